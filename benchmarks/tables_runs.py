"""Tables of training runs: losses, how stable they are, what a guard makes of them."""

from __future__ import annotations

import math
from statistics import mean, median, stdev
from typing import Any

from scipy.stats import spearmanr


def lora_losses_table(data: dict[str, Any]) -> list[list[str]]:
    """Losses of adapters, without the speed of what is too small for it."""
    rows = convergence_table(data, baseline="BF16")
    return [row[:4] for row in rows]


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


def quality_table(data: dict[str, Any]) -> list[list[str]]:
    """Losses beside those of BF16 with the same seed and start: mean and standard error."""
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
    """What two runs have in common if their losses can be compared."""
    return run["seed"], run.get("start", "")


def quality_rates_table(data: dict[str, Any]) -> list[list[str]]:
    """Mean losses by learning rate, how many runs diverged, and the highest rate where none did."""
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
    """The mean relative difference of pairs of runs, with its standard error."""
    if any(r[key] is None for r in (*own, *base)):
        return "not finite"
    changes = [100 * (a[key] / b[key] - 1) for a, b in zip(own, base, strict=True)]
    if not any(changes):
        return ""
    error = f" ± {stdev(changes) / math.sqrt(len(changes)):.2f}" if len(changes) > 1 else ""
    return f"{round(mean(changes), 2) + 0.0:+.2f}%{error}"  # -0.0 + 0.0 is 0.0


# Of the model of stability.py, whose loss begins at the logarithm of that.
VOCABULARY = 256


def stability_table(data: dict[str, Any]) -> list[list[str]]:
    """Final losses by format and learning rate, with how many seeds held, and sharpness."""
    results = data["results"]
    rates = sorted({r["rate"] for r in results})
    header = ["", *(f"{rate:g}" for rate in rates), "highest that holds", "sensitivity"]
    rows = [[*header, "sharpness where it holds", "before divergence", "at it", "ms a step"]]
    bf16 = [r for r in results if r["variant"] == "bf16"]
    lowest: dict[int, float] = {}
    for r in bf16:
        lowest[r["seed"]] = min(lowest.get(r["seed"], math.inf), _final_loss(r))
    limit = {seed: loss + data["settings"]["holds"] for seed, loss in lowest.items()}
    variants = list(dict.fromkeys(r["variant"] for r in results))
    pairs = [{(r["rate"], r["seed"]) for r in results if r["variant"] == v} for v in variants]
    of_all = set.intersection(*pairs)  # sensitivities are of the same runs
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
    within = {
        case
        for case, r in acting.items()
        if r["loss"] is not None and case in quiet and r["loss"] <= RECOVERED * quiet[case]["loss"]
    }
    diverged = {case for case, r in watched.items() if r["doubled"] is not None}
    recovered = f"{len(within & diverged)} of {len(acting.keys() & diverged)}"
    others = f"{len(within - diverged)} of {len(acting.keys() - diverged)} others"
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
        ["within 2% of the quiet run's loss, acting", f"{recovered}; {others}", "8 of 12"],
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


def optimizer_convergence_table(data: dict[str, Any]) -> list[list[str]]:
    """Training runs beside that with states and master weights in FP32.

    Without their speed, as runs may share a GPU.
    """
    rows = convergence_table(data, baseline="fp32")
    speed = rows[0].index("tokens/s")
    return [row[:speed] + row[speed + 1 :] for row in rows]
