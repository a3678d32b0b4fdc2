"""Inline the regions that `torch.compiler.nested_compile_region` marks in a Dynamo graph.

Dynamo traces only the first of several equal regions, and calls its graph with the parameters of
each region. In this shared graph, passes could not tell which inputs are parameters, and all module
paths would name the first region.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fp8pass import compat
from fp8pass.graph.names import clean_path, module_path
from fp8pass.graph.nodes import free_attribute

STACK = "nn_module_stack"


# Maps prefixes of module paths in the first region to prefixes in another region with the same
# graph. Each prefix is split at its dots. The longest prefixes come first.
Renaming = dict[tuple[str, ...], tuple[str, ...]]


def inline_regions(gm: fx.GraphModule) -> None:
    first: dict[fx.GraphModule, list[fx.Node]] = {}
    for call in [n for n in gm.graph.nodes if compat.is_region(n)]:
        arguments: tuple[Any, ...] = call.args
        reference, _, *operands = arguments
        region = getattr(gm, reference.target)
        if region not in first:
            inline_regions(region)
            first[region] = operands
        renaming = _find_renaming(region, first[region], operands)
        _inline(gm, call, region, operands, renaming)
        gm.graph.erase_node(call)
        gm.graph.erase_node(reference)
    if first:
        gm.delete_all_unused_submodules()
        gm.recompile()


def _find_renaming(
    region: fx.GraphModule, first: list[fx.Node], operands: list[fx.Node]
) -> Renaming:
    """Derive the renaming from each parameter's module paths in the first and in this region."""
    if operands is first:
        return {}
    found: Renaming = {}
    placeholders = region.graph.find_nodes(op="placeholder")
    for placeholder, one, other in zip(placeholders, first, operands, strict=True):
        module = module_path(placeholder).split(".")
        old, new = (_module_of_source(x) for x in (one, other))
        # Dynamo's source may begin with a variable, which is not a part of the module path.
        if not new or old[-len(module) :] != module:
            continue
        new = new[len(old) - len(module) :]
        while module and new and module[-1] == new[-1]:
            module, new = module[:-1], new[:-1]
        found[tuple(module)] = tuple(new)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def _rename(stack: dict[str, Any], renaming: Renaming) -> dict[str, Any]:
    def rename(path: str) -> str:
        parts = tuple(clean_path(path).split("."))
        for old, new in renaming.items():
            if parts[: len(old)] == old:
                return ".".join((*new, *parts[len(old) :]))
        return path

    return {key: (rename(path), *rest) for key, (path, *rest) in stack.items()}


def _module_of_source(node: fx.Node) -> list[str]:
    path, _, name = compat.source_of(node).rpartition("._parameters[")
    return clean_path(path).split(".") if name else []


def _inline(
    gm: fx.GraphModule,
    call: fx.Node,
    region: fx.GraphModule,
    operands: list[fx.Node],
    renaming: Renaming,
) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = region.graph.find_nodes(op="placeholder")
    for placeholder, operand in zip(placeholders, operands, strict=True):
        copies[placeholder] = operand
        stack = placeholder.meta.get(STACK)
        if stack and STACK not in operand.meta and compat.source_of(operand):
            operand.meta[STACK] = _rename(stack, renaming)
    for node in region.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with gm.graph.inserting_before(call):
            copies[node] = copy = gm.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copy.target = free_attribute(gm, "_of_region_")
            setattr(gm, copy.target, operator.attrgetter(str(node.target))(region))
        if STACK in node.meta:
            copy.meta[STACK] = _rename(node.meta[STACK], renaming)
    results: Any = fx.map_arg(region.graph.output_node().args[0], copies.__getitem__)
    items: list[Any] = list(call.users)
    for item in items:
        item.replace_all_uses_with(results[item.args[1]])
        gm.graph.erase_node(item)
