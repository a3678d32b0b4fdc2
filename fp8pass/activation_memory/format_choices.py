"""The formats that the error rules allow for each forward value, with their prices."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, cached_property

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.activation_memory.added_time import AddedTime
from fp8pass.activation_memory.costs import UNITS_PER_BYTE, recompute_price, save_price
from fp8pass.activation_memory.decision import Decision, stored_bytes
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.dialect.formats import (
    E2M5,
    E4M3,
    E4M3_BYTES,
    EXACT,
    FORMATS,
    SAVED_FORMATS,
    Format,
    divisor_group,
)
from fp8pass.error_analysis.derivation import Amplification
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.graph.chunks import in_chunks
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.names import matching_pattern, operator_name, warn_about_idle_patterns
from fp8pass.option_checks import bytes_text

# The price of a relative error of 1 in a gradient, in saved bytes per element of the rounded value.
# It does not depend on the dtype, because rounding an FP32 sum of a residual stream is as harmful
# as rounding the 16-bit branch that was added to it.
ERROR_BYTES = 0.5

SAVED_EXACTLY = Decision(EXACT, 0, "")
CHEAP_TO_RECOMPUTE = Decision(None, 0, SavedReason.CHEAP)

# A `keep_exact` pattern with this separator is the name of a value, `module:operator:number`.
VALUE_SEPARATOR = ":"

# Largest number of elements that share a scale in an inexact attention output. See
# `benchmarks/results/attention_storage.json`.
OUTPUT_GROUP = 32

STORABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STORABLE_KINDS = (
    Kind.INPUT, Kind.VIEW, Kind.POINTWISE, Kind.MOVEMENT, Kind.REDUCTION, Kind.GEMM, Kind.ATTENTION,
    Kind.CONVOLUTION,
)  # fmt: skip


class FormatChoices:
    """The formats in which each value of one joint graph may be saved."""

    def __init__(self, rules: Rules, time: AddedTime | None = None) -> None:
        self.config, self.facts = rules.config, rules.facts
        self.rules, self.time = rules, time
        self.options = cache(self._list_options)
        self.save_price = cache(self._save_price)
        self.recompute_price = cache(self._recompute_price)

    def _save_price(self, node: fx.Node) -> float:
        price = save_price(node)
        return price if math.isinf(price) else price + self._time_price(node, SAVED_EXACTLY)

    def _recompute_price(self, node: fx.Node) -> float:
        """Return the price of recomputing a value.

        Time has no price for values computed only from parameters and data. Otherwise ranks with
        different sizes could repeat different gathers.
        """
        price = recompute_price(node)
        if node in self.rules.constants:
            return price
        return price if math.isinf(price) else price + self._time_price(node, CHEAP_TO_RECOMPUTE)

    def _time_price(self, node: fx.Node, decision: Decision) -> float:
        return self.time.price(node, decision) if self.time else 0.0

    @cached_property
    def _keep_exact(self) -> dict[fx.Node, str]:
        patterns = self.config.exact_patterns
        if not patterns or self.smallest.lossless:
            return {}
        values = tuple(p for p in patterns if VALUE_SEPARATOR in p)
        modules = tuple(p for p in patterns if VALUE_SEPARATOR not in p)
        names = {
            n: name
            for n, name in graph.value_names(self.rules.graph).items()
            # `skip`, not `keep_exact`, is the option for quantized operands of linear layers.
            if n not in self.rules.backward and kind(n) is not Kind.QUANTIZE
        }
        paths = {n: graph.module_path(n) for n in names}
        warn_about_idle_patterns("keep_exact", values, "value", list(names.values()))
        warn_about_idle_patterns("keep_exact", modules, "module", sorted(set(paths.values())))
        found = {
            n: matching_pattern(name, values) or matching_pattern(paths[n], modules)
            for n, name in names.items()
        }
        return {n: pattern for n, pattern in found.items() if pattern is not None}

    @property
    def smallest(self) -> Format:
        """The configured format of saved values. Formats with more bits are allowed, too."""
        return EXACT if self.config.save_format == "none" else FORMATS[self.config.save_format]

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """The configured format and all formats with more bits, the smallest first."""
        if self.smallest.lossless:
            return (self.smallest,)
        return tuple(f for f in SAVED_FORMATS if f.bits >= self.smallest.bits)

    def why_exact(self, node: fx.Node) -> str:
        """Return why the backward needs `node` exactly; '' if not, or if save_format='none'."""
        if self.config.save_format == "none":
            return ""
        if node in self._keep_exact:
            return SavedReason.KEEP_EXACT.format(pattern=self._keep_exact[node])
        return self.rules.why_exact(node)

    def must_be_available(self, node: fx.Node) -> bool:
        """Whether the backward must have `node` exactly even if it does not read `node`.

        This is so if `keep_exact` names the value, or if `keep_exact` names the module of the value
        and checkpointing recomputes the value.
        """
        return node in self._keep_exact and (
            VALUE_SEPARATOR in self._keep_exact[node] or compat.must_recompute(node)
        )

    def may_be_recomputed(self, node: fx.Node) -> bool:
        """Whether the backward may compute `node` from values with rounding errors."""
        return node not in self._keep_exact and self.rules.may_be_recomputed(node, self.smallest)

    def cheapest(self, node: fx.Node) -> Decision:
        return min(self.options(node), key=lambda option: option.price)

    def why_not_low_bit(self, node: fx.Node, option: Decision) -> str:
        """Return why a value is saved exactly although `option` is its cheapest format."""
        if not (self.time and option.low_bit and option.format):
            return option.reason
        seconds = self.time.low_bit(node, option) - self.time.exact(node)
        if seconds <= 0:
            return option.reason
        return SavedReason.SLOWER.format(
            format=option.format.name,
            bytes=bytes_text(graph.nbytes(node) - stored_bytes(node, option)),
            microseconds=1e6 * seconds,
        )

    def _list_options(self, node: fx.Node) -> list[Decision]:
        """Return the low-bit formats allowed for `node`, smallest first, or else only `EXACT`."""
        reason = self._why_not_storable(node) or self.why_exact(node)
        if reason:
            return [Decision(EXACT, 0, reason)]
        amplification = self.rules.amplification(node)
        if node in self.rules.inexact_outputs:
            return [self._attention_output(node, amplification)]
        groups = {f: self._group_size(node, f) for f in self.formats}
        if not any(groups.values()):
            return [Decision(EXACT, 0, SavedReason.NO_GROUPS)]
        tolerance = self.config.error_tolerance
        allowed = [(f, g) for f, g in groups.items() if g and amplification.allows(f, tolerance)]
        if not allowed:
            bound = amplification.bound
            times = "without bound" if math.isinf(bound) else f"{bound:.1f}×"
            return [Decision(EXACT, 0, SavedReason.AMPLIFIED.format(bound=times))]
        return [self._option(node, f, group, amplification) for f, group in allowed]

    def _group_size(self, node: fx.Node, format: Format) -> int | None:
        val = graph.tensor(node)
        if val.ndim < 2 or compat.has_unbacked(val) or graph.numel(val) == 0:
            return None
        length = val.shape[-1]
        if not isinstance(length, int):
            return None
        return divisor_group(length, self.config.group_size, multiple=format.group_multiple)

    def _why_not_storable(self, node: fx.Node) -> str:
        val = graph.value(node)
        if self.config.save_format == "none":
            return SavedReason.NO_LOW_BITS
        if node.op == "placeholder" and node not in self.facts.activations:
            return SavedReason.INPUT
        if kind(node) is Kind.QUANTIZE:
            return SavedReason.QUANTIZED
        if val is None or val.dtype not in STORABLE_DTYPES:
            return SavedReason.DISCRETE
        if graph.operator_of(node).target is in_chunks:
            return SavedReason.CHUNKED_HEAD
        if kind(node) not in STORABLE_KINDS:
            return SavedReason.OPERATOR.format(operator=operator_name(node))
        if node in self.rules.constants:
            return SavedReason.CONSTANT
        return self.rules.why_ungrouped(node)

    def _attention_output(self, node: fx.Node, amplification: Amplification) -> Decision:
        """Return the format of an inexact attention output (option `attention_output`)."""
        val = graph.tensor(node)
        unsized = compat.has_unbacked(val) or graph.numel(val) == 0
        group = None if unsized else divisor_group(val.shape[-1], OUTPUT_GROUP)
        if group is None:
            return Decision(EXACT, 0, SavedReason.NO_GROUPS)
        expected = amplification.expected
        reason = SavedReason.ATTENTION_OUTPUT.format(format=E2M5.name, expected=expected)
        option = Decision(E2M5, group, reason, expected * E2M5.relative_error, centred=True)
        # The error has no price, because the user has already accepted it.
        return self._with_price(node, option, error_bytes=0)

    def _option(
        self, node: fx.Node, format: Format, group: int, amplification: Amplification
    ) -> Decision:
        error = amplification.expected * format.relative_error
        reason = SavedReason.ALLOWED.format(bound=amplification.bound)
        if amplification.needs_signs and not self.smallest.keeps_signs:
            reason += SavedReason.SIGNS.format(format=self.smallest.name)
        if format is E4M3 and not hardware.has_fp8_casts(graph.tensor(node).device):
            format = E4M3_BYTES
        option = Decision(format, group, reason, error)
        return self._with_price(node, option, ERROR_BYTES * error)

    def _with_price(self, node: fx.Node, option: Decision, error_bytes: float) -> Decision:
        """Add the price of `option`. Errors cost as much as `error_bytes` bytes per element."""
        bytes_ = stored_bytes(node, option) + error_bytes * graph.numel(graph.tensor(node))
        # To quantize the value, a kernel reads it once more, which costs as much as recomputing it.
        price = bytes_ * UNITS_PER_BYTE + graph.nbytes(node)
        return replace(option, price=price + self._time_price(node, option))
