"""Compare the rounding error and size of formats with less than a byte per element.

    python benchmarks/formats.py            any device

Formats are simulated in fp32, because fp8pass does not implement all of them. They are floats with
x exponent and y mantissa bits (ExMy), without Inf and NaN; E4M3, with its bit pattern for NaN; and
integers. A group of `G` elements shares one scale: in fp32, in bf16 (truncated), or in E8M0 (a
power of two, rounded up). Each error is the root mean square of the rounding error divided by the
root mean square of the values. The values are random numbers, and activations of the demo model
after some training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import environment, print_rows, write_json
from tables_models import formats_table
from torch import Tensor
from torch.nn import functional as F

from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import Decoder, new_model
from fp8pass.demo.sizes import SIZES
from fp8pass.demo.train import train

SHAPE = (2048, 1024)
GROUPS = (16, 32, 64, 128)
SCALE_BITS = {"fp32": 32, "bf16": 16, "e8m0": 8}


@dataclass(frozen=True)
class Element:
    """The format of an element. Integers have no exponent bits, and steps of 1.

    Attributes:
        name: name in the record.
        exponent, mantissa: numbers of bits.
        reserved: how many of the largest bit patterns do not represent numbers.
    """

    name: str
    exponent: int
    mantissa: int
    reserved: int = 0

    @property
    def bits(self) -> int:
        """Return the number of bits of an element: sign, exponent and mantissa."""
        return 1 + self.exponent + self.mantissa

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the least normal number, with IEEE's bias."""
        return 2 - (1 << self.exponent - 1) if self.exponent else self.mantissa

    @property
    def max(self) -> float:
        """Return the largest value. Its bit pattern is the largest pattern that is not reserved."""
        binades = max(0, (1 << self.exponent) - 2)
        ones = (2 if self.exponent else 1) - (1 + self.reserved) * 2.0**-self.mantissa
        return ones * 2.0 ** (self.min_exponent + binades)

    def round(self, x: Tensor) -> Tensor:
        """Round `x` to the nearest value, ties to even, saturating."""
        exponent = torch.frexp(x).exponent.sub(1).clamp_min(self.min_exponent)
        step = torch.ldexp(torch.ones_like(x), exponent - self.mantissa)
        return ((x / step).round() * step).clamp(-self.max, self.max)


INT4, E2M1 = Element("int4", 0, 3), Element("e2m1", 2, 1)
E2M2, E3M1 = Element("e2m2", 2, 2), Element("e3m1", 3, 1)
E2M3, E3M2 = Element("e2m3", 2, 3), Element("e3m2", 3, 2)
E4M3 = Element("e4m3", 4, 3, reserved=1)
CHOICES = [
    (E4M3, "bf16"),
    *((E2M1, scale) for scale in SCALE_BITS),
    *((element, "bf16") for element in (INT4, E2M2, E3M1, E2M3, E3M2)),
]


def group_scale(amax: Tensor, element: Element, kind: str) -> Tensor:
    """Return the stored scale that maps `amax` to the largest value of the format."""
    scale = torch.where(amax == 0, 1.0, amax / element.max)
    if kind == "bf16":
        return (scale.view(torch.int32) & -1 << 16).view(torch.float32)
    if kind == "e8m0":
        return scale.log2().ceil().exp2()
    return scale


def relative_error(x: Tensor, element: Element, scale: str, group: int) -> float:
    """Return the RMS error of `x` [..., K] stored in groups, relative to the RMS of `x`."""
    groups = x.float().unflatten(-1, (-1, group))
    scales = group_scale(groups.abs().amax(-1, keepdim=True), element, scale)
    error = element.round(groups / scales) * scales - groups
    return float(error.norm() / groups.norm())


def random_values(device: torch.device) -> dict[str, Tensor]:
    """Return random bf16 numbers [*SHAPE] from distributions with different tails."""
    torch.manual_seed(0)
    gate, up = torch.randn(2, *SHAPE)
    heavy = torch.distributions.StudentT(torch.tensor(3.0)).sample(SHAPE)
    values = {"normal": gate, "silu(n)·n": F.silu(gate) * up, "Student t(3)": heavy}
    return {name: x.to(device, torch.bfloat16) for name, x in values.items()}


def activations(device: torch.device, steps: int) -> dict[str, Tensor]:
    """Return activations of the demo model's last layer after `steps` of training."""
    size = replace(SIZES["small"], steps=steps)
    data = Data.of(read_text(None), size, device)
    model = new_model(size, 0, device)
    train(model, data, size, 0, lambda step: None)
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        _watch(model, found)
        model(*next(data.train_batches(size, 1)))
    return found


def _watch(model: Decoder, found: dict[str, Tensor]) -> None:
    last: Any = model.layers[-1]

    def keep(name: str, pick: Callable[..., Tensor]) -> Callable[..., None]:
        return lambda module, inputs, output: found.update({name: pick(inputs, output).detach()})

    last.mlp_norm.register_forward_hook(keep("residual", lambda inputs, output: inputs[0]))
    last.mlp.gate_proj.register_forward_hook(keep("gate", lambda inputs, output: output))
    last.mlp.up_proj.register_forward_hook(keep("up", lambda inputs, output: output))
    last.mlp.down_proj.register_forward_hook(keep("silu(gate)·up", lambda inputs, _: inputs[0]))


@dataclass(frozen=True)
class Result:
    """The bits of a format with a group size, and the relative RMS error on each kind of values."""

    format: str
    scale: str
    group: int
    bits: float
    errors: dict[str, float]


def measure(values: dict[str, Tensor]) -> list[Result]:
    """Measure every format in every group size."""
    return [
        Result(
            element.name,
            scale,
            group,
            element.bits + SCALE_BITS[scale] / group,
            {name: relative_error(x, element, scale, group) for name, x in values.items()},
        )
        for element, scale in CHOICES
        for group in GROUPS
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps before measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/formats.json")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = measure(random_values(device) | activations(device, args.steps))
    record = {**environment(), "results": [asdict(r) for r in results]}
    print_rows("relative RMS error", formats_table(record))
    write_json(args.out, record)


if __name__ == "__main__":
    main()
