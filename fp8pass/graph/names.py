"""Names of modules, values and operators, and the patterns that select them."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from fp8pass.compat import input_index, is_operator
from fp8pass.config import Pattern
from fp8pass.graph.nodes import operator_of, value
from fp8pass.graph.patterns import RESHAPES
from fp8pass.graph.tags import ADDED_BY_PASS, INPUT_NAME, ORIGINAL_OPERATOR

# How many names or reasons a message lists.
MAX_LISTED = 3

# The variables that may contain the compiled module in the function where Dynamo starts to trace.
# Autocast and other decorators of a forward receive the module in `*args`.
_ROOT = re.compile(r"L\['(?:self|fn|mod|model_)'\]|L\['args'\]\[0\]")
# A closure variable of the traced function.
_CELL = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
# Names that Dynamo's path of a module contains, but the module's name in a checkpoint does not.
# `clean_path` also drops names like `__dict__`, which occur if a module defines `__getattr__`.
_WRAPPERS = ("_orig_mod", "_modules", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def matching_pattern(path: str, patterns: tuple[Pattern, ...]) -> str | None:
    """Return the text of the first pattern that matches a module path, or None.

    A string matches if it equals consecutive parts of the path. E.g. `1.mlp` and `layers.*.mlp`
    match `layers.1.mlp.up`.
    """
    return next((pattern_text(p) for p in patterns if _matches(path, p)), None)


def pattern_text(pattern: Pattern) -> str:
    """Return a string pattern itself, or the name of a function that is used as a pattern."""
    if isinstance(pattern, str):
        return pattern
    return getattr(pattern, "__qualname__", type(pattern).__qualname__)


def _matches(path: str, pattern: Pattern) -> bool:
    if not isinstance(pattern, str):
        return bool(pattern(path))
    if f".{pattern}." in f".{path}.":
        return True
    if not any(c in pattern for c in "*?["):
        return False  # fnmatch is slow for hundreds of plain paths
    forms = (f"{start}{pattern}{end}" for start in ("", "*.") for end in ("", ".*"))
    return any(fnmatch.fnmatchcase(path, form) for form in forms)


def warn_about_idle_patterns(
    option: str, patterns: tuple[Pattern, ...], what: str, names: list[str]
) -> None:
    """Warn about each string pattern of an option that matches none of `names`.

    `what` is the kind of the names, e.g. "linear layer". Functions cause no warning, because a
    function may be used for many models, and need not match in every model.
    """
    for pattern in patterns if names else ():
        if isinstance(pattern, str) and not any(_matches(name, pattern) for name in names):
            paths = list(dict.fromkeys(filter(None, names)))
            last_parts = sorted({path.split(":")[0].rsplit(".", 1)[-1] for path in paths})
            path = pattern.split(" (")[0]  # tables name a part of a module as `mha (in_proj)`
            nearest = difflib.get_close_matches(path, [*paths, *last_parts], n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"The graph has: {paths[:8]}."
            warnings.warn(
                f"fp8pass: {option} pattern {pattern!r} matches no {what} of this graph. {hint} "
                "Paths start at the compiled module. If you compile blocks separately, give each "
                "block its own Config, with paths that start at the block.",
                stacklevel=2,
            )


def first_reasons(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield e.g. `a.b in high precision: too narrow` for `MAX_LISTED` names, then `and 5 more`."""
    for name, why in itertools.islice(reasons.items(), MAX_LISTED):
        yield f"{name} in high precision: {why}"
    if len(reasons) > MAX_LISTED:
        yield f"and {len(reasons) - MAX_LISTED} more"


def common_reasons(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield e.g. `layers.0.mlp and 5 more: too narrow` for the first `MAX_LISTED` reasons."""
    names_of: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names_of.setdefault(why, []).append(name)
    for why, names in itertools.islice(names_of.items(), MAX_LISTED):
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{others}: {why}"


def value_names(g: fx.Graph) -> dict[fx.Node, str]:
    """Name each tensor by its module path, its operator and a number, e.g. `mlp:add.Tensor:0`.

    The names do not change with the batch, dynamic shapes, or the choice of layers that run in FP8.
    A view that a pass added has the name of the tensor that it views.
    """
    counts: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    for node in g.nodes:
        if value(node) is None:
            continue
        if ADDED_BY_PASS in node.meta and node.target in RESHAPES:
            names[node] = names[node.all_input_nodes[0]]
            continue
        name = node.meta.get(ORIGINAL_OPERATOR) or getattr(node.target, "__name__", node.target)
        name = f"{name} for FP8" if ADDED_BY_PASS in node.meta else name
        prefix = f"{module_path(node)}:{node.op if node.op == 'placeholder' else name}"
        counts[prefix] = counts.get(prefix, -1) + 1
        names[node] = f"{prefix}:{counts[prefix]}"
    return names


def tag_inputs(inputs: Iterable[fx.Node], names: Sequence[str]) -> None:
    """Tag inputs of a joint or inference graph with the names of the Dynamo graph's inputs."""
    for node in inputs:
        index = input_index(node)
        if index is not None and index < len(names):
            node.meta[INPUT_NAME] = names[index]


def module_path(node: fx.Node) -> str:
    """Return the path of a node's module, for example `model.layers.0.mlp`; '' at the top level."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    return clean_path(entries[-1][0]) if entries else ""


def clean_path(path: str) -> str:
    """Convert Dynamo's path, such as `L['self']._modules['a'].b[0]`, to the path in the model."""
    root = _ROOT.match(path)
    path = _CELL.sub("", path[root.end() :] if root else path)
    path = re.sub(r"^[LG](?=\[')|\['([^']*)'\]|\[(\d+)\]", r".\1\2.", path)
    parts = [p for p in path.split(".") if p]
    return ".".join(p for p in parts if p not in _WRAPPERS and not p.startswith("__"))


def operator_name(node: fx.Node) -> str:
    """Return the name of a node's operator, for example `aten.mm`."""
    if node.op != "call_function":
        return node.op
    target = operator_of(node).target
    name = str(target) if is_operator(target) else getattr(target, "__name__", str(target))
    return name.removesuffix(".default")


def short_operator_name(node: fx.Node) -> str:
    return shorten_operator(operator_name(node))


def shorten_operator(name: str) -> str:
    """Shorten `aten.add.Tensor` to `add`."""
    if "_scaled_dot_product" in name:
        return "attention"
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name
