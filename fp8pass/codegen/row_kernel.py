"""The Triton kernel of a program with reductions over rows: a row is read once and done with.

COAT 5.2, LLMQ 3. What a linear layer of the forward reads is a norm, an activation or a weight,
with a scale for each row: the kernel that holds the row finds the norm's statistics, the scale, the
codes, and the codes of groups that are kept for the backward. Inductor's own reductions go over a
row once for each of these and leave the groups to another kernel: 35 to 75% of the bandwidth of a
copy for more bytes, where this kernel has 80 to 94% (`benchmarks/kernels.py`).

A row that fits is held in registers (`straight`). A longer one is read in chunks, once for each
reduction that waits for another one, from the cache after the first time.
"""

from __future__ import annotations

import textwrap
from functools import cache
from typing import Any

from fp8pass import compat
from fp8pass.codegen.kernel_op import Launch, define_kernel
from fp8pass.codegen.program import PARTIAL_SUMS, REDUCTIONS, Load, Program, Step, Store
from fp8pass.codegen.triton_ops import CODE_TYPES, PRELUDE, coded, expression, kernel_name, pointers
from fp8pass.formats import FORMATS
from fp8pass.ops import SMALLEST_SCALE

# Longer rows are read in chunks of `CHUNK` elements.
LONGEST_STRAIGHT = 8192
CHUNK = 4096

# 64 bits: a matrix may have more elements than 32 count.
_KERNEL = """
@triton.jit
def {name}({parameters}, N, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = row * N
{body}
"""

# A program that sums over rows works on several, and keeps its sums in registers.
_SUMMING_KERNEL = """
@triton.jit
def {name}({parameters}, M, N, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr):
{zeros}
    for row in range(tl.program_id(0).to(tl.int64), M, PROGRAMS):
        first = row * N
{body}
{sums}
"""

_COLUMNS = [
    "column = start + tl.arange(0, CHUNK)",
    "there = column < N",
]
_LOADS = {
    "full": "{name} = tl.load({0} + first + column, there, other=0.0).to(tl.float32)",
    "row": "{name} = tl.load({0} + row).to(tl.float32)",
    "column": "{name} = tl.load({0} + column, there, other=0.0).to(tl.float32)",
    "scalar": "{name} = tl.load({0}).to(tl.float32)",
}
_GROUPS = [
    "{v}_groups = tl.reshape({v}, (CHUNK // {size}, {size}))",
    "{v}_amax = tl.reduce(tl.abs({v}_groups), 1, largest)",
    "{v}_scales = truncated(scale_of({v}_amax, {step}, {tiny}))",
    "group = start // {size} + tl.arange(0, CHUNK // {size})",
    "tl.store({1} + row * (N // {size}) + group, {v}_scales.to(tl.bfloat16), group < N // {size})",
    "{v}_groups = {v}_groups * tl.div_rn(1.0, {v}_scales)[:, None]",
    "tl.store({0} + first + column, tl.reshape({v}_groups.to({code}), (CHUNK,)), there)",
]


