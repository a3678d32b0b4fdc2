"""A training step from fixed random numbers, and the comparison of two, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat


@dataclass
class TrainingStep:
    """The results of one training step.

    Attributes:
        outputs: all tensors that the model returned.
        gradients: of parameters by their names, and of inputs as `input 0`; None if there is none.
        buffers: of the model afterwards.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def leaves(value: Any) -> list[Tensor]:
    """The tensors in nested containers and Hugging Face outputs."""
    return [x for x in compat.tree_leaves(value) if isinstance(x, Tensor)]


def step(
    run: Callable[..., Any], model: nn.Module | None, args: Sequence[Any], *, seed: int = 7
) -> TrainingStep:
    """Forward and backward from fixed random numbers; fresh gradients for parameters and inputs.

    Args:
        run: the model, as it is or compiled.
        model: whose parameters and buffers are looked at.
        args: what `run` is called with.
        seed: of dropout, and of the incoming gradients: every floating point output has its own.
    """
    parameters = dict(model.named_parameters()) if model is not None else {}
    inputs = {f"input {i}": x for i, x in enumerate(args) if isinstance(x, Tensor)}
    wanted = {name: x for name, x in (parameters | inputs).items() if x.requires_grad}
    for x in wanted.values():
        x.grad = None
    torch.manual_seed(seed)
    outputs = leaves(run(*args))
    differentiable = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    incoming = [
        torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in differentiable
    ]
    found = (
        torch.autograd.grad(differentiable, list(wanted.values()), incoming, allow_unused=True)
        if differentiable and wanted
        else [None] * len(wanted)
    )
    buffers = {n: b.clone() for n, b in model.named_buffers()} if model is not None else {}
    gradients = dict(zip(wanted, found, strict=True))
    return TrainingStep([y.detach() for y in outputs], gradients, buffers)


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals NaN."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(torch.nan_to_num(a, 12345.0), torch.nan_to_num(b, 12345.0))


def assert_same_step(got: TrainingStep, want: TrainingStep) -> None:
    """Outputs, gradients and buffers agree bit for bit."""
    assert len(got.outputs) == len(want.outputs)
    for i, (a, b) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        assert identical(a, b), f"output {i} differs by {_gap(a, b)}"
    assert got.gradients.keys() == want.gradients.keys()
    for name, expected in want.gradients.items():
        found = got.gradients[name]
        if found is None or expected is None:
            assert found is expected, f"gradient of {name}: {found} against {expected}"
        else:
            assert identical(found, expected), f"gradient of {name}: {_gap(found, expected)}"
    for name, b in want.buffers.items():
        assert identical(got.buffers[name], b), f"buffer {name}"


def _gap(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    return f"{(a.double() - b.double()).abs().max().item():.3e}"
