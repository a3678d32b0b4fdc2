"""Tables and totals of an explanation, for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from fp8pass import hardware
from fp8pass.graph.names import shorten_operator
from fp8pass.option_checks import bytes_text
from fp8pass.plan import Collective, FrontierPoint, Offload, Plan, RuleSummary
from fp8pass.tools import folding
from fp8pass.tools.explanation_data import ExplanationData
from fp8pass.tools.output import make_name, make_table


def make_tables(title: str, plan: Plan) -> Iterator[Table]:
    if plan.linears:
        yield make_linears_table(title, plan)
    if plan.saved:
        yield make_saved_table(title, plan)
    if plan.offload:
        yield _make_host_table(title, plan.offload)
    if plan.collectives:
        yield _make_collectives_table(title, plan.collectives)
    if plan.frontier:
        yield _make_frontier_table(title, plan)
    if plan.rules:
        yield _make_rules_table(title, plan.rules)


def make_linears_table(title: str, plan: Plan) -> Table:
    gemms = f"simulated {plan.simulated}" if plan.simulated else "FP8"
    columns = "×", "rows", "in → out", f"{gemms} GEMMs"
    table = make_table(f"{title}: linear layers", "module", *columns)
    for path, count, y, _ in folding.fold_linears(plan.linears):
        sizes = f"{y.in_features} → {y.out_features}"
        sizes = f"{y.experts} experts: {sizes}" if y.experts else sizes
        rewritten = " ".join(y.fp8 or y.simulated) or "none"
        accumulation = y.accumulation and f"accumulation: {y.accumulation}"
        slower = y.slower and y.fp8 and f"other GEMMs in BF16: {y.slower}"
        unfit = "; ".join(f"{gemm} ({why})" for gemm, why in y.unfit)
        scales = unfit and f"one scale per tensor in {unfit}"
        name = make_name(path, y.reason or accumulation, slower, scales)
        table.add_row(name, str(count), y.rows, sizes, rewritten)
    return table


def make_saved_table(title: str, plan: Plan) -> Table:
    columns = "×", "saved as", "MiB exact", "MiB saved"
    table = make_table(f"{title}: saved for the backward", "module, tensor and reason", *columns)
    for path, count, s, _ in folding.fold_saved(plan.saved):
        sizes = format_mib(count * s.bytes_exact), format_mib(count * s.bytes)
        error = f", grad error {s.expected_error:.1%}" if s.expected_error else ""
        format = s.saved_as + (", on host" if s.host_bytes else "")
        tensor = f"{shorten_operator(s.op)}, {s.dtype} {s.shape}{error}"
        table.add_row(make_name(path, tensor, s.reason), str(count), format, *sizes)
    if scalars := [s for s in plan.saved if s.is_scalar]:
        size = format_mib(sum(s.bytes for s in scalars))
        table.add_row(make_name("scales, seeds and sizes"), str(len(scalars)), "exact", size, size)
    return table


def _make_host_table(title: str, offload: Offload) -> Table:
    columns = "×", "MiB", "computed at ms", "used after ms", "copy ms"
    table = make_table(f"{title}: saved in host memory", "module and tensor", *columns)
    rows = folding.fold_rows((c.module, (c.shape, c.dtype), c) for c in offload.copies)
    for path, count, c, _ in rows:  # of equal layers, show the times of the first
        later = offload.forward_s - c.computed_s + c.used_s
        seconds = c.computed_s, later, 2 * count * c.bytes / offload.bandwidth
        name = make_name(path, f"{c.dtype} {c.shape}")
        times = (f"{1e3 * s:.3g}" for s in seconds)
        table.add_row(name, str(count), format_mib(count * c.bytes), *times)
    return table


def _make_collectives_table(title: str, collectives: list[Collective]) -> Table:
    columns = "×", "graph", "collective", "MiB"
    table = make_table(f"{title}: sent to other ranks", "module, tensor and reason", *columns)
    rows = ((c.module, (c.op, c.half, c.shape, c.dtype, c.reason), c) for c in collectives)
    for path, count, c, _ in folding.sort_by_bytes(folding.fold_rows(rows)):
        name = make_name(path, f"{c.dtype} {c.shape}", c.reason and f"not quantized: {c.reason}")
        table.add_row(name, str(count), c.half, c.op, format_mib(count * c.bytes))
    return table


def _make_rules_table(title: str, rules: list[RuleSummary]) -> Table:
    """Make the table of error rules: how much each region amplifies errors of stored values.

    The columns are Case 1 (inputs of a region stored) and Case 2 (intermediate results, too) of the
    paper AGoQ.
    """
    columns = "×", "inputs stored", "results, too"
    table = make_table(f"{title}: error rules", "module, operators, inputs", *columns)
    for path, count, r, _ in folding.fold_rules(rules):
        numbers = ("", "") if r.reason else (f"{r.case_1:.2f}", f"{r.case_2:.2f}")
        formula = f"no rule: {r.reason}" if r.reason else r.bound
        name = make_name(path, " ".join(r.operators), f"of {', '.join(r.inputs)}", formula)
        table.add_row(name, str(count), *numbers)
    return table


def _make_frontier_table(title: str, plan: Plan) -> Table:
    """Make the table of the frontier. Saved bytes are rounded up to be valid memory budgets."""
    points = sort_points({*plan.frontier, *([plan.point] if plan.point else [])})
    host = ["MiB on host"] if any(p.host_bytes for p in points) else []
    columns = "saved", "of unlimited", *host, "peak MiB", "added ms", "grad error"
    title = f"{title}: memory against time, estimated for one {hardware.RATES_OF}"
    table = make_table(title, "", *columns)
    for p in points:
        table.add_row(
            "this plan ▶" if p == plan.point else "",
            bytes_text(max(p.bytes, 1), up=True),
            f"{p.bytes / max(points[-1].bytes, 1):.0%}",
            *([format_mib(p.host_bytes)] if host else []),
            format_mib(p.peak_bytes),
            f"{p.seconds * 1e3:.3g}",
            f"{p.error:.1%}",
        )
    return table


def sort_points(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Sort by saved bytes, the smallest first."""
    return sorted(points, key=lambda p: (p.bytes, p.seconds))


