"""The table of features that are trained in pairs, used by the tests and the documentation."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from training import CHANGE, SIZE, Feature, Training, Way
from ways import FSDP, WAYS

import fp8pass
from fp8pass.demo.model import Decoder
from fp8pass.graph.tags import ROLE
from fp8pass.hardware import GPUS
from fp8pass.optim.shards import find_quantized
from fp8pass.passes.joint import scatter_quantized
from fp8pass.runtime import copies
from fp8pass.weights.quantized_parameter import QuantizedWeight


class Option(Feature):
    """Options of the compilation."""

    ours = True

    def __init__(self, name: str, one_of: str = "", **options: Any) -> None:
        super().__init__(name)
        self.one_of, self.options = one_of, options

    def configure(self, t: Training) -> None:
        t.options |= self.options


class Blocks(Option):
    """Blocks of 128 elements, also in layers that two ranks share."""

    size = replace(SIZE, dim=256, ffn=512, peak_lr=2e-3)


class Scatters(Option):
    """Reduce-scatters of a graph in 8 bits, with sequence parallelism if no other way is chosen."""

    ranks = 2

    def configure(self, t: Training) -> None:
        super().configure(t)
        rewrite = patch.object(scatter_quantized, "_rewrite", wraps=scatter_quantized._rewrite)
        self._rewrite = t.patches.enter_context(rewrite)

    def finish(self, t: Training) -> None:
        assert t.plain or t.way is not BY_NAME["sequence parallel"] or self._rewrite.called


class OnGpu(Feature):
    """GEMMs and saves as on a GPU, on which a tiny model gains nothing by FP8."""

    ours = True

    def configure(self, t: Training) -> None:
        t.patches.enter_context(patch("fp8pass.hardware.rates_of", lambda device: GPUS["H200"]))


class Mixed(OnGpu):
    """GEMMs in FP8 and in BF16 in one layer, as on a GPU on which some GEMMs do not gain."""

    def configure(self, t: Training) -> None:
        super().configure(t)
        t.patches.enter_context(patch("fp8pass.passes.gemm_choice._gain", _gain_by_shape))


def _gain_by_shape(gemm: Any, layer: Any, *_: Any) -> float:
    """Return a gain for some GEMMs of each layer; no gain for all GEMMs of square weights."""
    widens = layer.out_features > layer.in_features
    if layer.out_features == layer.in_features:
        return 0.0
    return math.inf if gemm.meta[ROLE] in ("forward", "wgrad" if widens else "dgrad") else 0.0


class DecoderWithLogits(Decoder):
    """Returns its logits together with the loss, as models of Hugging Face do."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss, logits


class DroppedLogits(Option):
    """A model that returns logits and loss, with `return_logits=False`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, head_chunks=2, return_logits=False)

    def change_model(self, t: Training) -> None:
        t.model.__class__ = DecoderWithLogits

    def finish(self, t: Training) -> None:
        if t.way is BY_NAME["pipeline"]:
            return
        # Under FSDP2 only the blocks are compiled, so the logits are values.
        assert t.logits.isnan().all() == (not isinstance(t.way, FSDP))


class Optimizer(Feature):
    """fp8pass's AdamW."""

    ours = True
    one_of = "optimizer"

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name)
        self.options = options

    def configure(self, t: Training) -> None:
        t.optimizer_options = {**(t.optimizer_options or {}), **self.options}


class Muon(Optimizer):
    """Muon for the matrices of hidden layers, and AdamW for all other parameters."""

    ours = False

    def configure(self, t: Training) -> None:
        super().configure(t)
        t.muon = True


class Attach(Optimizer):
    """Updates within the backward."""

    def configure(self, t: Training) -> None:
        super().configure(t)
        t.steps_in_backward = True

    def start(self, t: Training) -> None:
        t.step_in_backward()


