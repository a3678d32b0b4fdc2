"""Passes of the user run at their position, and change cache keys."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from helpers import COAT_EAGER, compiled
from torch import nn

import fp8pass
from fp8pass import graph
from fp8pass.compilation import Compilation
from fp8pass.config import Config
from fp8pass.graph.nodes import aten
from fp8pass.option_checks import ConfigError
from fp8pass.passes import INFERENCE_PASSES, JOINT_PASSES, LOWERING_PASSES
from fp8pass.passes.added import insert_passes


def sigmoids(gm, ctx) -> None:
    """Replace tanh by sigmoid."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
        with gm.graph.inserting_before(node):
            new = graph.emit(gm.graph, aten.sigmoid.default, *node.args, like=node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)


def nothing(gm, ctx) -> None:
    """Change nothing."""


def model_and_input():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)


def names(passes, added) -> list[str]:
    return [p.__name__ for p in insert_passes(passes, added)]


def test_positions():
    added = (("after", "quantize_linears", sigmoids), ("before", "quantize_linears", nothing))
    for passes in (JOINT_PASSES, INFERENCE_PASSES):
        found = names(passes, added)
        at = found.index("quantize_linears")
        assert found[at - 1 : at + 2] == ["nothing", "quantize_linears", "sigmoids"]
        assert len(found) == len(passes) + 2
    assert insert_passes(LOWERING_PASSES, added) == list(LOWERING_PASSES)


def test_several_at_one_position_run_in_their_order():
    added = tuple(("after", "lower_dialect", f) for f in (sigmoids, nothing, sigmoids))
    found = names(LOWERING_PASSES, added)
    at = found.index("lower_dialect")
    assert found[at + 1 : at + 4] == ["sigmoids", "nothing", "sigmoids"]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("trains", [True, False])
def test_it_changes_the_graph_and_is_recorded(trains):
    model, x = model_and_input()
    config = replace(COAT_EAGER, passes=(("after", "quantize_linears", sigmoids),))
    want = compiled(nn.Sequential(model[0], nn.Sigmoid()))[0](x)
    program, spy = compiled(model, config)
    with torch.set_grad_enabled(trains):
        torch.testing.assert_close(program(x), want)
    assert "sigmoids" in [record.name for record in spy.passes[0]]


def test_it_can_be_disabled(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "sigmoids")
    model, x = model_and_input()
    config = replace(COAT_EAGER, passes=(("after", "quantize_linears", sigmoids),))
    program, spy = compiled(model, config)
    program(x)
    assert "sigmoids" not in [record.name for record in spy.passes[0]]


def fails(gm, ctx) -> None:
    gm.graph.missing()


def adds_a_node_without_a_tensor(gm, ctx) -> None:
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.aten.sigmoid.default, (next(iter(gm.graph.nodes)),))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "The pass 'fails' of the option passes raised AttributeError"),
        (adds_a_node_without_a_tensor, r"created the node .* Create nodes with fp8pass.graph.emit"),
    ],
)
def test_errors_name_the_pass(function, message):
    model, x = model_and_input()
    config = replace(COAT_EAGER, passes=(("before", "quantize_linears", function),))
    with pytest.raises(Exception, match=message):
        compiled(model, config)[0](x)


def test_an_unknown_position_names_the_nearest():
    config = Config(passes=(("after", "quantize_linear", nothing),))
    with pytest.raises(ConfigError, match="Did you mean 'quantize_linears'"):
        fp8pass.backend(config)
    options = {"compiler": "eager", "passes": config.passes}
    program = torch.compile(nn.Linear(16, 16), backend="fp8pass", options=options)
    with pytest.raises(Exception, match="Did you mean 'quantize_linears'"):
        program(torch.randn(16, 16))


@pytest.mark.parametrize(
    "passes",
    [
        ((("beside", "quantize_linears", nothing),)),
        ((("after", "quantize_linears", "nothing"),)),
        (nothing,),
        nothing,
    ],
)
def test_invalid_passes_are_refused(passes):
    with pytest.raises(ConfigError, match=r"a tuple of \(position, name of a pass, function\)"):
        Config(passes=passes)


def test_equal_backends_share_compiled_code():
    config = Config(passes=(("after", "quantize_linears", nothing),))
    monitor = fp8pass.Monitor()
    for make in (lambda: fp8pass.backend(config), lambda: fp8pass.backend(config, monitor=monitor)):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert fp8pass.backend(config, monitor=monitor) != fp8pass.backend(config)
    assert fp8pass.backend(config) != fp8pass.backend(Config())


# --- caches -------------------------------------------------------------------------------------


def key(*functions) -> str:
    added = tuple(("after", "quantize_linears", f) for f in functions)
    return Compilation(Config(passes=added)).cache_key()


def test_keys_of_caches_contain_added_passes():
    assert key(nothing) == key(nothing)
    assert len({key(), key(nothing), key(sigmoids), key(nothing, nothing)}) == 4


def loaded(path):
    spec = importlib.util.spec_from_file_location("of_a_user", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.my_pass


def test_an_edit_of_the_file_changes_the_key(tmp_path):
    path = tmp_path / "of_a_user.py"
    path.write_text("def my_pass(gm, ctx):\n    pass\n")
    before, same = key(loaded(path)), key(loaded(path))
    path.write_text("FACTOR = 2\n\n\ndef my_pass(gm, ctx):\n    pass\n")
    assert before == same != key(loaded(path))


def test_a_closure_is_never_found_in_a_cache():
    def made(factor):
        def my_pass(gm, ctx) -> None:
            gm.meta["factor"] = factor

        return my_pass

    assert key(made(1)) != key(made(1))
