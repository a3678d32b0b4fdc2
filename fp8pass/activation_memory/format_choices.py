"""How a value would be stored: in the cheapest format that the error rules allow.

Costs are in the units of `costs.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.activation_memory.costs import UNITS_PER_BYTE
from fp8pass.config import Config
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
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.graph.chunks import in_chunks
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.names import matching_pattern, operator_name, warn_about_idle_patterns

# The price of errors: a value whose rounding makes a gradient wrong by 100% costs this many bytes
# more for each element, whatever its dtype: rounding the sum of a residual stream in FP32 is no
# worse than rounding its branch in 16 bits. It decides between formats, and where to cut, if
# choices take about the same bytes.
ERROR_BYTES = 0.5

# A `keep_exact` pattern with it is the name of a value, `module:operator:number`, not of a module.
VALUE_SEPARATOR = ":"

# Elements of attention's output that share a scale (`benchmarks/results/attention_storage.json`).
OUTPUT_GROUP = 32

NO_GROUPS = "its last dimension cannot be cut into equal groups of 16 or more"

STORABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STORABLE_KINDS = (
    Kind.INPUT,
    Kind.VIEW,
    Kind.POINTWISE,
    Kind.MOVEMENT,
    Kind.REDUCTION,
    Kind.GEMM,
    Kind.ATTENTION,
    Kind.CONVOLUTION,
)


@dataclass(frozen=True)
class FormatChoice:
    """How a value would be stored in low bits, or why it would not.

    Attributes:
        format: `EXACT` if no low-bit format is allowed; `group_size` is then 0.
        group_size: elements that share a scale.
        reason: why this format, as text.
        bytes: bytes kept, scales included.
        units: the price of keeping them, infinite if no format is allowed.
        expected_error: relative RMS error of the gradients.
        centred: whether it is the difference from its mean over tokens that is stored.
    """

    format: Format
    group_size: int
    reason: str
    bytes: float = math.inf
    units: float = math.inf
    expected_error: float = 0.0
    centred: bool = False


class FormatChoices:
    """The format choices for the values of one joint graph, made when first asked for."""

    def __init__(self, config: Config, facts: JointFacts, rules: Rules) -> None:
        self.config, self.facts = config, facts
        self.rules = rules
        self._options: dict[fx.Node, list[FormatChoice]] = {}

    @cached_property
    def _keep_exact(self) -> dict[fx.Node, str]:
        """The values that match `keep_exact`, each with the pattern that it matches."""
        patterns = self.config.exact_patterns
        if not patterns or self.coarsest.lossless:
            return {}
        values = tuple(p for p in patterns if VALUE_SEPARATOR in p)
        modules = tuple(p for p in patterns if VALUE_SEPARATOR not in p)
        names = {
            n: name
            for n, name in graph.value_names(self.rules.graph).items()
            if n not in self.rules.backward and kind(n) is not Kind.QUANTIZE  # that is for `skip`
        }
        paths = {n: graph.module_path(n) for n in names}
        warn_about_idle_patterns("keep_exact", values, "value", list(names.values()))
        warn_about_idle_patterns("keep_exact", modules, "module", sorted(set(paths.values())))
        found = {
            n: matching_pattern(name, values) or matching_pattern(paths[n], modules)
            for n, name in names.items()
        }
        return {n: pattern for n, pattern in found.items() if pattern is not None}

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """The formats that the configuration allows: its own and those of more bits."""
        if self.config.save_format == "none":
            return (EXACT,)
        smallest = FORMATS[self.config.save_format]
        if smallest.lossless:
            return (smallest,)
        return tuple(f for f in SAVED_FORMATS if f.bits >= smallest.bits)

    @property
    def coarsest(self) -> Format:
        """The format of the fewest bits that may be used."""
        return self.formats[0]

    def why_exact(self, node: fx.Node) -> str:
        """Why the backward needs `node` exactly; '' if it does not, or if all values are exact."""
        if self.config.save_format == "none":
            return ""
        if node in self._keep_exact:
            return f"matches keep_exact pattern {self._keep_exact[node]!r}"
        return self.rules.why_exact(node)

    def must_be_available(self, node: fx.Node) -> bool:
        """Whether the backward must have `node` exactly even if it does not use it itself.

        True for values that `keep_exact` names, since the user knows of them, and for values of a
        module it names that a checkpointed region recomputes.
        """
        return node in self._keep_exact and (
            VALUE_SEPARATOR in self._keep_exact[node] or compat.must_recompute(node)
        )

    def may_be_recomputed(self, node: fx.Node) -> bool:
        """Whether the backward may compute `node` from values that were stored in low bits."""
        return node not in self._keep_exact and self.rules.may_be_recomputed(node, self.coarsest)

    def cheapest(self, node: fx.Node) -> FormatChoice:
        """The cheapest allowed way to store `node` in low bits."""
        return min(self.options(node), key=lambda c: c.units)

    def options(self, node: fx.Node) -> list[FormatChoice]:
        """All allowed ways to store `node` in low bits, from few bits to many.

        Where there is none, the only one is `EXACT` in groups of 0, with the reason.
        """
        if node not in self._options:
            self._options[node] = self._list_options(node)
        return self._options[node]

    def _list_options(self, node: fx.Node) -> list[FormatChoice]:
        reason = self._why_no_candidate(node) or self.why_exact(node)
        if reason:
            return [FormatChoice(EXACT, 0, reason)]
        if node in self.rules.inexact_outputs:
            return [self._coded_output(node)]
        groups = {f: self._group_size(node, f) for f in self.formats}
        if not any(groups.values()):
            return [FormatChoice(EXACT, 0, NO_GROUPS)]
        allowed = [(f, g) for f, g in groups.items() if g and self.rules.allows(node, f)]
        if not allowed:
            bound = self.rules.amplification(node).bound
            times = "without bound" if math.isinf(bound) else f"{bound:.1f}×"
            reason = f"may amplify errors {times}, too much for any format"
            return [FormatChoice(EXACT, 0, reason)]
        return [self._priced(node, f, group) for f, group in allowed]

    def _group_size(self, node: fx.Node, format: Format) -> int | None:
        """The group size for `node` in `format`; None if no group divides its last dimension."""
        val = graph.tensor(node)
        if val.ndim < 2 or compat.has_unbacked(val) or graph.numel(val) == 0:
            return None
        length = val.shape[-1]
        if not isinstance(length, int):
            return None
        return divisor_group(length, self.config.group_size, multiple=format.group_multiple)

    def _why_no_candidate(self, node: fx.Node) -> str:
        """Why a value cannot be stored in low bits, whatever uses it; '' if it can."""
        val = graph.value(node)
        if self.config.save_format == "none":
            return "save_format='none'"
        if node.op == "placeholder" and node not in self.facts.activations:
            return "an input that needs no gradient: a table, a mask, data"
        if kind(node) is Kind.QUANTIZE:
            return "already quantized, for a linear layer"
        if val is None or val.dtype not in STORABLE_DTYPES:
            return "integers and masks are kept as they are"
        if graph.operator_of(node).target is in_chunks:
            return "a gradient that the forward has computed already, with the chunked output head"
        if kind(node) not in STORABLE_KINDS:
            return f"{operator_name(node)} is not computed from activations"
        if node in self.rules.constants:
            return "computed from parameters and data alone"
        return self.rules.why_ungrouped(node)

    def _coded_output(self, node: fx.Node) -> FormatChoice:
        """How the output of attention is stored that may be inexact."""
        val = graph.tensor(node)
        *_, tokens, head_dim = val.shape
        group = None if compat.has_unbacked(val) else divisor_group(head_dim, OUTPUT_GROUP)
        if group is None:
            return FormatChoice(EXACT, 0, NO_GROUPS)
        exact, expected = graph.nbytes(node), self.rules.amplification(node).expected
        stored = E2M5.stored_bytes(graph.numel(val), group) + exact / compat.size_hint(tokens)
        error = expected * E2M5.relative_error
        reason = f"attention_output={E2M5.name!r}: attention amplifies errors about {expected:.1f}×"
        # No choice of a price: the user has made it.
        units = stored * UNITS_PER_BYTE + exact
        return FormatChoice(E2M5, group, reason, stored, units, error, centred=True)

    def _priced(self, node: fx.Node, format: Format, group: int) -> FormatChoice:
        """The choice of `format` in groups of `group` elements, with its price."""
        val = graph.tensor(node)
        exact, elements = graph.nbytes(node), graph.numel(val)
        amplification = self.rules.amplification(node)
        error = amplification.expected * format.relative_error
        stored = exact if format.lossless else format.stored_bytes(elements, group)
        price = ERROR_BYTES * error * elements
        reason = f"amplifies errors at most {amplification.bound:.1f}×"
        if amplification.needs_signs and not self.coarsest.keeps_signs:
            reason += f", and its small values count, which {self.coarsest.name} rounds to zero"
        if format is E4M3 and not hardware.has_fp8_casts(val.device):
            format = E4M3_BYTES
        # Reading the value once more, to store it, costs as much as recomputing it.
        units = (stored + price) * UNITS_PER_BYTE + exact
        return FormatChoice(format, group, reason, stored, units, error)
