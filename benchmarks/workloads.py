"""The models of `never_slower.py`, each with a batch. Every forward returns a loss.

The models have their published sizes; `tiny` replaces them by sizes for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import layer
import lora
import moe
import torch
import transformers
from model import MODELS, new_llama
from model import TINY as TINY_LLAMAS
from models import GPT, DiT, rope_tables, rotate
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        make: returns the model and its inputs for a device, in tiny sizes if the second argument is
            set.
        autocast: whether weights are in FP32 under BF16 autocast; otherwise weights are in BF16.
        blocks: path of the layers that are compiled one by one; '' compiles the whole model.
        inner: whether the inputs get gradients, like the inputs of a layer within a model.
    """

    make: Callable[[torch.device, bool], Made]
    autocast: bool = True
    blocks: str = ""
    inner: bool = False

    def place(self, device: torch.device, tiny: bool) -> Made:
        """Return the model, with a loss, and its batch on a device."""
        dtype = torch.float32 if self.autocast else torch.bfloat16
        model, batch = self.make(device, tiny)
        for name, x in batch.items():
            floats = x.is_floating_point()
            batch[name] = x.to(device, dtype if floats else None).requires_grad_(
                self.inner and floats
            )
        return Loss(model).to(device, dtype), batch


class Loss(nn.Module):
    """Returns the loss of a model, or the mean square of an output without a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        y = self.model(**inputs)
        y = getattr(y, "loss", y)
        return y.float().square().mean() if y.ndim else y


# --- plain PyTorch --------------------------------------------------------------------------------


class NanochatBlock(nn.Module):
    """Norms without weights, rotary attention with normalized queries and keys, squared ReLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // min(128, hidden // 2)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = _rms_norm(x)
        q, k, v = (
            projection(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = (_rms_norm(rotate(y, cos, sin)) for y in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(_rms_norm(x))).square())


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Nanochat(nn.Module):
    """nanochat's model of a given depth, with a hidden size of 64 times the depth."""

    def __init__(self, depth: int, vocabulary: int, length: int, device: torch.device) -> None:
        super().__init__()
        hidden = 64 * depth
        self.tokens = nn.Embedding(vocabulary, hidden)
        blocks = [NanochatBlock(hidden) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        tables = rope_tables(length, hidden // blocks[0].heads, device)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = _rms_norm(self.tokens(ids).bfloat16())
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = 15 * torch.tanh(self.lm_head(_rms_norm(x)).float() / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with a ReLU after each but the last."""
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their targets; an MLP updates the nodes."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.messages = nn.ModuleList(mlp(2 * hidden, hidden, hidden) for _ in range(layers))
        self.updates = nn.ModuleList(mlp(2 * hidden, hidden, hidden) for _ in range(layers))

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([nodes[sources], nodes[targets]], dim=-1))
            received = torch.zeros_like(nodes).index_add(0, targets, sent.to(nodes.dtype))
            nodes = nodes + update(torch.cat([nodes, received], dim=-1))
        return nodes


class Recommender(nn.Module):
    """DLRM: embeddings of categories, products of all pairs of features, and two MLPs."""

    def __init__(self, tables: int, rows: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, hidden) for _ in range(tables))
        self.dense = mlp(13, 512, 256, hidden)
        pairs = (tables + 1) * tables // 2
        self.top = mlp(hidden + pairs, 1024, 1024, 512, 256, 1)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.dense(numbers)
        found = [table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True)]
        features = torch.stack([dense, *(x.to(dense.dtype) for x in found)], dim=1)
        products = (features @ features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1))


# --- constructors ---------------------------------------------------------------------------------


def random_tokens(vocabulary: int, batch: int, seq: int, *names: str) -> Batch:
    """Return a dict with random tokens [batch, seq] for each of the names."""
    return {name: torch.randint(vocabulary, (batch, seq)) for name in names}


def _gpt2(device: torch.device, tiny: bool) -> Made:
    layers, hidden, heads, vocabulary, batch, seq = (
        (2, 64, 2, 128, 2, 32) if tiny else (12, 768, 12, 50304, 16, 1024)
    )
    model = GPT(layers, hidden, heads, vocabulary, seq)
    return model, random_tokens(vocabulary, batch, seq, "ids", "targets")


def _nanochat(depth: int, device: torch.device, tiny: bool) -> Made:
    depth, vocabulary, batch, seq = (2, 128, 2, 32) if tiny else (depth, 65536, 16, 2048)
    model = Nanochat(depth, vocabulary, seq, device)
    return model, random_tokens(vocabulary, batch, seq, "ids", "targets")


def _llama(name: str, adapters: bool, device: torch.device, tiny: bool) -> Made:
    size = (TINY_LLAMAS if tiny else MODELS)[name]
    size = replace(size, batch=1, seq=2 * size.seq) if adapters else size
    model = new_llama(size, device)
    if adapters:
        lora.add_lora(model, model.model.layers)
        model.model.embed_tokens.register_forward_hook(lambda *args: args[-1].requires_grad_())
    return model, random_tokens(size.vocabulary, size.batch, size.seq, "input_ids", "labels")


def _layer(case: layer.Case, device: torch.device, tiny: bool) -> Made:
    case = layer.TINY if tiny else case
    model = layer.Stack(case.layers, case.hidden, case.heads, case.ffn)
    layer.init_weights(model)
    cos, sin = rope_tables(case.seq, case.hidden // case.heads, device)
    return model, {"x": torch.randn(case.batch, case.seq, case.hidden), "cos": cos, "sin": sin}


def _experts(case: moe.Case, device: torch.device, tiny: bool) -> Made:
    case = moe.TINY if tiny else case
    return moe.MoELayer(case), {"x": torch.randn(case.batch, case.seq, case.hidden)}


def _dit(device: torch.device, tiny: bool) -> Made:
    layers, hidden, heads, batch, tokens = (2, 64, 2, 2, 16) if tiny else (12, 768, 12, 128, 256)
    batch_of = {"x": torch.randn(batch, tokens, hidden), "c": torch.randn(batch, hidden)}
    return DiT(layers, hidden, heads), batch_of


def _graph(device: torch.device, tiny: bool) -> Made:
    layers, hidden, nodes, edges = (2, 32, 64, 256) if tiny else (6, 256, 50_000, 400_000)
    ends = random_tokens(nodes, 2, edges, "ends")["ends"]
    batch = {"nodes": torch.randn(nodes, hidden), "sources": ends[0], "targets": ends[1]}
    return GraphNetwork(layers, hidden), batch


def _recommender(device: torch.device, tiny: bool) -> Made:
    tables, rows, hidden, batch = (4, 100, 16, 32) if tiny else (26, 100_000, 128, 16384)
    categories = torch.randint(rows, (batch, tables))
    batch_of = {"numbers": torch.randn(batch, 13), "categories": categories}
    return Recommender(tables, rows, hidden), batch_of


def _hugging_face(
    config: str,
    model: str,
    sizes: Mapping[str, Any],
    small: Mapping[str, Any],
    inputs: Callable[[Any, bool], Batch],
    device: torch.device,
    tiny: bool,
) -> Made:
    made = getattr(transformers, config)(use_cache=False, **{**sizes, **(small if tiny else {})})
    return getattr(transformers, model)(made), inputs(made, tiny)


def _text(batch: int, seq: int, config: Any, tiny: bool) -> Batch:
    shape = (2, 32) if tiny else (batch, seq)
    return random_tokens(config.vocab_size, *shape, "input_ids", "labels")


def _image(batch: int, config: Any, tiny: bool) -> Batch:
    batch, size = (2, 32) if tiny else (batch, config.image_size)
    labels = torch.randint(config.num_labels, (batch,))
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": labels}


def _sound(batch: int, seq: int, config: Any, tiny: bool) -> Batch:
    batch, seq = (2, 16) if tiny else (batch, seq)
    frames = 2 * config.max_source_positions
    labels = random_tokens(config.vocab_size, batch, seq, "labels")
    return {"input_features": torch.randn(batch, config.num_mel_bins, frames), **labels}


QWEN = {"tie_word_embeddings": True, "num_key_value_heads": 2, "vocab_size": 151936}
ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {**ENCODER, "intermediate_size": 128, "vocab_size": 128}
T5 = {
    "decoder_start_token_id": 0,
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "dropout_rate": 0.0,
}
SMALL_T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "d_kv": 32}
WHISPER = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048,
           "decoder_ffn_dim": 2048, "encoder_attention_heads": 8,
           "decoder_attention_heads": 8}  # fmt: skip
SMALL_WHISPER = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128,
                 "decoder_ffn_dim": 128, "max_source_positions": 32, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2}  # fmt: skip
MAMBA = {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "n_groups": 1,
         "vocab_size": 50288}  # fmt: skip
SMALL_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 128,
               "chunk_size": 16, "state_size": 16}  # fmt: skip
CONVNEXT = {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}
SMALL_CONVNEXT = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2}
UNREGULARIZED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _hf(*args: Any, **options: Any) -> Workload:
    return Workload(partial(_hugging_face, *args), **options)


def _qwen(hidden: int, ffn: int, layers: int, heads: int) -> Workload:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
             "num_attention_heads": heads, **QWEN}  # fmt: skip
    text = partial(_text, 8, 1024)
    return _hf("Qwen2Config", "Qwen2ForCausalLM", sizes, SMALL, text, autocast=False)


WORKLOADS = {
    **{case.name: Workload(partial(_layer, case), False, inner=True) for case in layer.CASES},
    "GPT-2 124M": Workload(_gpt2),
    "nanochat d12": Workload(partial(_nanochat, 12)),
    "nanochat d20": Workload(partial(_nanochat, 20)),
    "Llama 1.2B": Workload(partial(_llama, "1B", False), autocast=False),
    "Llama 7B": Workload(partial(_llama, "7B", False), autocast=False, blocks="model.model.layers"),
    "LoRA 7B": Workload(partial(_llama, "7B", True), autocast=False, blocks="model.model.layers"),
    "Qwen2.5-0.5B": _qwen(896, 4864, 24, 14),
    "Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12),
    "Mixtral layer": Workload(partial(_experts, moe.CASES[0]), False, inner=True),
    "Qwen3-MoE layer": Workload(partial(_experts, moe.CASES[1]), False, inner=True),
    "ViT-B/16": _hf("ViTConfig", "ViTForImageClassification", UNREGULARIZED,
                    {**ENCODER, "intermediate_size": 128, "image_size": 32}, partial(_image, 128)),
    "DiT-B/2": Workload(_dit),
    "BERT base": _hf("BertConfig", "BertForMaskedLM", UNREGULARIZED, SMALL,
                     partial(_text, 32, 512)),
    "T5 base": _hf("T5Config", "T5ForConditionalGeneration", T5, SMALL_T5, partial(_text, 16, 512)),
    "Whisper base": _hf("WhisperConfig", "WhisperForConditionalGeneration", WHISPER, SMALL_WHISPER,
                        partial(_sound, 16, 256)),
    "Mamba-2 130M": _hf("Mamba2Config", "Mamba2ForCausalLM", MAMBA, SMALL_MAMBA,
                        partial(_text, 4, 1024)),
    "ConvNeXt-B": _hf("ConvNextConfig", "ConvNextForImageClassification", CONVNEXT, SMALL_CONVNEXT,
                      partial(_image, 64)),
    "graph network": Workload(_graph),
    "recommender": Workload(_recommender),
}  # fmt: skip
