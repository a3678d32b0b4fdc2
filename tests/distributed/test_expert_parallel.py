"""Experts on several ranks: tokens are sent to their experts in FP8, and no result changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_lowering import LoweredError, lowered_for_gpus
from ranks import ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.graph.collectives import ALL_TO_ALL

HIDDEN, FFN, CHOSEN, TOKENS = 64, 128, 2, 48


class Experts(nn.Module):
    """A mixture of experts. Each rank has two of the experts.

    It dispatches and combines tokens as torchtitan's `ExpertParallel` does, in one graph.
    """

    def __init__(self) -> None:
        super().__init__()
        ranks, self.local = dist.get_world_size(), 2
        self.router = nn.Linear(HIDDEN, ranks * self.local, bias=False)
        mine = slice(self.local * dist.get_rank(), self.local * (dist.get_rank() + 1))
        up = torch.randn(ranks * self.local, HIDDEN, FFN) / HIDDEN**0.5
        down = torch.randn(ranks * self.local, FFN, HIDDEN) / FFN**0.5
        self.up, self.down = nn.Parameter(up[mine].clone()), nn.Parameter(down[mine].clone())
        self.reads_received = self.pads = False

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).float().softmax(-1).topk(CHOSEN)
        order = experts.flatten().argsort(stable=True)
        group, ranks = dist.group.WORLD, dist.get_world_size()
        counts = F.one_hot(experts.flatten(), ranks * self.local).sum(0)
        with torch.no_grad():
            received = _exchange_counts(counts)
            sent, kept = (n.view(ranks, -1).sum(1).tolist() for n in (counts, received))
        rows = all_to_all_single_autograd(x[order // CHOSEN], kept, sent, group)
        expert = torch.arange(self.local, device=x.device).repeat(ranks)
        expert = expert.repeat_interleave(received, output_size=rows.shape[0])
        by_expert = expert.argsort(stable=True)
        tokens = received.view(ranks, -1).sum(0)
        if self.pads:
            back = self.compute_padded(rows, by_expert, tokens)
        else:
            computed = self.compute(rows[by_expert], tokens.cumsum(0).int())
            if self.reads_received:
                computed = computed + rows[by_expert]
            back = torch.empty_like(computed).index_put((by_expert,), computed)
        back = all_to_all_single_autograd(back, sent, kept, group)
        back = back * weights.flatten()[order, None].to(x.dtype)
        return x + torch.zeros_like(x).index_add(0, order // CHOSEN, back)

    def compute_padded(self, rows: Tensor, by_expert: Tensor, tokens: Tensor) -> Tensor:
        """Pad the tokens of each expert with rows of zeros to a multiple of 8, as torchtitan."""
        count = rows.shape[0]
        padded = (tokens + 7) // 8 * 8
        place = torch.arange(count + 8 * self.local, device=rows.device)
        expert = (place[:, None] >= padded.cumsum(0)).sum(1).clamp_max(self.local - 1)
        number = place - (padded.cumsum(0) - padded)[expert]
        is_token = number < tokens[expert]
        source = (tokens.cumsum(0) - tokens)[expert] + torch.where(is_token, number, 0)
        order = F.pad(by_expert, (0, 1))  # a source may lie after the last token
        indices = torch.where(is_token, order[source], count)
        with_zeros = torch.vstack((rows, rows.new_zeros(rows.shape[-1])))
        computed = self.compute(with_zeros[indices], padded.cumsum(0).int())
        unpermuted = computed.new_empty(with_zeros.shape)
        unpermuted[indices] = computed
        return unpermuted[:-1]

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(F.silu(torch._grouped_mm(rows, self.up, ends)), self.down, ends)


def _exchange_counts(counts: Tensor) -> Tensor:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    splits = [counts.shape[0] // ranks] * ranks
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_to_all_single(counts, splits, splits, group.group_name))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(HIDDEN, HIDDEN), Experts()
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpoints:
            return checkpoint(self.experts, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.experts(x)  # type: ignore[no-any-return]


@contextmanager
def capturing_sizes() -> Iterator[None]:
    """Capture the numbers of tokens in the graph. Caches are off, because plans are compared."""
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield


def make(
    device: str, *, checkpoints: bool = False, frozen: bool = False, pads: bool = False
) -> Model:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    model.checkpoints, model.experts.pads = checkpoints, pads
    if frozen:
        model.experts.up.requires_grad_(False)
        model.experts.down.requires_grad_(False)
        fp8pass.quantize_frozen(model)
    return model


def step(model: Model, device: str, config: Config | None, x: Tensor | None = None) -> Any:
    """Return the output, gradients of the input and the parameters, and the collectives."""
    torch._dynamo.reset()
    torch.manual_seed(1 + dist.get_rank())
    if x is None:
        x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    x = x.clone().requires_grad_()
    plans: list[Any] = []
    program: Any = model
    if config is not None:
        program = torch.compile(model, backend=Backend(config, plans.append), fullgraph=True)
    with capturing_sizes():
        y = program(x)
        y.float().square().mean().backward()
    sent = [c for compiled in plans for c in compiled.plan.collectives]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return y.detach(), x.grad, gradients, sent


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))


def without_pass() -> Any:
    return mock.patch.dict(os.environ, FP8PASS_DISABLE_PASSES="exchange_quantized")


# --- functions of ranks -------------------------------------------------------------------------


def exchanged_data_changes_no_bit(
    device: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Only wgrad differs, because it reads tokens that were rounded once more."""
    config = Config.recipe("coat", **{"compiler": "eager", **options})
    got = step(make(device, **changes), device, config)
    with without_pass():
        want = step(make(device, **changes), device, config)
    dtypes = [c.dtype for c in got[3] if c.dtype != "int64"]
    assert dtypes.count("uint8") == 2, [(c.half, c.dtype, c.reason) for c in got[3]]
    assert dtypes.count("bfloat16") == 2
    assert {c.dtype for c in want[3]} == {"int64", "bfloat16"}
    # Generated code may quantize a value before it is rounded. Budgets may save other values.
    rounds = config.compiler == "inductor" or config.memory_budget is not None
    for a, b in zip(got[:2], want[:2], strict=True):
        assert relative(a, b) < 0.03 if rounds else torch.equal(a, b)
    for name, gradient in want[2].items():
        if gradient is None:
            assert got[2][name] is None
        elif rounds or name in ("experts.up", "experts.down"):
            assert relative(got[2][name], gradient) < 0.03, name
        else:
            assert torch.equal(got[2][name], gradient), name


