"""Tables of an explanation, for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from fp8pass import hardware
from fp8pass.plan import Collective, FrontierPoint, Linear, Offload, Plan, RuleSummary
from fp8pass.progress.gain import doubt
from fp8pass.tools.explanation_data import ExplanationData
from fp8pass.tools.folding import (
    folded_collectives,
    folded_copies,
    folded_linears,
    folded_rules,
    folded_saved,
    path_pattern,
)
from fp8pass.tools.terminal import named, table


def linears_table(title: str, plan: Plan) -> Table:
    """The linear layers, and why some stay in high precision."""
    gemms = f"simulated {plan.simulated}" if plan.simulated else "FP8"
    columns = "×", "rows", "in → out", f"{gemms} GEMMs"
    made = table(f"{title}: linear layers", "module", *columns)
    for path, count, y in folded_linears(plan.linears):
        sizes = f"{y.in_features} → {y.out_features}"
        sizes = f"{y.experts} experts: {sizes}" if y.experts else sizes
        rewritten = " ".join(y.fp8 or y.simulated) or "none"
        accumulation = y.accumulation and f"accumulation: {y.accumulation}"
        about = named(path, y.reason or accumulation)
        made.add_row(about, str(count), y.rows, sizes, rewritten)
    return made


def saved_table(title: str, plan: Plan) -> Table:
    """The tensors kept for the backward, the largest first, and their formats."""
    columns = "×", "kept as", "MiB exact", "MiB kept"
    made = table(f"{title}: kept for the backward", "module, tensor and reason", *columns)
    rows = folded_saved(plan.saved)
    for path, count, s in sorted(rows, key=lambda row: -row[1] * row[2].bytes):
        exact, kept = mib(count * s.bytes_exact), mib(count * s.bytes)
        error = f", grad error {s.expected_error:.1%}" if s.expected_error else ""
        where = s.kept_as + (", on host" if s.host_bytes else "")
        about = named(path, f"{short_name(s.op)}, {s.dtype} {s.shape}{error}", s.reason)
        made.add_row(about, str(count), where, exact, kept)
    if scalars := [s for s in plan.saved if s.is_scalar]:
        kept = mib(sum(s.bytes for s in scalars))
        made.add_row(named("scales, seeds and sizes"), str(len(scalars)), "exact", kept, kept)
    return made


def host_table(title: str, offload: Offload) -> Table:
    """What is on the host between forward and backward, and when; times are predicted."""
    columns = "×", "MiB", "made at ms", "used ms later", "link ms"
    made = table(f"{title}: kept on the host", "module and tensor", *columns)
    for path, count, c in folded_copies(offload.copies):
        later = offload.forward_s - c.made_s + c.used_s
        numbers = (
            f"{1e3 * s:.3g}" for s in (c.made_s, later, 2 * count * c.bytes / offload.bandwidth)
        )
        about = named(path, f"{c.dtype} {c.shape}")
        made.add_row(about, str(count), mib(count * c.bytes), *numbers)
    return made


def collectives_table(title: str, collectives: list[Collective]) -> Table:
    """What ranks send each other, the most first, and why it is not in codes."""
    columns = "×", "half", "collective", "MiB"
    made = table(f"{title}: sent to other ranks", "module, tensor and reason", *columns)
    rows = folded_collectives(collectives)
    for path, count, c in sorted(rows, key=lambda row: -row[1] * row[2].bytes):
        reason = c.reason and f"not in codes: {c.reason}"
        about = named(path, f"{c.dtype} {c.shape}", reason)
        made.add_row(about, str(count), c.half, c.op, mib(count * c.bytes))
    return made


def rules_table(title: str, rules: list[RuleSummary]) -> Table:
    """Amplification of errors by region: Case 1 stores its inputs, Case 2 also cached values."""
    made = table(
        f"{title}: error rules", "module, operators, inputs", "×", "inputs kept", "results too"
    )
    for path, count, r in folded_rules(rules):
        numbers = ("", "") if r.reason else (f"{r.case_1:.2f}", f"{r.case_2:.2f}")
        formula = f"no rule: {r.reason}" if r.reason else r.bound
        about = named(path, " ".join(r.operators), f"of {', '.join(r.inputs)}", formula)
        made.add_row(about, str(count), *numbers)
    return made


def frontier_table(title: str, plan: Plan) -> Table:
    """The plan of each budget; shares are of the bytes kept without one, the peak is estimated."""
    of = f"{title}: memory against time, estimated for one {hardware.RATES_OF}"
    points = by_bytes({*plan.frontier, *([plan.point] if plan.point else [])})
    has_host = any(p.host_bytes for p in points)
    host = ("MiB on host",) if has_host else ()
    columns = "MiB kept", "of unlimited", *host, "peak MiB", "added ms", "grad error"
    made = table(of, "", *columns)
    for p in points:
        share = f"{p.bytes / max(points[-1].bytes, 1):.0%}"
        mark = "this plan ▶" if p == plan.point else ""
        numbers = mib(p.peak_bytes), f"{p.seconds * 1e3:.3g}", f"{p.error:.1%}"
        away = (mib(p.host_bytes),) if has_host else ()
        made.add_row(mark, mib(p.bytes), share, *away, *numbers)
    return made


def by_bytes(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Points of a frontier from the least to the most memory."""
    return sorted(points, key=lambda p: (p.bytes, p.seconds))


