"""Which values may be kept in low bits: a table of operator kinds.

A value may be stored inexactly if everything that the backward computes from it answers a small
relative error with a small relative error. Normalizations, activations and sums do (AGoQ 4.1);
attention and softmax do not, since they exponentiate, and what the user asked to keep in high
precision does not have to. Two questions are asked of the table:

- `tolerates(node)`: may this operator be computed from inexact operands?
- `storage(node, config)`: in which format may this value be stored?
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.formats import E4M3, E4M3_BYTES, EXACT, FORMATS, Format, divisor_group
from fp8pass.graph import aten, is_call, value
from fp8pass.passes.classify import Kind, kind
from fp8pass.passes.linear import TOLERANT

fp8 = torch.ops.fp8pass

STORABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Smooth enough, and the relative error of the result is that of the operands times a small factor.
# Variances are not: where the mean is large all of a row rounds to one code, and they vanish.
WELL_CONDITIONED = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.neg.default,
    aten.abs.default,
    aten.sign.default,
    aten.square.default,
    aten.sqrt.default,
    aten.sigmoid.default,
    aten.sigmoid_backward.default,
    aten.tanh.default,
    aten.tanh_backward.default,
    aten.erf.default,
    aten.relu.default,
    aten.leaky_relu.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.where.self,
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.clone.default,
    aten.copy.default,
    aten.addcmul.default,
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.mean.dim,
    aten.mean.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
}

SIGN_TESTS = {
    aten.le.Scalar,
    aten.lt.Scalar,
    aten.ge.Scalar,
    aten.gt.Scalar,
}

# Dialect operators that read a whole tensor or group for one number.
STATISTICS = {fp8.amax.default, fp8.group_scale.default}

DIVISIONS = {aten.div.Tensor, aten.div.Scalar, aten.reciprocal.default}


def tolerates(node: fx.Node) -> bool:
    """Whether the operator of `node` may be applied to inexact operands."""
    kind_ = kind(node)
    if kind_ in (Kind.VIEW, Kind.MOVEMENT, Kind.QUANTIZE, Kind.CREATION, Kind.SYMBOL):
        return True
    if kind_ is Kind.GEMM:
        return node.target is fp8.scaled_mm.default or bool(node.meta.get(TOLERANT))
    if node.target in SIGN_TESTS:  # rounding to nearest keeps signs
        return bool(node.args[1] == 0)
    if is_call(node, aten.threshold_backward.default):
        return bool(node.args[2] == 0)
    if node.target in graph.CASTS:  # rounding to whole numbers jumps
        val = value(node)
        return val is not None and val.is_floating_point()
    if is_call(node, aten.pow.Tensor_Scalar):
        return bool(node.args[1] >= 0)  # type: ignore[operator]
    if is_call(node, aten.rsqrt.default):
        return _is_statistic(node.args[0])  # type: ignore[arg-type]
    if node.target in DIVISIONS:
        return _denominator_stays_away_from_zero(node)
    if is_call(node, aten.exp.default):
        return _is_logistic(node) or _is_gaussian(node)
    return node.target in WELL_CONDITIONED


def storage(node: fx.Node, config: Config) -> tuple[Format, int, str]:
    """How `node` may be stored: format, group size, and the reason.

    The format is `EXACT` where no low-bit one is allowed; the group size is then 0.
    """
    val = value(node)
    if config.save_format == "none":
        return EXACT, 0, "save_format='none'"
    if kind(node) is Kind.QUANTIZE:
        return EXACT, 0, "already quantized, for a linear layer"
    if val is None or val.dtype not in STORABLE_DTYPES:
        return EXACT, 0, "integers and masks are kept as they are"
    if kind(node) not in _STORABLE or (node.op == "call_function" and not _may_be_inexact(node)):
        return EXACT, 0, f"{operator_name(node)} is sensitive to its input"
    group = _group(val, config.group_size)
    if group is None:
        return EXACT, 0, "no group of 16 or more divides its last dimension"
    format = FORMATS[config.save_format]
    if format is E4M3 and not hardware.has_fp8_casts(val.device):
        format = E4M3_BYTES
    return format, group, "only linear and well-conditioned operators use it"


_STORABLE = (
    Kind.INPUT,
    Kind.VIEW,
    Kind.POINTWISE,
    Kind.MOVEMENT,
    Kind.REDUCTION,
    Kind.GEMM,
    Kind.ATTENTION,
    Kind.CONVOLUTION,
)


def _may_be_inexact(node: fx.Node) -> bool:
    """Whether what `node` computes may be stored inexactly, were its operands exact."""
    if kind(node) in (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION):
        return True
    return tolerates(node)


def _group(val: torch.Tensor, group_size: int) -> int | None:
    if val.ndim < 2 or compat.has_unbacked(val) or graph.numel(val) == 0:
        return None
    length = val.shape[-1]
    return divisor_group(length, group_size) if isinstance(length, int) else None


def operator_name(node: fx.Node) -> str:
    """The operator of a node, as people write it."""
    if node.op != "call_function":
        return node.op
    if graph.is_getitem(node):
        return operator_name(node.args[0])  # type: ignore[arg-type]
    return str(node.target).removesuffix(".default")


def _denominator_stays_away_from_zero(node: fx.Node) -> bool:
    """A number, a statistic of many elements, or 1 + something positive."""
    denominator = node.args[0] if node.target is aten.reciprocal.default else node.args[1]
    if not isinstance(denominator, fx.Node):
        return True
    if is_call(denominator, aten.add.Tensor) and denominator.args[1] == 1:
        inner = denominator.args[0]
        return isinstance(inner, fx.Node) and is_call(inner, aten.exp.default)
    return _is_statistic(denominator)


def _is_statistic(node: fx.Node) -> bool:
    """Whether a value describes whole rows: one number for each, or one in all."""
    val = value(node)
    if val is None:
        return False
    return val.ndim == 0 or (isinstance(val.shape[-1], int) and val.shape[-1] == 1)


def _is_logistic(exp: fx.Node) -> bool:
    """exp(-x) of 1 / (1 + exp(-x)): bounded, and so is what it multiplies."""
    return all(is_call(u, aten.add.Tensor) and bool(u.args[1] == 1) for u in exp.users)


def _is_gaussian(exp: fx.Node) -> bool:
    """exp(-c x²), the derivative of erf: the error x² e^{-x²} stays small for all x."""
    scaled = exp.args[0]
    if not (isinstance(scaled, fx.Node) and is_call(scaled, aten.mul.Tensor)):
        return False
    square, factor = scaled.args
    if not (isinstance(square, fx.Node) and isinstance(factor, (int, float)) and factor < 0):
        return False
    if is_call(square, aten.mul.Tensor):
        return square.args[0] is square.args[1]
    return is_call(square, aten.pow.Tensor_Scalar) and bool(square.args[1] == 2)
