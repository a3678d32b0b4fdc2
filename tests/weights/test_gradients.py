"""Gradients in the memory of CUDA graphs are copied before a replay overwrites them.

These tests name that memory themselves; `tests/whole/test_gpu.py` trains with CUDA graphs.
"""

from __future__ import annotations

import pytest
import torch
from helpers import MLP
from torch import nn

from fp8pass import compat
from fp8pass.runtime import cuda_graphs as gradients
from fp8pass.runtime.cuda_graphs import protect_gradients


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget the parameters of other tests."""
    monkeypatch.setattr(gradients, "_parameters", compat.WeakIdKeyDictionary())


@pytest.fixture
def owned(monkeypatch) -> set[int]:
    """Addresses of memory that CUDA graphs own."""
    found: set[int] = set()
    monkeypatch.setattr(compat, "find_replayed_memory", lambda device: found)
    return found


def weight(gradient: torch.Tensor | None = None) -> nn.Parameter:
    found = nn.Parameter(torch.ones(4))
    found.grad = gradient
    return found


def test_only_gradients_of_cuda_graphs_are_copied(owned):
    pool = torch.arange(8.0)
    replayed, own, none = weight(pool[4:]), weight(torch.ones(4)), weight()
    owned.add(pool.data_ptr())
    before = own.grad
    program = protect_gradients(lambda *args: pool.fill_(7))
    program(replayed, torch.ones(4), own, none)
    assert replayed.grad.tolist() == [4, 5, 6, 7]
    assert own.grad is before
    assert none.grad is None


def test_the_first_graph_of_a_forward_protects_all_gradients(owned):
    pool = torch.arange(4.0)
    first, second = weight(), weight(pool)
    programs = [protect_gradients(lambda *args: None) for _ in range(2)]
    programs[1](second)
    owned.add(pool.data_ptr())
    programs[0](first)
    assert second.grad.data_ptr() != pool.data_ptr()
    assert second.grad.tolist() == [0, 1, 2, 3]


def test_parameters_can_be_freed(owned):
    protect_gradients(lambda *args: None)(weight(torch.ones(4)))
    assert not list(gradients._parameters)


@pytest.mark.parametrize("graphs", [False, True])
def test_only_programs_with_cuda_graphs_are_protected(graphs, monkeypatch):
    calls = []
    monkeypatch.setattr(gradients, "copy_replayed", lambda device: calls.append(1))
    options = {"compiler": "eager", "triton.cudagraphs": graphs}
    program = torch.compile(MLP((64, 64, 64)), backend="fp8pass", options=options)
    program(torch.randn(32, 64)).sum().backward()
    assert bool(calls) == graphs


def test_there_is_no_replayed_memory_without_cuda_graphs():
    assert not compat.find_replayed_memory(torch.device("cpu"))
    assert not compat.find_replayed_memory(torch.device("cuda", 0))
