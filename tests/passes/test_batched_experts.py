"""Batched GEMMs of parameters run in FP8 as experts with equally many tokens each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import (
    COAT_EAGER,
    EXACT_EAGER,
    JointGraph,
    assert_same_step,
    capture_joint,
    compiled,
    kept_tensors,
    pad_gemms,
    planned_tensors,
    relative,
    step,
    stock_eager,
)
from monitor_helpers import monitored
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fp8pass import Monitor, diagnose, explain, graph
from fp8pass.config import Config
from fp8pass.graph.classify import BATCHED
from fp8pass.graph.nodes import aten, prims
from fp8pass.passes.quantize_experts import _shared_matrix, quantize_experts
from fp8pass.passes.quantize_linears import quantize_linears
from fp8pass.plan import Linear

fp8 = torch.ops.fp8pass
ALL = ("forward", "dgrad", "wgrad")
E, T, K, N = 4, 24, 32, 48
# Two operands of 2.6% each, and a result that is rounded to BF16.
FP8_ERROR = 0.045


@dataclass(frozen=True)
class Spelling:
    """A way to write products of experts: a function of a weight and tokens, and their shapes."""

    function: Callable[..., Tensor]
    weight: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: int = E * T


SPELLINGS = {
    "bmm": Spelling(lambda w, x: torch.bmm(x, w), (E, K, N), (E, T, K)),
    "matmul": Spelling(lambda w, x: x @ w, (E, K, N), (E, T, K)),
    "transposed": Spelling(lambda w, x: x @ w.mT, (E, N, K), (E, T, K)),
    "in front": Spelling(lambda w, x: w @ x, (E, N, K), (E, K, T)),
    "in front, transposed": Spelling(lambda w, x: (w.mT @ x.mT).mT, (E, K, N), (E, T, K)),
    "einsum": Spelling(lambda w, x: torch.einsum("etk,ekn->etn", x, w), (E, K, N), (E, T, K)),
    "einsum, transposed": Spelling(
        lambda w, x: torch.einsum("etk,enk->etn", x, w), (E, N, K), (E, T, K)
    ),
    "tokens first": Spelling(
        lambda w, x: torch.einsum("tek,ekn->ten", x, w), (E, K, N), (T, E, K)
    ),
    "capacity": Spelling(
        lambda w, x: torch.einsum("beck,ekn->becn", x, w), (E, K, N), (2, E, T, K), 2 * E * T
    ),
    "cast": Spelling(lambda w, x: torch.bmm(x.half(), w.half()).float(), (E, K, N), (E, T, K)),
    "expanded": Spelling(lambda w, x: torch.bmm(x.expand(E, -1, -1), w), (E, K, N), (T, K)),
    "repeated": Spelling(
        lambda w, x: torch.bmm(x.repeat(E, 1).view(E, -1, K), w), (E, K, N), (T, K)
    ),
    "gradient expanded": Spelling(lambda w, x: torch.bmm(x, w).sum(0), (E, K, N), (E, T, K)),
    "odd number of tokens": Spelling(
        lambda w, x: torch.bmm(x, w), (E, K, N), (E, 7, K), 7 * E
    ),
    "groups of a matrix": Spelling(
        lambda w, x: torch.bmm(x, w.view(E, N, K).mT), (E * N, K), (E, T, K)
    ),
}  # fmt: skip


class Batched(nn.Module):
    """Experts written in one of these ways, behind an operator."""

    def __init__(self, spelling: Spelling, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = spelling.function
        self.weight = nn.Parameter((torch.randn(spelling.weight) / K**0.5).to(dtype))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.function(self.weight, x.sin(), *others)


class Experts(nn.Module):
    """SwiGLU as Llama 4 writes it, without chunks: of all tokens in each expert."""

    def __init__(self, experts: int = 4, hidden: int = 32, ffn: int = 64) -> None:
        super().__init__()
        torch.manual_seed(experts)
        for name, sizes in {
            "gate": (hidden, ffn),
            "up": (hidden, ffn),
            "down": (ffn, hidden),
        }.items():
            weight = torch.randn(experts, *sizes) / sizes[0] ** 0.5
            setattr(self, name, nn.Parameter(weight.bfloat16()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def rewritten(model: nn.Module, *args: Tensor, config: Config = COAT_EAGER) -> JointGraph:
    """The joint graph after the passes that quantize layers."""
    joint = capture_joint(model, *args, config=config)
    quantize_linears(joint.gm, joint.ctx)
    quantize_experts(joint.gm, joint.ctx)
    joint.gm.graph.eliminate_dead_code()
    joint.gm.graph.lint()
    return joint


def only_layer(
    function: Callable[..., Tensor], weight: tuple[int, ...], *args: Tensor, **options: Any
) -> Linear:
    """The only layer of a function of a weight and `args`; batched GEMMs are left or gone."""
    model = Batched(Spelling(function, weight, ()), options.pop("dtype", torch.bfloat16))
    joint = rewritten(model, *args, **options)
    (layer,) = joint.ctx.plan.linears
    assert bool(layer.fp8) == (not layer.reason)
    left = any(n.target in BATCHED for n in joint.gm.graph.nodes)
    assert left == bool(layer.reason)
    return layer


def assert_close(model: nn.Module, got: Any, batch: tuple[Tensor, ...], error: float) -> None:
    """A step against one in FP64."""
    twin = copy.deepcopy(model).double()
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in batch]
    want = step(twin, twin, inputs)
    assert relative(got.outputs[0], want.outputs[0]) < error
    for name, gradient in want.gradients.items():
        if gradient is not None:
            assert relative(got.gradients[name], gradient) < error, name


# --- what runs in FP8 ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_gemms_of_every_spelling(name):
    spelling = SPELLINGS[name]
    model, x = Batched(spelling), tokens(*spelling.tokens)
    program, spy = compiled(model)
    got = step(program, model, (x,))
    (layer,) = spy.plan.linears
    assert (layer.fp8, layer.reason, layer.experts) == (ALL, "", E)
    assert (layer.in_features, layer.out_features, layer.rows) == (K, N, str(spelling.rows))
    assert layer.weights == E * K * N
    assert_close(model, got, (x,), FP8_ERROR)


@pytest.mark.parametrize(
    ("equation", "shape"), [("tk,ekn->ten", (T, K)), ("bsk,ekn->bsen", (2, T, K))]
)
def test_all_experts_of_all_tokens_are_one_linear_layer(equation, shape):
    """As `einsum` writes them: a batch of one matrix, beside which there is no other."""
    spelling = Spelling(lambda w, x: torch.einsum(equation, x, w), (E, K, N), shape)
    model, x = Batched(spelling), tokens(*shape)
    assert rewritten(model, x).calls(fp8.scaled_mm.default)
    program, spy = compiled(model)
    got = step(program, model, (x,))
    (layer,) = spy.plan.linears
    rows = str(x.numel() // K)
    assert (layer.fp8, layer.experts, layer.rows) == (ALL, 0, rows)
    assert (layer.in_features, layer.out_features) == (K, E * N)
    assert_close(model, got, (x,), FP8_ERROR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    spelling = SPELLINGS["bmm"]
    model, x = Batched(spelling, dtype), tokens(E, T, K, dtype=dtype)
    got = step(compiled(model)[0], model, (x,))
    assert got.outputs[0].dtype is got.gradients["weight"].dtype is dtype
    assert_close(model, got, (x,), FP8_ERROR)


def test_autocast():
    model, x = Batched(SPELLINGS["bmm"], torch.float32), tokens(E, T, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        program, spy = compiled(model)
        program(x).sum().backward()
    assert spy.plan.linears[0].fp8 == ALL


@pytest.mark.parametrize("in_front", [False, True])
def test_biased(in_front):
    if in_front:
        function = lambda w, x, b: torch.baddbmm(b.mT, w.mT, x.mT).mT  # noqa: E731
    else:
        function = lambda w, x, b: torch.baddbmm(b, x, w)  # noqa: E731
    model = Batched(Spelling(function, (E, K, N), ()))
    batch = tokens(E, T, K), tokens(E, 1, N)
    program, spy = compiled(model)
    got = step(program, model, batch)
    assert spy.plan.linears[0].fp8 == ALL
    assert_close(model, got, batch, FP8_ERROR)


@pytest.mark.parametrize("name", ["bmm", "in front", "expanded", "repeated"])
def test_one_graph_for_any_number_of_tokens(name):
    spelling = SPELLINGS[name]
    model = Batched(spelling)
    program, spy = compiled(model, dynamic=True)
    for count in (T, 40, 7):
        sizes = [count if size == T else size for size in spelling.tokens]
        x = tokens(*sizes)
        torch._dynamo.mark_dynamic(x, spelling.tokens.index(T))
        assert_close(model, step(program, model, (x,)), (x,), FP8_ERROR)
    (plan,) = spy.plans
    assert plan.linears[0].rows.startswith("4 × s")


def test_nothing_is_asked_of_a_number_of_tokens_that_is_a_quotient():
    """The runner checks that a pass asks for no guards."""

    def function(w: Tensor, x: Tensor) -> Tensor:
        return w.mT @ x.unflatten(0, (-1, E)).permute(1, 2, 0)

    model = Batched(Spelling(function, (E, K, N), ()))
    program, spy = compiled(model, dynamic=True)
    for count in (T, 40, 5):
        x = tokens(E * count, K)
        torch._dynamo.mark_dynamic(x, 0)
        assert_close(model, step(program, model, (x,)), (x,), FP8_ERROR)
    assert spy.plan.linears[0].fp8 == ALL


@pytest.mark.parametrize("name", ["bmm", "einsum, transposed"])
def test_inductor_pads_what_is_contracted(name, monkeypatch):
    """As it may on a GPU, where the number of tokens is odd."""
    pad_gemms(monkeypatch)
    spelling = SPELLINGS[name]
    joint = rewritten(Batched(spelling), tokens(E, 20, K))
    assert joint.ctx.plan.linears[0].fp8 == ALL


def test_frozen_weights_have_no_wgrad():
    joint = rewritten(Experts().requires_grad_(False), tokens(E, T, K))
    assert [y.fp8 for y in joint.ctx.plan.linears] == [("forward", "dgrad")] * 3


def test_tokens_without_a_gradient_have_no_dgrad():
    joint = rewritten(Batched(SPELLINGS["bmm"]), tokens(E, T, K, grad=False))
    assert joint.ctx.plan.linears[0].fp8 == ("forward", "wgrad")


def test_evaluation_gives_the_numbers_of_training():
    model, x = Experts(), tokens(E, T, K)
    want = compiled(model)[0](x)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(compiled(model)[0](x), want)


# --- what is made once --------------------------------------------------------------------------


def test_one_quantization_of_each_tensor_and_direction():
    """Gate and up share tokens, all layers offsets."""
    joint = rewritten(Experts(), tokens(E, T, K))
    of_tokens, of_weights, of_gradients = 2, 3, 3
    assert len(joint.calls(fp8.quantize.default)) == of_tokens + 2 * of_weights + of_gradients
    assert len(joint.calls(fp8.transpose_segments.default)) == of_tokens + of_gradients
    (offsets,) = joint.calls(prims.iota.default)
    assert (offsets.args, offsets.kwargs["start"], offsets.kwargs["step"]) == ((E,), T, T)


@pytest.mark.parametrize("spelled", ["matmul", "einsum"])
def test_operands_that_are_written_twice_are_quantized_once(spelled):
    first = SPELLINGS[spelled].function
    function = lambda w, x: first(w, x) * first(w, x)  # noqa: E731
    joint = rewritten(Batched(Spelling(function, (E, K, N), ())), tokens(E, T, K))
    shapes = [tuple(n.meta["val"].shape) for n in joint.calls(fp8.quantize.default)]
    assert shapes.count((E * T, K)) == 1


def test_only_the_transposed_weight_is_copied():
    """Codes of the forward are those of columns in memory. All else is views."""
    joint = rewritten(Batched(SPELLINGS["bmm"]), tokens(E, T, K))
    (copied,) = joint.calls(aten.clone.default)
    assert graph.source(copied).target == "primals_1"


def test_tokens_first_are_copied_into_rows():
    joint = rewritten(Batched(SPELLINGS["tokens first"]), tokens(T, E, K))
    assert len(joint.calls(aten.clone.default)) == 2


@pytest.mark.parametrize("name", ["expanded", "repeated"])
def test_shared_tokens_are_quantized_once(name):
    """Codes are copied for each expert, and for wgrad the kernel finds the rows."""
    joint = rewritten(Batched(SPELLINGS[name]), tokens(T, K))
    shapes = [tuple(n.meta["val"].shape) for n in joint.calls(fp8.quantize.default)]
    assert shapes.count((T, K)) == 1
    assert (E * T, K) not in shapes
    (codes,) = joint.calls(fp8.as_codes.default)
    assert tuple(codes.meta["val"].shape) == (E * T, K)
    of_tokens, _ = joint.calls(fp8.transpose_segments.default)
    assert tuple(of_tokens.args[0].meta["val"].shape) == (T, K)
    wide = [n for n in joint.gm.graph.nodes if n.target is aten.index.Tensor]
    assert all(n.meta["val"].dtype is not torch.bfloat16 for n in wide)


def test_rows_repeated_otherwise_are_not_taken_for_shared():
    """Here a matrix has the halves of its neighbours' rows."""
    spelling = Spelling(lambda w, x: torch.bmm(x.repeat(1, E).view(E, T, K), w), (E, K, N), (T, K))
    model, x = Batched(spelling), tokens(T, K)
    assert_close(model, step(compiled(model)[0], model, (x,)), (x,), FP8_ERROR)
    assert not rewritten(model, x).calls(fp8.as_codes.default)


