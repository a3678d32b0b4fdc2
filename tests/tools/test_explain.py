"""`explain` reports the plan, and does not change the model."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from contextlib import nullcontext

import pytest
import torch
from helpers import MLP, llama, tokens
from torch import nn

import fp8pass
from fp8pass import Config, compat, explain
from fp8pass.option_checks import bytes_text, parse_bytes
from fp8pass.passes import LOWERING_PASSES
from fp8pass.tools.output import render_text
from fp8pass.tools.saved_bytes import saved_bytes
from fp8pass.tools.tables import make_linears_table, make_saved_table


class Broken(nn.Module):
    """Two graphs around a graph break, with batch normalization and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = MLP((64, 128, 64), 0.1), nn.BatchNorm1d(64)
        self.second = MLP((64, 128, 64))

    def forward(self, x):
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.fixture(scope="module")
def llama_explanation():
    return explain(llama(num_hidden_layers=2), tokens())


@pytest.mark.long
def test_tables(llama_explanation):
    text = str(llama_explanation)
    assert "graph 0: linear layers" in text
    assert "graph 0: saved for the backward" in text
    assert "model.layers.*.self_attn.q_proj" in text
    assert "forward dgrad wgrad" in text
    assert "accumulation: fast" in text
    assert "output head" in text
    assert "14 of 15 linear layers in FP8" in text
    assert "e4m3 1×" in text


@pytest.mark.long
@pytest.mark.parametrize("columns", [80, 120])
def test_tables_are_as_wide_as_the_terminal(llama_explanation, monkeypatch, columns):
    """No cell is cut: reasons are below their rows, and the largest tensors come first."""
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = llama_explanation.graphs[0].plan
    tables = [make_linears_table("graph", plan), make_saved_table("graph", plan)]
    lines = render_text(tables).splitlines()
    assert max(map(len, lines)) <= columns
    words = set(" ".join(lines).split())
    shown = [*plan.linears, *(s for s in plan.saved if not s.is_scalar)]
    for reason in {row.reason for row in shown}:
        assert columns == 80 or set(reason.split()) <= words
    assert render_text(["a sentence " * 20]) == "a sentence " * 20 + "\n"
    sizes = [float(line.split()[-1].lstrip("<")) for line in lines if " e4m3 " in line]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 2


@pytest.mark.parametrize(
    ("longest", "accumulation"), [(0, "precise"), (64, "fast in dgrad"), (4096, "fast")]
)
def test_accumulation(longest, accumulation, tmp_path):
    """The table, the JSON and the report have it."""
    layer, x = nn.Linear(128, 64, bias=False), torch.randn(80, 128, requires_grad=True)
    explanation = explain(layer, x, config=Config(longest_fast=longest))
    (linear,) = explanation.graphs[0].plan.linears
    assert linear.accumulation == accumulation
    assert f"accumulation: {accumulation}" in str(explanation)
    assert json.loads(explanation.to_json())["graphs"][0]["linears"][0]["fast"] == list(linear.fast)
    explanation.save(tmp_path / "report.html")
    assert f"<td>{accumulation}</td>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_model_without_values():
    with torch.device("meta"):
        model = MLP((64, 128, 32))
    with pytest.raises(
        ValueError, match=r"4 parameters, such as up.weight, .*to_empty\(device='cpu'\)"
    ):
        explain(model, torch.randn(16, 64))


def test_totals(llama_explanation):
    (graph,) = llama_explanation.graphs
    assert llama_explanation.saved_bytes == graph.plan.saved_bytes > 0
    assert llama_explanation.stock_bytes > llama_explanation.saved_bytes
    assert graph.plan.saved_bytes < graph.plan.exact_bytes


def test_an_infinite_tolerance_is_strict_json():
    explanation = explain(
        MLP((64, 128, 32)), torch.randn(16, 64), config=Config(error_tolerance=math.inf)
    )
    data = json.loads(explanation.to_json(), parse_constant=pytest.fail)
    assert data["config"]["error_tolerance"] == "inf"


def test_json_round_trip(llama_explanation, tmp_path):
    text = llama_explanation.to_json(tmp_path / "explain.json")
    data = json.loads(text)
    assert (
        json.loads((tmp_path / "explain.json").read_text())
        == data
        == llama_explanation.to_dict() | {"graphs": data["graphs"]}
    )
    assert data["saved_bytes"] == llama_explanation.saved_bytes
    assert data["config"]["group_size"] == 128
    (graph,) = data["graphs"]
    assert len(graph["linears"]) == 15
    assert all(s["value"].startswith(f"{s['module']}:") for s in graph["saved"])
    assert sum(s["bytes"] for s in graph["saved"]) == data["saved_bytes"]
    assert (
        sum(t["bytes"] for s in graph["saved"] if s["bytes"] for t in s["tensors"])
        == (data["saved_bytes"])
    )
    joint = {p.name for p in llama_explanation.graphs[0].passes if p.graph == "joint"}
    halves = {f"{half}.{p.__name__}" for half in ("forward", "backward") for p in LOWERING_PASSES}
    assert set(graph["pass_seconds"]) == joint | halves


