"""The hand-written kernels in the order in which they take what they can of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass import debug, graph
from fp8pass.codegen.fuse_norms import fuse_norms
from fp8pass.codegen.fuse_rows import fuse_rows, why_no_rows
from fp8pass.codegen.fuse_tiles import fuse_tiles, why_no_tiles
from fp8pass.plan import KernelUse

fp8 = torch.ops.fp8pass


@dataclass(frozen=True)
class Kernel:
    """A kernel: how it takes over matrices of a graph, and why it leaves one."""

    fuse: Callable[[fx.GraphModule], None]
    why_not: Callable[[fx.Node], str | None]


KERNELS = {
    "rows": Kernel(fuse_rows, why_no_rows),
    "norms": Kernel(fuse_norms, why_no_rows),
    "tiles": Kernel(fuse_tiles, why_no_tiles),
}


def use_kernels(gm: fx.GraphModule) -> None:
    """Put kernels in place of what they do better than generated code."""
    disabled = debug.disabled_kernels(KERNELS)
    for name, kernel in KERNELS.items():
        if name not in disabled:
            kernel.fuse(gm)


def kernel_use(gm: fx.GraphModule) -> KernelUse:
    """What `use_kernels` makes of a graph; the graph is changed."""
    use_kernels(gm)
    use = KernelUse()
    disabled = debug.disabled_kernels(KERNELS)
    for node in gm.graph.nodes:
        name = getattr(node.target, "name", str)() if node.op == "call_function" else ""
        kernel = name.removeprefix("fp8pass_codegen::").split(".")[0]
        if kernel in KERNELS:
            use.launches[kernel] = use.launches.get(kernel, 0) + 1
        elif graph.is_call(node, fp8.quantize.default):
            reason = _why_generated(node, disabled)
            use.generated[reason] = use.generated.get(reason, 0) + 1
    return use


def _why_generated(codes: fx.Node, disabled: list[str]) -> str:
    by_row = graph.tensor(codes.args[1]).ndim == 2  # type: ignore[arg-type]
    name = "rows" if by_row else "tiles"
    if name in disabled:
        return f"{name} disabled"
    return KERNELS[name].why_not(codes) or "its operands do not lie in one matrix"
