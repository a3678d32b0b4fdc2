"""Orthogonalization of matrices by a Newton–Schulz iteration, spread over ranks.

The iteration needs whole matrices, so each matrix has an owner, a rank that computes the iteration.
If only one mesh dimension shards a matrix (FSDP2, HSDP, tensor parallelism), the ranks send their
shards to the owner, which returns shards of the result, in two all-to-alls. Otherwise every rank
gathers the matrix, and the owner broadcasts the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fp8pass.optim.shards import DTensor, shard_of, whole

Orthogonalize = Callable[[Tensor], Tensor]


def newton_schulz(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return an approximation of U Vᵀ for a matrix U S Vᵀ [M, N], in BF16.

        X ← X / max(‖X‖, ε)        X ← a X + (b A + c A²) X    with A = X Xᵀ

    From Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). After five
    steps with the default coefficients, most singular values are between 0.7 and 1.2. Tall matrices
    are transposed.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def orthogonalize(
    matrices: Sequence[Tensor], first_owner: int, function: Orthogonalize
) -> list[Tensor]:
    """Apply `function` to whole BF16 matrices, and return the local shards of the results.

    `matrices` have the same order on all ranks. `first_owner` selects the rank that owns the first
    matrix, so that several calls with one matrix each are spread over ranks.
    """
    results: list[Any] = [None] * len(matrices)
    shared: dict[Any, list[int]] = defaultdict(list)
    for i, x in enumerate(matrices):
        dimension = find_dimension(x)
        if dimension is None:
            results[i] = function(x.to_local() if isinstance(x, DTensor) else x)
        else:
            is_divided = _dividing_dimensions(x) == [dimension]  # type: ignore[arg-type]
            shared[x.device_mesh, dimension, is_divided].append(i)  # type: ignore[attr-defined]
    for (mesh, dimension, is_divided), members in shared.items():
        ranks = Ranks(mesh.get_group(dimension), mesh.size(dimension), first_owner)
        some: list[Any] = [matrices[i] for i in members]
        if is_divided:
            found = exchange_shards(some, ranks, dimension, function)
        else:
            found = broadcast_results(some, ranks, function)
        for i, result in zip(members, found, strict=True):
            results[i] = result
    return results


def ranks_of(matrix: Tensor) -> int:
    dimension = find_dimension(matrix)
    return 1 if dimension is None else matrix.device_mesh.size(dimension)  # type: ignore[attr-defined]


def find_dimension(matrix: Tensor) -> int | None:
    """Return the mesh dimension along which ranks share the work on a matrix, if any.

    Prefer dimensions that shard the matrix. Among these, prefer the dimension with the most ranks.
    """
    if not isinstance(matrix, DTensor) or matrix.device_mesh.size() == 1:
        return None
    mesh, dividing = matrix.device_mesh, _dividing_dimensions(matrix)
    return max(range(mesh.ndim), key=lambda d: (d in dividing, mesh.size(d)))


def _dividing_dimensions(matrix: DTensor) -> list[int]:
    mesh = matrix.device_mesh
    sharded = (d for d, placement in enumerate(matrix.placements) if hasattr(placement, "dim"))
    return [d for d in sharded if mesh.size(d) > 1]


@dataclass(frozen=True)
class Ranks:
    """Ranks that share the orthogonalization of matrices."""

    group: Any
    size: int
    first_owner: int  # the rank that owns the first matrix, modulo `size`

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def owned(self, count: int) -> list[list[int]]:
        """Return, for each rank, the indices of the matrices that it owns, among `count`."""
        firsts = [(rank - self.first_owner) % self.size for rank in range(self.size)]
        return [list(range(first, count, self.size)) for first in firsts]

    def swap(
        self,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[Sequence[int]]],
        device: torch.device,
    ) -> list[list[Tensor]]:
        """Send BF16 tensors `sent[r]` to rank r, and receive tensors of `shapes[r]` from it."""
        empty = torch.empty(0, dtype=torch.bfloat16, device=device)
        sends = torch.cat([empty, *(x.reshape(-1) for tensors in sent for x in tensors)])
        counts = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        received = sends.new_empty(sum(map(sum, counts)))
        # In some versions of PyTorch, gloo cannot send BF16. So the data are sent as bytes.
        dist.all_to_all_single(
            received.view(torch.uint8),
            sends.view(torch.uint8),
            [2 * sum(count) for count in counts],
            [2 * sum(x.numel() for x in tensors) for tensors in sent],
            self.group,
        )
        flat = iter(received.split([count for of_rank in counts for count in of_rank]))
        return [[next(flat).view(tuple(shape)) for shape in of_rank] for of_rank in shapes]


def exchange_shards(
    matrices: Sequence[DTensor], ranks: Ranks, dimension: int, function: Orthogonalize
) -> list[Tensor]:
    """Return this rank's shards of the results, for matrices sharded by one mesh dimension only."""
    shards = [x.to_local() for x in matrices]
    shapes = [_shard_shapes(x, dimension) for x in matrices]
    axes = [x.placements[dimension].dim for x in matrices]  # type: ignore[attr-defined]
    owned, device = ranks.owned(len(matrices)), shards[0].device
    mine = owned[ranks.rank]
    received = ranks.swap(
        [[shards[i] for i in members] for members in owned],
        [[shapes[i][rank] for i in mine] for rank in range(ranks.size)],
        device,
    )
    results = []
    for i, parts in zip(mine, zip(*received, strict=True), strict=True):
        result = function(torch.cat(parts, axes[i]))
        results.append(result.split([shape[axes[i]] for shape in shapes[i]], axes[i]))
    received = ranks.swap(
        [[result[rank] for result in results] for rank in range(ranks.size)],
        [[shards[i].shape for i in members] for members in owned],
        device,
    )
    found = {
        i: x
        for members, tensors in zip(owned, received, strict=True)
        for i, x in zip(members, tensors, strict=True)
    }
    return [found[i] for i in range(len(matrices))]


def broadcast_results(
    matrices: Sequence[DTensor], ranks: Ranks, function: Orthogonalize
) -> list[Tensor]:
    """Return this rank's shards of the results. The owners broadcast the whole results."""
    wholes = [whole(x).contiguous() for x in matrices]
    owned = ranks.owned(len(matrices))
    for i in owned[ranks.rank]:
        wholes[i] = function(wholes[i]).contiguous()
    for owner, members in enumerate(owned):
        for i in members:
            dist.broadcast(wholes[i].view(torch.uint8), group_src=owner, group=ranks.group)
    return [shard_of(result, x) for result, x in zip(wholes, matrices, strict=True)]


def _shard_shapes(matrix: DTensor, dimension: int) -> list[list[int]]:
    """Return the shard's shape on each rank along a mesh dimension."""
    axis = matrix.placements[dimension].dim  # type: ignore[attr-defined]
    ranks, length = matrix.device_mesh.size(dimension), matrix.shape[axis]
    longest = -(-length // ranks)  # as in torch.chunk
    shapes = [list(matrix.shape) for _ in range(ranks)]
    for rank, shape in enumerate(shapes):
        shape[axis] = max(0, min(longest, length - rank * longest))
    return shapes
