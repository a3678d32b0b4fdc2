"""fit: predicted bytes are those that training takes, and what it says can be pasted."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers import MLP, llama
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fp8pass
from fp8pass import Config, ConfigError, compat, explain, fit
from fp8pass.dialect.gpus import GPUS, Work
from fp8pass.inspect.fitting.candidates import PLACES, Candidates
from fp8pass.inspect.fitting.deep import WHOLE, TracedLayers, find_layers, trace
from fp8pass.inspect.fitting.fitting import _notes_on_heads
from fp8pass.inspect.fitting.gpu import find_gpu
from fp8pass.inspect.fitting.parameters import Parameters
from fp8pass.inspect.fitting.replay import KINDS, Fate
from fp8pass.inspect.fitting.setup import Setup, config_text
from fp8pass.inspect.fitting.step import own_loss, record_step
from fp8pass.inspect.fitting.timing import step_seconds
from fp8pass.inspect.fitting.traced import TracedStep
from fp8pass.inspect.saved_bytes import saved_bytes
from fp8pass.optim import AdamW, attach
from fp8pass.optim.weights import offload_weights
from fp8pass.plan import Head
from fp8pass.saving.budget import BudgetProblem
from fp8pass.saving.planner import BudgetTooSmall

VOCABULARY = 640
STAY = Fate(stay=True)
MIB = 1 << 20


class Layered(nn.Module):
    """Equal blocks between an embedding and an output head; gives the loss."""

    def __init__(self, layers: int = 2, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), ids.flatten())


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(hidden), MLP((hidden, 2 * hidden, hidden))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def on_meta(layers: int = 2, batch: int = 4, seq: int = 64) -> tuple[Layered, Tensor]:
    with torch.device("meta"):
        return Layered(layers).bfloat16(), torch.empty(batch, seq, dtype=torch.long)


def on_cpu(layers: int = 2) -> tuple[Layered, Tensor]:
    torch.manual_seed(0)
    return Layered(layers).bfloat16(), torch.randint(VOCABULARY, (4, 64))


def recorded(model, paths, ids) -> TracedStep:
    return TracedStep(record_step(model, paths, ((ids,), {}), own_loss))


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


@pytest.fixture(scope="module")
def by_blocks() -> TracedStep:
    return recorded(on_meta()[0], ("blocks.0", "blocks.1"), on_meta()[1])


@pytest.fixture(scope="module")
def fitted() -> fp8pass.Fit:
    """Fits nowhere, so that all ways are tried."""
    model, ids = on_meta()
    return fit(model, ids, gpu="H200, 1MiB", host="8GiB", accumulate=2, blocks="blocks")


# --- bytes, against what PyTorch allocates -------------------------------------------------------


@pytest.mark.parametrize("config", [Config(), Config.recipe("agoq", memory_budget=0.6)])
def test_saved_bytes_are_those_of_explain_and_of_autograd(config):
    model, ids = on_cpu(layers=1)
    (planned,) = recorded(model, WHOLE, ids).planned(config).values()
    assert planned.plan.saved_bytes == explain(model, ids, config=config).saved_bytes
    torch._dynamo.reset()
    eager = Config(**{**vars(config), "compiler": "eager"})
    program = torch.compile(model, backend=fp8pass.backend(eager))
    assert planned.kept + nbytes(ids) == saved_bytes(program, ids)
    assert planned.backward.saved[0] == planned.kept


def test_what_is_not_compiled_is_recorded_as_pytorch_keeps_it():
    model, ids = on_cpu()
    moments = recorded(model, (), ids).moments(Config(), STAY)
    between = next(m for m in moments if m.backward)
    loss = 4
    assert between.activations + nbytes(ids) == saved_bytes(model, ids) + loss
    assert between.saved == between.gradients == between.workspace == 0


def test_gradients_at_the_end_are_all_or_none(by_blocks):
    model, _ = on_meta()
    most = {
        stay: max(m.gradients for m in by_blocks.moments(Config(), Fate(stay)))
        for stay in (True, False)
    }
    assert most[True] == nbytes(*model.parameters())
    largest = nbytes(*model.blocks[0].parameters())  # a block's backward gives all of its own
    assert most[False] == pytest.approx(largest, rel=0.1)


def test_gradients_that_wait_for_the_link_are_held(by_blocks):
    waits = Fate(stay=False, waiting=1 << 20)
    most = [max(m.gradients for m in by_blocks.moments(Config(), f)) for f in (Fate(False), waits)]
    assert most[0] < most[1] <= max(m.gradients for m in by_blocks.moments(Config(), STAY))


def test_inputs_that_blocks_share_count_once(by_blocks):
    """A block keeps its input, which is the result of the block before; nobody else holds it."""
    end = max(by_blocks.moments(Config(save_format="none"), STAY), key=lambda m: m.activations)
    of_stream = 4 * 64 * 256 * 2
    logits = 4 * 64 * VOCABULARY * (2 + 4 + 4)
    assert end.activations < 4 * of_stream + logits


@pytest.mark.parametrize("preset", ["coat", "fp8-lm", None])
def test_bytes_of_states(preset):
    model, ids = on_cpu()
    optimizer = AdamW(model.parameters(), preset=preset) if preset else None
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    model(ids).backward()
    optimizer.step()
    states = (x for state in optimizer.state.values() for n, x in state.items() if n != "step")
    here, host = Parameters(model).place(Setup(preset=preset), 1)
    assert here.states == pytest.approx(nbytes(*states), rel=0.001)
    assert host.total == 0


@pytest.mark.parametrize("accumulate", [2, 9])  # 8 bits, 16 bits
def test_bytes_of_sums(accumulate):
    model, ids = on_cpu()
    attached = attach(model, AdamW(model.parameters()), accumulate=accumulate)
    model(ids).backward()
    pieces = [piece for a in attached.accumulated.values() for piece in a.pieces]
    sums = [x for piece in pieces for x in piece.stored if x is not None]
    here, _ = Parameters(model).place(Setup(attach=True), accumulate)
    assert here.sums == pytest.approx(nbytes(*sums), rel=0.001)


def test_bytes_of_weights_in_codes():
    model, _ = on_cpu()
    here, host = Parameters(model).place(Setup(attach=True, offload=("weights",)), 1)
    moved = offload_weights(model, "cpu")
    inner = [p for p in moved.parameters() if hasattr(p, "codes")]
    others = [p for p in moved.parameters() if not hasattr(p, "codes")]
    assert len(inner) == 4
    assert here.weights == nbytes(*others, *(x for p in inner for x in (p.codes, p.scales)))
    assert host.weights == nbytes(*(p.source for p in inner))


@given(
    place=st.sampled_from(PLACES),
    preset=st.sampled_from(["coat", "fp8-lm"]),
    accumulate=st.integers(1, 20),
)
def test_what_is_moved_is_neither_lost_nor_doubled(place, preset, accumulate):
    parameters = Parameters(on_meta()[0])
    attach_, offload = place
    setup = Setup(attach=attach_, offload=offload, preset=preset)
    here, host = parameters.place(setup, accumulate)
    all_here, none = parameters.place(Setup(attach=attach_, preset=preset), accumulate)
    assert none.total == 0
    assert here.states + host.states == pytest.approx(all_here.states)
    assert here.sums + host.sums == pytest.approx(all_here.sums)
    codes = 0.5 * host.weights
    assert here.weights + host.weights == pytest.approx(all_here.weights + codes, rel=0.02)
    assert (host.total > 0) == bool(set(offload) - ({"gradients"} if accumulate == 1 else set()))


def test_hugging_face_layers_get_no_mask():
    """Where it sees that positions are those of whole sequences: those have values."""
    with torch.device("meta"):
        model, ids = llama(num_hidden_layers=2), torch.empty(2, 16, dtype=torch.long)
    values = ((), {"input_ids": ids, "labels": ids, "use_cache": False})
    paths = ("model.layers.0", "model.layers.1")
    (region,) = record_step(model, paths, values, own_loss).regions
    nodes = [n for n in region.gm.graph.nodes if "attention" in str(n.target)]
    forward = next(n for n in nodes if "backward" not in str(n.target))
    assert True in forward.args  # is_causal
    assert "attn_mask" not in forward.kwargs


def in_bf16(run, batch, device="cuda"):
    with torch.autocast(device, torch.bfloat16):
        return run(*batch)


class Autocast(Layered):
    """Computes in BF16 by itself."""

    def forward(self, ids):
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(ids)


def test_autocast_of_the_gpu_is_that_of_the_cpu_that_stands_for_it():
    with torch.device("meta"):
        model, inside, ids = Layered(1), Autocast(1), torch.empty(4, 64, dtype=torch.long)
    unpatched = torch.autocast.__init__

    def bytes_of(model, loss_fn=None):
        return fit(model, ids, gpu="16GiB", host="8GiB", loss_fn=loss_fn).shown.gpu

    on_gpu = bytes_of(model, in_bf16)
    assert on_gpu == bytes_of(model, lambda run, batch: in_bf16(run, batch, "cpu"))
    assert on_gpu["saved"] == bytes_of(inside)["saved"] < bytes_of(model)["saved"]
    assert torch.autocast.__init__ is unpatched


def test_autocast_of_other_threads_is_theirs():
    with compat.autocast_for_cpu(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(torch.autocast, "cuda", torch.bfloat16, enabled=False).result()
        with compat.autocast_for_cpu():
            assert torch.autocast("cuda", enabled=False).device == "cpu"
        assert torch.autocast("cuda").fast_dtype == torch.float16
        assert other.device == "cuda"


# --- many equal layers ---------------------------------------------------------------------------


@pytest.mark.long
def test_layers_are_continued_from_few(monkeypatch):
    model, ids = on_meta(layers=5)
    full = recorded(model, WHOLE, ids)
    monkeypatch.setattr("fp8pass.inspect.fitting.deep.WORTHWHILE", 5)
    deep = trace(model, (), ((ids,), {}), own_loss)
    assert isinstance(deep, TracedLayers)
    assert len(model.blocks) == 5
    for fate in (STAY, Fate(stay=False)):
        peaks = [max(t.moments(Config(), fate), key=lambda m: m.total) for t in (deep, full)]
        assert vars(peaks[0]) == vars(peaks[1])
    for got, want in zip(deep.work(Config()), full.work(Config()), strict=True):
        assert vars(got) == pytest.approx(vars(want))
    budget = Config(memory_budget=0.6)
    peaks = [max(m.total for m in t.moments(budget, STAY)) for t in (deep, full)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


def test_layers_that_differ_are_all_traced():
    model, _ = on_meta(layers=8)
    assert find_layers(model).count == 8
    model.blocks[3].mlp.requires_grad_(False)
    assert find_layers(model) is None


class ByNumber(Layered):
    """Does not run with fewer layers than it was made with."""

    def forward(self, ids):
        x = self.embed(ids)
        for i in range(8):
            x = self.blocks[i].norm(x)
        return x.float().square().mean()


def test_a_model_that_does_not_run_with_fewer_layers():
    with torch.device("meta"):
        model, ids = ByNumber(8), torch.empty(4, 64, dtype=torch.long)
    before = list(model.named_modules())
    assert isinstance(trace(model, (), ((ids,), {}), own_loss), TracedStep)
    assert list(model.named_modules()) == before


# --- the search ----------------------------------------------------------------------------------


def test_kinds_add_up(fitted):
    assert fitted.tried
    for candidate, why_not in fitted.tried:
        assert candidate.allocated == sum(candidate.gpu.values()) < candidate.gpu_bytes
        assert min(candidate.gpu.values()) >= 0
        assert set(KINDS) < set(candidate.gpu)
        assert "too much for the GPU" in why_not
        s = candidate.seconds
        assert s.total == pytest.approx(s.forward + s.backward + s.update + s.waiting)
    times = [c.seconds.total for c, _ in fitted.tried if c.setup.config.save_format == "e4m3"]
    assert all(a <= 1.02 * b for a, b in pairwise(times))


def test_budgets_keep_less_and_take_longer(fitted):
    of_place = [
        c
        for c, _ in fitted.tried
        if not c.setup.attach and not c.setup.offload and c.setup.config.save_format == "e4m3"
    ]
    of_place.sort(key=lambda c: c.seconds.total)
    assert len(of_place) > 2
    compute = [c.setup.config.memory_budget or 1.0 for c in of_place]
    assert compute == sorted(compute, reverse=True)


def test_the_first_that_fits_is_taken(fitted):
    model, ids = on_meta()
    sizes = [c.gpu_bytes for c, _ in fitted.tried]
    room = int(min(sizes) * 1.001)
    found = fit(model, ids, gpu=room, host="8GiB", accumulate=2, blocks="blocks")
    assert found.fits
    assert found.best.gpu_bytes <= room
    assert all(why for candidate, why in found.tried if candidate is not found.best)
    roomy = fit(model, ids, gpu="H200", host="8GiB", accumulate=2, blocks="blocks")
    assert roomy.best.setup == Setup()
    assert len(roomy.tried) == 1


def test_nothing_fits(fitted):
    assert not fitted.fits
    least = min(c.gpu_bytes for c, _ in fitted.tried) / MIB
    with pytest.raises(ConfigError, match=rf"The least is {least:.0f} MiB .* too much for the GPU"):
        _ = fitted.lines
    assert fitted.why_not in " ".join(str(fitted).split())
    assert json.loads(fitted.to_json())["fits"] is False


class Planless:
    """Stands for a step whose budgets are too small from 0.6 on, with a head as given."""

    def __init__(self, head: Head) -> None:
        self.head, self.asked = head, []

    def plans(self, config):
        return [SimpleNamespace(heads=[replace(self.head, chunks=config.head_chunks or 1)])]

    def work(self, config):
        self.asked.append(config)
        if (config.memory_budget or 1) < 0.7:
            raise BudgetTooSmall("cannot be met")
        return Work(bf16_flops=1e9), Work(bf16_flops=1e9)


class Returned(Planless):
    """The same, of a head that stays whole."""

    def plans(self, config):
        return [SimpleNamespace(heads=[self.head])]


@pytest.mark.parametrize(("kind", "chunks"), [(Planless, {None, 8}), (Returned, {None})])
def test_what_cannot_help_is_left_out(kind, chunks):
    """Budgets below one that is too small, each of which takes a while, and chunks of no head."""
    traced = kind(Head("head", "64×640", 1 << 20, 1, "there are too few tokens"))
    candidates = Candidates(traced, Parameters(on_meta()[0]), Config(), 1, GPUS["H200"])
    for config in candidates._configs(Config()):
        candidates._timed(config)
    assert {config.head_chunks for config in traced.asked} == chunks
    assert {config.memory_budget for config in traced.asked} == {None, 0.8, 0.6}
    assert {config.memory_budget for config in candidates.impossible} == {0.6}


def test_a_note_says_once_why_budgets_are_left_out(monkeypatch):
    monkeypatch.setattr(BudgetProblem, "within", lambda self, budget: None)
    monkeypatch.setattr(BudgetProblem, "least", lambda self: 1e9)
    model, ids = on_meta(layers=8)
    found = fit(model, ids, gpu="H200, 1MiB", host="8GiB")
    (note,) = (note for note in found.notes if "budgets are left out, 0.8 first" in note)
    assert "With few of the 8 layers of blocks, memory_budget of" in note
    assert all(candidate.setup.config.memory_budget is None for candidate, _ in found.tried)


def heads_of(module: str, size: int) -> list[SimpleNamespace]:
    return 2 * [SimpleNamespace(heads=[Head(module, "8192×32000", size, 1, "there are few")])]


def test_logits_of_all_tokens_are_spoken_of_once_if_they_are_large(fitted):
    plans = heads_of("small", 100) + heads_of("head", 8 * MIB)
    (note,) = set(_notes_on_heads(plans, fitted))
    assert note.startswith("Logits of head, 8192×32000, 8 MiB, exist for all tokens at once")


def test_a_host_too_small():
    model, ids = on_meta()
    options = {"config": Config(memory_budget=0.9), "blocks": "blocks"}
    found = fit(model, ids, gpu="H200, 1MiB", host="4GiB", **options)
    reasons = [why for candidate, why in found.tried if candidate.host]
    assert reasons
    assert all("too much for the host" in why for why in reasons)


def test_a_host_too_small_for_the_process_alone():
    model, ids = on_meta()
    found = fit(model, ids, gpu="H200", host="2GiB", blocks="blocks")
    assert len(found.tried) == 1
    assert "a host of 2 GiB: Python, PyTorch and the driver take 4 GiB of it" in found.why_not


def test_a_link_that_hides_nothing():
    parameters = Parameters(on_meta()[0])
    setup = Setup(attach=True, offload=("states", "gradients"))
    slow = fp8pass.Gpu("slow", 1e12, 1e15, 1e15, 1e15, 1e12, link=1e6)
    work = Work(bf16_flops=1e9), Work(bf16_flops=2e9)
    found = step_seconds(work, parameters, setup, 4, slow)
    _, host = parameters.place(setup, 4)
    assert found.link == pytest.approx((host.states + 4 * host.sums) / 1e6)
    assert found.waiting == pytest.approx(found.link, rel=0.01)
    fast = fp8pass.Gpu("fast", 1e12, 1e9, 1e9, 1e9, 1e12, link=1e12)
    assert step_seconds(work, parameters, setup, 4, fast).waiting == 0


def test_the_time_for_the_link_is_said():
    model, ids = on_meta()
    slow = fp8pass.Gpu("slow", 690 * MIB, 1e15, 1e15, 1e15, 1e12, link=1e6)
    found = fit(model, ids, gpu=slow, host="8GiB", accumulate=4, blocks="blocks")
    if found.shown.setup.offload:
        assert any("cannot be hidden" in note for note in found.notes)


# --- lines to paste ------------------------------------------------------------------------------


def run_lines(text: str, accumulate: int) -> None:
    """Train a model for a step as the lines say, on the CPU."""
    model, ids = on_cpu()
    names = {"fp8pass": fp8pass, "torch": torch, "model": model}
    exec(text.replace('"cuda"', '"cpu"').replace(", fused=True", ""), names)
    before = [p.detach().clone() for p in model.lm_head.parameters()]
    for _ in range(accumulate):
        names["model"](ids).backward()
    names["optimizer"].step()
    after = list(model.lm_head.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_lines_of_blocks_are_accepted(place):
    lines = Setup(Config(compiler="eager", memory_budget=0.9), *place).lines(2, ("blocks.*",))
    assert "memory_budget=0.9" in lines
    run_lines(lines, 2)


def test_lines_of_a_whole_model_are_accepted():
    run_lines(Setup(Config(compiler="eager"), *PLACES[-1]).lines(2, ()), 2)


def test_budgets_are_for_blocks_of_a_list():
    lines = Setup(Config(memory_budget=0.5)).lines(1, ("blocks.*", "lm_head"))
    assert "block.compile(backend=fp8pass.backend(config))" in lines
    assert '("lm_head").compile(backend=fp8pass.backend(fp8pass.Config()))' in lines
    assert '("lm_head").compile(backend=fp8pass.backend(config))' in Setup().lines(1, ("lm_head",))


def test_lines_of_pytorchs_optimizer():
    run_lines(Setup(Config(compiler="eager"), preset=None).lines(1, ("blocks.0.mlp",)), 1)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config.recipe("agoq"),
        Config.recipe("linear", skip=("a", "b")),
        Config(tolerance=2),
    ],
    ids=config_text,
)
def test_a_configuration_as_python(config):
    assert eval(config_text(config), {"fp8pass": fp8pass}) == config


# --- what it leaves alone, and what it refuses ---------------------------------------------------


@pytest.mark.parametrize("make", [on_meta, on_cpu])
def test_the_model_is_as_it_was(make):
    model, ids = make()
    before = dict(model.named_parameters())
    values = [p.detach().clone() for p in before.values()]
    fit(model, ids, gpu="H200", host="8GiB", blocks="blocks")
    after = dict(model.named_parameters())
    assert all(after[name] is p and p.grad is None for name, p in before.items())
    assert not any(isinstance(p, compat.FakeTensor) for p in after.values())
    assert all("forward" not in vars(m) for m in model.modules())
    if make is on_cpu:
        assert all(torch.equal(a, b) for a, b in zip(values, after.values(), strict=True))


def test_configuration_and_loss_of_the_model():
    model, ids = on_meta()
    for block in model.blocks:
        block.compile(backend="fp8pass", options={"skip": ("down",), "memory_budget": 0.9})
    found = fit(
        model,
        ids,
        gpu="H200",
        host="8GiB",
        loss_fn=lambda model, batch: model(*batch).square(),
        blocks="blocks",
    )
    assert found.best.setup.config == Config(skip=("down",), memory_budget=0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "RTX 409"}, r"Unknown gpu 'RTX 409'. Did you mean 'RTX 4090'"),
        ({"gpu": "16GiB, 8GiB"}, "a name, a size or both"),
        ({"gpu": 16}, "would be bytes: say how many GiB"),
        ({"host": "much"}, r"host must be a size such as '24GiB'"),
        ({"accumulate": 0}, "accumulate must be a positive int"),
        ({"blocks": "block"}, r"blocks='block' names no module. .*Did you mean 'blocks'"),
    ],
)
def test_wrong_options(changes, message):
    model, ids = on_meta()
    with pytest.raises(ConfigError, match=message):
        fit(model, ids, **{"gpu": "16GiB", "host": "8GiB", **changes})


def test_no_loss():
    with torch.device("meta"):
        model, x = MLP((64, 128, 64)), torch.empty(32, 64)
    with pytest.raises(ValueError, match=r"no loss: give fit a function of it and the batch"):
        fit(model, x, gpu="16GiB", host="8GiB")


def test_a_loss_function_that_gives_no_loss():
    model, ids = on_meta()
    with pytest.raises(TypeError, match=r"must give the loss.* it gave NoneType"):
        fit(model, ids, gpu="16GiB", host="8GiB", loss_fn=lambda model, batch: None)
    with pytest.raises(ValueError, match="depends on nothing that is trained"):
        fit(model.requires_grad_(False), ids, gpu="16GiB", host="8GiB")


class Positive(nn.Module):
    """The rows that begin above zero."""

    def forward(self, x):
        return x[x[:, 0] > 0]


class Positives(MLP):
    """Looks at values, in a part or by itself."""

    def __init__(self, *parts):
        super().__init__((64, 128, 64))
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        x = self.parts(super().forward(x))
        return x.square().mean() * (1 if self.parts else x.sum().item())


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([nn.Identity(), Positive()], r"which aten.nonzero.default in parts.1 needs"),
        (
            [],
            r"which aten._local_scalar_dense.default in Positives or its loss needs, as do .item\(",
        ),
    ],
)
def test_a_model_that_looks_at_values(parts, says):
    with pytest.raises(ValueError, match=says):
        fit(Positives(*parts), torch.randn(32, 64), gpu="16GiB", host="8GiB")


@pytest.mark.parametrize("text", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "RTX4090,8GiB"])
def test_gpus_by_name(text):
    found = find_gpu(text)
    assert found.bandwidth == GPUS["RTX 4090"].bandwidth
    assert found.memory == (8 << 30 if "8GiB" in text else GPUS["RTX 4090"].memory)


def test_plot(fitted, tmp_path):
    fitted.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="'xyz' is not supported"):
        fitted.plot(tmp_path / "memory.xyz")


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("place", [(False, ()), (True, ()), (True, ("states",))], ids=str)
def test_the_peak_is_as_predicted(place):
    """Of blocks large beside what PyTorch rounds up, above what other tests have left."""
    torch._dynamo.reset()
    x = torch.ones(16, 16, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS has memory of its own for each thread
    del x
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model, ids = Layered(4, hidden=2048).bfloat16(), torch.empty(8, 1024, dtype=torch.long)
    step = record_step(model, [f"blocks.{i}" for i in range(4)], ((ids,), {}), own_loss)
    parameters, setup = Parameters(model), Setup(Config(), *place)
    here, _ = parameters.place(setup, 1)
    moments = TracedStep(step).moments(Config(), parameters.fate_of_gradients(setup, 1))
    predicted = here.total + max(m.total for m in moments)

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
