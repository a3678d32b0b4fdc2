"""Grouped GEMMs of experts in FP8: their accuracy, and reasons for high precision."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    COAT_EAGER,
    EXACT_EAGER,
    JointGraph,
    assert_same_step,
    capture_joint,
    compiled,
    count_planned,
    count_saved,
    relative,
    step,
    stock_eager,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import counts
from kernel_helpers import graphs as graphs
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import diagnose, explain
from fp8pass.codegen.kernels.supported import why_no_rows
from fp8pass.config import Config
from fp8pass.graph.nodes import aten
from fp8pass.passes.joint.quantize_experts import quantize_experts
from fp8pass.passes.joint.quantize_linears import quantize_linears

fp8 = torch.ops.fp8pass
ALL = ("forward", "dgrad", "wgrad")


class Experts(nn.Module):
    """SwiGLU of each expert, as torchtitan writes it: weights [E, out, in]."""

    def __init__(self, experts: int = 4, hidden: int = 32, ffn: int = 64) -> None:
        super().__init__()
        torch.manual_seed(experts)
        sizes = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        for name, (rows, columns) in sizes.items():
            weight = torch.randn(experts, rows, columns) / columns**0.5
            setattr(self, name, nn.Parameter(weight.bfloat16()))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        def of_expert(x: Tensor, weight: Tensor) -> Tensor:
            return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)

        hidden = F.silu(of_expert(x, self.gate)) * of_expert(x, self.up)
        return of_expert(hidden, self.down)


class Upwards(nn.Module):
    """One layer of experts with weights [E, in, out], as in GPT-OSS."""

    def __init__(self, inward: int = 32, outward: int = 48, experts: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, inward, outward).bfloat16())

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=offsets)


class Routed(nn.Module):
    """A router, the permutations of tokens, and experts."""

    def __init__(self, experts: int = 16, hidden: int = 64, top: int = 2) -> None:
        super().__init__()
        self.top, self.count = top, experts
        self.router = nn.Linear(hidden, experts, bias=False, dtype=torch.bfloat16)
        self.experts = Experts(experts, hidden)
        self.shared = nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.top)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.count, device=x.device).index_add(
            0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float32)
        )
        offsets = counts.cumsum(0).int()
        y = self.experts(x[order // self.top], offsets)
        y = y * weights.flatten()[order].unsqueeze(-1).to(y.dtype)
        return self.shared(x) + torch.zeros_like(x).index_add(0, order // self.top, y)


def ends(*counts: int) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def rows(count: int = 50, features: int = 32, grad: bool = True) -> Tensor:
    torch.manual_seed(count)
    return torch.randn(count, features).bfloat16().requires_grad_(grad)


def rewritten(model, *args, config: Config = COAT_EAGER, **options) -> JointGraph:
    """The joint graph after the passes that quantize layers."""
    joint = capture_joint(model, *args, config=config, **options)
    quantize_linears(joint.gm, joint.ctx)
    quantize_experts(joint.gm, joint.ctx)
    joint.gm.graph.eliminate_dead_code()
    joint.gm.graph.lint()
    return joint


def reason_of(model, *args, **options) -> str:
    """The reason of the only layer of experts; with a reason its GEMMs must not change."""
    joint = rewritten(model, *args, **options)
    (layer,) = (y for y in joint.ctx.plan.linears if y.experts)
    assert bool(layer.fp8) == (not layer.reason)
    assert bool(joint.calls(aten._grouped_mm.default)) == bool(layer.reason)
    return layer.reason


# --- the rewrite --------------------------------------------------------------------------------


def test_three_gemms_of_each_layer():
    joint = rewritten(Experts(), rows(), ends(7, 0, 23, 20))
    assert [y.fp8 for y in joint.ctx.plan.linears] == [ALL] * 3
    assert [(y.experts, y.rows) for y in joint.ctx.plan.linears] == [(4, "50")] * 3
    sizes = [(y.in_features, y.out_features) for y in joint.ctx.plan.linears]
    assert sizes == [(32, 64), (32, 64), (64, 32)]
    assert len(joint.calls(fp8.scaled_grouped_mm.default)) == 6
    assert len(joint.calls(fp8.scaled_grouped_outer.default)) == 3
    assert not joint.calls(aten._grouped_mm.default)


def test_one_quantization_of_each_tensor_and_direction():
    """Gate and up share tokens, and wgrad their amaxes. All wgrads share padded ends."""
    joint = rewritten(Experts(), rows(), ends(7, 0, 23, 20))
    tokens, weights, gradients = 2, 3, 3
    assert len(joint.calls(fp8.amax.default)) == tokens + 2 * weights + gradients
    assert len(joint.calls(fp8.quantize.default)) == tokens + 2 * weights + gradients
    assert len(joint.calls(fp8.transpose_segments.default)) == tokens + gradients
    assert len(joint.calls(fp8.padded_ends.default)) == 1


@pytest.mark.long
def test_tokens_are_quantized_where_they_come_from():
    """FP8 data and amaxes are permuted, once for gate, up and wgrad."""
    joint = rewritten(Routed(), rows(48, 64))
    (taken,) = joint.calls(fp8.as_codes.default)
    assert taken.args[0].target is aten.index.Tensor
    (sent,) = joint.calls(fp8.as_bytes.default)
    assert tuple(sent.args[0].meta["val"].shape) == (48, 64)
    experts = [n for n in joint.calls(fp8.scaled_grouped_mm.default) if taken in n.args]
    assert len(experts) == 2
    of_tokens = joint.calls(fp8.transpose_segments.default)
    assert sum(tuple(n.args[0].meta["val"].shape) == (48, 64) for n in of_tokens) == 1
    amaxes = [n.args[0] for n in joint.calls(fp8.segment_amax.default)]
    assert taken.args[0].args[1] in [n.args[1] for n in amaxes if n.target is aten.index.Tensor]


def test_few_of_many_rows_are_quantized_alone():
    class Some(Upwards):
        def forward(self, x, chosen, offsets):
            return super().forward(x.sin()[chosen], offsets)

    joint = rewritten(Some(), rows(100), torch.arange(50), ends(7, 0, 43))
    assert joint.ctx.plan.linears[0].fp8 == ALL
    assert not joint.calls(fp8.as_codes.default)


def test_either_layout_of_weights():
    joint = rewritten(Upwards(), rows(), ends(7, 0, 43))
    (layer,) = joint.ctx.plan.linears
    assert (layer.in_features, layer.out_features, layer.fp8) == (32, 48, ALL)


@pytest.mark.parametrize("first", ["cast", "transpose"])
def test_weights_in_fp32_that_are_cast(first):
    """As in torchtitan."""

    class Cast(Upwards):
        def forward(self, x, offsets):
            weight = self.weight.bfloat16().mT if first == "cast" else self.weight.mT.bfloat16()
            return torch._grouped_mm(x, weight, offs=offsets)

    model = Cast(48, 32).float()
    joint = rewritten(model, rows(), ends(7, 0, 43))
    (layer,) = joint.ctx.plan.linears
    assert (layer.in_features, layer.out_features, layer.fp8) == (32, 48, ALL)


def test_frozen_experts_have_no_wgrad():
    joint = rewritten(Experts().requires_grad_(False), rows(), ends(7, 0, 23, 20))
    assert [y.fp8 for y in joint.ctx.plan.linears] == [("forward", "dgrad")] * 3


def test_tokens_without_a_gradient_have_no_dgrad():
    joint = rewritten(Upwards(), rows(grad=False), ends(7, 0, 43))
    assert joint.ctx.plan.linears[0].fp8 == ("forward", "wgrad")


@pytest.mark.long
def test_the_number_of_tokens_may_be_symbolic():
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    joint = rewritten(Experts(), x, ends(7, 0, 23, 20))
    assert [y.fp8 for y in joint.ctx.plan.linears] == [ALL] * 3
    assert not joint.ctx.plan.linears[0].rows.isdigit()


@pytest.mark.long
def test_routers_stay_exact():
    """FP8 GEMMs would take a router of 16 experts. Shared experts are linear layers."""
    joint = rewritten(Routed(), rows(48, 64))
    found = {(y.module, y.experts): y for y in joint.ctx.plan.linears}
    router = found["router", 0]
    assert router.reason == "router: a small error may send a token to another expert"
    assert router.chosen
    assert found["shared", 0].fp8 == found["experts", 16].fp8 == ALL


def test_layers_are_listed_in_the_order_of_the_forward():
    joint = rewritten(Routed(), rows(48, 64))
    modules = [y.module for y in joint.ctx.plan.linears]
    assert modules == ["router", "experts", "experts", "experts", "shared"]


# --- layers that are not rewritten ---------------------------------------------------------------


@pytest.mark.long
def test_skipped():
    config = Config(skip=("experts",))
    joint = rewritten(Routed(), rows(48, 64), config=config)
    reasons = {y.reason for y in joint.ctx.plan.linears if y.experts}
    assert reasons == {"matches skip pattern 'experts'"}
    assert len(joint.calls(aten._grouped_mm.default)) == 9


@pytest.mark.parametrize("sizes", [(24, 48), (32, 40)])
def test_sizes_that_tensor_cores_do_not_take(sizes):
    reason = reason_of(Upwards(*sizes), rows(50, sizes[0]), ends(7, 0, 43))
    assert "both sizes of each matrix must be multiples of 16" in reason


@pytest.mark.parametrize("option", ["forward_format", "gradient_format"])
def test_other_formats(option):
    reason = reason_of(Upwards(), rows(), ends(7, 0, 43), config=Config(**{option: "e5m2"}))
    assert reason == "PyTorch's FP8 GEMMs of experts take only e4m3"


def test_recipe_exact():
    assert reason_of(Upwards(), rows(), ends(7, 0, 43), config=EXACT_EAGER) == (
        "formats are exact, so the layer is not rewritten"
    )


def test_weights_that_are_buffers():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(3, 32, 48).bfloat16())

        def forward(self, x, offsets):
            return torch._grouped_mm(x, self.table, offs=offsets)

    reason = reason_of(Mixed(), rows(), ends(7, 0, 43))
    assert reason == "its weight is a buffer or constant: only parameters run in FP8"


def test_graphs_without_experts_do_not_change():
    joint = capture_joint(nn.Linear(32, 32), torch.randn(16, 32))
    before = joint.code
    quantize_experts(joint.gm, joint.ctx)
    assert joint.code == before
    assert not joint.ctx.plan.linears


@pytest.mark.long
def test_simulated_formats_mask_experts():
    program, spy = compiled(Experts(), Config(simulate="e8m5", compiler="eager"))
    got = step(program, model := Experts(), (rows(), ends(7, 0, 23, 20)))
    assert [y.simulated for y in spy.plan.linears] == [ALL] * 3
    exact = step(model, model, (rows(), ends(7, 0, 23, 20)))
    assert 0 < relative(got.outputs[0], exact.outputs[0]) < 0.1


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=5)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_gradients_are_close_for_any_segments(counts):
    """Relative to FP64: two layers with two operands of 2.6% each, and low-bit saved values."""
    torch._dynamo.reset()
    model, x, offsets = Experts(len(counts)), rows(sum(counts)), ends(*counts)
    program, _ = compiled(model, COAT_EAGER)
    got = step(program, model, (x, offsets))
    want = step(_loop, twin := copy.deepcopy(model).double(), (x.double(), offsets, twin))
    for name, gradient in want.gradients.items():
        found = got.gradients[name]
        assert found is not None
        assert relative(found.double(), gradient) < 0.09, name
    for expert, count in enumerate(counts):
        if not count:
            assert not got.gradients["up"][expert].any()


def _loop(x: Tensor, offsets: Tensor, experts: Experts) -> Tensor:
    parts, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        tokens, start = x[start:end], end
        gate, up, down = (w[expert].t() for w in (experts.gate, experts.up, experts.down))
        parts.append(F.silu(tokens @ gate) * (tokens @ up) @ down)
    return torch.cat(parts)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_saved_tensors_are_the_plan(recipe):
    """Results of experts are saved in low-bit formats."""
    model, x, offsets = Experts(), rows(), ends(7, 0, 23, 20)
    program, spy = compiled(model, Config.recipe(recipe, compiler="eager"))
    kept = count_saved(program, (x, offsets), [*model.parameters(), x])
    assert kept == count_planned(spy.plan)
    low_bit = [s for s in spy.plan.saved if s.expected_error]
    assert {s.op for s in low_bit} == {"fp8pass.scaled_grouped_mm"}
    assert spy.plan.saved_bytes < 0.6 * spy.plan.exact_bytes


@pytest.mark.long
def test_generated_code_gives_the_same():
    model, batch = Upwards(), (rows(), ends(7, 0, 43))
    results = []
    for config in (COAT_EAGER, Config.recipe("coat")):
        torch._dynamo.reset()
        results.append(step(compiled(model, config)[0], model, batch))
    for got, want in zip(results[1].gradients.values(), results[0].gradients.values(), strict=True):
        assert relative(got, want) < 0.01


@pytest.mark.long
def test_row_kernels_take_tokens_and_weights(graphs):
    """Tokens with the norm before them. The rows of dgrad's weights are columns in memory."""
    model, x = nn.Sequential(nn.RMSNorm(64, dtype=torch.bfloat16), Routed()), rows(48, 64)
    got = step(compiled(model, Config.recipe("coat"))[0], model, (x,))
    # Tokens, hidden tokens, three weights; input and weight of the shared layer. Then gradients.
    assert counts(graphs)["rows"] == 7 + 3
    generated = [n for g in graphs for n in g.nodes if n.target is fp8.quantize.default]
    turned = [n for n in generated if why_no_rows(n) == "it is transposed in memory"]
    assert len(turned) == 3
    torch._dynamo.reset()
    want = step(compiled(model, COAT_EAGER)[0], model, (x,))
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.08, name


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_as_close():
    model, x, offsets = Experts(4, 256, 512).cuda(), rows(1000, 256), ends(7, 0, 593, 400).cuda()
    x = x.detach().cuda().requires_grad_()
    got = step(torch.compile(model, backend="fp8pass"), model, (x, offsets))
    want = step(_loop, twin := copy.deepcopy(model).double(), (x.double(), offsets, twin))
    for name, gradient in want.gradients.items():
        found = got.gradients[name]
        assert found is not None
        assert relative(found.double(), gradient) < 0.09, name


