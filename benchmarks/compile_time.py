"""Measure compile time, cold and warm, of fp8pass, its passes alone, and other compilers.

    python benchmarks/compile_time.py            four layers of hidden 4096 (CUDA)
    python benchmarks/compile_time.py --passes   time of the passes for 1 to 32 layers (any device)
    python benchmarks/compile_time.py --depths   cold, for 10 to 200 small layers (any device)

Every measurement runs in a new process, and every variant has its own cache folder. The first run
of a variant is cold; the second run uses the caches of the first. Seconds are the time of the first
forward and backward, without imports; `passes` are the CPU seconds of fp8pass's passes. For depths,
the time is the CPU time of the process and its compilers, minus the CPU time of a second forward
and backward. `--jobs` processes run at a time; if there are many, each takes up to a third longer.
All depths together get `--limit` seconds; measurements that do not end by then are skipped. On the
CPU, kernels are generated but not compiled, because the C++ compiler would take most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from report import environment, print_rows, write_json

VARIANTS = ("bf16 compile", "torchao tensorwise", "fp8pass coat")
DEPTHS = (10, 25, 50, 100, 200)
DEEP_VARIANTS = ("bf16 compile", "fp8pass coat", "fp8pass agoq")
DEEP_HIDDEN = 256
HERE = Path(__file__).parent


def child(variant: str, layers: int, hidden: int) -> dict[str, Any]:
    """Compile one variant in this process, and return the times."""
    from layer import Subject
    from layer import variants as make_variants
    from models import Stack, init_weights, rope_tables
    from torch._inductor.async_compile import AsyncCompile

    from fp8pass import compilation, dynamo, partition
    from fp8pass.passes import runner

    seconds: list[float] = []
    run_passes = runner.run_passes

    def recorded(*args: Any, **kwargs: Any) -> list[runner.PassRecord]:
        start = time.process_time()
        records = run_passes(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return records

    for module in (compilation, dynamo, partition):
        module.run_passes = recorded  # type: ignore[attr-defined]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        AsyncCompile.cpp_pybinding = lambda *_: lambda *_: None  # type: ignore[method-assign]
    heads, ffn, seq = hidden // 128, hidden * 43 // 16, 1024
    model = Stack(layers, hidden, heads, ffn).to(device, torch.bfloat16)
    init_weights(model)
    x = torch.randn(1, seq, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    tables = rope_tables(seq, hidden // heads, device)
    subject = Subject(make_variants(False)[variant](model), (x, *tables), torch.randn_like(x))
    (x.sum() + 1).backward()  # CUDA starts up outside the measurement
    start, cpu = time.perf_counter(), [_cpu_seconds()]
    subject.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    wall = time.perf_counter() - start
    cpu.append(_cpu_seconds())
    subject.step()
    cpu.append(_cpu_seconds())
    compiling = (cpu[1] - cpu[0]) - (cpu[2] - cpu[1])
    return {"seconds": wall, "cpu_seconds": compiling, "passes": sum(seconds)}


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    return sum(os.times()[:4])


def measure(
    variant: str,
    layers: int,
    hidden: int,
    cache: Path,
    timeout: float | None = None,
    **variables: str,
) -> dict[str, Any]:
    """Run `child` in a new process with the cache folder `cache` and more environment variables.

    Raises `subprocess.TimeoutExpired` after `timeout` seconds.
    """
    command = [sys.executable, __file__, "--child", variant, str(layers), str(hidden)]
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        **variables,
    }
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=HERE, check=False, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cold_and_warm(layers: int, hidden: int) -> list[dict[str, Any]]:
    """Measure every variant cold, then warm."""
    results = []
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                found = measure(variant, layers, hidden, Path(folder))
                results.append({"variant": variant, "layers": layers, "cache": cache, **found})
                print(results[-1], file=sys.stderr, flush=True)
    return results


def by_depth(
    depths: Sequence[int], variants: Sequence[str], limit: float, jobs: int
) -> list[dict[str, Any]]:
    """Measure variants cold for each number of layers, within `limit` seconds in all."""
    end = time.perf_counter() + limit
    cases = [(layers, variant) for layers in sorted(depths) for variant in variants]

    def cold(case: tuple[int, str]) -> dict[str, Any] | None:
        layers, variant = case
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        left = end - time.perf_counter()
        if left <= 0:
            return None
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = measure(variant, layers, DEEP_HIDDEN, Path(folder), left, **alone)
            except subprocess.TimeoutExpired:
                return None
        result = {"layers": layers, "variant": variant, "jobs": jobs, **found}
        print(result, file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return [result for result in pool.map(cold, cases) if result]


def passes_alone() -> list[dict[str, Any]]:
    """Measure each pass on stacks of growing depth, without Inductor."""
    from models import Stack, rope_tables

    import fp8pass

    results = []
    for layers in (1, 2, 4, 8, 16, 32):
        torch._dynamo.reset()
        model = Stack(layers, 128, 1, 384).bfloat16()
        x = torch.randn(1, 128, 128, dtype=torch.bfloat16)
        explanation = fp8pass.explain(model, x, *rope_tables(128, 128, torch.device("cpu")))
        row: dict[str, Any] = {"layers": layers}
        for graph in explanation.graphs:
            for record in graph.passes:
                row[record.name] = row.get(record.name, 0.0) + record.seconds
        row["ms per layer"] = sum(v for k, v in row.items() if k != "layers") * 1e3 / layers
        results.append(row)
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", action="store_true", help="only the passes")
    parser.add_argument("--depths", type=int, nargs="*", help=f"default: {DEPTHS}")
    parser.add_argument("--variants", nargs="+", default=DEEP_VARIANTS, choices=DEEP_VARIANTS)
    parser.add_argument("--limit", type=float, default=180, help="seconds for all depths")
    parser.add_argument("--jobs", type=int, default=1, help="depths measured at once")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], int(args.child[1]), int(args.child[2]))))
        return
    if args.depths is not None:
        depths = args.depths or DEPTHS
        name, results = "depths", by_depth(depths, args.variants, args.limit, args.jobs)
    elif args.passes:
        name, results = "passes", passes_alone()
    else:
        name, results = "compile_time", cold_and_warm(args.layers, args.hidden)
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in r.values()] for r in results]
    print_rows(name.replace("_", " "), [list(results[0]), *rows])
    out = args.out or HERE / f"results/{name}.json"
    write_json(out, {**environment(), "results": results})


if __name__ == "__main__":
    main()
