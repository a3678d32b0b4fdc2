"""The vocabulary of rewritten graphs: formats, quantizations, scales, operators.

formats.py         number formats: the bits of an element
quantization.py    which elements share a scale, and how scales are stored
scaling.py         computes scales from largest magnitudes
encoding.py        conversion of fp32 numbers to a format and back, and packing
masking.py         numbers masked to a simulated format
expert_groups.py   which rows of a matrix belong to which expert
accumulation.py    how tensor cores accumulate the products of FP8 numbers
ops.py             the `fp8pass::` operators
triton_scaling.py  Triton functions that compute scales, for handwritten kernels
"""