class Frozen(Feature):
    """All linear layers of blocks but the last's are frozen; with fp8pass in FP8."""

    def __init__(self, name: str, *, quantized: bool) -> None:
        super().__init__(name)
        self.quantized = quantized
        self.one_of = "weights"

    def change_model(self, t: Training) -> None:
        t.model.layers[0].requires_grad_(False)
        if self.quantized and not t.plain:
            fp8pass.quantize_frozen(t.model)


class FP8Linear(nn.Linear):
    """A layer as loaders of FP8 checkpoints leave it."""


class FromCheckpoint(Feature):
    """The weights of a frozen block come from an FP8 checkpoint, with a scale for each row."""

    one_of = "weights"

    def change_model(self, t: Training) -> None:
        t.model.layers[0].requires_grad_(False)
        for layer in [m for m in t.model.layers[0].modules() if isinstance(m, nn.Linear)]:
            scale = layer.weight.float().abs().amax(1, keepdim=True) / 448
            data = (layer.weight.float() / scale).to(torch.float8_e4m3fn)
            layer.weight.data = (data.float() * scale).to(layer.weight.dtype)
            if not t.plain:
                layer.__class__ = FP8Linear
                layer.weight = nn.Parameter(data, requires_grad=False)
                layer.register_buffer("weight_scale", scale)
        if not t.plain:
            fp8pass.quantize_frozen(t.model)


class LowRank(nn.Module):
    """A frozen layer with an adapter. Its rank is too small for FP8, so `merge_adapters` runs."""

    RANK = 4

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, self.RANK, bias=False)
        self.b = nn.Linear(self.RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class Adapters(Feature):
    """Adapters train the first block. Its weights are frozen, and fp8pass stores them in FP8."""

    one_of = "weights"

    def add_layers(self, t: Training, model: nn.Module) -> None:
        for parent in list(model.layers[0].modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LowRank(child))

    def change_model(self, t: Training) -> None:
        for layer in t.model.layers[0].modules():
            if isinstance(layer, LowRank):
                layer.base.requires_grad_(False)
        if not t.plain:
            fp8pass.quantize_frozen(t.model)


class OffloadedWeights(Feature):
    """Weights in host memory, FP8 data on the device."""

    ours = True
    one_of = "weights"

    def change_model(self, t: Training) -> None:
        with patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1):
            fp8pass.optim.offload_weights(t.model, "cpu")

    def configure(self, t: Training) -> None:
        t.dtype = torch.bfloat16
        t.optimizer_options = t.optimizer_options or {}

    def finish(self, t: Training) -> None:
        offloaded = [isinstance(p, QuantizedWeight) for p in t.model.parameters() if p.ndim == 2]
        assert any(offloaded) != t.way.shards


class Unfrozen(Feature):
    """A block that is trained from the middle of the training on."""

    one_of = "weights"

    def change_model(self, t: Training) -> None:
        t.model.layers[0].requires_grad_(False)

    def before_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            t.add_trained(t.first_block())


class Precision(Feature):
    """Dtypes of weights and of the forward."""

    one_of = "precision"

    def __init__(
        self, name: str, dtype: torch.dtype, autocast: torch.dtype | None, scaled: bool = False
    ) -> None:
        super().__init__(name)
        self.dtype, self.autocast, self.scaled = dtype, autocast, scaled

    def configure(self, t: Training) -> None:
        t.dtype, t.autocast = self.dtype, self.autocast
        t.scaler = torch.amp.GradScaler("cpu", init_scale=128.0) if self.scaled else None


class Accumulation(Feature):
    """Two micro-batches in each step."""

    def configure(self, t: Training) -> None:
        t.accumulate = 2


class Clipping(Feature):
    """Gradients clipped by their global norm."""

    def configure(self, t: Training) -> None:
        t.max_norm = 1.0

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if t.scaler:
            for optimizer in t.optimizers:
                t.scaler.unscale_(optimizer)
        if not t.steps_in_backward:
            t.way.clip(t, 1.0)


