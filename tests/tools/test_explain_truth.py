"""`explain` reports exactly the bytes that autograd saves, for all ways to compile a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import MLP, llama, tokens
from torch import Tensor, nn

from fp8pass import compat, explain
from fp8pass.compilation import Compilation

OPTIONS = {"compiler": "eager"}


@pytest.fixture(autouse=True)
def no_lowered_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the passes on forward and backward graphs, which these tests do not need."""
    monkeypatch.setattr(Compilation, "shows_halves", False)


def saved(program: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that autograd saves for the backward, without parameters and buffers."""
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = program(*args, **kwargs)
    own = {x.untyped_storage().data_ptr() for x in (*program.parameters(), *program.buffers())}
    assert output is not None
    return sum(x.untyped_storage().nbytes() for at, x in found.items() if at not in own)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="fp8pass", options=OPTIONS)
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend="fp8pass", options=OPTIONS)
    return model


def regions(model: nn.Module) -> nn.Module:
    utils = pytest.importorskip("accelerate.utils")
    if not hasattr(utils, "compile_regions"):
        pytest.skip("this accelerate compiles no regions")
    return utils.compile_regions(model, backend="fp8pass", options=OPTIONS)


def checkpointed(model: nn.Module) -> nn.Module:
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_hidden_layers=2, use_cache=False))


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


class Interrupted(nn.Module):
    """A residual block followed by a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), MLP((64, 128, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        torch._dynamo.graph_break()
        return x


class Stack(nn.Module):
    """Blocks with graph breaks, so that Dynamo compiles the forward of each block separately."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Interrupted() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Case:
    """A compiled model, the number of layers in its graphs, and whether graphs cover the model."""

    make: Callable[[], nn.Module]
    linears: int
    whole: bool = True


CASES = {
    "in place": Case(lambda: compiled_in_place(llama()), 8),
    "blocks, 2": Case(lambda: compiled_blocks(llama(num_hidden_layers=2)), 14, False),
    "blocks, 8": Case(lambda: compiled_blocks(llama(num_hidden_layers=8)), 56, False),
    "regions of accelerate": Case(lambda: regions(llama(num_hidden_layers=2)), 15, False),
    "graph breaks": Case(lambda: compiled_in_place(Stack(5)), 10),
    "mixtral": Case(lambda: compiled_in_place(mixtral()), 11),
    "lora": Case(lambda: compiled_in_place(lora()), 12),
    "checkpointed": Case(lambda: compiled_in_place(checkpointed(llama())), 8),
    "checkpointed blocks": Case(
        lambda: compiled_blocks(checkpointed(llama(num_hidden_layers=2))), 14, False
    ),
}


WITHOUT_HEAD = ("blocks, 2", "blocks, 8", "checkpointed blocks")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_total_is_what_autograd_saves(name):
    case = CASES[name]
    model = case.make()
    args, kwargs = (torch.randn(4, 32, 64),), {}
    if name != "graph breaks":
        args, kwargs = (), {"input_ids": tokens()}
    got = explain(model, *args, **kwargs)
    torch._dynamo.reset()
    with compat.fresh_compilation():
        assert got.saved_bytes == saved(model, args, kwargs)
    plans = [g.plan for g in got.graphs for _ in g.runs]
    assert sum(len(plan.linears) for plan in plans) == case.linears
    assert bool(got.outside_bytes) == bool(got.parts) == (not case.whole)
    assert got.outside_linears == (["lm_head"] if name in WITHOUT_HEAD else [])
    names = {name.replace("_orig_mod.", "") for name, _ in model.named_modules()}
    for compiled in got.graphs:
        paths = {y.module for y in compiled.plan.linears}
        for module in got.modules_of(compiled):
            assert {f"{module}.{path}".strip(".") for path in paths} <= names


@pytest.mark.long
def test_layers_that_pytorch_runs_eagerly_are_named():
    """Dynamo runs a forward eagerly if a loop has a graph break, also layers after the loop."""

    class Headed(Stack):
        def __init__(self) -> None:
            super().__init__(2)
            self.first, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 96)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(x)

    explanation = explain(compiled_in_place(Headed()), torch.randn(4, 32, 64))
    assert explanation.outside_linears == ["first", "lm_head"]
    text = " ".join(str(explanation).split())
    assert (
        "2 linear layers run outside of compiled graphs, in high precision: first, lm_head. "
        "PyTorch compiled only some of the model; TORCH_LOGS=graph_breaks shows why." in text
    )


@pytest.mark.long
def test_paths_of_blocks_are_reported_once():
    explanation = explain(compiled_blocks(llama(num_hidden_layers=2)), tokens())
    text, data = str(explanation), explanation.to_dict()
    assert "graph 0 of model.layers.* (runs 2×): linear layers" in text
    assert "Only parts of the model are compiled: model.layers.*." in text
    assert "MiB are saved outside of compiled graphs" in text
    assert data["parts"] == data["graphs"][0]["modules"] == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_parts_run_afterwards_with_their_compilation(wrapped):
    model = nn.Sequential(MLP((64, 128, 64)), nn.Linear(64, 64))
    if wrapped:
        model[0] = torch.compile(model[0], backend="fp8pass", options=OPTIONS)
    else:
        compiled_in_place(model[0])
    x = torch.randn(16, 64)
    want = model(x)
    assert explain(model, x).parts == ("0",)
    assert torch.equal(model(x), want)


def test_a_model_without_a_graph_is_reported():
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                torch._dynamo.graph_break()
            return self.up(x)

    text = " ".join(str(explain(Breaking(), torch.randn(32, 64))).split())
    assert "1 linear layer runs outside of compiled graphs, in high precision: up." in text
    assert "PyTorch compiled nothing of the model" in text
