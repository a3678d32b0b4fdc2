"""Write the measured tables into README.md and docs/, from benchmarks/results/*.json.

    python benchmarks/tables.py            rewrite the tables
    python benchmarks/tables.py --check    fail if they are not up to date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; one that has not been measured
stays as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from scipy.stats import spearmanr

from fp8pass.graph.pointwise import POINTWISE

HERE = Path(__file__).parent
DOCUMENTS = (
    HERE.parent / "README.md",
    *(
        HERE.parent / "docs" / f"{name}.md"
        for name in (
            *("results", "formats", "optimizer", "distributed", "stability", "memory"),
            *("supported", "weights"),
        )
    ),
)
BASELINE = "torchao tensorwise"
# Ends the names of variants that are replayed as CUDA graphs, which hold their memory themselves.
GRAPHED = ", CUDA graphs"
# Of fp8pass, which `ablation.py` leaves out one by one.
ALL_PARTS = "all parts"


def layer_table(data: dict[str, Any]) -> list[list[str]]:
    """Decoder layers: time, memory and errors, beside torchao tensorwise run likewise."""
    header = ["", "ms", "× torchao", "CPU ms", "activations MiB", "× torchao", "x-grad err"]
    rows = [[*header, "w-grad err"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        results = [r for r in data["results"] if r["case"] == case]
        rows.append([f"**{case}**, {results[0]['rounds']} rounds", *[""] * 7])
        for r in results:
            graphed = GRAPHED * r["variant"].endswith(GRAPHED)
            base = next(b for b in results if b["variant"] == BASELINE + graphed)
            kept = ["", ""]
            if r["activation_bytes"]:
                share = r["activation_bytes"] / base["activation_bytes"]
                kept = [f"{r['activation_bytes'] / 2**20:.0f}", f"{share:.3f}"]
            rows.append(
                [
                    r["variant"],
                    f"{r['ms']:.2f}",
                    f"{r['ms'] / base['ms']:.3f}",
                    f"{r['cpu_ms']:.2f}",
                    *kept,
                    f"{r['x_grad_error']:.4f}",
                    f"{r['worst_weight_grad_error']:.4f}",
                ]
            )
    return rows


def moe_table(data: dict[str, Any]) -> list[list[str]]:
    """Mixtures of experts: time, memory and errors, beside `torch.compile` in BF16."""
    header = ["", "ms", "× bf16", "CPU ms", "activations MiB", "of bf16", "x-grad err"]
    rows = [[*header, "w-grad err", "FLOPs in FP8"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        results = [r for r in data["results"] if r["case"] == case]
        rows.append([f"**{case}**, {results[0]['rounds']} rounds", *[""] * 8])
        base = next(r for r in results if r["variant"] == "bf16 compile")
        for r in results:
            held, of = r["activation_bytes"], base["activation_bytes"]
            share = r["fp8_share"]
            rows.append(
                [
                    r["variant"],
                    f"{r['ms']:.2f}",
                    f"{r['ms'] / base['ms']:.3f}",
                    f"{r['cpu_ms']:.2f}",
                    *([f"{held / 2**20:.0f}", f"{held / of:.3f}"] if held else ["", ""]),
                    f"{r['x_grad_error']:.4f}",
                    f"{r['worst_weight_grad_error']:.4f}",
                    "" if share is None else f"{share:.1%}",
                ]
            )
    return rows


def ablation_table(data: dict[str, Any]) -> list[list[str]]:
    """The same models with parts of fp8pass left out."""
    rows = [["", "ms", "CPU ms", "over all parts"]]
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
    """GPT-2 under autocast: time and memory of a step by recipe, beside stock `torch.compile`."""
    header = ["", "ms", "× bf16", "GPU busy ms", "held MiB", "planned MiB"]
    rows = [[*header, "forward peak MiB", "backward peak MiB"]]
    base = data["results"][0]
    for r in data["results"]:
        planned = r["planned_bytes"]
        rows.append(
            [
                r["variant"],
                f"{r['ms']:.2f}",
                f"{r['ms'] / base['ms']:.3f}",
                f"{r['gpu_ms']:.2f}",
                f"{r['kept_bytes'] / 2**20:.0f}",
                "" if planned is None else f"{planned / 2**20:.0f}",
                f"{r['forward_peak_bytes'] / 2**20:.0f}",
                f"{r['backward_peak_bytes'] / 2**20:.0f}",
            ]
        )
    return rows


def head_table(data: dict[str, Any]) -> list[list[str]]:
    """Output heads with their loss: time, memory and gradient errors, whole and in chunks."""
    rows = [["head", "", "ms", "× bf16", "peak GiB", "error of dx", "error of dW"]]
    for r in data["results"]:
        base = next(b for b in data["results"] if b["case"] == r["case"])
        rows.append(
            [
                r["case"],
                r["variant"],
                f"{r['ms']:.2f}",
                f"{r['ms'] / base['ms']:.3f}" if base["ms"] else "",
                f"{r['peak_bytes'] / 2**30:.2f}",
                f"{r['x_grad_error']:.2e}",
                f"{r['weight_grad_error']:.2e}",
            ]
        )
    return rows


def offload_table(data: dict[str, Any]) -> list[list[str]]:
    """A memory budget met by computing again, and by the host."""
    header = ["budget", "ms", "× none", "held MiB", "peak MiB"]
    rows = [[*header, "on the host MiB", "link busy ms", "waits ms, predicted"]]
    base = data["results"][0]["ms"]
    for r in data["results"]:
        sizes = [f"{r[key] / 2**20:,.0f}" for key in ("held_bytes", "peak_bytes", "host_bytes")]
        times = [f"{r['ms']:.2f}", f"{r['ms'] / base:.3f}" if base else ""]
        link = [f"{r['link_ms']:.1f}", f"{r['wait_ms']:.1f}"] if r["offload"] else ["", ""]
        rows.append([r["variant"], *times, *sizes, *link])
    return rows


def compile_time_table(data: dict[str, Any]) -> list[list[str]]:
    """Seconds to the end of the first step, cold and in a second process."""
    rows = [["four layers, hidden 4096", "cold s", "warm s", "of which passes, cold"]]
    for variant in dict.fromkeys(r["variant"] for r in data["results"]):
        found = {r["cache"]: r for r in data["results"] if r["variant"] == variant}
        cold, warm = found["cold"], found["warm"]
        passes = f"{cold['passes']:.2f}" if cold["passes"] else ""
        rows.append([variant, f"{cold['seconds']:.1f}", f"{warm['seconds']:.1f}", passes])
    return rows


def depths_table(data: dict[str, Any]) -> list[list[str]]:
    """CPU seconds of compilation by depth, all and for each layer; the passes alone."""
    variants = list(dict.fromkeys(r["variant"] for r in data["results"]))
    header = [f"{variant}, CPU s (a layer)" for variant in variants]
    rows = [["layers, hidden 256", *header, "of which passes, ms a layer"]]
    for layers in dict.fromkeys(r["layers"] for r in data["results"]):
        found = {r["variant"]: r for r in data["results"] if r["layers"] == layers}
        cells = [
            f"{r['cpu_seconds']:.1f} ({r['cpu_seconds'] / layers:.2f})"
            if (r := found.get(v))
            else ""
            for v in variants
        ]
        passes = [f"{r['passes'] / layers * 1e3:.0f}" for r in found.values() if r["passes"]]
        rows.append([str(layers), *cells, ", ".join(passes)])
    return rows


def distributed_table(data: dict[str, Any]) -> list[list[str]]:
    """Training on several GPUs: speed and peak memory over each link, beside torchao."""
    rows = [
        ["", "tokens/s", "fastest step", "× torchao, FP8 gather", "peak GiB", "gradients sent",
         "weights sent"],
    ]  # fmt: skip
    for model, link in dict.fromkeys((r["model"], r["link"]) for r in data["results"]):
        results = [r for r in data["results"] if (r["model"], r["link"]) == (model, link)]
        base = next((r for r in results if r["variant"] == "torchao, FP8 gather"), None)
        rows.append([f"**{model}, {link}**", *[""] * 6])
        for r in results:
            if r["error"]:
                rows.append([r["variant"], r["error"].splitlines()[0][:80], *[""] * 5])
                continue
            speed, peak = r["tokens_per_second"], r["peak_bytes"]
            fsdp = base and not base["error"] and "sequence" not in r["variant"]
            rows.append(
                [
                    r["variant"],
                    f"{speed:,.0f}",
                    f"{r['fastest']:,.0f}" if r.get("fastest") else "",
                    f"{speed / base['tokens_per_second']:.3f}" if base and fsdp else "",
                    "" if peak is None else f"{peak / 2**30:.1f}",
                    *("" if x is None else f"{x:.3f}×" for x in _wire(r)),
                ]
            )
    return rows


def _wire(result: dict[str, Any]) -> tuple[float | None, float | None]:
    return result["gradients_wire"], result["weights_wire"]


def balance_table(data: dict[str, Any]) -> list[list[str]]:
    """Optimizer states of the rank that has most, times the number of ranks."""
    rows = [["", "ranks", "whole tensors", "FSDP2's rows"]]
    for r in data["results"]:
        rows.append(
            [r["model"], str(r["ranks"]), *(f"{r[k]:.2f}" for k in ("whole tensors", "rows"))]
        )
    return rows


def projection_table(data: dict[str, Any]) -> list[list[str]]:
    """Tokens per second and GPU; the number of GPUs matters little, so two of them are shown."""
    variants = list(dict.fromkeys(r["variant"] for r in data["results"]))
    rows = [["", "Gb/s", *variants, "× fp8pass", "× torchao, FP8 gather"]]
    gpus = sorted({r["gpus"] for r in data["results"]})
    for model in dict.fromkeys(r["model"] for r in data["results"]):
        for count in (gpus[0], gpus[-1]):
            rows.append([f"**{model}, {count} GPUs**", *[""] * (len(rows[0]) - 1)])
            for link in sorted({r["gigabits"] for r in data["results"]}):
                speed = {
                    r["variant"]: r["tokens_per_second"]
                    for r in data["results"]
                    if (r["model"], r["gpus"], r["gigabits"]) == (model, count, link)
                }
                versus = (
                    speed["fp8pass, compressed"] / speed[base]
                    for base in ("fp8pass", "torchao, FP8 gather")
                )
                rows.append(
                    [
                        "",
                        str(link),
                        *(f"{speed[v]:,.0f}" for v in variants),
                        *(f"{x:.2f}" for x in versus),
                    ]
                )
    return rows


def model_table(data: dict[str, Any]) -> list[list[str]]:
    """Whole models in training: speed and peak memory, beside torchao tensorwise with AdamW."""
    steps = data["settings"]["warm_up"] + data["settings"]["timed"]
    versus = "× torchao"
    header = ["", "optimizer", "tokens/s", versus, "peak GiB", versus, f"loss after {steps} steps"]
    rows = [header]
    for model in sorted({r["model"] for r in data["results"]}):
        results = [r for r in data["results"] if r["model"] == model]
        base: dict[str, Any] = next((r for r in results if _is_model_baseline(r)), {})
        rows.append([f"**{model}**", *[""] * (len(header) - 1)])
        for r in results:
            rows.append([r["variant"], r["optimizer"], *_model_cells(r, base)])
    return rows


def _is_model_baseline(result: dict[str, Any]) -> bool:
    return result["variant"] == BASELINE and result["optimizer"] == "AdamW" and not result["error"]


def _model_cells(result: dict[str, Any], base: dict[str, Any]) -> list[str]:
    if result["error"]:
        return [result["error"].splitlines()[0], *[""] * 4]

    def ratio(key: str) -> str:
        return f"{result[key] / base[key]:.3f}" if base.get(key) else ""

    peak = result["peak_bytes"]
    return [
        f"{result['tokens_per_second']:,.0f}",
        ratio("tokens_per_second"),
        f"{peak / 2**30:.1f}" if peak else "",
        ratio("peak_bytes"),
        f"{result['loss']:.4f}",
    ]


def small_gpu_table(data: dict[str, Any]) -> list[list[str]]:
    """Whole models under a limit of memory: speed beside the same model without."""
    header = ["", "limit GiB", "micro-batch", "tokens/s", "× no limit"]
    rows = [[*header, "reserved GiB", "allocated GiB", "host GiB"]]
    for model in dict.fromkeys(r["model"] for r in data["results"]):
        results = [r for r in data["results"] if r["model"] == model]
        free = next((r["tokens_per_second"] for r in results if not r["limit"]), None)
        rows.append([f"**{model}**", *[""] * 7])
        for r in results:
            limit, batch = f"{r['limit']:g}" if r["limit"] else "none", f"{r['batch']} sequences"
            if r["error"]:
                rows.append([r["how"], limit, batch, r["error"].split(".")[0], *[""] * 4])
                continue
            share = f"{r['tokens_per_second'] / free:.3f}" if free else ""
            sizes = (r["reserved_bytes"], r["allocated_bytes"], r["host_bytes"])
            memory = [f"{size / 2**30:.1f}" if size else "" for size in sizes]
            rows.append([r["how"], limit, batch, f"{r['tokens_per_second']:,.0f}", share, *memory])
    return rows


def lora_table(data: dict[str, Any]) -> list[list[str]]:
    """Adapters beside frozen weights: speed and memory, beside BF16."""
    header = ["", "tokens/s", "× BF16", "peak GiB", "× BF16", "weights GiB"]
    rows = [
        [*header, f"loss after {data['settings']['warm_up'] + data['settings']['timed']} steps"]
    ]
    done = [r for r in data["results"] if not r["error"]]
    base: dict[str, Any] = next((r for r in done if r["variant"] == "BF16"), {})
    for r in data["results"]:
        if r["error"]:
            rows.append([r["variant"], r["error"].split(".")[0], *[""] * 5])
            continue
        cells = [f"{r['tokens_per_second']:,.0f}", _share(r, base, "tokens_per_second")]
        peak = f"{r['peak_bytes'] / 2**30:.1f}" if r["peak_bytes"] else ""
        cells += [peak, _share(r, base, "peak_bytes"), f"{r['weight_bytes'] / 2**30:.1f}"]
        rows.append([r["variant"], *cells, f"{r['loss']:.4f}"])
    return rows


def _share(result: dict[str, Any], base: dict[str, Any], key: str) -> str:
    return f"{result[key] / base[key]:.3f}" if result[key] and base.get(key) else ""


def lora_losses_table(data: dict[str, Any]) -> list[list[str]]:
    """Losses of adapters, without the speed of what is too small for it."""
    rows = convergence_table(data, baseline="BF16")
    return [row[:4] for row in rows]


def micro_batches_table(data: dict[str, Any]) -> list[list[str]]:
    """Accumulated steps: speed, memory and loss, beside those of the first variant."""
    rows = [["", "tokens/s", "× without", "peak GiB", "loss"]]
    base = data["results"][0]
    for r in data["results"]:
        if r["error"]:
            rows.append([r["variant"], r["error"].split(".")[0], *[""] * 3])
            continue
        speed = f"{r['tokens_per_second']:,.0f}", _share(r, base, "tokens_per_second")
        peak = f"{r['peak_bytes'] / 2**30:.1f}" if r["peak_bytes"] else ""
        rows.append([r["variant"], *speed, peak, f"{r['loss']:.4f}"])
    return rows


def fit_table(data: dict[str, Any]) -> list[list[str]]:
    """Predictions of `fit` beside what was measured."""
    header = ["", "predicted GiB", "measured GiB", "off by"]
    rows = [[*header, "predicted tokens/s", "measured tokens/s", "off by"]]
    for r in data["results"]:
        predicted = [
            f"{r['predicted_bytes'] / 2**30:.2f}",
            f"{r['predicted_tokens_per_second']:,.0f}",
        ]
        if r["error"]:
            rows.append([r["case"], predicted[0], r["error"], "", predicted[1], "", ""])
            continue
        peak, tokens = r["peak_bytes"], r["tokens_per_second"]
        off = f"{r['predicted_bytes'] / peak - 1:+.1%}" if peak else ""
        memory = [predicted[0], f"{peak / 2**30:.2f}" if peak else "", off]
        slower = f"{r['predicted_tokens_per_second'] / tokens - 1:+.0%}"
        rows.append([r["case"], *memory, predicted[1], f"{tokens:,.0f}", slower])
    return rows


def convergence_table(data: dict[str, Any], baseline: str = "bf16") -> list[list[str]]:
    """Training runs: final validation loss beside that of the baseline with the same seed."""
    rows = [["variant", "seed", "validation loss", f"vs {baseline}", "tokens/s", "peak GiB"]]
    results = data["results"]
    base = {r["seed"]: r["validation_loss"] for r in results if r["variant"] == baseline}
    for variant in dict.fromkeys(r["variant"] for r in results):
        runs = sorted((r for r in results if r["variant"] == variant), key=lambda r: r["seed"])
        for r in runs:
            rows.append([variant, str(r["seed"]), *_convergence_cells([r], base)])
        if len(runs) > 1:
            rows.append([variant, "mean", *_convergence_cells(runs, base)])
    return rows


# Of the model of stability.py, whose loss begins at the logarithm of that.
VOCABULARY = 256


def stability_table(data: dict[str, Any]) -> list[list[str]]:
    """Final losses by format and learning rate, with how many seeds held, and sharpness."""
    results = data["results"]
    rates = sorted({r["rate"] for r in results})
    header = ["", *(f"{rate:g}" for rate in rates), "highest that holds", "sensitivity"]
    rows = [[*header, "sharpness before", "at divergence", "ms a step"]]
    bf16 = [r for r in results if r["variant"] == "bf16"]
    lowest: dict[int, float] = {}
    for r in bf16:
        lowest[r["seed"]] = min(lowest.get(r["seed"], math.inf), _final_loss(r))
    limit = {seed: loss + data["settings"]["rise"] for seed, loss in lowest.items()}
    for variant in dict.fromkeys(r["variant"] for r in results):
        mine = [r for r in results if r["variant"] == variant and r["seed"] in limit]
        cells, highest = [], ""
        for rate in rates:
            runs = [r for r in mine if r["rate"] == rate]
            held = sum(_final_loss(r) <= limit[r["seed"]] for r in runs)
            loss = mean(_final_loss(r) for r in runs) if runs else math.inf
            shown = f"{loss:.3f}" if math.isfinite(loss) else "not finite"
            cells.append(f"{shown} ({held} of {len(runs)})" if runs else "")
            highest = f"{rate:g}" if runs and held == len(runs) else highest
        excess = [
            min(_final_loss(r), math.log(VOCABULARY)) - limit[r["seed"]] + data["settings"]["rise"]
            for r in mine
        ]
        sensitivity = f"{mean(excess):.3f}" if excess else ""
        before, at = _sharpness_around_divergence(mine)
        ms = sorted(r["ms_per_step"] for r in mine)
        speed = f"{ms[len(ms) // 2]:.2f}" if ms else ""
        rows.append([variant, *cells, highest or "none", sensitivity, before, at, speed])
    return rows


def stability_ranks(data: dict[str, Any]) -> list[list[str]]:
    """How the corner of the box ranks what was measured with the search, too."""
    pairs = [
        (corner, searched)
        for r in data["results"]
        for _, corner, searched in r["sharpness"]
        if corner is not None and searched is not None
    ]
    rows = [["measured", "rank correlation", "largest difference"]]
    if len(pairs) > 1:
        furthest = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
        rank = spearmanr(*zip(*pairs, strict=True)).statistic
        rows.append([str(len(pairs)), f"{rank:.4f}", f"{furthest:.2%}"])
    return rows


def _final_loss(run: dict[str, Any]) -> float:
    loss = run["losses"][-1]
    return math.inf if loss is None else loss


def _sharpness_around_divergence(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Medians over runs that diverge: of the last measurement before, and of the next."""
    before, at = [], []
    for r in runs:
        when = r["diverged_at"]
        known = [(s, c) for s, c, _ in r["sharpness"] if c is not None]
        if when is not None:
            before += [c for s, c in known if s < when][-1:]
            at += [c for s, c in known if s >= when][:1]
    return tuple(f"{median(x):.3g}%" if x else "" for x in (before, at))  # type: ignore[return-value]


