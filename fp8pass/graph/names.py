"""Names of modules, values and operators, and the patterns by which users choose among them."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping

from torch import fx

from fp8pass.compat import is_operator
from fp8pass.config import Pattern
from fp8pass.graph.nodes import operator_of, value
from fp8pass.graph.patterns import RESHAPES
from fp8pass.graph.tags import ADDED, REPLACED

# Names that one line lists.
LISTED = 3
# Added to the warning about a pattern that matches nothing.
_RELATIVE = (
    "Paths start at the module that is compiled: where blocks are compiled one by one, no pattern "
    "tells them apart; compile those that it is meant for with a Config of their own."
)

# The names that the compiled module has as a variable where Dynamo begins to trace. Autocast and
# other wrappers of a forward take it among `*args`.
_ROOT = re.compile(r"L\['(?:self|fn|mod|model_)'\]|L\['args'\]\[0\]")
# A variable of a function around the one that is traced.
_CELL = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
# Attributes through which modules are reached that are no part of their names in a checkpoint.
# Names with two underscores are Python's own: `__dict__` where a module has its own `__getattr__`.
_WRAPPERS = ("_orig_mod", "_modules", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def matching_pattern(path: str, patterns: tuple[Pattern, ...]) -> str | None:
    """Return the first pattern that matches a module path, or the name of the function.

    A pattern matches the path, the path of a module above it, or a suffix of either.
    """
    return next((pattern_text(p) for p in patterns if _matches(path, p)), None)


def pattern_text(pattern: Pattern) -> str:
    """Return a pattern, or the name of a function that is used as a pattern."""
    return pattern if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))


def _matches(path: str, pattern: Pattern) -> bool:
    if not isinstance(pattern, str):
        return bool(pattern(path))
    if f".{pattern}." in f".{path}.":
        return True
    if not any(c in pattern for c in "*?["):
        return False  # most are plain paths, of which there may be hundreds
    forms = (f"{start}{pattern}{end}" for start in ("", "*.") for end in ("", ".*"))
    return any(fnmatch.fnmatchcase(path, form) for form in forms)


def warn_about_idle_patterns(
    option: str, patterns: tuple[Pattern, ...], what: str, names: list[str]
) -> None:
    """Warn about patterns of an option that match none of the names that a graph has of `what`.

    A function is meant for many models, and may match nothing in one of them.
    """
    for pattern in patterns if names else ():
        if isinstance(pattern, str) and not any(_matches(name, pattern) for name in names):
            nearest = difflib.get_close_matches(pattern, [*names, *_last_parts(names)], n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else f" They are: {names[:8]}."
            warnings.warn(
                f"fp8pass: {option} pattern {pattern!r} matches no {what} of this graph.{hint} "
                f"{_RELATIVE}",
                stacklevel=2,
            )


def first_reasons(reasons: Mapping[str, str], between: str) -> Iterator[str]:
    """The first few names with the reasons for something, and how many more there are."""
    for name, why in itertools.islice(reasons.items(), LISTED):
        yield f"{name}{between}{why}"
    if len(reasons) > LISTED:
        yield f"and {len(reasons) - LISTED} more"


def common_reasons(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the first few reasons, each after the first name and the number of other names."""
    names_of: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names_of.setdefault(why, []).append(name)
    for why, names in itertools.islice(names_of.items(), LISTED):
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{others}: {why}"


def _last_parts(names: list[str]) -> list[str]:
    return sorted({name.split(":")[0].rsplit(".", 1)[-1] for name in names})


def value_names(g: fx.Graph) -> dict[fx.Node, str]:
    """Names of tensors by module, operator and a number.

    They are the same whatever batch a model is traced with, whether its sizes vary or not, and
    whatever runs in FP8. A view that a pass added has the name of what it is a view of.
    """
    counts: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    for node in g.nodes:
        if value(node) is None:
            continue
        if ADDED in node.meta and node.target in RESHAPES:
            names[node] = names[node.all_input_nodes[0]]
            continue
        name = node.meta.get(REPLACED) or getattr(node.target, "__name__", node.target)
        name = f"{name} for FP8" if ADDED in node.meta else name
        prefix = f"{module_path(node)}:{node.op if node.op == 'placeholder' else name}"
        counts[prefix] = counts.get(prefix, -1) + 1
        names[node] = f"{prefix}:{counts[prefix]}"
    return names


def module_path(node: fx.Node) -> str:
    """The path of the module that `node` comes from, as `model.layers.0.mlp`; '' at the top."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    return clean_path(entries[-1][0]) if entries else ""


def clean_path(path: str) -> str:
    """A module path as the user wrote it, out of Dynamo's `L['self']._modules['a'].b[0]`."""
    root = _ROOT.match(path)
    path = _CELL.sub("", path[root.end() :] if root else path)
    path = re.sub(r"^[LG](?=\[')|\['([^']*)'\]|\[(\d+)\]", r".\1\2.", path)
    parts = [p for p in path.split(".") if p]
    return ".".join(p for p in parts if p not in _WRAPPERS and not p.startswith("__"))


def operator_name(node: fx.Node) -> str:
    """The operator of a node, as people write it."""
    if node.op != "call_function":
        return node.op
    target = operator_of(node).target
    name = str(target) if is_operator(target) else getattr(target, "__name__", str(target))
    return name.removesuffix(".default")
