"""CUDA graphs under FSDP2, which gathers weights to other memory in each step.

On CPUs, where there are no graphs, what is compiled for them runs all the same.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from parallel import WAYS, Decoder, batch, full, loss_of, no_sync
from torch import Tensor, fx, nn

import fp8pass
from fp8pass import compat
from fp8pass.dynamo import Backend
from fp8pass.runtime.cuda_graph_inputs import compile_for_moving, moving_weights, pass_inputs

STEPS = 6
HALVES = 2  # equal blocks share a forward and a backward


def compiler(graphs: bool) -> Any:
    """A backend that makes CUDA graphs, or none."""
    backend, options = Backend(), {"triton.cudagraphs": graphs}
    return lambda gm, inputs: backend(gm, inputs, options=options)


class Recordings:
    """How often graphs are recorded while it is entered."""

    def __enter__(self) -> Recordings:
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

        self.count, self._of = 0, CUDAGraphTreeManager
        self._record = CUDAGraphTreeManager.record_function

        def counted(*args: Any) -> Any:
            self.count += 1
            return self._record(*args)

        CUDAGraphTreeManager.record_function = counted
        return self

    def __exit__(self, *_: object) -> None:
        self._of.record_function = self._record


def trained(device: str, way: str, graphs: bool, compress: bool, micro_batches: int) -> Any:
    """Weights after some steps, and how many graphs the last three recorded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Decoder(dtype=torch.bfloat16).to(device)
    model = WAYS[way](model, compiler(graphs))
    if compress:
        fp8pass.distributed.compress(model, gradients="none", weights="row")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(number: int) -> None:
        for i in range(micro_batches):
            torch.compiler.cudagraph_mark_step_begin()
            ids = batch(device, seed=10 * number + i, of_rank=True)
            with nullcontext() if i + 1 == micro_batches else no_sync(model):
                loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(STEPS - 3):
        step(i)
    with Recordings() as recordings:
        for i in range(STEPS - 3, STEPS):
            step(i)
    return {n: full(p) for n, p in model.named_parameters()}, recordings.count


CASES = [
    ("fsdp blocks", False, 1),
    ("fsdp blocks", False, 2),
    ("fsdp blocks", True, 1),
    ("fsdp blocks", True, 2),
    ("fsdp whole", False, 1),
    ("fsdp whole", True, 2),
    ("tensor", False, 1),
    ("sequence", False, 2),
]
# Where nothing is recorded, one case shows that weights and their codes find their way.
ON_CPU = [("fsdp blocks", True, 2)]


@pytest.mark.long
@pytest.mark.parametrize(("way", "compress", "micro_batches"), CASES)
def test_training_is_the_same_and_records_once(two, way, compress, micro_batches):
    case = way, compress, micro_batches
    if two.device == "cpu" and case not in ON_CPU:
        pytest.skip("only GPUs have CUDA graphs")
    plain, graphed = (two(trained, way, graphs, *case[1:]) for graphs in (False, True))
    for (want, _), (got, recorded) in zip(plain, graphed, strict=True):
        assert recorded == 0
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name


def told_inductor(device: str, way: str, graphs: bool) -> list[list[bool]]:
    """For each half, which inputs that are parameters Inductor is told to find in their place."""
    torch._dynamo.reset()
    found, original = [], compat.compile_fx_inner

    def seen(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        static = compat.static_inputs(kwargs)
        found.append([i in static for i, n in enumerate(placeholders) if compat.is_primal(n)])
        return original(gm, inputs, **kwargs)

    model = WAYS[way](Decoder(dtype=torch.bfloat16).to(device), compiler(graphs))
    ids = batch(device, of_rank=True)
    compat.compile_fx_inner = seen
    try:
        with compat.fresh_compilation():
            loss_of(model(ids), ids).backward()
    finally:
        compat.compile_fx_inner = original
    return found


@pytest.mark.long
def test_only_graphs_take_weights_that_move(two):
    for found in two(told_inductor, "fsdp blocks", True):
        assert [any(half) for half in found] == [False] * HALVES
    for found in two(told_inductor, "fsdp blocks", False):
        assert [any(half) for half in found] == [True] * HALVES


def test_a_half_hands_on_what_it_was_given():
    """Not the copy in a graph's memory; and the list of arguments is empty afterwards."""
    given, other = torch.ones(2), torch.zeros(2)

    def half(arguments: list[Tensor]) -> tuple[Tensor, ...]:
        copies = [x.clone() for x in arguments]
        arguments.clear()
        return copies[0] + 1, copies[1], copies[0]

    arguments = [other, given]
    results = pass_inputs(half, [(1, 1)])(arguments)
    assert not arguments
    assert results[1] is given
    assert results[2] is not other


def test_a_saved_weight_is_the_one_that_was_given(monkeypatch):
    """Of a forward that returns a weight and an activation, compiled as if for CUDA graphs."""
    g = fx.Graph()
    weight, x = g.placeholder("weight"), g.placeholder("x")
    g.output((g.call_function(torch.add, (x, weight)), x, weight))
    told = {}

    def compile_with_copies(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        told.update(kwargs)
        return lambda arguments: gm(*(a.clone() for a in arguments))

    monkeypatch.setattr(compat, "input_index", lambda node: ["weight", "x"].index(node.name))
    monkeypatch.setattr(compat, "compile_fx_inner", compile_with_copies)
    half = compile_for_moving(
        fx.GraphModule(nn.Module(), g), [], frozenset({0}), static_input_idxs=[0, 1]
    )
    given = [torch.ones(2), torch.zeros(2)]
    _, activation, saved = half(list(given))
    assert told["static_input_idxs"] == [1]
    assert saved is given[0]
    assert activation is not given[1]


def test_models_on_one_device_have_no_weights_that_move():
    found = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(moving_weights(gm, inputs))
        return gm

    torch.compile(nn.Linear(4, 4), backend=backend)(torch.ones(2, 4))
    assert found == [frozenset()]
