"""Linear layers in FP8: shared operands, and reasons for high precision."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    COAT_EAGER,
    MLP,
    capture_joint,
    compiled,
    gpt2,
    llama,
    sqnr,
    tokens,
)
from linear_helpers import linear, reasons, rewritten, rows
from torch import nn

from fp8pass.config import Config
from fp8pass.graph.linear_layers import is_narrow
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.nodes import aten
from fp8pass.graph.tags import ROLE
from fp8pass.passes.joint.quantize_linears import quantize_linears

fp8 = torch.ops.fp8pass
ALL = ("forward", "dgrad", "wgrad")


# --- the rewrite --------------------------------------------------------------------------------


def test_three_gemms():
    joint = rewritten(linear(), rows())
    (layer,) = joint.ctx.plan.linears
    assert (layer.module, layer.fp8, layer.reason) == ("0", ALL, "")
    assert (layer.rows, layer.in_features, layer.out_features) == ("32", 64, 128)
    shapes = [tuple(n.meta["val"].shape) for n in joint.calls(fp8.scaled_mm.default)]
    assert sorted(shapes) == sorted([(32, 128), (32, 64), (128, 64)])
    assert not joint.calls(aten.mm.default)


def test_one_quantization_per_tensor_and_layout():
    """x, W and dY are quantized once and transposed once."""
    joint = rewritten(linear(), rows())
    assert len(joint.calls(fp8.amax.default)) == 3
    assert len(joint.calls(fp8.scale.default)) == 3
    assert len(joint.calls(fp8.quantize.default)) == 3
    assert len(joint.calls(fp8.transpose.default)) == 3


@pytest.mark.long
def test_long_contractions_accumulate_precisely():
    """Each GEMM by its role and by the length of its own contraction: 64, 128 and 32."""
    for options, expected in (
        ({}, ALL),
        ({"longest_fast": 64}, ("forward", "wgrad")),
        ({"longest_fast": 0}, ()),
        ({"fast_accumulation": ("dgrad",)}, ("dgrad",)),
        ({"fast_accumulation": ()}, ()),
    ):
        joint = rewritten(linear(), rows(), config=Config(**options))
        gemms = joint.calls(fp8.scaled_mm.default)
        assert {n.meta[ROLE] for n in gemms if n.args[6]} == set(expected)
        assert joint.ctx.plan.linears[0].fast == expected


def test_no_input_gradient_no_dgrad():
    joint = rewritten(linear(), rows(grad=False))
    assert joint.ctx.plan.linears[0].fp8 == ("forward", "wgrad")
    assert len(joint.calls(fp8.scaled_mm.default)) == 2


def test_frozen_weight_no_wgrad():
    model = linear()
    model.requires_grad_(False)
    joint = rewritten(model, rows())
    assert joint.ctx.plan.linears[0].fp8 == ("forward", "dgrad")


class QKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x), self.k(x).relu(), self.v(x).sin()


@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
def test_layers_share_their_input(shape):
    """q, k and v each view the same tensor: it is read and quantized once."""
    joint = rewritten(QKV(), torch.randn(shape).requires_grad_())
    assert [y.fp8 for y in joint.ctx.plan.linears] == [ALL] * 3
    # x, three weights, three gradients.
    assert len(joint.calls(fp8.amax.default)) == 7
    assert len(joint.calls(fp8.quantize.default)) == 7
    assert len(joint.calls(fp8.scaled_mm.default)) == 9


def test_a_shared_weight_is_quantized_once():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    joint = rewritten(model, rows())
    assert [y.fp8 for y in joint.ctx.plan.linears] == [ALL] * 2
    assert len(joint.calls(fp8.amax.default)) == 5  # W, and x and dY of both


def test_bias_goes_with_the_gemm():
    joint = rewritten(linear(bias=True), rows())
    assert joint.ctx.plan.linears[0].fp8 == ALL
    assert not joint.calls(aten.addmm.default)
    biases = [n.args[4] for n in joint.calls(fp8.scaled_mm.default)]
    assert [b is not None for b in biases].count(True) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_keep_their_dtype(dtype):
    joint = rewritten(linear(dtype=dtype, bias=True), rows(dtype=dtype))
    assert joint.ctx.plan.linears[0].fp8 == ALL
    assert {n.meta["val"].dtype for n in joint.calls(fp8.scaled_mm.default)} == {dtype}


def test_autocast():
    """Weights are parameters through the cast to bf16."""
    model = MLP()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    joint = rewritten(run, rows())
    assert [y.fp8 for y in joint.ctx.plan.linears] == [ALL] * 2
    assert {n.meta["val"].dtype for n in joint.calls(fp8.scaled_mm.default)} == {torch.bfloat16}


def test_formats():
    for gradient in ("e4m3", "e5m2"):
        config = Config(gradient_format=gradient)
        torch._dynamo.reset()
        joint = rewritten(linear(), rows(), config=config)
        formats = sorted(n.args[2] for n in joint.calls(fp8.quantize.default))
        assert formats == sorted(f"{x} tensor" for x in ("e4m3", "e4m3", gradient))
        # The third amax depends on the incoming gradient.
        quantized = {n.args[2]: n for n in joint.calls(fp8.quantize.default)}
        if gradient == "e5m2":
            assert "tangents" in str(quantized["e5m2 tensor"].args[0])


@pytest.mark.long
def test_conv1d_stores_its_weight_the_other_way():
    joint = rewritten(gpt2().eval(), tokens())
    layers = {y.module: y for y in joint.ctx.plan.linears}
    fc = next(y for name, y in layers.items() if name.endswith("h.0.mlp.c_fc"))
    assert (fc.in_features, fc.out_features, fc.fp8) == (64, 256, ALL)
    attention = next(y for name, y in layers.items() if name.endswith("h.0.attn.c_attn"))
    assert (attention.in_features, attention.out_features, attention.fp8) == (64, 192, ALL)


@pytest.mark.long
def test_llama():
    joint = rewritten(llama(), tokens())
    found = joint.ctx.plan.linears
    assert len(found) == 8
    assert [y.module for y in found if not y.fp8] == ["lm_head"]
    assert all(y.fp8 == ALL for y in found if y.module != "lm_head")
    assert {(y.in_features, y.out_features) for y in found if "k_proj" in y.module} == {(64, 32)}


def test_dynamic_rows():
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    joint = rewritten(linear(), x)
    assert joint.ctx.plan.linears[0].fp8 == ALL
    assert not joint.ctx.plan.linears[0].rows.isdigit()


# --- layers that are not rewritten ---------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 64), (64, 24), (7, 16)])
def test_sizes_that_tensor_cores_cannot_take(inputs, outputs):
    joint = rewritten(linear(inputs, outputs), rows(features=inputs))
    assert "must be multiples of 16" in reasons(joint)["0"]
    assert not joint.calls(fp8.scaled_mm.default)
    assert len(joint.calls(aten.mm.default)) == 3


def test_skip_patterns():
    model = nn.ModuleDict({"body": MLP((64, 128, 64)), "tail": MLP((64, 64, 64))})

    def run(x):
        return model["tail"](model["body"](x))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.tail = model["body"], model["tail"]

        def forward(self, x):
            return self.tail(self.body(x))

    joint = rewritten(Both(), rows(), config=Config(skip=("body", "*.down")))
    found = reasons(joint)
    assert found["body.up"] == "matches skip pattern 'body'"
    assert found["body.down"] == "matches skip pattern 'body'"
    assert found["tail.down"] == "matches skip pattern '*.down'"
    assert found["tail.up"] == ""


def test_skip_takes_a_function():
    def is_first(path: str) -> bool:
        return path == "up"

    def reasons(*skip) -> list[str]:
        joint = rewritten(MLP(), rows(), config=Config(skip=skip))
        return [y.reason for y in joint.ctx.plan.linears]

    exact, quantized = reasons(is_first), reasons()
    assert exact[0] == f"matches skip pattern {is_first.__qualname__!r}"
    assert exact[1:] == quantized[1:]
    assert not quantized[0]
    assert reasons("no.such", is_first) == exact
    assert Config(skip=is_first) == Config(skip=(is_first,))


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("model.layers.0.mlp.down_proj", "down_proj", True),
        ("model.layers.0.mlp.down_proj", "layers.0", True),
        ("model.layers.0.mlp.down_proj", "*.down_proj", True),
        ("model.layers.0.mlp.down_proj", "model", True),
        ("model.layers.0.mlp.down_proj", "layers.?.mlp", True),
        ("model.layers.10.mlp.down_proj", "layers.1", False),
        ("model.layers.0.mlp.down_proj", "down", False),
        ("model.layers.0.mlp.down_proj", "proj", False),
        ("model.layers.0.mlp.down_proj", "layers.[12]", False),
        ("model.layers[0].*.down_proj", "layers[0].*.down_proj", True),
        ("model.layers[0].*.down_proj", "layers[[]0].[*].down_proj", True),
        ("model.layers0.mlp.down_proj", "layers[[]0].[*].down_proj", False),
        ("", "", True),
        ("model", "", False),
    ],
)
def test_patterns(path, pattern, matches):
    assert (matching_pattern(path, (pattern,)) == pattern) is matches


def test_fp64():
    joint = rewritten(linear(dtype=torch.float64), rows(dtype=torch.float64))
    assert reasons(joint)["0"] == "float64 operands"


def test_empty_input():
    joint = rewritten(linear(), rows(0))
    assert all(r == "empty input" for r in reasons(joint).values())
    assert not joint.calls(fp8.scaled_mm.default)


def test_a_batch_of_one_is_a_linear_layer():
    """`einsum` writes it. `quantize_experts` rewrites larger batches."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 4, 32) / 8)

        def forward(self, x):
            return torch.einsum("bsh,hnd->bsnd", x, self.weight)

    model, x = Written(), torch.randn(2, 16, 64, requires_grad=True)
    joint = rewritten(model, x)
    (layer,) = joint.ctx.plan.linears
    assert (layer.rows, layer.in_features, layer.out_features) == ("32", 64, 128)
    assert layer.fp8 == ("forward", "dgrad", "wgrad")
    assert len(joint.calls(fp8.scaled_mm.default)) == 3
    assert not joint.calls(aten.bmm.default)


