"""The content of the report: picture, folding, timeline and diffs agree with the plan."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter

import pytest
import torch
from helpers import MLP, Residuals, explained_llama, gpt2, tokens, vit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fp8pass
from fp8pass import Config, explain
from fp8pass.demo.model import new_model
from fp8pass.demo.sizes import SIZES
from fp8pass.graph.names import shorten_operator
from fp8pass.option_checks import parse_bytes
from fp8pass.tools.explanation_data import describe_operands
from fp8pass.tools.report.diffs import diff_modules, split_code
from fp8pass.tools.report.page import (
    FP8_LINEAR,
    count_operations,
    format_budget,
    format_size,
    format_time,
    page_data,
    render,
)
from fp8pass.tools.report.picture import OPERATOR_KINDS, DrawnOperator, Edge, Picture, draw
from fp8pass.tools.report.repeated_layers import find_layer, fold
from fp8pass.tools.report.timeline import trace_timeline


@pytest.fixture(scope="module")
def llama_explanation():
    return explained_llama()


@pytest.fixture(scope="module")
def picture(llama_explanation):
    return draw(llama_explanation.graphs[0])


def numbers_on_page(page: str) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


# --- the picture --------------------------------------------------------------------------------


@pytest.mark.long
def test_every_saved_byte_is_drawn_once(llama_explanation, picture):
    assert sum(e.bytes for e in picture.edges) == llama_explanation.saved_bytes > 0


@pytest.mark.long
def test_kinds(llama_explanation, picture):
    kinds = Counter(y.kind for y in picture.operators)
    plan = llama_explanation.graphs[0].plan
    assert set(kinds) <= set(OPERATOR_KINDS)
    merged = sum(len(layers) - 1 for layers in plan.merged)
    assert merged == 4 * 3  # q, k and v; gate and up
    assert kinds["fp8"] == sum(len(y.fp8) for y in plan.linears) - merged
    assert kinds["attention"] == (2 + 2) * 4  # forward, backward, saved output and statistics
    assert kinds["dequantize"] == sum(1 for s in plan.saved if s.expected_error)
    assert kinds["recomputed"] > 0


def test_sides(picture):
    by_id = {y.id: y for y in picture.operators}
    for edge in picture.edges:
        source, target = by_id[edge.source], by_id[edge.target]
        assert not (source.backward and not target.backward)
        assert not edge.crosses or (not source.backward and target.backward)


def test_columns_follow_the_forward(picture):
    order = [p.rsplit(".", 1)[-1] for p in picture.columns if p.startswith("model.layers.2.")]
    wanted = ["input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    assert [name for name in order if name in wanted] == wanted


def test_the_backward_is_in_the_column_of_its_module(picture):
    for operator in picture.operators:
        if operator.backward and operator.kind == "fp8":
            assert picture.columns[operator.column] == operator.module


@pytest.mark.long
def test_gradients_flow_through_the_layers_in_reverse():
    """A gradient reaches a layer from the next one, not from operators without a module."""
    picture = draw(explain(Residuals(4), torch.randn(32, 64)).graphs[0])
    operators = {y.id: y for y in picture.operators}
    sums = [y for y in picture.operators if y.backward and y.label == "add"]
    assert sums
    assert all(find_layer(y.module) for y in sums)
    layers = set()
    for edge in picture.edges:
        ends = operators[edge.source], operators[edge.target]
        if all(y.backward for y in ends) and ends[0].kind not in ("recomputed", "dequantize"):
            layers.add(tuple(find_layer(y.module) for y in ends))
    crossing = {pair for pair in layers if pair[0] != pair[1] and all(pair)}
    assert crossing == {(f"layers.{i + 1}", f"layers.{i}") for i in range(3)}


@pytest.mark.long
def test_inputs_have_the_names_of_the_models_arguments():
    explanation = explain(new_model(SIZES["tiny"], 0, torch.device("cpu")), *[tokens(4, 64)] * 2)
    picture = draw(explanation.graphs[0])
    labels = {y.label for y in picture.operators if y.kind == "input"}
    assert "tokens" in labels
    assert not any(label.startswith(("primals", "tangents")) for label in labels)
    row = re.search(r'<td>tokens(?:<code.*?</code>)?</td><td class="n">1</td>', render(explanation))
    assert row


def test_details(llama_explanation, picture):
    product = next(y for y in picture.operators if y.kind == "fp8" and not y.backward)
    assert product.details["shape"] == "32×64"
    assert product.details["scales"] == "one for each row × one for each row"
    assert re.search(r"modeling_llama.py:\d+  .*q_proj\(hidden_states\)", product.details["source"])
    head = next(y for y in picture.operators if y.module == "lm_head" and y.kind == "linear")
    assert "quantize_lm_head" in head.details["in high precision because"]
    stored = [s.saved_as for s in llama_explanation.graphs[0].plan.saved if s.expected_error]
    restored = [y.details["saved as"] for y in picture.operators if y.kind == "dequantize"]
    assert Counter(restored) == Counter(stored)
    names = {y.details["in keep_exact"] for y in picture.operators if y.kind == "dequantize"}
    assert names == {s.value for s in llama_explanation.graphs[0].plan.saved if s.expected_error}
    again = next(y for y in picture.operators if y.kind == "recomputed")
    assert "recomputed" in again.details["in the backward"]


def test_source_lines_are_lines_of_the_users_model(picture):
    """The innermost line outside of PyTorch, or a line in PyTorch if no other line exists."""
    alone = draw(explain(nn.RMSNorm(64), torch.randn(4, 64)).graphs[0])
    lines = [y.details["source"] for y in alone.operators if y.kind == "nonlinear"]
    assert lines
    assert all(line.startswith("torch/") and "rms_norm" in line for line in lines)
    lines = [y.details.get("source", "") for y in picture.operators]
    assert not [line for line in lines if line.startswith("torch/")]


# --- folding ------------------------------------------------------------------------------------


def test_equal_layers_are_drawn_once(picture):
    folded = fold(picture)
    assert [(y.first, y.last, y.count) for y in folded.layers] == [
        ("model.layers.0", "model.layers.0", 1),  # computes the mask for all layers
        ("model.layers.1", "model.layers.2", 2),
        ("model.layers.3", "model.layers.3", 1),  # its sum is saved exactly for the last norm
    ]
    layers = {find_layer(m) for m in folded.columns} - {""}
    assert layers == {"model.layers.0", "model.layers.1", "model.layers.3"}


def test_folding_loses_no_bytes(llama_explanation, picture):
    folded = fold(picture)
    column = {y.id: y.column for y in folded.operators}
    counts = {c: y.count for y in folded.layers for c in y.columns}
    bytes_ = sum(e.bytes * counts.get(column[e.source], 1) for e in folded.edges)
    assert bytes_ == llama_explanation.saved_bytes


def test_edges_to_the_next_equal_layer_are_drawn():
    picture = chain([1, 1, 1])
    saved = [Edge("1:0", "2:0", True, 8), Edge("2:0", "3:0", True, 8)]
    picture.edges = [*picture.edges[:1], *saved, *picture.edges[3:]]
    (edge,) = [e for e in fold(picture).edges if e.bytes]
    assert (edge.source, edge.target, edge.bytes) == ("1:0", "1:0", 8)


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("model.layers.12.mlp.up", "model.layers.12"),
        ("0", "0"),
        ("3.experts.5.up", "3"),
        ("h.1", "h.1"),
        ("conv1.weight", ""),
        ("", ""),
    ],
)
def test_layer_of(module, layer):
    assert find_layer(module) == layer


def chain(layers: list[int]) -> Picture:
    """Return a chain of layers with given numbers of operators, between two operators."""
    names = ["first", *(f"layers.{i}" for i in range(len(layers))), "last"]
    operators = [
        DrawnOperator(f"{column}:{i}", "mul", "nonlinear", module, column, False, {})
        for column, (module, size) in enumerate(zip(names, [1, *layers, 1], strict=True))
        for i in range(size)
    ]
    ids = [y.id for y in operators]
    edges = [Edge(a, b, False, 0) for a, b in itertools.pairwise(ids)]
    return Picture(names, operators, edges)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_folding_keeps_counts_and_connections(layers):
    folded = fold(chain(layers))
    assert sum(y.count for y in folded.layers) == len(layers)
    drawn = [len([y for y in folded.operators if y.column == z.columns[0]]) for z in folded.layers]
    expanded = [n for n, z in zip(drawn, folded.layers, strict=True) for _ in range(z.count)]
    assert expanded == layers
    ids = [y.id for y in folded.operators]
    assert {(e.source, e.target) for e in folded.edges} == set(itertools.pairwise(ids))
    assert [y.column for y in folded.operators] == sorted(y.column for y in folded.operators)


@pytest.mark.long
@pytest.mark.parametrize(("skip", "counts"), [((), [1, 4]), (("layers.2.up",), [1, 1, 1, 2])])
def test_different_layers_are_not_folded(skip, counts):
    explanation = explain(Residuals(5), torch.randn(32, 64), config=Config(skip=skip))
    folded = fold(draw(explanation.graphs[0]))
    assert [y.count for y in folded.layers] == counts


# --- the timeline -------------------------------------------------------------------------------


def test_the_timeline_rises_to_the_saved_bytes_and_falls_to_zero(llama_explanation):
    moments = trace_timeline(llama_explanation.graphs)
    forward = [m.bytes for m in moments if not m.backward]
    backward = [m.bytes for m in moments if m.backward]
    assert forward == sorted(forward)
    assert backward == sorted(backward, reverse=True)
    assert forward[-1] == llama_explanation.saved_bytes
    assert backward[-1] == 0


@pytest.mark.long
def test_the_timeline_of_several_graphs_frees_the_last_one_first():
    explanation = explain(Broken(), torch.randn(32, 64))
    assert len(explanation.graphs) == 2
    moments = trace_timeline(explanation.graphs)
    assert max(m.bytes for m in moments) == explanation.saved_bytes
    assert moments[-1].bytes == 0
    assert next(m.operator.split(".")[0] for m in moments if m.backward) == "second"


class Broken(nn.Module):
    """Two graphs around a graph break."""

    def __init__(self):
        super().__init__()
        self.first, self.second = MLP((64, 128, 64)), MLP((64, 128, 64))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_the_stock_timeline_is_that_of_pytorchs_partitioner(llama_explanation):
    points = trace_timeline(llama_explanation.graphs, stock=True)
    ours = trace_timeline(llama_explanation.graphs)
    assert [p.backward for p in points] == sorted(p.backward for p in points)
    assert max(p.bytes for p in points) == llama_explanation.stock_bytes
    assert points[-1].bytes == 0
    assert all(p.change > 0 for p in points[1:] if not p.backward)
    assert max(p.position for p in points) <= ours[-1].position * 1.01


def test_timeline_points_name_the_operator(llama_explanation):
    operators = [p.operator for p in trace_timeline(llama_explanation.graphs)[1:]]
    assert any(x.startswith("model.layers.2.mlp.") for x in operators)
    assert any(x.endswith(", quantize") for x in operators)


# --- FP8 operands -------------------------------------------------------------------------------


def test_saved_fp8_operands_are_low_bit():
    explanation = explain(MLP((64, 128, 64)), torch.randn(32, 64))
    (compiled,) = explanation.graphs
    (operand,) = [s for s in compiled.plan.saved if s.dtype == "float8_e4m3fn"]
    (shown,) = [s for s in describe_operands(compiled) if s.name == operand.name]
    assert shown.saved_as == "e4m3"
    assert shown.bytes_exact == 4 * shown.bytes == 4 * 32 * 64  # quantized from float32
    assert "<td>e4m3</td>" in render(explanation)
    assert re.search(r"up +1 +e4m3 +0.00781 +0.00195", str(explanation))
    assert "2 of 2 saved tensors in low-bit formats" in compiled.plan.summary()


# --- units --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (768, "768 B"), (8192, "8 KiB"), (-1572864, "-1.5 MiB"), (5 << 30, "5 GiB")],
)
def test_sizes_have_units(count, text):
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (8.47e-8, "0.0847 µs"), (1.5e-5, "15 µs"), (-0.0123, "-12.3 ms"), (2.5, "2.5 s")],
)
def test_times_have_units(seconds, text):
    assert format_time(seconds) == text


@given(st.integers(1, 10**13))
def test_a_budget_that_is_pasted_allows_the_plan(count):
    assert count <= parse_bytes(format_budget(count)) <= count * 1.001 + 1


# --- diffs --------------------------------------------------------------------------------------


def test_diffs_show_the_changes_of_a_pass(llama_explanation):
    passes = llama_explanation.graphs[0].passes
    record = next(record for record in passes if record.name == "quantize_linears")
    (gate,) = [d for d in diff_modules(record) if d.module.endswith("gate_proj")]
    assert gate.count == 4
    removed, added = (
        [line for line in gate.text.splitlines() if line.startswith(sign)] for sign in "-+"
    )
    assert sum("aten.mm.default" in line for line in removed) == 3
    assert sum("fp8pass.scaled_mm.default" in line for line in added) == 3


def test_code_by_module_contains_all_code(llama_explanation):
    for record in llama_explanation.graphs[0].passes:
        lines = [x.strip() for x in record.after.splitlines()]
        wanted = [x for x in lines if x and not x.startswith("# module")]
        got = [x for module in split_code(record.after).values() for x in module]
        assert Counter(got) == Counter(wanted)


def test_the_return_statement_belongs_to_no_module(llama_explanation):
    after = split_code(llama_explanation.graphs[0].passes[0].after)
    assert [m for m, lines in after.items() if any(x.startswith("return") for x in lines)] == [""]


def test_a_pass_that_changed_nothing_has_no_diff(llama_explanation):
    record = llama_explanation.graphs[0].passes[0]
    assert diff_modules(dataclasses.replace(record, after=record.before)) == []


# --- the page -----------------------------------------------------------------------------------


def assert_numbers_are_the_plans(explanation, page: str) -> None:
    data = numbers_on_page(page)
    assert data == json.loads(json.dumps(page_data(explanation, None)))
    assert len(data["pictures"]) == len(explanation.graphs)
    drawn = count_operations(explanation.graphs)
    assert sum(drawn.values()) == sum(g.plan.flops for g in explanation.graphs)
    assert drawn.get(FP8_LINEAR, 0) == sum(g.plan.fp8_flops for g in explanation.graphs)
    assert max(m["bytes"] for m in data["timeline"]) == explanation.saved_bytes
    assert max(p["bytes"] for p in data["stock"]) == explanation.stock_bytes
    assert f'id="kept">{format_size(explanation.saved_bytes)}</b>' in page
    assert f"<b>{format_size(explanation.stock_bytes)}</b>" in page
    assert f"<code>error_tolerance={explanation.config.error_tolerance}</code>" in page
    assert not re.search(r"</h2>\s*</section", page)
    for graph in explanation.graphs:
        for linear in graph.plan.linears:
            assert linear.reason.replace("'", "&#39;").replace(">", "&gt;") in page


@pytest.mark.long
def test_llama(llama_explanation):
    assert_numbers_are_the_plans(llama_explanation, render(llama_explanation))


@pytest.mark.long
def test_demo():
    model = new_model(SIZES["tiny"], 0, torch.device("cpu"))
    explanation = explain(model, tokens(4, 64), tokens(4, 64))
    assert_numbers_are_the_plans(explanation, render(explanation))


@pytest.mark.long
def test_gpt2():
    explanation = explain(gpt2(), tokens(), labels=tokens())
    assert_numbers_are_the_plans(explanation, render(explanation))


@pytest.mark.long
def test_vit():
    explanation = explain(vit(), torch.randn(2, 3, 32, 32))
    assert_numbers_are_the_plans(explanation, render(explanation))


@pytest.mark.long
def test_graph_breaks_and_dynamic_shapes():
    model, x = Broken(), torch.randn(32, 64)
    torch._dynamo.mark_dynamic(x, 0)
    explanation = explain(model, x)
    page = render(explanation)
    assert_numbers_are_the_plans(explanation, page)
    assert re.findall(r'<option value="(\d)"', page) == ["0", "1"]
    assert re.search(r"\bs\d+", json.dumps(numbers_on_page(page)["pictures"]))


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("aten.add.Tensor", "add"),
        ("fp8pass.scaled_mm", "scaled_mm"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("placeholder", "placeholder"),
    ],
)
def test_short_names(operator, name):
    assert shorten_operator(operator) == name


def test_two_operators():
    explanation = explain(nn.Linear(64, 64, bias=False), torch.randn(16, 64))
    assert_numbers_are_the_plans(explanation, render(explanation))


def test_inference_only():
    model = nn.Linear(64, 64).requires_grad_(False)
    explanation = explain(model, torch.randn(16, 64))
    assert explanation.graphs[0].plan.inference
    assert "inference" in render(explanation) or len(explanation.graphs) == 1


def test_names_cannot_become_code():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({'<script>alert("x")</script>': nn.Linear(64, 64)})

        def forward(self, x):
            for part in self.parts.values():
                x = torch.relu(part(x))
            return x

    page = render(explain(Model(), torch.randn(16, 64)))
    assert "alert" in page
    assert "<script>alert" not in page
    assert page.count("<script") == page.count("</script>")


@pytest.mark.long
def test_frontier_and_diagnosis_are_shown():
    model, x = MLP((64, 128, 32)).bfloat16(), torch.randn(64, 64, dtype=torch.bfloat16)
    explanation = explain(model, x, frontier=True, rules=True)
    diagnosis = fp8pass.diagnose(model, lambda m, b: m(b).float().square().mean(), x)
    page = render(explanation, diagnosis)
    point = explanation.graphs[0].plan.point
    assert f'<code>"{format_budget(point.bytes)}"</code>' in page
    assert "this plan" in page
    assert "Error rules" in page
    assert len(numbers_on_page(page)["errors"]) == len(diagnosis.layers) > 0
    assert f"{diagnosis.layers[0].relative:.4f}" in page


def test_sections_without_content_are_left_out(llama_explanation):
    page = render(llama_explanation)
    for absent in ('id="budget"', 'id="errors"', 'id="comparison"', "Not computed"):
        assert absent not in page


def test_long_instructions_are_behind_help_buttons(llama_explanation):
    page = render(llama_explanation)
    without = re.sub(r'<details class="help">.*?</details>', "", page, flags=re.DOTALL)
    assert "Drag to" in page
    assert "Drag to" not in without
    hints = re.findall(r'<p class="hint">(.*?)</p>', without, re.DOTALL)
    assert all(len(hint.split()) < 30 for hint in hints)


def test_the_page_loads_no_resources(llama_explanation):
    page = render(llama_explanation)
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)


def test_save(llama_explanation, tmp_path):
    path = tmp_path / "report.html"
    llama_explanation.save(path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert path.stat().st_size < 5e6


def test_bytes_of_eager_pytorch_are_measured(llama_explanation):
    linear = nn.Linear(64, 32, bias=False)
    x = torch.randn(16, 64)
    explanation = explain(nn.Sequential(linear, nn.Sigmoid()), x)
    assert explanation.eager_bytes == 4 * (16 * 64 + 16 * 32)
    assert (
        llama_explanation.eager_bytes
        > llama_explanation.stock_bytes
        > llama_explanation.saved_bytes
    )


def test_share_of_fp8(llama_explanation):
    plan = llama_explanation.graphs[0].plan
    products = 3 * sum(
        2 * int(y.rows) * y.in_features * y.out_features for y in plan.linears if y.fp8
    )
    assert plan.fp8_flops == products
    head = plan.linears[-1]
    attention = 4 * (4 + 10) * 2 * 4 * 16 * 16 * 16  # layers, products, batch, heads, L, L, dim
    rest = 3 * 2 * int(head.rows) * head.in_features * head.out_features + attention
    rope = plan.flops - products - rest
    assert 0 <= rope < 0.01 * plan.flops
