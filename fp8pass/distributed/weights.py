"""Weights that FSDP2 gathers in codes: E4M3, a scale for each row (LLMQ 3.2, FP8 weight gather).

A shard holds whole rows, so that each rank codes its own, without asking others for the largest
magnitude. What FSDP2 gathers stays in codes on every rank: compiled code takes them as they are for
the forward's GEMM, which would code a BF16 weight by row into the same bits. The backward decodes
them. Shards, their gradients and state dicts are the plain tensors that they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fp8pass import compat
from fp8pass.compat.fsdp import Gathered, fsdp_has_run, gathered_parameters, shard_of
from fp8pass.dialect import hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3
from fp8pass.distributed.collectives import Traffic
from fp8pass.graph.linear_layers import is_multiple_of_16
from fp8pass.graph.names import matching_pattern, warn_about_idle_patterns
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
            weight = args[0]
            return CodedWeight(weight.codes, weight.scales, weight.dtype)
        if compat.schema_of(func).is_mutable:
            raise RuntimeError(
                f"{func} would change a gathered weight, which is lost: it is in codes. Change its "
                "shard, or name its layer in compress(model, skip=[...])."
            )
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
                shards = [shard_of(cast(Any, y.weight)) for y in self.layers]
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


@torch.no_grad()
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

    Those of layers that compute in BF16. Output heads, by their name or the sizes of the largest
    embedding, layers that `skip` names, and weights whose rows FSDP2 does not share out evenly are
    gathered as they were.
    """
    paths = {module: path for path, module in model.named_modules()}
    logits = _sizes_of_logits(model)
    found: list[str] = []
    gatherings: dict[nn.Module, list[Gathering]] = {}
    for module in model.modules():
        together: dict[tuple[int, torch.dtype], list[nn.Linear]] = {}
        for each in gathered_parameters(module) if isinstance(module, FSDPModule) else ():
            layer = each.module
            if isinstance(layer, nn.Linear) and each.name == "weight" and _may_be_coded(each):
                together.setdefault((each.group, layer.weight.dtype), []).append(layer)
        for layers in together.values():
            chosen = [y for y in layers if not _is_exact(paths[y], y, logits, skip)]
            found += [paths[layer] for layer in chosen]
            if chosen:
                gatherings.setdefault(module, []).append(Gathering(chosen, traffic))
    # FSDP2 begins to gather where a forward enters it: at the whole model, or at one of its parts.
    if gatherings and isinstance(model, FSDPModule):
        gatherings[model] = [each for group in gatherings.values() for each in group]
    for module, group in gatherings.items():
        _attach_before_forwards(module, group)
    linears = [path for module, path in paths.items() if isinstance(module, nn.Linear)]
    warn_about_idle_patterns("skip", skip, "linear layer", linears)
    return tuple(found)


def _attach_before_forwards(module: nn.Module, gatherings: list[Gathering]) -> None:
    """Attach now, and before what FSDP2 does: whoever moves a model gives it other shards."""

    def attach(*_: Any) -> None:
        for gathering in gatherings:
            gathering.attach()

    attach()
    module.register_forward_pre_hook(torch.compiler.disable(attach), prepend=True)


def _is_exact(path: str, layer: nn.Linear, logits: object, skip: tuple[str, ...]) -> bool:
    """Whether a layer is skipped, or an output head as far as is known before a graph is traced."""
    is_head = has_head_name(path) or (layer.out_features, layer.in_features) == logits
    return is_head or matching_pattern(path, skip) is not None


def _sizes_of_logits(model: nn.Module) -> tuple[int, int] | None:
    """The sizes of the largest embedding, which an output head has, too."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    return max(((m.num_embeddings, m.embedding_dim) for m in tables), default=None)


def _may_be_coded(each: Gathered) -> bool:
    weight = each.module.weight
    assert isinstance(weight, Tensor)
    is_float = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    in_bf16 = each.dtype is torch.bfloat16
    return is_float and in_bf16 and not each.is_kept_in_parts and _is_shared_out_in_rows(weight)


def _is_shared_out_in_rows(weight: Tensor) -> bool:
    """Whether several ranks have as many rows each of a matrix that can run in FP8."""
    if not isinstance(weight, DTensor) or not all(map(is_multiple_of_16, weight.shape)):
        return False
    *replicas, shard = weight.placements
    ranks = weight.device_mesh.size(-1)
    # Elsewhere it is offloaded, or nowhere yet.
    on_device = weight.device.type in (weight.device_mesh.device_type, "meta")
    whole = all(p.is_replicate() for p in replicas)
    is_even = ranks > 1 and weight.shape[0] % ranks == 0
    return shard == Shard(0) and whole and on_device and is_even


def why_too_late(modules: Iterable[nn.Module]) -> str:
    """Why weights cannot be gathered in codes any more; '' if they can."""
    shards = (m for m in modules if isinstance(m, FSDPModule))
    has_run = any(map(fsdp_has_run, shards))
    return "the model has run already: call compress before its first forward." if has_run else ""
