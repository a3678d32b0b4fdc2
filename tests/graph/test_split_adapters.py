"""Adapters of experts, multiplied with tokens instead of added to weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import relative
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.graph.split_adapters import split_adapters

TOKENS = 24


def inputs(experts: int, n: int, k: int, ranks: list[int], seed: int = 0) -> list[Tensor]:
    """Return tokens, the ends of groups, frozen weights [E, N, K], and pairs of factors."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    ends = torch.randint(0, TOKENS, (experts,), generator=generator).sort().values
    ends[-1] = TOKENS
    factors = [new(*shape) / 4 for r in ranks for shape in ((experts, n, r), (experts, r, k))]
    tensors = [new(TOKENS, k), new(experts, n, k), *factors]
    for x in (tensors[0], *factors):
        x.requires_grad_(True)
    return [tensors[0], ends.int(), *tensors[1:]]


def multiply(x: Tensor, ends: Tensor, weight: Tensor, *factors: Tensor, alpha=0.5) -> Tensor:
    for left, right in zip(factors[::2], factors[1::2], strict=True):
        weight = torch.baddbmm(weight, left, right, alpha=alpha)
    return torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def multiply_transposed(x: Tensor, ends: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """The weights are stored as [E, K, N], as in gpt-oss."""
    weight = weight.transpose(1, 2).contiguous()
    for left, right in zip(factors[::2], factors[1::2], strict=True):
        weight = torch.baddbmm(weight, right.transpose(1, 2), left.transpose(1, 2), alpha=0.5)
    return torch._grouped_mm(x, weight, offs=ends)


def exact(x: Tensor, ends: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    weight = weight.double()
    for left, right in zip(factors[::2], factors[1::2], strict=True):
        weight = weight + 0.5 * left.double() @ right.double()
    begins = [0, *ends[:-1].tolist()]
    parts = zip(begins, ends.tolist(), weight, strict=True)
    return torch.cat([x[a:b].double() @ w.T for a, b, w in parts])


def compile_split(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[str]]:
    """Return the compiled function, and a list that gets the names of its operators."""
    names: list[str] = []

    def backend(gm: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        split_adapters(gm)
        gm.graph.lint()
        for part in gm.modules():
            nodes = part.graph.nodes if isinstance(part, fx.GraphModule) else ()
            names.extend(str(n.target) for n in nodes if n.op == "call_function")
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True), names


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    trained = [x for x in tensors if x.requires_grad]
    y = function(*tensors)
    upstream = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, trained, upstream)]


@pytest.mark.parametrize("function", [multiply, multiply_transposed])
@given(
    st.integers(1, 4),
    st.sampled_from([16, 40]),
    st.sampled_from([24, 64]),
    st.lists(st.sampled_from([8, 16]), min_size=1, max_size=2),
    st.integers(0, 100),
)
def test_results_and_gradients_are_those_of_the_sum(function, experts, n, k, ranks, seed):
    tensors = inputs(experts, n, k, ranks, seed)
    compiled, names = compile_split(function)
    for got, want in zip(gradients(compiled, tensors), gradients(exact, tensors), strict=True):
        assert relative(got, want) < 0.02
    assert not any("baddbmm" in name for name in names)
    assert sum("grouped_mm" in name for name in names) == 1 + 2 * len(ranks)


def returns_the_weight(x, ends, weight, left, right):
    weight = torch.baddbmm(weight, left, right)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends) * weight.mean()


def scales_the_weight(x, ends, weight, left, right):
    weight = torch.baddbmm(weight, left, right, beta=0.5)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def broadcasts_the_weight(x, ends, weight, left, right):
    weight = torch.baddbmm(weight[:1], left, right)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def sums_without_gradients(x, ends, weight, left, right):
    with torch.no_grad():
        weight = torch.baddbmm(weight, left, right)
    return (
        torch._grouped_mm(x, weight.transpose(1, 2), offs=ends) + 0 * left.sum() + 0 * right.sum()
    )


