"""Triton kernels that compute programs.

supported.py          which matrices and programs the kernels support
kernel_operator.py    a PyTorch operator for each kernel, which Inductor can launch
row_kernel.py         the kernel that processes whole rows, and can reduce along rows
row_source.py         the Triton source of the row kernel
tile_kernel.py        the kernel that processes tiles, and can store tiles transposed
tile_source.py        the Triton source of the tile kernel
expert_transpose.py   the kernel that quantizes and transposes the tokens of experts
block_gemm.py         GEMMs with a scale for each block of 128 columns
planes.py             Triton source that packs and unpacks elements of less than 8 bits
triton_ops.py         pieces of source that the row and tile kernels share
device_functions.py   Triton functions that all kernels call
launch.py             runs several programs in one launch of a kernel
"""
