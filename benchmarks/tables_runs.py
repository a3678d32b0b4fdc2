"""Tables of training runs: losses and their stability."""

from __future__ import annotations

import math
from statistics import mean, median, stdev
from typing import Any

from scipy.stats import spearmanr


def lora_losses_table(data: dict[str, Any]) -> list[list[str]]:
    """Return losses of LoRA runs, without speeds, which mean little for a small model."""
    return [row[:4] for row in convergence_table(data)]


def convergence_table(data: dict[str, Any]) -> list[list[str]]:
    """Return final losses on held-out text, relative to BF16 with the same seed."""
    rows = [["variant", "seed", "held-out loss", "vs BF16", "tokens/s", "peak GiB"]]
    results = data["results"]
    base = {r["seed"]: r["held_out_loss"] for r in results if r["variant"] == "BF16"}
    for variant in dict.fromkeys(r["variant"] for r in results):
        runs = sorted((r for r in results if r["variant"] == variant), key=lambda r: r["seed"])
        for r in runs:
            rows.append([variant, str(r["seed"]), *_convergence_cells([r], base)])
        if len(runs) > 1:
            rows.append([variant, "mean", *_convergence_cells(runs, base)])
    return rows


def quality_table(data: dict[str, Any]) -> list[list[str]]:
    """Return losses relative to BF16 with the same seed and start: mean and standard error."""
    results = data["results"]
    baseline = next((r["variant"] for r in results if r["variant"].startswith("BF16")), "BF16")
    bases = {_pair(r): r for r in results if r["variant"] == baseline}
    rows = [["variant", "seeds", "loss", f"vs {baseline}", "held out", "tokens/s"]]
    for variant in dict.fromkeys(r["variant"] for r in results):
        own = [r for r in results if r["variant"] == variant and _pair(r) in bases]
        if not own:
            continue
        base = [bases[_pair(r)] for r in own]
        cells = [_paired(own, base, key) for key in ("loss", "held_out_loss")]
        loss = "not finite" if any(r["loss"] is None for r in own) else _mean(own, "loss")
        speed = f"{median(r['tokens_per_second'] for r in own):,.0f}"
        rows.append([variant, str(len(own)), loss, *cells, speed])
    return rows


def _pair(run: dict[str, Any]) -> tuple[int, str]:
    """Return the seed and the start of a run. Losses can be compared if both are equal."""
    return run["seed"], run.get("start", "")


def quality_rates_table(data: dict[str, Any]) -> list[list[str]]:
    """Return mean losses and diverged runs by learning rate, and the highest rate without any."""
    results = data["results"]
    rates = sorted({r["rate"] for r in results})
    rows = [["variant", *(f"{rate:g}" for rate in rates), "highest stable"]]
    for variant in dict.fromkeys(r["variant"] for r in results):
        cells, stable = [], True
        highest = "none"
        for rate in rates:
            runs = [r for r in results if (r["variant"], r["rate"]) == (variant, rate)]
            lost = sum(r["diverged"] for r in runs)
            stable = stable and bool(runs) and not lost
            highest = f"{rate:g}" if stable else highest
            finite = [r["loss"] for r in runs if r["loss"] is not None]
            loss = f"{mean(finite):.3f}" if finite else "not finite" if runs else ""
            cells.append(f"{loss} ({lost} of {len(runs)} diverged)" if lost else loss)
        rows.append([variant, *cells, highest])
    return rows


def _mean(runs: list[dict[str, Any]], key: str) -> str:
    return f"{mean(r[key] for r in runs):.4f}"


def _paired(own: list[dict[str, Any]], base: list[dict[str, Any]], key: str) -> str:
    """Return the mean relative difference of pairs of runs, with its standard error."""
    if any(r[key] is None for r in (*own, *base)):
        return "not finite"
    changes = [100 * (a[key] / b[key] - 1) for a, b in zip(own, base, strict=True)]
    if not any(changes):
        return ""
    error = f" ± {stdev(changes) / math.sqrt(len(changes)):.2f}" if len(changes) > 1 else ""
    return f"{round(mean(changes), 2) + 0.0:+.2f}%{error}"  # -0.0 + 0.0 is 0.0


# Vocabulary of the model in stability.py. An untrained model has the loss log(VOCABULARY).
VOCABULARY = 256


def stability_table(data: dict[str, Any]) -> list[list[str]]:
    """Return losses and numbers of runs that hold, by format and learning rate, and sharpness."""
    results = data["results"]
    rates = sorted({r["rate"] for r in results})
    header = ["", *(f"{rate:g}" for rate in rates), "highest rate that holds", "sensitivity"]
    rows = [[*header, "sharpness if it holds", "before divergence", "at divergence", "ms a step"]]
    bf16 = [r for r in results if r["variant"] == "bf16"]
    lowest: dict[int, float] = {}
    for r in bf16:
        lowest[r["seed"]] = min(lowest.get(r["seed"], math.inf), _final_loss(r))
    limit = {seed: loss + data["settings"]["holds"] for seed, loss in lowest.items()}
    variants = list(dict.fromkeys(r["variant"] for r in results))
    pairs = [{(r["rate"], r["seed"]) for r in results if r["variant"] == v} for v in variants]
    of_all = set.intersection(*pairs)  # for equal runs in all sensitivities
    for variant in variants:
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
            min(_final_loss(r), math.log(VOCABULARY)) - lowest[r["seed"]]
            for r in mine
            if (r["rate"], r["seed"]) in of_all
        ]
        sensitivity = f"{mean(excess):.3f}" if excess else ""
        before, at = _sharpness_around_divergence(mine)
        held = (r for r in mine if _final_loss(r) <= limit[r["seed"]])
        ends = [corner for r in held for _, corner, _ in r["sharpness"][-1:] if corner is not None]
        held_at = f"{median(ends):.3g}%" if ends else ""
        ms = sorted(r["ms_per_step"] for r in mine)
        speed = f"{ms[len(ms) // 2]:.2f}" if ms else ""
        rows.append([variant, *cells, highest or "none", sensitivity, held_at, before, at, speed])
    return rows


def stability_ranks(data: dict[str, Any]) -> list[list[str]]:
    """Return the rank correlation of sharpness in the box's corner with sharpness by the search."""
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
    """Return median sharpness of diverging runs: last before divergence, first at or after it."""
    before, at = [], []
    for r in runs:
        when = r["diverged_at"]
        known = [(s, c) for s, c, _ in r["sharpness"] if c is not None]
        if when is not None:
            before += [c for s, c in known if s < when][-1:]
            at += [c for s, c in known if s >= when][:1]
    return tuple(f"{median(x):.3g}%" if x else "" for x in (before, at))  # type: ignore[return-value]


def _convergence_cells(runs: list[dict[str, Any]], base: dict[int, float | None]) -> list[str]:
    losses = [r["held_out_loss"] for r in runs]
    if any(r["diverged"] or r["held_out_loss"] is None for r in runs):
        loss, versus = "diverged", ""
    else:
        references = [base.get(r["seed"]) for r in runs]
        ratios = [x / y for x, y in zip(losses, references, strict=True) if y]
        loss = f"{mean(losses):.4f}"
        versus = f"{(mean(ratios) - 1) * 100:+.2f}%" if len(ratios) == len(runs) else ""
    peaks = [r["peak_bytes"] for r in runs]
    peak = f"{mean(peaks) / 2**30:.2f}" if all(peaks) else ""
    return [loss, versus, f"{mean(r['tokens_per_second'] for r in runs):,.0f}", peak]
