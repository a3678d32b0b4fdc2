"""One step of a model, run without memory: who allocates what, until when.

Compiled graphs are stood in for: `Region` has the joint graph as it was before the passes, and the
record says when which of them runs forward and backward. What the model does outside of them is
recorded operator by operator, as PyTorch runs it. Any plan of the graphs can be put into the record
(`replay.py`) without tracing again.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat, graph
from fp8pass.compilation import Compilation, Inputs
from fp8pass.config import Config
from fp8pass.partition import Partitioner
from fp8pass.passes import Context
from fp8pass.tools.fitting.events import (
    Allocated,
    Backward,
    BackwardBegins,
    Computed,
    Event,
    Forward,
    Freed,
    Gradient,
    Region,
    Step,
)
from fp8pass.tools.fitting.fakes import without_memory
from fp8pass.tools.fitting.work import work_of_call

# Of a model to run, its arguments and its keyword arguments.
LossFunction = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Tensor]


def own_loss(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The loss that a model returns.

    Raises:
        ValueError: it returns none.
    """
    output = run(*args, **kwargs)
    value = getattr(output, "loss", output)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    raise ValueError(
        f"The model returns {type(output).__name__}, no loss: give fit a function of it and the "
        "batch, loss_fn=lambda model, batch: model(*batch).square().mean(), or the model labels."
    )


def record_step(
    module: nn.Module,
    paths: Sequence[str],
    values: tuple[tuple[Any, ...], dict[str, Any]],
    loss_of: LossFunction,
) -> Step:
    """Run one step of a module whose parts at `paths` are compiled, which are stood in for.

    Args:
        module: the model, on any device.
        paths: of parts; `('',)` for the model as a whole.
        values: arguments and keyword arguments of the model.
        loss_of: runs it and gives its loss.

    Raises:
        ValueError: the loss has no gradient, or something needs the values of tensors.
    """
    step = Step()
    recorder = _Recorder(step)
    with (
        _values_explained(module),
        compat.run_uncompiled(module),
        without_memory(module, values) as (args, kwargs),
        compat.fresh_compilation(),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        _compiled(module, paths, recorder) as run,
    ):
        loss_of(run, args, kwargs)  # to compile: no operator is to be observed meanwhile
        with recorder.watching(module):
            loss = loss_of(run, args, kwargs)
            if not loss.requires_grad:
                raise ValueError(
                    "The loss depends on nothing that is trained: no parameter requires a "
                    "gradient, or the loss is computed from values that were detached."
                )
            recorder.events.append(BackwardBegins())
            loss.backward()
            step.events = list(recorder.events)
    return step


@contextmanager
def _values_explained(module: nn.Module) -> Iterator[None]:
    """Say of an operator that needs values, which nothing has here, where it is and what to do.

    Raises:
        ValueError: there is one.
    """
    try:
        yield
    except compat.NEEDS_VALUES as error:
        raise ValueError(
            f"fit runs a model on tensors without values, which {error.func} in "
            f"{_running(module, error)} needs, as do .item(), branches on values and masks as "
            "indices. Compute that without (experts of Hugging Face: experts_implementation="
            "'grouped_mm'), or give fit a part of the model that has none."
        ) from error


def _running(module: nn.Module, error: Exception) -> str:
    """The innermost module that ran when an error was raised, in words."""
    paths = {id(m): path for path, m in module.named_modules() if path}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = [paths[i] for f in frames if (i := id(f.f_locals.get("self"))) in paths]
    return owners[-1] if owners else f"{type(module).__name__} or its loss"


@contextmanager
def _compiled(
    module: nn.Module, paths: Sequence[str], recorder: _Recorder
) -> Iterator[Callable[..., Any]]:
    """`module` as it runs with parts of it compiled, which the recorder stands in for."""
    if list(paths) == [""]:
        yield torch.compile(module, backend=recorder.backend)
        return
    parts = {path: module.get_submodule(path) for path in paths}
    for path, part in parts.items():
        part.forward = recorder.at(path, torch.compile(part.forward, backend=recorder.backend))
    try:
        yield module
    finally:
        for part in parts.values():
            del part.forward


