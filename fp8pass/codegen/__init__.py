"""From graphs of aten and the dialect to graphs that Inductor compiles.

In the order in which a graph meets them; the passes that call them are in `fp8pass/passes`.

program/       what a kernel computes, as data
kernels/       Triton kernels that compute programs
lowering.py    the rest of the dialect in aten, for Inductor to generate code from
coding.py      encoding and decoding in aten, part of this
masking.py     numbers masked to a format, likewise
grouped.py     GEMMs of experts, likewise
segments.py    tokens of experts, coded and transposed: the operator of a kernel
emitter.py     adds aten operators to a graph
buffers.py     values that get memory of their own, in a layout of their own, or after others
add_product.py GEMMs that add to a matrix in place
"""
