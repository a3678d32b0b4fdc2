"""From graphs of aten and the dialect to what Inductor compiles, in the order it happens.

kernels.py        Triton kernels take over what they do better than generated code:
  fuse_rows.py      what is quantized by row                    -> row_kernel.py
  fuse_norms.py     the backward of norms                       -> row_kernel.py
  fuse_tiles.py     what is needed in both layouts              -> tile_kernel.py
  fuse_scales.py    what is left of amaxes, and scales          -> row_kernel.py
  fuse_launches.py  kernels that can run together               -> batch.py
  reader.py         reads FX operators into a program.py, which simplify.py makes shorter
  triton_ops.py     says operators in Triton, row_source.py rows of them; prelude.py is shared
  kernel_op.py      makes operators of kernels, which Inductor launches: launch.py
lowering.py       the rest of the dialect becomes aten
buffers.py        values that get memory, and a layout, of their own
"""
