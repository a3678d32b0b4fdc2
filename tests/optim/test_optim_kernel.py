"""The fused update compared with the one in PyTorch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from optim_helpers import (
    KERNEL_CHUNK,
    KERNEL_DEVICES,
    all_parameters,
    assert_same_state,
    moment_values,
    parameters,
    set_gradients,
)
from torch import nn

from fp8pass import hardware
from fp8pass.optim import AdamW, fused, kernel
from fp8pass.optim.state_formats import MOMENT_FORMATS

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.usefixtures("everything_is_fused"),
    pytest.mark.parametrize("device", KERNEL_DEVICES),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of log2(0)
]

# A scalar, less and more than a group, aligned and unaligned sizes, and several chunks.
SHAPES = ((), (15,), (130,), (2, 64), (KERNEL_CHUNK // 50 + 3, 50))


def on(device: str, params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(device)) for p in params]


def both(device: str, monkeypatch, dtype, steps: int = 2, shapes=SHAPES, **options):
    """Return an optimizer that fuses and one that does not, after the same steps."""
    found = []
    for why_not in (None, "for comparison"):
        monkeypatch.setattr(
            hardware, "why_no_triton_kernels", lambda device, why_not=why_not: why_not
        )
        params = on(device, parameters(shapes, dtype))
        optimizer = AdamW(params, **options)
        for step in range(steps):
            move_gradients(params, step)
            optimizer.step()
        found.append(optimizer)
    return found


def move_gradients(params, step: int) -> None:
    """Set the same gradients on every device."""
    here = [nn.Parameter(p.detach().cpu()) for p in params]
    set_gradients(here, step)
    for p, q in zip(params, here, strict=True):
        p.grad = q.grad.to(p.device)


def assert_alike(got: AdamW, want: AdamW, dtype) -> None:
    """Check that few quantized values differ, by one rounding step."""
    for number, (p, q) in enumerate(zip(all_parameters(got), all_parameters(want), strict=True)):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(p, q, rtol=tolerance, atol=1e-5)
        assert got.state[p]["step"] == want.state[q]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            a, b = (moment_values(o, number, name) for o in (got, want))
            off = (a - b).abs() > 1e-4 * b.abs() + 1e-30
            # E5M2 has the coarsest step.
            assert ((a - b).abs() <= 0.3 * b.abs() + 0.01 * b.abs().amax()).all()
            # Cancellation in the smallest value of a group changes its range. It occurs more often
            # in larger groups, which have smaller values.
            group = got.param_groups[0]["group_size"] if off.numel() > 1024 else 1
            assert off.sum() <= max(3 * group, 1 + 0.05 * off.numel())


@pytest.mark.long
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_every_format(device, monkeypatch, name):
    dtype = torch.float32 if name.startswith("e5m2") else torch.bfloat16
    options = {"first_moment": name, "second_moment": name, "lr": 0.01}
    assert_alike(*both(device, monkeypatch, dtype, **options), dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MOMENT_FORMATS if name != "fp32"])
def test_every_format_rounded_to_nearest(device, monkeypatch, name):
    """Less than 0.4% of the quantized values differ if scales agree.

    With random bits half of them would.
    """
    options = {"first_moment": name, "second_moment": name, "weights": "fp16"}
    shapes = ((KERNEL_CHUNK // 50 + 3, 50),)
    options |= {"state_rounding": "nearest", "lr": 0.01, "shapes": shapes}
    got, want = both(device, monkeypatch, torch.bfloat16, steps=1, **options)
    assert_alike(got, want, torch.bfloat16)
    for p, q in zip(all_parameters(got), all_parameters(want), strict=True):
        for state in (f"exp_avg:{name}", f"exp_avg_sq:{name}", "master:fp16"):
            state = state.removesuffix(":bf16")
            differ = find_differences(got.state[p], want.state[q], state)
            assert differ.sum() <= 0.004 * p.numel()


def find_differences(a: dict[str, Any], b: dict[str, Any], name: str) -> torch.Tensor:
    """Return which elements differ among states with equal scales and powers: bool [elements]."""
    differ = (a[name] != b[name]).reshape(-1)
    for part in (f"{name}:scale", f"{name}:power"):
        if part in a:
            same = (a[part] == b[part]).reshape(-1)
            assert same.double().mean() >= 0.75
            differ &= same.repeat_interleave(128)[: len(differ)]
    return differ


@pytest.mark.long
def test_states_rounded_to_nearest_draw_no_bits(device):
    """Another seed gives the same states and weights."""
    options = {"preset": "coat-paper", "lr": 0.01}
    found = []
    for seed in (0, 1):
        params = on(device, parameters(SHAPES, torch.bfloat16))
        found.append(AdamW(params, seed=seed, **options))
        run_on(params, found[-1], range(2))
    assert_same_state(*found)


@pytest.mark.long
@pytest.mark.drawn(3)
@pytest.mark.parametrize("weights", ["nearest", "fp32", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kind_of_weights(device, monkeypatch, weights, dtype):
    options = {"preset": "fp8-lm", "weights": weights, "lr": 0.01, "maximize": True}
    got, want = both(device, monkeypatch, dtype, group_size=32, **options)
    assert_alike(got, want, dtype)
    for p, q in zip(all_parameters(got), all_parameters(want), strict=True):
        assert got.state[p].keys() == want.state[q].keys()


def test_stochastic_rounding_draws_the_same_numbers(device, monkeypatch):
    exact = {"first_moment": "fp32", "second_moment": "fp32"}
    got, want = both(device, monkeypatch, torch.bfloat16, steps=3, seed=5, **exact)
    different = torch.cat(
        [(p != q).flatten() for p, q in zip(all_parameters(got), all_parameters(want), strict=True)]
    )
    assert different.double().mean() < 0.01


@pytest.mark.long
@pytest.mark.parametrize("preset", ["coat", "fp8-lm"])
@pytest.mark.parametrize("expand", ["", "+expand"])
def test_gradients_of_another_dtype_or_place(device, monkeypatch, preset, expand):
    """Gradients are in fp32, or at addresses where vectors cannot be read."""
    options: dict[str, Any] = {"preset": preset, "first_moment": f"e4m3{expand}"}
    params = on(device, parameters(((64,), (2, 128))))
    copies = on(device, parameters(((64,), (2, 128))))
    optimizers = AdamW(params, **options), AdamW(copies, **options)
    for step in range(2):
        for ps, optimizer in zip((params, copies), optimizers, strict=True):
            move_gradients(ps, step)
            if ps is params:
                for p in ps:
                    room = torch.empty(p.numel() + 1, device=device)
                    p.grad = room[1:].view_as(p).copy_(p.grad)
            optimizer.step()
    assert_same_state(*optimizers)
    params[0].grad = None
    params[1].grad = params[1].grad.t().contiguous().t()
    copies[0].grad = None
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizers[0].state[p]["step"].item() for p in params] == [2, 3]
    assert_same_state(*optimizers)


@pytest.mark.long
def test_gradients_can_be_scaled_and_steps_skipped(device):
    params, plain = on(device, parameters(((40,), (200,)))), on(device, parameters(((40,), (200,))))
    scaled, unscaled = AdamW(params), AdamW(plain)
    for step in range(3):
        move_gradients(params, step)
        move_gradients(plain, step)
        for p in params:
            p.grad *= 1024
        scaled.grad_scale = torch.tensor(1024.0, device=device)
        scaled.found_inf = torch.tensor([float(step == 1)], device=device)
        scaled.step()
        if step != 1:
            unscaled.step()
    assert_same_state(scaled, unscaled)


@pytest.mark.parametrize("betas", [(0, 0.9), (0.9, 0), (0.9, 0.999)])
@pytest.mark.parametrize("eps", [0, 1e-8])
def test_numbers_at_their_limits(device, monkeypatch, betas, eps):
    options = {"first_moment": "fp32", "second_moment": "fp32", "weights": "nearest"}
    got, want = both(device, monkeypatch, torch.float32, betas=betas, eps=eps, **options)
    assert_alike(got, want, torch.float32)
    for optimizer in (got, want):
        assert all(p.isfinite().all() for p in all_parameters(optimizer))


def test_gradients_whose_squares_are_infinite(device, monkeypatch):
    """The weights do not change, and the state becomes NaN or infinite."""
    options = {"first_moment": "fp32", "second_moment": "fp32"}
    found = []
    for why_not in (None, "for comparison"):
        monkeypatch.setattr(
            hardware, "why_no_triton_kernels", lambda device, why_not=why_not: why_not
        )
        (p,) = on(device, parameters(((32,),)))
        p.grad = torch.full_like(p, 1e25)
        optimizer = AdamW([p], weight_decay=0.0, **options)
        optimizer.step()
        assert optimizer.state[p]["exp_avg_sq"].isinf().all()
        found.append(p)
    assert torch.equal(*found)


def test_squares_beyond_the_format_end_training(device, monkeypatch):
    """A group with an infinite second moment gets the scale NaN.

    Its weights become NaN in this step if the update is fused, and in the next step otherwise.
    """
    for why_not in (None, "for comparison"):
        monkeypatch.setattr(
            hardware, "why_no_triton_kernels", lambda device, why_not=why_not: why_not
        )
        (p,) = on(device, parameters(((256,),)))
        p.grad = torch.zeros_like(p)
        p.grad[:128] = 1e25
        optimizer = AdamW([p])
        optimizer.step()
        assert p[:128].isinf().all() == (why_not is None)
        optimizer.step()
        assert not p[:128].isfinite().any()
        assert p[128:].isfinite().all()


@pytest.mark.parametrize("rate", [0.0, 1e-20])
def test_a_rate_of_zero_moves_no_weight(device, rate):
    """Neither does a rate with steps below the last bit of every weight.

    States are updated.
    """
    params = on(device, parameters(((300,), (2, 64))))
    params[0].data[::3] = 0.0
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params, lr=rate, weight_decay=0.0)
    for step in range(2):
        move_gradients(params, step)
        optimizer.step()
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)
        assert (optimizer.state[p]["exp_avg_sq:e4m3+expand"] != 0).any()


@pytest.mark.parametrize("rate", [1e-15, 1e-3, 1e3, -1e-3])
def test_steps_are_proportional_to_the_rate(device, monkeypatch, rate):
    """Weights of zero become the step, exact but for two digits. Schedulers may set any rate."""
    steps = []
    for why_not in (None, "for comparison"):
        monkeypatch.setattr(
            hardware, "why_no_triton_kernels", lambda device, why_not=why_not: why_not
        )
        params = on(device, parameters(((256,),)))
        params[0].data.zero_()
        move_gradients(params, 0)
        AdamW(params, lr=torch.tensor(rate, device=device)).step()
        steps.append(params[0].detach())
    torch.testing.assert_close(*steps, rtol=5e-5, atol=0.0)


def test_nonfinite_gradients_are_not_hidden(device):
    (p,) = on(device, parameters(((300,),)))
    optimizer = AdamW([p])
    for step in range(3):
        move_gradients([p], step)
        if step == 1:
            p.grad[200] = torch.nan
        optimizer.step()
    assert not p[200].isfinite()
    assert p[:128].isfinite().all()


@pytest.mark.long
def test_resuming_is_bit_exact(device):
    params = on(device, parameters(SHAPES, torch.bfloat16))
    straight = on(device, parameters(SHAPES, torch.bfloat16))
    uninterrupted, optimizer = AdamW(straight), AdamW(params)
    run_on(straight, uninterrupted, range(3))
    run_on(params, optimizer, range(1))
    resumed = AdamW(params)
    resumed.load_state_dict(optimizer.state_dict())
    run_on(params, resumed, range(1, 3))
    assert_same_state(resumed, uninterrupted)


def run_on(params, optimizer, steps: range) -> None:
    for step in steps:
        move_gradients(params, step)
        optimizer.step()


@pytest.mark.long
def test_nothing_is_prepared_twice(device, monkeypatch):
    made = []
    original = fused.FusedUpdate.__init__
    monkeypatch.setattr(
        fused.FusedUpdate,
        "__init__",
        lambda *args: made.append(1) or original(*args),
    )
    params = on(device, parameters(((40,), (50,))))
    rate = torch.tensor(0.1)
    optimizer = AdamW(params, lr=rate)
    run_on(params, optimizer, range(2))
    rate.fill_(0.2)
    run_on(params, optimizer, range(2, 3))
    assert len(made) == 1
    params[0].data = params[0].data.clone()
    run_on(params, optimizer, range(3, 4))
    assert len(made) == 2


@pytest.mark.long
def test_no_number_of_a_launch_changes_between_steps(device, monkeypatch):
    """A CUDA graph would repeat these numbers: steps, rates and addresses are read from memory."""
    launched: list[dict[str, Any]] = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **options):
                tensors = [x.data_ptr() for x in args if isinstance(x, torch.Tensor)]
                numbers = [x for x in args if not isinstance(x, torch.Tensor)]
                launched.append({"grid": grid, "numbers": numbers, **options, "tensors": tensors})
                self.kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(fused, "kernel", lambda *args: Recorded(kernel.kernel(*args)))
    params = on(device, parameters(((40,), (2, 64)), torch.bfloat16))
    rate = torch.tensor(0.1, device=device)
    optimizer = AdamW(params, lr=rate, capturable=True)
    move_gradients(params, 0)
    for _ in range(3):
        optimizer.step()
        rate.mul_(0.5)
    table = 5  # factors, which a CUDA graph recomputes into the same memory
    for launch in launched:
        del launch["tensors"][table]
    each = len(launched) // 3
    steps = [launched[i * each : (i + 1) * each] for i in range(3)]
    assert steps[0] == steps[1] == steps[2]
    assert optimizer.state[params[0]]["step"].item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["coat", "fp8-lm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replays_of_cuda_graphs(device, dtype, preset):
    params, eager = (on("cuda", parameters(SHAPES, dtype)) for _ in range(2))
    rate = torch.tensor(0.1, device="cuda")
    options = {"lr": rate, "preset": preset}
    captured, plain = AdamW(params, **options, capturable=True), AdamW(eager, **options)
    for ps in (params, eager):
        move_gradients(ps, 0)
    captured.step()
    plain.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(1, 4):
        rate.fill_(0.1 / step)
        here = on("cpu", parameters(SHAPES, dtype))
        set_gradients(here, step)
        for p, q, source in zip(params, eager, here, strict=True):
            p.grad.copy_(source.grad)
            q.grad.copy_(source.grad)
        graph.replay()
        plain.step()
    assert_same_state(captured, plain)


def test_a_graph_that_saved_the_weights_is_outdated(device):
    """PyTorch's own optimizers invalidate the graph as well."""
    weight = on(device, [nn.Parameter(torch.randn(32, 32))])[0]
    optimizer = AdamW([weight], lr=0.01)
    loss = (torch.ones(2, 32, device=device, requires_grad=True) @ weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("group_size", [16, 1024])
def test_groups_of_any_size(device, monkeypatch, group_size):
    options = {"group_size": group_size, "lr": 0.01}
    assert_alike(*both(device, monkeypatch, torch.bfloat16, **options), torch.bfloat16)


@pytest.mark.long
def test_the_order_of_axes_does_not_matter(device, monkeypatch):
    """The order depends on the version of Triton."""
    results = []
    for part in (0, 1):
        orders = ["[:, None, None]", "[None, :, None]"]
        order = kernel.Axes(orders[1 - part], orders[part], part)
        monkeypatch.setattr(kernel, "axes", lambda order=order: order)
        kernel.kernel.cache_clear()
        params = on(device, parameters(((KERNEL_CHUNK // 50 + 3, 50),), torch.bfloat16))
        results.append(AdamW(params))
        run_on(params, results[-1], range(2))
    assert_same_state(*results)


@pytest.mark.long
def test_parameters_can_be_updated_together_or_alone(device):
    """Updating all parameters at once, or one at a time, gives the same result."""
    together, apart = on(device, parameters(SHAPES)), on(device, parameters(SHAPES))
    one, other = AdamW(together), AdamW(apart)
    for step in range(2):
        move_gradients(together, step)
        one.step()
        move_gradients(apart, step)
        for p in reversed(apart):
            other.update(other.param_groups[0], [p])
    assert_same_state(one, other)


COMPILATION = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8pass.optim.adamw import FUSED
from fp8pass.optim.kernel import LAUNCH, kernel
from fp8pass.optim.group_options import Storage
from fp8pass.optim.muon import FUSED_MOMENTUM, FUSED_WEIGHTS, _divide_storage

POINTERS = {"tables": "i64", "addresses": "i64", "sizes": "i64", "numbers": "i32",
            "parameter_of": "i32", "first_chunk": "i32"}
NUMBERS = {"count": "i32", "seed": "i32", "ALIGNED": "constexpr"}

def compile_kernel(rule, storage, aligned):
    function = kernel(rule, storage, torch.bfloat16, torch.bfloat16)
    numbers = NUMBERS | {name: "fp32" for name in rule.numbers}
    signature = {
        name: numbers.get(name) or "*" + POINTERS.get(name, "fp32") for name in function.arg_names
    }
    source = ASTSource(function, signature, {"ALIGNED": aligned})
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), dict(LAUNCH))
    # Registers allow 12 programs on a multiprocessor; each uses 1 KiB of the shared 228 KiB.
    assert compiled.metadata.shared <= 18432, (rule.name, storage, compiled.metadata.shared)
    return compiled.asm["ptx"]

for first, second, weights, state_rounding, group_size, aligned in [
    ("e4m3+expand", "e4m3+expand", "stochastic", "stochastic", 128, True),
    ("e5m2", "fp16", "fp16", "stochastic", 16, True),
    ("e4m3+expand", "e4m3+expand", "stochastic", "stochastic", 1024, False),
    ("de8+expand", "bf16", "fp32", "stochastic", 128, True),
    ("e4m3+expand", "e4m3+expand", "stochastic", "nearest", 128, True),
    ("de8+expand", "bf16", "fp16", "nearest", 128, True),
]:
    storage = Storage.of({"first_moment": first, "second_moment": second, "weights": weights,
                          "group_size": group_size, "state_rounding": state_rounding})
    ptx = compile_kernel(FUSED, storage, aligned)
    # Two exchanges within four threads for each extreme of a group: the largest and the smallest
    # magnitude of an expanded moment, and the largest magnitude of an FP16 master copy.
    exchanges = ptx.count("shfl.sync.bfly") if aligned and group_size == 128 else None
    print(first, "cp.async.cg" in ptx, "lg2.approx.ftz" in ptx, exchanges)
for name, weights in [("e4m3+expand", "stochastic"), ("int8", "fp16")]:
    storage = Storage.of({"momentum_format": name, "weights": weights, "group_size": 128})
    for rule, part in zip((FUSED_MOMENTUM, FUSED_WEIGHTS), _divide_storage(storage)):
        ptx = compile_kernel(rule, part, True)
        print(rule.name, name, weights, "cp.async.cg" in ptx, ptx.count("shfl.sync.bfly"))
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles in every other test")
def test_compiles_for_a_gpu(device, tmp_path):
    """The interpreter does not test compilation and prefetched vectors."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILATION],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [
        "e4m3+expand True True 8",
        "e5m2 True False None",
        "e4m3+expand False True None",
        "de8+expand False True 4",
        "e4m3+expand True True 8",
        "de8+expand False True 6",
        "muon_momentum e4m3+expand stochastic True 4",
        "muon_weights e4m3+expand stochastic True 0",
        "muon_momentum int8 fp16 True 2",
        "muon_weights int8 fp16 True 2",
    ]
    assert found.stdout.splitlines() == lines
