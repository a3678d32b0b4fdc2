"""Record one step of a model on fake tensors: storages, and runs of compiled graphs.

A stand-in replaces each compiled graph: it allocates results but computes nothing. The record lists
the runs of each graph, so `traced.py` can insert the plan of any configuration without tracing the
model again.
Operators outside of compiled graphs are recorded one by one.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from fp8pass import compat, graph
from fp8pass.compilation import Compilation, Inputs
from fp8pass.config import Config
from fp8pass.graph.classify import CREATIONS
from fp8pass.hardware import Work
from fp8pass.partition import Partitioner
from fp8pass.passes import Context

# Takes a model, its arguments and its keyword arguments, and returns the loss.
LossFunction = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Tensor]


@dataclass(eq=False)
class CompiledRegion:
    """A part of the model that is compiled as one graph."""

    path: str  # of the module that first ran the region
    # For each result: its layout, and whether it has a gradient.
    outputs: list[tuple[Any, bool]]
    # The joint graph before any pass; None if the region has no backward.
    gm: fx.GraphModule | None = None
    ctx: Context | None = None


@dataclass(frozen=True)
class Allocated:
    """A storage of `bytes` bytes was allocated."""

    storage: int
    bytes: int


@dataclass(frozen=True)
class Freed:
    """The model and autograd no longer reference a storage."""

    storage: int


@dataclass(frozen=True)
class RegionForward:
    """A region runs forward."""

    region: CompiledRegion
    # Numbers of storages. None for a storage from before the step, or a value that is not a tensor.
    inputs: list[int | None]
    outputs: list[int | None] = field(default_factory=list)


@dataclass(frozen=True)
class RegionBackward:
    """A region runs the backward of an earlier forward."""

    forward: RegionForward


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter, in `storage`, is final."""

    storage: int | None


@dataclass(frozen=True)
class Computed:
    """Work of an operator that ran outside of compiled regions."""

    work: Work


@dataclass(frozen=True)
class BackwardBegins:
    """The forward is complete."""


Event = Allocated | Freed | RegionForward | RegionBackward | Gradient | Computed | BackwardBegins


@dataclass(frozen=True)
class RecordedStep:
    """One forward and backward: its events in order, and the compiled regions."""

    events: list[Event]
    regions: list[CompiledRegion]


