"""`weight_codes` and `same_weights`: codes of trained weights, made once for several runs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers import COAT_EAGER, Spy, compiled, relative, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import counts
from torch import nn

import fp8pass
from fp8pass import Config, ConfigError, compat, optim
from fp8pass.dialect import hardware
from fp8pass.dynamo import Backend
from fp8pass.passes import Context, runner
from fp8pass.weights import kept

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
WIDTH = 64


class Model(nn.Module):
    """Layers with weights of their own, and two that share one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, 128)
        self.again.weight = self.up.weight
        self.odd = nn.Linear(WIDTH, 24)
        self.lm_head = nn.Linear(WIDTH, 96)

    def forward(self, x):
        x = self.norm(x)
        x = x + self.down(nn.functional.silu(self.up(x)) * self.again(x))
        return self.lm_head(x).float().square().mean() + self.odd(x).float().sum() * 1e-2


def config(device: str, size: int | str) -> Config:
    compiler = "inductor" if device == "cuda" else "eager"
    return Config(weight_codes=size, compiler=compiler)


def inputs(device: str = "cpu", count: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(32, WIDTH, generator=generator).to(device, torch.bfloat16) for _ in range(count)
    ]


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """How many weights each launch made codes of."""
    found: list[int] = []
    coded = kept.coded

    def counted(matrices, dtype):
        found.append(len(matrices))
        return coded(matrices, dtype)

    monkeypatch.setattr(kept, "coded", counted)
    return found


# --- what changes, and what does not ------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_number_changes(device, dtype, made):
    """Of three micro-batches, whose codes are made once, by one launch.

    Generated code keeps FP32 where autocast asks for BF16, up to the codes: these are of weights
    that were not rounded before, which codes that are made once are.
    """
    found = []
    for size in (0, "1MiB"):
        torch._dynamo.reset()
        model, spy = Model().to(device, dtype), Spy()
        program = torch.compile(model, backend=Backend(config(device, size), spy))
        autocast = torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32)
        with autocast, fp8pass.same_weights():
            for x in inputs(device, 3):
                program(x.to(dtype)).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    assert made == [2]
    want, got = found
    for name, gradient in want.items():
        if device == "cuda" and dtype is torch.float32:
            assert relative(got[name], gradient) < 0.03, name
        else:
            assert torch.equal(got[name], gradient), name
    assert {y.module: y.codes for y in spy.plan.linears} == {
        "up": "inputs",
        "again": "inputs",
        "down": "inputs",
        "odd": "",
        "lm_head": "",
    }


@pytest.mark.parametrize("device", DEVICES)
def test_outside_of_it_every_run_makes_codes(device, made):
    model = Model().bfloat16().to(device)
    program = torch.compile(model, backend=Backend(config(device, "1MiB")))
    (x,) = inputs(device)
    for _ in range(2):
        program(x).backward()
    with torch.no_grad():
        program(x)
    assert made == [2] * 3
    assert not kept._kept.by_weight
    with fp8pass.same_weights(), fp8pass.same_weights():
        program(x)
    with fp8pass.same_weights():
        with torch.inference_mode():
            program(x)
        program(x).backward()
        assert len(kept._kept.by_weight) == 2
    assert made == [2] * 5
    assert not kept._kept.by_weight


@pytest.mark.long
def test_kernels_make_no_codes_of_weights(graphs):
    model, found = Model().bfloat16(), []
    for size in (0, "1MiB"):
        torch._dynamo.reset()
        program = torch.compile(model, backend=Backend(Config(weight_codes=size)))
        found.append(step(program, model, (inputs()[0],)))
    assert torch.equal(found[0].outputs[0], found[1].outputs[0])
    plain, plain_backward, ours, backward = (counts([g]) for g in graphs)
    assert (plain - ours) == {"rows": 2}
    assert plain_backward == backward


