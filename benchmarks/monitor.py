"""What a monitor costs: time per training step without one, between its samples and in a sample.

    python benchmarks/monitor.py                 the demo's model, writes results/monitor.json
    python benchmarks/monitor.py --size tiny     a smaller one, to check that the script works

The variants take turns, a step each, so that drift hits all alike; medians of whole steps, from the
batch to the optimizer. A sampled step is timed with the report of its statistics. The overhead at
N is that of a monitor's steps, one sampled and N - 1 not, over steps without a monitor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import environment, print_rows, write_json
from tables_layers import monitor_table

import fp8pass
from fp8pass.demo.model import VOCABULARY, new_model
from fp8pass.demo.sizes import SIZES, Size

HERE = Path(__file__).parent
WARM_UP, ROUNDS = 3, 40


def training_step(size: Size, monitor: fp8pass.Monitor | None) -> Callable[[], None]:
    """One step of a model of its own, up to and with the wait for the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = new_model(size, 0, device)
    run = torch.compile(model, backend=fp8pass.backend(fp8pass.Config(), monitor=monitor))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (size.batch, size.seq), device=device)

    def step() -> None:
        loss = run(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        loss.item()

    return step


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step, by variant, and what one sample holds."""
    # `resume` says which of the next steps are sampled: none, or each.
    idle, sampling = fp8pass.Monitor(), fp8pass.Monitor(every=1)
    steps = {
        "without": training_step(size, None),
        "between": training_step(size, idle),
        "sampled": training_step(size, sampling),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + rounds):
        for name in list(steps)[turn % 3 :] + list(steps)[: turn % 3]:
            idle.resume(1)
            start = time.perf_counter()
            steps[name]()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    ms = {name: statistics.median(found) * 1e3 for name, found in seconds.items()}
    return {"ms": ms, "tensors": len(sampling.latest)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = "large" if torch.cuda.is_available() else "small"
    parser.add_argument("--size", choices=tuple(SIZES), default=default, help="of the demo's model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=HERE / "results/monitor.json")
    args = parser.parse_args()
    result = measure(SIZES[args.size], args.rounds)
    data = {
        **environment(),
        "settings": {"size": args.size, "rounds": args.rounds, "every": fp8pass.Monitor().every},
        "results": [result],
    }
    print_rows("monitor", monitor_table(data))
    write_json(args.out, data)


if __name__ == "__main__":
    main()
