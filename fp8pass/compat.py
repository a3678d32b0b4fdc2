"""Every private PyTorch symbol that fp8pass uses, for every supported version.

Nothing else in the package imports from `torch._*`. When a PyTorch release moves or changes one
of these, this is the only file to touch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx

SUPPORTED = ">=2.11,<2.14"
_MINIMUM, _BELOW = (2, 11), (2, 14)


def check_version(version: str) -> None:
    """Raise ImportError unless `version` of PyTorch is one fp8pass supports."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not _MINIMUM <= release < _BELOW:
        raise ImportError(
            f"fp8pass supports PyTorch {SUPPORTED}, this is {version}. "
            f"Install one that works: pip install 'torch{SUPPORTED}'"
        )


check_version(torch.__version__)

import torch._dynamo.config as dynamo_config  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402
import torch._functorch.partitioners as _partitioners  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
import torch._inductor.inductor_prims  # noqa: E402
from torch._dynamo.utils import counters as counters  # noqa: E402
from torch._functorch._aot_autograd.descriptors import PlainAOTInput  # noqa: E402
from torch._functorch._aot_autograd.utils import make_boxed_func  # noqa: E402
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems  # noqa: E402
from torch._functorch.partitioners import (  # noqa: E402
    cleanup_recompute_tags,
    force_save_bw_mutation_src,
    force_save_collectives,
    force_save_effectful_ops,
    has_recomputable_ops,
    min_cut_rematerialization_partition,
    reordering_to_mimic_autograd_engine,
    thread_graphsafe_rng_from_hops,
)
from torch._higher_order_ops import triton_kernel_wrap  # noqa: E402
from torch._inductor import ir as inductor_ir  # noqa: E402
from torch._inductor import list_mode_options, list_options  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: E402
from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: E402
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # noqa: E402
from torch._inductor.lowering import empty_strided as inductor_empty_strided  # noqa: E402
from torch._inductor.lowering import fallback_handler, register_lowering  # noqa: E402
from torch._inductor.utils import convert_shape_to_inductor  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._logging import trace_structured  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors  # noqa: E402
from torch.fx.experimental.proxy_tensor import is_sym_node  # noqa: E402
from torch.fx.experimental.symbolic_shapes import (  # noqa: E402
    free_unbacked_symbols,
    statically_known_true,
)
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._sympy.functions import CeilDiv  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy  # noqa: E402

__all__ = [
    "CustomPartitionerFn",
    "FakeTensor",
    "compile_fx",
    "compile_fx_inner",
    "counters",
    "get_cpp_compiler",
    "is_sym_node",
    "list_mode_options",
    "list_options",
    "real_tensors",
    "statically_known_true",
    "stock_partition",
    "trace_structured",
]

