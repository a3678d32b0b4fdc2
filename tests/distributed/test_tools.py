"""`diagnose`, `bisect` and `calibrate` on a sharded model."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import parallel
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8pass
from fp8pass import Config

EAGER = Config(compiler="eager")


class Stack(nn.Module):
    """Two equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parallel.MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sharded(device: str) -> tuple[nn.Module, Tensor]:
    """Return a sharded model, and the batch of this rank."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Stack().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    return model, torch.randn(32, parallel.WIDTH, device=device)


def names(device: str) -> tuple[list[str], list[str]]:
    """Return the names of layers in `diagnose` and `calibrate`."""
    model, x = sharded(device)
    found = fp8pass.diagnose(model, loss, x, config=EAGER)
    values = fp8pass.calibrate(model, loss, x, config=EAGER)
    return sorted({y.module for y in found.layers}), [name for name, *_ in values]


def run_bisect(device: str, broken: bool) -> str:
    """Return the report of `bisect`, or with a NaN in the shard of one rank its error message."""
    model, x = sharded(device)
    if broken and dist.get_rank():
        with torch.no_grad():
            next(model.parameters()).to_local()[:1] = torch.nan
    try:
        return str(fp8pass.bisect(model, loss, x, config=EAGER, most=1))
    except ValueError as wrong:
        return str(wrong)


# --- tools in the middle of a step ---------------------------------------------------------------

WAYS = (
    "ddp",
    "ddp views",
    "ddp views, no_sync",
    "fsdp",
    "fsdp no sync",
    "fsdp no sync, fp32",
    "hsdp",
    "hsdp compressed",
)


TOOLS = {
    "diagnose": lambda m, x: fp8pass.diagnose(m, loss, x, config=EAGER),
    "bisect": lambda m, x: fp8pass.bisect(m, loss, x, config=EAGER, most=1),
    "calibrate": lambda m, x: fp8pass.calibrate(m, loss, x, config=EAGER),
    "sharpness": lambda m, x: fp8pass.sharpness(m, loss, x, search=False),
}


def trainable(device: str, way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Stack().to(device)
    if way.startswith("ddp"):
        return DistributedDataParallel(model, gradient_as_bucket_view="views" in way)
    policy = MixedPrecisionPolicy()
    if "fp32" in way:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (2,))
    if "hsdp" in way:
        mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if "compressed" in way:
        fp8pass.distributed.compress(model)
    return model


def reduce_last(model: nn.Module, way: str, last: bool) -> AbstractContextManager[object]:
    """Return a context that reduces gradients only in the last backward of a step."""
    if "no_sync" in way and not last:
        return model.no_sync()
    if "no sync" in way:
        model.set_requires_gradient_sync(last)
    if "hsdp" in way:
        model.set_requires_all_reduce(last)
    return nullcontext()


def a_step_with_tools(device: str, way: str, tool: str, where: str) -> None:
    """Two steps of three backwards have equal bits with and without a tool."""
    found = []
    for uses_tool in (False, True):
        torch._dynamo.reset()
        model = trainable(device, way)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = torch.randn(2, 3, 32, parallel.WIDTH, generator=generator).to(device)
        for step in range(2):
            for i, x in enumerate(batches[step]):
                with reduce_last(model, way, i == 2):
                    loss(model, x).backward()
                if uses_tool and i == (2 if where == "before the step" else 1):
                    TOOLS[tool](model, 3 * batches[1, 0])
            optimizer.step()
            optimizer.zero_grad()
        found.append([parallel.full(p).detach() for p in model.parameters()])
    for with_tool, without in zip(*found, strict=True):
        assert torch.equal(with_tool, without)


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("where", ["between backwards", "before the step"])
@pytest.mark.parametrize("way", WAYS)
def test_a_tool_does_not_affect_a_step(two, way, where):
    two(a_step_with_tools, way, "diagnose", where)


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("tool", [name for name in TOOLS if name != "diagnose"])
@pytest.mark.parametrize("way", ["ddp views, no_sync", "fsdp no sync"])
def test_no_tool_affects_a_step(two, way, tool):
    two(a_step_with_tools, way, tool, "between backwards")


def warnings_about_a_wrapper(device: str) -> list[str]:
    """Return the warnings of `diagnose` if DistributedDataParallel is compiled in place."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Stack().to(device))
    model.compile(backend=fp8pass.backend(EAGER))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp8pass.diagnose(model, loss, torch.randn(32, parallel.WIDTH, device=device))
    return [str(w.message) for w in caught if "has no effect" in str(w.message)]


@pytest.mark.long
def test_a_compiled_wrapper_causes_no_warning(two):
    assert two(warnings_about_a_wrapper) == [[], []]


def count_alarms(device: str) -> int:
    """Return the number of alarms in steps with a gradient norm that is a DTensor."""
    model, x = sharded(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = fp8pass.Guard(None, optimizer, model=model, every=1)
    for _ in range(3):
        value = loss(model, x)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        guard.step(value.detach(), gradient_norm=norm)
        optimizer.zero_grad()
    return len(guard.events)


def test_a_guard_accepts_distributed_norms(two):
    assert two(count_alarms) == [0, 0]


@pytest.mark.long
def test_layers_are_named_by_their_blocks(two):
    """Gathered parameters are not the parameters of the model."""
    (first, values), second = two(names)
    assert (first, values) == second
    assert {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")} <= {*first}
    assert any(name.startswith("up:") for name in values)  # names start at the compiled module


@pytest.mark.long
@pytest.mark.parametrize("broken", [False, True])
def test_bisect_decides_equally_on_all_ranks(two, broken):
    """Decisions use gradients of all shards. Otherwise a rank would wait for the other."""
    first, second = two(run_bisect, broken)
    assert first == second
    cause = "linear layers and saved tensors in low-bit formats"
    assert ("not finite" if broken else cause) in first
