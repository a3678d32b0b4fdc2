"""Replace `in_chunks` by the operators of each chunk.

    before   losses, dW = in_chunks(body, 2, [x, y], [W], 1)
    after    x_0 = slice(x, 0, c); ...;  loss_0 = ...;  dW = mm(t(d_0), x_0)
             x_1 = after(slice(x, c, T), loss_0); ...;  loss_1 = ...;  add_product(dW, t(d_1), x_1)
             losses = cat([loss_0, loss_1])

Inductor keeps this order. Values that do not depend on the rows of a chunk are computed once.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.codegen.add_product import add_product
from fp8pass.codegen.buffers import after
from fp8pass.graph.chunks import Chunks, chunk_bounds, in_chunks
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.passes.context import Context


def unroll_chunks(gm: fx.GraphModule, ctx: Context) -> None:
    calls = gm.graph.find_nodes(op="call_function", target=in_chunks)
    for call in calls:
        with gm.graph.inserting_before(call):
            results = Unroller(gm.graph, Chunks.of(call)).emit_results()
        for user in list(call.users):
            assert graph.is_getitem(user)
            user.replace_all_uses_with(results[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(call)
    if calls:
        gm.graph.eliminate_dead_code()
        gm.delete_all_unused_submodules()


class Unroller:
    def __init__(self, g: fx.Graph, chunks: Chunks) -> None:
        self.graph, self.chunks = g, chunks
        self.body = chunks.body.graph
        inputs = list(chunks.inputs())
        split = len(chunks.rows)
        self.row_inputs = inputs[:split]
        self.once: dict[fx.Node, fx.Node] = dict(inputs[split:])
        outputs = graph.outputs(self.body)
        split = len(outputs) - chunks.sums
        self.row_results: list[fx.Node] = outputs[:split]
        self.sums: list[fx.Node] = outputs[split:]
        # GEMMs whose results are only summed over chunks. They accumulate into the sum in place.
        self.products = {n for n in self.sums if n.target is aten.mm.default and len(n.users) == 1}

    def emit_results(self) -> list[fx.Node]:
        parts: list[list[fx.Node]] = [[] for _ in self.row_results]
        totals: dict[fx.Node, fx.Node] = {}
        done: list[fx.Node] = []
        for start, end in self._chunk_bounds():
            env = self._emit_chunk(start, end, done)
            done = [env[node] for node in self.row_results]
            for part, result in zip(parts, done, strict=True):
                part.append(result)
            for node in self.sums:
                totals[node] = self._add_to(totals.get(node), node, env)
        whole = [self._emit(aten.cat.default, part, like=part[0]) for part in parts]
        return [*whole, *(totals[n] for n in self.sums)]

    def _emit_chunk(self, start: Any, end: Any, done: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Emit a chunk after `done`, the results of the previous chunk; return the new nodes.

        Without this order, Inductor would compute all losses at the end and keep all logits until
        then.
        """
        env = dict(self.once)
        for placeholder, rows in self.row_inputs:
            part = self._emit(aten.slice.Tensor, rows, 0, start, end, like=rows)
            if done and tensor(part).ndim > 1 and tensor(part).shape[-1] > 1:  # no labels or losses
                part = self._emit(after, part, done, like=rows)
            env[placeholder] = part
        for node in self.body.nodes:
            if node.op != "call_function" or node in env or node in self.products:
                continue
            env[node] = self._copy(node, env)
            if all(operand in self.once for operand in node.all_input_nodes):
                self.once[node] = env[node]
        return env

    def _copy(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        fake = None if node.all_input_nodes else node.meta["val"]
        return self._emit(node.target, *args, like=node, fake=fake, **kwargs)

    def _add_to(self, total: fx.Node | None, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        if total is None:
            return self._copy(node, env) if node in self.products else env[node]
        if node not in self.products:
            return self._emit(aten.add.Tensor, total, env[node], like=node)
        a, b = (env[operand] for operand in node.args)  # type: ignore[index]
        self._emit(add_product, total, a, b, like=node)
        return total

    def _chunk_bounds(self) -> list[tuple[Any, Any]]:
        """Return the first and past-the-end row of each chunk, as nodes if they are symbolic."""
        rows, count = self.chunks.rows[0], self.chunks.count
        size = tensor(rows).shape[0]
        if isinstance(size, int):
            return list(chunk_bounds(size, count))
        everything = self._emit(aten.sym_size.int, rows, 0, like=rows)
        length = self._emit(operator.floordiv, everything, count, like=rows)
        starts = [self._emit(operator.mul, length, i, like=rows) for i in range(count)]
        return list(zip(starts, [*starts[1:], everything], strict=True))

    def _emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        return emit(self.graph, target, *args, like=like, **kwargs)