_EXTRACT_TAKES_OPAQUE = (
    "saved_opaque_nodes" in inspect.signature(_partitioners._extract_fwd_bwd_modules).parameters
)


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A key for the memory of `tensor`: no other storage gets the same while the key lives."""
    return StorageWeakRef(tensor.untyped_storage())


def lower_to_buffer(op: Any) -> None:
    """Have Inductor realize `op(x, order)` as `x` in memory, outermost dimension first in `order`.

    What is in such memory already is not copied.
    """

    def lowering(x: Any, order: Sequence[int]) -> Any:
        ranks = [len(order) - 1 - list(order).index(dim) for dim in range(len(order))]
        return inductor_ir.ExternKernel.require_stride_order(x, ranks)

    register_lowering(op, type_promotion_kind=None)(lowering)


def lower_to_triton(op: Any, prepare: Callable[[Sequence[Any], str], Iterable[Any]]) -> None:
    """Have Inductor run `op(inputs, programs)` on a GPU as the launches that `prepare` gives."""
    fallback = fallback_handler(op, add_to_fallback_set=False)

    def lowering(inputs: Sequence[Any], programs: str) -> Any:
        results = V.graph.current_node.meta["val"]
        if results[0].device.type != "cuda":
            return fallback(inputs, programs)
        tensors = [inductor_ir.ExternKernel.require_contiguous(x) for x in inputs]
        outputs = [_empty(convert_shape_to_inductor(x.shape), x) for x in results]
        for launch in prepare(tensors, programs):
            _launch(launch, tensors, outputs)
        return outputs

    register_lowering(op, type_promotion_kind=None)(lowering)


def _launch(launch: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Add a launch to what Inductor compiles."""
    pointers = {f"in{i}": inputs[number] for i, number in enumerate(launch.inputs)}
    pointers |= {f"out{i}": outputs[number] for i, number in enumerate(launch.outputs)}
    kernel = _with_warps(launch.kernel, launch.num_warps)
    with _each_kernel_analysed_once():
        inductor_ir.UserDefinedTritonKernel(
            kernel_idx=triton_kernel_wrap.kernel_side_table.add_kernel(kernel),
            grid=[(launch.grid, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args={**pointers, **launch.sizes},
        )


def _empty(size: Sequence[Any], like: torch.Tensor) -> Any:
    return inductor_empty_strided(size, None, dtype=like.dtype, device=like.device)


@cache
def _with_warps(kernel: Any, num_warps: int) -> Any:
    """A Triton function with its launch options, as Inductor takes them."""
    import triton

    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps)], key=[])(kernel)


@contextmanager
def _each_kernel_analysed_once() -> Iterator[None]:
    """Remember which arguments a kernel writes, for which Inductor compiles it every time."""
    names = ("identify_mutated_tensors", "identify_accessed_tensors")
    with ExitStack() as stack:
        for name in names:
            if analyse := getattr(triton_kernel_wrap, name, None):
                stack.enter_context(patch.object(triton_kernel_wrap, name, _remembered(analyse)))
        yield


_analysed: dict[Any, Any] = {}


def _remembered(analyse: Any) -> Any:
    def remembered(kernel: Any, *args: Any) -> Any:
        if kernel not in _analysed:
            _analysed[kernel] = analyse(kernel, *args)
        return _analysed[kernel]

    return remembered