class Average(Feature):
    """An exponential average of the weights, which takes their place in the middle."""

    def start(self, t: Training) -> None:
        t.average = {n: p.detach().clone().float() for n, p in t.model.named_parameters()}

    def after_step(self, t: Training, step: int) -> None:
        with torch.no_grad():
            for name, p in t.model.named_parameters():
                t.average[name].lerp_(p.detach().float(), 0.5)
                if step == CHANGE and p.requires_grad:
                    p.copy_(t.average[name])


class Loading(Feature):
    """A checkpoint of model and optimizer that is saved and loaded two steps later."""

    def before_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            states = [optimizer.state_dict() for optimizer in t.optimizers]
            t.saved = copy.deepcopy((t.model.state_dict(), states))
        if step == CHANGE + 2:
            model, states = t.saved
            t.model.load_state_dict(model)
            for optimizer, saved in zip(t.optimizers, states, strict=True):
                optimizer.load_state_dict(saved)


class Checkpointing(Feature):
    """Activation checkpointing of each block."""

    def change_model(self, t: Training) -> None:
        for layer in t.model.layers:
            forward = layer.forward
            layer.forward = _checkpointed(forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)

    return run


class Evaluation(Feature):
    """Losses without gradients between steps."""

    def before_step(self, t: Training, step: int) -> None:
        if step % 4 == 3:
            t.model.eval()
            t.way.evaluate(t, t.batches[0][0])
            t.model.train()


class Watched(Feature):
    """A Monitor that samples every third step."""

    ours = True

    def configure(self, t: Training) -> None:
        t.monitor = fp8pass.Monitor(every=3)

    def after_step(self, t: Training, step: int) -> None:
        assert t.monitor is not None
        t.monitor.step()


class Guarded(Feature):
    """A Guard that would lower the learning rate and roll back, as far as the setting allows."""

    ours = True

    def start(self, t: Training) -> None:
        act = () if t.steps_in_backward else ("lower lr",)
        act = (*act, "roll back") if t.way.ranks == 1 else ()
        t.guard = fp8pass.Guard(None, *t.optimizers, model=t.model, act=act, every=2)

    def after_step(self, t: Training, step: int) -> None:
        t.guard.step(torch.tensor(t.losses[-1] if t.losses else 5.5))

    def finish(self, t: Training) -> None:
        assert not t.guard.events, t.guard.events


class Tool(Feature):
    """A tool that runs a step of its own between a backward and the optimizer."""

    ours = True

    def __init__(self, name: str, tool: Callable[..., Any]) -> None:
        super().__init__(name)
        self.tool = tool

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            t.way.use_tool(t, self.tool)


class Explained(Feature):
    """explain in the middle of training."""

    ours = True

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            t.way.explain(t)


class OffloadedStates(Feature):
    """Optimizer states in host memory."""

    ours = True

    def configure(self, t: Training) -> None:
        t.optimizer_options = {**(t.optimizer_options or {}), "offload": ("states",)}
        t.patches.enter_context(patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 10))

    def finish(self, t: Training) -> None:
        for optimizer in t.optimizers:
            assert all(group["offload"] == ("states",) for group in optimizer.param_groups)


class OffloadedActivations(Option):
    """Saved tensors in host memory."""

    def __init__(self, name: str) -> None:
        # A bandwidth that scales with the tiny model.
        link = {"offload": True, "host_bandwidth": 5e12}
        super().__init__(name, "budget", memory_budget=0.3, **link)

    def configure(self, t: Training) -> None:
        super().configure(t)
        t.patches.enter_context(
            patch("fp8pass.activation_memory.host_transfer.SMALLEST_COPY", 1 << 10)
        )
        copies.lane_of.cache_clear()

    def finish(self, t: Training) -> None:
        assert copies.lane_of(torch.device("cpu")).buffers._taken > 0


