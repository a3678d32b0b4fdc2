"""From graphs of aten and dialect operators to graphs that Inductor compiles.

The passes in `fp8pass/passes/lowering` call these modules, in this order:

program/             what a kernel computes, as data
kernels/             Triton kernels that compute programs
lowering.py          replaces the other operators of the dialect by traces of their references
tuned_lowerings.py   functions that are traced instead, where generated code needs another form
buffers.py           values in their own memory, in a given layout or order
add_product.py       GEMMs that add to a matrix in place
"""