def guard_cases_table(data: dict[str, Any]) -> list[list[str]]:
    """What went wrong, when the guard warned, whom it blamed, and how runs ended."""
    header = ["what goes wrong", "at step", "warned", "loss doubled", "first suspect"]
    rows = [[*header, "held-out loss", "acting", "quiet run"]]
    found = {(r["kind"], r["detail"], r["mode"]): r for r in data["results"]}
    for kind, detail in dict.fromkeys((r["kind"], r["detail"]) for r in data["results"]):
        quiet, watched, acting = (
            found.get((kind, detail, m), {}) for m in ("quiet", "watched", "acting")
        )
        planted = watched.get("planted")
        since = [
            f"+{watched[key] - planted}" if watched.get(key) else "never"
            for key in ("warned", "doubled")
        ]
        losses = [
            f"{r['loss']:.3f}" if r.get("loss") is not None else "not finite"
            for r in (watched, acting, quiet)
        ]
        suspect = next(iter(watched.get("suspects", ())), "")
        rows.append([f"{kind} {detail}", str(planted), *since, suspect, *losses])
    return rows


# The most that a run that was rolled back may end above its quiet twin.
RECOVERED = 1.02
# Steps by which a warning is in time.
IN_TIME = 20


def guard_table(data: dict[str, Any]) -> list[list[str]]:
    """The guard's figures, beside what it should reach."""
    modes = {
        mode: {(r["kind"], r["detail"]): r for r in data["results"] if r["mode"] == mode}
        for mode in ("quiet", "watched", "acting")
    }
    quiet, watched, acting = modes.values()
    warned = [r for r in watched.values() if r["warned"] is not None]
    doubled = [r for r in watched.values() if r["doubled"] is not None]
    early = [r for r in doubled if r in warned and r["warned"] + IN_TIME <= r["doubled"]]
    calm = [r for r in warned if r["doubled"] is None]
    planted = [r for r in watched.values() if r["kind"] == "weights"]
    named = [r for r in planted if r["suspects"] and r["suspects"][0].split(" ")[0] == r["detail"]]
    within = [
        r
        for case, r in acting.items()
        if r["loss"] is not None and case in quiet and r["loss"] <= RECOVERED * quiet[case]["loss"]
    ]
    early_of = f"{len(early)} of {len(doubled)}; {len(calm)} more whose loss never doubled"
    rows = [
        ["", "measured", "wanted"],
        ["warned", f"{len(warned)} of {len(watched)}", ""],
        [f"warned {IN_TIME} steps before the loss had doubled", early_of, "9 of 12"],
        ["the scaled layer is the first suspect", f"{len(named)} of {len(planted)}", "3 of 4"],
        [
            "alarms in quiet runs",
            f"{sum(r['alarms'] for r in quiet.values())} in {len(quiet)}",
            "1 in 12",
        ],
        ["within 2% of the quiet run's loss, acting", f"{len(within)} of {len(acting)}", "8 of 12"],
    ]
    if took := data.get("overhead"):
        for key, name, wanted in (
            ("between", "the guard's share of a step between readings", "1%"),
            ("reading", "of one with a reading", ""),
        ):
            share = f"{took[key] / took['step']:.2%}: {took[key]:.3f} of {took['step']:.1f} ms"
            rows.append([name, share, wanted])
    return rows


