"""The vocabulary of rewritten graphs: formats, granularities, scales, codes, operators.

formats.py           how an element is coded
granularity.py       which elements share a scale
scaling.py           scales from largest magnitudes
coding.py            codes from values, and back
masking.py           numbers masked to a format, as in simulations
segments.py          the rows of a matrix that one expert takes
accumulation.py      how tensor cores add up the products of FP8 numbers
ops.py               the `fp8pass::` operators
coded_weight.py      weights that enter a graph as codes
coding_kernel.py     the kernel that makes those
launching.py         how it is launched again
triton_functions.py  what this and other kernels call: scales, and the larger of two numbers
hardware.py          which of this a device can do
gpus.py              rates of GPUs, and the time that some work takes one
"""
