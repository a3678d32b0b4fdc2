"""Module paths do not depend on the way in which Dynamo reaches the modules."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from helpers import MLP, Spy, compiled, llama, tokens
from monitor_helpers import monitored
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass import Config, Monitor
from fp8pass.dynamo import Backend
from fp8pass.graph.names import clean_path

SIZES = (64, 128, 64)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self'].layers.0.up", "layers.0.up"),
        ("L['self']._modules['layers'][0]", "layers.0"),
        ("L['fn'].0._orig_mod.up", "0.up"),
        ("L['self']", ""),
        ("L['args'][0].model.layers.0", "model.layers.0"),
        ("L['args'][1].layers.0", "args.1.layers.0"),
        ("L['self'].__dict__['_modules']['base_model'].layers.0", "base_model.layers.0"),
        ("L['fn'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("L['self'].layers.0._checkpoint_wrapped_module.up", "layers.0.up"),
        ("L['self'].heads.self.args.0", "heads.self.args.0"),
        ("L['self'].self.up", "self.up"),
        ("G['model'].layers.0", "model.layers.0"),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
        ("L.G.up", "L.G.up"),
    ],
)
def test_paths_from_dynamo_sources(source, path):
    assert clean_path(source) == path == clean_path(path)


class Wrapper(nn.Module):
    """Looks up missing attributes in its base model, as PEFT's models do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, x):
        return self.base_model(x)


def checkpointed() -> nn.Module:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP(SIZES)

        def forward(self, x):
            return checkpoint(self.mlp, x, use_reentrant=False)

    return Checkpointed()


def with_autocast() -> nn.Module:
    """Replace the forward of a model by one under autocast, as accelerate does."""
    model, original = nn.Sequential(MLP(SIZES)), nn.Sequential.forward

    @wraps(original)
    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return original(*args, **kwargs)

    model.forward = forward.__get__(model)
    return model


class Terse(nn.Module):
    """Names its `self` differently, and has a graph break in its forward."""

    def __init__(this) -> None:
        super().__init__()
        this.s, this.mlp = nn.Linear(64, 64), MLP(SIZES)

    def forward(s, x):
        x = s.s(x)
        torch._dynamo.graph_break()
        return s.mlp(x)


@pytest.mark.filterwarnings("ignore:skip pattern")  # of the graph before the break
@pytest.mark.parametrize("how", ["whole", "in place", "own forward"])
def test_self_may_have_any_name(how):
    model = Terse()
    if how == "own forward":
        model.forward = Terse.forward.__get__(model)
    spy = Spy()
    backend = Backend(Config(skip=("mlp.up",), compiler="eager"), spy)
    program = model if how == "in place" else torch.compile(model, backend=backend)
    if how == "in place":
        model.compile(backend=backend)
    program(torch.randn(4, 64))
    assert [y.module for plan in spy.plans for y in plan.linears] == ["s", "mlp.up", "mlp.down"]
    assert {s.module for plan in spy.plans for s in plan.saved} <= dict(
        model.named_modules()
    ).keys()


def test_self_may_have_any_name_in_diagnose():
    model, batch = Terse(), torch.randn(32, 64)
    diagnosed = fp8pass.diagnose(model, lambda m, b: m(b).square().mean(), batch)
    names = {name for name, _ in model.named_modules()}
    assert {"s", "mlp.up", "mlp.down"} <= {y.module for y in diagnosed.layers} <= names


def test_arguments_of_functions_keep_their_names():
    def function(model, x):
        return model(x)

    program, spy = compiled(function)
    program(MLP(SIZES), torch.randn(4, 64))
    assert [y.module for y in spy.plan.linears] == ["model.up", "model.down"]


MODELS = {
    "autocast": (with_autocast, "0"),
    "own getattr": (lambda: Wrapper(Wrapper(MLP(SIZES))), "base_model.base_model"),
    "checkpointed": (checkpointed, "mlp"),
    "a compiled part": (lambda: nn.Sequential(torch.compile(MLP(SIZES))), "0"),
}


@pytest.mark.parametrize("name", MODELS)
def test_paths_in_plans_and_patterns(name):
    make, path = MODELS[name]
    program, spy = compiled(make(), Config(skip=(f"{path}.up",), compiler="eager"))
    program(torch.randn(4, 64))
    assert [y.module for y in spy.plan.linears] == [f"{path}.up", f"{path}.down"]
    assert [bool(y.fp8) for y in spy.plan.linears] == [False, True]
    names = dict(make().named_modules())
    for saved in spy.plan.saved:
        assert saved.module in {n.replace("._orig_mod", "") for n in names}


def test_paths_in_a_monitor():
    """The monitor reports the paths of the model."""
    model, monitor = with_autocast(), Monitor()
    monitored(model, monitor)(torch.randn(4, 64)).float().mean().backward()
    monitor.step()
    names = {name for name, _ in model.named_modules()}
    assert {"0.up", "0.down"} <= {row.module for row in monitor.latest} <= names


def test_accelerate_and_peft():
    """The plan has the paths of the model that accelerate and PEFT wrapped."""
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    lora = peft.LoraConfig(r=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), lora)
    names = {name for name, _ in model.named_modules()}
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    program, spy = compiled(model)
    program(input_ids=tokens())
    assert {y.module for y in spy.plan.linears} < names
    assert {s.module for s in spy.plan.saved} < names
