"""`quantize_frozen`: frozen weights as FP8 data, without another copy."""

from __future__ import annotations

import copy
import io
import logging
from itertools import pairwise

import pytest
import torch
from helpers import COAT_EAGER, Spy, llama, relative, step, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import counts
from optim_helpers import reload_from_file
from torch import nn

import fp8pass
from fp8pass import Config, ConfigError, compat
from fp8pass.dynamo import Backend
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.setup import Setup
from fp8pass.weights import quantize_frozen as quantize_frozen_module
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
WIDTH, RANK = 64, 16


class LoRA(nn.Module):
    """A frozen layer plus the product of two small trained layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Model(nn.Module):
    """Adapters, and frozen weights: shared, of an embedding, of odd size, of an output head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = LoRA(nn.Linear(WIDTH, 128)), LoRA(nn.Linear(128, WIDTH, bias=False))
        self.again = nn.Linear(WIDTH, 128).requires_grad_(False)
        self.again.weight = self.up.base.weight
        self.odd = nn.Linear(WIDTH, 24, bias=False).requires_grad_(False)
        self.lm_head = nn.Linear(WIDTH, 96, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        x = x + self.down(nn.functional.silu(self.up(x)) * self.again(x))
        return self.lm_head(x).float().square().mean() + self.odd(x).float().sum() * 1e-3


def new(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Model:
    return Model().to(device, dtype)


def ids(device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 96, (32,), generator=torch.Generator().manual_seed(0)).to(device)


def config(device: str) -> Config:
    return Config() if device == "cuda" else COAT_EAGER


def stored(model: nn.Module) -> dict[str, bytes]:
    """Return the FP8 data of a model, as bytes."""
    return {
        name: p.fp8_data.view(torch.uint8).cpu().numpy().tobytes()
        for name, p in model.named_parameters()
        if isinstance(p, QuantizedWeight)
    }


# --- quantized layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_linear_layers_are_quantized(device, caplog):
    with caplog.at_level(logging.INFO, "fp8pass"):
        model = fp8pass.quantize_frozen(new(device))
    assert stored(model).keys() == {"up.base.weight", "down.base.weight"}
    assert model.again.weight is model.up.base.weight
    assert model.lm_head.weight is model.embedding.weight
    codes, _ = quantize_rows(new(device).up.base.weight.detach(), torch.bfloat16)
    assert torch.equal(model.up.base.weight.fp8_data.view(torch.uint8), codes.view(torch.uint8))
    (said,) = caplog.messages
    assert said == (
        "quantize_frozen: 3 of 5 frozen layers in FP8, 16.8 KiB instead of 32 KiB; odd in "
        "high precision: weight 24×64: both sizes must be multiples of 16; lm_head in high "
        "precision: it is an output head, or skipped"
    )


def test_narrow_layers_are_not_quantized(caplog):
    """Their GEMMs would not run in FP8."""
    model = nn.Sequential(nn.Linear(1024, 64), nn.Linear(64, 1024), nn.Linear(1024, 1024))
    with caplog.at_level(logging.INFO, "fp8pass"):
        fp8pass.quantize_frozen(model.bfloat16().requires_grad_(False))
    assert stored(model).keys() == {"2.weight"}
    assert (
        "0 in high precision: weight 64×1024: too narrow to gain by FP8; 1 in high precision: "
        in caplog.text
    )


def test_names_contain_no_wrappers(caplog):
    """`torch.compile(block)` adds a prefix that names of checkpoints do not have."""
    model = nn.Sequential(torch.compile(new(), backend="eager"))
    with caplog.at_level(logging.INFO, "fp8pass"):
        fp8pass.quantize_frozen(model, skip="0.down")
    assert stored(model).keys() == {"0._orig_mod.up.base.weight"}
    assert "; 0.down.base in high precision: " in caplog.text


def test_another_call_quantizes_more_layers():
    model = fp8pass.quantize_frozen(new(), skip="down")
    assert stored(model).keys() == {"up.base.weight"}
    before = stored(model)
    fp8pass.quantize_frozen(model)
    assert stored(model).keys() == {"up.base.weight", "down.base.weight"}
    assert stored(model).items() >= before.items()
    assert stored(fp8pass.quantize_frozen(model)) == stored(model)
    model.load_state_dict(model.state_dict())


def test_each_weight_is_freed_before_the_next_is_quantized(monkeypatch):
    """Each weight then takes one byte per element instead of four."""
    model = nn.Sequential(*(nn.Linear(1024, 512, bias=False) for _ in range(4)))
    model.requires_grad_(False)
    whole = [compat.weak_storage(layer.weight) for layer in model]
    left = []

    def count(matrix, dtype):
        left.append(sum(not x.expired() for x in whole))
        return quantize_rows(matrix, dtype)

    monkeypatch.setattr(quantize_frozen_module, "quantize_rows", count)
    fp8pass.quantize_frozen(model)
    assert left == [4, 3, 2, 1]
    assert all(x.expired() for x in whole)
    for layer in model:
        assert layer.weight.fp8_data.nbytes + layer.weight.scales.nbytes == 512 * 1024 + 512 * 4


@pytest.mark.gpu
def test_memory_of_a_gpu():
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
    model.bfloat16().requires_grad_(False).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fp8pass.quantize_frozen(model)
    assert torch.cuda.memory_allocated() - before < -0.99 * 8 * 4096 * 4096
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 4096 * 4096
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    assert x.grad.isfinite().all()


def test_errors_name_the_fix():
    with pytest.raises(ConfigError, match=r"is frozen: call model.requires_grad_\(False\)"):
        fp8pass.quantize_frozen(nn.Sequential(nn.Linear(64, 64)))
    frozen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 7)).half().requires_grad_(False)
    with pytest.raises(
        ConfigError, match="0: it is in float16, not in bfloat16 or float32; 1: weight 7"
    ):
        fp8pass.quantize_frozen(frozen)
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module, got int"):
        fp8pass.quantize_frozen(3)
    with pytest.raises(ConfigError, match="skip must be a module path pattern, or a tuple of"):
        fp8pass.quantize_frozen(new(), skip=3)


