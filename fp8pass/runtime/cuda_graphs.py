"""Support for CUDA graphs: weights whose address changes (FSDP2), and gradient accumulation.

Inductor records a graph again when the address of a parameter changes. So weights that FSDP2
gathers become non-static inputs, which are copied to the graph's own memory before each replay. The
forward saves the original weight for the backward, not the copy, because FSDP2 frees the original
and gathers it again.

Autograd assigns the first gradient to `.grad` without a copy. In replays, the next micro-batch
overwrites this memory before autograd adds its gradients (pytorch/pytorch#169545). So gradients in
the memory of a CUDA graph are copied before a forward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fp8pass import compat


def moving_weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the Dynamo graph's inputs that FSDP2 gathers."""
    pairs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    return frozenset(
        i
        for i, (node, value) in enumerate(pairs)
        if isinstance(value, nn.Parameter) and compat.is_of_fsdp(node)
    )


def compile_for_moving(
    gm: fx.GraphModule, inputs: Sequence[Any], moving: frozenset[int], **kwargs: Any
) -> Any:
    """Compile a forward or backward graph with Inductor, for weights with changing addresses.

    `moving` are the indices of these weights among the Dynamo graph's inputs.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    moved = {n: i for i, n in enumerate(placeholders) if compat.input_index(n) in moving}
    results: Any = gm.graph.output_node().args[0]
    passed = [(i, moved[x]) for i, x in enumerate(results) if x in moved]
    static = compat.static_inputs(kwargs) - set(moved.values())
    compiled = compat.compile_fx_inner(
        gm, inputs, **{**kwargs, "static_input_idxs": sorted(static)}
    )
    return pass_inputs(compiled, passed) if passed else compiled


def pass_inputs(compiled: Callable[..., Any], pairs: Sequence[tuple[int, int]]) -> Any:
    """Wrap `compiled`, so that result i is input j, for each index pair (i, j)."""

    def run(arguments: list[Any]) -> list[Any]:
        given = [arguments[i] for _, i in pairs]  # `compiled` empties the list
        results = list(compiled(arguments))
        for (i, _), value in zip(pairs, given, strict=True):
            results[i] = value
        return results

    return compat.box(run)


# Parameters of all compiled graphs, because the first graph of a forward checks all of them.
_parameters = compat.WeakIdKeyDictionary()


def protect_gradients(program: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled `program`, so that it preserves the gradients of earlier micro-batches."""

    def run(*args: Any) -> Any:
        trained = (x for x in args if isinstance(x, nn.Parameter) and x.requires_grad)
        _parameters.update(dict.fromkeys(trained, True))
        for device in {x.device for x in args if isinstance(x, Tensor)}:
            copy_replayed(device)
        return program(*args)

    return run


def copy_replayed(device: torch.device) -> None:
    """Copy gradients that the next replays on `device` would overwrite."""
    replayed = compat.find_replayed_memory(device)
    # Only the first graph of a forward finds replayed memory; later graphs skip the loop.
    for parameter in _parameters if replayed else ():
        gradient = parameter.grad
        if gradient is None:
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if part.untyped_storage().data_ptr() in replayed:
            parameter.grad = gradient.detach().clone()
