"""A memory budget met by computing again, and by the host: time and memory of decoder layers.

    python benchmarks/offload.py                   all rows, writes benchmarks/results/offload.json
    python benchmarks/offload.py --tiny --out x.json   a small stack, on the CPU too

Six decoder layers of hidden 4096, sequence 4096, batch 4, weights in BF16, recipe coat: without a
budget, and with some, without and with `offload`. Variants take turns, in any order.

Per variant: milliseconds of forward and backward (CUDA events, median), bytes of the GPU held for
the backward, the peak of a step above what was allocated before it, gradients included; by the plan
bytes on the host, and milliseconds that the link is busy and is waited for in a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from frontier import Bench
from layer import TINY, Case, Subject, median_times, sharing, with_own_code
from report import environment, print_rows, use_expandable_segments, write_json
from tables_layers import offload_table
from torch import nn

from fp8pass import Config
from fp8pass.compilation import CompiledGraph
from fp8pass.dynamo import Backend

CASE = Case("h4096x6", 6, 4096, 32, 11008, 4096)
BUDGETS = (0.7, 0.5, 0.3)


@dataclass
class Result:
    """One variant; see the module's docstring."""

    variant: str
    budget: float | None
    offload: bool
    ms: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    link_ms: float = 0.0
    wait_ms: float = 0.0


def compiled(
    model: nn.Module, config: Config, observer: Callable[[CompiledGraph], None]
) -> nn.Module:
    """A copy of a model that shares its weights, compiled; its plans go to `observer`."""
    copy = with_own_code(sharing(model))
    return torch.compile(copy, backend=Backend(config, observer), dynamic=False)  # type: ignore[return-value]


def variants() -> list[Result]:
    """What is compared."""
    found = [Result("no budget", None, False)]
    for budget in BUDGETS:
        found.append(Result(f"{budget}, computed again", budget, False))
        found.append(Result(f"{budget}, host", budget, True))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small stack, on the CPU too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/offload.json")
    args = parser.parse_args()
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(TINY if args.tiny else CASE, device, args.rounds)
    results, subjects = variants(), {}
    for result in results:
        graphs: list[CompiledGraph] = []
        config = Config(memory_budget=result.budget, offload=result.offload)
        step = compiled(bench.model, config, graphs.append)
        subject = subjects[result.variant] = Subject(step, bench.inputs, bench.grad)
        subject.step()
        result.held_bytes, result.peak_bytes = subject.activation_bytes(), bench.peak_bytes(subject)
        for offload in (graph.plan.offload for graph in graphs):
            if offload is not None:
                result.host_bytes += offload.bytes
                result.link_ms += 1e3 * offload.link_s
                result.wait_ms += 1e3 * offload.wait_s
    times = median_times(subjects, args.rounds)
    for result in results:
        result.ms = times[result.variant].ms
    data = {**environment(), "rounds": args.rounds, "results": [asdict(r) for r in results]}
    write_json(args.out, data)
    print_rows("a budget, and how it is met", offload_table(data))


if __name__ == "__main__":
    main()