@pytest.mark.long
def test_graphs_before_and_after_each_pass(llama_explanation):
    joint = [p for p in llama_explanation.graphs[0].passes if p.graph == "joint"]
    assert "fp8pass" not in joint[0].before
    assert "scaled_mm" in next(p for p in joint if p.name == "quantize_linears").after
    assert "dequantize" in joint[-1].after
    backward = [p for p in llama_explanation.graphs[0].passes if p.graph == "backward"]
    assert "dequantize" in backward[0].before
    assert "ops.fp8pass." not in backward[-1].after


def test_error_and_reason_of_every_saved_tensor(llama_explanation):
    for s in llama_explanation.graphs[0].plan.saved:
        assert s.reason
        assert (s.expected_error > 0) == s.saved_as.startswith("e4m3")


# --- memory against time ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced():
    config = Config(memory_budget=0.6)
    return explain(llama(), config=config, frontier=True, input_ids=tokens())


@pytest.mark.long
def test_frontier_table_marks_the_plan(traced):
    text = str(traced)
    assert "graph 0: memory against time, estimated for one NVIDIA H200" in text
    assert "grad error" in text
    (row,) = [line for line in text.splitlines() if "this plan ▶" in line]
    (graph,) = traced.graphs
    assert graph.plan.point.bytes == graph.plan.saved_bytes == traced.saved_bytes
    point = graph.plan.point
    assert point.seconds > 0 == graph.plan.frontier[-1].seconds
    for p in graph.plan.frontier:  # no plan is better in both
        assert (p.bytes < point.bytes) == (p.seconds > point.seconds)
    assert bytes_text(graph.plan.saved_bytes, up=True) in row
    share = graph.plan.saved_bytes / graph.plan.frontier[-1].bytes
    assert f"{share:.0%}" in row
    assert share <= 0.6
    assert "100%" in text


@pytest.mark.long
def test_frontier_in_json(traced):
    (graph,) = json.loads(traced.to_json())["graphs"]
    assert len(graph["frontier"]) > 2
    assert (
        {"bytes", "peak_bytes", "seconds", "error", "host_bytes"}
        == set(graph["frontier"][0])
        == set(graph["point"])
    )


def test_the_frontier_is_optional(llama_explanation):
    (graph,) = llama_explanation.graphs
    assert (graph.plan.frontier, graph.plan.point) == ([], None)
    assert "memory against time" not in str(llama_explanation)
    with pytest.raises(ValueError, match="frontier=True"):
        llama_explanation.plot_frontier("never.png")


def test_plot_frontier(traced, tmp_path):
    pytest.importorskip("matplotlib")
    traced.plot_frontier(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="'xyz' is not supported"):
        traced.plot_frontier(tmp_path / "frontier.xyz")