def totals(explanation: ExplanationData) -> str:
    """The totals over all runs of all graphs of a model, as sentences."""
    graphs = explanation.graphs
    plans = [g.plan for g in graphs for _ in g.runs]
    linears = [y for plan in plans for y in plan.linears]
    rewritten = sum(1 for y in linears if y.fp8 or y.simulated)
    simulated = next((plan.simulated for plan in plans if plan.simulated), None)
    format = f"simulated {simulated}" if simulated else "FP8"
    kept, stock = explanation.saved_bytes, explanation.stock_bytes
    share = f" ({kept / stock:.0%})" if stock else ""
    uses = [use for plan in plans for use in plan.kernels]
    programs, generated = (_summed(u.programs for u in uses), _summed(u.generated for u in uses))
    kernels = f"{_counted(programs, ', ')}, in {sum(u.launches for u in uses)} launches"
    return (
        f"{rewritten} of {len(linears)} linear layers in {format}{_experts(linears)}. "
        "Kept for the backward: "
        f"{mib(kept)} MiB; stock torch.compile would keep {mib(stock)} MiB{share}."
        f"{remarks(explanation)}"
        f"\nKernels: {kernels if programs else 'none'}. Matrices quantized by generated code: "
        f"{_reasons(generated) or 'none'}.{_merged(plans)}{_heads(plans)}{_on_host(plans)}"
    )


def _experts(linears: Sequence[Linear]) -> str:
    """How many of the linear layers are of experts, and how many experts these have."""
    layers = [y for y in linears if y.experts]
    if not layers:
        return ""
    rewritten = sum(1 for y in layers if y.fp8 or y.simulated)
    counts = " or ".join(str(n) for n in sorted({y.experts for y in layers}))
    return f", {rewritten} of {len(layers)} of {counts} experts among them"


def remarks(explanation: ExplanationData) -> str:
    """What is not compiled, not kept or computed again, and doubts; '' where there is none."""
    said = ""
    if explanation.parts:
        said += f"\nOnly parts of the model are compiled: {path_pattern(explanation.parts)}."
    if outside_linears := explanation.outside_linears:
        count = len(outside_linears)
        said += (
            f"\n{count} linear {'layers run' if count > 1 else 'layer runs'} outside of compiled "
            f"graphs, in high precision: {path_pattern(outside_linears)}."
        )
        if not explanation.parts:
            compiled = "only some" if explanation.graphs else "nothing"
            said += f" PyTorch compiled {compiled} of the model; TORCH_LOGS=graph_breaks says why."
    if (outside := explanation.outside_bytes) > 0:
        said += f" {mib(outside)} MiB are kept outside of compiled graphs, where nothing changes."
    elif outside < 0:
        said += f" {mib(-outside)} MiB are kept by several graphs and counted once."
    said += _evaluates(explanation)
    return said + _checkpointing(explanation) + _doubt(explanation)


