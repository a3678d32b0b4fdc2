"""Error rules: how much a saved value's rounding changes the gradients, derived from the graph.

regions.py         cuts a joint graph into regions of pointwise operators and reductions
expressions.py     writes a region in sympy
perturbation.py    perturbs its gradients to first order, and bounds the result
amplification.py   makes numbers of the bounds, on samples
derivation.py      the rule of one region
attention.py       the rule of attention
error_rules.py     the rules of a graph
prediction.py      the errors that the rules expect on real data
summary.py         the rules for people
"""
