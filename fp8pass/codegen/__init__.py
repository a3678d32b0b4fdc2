"""Lower graphs of aten and dialect operators to graphs that Inductor compiles.

The passes in `fp8pass/passes/lowering` call these modules:

program/             what a kernel computes, as data
kernels/             Triton kernels that compute programs
lowering.py          replaces the remaining operators of the dialect by traced functions
tuned_lowerings.py   faster functions, which `lowering.py` traces instead of the references
buffers.py           operators that store a value in a separate buffer, or fix the order of kernels
add_product.py       GEMMs that add to a matrix in place
"""