def test_one_number_for_all_is_no_shared_matrix():
    """As the gradient of a sum is."""
    gm = make_fx(lambda x: x.expand(E, T, N), tracing_mode="fake")(torch.tensor(1.0))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.expand.default)
    assert _shared_matrix(node) is None


def test_other_values_are_named_as_without_fp8():
    """By which `moments` and `keep_exact` know them."""
    model, x = Experts(), tokens(E, T, K)
    names = [
        set(graph.value_names(rewritten(model, x, config=config).gm.graph).values())
        for config in (EXACT_EAGER, COAT_EAGER)
    ]
    gone = names[0] - names[1]
    assert all("permute" in name for name in gone), gone


def test_results_are_kept_exactly_by_the_name_of_their_gemm():
    """Whatever views there are of them."""
    name = "0:bmm.default:0"
    config = Config(keep_exact=(name,), compiler="eager")
    program, spy = compiled(nn.Sequential(Experts()), config)
    program(tokens(E, T, K)).float().sum().backward()
    reasons = [s.reason for s in spy.plan.saved]
    assert reasons.count(f"matches keep_exact pattern {name!r}") == 1


# --- what stays as it was -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bmm", "matmul", "tokens first"])
def test_recipe_exact(name):
    spelling = SPELLINGS[name]
    model, x = Batched(spelling), tokens(*spelling.tokens)
    joint = capture_joint(model, x, config=EXACT_EAGER)
    before = joint.code
    quantize_linears(joint.gm, joint.ctx)
    quantize_experts(joint.gm, joint.ctx)
    assert joint.code == before
    assert joint.ctx.plan.linears[0].reason == "exact formats: not rewritten"
    torch._dynamo.reset()
    want = step(torch.compile(model, backend=stock_eager), model, (x,))
    torch._dynamo.reset()
    assert_same_step(step(compiled(model, EXACT_EAGER)[0], model, (x,)), want)


