"""Let the GEMMs of adapters, such as LoRA's, read and write large matrices fewer times.

    before   yᵢ  = c ((x Aᵢᵀ) Bᵢᵀ)             for all layers i that read x, such as q, k and v
             dhᵢ = (c dyᵢ) Bᵢ;  dBᵢ = (c dyᵢ)ᵀ hᵢ;  dAᵢ = dhᵢᵀ x;  dx = dh₁ A₁ + dh₂ A₂
    after    h   = x [A₁; A₂]ᵀ;  yᵢ = (c hᵢ) Bᵢᵀ
             dhᵢ = c (dyᵢ Bᵢ);  dBᵢ = dyᵢᵀ (c hᵢ)
             dA  = [dh₁ dh₂]ᵀ x;  dx = [dh₁ dh₂] [A₁; A₂]

`hᵢ` has as many columns as the rank of an adapter; `x` and `yᵢ` have as many as the layer. Memory
bandwidth limits these GEMMs, so their time is the time of reading and writing large matrices. The
pass reads `x` once for all layers, writes `dx` once, and multiplies small matrices by LoRA's factor
`c` = α / r. The gradients of `A` are slices of one matrix, so they share memory.

Results differ from the original results by rounding, because sums have another order. So recipe
`exact` skips the pass. In FP16 the factor stays, because `c h` may overflow where `c y` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.linear_layers import projects_down, projects_up
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import RESHAPES, is_returned, skip_reshapes, skip_transposes
from fp8pass.graph.sums import find_term, only_user
from fp8pass.graph.tags import HIGH_PRECISION_BY_CHOICE
from fp8pass.passes.context import Context


def merge_adapters(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite the adapters of a joint graph, or of an inference graph."""
    config = ctx.config
    if not config.quantizes_linears or config.simulate or ctx.requests.separate_adapters:
        return
    g, backward = gm.graph, graph.tangent_dependent(gm.graph)
    changed = _shrink_factors(g)
    for key_of, merge in (
        (_x_of_h, partial(_merge_products, shared=0)),
        (_x_of_gradient, partial(_merge_products, shared=1)),
        (_sum_of, _merge_terms),
    ):
        for gemms in _groups(g, key_of, backward):
            if key_of is _x_of_h and gemms[0] not in backward:
                ctx.plan.merged_adapters.append(tuple(map(graph.module_path, gemms)))
            merge(gemms)
            changed = True
    if changed:
        g.eliminate_dead_code()


# --- factors ------------------------------------------------------------------------------------


def _shrink_factors(g: fx.Graph) -> bool:
    """Multiply small matrices by factors, instead of large ones, and return whether any changed."""
    scaled: dict[tuple[fx.Node, float], fx.Node] = {}
    changed = False
    for product in g.find_nodes(op="call_function", target=aten.mul.Tensor):
        operand, factor = product.args
        dtypes = {tensor(product).dtype, tensor(operand).dtype}
        if _has_factor(product) and len(dtypes) == 1 and torch.float16 not in dtypes:
            changed |= _scale_h(product, factor, scaled) or _scale_results(product, factor, scaled)
    return changed


def _scale_h(product: fx.Node, factor: float, scaled: dict[tuple[fx.Node, float], fx.Node]) -> bool:
    """Replace `c (h Bᵀ)` by `(c h) Bᵀ`, and store `c h` in `scaled`."""
    gemm: fx.Node = product.args[0]  # type: ignore[assignment]
    while gemm.target in RESHAPES and only_user(gemm):
        gemm = gemm.args[0]  # type: ignore[assignment]
    if not _multiplies_h(gemm) or not only_user(gemm):
        return False
    h, weight = gemm.args
    with gemm.graph.inserting_before(gemm):
        small = emit(gemm.graph, aten.mul.Tensor, h, factor, like=product)
    gemm.args = small, weight
    scaled[h, factor] = small  # type: ignore[index]
    _remove_factor(product)
    return True


def _scale_results(
    product: fx.Node, factor: float, scaled: dict[tuple[fx.Node, float], fx.Node]
) -> bool:
    """Replace `(c dy) B` by `c (dy B)`, and `(c dy)ᵀ h` by `dyᵀ (c h)`."""
    gemms = list(_readers(product))
    if not gemms or not all(_reads_dy(gemm) for gemm in gemms):
        return False
    _remove_factor(product)
    for gemm in gemms:
        x, other = gemm.args
        if small := scaled.get((other, factor)):  # type: ignore[arg-type]
            gemm.args = x, small
            continue
        users = list(gemm.users)
        with gemm.graph.inserting_after(gemm):
            small = emit(gemm.graph, aten.mul.Tensor, gemm, factor, like=product)
        for user in users:
            user.replace_input_with(gemm, small)
    return True