def test_plot_frontier_without_matplotlib(traced, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        traced.plot_frontier(tmp_path / "frontier.png")
    assert not list(tmp_path.iterdir())


# --- graphs and configurations ------------------------------------------------------------------


@pytest.mark.long
def test_graph_breaks_give_several_graphs():
    explanation = explain(Broken(), torch.randn(32, 64))
    assert len(explanation.graphs) == 2
    assert "\n1 graph break: the model runs as 2 graphs, each with its own plan." in str(
        explanation
    )
    modules = [[y.module for y in g.plan.linears] for g in explanation.graphs]
    assert modules == [["first.up", "first.down"], ["second.up", "second.down"]]
    assert "graph 1" in str(explanation)


class Interrupted(nn.Module):
    """A residual block followed by a graph break."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), MLP((64, 128, 64))

    def forward(self, x):
        x = x + self.mlp(self.norm(x))
        torch._dynamo.graph_break()
        return x


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 5])
def test_graphs_count_once_for_each_run(layers):
    """The bytes equal the bytes that autograd saves."""
    model = nn.Sequential(*(Interrupted() for _ in range(layers)))
    x = torch.randn(4, 32, 64)
    explanation = explain(model, x)
    assert f"{2 * layers} of {2 * layers} linear layers in FP8" in str(explanation)
    assert sum(len(g.runs) for g in explanation.graphs) == layers > len(explanation.graphs) - 1
    assert explanation.to_dict()["graphs"][-1]["runs"] == layers - 1
    if layers > 2:
        assert f"(runs {layers - 1}×)" in str(explanation)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fp8pass.backend(Config(compiler="eager")))
    assert explanation.saved_bytes == saved_bytes(compiled, x)


@pytest.mark.long
def test_the_model_does_not_change():
    model = Broken().train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    explain(model, torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_existing_gradients_do_not_change():
    model = MLP()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    explain(model, torch.randn(32, 64))
    assert all((p.grad == 1).all() for p in model.parameters())


def test_uses_the_options_of_a_compiled_model():
    model = torch.compile(MLP(), backend="fp8pass", options={"recipe": "linear", "skip": ("up",)})
    explanation = explain(model, torch.randn(32, 64))
    assert explanation.config == Config.recipe("linear", skip=("up",))
    assert [bool(y.fp8) for y in explanation.graphs[0].plan.linears] == [False, True]


@pytest.mark.long
def test_uses_the_config_of_a_typed_backend():
    config = Config(group_size=16)
    model = torch.compile(MLP(), backend=fp8pass.backend(config))
    assert explain(model, torch.randn(32, 64)).config == config


def test_the_config_argument_overrides_the_models_config():
    model = torch.compile(MLP(), backend="fp8pass", options={"recipe": "linear"})
    config = Config.recipe("exact")
    assert explain(model, torch.randn(32, 64), config=config).config == config


@pytest.mark.long
def test_explains_a_compiled_model_again_and_lets_it_run():
    model = MLP()
    program = torch.compile(model, backend="fp8pass", options={"compiler": "eager"})
    x = torch.randn(32, 64)
    want = program(x)
    for _ in range(2):
        assert len(explain(program, x).graphs) == 1
    assert torch.equal(program(x), want)


@pytest.mark.long
def test_works_under_no_grad_and_keyword_arguments():
    with torch.no_grad():
        explanation = explain(llama(), input_ids=tokens(), labels=tokens())
    (graph,) = explanation.graphs
    assert graph.plan.saved


def evaluated():
    with torch.inference_mode():
        return explain(MLP(), torch.randn(32, 64))


@pytest.mark.parametrize(
    ("explained", "message"),
    [
        (evaluated, True),
        (lambda: explain(MLP().requires_grad_(False), torch.randn(32, 64)), True),
        (lambda: explain(MLP(), torch.randn(32, 64)), False),
    ],
    ids=["inference mode", "frozen", "trained"],
)
def test_without_a_backward_it_reports_why_nothing_is_saved(explained, message):
    found = explained()
    assert (found.saved_bytes == 0) == message
    assert ("no graph has a backward" in str(found)) == message


def test_skipped_and_unsupported_layers_have_reasons():
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 64), nn.Linear(64, 64))
    text = str(explain(model, torch.randn(32, 64), config=Config(skip=("3",))))
    assert "multiples of 16" in text
    assert "skip" in text


def test_a_skip_pattern_that_matches_nothing_warns_with_the_nearest():
    config = Config(skip=("upp",), compiler="eager")
    model = torch.compile(MLP(), backend=fp8pass.backend(config))
    with pytest.warns(UserWarning, match="upp.*up"):
        model(torch.randn(32, 64))


@pytest.mark.long
def test_rules_of_regions_list_both_cases():
    explanation = explain(llama(), rules=True, input_ids=tokens())
    (report,) = explanation.graphs
    norms = [r for r in report.plan.rules if "rsqrt" in r.operators]
    assert len(norms) == 3
    for rule in norms:
        (entering,) = rule.inputs
        assert 2 < rule.case_1 < 6
        assert f"Norm(%{entering.split()[0]}, 2)" in rule.bound
    gated = [r for r in report.plan.rules if len(r.inputs) == 2]
    assert len(gated) == 1
    # Until PyTorch 2.12 SiLU's backward has a division, since 2.13 a sigmoid with one value less.
    assert all(0 < r.case_1 < 4 and 0 < r.case_2 < 5 for r in gated)
    assert "error rules" in str(explanation)
    assert json.loads(explanation.to_json())["graphs"][0]["rules"][0]["case_1"] > 0


def test_operators_without_a_rule_have_a_reason():
    class Logarithm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(self.layer(x).abs().log())

    (report,) = explain(Logarithm(), torch.randn(32, 64), rules=True).graphs
    assert any("may be zero" in r.reason and not r.bound for r in report.plan.rules)


# --- how a model was compiled -------------------------------------------------------------------


AGOQ = Config.recipe("agoq", compiler="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=fp8pass.backend(AGOQ))
    return model


def with_options(model: nn.Module) -> nn.Module:
    model.compile(backend="fp8pass", options={"recipe": "agoq", "compiler": "eager"})
    return model


WAYS = {
    "wrapped": lambda model: torch.compile(model, backend=fp8pass.backend(AGOQ)),
    "in place": in_place,
    "in place with options": with_options,
    "a part in place": lambda model: in_place(model.first) and model,
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_explained_as_it_was_compiled(way):
    """The eager bytes do not depend on the way of compilation."""
    want = explain(Broken(), torch.randn(16, 64), config=AGOQ)
    model = WAYS[way](Broken())
    got = explain(model, torch.randn(16, 64))
    assert got.config == AGOQ
    if got.parts:  # the rest of the model is eager
        assert [got.modules_of(g) for g in got.graphs] == [["first"]]
        assert got.outside_bytes > 0
    else:
        assert got.saved_bytes == want.saved_bytes
    assert got.eager_bytes == want.eager_bytes > got.saved_bytes


@pytest.mark.long
def test_parts_that_were_compiled_in_different_ways():
    model = Broken()
    in_place(model.first)
    model.second.compile(backend="fp8pass")
    with pytest.raises(
        ValueError, match=r"different configurations. Pass one configuration, config="
    ):
        explain(model, torch.randn(16, 64))
    assert explain(model, torch.randn(16, 64), config=AGOQ).graphs


@pytest.mark.long
def test_modules_that_pytorch_does_not_compile_in_place_are_reported():
    """Before version 2.14 PyTorch ignores `compile()` on modules of torch.nn."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    graphs = []
    model.compile(backend=lambda gm, inputs: graphs.append(gm) or gm.forward)
    model(torch.randn(16, 64))
    in_place(model)
    message = r"fp8pass: Sequential\.compile\(\) has no effect.*torch\.compile"
    expected = nullcontext() if graphs else pytest.warns(UserWarning, match=message)
    with expected:
        got = explain(model, torch.randn(16, 64))
    assert compat.compiled_in_vain(model) == (not graphs)
    wrapped = torch.compile(model, backend=fp8pass.backend(AGOQ))
    assert got.saved_bytes == explain(wrapped, torch.randn(16, 64)).saved_bytes


@pytest.mark.long
def test_attention_has_a_row_for_each_projection():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = nn.MultiheadAttention(64, 4, batch_first=True)
            self.cross = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x, y):
            x = self.mha(x, x, x, need_weights=False)[0]
            return self.cross(x, y, y, need_weights=False)[0]

    explanation = explain(Block(), torch.randn(2, 16, 64), torch.randn(2, 16, 64))
    rows = re.findall(r"^  (mha|cross) \((\w+)\) .* → (\d+)", str(explanation), re.MULTILINE)
    assert rows == [
        ("mha", "in_proj", "192"),
        ("mha", "out_proj", "64"),
        ("cross", "in_proj", "64"),
        ("cross", "in_proj", "128"),
        ("cross", "out_proj", "64"),
    ]
    assert "graph break" not in str(explanation)


