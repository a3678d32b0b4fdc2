"""Weights of linear layers in codes, as the parameters of a model (`dialect/coded_weight.py`).

    choice.py  which layers' weights can be
    frozen.py  `freeze`: frozen weights, of which nothing else is left

Weights that are trained are in `optim/weights.py` and `distributed/weights.py`.
"""
