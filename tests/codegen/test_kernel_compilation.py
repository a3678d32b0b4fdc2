"""What the interpreter does not see: that kernels compile for a GPU, with its own instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8pass

pytest.importorskip("triton")

COMPILATION = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import kernel_helpers as t
from fp8pass.codegen import row_kernel, tile_kernel
from fp8pass.codegen.batch import Batch
from fp8pass.codegen.kernel_op import parts_of
from fp8pass.codegen.launch import launches

TYPES = {"e4m3": "fp8e4nv", "bfloat16": "bf16", "float32": "fp32"}

def types(program):
    operands = {"row": "fp32", "scalar": "fp32"}
    reads, writes = [], []
    for load in program.loads:
        operand = operands.get(load.operand, "bf16")
        reads += ["fp8e4nv", "bf16"] if load.operand == "groups" else [operand]
    for store in program.stores:
        for layout in store.layouts:
            writes += [TYPES[store.format or store.dtype or "float32"]]
            writes += ["bf16"] * (layout == "groups")
    return reads, writes

def compiled(module, *programs):
    inputs = [size for program, *size in programs for _ in range(program.input_count)]
    batch = Batch(tuple(program for program, *_ in programs))
    (launch,) = launches(parts_of(module.prepare, batch, inputs))
    reads, writes = zip(*(types(program) for program, *_ in programs))
    pointers = [n for n in launch.kernel.arg_names if n.startswith(("in", "out"))]
    signature = {n: f"*{t}" for n, t in zip(pointers, sum(reads + writes, []), strict=True)}
    signature |= dict.fromkeys(launch.sizes, "i32")
    options = {"num_warps": launch.num_warps}
    source = ASTSource(launch.kernel, signature)
    return triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"]

tiles = compiled(tile_kernel, (t.swiglu_backward(128), 4096, 1024))
print("cvt.rn.satfinite.e4m3x2" in tiles, "ex2.approx.ftz" in tiles)
rows = compiled(row_kernel, (t.swiglu(128), 4096, 1024))
print("ex2.approx.ftz" in rows, "rcp.approx.ftz" in rows)
print("e4m3" in compiled(row_kernel, (t.norm_backward(384), 4096, 384)))
two = compiled(row_kernel, (t.swiglu(128), 4096, 1024), (t.swiglu(128), 512, 2048))
print(two.count("rcp.approx.ftz") > rows.count("rcp.approx.ftz"))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles in every other test")
def test_compiles_for_a_gpu(tmp_path):
    """What the interpreter does not see: the GPU's own instructions."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[1]), str(Path(fp8pass.__file__).parents[1])]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILATION]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["True"] * 6
