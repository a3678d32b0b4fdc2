"""Simulate in eager PyTorch how rounding to FP8 and to low-bit formats changes gradients.

Independently of the package, this module rounds the operands of each GEMM with a parameter, the
gradient of its result, and all saved tensors. A random factor, drawn for each rounding from a
seeded generator, scales the grid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fp8pass import compat


@dataclass(frozen=True)
class Grid:
    """The numbers that a format can represent."""

    mantissa: int  # number of mantissa bits
    smallest: int  # smallest exponent
    largest: float  # largest number

    def round(self, x: Tensor) -> Tensor:
        """Round to the nearest number of the format."""
        _, exponent = torch.frexp(x)
        step = torch.exp2((exponent - 1).clamp(min=self.smallest).to(x.dtype) - self.mantissa)
        return (x / step).round().mul(step).clamp(-self.largest, self.largest)


GRIDS = {
    "e4m3": Grid(3, -6, 448.0),
    "e5m2": Grid(2, -14, 57344.0),
    "e2m3": Grid(3, 0, 7.5),
    "e2m2": Grid(2, 0, 7.0),
    "e2m1": Grid(1, 0, 6.0),
    "bfloat16": Grid(7, -126, 3.3895313892515355e38),
}


@dataclass(frozen=True)
class Formats:
    """The formats to which a recipe rounds; None means no rounding."""

    # Formats of forward GEMM operands, gradients, and saved tensors.
    forward: str | None = None
    gradient: str | None = None
    saved: str | None = None
    # Whether forward operands have one scale for each row.
    rows: bool = True
    longest_fast: int = 0  # longest contraction with fast accumulation

    def truncated_share(self, length: int) -> float:
        """Return the largest share of a sum of `length` products that fast accumulation loses.

        If all products have the same sign, each loses on average half of the last of 14 bits, which
        is a quarter to a third of 2^-14 of the final sum.
        """
        return length * 2.0**-14 / 3 if length <= self.longest_fast else 0.0

    @property
    def saved_error(self) -> float:
        """The relative root mean square error of saved tensors, if errors are uniform."""
        return 0.0 if self.saved is None else 0.42 * 2.0 ** -(GRIDS[self.saved].mantissa + 1)

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype = torch.float32) -> Formats:
        """Return the formats of a `Config`, for a model in `dtype`.

        A BF16 model without FP8 rounds to BF16: fusion changes where values are rounded, which
        changes the results of maxima and ReLUs.
        """
        if not config.quantizes_linears:
            own = "bfloat16" if dtype is torch.bfloat16 else None
            return cls(own, own, own)
        saved = config.save_format if config.save_format in GRIDS else None
        by_row = config.scales != "tensorwise"
        longest = config.longest_fast if config.fast_accumulation else 0
        return cls(config.forward_format, config.gradient_format, saved, by_row, longest)


class Noise(TorchFunctionMode):
    """Rounds the operands of GEMMs with a parameter, and the gradients of the GEMMs' results.

    The context `enter` also rounds saved tensors.
    """

    def __init__(self, formats: Formats, seed: int) -> None:
        super().__init__()
        self.formats = formats
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in GEMM_FUNCTIONS and any(_is_weight(x) for x in compat.tensor_leaves(args)):
            return self._run_gemm(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:  # hides its calls of F.linear from modes
            with patch.object(F, "linear", partial(self._run_gemm, F.linear)):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func not in EMBEDDINGS:
            _mark_computed_weights(
                compat.tensor_leaves(result), compat.tensor_leaves((args, kwargs))
            )
        return result

    def _run_gemm(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        length = max((x.shape[-1] for x in compat.tensor_leaves(args) if _is_weight(x)), default=0)
        args = compat.tree_map_only(Tensor, self._round_operand, args)
        return _RoundGradient.apply(self.truncate(func(*args, **kwargs), length), self)

    def _round_operand(self, x: Tensor) -> Tensor:
        if self.formats.forward is None or not x.is_floating_point() or x.ndim < 2:
            return x
        return _RoundValue.apply(x, self)

    def round(self, x: Tensor, format: str | None, *, by_row: bool) -> Tensor:
        """Round to `format`, with a scale for each row if `by_row`."""
        if format is None or not x.numel():
            return x
        wide = x.detach().double()
        amax = wide.abs().amax(-1, keepdim=True) if by_row else wide.abs().amax()
        grid = GRIDS[format]
        shift = torch.rand((), generator=self.generator).exp2().to(x.device)
        scale = torch.where(amax > 0, amax, 1.0) / grid.largest * shift
        return (grid.round(wide / scale) * scale).to(x.dtype)

    def truncate(self, sums: Tensor, *lengths: int) -> Tensor:
        """Reduce sums by a random share, at most the share that fast accumulation loses."""
        share = max(map(self.formats.truncated_share, lengths))
        if not share:
            return sums
        return sums * (1 - share * torch.rand((), generator=self.generator).to(sums.device))

    def round_saved(self, x: Tensor) -> Tensor:
        """Round a saved tensor, except parameters and row statistics."""
        if not x.is_floating_point() or _is_weight(x) or (x.is_leaf and x.requires_grad):
            return x
        if x.ndim == 0 or x.shape[-1] < 16:
            return x
        rounded = self.round(x, self.formats.saved, by_row=True)
        if 0 in x.stride():
            return rounded
        # Memory-efficient attention pads the rows of its bias, and its backward needs the strides.
        return x.new_empty_strided(x.shape, x.stride()).copy_(rounded)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Round operands and saved tensors.

        Checkpointing is off, because it would recompute unrounded values.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(self.round_saved, lambda x: x)
        saving = hooks if self.formats.saved else contextlib.nullcontext()
        with self, saving, patch.object(torch.utils.checkpoint, "checkpoint", _call):
            yield


class _RoundValue(torch.autograd.Function):
    """Rounds a value in the forward, and does not change its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        return noise.round(x, noise.formats.forward, by_row=noise.formats.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _RoundGradient(torch.autograd.Function):
    """Rounds a gradient, and does not change the value in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        ctx.noise = noise
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        noise, columns = ctx.noise, gradient.shape[-1] if gradient.ndim else 1
        rounded = noise.round(gradient, noise.formats.gradient, by_row=False)
        return noise.truncate(rounded, columns, gradient.numel() // max(columns, 1)), None


_COMPUTED = "computed_from_parameters"  # an attribute of tensors
GEMM_FUNCTIONS = frozenset(
    (
        F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
        Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.__matmul__, Tensor.__rmatmul__,
        F.conv1d, torch.conv1d, torch.bilinear, F.grouped_mm, compat.grouped_mm,
    )
)  # fmt: skip

# Their results are rows of a parameter, but are treated as activations.
EMBEDDINGS = (F.embedding, F.embedding_bag)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args)


def _is_weight(x: Tensor) -> bool:
    """Whether `x`, of 2 or more dimensions, is computed only from parameters."""
    base = x if x._base is None else x._base
    return base.ndim > 1 and (isinstance(base, nn.Parameter) or hasattr(x, _COMPUTED))


def _mark_computed_weights(results: list[Tensor], operands: list[Tensor]) -> None:
    floats = [x for x in operands if x.is_floating_point()]
    parameters = [isinstance(x, nn.Parameter) or hasattr(x, _COMPUTED) for x in floats]
    if floats and all(parameters):
        for x in results:
            setattr(x, _COMPUTED, True)
