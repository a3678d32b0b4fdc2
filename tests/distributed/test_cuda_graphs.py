"""CUDA graphs with FSDP2, which gathers weights to different memory in each step.

CPUs have no CUDA graphs, but run the code that is compiled for them.
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
from fp8pass.runtime.cuda_graphs import compile_for_moving, moving_weights, pass_inputs

STEPS = 6
GRAPHS = 2  # a forward and a backward, which equal blocks share


def compiler(graphs: bool) -> Any:
    """Return a backend with or without CUDA graphs."""
    backend, options = Backend(), {"triton.cudagraphs": graphs}
    return lambda gm, inputs: backend(gm, inputs, options=options)


class Recordings:
    """Context that counts recordings of CUDA graphs."""

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


def train(device: str, way: str, graphs: bool, compress: bool, micro_batches: int) -> Any:
    """Train, and return the weights and the number of recordings in the last three steps."""
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
# Without recordings one case is enough to check the weights and their FP8 data.
ON_CPU = [("fsdp blocks", True, 2)]


@pytest.mark.long
@pytest.mark.parametrize(("way", "compress", "micro_batches"), CASES)
def test_cuda_graphs_train_equally_and_record_once(two, way, compress, micro_batches):
    case = way, compress, micro_batches
    if two.device == "cpu" and case not in ON_CPU:
        pytest.skip("only GPUs have CUDA graphs")
    plain, graphed = (two(train, way, graphs, *case[1:]) for graphs in (False, True))
    for (want, _), (got, recorded) in zip(plain, graphed, strict=True):
        assert recorded == 0
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name


def static_parameters(device: str, way: str, graphs: bool) -> list[list[bool]]:
    """Return for each graph whether each parameter is a static input of Inductor."""
    torch._dynamo.reset()
    found, original = [], compat.compile_fx_inner

    def record(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        static = compat.static_inputs(kwargs)
        found.append([i in static for i, n in enumerate(placeholders) if compat.is_primal(n)])
        return original(gm, inputs, **kwargs)

    model = WAYS[way](Decoder(dtype=torch.bfloat16).to(device), compiler(graphs))
    ids = batch(device, of_rank=True)
    compat.compile_fx_inner = record
    try:
        with compat.fresh_compilation():
            loss_of(model(ids), ids).backward()
    finally:
        compat.compile_fx_inner = original
    return found


@pytest.mark.long
def test_only_cuda_graphs_have_weights_that_move(two):
    for found in two(static_parameters, "fsdp blocks", True):
        assert [any(graph) for graph in found] == [False] * GRAPHS
    for found in two(static_parameters, "fsdp blocks", False):
        assert [any(graph) for graph in found] == [True] * GRAPHS


def test_a_graph_returns_its_inputs_themselves():
    """Results are not copies in a CUDA graph's memory, and the list of arguments is cleared."""
    weight, other = torch.ones(2), torch.zeros(2)

    def graph(arguments: list[Tensor]) -> tuple[Tensor, ...]:
        copies = [x.clone() for x in arguments]
        arguments.clear()
        return copies[0] + 1, copies[1], copies[0]

    arguments = [other, weight]
    results = pass_inputs(graph, [(1, 1)])(arguments)
    assert not arguments
    assert results[1] is weight
    assert results[2] is not other


def test_a_saved_weight_is_the_input_itself(monkeypatch):
    """The forward returns a weight and an activation, and its runtime copies inputs."""
    g = fx.Graph()
    weight, x = g.placeholder("weight"), g.placeholder("x")
    g.output((g.call_function(torch.add, (x, weight)), x, weight))
    options = {}

    def compile_with_copies(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        options.update(kwargs)
        return lambda arguments: gm(*(a.clone() for a in arguments))

    monkeypatch.setattr(compat, "input_index", lambda node: ["weight", "x"].index(node.name))
    monkeypatch.setattr(compat, "compile_fx_inner", compile_with_copies)
    graph = compile_for_moving(
        fx.GraphModule(nn.Module(), g), [], frozenset({0}), static_input_idxs=[0, 1]
    )
    inputs = [torch.ones(2), torch.zeros(2)]
    _, activation, saved = graph(list(inputs))
    assert options["static_input_idxs"] == [1]
    assert saved is inputs[0]
    assert activation is not inputs[1]


def test_models_on_one_device_have_no_moving_weights():
    found = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(moving_weights(gm, inputs))
        return gm

    torch.compile(nn.Linear(4, 4), backend=backend)(torch.ones(2, 4))
    assert found == [frozenset()]