def test_blocks_that_share_code_have_codes_of_their_own(made):
    model = nn.ModuleList(Model() for _ in range(2)).bfloat16()
    with torch.no_grad():
        model[1].down.weight.mul_(3)
    want = [torch.compile(m, backend=Backend(COAT_EAGER))(inputs()[0]) for m in model]
    blocks = [torch.compile(m, backend=Backend(config("cpu", "1MiB"))) for m in model]
    with fp8pass.same_weights():
        for _ in range(2):
            assert [block(inputs()[0]) for block in blocks] == want
    assert made == [2, 2]


# --- the budget ---------------------------------------------------------------------------------


def test_what_the_budget_has_no_room_for_is_coded_in_the_graph(made):
    size = WIDTH * 128 + 4 * 128  # of one weight and its scales
    spy = Spy()
    program = torch.compile(Model().bfloat16(), backend=Backend(config("cpu", size), spy))
    program(inputs()[0]).backward()
    assert made == [1]
    up, again, down, *_ = spy.plan.linears
    assert up.codes == again.codes == "inputs"
    assert down.codes == (
        "the graph: its codes take 8.25 KiB, and only 0 B of weight_codes are left"
    )


class Others(nn.Module):
    """Layers of which names do not say that they take no codes, before those that do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 256)  # logits
        self.mixer = nn.Linear(32, 32)  # over tokens, which are columns
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x):
        targets = x.argmax(-1)
        x = self.mixer(x.t()).t() + self.down(nn.functional.silu(self.up(x)))
        return nn.functional.cross_entropy(self.scores(x).float(), targets)


@pytest.mark.parametrize("trains", [True, False])
def test_only_weights_whose_layers_take_codes_have_some(trains, made):
    """The others leave their room to those that follow."""
    spy = Spy()
    size = 2 * (WIDTH * 128) + 4 * (128 + WIDTH)  # of up and down alone
    model = Others().bfloat16()
    program = torch.compile(model, backend=Backend(config("cpu", size), spy))
    with torch.set_grad_enabled(trains), fp8pass.same_weights():
        loss = program(inputs()[0])
        assert {id(model.up.weight), id(model.down.weight)} == set(kept._kept.by_weight)
    assert made == [2]
    assert torch.equal(loss, torch.compile(model, backend=Backend(COAT_EAGER))(inputs()[0]))
    assert {y.module: (y.codes, bool(y.fp8)) for y in spy.plan.linears} == {
        "mixer": ("the graph: its input is transposed, for which a weight has one scale", True),
        "up": ("inputs", True),
        "down": ("inputs", True),
        "scores": ("", False),
    }


def test_a_head_in_chunks_has_no_codes(made):
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, 256)).bfloat16()

    def loss(x, targets):
        return nn.functional.cross_entropy(model(x).float(), targets)

    several = replace(config("cpu", "1MiB"), quantize_lm_head=True, head_chunks=2)
    program, spy = compiled(loss, several)
    program(inputs()[0], torch.arange(32)).backward()
    assert made == [1]
    assert [(y.codes, bool(y.fp8)) for y in spy.plan.linears] == [
        ("inputs", True),
        ("the graph: its tokens are computed in chunks", True),
    ]


def test_nothing_has_codes_where_nothing_runs_in_fp8(made, monkeypatch):
    monkeypatch.setattr(hardware, "why_no_fp8_gemm", lambda device: "no tensor cores")
    program, spy = compiled(Model().bfloat16(), config("cpu", "1MiB"))
    program(inputs()[0]).backward()
    assert made == []
    assert not any(y.codes for y in spy.plan.linears)


@pytest.mark.parametrize("size", [-1, True, 0.5, "much"])
def test_sizes_are_checked(size):
    with pytest.raises(ConfigError, match="weight_codes must be"):
        Config(weight_codes=size)


def test_recipes_without_scales_of_rows_have_none():
    with pytest.raises(ConfigError, match=r"weight_codes='1GiB': .* Use recipe 'coat'"):
        Config.recipe("linear", weight_codes="1GiB")


# --- never stale --------------------------------------------------------------------------------


class Trained:
    """A model with programs with and without codes as inputs, and what may change its weights."""

    def __init__(self, device: str = "cpu", mode: str | None = None) -> None:
        torch._dynamo.reset()
        self.model = Model().bfloat16().to(device)
        backend = Backend(config(device, "1MiB"))
        self.with_codes = torch.compile(self.model, backend=backend, mode=mode)
        self.plain = torch.compile(self.model, backend=Backend(config(device, 0)))
        self.others = copy.deepcopy(self.model)
        self.x = inputs(device)[0]
        parameters = list(self.model.parameters())
        self.optimizers = {
            "SGD": torch.optim.SGD(parameters, lr=0.01),
            "AdamW": torch.optim.AdamW(parameters, lr=0.01, foreach=True),
            "fused": torch.optim.AdamW(parameters, lr=0.01, fused=True),
            "ours": optim.AdamW(parameters, lr=0.01),
            "behind PyTorch's back": BehindTheBack(parameters, {}),
        }

    def start_again(self) -> None:
        for model in (self.model, self.others):
            model.load_state_dict(Model().bfloat16().state_dict())
        with torch.no_grad():
            for p in self.others.parameters():
                p.mul_(0.9)
        for optimizer in self.optimizers.values():
            optimizer.state.clear()

    def check(self) -> None:
        assert torch.equal(self.with_codes(self.x), self.plain(self.x))

    def change(self, how: str) -> None:
        model, others = self.model, self.others
        if how in self.optimizers:
            self.with_codes(self.x).backward()
            self.optimizers[how].step()
            model.zero_grad()
        elif how == "load":
            model.load_state_dict(copy.deepcopy(others).state_dict())
        elif how == "swap":  # with an average of weights, as evaluation does
            for p, q in zip(model.parameters(), others.parameters(), strict=True):
                p.data, q.data = q.data, p.data
        elif how == "in place":
            with torch.no_grad():
                model.again.weight.mul_(-1)  # which is up's, too
                model.down.weight[3, 5:7] = 2
        elif how == "other memory":
            for p in model.parameters():
                p.data = p.data.clone().mul_(0.5)
        elif how == "moved":
            model.double()
            for p in model.parameters():
                p.data.mul_(-0.5)
            model.bfloat16()
        elif how == "another parameter":
            model.up.weight = model.again.weight = nn.Parameter(others.up.weight.detach() * 0.5)
            for optimizer in self.optimizers.values():
                optimizer.param_groups[0]["params"] = list(model.parameters())
        elif how == "other context":
            model.down.weight.data.neg_()


class BehindTheBack(torch.optim.Optimizer):
    """Writes to weights as kernels of other packages do."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            version = p._version
            p.data.mul_(0.5)
            assert p._version == version


