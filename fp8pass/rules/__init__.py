"""Error rules: how much an error of a stored value is amplified in the gradients (AGoQ 4.1, 8.1).

regions.py        a joint graph cut into regions of pointwise operators and reductions
expressions.py    the maths of a region as formulas
perturbation.py   its gradients perturbed to first order, as formulas
amplification.py  formulas as numbers, on random samples or real data
derivation.py     the rule of one region
attention.py      the rule of attention
error_rules.py    the rules of a joint graph: which values may be stored in which format
summary.py        the rules as text, for `fp8pass.explain`
"""
