"""Train LoRA: speed and memory of large models, and losses of small ones.

    python benchmarks/lora.py speed                        all runs that are not in the results yet
    python benchmarks/lora.py speed --variants "Llama-2-7B, BF16"
    python benchmarks/lora.py experts                      a mixture of experts of 30B
    python benchmarks/lora.py diffusion                    a diffusion transformer of 10B
    python benchmarks/lora.py losses                       a small model, 1,500 steps
    python benchmarks/lora.py losses-experts               a small mixture of experts, 300 steps
    python benchmarks/lora.py speed --tiny --out x.json    small models, on the CPU too

Adapters have rank 16 and compute the same values as PEFT's adapters without dropout. The model has
random weights in BF16. Only adapters are trained, with `torch.optim.AdamW(fused=True)`.

`speed` trains on sequences of 4,096 tokens. Layers are compiled one by one and share their code.
With fp8pass, the head and the loss are compiled as one module, in chunks of tokens. Every variant
runs in a separate process. Measured: tokens per second, by the median of the steps after the first
few; the memory peak of these steps, which is unknown with CUDA graphs; bytes of all weights; the
last loss. *GEMMs of adapters apart* leaves out the passes that merge the GEMMs of adapters.

`experts` measures the same numbers with adapters of the attention and of the stacked experts of a
Qwen3-30B-A3B. In BF16 the model needs more memory than a GPU of 80 GB has, so 8 of its 48 layers
are compared.

`diffusion` measures the same numbers with adapters of attention and MLPs of a DiT with the width
and the depth of FLUX.1, for one image of 4,608 tokens.

`losses` trains the model of 51M parameters of `quality.py convergence` on the source of Python's
standard library, in BF16. Every variant then trains adapters on PyTorch's source, under autocast.
The result is the loss on every tenth file, which is held out. `losses-experts` does the same for
the mixture of experts of `quality.py experts`, with adapters of attention and experts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import quality
import torch
import transformers
from alone import measure_each, print_result
from layer import CUDA_GRAPHS, with_fp8pass
from model import (
    MODELS,
    TIMED,
    TINY,
    WARM_UP,
    Compile,
    LossOnly,
    Size,
    compile_blocks,
    new_llama,
    train,
)
from models import DiT, MoEDecoder
from report import add_result, print_rows, record_parser, resume
from tables_models import lora_table
from tables_runs import lora_losses_table
from torch import Tensor, nn

import fp8pass
from fp8pass.demo.data import source_files
from fp8pass.weights.quantized_parameter import QuantizedWeight

RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-4
HEAD_CHUNKS = 4
LLAMA, LLAMA_3, QWEN = "Llama-2-7B", "Llama-3.1-8B", "Qwen2.5-7B"
SIZES = {
    LLAMA: replace(MODELS["7B"], batch=1, seq=4096),
    LLAMA_3: replace(MODELS["8B"], batch=2, seq=4096),
    QWEN: Size(3584, 18944, 28, 28, 4, 152064, batch=2, seq=4096, per_block=True),
}
BASELINE, FP8, FROZEN = "BF16", "fp8pass", "fp8pass, frozen in FP8"
# Memory budgets, as shares of the bytes that a layer saves; all other values are recomputed.
BUDGETS = (0.8, 0.6)
APART = f"{LLAMA}, {FROZEN}, GEMMs of adapters apart, CUDA graphs"
APART_PASSES = "merge_adapters,use_addmm,add_in_place"
# For each variant of `speed`: the model, how its weights are stored and compiled, and options.
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{LLAMA}, {how}": (LLAMA, how, {}) for how in (BASELINE, FP8, FROZEN)},
    **{f"{LLAMA}, {how}, CUDA graphs": (LLAMA, how, CUDA_GRAPHS) for how in (BASELINE, FROZEN)},
    **{
        f"{LLAMA}, {FROZEN}, budget {share}": (LLAMA, FROZEN, {"memory_budget": share})
        for share in BUDGETS
    },
    APART: (LLAMA, FROZEN, CUDA_GRAPHS),
    **{f"{m}, {how}": (m, how, {}) for m in (LLAMA_3, QWEN) for how in (BASELINE, FROZEN)},
}
STEPS, EXPERT_STEPS = 1500, 300
EXPERT_PRETRAINING = 600


class LoRA(nn.Module):
    """A linear layer plus the product of two small layers: `y = W x + B A x · α / r`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False).to(base.weight)
        self.b = nn.Linear(RANK, base.out_features, bias=False).to(base.weight)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * (ALPHA / RANK)