class Writer:
    """Writes the body of a kernel.

    Work is done in stages: a reduction belongs to the stage after those of all reductions that its
    operand needs, a store likewise. Values that vary along a row are computed in every stage that
    needs them if the row is read in chunks, and once if it is not.
    """

    def __init__(self, program: Program, *, straight: bool) -> None:
        self.program, self.straight = program, straight
        self.definitions: dict[str, Load | Step] = {x.name: x for x in program.loads}
        self.definitions |= {x.name: x for x in program.steps}
        self.rounded = {s.name: s.dtype for s in program.stores if "full" in s.layouts}
        self.where = pointers(program)
        self.results = self._name_results()
        self.varying: set[str] = set()
        self.stages: dict[str, int] = {}
        for definition in self.definitions.values():
            self._place(definition)
        self.lines: list[str] = []
        self.known: set[str] = set()

    def _name_results(self) -> dict[tuple[int, str], list[str]]:
        """The pointers of every store, by its number and layout."""
        found: dict[tuple[int, str], list[str]] = {}
        count = 0
        for i, store in enumerate(self.program.stores):
            for layout in store.layouts:
                number = 2 if layout == "groups" else 1
                found[i, layout] = [f"out{count + i}" for i in range(number)]
                count += number
        return found

    def parameters(self) -> list[str]:
        """The kernel's pointers."""
        inputs = [f"in{i}" for i in range(self.program.input_count)]
        return inputs + [name for names in self.results.values() for name in names]

    def _place(self, definition: Load | Step) -> None:
        """Whether a value varies along a row, and the stage in which it is first known.

        A reduction is known in the stage after its own.
        """
        name = definition.name
        if isinstance(definition, Load):
            self.stages[name] = 0
            if definition.operand in ("full", "column", "groups"):
                self.varying.add(name)
            return
        needs, reduces = _operands(definition), definition.target in REDUCTIONS
        self.stages[name] = max((self.stages[x] for x in needs), default=0) + reduces
        if not reduces and not self.varying.isdisjoint(needs):
            self.varying.add(name)

    # --- lines ----------------------------------------------------------------------------------

    def write(self) -> list[str]:
        """All lines of the body."""
        reductions = [s for s in self.program.steps if s.target in REDUCTIONS]
        when = {key: self._stage_of_store(key[0]) for key in self.results}
        last = max([*when.values(), *(self.stages[r.name] - 1 for r in reductions)])
        if self.straight:
            self.lines += ["start = 0", *_COLUMNS]
        for stage in range(last + 1):
            self._write_stage(
                [r for r in reductions if self.stages[r.name] - 1 == stage],
                [key for key in self.results if when[key] == stage],
            )
        return self.lines

    def _stage_of_store(self, number: int) -> int:
        store = self.program.stores[number]
        return max(self.stages[x] for x in (store.name, store.scale) if x)

    def _write_stage(self, reductions: list[Step], stores: list[tuple[int, str]]) -> None:
        along = [key for key in stores if key[1] != "row"]
        needed = [r.args[0] for r in reductions]
        for number, _ in along:
            needed += [self.program.stores[number].name, self.program.stores[number].scale]
        for value in self._row_values([x for x in needed if x]):
            self.define(value)
        if self.straight:
            self._write_chunk(reductions, along)
        elif reductions or along:
            for r in reductions:
                self.lines.append(f"{r.name}_chunk = tl.zeros((CHUNK,), tl.float32)")
            self.lines.append("for start in range(0, N, CHUNK):")
            outside, self.lines, known = self.lines, list(_COLUMNS), set(self.known)
            self._write_chunk(reductions, along)
            self.lines = outside + [f"    {line}" for line in self.lines]
            self.known = known
        for r in reductions:
            combine = "sum" if r.target == "row_sum" else "reduce"
            rest = "" if combine == "sum" else ", largest"
            self.lines.append(f"{r.name} = tl.{combine}({r.name}_chunk, 0{rest})")
            self.known.add(r.name)
        for number, layout in stores:
            if layout == "row":
                store, (pointer,) = self.program.stores[number], self.results[number, layout]
                self.define(store.name)
                self.lines.append(f"tl.store({pointer} + row, {store.name}.to(tl.{store.dtype}))")

    def _row_values(self, names: list[str]) -> list[str]:
        """What does not vary along a row and is needed to compute values."""
        found: list[str] = []
        seen, pending = set(self.known), list(reversed(names))
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            definition = self.definitions[name]
            if name not in self.varying:
                found.append(name)
            elif isinstance(definition, Step):
                pending += _operands(definition)
        return found

    def _write_chunk(self, reductions: list[Step], stores: list[tuple[int, str]]) -> None:
        for number, layout in stores:
            store = self.program.stores[number]
            self.define(store.name)
            self._write_store(store, layout, self.results[number, layout])
        for r in reductions:
            (x,) = r.args
            self.define(x)
            value = f"tl.where(there, {x}, 0.0)"
            if r.target == "row_amax":
                value = f"tl.abs({value})"
            if not self.straight:
                chunk = f"{r.name}_chunk"
                sum_ = r.target == "row_sum"
                value = f"{chunk} + {value}" if sum_ else f"largest({chunk}, {value})"
            self.lines.append(f"{r.name}_chunk = {value}")

    def define(self, name: str) -> None:
        """Compute a value and what it needs, unless it is known."""
        if name in self.known:
            return
        definition = self.definitions[name]
        if isinstance(definition, Load):
            self.lines += self._load_lines(definition)
        else:
            for x in _operands(definition):
                self.define(x)
            self.lines.append(f"{name} = {expression(definition)}")
        if name in self.rounded:
            self.lines.append(f"{name} = {name}.to(tl.{self.rounded[name]}).to(tl.float32)")
        self.known.add(name)

    def _load_lines(self, load: Load) -> list[str]:
        where = self.where[load]
        if load.operand != "groups":
            return [_LOADS[load.operand].format(*where, name=load.name)]
        scales = f"tl.load({where[1]} + row * (N // {load.group_size}) + column // "
        scales += f"{load.group_size}, there, other=0.0).to(tl.float32)"
        return [
            f"{load.name} = tl.load({where[0]} + first + column, there, other=0.0).to(tl.float32)",
            f"{load.name} = {load.name} * {scales}",
        ]

    def _write_store(self, store: Store, layout: str, pointers_: list[str]) -> None:
        name = store.name
        if layout == "sums":
            self.lines.append(f"{name}_sums += tl.where(there, {name}, 0.0)")
        elif layout == "full":
            line = f"tl.store({pointers_[0]} + first + column, {name}.to(tl.{store.dtype}), there)"
            self.lines.append(line)
        elif layout == "rows":
            codes = f"{coded(name, store.scale)}.to({CODE_TYPES[store.format]})"
            self.lines.append(f"tl.store({pointers_[0]} + first + column, {codes}, there)")
        else:
            self.lines += _group_lines(store, pointers_)