def gradients_are_near_eager(device: str) -> None:
    config = Config(compiler="eager", skip=("first",))  # tokens keep their experts
    got, want = (step(make(device), device, c) for c in (config, None))
    assert relative(got[0], want[0]) < 0.05
    assert relative(got[1], want[1]) < 0.15
    for name, gradient in want[2].items():
        assert relative(got[2][name], gradient) < 0.25, name


def recipe_exact_sends_what_the_model_sends(device: str) -> None:
    got = step(make(device), device, Config.recipe("exact", compiler="eager"))
    want = step(make(device), device, None)
    assert {c.dtype for c in got[3]} == {"int64", "bfloat16"}
    assert relative(got[0], want[0]) < 1e-2


def a_rank_without_tokens_waits_for_none(device: str) -> None:
    model = make(device)
    with torch.no_grad():  # the first feature routes all tokens to the experts of rank 0
        model.first.weight.zero_()
        model.first.bias.zero_()[0] = 9.0
        model.experts.router.weight.zero_()[:2, 0] = 9.0
    y, x_grad, gradients, sent = step(model, device, Config(compiler="eager"))
    assert [c.dtype for c in sent].count("uint8") == 2
    assert y.isfinite().all()
    assert x_grad.isfinite().all()
    used = dist.get_rank() == 0
    assert bool(gradients["experts.up"].any()) == used


def a_nan_reaches_the_rank_of_its_expert(device: str) -> None:
    x = torch.zeros(TOKENS, HIDDEN, device=device).bfloat16()
    x[3, 5] = torch.nan if dist.get_rank() == 1 else 0.0
    y, *_ = step(make(device), device, Config(compiler="eager"), x)
    assert bool(y[3].isnan().any()) == (dist.get_rank() == 1)
    assert y[4].isfinite().all()


def tokens_that_others_read_stay_in_bf16(device: str) -> list[str]:
    model = make(device)
    model.experts.reads_received = True
    *_, sent = step(model, device, Config(compiler="eager"))
    assert [c.dtype for c in sent if c.half == "forward"] == ["int64", "bfloat16", "bfloat16"]
    return [c.reason for c in sent if c.half == "forward"][1:2]