CHANGES = [
    *("SGD", "AdamW", "fused", "ours", "behind PyTorch's back", "load", "swap", "in place"),
    *("other memory", "moved", "other context", "nothing"),
]


MODES = [None, "reduce-overhead"]  # CUDA graphs read codes where they always are


@pytest.fixture(params=MODES)
def trained(request) -> Trained:
    return Trained(mode=request.param)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=5))
def test_codes_are_never_stale_whatever_the_order(trained, changes):
    trained.start_again()
    context = fp8pass.same_weights()
    context.__enter__()
    try:
        trained.check()
        for how in changes:
            if how == "other context":
                context.__exit__(None, None, None)
            trained.change(how)
            if how == "other context":
                context = fp8pass.same_weights()
                context.__enter__()
            trained.check()
    finally:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_each_change_is_noticed(device, mode):
    trained = Trained(device, mode)
    for how in [*CHANGES, "another parameter"]:
        trained.start_again()
        with fp8pass.same_weights():
            trained.check()
            before = trained.with_codes(trained.x).item()
            if how != "other context":
                trained.change(how)
                trained.check()
                same = trained.with_codes(trained.x).item() == before
                assert same == (how == "nothing"), how


def test_cuda_graphs_read_codes_in_one_place():
    """New weights, new contexts and none at all: their graphs need not copy what stays there."""
    trained = Trained(mode="reduce-overhead")
    weights = trained.model.up.weight, trained.model.down.weight
    places = []
    for how in ("nothing", "SGD", "load", "other memory"):
        with fp8pass.same_weights():
            trained.with_codes(trained.x)
        trained.change(how)
        trained.with_codes(trained.x)
        places.append([kept._kept.in_place[id(w)].codes.data_ptr() for w in weights])
    assert places == places[:1] * len(places)