def wire_convergence_table(data: dict[str, Any]) -> list[list[str]]:
    """Runs on several ranks: validation loss beside that with BF16 on the wire, and bytes sent."""
    header, *body = convergence_table(data, baseline="bf16 wire")
    sent = {(r["variant"], str(r["seed"])): r for r in data["results"]}
    rows = [[*header[:4], "gradients sent", "weights sent"]]
    for row in body:
        r = sent.get((row[0], row[1]), {})
        ratios = (r.get(key) for key in ("gradients_sent", "weights_sent"))
        rows.append([*row[:4], *(f"{x:.3f}×" if x else "" for x in ratios)])
    return rows


def _convergence_cells(runs: list[dict[str, Any]], base: dict[int, float | None]) -> list[str]:
    losses = [r["validation_loss"] for r in runs]
    if any(r["diverged"] for r in runs):
        loss, versus = "diverged", ""
    else:
        references = [base.get(r["seed"]) for r in runs]
        ratios = [x / y for x, y in zip(losses, references, strict=True) if y]
        loss = f"{mean(losses):.4f}"
        versus = f"{(mean(ratios) - 1) * 100:+.2f}%" if len(ratios) == len(runs) else ""
    peaks = [r["peak_bytes"] for r in runs]
    peak = f"{mean(peaks) / 2**30:.2f}" if all(peaks) else ""
    return [loss, versus, f"{mean(r['tokens_per_second'] for r in runs):,.0f}", peak]


