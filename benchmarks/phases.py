"""Where the time of a step of `small_gpu.py` goes, by forward and backward of its micro-batches.

    python benchmarks/phases.py "7B fp8pass 24 GiB" "7B fp8pass no limit"
    python benchmarks/phases.py "7B fp8pass 24 GiB" --layers 8      a quarter of it, sooner

One step is traced. Of every phase, in milliseconds: how long it is on the stream that the model
computes on, and how much of that kernels run there, kernels run on other streams (updates of what
is on the host), and copies are on their way into the GPU and out of it. GB/s are those of all
copies, of the time that there is one. Phases between the first two and the last are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from report import print_rows, use_expandable_segments
from small_gpu import SETUPS, SIZES, STEP_TOKENS, WAYS, Setup, drawn_llama

Span = tuple[float, float]  # begin and end in ms
WARM_UP = 2


@dataclass
class Trace:
    """What a GPU did: spans by stream and kind of copy, and marks between phases."""

    computing: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    into: list[Span] = field(default_factory=list)
    out: list[Span] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    marks: list[Span] = field(default_factory=list)
    main: int = 0


def mark() -> None:
    """Show in the trace where this stream is: by a kernel that nothing else launches."""
    torch.cuda._sleep(1)


def traced(step: Callable[[], object]) -> Trace:
    """A trace of a step that calls `mark` between its phases."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    found = Trace()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            _add(found, event)
    return found


def _add(found: Trace, event: Any) -> None:
    begin, name = event.start_ns() / 1e6, event.name()
    span = begin, begin + event.duration_ns() / 1e6
    for way, spans in (("HtoD", found.into), ("DtoH", found.out)):
        if way in name:
            spans.append(span)
            found.bytes[way] += event.nbytes()
            return
    if "spin" in name:
        found.marks.append(span)
        found.main = event.device_resource_id()
    else:
        found.computing[event.device_resource_id()].append(span)


def busy(spans: Iterable[Span], phase: Span) -> float:
    """How much of a phase is within spans, which may overlap."""
    total, last = 0.0, phase[0]
    for begin, end in sorted(spans):
        begin, end = max(begin, last), min(end, phase[1])
        total, last = total + max(end - begin, 0.0), max(end, last)
    return total


def phases(trace: Trace, backwards: int) -> list[tuple[str, Span]]:
    """Forward and backward of each micro-batch, what comes after them, and all together."""
    names = [f"{half} {i + 1}" for i in range(backwards) for half in ("forward", "backward")]
    begins = [begin for begin, _ in sorted(trace.marks)]
    spans = [*trace.into, *trace.out, *(s for found in trace.computing.values() for s in found)]
    bounds = [*begins, max(end for _, end in spans)]
    named = zip([*names, "after"], pairwise(bounds), strict=True)
    return [*named, ("step", (bounds[0], bounds[-1]))]


def rows(trace: Trace, backwards: int) -> list[list[str]]:
    """The table."""
    beside = [s for stream, found in trace.computing.items() if stream != trace.main for s in found]
    shown = {1, 2, backwards}
    header = ["", "ms", "computing", "on other streams", "copies in", "copies out"]
    found = [header]
    for name, phase in phases(trace, backwards):
        number = name.rpartition(" ")[2]
        if number.isdigit() and int(number) not in shown:
            continue
        kinds = trace.computing[trace.main], beside, trace.into, trace.out
        parts = [phase[1] - phase[0], *(busy(spans, phase) for spans in kinds)]
        found.append([name, *(f"{part:.1f}" for part in parts)])
    whole = min(trace.marks)[0], float("inf")
    for way, name, spans in (("HtoD", "in", trace.into), ("DtoH", "out", trace.out)):
        if trace.bytes[way]:
            rate = trace.bytes[way] / busy(spans, whole) / 1e6
            found.append([f"GB/s {name}", f"{rate:.0f}", "", "", "", ""])
    return found


def trace_setup(setup: Setup, layers: int | None) -> list[list[str]]:
    """Train a set-up in this process and trace its third step."""
    device, size = torch.device("cuda"), SIZES[setup.model]
    size = replace(size, layers=layers or size.layers)
    backwards = STEP_TOKENS // (setup.batch * size.seq)
    forward, finish = WAYS[setup.how](setup, drawn_llama(size, device), device, backwards)
    ids = torch.randint(size.vocabulary, (backwards, setup.batch, size.seq), device=device)

    def step() -> None:
        for part in ids:
            mark()
            loss = forward(part)
            mark()
            (loss / backwards).backward()
        mark()
        finish()

    for _ in range(WARM_UP):
        step()
    return rows(traced(step), backwards)


def main() -> None:
    """Command line."""
    by_name = {setup.name: setup for setup in SETUPS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setups", nargs="+", choices=by_name)
    parser.add_argument("--layers", type=int, help="instead of those of the model")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("A trace needs an NVIDIA GPU.")
    use_expandable_segments()
    for name in args.setups:
        torch._dynamo.reset()
        print_rows(name, trace_setup(by_name[name], args.layers))


if __name__ == "__main__":
    main()
