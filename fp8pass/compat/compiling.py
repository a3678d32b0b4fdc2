"""Compiling with Dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any
from weakref import ref

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import OptimizedModule, compiled_autograd, convert_frame, trace_rules
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import list_mode_options, list_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InvalidCxxCompiler
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

from fp8pass.compat.randomness import run_op_by_op

__all__ = [
    "CustomPartitionerFn",
    "activation_quantization_is_on",
    "after_backward",
    "backend_of",
    "boxed",
    "captures_backward",
    "compile_fx",
    "compile_fx_inner",
    "compiled_in_vain",
    "copy_captured",
    "counters",
    "fresh_compilation",
    "get_cpp_compiler",
    "half_of",
    "has_cpp_compiler",
    "interpret",
    "is_checkpointing",
    "is_of_fsdp",
    "list_mode_options",
    "list_options",
    "multiplies_bf16_on_cpu",
    "original_of",
    "recompiled",
    "replayed_memory",
    "running_backward",
    "static_inputs",
    "trace_structured",
    "uncached",
    "uncompiled",
]


def half_of(kwargs: dict[str, Any]) -> str:
    """The graph that Inductor's inner compile got: `forward`, `backward` or `inference`."""
    if kwargs.get("is_inference"):
        return "inference"
    return "backward" if kwargs.get("is_backward") else "forward"


def static_inputs(kwargs: dict[str, Any]) -> frozenset[int]:
    """Indices of the inputs that Inductor's inner compile knows to be parameters or buffers."""
    return frozenset(kwargs.get("static_input_idxs") or ())


def has_cpp_compiler() -> bool:
    """Whether Inductor finds a compiler for the CPU."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def multiplies_bf16_on_cpu() -> bool:
    """Whether products in BF16 have instructions of their own on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_checkpointing() -> bool:
    """Whether what is saved here is dropped, and computed again by `torch.utils.checkpoint`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def captures_backward() -> bool:
    """Whether the graph that is being compiled is a whole backward, of compiled autograd.

    What the passes made of the backwards of compiled forwards is a part of it.
    """
    return bool(compiled_autograd.in_compiled_autograd_region)


def type_of_option(name: str) -> type | None:
    """The type of an option of Inductor; None if that is no class, or the value may be None."""
    found = inductor_config.get_type(name)  # type: ignore[attr-defined]
    return found if isinstance(found, type) and found is not type(None) else None


def activation_quantization_is_on(options: Mapping[str, Any]) -> bool:
    """Whether the user also asked for PyTorch's own activation quantization, here or anywhere."""
    fusions = options.get("post_grad_fusion_options", inductor_config.post_grad_fusion_options)
    return "activation_quantization_aten_pass" in fusions


def boxed(function: Any) -> Any:
    """`function` of a list of arguments as AOTAutograd wants compiled code."""
    function._boxed_call = True
    return function


def interpret(gm: fx.GraphModule, run: Callable[[list[Any]], Any] | None = None) -> Any:
    """`gm` as AOTAutograd wants compiled code, run op by op by PyTorch, or by `run`.

    What a graph returns may be a view of one of its values. Generated code returns it as a tensor
    of its own, and so must we: autograd refuses to change a view in place that was made where it
    did not look, as models do with what they got before a graph break.
    """
    run_op_by_op(gm)
    run = run or make_boxed_func(gm.forward)
    results = next(iter(reversed(gm.graph.nodes))).args[0]
    given = [isinstance(x, fx.Node) and x.op == "placeholder" for x in results]

    def interpreted(arguments: list[Any]) -> list[Any]:
        pairs = zip(run(arguments), given, strict=True)
        return [x if is_input else _no_view(x) for x, is_input in pairs]

    return boxed(interpreted)


def _no_view(value: Any) -> Any:
    """A tensor in the same memory that autograd does not take for a view."""
    if not isinstance(value, torch.Tensor) or not value._is_view():
        return value
    return torch.ops.aten._unsafe_view.default(value, value.shape)


def backend_of(model: Any) -> tuple[Any, dict[str, Any]]:
    """The backend and the options that a module was compiled with; (None, {}) if it was not.

    Dynamo wraps backends in callbacks that point inwards.
    """
    callback: Any = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    in_place = getattr(model, "_compiled_call_impl", None)
    if in_place is not None:
        callback = inspect.getclosurevars(in_place).nonlocals.get("callback")
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    options = getattr(callback, "kwargs", {}).get("options", {})
    return getattr(callback, "compiler_fn", None), dict(options)


def compiled_in_vain(module: nn.Module) -> bool:
    """Whether a module was compiled in place although Dynamo does not trace its class.

    The forward of a class of `torch.nn` is traced only where something else calls it.
    DistributedDataParallel calls the forward of its module, which Dynamo traces.
    """
    if module._compiled_call_impl is None:
        return False
    called = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return trace_rules.check(called.forward)


