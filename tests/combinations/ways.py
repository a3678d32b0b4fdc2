"""The ways to distribute the decoder over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import Training, Way

import fp8pass

MICROBATCHES = 2  # of a pipeline


class Distributed(Way):
    """A way that needs ranks."""

    def __init__(self, name: str, ranks: int = 2) -> None:
        super().__init__(name)
        self.ranks = ranks


class DDP(Distributed):
    """A copy of the model on each rank."""

    def distribute(self, t: Training) -> None:
        t.outer = nn.parallel.DistributedDataParallel(t.model)
        t.compile_in_place(t.outer)

    def reduces(self, t: Training, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(t.outer, nn.parallel.DistributedDataParallel)
        return nullcontext() if last or t.steps_in_backward else t.outer.no_sync()


class Averaged(DDP):
    """`average_sums` with a copy of the model on each rank. The plain training uses DDP."""

    averages_sums = True

    def configure(self, t: Training) -> None:
        super().configure(t)
        if not t.plain:
            t.steps_in_backward, t.max_norm = True, t.max_norm or math.inf
            t.optimizer_options = t.optimizer_options or {}

    def distribute(self, t: Training) -> None:
        if t.plain:
            super().distribute(t)
        else:
            t.compile_in_place(t.model)

    def reduces(self, t: Training, last: bool) -> AbstractContextManager[Any]:
        return super().reduces(t, last) if t.plain else nullcontext()

    def start(self, t: Training) -> None:
        if not t.plain and not t.attached:
            t.step_in_backward()


class FSDP(Distributed):
    """Shards of each parameter, also with replicas (HSDP) or tensor parallelism.

    Args:
        name: the name of the feature.
        mesh: the sizes of the mesh by dimension. Dimension "tensor" splits layers.
    """

    shards = True

    def __init__(self, name: str, **mesh: int) -> None:
        super().__init__(name, torch.Size(mesh.values()).numel())
        self.mesh = mesh
        self.ranks_per_batch = mesh.get("tensor", 1)

    def distribute(self, t: Training) -> None:
        mesh = init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
        if "tensor" in self.mesh:
            split_layers(t.model, mesh["tensor"])
            mesh = mesh["shards"]
        policy = MixedPrecisionPolicy(param_dtype=t.param_dtype)
        for block in t.model.layers:
            t.compile_in_place(block)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(t.model, mesh=mesh, mp_policy=policy)

    @contextmanager
    def reduces(self, t: Training, last: bool) -> Iterator[None]:
        t.model.set_requires_gradient_sync(last or t.steps_in_backward)
        yield

    def clip(self, t: Training, norm: float) -> None:
        clip_by_total(t.model.parameters(), norm)


class Tensors(Distributed):
    """Layers split over ranks."""

    ranks_per_batch = 2
    shards = True

    def distribute(self, t: Training) -> None:
        split_layers(t.model, init_device_mesh("cpu", (self.ranks,)))
        t.compile_in_place(t.model)

    def clip(self, t: Training, norm: float) -> None:
        clip_by_total(t.model.parameters(), norm)


class Sequences(Tensors):
    """Layers split over ranks. Between them, each rank has a part of the sequence."""

    def distribute(self, t: Training) -> None:
        mesh = init_device_mesh("cpu", (self.ranks,))
        rows, whole = Shard(1), Replicate()
        split_layers(t.model, mesh, output_layouts=rows)
        attention = PrepareModuleInput(
            input_layouts=(rows, None, None), desired_input_layouts=(whole, None, None)
        )
        mlp = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
        norms = {f"{name}_norm": SequenceParallel() for name in ("attention", "mlp")}
        for block in t.model.layers:
            parallelize_module(block, mesh, {"attention": attention, "mlp": mlp, **norms})
        ends = {
            "embed": RowwiseParallel(input_layouts=whole, output_layouts=rows),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
        }
        parallelize_module(t.model, mesh, ends)
        t.compile_in_place(t.model)


def split_layers(model: nn.Module, mesh: DeviceMesh, **outputs: Any) -> None:
    """Split the linear layers of all blocks over the ranks of a mesh."""
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    plan: dict[str, Any] = {
        **{name: ColwiseParallel() for name in (*columns, "mlp.gate_proj", "mlp.up_proj")},
        **{name: RowwiseParallel(**outputs) for name in ("attention.o_proj", "mlp.down_proj")},
    }
    for block in model.layers:
        parallelize_module(block, mesh, plan)


def clip_by_total(parameters: Iterable[nn.Parameter], norm: float, *, over_ranks: bool = False):
    """Clip gradients by their global norm, also where PyTorch cannot put them into one norm.

    Gradients on different meshes, or on one rank of a pipeline, need this in plain PyTorch, too.
    """
    found = [p for p in parameters if p.grad is not None]
    norms = [p.grad.norm() for p in found]
    squares = [(x.full_tensor() if isinstance(x, DTensor) else x).float().square() for x in norms]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if over_ranks:
        dist.all_reduce(total)
    factor = (norm / (total.sqrt() + 1e-6)).clamp(max=1.0).item()
    for p in found:
        p.grad.mul_(factor)


class Stage(nn.Module):
    """A part of the decoder. Its parameters have the same names as in the decoder."""

    def __init__(self, decoder: nn.Module, index: int, count: int) -> None:
        super().__init__()
        blocks = len(decoder.layers) // count
        indices = range(index * blocks, (index + 1) * blocks)
        self.layers = nn.ModuleDict({str(i): decoder.layers[i] for i in indices})
        self.embed = decoder.embed if index == 0 else None
        self.norm = decoder.norm if index == count - 1 else None
        self.lm_head = decoder.lm_head if index == count - 1 else None
        self.register_buffer("cos", decoder.cos, persistent=False)
        self.register_buffer("sin", decoder.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


class Pipeline(Distributed):
    """A stage of the model on each rank."""

    ranks_per_batch = 2
    backwards = MICROBATCHES

    def distribute(self, t: Training) -> None:
        self._index = dist.get_rank()
        t.model = t.outer = Stage(t.model, self._index, self.ranks)
        stage = PipelineStage(t.model, self._index, self.ranks, torch.device("cpu"))

        # The schedule would scale the sum of earlier backwards once more.
        parts = 1 if t.accumulate == 1 else t.accumulate * MICROBATCHES
        self._parts = MICROBATCHES if t.accumulate == 1 else 1

        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss = loss / parts
            return t.scaler.scale(loss) if t.scaler and torch.is_grad_enabled() else loss

        self._schedule = Schedule1F1B(
            stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=t.accumulate == 1
        )
        shared = t.config.memory_budget is not None or t.config.save_format == "e2m1"
        configs = (
            fp8pass.distributed.pipeline_configs(self._schedule, base=t.config)
            if shared
            else [t.config] * self.ranks
        )
        t.compile_in_place(t.model, configs[self._index])

    def _run(self, t: Training, run: Any, batch: Tensor) -> list[Tensor]:
        """Run the schedule, and return the losses of its micro-batches on the last rank."""
        losses: list[Tensor] = []
        with torch.autocast("cpu", t.autocast or torch.bfloat16, enabled=t.autocast is not None):
            if self._index == 0:
                run(batch[:, :-1].contiguous())  # PyTorch 2.11 checks strides
            else:
                run(target=batch[:, 1:], losses=losses)
        return losses

    def backward(self, t: Training, batch: Tensor) -> float:
        # A scaler has a scale from its first use on, also on ranks without a loss.
        scale = t.scaler.scale(torch.ones(())).item() if t.scaler else 1.0
        losses = self._run(t, self._schedule.step, batch)
        # The mean over ranks counts the ranks without a loss.
        return sum(x.item() for x in losses) / scale / self._parts * self.ranks

    @torch.no_grad()
    def evaluate(self, t: Training, batch: Tensor) -> float:
        losses = self._run(t, self._schedule.eval, batch)
        total = torch.tensor(sum(x.item() for x in losses) / self._parts * t.accumulate)
        dist.all_reduce(total)
        return total.item()

    def clip(self, t: Training, norm: float) -> None:
        clip_by_total(t.model.parameters(), norm, over_ranks=True)

    def _input(self, t: Training) -> Tensor:
        """Return an input of this stage."""
        batch = t.batches[0][0][:, :-1].contiguous()
        if self._index == 0:
            return batch
        return torch.randn(*batch.shape, t.size.dim, dtype=t.dtype, requires_grad=True)

    def use_tool(self, t: Training, tool: Any) -> None:
        tool(t.model, lambda model, x: model(x).float().square().mean(), self._input(t))

    def explain(self, t: Training) -> None:
        fp8pass.explain(t.model, self._input(t))

    def weights(self, t: Training) -> dict[str, Tensor]:
        return self._of_all_stages(super().weights(t))

    def gradients(self, t: Training) -> dict[str, Tensor]:
        return self._of_all_stages(super().gradients(t))

    def _of_all_stages(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, mine)
        return {name: x for part in parts for name, x in part.items()}

    def check_replicas(self, t: Training) -> None:
        """Stages have no parameter in common."""


WAYS = (
    DDP("DDP"),
    Averaged("average_sums"),
    FSDP("FSDP2", shards=2),
    FSDP("HSDP", copies=2, shards=2),
    Tensors("tensor parallel"),
    Sequences("sequence parallel"),
    FSDP("tensor parallel and FSDP2", shards=2, tensor=2),
    Pipeline("pipeline"),
)