def add_lora(model: nn.Module, layers: nn.Module, skip: str = "") -> list[nn.Parameter]:
    """Freeze a model, add adapters to the linear layers in `layers`, return their weights.

    Layers with the name `skip` get no adapter.
    """
    model.requires_grad_(False)
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != skip:
                setattr(parent, name, LoRA(child))
    return [p for p in model.parameters() if p.requires_grad]


# --- speed and memory ---------------------------------------------------------------------------


def measure(variant: str, size: Size, device: torch.device) -> dict[str, Any]:
    """Train adapters in this process. Return the fields of a result."""
    name, how, options = VARIANTS[variant]
    if variant == APART:
        os.environ["FP8PASS_DISABLE_PASSES"] = APART_PASSES
    torch.manual_seed(0)
    family = transformers.Qwen2Config if name == QWEN else transformers.LlamaConfig
    llama = new_llama(size, device, family)
    trained = add_lora(llama, llama.model.layers)
    # The first layer also computes the gradient of its input, so that all layers share one graph.
    llama.model.embed_tokens.register_forward_hook(lambda *args: args[-1].requires_grad_())
    if how == FROZEN:
        fp8pass.quantize_frozen(llama)
    weight_bytes = sum(map(bytes_of, llama.parameters()))
    model: Any
    if how == BASELINE:
        in_bf16: Compile = partial(torch.compile, options=options or None)  # type: ignore[assignment]
        model = compile_blocks(llama, in_bf16)
    else:
        graphed = {name: options[name] for name in CUDA_GRAPHS if name in options}
        head = with_fp8pass(head_chunks=HEAD_CHUNKS, **graphed)
        model = LossOnly(llama, with_fp8pass(**options), head)
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)
    ids = torch.randint(size.vocabulary, (size.batch, size.seq), device=device)
    found = {**train(model, optimizer, ids), "weight_bytes": weight_bytes}
    if CUDA_GRAPHS.items() <= options.items():
        found["peak_bytes"] = None  # the allocator counts memory inside CUDA graphs as free
    return found


def bytes_of(weight: Tensor) -> int:
    """Return the bytes of a weight, or of its FP8 data and scales."""
    parts = [weight.fp8_data, weight.scales] if isinstance(weight, QuantizedWeight) else [weight]
    return sum(x.nbytes for x in parts)


def speed(args: argparse.Namespace) -> None:
    """Measure time and memory of every variant."""
    sizes = {name: replace(TINY["7B"], batch=1) for name in SIZES} if args.tiny else SIZES
    settings = {name: asdict(size) for name, size in sizes.items()}
    measure_all(
        args, "lora", settings, VARIANTS, lambda v, on: measure(v, sizes[VARIANTS[v][0]], on)
    )


def measure_all(
    args: argparse.Namespace,
    name: str,
    models: dict[str, Any],
    variants: Iterable[str],
    measure_variant: Callable[[str, torch.device], dict[str, Any]],
) -> None:
    """Measure each variant in a process, and add the results to a record."""
    if args.child:
        print_result(partial(measure_variant, args.child))
        return
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("These models need an NVIDIA GPU; --tiny runs on the CPU.")
    settings = {"models": models, "rank": RANK, "warm_up": WARM_UP, "timed": TIMED}
    path = args.out or Path(__file__).parent / f"results/{name}.json"
    record = resume(path, settings, again=args.again)
    command = [__file__, args.what, *(["--tiny"] if args.tiny else [])]
    measure_each(record, path, args.variants or variants, command)
    print_rows("LoRA", lora_table(record))


# --- experts ------------------------------------------------------------------------------------

