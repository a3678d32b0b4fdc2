"""Helpers for compiling with Dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CodeType
from typing import Any
from weakref import ref

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.inductor_prims
from torch import fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import OptimizedModule, compiled_autograd, convert_frame, trace_rules
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.pgo import reset_code_state
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import list_mode_options, list_options
from torch._inductor.codegen import wrapper
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.runtime_utils import cache_dir
from torch._inductor.virtualized import V
from torch._logging import trace_structured

from fp8pass.compat.attributes import Attribute, set_attributes

__all__ = [
    "SEEDED_RANDOM", "CustomPartitionerFn", "activation_quantization_is_on", "after_backward",
    "backend_of", "box", "cache_folder", "compile_fx", "compile_fx_inner", "compiled_in_vain",
    "compiles_backward", "copy_captured", "current_options", "find_replayed_memory",
    "forget_sizes", "fresh_compilation", "get_cpp_compiler", "half_of", "has_cpp_compiler",
    "interpret", "is_checkpointing", "is_of_fsdp", "is_region", "list_mode_options",
    "list_options", "match_generated_code", "multiplies_bf16_on_cpu", "original_of",
    "patch_options", "recompile", "reuse_small_buffers", "run_uncompiled", "running_backward",
    "source_of", "static_inputs", "trace_structured", "type_of_option", "uncached",
    "uses_cuda_graphs",
]  # fmt: skip

# Before PyTorch 2.13, Dynamo does not check a parameter again while the dict that contains it is
# unchanged. If the user unfroze a layer, Dynamo would not recompile the model, and the layer would
# not train.
if torch.__version__ < "2.13":
    dynamo_config.skip_tensor_guards_with_matching_dict_tags = False

# The largest buffer, in bytes, that generated code reuses for later results. Larger buffers are
# freed after their last use, because Inductor would hold their memory. Half of the allocations of a
# small model are smaller.
_LARGEST_REUSED = 1 << 20

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

# The operators whose random numbers are determined by a seed operand.
SEEDED_RANDOM = (
    torch.ops.prims.inductor_random.default,
    torch.ops.prims.inductor_randint.default,
    torch.ops.prims.inductor_lookup_seed.default,
)


def half_of(kwargs: dict[str, Any]) -> str:
    """Return which graph Inductor compiles: `forward`, `backward` or `inference`."""
    if kwargs.get("is_inference"):
        return "inference"
    return "backward" if kwargs.get("is_backward") else "forward"


def static_inputs(kwargs: dict[str, Any]) -> frozenset[int]:
    """Return the indices of inputs with fixed addresses, such as parameters."""
    return frozenset(kwargs.get("static_input_idxs") or ())


def has_cpp_compiler() -> bool:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def multiplies_bf16_on_cpu() -> bool:
    """Whether PyTorch can use the CPU's instructions for BF16 GEMMs."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_checkpointing() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def type_of_option(name: str) -> type | None:
    """Return the type of an Inductor option, if it is a class."""
    found = inductor_config.get_type(name)  # type: ignore[attr-defined]
    return found if isinstance(found, type) and found is not type(None) else None


def activation_quantization_is_on(options: Mapping[str, Any]) -> bool:
    """Whether PyTorch's own activation quantization is enabled."""
    fusions = options.get("post_grad_fusion_options", inductor_config.post_grad_fusion_options)
    return "activation_quantization_aten_pass" in fusions


def box(function: Any) -> Any:
    """Mark a function that takes one list of arguments as compiled code for AOTAutograd."""
    function._boxed_call = True
    return function


