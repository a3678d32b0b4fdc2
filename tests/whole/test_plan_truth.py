"""Invariant 2: autograd saves exactly the tensors of the plan."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    MLP,
    benchmark_models,
    compiled,
    count_planned,
    count_saved,
    gpt2,
    llama,
    tokens,
    vit,
)
from torch import nn
from torch.nn import functional as F

from fp8pass.config import Config
from fp8pass.dialect.formats import FORMATS


def decoder():
    models = benchmark_models()
    cos, sin = models.rope_tables(32, 32, torch.device("cpu"))
    x = torch.randn(2, 32, 128).bfloat16().requires_grad_()
    return models.Stack(1, 128, 4, 352).bfloat16(), (x, cos, sin), (x,)


def normed():
    model = nn.Sequential(
        nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
    )
    x = torch.randn(48, 128)
    return model, (x,), ()


def head():
    """A skipped output head, softmax and a loss."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head = MLP((64, 128, 64)), nn.Linear(64, 96)

        def forward(self, x, y):
            return F.cross_entropy(self.lm_head(torch.tanh(self.body(x))), y)

    return Head(), (torch.randn(32, 64), torch.randint(96, (32,))), ()


MODELS = {
    "mlp": lambda: (MLP(), (torch.randn(32, 64),), ()),
    "odd rows": lambda: (MLP(), (torch.randn(17, 64),), ()),
    "normed": normed,
    "head": head,
    "decoder": decoder,
    "llama": lambda: (llama(), (tokens(),), ()),
    "gpt2": lambda: (gpt2(), (tokens(),), ()),
    "vit": lambda: (vit(), (torch.randn(2, 3, 32, 32),), ()),
}


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("recipe", ["coat", "linear"])
@pytest.mark.parametrize("name", list(MODELS))
def test_saved_tensors_match_the_plan(name, recipe):
    check(name, Config.recipe(recipe, compiler="eager"))


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("recipe", ["coat", "linear"])
def test_saved_tensors_of_generated_code_match_the_plan(recipe):
    check("normed", Config.recipe(recipe))


@pytest.mark.long
@pytest.mark.parametrize("format", ["e2m1", "e2m2", "e2m3"])
def test_packed_tensors_match_the_plan(format):
    plan = check("decoder", Config(save_format=format, compiler="eager"))
    low_bit = [s for s in plan.saved if s.saved_as.startswith(format)]
    assert low_bit
    for s in low_bit:
        elements, group = s.bytes_exact // 2, int(s.saved_as.split("×")[1])
        assert s.bytes == FORMATS[format].stored_bytes(elements, group)
        assert len(s.tensors) == len(FORMATS[format].planes) + 1


@pytest.mark.long
def test_packed_tensors_of_generated_code_match_the_plan():
    check("normed", Config(save_format="e2m3"))


def check(name, config):
    model, args, held = MODELS[name]()
    program, spy = compiled(model.train(), config)
    saved = count_saved(program, args, (*held, *model.buffers()))
    assert saved == count_planned(spy.plan)
    sizes = {(t.dtype, t.shape): t.bytes for s in spy.plan.saved for t in s.tensors}
    assert sum(sizes[key] * count for key, count in saved.items()) == spy.plan.saved_bytes
    for key, bytes_ in sizes.items():
        dims = [] if key[1] == "scalar" else [int(d) for d in key[1].split("×")]
        element = getattr(torch, key[0]).itemsize
        assert bytes_ == torch.Size(dims).numel() * element
    return spy.plan


@pytest.mark.long
def test_a_graph_input_that_needs_a_gradient_is_saved_quantized():
    """Blocks are compiled one by one. The input of the second block is the output of the first."""
    blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128)) for _ in range(2)]
    programs = [compiled(block) for block in blocks]
    x = torch.randn(32, 128, requires_grad=True)
    h = programs[0][0](x)
    saved = count_saved(programs[1][0], (h,), ())
    assert saved == count_planned(programs[1][1].plan)
    assert ("float32", "32×128") not in saved
    assert programs[1][1].plan.saved_bytes < 0.5 * h.numel() * 4


@pytest.mark.parametrize("part", [lambda y: y[0], lambda y: y[1].t(), lambda y: y[:, 0]])
def test_a_saved_part_of_a_tensor_does_not_keep_the_rest(part):
    """Inductor removes copies with the strides of their operand."""

    def normed(x, w):
        h = F.softsign(part(F.linear(x, w)))
        return F.layer_norm(h, h.shape[-1:])

    program, spy = compiled(normed, Config())
    x = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    w = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    assert count_saved(program, (x, w), ()) == count_planned(spy.plan)


@pytest.mark.long
def test_coat_saves_fewer_bytes_than_linear_and_stock():
    saved = {}
    for recipe in ("coat", "linear"):
        torch._dynamo.reset()
        model, args, _ = decoder()
        program, spy = compiled(model, Config.recipe(recipe, compiler="eager"))
        program(*args)
        saved[recipe] = spy.plan.saved_bytes
        stock = spy.plan.stock_bytes
    assert saved["coat"] < 0.9 * saved["linear"] < 0.9 * stock