def test_gemms_without_a_parameter_are_no_linear_layers():
    def run(x):
        return (x @ x.t()) @ x

    joint = capture_joint(run, rows())
    before = joint.code
    quantize_linears(joint.gm, joint.ctx)
    assert joint.ctx.plan.linears == []
    assert joint.code == before


def test_a_graph_without_linear_layers_does_not_change():
    joint = capture_joint(nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.Softmax(-1)), rows())
    before = joint.code
    quantize_linears(joint.gm, joint.ctx)
    assert joint.code == before


def test_layers_that_stay_leave_the_graph_identical():
    joint = capture_joint(MLP((24, 20, 7)), rows(features=24))
    before = joint.code
    quantize_linears(joint.gm, joint.ctx)
    assert joint.code == before
    assert len(joint.ctx.plan.linears) == 2


@pytest.mark.long
def test_deterministic():
    codes = []
    for _ in range(2):
        torch._dynamo.reset()
        codes.append(rewritten(llama(), tokens()).code)
    assert codes[0] == codes[1]


@pytest.mark.parametrize("device_reason", ["no FP8 here"])
def test_devices_without_fp8_gemms_say_so(monkeypatch, device_reason):
    monkeypatch.setattr("fp8pass.hardware.why_no_fp8_gemm", lambda device: device_reason)
    joint = rewritten(linear(), rows())
    assert reasons(joint)["0"] == device_reason
    assert not joint.calls(fp8.scaled_mm.default)
    torch._dynamo.reset()
    exact = rewritten(linear(), rows(), config=Config.recipe("exact"))
    assert len(exact.calls(fp8.scaled_mm.default)) == 3  # rewrites them without any hardware