def ceil_div(a: Any, b: int) -> Any:
    """⌈a / b⌉ of numbers, sizes or Inductor's sizes."""
    return CeilDiv(a, b) if isinstance(a, sympy.Expr) else -(-a // b)


def load_source(source: str) -> Any:
    """The module of a source text, kept in a file that Triton can read it from."""
    return PyCodeCache.load(source)


def stock_partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own min-cut partitioner, what `torch.compile` uses without fp8pass."""
    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def normalize_joint_graph(gm: fx.GraphModule) -> None:
    """What PyTorch's partitioner does before it decides: CSE and tags for what must be saved."""
    gm.graph.eliminate_dead_code()
    if functorch_config.cse:
        gm.graph = fx_graph_cse(gm.graph)
    if has_recomputable_ops(gm):
        cleanup_recompute_tags(gm, is_default_partition=False)
    force_save_collectives(gm)
    force_save_effectful_ops(gm)
    force_save_bw_mutation_src(gm)


def extract_forward_backward(
    gm: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    *,
    num_fwd_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the joint graph at `saved` and `saved_symbols` into forward and backward modules."""
    extra: dict[str, Any] = {"saved_opaque_nodes": []} if _EXTRACT_TAKES_OPAQUE else {}
    forward, backward = _partitioners._extract_fwd_bwd_modules(
        gm, saved, saved_sym_nodes=saved_symbols, num_fwd_outputs=num_fwd_outputs, **extra
    )
    backward = reordering_to_mimic_autograd_engine(backward)
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def is_tangent(node: fx.Node) -> bool:
    """Whether `node` is the gradient of a forward output, an input of the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_primal(node: fx.Node) -> bool:
    """Whether `node` is an input of the forward: parameter, buffer or argument."""
    return node.op == "placeholder" and "primals" in str(node.target)


def must_recompute(node: fx.Node) -> bool:
    """Whether the user asked for recomputation (`torch.utils.checkpoint`)."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def must_save(node: fx.Node) -> bool:
    """Whether recomputing is ruled out, by the user's policy or by a side effect."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def input_index(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a primal is, None where that is unknown."""
    desc = node.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def has_unbacked(value: object) -> bool:
    """Whether a tensor's sizes depend on data, so that nothing about them is known."""
    return bool(free_unbacked_symbols(value))


# What a size counts as that only the data decides.
_UNBACKED_HINT = 4096


def size_hint(value: int | torch.SymInt) -> int:
    """The number behind a size: itself, or the one it was traced with, or a guess."""
    if isinstance(value, int):
        return value
    hint = None if has_unbacked(value) else value.node.hint
    return _UNBACKED_HINT if hint is None else int(hint)


def seeded_random_ops() -> Iterable[Any]:
    """Inductor's random numbers: a pure function of a seed, so recomputing gives the same."""
    return (
        torch.ops.prims.inductor_random.default,
        torch.ops.prims.inductor_randint.default,
        torch.ops.prims.inductor_lookup_seed.default,
    )


def is_inference_compile(kwargs: dict[str, Any]) -> bool:
    """Whether Inductor's inner compile was called for a graph without a backward."""
    return bool(kwargs.get("is_inference"))


def is_backward_compile(kwargs: dict[str, Any]) -> bool:
    """Whether Inductor's inner compile was called for a backward graph."""
    return bool(kwargs.get("is_backward"))


def static_inputs(kwargs: dict[str, Any]) -> frozenset[int]:
    """Indices of the inputs that Inductor's inner compile knows to be parameters or buffers."""
    return frozenset(kwargs.get("static_input_idxs") or ())


def activation_quantization_is_on() -> bool:
    """Whether the user also asked for PyTorch's own activation quantization."""
    return "activation_quantization_aten_pass" in inductor_config.post_grad_fusion_options


def fake_mode_of(fake: torch.Tensor) -> Any:
    """The mode under which operators without tensor inputs give fake tensors, as a context."""
    assert isinstance(fake, FakeTensor)
    return fake.fake_mode


def boxed(function: Any) -> Any:
    """`function` of a list of arguments as AOTAutograd wants compiled code."""
    function._boxed_call = True
    return function


def interpret(gm: fx.GraphModule) -> Any:
    """`gm` as AOTAutograd wants compiled code, run op by op by PyTorch."""
    draw_from_seeds(gm)
    return make_boxed_func(gm.forward)


def draw_from_seeds(gm: fx.GraphModule) -> None:
    """Make Inductor's random numbers a function of their seed, as they are in generated code.

    In their eager form they are not: a backward that draws them again would get others.
    """
    prims = torch.ops.prims
    for node in gm.graph.nodes:
        if node.target is prims.inductor_random.default:
            node.target = _seeded_random
        elif node.target is prims.inductor_randint.default:
            node.target = _seeded_randint
    gm.recompile()


def _seeded_random(
    size: list[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    draw = getattr(torch, mode)
    return draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)


def _seeded_randint(low: int, high: int, size: list[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


def backend_of(model: Any) -> tuple[Any, dict[str, Any]]:
    """The backend and the options that `torch.compile` made `model` with; (None, {}) if it did not.

    Dynamo wraps backends in callbacks that point inwards.
    """
    callback: Any = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    options = getattr(callback, "kwargs", {}).get("options", {})
    return getattr(callback, "compiler_fn", None), dict(options)


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


@contextmanager
def uncached() -> Iterator[None]:
    """Neither look up nor keep what AOTAutograd compiles here."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def fresh_compilation() -> Iterator[None]:
    """Compile here whatever is cached, and however often this code was compiled before."""
    unlimited = 1 << 20
    with (
        uncached(),
        dynamo_config.patch(recompile_limit=unlimited, accumulated_recompile_limit=unlimited),
    ):
        yield
