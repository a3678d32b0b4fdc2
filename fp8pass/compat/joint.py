"""Inputs and checkpointing tags of joint graphs, and their split into forward and backward."""

from __future__ import annotations

import inspect
from typing import Any

import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "copy_region", "extract_forward_backward", "forget_checkpointing", "input_index", "is_primal",
    "is_tangent", "must_recompute", "must_save", "normalize_joint_graph", "recompute_always",
    "save_always", "stock_partition",
]  # fmt: skip

stock_partition = partitioners.min_cut_rematerialization_partition

_EXTRACT_TAKES_OPAQUE = (
    "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
)


def normalize_joint_graph(gm: fx.GraphModule) -> None:
    """Run the first steps of PyTorch's partitioner: CSE, and tags for values that must be saved."""
    gm.graph.eliminate_dead_code()
    if functorch_config.cse:
        gm.graph = fx_graph_cse(gm.graph)
    if partitioners.has_recomputable_ops(gm):
        partitioners.cleanup_recompute_tags(gm, is_default_partition=False)
    partitioners.force_save_collectives(gm)
    partitioners.force_save_effectful_ops(gm)
    partitioners.force_save_bw_mutation_src(gm)


def extract_forward_backward(
    gm: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_objects: list[fx.Node],
    *,
    num_fwd_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into a forward, which saves only the given nodes, and a backward."""
    extra: dict[str, Any] = {}
    if _EXTRACT_TAKES_OPAQUE:
        extra["saved_opaque_nodes"] = saved_objects
    elif saved_objects:
        raise AssertionError(
            f"The backward needs the objects {saved_objects}, but this PyTorch version saves only "
            "tensors and sizes. Please report this to fp8pass, with the output of fp8pass env."
        )
    forward, backward = partitioners._extract_fwd_bwd_modules(
        gm, saved, saved_sym_nodes=saved_symbols, num_fwd_outputs=num_fwd_outputs, **extra
    )
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def is_tangent(node: fx.Node) -> bool:
    """Whether `node` is the gradient of a forward output, an input of the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_primal(node: fx.Node) -> bool:
    """Whether `node` is a parameter, buffer or argument, an input of the forward."""
    return node.op == "placeholder" and "primals" in str(node.target)


def must_recompute(node: fx.Node) -> bool:
    """Whether `torch.utils.checkpoint` recomputes `node`."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def forget_checkpointing(g: fx.Graph) -> None:
    """Remove the tags of `torch.utils.checkpoint`."""
    for node in g.nodes:
        if must_recompute(node):
            del node.meta["recompute"]


def must_save(node: fx.Node) -> bool:
    """Whether the user's policy or a side effect forbids recomputing `node`."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def recompute_always(node: fx.Node) -> None:
    """Tag `node` for recomputation, as `torch.utils.checkpoint` does."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def save_always(node: fx.Node) -> None:
    """Forbid recomputation, unless `torch.utils.checkpoint` requires it."""
    if not must_recompute(node):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def copy_region(source: fx.Node, node: fx.Node) -> None:
    """Copy the checkpointing tag of `source` to `node`."""
    node.meta.pop("recompute", None)
    if "recompute" in source.meta:
        node.meta["recompute"] = source.meta["recompute"]


def input_index(node: fx.Node) -> int | None:
    """Return the index of the Dynamo graph's input that `node` represents, or None if unknown."""
    desc = node.meta.get("desc")
    while isinstance(desc, SubclassGetAttrAOTInput):  # a DTensor's local tensor
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None
