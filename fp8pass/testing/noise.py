"""How far rounding to FP8 and to low-bit saves moves a model's gradients, in eager PyTorch.

An independent model of the formats: nothing of fp8pass is used. Each GEMM of a parameter gets
rounded operands and a rounded gradient, and everything that autograd saves is rounded. The grid
that numbers are rounded to is shifted by a random factor, so that every seed gives other errors of
the same size.
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
    """The numbers of a format: bits of the mantissa, smallest exponent, largest number."""

    mantissa: int
    smallest: int
    largest: float

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest number of the format."""
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
    """What a recipe rounds to; None is not at all."""

    forward: str | None = None
    gradient: str | None = None
    saved: str | None = None
    rows: bool = True
    longest_fast: int = 0  # contraction with fast accumulation

    def truncated_share(self, length: int) -> float:
        """The largest share of a sum that fast accumulation loses: that of products of one sign.

        Each product loses half a unit of the running sum's 14 bits, on average, while that sum
        grows: a quarter to a third of 2^-14 of the final sum.
        """
        return length * 2.0**-14 / 3 if length <= self.longest_fast else 0.0

    @property
    def saved_error(self) -> float:
        """Relative error of a saved value, root mean square, for errors uniform in a step."""
        return 0.0 if self.saved is None else 0.42 * 2.0 ** -(GRIDS[self.saved].mantissa + 1)

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype = torch.float32) -> Formats:
        """Those of a `Config`, for a model in `dtype`.

        What rounds to nothing coarser rounds to BF16 in a model of that dtype: which one of two
        equal maxima is the first, and whether a ReLU is open, depends on what is fused.
        """
        if not config.quantizes_linears:
            own = "bfloat16" if dtype is torch.bfloat16 else None
            return cls(own, own, own)
        saved = config.save_format if config.save_format in GRIDS else None
        by_row = config.forward_scales == "row"
        longest = config.longest_fast if config.fast_accumulation else 0
        return cls(config.forward_format, config.gradient_format, saved, by_row, longest)


class Noise(TorchFunctionMode):
    """Rounds what GEMMs of parameters read, and what autograd saves, while it is entered."""

    def __init__(self, formats: Formats, seed: int) -> None:
        super().__init__()
        self.formats = formats
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in GEMMS and any(_is_weight(x) for x in _tensors(args)):
            return self._gemm(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:  # calls F.linear, of which a mode learns nothing
            with patch.object(F, "linear", partial(self._gemm, F.linear)):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func not in EMBEDDINGS:
            _mark_computed_weights(_tensors(result), _tensors((args, kwargs)))
        return result

    def _gemm(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        length = max((x.shape[-1] for x in _tensors(args) if _is_weight(x)), default=0)
        args = compat.tree_map_only(Tensor, self._operand, args)
        return _RoundedGradient.apply(self.truncated(func(*args, **kwargs), length), self)

    def _operand(self, x: Tensor) -> Tensor:
        if self.formats.forward is None or not x.is_floating_point() or x.ndim < 2:
            return x
        return _RoundedValue.apply(x, self)

    def rounded(self, x: Tensor, format: str | None, *, by_row: bool) -> Tensor:
        """`x` to the numbers of `format`, times a scale by row or one for all."""
        if format is None or not x.numel():
            return x
        wide = x.detach().double()
        amax = wide.abs().amax(-1, keepdim=True) if by_row else wide.abs().amax()
        grid = GRIDS[format]
        shift = torch.rand((), generator=self.generator).exp2().to(x.device)
        scale = torch.where(amax > 0, amax, 1.0) / grid.largest * shift
        return (grid.nearest(wide / scale) * scale).to(x.dtype)

    def truncated(self, sums: Tensor, *lengths: int) -> Tensor:
        """Sums of products as fast accumulation leaves them, off by a random part of that share."""
        share = max(map(self.formats.truncated_share, lengths))
        if not share:
            return sums
        return sums * (1 - share * torch.rand((), generator=self.generator).to(sums.device))

    def saved(self, x: Tensor) -> Tensor:
        """What the backward gets of a saved tensor. Parameters and row statistics stay exact."""
        if not x.is_floating_point() or _is_weight(x) or (x.is_leaf and x.requires_grad):
            return x
        if x.ndim == 0 or x.shape[-1] < 16:
            return x
        return self.rounded(x, self.formats.saved, by_row=True)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The rounding of operands, and that of saved tensors.

        Nothing is checkpointed: PyTorch would compute it again without the rounding.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(self.saved, lambda x: x)
        saving = hooks if self.formats.saved else contextlib.nullcontext()
        with self, saving, patch.object(torch.utils.checkpoint, "checkpoint", _called):
            yield


class _RoundedValue(torch.autograd.Function):
    """Rounds an operand; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        return noise.rounded(x, noise.formats.forward, by_row=noise.formats.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _RoundedGradient(torch.autograd.Function):
    """Rounds the gradient of a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        ctx.noise = noise
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        noise, columns = ctx.noise, gradient.shape[-1] if gradient.ndim else 1
        rounded = noise.rounded(gradient, noise.formats.gradient, by_row=False)
        # dgrad contracts over columns, wgrad over rows.
        return noise.truncated(rounded, columns, gradient.numel() // max(columns, 1)), None


_COMPUTED = "computed_from_parameters"  # an attribute of tensors
GEMMS = frozenset(
    (
        F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
        Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.__matmul__, Tensor.__rmatmul__,
        F.conv1d, torch.conv1d, torch.bilinear, F.grouped_mm, compat.grouped_mm,
    )
)  # fmt: skip

# Which of a parameter's rows they give is data.
EMBEDDINGS = (F.embedding, F.embedding_bag)


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args)


def _tensors(args: Any) -> list[Tensor]:
    return [x for x in compat.tree_leaves(args) if isinstance(x, Tensor)]


def _is_weight(x: Tensor) -> bool:
    """A parameter of at least two dimensions, a view of one, or computed from parameters alone."""
    base = x if x._base is None else x._base
    return base.ndim > 1 and (isinstance(base, nn.Parameter) or hasattr(x, _COMPUTED))


def _mark_computed_weights(results: list[Tensor], operands: list[Tensor]) -> None:
    """Remember what is computed from parameters, and indices, alone."""
    floats = [x for x in operands if x.is_floating_point()]
    parameters = [isinstance(x, nn.Parameter) or hasattr(x, _COMPUTED) for x in floats]
    if floats and all(parameters):
        for x in results:
            setattr(x, _COMPUTED, True)
