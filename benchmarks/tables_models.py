"""Tables of whole models: speed, memory and compile time, on one GPU and on several GPUs."""

from __future__ import annotations

from typing import Any

from tables_layers import BASELINE


def compile_time_table(data: dict[str, Any]) -> list[list[str]]:
    """Return the seconds to the end of the first step: cold, and warm in a second process."""
    rows = [["four layers, hidden 4096", "cold s", "warm s", "of which fp8pass's passes, cold"]]
    for variant in dict.fromkeys(r["variant"] for r in data["results"]):
        found = {r["cache"]: r for r in data["results"] if r["variant"] == variant}
        cold, warm = found["cold"], found["warm"]
        passes = f"{cold['passes']:.2f}" if cold["passes"] else ""
        rows.append([variant, f"{cold['seconds']:.1f}", f"{warm['seconds']:.1f}", passes])
    return rows


def depths_table(data: dict[str, Any]) -> list[list[str]]:
    """Return CPU seconds of compilation by depth: in total, per layer, and for the passes."""
    variants = list(dict.fromkeys(r["variant"] for r in data["results"]))
    header = [f"{variant}, CPU s (a layer)" for variant in variants]
    rows = [["layers, hidden 256", *header, "of which fp8pass's passes, CPU ms a layer"]]
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
    """Return speed and peak memory on several GPUs over each link, without empty columns."""
    launches = any(r.get("launch_s") for r in data["results"])  # older records have no launch times
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
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def long_table(data: dict[str, Any]) -> list[list[str]]:
    """Return speed and peak memory for each length of a sequence, relative to the first variant."""
    rows = [["", "tokens/s", "× BF16", "peak GiB", "× BF16"]]
    for length in dict.fromkeys(r["model"] for r in data["results"]):
        first, *others = [r for r in data["results"] if r["model"] == length]
        rows.append([f"**{length}**", *[""] * 4])
        for r in (first, *others):
            speed, peak = r["tokens_per_second"], r["peak_bytes"]
            ratios = speed / first["tokens_per_second"], peak / first["peak_bytes"]
            row = [f"{speed:,.0f}", f"{ratios[0]:.2f}", f"{peak / 2**30:.1f}", f"{ratios[1]:.2f}"]
            rows.append([r["variant"], *row])
    return rows


def large_models_table(data: dict[str, Any]) -> list[list[str]]:
    """Return speed and memory of large models for each limit of the GPUs' memory."""
    rows = [["", "micro-batch", "tokens/s", "MFU", "reserved GiB", "host GiB a rank"]]
    cases = dict.fromkeys((r["model"], r["ranks"], r["limit"]) for r in data["results"])
    for model, ranks, limit in cases:
        rows.append([f"**{model}, {ranks} GPUs, {limit:g} GiB each**", *[""] * 5])
        for r in data["results"]:
            if (r["model"], r["ranks"], r["limit"]) != (model, ranks, limit):
                continue
            if r["error"]:
                rows.append([r["how"], "", r["error"][:60], *[""] * 3])
                continue
            reserved, host = ((r[k] or 0) / 2**30 for k in ("reserved_bytes", "host_bytes"))
            memory = f"{reserved:.1f}", f"{host:.1f}"
            speed = f"{r['tokens_per_second']:,.0f}", f"{r['mfu']:.0%}"
            rows.append([r["how"], f"{r['batch']} sequences", *speed, *memory])
    return rows


def pipelines_table(data: dict[str, Any]) -> list[list[str]]:
    """Return speed, the memory peaks of all ranks, and the compile time, for each schedule."""
    rows = [["", "tokens/s", "× BF16", "peak GiB by rank", "first step s"]]
    for schedule, ranks in dict.fromkeys((r["schedule"], r["ranks"]) for r in data["results"]):
        results = [r for r in data["results"] if (r["schedule"], r["ranks"]) == (schedule, ranks)]
        base: dict[str, Any] = next((r for r in results if r["variant"] == "bf16 compile"), {})
        rows.append([f"**{schedule}, {ranks} GPUs**", *[""] * 4])
        for r in results:
            if r["error"]:
                rows.append([r["variant"], r["error"][:60], *[""] * 3])
                continue
            speed, baseline = r["tokens_per_second"], base.get("tokens_per_second")
            peaks = ", ".join(f"{peak / 2**30:.1f}" for peak in r["peak_bytes"] if peak)
            ratio = f"{speed / baseline:.2f}" if baseline else ""
            rows.append([r["variant"], f"{speed:,.0f}", ratio, peaks, f"{r['first_step_s']:.0f}"])
    return rows


