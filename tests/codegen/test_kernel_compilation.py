"""Kernels compile for a GPU and contain its instructions, which the interpreter cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8pass

pytest.importorskip("triton")

COMPILATION = """
import json
import re
import struct
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import kernel_helpers as t
from fp8pass.codegen.kernels import launch as launching
from fp8pass.codegen.kernels import block_gemm as gemm
from fp8pass.codegen.kernels import device_functions, row_kernel, tile_kernel
from fp8pass.codegen.program.ir import Load, Program, Store
from fp8pass.codegen.kernels.kernel_operator import prepare_batch
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.dialect.formats import FORMATS

TYPES = {"e4m3": "fp8e4nv", "bfloat16": "bf16", "float32": "fp32"}

def data_types(format):
    return [TYPES.get(format, "u8") for _ in FORMATS[format].planes]

def types(program):
    operands = {"row": "fp32", "scalar": "fp32", "tile": "fp32"}
    reads, writes = [], []
    for load in program.loads:
        operand = operands.get(load.operand, "bf16")
        reads += [*data_types(load.format), "bf16"] if load.operand == "groups" else [operand]
    for store in program.stores:
        for layout in store.layouts:
            if layout == "groups":
                scales = "fp32" if store.scale_form else "bf16"
                writes += [*data_types(store.format), scales]
            else:
                writes += [TYPES[store.format or store.dtype or "float32"]]
        writes += ["fp32"] * bool(store.block)
    return reads, writes

def code_size(cubin):
    # Bytes of the executable sections of an ELF file.
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<2H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    return sum(section[5] for section in sections if section[2] & 4)

def stack_size(cubin):
    # Bytes of the stack of a thread, to which registers spill.
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search("STACK:([0-9]+)", report.stdout + report.stderr)[1])

def compiled(module, *programs, capability=90):
    inputs = [size for program, *size in programs for _ in range(program.input_count)]
    batch = Batch(tuple(program for program, *_ in programs))
    (launch,) = launching.plan_launches(prepare_batch(module.prepare, batch, inputs))
    reads, writes = zip(*(types(program) for program, *_ in programs))
    pointers = [n for n in launch.kernel.arg_names if n.startswith(("in", "out"))]
    signature = {n: f"*{t}" for n, t in zip(pointers, sum(reads + writes, []), strict=True)}
    signature |= dict.fromkeys(launch.sizes, "i32")
    source = ASTSource(launch.kernel, signature)
    options = {"num_warps": launch.num_warps}
    binary = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    if any(store.block for program, *_ in programs for store in program.stores):
        assert stack_size(binary.asm["cubin"]) == 0
    return code_size(binary.asm["cubin"])

def block_gemm(capability, b_rows, bias):
    # Return the code size, and the bytes of shared memory.
    kernel = gemm._multiply_blocks
    types = {"a": "*fp8e4nv", "a_scale": "*fp32", "b": "*fp8e4nv", "b_scale": "*fp32"}
    types |= {"bias": "*bf16"} if bias else {}
    types |= {"out": "*bf16"} | dict.fromkeys(("M", "N", "K"), "i32")
    types |= dict.fromkeys(("a_row", "a_step", "b_row", "b_step"), "i32")
    constants = {"A_ROWS": 1, "B_ROWS": b_rows, "TILE_M": gemm.TILE_M, "TILE_N": gemm.TILE_N}
    constants |= {"BLOCK": gemm.BLOCK, "GROUP": gemm.GROUP} | ({} if bias else {"bias": None})
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": 8, "num_stages": gemm.stages(capability)}
    binary = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    return code_size(binary.asm["cubin"]), binary.metadata.shared

write_functions = device_functions.write_functions

def as_triton_has_them(functions):
    triton.knobs.runtime.interpret = True
    found = write_functions(functions)
    triton.knobs.runtime.interpret = False
    return found

swiglu = t.swiglu(128), 4096, 1024
backward = t.swiglu_backward(128), 4096, 1024
matrix = Load("x", "full"), Load("y", "full")
def both(name):
    # Data for dgrad and for wgrad.
    block = Store(name, ("rows",), format="e4m3", block="1×128")
    return block, Store(name, ("columns",), "s", "e4m3")

gradient = Program((*matrix, Load("s", "scalar")), (), (*both("x"), *both("y")))
square = Program(matrix[:1], (), (Store("x", ("rows", "columns"), format="e4m3", block="128×128"),))
scale = next(load.name for load in backward[0].loads if load.operand == "scalar")
swiglu_stores = tuple(
    replace(store, scale=scale if store.scale else "")
    for name in ("du", "dg") for store in both(name)
)
in_blocks = replace(backward[0], stores=swiglu_stores)
found = {
    "SwiGLU in blocks": compiled(tile_kernel, (in_blocks, 4096, 1024)),
    "blocks": compiled(tile_kernel, (gradient, 4096, 1024)),
    "squares": compiled(tile_kernel, (square, 4096, 1024)),
    "nibbles in tiles": compiled(tile_kernel, (t.swiglu_backward(128, "e2m1"), 4096, 1024)),
    "nibbles in rows": compiled(row_kernel, (t.swiglu(128, "e2m1"), 4096, 1024)),
    "nibbles in a norm": compiled(row_kernel, (t.norm_backward(384, "e2m1"), 4096, 384)),
    "5 bits in tiles": compiled(tile_kernel, (t.swiglu_backward(128, "e2m2"), 4096, 1024)),
    "5 bits in rows": compiled(row_kernel, (t.swiglu(128, "e2m2"), 4096, 1024)),
    "5 bits in a norm": compiled(row_kernel, (t.norm_backward(384, "e2m2"), 4096, 384)),
    "amaxes and sums": compiled(tile_kernel, (t.gelu_backward(128), 4096, 1024)),
    "tiles": compiled(tile_kernel, backward),
    "rows": compiled(row_kernel, swiglu),
    "norm": compiled(row_kernel, (t.norm_backward(384), 4096, 384)),
    "two": compiled(row_kernel, swiglu, (t.swiglu(128), 512, 2048)),
}
device_functions.write_functions = as_triton_has_them
launching._load_kernel.cache_clear()
found["plain tiles"] = compiled(tile_kernel, backward)
found["plain rows"] = compiled(row_kernel, swiglu)
for capability in (89, 90, 100, 120):
    size, shared = block_gemm(capability, 128, False)
    assert size
    # Bytes of shared memory that a program may use on sm89 and sm120, and on the others.
    assert shared <= (99 if capability in (89, 120) else 227) * 1024, (capability, shared)
    found[f"blocks, sm{capability}"] = compiled(
        tile_kernel, (gradient, 4096, 1024), capability=capability
    )
found["GEMM of blocks"], _ = block_gemm(90, 1, True)
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles in every other test")
def test_compiles_for_a_gpu(tmp_path):
    """The inline assembly gives less code than Triton's own functions."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[1]), str(Path(fp8pass.__file__).parents[1])]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILATION]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    code = json.loads(found.stdout)
    assert all(code.values())
    assert code["tiles"] < 0.95 * code["plain tiles"]
    assert code["rows"] < 0.98 * code["plain rows"]
    assert code["two"] > 1.8 * code["rows"]