def _group_lines(store: Store, pointers_: list[str]) -> list[str]:
    names = {"v": store.name, "size": store.group_size, "code": CODE_TYPES[store.format]}
    numbers = {"step": repr(1 / FORMATS[store.format].max), "tiny": repr(SMALLEST_SCALE)}
    return [line.format(*pointers_, **names, **numbers) for line in _GROUPS]


def _operands(step: Step) -> list[str]:
    names = step.args[:1] if step.target == "scale" else step.args
    return [x for x in names if isinstance(x, str)]


def source(program: Program, *, straight: bool) -> str:
    """The Triton module of a program."""
    writer = Writer(program, straight=straight)
    body = "\n".join(f"    {line}" for line in writer.write())
    name = kernel_name("rows", program)
    if sums := [(i, s) for i, s in enumerate(program.stores) if "sums" in s.layouts]:
        return PRELUDE + _SUMMING_KERNEL.format(
            name=name,
            parameters=", ".join(writer.parameters()),
            zeros="\n".join(f"    {s.name}_sums = tl.zeros((CHUNK,), tl.float32)" for _, s in sums),
            body=textwrap.indent(body, "    "),
            sums="\n".join(_sum_line(s, *writer.results[i, "sums"]) for i, s in sums),
        )
    return PRELUDE + _KERNEL.format(name=name, parameters=", ".join(writer.parameters()), body=body)


def _sum_line(store: Store, pointer: str) -> str:
    where = f"{pointer} + tl.program_id(0) * N + tl.arange(0, CHUNK)"
    return f"    tl.store({where}, {store.name}_sums, tl.arange(0, CHUNK) < N)"


def sums_rows(program: Program) -> bool:
    """Whether a program sums over rows."""
    return any("sums" in store.layouts for store in program.stores)


def prepare(program: Program, rows: Any, columns: int) -> Launch:
    """The kernel of a program, reading what was fastest on the H200 at a time."""
    straight = columns <= LONGEST_STRAIGHT
    chunk = max(128, 1 << (columns - 1).bit_length()) if straight else CHUNK
    kernel = _kernel(program, straight)
    if sums_rows(program):
        sizes = {"M": rows, "N": columns}
        constants = {"CHUNK": chunk, "PROGRAMS": PARTIAL_SUMS}
        return Launch(kernel, (PARTIAL_SUMS,), sizes, constants, num_warps=max(4, chunk // 1024))
    return Launch(
        kernel,
        grid=(rows,),
        sizes={"N": columns},
        constants={"CHUNK": chunk},
        num_warps=4,
    )


@cache
def _kernel(program: Program, straight: bool) -> Any:
    module = compat.load_source(source(program, straight=straight))
    return getattr(module, kernel_name("rows", program))


rows = define_kernel("rows", prepare)
