"""Run the output head and the loss, forward and backward, on some tokens after others.

    before   logits = mm(x, t(W));  loss = sum(nll(logits, y)) / n           tokens × vocabulary,
             dlogits = d nll(logits, y) * (tangent / n)                      twice
             dx = mm(dlogits, W);  dW = mm(t(dlogits), x)
    after    nll, dx', dW' = in_chunks(body, [x, y, 1 / n], [W])
             loss = sum(nll) / n;  dx = dx' * tangent;  dW = dW' * tangent

LLMQ section 3, "Chunking". All gradients come out in the forward, as if the gradient of the graph's
result were 1: they are multiples of it, which is checked. The backward multiplies. Between the
GEMM and the loss there may be anything that computes each token by itself (`graph/row_writer.py`):
casts, a softcap, label smoothing, a z-loss, a shift by one token. It is the same arithmetic, token
by token; only the weight's gradient is added up chunk by chunk, as it is over micro-batches: in the
weight's dtype.

Where logits are returned or used otherwise, or where the gradients are no multiples of one number,
the head stays whole, and the plan says why.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.chunks import in_chunks
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.multiples import is_multiple_of_gradient
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.order import ancestors
from fp8pass.graph.output_heads import find_logit_gemms
from fp8pass.graph.row_graph import UNIT_TANGENT, NotRowwise
from fp8pass.graph.row_writer import ChunkWriter
from fp8pass.passes.context import Context
from fp8pass.plan import Head

# Every chunk reads and writes the weight's gradient once more: with 2048 tokens that takes 5% of
# the head's time (docs/results.md), and the head of a model of hidden 2048 a fifth of all time.
CHUNK_ROWS = 2048
LEAST_HIDDEN = 2048
# Fewer save less than the gradient takes that is added to; more round it more often.
FEWEST, MOST = 4, 8


def chunk_head(gm: fx.GraphModule, ctx: Context) -> None:
    """Put one operator in the place of each output head and the loss behind it."""
    found = find_logit_gemms(gm.graph) if ctx.config.head_chunks != 1 else []
    heads = sorted(head for head in found if head.target in (aten.mm.default, aten.addmm.default))
    while heads:
        done = _chunk(gm, heads, ctx)
        ctx.plan.heads += done.values()
        heads = [head for head in heads if head not in done]


def _chunk(gm: fx.GraphModule, heads: Sequence[fx.Node], ctx: Context) -> dict[fx.Node, Head]:
    """Rewrite the first of some heads where that is possible and worth it.

    Returns what became of it, for the plan, and of those that went with it: heads whose losses
    share what is as large as logits, as the mask of labels that both take.
    """
    head = heads[0]
    rows, hidden = tensor(head.args[-2]).shape  # type: ignore[arg-type]
    if compat.has_unbacked(rows):
        return {head: _whole(head, "the number of tokens depends on data")}
    hints = compat.size_hint(rows), compat.size_hint(hidden)
    count = ctx.config.head_chunks or rule_of_chunks(*hints)
    if count == 1 or rows < 2 * count:  # a guard, where the number of tokens varies
        why = "there are too few tokens or features for chunks to pay"
        return {head: _whole(head, why, can_chunk=True)}
    try:
        part = find_part(head)
        Chunking(gm, head, part, count).run()
    except NotRowwise as reason:
        return {head: _whole(head, str(reason))}
    finally:
        graph.sort_and_prune(gm.graph)  # what was begun in vain goes, too
    return {
        each: Head(graph.module_path(each), _shape(each), graph.nbytes(each) // count, count, "")
        for each in heads
        if each in part
    }


def _whole(head: fx.Node, reason: str, *, can_chunk: bool = False) -> Head:
    """Describe a head that stays as it is."""
    size = graph.nbytes(head)
    return Head(graph.module_path(head), _shape(head), size, 1, reason, can_chunk)


def _shape(head: fx.Node) -> str:
    return graph.shape_text(tensor(head))


def rule_of_chunks(rows: int, hidden: int) -> int:
    """How many chunks a head is worth that nobody asked about."""
    count = min(MOST, rows // CHUNK_ROWS)
    return count if count >= FEWEST and hidden >= LEAST_HIDDEN else 1


def find_part(head: fx.Node) -> list[fx.Node]:
    """The nodes that hold logits, all that reads these, and what lies between; in order.

    Raises:
        NotRowwise: logits leave the graph.
    """
    most = graph.numel(tensor(head)) // 2
    part, pending = {head}, [head]
    while pending:
        while pending:
            node = pending.pop()
            found = {*_wide_operands(node, most), *filter(graph.is_getitem, node.users)}
            if node is head or _holds_logits(node, most):
                found |= {user for user in node.users if kind(user) is not Kind.SYMBOL}
            pending += found - part
            part |= found
        pending = list(_between(head.graph, part) - part)
        part |= set(pending)
    if any(node.op == "output" for node in part):
        raise NotRowwise("its logits are returned: return the loss alone")
    return sorted(part)


def _wide_operands(node: fx.Node, most: int) -> Iterator[fx.Node]:
    """The operands as large as logits, of what is no GEMM: masks, and gradients of log-softmax."""
    for operand in node.all_input_nodes if kind(node) is not Kind.GEMM else ():
        if operand.op == "call_function" and _is_wide(operand, most):
            yield operand


def _holds_logits(node: fx.Node, most: int) -> bool:
    """Whether a node of the part holds something of each logit: no gradient of a GEMM's operand."""
    return _is_wide(node, most) and kind(node) not in (Kind.CREATION, Kind.GEMM)


