"""Run the output head and the loss, forward and backward, on one chunk of the tokens at a time.

    before   logits = mm(x, t(W));  loss = sum(nll(logits, y)) / n
             dlogits = d nll(logits, y) * (tangent / n)
             dx = mm(dlogits, W);  dW = mm(t(dlogits), x)
    after    nll, dx', dW' = in_chunks(body, [x, y, 1 / n], [W])
             loss = sum(nll) / n;  dx = dx' * tangent;  dW = dW' * tangent

Only one chunk of `logits` and `dlogits`, [tokens, vocabulary], exists at once. See "Chunking" in
section 3 of the paper LLMQ. The forward computes the gradients for a tangent (gradient of the loss)
of 1. The weight's gradient is accumulated over chunks in the weight's dtype.

The head is not chunked if the model returns the logits, if operators outside of the loss read them,
or if gradients are not multiples of one tangent. The plan reports the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.chunks import in_chunks
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import elements_read
from fp8pass.graph.multiples import is_multiple_of_gradient
from fp8pass.graph.nodes import aten, emit, free_attribute, tensor
from fp8pass.graph.order import ancestors
from fp8pass.graph.output_heads import find_logit_gemms
from fp8pass.graph.row_graph import UNIT_TANGENT, NotRowwise
from fp8pass.graph.row_writer import ChunkWriter
from fp8pass.passes.context import Context
from fp8pass.plan import Head

# Each chunk reads and writes the weight's gradient. With 2048 tokens per chunk this takes 5% of the
# head's time (docs/results.md). At hidden size 2048 that is 1% of the step.
CHUNK_ROWS = 2048
LEAST_HIDDEN = 2048
# Fewer chunks save less memory than the accumulated gradient takes. More chunks round that gradient
# more often.
FEWEST, MOST = 4, 8


class ReturnsLogits(NotRowwise):
    """The graph returns the logits of a head."""


def chunk_head(gm: fx.GraphModule, ctx: Context) -> None:
    found = find_logit_gemms(gm.graph) if ctx.config.head_chunks != 1 else []
    heads = sorted(head for head in found if head.target in (aten.mm.default, aten.addmm.default))
    while heads:
        done = _chunk_first(gm, heads, ctx.config.head_chunks)
        ctx.plan.heads += done.values()
        heads = [head for head in heads if head not in done]


def _chunk_first(
    gm: fx.GraphModule, heads: Sequence[fx.Node], head_chunks: int | None
) -> dict[fx.Node, Head]:
    """Rewrite the first head, and heads that share masks with it, if that saves enough memory."""
    head = heads[0]
    rows, hidden = tensor(head.args[-2]).shape  # type: ignore[arg-type]
    if compat.has_unbacked(rows):
        return {head: _describe_whole(head, "the number of tokens depends on data")}
    count = head_chunks or choose_chunks(compat.size_hint(rows), compat.size_hint(hidden))
    if count == 1 or rows < 2 * count:  # adds a guard if the number of tokens is symbolic
        why = "the head has too few tokens or features to gain from chunks"
        return {head: _describe_whole(head, why, can_chunk=True)}
    try:
        part = find_part(head)
        Chunking(gm, head, part, count).run()
    except ReturnsLogits as reason:
        whole = _describe_whole(head, str(reason))
        return {head: replace(whole, avoidable_bytes=2 * (whole.bytes - whole.bytes // count))}
    except NotRowwise as reason:
        return {head: _describe_whole(head, str(reason))}
    finally:
        graph.sort_and_prune(gm.graph)  # also removes the nodes of a failed attempt
    return {
        each: Head(graph.module_path(each), _shape(each), graph.nbytes(each) // count, count, "")
        for each in heads
        if each in part
    }


def _describe_whole(head: fx.Node, reason: str, *, can_chunk: bool = False) -> Head:
    size = graph.nbytes(head)
    return Head(graph.module_path(head), _shape(head), size, 1, reason, can_chunk)


def _shape(head: fx.Node) -> str:
    return graph.shape_text(tensor(head))


def choose_chunks(rows: int, hidden: int) -> int:
    """Return the number of chunks of a head if `head_chunks` is not configured."""
    count = min(MOST, rows // CHUNK_ROWS)
    return count if count >= FEWEST and hidden >= LEAST_HIDDEN else 1


def find_part(head: fx.Node) -> list[fx.Node]:
    """Return, in graph order, nodes as large as the logits, their users, and nodes between them.

    Raises:
        ReturnsLogits: the graph returns logits.
    """
    most = graph.numel(tensor(head)) // 2
    part, pending = {head}, [head]
    while pending:
        while pending:
            node = pending.pop()
            found = {*_wide_operands(node, most), *filter(graph.is_getitem, node.users)}
            if node is head or _holds_logits(node, most):
                found |= set(elements_read(node))
            pending += found - part
            part |= found
        pending = list(_between(head.graph, part) - part)
        part |= set(pending)
    if any(node.op == "output" for node in part):
        raise ReturnsLogits("the model returns the logits: set return_logits=False")
    return sorted(part)


def _wide_operands(node: fx.Node, most: int) -> Iterator[fx.Node]:
    """Yield the operands that are as large as the logits, such as masks. Skip operands of GEMMs."""
    for operand in node.all_input_nodes if kind(node) is not Kind.GEMM else ():
        if operand.op == "call_function" and _is_wide(operand, most):
            yield operand


def _holds_logits(node: fx.Node, most: int) -> bool:
    return _is_wide(node, most) and kind(node) not in (Kind.CREATION, Kind.GEMM)


def _is_wide(node: fx.Node, most: int) -> bool:
    val = graph.value(node)
    return val is not None and graph.numel(val) > most


def _between(g: fx.Graph, part: set[fx.Node]) -> set[fx.Node]:
    after: set[fx.Node] = set()
    for node in g.nodes:
        is_computed = any(n in after for n in node.all_input_nodes)
        if node in part or (is_computed and kind(node) is not Kind.SYMBOL):
            after.add(node)
    return after & ancestors(part)


class Chunking:
    def __init__(self, gm: fx.GraphModule, head: fx.Node, part: list[fx.Node], count: int) -> None:
        self.gm, self.head, self.part, self.count = gm, head, part, count
        self.backward = graph.tangent_dependent(gm.graph)
        self.tangents: set[fx.Node] = set()
        # Copies of nodes of the backward, computed as if the tangent were 1.
        self._units: dict[fx.Node, fx.Node] = {}
        self._sizes = _find_sizes(gm.graph, set(part))
        rows = tensor(head).shape[0]
        example = compat.size_hint(rows) // count
        self.writer = ChunkWriter(rows, example, self._with_unit_tangent, self._emit, self._to_args)

    def run(self) -> None:
        """Rewrite the graph.

        Raises:
            NotRowwise: the part cannot be chunked. The graph then only has additional unused nodes.
        """
        part = set(self.part)
        for node in self.part:
            self._require_multiple(node)
            self.writer.write(node, part)
        computed = [n for n in self.part if kind(n) is not Kind.CREATION]
        results = [n for n in computed if not part.issuperset(elements_read(n))]
        sums = [n for n in results if n in self.writer.sums]
        rows = [n for n in results if n not in self.writer.sums]
        for node in rows:
            if _holds_logits(node, graph.numel(tensor(self.head)) // 2):
                name = graph.operator_name(max(node.users))
                raise NotRowwise(f"the operator {name} reads the logits outside of the loss")
        if len(self.tangents) > 1:
            raise NotRowwise(
                "the model returns several losses of the same logits: return their sum"
            )
        self._replace_sizes()
        call = self._emit_call(rows, sums)
        for i, node in enumerate((*rows, *sums)):
            new = self._emit(operator.getitem, call, i)
            new = new if node in self.writer.sums else self.writer.restore(node, new)
            if node in self.backward:
                (tangent,) = self.tangents
                with self.gm.graph.inserting_before(self.head):
                    new = emit(self.gm.graph, aten.mul.Tensor, new, tangent, like=node)
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in part)

    def _emit_call(self, rows: list[fx.Node], sums: list[fx.Node]) -> fx.Node:
        row_inputs, shared_inputs = self.writer.finish([*rows, *sums])
        name = free_attribute(self.gm, "head_")
        self.gm.add_submodule(name, fx.GraphModule({}, self.writer.body))
        of_chunk = [tensor(self.writer[n]) for n in rows]
        whole = [x.new_empty((self.writer.rows, *x.shape[1:])) for x in of_chunk]
        with self.gm.graph.inserting_before(self.head):
            body = self.gm.graph.get_attr(name)
            call = self.gm.graph.call_function(
                in_chunks, (body, self.count, row_inputs, shared_inputs, len(sums))
            )
        values = (*whole, *(tensor(self.writer[n]) for n in sums))
        call.meta = {"val": values, "nn_module_stack": self.head.meta.get("nn_module_stack", {})}
        return call

    def _with_unit_tangent(self, node: fx.Node) -> fx.Node:
        pending = [node] if node in self.backward else []
        while pending:
            current = pending[-1]
            missing = [
                n for n in current.all_input_nodes if n in self.backward and n not in self._units
            ]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self._units:
                self._units[current] = self._emit_unit(current)
        return self._units.get(node, node)

    def _require_multiple(self, node: fx.Node) -> None:
        if node not in self.backward or compat.is_tangent(node):
            return
        if not is_multiple_of_gradient(node, self.backward.__contains__):
            name = graph.operator_name(node)
            raise NotRowwise(
                f"the gradient that {name} computes is not a multiple of the gradient of the loss"
            )
        val = graph.value(node)
        if val is not None and val.dtype is torch.float16:
            raise NotRowwise("float16 gradients may underflow without the loss scale: use bfloat16")

    def _emit_unit(self, node: fx.Node) -> fx.Node:
        """Copy a backward node as if the tangent were 1. Copies of its operands already exist."""
        self._require_multiple(node)
        if compat.is_tangent(node):
            val = tensor(node)
            if val.ndim:
                raise NotRowwise(
                    "the model returns one loss for each token: return their mean or sum"
                )
            self.tangents.add(node)
            with compat.fake_mode_of(val):
                unit = self._emit(aten.full.default, [], 1, dtype=val.dtype, device=val.device)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._units.get(n, n))
            unit = self._emit(node.target, *args, **kwargs)
        unit.meta[UNIT_TANGENT] = True
        return unit

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.gm.graph.inserting_before(self.head):
            node = emit(self.gm.graph, target, *args, like=self.head, **kwargs)
        if any(n.meta.get(UNIT_TANGENT) for n in node.all_input_nodes):
            node.meta[UNIT_TANGENT] = True
        return node

    def _replace_sizes(self) -> None:
        for node in self.part:
            for user in list(node.users):
                if kind(user) is Kind.SYMBOL:
                    user.replace_all_uses_with(self._to_args([user.meta["val"]])[0])

    def _to_args(self, shape: Sequence[Any]) -> list[Any]:
        arguments: list[Any] = []
        for size in shape:
            if not isinstance(size, int):
                if str(size) not in self._sizes:
                    raise NotRowwise(f"the symbolic size {size} occurs only in the logits")
                node, *dim = self._sizes[str(size)]
                size = self._emit(aten.sym_size.int, node, *dim) if dim else node
            arguments.append(size)
        return arguments


def _find_sizes(g: fx.Graph, part: set[fx.Node]) -> dict[str, tuple[Any, ...]]:
    """Map symbolic sizes outside of `part` to `(node,)`, or to `(node, dim)` of a tensor."""
    found: dict[str, tuple[Any, ...]] = {}
    after: set[fx.Node] = set()
    for node in g.nodes:
        if node in part or any(n in after for n in node.all_input_nodes):
            after.add(node)
        elif compat.is_sym_node(node):
            found[str(node.meta["val"])] = (node,)
        elif (val := graph.value(node)) is not None:
            for dim, size in enumerate(val.shape):
                if not isinstance(size, int):
                    found.setdefault(str(size), (node, dim))
    return found
