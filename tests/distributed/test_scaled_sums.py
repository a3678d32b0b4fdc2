"""Gradients that are added up in FP8 on the way (FP8-LM 2.1)."""

from __future__ import annotations

import math

import parallel
import pytest
import torch
from test_parallel import assert_replicas_are_equal, backward, distributed, gradients
from torch import Tensor, nn
from torch import distributed as dist

import fp8pass
from fp8pass.dialect.formats import E4M3
from fp8pass.distributed.collectives import Traffic
from fp8pass.distributed.scaled_sums import (
    CHUNK,
    GROWTH,
    THRESHOLD,
    AutoScale,
    ScaledSums,
    added_in_turn,
)
from fp8pass.distributed.wire import scales_of

CPU = torch.device("cpu")


def reduced(terms: Tensor, auto: AutoScale) -> Tensor:
    """The mean of terms [world, N], N one chunk, as ranks with one scale would reduce them."""
    scale = scales_of(terms.abs().amax().view(1) / auto.mu).float()
    codes = (terms / scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    total = added_in_turn(codes)
    auto.adapt((total.float().abs() >= E4M3.max).float().mean().view(1))
    return total.float() * scale / len(terms)


@pytest.mark.parametrize(("ranks", "accepted"), [(2, 0.04), (8, 0.06), (64, 0.4)])
def test_error_of_a_mean_grows_with_ranks(ranks, accepted):
    """Gradients with as much noise as they have in common, once µ has found its size."""
    generator = torch.Generator().manual_seed(0)
    auto = AutoScale(ranks, CPU)
    errors = []
    for _ in range(100):
        common = torch.randn(1, CHUNK, generator=generator)
        terms = common + torch.randn(ranks, CHUNK, generator=generator)
        mean = terms.mean(0)
        errors.append(float((reduced(terms, auto) - mean).norm() / mean.norm()))
    assert 0.01 < max(errors) < accepted


def test_mu_doubles_in_a_thousand_steps_and_is_halved_by_overflows():
    auto = AutoScale(8, CPU)
    none, some = torch.zeros(1), torch.full((1,), 2 * THRESHOLD)
    for _ in range(1000):
        auto.adapt(none)
    assert math.isclose(float(auto.mu), 2 / 8, rel_tol=1e-3)
    auto.adapt(some)
    assert math.isclose(float(auto.mu), 1 / 8, rel_tol=1e-3)
    for _ in range(5000):
        auto.adapt(none)
    assert float(auto.mu) == 1.0
    assert math.isclose(GROWTH**1000, 2)


def test_sums_stop_at_the_largest_code_and_keep_nan():
    codes = torch.tensor([[400.0, 1.0, float("nan")], [400.0, 2.0, 1.0]]).to(E4M3.dtype)
    assert added_in_turn(codes).float().tolist()[:2] == [448.0, 3.0]
    assert added_in_turn(codes).float().isnan().tolist() == [False, False, True]


# --- what ranks do ------------------------------------------------------------------------------


def sums_of_ranks(device: str, length: int) -> None:
    """Near those in fp32, the same bits on all ranks, in 0.501 times the bytes of BF16."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    traffic = Traffic()
    sums = ScaledSums(traffic)
    group = dist.group.WORLD
    for _ in range(3):
        x = torch.randn(length, generator=generator).to(device)
        x[: length // 2] *= 1e-6
        want = x.clone()
        dist.all_reduce(want)
        sums.all_reduce(x, (length,), group, 0.5)
        ranks = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(ranks, x)
        assert torch.equal(*ranks)
        for part in (slice(0, length // 2 - CHUNK), slice(length // 2 + CHUNK, length)):
            error = (x[part] - want[part] / 2).norm() / (want[part] / 2).norm()
            assert 0 < error < 0.06
    assert traffic.elements == 3 * (length // 2 * 2)
    assert 0.5 < traffic.ratio <= 0.501
    assert next(iter(sums.scales.values())).mu[0].item() == pytest.approx(0.5 * GROWTH**2)


def training(device: str, way: str) -> None:
    losses: list[Tensor] = []
    monitor = fp8pass.Monitor(every=4)
    model = distributed(way, device, "coat")
    fp8pass.distributed.compress(model, "scaled", monitor=monitor)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(6):
        losses.append(backward(way, device, model, seed=1))
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    assert_replicas_are_equal(model)
    assert losses[-1] < 0.9 * losses[0]
    rows = {row.module: row for row in monitor.latest}
    assert rows.keys() == ({""} if way == "ddp" else {"", "blocks.0", "blocks.1"})
    for row in rows.values():
        assert (row.step, row.tensor, row.scales) == (4, "gradient sent", f"1×{CHUNK}")
        assert 20 < row.sqnr_db < 60
        assert 0.5 < row.mu < 0.51


def what_is_not_finite_reaches_all(device: str, way: str) -> None:
    model = distributed(way, device, "exact")
    fp8pass.distributed.compress(model, "scaled")
    ids = parallel.batch(device, of_rank=True)
    loss = parallel.loss_of(model(ids), ids)
    (loss * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
    assert all(g.isnan().any() for g in gradients(model))


def a_monitor_of_groups(device: str) -> None:
    monitor = fp8pass.Monitor(every=1)
    model = distributed("fsdp blocks", device, "exact")
    with pytest.raises(fp8pass.ConfigError, match=r"monitor must be a fp8pass\.Monitor, got dict"):
        fp8pass.distributed.compress(model, monitor={})
    fp8pass.distributed.compress(model, monitor=monitor)
    backward("fsdp blocks", device, model)
    monitor.step()
    assert {(row.scales, row.mu) for row in monitor.latest} == {("1×128", 1.0)}
    assert all(24 < row.sqnr_db < 40 for row in monitor.latest)
    assert isinstance(model, nn.Module)


def test_two_ranks_add_up(two):
    two(sums_of_ranks, 1 << 16)


@pytest.mark.parametrize("claim", [training, what_is_not_finite_reaches_all])
@pytest.mark.parametrize("way", ["ddp", "fsdp blocks"])
def test_two_ranks(two, way, claim):
    two(claim, way)


def test_a_monitor(two):
    two(a_monitor_of_groups)