def _remove_factor(product: fx.Node) -> None:
    product.replace_all_uses_with(product.args[0])  # type: ignore[arg-type]
    product.graph.erase_node(product)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, and of its views and transposes."""
    for user in node.users:
        if user.target in RESHAPES or skip_transposes(user)[1]:
            yield from _readers(user)
        else:
            yield user


# --- GEMMs --------------------------------------------------------------------------------------


def _has_factor(node: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and isinstance(node.args[1], (int, float))


def _is_h(node: Any) -> bool:
    """Whether a node is `x Aᵀ` or `dy B`, possibly scaled, or a slice of a merged product."""
    while _has_factor(node) or node.target is aten.slice.Tensor:
        node = node.args[0]
    return projects_down(node)


def _multiplies_h(gemm: fx.Node) -> bool:
    """Whether a node is `h Bᵀ` or `dh A`."""
    return projects_up(gemm) and _is_h(skip_reshapes(gemm.args[0]))  # type: ignore[arg-type]


def _reads_dy(gemm: fx.Node) -> bool:
    """Whether a node is `dy B` or `dyᵀ h`."""
    if not projects_down(gemm):
        return False
    reads_h = _is_h(skip_reshapes(gemm.args[1]))  # type: ignore[arg-type]
    return reads_h or any(reader.target is aten.mm.default for reader in _readers(gemm))


def _x_of_h(gemm: fx.Node) -> Hashable:
    """Return `x` of `x Aᵀ`, or `dy` of `dy B`. Return None unless another GEMM reads the result.

    A result that the graph returns is left out, because a slice would have other strides.
    """
    if not projects_down(gemm) or is_returned(gemm):
        return None
    readers = [user for reader in _readers(gemm) for user in (reader, *_scaled_readers(reader))]
    return _identity(gemm.args[0]) if any(map(projects_up, readers)) else None


def _scaled_readers(product: fx.Node) -> Iterator[fx.Node]:
    return _readers(product) if _has_factor(product) else iter(())


def _x_of_gradient(gemm: fx.Node) -> Hashable:
    """Return `x` of `dhᵀ x`, the gradient of `A`."""
    if gemm.target is not aten.mm.default:
        return None
    dh, is_transposed = skip_transposes(gemm.args[0])  # type: ignore[arg-type]
    return _identity(gemm.args[1]) if is_transposed and _is_h(dh) else None


def _identity(x: Any) -> Hashable:
    """Return a value that is equal for equal views of a tensor."""
    return (skip_reshapes(x), *map(str, tensor(x).shape))


def _sum_of(gemm: fx.Node) -> Hashable:
    """Return the sum in which `dh A` is a term, and its shape."""
    term = find_term(gemm) if _multiplies_h(gemm) else None
    return (term.total, *map(str, tensor(gemm).shape)) if term else None


def _groups(
    g: fx.Graph, key_of: Callable[[fx.Node], Hashable], backward: set[fx.Node]
) -> Iterator[list[fx.Node]]:
    """Yield sorted lists of GEMMs for which `key_of` returns the same value.

    A GEMM is left out if the user's checkpoint policy saves its result.
    """
    groups: dict[Hashable, list[fx.Node]] = {}
    for gemm in g.find_nodes(op="call_function", target=aten.mm.default):
        if (key := key_of(gemm)) is not None and not compat.must_save(gemm):
            place = gemm in backward, *map(gemm.meta.get, ("recompute", HIGH_PRECISION_BY_CHOICE))
            groups.setdefault((key, tensor(gemm).dtype, *place), []).append(gemm)
    for gemms in groups.values():
        gemms.sort()  # the merging of earlier groups moves nodes
        if len(gemms) > 1 and not depends_on(gemms, gemms):
            yield gemms


# --- merging ------------------------------------------------------------------------------------


def _merge_products(gemms: list[fx.Node], shared: int) -> None:
    """Replace GEMMs that share an operand by slices of one GEMM; `shared` is its number."""
    last, dim = gemms[-1], 1 - shared
    with last.graph.inserting_before(last):
        operands: list[Any] = list(last.args)
        operands[dim] = _concatenate([gemm.args[dim] for gemm in gemms], dim, like=last)
        merged = _multiply(*operands, like=last)
        ends = accumulate((tensor(gemm).shape[dim] for gemm in gemms), initial=0)
        slices = [
            emit(last.graph, aten.slice.Tensor, merged, dim, *rows, like=gemm)
            for gemm, rows in zip(gemms, pairwise(ends), strict=True)
        ]
    for gemm, part in zip(gemms, slices, strict=True):
        gemm.replace_all_uses_with(part)
        gemm.graph.erase_node(gemm)
    for part in slices:
        sort_around(part)


def _merge_terms(gemms: list[fx.Node]) -> None:
    """Replace `dh₁ A₁ + dh₂ A₂` by one GEMM."""
    *others, last = gemms
    terms = [find_term(gemm) for gemm in others]
    with last.graph.inserting_before(last):
        operands = (_concatenate([x.args[i] for x in gemms], 1 - i, like=last) for i in (0, 1))
        merged = _multiply(*operands, like=last)
    last.replace_all_uses_with(merged)
    last.graph.erase_node(last)
    for term in terms:
        assert term is not None
        term.remove()


def _multiply(a: Any, b: Any, *, like: fx.Node) -> fx.Node:
    gemm = emit(like.graph, aten.mm.default, a, b, like=like)
    if HIGH_PRECISION_BY_CHOICE in like.meta:
        gemm.meta[HIGH_PRECISION_BY_CHOICE] = True
    return gemm


def _concatenate(matrices: list[Any], dim: int, like: fx.Node) -> fx.Node:
    """Return a concatenation. If all matrices are transposed, the concatenation is transposed."""
    emit_here = partial(emit, like.graph, like=like)
    bases, flips = zip(*map(skip_transposes, matrices), strict=True)
    if len(set(flips)) > 1:
        return emit_here(aten.cat.default, matrices, dim)
    arguments = list(bases), 1 - dim if flips[0] else dim
    known = (x for x in bases[0].users if x.target is aten.cat.default and x.args == arguments)
    whole = next((x for x in known if x < like), None) or emit_here(aten.cat.default, *arguments)
    return emit_here(aten.permute.default, whole, [1, 0]) if flips[0] else whole
