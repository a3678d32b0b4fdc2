"""Checkpoints of optimizer states: exact, converted between formats, and from PyTorch."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from optim_helpers import (
    EXACT_STATES,
    all_parameters,
    assert_same_state,
    moment_values,
    parameters,
    reload_from_file,
    run,
    set_gradients,
)
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fp8pass
from fp8pass.optim import PRESETS, AdamW, Muon
from fp8pass.optim.group_options import WEIGHTS
from fp8pass.optim.slots import name_of
from fp8pass.optim.state_formats import MOMENT_FORMATS


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_resuming_is_bit_exact(name, weights):
    options = {"first_moment": name, "second_moment": name, "weights": weights}
    straight = parameters(dtype=torch.bfloat16)
    uninterrupted = AdamW(straight, lr=0.01, seed=3, **options)
    run(straight, uninterrupted, range(6))

    params = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(params, lr=0.01, seed=3, **options)
    run(params, optimizer, range(3))
    saved = reload_from_file(optimizer.state_dict())
    resumed = AdamW(params, **options)
    resumed.load_state_dict(saved)
    run(params, resumed, range(3, 6))
    assert_same_state(resumed, uninterrupted)


@pytest.mark.parametrize("make", [AdamW, Muon])
def test_copies_and_pickles_go_on_alike(make):
    params = parameters(((24, 40), (7, 3)), dtype=torch.bfloat16)
    optimizer = make(params)
    run(params, optimizer, range(2))
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    run(params, optimizer, range(2, 4))
    for other in others:
        run(all_parameters(other), other, range(2, 4))
        assert_same_state(other, optimizer)


@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_resuming_goes_on_rounding_to_nearest(name):
    """The option comes from the checkpoint, as betas and seed do."""
    options = {"first_moment": name, "second_moment": name, "weights": "fp16"}
    straight, params = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    uninterrupted = AdamW(straight, lr=0.01, state_rounding="nearest", **options)
    run(straight, uninterrupted, range(4))
    optimizer = AdamW(params, lr=0.01, state_rounding="nearest", **options)
    run(params, optimizer, range(2))
    resumed = AdamW(params, **options)
    resumed.load_state_dict(reload_from_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["state_rounding"] == "nearest"
    run(params, resumed, range(2, 4))
    assert_same_state(resumed, uninterrupted)


def test_checkpoints_without_the_rounding_of_states():
    """A checkpoint of an older version lacks the option, so the optimizer's own value stays."""
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["state_rounding"]
    other = AdamW(params, state_rounding="nearest")
    other.load_state_dict(saved)
    assert other.param_groups[0]["state_rounding"] == "nearest"
    assert_same_state(other, optimizer)


@pytest.mark.parametrize("target", ["e5m2+expand", "de8", "bf16", "fp32"])
@pytest.mark.parametrize("source", ["e4m3+expand", "e5m2", "fp16", "fp32"])
def test_checkpoints_are_converted_between_formats(source, target):
    params = parameters(dtype=torch.bfloat16)
    old = AdamW(params, lr=0.5, first_moment=source, second_moment=source, weights="fp32")
    run(params, old, range(4))
    new = AdamW(params, first_moment=target, second_moment=target, group_size=32)
    new.load_state_dict(reload_from_file(old.state_dict()))
    (group,) = new.param_groups
    assert (group["lr"], group["first_moment"], group["group_size"]) == (0.5, target, 32)
    for number, p in enumerate(params):
        assert {name_of(key) for key in new.state[p]} == {"step", "exp_avg", "exp_avg_sq"}
        assert new.state[p]["step"] == 4
        for name in ("exp_avg", "exp_avg_sq"):
            before = moment_values(old, number, name)
            after = moment_values(new, number, name)
            bound = 0.02 * before.abs().amax() if before.numel() else 0.0
            assert ((after - before).abs() <= 0.15 * before.abs() + bound).all()
    run(params, new, range(4, 6))


@pytest.mark.parametrize("changed", [{}, {"group_size": 64}, {"weights": "nearest"}], ids=str)
def test_options_of_a_checkpoint_do_not_determine_formats_of_states(changed):
    """The keys of states determine their formats."""
    params = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(params, weights="fp16")
    run(params, optimizer, range(2))
    saved = reload_from_file(optimizer.state_dict())
    saved["param_groups"][0] |= {"first_moment": "e5m2", "second_moment": "bf16"} | changed
    same = AdamW(params, weights="fp16")
    same.load_state_dict(saved)
    assert_same_state(same, optimizer)