def compute_own_loss(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return a model's output, or the output's `loss`."""
    output = run(*args, **kwargs)
    value = getattr(output, "loss", output)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    raise ValueError(
        f"The model returns {type(output).__name__} instead of a loss. Pass a loss function to "
        "fit, loss_fn=lambda model, batch: model(*batch).square().mean(), or pass labels to the "
        "model."
    )


def record_step(
    module: nn.Module, paths: Sequence[str], values: Any, loss_of: LossFunction
) -> RecordedStep:
    """Record a forward and backward without allocating memory.

    Args:
        module: the model, on any device.
        paths: paths of the parts that are compiled; `('',)` for the model as a whole.
        values: arguments and keyword arguments of the model.
        loss_of: runs the model and returns its loss.
    """
    recorder = _Recorder()
    with (
        _explain_missing_values(module),
        compat.run_uncompiled(module),
        use_fake_tensors(module, values) as (args, kwargs),
        compat.fresh_compilation(),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        _compile_parts(module, paths, recorder) as run,
    ):
        loss_of(run, args, kwargs)  # compiles the graphs, without recording operators
        with recorder.watch(module):
            loss = loss_of(run, args, kwargs)
            if not loss.requires_grad:
                raise ValueError(
                    "The loss does not depend on a trainable parameter. Set requires_grad on a "
                    "parameter, and do not detach the values that the loss is computed from."
                )
            recorder.events.append(BackwardBegins())
            loss.backward()
            events = list(recorder.events)  # a copy, because later frees append events
    return RecordedStep(events, recorder.regions)


@contextmanager
def use_fake_tensors(module: nn.Module, values: Any) -> Iterator[Any]:
    """Replace a module's tensors by fake CPU tensors until exit. Yield fake `values`, too.

    The CPU represents the GPU: `torch.autocast("cuda")` also applies to the CPU tensors.
    """
    # Replace tensors in these dictionaries, because modules may override setattr, and PyTorch's
    # setattr runs hooks.
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    mode = compat.use_fake_tensors()
    fakes: dict[int, tuple[Tensor, Tensor]] = {}  # holds the originals, so that ids stay unique

    def replace(x: Tensor | None) -> Any:
        if x is not None and id(x) not in fakes:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            if isinstance(x, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=x.requires_grad)
            elif x.requires_grad:
                fake.requires_grad_()
            fakes[id(x)] = x, fake
        return None if x is None else fakes[id(x)][1]

    with mode:
        for m, parameters, buffers in before:
            m._parameters.update({name: replace(p) for name, p in parameters.items()})
            m._buffers.update({name: replace(b) for name, b in buffers.items()})
        given = compat.tree_map_only(Tensor, replace, values)
        try:
            with compat.RealPositions(), compat.autocast_for_cpu():
                yield given
        finally:
            for m, parameters, buffers in before:
                m._parameters.update(parameters)
                m._buffers.update(buffers)


@contextmanager
def _explain_missing_values(module: nn.Module) -> Iterator[None]:
    try:
        yield
    except compat.NEEDS_VALUES as error:
        paths = {id(m): path for path, m in module.named_modules() if path}
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        running = [paths[i] for f in frames if (i := id(f.f_locals.get("self"))) in paths]
        where = running[-1] if running else f"{type(module).__name__} or its loss"
        raise ValueError(
            f"fit runs a model on fake tensors, which have no values, but {error.func} in {where} "
            "reads values, for example for .item(), a branch or a boolean mask. Replace this "
            "operation, or call fit on a part of the model. For mixture-of-experts models of "
            "Hugging Face, set experts_implementation='grouped_mm'."
        ) from error


@contextmanager
def _compile_parts(
    module: nn.Module, paths: Sequence[str], recorder: _Recorder
) -> Iterator[Callable[..., Any]]:
    if list(paths) == [""]:
        # A plan needs numbers, but Dynamo makes a size dynamic that differs from an earlier `fit`.
        yield torch.compile(module, backend=recorder.compile, dynamic=False)
        return
    parts = {path: module.get_submodule(path) for path in paths}
    for path, part in parts.items():
        compiled = torch.compile(part.forward, backend=recorder.compile, dynamic=False)
        part.forward = partial(recorder.run_at, path, compiled)
    try:
        yield module
    finally:
        for part in parts.values():
            del part.forward


class _Recorder(compat.OperatorObserver):
    def __init__(self) -> None:
        super().__init__(self._record_operator)
        self.regions: list[CompiledRegion] = []
        self.events: list[Event] = []
        self.path = ""
        self._storages = compat.WeakIdKeyDictionary()
        self._numbers = itertools.count()

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Start an empty record, and record until exit. Parameters and buffers are not recorded."""
        self.events, self._storages = [], compat.WeakIdKeyDictionary()
        for x in (*module.parameters(), *module.buffers()):
            self._storages[x.untyped_storage()] = None

        def record(parameter: Tensor) -> None:
            self.events.append(Gradient(self.number(parameter.grad)))

        trained = [p for p in module.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(record) for p in trained]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _record_operator(self, operator: Any, arguments: Any, result: Any) -> None:
        given = {id(x.untyped_storage()) for x in compat.tensor_leaves(arguments)}
        new = [x for x in compat.tensor_leaves(result) if id(x.untyped_storage()) not in given]
        if new:
            self.events.append(Computed(_estimate_work(operator, arguments, result, new)))
        for x in new:
            self.number(x)

    def number(self, x: Any) -> int | None:
        """Return the number of a tensor's storage, and record a new storage.

        The number is None if the storage existed before the step, or if `x` has no storage.
        """
        if not isinstance(x, Tensor):
            return None
        storage = x.untyped_storage()
        if storage not in self._storages:
            number = self._storages[storage] = next(self._numbers)
            self.events.append(Allocated(number, storage.nbytes()))
            weakref.finalize(storage, self.events.append, Freed(number))
        found: int | None = self._storages[storage]
        return found

    def run_at(self, path: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module at `path`. Regions that `compile` captures meanwhile get the path."""
        self.path = path
        return run(*args, **kwargs)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Backend of `torch.compile` that captures the joint graph and returns a stand-in."""
        region = _capture(gm, example_inputs, self.path)
        self.regions.append(region)
        return lambda *inputs: _StandIn.apply(self, region, *inputs)


def _estimate_work(operator: Any, arguments: Any, result: Any, new: Sequence[Tensor]) -> Work:
    """Estimate the work of an operator. `new` are the results that are not views of arguments."""
    args, kwargs = arguments
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    if formula is not None:
        return Work(bf16_flops=float(formula(*args, **kwargs, out_val=result)))
    if operator in CREATIONS:
        return Work()
    return Work(bytes=float(sum(map(graph.bytes_of, (*compat.tensor_leaves(arguments), *new)))))


class _StandIn(torch.autograd.Function):
    """Stands in for a compiled graph: allocates results and gradients, but computes nothing."""

    @staticmethod
    def forward(ctx: Any, recorder: _Recorder, region: CompiledRegion, *inputs: Any) -> Any:
        call = RegionForward(region, [recorder.number(x) for x in inputs])
        recorder.events.append(call)
        results = tuple(_allocate(x) for x, _ in region.outputs)
        call.outputs.extend(map(recorder.number, results))
        pairs = zip(results, region.outputs, strict=True)
        ctx.mark_non_differentiable(
            *(x for x, (_, has_gradient) in pairs if isinstance(x, Tensor) and not has_gradient)
        )
        ctx.recorder, ctx.call = recorder, call
        ctx.layouts = [_describe_layout(x) for x in inputs]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.recorder.events.append(RegionBackward(ctx.call))
        wanted = zip(ctx.layouts, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(_allocate(x) if needed else None for x, needed in wanted))


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _describe_layout(x: Any) -> Any:
    return _Layout(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _allocate(x: Any) -> Any:
    if not isinstance(x, _Layout):
        return x
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype)


def _capture(gm: fx.GraphModule, example_inputs: Sequence[Any], path: str) -> CompiledRegion:
    compat.rename_self(gm)
    results = compat.tree_leaves(gm(*example_inputs))
    outputs = [(_describe_layout(x), isinstance(x, Tensor) and x.requires_grad) for x in results]
    region = CompiledRegion(path, outputs)
    compilation = Compilation(Config(compiler="eager"), Inputs.of(example_inputs), is_main=False)
    compat.compile_fx(
        gm,
        list(example_inputs),
        inner_compile=lambda half, inputs, **kwargs: compat.interpret(half),
        config_patches={"custom_partitioner_fn": _Capture(compilation, region)},
    )
    return region


class _Capture(Partitioner):
    def __init__(self, compilation: Compilation, region: CompiledRegion) -> None:
        super().__init__(compilation)
        self.region = region

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        ctx = self.context(gm, **kwargs)
        copies: dict[fx.Node, fx.Node] = {}
        self.region.gm = graph.copy_module(gm, copies)
        self.region.ctx = Context(ctx.config, ctx.facts.map_to_copy(copies))
        return compat.stock_partition(gm, joint_inputs, **kwargs)