def test_graphs_of_both_kinds_share_a_weight():
    """Those that read codes in one place do so, whoever made some before."""
    trained = Trained(mode="reduce-overhead")
    anywhere = torch.compile(trained.model, backend=Backend(config("cpu", "1MiB")))
    weight, places = trained.model.up.weight, set()
    for programs in ((trained.with_codes, anywhere), (anywhere, trained.with_codes)) * 2:
        with fp8pass.same_weights():
            for program in programs:
                program(trained.x)
            made = kept._kept.in_place[id(weight)]
            assert kept._kept.by_weight[id(weight)] is made
            places.add(made.codes.data_ptr())
            trained.check()
        trained.change("SGD")
    assert len(places) == 1


def test_backwards_wait_for_codes_of_the_same_weights_alone():
    """As they do for weights in PyTorch, which it says are modified by an in-place operation."""
    trained = Trained(mode="reduce-overhead")
    first, second = trained.with_codes(trained.x), trained.with_codes(trained.x)
    first.backward()
    second.backward()
    waiting = trained.with_codes(trained.x)
    with torch.no_grad():
        trained.model.down.weight.mul_(2)
    trained.with_codes(trained.x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trains", [True, False])
def test_graphs_know_of_codes_that_stay_in_one_place(trains, mode, monkeypatch):
    """To Inductor they are as parameters are; to the passes they are not."""
    found: list[Context] = []
    static: list[int] = []
    run = Trained(mode=mode).with_codes
    frontend = compat.compile_fx

    def compile_fx(gm, inputs, **kwargs):
        static.append(sum("tensor_dict" in n.meta for n in placeholders_of_codes(gm)))
        return frontend(gm, inputs, **kwargs)

    def recorded(passes, gm, ctx, **kwargs):
        found.append(ctx)
        return runner.run_passes(passes, gm, ctx, **kwargs)

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    for module in ("fp8pass.partition", "fp8pass.dynamo"):
        monkeypatch.setattr(f"{module}.run_passes", recorded)
    with torch.set_grad_enabled(trains):
        run(inputs()[0])
    assert static == [4 if mode else 0]
    codes = {x for pair in found[0].facts.codes.values() for x in pair}
    assert len(codes) == 4
    assert not found[0].facts.parameters & codes


def placeholders_of_codes(gm):
    nodes = gm.graph.find_nodes(op="placeholder")
    return [n for n in nodes if n.name.startswith(("codes_of_input", "scales_of_input"))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_updates_within_the_backward(device, mode):
    """`attach`, of which nobody calls the optimizer's step."""
    losses = []
    for size in (0, "1MiB"):
        torch._dynamo.reset()
        model = Model().bfloat16().to(device)
        optim.attach(model, optim.AdamW(model.parameters(), lr=0.01), accumulate=2)
        program = torch.compile(model, backend=Backend(config(device, size)), mode=mode)
        with fp8pass.same_weights():
            for x in inputs(device, 6):
                loss = program(x)
                loss.backward()
                losses.append(loss.item())  # CUDA graphs write the next one to the same memory
    assert losses[:6] == losses[6:]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("in_place", [False, True])
def test_codes_of_weights_that_are_no_more_are_dropped(in_place):
    """In a context around all of training, too, where each step may have weights of its own."""
    stays = nn.Parameter(torch.randn(32, 32))
    before = len(kept._kept.in_place)
    with fp8pass.same_weights():
        for _ in range(5):
            new = nn.Parameter(torch.randn(32, 32))
            kept.codes_of([stays, new], in_place=in_place)
        assert len(kept._kept.by_weight) <= 3
        assert id(stays) in kept._kept.by_weight
    assert len(kept._kept.in_place) <= before + 3
