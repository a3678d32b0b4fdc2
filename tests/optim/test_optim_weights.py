"""`offload_weights`: weights in host memory, with FP8 data on the device."""

from __future__ import annotations

import copy
import io
from functools import cache

import pytest
import torch
from optim_helpers import reload_from_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8pass
from fp8pass import hardware
from fp8pass.optim import AdamW, offload_weights, step_in_backward
from fp8pass.option_checks import ConfigError
from fp8pass.runtime.arena import Arena
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
BATCH, WIDTH = 32, 64


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.STAGED_BYTES", 1 << 18)
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 960), nn.Linear(960, WIDTH, bias=False)
        self.odd = nn.Linear(WIDTH, 24, bias=False)
        self.again = nn.Linear(WIDTH, 960)
        self.again.weight = self.up.weight
        self.lm_head = nn.Linear(WIDTH, 100, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        x = x + self.down(nn.functional.silu(self.again(x)))
        return self.lm_head(x).float().square().mean() + self.odd(x).float().sum() * 1e-3


def ids(device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (BATCH,), generator=generator).to(device)


def new(device: str) -> Model:
    return offload_weights(Model().bfloat16(), device)


@pytest.mark.parametrize("device", DEVICES)
def test_large_weights_are_quantized(device):
    model = new(device)
    found = {n for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    assert found == {"up.weight", "down.weight"}
    assert model.again.weight is model.up.weight
    assert model.lm_head.weight is model.embedding.weight
    assert all(p.device.type == device for p in model.parameters())
    assert model.up.weight.source.device.type == "cpu"
    assert model.up.weight.requires_grad
    codes, scales = quantize_rows(Model().bfloat16().up.weight.detach().to(device), torch.bfloat16)
    assert torch.equal(model.up.weight.fp8_data.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(model.up.weight.scales, scales)


@cache
def backend(device: str, recipe: str):
    """Return a backend. Models that share it share compiled code, and kernels that Inductor tuned.

    Without sharing, kernels that were tuned twice may sum in different orders.
    """
    compiler = "inductor" if device == "cuda" else "eager"
    return fp8pass.backend(fp8pass.Config.recipe(recipe, compiler=compiler))


def train(model: nn.Module, device: str, backwards: int, *, offload, accumulate: int, recipe):
    """Return the losses and the model's optimizer."""
    optimizer = AdamW(model.parameters(), lr=0.01, offload=offload)
    step_in_backward(model, optimizer, accumulate=accumulate)
    program = torch.compile(model, backend=backend(device, recipe))
    losses = []
    for step in range(backwards):
        loss = program(ids(device, step))
        loss.backward()
        losses.append(loss.item())
    return losses, optimizer


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_where_weights_are_changes_no_number(device, recipe, monkeypatch):
    """The reference has sources, states and sums on the device, and updates whole parameters."""
    offload = ("states", "gradients")
    model = new(device)
    backwards = 40 if device == "cuda" else 12
    got, _ = train(model, device, backwards, offload=offload, accumulate=2, recipe=recipe)

    def on_device(self, shape, dtype):
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(Arena, "empty", on_device)
    monkeypatch.setattr("fp8pass.optim.offload.STAGED_BYTES", 1 << 22)
    there = new(device)
    want, _ = train(there, device, backwards, offload=(), accumulate=2, recipe=recipe)
    assert got == want
    for (name, x), (_, y) in zip(
        model.state_dict().items(), there.state_dict().items(), strict=True
    ):
        assert torch.equal(x.cpu(), y.cpu()), name


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_it_trains_as_with_weights_on_the_device(device):
    plain = Model().bfloat16().to(device)
    want, _ = train(plain, device, 20, offload=(), accumulate=1, recipe="coat")
    model = new(device)
    got, _ = train(model, device, 20, offload=("states",), accumulate=1, recipe="coat")
    assert got[0] == want[0]  # the forward uses the same FP8 data
    assert got[-1] < 0.5 * got[0]
    assert abs(got[-1] - want[-1]) < 0.1 * got[0]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_cpu_waits_for_no_gradient(accumulate):
    """Otherwise the GPU would be idle until the backward of the next layer is launched."""
    model = new("cuda")
    optimizer = AdamW(model.parameters(), lr=0.01, offload=("states", "gradients"))
    step_in_backward(model, optimizer, accumulate=accumulate)
    for step in range(2 * accumulate):
        model(ids("cuda", step)).backward()
    losses = [model(ids("cuda", step)) for step in range(accumulate)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in losses:
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 3])
def test_few_gradients_wait_for_their_turn(accumulate):
    """This holds even if the whole backward is launched before the GPU begins it."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(32)]
    model = nn.Sequential(*layers).bfloat16().cuda()
    optimizer = AdamW(model.parameters(), offload=("states", "gradients"))
    step_in_backward(model, optimizer, accumulate=accumulate)
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device="cuda")
    for backward in range(2 * accumulate):
        loss = model(x).sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda._sleep(1 << 28)
        loss.backward()
        if backward >= accumulate:
            assert torch.cuda.max_memory_allocated() - before < (2 + 3) * layers[0].weight.nbytes
    torch.cuda.synchronize()


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_fp8_data_follow_the_weights(device):
    model = new(device)
    train(model, device, 2, offload=(), accumulate=1, recipe="coat")
    for p in (model.up.weight, model.down.weight):
        codes, scales = quantize_rows(p.source.to(device), torch.bfloat16)
        assert torch.equal(p.fp8_data.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(p.scales, scales)


@pytest.mark.parametrize("device", DEVICES)
def test_changed_rows_are_requantized(device, monkeypatch):
    """The kernel, or its interpreter on a CPU, writes over the previous FP8 data."""
    pytest.importorskip("triton")
    weight = new(device).up.weight
    before, rows = weight.dequantize(), torch.randn(64, WIDTH, device=device).bfloat16()
    codes, scales = quantize_rows(rows, torch.bfloat16)
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    weight.requantize(128, rows)
    assert torch.equal(weight.fp8_data[128:192].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weight.scales[128:192], scales)
    for part in (slice(0, 128), slice(192, None)):
        assert torch.equal(weight.dequantize()[part], before[part])


@pytest.mark.parametrize("device", DEVICES)
def test_state_dicts_have_the_weights(device):
    model, plain = new(device), Model().bfloat16()
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, x in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), x)
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    model.load_state_dict(reload_from_file(other.state_dict()))
    assert torch.equal(model.down.weight.source, other.down.weight)
    assert torch.equal(
        model.down.weight.dequantize().cpu(), new(device).down.weight.dequantize().cpu() * 2
    )
    Model().bfloat16().load_state_dict(reload_from_file(model.state_dict()))


def test_weights_that_cannot_be_offloaded_are_refused():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(
        ConfigError, match=r"0 and 1 more: it is in float32; call model.bfloat16\(\)"
    ):
        offload_weights(layers, "cpu")
    with pytest.raises(ConfigError, match=r"the device that the model trains on.*got 'gpu'"):
        offload_weights(nn.Linear(64, 64).bfloat16(), "gpu")
    with pytest.raises(ConfigError, match="the model has no linear layer"):
        offload_weights(nn.Conv1d(2, 2, 2), "cpu")
    with pytest.raises(ConfigError, match=r"it is on the meta device; call model.to_empty"):
        offload_weights(nn.Sequential(nn.Linear(64, 64, device="meta")).bfloat16(), "cpu")
    with pytest.raises(ConfigError, match="it is already quantized or offloaded"):
        offload_weights(new("cpu"), "cpu")
    with pytest.raises(ConfigError, match="it is an output head, or skipped"):
        offload_weights(nn.Sequential(nn.Linear(64, 64)).bfloat16(), "cpu", skip=["0"])


def check_exact(weight: QuantizedWeight, want: torch.Tensor) -> None:
    """Check the source of a weight, the values that operators read, and the FP8 data."""
    assert torch.equal(weight.source, want)
    assert torch.equal(weight + 0, want)
    codes, scales = quantize_rows(want, torch.bfloat16)
    assert torch.equal(weight.fp8_data.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weight.scales, scales)


def swap_in_and_out(model: Model) -> None:
    """Evaluate with other weights, as averages are swapped in and out."""
    saved = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.zero_()
    for p, values in zip(model.parameters(), saved, strict=True):
        p.data.copy_(values)


def flatten_and_scale(model: Model) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(2 * vector, model.parameters())


def write_to_state_dict(model: Model) -> None:
    for values in {id(x): x for x in model.state_dict().values()}.values():
        values.mul_(2)


WRITES = {
    "itself": (lambda m: m.up.weight.copy_(m.up.weight), lambda w: w),
    "mul_": (lambda m: m.up.weight.mul_(2), lambda w: 2 * w),
    "lerp_": (
        lambda m: m.up.weight.lerp_(torch.ones_like(m.up.weight), 0.5),
        lambda w: (w + 1) / 2,
    ),
    "data": (lambda m: setattr(m.up.weight, "data", m.up.weight.data * 2), lambda w: 2 * w),
    "out": (lambda m: torch.mul(m.up.weight, 2, out=m.up.weight.detach()), lambda w: 2 * w),
    "foreach": (lambda m: torch._foreach_mul_([m.up.weight, torch.ones(3)], 2.0), lambda w: 2 * w),
    "initialize": (lambda m: nn.init.zeros_(m.up.weight), torch.zeros_like),
    "swap": (swap_in_and_out, lambda w: w),
    "flatten": (flatten_and_scale, lambda w: 2 * w),
    "state dict": (write_to_state_dict, lambda w: 2 * w),
    "round trip": (lambda m: m.float().bfloat16(), lambda w: w),
    "copy": (lambda m: copy.deepcopy(m).up.weight.zero_(), lambda w: w),
    "dtype": (lambda m: m.up.weight.float().zero_(), lambda w: w),
}


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_writes_reach_the_exact_weight(name):
    write, expected = WRITES[name]
    model, before = new("cpu"), Model().bfloat16().up.weight.detach()
    check_exact(model.up.weight, before)
    write(model)
    check_exact(model.up.weight, expected(before))
    assert model.again.weight is model.up.weight


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w[0].zero_(),
        lambda w: w.view(-1).mul_(2),
        lambda w: w.t()[:3].copy_(torch.ones(())),
        lambda w: w.chunk(2)[1].add_(1),
        lambda w: w.__setitem__(0, 0.0),
        lambda w: w.t_(),
        lambda w: setattr(w, "data", w.float() * 2),
        lambda w: setattr(w, "data", w[:1]),
    ],
)
@torch.no_grad()
def test_writes_that_would_be_lost_are_refused(write):
    model, before = new("cpu"), Model().bfloat16().up.weight.detach()
    with pytest.raises(RuntimeError, match="quantized weight"):
        write(model.up.weight)
    check_exact(model.up.weight, before)


@torch.no_grad()
def test_averages_are_exact():
    model = new("cpu")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model.up.weight.mul_(2)
    for _ in range(2):  # the first update copies
        average.update_parameters(model)
    check_exact(average.module.up.weight, model.up.weight.source)
    average.module.up.weight.zero_()
    assert model.up.weight.source.any()


READS = {
    "copy_": lambda x, w: x.copy_(w),
    "add_": lambda x, w: x.add_(w, alpha=2),
    "lerp_": lambda x, w: x.lerp_(w, 0.5),
    "out": lambda x, w: torch.mul(w, 2, out=x),
    "cat": lambda x, w: torch.cat([w[:480], w[480:]], out=x),
    "part": lambda x, w: x[1:].copy_(w[1:]),
    "view": lambda x, w: x.view(-1).copy_(w.view(-1)),
}


@pytest.mark.parametrize("name", READS)
def test_writes_to_other_tensors_read_the_weight(name):
    weight = new("cpu").up.weight
    plain, found = (torch.ones(weight.shape, dtype=weight.dtype) for _ in range(2))
    with torch.no_grad():
        READS[name](plain, weight.source)
        READS[name](found, weight)
    assert torch.equal(found, plain)


def test_views_can_be_saved():
    weight = new("cpu").up.weight
    loaded = reload_from_file(weight.detach().view(-1))
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, weight.source.view(-1))


def test_views_are_read_once():
    """The first read of a view copies the values, for all parts of the weight at once."""
    weight = new("cpu").up.weight
    with torch.no_grad():
        first, second = weight.chunk(2)
        assert first.shape == (480, WIDTH)
        weight.fill_(3.0)
        assert bool((first == 3.0).all())
        weight.fill_(4.0)
        assert bool((second == 3.0).all())


@torch.no_grad()
def test_pickles_have_fp8_data_of_the_weights():
    model = new("cpu")
    model.state_dict()["up.weight"].mul_(2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    check_exact(torch.load(file, weights_only=False).up.weight, model.up.weight.source)


def test_eager_layers_use_exact_weights():
    model, plain = new("cpu"), Model().bfloat16()
    for each in (model, plain):
        each(ids("cpu")).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    torch.optim.AdamW(model.parameters(), 0.1).step()
    torch.optim.AdamW(plain.parameters(), 0.1).step()
    check_exact(model.up.weight, plain.up.weight.detach())


@pytest.mark.long
def test_compiled_code_sees_writes_to_a_state_dict():
    model = new("cpu")
    program = torch.compile(model, backend=fp8pass.backend(fp8pass.Config(compiler="eager")))
    program(ids("cpu"))
    with torch.no_grad():
        model.state_dict()["down.weight"].zero_()
        changed = program(ids("cpu"))
    fresh = new("cpu")
    fresh.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    program = torch.compile(fresh, backend=fp8pass.backend(fp8pass.Config(compiler="eager")))
    with torch.no_grad():
        assert torch.equal(program(ids("cpu")), changed)


@torch.no_grad()
def test_weights_that_exist_only_in_fp8_are_not_updated():
    """Most updates are smaller than the distance of two FP8 values, and would be lost silently."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    fp8pass.quantize_frozen(model, skip="1")
    model.requires_grad_()
    optimizer = AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    before, other = model[0].weight.fp8_data.clone(), model[1].weight.clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    with pytest.raises(
        RuntimeError, match=r"64, 64\) exists only in FP8.*skip= of quantize_frozen"
    ):
        optimizer.step()
    assert torch.equal(model[0].weight.fp8_data.view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(model[1].weight, other)
