"""Batched GEMMs of parameters run in FP8 as experts with the same number of tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expert_helpers import ALL, SPELLINGS, Batched, E, Experts, K, N, Spelling, T, rewritten, tokens
from helpers import (
    COAT_EAGER,
    EXACT_EAGER,
    compiled,
    count_planned,
    count_saved,
    pad_gemms,
    relative,
    step,
)
from monitor_helpers import monitored
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import Monitor, diagnose, explain, graph
from fp8pass.config import Config
from fp8pass.graph.nodes import aten, prims
from fp8pass.passes.joint.quantize_experts import _shared_matrix

fp8 = torch.ops.fp8pass
# Two operands with errors of 2.6%, and a result that is rounded to BF16.
FP8_ERROR = 0.045


def assert_close(model: nn.Module, got: Any, batch: tuple[Tensor, ...], error: float) -> None:
    """Compare a step with a step in FP64."""
    twin = copy.deepcopy(model).double()
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in batch]
    want = step(twin, twin, inputs)
    assert relative(got.outputs[0], want.outputs[0]) < error
    for name, gradient in want.gradients.items():
        if gradient is not None:
            assert relative(got.gradients[name], gradient) < error, name


# --- what runs in FP8 ---------------------------------------------------------------------------


@pytest.mark.drawn(1)
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


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("equation", "shape"), [("tk,ekn->ten", (T, K)), ("bsk,ekn->bsen", (2, T, K))]
)
def test_all_experts_of_all_tokens_are_one_linear_layer(equation, shape):
    """`einsum` writes them as a batch of one matrix."""
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


@pytest.mark.drawn(1)
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


@pytest.mark.long
def test_a_quotient_of_tokens_adds_no_guard():
    """The runner checks that no pass adds guards."""

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
def test_inductor_pads_contractions(name, monkeypatch):
    """As on a GPU, if the number of tokens is odd."""
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
    """Gate and up share tokens, and all layers share offsets."""
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
    """The forward quantizes columns in memory. All other operands are views."""
    joint = rewritten(Batched(SPELLINGS["bmm"]), tokens(E, T, K))
    (copied,) = joint.calls(aten.clone.default)
    assert graph.skip_views_and_casts(copied).target == "primals_1"


def test_tokens_first_are_copied_into_rows():
    """The layout of the gradient, and so its copy, depends on the version of PyTorch."""
    joint = rewritten(Batched(SPELLINGS["tokens first"]), tokens(T, E, K))
    copied = [tuple(n.meta["val"].shape) for n in joint.calls(aten.clone.default)]
    assert copied in ([(E, T, K), (E, N, K)], [(E, T, K), (E, N, K), (E, T, N)])


@pytest.mark.parametrize("name", ["expanded", "repeated"])
def test_shared_tokens_are_quantized_once(name):
    """FP8 data is copied for each expert. For wgrad the kernel gathers the rows."""
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


def test_rows_repeated_otherwise_are_not_shared():
    """Here each matrix has half of the rows of its neighbours."""
    spelling = Spelling(lambda w, x: torch.bmm(x.repeat(1, E).view(E, T, K), w), (E, K, N), (T, K))
    model, x = Batched(spelling), tokens(T, K)
    assert_close(model, step(compiled(model)[0], model, (x,)), (x,), FP8_ERROR)
    assert not rewritten(model, x).calls(fp8.as_codes.default)


def test_an_expanded_number_is_not_a_shared_matrix():
    """The gradient of a sum is expanded from one number."""
    gm = make_fx(lambda x: x.expand(E, T, N), tracing_mode="fake")(torch.tensor(1.0))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.expand.default)
    assert _shared_matrix(node) is None


def test_other_values_are_named_as_without_fp8():
    """`calibration` and `keep_exact` refer to these names."""
    model, x = Experts(), tokens(E, T, K)
    names = [
        set(graph.value_names(rewritten(model, x, config=config).gm.graph).values())
        for config in (EXACT_EAGER, COAT_EAGER)
    ]
    gone = names[0] - names[1]
    assert all("permute" in name for name in gone), gone


def test_results_are_kept_exactly_by_the_name_of_their_gemm():
    """Views of the results are exact, too."""
    name = "0:bmm.default:0"
    config = Config(keep_exact=(name,), compiler="eager")
    program, spy = compiled(nn.Sequential(Experts()), config)
    program(tokens(E, T, K)).float().sum().backward()
    reasons = [s.reason for s in spy.plan.saved]
    assert reasons.count(f"matches keep_exact pattern {name!r}") == 1


# --- what else there is -------------------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_saved_tensors_are_the_plan(recipe):
    """Results of experts are saved in low-bit formats."""
    model, x = Experts(), tokens(E, T, K)
    program, spy = compiled(model, Config.recipe(recipe, compiler="eager"))
    kept = count_saved(program, (x,), [*model.parameters(), x])
    assert kept == count_planned(spy.plan)
    low_bit = [s for s in spy.plan.saved if s.expected_error]
    assert {(s.op, s.shape) for s in low_bit} == {("aten.view", f"{E}×{T}×64")}
    assert spy.plan.saved_bytes < 0.6 * spy.plan.exact_bytes


@pytest.mark.long
def test_all_operations_are_in_fp8():
    model, x = Experts(), tokens(E, 2 * K, K)
    found = explain(model, x)
    (plan,) = (g.plan for g in found.graphs)
    assert plan.flops == plan.fp8_flops == 3 * 3 * 2 * E * 2 * K * 32 * 64
    text = " ".join(str(found).split())  # the text is wrapped
    assert "3 of 3 linear layers in FP8, including 3 of 3 with 4 experts each" in text
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