def _is_wide(node: fx.Node, most: int) -> bool:
    val = graph.value(node)
    return val is not None and graph.numel(val) > most


def _between(g: fx.Graph, part: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from one of the part, and that one of the part needs."""
    after: set[fx.Node] = set()
    for node in g.nodes:
        computed = any(n in after for n in node.all_input_nodes)
        if node in part or (computed and kind(node) is not Kind.SYMBOL):
            after.add(node)
    return after & ancestors(part)


class Chunking:
    """Puts `in_chunks` in the place of a part of a graph."""

    def __init__(self, gm: fx.GraphModule, head: fx.Node, part: list[fx.Node], count: int) -> None:
        self.gm, self.head, self.part, self.count = gm, head, part, count
        self.backward = graph.tangent_dependent(gm.graph)
        self.tangents: set[fx.Node] = set()
        self._known: dict[fx.Node, fx.Node] = {}
        self._sizes = _sizes(gm.graph, set(part))
        rows = tensor(head).shape[0]
        example = compat.size_hint(rows) // count
        self.writer = ChunkWriter(rows, example, self._as_known, self._emit, self._arguments)

    def run(self) -> None:
        """Rewrite the graph.

        Raises:
            NotRowwise: that cannot be done; nothing has changed, but for nodes that nobody uses.
        """
        part = set(self.part)
        for node in self.part:
            self._require_multiple(node)
            self.writer.write(node, part)
        computed = [n for n in self.part if kind(n) is not Kind.CREATION]
        results = [n for n in computed if any(_reads(user, part) for user in n.users)]
        sums = [n for n in results if n in self.writer.sums]
        rows = [n for n in results if n not in self.writer.sums]
        _require_narrow(rows, graph.numel(tensor(self.head)) // 2)
        tangent = self._tangent()
        self._measure_elsewhere()
        call = self._call(rows, sums)
        for i, node in enumerate((*rows, *sums)):
            new = self._emit(operator.getitem, call, i)
            new = new if node in self.writer.sums else self.writer.restore(node, new)
            if node in self.backward:
                assert tangent is not None
                with self.gm.graph.inserting_before(self.head):
                    new = emit(self.gm.graph, aten.mul.Tensor, new, tangent, like=node)
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in part)

    def _call(self, rows: list[fx.Node], sums: list[fx.Node]) -> fx.Node:
        """The call of `in_chunks` with what the writer wrote."""
        row_inputs, shared_inputs = self.writer.finish([*rows, *sums])
        name = _add_submodule(self.gm, fx.GraphModule({}, self.writer.body))
        of_all = [self._of_all(self.writer[n]) for n in rows]
        values = (*of_all, *(tensor(self.writer[n]) for n in sums))
        with self.gm.graph.inserting_before(self.head):
            body = self.gm.graph.get_attr(name)
            call = self.gm.graph.call_function(
                in_chunks, (body, self.count, row_inputs, shared_inputs, len(sums))
            )
        call.meta = {"val": values, "nn_module_stack": self.head.meta.get("nn_module_stack", {})}
        return call

    def _of_all(self, result: fx.Node) -> torch.Tensor:
        """The fake value of a result of all rows."""
        val = tensor(result)
        return val.new_empty((self.writer.rows, *val.shape[1:]))

    def _tangent(self) -> fx.Node | None:
        """The gradient from outside of which all gradients of the part are multiples."""
        if len(self.tangents) > 1:
            raise NotRowwise("its loss is in several results of the graph: return their sum")
        return next(iter(self.tangents), None)

    def _as_known(self, node: fx.Node) -> fx.Node:
        """A value as it would be if the gradient from outside were 1."""
        pending = [node] if node in self.backward else []
        while pending:
            current = pending[-1]
            missing = [
                n for n in current.all_input_nodes if n in self.backward and n not in self._known
            ]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self._known:
                self._known[current] = self._unit(current)
        return self._known.get(node, node)

    def _require_multiple(self, node: fx.Node) -> None:
        """Check that a gradient is one times the gradient from outside, and has its range."""
        if node in self.backward and not compat.is_tangent(node):
            if not is_multiple_of_gradient(node, self.backward.__contains__):
                name = graph.operator_name(node)
                raise NotRowwise(
                    f"the gradient from the operator {name} is no multiple of that of the loss"
                )
            val = graph.value(node)
            if val is not None and val.dtype is torch.float16:
                raise NotRowwise(
                    "gradients in float16 need the loss scale from the start: use bfloat16"
                )

    def _unit(self, node: fx.Node) -> fx.Node:
        """A copy of one node of the backward, of copies."""
        self._require_multiple(node)
        val = tensor(node) if compat.is_tangent(node) else None
        if val is not None:
            if val.ndim:
                raise NotRowwise("losses of single tokens are returned: return their mean or sum")
            self.tangents.add(node)
            with compat.fake_mode_of(val):
                unit = self._emit(aten.full.default, [], 1, dtype=val.dtype, device=val.device)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._known.get(n, n))
            unit = self._emit(node.target, *args, **kwargs)
        unit.meta[UNIT_TANGENT] = True
        return unit

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the forward, before the head."""
        with self.gm.graph.inserting_before(self.head):
            node = emit(self.gm.graph, target, *args, like=self.head, **kwargs)
        if any(n.meta.get(UNIT_TANGENT) for n in node.all_input_nodes):
            node.meta[UNIT_TANGENT] = True
        return node

    def _measure_elsewhere(self) -> None:
        """Take sizes that are read off the part from other values, so that it can go."""
        for node in self.part:
            for user in list(node.users):
                if kind(user) is Kind.SYMBOL:
                    user.replace_all_uses_with(self._arguments([user.meta["val"]])[0])

    def _arguments(self, shape: Sequence[Any]) -> list[Any]:
        """A shape as arguments: sizes that vary are nodes of the graph."""
        arguments: list[Any] = []
        for size in shape:
            if not isinstance(size, int):
                if str(size) not in self._sizes:
                    raise NotRowwise(f"the size {size} varies, and only its logits tell it")
                of, *dim = self._sizes[str(size)]
                size = self._emit(aten.sym_size.int, of, *dim) if dim else of
            arguments.append(size)
        return arguments


def _sizes(g: fx.Graph, part: set[fx.Node]) -> dict[str, tuple[Any, ...]]:
    """Where sizes that vary are known without a part: a node, or a tensor and its dimension."""
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


def _reads(user: fx.Node, part: set[fx.Node]) -> bool:
    """Whether a node reads from outside of a part what is in it, and not only its size."""
    return user not in part and kind(user) is not Kind.SYMBOL


def _require_narrow(results: list[fx.Node], most: int) -> None:
    for node in results:
        if _holds_logits(node, most):
            reader = max(node.users)
            name = graph.operator_name(reader)
            raise NotRowwise(f"the operator {name} reads its logits outside of the loss, too")


def _add_submodule(gm: fx.GraphModule, body: fx.GraphModule) -> str:
    """Make a graph a part of another one; its name there."""
    name = next(f"head_{i}" for i in itertools.count() if not hasattr(gm, f"head_{i}"))
    gm.add_submodule(name, body)
    return name
