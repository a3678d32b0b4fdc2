"""Every private PyTorch symbol that fp8pass uses, for every supported version.

Nothing else in the package imports from `torch._*`. When a PyTorch release moves or changes
something, this folder is the first place to look.

version.py     which versions are supported
compiling.py   Dynamo, AOTAutograd and Inductor
joint.py       joint graphs: inputs, tags, how they are cut
symbols.py     questions about tensors, sizes and operators
launching.py   our kernels and buffers in what Inductor generates
randomness.py  what Inductor has operators of its own for, run op by op
fakes.py       running a model without memory
frames.py      the function that Dynamo traces
fsdp.py        FSDP2
loading.py     loads of distributed checkpoints
collectives.py those that have other names in newer versions
replicate.py   DDP that leaves a model as it is
pipelining.py  schedules of pipelines
"""

from __future__ import annotations

import torch

from fp8pass.compat.version import SUPPORTED, check_version

check_version(torch.__version__)

from fp8pass.compat.compiling import (  # noqa: E402
    CustomPartitionerFn,
    activation_quantization_is_on,
    after_backward,
    backend_of,
    boxed,
    captures_backward,
    compile_fx,
    compile_fx_inner,
    compiled_in_vain,
    copy_captured,
    counters,
    fresh_compilation,
    get_cpp_compiler,
    half_of,
    has_cpp_compiler,
    input_like,
    interpret,
    is_checkpointing,
    is_of_fsdp,
    list_mode_options,
    list_options,
    mark_static,
    multiplies_bf16_on_cpu,
    original_of,
    recompiled,
    replayed_memory,
    running_backward,
    static_inputs,
    trace_structured,
    type_of_option,
    uncached,
    uncompiled,
    uses_cuda_graphs,
    without_gradient_hooks,
    without_source,
)
from fp8pass.compat.fakes import (  # noqa: E402
    NEEDS_VALUES,
    OperatorObserver,
    RealPositions,
    WeakIdKeyDictionary,
    autocast_for_cpu,
    fake_tensors,
)
from fp8pass.compat.frames import rename_self  # noqa: E402
from fp8pass.compat.joint import (  # noqa: E402
    copy_region,
    extract_forward_backward,
    forget_checkpointing,
    input_index,
    is_primal,
    is_tangent,
    must_recompute,
    must_save,
    normalize_joint_graph,
    recompute_always,
    save_always,
    stock_partition,
)
from fp8pass.compat.launching import (  # noqa: E402
    ceil_div,
    load_source,
    lower_to_buffer,
    lower_to_parts,
    lower_to_triton,
)
from fp8pass.compat.loading import prepare_loads  # noqa: E402
from fp8pass.compat.pipelining import (  # noqa: E402
    PipelineAction,
    pipeline_actions,
    planned_schedule,
    runs_one_stage_a_rank,
    schedule_class,
    schedule_names,
)
from fp8pass.compat.randomness import (  # noqa: E402
    run_op_by_op,
    seeded_random_ops,
)
from fp8pass.compat.symbols import (  # noqa: E402
    FLEX_ATTENTION,
    FakeTensor,
    StorageWeakRef,
    arg_tree_leaves,
    fake_mode_of,
    foreach_norm,
    foreach_sub,
    grouped_mm,
    guard_count,
    has_unbacked,
    is_opaque,
    is_operator,
    is_sym_node,
    real_tensors,
    restrictions,
    scaled_mm,
    schema_of,
    size_hint,
    sizes_that_vary,
    statically_known_true,
    stream_of,
    tree_leaves,
    tree_map_only,
    version_of,
    weak_storage,
    wrapper,
)

__all__ = [
    "FLEX_ATTENTION",
    "NEEDS_VALUES",
    "SUPPORTED",
    "CustomPartitionerFn",
    "FakeTensor",
    "OperatorObserver",
    "PipelineAction",
    "RealPositions",
    "StorageWeakRef",
    "WeakIdKeyDictionary",
    "activation_quantization_is_on",
    "after_backward",
    "arg_tree_leaves",
    "autocast_for_cpu",
    "backend_of",
    "boxed",
    "captures_backward",
    "ceil_div",
    "check_version",
    "compile_fx",
    "compile_fx_inner",
    "compiled_in_vain",
    "copy_captured",
    "copy_region",
    "counters",
    "extract_forward_backward",
    "fake_mode_of",
    "fake_tensors",
    "foreach_norm",
    "foreach_sub",
    "forget_checkpointing",
    "fresh_compilation",
    "get_cpp_compiler",
    "grouped_mm",
    "guard_count",
    "half_of",
    "has_cpp_compiler",
    "has_unbacked",
    "input_index",
    "input_like",
    "interpret",
    "is_checkpointing",
    "is_of_fsdp",
    "is_opaque",
    "is_operator",
    "is_primal",
    "is_sym_node",
    "is_tangent",
    "list_mode_options",
    "list_options",
    "load_source",
    "lower_to_buffer",
    "lower_to_parts",
    "lower_to_triton",
    "mark_static",
    "multiplies_bf16_on_cpu",
    "must_recompute",
    "must_save",
    "normalize_joint_graph",
    "original_of",
    "pipeline_actions",
    "planned_schedule",
    "prepare_loads",
    "real_tensors",
    "recompiled",
    "recompute_always",
    "rename_self",
    "replayed_memory",
    "restrictions",
    "run_op_by_op",
    "running_backward",
    "runs_one_stage_a_rank",
    "save_always",
    "scaled_mm",
    "schedule_class",
    "schedule_names",
    "schema_of",
    "seeded_random_ops",
    "size_hint",
    "sizes_that_vary",
    "static_inputs",
    "statically_known_true",
    "stock_partition",
    "stream_of",
    "trace_structured",
    "tree_leaves",
    "tree_map_only",
    "type_of_option",
    "uncached",
    "uncompiled",
    "uses_cuda_graphs",
    "version_of",
    "weak_storage",
    "without_gradient_hooks",
    "without_source",
    "wrapper",
]