def sums_in_fp32_weights(x, ends, weight, left, right):
    with torch.autocast("cpu", torch.bfloat16):
        weight = torch.baddbmm(weight.float(), left, right)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def writes_to_the_weight(x, ends, weight, left, right):
    weight = weight * 1
    adapted = torch.baddbmm(weight, left, right)
    weight.mul_(0)
    return torch._grouped_mm(x, adapted.transpose(1, 2), offs=ends)


def writes_by_an_argument(x, ends, weight, left, right):
    weight = weight * 1
    adapted = torch.baddbmm(weight, left, right)
    torch.nn.functional.relu(weight, inplace=True)
    return torch._grouped_mm(x, adapted.transpose(1, 2), offs=ends)


@torch.library.custom_op("fp8pass_tests::set_to_zero", mutates_args=("x",))
def set_to_zero(x: Tensor) -> None:
    x.zero_()


def writes_by_a_custom_operator(x, ends, weight, left, right):
    weight = weight * 1
    adapted = torch.baddbmm(weight, left, right)
    set_to_zero(weight)
    return torch._grouped_mm(x, adapted.transpose(1, 2), offs=ends)


OTHERS = [
    *(writes_by_an_argument, writes_by_a_custom_operator),
    *(returns_the_weight, scales_the_weight, broadcasts_the_weight, sums_without_gradients),
    *(sums_in_fp32_weights, writes_to_the_weight),
]


@pytest.mark.parametrize(("function", "rank"), [(multiply, 4), *((f, 8) for f in OTHERS)])
def test_other_sums_stay(function, rank):
    tensors = inputs(2, 16, 24, [rank])
    compiled, names = compile_split(function)
    for got, want in zip(gradients(compiled, tensors), gradients(function, tensors), strict=True):
        assert torch.equal(got, want)
    assert sum("baddbmm" in name for name in names) == 1


def test_sums_in_checkpointed_regions_are_split():
    """Dynamo's graph has such a region as a subgraph."""

    def function(*tensors: Tensor) -> Tensor:
        return checkpoint(multiply, *tensors, use_reentrant=False)

    tensors = inputs(2, 16, 24, [8])
    compiled, names = compile_split(function)
    for got, want in zip(gradients(compiled, tensors), gradients(exact, tensors), strict=True):
        assert relative(got, want) < 0.02
    assert sum("grouped_mm" in name for name in names) == 3


def test_recipe_exact_keeps_the_order_of_sums():
    tensors = inputs(2, 16, 24, [8])
    options = {"recipe": "exact", "compiler": "eager"}
    torch._dynamo.reset()
    compiled = torch.compile(multiply, backend="fp8pass", options=options)
    for got, want in zip(gradients(compiled, tensors), gradients(multiply, tensors), strict=True):
        assert torch.equal(got, want)


class LargeResults(TorchDispatchMode):
    """Lists the grouped GEMMs whose results are as large as the weights of all experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "mm" in str(func) and isinstance(result, Tensor) and result.numel() == self.size:
            self.found.append(str(func))
        return result


class Experts(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, ends: Tensor, *factors: Tensor) -> Tensor:
        return multiply(x, ends, self.weight, *factors)


def test_no_gemm_computes_a_matrix_of_the_size_of_quantized_experts():
    tensors = inputs(4, 128, 256, [16])
    module = fp8pass.quantize_frozen(Experts(tensors[2]))
    config = fp8pass.Config(fp8_gemms="all", compiler="eager")
    torch._dynamo.reset()
    program = torch.compile(module, backend=fp8pass.backend(config))
    found = gradients(program, [*tensors[:2], *tensors[3:]])
    for got, want in zip(found, gradients(exact, tensors), strict=True):
        assert relative(got, want) < 0.1
    # Dynamo does not run compiled forwards under a dispatch mode.
    results = program(*tensors[:2], *tensors[3:]), multiply(*tensors)
    lists = []
    for y in results:
        with LargeResults(tensors[2].numel()) as large:
            y.square().mean().backward()
        lists.append(large.found)
    assert [len(found) for found in lists] == [0, 1]
