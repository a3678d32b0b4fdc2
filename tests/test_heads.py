"""Rotary embeddings in tile kernels: what is read out of heads, and that nothing changes by it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import benchmark_models, llama, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    AMAX,
    CODES,
    assert_same,
    both_devices,
    operands,
    rotary,
    run,
    run_batch,
)
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import hardware
from fp8pass.codegen import tile_kernel
from fp8pass.codegen.batch import Batch
from fp8pass.codegen.buffers import buffer
from fp8pass.codegen.fuse_tiles import fuse_tiles
from fp8pass.codegen.program import Load, Program, Step, reference
from fp8pass.codegen.reader import sort_topologically
from fp8pass.codegen.simplify import simplify
from fp8pass.codegen.tile_kernel import tiles

aten, fp8 = torch.ops.aten, torch.ops.fp8pass
BATCH, HEADS, SEQ, HEAD = 2, 3, 8, 16
MOVES = {aten.cat.default, aten.slice.Tensor, aten.slice_scatter.default}


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)


# --- programs -----------------------------------------------------------------------------------


@both_devices
@pytest.mark.parametrize("store", [CODES, AMAX], ids=["codes", "amax"])
@settings(max_examples=12)
@given(
    rows=st.integers(1, 70),
    size=st.sampled_from([(16, 1), (16, 3), (48, 3), (64, 2), (128, 5), (256, 2)]),
    period=st.sampled_from([0, 1, 16, 37]),
)
def test_kernels(device, store, rows, size, period):
    """Heads of which a tile holds several, or one, or that lie in several, or are cut by them."""
    head, heads = size
    program = rotary(head, period, store)
    inputs = operands(program, rows, heads * head, device)
    for got, want in zip(
        run(tile_kernel, program, inputs), reference(program, inputs), strict=True
    ):
        if store is AMAX:  # of other tiles
            got, want = got.amax(), want.amax()
        assert_same(got, want, exact=False)


@both_devices
def test_what_is_not_finite_stays_in_its_place(device):
    """What is not a number may be in the half that is not chosen."""
    program = rotary(16, 0, CODES)
    inputs = operands(program, 40, 64, device)
    inputs[3][3, 5], inputs[3][4, 20], inputs[3][5] = math.nan, math.nan, 0.0
    (got, turned), want = run(tile_kernel, program, inputs), reference(program, inputs)
    assert_same(got, want[0], exact=False)
    assert_same(turned, want[1], exact=False)
    assert got.double().isnan().nonzero().tolist() == [[3, 5], [3, 13], [4, 20], [4, 28]]


def test_two_spellings_are_one():
    """Zero where it is not, and then added, is put together."""
    apart = simplify(rotary(16, 8, CODES, scattered=True))
    assert [s.target for s in apart.steps].count("aten.where.self") == 1
    inputs = operands(apart, 24, 48, "cpu")
    together = reference(rotary(16, 8, CODES), inputs)
    for got, want in zip(reference(apart, inputs), together, strict=True):
        assert torch.equal(got.double(), want.double())


@pytest.mark.parametrize("change", ["head", "gap", "fill"])
def test_other_sums_stay(change):
    """Of columns that overlap, or lie in other heads, or that have something else beside."""
    program = rotary(16, 8, CODES, scattered=True)
    changed = {
        "head": Step("high", "in_head", ("m", 8, 0, 4, 8)),
        "gap": Step("high", "in_head", ("m", 16, 0, 9, 16)),
        "fill": Step("right", "aten.where.self", ("high", "n", 1.0)),
    }[change]
    steps = tuple(changed if step.name == changed.name else step for step in program.steps)
    program = Program(program.loads, steps, program.stores)
    assert simplify(program).steps == program.steps


# --- graphs -------------------------------------------------------------------------------------


def quantized(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    codes = fp8.quantize(x, scale, "e4m3")
    return codes.view(torch.uint8), fp8.transpose(codes).view(torch.uint8), fp8.amax(x)


def fused(function: Callable, args: tuple) -> fx.GraphModule:
    """The graph of a function with tile kernels."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    assert fuse_tiles(gm)
    sort_topologically(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return gm


def batches(g: fx.Graph) -> list[Batch]:
    return [Batch.parse(n.args[1]) for n in g.nodes if n.target is tiles]


def tables_read(g: fx.Graph) -> list[Load]:
    programs = [program for batch in batches(g) for program in batch.programs]
    return [load for program in programs for load in program.loads if load.operand == "table"]


def launched(gm: fx.GraphModule, args: tuple) -> tuple[Tensor, ...]:
    """The results of a graph whose tile kernels run in Triton."""

    class Launcher(fx.Interpreter):
        def call_function(self, target, operands, options):
            if target is not tiles:
                return super().call_function(target, operands, options)
            inputs = [x.contiguous() for x in operands[0]]
            return run_batch(tile_kernel, Batch.parse(operands[1]), inputs)

    return Launcher(gm).run(*args)


def assert_as_before(gm: fx.GraphModule, function: Callable, args: tuple) -> None:
    """The graph's results are the function's, by its references and by interpreted kernels."""
    want = function(*args)
    for got in (gm(*args), *([] if torch.cuda.is_available() else [launched(gm, args)])):
        for a, b in zip(got, want, strict=True):
            if a.dtype == torch.uint8:  # zeros may have signs
                a, b = (x.view(torch.float8_e4m3fn).double() for x in (a, b))
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def in_heads(order: tuple[int, ...] = (0, 2, 1, 3), seed: int = 0) -> Tensor:
    """Random [B, H, S, D], in memory as `order` says."""
    sizes = BATCH, HEADS, SEQ, HEAD
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn([sizes[i] for i in order], generator=generator)
    return x.permute([order.index(i) for i in range(4)])


def columns(x: Tensor) -> Tensor:
    """[B, H, S, D] as a matrix."""
    return x.permute(0, 2, 1, 3).reshape(BATCH * SEQ, HEADS * HEAD)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    m = x * table
    return torch.cat([m[..., HEAD // 2 :], -m[..., : HEAD // 2]], -1)


def scattered(x: Tensor, table: Tensor) -> Tensor:
    m, zeros = x * table, torch.full(x.shape, 0.0)
    right = aten.slice_scatter(zeros, -m[..., : HEAD // 2], 3, HEAD // 2, sys.maxsize)
    return aten.slice_scatter(zeros, m[..., HEAD // 2 :], 3, 0, HEAD // 2) + right


def interleaved(x: Tensor, table: Tensor) -> Tensor:
    """Quarters of a head, moved around, into what else is there."""
    moved = torch.cat([x[..., 12:], -x[..., :4], x[..., 4:12]], dim=3)
    return aten.slice_scatter(moved * table, x[..., 4:8] * 2.0, -1, 8, 12)


def transposed(x: Tensor, table: Tensor) -> Tensor:
    """Columns elsewhere than last."""
    turned = x.permute(0, 1, 3, 2)
    moved = torch.cat([turned[:, :, 4:], turned[:, :, :4]], dim=2)
    return moved.permute(0, 1, 3, 2) + table


def expanded(x: Tensor, table: Tensor) -> Tensor:
    return x * (table.expand(x.shape) if table.ndim else table)


OPERATORS = [rotated, scattered, interleaved, transposed, expanded, torch.add]
TABLES = [(SEQ, HEAD), (1, 1, SEQ, HEAD), (BATCH, 1, SEQ, HEAD), (HEAD,), ()]


@given(
    operators=st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=4),
    shapes=st.lists(st.sampled_from(TABLES), min_size=4, max_size=4),
    order=st.sampled_from([(0, 2, 1, 3), (0, 2, 1, 3), (0, 1, 2, 3), (3, 0, 1, 2)]),
)
def test_what_moves_columns_is_read(operators, shapes, order):
    """Random operators on heads: of those in order nothing is left, and results are the same."""
    tables = [torch.randn(shape) for shape in shapes]

    def function(x, scale, *tables):
        y = x
        for operator, table in zip(operators, tables, strict=False):
            y = operator(y, table)
        return quantized(columns(y + x), scale)

    args = in_heads(order), torch.tensor(0.02), *tables
    gm = fused(function, args)
    in_order = order == (0, 2, 1, 3)
    if in_order and any(table.ndim for table, _ in zip(tables, operators, strict=False)):
        assert not MOVES & {n.target for n in gm.graph.nodes}
        assert tables_read(gm.graph)
    assert_as_before(gm, function, args)


def narrow(x: Tensor, table: Tensor) -> Tensor:
    """A rotary embedding of the first half of a head, whose tables are narrower than it."""
    half = x[..., : HEAD // 2]
    return torch.cat([half * table[..., : HEAD // 2], x[..., HEAD // 2 :]], -1)


def by_row(x: Tensor, table: Tensor) -> Tensor:
    """Scaled by row, while rows are the last dimension."""
    return (x.permute(0, 1, 3, 2) * table[:, 0]).permute(0, 1, 3, 2)


UNREAD: dict[str, Callable] = {
    "a narrower table": narrow,
    "a table of each head": lambda x, table: x * torch.ones(HEADS, 1, HEAD),
    "a table of each sequence": lambda x, table: x * torch.ones(BATCH, 1, 1, HEAD),
    "a norm of heads": lambda x, table: x * table * x.square().mean(-1, keepdim=True),
    "one column for all": lambda x, table: x[..., :1] * x * table,
    "no quarters of a head": lambda x, table: torch.cat([x[..., 5:], x[..., :5]], -1) + table,
    "every other column": lambda x, table: torch.cat([x[..., ::2], x[..., 1::2]], -1),
    "other rows": lambda x, table: torch.cat([x[:, :, 1:], x[:, :, :1]], 2),
    "more columns than a head": lambda x, table: torch.cat([x, -x], -1)[..., HEAD:] * table,
    "numbers cut off": lambda x, table: x.to(torch.int32) * table,
    "a factor of each row": by_row,
    "filled with what is not a number": lambda x, table: aten.slice_scatter(
        torch.full(x.shape, math.nan), x[..., :8] * table[..., :8], 3, 0, 8
    ),
    "a value that is not stored": lambda x, table: torch.special.erfcx(x) * table,
    "nothing but the order": lambda x, table: x,
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_left_to_generated_code(case):
    def function(x, scale, table):
        return quantized(columns(UNREAD[case](x, table)), scale)

    args = in_heads(), torch.tensor(0.02), torch.randn(SEQ, HEAD)
    gm = fused(function, args)
    assert not tables_read(gm.graph)
    assert sum(n.target is buffer for n in gm.graph.nodes) <= 1
    assert_as_before(gm, function, args)


def test_what_is_read_in_two_orders_is_not_read():
    """A sum may be stored in any order: here in two, with as many rows of a sequence as heads."""

    def function(z, scale, table):
        x = z.sum(0)
        y = (x + x.permute(0, 2, 1, 3)) * table
        return quantized(y.permute(0, 2, 1, 3).reshape(BATCH * SEQ, SEQ * HEAD), scale)

    args = torch.randn(2, BATCH, SEQ, SEQ, HEAD), torch.tensor(0.02), torch.randn(SEQ, HEAD)
    gm = fused(function, args)
    assert not tables_read(gm.graph)
    assert_as_before(gm, function, args)


def test_heads_of_two_sizes():
    """In one matrix: a kernel cuts heads of one size."""

    def function(x, y, scale, table):
        halves = y.view(BATCH, SEQ, 2 * HEADS, HEAD // 2).permute(0, 2, 1, 3)
        turned = torch.cat([halves[..., 4:], halves[..., :4]], -1) * table[:, : HEAD // 2]
        flat = turned.permute(0, 2, 1, 3).reshape(BATCH * SEQ, HEADS * HEAD)
        return quantized(columns(rotated(x, table)) + flat, scale)

    y = torch.randn(BATCH, SEQ, HEADS * HEAD)
    args = in_heads(), y, torch.tensor(0.02), torch.randn(SEQ, HEAD)
    gm = fused(function, args)
    assert len({load.head for load in tables_read(gm.graph)}) == 1
    assert_as_before(gm, function, args)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)])
def test_only_heads_in_the_order_of_the_matrix_are_read(order):
    """Others would be copied into it first; to rotate them meanwhile costs less."""

    def function(x, weight, scale, table):
        y = (x @ weight).view([(BATCH, HEADS, SEQ, HEAD)[dim] for dim in order])
        y = y.permute([order.index(dim) for dim in range(4)])
        return quantized(columns(rotated(y, table)), scale)

    x, weight = torch.randn(BATCH * HEADS * SEQ, 16), torch.randn(16, HEAD)
    args = x, weight, torch.tensor(0.02), torch.randn(SEQ, HEAD)
    gm = fused(function, args)
    assert bool(tables_read(gm.graph)) == (order == (0, 2, 1, 3))
    assert_as_before(gm, function, args)


@pytest.mark.parametrize("shape", [(1, HEADS, HEAD), (BATCH, 1, HEADS, HEAD)])
def test_less_than_a_matrix_is_not_taken_for_one(shape):
    """Weights of each head, for all rows or some."""

    def function(x, w, scale):
        flat = (w * 2).reshape(*shape[:-2], HEADS * HEAD)
        return quantized((x + flat).reshape(BATCH * SEQ, HEADS * HEAD), scale)

    args = torch.randn(BATCH, SEQ, HEADS * HEAD), torch.randn(shape), torch.tensor(0.02)
    gm = fused(function, args)
    assert_as_before(gm, function, args)


def test_matrices_of_one_kernel_read_alike():
    """Two that read the same heads, rotated and not."""

    def function(x, scale, table):
        a = quantized(columns(rotated(x, table) + x), scale)
        return *a, *quantized(columns(x * table), scale)

    args = in_heads(), torch.tensor(0.02), torch.randn(SEQ, HEAD)
    gm = fused(function, args)
    assert max(len(p.stores) for batch in batches(gm.graph) for p in batch.programs) == 2
    assert_as_before(gm, function, args)


# --- models -------------------------------------------------------------------------------------


def moves_of_gradients(g: fx.Graph) -> list[fx.Node]:
    """What moves columns of four-dimensional values, as generated code would."""
    return [n for n in g.nodes if n.target in MOVES and n.meta["val"].ndim == 4]


class Layer(nn.Module):
    """A decoder layer of the benchmarks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        models = benchmark_models()
        self.layer = models.DecoderLayer(64, 2, 128).to(device)
        self.tables = models.rope_tables(16, 32, torch.device(device))

    def forward(self, x):
        return self.layer(x, *self.tables)


@both_devices
def test_a_decoder_layer_stores_no_rotated_gradients(device, graphs):
    x = torch.randn(2, 16, 64, device=device).bfloat16().requires_grad_()
    layer = Layer(device).bfloat16()
    torch.compile(layer, backend="fp8pass")(x).sum().backward()
    assert not moves_of_gradients(graphs[-1])
    assert len(tables_read(graphs[-1])) == 8  # two of each of q and k, for amax and for codes


@pytest.mark.parametrize(("batch", "count"), [(1, 8), (2, 0)])
def test_lengths_that_vary(batch, count, graphs):
    """A table that is shorter than the matrix repeats after a length that a kernel is not told."""
    models = benchmark_models()
    layer = models.DecoderLayer(64, 2, 128).bfloat16()
    x = torch.randn(batch, 16, 64).bfloat16().requires_grad_()
    tables = models.rope_tables(16, 32, torch.device("cpu"))
    for tensor, dim in ((x, 1), (tables[0], 0), (tables[1], 0)):
        torch._dynamo.mark_dynamic(tensor, dim)
    torch.compile(layer, backend="fp8pass")(x, *tables).sum().backward()
    assert len(tables_read(graphs[-1])) == count
    assert x.grad.isfinite().all()


@both_devices
def test_a_hugging_face_llama_stores_no_rotated_gradients(device, graphs):
    model, ids = llama().bfloat16().to(device), tokens().to(device)
    torch.compile(model, backend="fp8pass")(input_ids=ids, labels=ids).loss.backward()
    assert not moves_of_gradients(graphs[-1])
    assert len(tables_read(graphs[-1])) == 8 * len(model.model.layers)


@both_devices
def test_the_kernels_of_a_graph(device):
    """As launched on a GPU, with what the graph hands them."""

    def function(x, scale, table):
        return quantized(columns(rotated(x, table) + x * table), scale)

    args = in_heads(), torch.tensor(0.02), torch.randn(1, 1, SEQ, HEAD)
    gm = fused(function, args)
    assert tables_read(gm.graph)
    got, want = launched(gm, tuple(x.to(device) for x in args)), gm(*args)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert_same(*(x.cpu().view(torch.float8_e4m3fn) for x in (a, b)), exact=False)
    torch.testing.assert_close(got[2].cpu(), want[2])
