"""Tables of whole models: speed and memory, on one GPU and several, measured and predicted."""

from __future__ import annotations

from typing import Any

from tables_layers import BASELINE


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
    launches = any(r.get("launch_s") for r in data["results"])  # not in older records
    header = ["", "tokens/s", "fastest step", *(["CPU ms"] if launches else [])]
    header += ["× torchao, FP8 gather", "peak GiB", "gradients sent", "weights sent"]
    rows = [header]
    for model, link in dict.fromkeys((r["model"], r["link"]) for r in data["results"]):
        results = [r for r in data["results"] if (r["model"], r["link"]) == (model, link)]
        base = next((r for r in results if r["variant"] == "torchao, FP8 gather"), None)
        rows.append([f"**{model}, {link}**", *[""] * (len(header) - 1)])
        for r in results:
            if r["error"]:
                error = r["error"].splitlines()[0][:80]
                rows.append([r["variant"], error, *[""] * (len(header) - 2)])
                continue
            speed, peak, launch = r["tokens_per_second"], r["peak_bytes"], r.get("launch_s")
            fsdp = base and not base["error"] and "sequence" not in r["variant"]
            rows.append(
                [
                    r["variant"],
                    f"{speed:,.0f}",
                    f"{r['fastest']:,.0f}" if r.get("fastest") else "",
                    *([f"{1e3 * launch:.0f}" if launch else ""] if launches else []),
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


def micro_batches_table(data: dict[str, Any]) -> list[list[str]]:
    """Accumulated steps: speed, memory and loss, beside those of the first variant."""
    return _speeds(data["results"], "× without", data["results"][0]["variant"])


def checkpointing_table(data: dict[str, Any]) -> list[list[str]]:
    """Checkpointing and budgets: speed, memory and loss, beside fp8pass without either."""
    return _speeds(data["results"], "× fp8pass", "fp8pass")


def _speeds(results: list[dict[str, Any]], title: str, base: str) -> list[list[str]]:
    rows = [["", "tokens/s", title, "peak GiB", "loss"]]
    beside = next((r for r in results if r["variant"] == base and not r["error"]), {})
    for r in results:
        if r["error"]:
            rows.append([r["variant"], r["error"].split(".")[0], *[""] * 3])
            continue
        speed = f"{r['tokens_per_second']:,.0f}", _share(r, beside, "tokens_per_second")
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
    """Rounding errors with G = 128, of E2M1 in equal bits, and of E4M3 in every group size."""
    names = list(data["results"][0]["errors"])
    rows = [["format", "scales", "G", "bits", *names]]
    for r in data["results"]:
        equal_bits = r["format"] == "e2m1" and r["bits"] == 4.25
        if r["group"] == 128 or equal_bits or r["format"] == "e4m3":
            errors = [f"{r['errors'][name]:.4f}" for name in names]
            rows.append([r["format"], r["scale"], str(r["group"]), f"{r['bits']:.3f}", *errors])
    return rows


FP8_NOISE = "FP8 projections"


def attention_storage_table(data: dict[str, Any]) -> list[list[str]]:
    """Of each way to keep attention's values the largest error, as a share of FP8's noise."""
    results = data["results"]
    kinds = list(dict.fromkeys(r["values"] for r in results))
    noise = [e for r in results if r["option"] == FP8_NOISE for e in r["errors"].values()]
    rows = [["kept", *kinds, "worst of", "least cosine"]]
    for option, found in _options(results).items():
        shares = {kind: max(_shares(results, found, values=kind)) for kind in kinds}
        _, worst = max(_shares(results, found))
        cosine = min(r["cosine"] for r in found)
        cells = [f"{shares[kind][0]:.2f}" for kind in kinds]
        rows.append([option, *cells, f"d{worst}", f"{cosine:.3f}"])
    rows[1][0] += f": errors of {min(noise):.3f} to {max(noise):.3f}"
    return rows


def attention_lengths_table(data: dict[str, Any]) -> list[list[str]]:
    """The same by length, and how far probabilities are from adding up to one."""
    results = data["results"]
    lengths = sorted({r["length"] for r in results})
    heads = [
        f"{what}, {n} tokens" for what in ("share of the noise", "sums off by") for n in lengths
    ]
    rows = [["kept", *heads]]
    for option, found in _options(results).items():
        if option in (FP8_NOISE, f"{FP8_NOISE}, backward only") or "mass" not in found[0]:
            continue
        shares = [max(_shares(results, found, length=n))[0] for n in lengths]
        masses = [max(r["mass"] for r in found if r["length"] == n) for n in lengths]
        rows.append([option, *(f"{x:.2f}" for x in shares), *(f"{x:.3f}" for x in masses)])
    return rows


def _options(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The results of each option, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        found.setdefault(r["option"], []).append(r)
    return found


def _shares(
    results: list[dict[str, Any]], found: list[dict[str, Any]], **where: Any
) -> list[tuple[float, str]]:
    """Errors of gradients by those of the same gradients with FP8 projections, with their names."""

    def case(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["values"], r["length"], r["head_dim"]

    noise = {case(r): r["errors"] for r in results if r["option"] == FP8_NOISE}
    return [
        (error / noise[case(r)][name], name)
        for r in found
        if all(r[key] == value for key, value in where.items())
        for name, error in r["errors"].items()
    ]
