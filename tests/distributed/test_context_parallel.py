"""Context parallelism of PyTorch: each rank has a part of one long sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel import VOCABULARY, WIDTH, Decoder, mesh_of
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8pass import Config
from fp8pass.dynamo import Backend
from fp8pass.hooks import CompiledGraph

SEQUENCES, LENGTH = 2, 256


def new_model(device: str, *, checkpoints: bool = False) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(dtype=torch.bfloat16).to(device)
    model.checkpoints = checkpoints
    return model


def backward(device: str, model: nn.Module) -> list[Tensor]:
    """Run forward and backward of whole sequences, and return loss and gradients."""
    ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    return _backward(model, ids, ids.roll(1, 1))


def parallel_backward(device: str, model: nn.Module) -> list[Tensor]:
    """Divide the sequences among the ranks. Return the means of losses and gradients."""
    ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    parts = [ids, ids.roll(1, 1)]
    with context_parallel(mesh_of(model), buffers=parts, buffer_seq_dims=[1, 1]):
        found = _backward(model, *parts)
    for x in found:
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return found


def _backward(model: nn.Module, ids: Tensor, labels: Tensor) -> list[Tensor]:
    model.zero_grad()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
    return [loss.detach(), *(p.grad.float() for p in model.parameters())]


def compiled(
    device: str, recipe: str, options: dict[str, Any], *, checkpoints: bool = False
) -> tuple[Decoder, list[CompiledGraph]]:
    """Return a model of compiled blocks, and the list of their graphs."""
    torch._dynamo.reset()
    model, graphs = new_model(device, checkpoints=checkpoints), []  # type: ignore[var-annotated]
    for block in model.blocks:
        block.compile(backend=Backend(Config.recipe(recipe, **options), graphs.append))
    return model, graphs


# --- functions of ranks -------------------------------------------------------------------------


def exact_equals_eager(device: str, rotate: str) -> None:
    set_rotate_method(rotate)
    want = parallel_backward(device, new_model(device))
    model, _ = compiled(device, "exact", {"compiler": "eager"})
    assert all(map(torch.equal, parallel_backward(device, model), want))


def keys_and_values_stay_exact(device: str, rotate: str) -> None:
    """Ranks exchange keys and values in BF16, and gradients of them in FP32."""
    set_rotate_method(rotate)
    model, graphs = compiled(device, "coat", {"compiler": "eager"})
    parallel_backward(device, model)
    in_bf16 = 2 * SEQUENCES * LENGTH // dist.get_world_size() * WIDTH * 2
    sent = [collective.bytes for collective in graphs[0].plan.collectives]
    assert sent == [in_bf16, 2 * in_bf16, 2 * in_bf16]


def gradients_are_near_those_of_whole_sequences(
    device: str, recipe: str, options: dict[str, Any], checkpoints: bool, tolerance: float
) -> None:
    set_rotate_method("allgather")
    want = backward(device, new_model(device))
    model, _ = compiled(device, recipe, options, checkpoints=checkpoints)
    for _ in range(2):
        for a, b in zip(parallel_backward(device, model), want, strict=True):
            assert float((a - b).norm()) <= tolerance * float(b.norm())


# --- tests --------------------------------------------------------------------------------------


@pytest.fixture
def gpus(two):
    if two.device == "cpu":
        pytest.skip("PyTorch has no context parallelism on CPUs")
    return two


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("function", [exact_equals_eager, keys_and_values_stay_exact])
def test_context_parallelism(gpus, function, rotate):
    gpus(function, rotate)


@pytest.mark.parametrize(
    ("recipe", "options", "checkpoints", "tolerance"),
    [
        ("exact", {}, False, 0.02),
        ("coat", {}, False, 0.15),
        ("coat", {}, True, 0.15),
        ("coat", {"memory_budget": 0.6}, False, 0.15),
        ("coat", {"offload": True}, False, 0.15),
        ("block", {}, False, 0.15),
        ("agoq", {}, False, 0.4),
    ],
    ids=str,
)
def test_gradients(gpus, recipe, options, checkpoints, tolerance):
    gpus(gradients_are_near_those_of_whole_sequences, recipe, options, checkpoints, tolerance)
