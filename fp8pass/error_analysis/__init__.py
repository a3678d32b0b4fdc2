"""Error rules: how much gradients amplify an error of a stored value (AGoQ 4.1, 8.1).

| question | file |
| --- | --- |
| Which values may be stored in which format? | error_rules.py |
| What is the rule of one region of operators? | derivation.py |
| How is a joint graph cut into regions? | regions.py |
| What are the formulas of a region's values? | expressions.py |
| What values do they have? | samples.py |
| What are the factors that gradients are multiplied by? | factors.py |
| How large are bound and expectation of the amplification? | amplification.py |
| Which comparisons make results jump? | jumps.py |
| Which values have outliers, grow exponentially, or are divisors? | ranges.py |
| Which sums may cancel, so that errors of terms are amplified? | differences.py |
| Which values have no positive, or no negative, elements? | signs.py |
| Which values are summed in scans and gradients of small parameters? | summed_values.py |
| How much does attention amplify errors? | attention.py |
| How are the rules written for `fp8pass.explain`? | formulas.py |
"""
