"""Config: recipes, and errors that name the nearest right choice."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from helpers import COAT_EAGER, MLP
from torch import nn

import fp8pass
from fp8pass import compat
from fp8pass import config as config_module
from fp8pass.config import GEMMS, RECIPES, Config, Simulation, split_options
from fp8pass.dialect.formats import FORMATS, SAVED_FORMATS
from fp8pass.option_checks import ConfigError, bytes_text, parse_bytes


def test_the_default_is_coat():
    assert Config() == Config.recipe("coat")
    assert (Config().forward_format, Config().save_format, Config().group_size) == (
        *("e4m3", "e4m3"),
        128,
    )


def test_recipes_differ():
    configs = {name: Config.recipe(name) for name in RECIPES}
    assert len(set(configs.values())) == len(RECIPES) == 6
    assert configs["linear"].save_format == "none"
    assert configs["linear"].quantizes_linears
    assert not configs["exact"].quantizes_linears


def test_overrides():
    want = Config(save_format="none", scales="tensorwise", group_size=16)
    assert Config.recipe("linear", group_size=16) == want


def test_literals_are_those_of_the_tables():
    """Type checkers read the literals, the compiler reads the tables."""
    saved = {f.name for f in SAVED_FORMATS} | {"none", "exact"}
    assert set(get_args(config_module.SaveFormat)) == saved
    multiplied = {f.name for f in FORMATS.values() if f.multiplies} | {"exact"}
    assert set(get_args(config_module.LinearFormat)) == multiplied
    assert set(get_args(config_module.Recipe)) == set(RECIPES)


def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().group_size = 16
    for field in ("skip", "keep_exact"):
        for given in (["a"], "a"):
            assert hash(Config(**{field: given})) == hash(Config(**{field: ("a",)}))


@pytest.mark.parametrize("text", ["60%", " 60 %", "0.6", ".6", "60.0%"])
def test_a_share_may_be_text(text):
    assert Config(memory_budget=text) == Config(memory_budget=0.6)


def test_budgets_are_rounded_up():
    for count in (1, 1023, 1024, 1052736, 123456789, 999_999_999_999):
        text = bytes_text(count, up=True)
        assert count <= parse_bytes(text) <= 1.01 * count + 1, text


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Config.recipe("caot"), "'coat'"),
        (lambda: Config.recipe("coat", groupsize=16), "'group_size'"),
        (lambda: Config(forward_format="e4m2"), "'e4m3'"),
        (lambda: Config(gradient_format="e5m3"), "'e5m2'"),
        (lambda: Config(save_format="nonee"), "'none'"),
        (lambda: Config(compiler="inducter"), "'inductor'"),
        (
            lambda: Config(forward_format="exact"),
            "mix FP8 and high precision in one GEMM",
        ),
        (lambda: Config(forward_format="e5m2", gradient_format="e5m2"), "forward_format='e4m3'"),
        (lambda: Config(groupsize=16), "Unknown option 'groupsize'. Did you mean 'group_size'?"),
        (lambda: Config("coat"), "got 'coat'. To choose a recipe, write Config.recipe('coat')"),
        (lambda: Config(group_size=7), "group_size must be a positive multiple of 16, such as 128"),
        (lambda: Config(group_size=24), "multiple of 16, such as 128, got 24"),
        (lambda: Config(group_size=0), "multiple of 16, such as 128, got 0"),
        (lambda: Config(group_size=-16), "multiple of 16, such as 128, got -16"),
        (lambda: Config(group_size=True), "multiple of 16, such as 128, got True"),
        (lambda: Config(group_size=16.0), "multiple of 16, such as 128, got 16.0"),
        (
            lambda: Config(error_tolerance="1"),
            "error_tolerance must be a positive number, or float('inf')",
        ),
        (lambda: Config(error_tolerance=True), "got True"),
        (lambda: Config(error_tolerance=math.nan), "got nan"),
        (lambda: Config(error_tolerance=10**400), "got 1000"),
        (lambda: Config(memory_budget="0.0 MiB"), "positive and finite, got '0.0 MiB': give a"),
        (lambda: Config(memory_budget="60"), "a share, a number up to 2.0"),
        (
            lambda: Config(memory_budget="300%"),
            "memory_budget=3.0 is too large: a float is a share",
        ),
        (
            lambda: Config(calibration=(("up", math.nan, 1.0),)),
            "Pass the return value of fp8pass.calibrate",
        ),
        (
            lambda: Config(calibration=(("up", 10**400, 1.0),)),
            "Pass the return value of fp8pass.calibrate",
        ),
        (lambda: Config(host_bandwidth=10**400), "a number of bytes per second, such as 25e9"),
        (
            lambda: Config(calibration=(("up", 0.0, -1.0),)),
            "Pass the return value of fp8pass.calibrate",
        ),
        (
            lambda: Config(recipe="agoq", skip="a"),
            "Write Config.recipe('agoq', skip=...)",
        ),
        (lambda: Config(recipe="agoq"), "Write Config.recipe('agoq') instead of"),
        (
            lambda: Config(skip={"layers.0": True}),
            "skip must be a module path pattern, or",
        ),
        (lambda: Config(skip=(1,)), "skip must be a module path pattern, or"),
        (lambda: Config(skip=torch.nn.Linear), "skip must be a module path pattern, or"),
        (lambda: Config(skip=(torch.nn.Linear(1, 1),)), "skip must be a module path pattern, or"),
        (
            lambda: Config(skip=1),
            "skip must be a module path pattern, or a tuple of them, or a function that takes",
        ),
        (
            lambda: Config(keep_exact=1),
            "keep_exact must be a tensor name or module path pattern, or a tuple of them",
        ),
        (
            lambda: Config(keep_exact=(None,)),
            "must be a tensor name or module path pattern",
        ),
        (lambda: split_options({"keepexact": ()}, []), "'keep_exact'"),
        (lambda: Config(quantize_lm_head=1), "must be a bool, True or False, got 1"),
        (lambda: split_options({"mode": "max-autotune"}, []), "torch.compile(model, mode=...,"),
        (lambda: split_options({1: 2}, []), "Unknown option 1"),
        (lambda: split_options({"groupsize": 16}, ["max_autotune"]), "'group_size'"),
        (lambda: split_options({"max_autotun": True}, ["max_autotune"]), "'max_autotune'"),
        (lambda: split_options({"recipe": "exat"}, []), "'exact'"),
    ],
)
def test_errors_name_the_nearest_right_choice(make, names):
    with pytest.raises(ConfigError) as error:
        make()
    assert names in str(error.value)


def test_inductor_options_pass_through():
    options = {"recipe": "linear", "group_size": 32, "max_autotune": True, "epilogue-fusion": False}
    config, rest = split_options(options, compat.list_options())
    assert config == Config.recipe("linear", group_size=32)
    assert rest == {"max_autotune": True, "epilogue_fusion": False}


def test_inductor_options_reach_inductor(monkeypatch):
    seen = {}

    def record(gm, inputs, **kwargs):
        seen.update(kwargs["config_patches"])
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", record)
    options = {"recipe": "linear", "epilogue_fusion": False}
    torch.compile(MLP(), backend="fp8pass", options=options)(torch.randn(16, 64))
    assert seen["epilogue_fusion"] is False
    assert seen["custom_partitioner_fn"].compilation.config == Config.recipe("linear")


def test_modes_become_inductor_options(monkeypatch):
    seen = {}

    def record(gm, inputs, **kwargs):
        seen.update(kwargs["config_patches"])
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", record)
    torch.compile(MLP(), backend="fp8pass", mode="max-autotune-no-cudagraphs")(torch.randn(16, 64))
    assert seen["max_autotune"] is True


def test_backend_wants_a_config():
    with pytest.raises(TypeError, match=r"fp8pass\.Config, got str.*options="):
        fp8pass.backend("coat")


@pytest.mark.parametrize("options", [None, {"recipe": "agoq"}])
def test_the_backend_is_made_by_a_call(options):
    compiled = torch.compile(MLP(), backend=fp8pass.backend, options=options)
    with pytest.raises(Exception, match=r"backend=fp8pass\.backend\(fp8pass\.Config\(\)\)"):
        compiled(torch.randn(16, 64))


def test_a_config_is_not_a_backend():
    compiled = torch.compile(MLP(), backend=Config())
    with pytest.raises(Exception, match=r"TypeError: .*backend=fp8pass\.backend\(config\)"):
        compiled(torch.randn(16, 64))


@pytest.mark.parametrize(
    ("options", "names"),
    [({"recipe": "caot"}, "Did you mean 'coat'"), ({"grup_size": 16}, "Did you mean 'group_size'")],
)
def test_wrong_options_reach_the_user(options, names):
    compiled = torch.compile(MLP(), backend="fp8pass", options=options)
    with pytest.raises(Exception, match=names):
        compiled(torch.randn(16, 64))


def test_wrong_mode_reaches_the_user():
    compiled = torch.compile(MLP(), backend="fp8pass", mode="max-autotun")
    with pytest.raises(Exception, match="Did you mean 'max-autotune'"):
        compiled(torch.randn(16, 64))


def test_config_and_options_exclude_each_other():
    backend = fp8pass.backend(Config.recipe("linear"))
    compiled = torch.compile(MLP(), backend=backend, options={"group_size": 16})
    with pytest.raises(Exception, match="not both"):
        compiled(torch.randn(16, 64))


def test_unsupported_pytorch_names_the_versions_that_work():
    for version in ("2.10.1", "2.15.0", "3.0"):
        with pytest.raises(ImportError, match=r"torch>=2\.11,<2\.15"):
            compat.check_version(version)
    compat.check_version("2.11.0+cu130")
    compat.check_version("2.14.1a0+git")


def test_blocks_compiled_one_by_one_have_configurations_of_their_own():
    """Patterns cannot choose among them, since paths start at the block; the warning says so."""
    blocks = nn.ModuleList(MLP((64, 64, 64)) for _ in range(3))
    blocks[0].compile(backend=fp8pass.backend(replace(COAT_EAGER, skip=("*",))))
    for block in blocks[1:]:
        block.compile(backend=fp8pass.backend(COAT_EAGER))
    x = torch.randn(32, 64)
    exact = [torch.allclose(block(x), block.forward(x), atol=1e-6) for block in blocks]
    assert exact == [True, False, False]

    blocks[1].compile(backend=fp8pass.backend(replace(COAT_EAGER, skip=("blocks.1",))))
    with pytest.warns(UserWarning, match=r"Paths start at the compiled module.*its own Config"):
        blocks[1](x)


# --- accumulation -------------------------------------------------------------------------------


def test_accumulation_by_role_and_length():
    config = Config(fast_accumulation=["wgrad", "forward"], longest_fast=100)
    assert config.fast_accumulation == ("forward", "wgrad")
    assert config.accumulates_fast("wgrad", 100)
    assert not config.accumulates_fast("wgrad", 101)
    assert not config.accumulates_fast("dgrad", 16)
    assert not Config.recipe("exact").accumulates_fast("forward", 16)
    symbolic = torch.SymInt  # a dynamic length is no int
    assert not config.accumulates_fast("wgrad", symbolic)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fast_accumulation": "wgrad"}, r"fast_accumulation=\('wgrad',\)"),
        ({"fast_accumulation": ("wgard",)}, "Did you mean 'wgrad'"),
        ({"fast_accumulation": True}, "must be a tuple"),
        ({"longest_fast": -1}, "longest_fast must be a whole number"),
        ({"longest_fast": 1.5}, "longest_fast must be a whole number"),
        ({"longest_fast": True}, "longest_fast must be a whole number"),
    ],
)
def test_wrong_accumulation(options, message):
    with pytest.raises(ConfigError, match=message):
        Config(**options)


# --- simulated formats --------------------------------------------------------------------------


def test_what_is_simulated_is_neither_in_fp8_nor_in_low_bits():
    config = Config(simulate="e8m3")
    assert not config.quantizes_linears
    assert (config.save_format, config.head_chunks) == ("none", 1)
    assert config == Config.recipe("exact", simulate="e8m3")
    assert config == split_options({"simulate": "e8m3"}, ())[0]
    assert config.simulate == Simulation("e8m3", GEMMS, inner_clamp=True, outer_clamp=True)
    assert Simulation("e8m3", ["wgrad", "forward"]).gemms == ("forward", "wgrad")
    assert Config(simulate="e8m3", head_chunks=4).head_chunks == 4


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("e9m3", "e8m3"), ("E8M3", "e8m3"), ("e8m99", "e8m23"), ("e0m1", "e1m1"), ("float8_e4m3", "")],
)
def test_unknown_simulated_formats_name_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"Did you mean '{nearest}'" if nearest else "such as"):
        Config(simulate=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_format": "e4m3"}, "excludes save_format='e4m3'.*Leave save_format out"),
        ({"forward_format": "e4m3"}, "excludes forward_format='e4m3'"),
    ],
)
def test_simulation_excludes_low_bits(options, message):
    with pytest.raises(ConfigError, match=message):
        Config(simulate="e8m3", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gemms": "forward"}, r"gemms=\('forward',\)"),
        ({"gemms": ("wgard",)}, "Did you mean 'wgrad'"),
        ({"inner_clamp": 1}, "inner_clamp must be a bool"),
        ({"format": "e9m3"}, "Did you mean 'e8m3'"),
    ],
)
def test_wrong_arguments_of_a_simulation(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Simulation(**{"format": "e8m3", **arguments})


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "exact"])
def test_simulation_excludes_recipes_that_quantize(recipe):
    with pytest.raises(ConfigError, match="Leave the recipe out"):
        split_options({"recipe": recipe, "simulate": "e8m3"}, ())


def test_training_without_memory_is_refused():
    """On the meta device."""
    with torch.device("meta"):
        model, x = torch.nn.Linear(32, 32), torch.randn(32, 32)
    program = torch.compile(model, backend="fp8pass", options={"compiler": "eager"})
    with pytest.raises(Exception, match="on the meta device and have no memory"):
        program(x)
