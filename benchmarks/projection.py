"""What a step would take on many GPUs, over links of many speeds: a projection, not a measurement.

    python benchmarks/projection.py    from results/model.json and results/distributed.json

Assumptions:

- FSDP2 by decoder layer, 8192 tokens on each GPU, one micro-batch a step. A GPU computes as fast as
  a single one trains Llama-2-7B (`model.py`, with torch's AdamW, whose time, which shrinks with
  shards, stays in); a 70B model takes as many times longer as it has more operations a token.
- A GPU sends, in each step, its part of (n - 1) / n of all weights twice, for the forward and the
  backward, and of all gradients once, at the speed of its link in one direction. In BF16 a number
  takes two bytes, in codes what `distributed.py` counts. Latencies are left out.
- Sending runs beside computing: a step takes the longer of the two, and what cannot overlap: one
  layer's gather before the first forward, and one layer's gradients after the last backward.
- Coding, taking apart, decoding and summing is added to computing, at the shares of a copy's
  bandwidth that `distributed.py` measures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balance import LLAMAS, shapes
from report import environment, print_rows, write_json
from tables_models import projection_table

HERE = Path(__file__).parent
TOKENS = 8192
GPUS = (8, 64, 256, 1024)
GIGABITS = (10, 25, 50, 100, 200, 400)
SEQUENCE = 4096
MODELS = ("Llama-2-7B", "Llama-2-70B")


@dataclass(frozen=True)
class Way:
    """How a variant computes and sends.

    Attributes:
        compiled: the variant of `model.py` that it computes as.
        weight, gradient: bytes of a number on the wire.
        codes: whether kernels of the wire run.
    """

    compiled: str
    weight: float = 2.0
    gradient: float = 2.0
    codes: bool = False


@dataclass(frozen=True)
class Shape:
    """A model: its parameters, those of one layer, and operations of a token."""

    parameters: int
    layer: int
    operations: float

    @classmethod
    def of(cls, name: str) -> Shape:
        """Of a Llama of `balance.py`."""
        config = LLAMAS[name]
        total = sum(x.numel() for x in shapes(config))
        outside = 2 * config["vocab_size"] * config["hidden_size"]
        layers = config["num_hidden_layers"]
        attention = 6 * layers * config["hidden_size"] * SEQUENCE
        return cls(total, (total - outside) // layers, 6 * total + attention)


def step_seconds(shape: Shape, way: Way, gpus: int, gigabits: int, measured: Any) -> float:
    """The time of one step on one of `gpus` GPUs."""
    computing = TOKENS / measured.tokens_per_second(way.compiled, shape)
    if way.codes:
        computing += measured.coding(shape.parameters, gpus)
    bytes_per_second = gigabits * 1e9 / 8 * gpus / (gpus - 1)
    sending = shape.parameters * (2 * way.weight + way.gradient) / bytes_per_second
    alone = shape.layer * (way.weight + way.gradient) / bytes_per_second
    return max(computing, sending) + alone


class Measured:
    """What one and two GPUs do."""

    def __init__(self, model: dict[str, Any], distributed: dict[str, Any]) -> None:
        chosen = [r for r in model["results"] if (r["model"], r["optimizer"]) == ("7B", "AdamW")]
        self._tokens = {r["variant"]: r["tokens_per_second"] for r in chosen}
        self._operations = Shape.of("Llama-2-7B").operations
        self._kernels = distributed["kernels"]
        compressed = [
            r for r in distributed["results"] if r["weights_wire"] and r["gradients_wire"]
        ]
        self.weight, self.gradient = (
            2 * compressed[0][key] for key in ("weights_wire", "gradients_wire")
        )

    def tokens_per_second(self, variant: str, shape: Shape) -> float:
        """Of one GPU, if it sends nothing."""
        return self._tokens[variant] * self._operations / shape.operations

    def coding(self, parameters: int, gpus: int) -> float:
        """Seconds in which one GPU codes and takes apart weights twice, and sums gradients once."""
        moved = {
            "take apart": 2 * parameters * 2 * self.weight,
            "code rows torch.float32": 2 * parameters / gpus * (4 + self.weight),
            "pack torch.bfloat16": parameters * (2 + self.gradient),
            "add up torch.bfloat16": parameters * self.gradient + parameters / gpus * 2,
        }
        speed = self._kernels["copy_bytes_per_second"]
        return sum(size / (self._kernels[name] * speed) for name, size in moved.items())


def project(measured: Measured) -> list[dict[str, Any]]:
    """Tokens per second and GPU, for all models, links and numbers of GPUs."""
    ways = {
        "bf16": Way("bf16 compile"),
        "torchao, FP8 gather": Way("torchao tensorwise", weight=1.0),
        "fp8pass": Way("fp8pass coat"),
        "fp8pass, compressed": Way("fp8pass coat", measured.weight, measured.gradient, True),
    }
    return [
        {
            "model": model,
            "gpus": gpus,
            "gigabits": gigabits,
            "variant": name,
            "tokens_per_second": TOKENS / step_seconds(shape, way, gpus, gigabits, measured),
        }
        for model in MODELS
        for shape in [Shape.of(model)]
        for gpus in GPUS
        for gigabits in GIGABITS
        for name, way in ways.items()
    ]


def main() -> None:
    """Command line."""
    read = {
        n: json.loads((HERE / f"results/{n}.json").read_text()) for n in ("model", "distributed")
    }
    settings = {"tokens": TOKENS, "from": {n: r["date"] for n, r in read.items()}}
    results = project(Measured(read["model"], read["distributed"]))
    record = {**environment(), "settings": settings, "results": results}
    write_json(HERE / "results/projection.json", record)
    print_rows("projection: tokens per second and GPU", projection_table(record))


if __name__ == "__main__":
    main()