@pytest.mark.long
def test_convolutions_are_counted():
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mlp = nn.Conv2d(3, 64, 4, stride=4), MLP((64, 128, 64))

        def forward(self, x):
            return self.mlp(self.conv(x).flatten(2).mT)

    model = Patches()
    share = sum(p.numel() for p in model.conv.parameters()) / sum(
        p.numel() for p in model.parameters()
    )
    explanation = explain(model, torch.randn(2, 3, 16, 16))
    line = f"1 convolution stays in high precision, with {share:.0%} of the parameters."
    assert line in str(explanation)


def test_a_model_without_linear_layers():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU())
    text = str(explain(model, torch.randn(2, 4, 16)))
    assert "There is nothing to run in FP8: the compiled graphs have no linear layers." in text
    assert "linear layers  " not in text
    assert "0 of 0" not in text


def test_repr_is_one_short_line(llama_explanation):
    text = repr(llama_explanation)
    assert text.startswith("<fp8pass.Explanation: LlamaForCausalLM, 1 graph, 14 of 15 linear")
    assert len(text) < 200
    assert "model.layers.*" in llama_explanation._repr_html_()


@pytest.mark.long
def test_budgets_of_the_frontier_can_be_pasted():
    model, x = MLP((64, 128, 64)), torch.randn(32, 64, requires_grad=True)
    explanation = explain(model, x, frontier=True)
    for point in explanation.graphs[0].plan.frontier:
        budget = bytes_text(max(point.bytes, 1), up=True)
        (graph,) = explain(model, x, config=Config(memory_budget=budget)).graphs
        assert graph.plan.saved_bytes <= parse_bytes(budget)
        assert f" {budget} " in str(explanation)


def test_derivatives_within_the_forward_are_refused():
    """PyTorch has no hooks for tensors that torch.func saves."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(64, 16)

        def forward(self, x):
            return torch.func.grad(lambda z: self.energy(z).square().sum())(x)

    with pytest.raises(
        RuntimeError,
        match=r"cannot count the saved tensors of a model whose forward calls torch\.func",
    ):
        explain(Field(), torch.randn(32, 64))
