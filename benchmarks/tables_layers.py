"""Tables of decoder layers and small models: time, memory, errors, and layers in FP8."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fp8pass.graph.pointwise import POINTWISE

BASELINE = "torchao tensorwise"
# Suffix of variants that replay CUDA graphs. Their memory cannot be measured.
GRAPHED = ", CUDA graphs"
# Suffix of variants that run the whole training step as one CUDA graph (`capture_step`).
CAPTURED = ", captured"
# The variant with stock `torch.compile` instead of a recipe of fp8pass.
BF16 = "bf16"
# The variant of `never_slower.py` that has all parts of fp8pass.
ALL_PARTS = "all parts"


def layer_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time, memory and errors of decoder layers, relative to torchao tensorwise."""
    header = ["", "ms", "× torchao", "CPU ms", "activations MiB", "× torchao", "x-grad err"]
    rows = [[*header, "w-grad err"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        results = [r for r in data["results"] if r["case"] == case]
        rows.append([f"**{case}**, {results[0]['rounds']} rounds", *[""] * 7])
        for r in results:
            graphed = GRAPHED * r["variant"].endswith(GRAPHED)
            base = next((b for b in results if b["variant"] == BASELINE + graphed), r)
            rows.append(_compare(r, base))
    return rows


def _compare(r: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return a variant's time, memory and errors, and ratios of time and memory to `base`."""
    held, of = r["activation_bytes"], base["activation_bytes"]
    return [
        r["variant"],
        f"{r['ms']:.2f}",
        f"{r['ms'] / base['ms']:.3f}",
        f"{r['cpu_ms']:.2f}",
        *([f"{held / 2**20:.0f}", f"{held / of:.3f}"] if held else ["", ""]),
        f"{r['x_grad_error']:.4f}",
        f"{r['worst_weight_grad_error']:.4f}",
    ]


def moe_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time, memory and errors of experts, relative to `torch.compile` in BF16.

    For a case without a BF16 result, they are relative to the first variant.
    """
    header = ["", "ms", "× bf16", "CPU ms", "activations MiB", "of bf16", "x-grad err"]
    rows = [[*header, "w-grad err", "FLOPs in FP8"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        results = [r for r in data["results"] if r["case"] == case]
        rows.append([f"**{case}**, {results[0]['rounds']} rounds", *[""] * 8])
        base = next((r for r in results if r["variant"] == "bf16 compile"), results[0])
        for r in results:
            share = r["fp8_share"]
            rows.append([*_compare(r, base), "" if share is None else f"{share:.1%}"])
    return rows


def ablation_table(data: dict[str, Any]) -> list[list[str]]:
    """Return the times of models with all parts of fp8pass, and with some disabled."""
    rows = [["", "ms", "CPU ms", "vs all parts"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        found = {r["variant"]: r for r in data["results"] if r["case"] == case}
        rounds = next(iter(found.values()))["rounds"]
        rows.append([f"**{case}**, {rounds} rounds", "", "", ""])
        for variant, r in found.items():
            base = ALL_PARTS + GRAPHED if variant.endswith(GRAPHED) else ALL_PARTS
            over = "" if variant == base else f"{r['ms'] / found[base]['ms'] - 1:+.1%}"
            rows.append([variant, f"{r['ms']:.2f}", f"{r['cpu_ms']:.2f}", over])
    return rows


def gpt2_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time and memory of a GPT-2 step by recipe, relative to stock `torch.compile`."""
    header = ["", "ms", "× bf16", "GPU busy ms", "held MiB", "planned MiB"]
    rows = [[*header, "forward peak MiB", "backward peak MiB"]]
    base = data["results"][0]
    for r in data["results"]:
        times = [f"{r['ms']:.2f}", f"{r['ms'] / base['ms']:.3f}", f"{r['gpu_ms']:.2f}"]
        keys = ("saved_bytes", "planned_bytes", "forward_peak_bytes", "backward_peak_bytes")
        rows.append([r["variant"], *times, *(_mib(r[key]) for key in keys)])
    return rows


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f}"


def never_slower_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time, kernels and memory of workloads, relative to stock `torch.compile`."""
    header = ["", "", "ms", "× bf16", "GPU busy ms", "CPU ms", "kernels", "held MiB"]
    rows = [[*header, "× bf16 "]]
    for r in data["results"]:
        base = next(b for b in data["results"] if b["case"] == r["case"])
        time = f"{r['ms'] / base['ms']:.3f}"
        bytes_ = f"{r['saved_bytes'] / (base['saved_bytes'] or 1):.3f}"
        numbers = [f"{r['gpu_ms']:.2f}", f"{r['cpu_ms']:.2f}", str(r["kernels"])]
        first = [r["case"], r["variant"], f"{r['ms']:.2f}", time]
        rows.append([*first, *numbers, _mib(r["saved_bytes"]), bytes_])
    return rows


def steps_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time and memory of whole training steps, relative to stock `torch.compile`."""
    rows = [["", "", "ms", "× bf16", "CPU ms", "reserved MiB"]]
    for r in data["results"]:
        same = (b for b in data["results"] if b["case"] == r["case"])
        base = next((b["ms"] for b in same if b["variant"] == "bf16 compile"), float("nan"))
        numbers = [f"{r['ms']:.2f}", f"{r['ms'] / base:.3f}", f"{r['cpu_ms']:.2f}"]
        rows.append([r["case"], r["variant"], *numbers, _mib(r["reserved_bytes"])])
    return rows


def zoo_table(data: dict[str, Any]) -> list[list[str]]:
    """Return the number of FP8 layers, saved bytes and correctness of each architecture's model."""
    rows = [["", "FP8", "16 bits by default", "saved bytes, of stock", "right", "why not in FP8"]]
    ran = [r for r in data["results"] if not r["error"]]
    fp8, asked, layers = (sum(r[key] for r in ran) for key in ("fp8", "asked_for", "layers"))
    right = f"{sum(not r['complaints'] for r in ran)} of {len(data['results'])}"
    rows.append(["**all**", f"{fp8} of {layers - asked}", str(asked), "", right, ""])
    for family in dict.fromkeys(r["family"] for r in data["results"]):
        results = [r for r in data["results"] if r["family"] == family]
        rows.append([f"**{family}**, {len(results)}", *[""] * 5])
        rows += [zoo_row(r) for r in results]
    return rows


def zoo_row(r: dict[str, Any]) -> list[str]:
    """Return the row of one architecture."""
    if r["error"]:
        return [r["name"], "", "", "", "no", r["error"].splitlines()[0]]
    left = r["layers"] - r["asked_for"]
    share = f"{r['saved_bytes'] / r['stock_bytes']:.2f}" if r["stock_bytes"] else ""
    right = "no" if r["complaints"] else "yes"
    why = "; ".join([*r["reasons"], *r["complaints"]])
    return [r["name"], f"{r['fp8']} of {left}", str(r["asked_for"] or ""), share, right, why]


def zoo_operators_table(data: dict[str, Any]) -> list[list[str]]:
    """Return the operators in the graphs of all architectures, by kind, most frequent first."""
    name_of = lambda op: str(op).split(".")[1]  # noqa: E731
    rules = {name_of(op) for op, meaning in POINTWISE.items() if meaning.formula}
    kernels = {name_of(op) for op, meaning in POINTWISE.items() if meaning.triton}
    kernels.add("pow")  # kernels support the exponents in `POWERS`
    counts: dict[str, Counter[str]] = {}
    for r in data["results"]:
        for kind, names in r.get("operators", {}).items():
            if kind not in ("view", "movement", "creation", "symbol"):
                counts.setdefault(kind, Counter()).update(names.split())
    rows = [["operator", "models", "rule", "kernel"]]
    for kind, found in sorted(counts.items()):
        rows.append([f"**{kind}**", "", "", ""])
        for name, count in sorted(found.items(), key=lambda item: (-item[1], item[0])):
            marks = ["yes" * (name in table) for table in (rules, kernels)]
            rows.append([f"`{name}`", str(count), *marks])
    return rows