def frontier_table(data: dict[str, Any]) -> list[list[str]]:
    """Points of memory and time; for stock ones, the fastest of fp8pass that holds no more."""
    header = ["", "budget", "ms", "activations MiB", "peak MiB", "compile s", "fp8pass, no larger"]
    rows = [header]
    better = {r["budget"]: r for r in data["dominated"]}
    order = sorted(data["results"], key=lambda r: -(r["budget"] or 1.0))
    for variant in dict.fromkeys(r["variant"] for r in order):
        for r in (r for r in order if r["variant"] == variant):
            budget = "" if r["budget"] is None else f"{r['budget']:g}"
            if r["error"]:
                reason = r["error"].splitlines()[0]
                rows.append([variant, budget, reason, *[""] * (len(header) - 3)])
                continue
            by = better[r["budget"]] if variant == "torch.compile" else {"by": None}
            rows.append(
                [
                    variant,
                    budget,
                    f"{r['ms']:.1f}",
                    f"{r['activation_bytes'] / 2**20:.0f}",
                    f"{r['peak_bytes'] / 2**20:.0f}",
                    f"{r['compile_s']:.1f}",
                    f"{_point_name(by['by'])}: × {by['ratio']:.3f}" if by["by"] else "",
                ]
            )
    return rows


def _point_name(point: dict[str, Any]) -> str:
    recipe = point["variant"].removeprefix("fp8pass ")
    return recipe if point["budget"] is None else f"{recipe} {point['budget']:g}"