# --- training -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_forward_does_not_change_and_gradients_are_close(device, dtype):
    found, eager = [], new(device, dtype)
    for model in (new(device, dtype), fp8pass.quantize_frozen(new(device, dtype))):
        torch._dynamo.reset()
        spy = Spy()
        program = torch.compile(model, backend=Backend(config(device), spy))
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32):
            found.append((step(program, model, (ids(device),)), spy.plan))
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32):
        exact = step(eager, eager, (ids(device),))
    (want, plain), (got, planned) = found
    if device == "cuda" and dtype is torch.float32:  # not rounded to BF16 before
        assert relative(got.outputs[0], want.outputs[0]) < 0.03
    else:
        assert torch.equal(got.outputs[0], want.outputs[0])
    assert planned.saved_bytes <= plain.saved_bytes
    assert [y.fp8 for y in planned.linears] == [y.fp8 for y in plain.linears]
    assert got.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        error = relative(want.gradients[name], gradient)
        assert relative(got.gradients[name], gradient) < 1.5 * error + 0.01, name


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_place", [True, False])
def test_training_adapters_does_not_change_weights(device, in_place):
    torch._dynamo.reset()
    model = fp8pass.quantize_frozen(new(device))
    before = stored(model)
    program = model
    if in_place:
        model.compile(backend=fp8pass.backend(config(device)))
    else:
        program = torch.compile(model, backend=fp8pass.backend(config(device)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    losses = []
    for i in range(8):
        model.train(i != 4)
        loss = program(ids(device))
        losses.append(loss.item())
        if i == 4:
            with torch.no_grad():
                losses[-1] = program(ids(device)).item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(b < a for a, b in pairwise(losses))
    assert stored(model) == before


@pytest.mark.parametrize("device", DEVICES)
def test_eager_models_compute_with_rounded_weights(device):
    model = fp8pass.quantize_frozen(new(device))
    rounded = new(device)
    rounded.load_state_dict(model.state_dict())
    want, got = (step(each, each, (ids(device),)) for each in (rounded, model))
    assert torch.equal(got.outputs[0], want.outputs[0])
    for name, gradient in want.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


@pytest.mark.long
def test_kernels_do_not_quantize_frozen_weights(graphs):
    """The forward quantizes only inputs."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.SiLU(), nn.Linear(128, 64, bias=False))
    model = model.bfloat16().requires_grad_(False)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    for each in (model, fp8pass.quantize_frozen(copy.deepcopy(model))):
        torch._dynamo.reset()
        step(torch.compile(each, backend="fp8pass"), each, (x,))
    plain, _, frozen, _ = (counts([g])["quantize"] + counts([g])["rows"] for g in graphs)
    assert frozen < plain


# --- copies, moves and checkpoints --------------------------------------------------------------


def check_same(model: nn.Module, other: nn.Module) -> None:
    assert stored(model) == stored(other) != {}
    assert all(isinstance(p, nn.Parameter) for p in other.parameters())
    assert not other.up.base.weight.requires_grad
    assert other.again.weight is other.up.base.weight
    assert other.state_dict().keys() == model.state_dict().keys()


def test_copies_and_pickles():
    model = fp8pass.quantize_frozen(new())
    other = copy.deepcopy(model)
    check_same(model, other)
    other.load_state_dict(new().state_dict() | {"down.base.weight": torch.zeros(WIDTH, 128)})
    assert stored(other) != stored(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    check_same(model, torch.load(file, weights_only=False))


def test_processes_can_share_a_model():
    model = fp8pass.quantize_frozen(new())
    before = stored(model)
    model.share_memory()
    assert stored(model) == before
    assert all(p.is_shared() for p in model.parameters())


@pytest.mark.parametrize("swap", [False, True])
def test_moves_and_other_dtypes(swap):
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model = fp8pass.quantize_frozen(new())
        weight, before = model.up.base.weight, copy.deepcopy(model)
        model.float()
        assert model.up.base.weight is weight
        assert weight.dtype is torch.float32
        check_same(before, model)
        assert model.state_dict()["up.base.weight"].dtype is torch.float32
        model.to(torch.bfloat16)
        check_same(before, model)
        model.load_state_dict(before.state_dict())
        check_same(before, model)
        model.to("meta")
        assert model.up.base.weight.fp8_data.is_meta
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.gpu
def test_moves_to_a_gpu_and_back():
    model = fp8pass.quantize_frozen(new())
    before = copy.deepcopy(model)
    program = torch.compile(model, backend="fp8pass")
    for _ in range(2):
        model.cuda()
        assert model.up.base.weight.fp8_data.is_cuda
        check_same(before, model)
        assert model.state_dict()["up.base.weight"].device.type == "cpu"
        program(ids("cuda")).backward()
        model.cpu()
        check_same(before, model)


@pytest.mark.parametrize("device", DEVICES)
def test_state_dicts_contain_rounded_weights(device):
    model, plain = fp8pass.quantize_frozen(new(device)), new()
    state = reload_from_file(model.state_dict())
    assert {n: (x.shape, x.dtype) for n, x in state.items()} == {
        n: (x.shape, x.dtype) for n, x in plain.state_dict().items()
    }
    assert 0 < relative(state["up.base.weight"], plain.up.base.weight) < 0.04
    plain.load_state_dict(state)  # an unquantized model
    model.load_state_dict(state)
    assert stored(fp8pass.quantize_frozen(plain)) == stored(model)  # rounded once
    other = {n: x * 2 if x.ndim == 2 else x for n, x in state.items()}
    model.load_state_dict(reload_from_file(other))
    assert torch.equal(model.down.base.weight.dequantize().cpu(), other["down.base.weight"])
    model.load_state_dict(new(device).state_dict(), assign=True)
    assert stored(model) == {}


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    change=st.sampled_from(["copy_", "data.copy_", "data =", "load", "number", "lerp_", "part ="]),
    source=st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.float16]),
    std=st.sampled_from([1e-4, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_writes_update_the_fp8_data_or_are_refused(rows, columns, dtype, change, source, std, seed):
    """Each way to write to a weight quantizes the values, or raises an error."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 16 * rows, 16 * columns
    layer = nn.Linear(*sizes[::-1], bias=False, dtype=dtype).requires_grad_(False)
    model = fp8pass.quantize_frozen(nn.Sequential(layer))
    view, before = layer.weight.detach(), layer.weight.fp8_data.clone()
    values = (torch.randn(sizes, dtype=torch.float64, generator=generator) * std).to(source)
    with torch.no_grad():
        if change == "copy_":
            layer.weight.copy_(values)
        elif change == "data.copy_":
            layer.weight.data.copy_(values)
        elif change == "data =":
            layer.weight.data = values
        elif change == "load":
            model.load_state_dict({"0.weight": values})
        elif change == "number":
            values = values[:1, :1].expand(sizes)
            layer.weight.copy_(values[0, 0])
        else:
            write = layer.weight.__setitem__ if change == "part =" else layer.weight.data.lerp_
            with pytest.raises(
                RuntimeError,
                match=r"no longer exist.*load the model in 16 bits.*load_state_dict",
            ):
                write(slice(1, 3) if change == "part =" else values.to(dtype), 0.5)
            assert torch.equal(view.fp8_data.view(torch.uint8), before.view(torch.uint8))
            return
    codes, scales = quantize_rows(values.bfloat16(), torch.bfloat16)
    for weight in (layer.weight, view):
        assert torch.equal(weight.fp8_data.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(weight.scales, scales)
    x = torch.eye(sizes[1], dtype=dtype)
    assert torch.equal(model(x), (codes.float() * scales).to(dtype).T)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_reads_new_weights(device):
    model = fp8pass.quantize_frozen(new(device))
    program = torch.compile(model, backend=fp8pass.backend(config(device)))
    program(ids(device))
    state = {n: x * 2 if "base" in n else x for n, x in model.state_dict().items()}
    fresh = new(device)
    for each in (model, fresh):
        each.load_state_dict(state)
    got = program(ids(device))
    fresh = torch.compile(fp8pass.quantize_frozen(fresh), backend=fp8pass.backend(config(device)))
    assert torch.equal(got, fresh(ids(device)))


def test_weights_can_be_copied_and_added_to_tensors():
    """Examples are an average of weights, a copy, and a sum of several tensors."""
    weight = fp8pass.quantize_frozen(new()).up.base.weight
    values, average = weight.dequantize(), torch.zeros(weight.shape, dtype=weight.dtype)
    average.copy_(weight)
    assert torch.equal(average, values)
    average.add_(weight)
    torch._foreach_add_([average], [weight.detach()])
    assert torch.equal(average, 2 * values + values)
    with pytest.raises(RuntimeError, match="exact values no longer exist"):
        torch._foreach_mul_([average, weight.detach()], 2.0)


def test_explain_does_not_count_quantized_weights_as_activations():
    for model in (new(), fp8pass.quantize_frozen(new())):
        torch._dynamo.reset()
        model.compile(backend="fp8pass", options={"compiler": "eager"})
        assert fp8pass.explain(model, ids()).outside_bytes == 0


def test_fit_counts_fp8_data():
    model = fp8pass.quantize_frozen(new())
    here, _ = Parameters(model).place(Setup(), 1)
    held = [p for p in model.parameters() if not isinstance(p, QuantizedWeight)]
    for weight in (model.up.base.weight, model.down.base.weight):
        held += [weight.fp8_data, weight.scales]
    assert here.weights == sum(x.nbytes for x in held)


@pytest.mark.long
def test_adapters_of_peft():
    """`quantize_frozen` may be called before or after `get_peft_model`."""
    peft = pytest.importorskip("peft")
    found, lora = [], peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    for first in (True, False):
        torch._dynamo.reset()
        model = llama().bfloat16().requires_grad_(False)
        if first:
            fp8pass.quantize_frozen(model)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, lora)
        if not first:
            fp8pass.quantize_frozen(model)
        found.append(list(stored(model).values()))
        program = torch.compile(model, backend=Backend(COAT_EAGER))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
        losses = []
        for _ in range(3):
            losses.append(program(input_ids=tokens(), labels=tokens()).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[2] < losses[1] < losses[0]
        assert list(stored(model).values()) == found[-1]
        assert all("base_layer" not in name for name in peft.get_peft_model_state_dict(model))
    assert len(found[0]) == 7
    assert found[0] == found[1]


@pytest.mark.long
def test_a_monitor_reports_quantized_inputs():
    model, monitor = fp8pass.quantize_frozen(new()), fp8pass.Monitor(every=1)
    program = torch.compile(model, backend=fp8pass.backend(COAT_EAGER, monitor=monitor))
    program(ids()).backward()
    monitor.step()
    assert {row.tensor for row in monitor.latest} >= {"input"}
