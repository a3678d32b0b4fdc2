"""The vocabulary of the graphs that fp8pass rewrites: operators, and how tensors are quantized.

formats.py         number formats, such as E4M3: the bits of one element
quantization.py    which elements share a scale, and how scales are stored
scaling.py         computes a scale from the largest magnitude of the elements that share it
encoding.py        converts fp32 numbers to a format and back, packs several elements into a byte
masking.py         simulates a format by clearing mantissa bits and clamping
expert_groups.py   which rows of a matrix belong to which expert
accumulation.py    emulates how tensor cores accumulate products of FP8 numbers
ops.py             the `fp8pass::` operators
triton_scaling.py  Triton functions that compute scales, for handwritten kernels
"""
