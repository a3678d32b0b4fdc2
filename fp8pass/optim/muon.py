"""`Muon`: momentum in 8 bits, orthogonalized by Newton–Schulz iterations, and `split_parameters`.

    m ← μ m + (1 - μ) g        u = μ m + (1 - μ) g, or m without Nesterov momentum
    w ← w (1 - lr·λ) - lr · r · NS(u)

`r` adjusts the learning rate to the shape of the matrix. Apart from NS(u), both lines are
elementwise updates, each in one Triton kernel or in PyTorch (`update.py`). `newton_schulz.py`
computes NS(u) of whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.graph.names import clean_path, matching_pattern, warn_about_idle_patterns
from fp8pass.graph.output_heads import has_head_name, largest_embedding_size
from fp8pass.optim.fused import FusedUpdate, StreamedUpdate
from fp8pass.optim.group_options import PARAMETER, Storage
from fp8pass.optim.kernel import FusedRule
from fp8pass.optim.newton_schulz import newton_schulz, orthogonalize, ranks_of
from fp8pass.optim.offload import Staging, is_offloaded
from fp8pass.optim.optimizer import How, Optimizer
from fp8pass.optim.shards import find_quantized, like_parameter
from fp8pass.optim.slots import Slot
from fp8pass.optim.update import Batch, Group, PreparedUpdate, Rule, Tensors, update_eagerly
from fp8pass.option_checks import ConfigError, checked_patterns

# A round ends when it has this number of elements on each rank, and at least one matrix for each
# rank. Small rounds need little memory for the directions.
ROUND = 1 << 26
MOMENTUM = "momentum_buffer"
_MOMENTUM = """
gradient = gradient * tl.load(control)
momentum_buffer = momentum_buffer + complement * (gradient - momentum_buffer)
direction = momentum_buffer + share * (gradient - momentum_buffer)
"""
_WEIGHTS = """
decay = tl.load(factors + number)
rate = tl.load(factors + count + number)
{weights} = {weights} * decay - rate * gradient
"""
# Names of output heads that are layers of the model itself, not of a submodule.
CLASSIFIERS = ("head", "classifier", "score", "fc")


class Muon(Optimizer):
    """`torch.optim.Muon` with momentum in 8 bits, for the matrices of hidden layers.

        matrices, others = fp8pass.optim.split_parameters(model)
        optimizers = [fp8pass.optim.Muon(matrices, lr=0.02), fp8pass.optim.AdamW(others, lr=3e-4)]

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix (Jordan et al., "Muon:
    An optimizer for hidden layers in neural networks", 2024). Options can be set for each parameter
    group. Under FSDP2 and tensor parallelism each rank orthogonalizes a part of the matrices.

    Args:
        params: matrices in float32, bfloat16 or float16, or groups of them.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay, multiplied by `lr`.
        momentum: decay of the momentum.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: coefficients a, b and c of the Newton–Schulz iteration.
        eps: lower limit of the norm by which the iteration divides a matrix.
        ns_steps: number of iterations.
        adjust_lr_fn: factor of the learning rate for a matrix [M, N]. `original` (also None) is
            max(1, M / N)^½. `match_rms_adamw` is 0.2 max(M, N)^½ ("Muon is Scalable for LLM
            Training", section 2.2), for learning rates that were tuned for AdamW.
        momentum_format: format of the momentum: `int8` (127 equal steps on each side of zero);
            `e4m3`, `e5m2` or `de8` (8-bit dynamic exponent), each also with `+expand`; `fp16`,
            `bf16` or `fp32`.
        weights: how 16-bit parameters receive small updates, as in `AdamW`.
        state_rounding: rounding of momentum and FP16 master copies, `stochastic` or `nearest`.
        group_size: number of consecutive elements that share a scale. It must be a power of two.
        seed: seed of stochastic rounding.
        offload: `("states",)` stores the states in host memory, as in `AdamW`.

    Raises:
        ConfigError: an option has an invalid value, a parameter is not a matrix or cannot be
            optimized, or host memory is too small.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        momentum_format: str = "int8",
        weights: str = "stochastic",
        state_rounding: str = "stochastic",
        group_size: int = 128,
        seed: int = 0,
        offload: Iterable[str] = (),
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "momentum_format": momentum_format,
            "weights": weights,
            "state_rounding": state_rounding,
            "group_size": group_size,
            "seed": seed,
            "offload": offload,
        }
        super().__init__(params, defaults)

    def _fuses(self, group: Group, parameter: Tensor) -> bool:
        return not self._streams(group, parameter) and super()._fuses(group, parameter)

    def _streams(self, group: Group, parameter: Tensor) -> bool:
        # All ranks must update the same matrices together, also if some shards are too small to be
        # offloaded.
        return find_quantized(parameter) is not None or "states" in group["offload"]

    def _make_update(
        self, group: Group, parameters: Tensors, slots: Sequence[Slot], gradients: Tensors, how: How
    ) -> PreparedUpdate:
        def make_round(members: Sequence[int]) -> FusedRound | EagerRound:
            found = [slots[i] for i in members]
            if how.fuses:
                return FusedRound(found, [gradients[i] for i in members], how.storage)
            offloaded = [is_offloaded(group, "states", parameters[i]) for i in members]
            return EagerRound(found, how.storage, staging, offloaded, device)

        device = parameters[0].device
        staging = self._staging_of(device) if how.streams else None
        rounds = [(members, make_round(members)) for members in _divide_into_rounds(parameters)]
        return partial(_update_in_rounds, parameters, slots, rounds)


class FusedRound:
    """Updates the momentum with one Triton kernel, and the weights with another kernel."""

    def __init__(self, slots: Sequence[Slot], gradients: Tensors, storage: Storage) -> None:
        of_momentum, of_weights = _divide_storage(storage)
        directions = [g.new_empty(0, dtype=torch.bfloat16) for g in gradients]
        self.momentum = momentum = FusedUpdate(FUSED_MOMENTUM, slots, gradients, of_momentum)
        self.weights = FusedUpdate(FUSED_WEIGHTS, slots, directions, of_weights, after=momentum)

    def accumulate(
        self, gradients: Tensors, directions: Tensors, group: Group, control: Tensor
    ) -> None:
        """Update the momentum, and write the directions."""
        self.momentum.step(gradients, group, control, directions)

    def apply(self, directions: Tensors, group: Group, control: Tensor) -> None:
        """Update the weights with orthogonal directions."""
        self.weights.step([u.contiguous() for u in directions], group, control)


class EagerRound:
    """Updates momentum and weights with PyTorch's operators, also if states are in host memory."""

    def __init__(
        self,
        slots: Sequence[Slot],
        storage: Storage,
        staging: Staging | None,
        offloaded: Sequence[bool],
        device: torch.device,
    ) -> None:
        self.slots, self.storage = slots, storage
        self.staging, self.offloaded = staging, offloaded
        # A `control` for `apply`: the factor is 1, because directions are already scaled.
        self.unscaled = torch.tensor([1.0, 0.0], device=device)

    def accumulate(
        self, gradients: Tensors, directions: Tensors, group: Group, control: Tensor
    ) -> None:
        slots = [
            replace(slot, parameter=u, states={MOMENTUM: slot.states[MOMENTUM]}, offloaded=None)
            for slot, u in zip(self.slots, directions, strict=True)
        ]
        self._run(slots, update_momentum, gradients, group, control)

    def apply(self, directions: Tensors, group: Group, control: Tensor) -> None:
        slots = [
            replace(slot, states={k: x for k, x in slot.states.items() if k != MOMENTUM})
            for slot in self.slots
        ]
        self._run(slots, update_weights, directions, group, self.unscaled)

    def _run(
        self,
        slots: Sequence[Slot],
        rule: Rule,
        gradients: Tensors,
        group: Group,
        control: Tensor,
    ) -> None:
        streamed: list[tuple[Slot, Tensor]] = []
        present: list[tuple[Slot, Tensor]] = []
        for slot, gradient, offloaded in zip(slots, gradients, self.offloaded, strict=True):
            on_host = slot.states or slot.offloaded is not None
            (streamed if offloaded and on_host else present).append((slot, gradient))
        if present:
            some, found = zip(*present, strict=True)
            update_eagerly(some, self.storage, rule, found, group, control)
        if streamed:
            assert self.staging is not None
            some, found = zip(*streamed, strict=True)
            update = StreamedUpdate(some, found, self.storage, self.staging, rule)
            update.step(found, group, control)
            self.staging.join()


def _update_in_rounds(
    parameters: Tensors,
    slots: Sequence[Slot],
    rounds: Sequence[tuple[Sequence[int], FusedRound | EagerRound]],
    gradients: Tensors,
    group: Group,
    control: Tensor,
) -> None:
    """Update matrices of one dtype and device. Directions are in memory for one round at a time."""
    function = partial(
        newton_schulz,
        coefficients=group["ns_coefficients"],
        steps=group["ns_steps"],
        eps=group["eps"],
    )
    for members, update in rounds:
        found = [gradients[i] for i in members]
        directions = [torch.empty(g.shape, dtype=torch.bfloat16, device=g.device) for g in found]
        update.accumulate(found, directions, group, control)
        whole = [like_parameter(u, parameters[i]) for i, u in zip(members, directions, strict=True)]
        directions = orthogonalize(whole, slots[members[0]].number, function)
        update.apply(directions, group, control)


def _divide_into_rounds(parameters: Tensors) -> Iterator[list[int]]:
    """Yield the indices of the parameters of each round. All ranks have the same rounds."""
    members: list[int] = []
    size = 0
    for i, parameter in enumerate(parameters):
        members.append(i)
        ranks = ranks_of(parameter)
        size += parameter.numel() // ranks
        if size >= ROUND and len(members) >= ranks:
            yield members
            members, size = [], 0
    if members:
        yield members


def update_momentum(batch: Batch, gradient: Tensor) -> None:
    """Update the momentum, and write the direction u into the parameters of the slots."""
    batch.count_step()
    beta = batch.group["momentum"]
    momentum = batch.read(MOMENTUM).lerp(gradient, 1 - beta)
    batch.write({MOMENTUM: momentum})
    batch.write_parameter(gradient.lerp(momentum, beta) if batch.group["nesterov"] else momentum)


def update_weights(batch: Batch, direction: Tensor) -> None:
    shapes = torch.tensor([slot.shape for slot in batch.slots], dtype=torch.float64)
    found = factors(batch.group, batch.steps, shapes.to(direction.device))
    decay, rate = (batch.repeat(x) for x in found)
    batch.write({PARAMETER: batch.read_weights() * decay - rate * direction})


def factors(group: Group, steps: Tensor, shapes: Tensor) -> Tensor:
    """Return 1 - lr·λ and lr·r of n matrices, fp32 [2, n], given their `shapes`, fp64 [n, 2]."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.to(shapes).reshape(())
    rows, columns = shapes.unbind(1)
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratios = 0.2 * torch.maximum(rows, columns).sqrt()
    else:
        ratios = (rows / columns).clamp_min(1).sqrt()
    return torch.stack([torch.ones_like(ratios) - lr * group["weight_decay"], lr * ratios]).float()


@cache
def _divide_storage(storage: Storage) -> tuple[Storage, Storage]:
    """Return the storage of momentum alone, and the storage of weights alone."""
    return replace(storage, weights="nearest"), replace(storage, moments={})


# The same arithmetic as in `update_momentum` and `update_weights`, in fp32.
FUSED_MOMENTUM = FusedRule(
    "muon_momentum",
    {
        "complement": lambda group: 1 - float(group["momentum"]),
        "share": lambda group: 1 - float(group["momentum"]) if group["nesterov"] else 0.0,
    },
    lambda group, steps, shapes: steps,
    lambda writer: writer.add(_MOMENTUM),
    result="direction",
)
FUSED_WEIGHTS = FusedRule(
    "muon_weights",
    {},
    factors,
    lambda writer: writer.add(_WEIGHTS, weights=writer.weights),
)


def split_parameters(
    model: nn.Module, *, skip: str | Sequence[str] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide the parameters of a model: matrices of hidden layers for Muon, others for AdamW.

    A parameter is a matrix of a hidden layer if it has two dimensions, both longer than 1, and no
    embedding or output head uses it. An output head is a layer named `lm_head`, `embed_out` or
    `unembed`, or a layer of the model itself named `output`, `head`, `classifier`, `score` or `fc`.
    If there is no such layer, and no linear layer shares the weight of an embedding, the output
    heads are the linear layers of the size of the largest embedding.

    Args:
        model: a module, also a compiled or distributed module.
        skip: paths, or patterns with *, of modules or parameters that AdamW trains, such as
            position embeddings that are plain parameters.

    Returns:
        The parameters for Muon, and the parameters for AdamW, both in the order of the model.

    Raises:
        ConfigError: the model is not a module, or `skip` has an invalid pattern.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    patterns = checked_patterns("skip", skip)
    named = [(clean_path(n), p) for n, p in model.named_parameters(remove_duplicate=False)]
    warn_about_idle_patterns("skip", patterns, "parameter", [name for name, _ in named])
    excluded = _parameters_of_tables(model)
    excluded |= {id(p) for name, p in named if matching_pattern(name, patterns) is not None}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        (matrices if is_matrix and id(parameter) not in excluded else others).append(parameter)
    return matrices, others


def _parameters_of_tables(model: nn.Module) -> set[int]:
    modules = [(clean_path(path), module) for path, module in model.named_modules()]
    embeddings = [m for _, m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    heads = [m for path, m in modules if has_head_name(path) or path in CLASSIFIERS]
    tables = {id(p) for m in (*embeddings, *heads) for p in m.parameters()}
    linears = [m for _, m in modules if isinstance(m, nn.Linear)]
    if not heads and not any(id(m.weight) in tables for m in linears):
        size = largest_embedding_size(model)
        found = (m for m in linears if (m.out_features, m.in_features) == size)
        tables |= {id(m.weight) for m in found}
    return tables
