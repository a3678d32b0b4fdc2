"""How a single value would be stored: the cheapest format that the error rules allow.

Costs are in the units of `costs.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Config
from fp8pass.dialect import hardware
from fp8pass.dialect.formats import (
    E4M3,
    E4M3_BYTES,
    EXACT,
    FORMATS,
    SAVED_FORMATS,
    Format,
    divisor_group,
)
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.names import matching_pattern, operator_name, warn_about_idle_patterns
from fp8pass.rules.error_rules import Rules
from fp8pass.saving.costs import UNITS_PER_BYTE

# An error price: a value that makes all of a gradient wrong would cost this share of its bytes
# more. It decides between formats, and where to cut, among choices that take about equal bytes.
ERROR_WEIGHT = 0.25

# In a pattern of `keep_exact`: `module:operator:number`.
NAMES_A_VALUE = ":"

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
class Choice:
    """How a value would be stored in low bits, or why it would not.

    Attributes:
        format: `EXACT` where no low-bit format is allowed; `group_size` is then 0.
        group_size: elements that share a scale.
        reason: for people.
        bytes: kept, scales included.
        units: what that costs, infinite where it is not possible.
        expected_error: of the gradients, relative, root mean square.
    """

    format: Format
    group_size: int
    reason: str
    bytes: float = math.inf
    units: float = math.inf
    expected_error: float = 0.0


class Storage:
    """Chooses formats for the values of one joint graph."""

    def __init__(self, config: Config, facts: JointFacts, rules: Rules) -> None:
        self.config, self.facts = config, facts
        self.rules = rules
        self._choices: dict[fx.Node, Choice] = {}

    @cached_property
    def _asked(self) -> dict[fx.Node, str]:
        """The values that the user wants exactly, with the pattern that says so."""
        patterns = self.config.keep_exact
        if not patterns or self.coarsest.lossless:
            return {}
        values = tuple(p for p in patterns if NAMES_A_VALUE in p)
        modules = tuple(p for p in patterns if NAMES_A_VALUE not in p)
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
        """What the configuration allows: its format and those of more bits."""
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
        """Why the backward needs `node` exactly; '' where it does not, or all is exact."""
        if self.config.save_format == "none":
            return ""
        if node in self._asked:
            return f"matches keep_exact pattern {self._asked[node]!r}"
        return self.rules.why_exact(node)

    def must_be_available(self, node: fx.Node) -> bool:
        """Whether the backward has `node` exactly even if others could stand in for it.

        Those are values asked for by name, of which the user knows, rather than by module; and
        what a checkpointed region has to compute again.
        """
        return node in self._asked and (
            NAMES_A_VALUE in self._asked[node] or compat.must_recompute(node)
        )

    def may_be_recomputed(self, node: fx.Node) -> bool:
        """Whether the backward may compute `node` from values that were stored in low bits."""
        return node not in self._asked and self.rules.may_be_recomputed(node, self.coarsest)

    def choice(self, node: fx.Node) -> Choice:
        """The cheapest allowed way to store `node` in low bits."""
        if node not in self._choices:
            self._choices[node] = self._choose(node)
        return self._choices[node]

    def _choose(self, node: fx.Node) -> Choice:
        reason = self._why_not(node) or self.why_exact(node)
        if reason:
            return Choice(EXACT, 0, reason)
        groups = {f: self._group(node, f) for f in self.formats}
        if not any(groups.values()):
            return Choice(EXACT, 0, "no group of 16 or more divides its last dimension")
        allowed = [(f, g) for f, g in groups.items() if g and self.rules.allows(node, f)]
        if not allowed:
            bound = self.rules.amplification(node).bound
            return Choice(EXACT, 0, f"may amplify errors {bound:.1f}×, too much for any format")
        return min((self._priced(node, f, group) for f, group in allowed), key=lambda c: c.units)

    def _group(self, node: fx.Node, format: Format) -> int | None:
        val = graph.tensor(node)
        if val.ndim < 2 or compat.has_unbacked(val) or graph.numel(val) == 0:
            return None
        length = val.shape[-1]
        if not isinstance(length, int):
            return None
        return divisor_group(length, self.config.group_size, multiple=format.group_multiple)

    def _why_not(self, node: fx.Node) -> str:
        """Why a value is no candidate, whatever uses it."""
        val = graph.value(node)
        if self.config.save_format == "none":
            return "save_format='none'"
        if node.op == "placeholder" and node not in self.facts.activations:
            return "an input that needs no gradient: a table, a mask, data"
        if kind(node) is Kind.QUANTIZE:
            return "already quantized, for a linear layer"
        if val is None or val.dtype not in STORABLE_DTYPES:
            return "integers and masks are kept as they are"
        if kind(node) not in STORABLE_KINDS:
            return f"{operator_name(node)} is not computed from activations"
        if node in self.rules.constants:
            return "computed from parameters and data alone"
        return ""

    def _priced(self, node: fx.Node, format: Format, group: int) -> Choice:
        val = graph.tensor(node)
        exact, elements = graph.nbytes(node), graph.numel(val)
        amplification = self.rules.amplification(node)
        error = amplification.expected * format.relative_error
        stored = exact if format.lossless else format.stored_bytes(elements, group)
        price = ERROR_WEIGHT * error * exact
        reason = f"amplifies errors at most {amplification.bound:.1f}×"
        if amplification.needs_signs and not self.coarsest.keeps_signs:
            reason += f", and is compared with zero: {self.coarsest.name} flushes to it"
        if format is E4M3 and not hardware.has_fp8_casts(val.device):
            format = E4M3_BYTES
        # Reading the value once more, to store it, counts like computing it again.
        units = (stored + price) * UNITS_PER_BYTE + exact
        return Choice(format, group, reason, stored, units, error)
