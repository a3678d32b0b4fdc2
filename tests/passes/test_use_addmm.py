"""The product of an adapter is added to the result of another GEMM, in place."""

from __future__ import annotations

import pytest
import torch
from helpers import relative
from kernel_helpers import both_devices
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import compilation
from fp8pass.codegen.add_product import add_product
from fp8pass.config import Config
from fp8pass.graph.nodes import aten
from fp8pass.passes import LOWERING_PASSES, Context
from fp8pass.passes.lowering.add_in_place import add_in_place
from fp8pass.passes.lowering.use_addmm import use_addmm

WIDTH, RANK = 256, 16


def operands(dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (32, 128), (128, WIDTH), (32, RANK), (RANK, WIDTH)
    return [torch.randn(*size, dtype=dtype) for size in sizes]


def rewritten(function, *args, recipe="coat") -> fx.Graph:
    """Run both passes; compare the results, and check that they do not write to the operands."""
    args = args or tuple(operands())
    gm = make_fx(function, tracing_mode="fake")(*args)
    want = gm(*args)
    ctx = Context(Config.recipe(recipe))
    use_addmm(gm, ctx)
    add_in_place(gm, ctx)
    gm.graph.lint()
    gm.recompile()
    copies = [x.clone() for x in args]
    found = gm(*copies)
    for a, b in zip(copies, args, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, want)), strict=True):
        assert relative(a, b) < 1e-12
    return gm.graph


def products(g: fx.Graph) -> int:
    return len(g.find_nodes(op="call_function", target=add_product))


ADDED = {
    "first": lambda x, w, h, b: x @ w + h @ b,
    "second": lambda x, w, h, b: h @ b + x @ w,
    "views": lambda x, w, h, b: (x @ w).view(4, 8, -1) + (h @ b).view(4, 8, -1),
    "views of views": lambda x, w, h, b: (x @ w).view(4, 8, -1)[None] + (h @ b).view(1, 4, 8, -1),
    "read twice": lambda x, w, h, b: (lambda y: (y.sin(), y.view(-1)))(x @ w + h @ b),
}
KEPT = {
    "total is read twice": lambda x, w, h, b: (lambda t: (t + h @ b, t.sin()))(x @ w),
    "product is read twice": lambda x, w, h, b: (lambda p: (x @ w + p, p.sin()))(h @ b),
    "total is an operand": lambda x, w, h, b: x @ w @ w.t() @ w + h @ b * 2,
    "both are narrow": lambda x, w, h, b: h @ b + h.cos() @ b,
    "neither is narrow": lambda x, w, h, b: x @ w + x.cos() @ w,
    "broadcast": lambda x, w, h, b: (x @ w) + (h[:1] @ b),
    "transposed": lambda x, w, h, b: (x @ w).t() + (h @ b).t(),
    "factor": lambda x, w, h, b: torch.add(x @ w, h @ b, alpha=2),
    "difference": lambda x, w, h, b: x @ w - h @ b,
}


@pytest.mark.parametrize("case", ADDED)
def test_products_are_added_in_place(case):
    g = rewritten(ADDED[case])
    assert products(g) == 1
    assert not g.find_nodes(op="call_function", target=aten.add.Tensor)


@pytest.mark.parametrize("case", KEPT)
def test_other_sums_stay(case):
    assert products(rewritten(KEPT[case])) == 0


def test_several_products_of_one_layer():
    g = rewritten(lambda x, w, h, b: x @ w + h @ b + h.sin() @ b)
    assert products(g) == 1


def test_recipe_exact_rounds_where_pytorch_does():
    assert products(rewritten(ADDED["first"], recipe="exact")) == 0


def test_a_total_that_is_an_operand_is_not_overwritten():
    """`addmm` of the user adds to an input of the graph."""
    x, _, h, b = operands()
    total = torch.randn(32, WIDTH, dtype=x.dtype)
    assert products(rewritten(lambda t, h, b: torch.addmm(t, h, b), total, h, b)) == 0


def test_a_total_of_another_shape_is_not_overwritten():
    x, w, h, b = operands()
    rewritten(lambda x, w, h, b: torch.addmm(x[:1] @ w, h, b), x, w, h, b)


def test_a_total_that_is_a_factor_is_not_overwritten():
    x = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    function = lambda x, w: (lambda t: torch.addmm(t, t, w))(x @ w)  # noqa: E731
    assert products(rewritten(function, x, x)) == 0


@pytest.mark.long
@both_devices
def test_trained_adapters(device, monkeypatch):
    """Inductor computes the same results as eager PyTorch."""
    from test_merge_adapters import Layers, train

    torch._dynamo.reset()
    found = []

    def recorded(gm, ctx):
        add_in_place(gm, ctx)
        found.append(products(gm.graph))

    changed = tuple(recorded if p is add_in_place else p for p in LOWERING_PASSES)
    monkeypatch.setattr(compilation, "LOWERING_PASSES", changed)
    model = Layers().bfloat16().to(device)
    x = torch.randn(4, 64, WIDTH, device=device, dtype=torch.bfloat16)
    want = train(model, model, x)
    # On a CPU, FP8 GEMMs are lowered to other operators.
    options = {"fp8_gemms": "all"} if device == "cuda" else {"skip": ["*"]}
    got = train(torch.compile(model, backend="fp8pass", options=options), model, x)
    # Four layers; dx of the last layer. Dx of the first three layers is one GEMM in FP8 only.
    assert found == [4, 2 if device == "cuda" else 1]
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.1
