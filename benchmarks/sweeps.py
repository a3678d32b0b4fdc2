"""What chose the constants of the row and tile kernels: the settings of those that move most.

    python benchmarks/sweeps.py        needs an NVIDIA GPU with FP8 tensor cores

The programs are those of a decoder layer of hidden 4096, as fp8pass compiles it. A row kernel has
warps, and chunks that they read at a time: `HELD` and `HELD_SUMMED` say how many elements of a row
a thread holds at most. A tile kernel has a tile and warps. Beside each setting's time is the share
that it reaches of a large copy's bandwidth, counting each argument once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from kernels import busiest_ms, measure_limits
from layer import CASES, Case
from models import Stack, init_weights, rope_tables
from report import environment, print_rows, write_json
from tables_kernels import sweeps_table
from torch import Tensor, fx

import fp8pass
from fp8pass import compilation
from fp8pass.codegen.kernels import rows as row_kernel
from fp8pass.codegen.kernels import tiles as tile_kernel
from fp8pass.codegen.kernels.launch import Launch, Part, launch
from fp8pass.codegen.kernels.row_source import Shape, sums_rows, write
from fp8pass.codegen.kernels.triton_ops import kernel_name
from fp8pass.codegen.program.batch import Batch
from fp8pass.codegen.program.ir import AMAX_TILE, Program
from fp8pass.passes import HALF_PASSES, Context
from fp8pass.passes.lower_dialect import lower_dialect

# By the names that profilers show. Of several of one name the one that moves most.
HOT = {
    "rows_sigmoid_mul": "SwiGLU forward",
    "tiles_sigmoid_mul_sub_add": "SwiGLU backward",
    "tiles_sigmoid_mul_sub_add_amax": "SwiGLU backward, amaxes",
    "rows_add_pow_mul_rsqrt": "norm forward",
    "rows_mul_add_pow_div": "norm backward",
    "tiles_cast": "cast in both layouts",
    "tiles_amax": "amax",
}
OPERATORS = {row_kernel.rows: "rows", tile_kernel.tiles: "tiles"}

WARPS = (2, 4, 8, 16)
# Elements of a chunk that a thread reads.
VECTORS = (4, 8, 16, 32)
# Elements of a row or tile for each thread, chunks of a row, and their elements over the row's:
# beyond these registers spill, or threads have nothing to do.
FEWEST, MOST = 8, 90
MOST_CHUNKS = 12
MOST_PADDED = 1.34
TILES = tuple(product((32, 64, 128), (64, 128, 256), (4, 8)))
# Amaxes are of tiles of one size.
MEASURED_TILES = tuple((*AMAX_TILE, warps) for warps in (4, 8, 16))


@dataclass
class Task:
    """A program with its operands and room for its results."""

    kind: str
    program: Program
    inputs: list[Tensor]
    outputs: list[Tensor]

    @property
    def bytes(self) -> int:
        """Read and written, once each."""
        return sum(x.nbytes for x in self.inputs + self.outputs)


@dataclass
class Variant:
    """A kernel with one setting; `held` is how many elements a thread has."""

    setting: str
    held: int
    launch: Launch
    shipped: bool


@dataclass
class Result:
    """One setting of one program."""

    program: str
    kernel: str
    size: tuple[int, int]
    bytes: int
    setting: str
    held: int
    ms: float
    shipped: bool


def kernel_calls(case: Case, device: str) -> list[fx.Node]:
    """The kernels in the graphs of a step."""
    found: list[fx.Node] = []

    def record(gm: fx.GraphModule, ctx: Context) -> None:
        found.extend(node for node in gm.graph.nodes if node.target in OPERATORS)

    model = Stack(case.layers, case.hidden, case.heads, case.ffn).to(device, torch.bfloat16)
    init_weights(model)
    x = torch.randn(case.batch, case.seq, case.hidden, device=device, dtype=torch.bfloat16)
    tables = rope_tables(case.seq, case.hidden // case.heads, x.device)
    before = HALF_PASSES.index(lower_dialect)
    passes = (*HALF_PASSES[:before], record, *HALF_PASSES[before:])
    with patch.object(compilation, "HALF_PASSES", passes):
        fp8pass.explain(model, x.requires_grad_(), *tables)
    return found


def hot_tasks(calls: list[fx.Node]) -> dict[str, Task]:
    """What is swept, by its name in `HOT`."""
    found: dict[str, Task] = {}
    for node in calls:
        operands, text = node.args
        kind = OPERATORS[node.target]
        for program, read, _ in Batch.parse(str(text)).split(operands):  # type: ignore[arg-type]
            name = kernel_name(kind, program)
            if name not in HOT:
                continue
            # Results alone, not side by side with others: those would be counted with them.
            stores = tuple(replace(store, width=0, offset=0) for store in program.stores)
            program = replace(program, stores=stores)
            # Kernels take as long whatever the numbers are; of these all can be scales, too.
            fakes = [x.meta["val"] for x in read]  # type: ignore[union-attr]
            inputs = [torch.rand(x.shape, device=x.device).add(0.5).to(x.dtype) for x in fakes]
            task = Task(kind, program, inputs, program.empty_outputs(inputs))
            if name not in found or task.bytes > found[name].bytes:
                found[name] = task
    return {name: found[name] for name in HOT}


def row_variants(program: Program, rows: int, columns: int) -> Iterator[Variant]:
    """A row kernel with its chunks held, and read in a loop where it can."""
    part = row_kernel.prepare(program, rows, columns)
    shipped = row_kernel._shape(program, columns)
    shapes = [(Shape(columns, 32 * w * v, held=True), w) for w, v in product(WARPS, VECTORS)]
    if not sums_rows(program):
        shapes += [(Shape(columns, row_kernel.CHUNK, held=False), w) for w in (4, 8)]
    for shape, warps in shapes:
        held, chunks = columns // (32 * warps), len(shape.chunks)
        if shape.held and not (
            FEWEST <= held <= MOST
            and chunks <= MOST_CHUNKS
            and chunks * shape.chunk <= MOST_PADDED * columns
        ):
            continue
        how = "chunks" if shape.held else "a loop over chunks"
        variant = replace(part, function=write(program, shape), num_warps=warps)
        setting = f"{warps} warps, {how} of {shape.chunk}"
        yield Variant(setting, held, alone(variant), (shape, warps) == shipped)


def tile_variants(program: Program, rows: int, columns: int) -> Iterator[Variant]:
    """A tile kernel with every tile that a thread can hold."""
    part = tile_kernel.prepare(program, rows, columns)
    for m, n, warps in MEASURED_TILES if program.takes_amaxes else TILES:
        held = m * n // (32 * warps)
        if held > MOST:
            continue
        variant = replace(
            part,
            grid=-(-rows // m) * -(-columns // n),
            constants={"M_TILE": m, "N_TILE": n, "FULL": rows % m == 0 and columns % n == 0},
            num_warps=warps,
        )
        yield Variant(f"{m} × {n}, {warps} warps", held, alone(variant), variant == part)


def variants_of(kind: str, program: Program, rows: int, columns: int) -> list[Variant]:
    """All settings of a program's kernel."""
    make = row_variants if kind == "rows" else tile_variants
    return list(make(program, rows, columns))


