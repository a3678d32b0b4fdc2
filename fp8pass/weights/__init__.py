"""Codes of the weights of linear layers that outlive a graph. As parameters (`CodedWeight`):

    choice.py  which layers' weights can be
    frozen.py  `freeze`: frozen weights, of which nothing else is left

And codes of weights that are trained, beside these:

    inputs.py  as inputs of a graph
    kept.py    `same_weights`: made once for several runs

Gradients of weights:

    gradients.py  sums of them beside CUDA graphs

Weights that are elsewhere in every step, as FSDP2's:

    moving.py  where CUDA graphs read them

Trained weights of which the device has codes alone are in `optim/weights.py` and
`distributed/weights.py`.
"""