class Compressed(Feature):
    """Gradients, and the weights that FSDP2 gathers, in 8 bits on the wire."""

    ranks = 2
    one_of = "compress"

    def __init__(self, name: str, sums: str = "none") -> None:
        super().__init__(name)
        self.sums = sums

    def configure(self, t: Training) -> None:
        if self.sums != "none":
            t.accumulate = 2
        # Weights are gathered in 8 bits where layers compute in BF16.
        t.param_dtype = None if t.autocast else torch.bfloat16

    def after_distribution(self, t: Training) -> None:
        if not t.plain:
            t.sent = fp8pass.distributed.compress(t.outer, sums=self.sums)

    def finish(self, t: Training) -> None:
        if t.plain:
            return
        assert 0 < t.sent.gradients.ratio < 0.6, t.sent
        if t.way is BY_NAME["FSDP2"] and t.param_dtype:
            assert 0 < t.sent.weights.ratio < 0.6, t.sent


class OffloadedShards(FSDP):
    """FSDP2 with exact shards in host memory, which gathers FP8 data."""

    def configure(self, t: Training) -> None:
        super().configure(t)
        t.dtype = t.param_dtype = torch.bfloat16
        t.optimizer_options = t.optimizer_options or {}

    def after_distribution(self, t: Training) -> None:
        if t.plain:
            return
        if not any(isinstance(feature, Compressed) for feature in t.features):
            fp8pass.distributed.compress(t.outer)
        with patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1):
            fp8pass.optim.offload_weights(t.model, "cpu")

    def finish(self, t: Training) -> None:
        if not t.plain:
            assert any(find_quantized(p) is not None for p in t.model.parameters())


SUMS = "sums of micro-batches in 8 bits"
SHARDS = "FSDP2, shards in host memory"