def format_totals(explanation: ExplanationData) -> str:
    """Summarize all runs of all graphs."""
    plans = [g.plan for g in explanation.graphs for _ in g.runs]
    linears = [y for plan in plans for y in plan.linears]
    rewritten = [y for y in linears if y.fp8 or y.simulated]
    experts = ""
    if of_experts := [y for y in linears if y.experts]:
        counts = " or ".join(str(n) for n in sorted({y.experts for y in of_experts}))
        done = sum(1 for y in rewritten if y.experts)
        experts = f", including {done} of {len(of_experts)} with {counts} experts each"
    simulated = next((plan.simulated for plan in plans if plan.simulated), None)
    format = f"simulated {simulated}" if simulated else "FP8"
    layers = f"{len(rewritten)} of {len(linears)} linear layers in {format}{experts}."
    if not linears:
        layers = "There is nothing to run in FP8: the compiled graphs have no linear layers."
    saved, stock = explanation.saved_bytes, explanation.stock_bytes
    share = f" ({saved / stock:.0%})" if stock else ""
    uses = [use for plan in plans for use in plan.kernels]
    programs, generated = (_sum(u.programs for u in uses), _sum(u.generated for u in uses))
    listed = ", ".join(f"{count} × {name}" for name, count in programs.items())
    kernels = f"{listed}, in {sum(u.launches for u in uses)} launches" if programs else "none"
    reasons = "; ".join(f"{count} ({reason})" for reason, count in generated.items())
    return (
        f"{layers} Saved for the backward: {format_mib(saved)} MiB; stock torch.compile would save "
        f"{format_mib(stock)} MiB{share}.{format_remarks(explanation)}\n"
        f"Kernels: {kernels}. Matrices quantized by generated code: {reasons or 'none'}."
        f"{_describe_merged(plans)}{_describe_heads(plans)}{_describe_offload(plans)}"
    )


def _describe_merged(plans: list[Plan]) -> str:
    kinds = {
        "the input-gradient GEMMs of {} layers": [p.merged for p in plans],
        "GEMMs of {} adapters": [p.merged_adapters for p in plans],
    }
    text = ""
    for kind, found in kinds.items():
        groups = [modules for merged in found for modules in merged]
        gemms = "one GEMM" if len(groups) == 1 else f"{len(groups)} GEMMs"
        if groups:
            text += f" Merged {kind.format(sum(map(len, groups)))} into {gemms}."
    return text


