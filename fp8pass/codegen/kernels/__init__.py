"""Triton kernels that compute programs.

limits.py         which matrices and programs the kernels take
operator.py       an operator for each kernel, which Inductor launches
rows.py           the kernel that holds whole rows, for reductions over them
row_source.py     its Triton source
tiles.py          the kernel that holds tiles, for codes in both layouts
tile_source.py    its Triton source
segments.py       the kernel that codes and transposes the tokens of experts
nibbles.py        codes of 4 bits in Triton source
triton_ops.py     pieces of source that both kernels share
prelude.py        Triton functions that all kernels call
launch.py         several programs in one launch
"""
