"""Lower graphs as on an H200, on a machine without GPUs: their values are moved to a fake GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fp8pass import compat, hardware
from fp8pass.compilation import Compilation


class LoweredError(Exception):
    """Raised instead of running a graph, which a machine without GPUs cannot do."""


def refuse_to_run(arguments: list[Any]) -> Any:
    raise LoweredError


def _compile_nothing(*args: Any, **options: Any) -> Any:
    return compat.box(refuse_to_run)


@contextmanager
def lowered_for_gpus(
    compile_half: Callable[..., Any] = _compile_nothing,
) -> Iterator[list[fx.GraphModule]]:
    """Yield the list of lowered forward and backward graphs. Running a graph is an error.

    `compile_half` takes the place of Inductor.
    """
    halves: list[fx.GraphModule] = []
    rewrite = Compilation.rewrite_half

    def rewrite_on_gpu(compilation: Compilation, gm: fx.GraphModule, half: str) -> None:
        for node in gm.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = _on_gpu(node.meta["val"])
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
        rewrite(compilation, gm, half)
        gm.graph.lint()
        halves.append(gm)

    with (
        mock.patch.object(Compilation, "rewrite_half", rewrite_on_gpu),
        mock.patch.object(compat, "compile_fx_inner", compile_half),
        mock.patch.object(hardware, "capability_of", return_value=(9, 0)),
        mock.patch.object(hardware, "name_of", return_value=hardware.RATES_OF),
        compat.uncached(),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        yield halves


def _on_gpu(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        with value.fake_mode:
            strided: Tensor = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="cuda"
            )
        return strided
    if isinstance(value, (tuple, list)):
        return type(value)(map(_on_gpu, value))
    return value