def interpret(gm: fx.GraphModule, run: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return a function for AOTAutograd that runs `gm` op by op, or calls `run` if it is given.

    The function replaces a result that is a view by a separate tensor, as generated code does.
    Otherwise autograd would raise an error when a model writes in place to the view.
    """
    match_generated_code(gm)
    run = run or make_boxed_func(gm.forward)
    results: Any = gm.graph.output_node().args[0]
    are_inputs = [isinstance(x, fx.Node) and x.op == "placeholder" for x in results]

    def interpreted(arguments: list[Any]) -> list[Any]:
        pairs = zip(run(arguments), are_inputs, strict=True)
        return [x if is_input else _detach_from_base(x) for x, is_input in pairs]

    return box(interpreted)


def _detach_from_base(value: Any) -> Any:
    """Return a tensor with the memory of a view. Autograd does not treat the tensor as a view."""
    if not isinstance(value, torch.Tensor) or not value._is_view():
        return value
    return torch.ops.aten._unsafe_view.default(value, value.shape)


def match_generated_code(gm: fx.GraphModule) -> None:
    """Change a graph so that running it op by op gives the results of generated code.

    In eager mode, random operators ignore the seed, and `iota` does not support unsigned dtypes.
    Results may have other strides than in the trace, so a traced `view` would raise an error.
    """
    aten, prims = torch.ops.aten, torch.ops.prims
    for node in gm.graph.nodes:
        if node.target is prims.inductor_random.default:
            node.target = _random
        elif node.target is prims.inductor_randint.default:
            node.target = _randint
        elif node.target is prims.iota.default and node.kwargs.get("dtype") in _UNSIGNED:
            node.kwargs = {**node.kwargs, "dtype": torch.int64}
        elif node.target is aten.view.default:
            node.target = aten.reshape.default
    gm.recompile()


def _random(
    size: list[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    draw = getattr(torch, mode)
    return draw(size, generator=_make_generator(seed), device=seed.device, dtype=torch.float32)


def _randint(low: int, high: int, size: list[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_make_generator(seed), device=seed.device)


def _make_generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


def backend_of(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the backend and options of a compiled module, or (None, {}).

    If a module is compiled in place and then again by `torch.compile`, the in-place backend runs,
    so this backend is returned.
    """
    callback: Any = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    in_place = getattr(original_of(model), "_compiled_call_impl", None)
    if in_place is not None:
        callback = inspect.getclosurevars(in_place).nonlocals.get("callback")
    while hasattr(callback, "_torchdynamo_orig_backend"):  # Dynamo nests callbacks
        callback = callback._torchdynamo_orig_backend
    options = getattr(callback, "kwargs", {}).get("options", {})
    return getattr(callback, "compiler_fn", None), dict(options)


def compiled_in_vain(module: nn.Module) -> bool:
    """Whether `module.compile()` had no effect, because Dynamo does not trace the module's class.

    Before PyTorch 2.14, Dynamo traces the forward of a `torch.nn` class only if other traced code
    calls this forward. For a DistributedDataParallel, the class of the wrapped module counts.
    """
    if module._compiled_call_impl is None:
        return False
    called = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return trace_rules.check(called.forward) and not _compiles_torch_classes_in_place()


@cache
def _compiles_torch_classes_in_place() -> bool:
    """Compile a `torch.nn.Sequential` in place, and return whether Dynamo traces it."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    probe = nn.Sequential(nn.ReLU())
    probe.compile(backend=backend)
    with fresh_compilation(), torch.compiler.set_stance("default"):
        probe(torch.ones(1))
    return bool(graphs)


def original_of(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, if any."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def recompile(parts: Iterable[nn.Module], backend: Any) -> AbstractContextManager[None]:
    """Use `backend` for `parts`, which were compiled with another backend."""
    changes: list[Attribute] = []
    for part in parts:
        if isinstance(part, OptimizedModule):
            wrapped: Any = torch.compile(part._orig_mod, backend=backend)
            changes.append((part, "forward", wrapped.forward))
        else:
            call = torch.compile(part._call_impl, backend=backend)
            changes.append((part, "_compiled_call_impl", call))
    return set_attributes(changes)


def run_uncompiled(module: nn.Module) -> AbstractContextManager[None]:
    """Ignore the in-place compilation of a module and its submodules."""
    compiled = [m for m in module.modules() if m._compiled_call_impl]
    return set_attributes([(m, "_compiled_call_impl", None) for m in compiled])


def copy_captured(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a Dynamo graph and its inputs' sources, by which AOTAutograd recognizes parameters."""
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
    """Return the Python expression of a Dynamo graph's input, such as `L['ids']`, or ''."""
    source = getattr(node, "_dynamo_source", None)
    return "" if source is None else source.name


def is_region(node: fx.Node) -> bool:
    """Whether a node calls a region of `torch.compiler.nested_compile_region`."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def is_of_fsdp(node: fx.Node) -> bool:
    """Whether FSDP manages the module of a graph input."""
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()


def uses_cuda_graphs(patches: Mapping[str, Any]) -> bool:
    return bool(patches.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def current_options(names: Iterable[str]) -> dict[str, Any]:
    """Return the current values of the Inductor options `names`."""
    return {name: getattr(inductor_config, name) for name in names}


def patch_options(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Set options of Inductor temporarily."""
    return inductor_config.patch(dict(options))


@contextmanager
def reuse_small_buffers() -> Iterator[None]:
    """Let generated code reuse buffers of at most `_LARGEST_REUSED` bytes."""
    key_of: Any = wrapper.buffer_reuse_key

    def key_if_small(node: Any) -> Any:
        sizes, itemsize = V.graph.sizevars, node.get_dtype().itemsize
        size = V.graph.get_allocation_storage_size(node) * itemsize
        is_small = sizes.statically_known_leq(size, _LARGEST_REUSED)
        return key_of(node) if is_small else node.get_name()

    changes = [(wrapper, "buffer_reuse_key", key_if_small)]
    with set_attributes(changes), patch_options({"allow_buffer_reuse": True}):
        yield


def cache_folder() -> str | None:
    """Return the folder of Inductor's caches, or None if compiled graphs are not cached."""
    is_enabled = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    return cache_dir() if is_enabled and not inductor_config.force_disable_caches else None


def uncached() -> AbstractContextManager[Any]:
    """Disable the cache of AOTAutograd."""
    return functorch_config.patch(enable_autograd_cache=False)


def forget_sizes() -> None:
    """Let Dynamo forget the sizes that it has seen. Compiled code stays.

    After two different sizes, Dynamo compiles for any size.
    """
    reset_code_state()


@contextmanager
def fresh_compilation() -> Iterator[None]:
    """Ignore caches and recompile limits, and drop the compiled code on exit.

    Dynamo limits the number of compiled versions of a function, and never retries a function after
    its compilation raised an exception. Each dropped version leaves an empty entry, which only
    `accumulated_recompile_limit` counts.
    """
    unlimited = 1 << 20
    # Keep references to the guard managers, because ids of dead objects may be reused.
    before = [
        (code, [entry.guard_manager for entry in _live_entries(code)]) for code in _compiled_codes()
    ]
    known = {id(code): {id(guards) for guards in found} for code, found in before if found}
    try:
        with (
            uncached(),
            dynamo_config.patch(recompile_limit=unlimited, accumulated_recompile_limit=unlimited),
        ):
            yield
    finally:
        with convert_frame.compile_lock:
            for code in _compiled_codes():
                _forget(code, known.get(id(code), set()))


def _compiled_codes() -> list[CodeType]:
    """Return the functions that Dynamo has compiled, or has tried to compile."""
    codes = (reference() for reference in convert_frame.input_codes.seen)
    return [code for code in codes if code is not None]


def _live_entries(code: CodeType) -> list[Any]:
    """Return Dynamo's cache entries for a function, one for each valid version."""
    entries = _debug_get_cache_entry_list(code)
    return [e for e in entries if getattr(e.guard_manager, "extra_state", None) is not None]


def _forget(code: CodeType, known: set[int]) -> None:
    """Drop compiled versions of a function, except those with a guard manager id in `known`."""
    if not known:
        reset_code(code)
        return
    for entry in _live_entries(code):
        if id(entry.guard_manager) not in known:
            entry.guard_manager.extra_state.invalidate(entry, _Forgotten())


class _Forgotten(DeletedGuardManagerWrapper):
    """Guards of a dropped version. They match no object, so Dynamo does not count the version."""

    def __init__(self) -> None:
        super().__init__("compiled by an fp8pass tool that has ended")
        self.id_matched_objs = {"self": ref(type(self))}


def find_replayed_memory(device: torch.device) -> frozenset[int]:
    """Return the addresses of CUDA graph outputs that the next replay may overwrite.

    Call this before a graph runs. The result is empty while a forward waits for its backward.
    """
    from torch._inductor import cudagraph_trees  # imported late: only CUDA graphs need this module

    if device.type != "cuda":
        return frozenset()
    manager = cudagraph_trees.get_manager(device.index, create_if_none_exists=False)
    if manager is None or manager.current_node is None or not manager.can_start_new_generation():
        return frozenset()
    return frozenset(live.data_ptr() for live in manager.current_node.path_live_weakrefs())


def running_backward() -> int:
    """Return an id of the (innermost) running backward."""
    return torch._C._current_graph_task_id()


def compiles_backward() -> bool:
    """Whether compiled autograd is compiling a whole backward."""
    return compiled_autograd.in_compiled_autograd_region


def after_backward(function: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Call `function` when the running backward has ended, on the stream of the backward's caller.

    If the backward raises an error, call `otherwise`, on the current stream.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_Ending(function, otherwise))


class _Ending:
    """A callback of a backward. If the backward fails, callbacks are deleted, but not called."""

    def __init__(self, function: Callable[[], None], otherwise: Callable[[], None]) -> None:
        self._function, self._otherwise = function, otherwise
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._function()

    def __del__(self) -> None:
        if not self._called:
            self._otherwise()