def _wire(result: dict[str, Any]) -> tuple[float | None, float | None]:
    return result["gradients_wire"], result["weights_wire"]


def model_table(data: dict[str, Any]) -> list[list[str]]:
    """Return speed and peak memory of whole models, relative to torchao tensorwise with AdamW."""
    steps = data["settings"]["warm_up"] + data["settings"]["timed"]
    versus = "× torchao"
    header = ["", "optimizer", "tokens/s", versus, "peak GiB", versus, f"loss after {steps} steps"]
    rows = [header]
    for model in sorted({r["model"] for r in data["results"]}):
        results = [r for r in data["results"] if r["model"] == model]
        base: dict[str, Any] = next((r for r in results if _is_model_baseline(r)), {})
        rows.append([f"**{model}**", *[""] * (len(header) - 1)])
        for r in results:
            if r["error"]:
                cells = [r["error"].splitlines()[0], *[""] * 4]
            else:
                cells = [*_speed_cells(r, base), f"{r['loss']:.4f}"]
            rows.append([r["variant"], r["optimizer"], *cells])
    return rows


def _is_model_baseline(result: dict[str, Any]) -> bool:
    return result["variant"] == BASELINE and result["optimizer"] == "AdamW" and not result["error"]


def _speed_cells(result: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return speed and peak memory, each followed by its ratio to `base`."""
    cells = [f"{result['tokens_per_second']:,.0f}", _ratio(result, base, "tokens_per_second")]
    peak = f"{result['peak_bytes'] / 2**30:.1f}" if result["peak_bytes"] else ""
    return [*cells, peak, _ratio(result, base, "peak_bytes")]


def _ratio(result: dict[str, Any], base: dict[str, Any], key: str) -> str:
    return f"{result[key] / base[key]:.3f}" if result[key] and base.get(key) else ""


def llmq_table(data: dict[str, Any]) -> list[list[str]]:
    """Return tokens per second of whole steps, relative to BF16 and to a published figure."""
    rows = [
        ["", "tokens/s", "× BF16", "× published, H100", "micro-batch ms", "update ms", "peak GiB"]
    ]
    for model, size in data["settings"]["models"].items():
        results = [r for r in data["results"] if r["model"] == model]
        done = {r["variant"]: r for r in results if not r["error"]}
        rows.append([f"**{model}**", *[""] * 6] if results else [])
        for r in results:
            if r["error"]:
                rows.append([r["variant"], r["error"].splitlines()[0][:80], *[""] * 5])
                continue
            speed, peak = r["tokens_per_second"], (r["peak_bytes"] or 0) / 2**30
            versus = _ratio(r, done.get("bf16 compile", {}), "tokens_per_second")
            cells = [f"{speed:,.0f}", versus, f"{speed / size['published']:.2f}"]
            cells += [
                f"{1e3 * r['micro_batch_s']:.1f}",
                f"{1e3 * r['update_s']:.1f}",
                f"{peak:.1f}",
            ]
            rows.append([r["variant"], *cells])
    return [row for row in rows if row]


def lora_table(data: dict[str, Any]) -> list[list[str]]:
    """Return speed and memory of training LoRA adapters, relative to BF16 for each model.

    The name of a variant starts with the name of its model. A model may also have a variant with
    another number of layers.
    """
    header = ["", "tokens/s", "× BF16", "peak GiB", "× BF16", "weights GiB"]
    rows = [header]
    results = data["results"]
    bases = {r["variant"]: r for r in results if not r["error"]}
    for r in results:
        if r["error"]:
            rows.append([r["variant"], r["error"].split(".")[0], *[""] * 4])
            continue
        model = r["variant"].split(", ")[0]
        base = bases.get(f"{model}, BF16", {})
        weights = f"{r['weight_bytes'] / 2**30:.1f}"
        rows.append([r["variant"], *_speed_cells(r, base), weights])
    return rows


def formats_table(data: dict[str, Any]) -> list[list[str]]:
    """Return errors: all formats in groups of 128, E2M1 with 4.25 bits, E4M3 in all group sizes."""
    names = list(data["results"][0]["errors"])
    rows = [["format", "scales", "G", "bits", *names]]
    for r in data["results"]:
        equal_bits = r["format"] == "e2m1" and r["bits"] == 4.25
        if r["group"] == 128 or equal_bits or r["format"] == "e4m3":
            errors = [f"{r['errors'][name]:.4f}" for name in names]
            rows.append([r["format"], r["scale"], str(r["group"]), f"{r['bits']:.3f}", *errors])
    return rows
