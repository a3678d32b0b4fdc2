"""The hand-written kernels in the order in which they take what they can of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from fp8pass import debug, graph
from fp8pass.codegen import row_kernel, tile_kernel
from fp8pass.codegen.batch import Batch
from fp8pass.codegen.fuse_launches import fuse_launches
from fp8pass.codegen.fuse_norms import fuse_norms
from fp8pass.codegen.fuse_rows import fuse_rows, why_no_rows
from fp8pass.codegen.fuse_scales import fuse_scales
from fp8pass.codegen.fuse_tiles import fuse_tiles, why_no_tiles
from fp8pass.codegen.kernel_op import Prepare, parts_of
from fp8pass.codegen.launch import grouped
from fp8pass.codegen.program import Program
from fp8pass.codegen.reader import sort_topologically
from fp8pass.graph import tensor
from fp8pass.plan import KernelUse

fp8 = torch.ops.fp8pass

# What each puts in place of nodes need not come after what it reads: `use_kernels` sorts.
KERNELS: dict[str, Callable[[fx.GraphModule], bool]] = {
    "rows": fuse_rows,
    "norms": fuse_norms,
    "tiles": fuse_tiles,
    "scales": fuse_scales,
    "launches": fuse_launches,
}
# What the operators of kernels launch.
PREPARE: dict[object, Prepare] = {
    row_kernel.rows: row_kernel.prepare,
    tile_kernel.tiles: tile_kernel.prepare,
}


def use_kernels(gm: fx.GraphModule) -> None:
    """Put kernels in place of what they do better than generated code."""
    disabled = debug.disabled_kernels(KERNELS)
    for name, fuse in KERNELS.items():
        if name not in disabled and fuse(gm):
            sort_topologically(gm.graph)
            gm.graph.eliminate_dead_code()
            gm.recompile()


def kernel_use(gm: fx.GraphModule) -> KernelUse:
    """What `use_kernels` makes of a graph; the graph is changed."""
    use_kernels(gm)
    programs: Counter[str] = Counter()
    launches = 0
    for node in gm.graph.nodes:
        if node.target in PREPARE:
            batch, sizes = Batch.parse(str(node.args[1])), [tensor(x).shape for x in node.args[0]]
            programs.update(kind_of(node, program) for program in batch.programs)
            launches += len(grouped(parts_of(PREPARE[node.target], batch, sizes)))
    left = [n for n in gm.graph.nodes if graph.is_call(n, fp8.quantize.default)]
    return KernelUse(dict(programs), launches, dict(Counter(map(_why_generated, left))))


def kind_of(node: fx.Node, program: Program) -> str:
    """The kernel of a program, in the words of `KERNELS`."""
    if program.finishes_amax:
        return "scales"
    return "rows" if node.target is row_kernel.rows else "tiles"


def _why_generated(codes: fx.Node) -> str:
    by_row = graph.tensor(codes.args[1]).ndim == 2  # type: ignore[arg-type]
    name, why_not = ("rows", why_no_rows) if by_row else ("tiles", why_no_tiles)
    if name in debug.disabled_kernels(KERNELS):
        return f"{name} disabled"
    return why_not(codes) or "its operands do not lie in one matrix"
