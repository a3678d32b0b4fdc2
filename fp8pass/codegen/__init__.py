"""Lower graphs of aten and dialect operators to graphs that Inductor compiles.

The passes in `fp8pass/passes/lowering` call these modules, in this order:

program/             what a kernel computes, as data
kernels/             Triton kernels that compute programs
lowering.py          replaces the other operators of the dialect by traces of their references
tuned_lowerings.py   functions that are traced instead of references, for faster generated code
buffers.py           operators that store a value in a buffer of its own, or delay its computation
add_product.py       GEMMs that add to a matrix in place
"""
