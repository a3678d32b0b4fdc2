"""Error rules: how much an error of a stored value is amplified in the gradients (AGoQ 4.1, 8.1).

regions.py        a joint graph cut into regions of pointwise operators and reductions
expressions.py    the maths of a region in symbols, one definition for each operator
samples.py        values of a region on random samples, or on real data
factors.py        the gradient factors of a region, element by element
amplification.py  bounds and expectations of their relative errors
jumps.py          comparisons whose outcome matters at the threshold
ranges.py         values that a mask may make huge in places
scans.py          gradients that are summed over positions, where small elements may count most
signs.py          which values are nowhere positive, as the logarithms of decays
growth.py         exponentials that nothing bounds, for which there is no rule
differences.py    which sums may nearly cancel, so that low bits of their terms do not do
small_parameters.py  sums that make up the gradient of a few numbers
divisors.py       values that something divides by
work.py           what a derivation takes, and when it is not tried
derivation.py     the rule of one region, from these
attention.py      the rule of attention
error_rules.py    the rules of a joint graph: which values may be stored in which format
formulas.py       the bounds of small regions as formulas, to be read
summary.py        the rules as text, for `fp8pass.explain`
"""
