"""Compare time, activation memory and gradient error of mixtures of experts.

    python benchmarks/moe.py                   both cases, writes benchmarks/results/moe.json
    python benchmarks/moe.py --cases mixtral   one case
    python benchmarks/moe.py --tiny            a CPU-sized case, to check that the script works

Measured for each case and variant: the same as in `layer.py`, and the planned share of FLOPs in
FP8. torchao's expert GEMMs need multiples of 16 tokens per expert, so the layer pads the tokens for
torchao, as in torchtitan.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layer import Variant, compare, with_fp8pass
from models import RMSNorm
from report import environment, print_rows, write_json
from tables_layers import moe_table
from torch import Tensor, nn
from torch.nn import functional as F

import fp8pass

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A layer of experts and its input."""

    name: str
    hidden: int
    experts: int
    ffn: int
    top: int
    batch: int
    seq: int


CASES = (
    Case("mixtral", 4096, 8, 14336, 2, 4, 4096),
    Case("qwen3", 2048, 128, 768, 8, 8, 2048),
)
TINY = Case("tiny", 64, 8, 128, 2, 2, 32)


class MoELayer(nn.Module):
    """RMSNorm, a router, SwiGLU experts, and the sum with the residual stream.

    The router reads the input of the norm, not the output. Each variant rounds the output
    differently, so it would send some tokens to different experts, which would hide the gradient
    errors.

    Attributes:
        multiply: function that computes the grouped GEMM of the experts.
        multiple: the number of tokens of an expert is padded to a multiple of this.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.multiply: GroupedMM = lambda x, weights, ends: torch._grouped_mm(x, weights, offs=ends)
        self.multiple = 1
        self.norm = RMSNorm(case.hidden)
        self.router = nn.Linear(case.hidden, case.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(case.experts, 2 * case.ffn, case.hidden))
        self.down = nn.Parameter(torch.empty(case.experts, case.hidden, case.ffn))
        for weight in (self.router.weight, self.gate_up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat, top = x.flatten(0, 1), self.case.top
        weights, chosen = self.router(flat).float().softmax(-1).topk(top)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        tokens = self.norm(flat)[order // top]
        places, offsets = self._places(chosen.flatten()[order])
        if self.multiple > 1:
            rows = len(tokens) + self.case.experts * self.multiple
            tokens = tokens.new_zeros(rows, tokens.shape[1]).index_copy(0, places, tokens)
        gate, up = self.multiply(tokens, self.gate_up.transpose(-2, -1), offsets).chunk(2, -1)
        y = self.multiply(F.silu(gate) * up, self.down.transpose(-2, -1), offsets)
        if self.multiple > 1:
            y = y[places]
        y = y * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        return x + y[back].unflatten(0, (-1, top)).sum(1).view_as(x)

    def _places(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Return the padded positions of sorted tokens, and the end of each expert's tokens."""
        ends = torch.searchsorted(
            expert, torch.arange(1, self.case.experts + 1, device=expert.device)
        )
        counts = ends.diff(prepend=ends.new_zeros(1))
        padded = (counts + self.multiple - 1) // self.multiple * self.multiple
        moved = (padded - counts).cumsum(0) - (padded - counts)
        places = torch.arange(len(expert), device=expert.device) + moved[expert]
        return places, padded.cumsum(0, dtype=torch.int32)


def torchao(model: nn.Module) -> nn.Module:
    """Return the layer, compiled, with torchao's rowwise FP8 GEMMs for its experts."""
    from torchao.prototype.moe_training import fp8_grouped_mm

    assert isinstance(model, MoELayer)
    multiply = fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm
    model.multiply = partial(multiply, pad_token_groups_for_grouped_mm=False)
    model.multiple = 16
    return torch.compile(model)  # type: ignore[return-value]


VARIANTS: dict[str, Variant] = {
    "bf16 eager": lambda m: m,
    "bf16 compile": lambda m: torch.compile(m),  # type: ignore[dict-item, return-value]
    "torchao rowwise": torchao,
    "fp8pass coat": with_fp8pass(),
    "fp8pass coat, all in FP8": with_fp8pass(fp8_gemms="all"),
    "fp8pass agoq": with_fp8pass(recipe="agoq"),
    "fp8pass linear": with_fp8pass(recipe="linear"),
    "fp8pass block": with_fp8pass(recipe="block"),
}


def run_case(
    case: Case, chosen: dict[str, Variant], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Measure every variant on one case."""
    torch.manual_seed(0)
    base = MoELayer(case).to(device, torch.bfloat16)
    x = torch.randn(case.batch, case.seq, case.hidden, device=device, dtype=torch.bfloat16)
    results = compare(case.name, base, (x,), torch.randn_like(x), chosen, rounds)
    return [{**asdict(r), "fp8_share": _fp8_share(r.variant, base, x)} for r in results]


def _fp8_share(variant: str, base: nn.Module, x: Tensor) -> float | None:
    """Return the share of a layer's FLOPs that fp8pass runs in FP8."""
    recipe = variant.removeprefix("fp8pass ")
    if recipe not in fp8pass.RECIPES:
        return None
    config = fp8pass.Config.recipe(recipe)
    plans = [
        g.plan for g in fp8pass.explain(base, x.clone().requires_grad_(), config=config).graphs
    ]
    return sum(p.fp8_flops for p in plans) / sum(p.flops for p in plans)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help="measure only these")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="one small case, on the CPU too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/moe.json")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [TINY] if args.tiny else [c for c in CASES if c.name in args.cases]
    chosen = {name: VARIANTS[name] for name in VARIANTS if name in args.variants}
    results: list[dict[str, Any]] = []
    for case in cases:
        results += run_case(case, chosen, device, args.rounds)
        gc.collect()
        write_json(args.out, {**environment(), "results": results})
    print_rows("mixtures of experts, forward + backward", moe_table({"results": results}))


if __name__ == "__main__":
    main()