class Fixed(nn.Module):
    """Experts with constant numbers of tokens, which may differ between ranks."""

    more_exchanges = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, HIDDEN, FFN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(2, FFN, HIDDEN) / FFN**0.5)

    def forward(self, x: Tensor, kept: list[int], sent: list[int], chosen: Tensor) -> Tensor:
        rows = all_to_all_single_autograd(torch.tanh(x), kept, sent, dist.group.WORLD)
        for _ in range(self.more_exchanges):
            rows = all_to_all_single_autograd(rows, kept, sent, dist.group.WORLD)
        count = chosen.shape[0]
        ends = torch.tensor([count // 2, count], dtype=torch.int32, device=x.device)
        h = F.silu(torch._grouped_mm(rows[chosen], self.up, ends))
        out = torch._grouped_mm(h, self.down, ends)
        out = rows.new_zeros(rows.shape).index_put((chosen,), out)
        return all_to_all_single_autograd(out, sent, kept, dist.group.WORLD)


def ranks_with_other_sizes_send_the_same(device: str, kept: list[list[int]], most: int) -> None:
    """Rank r receives `kept[r]` tokens, and keeps at most `most` of them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, rank, plans = Fixed().to(device, torch.bfloat16), dist.get_rank(), list[Any]()
    mine, sent = kept[rank], [row[rank] for row in kept]
    x = torch.randn(sum(sent), HIDDEN, device=device).bfloat16().requires_grad_()
    chosen = torch.arange(min(sum(mine), most), device=device)
    config = Config(compiler="eager")
    with capturing_sizes():
        program = torch.compile(model, backend=Backend(config, plans.append), fullgraph=True)
        program(x, mine, sent, chosen).float().square().mean().backward()
    found = [c.dtype for compiled in plans for c in compiled.plan.collectives]
    assert found == ["float32", "uint8", "bfloat16"] * 2
    assert x.grad is not None
    assert x.grad.isfinite().all()


def all_exchanges_of_a_chain_send_fp8(device: str) -> None:
    torch._dynamo.reset()
    model, plans = Fixed().to(device, torch.bfloat16), list[Any]()
    model.more_exchanges = 1
    x = torch.randn(32, HIDDEN, device=device).bfloat16().requires_grad_()
    with capturing_sizes():
        backend = Backend(Config(compiler="eager"), plans.append)
        program = torch.compile(model, backend=backend, fullgraph=True)
        program(x, [16, 16], [16, 16], torch.arange(32, device=device)).float().sum().backward()
    found = [c.dtype for c in plans[0].plan.collectives if c.half == "forward"]
    assert sorted(found) == ["bfloat16", "float32", "float32", "uint8", "uint8"]


def graphs_are_lowered_for_gpus(device: str, pads: bool, more_exchanges: int) -> None:
    torch._dynamo.reset()
    model: Any = make(device, pads=pads)
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16().requires_grad_()
    arguments: tuple[Any, ...] = (x,)
    if more_exchanges:
        model = Fixed().to(device, torch.bfloat16)
        model.more_exchanges = more_exchanges
        arguments = (x, [24, 24], [24, 24], torch.arange(TOKENS, device=device))
    program = torch.compile(model, backend=Backend(Config()), fullgraph=True)
    raised = pytest.raises(LoweredError)
    with capturing_sizes(), lowered_for_gpus() as halves, raised:
        program(*arguments)
    for gm in halves:
        exchanged = [n for n in gm.graph.nodes if n.target is ALL_TO_ALL]
        dtypes = [n.meta["val"].dtype for n in exchanged]
        assert dtypes.count(torch.uint8) == 1 + (more_exchanges if gm is halves[0] else 0)


# --- tests --------------------------------------------------------------------------------------


# Options of fp8pass, and changes of the model.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "checkpointing": ({}, {"checkpoints": True}),
    "frozen experts": ({}, {"frozen": True}),
    "padded": ({}, {"pads": True}),
    "5 bits": ({"save_format": "e2m2"}, {}),
    "all saves compact": ({"compact_saves": "all"}, {}),
    "budget": ({"memory_budget": 0.7}, {}),
    "values saved exactly": ({"save_format": "none"}, {}),
    "all GEMMs": ({"fp8_gemms": "all"}, {}),
}


QUICK = "plain", "padded", "checkpointing"


@pytest.mark.parametrize("case", QUICK)
def test_exchanges_in_fp8_change_no_bit(two, case):
    two(exchanged_data_changes_no_bit, *CASES[case])


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_exchanges_beside_other_options(two, case):
    two(exchanged_data_changes_no_bit, *CASES[case])


@pytest.mark.long
def test_generated_code_exchanges_in_fp8(two):
    two(exchanged_data_changes_no_bit, {"compiler": "inductor"}, {})


@pytest.mark.parametrize(
    "function",
    [
        gradients_are_near_eager,
        recipe_exact_sends_what_the_model_sends,
        a_rank_without_tokens_waits_for_none,
        a_nan_reaches_the_rank_of_its_expert,
    ],
)
def test_expert_parallel_training(two, function):
    two(function)


def test_reasons_name_the_operator_that_reads_high_precision(two):
    for reasons in two(tokens_that_others_read_stay_in_bf16):
        assert reasons == ["aten.index.Tensor reads it in high precision"]


# Tokens that each rank receives from each rank, and the most that it keeps.
SIZES = {
    "a rank without tokens": ([[32, 32], [0, 0]], 64),
    "a rank drops tokens": ([[20, 20], [12, 12]], 32),
}


@pytest.mark.parametrize("case", SIZES)
def test_ranks_with_other_sizes_send_the_same(two, case):
    two(ranks_with_other_sizes_send_the_same, *SIZES[case])


def test_all_exchanges_of_a_chain_send_fp8(two):
    two(all_exchanges_of_a_chain_send_fp8)


@pytest.mark.long
def test_four_ranks_exchange_in_fp8(tmp_path):
    with ranks(tmp_path, "cpu", world=4) as four:
        four(exchanged_data_changes_no_bit, {}, {})
        four(a_rank_without_tokens_waits_for_none)


@pytest.mark.long
def test_graphs_are_lowered_for_gpus(tmp_path):
    with ranks(tmp_path, "cpu") as two:
        for pads, more_exchanges in ((False, 0), (True, 0), (False, 1)):
            two(graphs_are_lowered_for_gpus, pads, more_exchanges)