def formats_table(data: dict[str, Any]) -> list[list[str]]:
    """Rounding errors: every choice with G = 128, and those that cost E2M1's bits with G = 64."""
    names = list(data["results"][0]["errors"])
    rows = [["format", "scales", "G", "bits", *names]]
    for r in data["results"]:
        if r["group"] == 128 or (r["format"] == "e2m1" and r["bits"] == 4.25):
            errors = [f"{r['errors'][name]:.4f}" for name in names]
            rows.append([r["format"], r["scale"], str(r["group"]), f"{r['bits']:.3f}", *errors])
    return rows


SHOWN_KERNELS = 12


def kernels_table(data: dict[str, Any]) -> list[list[str]]:
    """Where a step's time goes, the largest generated kernels, and the floor."""
    bandwidth, fp8 = data["limits"]["copy_bandwidth"], data["limits"]["fp8_flops"]
    rows = [
        ["", "calls", "ms", "MiB", "of the limit"],
        ["a large copy", "", "", "", f"{bandwidth / 1e12:.2f} TB/s"],
        ["a large FP8 product", "", "", "", f"{fp8 / 1e12:.0f} TFLOP/s"],
    ]
    steps = {r["case"]: r["step_ms"] for r in data["results"]}
    for r in data["results"]:
        kernels = r["kernels"]
        ms = {k: sum(x["ms"] for x in kernels if x["kind"] == k) for k in KERNEL_KINDS}
        moved = sum(x["bytes"] for x in kernels)
        floor = ms["gemm"] + ms["attention"] + moved / bandwidth * 1e3
        peer = steps.get(r["case"].split(",")[0] + ", torchao tensorwise")
        shares = f"{r['step_ms'] / peer:.3f}, floor {floor / peer:.3f} × torchao" if peer else ""
        rate = r["gemm_flops"] / ms["gemm"] * 1e3 / fp8
        attention = r["attention_flops"] / ms["attention"] / 1e9
        rest = ms["ours"] + ms["generated"] + ms["other"]
        rows += [
            [f"**{r['case']}**", "", f"{r['step_ms']:.2f}", "", shares],
            ["floor", "", f"{floor:.2f}", "", ""],
            ["GEMMs", "", f"{ms['gemm']:.2f}", "", f"{rate:.0%}"],
            ["attention", "", f"{ms['attention']:.2f}", "", f"{attention:.0f} TFLOP/s"],
            [
                "all else",
                "",
                f"{rest:.2f}",
                f"{moved / 2**20:.0f}",
                f"{moved / bandwidth * 1e3:.2f} ms",
            ],
            ["no kernel running", "", f"{r['idle_ms']:.2f}", "", ""],
        ]
        memory_bound = [x for x in kernels if x["kind"] in ("ours", "generated")]
        rows += [_kernel_row(x, bandwidth) for x in memory_bound[:SHOWN_KERNELS]]
    return rows


