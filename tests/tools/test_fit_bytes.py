"""`fit`: predicted bytes equal the bytes that training takes."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fit_helpers import STAY, VOCABULARY, Layered, make_on_cpu, make_on_meta, nbytes, trace_step
from helpers import llama
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fp8pass
from fp8pass import Config, compat, explain, fit
from fp8pass.optim import AdamW, offload_weights, step_in_backward
from fp8pass.tools.fitting.candidates import STATE_PLACES
from fp8pass.tools.fitting.parameters import Parameters, Standing
from fp8pass.tools.fitting.setup import Setup
from fp8pass.tools.fitting.step import compute_own_loss, record_step
from fp8pass.tools.fitting.traced import WHOLE, TracedLayers, TracedStep, find_layers, trace
from fp8pass.tools.saved_bytes import saved_bytes


@pytest.fixture(scope="module")
def by_blocks() -> TracedStep:
    return trace_step(make_on_meta()[0], ("blocks.0", "blocks.1"), make_on_meta()[1])


# --- compared with PyTorch's allocations ----------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("config", [Config(), Config.recipe("agoq", memory_budget=0.6)])
def test_saved_bytes_equal_explain_and_autograd(config):
    model, ids = make_on_cpu(layers=1)
    (planned,) = trace_step(model, WHOLE, ids).planned(config).values()
    assert planned.plan.saved_bytes == explain(model, ids, config=config).saved_bytes
    torch._dynamo.reset()
    eager = Config(**{**vars(config), "compiler": "eager"})
    program = torch.compile(model, backend=fp8pass.backend(eager))
    assert planned.kept + nbytes(ids) == saved_bytes(program, ids)
    assert planned.backward[0].saved == planned.kept


def test_eager_parts_count_what_autograd_saves():
    model, ids = make_on_cpu()
    moments = trace_step(model, (), ids).moments(Config(), STAY)
    between = next(m for m in moments if m.backward)
    loss = 4
    assert between.activations + nbytes(ids) == saved_bytes(model, ids) + loss
    assert between.saved == between.gradients == between.workspace == 0


def test_gradients_at_the_end_are_all_or_one_block(by_blocks):
    model, _ = make_on_meta()
    most = {held: max(m.gradients for m in by_blocks.moments(Config(), held)) for held in (STAY, 0)}
    assert most[STAY] == nbytes(*model.parameters())
    largest = nbytes(*model.blocks[0].parameters())  # of one block at a time
    assert most[0] == pytest.approx(largest, rel=0.1)


def test_gradients_that_wait_for_the_link_are_held(by_blocks):
    most = [max(m.gradients for m in by_blocks.moments(Config(), held)) for held in (0, 1 << 20)]
    assert most[0] < most[1] <= max(m.gradients for m in by_blocks.moments(Config(), STAY))


def test_inputs_that_blocks_share_count_once(by_blocks):
    """The input of a block is the output of the previous block, and must count once."""
    end = max(by_blocks.moments(Config(save_format="none"), STAY), key=lambda m: m.activations)
    of_stream = 4 * 64 * 256 * 2
    logits = 4 * 64 * VOCABULARY * (2 + 4 + 4)
    assert end.activations < 4 * of_stream + logits


def test_bytes_of_states_equal_the_optimizers():
    model, ids = make_on_cpu()
    optimizer = AdamW(model.parameters())
    model(ids).backward()
    optimizer.step()
    states = (x for state in optimizer.state.values() for n, x in state.items() if n != "step")
    here, host = Parameters(model).place(Setup(), 1)
    assert here.states == pytest.approx(nbytes(*states), rel=0.001)
    assert host == Standing()


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [2, 9])  # 8 bits, 16 bits
def test_bytes_of_sums_equal_the_optimizers(accumulate):
    model, ids = make_on_cpu()
    attached = step_in_backward(model, AdamW(model.parameters()), accumulate=accumulate)
    model(ids).backward()
    pieces = [piece for a in attached.accumulated.values() for piece in a.pieces]
    sums = [x for piece in pieces for x in piece.stored if x is not None]
    here, _ = Parameters(model).place(Setup(step_in_backward=True), accumulate)
    assert here.sums == pytest.approx(nbytes(*sums), rel=0.001)


def test_bytes_of_quantized_weights_equal_offload_weights():
    model, _ = make_on_cpu()
    here, host = Parameters(model).place(Setup(step_in_backward=True, offload=("weights",)), 1)
    moved = offload_weights(model, "cpu")
    inner = [p for p in moved.parameters() if hasattr(p, "fp8_data")]
    others = [p for p in moved.parameters() if not hasattr(p, "fp8_data")]
    assert len(inner) == 4
    assert here.weights == nbytes(*others, *(x for p in inner for x in (p.fp8_data, p.scales)))
    assert host.weights == nbytes(*(p.source for p in inner))


@given(place=st.sampled_from(STATE_PLACES), accumulate=st.integers(1, 20))
def test_gpu_and_host_bytes_add_up_for_every_offload(place, accumulate):
    parameters = Parameters(make_on_meta()[0])
    in_backward, offload = place
    setup = Setup(step_in_backward=in_backward, offload=offload)
    here, host = parameters.place(setup, accumulate)
    all_here, none = parameters.place(Setup(step_in_backward=in_backward), accumulate)
    assert none == Standing()
    assert here.states + host.states == pytest.approx(all_here.states)
    assert here.sums + host.sums == pytest.approx(all_here.sums)
    fp8_data = 0.5 * host.weights
    assert here.weights + host.weights == pytest.approx(all_here.weights + fp8_data, rel=0.02)
    moved = set(offload) - ({"gradients"} if accumulate == 1 else set())
    assert (host != Standing()) == bool(moved)


@pytest.mark.long
def test_hugging_face_layers_are_traced_without_a_mask():
    """transformers omits the mask if positions show whole sequences. Positions are not fake."""
    with torch.device("meta"):
        model, ids = llama(num_hidden_layers=2), torch.empty(2, 16, dtype=torch.long)
    values = ((), {"input_ids": ids, "labels": ids, "use_cache": False})
    paths = ("model.layers.0", "model.layers.1")
    (region,) = record_step(model, paths, values, compute_own_loss).regions
    nodes = [n for n in region.gm.graph.nodes if "attention" in str(n.target)]
    forward = next(n for n in nodes if "backward" not in str(n.target))
    assert True in forward.args  # is_causal
    assert "attn_mask" not in forward.kwargs


def in_bf16(run, batch, device="cuda"):
    with torch.autocast(device, torch.bfloat16):
        return run(*batch)


class Autocast(Layered):
    """A model with autocast inside of its forward."""

    def forward(self, ids):
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(ids)


@pytest.mark.long
def test_autocast_for_a_gpu_applies_to_the_simulation_on_a_cpu():
    with torch.device("meta"):
        model, inside, ids = Layered(1), Autocast(1), torch.empty(4, 64, dtype=torch.long)
    unpatched = torch.autocast.__init__

    def bytes_of(model, loss_fn=None):
        return fit(model, ids, gpu="16GiB", host="8GiB", loss_fn=loss_fn).shown.gpu

    on_gpu = bytes_of(model, in_bf16)
    assert on_gpu == bytes_of(model, lambda run, batch: in_bf16(run, batch, "cpu"))
    assert on_gpu["saved"] == bytes_of(inside)["saved"] < bytes_of(model)["saved"]
    assert torch.autocast.__init__ is unpatched


def test_autocast_of_other_threads_is_not_redirected():
    with compat.autocast_for_cpu(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(torch.autocast, "cuda", torch.bfloat16, enabled=False).result()
        with compat.autocast_for_cpu():
            assert torch.autocast("cuda", enabled=False).device == "cpu"
        assert torch.autocast("cuda").fast_dtype == torch.float16
        assert other.device == "cuda"


# --- many equal layers ---------------------------------------------------------------------------


@pytest.mark.long
def test_many_equal_layers_are_extrapolated_from_few(monkeypatch):
    model, ids = make_on_meta(layers=5)
    full = trace_step(model, WHOLE, ids)
    monkeypatch.setattr("fp8pass.tools.fitting.traced.WORTHWHILE", 5)
    deep = trace(model, (), ((ids,), {}), compute_own_loss)
    assert isinstance(deep, TracedLayers)
    assert len(model.blocks) == 5
    for held in (STAY, 0):
        peaks = [max(t.moments(Config(), held), key=lambda m: m.total) for t in (deep, full)]
        assert vars(peaks[0]) == vars(peaks[1])
    for got, want in zip(deep.work(Config()), full.work(Config()), strict=True):
        assert vars(got) == pytest.approx(vars(want))
    budget = Config(memory_budget=0.6)
    peaks = [max(m.total for m in t.moments(budget, STAY)) for t in (deep, full)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


def test_layers_that_differ_are_all_traced():
    model, _ = make_on_meta(layers=8)
    assert find_layers(model).count == 8
    model.blocks[3].mlp.requires_grad_(False)
    assert find_layers(model) is None


class ByNumber(Layered):
    """Needs the number of layers that it was created with."""

    def forward(self, ids):
        x = self.embed(ids)
        for i in range(8):
            x = self.blocks[i].norm(x)
        return x.float().square().mean()


def test_a_model_that_does_not_run_with_fewer_layers_is_traced_whole():
    with torch.device("meta"):
        model, ids = ByNumber(8), torch.empty(4, 64, dtype=torch.long)
    before = list(model.named_modules())
    assert isinstance(trace(model, (), ((ids,), {}), compute_own_loss), TracedStep)
    assert list(model.named_modules()) == before


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("place", [(False, ()), (True, ()), (True, ("states",))], ids=str)
def test_the_predicted_peak_is_right(place):
    """Blocks are large compared with rounding. Memory of other tests is subtracted."""
    torch._dynamo.reset()
    x = torch.ones(16, 16, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS allocates a workspace for each thread
    del x
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model, ids = Layered(4, hidden=2048).bfloat16(), torch.empty(8, 1024, dtype=torch.long)
    step = record_step(model, [f"blocks.{i}" for i in range(4)], ((ids,), {}), compute_own_loss)
    parameters, setup = Parameters(model), Setup(Config(), *place)
    here, _ = parameters.place(setup, 1)
    moments = TracedStep(step).moments(Config(), parameters.held_gradients(setup, 1))
    predicted = sum(vars(here).values()) + max(m.total for m in moments)

    names = {"fp8pass": fp8pass, "torch": torch, "model": model.to_empty(device="cuda")}
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    exec(setup.lines(1, ("blocks.*",)), names)
    ids = torch.randint(VOCABULARY, (8, 1024), device="cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(ids).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    assert predicted == pytest.approx(measured, rel=0.05)