@pytest.mark.parametrize("foreign", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RAdam])
@pytest.mark.parametrize(
    "options",
    [{}, {"preset": "fp8-lm"}, {"first_moment": "fp32"}, {"second_moment": "bf16"}],
    ids=str,
)
def test_optimizers_of_torch_refuse_quantized_moments(foreign, options):
    params = parameters(((128, 64),))
    optimizer = AdamW(params, **options)
    run(params, optimizer, range(2))
    other = foreign(params)
    other.load_state_dict(reload_from_file(optimizer.state_dict()))
    before = params[0].detach().clone()
    set_gradients(params, 2)
    with pytest.raises(KeyError):
        other.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_way_back_to_torch(preset):
    """Moments in FP32 have the keys and the meaning of torch.optim.AdamW's moments."""
    params = parameters()
    optimizer = AdamW(params, lr=0.02, preset=preset)
    run(params, optimizer, range(3))
    exact = AdamW(params, **EXACT_STATES)
    exact.load_state_dict(optimizer.state_dict())
    other = torch.optim.AdamW(params)
    other.load_state_dict(reload_from_file(exact.state_dict()))
    assert other.param_groups[0]["lr"] == 0.02
    for number, p in enumerate(params):
        assert other.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert other.state[p]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert other.state[p][name].dtype is torch.float32
            want = moment_values(optimizer, number, name).view_as(p)
            torch.testing.assert_close(other.state[p][name], want, rtol=1e-6, atol=0)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    same = AdamW(copies, **EXACT_STATES)
    same.load_state_dict(exact.state_dict())
    run(params, other, range(3, 6))
    run(copies, same, range(3, 6))
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def trained(seed: int, dtype=torch.float32, **options) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to(dtype)
    optimizer = AdamW(model.parameters(), 3e-3, **options)
    run(list(model.parameters()), optimizer, range(seed, seed + 3))
    return model, optimizer


def save_distributed(path, optimizer, model, **options) -> None:
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"optimizer": states}, checkpoint_id=path)