@pytest.mark.gpu
def test_on_a_gpu_permuted_tokens_give_what_they_give_op_by_op():
    model, x = Routed(16, 256).cuda(), rows(512, 256).detach().cuda().requires_grad_()
    want = step(compiled(model, COAT_EAGER)[0], model, (x,))
    torch._dynamo.reset()
    got = step(torch.compile(model, backend="fp8pass"), model, (x,))
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.06, name


@pytest.mark.gpu
def test_on_a_gpu_nobody_waits_for_offsets():
    model = Routed(16, 256).cuda()
    program = torch.compile(model, backend="fp8pass")
    x = rows(512, 256).detach().cuda().requires_grad_()
    program(x).sum().backward()  # compilation may synchronize
    torch.cuda.set_sync_debug_mode("error")
    try:
        program(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- Hugging Face -------------------------------------------------------------------------------


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    configs = {
        "Mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen3Moe": {
            "moe_intermediate_size": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "head_dim": 16,
        },
        "Llama4": {  # experts are a `bmm` of all tokens each
            "intermediate_size": 256,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "head_dim": 16,
            "attention_chunk_size": 32,
        },
    }
    config_class = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    config = getattr(transformers, config_class)(**sizes, **configs[name])
    if name != "Llama4":  # it has one implementation
        config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


@pytest.mark.long
def test_recipe_exact_of_hugging_face():
    model, ids = Loss(hugging_face("Mixtral")), torch.arange(64).view(2, 32)
    want = step(torch.compile(model, backend=stock_eager), model, (ids,))
    torch._dynamo.reset()
    assert_same_step(step(compiled(model, EXACT_EAGER)[0], model, (ids,)), want)


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Llama4"])
def test_hugging_face(name):
    """70% of the operations are in FP8."""
    model, ids = Loss(hugging_face(name)), torch.arange(64).view(2, 32)
    want = step(model, model, (ids,))
    program, spy = compiled(model, COAT_EAGER, fullgraph=True)
    got = step(program, model, (ids,))
    assert abs(got.outputs[0] - want.outputs[0]) < 0.01 * want.outputs[0]
    experts = [y for y in spy.plan.linears if y.experts]
    assert [y.fp8 for y in experts] == [ALL] * 2
    assert spy.plan.fp8_flops > 0.7 * spy.plan.flops
    # In an untrained model rounding may send tokens to another expert.
    for y in ("gate_up_proj", "down_proj"):
        block = "feed_forward" if name == "Llama4" else "mlp"
        path = f"model.model.layers.0.{block}.experts.{y}"
        assert relative(got.gradients[path], want.gradients[path]) < 0.35


@pytest.mark.long
def test_diagnose_expects_what_it_measures():
    loss = lambda model, x: model(x).float().square().mean()  # noqa: E731
    found = diagnose(Routed(), loss, rows(48, 64)).layers
    of_experts = [e for e in found if e.module == "experts"]
    assert len(of_experts) == 8
    for error in of_experts:
        assert 0.5 < error.relative / error.predicted < 1.5


@pytest.mark.long
def test_explain_counts_experts():
    text = " ".join(str(explain(Routed(), rows(48, 64))).split())  # the text is wrapped
    assert "4 of 5 linear layers in FP8, including 3 of 3 with 16 experts each" in text
    assert "16 experts: 64 → 64" in text
    assert "router: a small error" in text
