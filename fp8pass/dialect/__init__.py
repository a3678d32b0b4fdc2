"""The vocabulary of rewritten graphs: formats, quantizations, scales, operators.

formats.py           how an element is coded
quantization.py      which elements share a scale, and how scales are stored
scaling.py           scales from largest magnitudes
coding.py            codes from values, and back
masking.py           numbers masked to a format, as in simulations
segments.py          the rows of a matrix that one expert takes
accumulation.py      how tensor cores add up the products of FP8 numbers
ops.py               the `fp8pass::` operators
triton_functions.py  Triton functions that kernels share: scales, and the larger of two numbers
"""
