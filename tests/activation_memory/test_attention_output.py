"""`attention_output='e2m5'`: attention's output saved in 8 bits."""

from __future__ import annotations

import pytest
import torch
from helpers import compiled
from torch import nn
from torch.nn import functional as F

import fp8pass
from fp8pass.config import Config
from fp8pass.option_checks import ConfigError
from fp8pass.testing import assert_close, assert_plan_is_true
from fp8pass.tools.diagnosis import diagnose

HEADS, HEAD_DIM, TOKENS = 2, 64, 128
WIDTH = HEADS * HEAD_DIM
E2M5 = Config(attention_output="e2m5", compiler="eager")
EXACT = Config(compiler="eager")


class Attention(nn.Module):
    """Causal attention with its projections."""

    def __init__(self, head_dim: int = HEAD_DIM, common: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_dim = head_dim
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.qkv.bias[2 * WIDTH :], common)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def batch(tokens: int = TOKENS):
    torch.manual_seed(1)
    return torch.randn(2, tokens, WIDTH).bfloat16()


def find_saved(config: Config, model: nn.Module, x: torch.Tensor | None = None):
    program, spy = compiled(model, config)
    program(batch() if x is None else x)
    return spy.plan, [s for s in spy.plan.saved if "attention" in s.op and s.dtype != "float32"]


@pytest.mark.long
def test_output_takes_half_its_bytes_and_operands_stay_exact():
    model = Attention().bfloat16()
    before, (exact,) = find_saved(EXACT, model)
    after, (saved,) = find_saved(E2M5, model)
    unit = 2 * TOKENS * WIDTH * 2
    assert (exact.saved_as, exact.bytes) == ("exact", unit)
    assert saved.saved_as == "e2m5 1×32 centred"
    assert saved.bytes == unit // 2 + unit // 32 + unit // TOKENS  # data, scales, means
    assert before.saved_bytes - after.saved_bytes == exact.bytes - saved.bytes
    assert "attention_output='e2m5'" in saved.reason


@pytest.mark.long
def test_plan_agrees_with_autograd():
    assert_plan_is_true(Attention().bfloat16(), batch(), config=E2M5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_within_rounding_errors(dtype):
    assert_close(Attention().to(dtype), batch().to(dtype), config=E2M5)


def test_forward_does_not_change():
    outputs = [compiled(Attention().bfloat16(), c)[0](batch()) for c in (EXACT, E2M5)]
    assert torch.equal(*outputs)


def errors(config: Config, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the measured and predicted errors of attention's gradients."""
    found = diagnose(model, lambda m, x: m(x).float().square().mean(), batch(), config=config)
    of_attention = [y for y in found.layers if y.gradient.startswith("attention")]
    return {y.gradient: (y.relative, y.predicted or 0.0) for y in of_attention}


@pytest.mark.long
def test_diagnose_reports_the_error():
    assert not errors(EXACT, Attention().bfloat16())
    found = errors(E2M5, Attention().bfloat16())
    assert set(found) == {"attention q", "attention k"}
    for measured, predicted in found.values():
        assert measured < 0.02
        assert predicted / 3 < measured < predicted * 3


def test_mean_over_tokens_adds_no_error():
    """If the mean were rounded, too, these gradients would be 4% wrong."""
    for measured, _ in errors(E2M5, Attention(common=5.0).bfloat16()).values():
        assert measured < 0.005


@pytest.mark.parametrize(
    ("config", "head_dim", "tokens", "reason"),
    [
        (Config(attention_output="e2m5", keep_exact=("*:getitem:*",)), 64, 128, "keep_exact"),
        (Config(attention_output="e2m5", skip=("out",)), 64, 128, "options keep in high precision"),
        (Config(attention_output="e2m5"), 8, 128, "equal groups"),
        (Config(attention_output="e2m5"), 64, 1, "few tokens"),
    ],
)
def test_other_options_keep_the_output_exact(config, head_dim, tokens, reason):
    model = Attention(head_dim).bfloat16()
    explanation = fp8pass.explain(model, batch(tokens), config=config)
    saved = explanation.graphs[0].plan.saved
    outputs = [s for s in saved if "attention" in s.op and s.dtype == "bfloat16"]
    assert [s.saved_as for s in outputs] == ["exact"]
    assert reason in outputs[0].reason


def test_infinite_tolerance_keeps_the_format():
    config = Config(attention_output="e2m5", error_tolerance=float("inf"), compiler="eager")
    _, (saved,) = find_saved(config, Attention().bfloat16())
    assert saved.saved_as == "e2m5 1×32 centred"


@pytest.mark.long
def test_budget_keeps_the_format_or_recomputes():
    config = Config(attention_output="e2m5", memory_budget=0.95, compiler="eager")
    plan, saved = find_saved(config, Attention().bfloat16())
    assert all(s.saved_as.startswith("e2m5") for s in saved)
    assert_plan_is_true(Attention().bfloat16(), batch(), config=config)
    assert plan.saved_bytes <= 0.95 * find_saved(E2M5, Attention().bfloat16())[0].saved_bytes


@pytest.mark.parametrize("recipe", ["linear", "exact"])
def test_recipes_without_low_bits_refuse_it(recipe):
    with pytest.raises(ConfigError, match="does not allow low-bit formats"):
        Config.recipe(recipe, attention_output="e2m5")


def test_unknown_and_conflicting_values_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'e2m5'"):
        Config(attention_output="e2m6")
    with pytest.raises(ConfigError, match="excludes attention_output='e2m5'"):
        Config(simulate="e4m3", attention_output="e2m5")
