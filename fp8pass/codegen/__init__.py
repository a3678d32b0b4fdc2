"""Lower graphs of aten and dialect operators to graphs that Inductor compiles.

The passes in `fp8pass/passes/lowering` call these modules:

program/             descriptions of what a kernel computes
kernels/             Triton kernels that compute programs
lowering.py          replaces the remaining operators of the dialect by aten operators
tuned_lowerings.py   functions that are faster than the reference implementations
block_scaled_mm.py   GEMMs whose scales vary along the contraction
buffers.py           operators that store a value in a separate buffer, or fix the order of kernels
add_product.py       GEMMs that add to a matrix in place
"""