# --- narrow layers ------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, width=256, rank=16):
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        x = nn.functional.silu(self.base(x))
        return self.base(x) + self.up(self.down(x))


def test_adapters_of_low_rank_gain_nothing():
    assert reasons(rewritten(Adapted(), rows(features=256))) == {
        "base": "",
        "down": "weight 16×256: too narrow to gain by FP8",
        "up": "weight 256×16: too narrow to gain by FP8",
    }
    assert not any(reasons(rewritten(Adapted(128), rows(features=128))).values())


@pytest.mark.parametrize(
    ("sizes", "narrow"),
    [((64, 1024), True), ((4096, 16), True), ((64, 1023), False), ((65, 4096), False)],
)
def test_narrow_sizes(sizes, narrow):
    assert is_narrow(*sizes) == narrow == is_narrow(*reversed(sizes))


def test_inputs_of_narrow_layers_are_saved_in_low_bits():
    """As inputs of layers in FP8: the user did not ask for exact layers."""
    torch._dynamo.reset()
    model, x = Adapted().bfloat16(), rows(features=256, dtype=torch.bfloat16)
    program, spy = compiled(model, COAT_EAGER)
    program(x).sum().backward()
    (large,) = [s for s in spy.plan.saved if s.bytes >= 32 * 256]
    assert large.bytes < 1.1 * 32 * 256  # of E4M3 and scales
    want = copy.deepcopy(model).double()
    want(x.detach().double()).sum().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or sqnr(p.grad.double(), q.grad) > 25