def load_distributed(path, optimizer, model, planner=None, **options) -> None:
    options = StateDictOptions(**options)
    content = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(content, checkpoint_id=path, planner=planner)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"preset": "fp8-lm"}, torch.float32),
        ({"first_moment": "e5m2+expand"}, torch.float32),
        ({"second_moment": "de8"}, torch.bfloat16),
        (EXACT_STATES, torch.bfloat16),
        ({"group_size": 64}, torch.float32),
        ({"first_moment": "bf16", "second_moment": "fp16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_a_distributed_checkpoint_in_other_formats_is_converted(tmp_path, options, dtype, flat):
    """In both directions the states equal the states after `load_state_dict`."""
    for source, target in (({}, options), (options, {})):
        model, optimizer = trained(0, dtype, **source)
        folder = tmp_path / str(bool(source))
        save_distributed(folder, optimizer, model, flatten_optimizer_state_dict=flat)
        other_model, other = trained(1, dtype, **target)
        load_distributed(folder, other, other_model, flatten_optimizer_state_dict=flat)
        want = AdamW(all_parameters(other), **target)
        want.load_state_dict(optimizer.state_dict())
        assert_same_state(other, want)
        assert other.param_groups == want.param_groups


def test_the_optimizer_itself_loads_a_distributed_checkpoint(tmp_path):
    _model, optimizer = trained(0, preset="fp8-lm")
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    _, other = trained(1)
    dcp.load({"optimizer": other}, checkpoint_id=tmp_path)
    want = AdamW(all_parameters(other))
    want.load_state_dict(optimizer.state_dict())
    assert_same_state(other, want)


def test_a_distributed_checkpoint_without_master_copies(tmp_path):
    """The next step makes the copies from the weights, which are loaded after the optimizer."""
    model, optimizer = trained(0, torch.bfloat16)
    save_distributed(tmp_path, optimizer, model)
    other_model, other = trained(1, torch.bfloat16, weights="fp32")
    load_distributed(tmp_path, other, other_model)
    other_model.load_state_dict(model.state_dict())
    want_model, _ = trained(2, torch.bfloat16)
    want_model.load_state_dict(model.state_dict())
    want = AdamW(want_model.parameters(), weights="fp32")
    want.load_state_dict(optimizer.state_dict())
    for each in (other, want):
        run(all_parameters(each), each, range(3, 5))
    for p, q in zip(all_parameters(other), all_parameters(want), strict=True):
        # Where the old copy rounds to the loaded weight, the optimizer keeps the old copy.
        is_same = other.state[p]["master"] == want.state[q]["master"]
        assert is_same.float().mean() > 0.98
        torch.testing.assert_close(p, q, rtol=0.01, atol=0)


def test_a_distributed_checkpoint_of_torch(tmp_path):
    model, _ = trained(0)
    theirs = torch.optim.AdamW(model.parameters(), 0.02)
    run(list(model.parameters()), theirs, range(3))
    save_distributed(tmp_path, theirs, model)
    other_model, other = trained(1)
    load_distributed(tmp_path, other, other_model)
    assert other.param_groups[0]["lr"] == 0.02
    assert other.param_groups[0]["first_moment"] == "e4m3+expand"
    want = AdamW(all_parameters(other))
    want.load_state_dict(theirs.state_dict())
    assert_same_state(other, want)


def test_one_planner_loads_two_distributed_checkpoints(tmp_path):
    planner = dcp.DefaultLoadPlanner()
    other_model, other = trained(9)
    for seed, preset in enumerate(("fp8-lm", "coat")):
        model, optimizer = trained(seed, preset=preset)
        save_distributed(tmp_path / preset, optimizer, model)
        load_distributed(tmp_path / preset, other, other_model, planner)
        want = AdamW(all_parameters(other))
        want.load_state_dict(optimizer.state_dict())
        assert_same_state(other, want)


def test_plain_fp16_moments_are_quantized():
    """Moments of torch.optim.AdamW in FP16 have no scales, in contrast to the format `fp16`."""
    params = parameters(((64, 32),), dtype=torch.float16)
    theirs = torch.optim.AdamW(params)
    run(params, theirs, range(2))
    optimizer = AdamW(params, preset="fp8-lm", first_moment="fp16")
    optimizer.load_state_dict(reload_from_file(theirs.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        want = theirs.state[params[0]][name].float().view(-1)
        torch.testing.assert_close(moment_values(optimizer, 0, name), want, rtol=1e-3, atol=0)
    run(params, optimizer, range(2, 3))


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_distributed_checkpoints_of_strangers_are_refused(tmp_path, make):
    """Neither optimizer loads entries of the other one, and nothing changes."""
    model, optimizer = trained(0)
    save_distributed(tmp_path / "ours", optimizer, model)
    stranger_model, _ = trained(1)
    stranger = make(stranger_model.parameters(), lr=0.1)
    run(list(stranger_model.parameters()), stranger, range(2))
    before = copy.deepcopy(stranger.state_dict()["state"])
    with pytest.raises(CheckpointException, match=r"Missing key .*(exp_avg|momentum_buffer)"):
        load_distributed(tmp_path / "ours", stranger, stranger_model)
    for number, state in stranger.state_dict()["state"].items():
        assert all(torch.equal(x, before[number][key]) for key, x in state.items())
    if make is not torch.optim.AdamW:
        save_distributed(tmp_path / "theirs", stranger, stranger_model)
        ours = copy.deepcopy(optimizer)
        with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
            load_distributed(tmp_path / "theirs", optimizer, model)
        assert_same_state(optimizer, ours)


def test_a_distributed_checkpoint_that_is_not_complete_is_refused(tmp_path):
    model, optimizer = trained(0)
    states = get_optimizer_state_dict(model, optimizer)
    del states["state"]["0.weight"]["exp_avg:e4m3+expand:power"]
    dcp.save({"optimizer": states}, checkpoint_id=tmp_path)
    other_model, other = trained(1, preset="fp8-lm")
    with pytest.raises(CheckpointException, match=r"without exp_avg:e4m3\+expand:power"):
        load_distributed(tmp_path, other, other_model)


def test_a_distributed_checkpoint_is_converted_after_it_was_loaded(tmp_path):
    model, optimizer = trained(0)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(content, checkpoint_id=tmp_path)
    other_model, other = trained(1)
    content = dict(zip(("model", "optimizer"), get_state_dict(other_model, other), strict=True))
    dcp.load(content, checkpoint_id=tmp_path)
    set_state_dict(
        other_model,
        other,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    assert_same_state(other, optimizer)
    for each in (optimizer, other):
        each.param_groups[0].update(first_moment="e4m3", second_moment="fp16")
    run(list(model.parameters()), optimizer, range(3, 5))
    run(list(other_model.parameters()), other, range(3, 5))
    assert_same_state(other, optimizer)


@pytest.mark.parametrize("target", [{}, {"preset": "fp8-lm"}, EXACT_STATES], ids=str)
@pytest.mark.parametrize("source", [{}, {"preset": "fp8-lm"}, EXACT_STATES], ids=str)
def test_full_state_dicts_of_pytorch_are_converted(source, target):
    """PyTorch merges them into the optimizer's own states, which have other formats."""
    full = StateDictOptions(full_state_dict=True)
    model, optimizer = trained(0, **source)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=full))
    other_model, other = trained(1, **target)
    set_state_dict(
        other_model,
        other,
        model_state_dict=saved[0],
        optim_state_dict=saved[1],
        options=full,
    )
    directly = AdamW(all_parameters(other), **target)
    directly.load_state_dict(optimizer.state_dict())
    assert_same_state(other, directly)


def test_quantized_states_without_their_format_are_refused():
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    key = "exp_avg:e4m3+expand"
    data = saved["state"][0].pop(key)
    saved["state"][0]["exp_avg"] = data
    same_options = {"lr": 0.5}
    other = AdamW(params, **same_options)
    run(params, other, range(1))
    before = copy.deepcopy(other)
    with pytest.raises(fp8pass.ConfigError, match="exp_avg is uint8, not floating point"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.5
    assert list(other.state) == params
    for p, q in zip(params, all_parameters(before), strict=True):
        assert all(torch.equal(x, before.state[q][k]) for k, x in other.state[p].items())
    del saved["state"][0]["exp_avg"]
    saved["state"][0]["exp_avg:e4m4"] = data
    with pytest.raises(fp8pass.ConfigError, match="exp_avg: Unknown format 'e4m4'"):
        other.load_state_dict(saved)
    saved["state"][0] |= {key: data, "exp_avg:e5m2": data}
    with pytest.raises(fp8pass.ConfigError, match=r"has both exp_avg:e4m4 and exp_avg:e5m2"):
        other.load_state_dict(saved)
    del saved["state"][0]["exp_avg:e4m4"], saved["state"][0]["exp_avg:e5m2"]
    saved["state"][3][f"{key}:scale"] = torch.ones(7)
    with pytest.raises(fp8pass.ConfigError, match="7 scales for a state of 128 elements"):
        other.load_state_dict(saved)


def test_a_master_copy_begins_with_the_weights_of_a_checkpoint_without():
    params = parameters(dtype=torch.bfloat16)
    old, new = AdamW(params), AdamW(params, weights="fp32")
    run(params, old, range(2))
    new.load_state_dict(old.state_dict())
    for p in params:
        assert torch.equal(new.state[p]["master"], p.float())


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints_of_torch(fused):
    ours, theirs = parameters(), parameters()
    torch_optimizer = torch.optim.AdamW(theirs, lr=0.02, fused=fused)
    run(theirs, torch_optimizer, range(3))
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    optimizer = AdamW(ours, **EXACT_STATES)
    optimizer.load_state_dict(reload_from_file(torch_optimizer.state_dict()))
    run(theirs, torch_optimizer, range(3, 6))
    run(ours, optimizer, range(3, 6))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    AdamW(ours).load_state_dict(torch_optimizer.state_dict())
    with pytest.raises(fp8pass.ConfigError, match="amsgrad=True"):
        AdamW(ours).load_state_dict(torch.optim.AdamW(ours, amsgrad=True).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (2, 3)}, r"betas\[0\] must be a number in \[0, 1\), got 2"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"eps": -1.0}, "eps must be"),
        ({"state_rounding": "nearst"}, "Did you mean 'nearest'"),
        ({"seed": None}, "seed must be an int"),
    ],
)
def test_wrong_options_of_checkpoints_are_refused(options, message):
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= options
    other = AdamW(params)
    with pytest.raises(fp8pass.ConfigError, match=f"checkpoint cannot be loaded. .*{message}"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    assert not other.state


@pytest.mark.parametrize("given", [{}, {"optimizer": {}}, None, "checkpoint.pt", [1]], ids=str)
def test_invalid_checkpoints_are_refused(given):
    with pytest.raises(fp8pass.ConfigError, match=r"has no param_groups, state.* Load what"):
        AdamW(parameters()).load_state_dict(given)


def test_checkpoints_that_do_not_fit():
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    shapes = r"exp_avg has shape \(1,\), but the parameter has shape \(128,\)"
    with pytest.raises(fp8pass.ConfigError, match=shapes):
        AdamW([*params[:1], params[3], params[1], *params[2:3], *params[4:]]).load_state_dict(
            optimizer.state_dict()
        )
    with pytest.raises(ValueError, match="size of optimizer's group"):
        AdamW(params[1:]).load_state_dict(optimizer.state_dict())
    momentum = torch.optim.SGD(params, momentum=0.9)
    run(params, momentum, range(1))
    with pytest.raises(fp8pass.ConfigError, match="another optimizer"):
        AdamW(params).load_state_dict(momentum.state_dict())
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["state"][2]["exp_avg:e4m3+expand:power"]
    with pytest.raises(fp8pass.ConfigError, match=r"incomplete: .* without exp_avg:e4m3"):
        AdamW(params).load_state_dict(broken)
