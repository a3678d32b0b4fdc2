"""The tools with frozen layers and adapters of low rank, nested and named as in PEFT."""

from __future__ import annotations

import pytest
import torch
from helpers import MLP
from torch import Tensor, nn

import fp8pass
from fp8pass import Config

EAGER = Config(compiler="eager")


class LoraLinear(nn.Module):
    """A frozen layer with an adapter of rank 8."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name, a in self.lora_A.items():
            result = result + self.lora_B[name](a(x)) * 2.0
        return result


class Wrapper(nn.Module):
    """Wraps a module under a name and forwards attributes, like LoraModel and PeftModel."""

    def __init__(self, name: str, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped_as = name
        self.add_module(name, wrapped)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.__dict__["wrapped_as"]), name)

    def forward(self, *args, **kwargs):
        return getattr(self, self.wrapped_as)(*args, **kwargs)


@pytest.fixture
def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = MLP((64, 128, 64))
    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(model, name, LoraLinear(layer))
    return Wrapper("base_model", Wrapper("model", model))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_diagnose(adapted):
    found = fp8pass.diagnose(adapted, loss, torch.randn(32, 64), config=EAGER)
    modules = {y.module for y in found.layers}
    assert "base_model.model.down.base_layer" in modules
    assert all(y.relative < 0.3 for y in found.layers)


def test_diagnose_compares_adapters_that_share_gemms():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.layers = nn.ModuleList(LoraLinear(nn.Linear(64, 64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sin(self.first(x))
            return sum(torch.sin(layer(x)) for layer in self.layers)

    torch.manual_seed(0)
    found = fp8pass.diagnose(Shared(), loss, torch.randn(64, 64), config=EAGER)
    assert {y.gradient for y in found.layers} == {"input", "weight"}
    assert all(y.relative < 0.1 for y in found.layers)


@pytest.mark.long
def test_bisect(adapted):
    found = fp8pass.bisect(adapted, loss, torch.randn(32, 64), config=EAGER, most=1)
    assert found.units
    assert all(c.name.startswith("base_model.model.") for c in found.culprits)


def test_calibrate(adapted):
    found = fp8pass.calibrate(adapted, loss, torch.randn(32, 64), config=EAGER)
    assert found
    assert all(name.startswith("base_model.model.") for name, *_ in found)