def _evaluates(explanation: ExplanationData) -> str:
    """Why nothing is kept, where no graph has a backward."""
    if not explanation.graphs or not all(g.plan.inference for g in explanation.graphs):
        return ""
    return (
        "\nThe graphs keep nothing: none has a backward, as in evaluation. To see training, call "
        "explain outside of torch.inference_mode(), with a model that has a parameter that "
        "requires a gradient and does not compute under torch.no_grad()."
    )


def _doubt(explanation: ExplanationData) -> str:
    """Whether FP8 may make the model slower, where that is to be expected."""
    runs = [(g.plan, run) for g in explanation.graphs for run in g.runs]
    devices = (weight.device for _, run in runs for weight in run.weights.values())
    said = doubt([plan for plan, _ in runs], next(devices, None))
    return f"\n{said}" if said else ""


def _checkpointing(explanation: ExplanationData) -> str:
    """What `torch.utils.checkpoint` has computed again, and what there would be without it."""
    plans = [g.plan for g in explanation.graphs for _ in g.runs if g.plan.checkpointing]
    inside = [p.checkpointing for p in plans if p.checkpointing]
    around = sum(run.checkpointed for g in explanation.graphs for run in g.runs)
    said = ""
    if inside:
        products, kept = sum(c.products for c in inside), sum(p.saved_bytes for p in plans)
        without = sum(c.bytes_without or 0 for c in inside)
        least = sum(c.least_without or 0 for c in inside)
        said += (
            f"\ntorch.utils.checkpoint has the backward compute {products} matrix products again "
            "and all that lies between: nothing of it is kept in low bits. These graphs keep "
            f"{mib(kept)} MiB. Without it they would keep {mib(without)} MiB, or, with a "
            f"memory_budget, anything down to {mib(least)} MiB and compute again what does not fit."
        )
    if around:
        said += (
            f"\ntorch.utils.checkpoint runs {around} compiled graphs again in the backward: what "
            "they keep, in low bits or not, is dropped at once. Their inputs are held instead, "
            "which are not counted here. Without it a memory_budget limits what they keep."
        )
    return said


def _reasons(counts: dict[str, int]) -> str:
    """Numbers of matrices, each with the reason."""
    return "; ".join(f"{count} ({reason})" for reason, count in counts.items())


def _merged(plans: Sequence[Plan]) -> str:
    merged = [layers for plan in plans for layers in plan.merged]
    if not merged:
        return ""
    gemms = "one GEMM" if len(merged) == 1 else f"{len(merged)} GEMMs"
    return f" Input gradients of {sum(map(len, merged))} layers come from {gemms}."


def _heads(plans: Sequence[Plan]) -> str:
    """A line for each output head that has its loss in the graph."""
    lines = dict.fromkeys(
        f"\nLogits of {head.module or 'the output head'}, {head.shape}: "
        + (f"in {head.chunks} chunks of tokens" if head.chunks > 1 else "of all tokens at once")
        + f", {mib(head.bytes)} MiB{', because ' * bool(head.reason)}{head.reason}."
        for plan in plans
        for head in plan.heads
    )
    return "".join(lines)


def _on_host(plans: Sequence[Plan]) -> str:
    """A line about copies to the host and back, if there are any."""
    found = [plan.offload for plan in plans if plan.offload]
    if not found:
        return ""
    link, wait = (1e3 * sum(x) for x in ([o.link_s for o in found], [o.wait_s for o in found]))
    return (
        f"\nOn the host: {mib(sum(o.bytes for o in found))} MiB. Copies there and back take "
        f"{link:.3g} ms a step at {found[0].bandwidth / 1e9:.3g} GB/s, of which {wait:.3g} ms are "
        f"waited for, and hold at most {mib(max(o.in_flight_bytes for o in found))} MiB besides."
    )


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(c) for c in counts), Counter()))


def _counted(counts: dict[str, int], separator: str) -> str:
    return separator.join(f"{n} × {name}" for name, n in counts.items())


def short_name(operator: str) -> str:
    """The name of an operator without library and overload: `add` for `aten.add.Tensor`."""
    if "_scaled_dot_product" in operator:
        return "attention"
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def mib(count: int) -> str:
    """Bytes in MiB, with about three significant digits."""
    size = count / 2**20
    if 0 < abs(size) < 0.001:
        return "<0.001"
    return f"{size:,.1f}" if abs(size) >= 100 else f"{size:.3g}"