KERNEL_KINDS = ("gemm", "attention", "ours", "generated", "other")


def _kernel_row(kernel: dict[str, Any], bandwidth: float) -> list[str]:
    name = kernel["name"].removeprefix("triton_").replace("fused__", "").replace("fused_", "")
    share = kernel["bytes"] / bandwidth * 1e3 / kernel["ms"]
    numbers = f"{kernel['calls']:.0f}", f"{kernel['ms']:.3f}", f"{kernel['bytes'] / 2**20:.0f}"
    return [f"`{name[:60]}`", *numbers, f"{share:.0%}"]


# Of the settings of a kernel, how many are shown.
FASTEST = 5


def sweeps_table(data: dict[str, Any]) -> list[list[str]]:
    """The fastest settings of the largest kernels, and the slowest; what fp8pass uses is bold."""
    rows = [["", "elements a thread", "ms", "of a copy"]]
    for program in dict.fromkeys(r["program"] for r in data["results"]):
        results = [r for r in data["results"] if r["program"] == program]
        (m, n), kernel = results[0]["size"], results[0]["kernel"]
        rows.append([f"**{program}**, `{kernel}`, {m} × {n}", "", "", ""])
        ordered = sorted(results, key=lambda r: r["ms"])
        shown = [r for i, r in enumerate(ordered) if i < FASTEST or r["shipped"]]
        for r in shown if ordered[-1] in shown else [*shown, ordered[-1]]:
            share = r["bytes"] / data["copy_bandwidth"] * 1e3 / r["ms"]
            row = [r["setting"], str(r["held"]), f"{r['ms']:.3f}", f"{share:.0%}"]
            rows.append([f"**{cell}**" for cell in row] if r["shipped"] else row)
    return rows