def format_remarks(explanation: ExplanationData) -> str:
    """Describe convolutions, uncompiled parts and checkpointing."""
    text = ""
    if count := explanation.convolutions:
        text += (
            f"\n{count} {'convolutions stay' if count > 1 else 'convolution stays'} in high "
            f"precision, with {explanation.convolution_share:.0%} of the parameters."
        )
    if breaks := explanation.graph_breaks:
        text += (
            f"\n{breaks} graph break{'s' * (breaks > 1)}: the model runs as {breaks + 1} graphs, "
            "each with its own plan. TORCH_LOGS=graph_breaks shows why."
        )
    if explanation.parts:
        text += (
            f"\nOnly parts of the model are compiled: {folding.format_paths(explanation.parts)}."
        )
    if outside_linears := explanation.outside_linears:
        count = len(outside_linears)
        text += (
            f"\n{count} linear {'layers run' if count > 1 else 'layer runs'} outside of compiled "
            f"graphs, in high precision: {folding.format_paths(outside_linears)}."
        )
        if not explanation.parts:
            compiled = "only some" if explanation.graphs else "nothing"
            text += f" PyTorch compiled {compiled} of the model; TORCH_LOGS=graph_breaks shows why."
    if (outside := explanation.outside_bytes) > 0:
        text += f" {format_mib(outside)} MiB are saved outside of compiled graphs, unchanged."
    elif outside < 0:
        text += f" {format_mib(-outside)} MiB are saved by several graphs and counted once."
    if explanation.graphs and all(g.plan.inference for g in explanation.graphs):
        text += (
            "\nThe graphs save nothing, because no graph has a backward. To explain a training "
            "step, call explain outside of torch.inference_mode() and torch.no_grad(), with a "
            "model that has a trainable parameter."
        )
    if not explanation.is_compiled:
        text += (
            "\nThis model is not compiled with fp8pass. The tables show what fp8pass would do: "
            "model = torch.compile(model, backend='fp8pass')."
        )
    return text + _describe_checkpointing(explanation)


def _describe_checkpointing(explanation: ExplanationData) -> str:
    plans = [g.plan for g in explanation.graphs for _ in g.runs if g.plan.checkpointing]
    inside = [p.checkpointing for p in plans if p.checkpointing]
    around = sum(run.checkpointed for g in explanation.graphs for run in g.runs)
    text = ""
    if inside:
        products, saved = sum(c.products for c in inside), sum(p.saved_bytes for p in plans)
        without = sum(c.bytes_without or 0 for c in inside)
        least = sum(c.least_without or 0 for c in inside)
        text += (
            f"\ntorch.utils.checkpoint makes the backward recompute {products} GEMMs and "
            "attention operators, and all operators between them, so fp8pass saves none of their "
            f"results in low-bit formats. These graphs save {format_mib(saved)} MiB. Without "
            f"checkpointing, the graphs would save {format_mib(without)} MiB, and a memory_budget "
            f"can reduce this to {bytes_text(least, up=True)}."
        )
    if around:
        text += (
            f"\ntorch.utils.checkpoint reruns {around} compiled graphs in the backward. It saves "
            "only their inputs, which are not counted here. To limit saved tensors without "
            "checkpointing, set memory_budget."
        )
    return text


def _describe_heads(plans: Sequence[Plan]) -> str:
    lines = dict.fromkeys(
        f"\nLogits of {head.module or 'the output head'}, {head.shape}: computed "
        + (f"in {head.chunks} chunks of tokens" if head.chunks > 1 else "for all tokens at once")
        + f", {format_mib(head.bytes)} MiB{', because ' * bool(head.reason)}{head.reason}."
        for plan in plans
        for head in plan.heads
    )
    return "".join(lines)


def _describe_offload(plans: Sequence[Plan]) -> str:
    found = [plan.offload for plan in plans if plan.offload]
    if not found:
        return ""
    link, wait = (1e3 * sum(x) for x in ([o.copy_s for o in found], [o.wait_s for o in found]))
    return (
        f"\nSaved in host memory: {format_mib(sum(o.bytes for o in found))} MiB. Copies take "
        f"{link:.3g} ms per step at {found[0].bandwidth / 1e9:.3g} GB/s; {wait:.3g} ms of them are "
        "exposed. Copies in flight take at most "
        f"{format_mib(max(o.in_flight_bytes for o in found))} MiB of GPU memory."
    )


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(c) for c in counts), Counter()))


def format_mib(count: int) -> str:
    """Format bytes in MiB, with about three significant digits."""
    size = count / 2**20
    if 0 < abs(size) < 0.001:
        return "<0.001"
    return f"{size:,.1f}" if abs(size) >= 100 else f"{size:.3g}"