def alone(part: Part) -> Launch:
    """A launch of nothing else, which reads all of a task's inputs and writes all its outputs."""
    count = sum(name.startswith("in") for name in part.function.pointers)
    outputs = range(len(part.function.pointers) - count)
    return launch([replace(part, inputs=tuple(range(count)), outputs=tuple(outputs))])


def compile_all(tasks: list[tuple[Task, Variant]]) -> None:
    """Compile kernels side by side: most of that is outside Python."""

    def warm_up(pair: tuple[Task, Variant]) -> None:
        task, launch = pair[0], pair[1].launch
        tensors = (*task.inputs, *task.outputs)
        options = {**launch.sizes, "num_warps": launch.num_warps}
        launch.kernel.warmup(*tensors, grid=(launch.grid,), **options)

    with ThreadPoolExecutor() as pool:
        list(pool.map(warm_up, tasks))


def measure(name: str, task: Task, variant: Variant) -> Result:
    """The time of one setting."""
    run = partial(variant.launch.run, task.inputs, task.outputs)
    size = task.program.sizes([x.shape for x in task.inputs])
    return Result(
        HOT[name],
        name,
        size,
        task.bytes,
        variant.setting,
        variant.held,
        busiest_ms(run),
        variant.shipped,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/sweeps.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a GPU, and there is none")
    (case,) = (case for case in CASES if case.name == "h4096")
    tasks = hot_tasks(kernel_calls(case, "cuda"))
    swept = [
        (name, task, variant)
        for name, task in tasks.items()
        for variant in variants_of(
            task.kind, task.program, *task.program.sizes([x.shape for x in task.inputs])
        )
    ]
    compile_all([(task, variant) for _, task, variant in swept])
    record = {
        **environment(),
        "copy_bandwidth": measure_limits().copy_bandwidth,
        "results": [asdict(measure(*one)) for one in swept],
    }
    print_rows("settings of kernels", sweeps_table(record))
    write_json(args.out, record)


if __name__ == "__main__":
    main()
