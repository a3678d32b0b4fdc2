"""Triton kernels that compute programs.

supported.py          which matrices and programs the kernels support
kernel_operator.py    an operator for each kernel, which Inductor launches
row_kernel.py         the kernel that holds whole rows, and can reduce rows
row_source.py         the Triton source of the row kernel
tile_kernel.py        the kernel that holds tiles, and can store tiles transposed
tile_source.py        the Triton source of the tile kernel
expert_transpose.py   the kernel that quantizes and transposes the tokens of experts
planes.py             packed elements in Triton source
triton_ops.py         pieces of source that the row and tile kernels share
device_functions.py   Triton functions that all kernels call
launch.py             several programs in one launch
"""
