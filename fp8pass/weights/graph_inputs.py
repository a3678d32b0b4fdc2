"""Codes of weights as inputs of a graph, behind those that Dynamo gave it.

    before   forward(x, W)                     y = linear(x, W)
    after    forward(x, W, codes, scales)      y = linear(x, W)

The graph computes the same. What codes there are of `W` is said beside it (`Given`), and
`quantize_linears` takes them in place of making them. Names and users say which weights could have
some; where the pass finds layers that do not run in FP8 after all, the choice is made again without
their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat, graph
from fp8pass.config import Config, bytes_text
from fp8pass.graph.linear_layers import why_not_of_this_size
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.output_heads import has_head_name
from fp8pass.weights.cached import codes_of

LINEAR = torch.nn.functional.linear


@dataclass(frozen=True)
class Given:
    """Which inputs of a Dynamo graph are codes of others, by index.

    Attributes:
        of: weights with their codes and scales.
        left_out: weights that could have codes, and why they have none.
    """

    of: tuple[tuple[int, int, int], ...] = ()
    left_out: tuple[tuple[int, str], ...] = ()

    @property
    def made(self) -> frozenset[int]:
        """Those that are codes or scales."""
        return frozenset(i for _, *made in self.of for i in made)


NO_CODES = Given()


def choose_codes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    unused: Collection[int] = (),
) -> Given:
    """The weights of a Dynamo graph whose codes are to be inputs, in order, as far as they fit.

    Args:
        gm: the graph.
        example_inputs: its inputs.
        config: says how much room there is.
        unused: inputs whose codes no GEMM of the graph would take.
    """
    room = config.weight_code_bytes
    if not room:
        return NO_CODES
    chosen, left_out = list[int](), list[tuple[int, str]]()
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for i, (node, weight) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if i in unused or not _is_weight_of_linear_layers(node, weight, config):
            continue
        if compat.is_of_fsdp(node):
            # A gather writes to the same memory without a trace, and what it writes depends on
            # shards that other ranks may have changed.
            left_out.append((i, "FSDP gathers the weight in every run"))
            continue
        needed = weight.numel() + 4 * weight.shape[0]  # E4M3, scales of rows in FP32
        if needed > room:
            left = (
                f"its codes take {bytes_text(needed)}, and only {bytes_text(room)} of weight_codes "
                "are left"
            )
            left_out.append((i, left))
            continue
        chosen.append(i)
        room -= needed
    first = len(placeholders)
    of = tuple((w, first + 2 * i, first + 2 * i + 1) for i, w in enumerate(chosen))
    return Given(of, tuple(left_out))


def _is_weight_of_linear_layers(node: fx.Node, weight: Any, config: Config) -> bool:
    """Whether an input is a plain matrix that FP8 GEMMs of the forward multiply with, in BF16."""
    if type(weight) is not nn.Parameter or weight.ndim != 2 or not node.users:
        return False
    if weight.is_inference():  # which counts no versions
        return False
    if not all(isinstance(n, int) and n for n in weight.shape):
        return False
    if why_not_of_this_size(*weight.shape):
        return False
    if not weight.is_contiguous() or not _computes_in_bf16(weight):
        return False
    return all(_is_quantized_linear(user, node, config) for user in node.users)


def _computes_in_bf16(weight: Tensor) -> bool:
    kind = weight.device.type
    casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
    return weight.dtype is torch.bfloat16 or (casts and weight.dtype is torch.float32)


def _is_quantized_linear(user: fx.Node, weight: fx.Node, config: Config) -> bool:
    """Whether a node is a linear layer that runs in FP8, as far as names say."""
    path = graph.module_path(user)
    if user.target is not LINEAR or user.args[1:2] != (weight,):
        return False
    is_head = has_head_name(path) and not config.quantize_lm_head
    return not is_head and matching_pattern(path, config.skip) is None


def with_codes(gm: fx.GraphModule, given: Given, *, in_place: bool) -> fx.GraphModule:
    """A copy of a Dynamo graph with the given codes as inputs.

    With `in_place` these are always in the same memory, so that CUDA graphs need not copy them.
    """
    copy = compat.copy_captured(gm)
    last = [n for n in copy.graph.nodes if n.op == "placeholder"][-1]
    with copy.graph.inserting_after(last):
        for weight, *_ in reversed(given.of):
            for kind in ("scales", "codes"):
                node = copy.graph.placeholder(f"{kind}_of_input_{weight}")
                compat.without_source(node)
                if in_place:
                    compat.mark_static(node)
    copy.recompile()
    return copy


def examples(example_inputs: Sequence[Any], given: Given) -> list[Any]:
    """Inputs to compile with: those of Dynamo, and codes without memory."""
    found = list(example_inputs)
    for i, *_ in given.of:
        weight = example_inputs[i]
        found.append(compat.input_like(weight, weight.shape, torch.float8_e4m3fn))
        found.append(compat.input_like(weight, (weight.shape[0], 1), torch.float32))
    return found


def giving_codes(
    compiled: Callable[..., Any], given: Given, *, in_place: bool
) -> Callable[..., Any]:
    """A compiled graph that gets the codes of its weights besides its inputs."""
    weights = [i for i, *_ in given.of]

    def run(*args: Any) -> Any:
        return compiled(*args, *codes_of([args[i] for i in weights], in_place=in_place))

    return run