def test_a_batch_of_one_in_recipe_exact():
    x = tokens(T, K)
    function = lambda w, x: torch.einsum("tk,ekn->ten", x, w)  # noqa: E731
    layer = only_layer(function, (E, K, N), x, config=EXACT_EAGER)
    assert layer.reason == "exact formats: not rewritten"


def test_attention_is_left_alone():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, K, K).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            scores = torch.bmm(torch.bmm(x, self.weight), x.mT)
            return torch.bmm(scores.softmax(-1), x)

    joint = rewritten(Attention(), tokens(E, T, K))
    (layer,) = joint.ctx.plan.linears
    assert layer.fp8 == ALL
    assert len(joint.calls(aten.bmm.default)) == 6


REASONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], str]] = {
    "one matrix for all": (
        lambda w, x: torch.bmm(x, w.expand(E, -1, -1)),
        (K, N),
        "its weight is computed by aten.expand from fewer parameters than it has elements",
    ),
    "a batch of batches": (
        lambda w, x: x.expand(2, -1, -1, -1) @ w,
        (E, K, N),
        "its weight is computed by aten.expand from fewer parameters than it has elements",
    ),
    "odd sizes": (
        torch.Tensor.__rmatmul__,
        (E, K, 40),
        "weights 4×32×40: both sizes of each must be multiples of 16",
    ),
    "factors": (
        lambda w, x: torch.baddbmm(x, x, w, alpha=0.5),
        (E, K, K),
        "aten.baddbmm.default with factors: only plain sums and products run in FP8",
    ),
    "a head": (
        lambda w, x: torch.bmm(x, w).log_softmax(-1),
        (E, K, N),
        "an output head, which stays exact unless quantize_lm_head=True",
    ),
    "a router": (
        lambda w, x: torch.bmm(x, w).topk(2, -1).values,
        (E, K, N),
        "router: a small error may send a token to another expert",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    function, shape, reason = REASONS[name]
    assert only_layer(function, shape, tokens(E, T, K)).reason == reason


def test_more_experts_than_pytorch_takes():
    layer = only_layer(lambda w, x: torch.bmm(x, w), (1024, 16, 16), tokens(1024, 1, 16))
    assert layer.reason == "1024 experts: PyTorch's FP8 GEMMs take 1023 at most"


def test_other_formats():
    config = Config(gradient_format="e5m2")
    layer = only_layer(SPELLINGS["bmm"].function, (E, K, N), tokens(E, T, K), config=config)
    assert layer.reason == "PyTorch has FP8 GEMMs of experts for e4m3 only"


def test_skipped():
    model = nn.Sequential(Experts(), Experts())
    joint = rewritten(model, tokens(E, T, K), config=Config(skip=("0",)))
    reasons = [y.reason for y in joint.ctx.plan.linears]
    assert reasons == ["matches skip pattern '0'"] * 3 + [""] * 3
    assert len(joint.calls(aten.bmm.default)) == 9


def test_double_precision():
    layer = only_layer(
        SPELLINGS["bmm"].function,
        (E, K, N),
        tokens(E, T, K, dtype=torch.float64),
        dtype=torch.float64,
    )
    assert layer.reason == "float64 operands"


def test_buffers():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(E, K, N).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.table)

    joint = rewritten(Mixed(), tokens(E, T, K))
    assert [y.reason for y in joint.ctx.plan.linears] == [
        "its weight is a buffer or constant: only parameters run in FP8"
    ]


# --- what else there is -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_saved_tensors_are_the_plan(recipe):
    """Results of experts are kept in low bits."""
    model, x = Experts(), tokens(E, T, K)
    program, spy = compiled(model, Config.recipe(recipe, compiler="eager"))
    kept = kept_tensors(program, (x,), [*model.parameters(), x])
    assert kept == planned_tensors(spy.plan)
    low_bit = [s for s in spy.plan.saved if s.expected_error]
    assert {(s.op, s.shape) for s in low_bit} == {("aten.view", f"{E}×{T}×64")}
    assert spy.plan.saved_bytes < 0.6 * spy.plan.exact_bytes


def test_all_operations_are_in_fp8():
    model, x = Experts(), tokens(E, 2 * K, K)
    found = explain(model, x)
    (plan,) = (g.plan for g in found.graphs)
    assert plan.flops == plan.fp8_flops == 3 * 3 * 2 * E * 2 * K * 32 * 64
    text = " ".join(str(found).split())  # lines end where they may
    assert "3 of 3 linear layers in FP8, 3 of 3 of 4 experts among them" in text
    assert "4 experts: 32 → 64" in text


@pytest.mark.parametrize("name", ["bmm", "in front", "tokens first", "expanded"])
def test_diagnose_expects_what_it_measures(name):
    spelling = SPELLINGS[name]
    model = nn.Sequential(Batched(spelling), nn.SiLU())
    loss = lambda model, x: model(x).float().square().mean()  # noqa: E731
    found = [e for e in diagnose(model, loss, tokens(*spelling.tokens)).layers if e.module == "0"]
    assert sorted(e.gradient for e in found) == ["input", "weight"]
    for error in found:
        assert 0.5 < error.relative / error.predicted < 1.5


def test_a_monitor_measures_them():
    model, monitor = nn.Sequential(Experts()), Monitor()
    monitored(model, monitor)(tokens(E, T, K)).float().square().mean().backward()
    monitor.step()
    seen = {(row.module, row.tensor) for row in monitor.latest}
    assert {("0", "input"), ("0", "weight"), ("0", "gradient")} <= seen


def test_simulated_formats_mask_them():
    program, spy = compiled(Experts(), Config(simulate="e8m5", compiler="eager"))
    program(tokens(E, T, K)).float().sum().backward()
    assert [(y.simulated, y.experts) for y in spy.plan.linears] == [(ALL, E)] * 3


def test_codes_of_weights_are_for_others():
    model, x = nn.Sequential(Experts(), nn.Linear(K, K, dtype=torch.bfloat16)), tokens(E, T, K)
    want = step(compiled(model)[0], model, (x,))
    torch._dynamo.reset()
    program, spy = compiled(model, Config(weight_codes="1MiB", compiler="eager"))
    assert_same_step(step(program, model, (x,)), want)
    assert [y.codes for y in spy.plan.linears] == ["", "", "", "inputs"]


@pytest.mark.long
@pytest.mark.parametrize("name", SPELLINGS)
def test_generated_code_gives_the_same(name):
    spelling = SPELLINGS[name]
    model, x = Batched(spelling), tokens(*spelling.tokens)
    got = step(compiled(model, Config.recipe("coat"))[0], model, (x,))
    assert_close(model, got, (x,), FP8_ERROR)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPELLINGS)
def test_on_a_gpu_gradients_are_as_close(name):
    spelling = SPELLINGS[name]
    model, x = Batched(spelling).cuda(), tokens(*spelling.tokens).detach().cuda().requires_grad_()
    got = step(torch.compile(model, backend="fp8pass"), model, (x,))
    assert_close(model, got, (x,), FP8_ERROR)
