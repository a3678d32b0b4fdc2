"""Gradients that CUDA graphs would overwrite are somewhere else before they do.

That the memory is theirs is said here by the test: `tests/whole/test_gpu.py` trains with graphs.
"""

from __future__ import annotations

import pytest
import torch
from helpers import MLP
from torch import nn

from fp8pass import compat
from fp8pass.runtime import cuda_graph_gradients as gradients
from fp8pass.runtime.cuda_graph_gradients import protect_gradients


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is known of parameters of other tests."""
    monkeypatch.setattr(gradients, "_parameters", compat.WeakIdKeyDictionary())


@pytest.fixture
def owned(monkeypatch) -> set[int]:
    """Addresses that graphs own."""
    found: set[int] = set()
    monkeypatch.setattr(compat, "find_replayed_memory", lambda device: found)
    return found


def weight(gradient: torch.Tensor | None = None) -> nn.Parameter:
    found = nn.Parameter(torch.ones(4))
    found.grad = gradient
    return found


def test_what_graphs_own_moves_and_all_else_stays(owned):
    pool = torch.arange(8.0)
    replayed, own, none = weight(pool[4:]), weight(torch.ones(4)), weight()
    owned.add(pool.data_ptr())
    before = own.grad
    program = protect_gradients(lambda *args: pool.fill_(7))
    program(replayed, torch.ones(4), own, none)
    assert replayed.grad.tolist() == [4, 5, 6, 7]
    assert own.grad is before
    assert none.grad is None


def test_the_first_graph_of_a_forward_looks_after_all(owned):
    pool = torch.arange(4.0)
    first, second = weight(), weight(pool)
    programs = [protect_gradients(lambda *args: None) for _ in range(2)]
    programs[1](second)
    owned.add(pool.data_ptr())
    programs[0](first)
    assert second.grad.data_ptr() != pool.data_ptr()
    assert second.grad.tolist() == [0, 1, 2, 3]


def test_parameters_are_let_go(owned):
    protect_gradients(lambda *args: None)(weight(torch.ones(4)))
    assert not list(gradients._parameters)


@pytest.mark.parametrize("graphs", [False, True])
def test_only_programs_with_graphs_look(graphs, monkeypatch):
    calls = []
    monkeypatch.setattr(gradients, "copy_replayed", lambda device: calls.append(1))
    options = {"compiler": "eager", "triton.cudagraphs": graphs}
    program = torch.compile(MLP((64, 64, 64)), backend="fp8pass", options=options)
    program(torch.randn(32, 64)).sum().backward()
    assert bool(calls) == graphs


def test_nothing_is_replayed_where_there_are_no_graphs():
    assert not compat.find_replayed_memory(torch.device("cpu"))
    assert not compat.find_replayed_memory(torch.device("cuda", 0))