FEATURES: tuple[Feature, ...] = (
    Option("recipe linear", "recipe", recipe="linear"),
    Option("recipe agoq", "recipe", recipe="agoq"),
    Option("recipe exact", "recipe", recipe="exact"),
    Option("recipe mxfp8", "recipe", recipe="mxfp8"),
    Blocks("recipe block", "recipe", recipe="block", fp8_gemms="all"),
    Option("memory budget", "budget", memory_budget=0.6),
    OffloadedActivations("activations in host memory"),
    Option("head in chunks", head_chunks=2),
    DroppedLogits("logits not returned"),
    Option("precise accumulation", fast_accumulation=()),
    Mixed("FP8 in some GEMMs"),
    OnGpu("no gain by FP8"),
    Optimizer("fp8pass AdamW"),
    Optimizer("preset fp8-lm", preset="fp8-lm"),
    Optimizer("preset coat-paper", preset="coat-paper"),
    Muon("Muon"),
    Attach("step_in_backward"),
    OffloadedStates("states in host memory"),
    Frozen("frozen weights", quantized=False),
    Frozen("frozen weights in FP8", quantized=True),
    FromCheckpoint("weights of an FP8 checkpoint"),
    Adapters("LoRA"),
    OffloadedWeights("weights in host memory"),
    Unfrozen("a block unfrozen later"),
    Precision("BF16 weights", torch.bfloat16, None),
    Precision("BF16 autocast", torch.float32, torch.bfloat16),
    Precision("FP16 autocast, GradScaler", torch.float32, torch.float16, scaled=True),
    Accumulation("micro-batches"),
    Clipping("clipping"),
    Average("averaged weights"),
    Loading("checkpoint loaded"),
    Checkpointing("activation checkpointing"),
    Evaluation("evaluation"),
    Watched("Monitor"),
    Guarded("Guard"),
    Tool("diagnose", fp8pass.diagnose),
    Tool("calibrate", fp8pass.calibrate),
    Explained("explain"),
    *WAYS,
    Compressed("compress"),
    Compressed(SUMS, sums="e4m3"),
    Scatters("scatters in FP8", scatter_format="e4m3"),
    OffloadedShards(SHARDS, shards=2),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


class Refused(NamedTuple):
    """The reason why two features cannot be combined, and the error that users get.

    Attributes:
        by: what raises the error: "fp8pass"; "PyTorch" if the plain training fails, too.
        error: a regular expression that the error matches.
        why: the reason, for the documentation.
    """

    by: str
    error: str
    why: str


REFUSED: dict[tuple[str, str], Refused] = {
    **{
        pair: Refused(
            "fp8pass", "GradScaler", "weights are updated before the scaler can check the gradients"
        )
        for pair in (
            ("step_in_backward", "FP16 autocast, GradScaler"),
            ("FP16 autocast, GradScaler", "average_sums"),
        )
    },
    ("weights in host memory", "average_sums"): Refused(
        "fp8pass", "supports plain parameters only", "sums of such weights are not averaged"
    ),
    ("step_in_backward", "DDP"): Refused(
        "fp8pass",
        "DistributedDataParallel reduces gradients over ranks only after",
        "DDP reduces gradients after the backward has updated the weights",
    ),
    **{
        ("weights in host memory", name): Refused(
            "fp8pass", r"it is in float32; call model\.bfloat16\(\) first", "it needs BF16 weights"
        )
        for name in ("BF16 autocast", "FP16 autocast, GradScaler")
    },
    ("FP16 autocast, GradScaler", "tensor parallel"): Refused(
        "PyTorch",
        "got mixed torch.Tensor and DTensor",
        "GradScaler cannot unscale DTensors and other tensors together",
    ),
    **{
        (way, name): Refused(
            "fp8pass",
            "No module of this .* reduces gradients over ranks",
            "no gradients are reduced over ranks",
        )
        for way in ("average_sums", "tensor parallel", "sequence parallel", "pipeline")
        for name in ("compress", SUMS)
    },
    **{
        ("LoRA", way): Refused(
            "PyTorch",
            "ColwiseParallel currently only support",
            "PyTorch splits linear layers only, not layers with adapters",
        )
        for way in (
            "tensor parallel",
            "sequence parallel",
            "tensor parallel and FSDP2",
            "scatters in FP8",
        )
    },
    **{
        ("a block unfrozen later", name): Refused(
            "PyTorch",
            "attempting to assign a gradient with dtype",
            "FSDP2 with mixed precision cannot train a block that was frozen when it was sharded",
        )
        for name in ("compress", SUMS)
    },
    **{
        ("a block unfrozen later", way): Refused(
            "PyTorch",
            "some parameters appear in more than one parameter group",
            "SequenceParallel makes frozen norms trainable",
        )
        for way in ("sequence parallel", "scatters in FP8")
    },
    ("a block unfrozen later", "DDP"): Refused(
        "PyTorch",
        "drifted apart",
        "DDP reduces only the parameters that were trained when it was made: wrap the model again",
    ),
    ("a block unfrozen later", "average_sums"): Refused(
        "PyTorch", "drifted apart", "DDP, with which the test compares, cannot train it"
    ),
}


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Yield all pairs of features that are not alternatives."""
    for a, b in itertools.combinations(FEATURES, 2):
        if not a.one_of or a.one_of != b.one_of:
            yield a, b


def ranks_of(pair: Sequence[Feature]) -> int:
    """Return how many ranks train a pair."""
    return max(feature.ranks for feature in trained_with(pair))


def trained_with(pair: Sequence[Feature]) -> tuple[Feature, ...]:
    """Return the features of a training: some need a way to distribute the model."""
    if any(isinstance(x, Way) for x in pair):
        return tuple(pair)
    for kind, way in ((Compressed, "FSDP2"), (Scatters, "sequence parallel")):
        if any(isinstance(x, kind) for x in pair):
            return (*pair, BY_NAME[way])
    return tuple(pair)