QWEN3_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
TINY_MOE = QWEN3_MOE | {
    "vocab_size": 256,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
FEW_LAYERS, ALL_LAYERS = 8, 48
FEW, ALL = "Qwen3-30B-A3B with 8 layers", "Qwen3-30B-A3B"
# Number of layers in each variant.
EXPERT_VARIANTS = {
    f"{FEW}, {BASELINE}": FEW_LAYERS,
    f"{FEW}, {FROZEN}": FEW_LAYERS,
    f"{ALL}, {FROZEN}": ALL_LAYERS,
}


class ExpertLoRA(nn.Module):
    """Stacked experts with adapters, which compute the same as PEFT's `target_parameters`.

    Args:
        base: the experts.
        names: the names of their weights [E, N, K].
    """

    def __init__(self, base: nn.Module, *names: str) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name in names:
            weight = base.get_parameter(name)
            experts, rows, columns = weight.shape
            a = torch.empty_like(weight[:, :RANK]).normal_(std=columns**-0.5)
            self.a[name] = nn.Parameter(a)
            self.b[name] = nn.Parameter(weight.new_zeros(experts, rows, RANK))

    def forward(self, *args: Any) -> Tensor:
        adapted = {
            name: torch.baddbmm(
                self.base.get_parameter(name), self.b[name], self.a[name], alpha=ALPHA / RANK
            )
            for name in self.a
        }
        return torch.func.functional_call(self.base, adapted, args)


def new_moe(layers: int, shape: dict[str, Any], device: torch.device, *, quantize: bool) -> Any:
    """Return a Qwen3-MoE with adapters. Each layer is quantized before the next one is created."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    config = qwen3.Qwen3MoeConfig(**shape, num_hidden_layers=0, use_cache=False)
    config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = qwen3.Qwen3MoeForCausalLM(config)
        model.requires_grad_(False)
        for i in range(layers):
            layer: Any = qwen3.Qwen3MoeDecoderLayer(config, i)
            layer.requires_grad_(False)
            add_lora(layer, layer.self_attn)
            with torch.no_grad():
                for weight in layer.mlp.experts.parameters():
                    nn.init.normal_(weight, std=0.02)
                layer.mlp.experts = ExpertLoRA(layer.mlp.experts, "gate_up_proj", "down_proj")
            nn.init.normal_(
                layer.mlp.gate.weight, std=0.02
            )  # else all tokens go to the same experts
            model.model.layers.append(fp8pass.quantize_frozen(layer) if quantize else layer)
    config.num_hidden_layers = layers  # the model runs this number of layers
    torch.set_default_dtype(torch.float32)
    return model


def measure_experts(
    variant: str, shape: dict[str, Any], tokens: int, device: torch.device
) -> dict[str, Any]:
    """Train adapters of a mixture of experts. Return the fields of a result."""
    torch.manual_seed(0)
    moe = new_moe(EXPERT_VARIANTS[variant], shape, device, quantize=FROZEN in variant)
    trained = [p for p in moe.parameters() if p.requires_grad]
    moe.model.embed_tokens.register_forward_hook(lambda *args: args[-1].requires_grad_())
    weight_bytes = sum(map(bytes_of, moe.parameters()))
    model: Any
    if FROZEN in variant:
        model = LossOnly(moe, with_fp8pass(), with_fp8pass(head_chunks=HEAD_CHUNKS))
    else:
        model = compile_blocks(moe, torch.compile)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)
    ids = torch.randint(shape["vocab_size"], (1, tokens), device=device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert all(p.grad is not None for p in trained)
    return {**train(model, optimizer, ids), "weight_bytes": weight_bytes}


def experts(args: argparse.Namespace) -> None:
    """Measure time and memory of adapters of experts."""
    shape, tokens = (TINY_MOE, 128) if args.tiny else (QWEN3_MOE, SIZES[LLAMA].seq)
    measure_all(
        args, "lora_experts", {"shape": shape, "tokens": tokens}, EXPERT_VARIANTS,
        lambda variant, device: measure_experts(variant, shape, tokens, device),
    )  # fmt: skip


# --- diffusion ----------------------------------------------------------------------------------

# Blocks, width and heads of FLUX.1; tokens of an image of 1024 × 1024 and of its prompt.
FLUX = {"layers": 57, "hidden": 3072, "heads": 24, "tokens": 4096 + 512}
TINY_FLUX = {"layers": 2, "hidden": 128, "heads": 4, "tokens": 64}
DIFFUSION_VARIANTS = (f"DiT, {BASELINE}", f"DiT, {FP8}", f"DiT, {FROZEN}")


class Denoiser(nn.Module):
    """A DiT with the mean squared error of its output, for one fixed image and condition."""

    def __init__(self, shape: dict[str, int], device: torch.device) -> None:
        super().__init__()
        with device:
            self.dit = DiT(shape["layers"], shape["hidden"], shape["heads"]).bfloat16()
            noisy = torch.randn(1, shape["tokens"], shape["hidden"], dtype=torch.bfloat16)
            self.image, self.noise = noisy.requires_grad_(), torch.randn_like(noisy)
            self.condition = torch.randn(1, shape["hidden"], dtype=torch.bfloat16)

    def forward(self, **ids: Any) -> Any:
        """Return an object with the `loss`, as models of Hugging Face do."""
        loss = (self.dit(self.image, self.condition) - self.noise).float().square().mean()
        return SimpleNamespace(loss=loss)


def measure_diffusion(variant: str, shape: dict[str, int], device: torch.device) -> dict[str, Any]:
    """Train adapters of a diffusion transformer. Return the fields of a result."""
    torch.manual_seed(0)
    model = Denoiser(shape, device)
    trained = add_lora(model, model.dit.blocks, skip="modulation")
    if variant.endswith(FROZEN):
        fp8pass.quantize_frozen(model)
    weight_bytes = sum(map(bytes_of, model.parameters()))
    compile_block: Any = torch.compile if variant.endswith(BASELINE) else with_fp8pass()
    for i, block in enumerate(model.dit.blocks):
        model.dit.blocks[i] = compile_block(block)
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)
    tokens = torch.zeros(1, shape["tokens"], dtype=torch.int64, device=device)
    return {**train(model, optimizer, tokens), "weight_bytes": weight_bytes}


def diffusion(args: argparse.Namespace) -> None:
    """Measure time and memory of adapters of a diffusion transformer."""
    shape = TINY_FLUX if args.tiny else FLUX
    measure_all(
        args, "lora_diffusion", shape, DIFFUSION_VARIANTS,
        lambda variant, device: measure_diffusion(variant, shape, device),
    )  # fmt: skip


# --- losses -------------------------------------------------------------------------------------


def pytorch_source() -> list[Path]:
    """List the Python files of PyTorch."""
    return [f for f in source_files(Path(torch.__file__).parent) if f.suffix == ".py"]


def adapted(
    variant: str, seed: int, of: quality.Experiment, weights: dict[str, Tensor], on: torch.device
) -> nn.Module:
    """Return a model with given weights and new adapters."""
    model: Any = quality.new_model(of, seed, on)
    model.load_state_dict(weights)
    add_lora(model, model.layers, skip="router")
    if of.model is MoEDecoder:
        for layer in model.layers:
            layer.mlp = ExpertLoRA(layer.mlp, "gate_up", "down")
    if variant == FROZEN:
        fp8pass.quantize_frozen(model)
    return model


def losses(args: argparse.Namespace) -> None:
    """Measure the losses of every variant."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    of_experts = args.what == "losses-experts"
    first = quality.EXPERIMENTS["experts"] if of_experts else quality.SMALL
    if of_experts:
        first = replace(first, size=replace(first.size, steps=EXPERT_PRETRAINING))
    steps = EXPERT_STEPS if of_experts else STEPS
    if args.tiny:
        first, steps = replace(first, size=quality.TINY), quality.TINY.steps
    size = replace(first.size, steps=steps)
    of = replace(first, size=size, files=pytorch_source)
    name = "lora_losses_experts" if of_experts else "lora_losses"
    path = args.out or Path(__file__).parent / f"results/{name}.json"
    settings = {**asdict(size), "rank": RANK, "last": quality.LAST}
    record = resume(path, settings, again=args.again)
    done = {(r["variant"], r["seed"]) for r in record["results"]}
    names = args.variants or (BASELINE, FP8, FROZEN)
    pretrained = quality.new_model(first, 0, device)
    quality.Trainer(quality.Variant(), first, pretrained).run(BASELINE, first.size.peak_lr, 0)
    for seed, variant in itertools.product(args.seeds, names):
        if (variant, seed) in done:
            continue
        model = adapted(variant, seed, of, pretrained.state_dict(), device)
        how = quality.Variant(None if variant == BASELINE else {})
        result = quality.Trainer(how, of, model).run(variant, size.peak_lr, seed)
        add_result(path, record, asdict(result), ("variant", "seed"))
    print_rows("LoRA, a small model", lora_losses_table(record))


def main() -> None:
    """Run the command line."""
    commands = {
        "speed": speed,
        "experts": experts,
        "diffusion": diffusion,
        "losses": losses,
        "losses-experts": losses,
    }
    parser = record_parser(__doc__)
    parser.add_argument("what", choices=commands)
    names = {*VARIANTS, *EXPERT_VARIANTS, *DIFFUSION_VARIANTS, BASELINE, FP8, FROZEN}
    parser.add_argument("--variants", nargs="+", choices=names)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="seeds of `losses`")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    commands[args.what](args)


if __name__ == "__main__":
    main()