def merged_table(data: dict[str, Any]) -> list[list[str]]:
    """GEMMs of layers that share an input, apart and as one."""
    rows = [["ms", "forward", "dgrad", "sums", "wgrad"]]
    for r in data["results"]:
        pairs = {k: f"{r[k][0]:.3f} → {r[k][1]:.3f}" for k in ("forward", "dgrad", "wgrad")}
        rows.append(
            [r["case"], pairs["forward"], pairs["dgrad"], f"{r['sums']:.3f}", pairs["wgrad"]]
        )
    return rows


def gemms_table(data: dict[str, Any]) -> list[list[str]]:
    """GEMMs with a scale for each operand and for each row: cuBLASLt, and Triton beside it."""
    versus = "× cuBLASLt"
    header = ["ms", "M × N × K", "cuBLASLt", "TFLOP/s", "by row"]
    header += ["Triton", versus, "by row", versus]
    rows = [header]
    for r in data["results"]:
        (m, n, k), cublaslt, triton = r["size"], r["cublaslt_ms"], r["triton_ms"]
        row = [f"{r['case']}, {r['product']}", f"{m} × {n} × {k}", f"{cublaslt[0]:.3f}"]
        row += [f"{2 * m * n * k / cublaslt[0] / 1e9:.0f}", f"{cublaslt[1]:.3f}"]
        for theirs, library in zip(triton, cublaslt, strict=True):
            row += [f"{theirs:.3f}", f"{theirs / library:.3f}"]
        rows.append(row)
    return rows


def monitor_table(data: dict[str, Any]) -> list[list[str]]:
    """A training step without a monitor, between its samples and sampled; overheads by interval."""
    (result,) = data["results"]
    ms, default = result["ms"], data["settings"]["every"]
    without, between, sampled = ms["without"], ms["between"], ms["sampled"]
    rows = [["step of the demo's model", "ms", "over one without"]]
    rows.append(["without a monitor", f"{without:.1f}", ""])
    rows.append(["between samples", f"{between:.1f}", f"{between / without - 1:+.2%}"])
    name = f"sampled, {result['tensors']} tensors"
    rows.append([name, f"{sampled:.1f}", f"× {sampled / without:.1f}"])
    for every in sorted({100, 250, default}):
        # What is between samples differs by the noise of the measurement, which is not a cost.
        share = (sampled / without - 1) / every
        note = " (default)" if every == default else ""
        rows.append([f"every={every}{note}", "", f"{share:+.2%}"])
    return rows


def optimizer_errors_table(data: dict[str, Any]) -> list[list[str]]:
    """Errors of the update by the formats of both moments, in 10⁻⁵, with COAT's in brackets."""
    seconds = list(dict.fromkeys(r["second"] for r in data["results"]))
    rows = [["first moment, then second", *seconds]]
    for first in dict.fromkeys(r["first"] for r in data["results"]):
        found = {r["second"]: r for r in data["results"] if r["first"] == first}
        cells = [f"{found[second]['mse'] * 1e5:.2f}" for second in seconds]
        theirs = [found[second]["coat"] for second in seconds]
        cells = [c if t is None else f"{c} ({t:.2f})" for c, t in zip(cells, theirs, strict=True)]
        rows.append([first, *cells])
    return rows


def optimizer_convergence_table(data: dict[str, Any]) -> list[list[str]]:
    """Training runs beside that with states and master weights in FP32.

    Without their speed, as runs may share a GPU.
    """
    rows = convergence_table(data, baseline="fp32")
    speed = rows[0].index("tokens/s")
    return [row[:speed] + row[speed + 1 :] for row in rows]