def original_of(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped; `model` itself if it did not."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


@contextmanager
def recompiled(parts: Iterable[nn.Module], backend: Any) -> Iterator[None]:
    """Let parts of a model, compiled in place or wrapped, run here compiled with `backend`."""
    earlier: list[tuple[nn.Module, str, Any]] = []
    for part in parts:
        if isinstance(part, OptimizedModule):
            wrapped: Any = torch.compile(part._orig_mod, backend=backend)
            name, call = "forward", wrapped.forward
        else:
            name, call = "_compiled_call_impl", torch.compile(part._call_impl, backend=backend)
        earlier.append((part, name, getattr(part, name)))
        setattr(part, name, call)
    try:
        yield
    finally:
        for part, name, call in earlier:
            setattr(part, name, call)


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Let a module and its parts run here as if none of them had been compiled in place."""
    compiled = {m: m._compiled_call_impl for m in module.modules() if m._compiled_call_impl}
    for m in compiled:
        m._compiled_call_impl = None
    try:
        yield
    finally:
        for m, call in compiled.items():
            m._compiled_call_impl = call


@contextmanager
def without_gradient_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Call no hook that was registered to run when a gradient has been accumulated."""
    # The engine reads the dict that holds them: another in its place would change nothing.
    hooks = [h for x in leaves if (h := x._post_accumulate_grad_hooks)]
    registered = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, there in zip(hooks, registered, strict=True):
            h.update(there)


def copy_captured(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that Dynamo captured, with what Dynamo said about its inputs.

    Without that AOTAutograd would not know which of them are parameters.
    """
    copies: dict[fx.Node, fx.Node] = {}
    g = fx.Graph()
    g.output(g.graph_copy(gm.graph, copies))
    copy = fx.GraphModule(gm, g)
    copy.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    for node, its_copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            its_copy._dynamo_source = node._dynamo_source
    return copy


def source_of(node: fx.Node) -> str:
    """The expression by which Dynamo reached an input of its graph; empty for other nodes."""
    source = getattr(node, "_dynamo_source", None)
    # A method in older versions, an attribute in newer ones.
    name = "" if source is None else source.name
    return name() if callable(name) else name


def is_region(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph calls a region of `torch.compiler.nested_compile_region`."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def is_of_fsdp(node: fx.Node) -> bool:
    """Whether Dynamo found an input of its graph in a module that FSDP manages."""
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()


def uses_cuda_graphs(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor is to make CUDA graphs, with these options of a compilation."""
    return bool(patches.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


@contextmanager
def uncached() -> Iterator[None]:
    """Let AOTAutograd neither look up nor keep its results here."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def fresh_compilation() -> Iterator[None]:
    """Compile here whatever is cached, and however often this code was compiled before.

    What was compiled is forgotten in the end: Dynamo compiles a function so often and no more, and
    none that has raised an exception when it was compiled. Of a function that had versions before,
    empty entries are left, which count for `accumulated_recompile_limit` alone.
    """
    unlimited = 1 << 20
    # Held, codes and guards: what is compared by identity must not be freed and its place taken.
    before = [(code, [entry.guard_manager for entry in _live(code)]) for code in _codes()]
    kept = {id(code): {id(guards) for guards in found} for code, found in before if found}
    try:
        with (
            uncached(),
            dynamo_config.patch(recompile_limit=unlimited, accumulated_recompile_limit=unlimited),
        ):
            yield
    finally:
        with convert_frame.compile_lock:
            for code in _codes():
                _forget(code, kept.get(id(code), set()))


def _codes() -> list[CodeType]:
    """The functions that Dynamo has compiled, or tried to."""
    codes = (reference() for reference in convert_frame.input_codes.seen)
    return [code for code in codes if code is not None]


def _live(code: CodeType) -> list[Any]:
    """What Dynamo has made of a function."""
    entries = _debug_get_cache_entry_list(code)
    return [e for e in entries if getattr(e.guard_manager, "extra_state", None) is not None]


def _forget(code: CodeType, kept: set[int]) -> None:
    """Drop all versions of a function but those of which the guards' identities are given."""
    if not kept:
        reset_code(code)
        return
    for entry in _live(code):
        if id(entry.guard_manager) not in kept:
            entry.guard_manager.extra_state.invalidate(entry, _Forgotten())


class _Forgotten(DeletedGuardManagerWrapper):
    """Guards of a version that is gone and does not count: it was of no object that is there."""

    def __init__(self) -> None:
        super().__init__("compiled by a tool, which has ended")
        self.id_matched_objs = {"self": ref(type(self))}


def replayed_memory(device: torch.device) -> frozenset[int]:
    """Addresses of what CUDA graphs returned and may overwrite from now on, called before a graph.

    Nothing while results of a forward wait for their backward.
    """
    from torch._inductor import cudagraph_trees  # without CUDA graphs nobody imports it

    if device.type != "cuda":
        return frozenset()
    manager = cudagraph_trees.get_manager(device.index, create_if_none_exists=False)
    if manager is None or manager.current_node is None or not manager.can_start_new_generation():
        return frozenset()
    return frozenset(live.data_ptr() for live in manager.current_node.path_live_weakrefs())


def running_backward() -> int:
    """The number of the backward that is running, of the innermost where one runs in another."""
    return torch._C._current_graph_task_id()


def compiles_backward() -> bool:
    """Whether compiled autograd runs the current backward."""
    return compiled_autograd.in_compiled_autograd_region


def after_backward(function: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Call a function when the backward that is running has ended, on its caller's stream.

    If that ends with an error `otherwise` is called, on any stream.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_Ending(function, otherwise))


class _Ending:
    """What autograd calls at the end of a backward; of one that fails it only lets go."""

    def __init__(self, function: Callable[[], None], otherwise: Callable[[], None]) -> None:
        self._function, self._otherwise = function, otherwise
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._function()

    def __del__(self) -> None:
        if not self._called:
            self._otherwise()
