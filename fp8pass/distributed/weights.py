"""Weights that FSDP2 gathers in codes: E4M3, a scale for each row (LLMQ 3.2, FP8 weight gather).

A shard holds whole rows, so that each rank codes its own, without asking others for the largest
magnitude. What FSDP2 gathers stays in codes on every rank: compiled code takes them as they are for
the forward's GEMM, which would code a BF16 weight by row into the same bits. The backward decodes
them. Shards, their gradients and state dicts are the plain tensors that they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fp8pass import compat
from fp8pass.compat.fsdp import fsdp_has_run, shard_of
from fp8pass.dialect import hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3
from fp8pass.distributed.collectives import Traffic
from fp8pass.graph.linear_layers import is_multiple_of_16
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.output_heads import has_head_name

aten = torch.ops.aten
fp8 = torch.ops.fp8pass


class CodedWeight(Tensor):
    """A matrix [M, K] as E4M3 codes and a scale for each row; its values to every operator.

    Attributes:
        codes: float8_e4m3fn [M, K].
        scales: fp32 [M, 1].
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedWeight:
        return compat.wrapper(cls, codes, dtype)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    def __repr__(self) -> str:  # type: ignore[override]
        """Without numbers: compilers print weights that have none."""
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    def decoded(self) -> Tensor:
        """The values, in a plain tensor."""
        return fp8.dequantize.default(self.codes, self.scales, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> CodedWeight:
        return CodedWeight(inner["codes"], inner["scales"], dtype)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for its cache."""
        return f"CodedWeight {tuple(self.shape)} {self.dtype} {self.requires_grad}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # FSDP2 and nn.Parameter look at a weight in these ways, which change nothing of it.
        if func is aten.detach.default or (
            func is aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        ):
            (weight,) = (x for x in args[:1] if isinstance(x, CodedWeight))
            return CodedWeight(weight.codes, weight.scales, weight.dtype)
        args, kwargs = compat.tree_map_only(CodedWeight, CodedWeight.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


class Gathering:
    """How FSDP2 gathers the weights of one of its modules: its extension for each of them.

    It asks for one after the other, and gets codes that were made of all at once.
    """

    def __init__(self, layers: list[nn.Linear], traffic: Traffic) -> None:
        self.layers, self.traffic = layers, traffic
        self._coded: dict[int, tuple[Tensor, Tensor]] = {}

    def attach(self) -> None:
        """Answer for the shards, unless FSDP2 has put whole weights in their place."""
        for i, layer in enumerate(self.layers):
            weight: Any = layer.weight
            shard: Any = shard_of(weight) if isinstance(weight, DTensor) else None
            if shard is not None and not hasattr(shard, "fsdp_pre_all_gather"):
                shard.fsdp_pre_all_gather = self._before(i)
                shard.fsdp_post_all_gather = self.after

    def _before(self, i: int) -> Any:
        """What gives what this rank sends of weight `i`: codes [M / ranks, K], scales [.., 1]."""

        def before(
            mesh: Any, size: Any, stride: Any, module: nn.Linear, mp_policy: Any
        ) -> tuple[tuple[Tensor, Tensor], torch.dtype]:
            dtype = mp_policy.param_dtype or module.weight.dtype
            if i not in self._coded:
                shards = [shard_of(cast(Any, y.weight)).detach() for y in self.layers]
                self._coded = dict(enumerate(coded(shards, dtype)))
            codes, scales = self._coded.pop(i)
            sent = codes.numel() + scales.numel() * scales.itemsize
            self.traffic.add(codes.numel(), sent, mesh.size() - 1)
            return (codes, scales), dtype

        # FSDP2 asks for it each time, which takes longer than all of the rest.
        before.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
        return before

    @staticmethod
    def after(
        gathered: tuple[Tensor, Tensor], dtype: torch.dtype, _: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
        """The weight in what was gathered. FSDP2 gathers into the same memory every time."""
        return None if out is not None else (CodedWeight(*gathered, dtype), gathered)


def coded(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of matrices [M, K], rounded to `dtype` before, as `quantize` gives them."""
    if hardware.why_no_triton_kernels(matrices[0].device) is None:
        from fp8pass.distributed import wire_kernels

        return wire_kernels.code_rows([x.contiguous() for x in matrices], dtype)
    found = []
    for x in matrices:
        scales = fp8.scale.default(fp8.row_amax.default(x.to(dtype)), E4M3.name)
        found.append((fp8.quantize.default(x.to(dtype), scales, E4M3.name), scales))
    return found


def gather_codes(model: nn.Module, skip: tuple[str, ...], traffic: Traffic) -> tuple[str, ...]:
    """Have FSDP2 gather the weights of linear layers in codes; the paths of these layers.

    Output heads, by their name or by as many outputs as an embedding has rows, layers that `skip`
    names, and weights whose rows FSDP2 does not share out evenly are gathered as they were.
    """
    layers = dict(_layers(model, skip))
    together: dict[tuple[nn.Module, torch.dtype], list[nn.Linear]] = {}
    for path, layer in layers.items():
        together.setdefault((_gathers(model, path), layer.weight.dtype), []).append(layer)
    gatherings = [Gathering(each, traffic) for each in together.values()]

    def attach(*_: Any) -> None:
        for gathering in gatherings:
            gathering.attach()

    attach()
    if layers:
        # Whoever moves a model gives it other shards. Before what FSDP2 does before a forward.
        model.register_forward_pre_hook(torch.compiler.disable(attach), prepend=True)
    return tuple(layers)


def _gathers(model: nn.Module, path: str) -> nn.Module:
    """The innermost module of FSDP2's around a layer: it gathers all weights in it at once."""
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
    return next(module for module in around if isinstance(module, FSDPModule))


def _layers(model: nn.Module, skip: tuple[str, ...]) -> Iterator[tuple[str, nn.Linear]]:
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            # What follows a layer is not known here: the graph, which knows, is traced later.
            is_head = has_head_name(path) or module.out_features in vocabularies
            is_exact = is_head or matching_pattern(path, skip) is not None
            if not is_exact and _is_shared_out_in_rows(module.weight):
                yield path, module


def _is_shared_out_in_rows(weight: Tensor) -> bool:
    """Whether several ranks have as many rows each of a matrix that can run in FP8."""
    if not isinstance(weight, DTensor) or not all(map(is_multiple_of_16, weight.shape)):
        return False
    *replicas, shard = weight.placements
    ranks = weight.device_mesh.size(-1)
    on_device = weight.device_mesh.device_type == weight.device.type  # it is not, if offloaded
    whole = all(p.is_replicate() for p in replicas)
    is_even = ranks > 1 and weight.shape[0] % ranks == 0
    return shard == Shard(0) and whole and on_device and is_even


def why_too_late(modules: Iterable[nn.Module]) -> str:
    """Why weights cannot be gathered in codes any more; '' if they can."""
    shards = (m for m in modules if isinstance(m, FSDPModule))
    has_run = any(map(fsdp_has_run, shards))
    return "the model has run already: call compress before its first forward." if has_run else ""