def optimizer_speed_table(data: dict[str, Any]) -> list[list[str]]:
    """Optimizer steps: time, beside what the bytes need, and memory."""
    rows = [["", "ms", "× limit", "× torch fused", "first step s", "state bytes", "peak GiB"]]
    for shape in dict.fromkeys(r["shape"] for r in data["results"]):
        results = [r for r in data["results"] if r["shape"] == shape]
        base = next(r for r in results if r["optimizer"] == "torch fused")
        rows.append([f"**{shape}**", *[""] * 6])
        for r in results:
            rows.append(
                [
                    r["optimizer"],
                    f"{r['ms']:.2f}",
                    f"{r['ms'] / r['limit_ms']:.2f}",
                    f"{r['ms'] / base['ms']:.3f}",
                    f"{r['first_s']:.1f}",
                    f"{r['state_bytes']:.2f}",
                    f"{r['peak_bytes'] / 2**30:.1f}",
                ]
            )
    return rows


def optimizer_sweep_table(data: dict[str, Any]) -> list[list[str]]:
    """A step with other constants, from the fastest on; what fp8pass uses is bold."""
    rows = [["changed", "ms", "× limit"]]
    for r in sorted(data["results"], key=lambda r: r["ms"]):
        row = [r["setting"] or "nothing", f"{r['ms']:.2f}", f"{r['ms'] / r['limit_ms']:.3f}"]
        rows.append(row if r["setting"] else [f"**{cell}**" for cell in row])
    return rows


def zoo_table(data: dict[str, Any]) -> list[list[str]]:
    """Small models of all architectures: layers in FP8, what is kept, whether a step is right."""
    rows = [["", "FP8", "asked to stay", "kept, of stock", "right", "why others stay in 16 bits"]]
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
    """One architecture."""
    if r["error"]:
        return [r["name"], "", "", "", "no", r["error"].splitlines()[0]]
    left = r["layers"] - r["asked_for"]
    share = f"{r['kept_bytes'] / r['stock_bytes']:.2f}" if r["stock_bytes"] else ""
    right = "no" if r["complaints"] else "yes"
    why = "; ".join([*r["reasons"], *r["complaints"]])
    return [r["name"], f"{r['fp8']} of {left}", str(r["asked_for"] or ""), share, right, why]


def zoo_operators_table(data: dict[str, Any]) -> list[list[str]]:
    """The operators of all architectures' graphs, by kind, the frequent ones first."""
    name_of = lambda op: str(op).split(".")[1]  # noqa: E731
    rules = {name_of(op) for op, meaning in POINTWISE.items() if meaning.formula}
    kernels = {name_of(op) for op, meaning in POINTWISE.items() if meaning.triton}
    kernels.add("pow")  # of the exponents in `POWERS`
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


# Tables of results that have another name.
RESULTS = {
    "stability_ranks": "stability",
    "zoo_operators": "zoo",
    "guard_cases": "guard",
}

TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "layer": layer_table,
    "moe": moe_table,
    "model": model_table,
    "distributed": distributed_table,
    "balance": balance_table,
    "projection": projection_table,
    "compile_time": compile_time_table,
    "depths": depths_table,
    "convergence": convergence_table,
    "stability": stability_table,
    "stability_ranks": stability_ranks,
    "guard": guard_table,
    "guard_cases": guard_cases_table,
    "wire_convergence": wire_convergence_table,
    "frontier": frontier_table,
    "formats": formats_table,
    "kernels": kernels_table,
    "ablation": ablation_table,
    "gpt2": gpt2_table,
    "head": head_table,
    "offload": offload_table,
    "model_8b": model_table,
    "small_gpu": small_gpu_table,
    "lora": lora_table,
    "lora_losses": lora_losses_table,
    "micro_batches": micro_batches_table,
    "fit": fit_table,
    "sweeps": sweeps_table,
    "merged": merged_table,
    "gemms": gemms_table,
    "monitor": monitor_table,
    "zoo": zoo_table,
    "zoo_operators": zoo_operators_table,
    "optimizer_errors": optimizer_errors_table,
    "optimizer_speed": optimizer_speed_table,
    "optimizer_sweep": optimizer_sweep_table,
    "optimizer_convergence": optimizer_convergence_table,
}


def markdown(rows: list[list[str]]) -> str:
    """Rows as a Markdown table; the first is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def caption(data: dict[str, Any]) -> str:
    """Where and when a result was measured."""
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items() if k != "fp8pass")
    device = "CPU" if data["gpu"] == "none" else data["gpu"]
    return f"*{device}, {versions}, {data['date']}*"


def filled(text: str) -> str:
    """`text` with every measured table made anew."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        path = HERE / f"results/{RESULTS.get(name, name)}.json"
        if not path.exists():
            return match[0]
        data = json.loads(path.read_text())
        body = markdown(TABLES[name](data))
        return f"<!-- table: {name} -->\n{body}\n\n{caption(data)}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args()
    for document in DOCUMENTS:
        text = document.read_text()
        new = filled(text)
        if args.check and new != text:
            sys.exit(f"{document} is not what benchmarks/results say: python benchmarks/tables.py")
        document.write_text(new)


if __name__ == "__main__":
    main()
