"""Every private PyTorch symbol that fp8pass uses, for every supported version.

Nothing else in the package imports from `torch._*`, or reads what PyTorch calls private. When a
PyTorch release moves or changes something, this folder is the only place to touch.
"""

from __future__ import annotations

import torch

from fp8pass.compat.version import SUPPORTED, check_version

check_version(torch.__version__)

from fp8pass.compat.compiling import (  # noqa: E402
    CustomPartitionerFn,
    activation_quantization_is_on,
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
    interpret,
    list_mode_options,
    list_options,
    static_inputs,
    trace_structured,
    uncached,
    uncompiled,
)
from fp8pass.compat.joint import (  # noqa: E402
    copy_region,
    extract_forward_backward,
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
    lower_to_triton,
)
from fp8pass.compat.randomness import (  # noqa: E402
    draw_from_seeds,
    seeded_random_ops,
)
from fp8pass.compat.symbols import (  # noqa: E402
    FakeTensor,
    arg_tree_leaves,
    fake_mode_of,
    guard_count,
    has_unbacked,
    is_opaque,
    is_operator,
    is_sym_node,
    real_tensors,
    restrictions,
    schema_of,
    size_hint,
    statically_known_true,
    tree_leaves,
    tree_map_only,
    version_of,
    weak_storage,
)

__all__ = [
    "SUPPORTED",
    "CustomPartitionerFn",
    "FakeTensor",
    "activation_quantization_is_on",
    "arg_tree_leaves",
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
    "draw_from_seeds",
    "extract_forward_backward",
    "fake_mode_of",
    "fresh_compilation",
    "get_cpp_compiler",
    "guard_count",
    "half_of",
    "has_unbacked",
    "input_index",
    "interpret",
    "is_opaque",
    "is_operator",
    "is_primal",
    "is_sym_node",
    "is_tangent",
    "list_mode_options",
    "list_options",
    "load_source",
    "lower_to_buffer",
    "lower_to_triton",
    "must_recompute",
    "must_save",
    "normalize_joint_graph",
    "real_tensors",
    "recompute_always",
    "restrictions",
    "save_always",
    "schema_of",
    "seeded_random_ops",
    "size_hint",
    "static_inputs",
    "statically_known_true",
    "stock_partition",
    "trace_structured",
    "tree_leaves",
    "tree_map_only",
    "uncached",
    "uncompiled",
    "version_of",
    "weak_storage",
]
