"""Regions of `torch.compiler.nested_compile_region`, and other operators that call graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_

import fp8pass
from fp8pass import Config

EAGER = {"compiler": "eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks that share the graph of a region, or are called directly."""

    def __init__(self, call=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


@torch.compiler.nested_compile_region
def region(block, x):
    return block(x)


@torch.compiler.nested_compile_region
def region_around_a_region(block, x):
    return region(block, 0.5 * x) + x


def without_a_region(block, x):
    return block(0.5 * x) + x


def data(requires_grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 64, generator=generator).requires_grad_(requires_grad)


def gradients(model: nn.Module, **options) -> list[torch.Tensor]:
    torch._dynamo.reset()
    run = torch.compile(model, backend="fp8pass", options=EAGER | options)
    run(data()).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.long
@pytest.mark.parametrize("options", [{"recipe": "agoq"}, {"memory_budget": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("call", "plain"), [(region, None), (region_around_a_region, without_a_region)]
)
def test_a_region_has_the_gradients_of_a_plain_call(call, plain, options):
    for ours, want in zip(
        gradients(Blocks(call), **options), gradients(Blocks(plain), **options), strict=True
    ):
        assert torch.equal(ours, want)


def explained(model: nn.Module, **options) -> fp8pass.Explanation:
    torch._dynamo.reset()
    return fp8pass.explain(model, data(), config=Config.recipe("coat", **options))


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"skip": ("blocks.1.up", "blocks.2")}, {"keep_exact": ("blocks.1",)}], ids=str
)
def test_every_block_of_a_region_has_its_own_layers_and_patterns(options):
    with_region, without = explained(Blocks(region), **options), explained(Blocks(), **options)
    (ours,), (want,) = with_region.graphs, without.graphs
    assert [x.module for x in ours.plan.linears] == [x.module for x in want.plan.linears]
    assert [x.fp8 for x in ours.plan.linears] == [x.fp8 for x in want.plan.linears]
    assert ours.plan.saved_bytes == want.plan.saved_bytes
    assert with_region.saved_bytes == without.saved_bytes
    assert len({x.module for x in ours.plan.linears}) == 6


class Pairs(nn.Module):
    """A region of a shared module and a block, with blocks at different paths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(64, 64)
        self.encoder, self.decoder = Block(), nn.ModuleDict({"last": Block()})

    @torch.compiler.nested_compile_region
    def pair(self, block, x):
        return block(torch.nn.functional.gelu(self.shared(x)))

    def forward(self, x):
        return self.pair(self.decoder["last"], self.pair(self.encoder, x))


@pytest.mark.long
def test_modules_at_different_paths_keep_their_names():
    (compiled,) = explained(Pairs()).graphs
    found = sorted(x.module for x in compiled.plan.linears)
    blocks = [f"{name}.{layer}" for name in ("decoder.last", "encoder") for layer in ("down", "up")]
    assert found == [*blocks, "shared", "shared"]


def test_a_region_runs_without_gradients():
    model = Blocks(region)
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(model, backend="fp8pass", options=EAGER)
        got = run(data(requires_grad=False))
    torch._dynamo.reset()
    plain = Blocks()
    with torch.no_grad():
        want = torch.compile(plain, backend="fp8pass", options=EAGER)(data(requires_grad=False))
    assert torch.equal(got, want)


# --- graphs that operators call -----------------------------------------------------------------


class Calls(nn.Module):
    """Two blocks in graphs that an operator calls, and one outside of them."""

    def __init__(self, call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = Block(), Block(), Block()
        self.call = call

    def forward(self, x):
        return self.last(self.call(self, x))


def by_cond(model, x):
    return torch.cond(x.sum() > 0, lambda y: model.first(y), lambda y: model.second(y), (x,))


def by_while_loop(model, x):
    def body(i, y):
        return i + 1, model.second(model.first(y))

    with torch.no_grad():
        _, y = while_loop(lambda i, _: i < 2, body, (torch.tensor(0), x.detach()))
    return x + y


def by_map(model, x):
    return map_(lambda y: model.second(model.first(y)), x.unflatten(0, (2, 16))).flatten(0, 1)


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("call", [by_cond, by_while_loop, by_map])
def test_layers_in_called_graphs_are_listed_with_a_reason(call):
    (compiled,) = explained(Calls(call)).graphs
    linears = compiled.plan.linears
    assert [x.module for x in linears if x.fp8] == ["last.up", "last.down"]
    left = [x for x in linears if not x.fp8]
    assert len(left) == 4
    assert all("in a subgraph of" in x.reason for x in left)
    assert {(x.in_features, x.out_features) for x in left} == {(64, 128), (128, 64)}


@pytest.mark.filterwarnings("error:.*skip pattern")
@pytest.mark.parametrize("name", ["first", "second"])
def test_layers_in_called_graphs_can_be_skipped(name):
    (compiled,) = explained(Calls(by_cond), skip=(f"{name}.*",)).graphs
    skipped = [x.module for x in compiled.plan.linears if "skip" in x.reason]
    assert skipped == [f"{name}.up", f"{name}.down"]


@pytest.mark.long
@pytest.mark.parametrize("call", [by_cond, by_map])
def test_called_graphs_train(call):
    """The bound covers the rounding of the layers outside of the graphs."""
    ours = gradients(Calls(call))
    want = gradients(Calls(call), recipe="exact")
    compared = [(a, b) for a, b in zip(ours, want, strict=True) if b is not None]
    assert len(compared) >= 12
    assert all((a - b).norm() <= 0.2 * b.norm() for a, b in compared)
