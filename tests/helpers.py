"""Helpers of many tests: capture plans and graphs, run steps, compare results."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.fx_passes import pad_mm

from fp8pass import compat, explain
from fp8pass.compilation import Compilation, CompiledGraph, Inputs
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.graph.nodes import copy_module
from fp8pass.partition import Partitioner
from fp8pass.passes import Context
from fp8pass.passes.runner import PassRecord
from fp8pass.plan import Plan
from fp8pass.testing.checks import stock_eager as stock_eager
from fp8pass.testing.steps import TrainingStep as TrainingStep
from fp8pass.testing.steps import assert_same_step as assert_same_step
from fp8pass.testing.steps import count_planned as count_planned
from fp8pass.testing.steps import count_saved as count_saved
from fp8pass.testing.steps import identical as identical
from fp8pass.testing.steps import step as step
from fp8pass.tools.explanation import Explanation

EXACT = Config.recipe("exact")
EXACT_EAGER = Config.recipe("exact", compiler="eager")
COAT_EAGER = Config.recipe("coat", compiler="eager")


# --- plans and graphs ---------------------------------------------------------------------------


@dataclass(eq=False)
class Spy:
    """Observer that records every plan and the graphs of every pass.

    Attributes:
        halves: whether the passes on forward and backward graphs run even if no code is generated
            from them. This doubles the time.
    """

    halves: bool = False
    plans: list[Plan] = field(default_factory=list)
    passes: list[list[PassRecord]] = field(default_factory=list)

    def __call__(self, compiled: CompiledGraph) -> None:
        self.plans.append(compiled.plan)
        self.passes.append(compiled.passes)

    @property
    def plan(self) -> Plan:
        """Return the only plan."""
        (plan,) = self.plans
        return plan


def compiled(
    model: Callable[..., Any], config: Config = COAT_EAGER, *, halves: bool = False, **kwargs: Any
) -> tuple[Callable[..., Any], Spy]:
    """Compile `model` with fp8pass. Return the compiled model and the spy with its plans."""
    spy = Spy(halves)
    return torch.compile(model, backend=Backend(config, spy), **kwargs), spy


def pad_gemms(monkeypatch: Any, padded: bool = True) -> None:
    """Make Inductor pad every GEMM, or no GEMM. By default it decides by timing, on GPUs only."""
    for check in ("can_pad", "_should_pad"):
        monkeypatch.setattr(pad_mm, check, lambda *args, **kwargs: padded)


@dataclass
class JointGraph:
    """A joint graph before any pass."""

    gm: fx.GraphModule
    ctx: Context

    def calls(self, target: Any) -> list[fx.Node]:
        """Return the nodes that call `target`."""
        return [n for n in self.gm.graph.nodes if n.target is target]

    @property
    def code(self) -> str:
        """Return the graph as Python code."""
        return self.gm.graph.python_code("self").src


def capture_joint(
    model: Callable[..., Any], *args: Any, config: Config = COAT_EAGER, **compile_options: Any
) -> JointGraph:
    """Return the only joint graph of `model(*args)`, before any pass."""
    (joint,) = capture_joints(model, *args, config=config, **compile_options)
    return joint


def capture_joints(
    model: Callable[..., Any], *args: Any, config: Config = COAT_EAGER, **compile_options: Any
) -> list[JointGraph]:
    """Return the joint graphs of `model(*args)`, which exist only if something needs a gradient."""
    found: list[JointGraph] = []

    class Capture(Partitioner):
        def __call__(self, gm, joint_inputs, **kwargs):  # type: ignore
            copy = copy_module(gm)
            found.append(JointGraph(copy, self.context(copy, **kwargs)))
            return compat.stock_partition(gm, joint_inputs, **kwargs)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compat.compile_fx(
            gm,
            list(inputs),
            inner_compile=lambda graph, _, **kwargs: compat.interpret(graph),
            config_patches={
                "custom_partitioner_fn": Capture(Compilation(config, Inputs.of(inputs)))
            },
        )

    torch.compile(model, backend=backend, **compile_options)(*args)
    return found


# --- reference backends -------------------------------------------------------------------------


def aot_exact(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Backend `aot_eager` with fp8pass's partitioner and recipe `exact`."""
    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=Partitioner(Compilation(EXACT, Inputs.of(inputs))),
        keep_inference_input_mutations=True,
    )(gm, inputs)


# --- numbers ------------------------------------------------------------------------------------


def sqnr(got: Tensor, want: Tensor) -> float:
    """Return the signal to quantization noise ratio in dB."""
    noise = (got.double() - want.double()).norm()
    return float(20 * torch.log10(want.double().norm() / noise))


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def benchmark_models() -> Any:
    """Import benchmarks/models.py."""
    path = Path(__file__).parents[1] / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("benchmark_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks up functions here
    spec.loader.exec_module(module)
    return module


# --- models -------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Two linear layers around an activation, with dropout."""

    def __init__(self, sizes: tuple[int, int, int] = (64, 128, 32), dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(sizes[0], sizes[1])
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.nn.functional.gelu(self.up(x))))


class FFN(nn.Module):
    """The SwiGLU block of a Llama."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Residuals(nn.Module):
    """Equal residual layers with a tenth of the operators of a Llama."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MLP((64, 128, 64)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def llama(attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return a tiny Llama with grouped-query attention and by default one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes), attn_implementation=attention))


@cache
def explained_llama() -> Explanation:
    """Explain a Llama of four layers. The report draws two equal layers as one."""
    return explain(llama(num_hidden_layers=4).bfloat16(), tokens(), labels=tokens())


def gpt2(**changes: Any) -> nn.Module:
    """Return a tiny GPT-2, with Conv1D layers, dropout and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes), use_cache=False))


def vit() -> nn.Module:
    """Return a tiny ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=32,
            patch_size=8,
            num_labels=10,
        )
    )


def tokens(batch: int = 2, seq: int = 16, vocab: int = 96) -> Tensor:
    """Return random token ids."""
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(batch * seq))
