"""PyTorch's protocols: hooks, groups, schedulers, scalers, trainers; and invalid options."""

from __future__ import annotations

import math
import shutil
import warnings
from typing import Any

import pytest
import torch
from optim_helpers import EXACT_STATES, SHAPES, assert_same_state, parameters, run, set_gradients
from torch import nn

import fp8pass
from fp8pass.optim import AdamW
from fp8pass.optim.checkpoint import PARTS


def test_user_hooks_see_checkpoints_and_steps():
    params, seen = parameters(), []
    optimizer = AdamW(params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(params, optimizer, range(1))
    assert seen == ["before", "after"]
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda _, d: seen.append(sorted(d["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(saved)
    assert seen[2:] == [list(range(len(SHAPES))), len(SHAPES)]


def test_parameter_groups_have_options_of_their_own():
    first, second, third = parameters(((256,), (256,), (256,)))
    options = {"params": [second], "lr": 0.5, "first_moment": "bf16", "weight_decay": 0.0}
    optimizer = AdamW([{"params": [first]}, options], lr=0.1)
    optimizer.add_param_group({"params": [third], "second_moment": "fp32"})
    run([first, second, third], optimizer, range(2))
    dtypes = [
        {key: x.dtype for key, x in optimizer.state[p].items() if not key.endswith(PARTS)}
        for p in (first, second, third)
    ]
    step = {"step": torch.float32}
    fp8 = [{f"{x}:e4m3+expand": torch.uint8} for x in ("exp_avg", "exp_avg_sq")]
    assert dtypes == [
        step | fp8[0] | fp8[1],
        step | {"exp_avg": torch.bfloat16} | fp8[1],
        step | fp8[0] | {"exp_avg_sq": torch.float32},
    ]
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'e4m3'"):
        optimizer.add_param_group({"params": parameters(((3,),)), "first_moment": "e4m4"})
    assert len(optimizer.param_groups) == 3


def test_a_group_has_a_preset_of_its_own():
    params = parameters(((128,), (128,), (128,)))
    mixed = {"params": params[1:2], "preset": "fp8-lm", "first_moment": "bf16"}
    mixed["state_rounding"] = "nearest"
    optimizer = AdamW([{"params": params[:1], "preset": "fp8-lm"}, mixed, {"params": params[2:]}])
    run(params, optimizer, range(2))
    names = ("first_moment", "second_moment", "weights", "state_rounding")
    assert [tuple(group[name] for name in names) for group in optimizer.param_groups] == [
        ("e4m3", "fp16", "fp16", "stochastic"),
        ("bf16", "fp16", "fp16", "nearest"),
        ("e4m3+expand", "e4m3+expand", "stochastic", "stochastic"),
    ]
    assert optimizer.state[params[0]]["exp_avg_sq:fp16"].dtype is torch.float16
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'fp8-lm'"):
        optimizer.add_param_group({"params": parameters(((3,),)), "preset": "fp8lm"})
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'first_moment'"):
        optimizer.add_param_group({"params": parameters(((3,),)), "first_momnet": "fp32"})
    assert len(optimizer.param_groups) == 3
    optimizer.add_param_group({"params": parameters(((3,),)), "weight_decay_multiplier": 2})


def test_schedulers_change_the_rate():
    params, same = parameters(), parameters()
    ours, theirs = AdamW(params, **EXACT_STATES), torch.optim.AdamW(same)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in (ours, theirs)]
    for step in range(5):
        run(params, ours, range(step, step + 1))
        run(same, theirs, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    for p, q in zip(params, same, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


def test_absent_gradients_are_skipped_and_sparse_ones_refused():
    present, absent = parameters(((5,), (6,)))
    before = absent.detach().clone()
    optimizer = AdamW([present, absent])
    set_gradients([present], 0)
    optimizer.step()
    assert torch.equal(absent, before)
    assert absent not in optimizer.state
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        AdamW(embedding.parameters()).step()


def test_the_rate_as_a_tensor():
    ours, theirs = parameters(), parameters()
    rate = torch.tensor(0.1)
    run(ours, AdamW(ours, lr=rate), range(2))
    run(theirs, AdamW(theirs, lr=rate.item()), range(2))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_options_that_are_ignored_cause_a_warning(option):
    with pytest.warns(UserWarning, match=rf"ignores {option}=True.* Leave out {option}\."):
        AdamW(parameters(), **{option: True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW(parameters(), **{option: False})


def test_closures():
    (p,) = parameters(((4,),))
    optimizer = AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("scales_itself", [False, True])
def test_grad_scaler_skips_steps_that_overflow(scales_itself):
    """By default GradScaler unscales gradients. Lightning refuses to clip them otherwise."""
    ours, theirs = parameters(), parameters()
    optimizer, unscaled = AdamW(ours), AdamW(theirs)
    assert not optimizer._step_supports_amp_scaling
    optimizer.takes_scaled_gradients = scales_itself
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        scaler.scale(torch.zeros(()))
        for p in ours:
            p.grad *= scaler.get_scale()
        if step == 2:
            ours[1].grad.fill_(torch.inf)
        else:
            unscaled.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same_state(optimizer, unscaled)


def test_grad_scaler_with_weights_in_fp16():
    weight = torch.ones(16, dtype=torch.float16, requires_grad=True)
    optimizer, scaler = AdamW([weight], lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert (weight < 1).all()


@pytest.mark.long
def test_training_with_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)

    def trained(steps: int, resume: bool) -> tuple[Any, AdamW]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        data = [{"input_ids": x, "labels": x} for x in torch.arange(128).view(8, 16) % 64]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, schedule)
        )
        trainer.train(resume_from_checkpoint=resume)
        return model, optimizer

    whole, optimizer = trained(4, resume=False)
    assert optimizer.state[whole.lm_head.weight]["exp_avg:e4m3+expand"].dtype == torch.uint8
    trained(2, resume=False)
    for folder in tmp_path.glob("checkpoint-4"):
        shutil.rmtree(folder)
    resumed, _ = trained(4, resume=True)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number >= 0"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"eps": math.nan}, "eps must be"),
        ({"weight_decay": "0.1"}, "weight_decay must be"),
        ({"amsgrad": True}, "use torch.optim.AdamW"),
        ({"differentiable": True}, "use torch.optim.AdamW"),
        ({"preset": "fp8lm"}, "Did you mean 'fp8-lm'"),
        ({"first_moment": "e4m3-expand"}, r"Did you mean 'e4m3\+expand'"),
        ({"second_moment": 8}, "second_moment: Unknown format 8"),
        ({"weights": "stochastik"}, "Did you mean 'stochastic'"),
        ({"state_rounding": "near"}, "Unknown state_rounding 'near'"),
        ({"state_rounding": True}, "Unknown state_rounding True"),
        ({"group_size": 100}, "power of two from 16"),
        ({"seed": 0.5}, "seed must be an int"),
        (
            {"offload": True},
            'tuple of names, such as offload=\\("states",\\), got True',
        ),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    with pytest.raises(fp8pass.ConfigError, match=message):
        AdamW(parameters(), **options)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.complex64, "view_as_real"),
        (torch.float64, "dtype float64.*to another"),
        (torch.float8_e4m3fn, "has dtype float8_e4m3fn"),
    ],
)
def test_parameters_that_cannot_be_optimized(dtype, message):
    with pytest.raises(fp8pass.ConfigError, match=message):
        AdamW([torch.zeros(3, dtype=dtype).requires_grad_()])
