"""The output of attention in 8 bits, where the user says so."""

from __future__ import annotations

import pytest
import torch
from helpers import compiled
from torch import nn
from torch.nn import functional as F

import fp8pass
from fp8pass.config import Config, ConfigError
from fp8pass.testing import assert_close, assert_plan_is_true
from fp8pass.tools.diagnosis import diagnose

HEADS, HEAD_DIM, TOKENS = 2, 64, 128
WIDTH = HEADS * HEAD_DIM
CODED = Config(attention_output="e2m5", compiler="eager")
EXACTLY = Config(compiler="eager")


class Attention(nn.Module):
    """Causal attention between its projections."""

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


def kept(config: Config, model: nn.Module, x: torch.Tensor | None = None):
    program, spy = compiled(model, config)
    program(batch() if x is None else x)
    return spy.plan, [s for s in spy.plan.saved if "attention" in s.op and s.dtype != "float32"]


def test_the_output_takes_half_its_bytes_and_q_k_v_stay_exact():
    model = Attention().bfloat16()
    before, (exact,) = kept(EXACTLY, model)
    after, (coded,) = kept(CODED, model)
    unit = 2 * TOKENS * WIDTH * 2
    assert (exact.kept_as, exact.bytes) == ("exact", unit)
    assert coded.kept_as == "e2m5 1×32 centred"
    assert coded.bytes == unit // 2 + unit // 32 + unit // TOKENS  # codes, scales, means
    assert before.saved_bytes - after.saved_bytes == exact.bytes - coded.bytes
    assert "attention_output='e2m5'" in coded.reason


def test_the_plan_is_what_autograd_keeps():
    assert_plan_is_true(Attention().bfloat16(), batch(), config=CODED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_close_as_formats_allow(dtype):
    assert_close(Attention().to(dtype), batch().to(dtype), config=CODED)


def test_the_forward_is_the_same():
    outputs = [compiled(Attention().bfloat16(), c)[0](batch()) for c in (EXACTLY, CODED)]
    assert torch.equal(*outputs)


def errors(config: Config, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Measured and predicted errors of attention's gradients."""
    found = diagnose(model, lambda m, x: m(x).float().square().mean(), batch(), config=config)
    of_attention = [y for y in found.layers if y.gradient.startswith("attention")]
    return {y.gradient: (y.relative, y.predicted or 0.0) for y in of_attention}


def test_diagnose_says_what_it_costs():
    assert not errors(EXACTLY, Attention().bfloat16())
    found = errors(CODED, Attention().bfloat16())
    assert set(found) == {"attention q", "attention k"}
    for measured, predicted in found.values():
        assert measured < 0.02
        assert predicted / 3 < measured < predicted * 3


def test_what_all_tokens_share_adds_no_error():
    """Rounded as it is, an output that is mostly common would make these gradients 4% wrong."""
    for measured, _ in errors(CODED, Attention(common=5.0).bfloat16()).values():
        assert measured < 0.005


@pytest.mark.parametrize(
    ("config", "head_dim", "tokens", "reason"),
    [
        (Config(attention_output="e2m5", keep_exact=("*:getitem:*",)), 64, 128, "keep_exact"),
        (Config(attention_output="e2m5", skip=("out",)), 64, 128, "by choice"),
        (Config(attention_output="e2m5"), 8, 128, "equal groups"),
        (Config(attention_output="e2m5"), 64, 1, "few tokens"),
    ],
)
def test_what_keeps_it_exact(config, head_dim, tokens, reason):
    model = Attention(head_dim).bfloat16()
    explanation = fp8pass.explain(model, batch(tokens), config=config)
    saved = explanation.graphs[0].plan.saved
    outputs = [s for s in saved if "attention" in s.op and s.dtype == "bfloat16"]
    assert [s.kept_as for s in outputs] == ["exact"]
    assert reason in outputs[0].reason


def test_any_tolerance_keeps_it_as_the_user_says():
    config = Config(attention_output="e2m5", error_tolerance=float("inf"), compiler="eager")
    _, (coded,) = kept(config, Attention().bfloat16())
    assert coded.kept_as == "e2m5 1×32 centred"


def test_a_budget_keeps_it_so_or_computes_it_again():
    config = Config(attention_output="e2m5", memory_budget=0.95, compiler="eager")
    plan, coded = kept(config, Attention().bfloat16())
    assert all(s.kept_as.startswith("e2m5") for s in coded)
    assert_plan_is_true(Attention().bfloat16(), batch(), config=config)
    assert plan.saved_bytes <= 0.95 * kept(CODED, Attention().bfloat16())[0].saved_bytes


@pytest.mark.parametrize("recipe", ["linear", "exact"])
def test_it_needs_low_bits(recipe):
    with pytest.raises(ConfigError, match="excludes"):
        Config.recipe(recipe, attention_output="e2m5")


def test_it_is_one_of_the_choices():
    with pytest.raises(ConfigError, match="Did you mean 'e2m5'"):
        Config(attention_output="e2m6")
    with pytest.raises(ConfigError, match="attention_output='e2m5' out"):
        Config(simulate="e4m3", attention_output="e2m5")
