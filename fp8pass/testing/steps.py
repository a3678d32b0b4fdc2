"""Run a reproducible training step, compare steps bit by bit, and count saved tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat, graph
from fp8pass.plan import Plan


@dataclass
class TrainingStep:
    """The results of one training step.

    Attributes:
        outputs: all tensors that the model returned.
        gradients: gradients of parameters by name, and of inputs as `input 0`; None if missing.
        buffers: buffers of the model after the step.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def step(
    run: Callable[..., Any], model: nn.Module | None, args: Sequence[Any], *, seed: int = 7
) -> TrainingStep:
    """Run a forward and a backward with fixed random numbers. Do not accumulate gradients.

    Args:
        run: the model, compiled or not.
        model: the module that has the parameters and buffers.
        args: arguments of `run`.
        seed: seed of dropout, and of the random gradients of outputs that start the backward.
    """
    parameters = dict(model.named_parameters()) if model is not None else {}
    inputs = {f"input {i}": x for i, x in enumerate(args) if isinstance(x, Tensor)}
    wanted = {name: x for name, x in (parameters | inputs).items() if x.requires_grad}
    for x in wanted.values():
        x.grad = None
    torch.manual_seed(seed)
    outputs = compat.tensor_leaves(run(*args))
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
    """Compare dtypes, shapes and values. NaN equals NaN, -0 equals 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    present = ~a.isnan()
    return torch.equal(present, ~b.isnan()) and torch.equal(a[present], b[present])


def assert_same_step(got: TrainingStep, want: TrainingStep) -> None:
    """Assert that outputs, gradients and buffers are `identical`.

    Raises:
        AssertionError: names the first tensor that differs.
    """
    assert len(got.outputs) == len(want.outputs)
    for i, (a, b) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        assert identical(a, b), f"output {i} differs by {_describe_gap(a, b)}"
    assert got.gradients.keys() == want.gradients.keys()
    for name, expected in want.gradients.items():
        found = got.gradients[name]
        if found is None or expected is None:
            assert found is expected, f"gradient of {name}: {found} instead of {expected}"
        else:
            assert identical(found, expected), (
                f"gradient of {name} differs by {_describe_gap(found, expected)}"
            )
    for name, b in want.buffers.items():
        assert identical(got.buffers[name], b), f"buffer {name}"


def _describe_gap(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
    return f"{(a.double() - b.double()).abs().max().item():.3e}"


SavedCounts = Counter[tuple[str, str]]  # number of saved tensors by dtype and shape


def count_saved(
    program: Callable[..., Any], args: Sequence[Any], held: Iterable[Tensor]
) -> SavedCounts:
    """Count the tensors that autograd saves for the backward, except parameters and `held`."""
    addresses = {t.data_ptr() for t in held}
    inputs = {t.data_ptr() for t in compat.tensor_leaves(args)}
    found: SavedCounts = Counter()

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and x.data_ptr() not in addresses:
            found[graph.dtype_text(x.dtype), graph.shape_text(x)] += 1
            is_whole = x.untyped_storage().nbytes() <= max(x.numel() * x.element_size(), 1)
            assert is_whole or x.data_ptr() in inputs, (
                f"{x.dtype} {tuple(x.shape)} is a view that keeps a larger tensor alive"
            )
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = compat.tensor_leaves(program(*args))
    assert any(y.requires_grad for y in outputs), "no output requires a gradient"
    return found


def count_planned(plan: Plan) -> SavedCounts:
    """Count the tensors that a plan saves on the device or in host memory."""
    saved = (s for s in plan.saved if s.bytes or s.host_bytes)
    return Counter((t.dtype, t.shape) for s in saved for t in s.tensors)
