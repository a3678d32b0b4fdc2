"""Tables of kernels and of the optimizer: times, bandwidths, rounding errors."""

from __future__ import annotations

from typing import Any

SHOWN_KERNELS = 8
# Cases of the record that the table leaves out, to stay short.
HIDDEN_CASES = ("h2048", "h4096x4")


def kernels_table(data: dict[str, Any]) -> list[list[str]]:
    """Return the time of a step by kind of kernel, its largest kernels, and its lower bound."""
    bandwidth, fp8 = data["limits"]["copy_bandwidth"], data["limits"]["fp8_flops"]
    rows = [
        ["", "calls", "ms", "MiB", "of the limit"],
        ["a large copy", "", "", "", f"{bandwidth / 1e12:.2f} TB/s"],
        ["a large FP8 GEMM", "", "", "", f"{fp8 / 1e12:.0f} TFLOP/s"],
    ]
    steps = {r["case"]: r["step_ms"] for r in data["results"]}
    for r in data["results"]:
        if r["case"].split(",")[0] in HIDDEN_CASES:
            continue
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
                "other kernels",
                "",
                f"{rest:.2f}",
                f"{moved / 2**20:.0f}",
                f"{moved / bandwidth * 1e3:.2f} ms",
            ],
            ["idle", "", f"{r['idle_ms']:.2f}", "", ""],
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


# The default of the option `longest_fast`.
LONGEST_FAST = 4096


def accumulation_table(data: dict[str, Any]) -> list[list[str]]:
    """Return the time of FP8 GEMMs with fast accumulation, and of other choices relative to it."""
    roles = "forward", "dgrad", "wgrad"
    choices = *(f"{role} precise" for role in roles), "all precise", "default"
    rows = [["", "all fast, ms", *choices, "error: all fast", "default"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        results = [r for r in data["results"] if r["case"] == case]
        fast = sum(r["count"] * r["fast_ms"] for r in results)
        of_role = [_added_ms([r for r in results if r["role"] == role]) for role in roles]
        long = [r for r in results if _contraction(r) > LONGEST_FAST]
        times = (f"× {1 + more / fast:.3f}" for more in (*of_role, sum(of_role), _added_ms(long)))
        errors = (
            max(r["fast_error"] for r in results),
            max(r["precise_error" if r in long else "fast_error"] for r in results),
        )
        rows.append([case, f"{fast:.2f}", *times, *(f"{error:.2%}" for error in errors)])
    return rows


def _added_ms(results: list[dict[str, Any]]) -> float:
    """Return the milliseconds that precise accumulation adds to these GEMMs, per step."""
    return sum(r["count"] * (r["precise_ms"] - r["fast_ms"]) for r in results)


def _contraction(result: dict[str, Any]) -> float:
    """Return the length of a contraction; for wgrad of experts, the mean number of tokens."""
    is_outer = result["experts"] and result["role"] == "wgrad"
    return result["size"][2] / (result["experts"] if is_outer else 1)


ROUNDED = {"stochastic": "stochastically", "nearest": "to nearest"}


def optimizer_errors_table(data: dict[str, Any]) -> list[list[str]]:
    """Return errors of the update by the formats of both moments, in 10⁻⁵ (COAT's in brackets)."""
    seconds = list(dict.fromkeys(r["second"] for r in data["results"]))
    rows = [["first moment ↓, second moment →", "rounded", *seconds]]
    for first, rounding in dict.fromkeys((r["first"], r["rounding"]) for r in data["results"]):
        alike = (r for r in data["results"] if (r["first"], r["rounding"]) == (first, rounding))
        found = {r["second"]: r for r in alike}
        cells = [f"{found[second]['mse'] * 1e5:.2f}" for second in seconds]
        theirs = [found[second]["coat"] for second in seconds]
        cells = [c if t is None else f"{c} ({t:.2f})" for c, t in zip(cells, theirs, strict=True)]
        rows.append([first, ROUNDED[rounding], *cells])
    return rows


def optimizer_sums_table(data: dict[str, Any]) -> list[list[str]]:
    """Return a table of the relative errors of gradient sums, by the number of summed gradients.

    Brackets contain the length of the sum's projection on the exact sum, relative to the exact sum.
    """
    results = data["results"]
    counts = sorted({r["count"] for r in results})
    rows = [["sum of", *map(str, counts)]]
    for gradients in dict.fromkeys(r["gradients"] for r in results):
        rows.append([f"**{gradients} gradients**", *[""] * len(counts)])
        for name in dict.fromkeys(r["buffer"] for r in results):
            alike = [r for r in results if (r["gradients"], r["buffer"]) == (gradients, name)]
            cells = [f"{r['error']:.1%} ({r['length']:.2f})" for r in alike]
            rows.append([name, *cells])
    return rows


def optimizer_speed_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time and memory of optimizer steps, with the time relative to the bandwidth limit."""
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


def optimizer_muon_table(data: dict[str, Any]) -> list[list[str]]:
    """Return time and memory of steps of Muon."""
    rows = [["", "ms", "× torch.optim.Muon", "state bytes", "peak GiB a GPU"]]
    cases = dict.fromkeys((r["shape"], r["ranks"]) for r in data["results"])
    for shape, ranks in sorted(cases):
        results = [r for r in data["results"] if (r["shape"], r["ranks"]) == (shape, ranks)]
        base = next(r["ms"] for r in results if r["optimizer"] == "torch.optim.Muon")
        rows.append([f"**{shape}, {ranks} GPU{'s' if ranks > 1 else ''}**", *[""] * 4])
        for r in sorted(results, key=lambda r: r["optimizer"] != "torch.optim.Muon"):
            rows.append(
                [
                    r["optimizer"],
                    f"{r['ms']:.1f}",
                    f"{r['ms'] / base:.3f}",
                    f"{r['state_bytes']:.2f}",
                    f"{r['peak_bytes'] / 2**30:.1f}",
                ]
            )
    return rows
