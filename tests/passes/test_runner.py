"""Environment variables: dumps of graphs, and disabled passes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from helpers import COAT_EAGER, MLP, capture_joint, compiled, relative, step

from fp8pass.config import Config
from fp8pass.passes import JOINT_PASSES, LOWERING_PASSES

NAMES = [p.__name__ for p in JOINT_PASSES]
HALF_NAMES = [p.__name__ for p in LOWERING_PASSES]
GRAPHS = {"joint": NAMES, "forward": HALF_NAMES, "backward": HALF_NAMES}


def run(config=COAT_EAGER):
    model, x = MLP(), torch.randn(32, 64, requires_grad=True)
    program, spy = compiled(model, config, halves=True)
    return step(program, model, (x,)), step(model, model, (x,)), spy


def test_dump(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8PASS_DUMP", str(tmp_path / "graphs"))
    run()
    files = sorted(p.name.split("_", 1)[1] for p in (tmp_path / "graphs").iterdir())
    assert files == sorted(
        f"{of}_{i:02}_{name}_{when}.py"
        for of, names in GRAPHS.items()
        for i, name in enumerate(names)
        for when in ("before", "after")
    )

    def text(name, when):
        (path,) = (tmp_path / "graphs").glob(f"*_joint_*_{name}_{when}.py")
        return path.read_text()

    assert "fp8pass.scaled_mm" not in text("quantize_linears", "before")
    assert "fp8pass.scaled_mm" in text("quantize_linears", "after")
    assert "dequantize" not in text("materialize_plan", "before")
    assert "dequantize" in text("materialize_plan", "after")
    assert text("plan_saved_values", "before") == text("quantize_linears", "after")


@pytest.mark.long
def test_torch_trace_gets_both_graphs(tmp_path):
    """In a separate process, since PyTorch reads the variable once."""
    train = (
        "import torch; m = torch.compile(torch.nn.Linear(64, 64), backend='fp8pass', "
        "options={'compiler': 'eager'}); m(torch.randn(16, 64)).sum().backward()"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", train], env=environment, check=True)
    (trace,) = tmp_path.iterdir()
    text = trace.read_text()
    for name in ("quantize_linears", "plan_saved_values", "materialize_plan"):
        for when in ("before", "after"):
            assert f'"name": "fp8pass_0_joint_{name}_{when}"' in text
    assert "torch.ops.fp8pass.scaled_mm.default" in text


def test_disabled_linears(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "quantize_linears")
    got, want, spy = run()
    assert spy.plan.linears == []
    assert relative(got.outputs[0], want.outputs[0]) < 1e-6
    names = [name for name in NAMES if name != "quantize_linears"]
    assert [r.name for r in spy.passes[0] if r.graph == "joint"] == names


def test_disabled_plan_keeps_everything(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "plan_saved_values,quantize_linears")
    got, want, spy = run()
    assert {s.saved_as for s in spy.plan.saved} == {"exact"}
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 1e-5


def test_unknown_pass_names_the_nearest(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "quantise_linears")
    with pytest.raises(Exception, match="Did you mean 'quantize_linears'"):
        run()


def test_prefixes_are_not_names(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "quantize")
    with pytest.raises(Exception, match="Unknown pass"):
        run()


def test_required_passes_cannot_be_disabled(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "materialize_plan")
    with pytest.raises(Exception, match="cannot be compiled without"):
        run()


def test_the_code_names_modules_and_runs():
    program, spy = compiled(MLP())
    program(torch.randn(32, 64))
    last = next(r for r in spy.passes[0] if r.name == "materialize_plan")
    assert "    # module up\n" in last.after
    assert "    # module down\n" in last.after
    assert "= None" not in last.after
    compile(last.after, "graph", "exec")
    assert last.nodes_after > last.nodes_before > 0


def test_records_and_the_log(caplog, monkeypatch, tmp_path):
    """Without `FP8PASS_DUMP` no files are written."""
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="fp8pass"):
        _, _, spy = run()
    assert not list(tmp_path.iterdir())
    messages = [r.getMessage() for r in caplog.records if r.name == "fp8pass"]
    assert any("quantize_linears took" in m for m in messages)
    (records,) = spy.passes
    for graph, names in GRAPHS.items():
        assert [r.name for r in records if r.graph == graph] == names
    (lowering,) = (r for r in records if (r.graph, r.name) == ("backward", "lower_dialect"))
    assert "fp8pass.scaled_mm" in lowering.before
    assert "fp8pass.scaled_mm" not in lowering.after
    diffs = {r.name: r.diff for r in records if r.graph == "joint"}
    assert "+" in diffs["quantize_linears"]
    assert diffs["plan_saved_values"] == ""  # planning changes no node
    assert all(r.seconds > 0 for r in records)


def test_passes_are_deterministic():
    codes = []
    for _ in range(2):
        torch._dynamo.reset()
        joint = capture_joint(MLP(dropout=0.1), torch.randn(32, 64, requires_grad=True) * 1)
        for pass_ in JOINT_PASSES:
            pass_(joint.gm, joint.ctx)
        codes.append((joint.code, [n.name for n in joint.ctx.saved]))
    assert codes[0] == codes[1]


def test_passes_that_do_not_apply_leave_the_graph_identical():
    """An elementwise operator on a leaf runs nothing in FP8 and saves nothing."""
    joint = capture_joint(lambda x: x * 2 + 1, torch.randn(32, 64, requires_grad=True))
    before = joint.code
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
    assert joint.code == before
    assert joint.ctx.saved == []


def test_inference_plans_nothing_to_keep():
    model = MLP()
    program, spy = compiled(model, Config(compiler="eager"))
    with torch.no_grad():
        y = program(torch.randn(32, 64))
    assert spy.plan.inference
    assert [linear.fp8 for linear in spy.plan.linears] == [("forward",)] * 2
    assert spy.plan.saved == []
    assert y.shape == (32, 32)


def test_inference_gives_the_values_of_training():
    model, x = MLP(), torch.randn(32, 64)
    program, _ = compiled(model)
    trained = program(x).detach()
    with torch.no_grad():
        assert torch.equal(program(x), trained)