class _Recorder(compat.OperatorObserver):
    """Writes the record of a step."""

    def __init__(self, step: Step) -> None:
        super().__init__(self._see)
        self.step = step
        self.events: list[Event] = []
        self.path = ""
        self._storages = compat.WeakIdKeyDictionary()
        self._numbers = itertools.count()
        self._calls = itertools.count()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record what runs in this context, anew; parameters and buffers were there before."""
        self.events, self._storages = [], compat.WeakIdKeyDictionary()
        for x in (*module.parameters(), *module.buffers()):
            self._storages[x.untyped_storage()] = None
        trained = [p for p in module.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(self._gradient) for p in trained]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, operator: Any, arguments: Any, result: Any) -> None:
        given = {id(x.untyped_storage()) for x in _tensors(arguments)}
        new = [x for x in _tensors(result) if id(x.untyped_storage()) not in given]
        if new:
            self.events.append(Computed(work_of_call(operator, arguments, result, new)))
        for x in new:
            self._number(x)

    def _number(self, x: Any) -> int | None:
        """The number of a tensor's storage, recorded if it is new; None if it was there before."""
        if not isinstance(x, Tensor):
            return None
        storage = x.untyped_storage()
        if storage not in self._storages:
            number = self._storages[storage] = next(self._numbers)
            self.events.append(Allocated(number, storage.nbytes()))
            weakref.finalize(storage, self.events.append, Freed(number))
        found: int | None = self._storages[storage]
        return found

    def _gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.events.append(Gradient(self._number(gradient)))

    def begin(self, region: Region, inputs: Sequence[Any]) -> Forward:
        """A region begins to run forward."""
        event = Forward(region, next(self._calls), [self._number(x) for x in inputs])
        self.events.append(event)
        return event

    def end(self, event: Forward, outputs: Sequence[Any]) -> None:
        """It has run."""
        event.outputs.extend(self._number(x) for x in outputs)

    def backward(self, event: Forward) -> None:
        """It runs backward."""
        self.events.append(Backward(event.region, event.call))

    def at(self, path: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that notes the path of the module that runs."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.path = path
            return run(*args, **kwargs)

        return noted

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A backend of `torch.compile` that captures graphs, and has stand-ins run."""
        region = _capture(gm, example_inputs, self.path)
        self.step.regions.append(region)
        return lambda *inputs: _StandIn.apply(self, region, *inputs)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in compat.tree_leaves(values) if isinstance(x, Tensor)]


class _StandIn(torch.autograd.Function):
    """Has the results of a compiled graph, and its gradients, and does nothing."""

    @staticmethod
    def forward(ctx: Any, recorder: _Recorder, region: Region, *inputs: Any) -> Any:
        call = recorder.begin(region, inputs)
        results = tuple(_new(x) for x, _ in region.outputs)
        recorder.end(call, results)
        pairs = zip(results, region.outputs, strict=True)
        ctx.mark_non_differentiable(
            *(x for x, (_, has) in pairs if isinstance(x, Tensor) and not has)
        )
        ctx.recorder, ctx.call = recorder, call
        ctx.like = [_described(x) for x in inputs]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.recorder.backward(ctx.call)
        wanted = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(_new(like) if needs else None for like, needs in wanted))


@dataclass(frozen=True)
class _Description:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _described(x: Any) -> Any:
    return _Description(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _new(like: Any) -> Any:
    """A tensor like the described one; other values as they are."""
    if not isinstance(like, _Description):
        return like
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype)


def _capture(gm: fx.GraphModule, example_inputs: Sequence[Any], path: str) -> Region:
    """The joint graph of what Dynamo captured."""
    compat.rename_self(gm)
    results = compat.tree_leaves(gm(*example_inputs))
    outputs = [(_described(x), isinstance(x, Tensor) and x.requires_grad) for x in results]
    region = Region(path, outputs)
    compilation = Compilation(Config(compiler="eager"), Inputs.of(example_inputs), is_main=False)
    compat.compile_fx(
        gm,
        list(example_inputs),
        inner_compile=lambda half, inputs, **kwargs: compat.interpret(half),
        config_patches={"custom_partitioner_fn": _Capture(compilation, region)},
    )
    return region


class _Capture(Partitioner):
    """Copies a joint graph, and lets PyTorch cut it, without any of our passes."""

    def __init__(self, compilation: Compilation, region: Region) -> None:
        super().__init__(compilation)
        self.region = region

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        ctx = self.context(gm, **kwargs)
        copies: dict[fx.Node, fx.Node] = {}
        self.region.gm = graph.copy_of(gm, copies)
        self.region.ctx = Context(ctx.config, ctx.facts.of_copy(copies))
        return compat.stock_partition(gm, joint_inputs, **kwargs)
