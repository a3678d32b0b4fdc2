"""What attention's backward loses if q, k, v or the output are kept in low bits.

    python benchmarks/attention_storage.py          on the CPU, about half an hour

Causal attention with its four projections, in FP64: gradients of q, k, v and of the four weights
from exact values, from values that were rounded to a format between forward and backward, and with
projections in FP8 as recipe `coat` runs them, whose noise is the measure. As kernels do, the
backward has the forward's log-sums exactly, and computes scores again from what is kept.

Values are random numbers (`normal`), with scores of four times the deviation (`sharp`), with a
first token that most of the others look at (`sink`), and those of a demo model's last layer after
some steps of training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import environment, print_table, write_json
from torch import Tensor
from torch.nn import functional as F

from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import Decoder, rope_tables, rotate
from fp8pass.demo.sizes import SIZES
from fp8pass.demo.train import train

LENGTHS = (128, 512, 2048)
HEAD_DIMS = (64, 128)
HEADS = 2
STEPS = (2, 20, 60, 150)  # of training
GRADIENTS = ("q", "k", "v", "Wq", "Wk", "Wv", "Wo")

# Mantissa bits, exponent of the least normal number, largest value.
ELEMENTS = {
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
    "e2m5": (5, 0, 7.875),
    "e2m3": (3, 0, 7.5),
}
ROW, HEAD, TENSOR = "row", "head", "tensor"


@dataclass(frozen=True)
class Rounding:
    """A format and the elements that share a scale: a row of a head, 16 of it, a head, or all."""

    element: str
    shared: str | int = ROW

    def __call__(self, x: Tensor) -> Tensor:
        """`x` as it is read back; its last two dimensions are tokens and features."""
        if isinstance(self.shared, int):
            groups = x.unflatten(-1, (-1, self.shared))
            return self._rounded(groups, (-1,)).flatten(-2)
        return self._rounded(x, {ROW: (-1,), HEAD: (-2, -1), TENSOR: None}[self.shared])

    def _rounded(self, x: Tensor, shared: tuple[int, ...] | None) -> Tensor:
        mantissa, least, largest = ELEMENTS[self.element]
        amax = x.abs().amax(shared, keepdim=True) if shared else x.abs().amax()
        scale = torch.where(amax == 0, 1.0, amax / largest)
        exponent = torch.frexp(x / scale).exponent.sub(1).clamp_min(least)
        step = scale * torch.exp2(exponent - mantissa)
        return (x / step).round() * step


@dataclass(frozen=True)
class Option:
    """One way to keep attention's values.

    Attributes:
        name: for the table.
        rounding: how values are rounded that are not kept exactly.
        values: which these are, out of q, k, v and o, the output.
        centred: whether it is their difference from their mean over tokens that is rounded, as
            softmax and its gradient leave a common part of k, of v and of the output out.
        consistent: what is computed from them again and not taken from the forward: `sums`, the
            log-sums, so that probabilities add up to one; `delta`, the row sums of the gradient
            times the output, from probabilities.
    """

    name: str
    rounding: Rounding
    values: str
    centred: bool = False
    consistent: tuple[str, ...] = ()

    def stored(self, kept: Kept) -> Kept:
        """What the backward reads."""
        return replace(kept, **{name: self._read(getattr(kept, name)) for name in self.values})

    def _read(self, x: Tensor) -> Tensor:
        mean = x.mean(-2, keepdim=True) if self.centred else 0.0
        return self.rounding(x - mean) + mean


E4M3 = Rounding("e4m3")
E2M5 = Rounding("e2m5")
FINE_E4M3, FINE_E2M5 = Rounding("e4m3", 32), Rounding("e2m5", 32)
AGAIN = ("sums", "delta")
OPTIONS = (
    Option("output e4m3", E4M3, "o"),
    Option("output e4m3 1×16", Rounding("e4m3", 16), "o"),
    Option("output e4m3 1×32, centred", FINE_E4M3, "o", centred=True),
    Option("output e2m5", E2M5, "o"),
    Option("output e2m5 1×32", FINE_E2M5, "o"),
    Option("output e2m5 1×32, centred", FINE_E2M5, "o", centred=True),
    Option("v e4m3", E4M3, "v"),
    Option("v e2m5 1×32, centred", FINE_E2M5, "v", centred=True),
    Option("v, output e2m5 1×32, centred", FINE_E2M5, "vo", centred=True),
    Option("q e2m5 1×32, centred", FINE_E2M5, "q", centred=True),
    Option("k e2m5 1×32, centred", FINE_E2M5, "k", centred=True),
    Option("q, k, v e4m3", E4M3, "qkv"),
    Option("q, k, v e4m3 1×16", Rounding("e4m3", 16), "qkv"),
    Option("q, k, v e4m3, a scale a head", Rounding("e4m3", HEAD), "qkv"),
    Option("q, k, v e5m2", Rounding("e5m2"), "qkv"),
    Option("q, k, v e2m3", Rounding("e2m3"), "qkv"),
    Option("q, k, v e2m5 1×32, centred", FINE_E2M5, "qkv", centred=True),
    Option("q, k, v e4m3, sums again", E4M3, "qkv", consistent=("sums",)),
    Option("q, k, v e4m3, attention again", E4M3, "qkv", consistent=AGAIN),
    Option("q, k, v e2m5 1×32, centred, attention again", FINE_E2M5, "qkv", True, AGAIN),
    Option("q, k, v, output e4m3", E4M3, "qkvo"),
)
TOGETHER = ("output e2m5 1×32, centred", "q, k, v, output e4m3")


@dataclass
class Layer:
    """Inputs of an attention layer in FP64, and the gradient of its output.

    Attributes:
        x: normed inputs [L, D].
        weights: of q, k and v [H·d, D] each and of the output [D, H·d].
        gradient: of the result [L, D].
        head_dim: d.
    """

    x: Tensor
    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    gradient: Tensor
    head_dim: int

    def heads(self, x: Tensor) -> Tensor:
        """[L, H·d] as [H, L, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def turned(self, x: Tensor, back: bool = False) -> Tensor:
        """Rotary embeddings of [H, L, d]; or their gradient, which turns back."""
        cos, sin = (t.double() for t in rope_tables(len(self.x), self.head_dim))
        return rotate(x, cos, -sin if back else sin)


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled and masked scores [H, L, L]."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(mask, -torch.inf)


@dataclass
class Kept:
    """What the forward of attention has computed, [H, L, d] each; log-sums are [H, L, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    sums: Tensor

    @classmethod
    def of(cls, layer: Layer, linear: Callable[[Tensor, Tensor], Tensor]) -> Kept:
        """The forward of a layer whose projections are `linear(x, weight)`."""
        q, k, v = (layer.heads(linear(layer.x, w)) for w in layer.weights[:3])
        q, k = layer.turned(q), layer.turned(k)
        scores = causal_scores(q, k)
        sums = scores.logsumexp(-1, keepdim=True)
        return cls(q, k, v, (scores - sums).exp() @ v, sums)


def attention_backward(
    kept: Kept, gradient: Tensor, consistent: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output, [H, L, d]."""
    scores = causal_scores(kept.q, kept.k)
    sums = scores.logsumexp(-1, keepdim=True) if "sums" in consistent else kept.sums
    p = (scores - sums).exp()
    dp = gradient @ kept.v.mT
    along = (p, dp) if "delta" in consistent else (gradient, kept.o)
    ds = p * (dp - (along[0] * along[1]).sum(-1, keepdim=True)) * kept.q.shape[-1] ** -0.5
    return ds @ kept.k, ds.mT @ kept.q, p.mT @ gradient


def exact(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def gradients(
    layer: Layer,
    kept: Kept,
    rounding: Callable[[Tensor], Tensor] = exact,
    consistent: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """All gradients of a layer, with operands of the backward's GEMMs rounded."""
    *_, wo = layer.weights
    dy = rounding(layer.gradient)
    dq, dk, dv = attention_backward(kept, layer.heads(dy @ rounding(wo)), consistent)
    found = {"q": dq, "k": dk, "v": dv}
    turned = layer.turned(dq, back=True), layer.turned(dk, back=True), dv
    for name, dx in zip(("Wq", "Wk", "Wv"), turned, strict=True):
        found[name] = rounding(dx.transpose(0, 1).flatten(1)).mT @ rounding(layer.x)
    return found | {"Wo": dy.mT @ rounding(kept.o.transpose(0, 1).flatten(1))}


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer of recipe `coat`: a scale for each token and for each output feature."""
    return E4M3(x) @ E4M3(weight).mT


def compared(wrong: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Any]:
    """The relative error of each gradient; of all the least cosine, and the ratio of norms."""
    pairs = {name: (wrong[name].ravel(), right[name].ravel()) for name in GRADIENTS}
    errors = {name: short((x - y).norm() / y.norm()) for name, (x, y) in pairs.items()}
    cosines = [short(F.cosine_similarity(x, y, dim=0)) for x, y in pairs.values()]
    norms = [short(x.norm() / y.norm()) for x, y in pairs.values()]
    beside = {"cosine": min(cosines), "norm": max(norms, key=lambda ratio: abs(ratio - 1))}
    return {"errors": errors, **beside}


def short(x: Tensor) -> float:
    """A number, with as many digits as are of use."""
    return float(f"{float(x):.4g}")


def measure(layer: Layer) -> Iterable[dict[str, Any]]:
    """The errors of FP8 projections and of each option, alone and on top of these."""
    kept = Kept.of(layer, lambda x, w: x @ w.mT)
    right = gradients(layer, kept)
    noisy = Kept.of(layer, fp8_linear)
    fp8 = Rounding("e4m3", TENSOR)
    yield {"option": "FP8 projections", **compared(gradients(layer, noisy, fp8), right)}
    backward = compared(gradients(layer, kept, fp8), right)
    yield {"option": "FP8 projections, backward only", **backward}
    for option in OPTIONS:
        stored = option.stored(kept)
        errors = compared(gradients(layer, stored, consistent=option.consistent), right)
        yield {"option": option.name, **errors, "mass": _mass(stored)}
    for option in (o for o in OPTIONS if o.name in TOGETHER):
        both = compared(gradients(layer, option.stored(noisy), fp8), right)
        yield {"option": f"FP8 projections, {option.name}", **both}


def _mass(kept: Kept) -> float:
    """How far probabilities of a row are from adding up to one, root mean square."""
    rows = (causal_scores(kept.q, kept.k) - kept.sums).exp().sum(-1)
    return short((rows - 1).square().mean().sqrt())


# --- layers -------------------------------------------------------------------------------------


def random_layer(length: int, head_dim: int, sharpness: float = 1.0) -> Layer:
    """Random inputs and weights; scores have a deviation of the square of `sharpness`."""
    torch.manual_seed(0)
    width = HEADS * head_dim
    gains = (sharpness, sharpness, 1.0, 1.0)
    weights = tuple(g * torch.randn(width, width).double() / width**0.5 for g in gains)
    x, gradient = torch.randn(2, length, width).double()
    return Layer(x, weights, gradient, head_dim)


def sink_layer(length: int, head_dim: int) -> Layer:
    """A first token of huge entries, as trained models have, which all others look at."""
    layer = random_layer(length, head_dim)
    x, (wq, wk, wv, wo) = layer.x, layer.weights
    x[:, 0], x[:, 1] = 1.0, 0.0
    x[0], x[0, 1] = x[0] / 40.0, 40.0
    # Of a rotary embedding, the pair of features that turns least; in all heads.
    slow = torch.arange(HEADS) * head_dim + head_dim // 2 - 1
    wq[slow, 0] = 8.0
    wk[slow, 1], wv[:, 1] = head_dim**0.5 / 40.0, wv[:, 1] / 400.0
    return replace(layer, weights=(wq, wk, wv, wo))


def trained_layers(head_dim: int, lengths: Iterable[int]) -> dict[tuple[int, int], Layer]:
    """The last layer of a demo model, by the steps of its training and the length of its text."""
    size = SIZES["small"]
    heads = size.dim // head_dim
    size = replace(size, heads=heads, kv_heads=heads, seq=512, batch=4, steps=max(STEPS))
    torch.manual_seed(0)
    model = Decoder(size)
    data = Data.of(read_text(None), size, torch.device("cpu"))
    found: dict[tuple[int, int], Layer] = {}

    def look(step: int, loss: float) -> None:
        if step in STEPS:
            seen = copy.deepcopy(model)
            found.update({(step, n): layer_of(seen, data, n, head_dim) for n in lengths})

    train(model, data, size, 0, look)
    return found


def layer_of(model: Decoder, data: Data, length: int, head_dim: int) -> Layer:
    """The first heads of a model's last layer, on held-out text."""
    size = replace(SIZES["small"], seq=length, batch=1)
    model.cos, model.sin = rope_tables(length, head_dim)
    attention: Any = model.layers[-1].attention
    found: dict[str, Tensor] = {}

    def watch(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found["x"] = inputs[0].detach()
        output.register_hook(lambda gradient: found.update(gradient=gradient))

    handle = attention.register_forward_hook(watch)
    model(*next(data.held_out_batches(size, 1))).backward()
    handle.remove()
    width = HEADS * head_dim
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    wq, wk, wv = (p.weight.detach().double()[:width] for p in projections)
    weights = wq, wk, wv, attention.o_proj.weight.detach().double()[:, :width]
    return Layer(found["x"][0].double(), weights, found["gradient"][0].double(), head_dim)


def layers(lengths: Iterable[int]) -> Iterable[tuple[dict[str, Any], Layer]]:
    """All layers that are measured, with what they are."""
    for head_dim in HEAD_DIMS:
        trained = trained_layers(head_dim, lengths)
        for length in lengths:
            made = {
                "normal": random_layer(length, head_dim),
                "sharp": random_layer(length, head_dim, sharpness=2.0),
                "sink": sink_layer(length, head_dim),
                **{f"{step} steps": trained[step, length] for step in STEPS},
            }
            for values, layer in made.items():
                yield {"values": values, "length": length, "head_dim": head_dim}, layer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    default = Path(__file__).parent / "results/attention_storage.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    results = []
    for what, layer in layers(args.lengths):
        measured = list(measure(layer))
        results += [what | row for row in measured]
        rows = [
            {"option": row["option"]}
            | {g: f"{row['errors'][g]:.4f}" for g in GRADIENTS}
            | {"mass": f"{row.get('mass', 0):.3f}"}
            for row in measured
        ]
        print_table(", ".join(f"{k} {v}" for k, v in what.items()), rows)
    write_json(args.out, {**environment(), "results": results})


if __name__ == "__main__":
    main()
