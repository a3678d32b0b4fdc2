"""The Triton source of row kernels.

A row is cut into chunks. If registers do not hold all chunks, the kernel loops over them for every
stage of reductions. After the first loop, the row is in the cache.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fp8pass.codegen.kernels.device_functions import call_quotient_of
from fp8pass.codegen.kernels.launch import Function
from fp8pass.codegen.kernels.planes import (
    decode_bits,
    encode_values,
    extract_bits,
    locate_byte,
    split_planes,
)
from fp8pass.codegen.kernels.triton_ops import (
    TRITON_TYPES,
    divide_by_scale,
    name_kernel,
    name_pointers,
    write_expression,
)
from fp8pass.codegen.program.ir import (
    IS_COLUMN,
    REDUCTION_STEPS,
    ROW_EXP_SUM,
    Load,
    Program,
    Step,
    Store,
)
from fp8pass.dialect.formats import FORMATS

# One load instruction: 16 bytes of BF16.
VECTOR = 8

_BODY = """
row = index.to(tl.int64)
{before}
{body}
"""

# Sums over rows stay in registers.
_SUMMING_BODY = """
{before}
for row in tl.range(index.to(tl.int64), M, PROGRAMS, num_stages=STAGES):
{body}
{after}
"""

_LOADS = {
    "full": "tl.load({0} + {first} + {column}{or_zero})",
    "column": "tl.load({0} + {column}{or_zero})",
    "row": "tl.load({0} + row)",
    "scalar": "tl.load({0})",
}
_GROUP_SCALES = [
    "{v}_few = {start} + tl.arange(0, {chunk} // {few}) * {few}",
    "{v}_scales = tl.load({scales} + row * ({width} // {size}) + ({offset} + {v}_few) // {size}"
    "{few_or_zero})",
]
_OF_GROUPS = (
    "tl.reshape(tl.reshape({elements}, ({chunk} // {few}, {few})) "
    "* {v}_scales.to(tl.float32)[:, None], ({chunk},))"
)
_GROUPS = [
    "{v}_groups = tl.reshape({value}, ({chunk} // {size}, {size}))",
    "{v}_amax = tl.reduce(tl.abs({v}_groups), 1, largest)",
    "{v}_scales = {round}({scale})",
    "group = {start} // {size} + tl.arange(0, {chunk} // {size})",
    "tl.store({scales} + row * ({N} // {size}) + group, {v}_scales.to({scale_type}){if_group})",
    "{v}_groups = {v}_groups * tl.div_rn(1.0, {v}_scales)[:, None]",
]
# `ROW_EXP_SUM` in one pass over the row: every `few` elements of a chunk have one partial sum. It
# is relative to the largest of these elements in the chunks so far.
_EXP_SUM = [
    "{v}_few = tl.reshape({value}, ({chunk} // {few}, {few}))",
    "{v}_max = largest({largest}_chunk, tl.reduce({v}_few, 1, largest))",
    "{v}_shift = finite({v}_max)",
    "{v}_chunk *= exp({largest}_chunk - {v}_shift)",
    "{v}_chunk += tl.sum(exp({v}_few - {v}_shift[:, None]), 1)",
    "{largest}_chunk = {v}_max",
]
# The result of each reduction along a row, from its partial results for the elements of a chunk.
_RESULTS = {
    "row_sum": "tl.sum({0}, 0)",
    "row_amax": "tl.reduce({0}, 0, largest)",
    "row_max": "tl.reduce({0}, 0, largest)",
    ROW_EXP_SUM: "tl.sum({0} * exp({1}_chunk - finite({1})), 0)",
}
# How scales of groups are rounded and stored, by `Store.scale_form`.
_SCALE_FORMS = {"": ("truncated", "tl.bfloat16"), "fp32": ("power_of_two", "tl.float32")}
_STORE_ELEMENTS = (
    "tl.store({data} + first + {column}, tl.reshape({v}_groups.to({type}), ({chunk},)){if_there})"
)
_STORE_PLANE = [
    "{v}_bytes = {start} * {width} // 8 + tl.arange(0, {chunk} * {width} // 8)",
    "tl.store({plane} + row * {row_bytes} + {v}_bytes, tl.reshape("
    "pack({field}, {chunk} // {size}, {size}, {width}), ({chunk} * {width} // 8,)){if_byte})",
]


@dataclass(frozen=True)
class Shape:
    """How a kernel processes a row."""

    columns: int
    chunk: int  # number of elements of a chunk
    held: bool  # whether registers hold the row; otherwise the kernel reads the row in a loop
    last: int = 0  # number of elements of the last chunk, if it is shorter than the others

    @property
    def chunks(self) -> range:
        """The indices of the chunks that have code of their own. A loop has code for one chunk."""
        return range(-(-self.columns // self.chunk) if self.held else 1)

    @property
    def short(self) -> int:
        """The index of the short last chunk; -1 if the last chunk is not shorter."""
        return self.chunks[-1] if self.last else -1

    def size(self, i: int) -> int:
        """The number of elements of chunk `i`."""
        return self.last if i == self.short else self.chunk

    def is_full(self, i: int) -> bool:
        if self.held:
            return i * self.chunk + self.size(i) <= self.columns
        return self.columns % self.chunk == 0


class RowWriter:
    """Writes the body of a Triton function.

    A reduction or store belongs to the first stage after all reductions that it depends on. A value
    that varies along a row has a name for each chunk, and is recomputed in each stage if the row is
    not held.
    """

    def __init__(self, program: Program, shape: Shape) -> None:
        self.program, self.shape = program, shape
        self.definitions: dict[str, Load | Step] = {x.name: x for x in program.loads}
        self.definitions |= {x.name: x for x in program.steps}
        self.rounded = {s.name: s.dtype for s in program.stores if "full" in s.layouts}
        self.where = name_pointers(program)
        self.results = self._name_results()
        steps = program.steps
        self.exp_sums = {s.args[1]: s.name for s in steps if s.target == ROW_EXP_SUM}
        self.varying: set[str] = set()
        self.stages: dict[str, int] = {}
        for definition in self.definitions.values():
            self._place(definition)
        self.lines: list[str] = []
        self.known: set[str] = set()

    def _name_results(self) -> dict[tuple[int, str], list[str]]:
        found: dict[tuple[int, str], list[str]] = {}
        count = 0
        for i, store in enumerate(self.program.stores):
            for layout in store.layouts:
                number = store.tensor_count(layout)
                found[i, layout] = [f"out{count + i}" for i in range(number)]
                count += number
        return found

    def parameters(self) -> list[str]:
        inputs = [f"in{i}" for i in range(self.program.input_count)]
        return inputs + [name for names in self.results.values() for name in names]

    def _place(self, definition: Load | Step) -> None:
        """Record whether a value varies along a row, and the first stage that can use it."""
        name = definition.name
        if isinstance(definition, Load):
            self.stages[name] = 0
            if definition.operand in ("full", "column", "groups"):
                self.varying.add(name)
            return
        needs, reduces = _operands(definition), definition.target in REDUCTION_STEPS
        same = definition.target == ROW_EXP_SUM  # the same stage as the maximum
        stage = max((self.stages[x] for x in needs), default=0)
        self.stages[name] = stage + (reduces and not same)
        if definition.target == IS_COLUMN or (not reduces and not self.varying.isdisjoint(needs)):
            self.varying.add(name)

    def before(self) -> list[str]:
        """Return the lines that run once, before the first row."""
        self.lines = []
        if self.shape.held:
            for i in self.shape.chunks:
                self._write_columns(i)
            self._read("column")
        for number, _ in self._sums():
            for i in self.shape.chunks:
                zeros = f"tl.zeros(({self.shape.size(i)},), tl.float32)"
                self.lines.append(f"sums_{number}_{i} = {zeros}")
        return self.lines

    def body(self) -> list[str]:
        self.lines = [f"first = row * {self.shape.columns}"]
        if self.shape.held:  # all loads are issued before the kernel waits for the first load
            self._read("full", "groups")
        reductions = [s for s in self.program.steps if s.target in REDUCTION_STEPS]
        when = {key: self._stage_of_store(key[0]) for key in self.results}
        last = max([*when.values(), *(self.stages[r.name] - 1 for r in reductions)])
        for stage in range(last + 1):
            self._write_stage(
                [r for r in reductions if self.stages[r.name] - 1 == stage],
                [key for key in self.results if when[key] == stage],
            )
        return self.lines

    def after(self) -> list[str]:
        """Return the lines that run once, after the last row. They store sums over rows."""
        self.lines = []
        for number, pointer in self._sums():
            for i in self.shape.chunks:
                where = f"{pointer} + index * {self.shape.columns} + column_{i}"
                self.lines.append(f"tl.store({where}, sums_{number}_{i}{self._if_there(i)})")
        return self.lines

    def _sums(self) -> list[tuple[int, str]]:
        """Return the number and the pointer of each store of sums over rows."""
        found = self.results.items()
        return [(number, pointers_[0]) for (number, layout), pointers_ in found if layout == "sums"]

    def _stage_of_store(self, number: int) -> int:
        store = self.program.stores[number]
        return max(self.stages[x] for x in (store.name, store.scale) if x)

    def may_overwrite(self, load: Load, number: int) -> bool:
        """Whether the kernel has read all of `load` before it writes store `number` in its place.

        If the kernel reads the row in a loop, later stages must not read the load again. The store
        must depend on the load, so that the loop reads each chunk before it overwrites the chunk.
        """
        if self.shape.held:
            return True
        reductions = [s.name for s in self.program.steps if s.target in REDUCTION_STEPS]
        along = [self._stage_of_store(i) for i, layout in self.results if layout != "row"]
        loops = [*along, *(self.stages[name] - 1 for name in reductions)]
        if self._stage_of_store(number) < max(loops):
            return False
        pending, found = [self.program.stores[number].name], set[str]()
        while pending:
            name = pending.pop()
            if name in found or name not in self.varying:
                continue
            found.add(name)
            definition = self.definitions[name]
            if isinstance(definition, Step):
                pending += _operands(definition)
        return load.name in found

    def _write_stage(self, reductions: list[Step], stores: list[tuple[int, str]]) -> None:
        along = [key for key in stores if key[1] != "row"]
        needed = [r.args[0] for r in reductions]
        for number, _ in along:
            needed += [self.program.stores[number].name, self.program.stores[number].scale]
        for value in self._row_values([x for x in needed if x]):
            self.define(value, 0)
        if self.shape.held:
            self._write_initial([r for r in reductions if self._by_few(r)])
            for i in self.shape.chunks:
                self._write_chunk(i, reductions, along, is_first=i == 0)
        elif reductions or along:
            self._write_loop(reductions, along)
        for r in reductions:
            result = _RESULTS[r.target].format(f"{r.name}_chunk", *r.args[1:])
            if self.shape.last:
                result = _combine(r, result, _RESULTS[r.target].format(f"{r.name}_last"))
            self.lines.append(f"{r.name} = {result}")
            self.known.add(r.name)
        for number, layout in stores:
            if layout == "row":
                store, (pointer,) = self.program.stores[number], self.results[number, layout]
                value = self.define(store.name, 0)
                self.lines.append(f"tl.store({pointer} + row, {value}.to(tl.{store.dtype}))")

    def _row_values(self, names: list[str]) -> list[str]:
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

    def _write_loop(self, reductions: list[Step], stores: list[tuple[int, str]]) -> None:
        chunk = self.shape.chunk
        self._write_initial(reductions)
        self.lines.append(f"for start in range(0, {self.shape.columns}, {chunk}):")
        outside, self.lines, known = self.lines, [], set(self.known)
        self._write_columns(0)
        self._write_chunk(0, reductions, stores, is_first=False)
        self.lines = outside + [f"    {line}" for line in self.lines]
        self.known = known

    def _by_few(self, reduction: Step) -> bool:
        """Whether a reduction has one partial result for every `VECTOR` elements of a chunk.

        This applies to `ROW_EXP_SUM` and to the maximum that is computed with it.
        """
        return reduction.target == ROW_EXP_SUM or reduction.name in self.exp_sums

    def _write_initial(self, reductions: list[Step]) -> None:
        for r in reductions:
            size = self.shape.chunk // (VECTOR if self._by_few(r) else 1)
            self.lines.append(f"{r.name}_chunk = tl.full(({size},), {_initial(r)}, tl.float32)")

    def _write_chunk(
        self, i: int, reductions: list[Step], stores: list[tuple[int, str]], *, is_first: bool
    ) -> None:
        for number, layout in stores:
            self._write_store(i, number, layout)
        for r in reductions:
            if r.name in self.exp_sums:
                continue
            initial = "float('-inf')" if r.target == ROW_EXP_SUM else _initial(r)
            value = self._only_there(self._along(r.args[0], i), i, initial)
            if r.target == ROW_EXP_SUM:
                names = {"v": r.name, "value": value, "largest": r.args[1]}
                names |= {"chunk": self.shape.chunk, "few": VECTOR}
                self.lines += [line.format(**names) for line in _EXP_SUM]
                continue
            if r.target == "row_amax":
                value = f"tl.abs({value})"
            if i == self.shape.short:
                self.lines.append(f"{r.name}_last = {value}")
                continue
            so_far = f"{r.name}_chunk"
            if not is_first:
                value = _combine(r, so_far, value)
            self.lines.append(f"{so_far} = {value}")

    def _start(self, i: int) -> str:
        return str(i * self.shape.chunk) if self.shape.held else "start"

    def _write_columns(self, i: int) -> None:
        column = f"{self._start(i)} + tl.arange(0, {self.shape.size(i)})"
        self.lines.append(f"column_{i} = {column}")
        if not self.shape.is_full(i):
            self.lines.append(f"there_{i} = column_{i} < {self.shape.columns}")

    def _if_there(self, i: int, condition: str = "") -> str:
        """Return the mask argument of a load or store; '' if the chunk is full."""
        return "" if self.shape.is_full(i) else f", {condition or f'there_{i}'}"

    def _only_there(self, value: str, i: int, otherwise: str = "0.0") -> str:
        return value if self.shape.is_full(i) else f"tl.where(there_{i}, {value}, {otherwise})"

    def name(self, value: str, i: int) -> str:
        return f"{value}_{i}" if value in self.varying else value

    def _along(self, value: str, i: int) -> str:
        """Broadcast a value to the elements of chunk `i`."""
        name = self.define(value, i)
        varies = value in self.varying
        return name if varies else f"tl.full(({self.shape.size(i)},), {name}, tl.float32)"

    def define(self, value: str, i: int) -> str:
        """Write the lines that compute a value in chunk `i`, once. Return its name."""
        name = self.name(value, i)
        if name in self.known:
            return name
        definition = self.definitions[value]
        if isinstance(definition, Load):
            self._write_load(definition, i)
        else:
            args = definition.args
            renamed = {x: self.define(x, i) for x in _operands(definition)}
            step = replace(definition, args=tuple(renamed.get(x, x) for x in args))
            if step.target == IS_COLUMN:
                self.lines.append(f"{name} = column_{i} == {step.args[0]}.to(tl.int32)")
            else:
                self.lines.append(f"{name} = {write_expression(step)}")
        if value in self.rounded:
            self.lines.append(f"{name} = {name}.to(tl.{self.rounded[value]}).to(tl.float32)")
        self.known.add(name)
        return name

    def _read(self, *kinds: str) -> None:
        for i in self.shape.chunks:
            for load in self.program.loads:
                if load.operand in kinds:
                    self._write_read(load, i)

    def _write_read(self, load: Load, i: int) -> None:
        name, where = self.name(load.name, i), self.where[load]
        if f"{name}_read" in self.known:
            return
        kind = "full" if load.operand == "groups" else load.operand
        or_zero = self._if_there(i, f"there_{i}, other=0.0")
        places = {"first": _first(load), "column": f"column_{i}", "or_zero": or_zero}
        if load.packed:
            self._read_planes(load, name, i)
        else:
            self.lines.append(f"{name}_read = {_LOADS[kind].format(*where, **places)}")
        self.known.add(f"{name}_read")
        if load.operand == "groups":
            few_or_zero = self._if_there(i, f"{name}_few < {self.shape.columns}, other=0.0")
            names = {**self._names(name, i), **_groups(load), "few_or_zero": few_or_zero}
            names |= {"width": load.width or self.shape.columns, "offset": load.offset}
            self.lines += [line.format(scales=where[-1], **names) for line in _GROUP_SCALES]

    def _read_planes(self, load: Load, name: str, i: int) -> None:
        """Load the bytes that contain the elements of chunk `i`."""
        for plane, width in enumerate(FORMATS[load.format].planes):
            byte = locate_byte(f"column_{i}", load.group_size, width)
            place = f"row * {self.shape.columns * width // 8} + {byte}"
            or_zero = self._if_there(i, f"there_{i}, other=0")
            self.lines.append(
                f"{name}_plane{plane} = tl.load({self.where[load][plane]} + {place}{or_zero})"
            )

    def _write_load(self, load: Load, i: int) -> None:
        self._write_read(load, i)
        name = self.name(load.name, i)
        value = f"{name}_read.to(tl.float32)"
        if load.operand == "groups":
            if load.packed:
                planes = [f"{name}_plane{plane}" for plane in range(load.tensor_count - 1)]
                bits = extract_bits(planes, f"column_{i}", load.group_size, load.format)
                value = decode_bits(bits, load.format)
            value = _OF_GROUPS.format(elements=value, **self._names(name, i), **_groups(load))
        self.lines.append(f"{name} = {value}")

    def _names(self, value: str, i: int) -> dict[str, Any]:
        return {
            "v": value,
            "column": f"column_{i}",
            "start": self._start(i),
            "chunk": self.shape.size(i),
            "N": self.shape.columns,
        }

    def _write_store(self, i: int, number: int, layout: str) -> None:
        value = self._along(self.program.stores[number].name, i)
        ROW_STORES[layout](self, i, number, value)

    def _store_sums(self, i: int, number: int, value: str) -> None:
        self.lines.append(f"sums_{number}_{i} += {self._only_there(value, i)}")

    def _store_full(self, i: int, number: int, value: str) -> None:
        store, (pointer,) = self.program.stores[number], self.results[number, "full"]
        self._store_elements(i, pointer, f"{value}.to(tl.{store.dtype})")

    def _store_rows(self, i: int, number: int, value: str) -> None:
        store, (pointer,) = self.program.stores[number], self.results[number, "rows"]
        data = divide_by_scale(value, self.define(store.scale, i))
        self._store_elements(i, pointer, f"{data}.to({TRITON_TYPES[store.format]})")

    def _store_elements(self, i: int, pointer: str, elements: str) -> None:
        where = f"{pointer} + first + column_{i}"
        self.lines.append(f"tl.store({where}, {elements}{self._if_there(i)})")

    def _store_groups(self, i: int, number: int, value: str) -> None:
        store = self.program.stores[number]
        *planes, scales = self.results[number, "groups"]
        names = {
            **self._names(f"{store.name}_{i}", i),
            "value": value,
            "scales": scales,
            "size": store.group_size,
            "round": _SCALE_FORMS[store.scale_form][0],
            "scale_type": _SCALE_FORMS[store.scale_form][1],
            "scale": call_quotient_of(f"{store.name}_{i}_amax", store.format),
            "if_there": self._if_there(i),
            "if_group": self._if_there(i, f"group < {self.shape.columns // store.group_size}"),
        }
        self.lines += [line.format(**names) for line in _GROUPS]
        if FORMATS[store.format].packed:
            self._store_planes(i, store, planes, names)
        else:
            type = TRITON_TYPES[store.format]
            self.lines.append(_STORE_ELEMENTS.format(data=planes[0], type=type, **names))

    def _store_planes(self, i: int, store: Store, planes: list[str], names: dict[str, Any]) -> None:
        bits = f"{store.name}_{i}_bits"
        self.lines.append(f"{bits} = {encode_values(f'{store.name}_{i}_groups', store.format)}")
        fields = split_planes(bits, store.format)
        for plane, (field, width) in zip(planes, fields, strict=True):
            row_bytes = self.shape.columns * width // 8
            names |= {"plane": plane, "field": field, "width": width, "row_bytes": row_bytes}
            names["if_byte"] = self._if_there(i, f"{store.name}_{i}_bytes < {row_bytes}")
            self.lines += [line.format(**names) for line in _STORE_PLANE]


ROW_STORES: dict[str, Callable[[RowWriter, int, int, str], None]] = {
    "rows": RowWriter._store_rows,
    "groups": RowWriter._store_groups,
    "full": RowWriter._store_full,
    "sums": RowWriter._store_sums,
}


def _initial(reduction: Step) -> str:
    return "float('-inf')" if reduction.target == "row_max" else "0.0"


def _combine(reduction: Step, a: str, b: str) -> str:
    """Return an expression that combines two partial results of a reduction."""
    return f"{a} + {b}" if reduction.target == "row_sum" else f"largest({a}, {b})"


def _first(load: Load) -> str:
    return f"row * {load.width} + {load.offset}" if load.width else "first"


def _groups(load: Load) -> dict[str, int]:
    return {"size": load.group_size, "few": math.gcd(VECTOR, load.group_size)}


def _operands(step: Step) -> list[str]:
    names = step.args[:1] if step.target == "scale" else step.args
    return [x for x in names if isinstance(x, str)]


def sums_rows(program: Program) -> bool:
    return any("sums" in store.layouts for store in program.stores)


@cache
def write(program: Program, shape: Shape) -> Function:
    writer = RowWriter(program, shape)
    before, body, after = ("\n".join(x) for x in (writer.before(), writer.body(), writer.after()))
    sizes: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    if sums_rows(program):
        sizes, constants = ("M",), ("PROGRAMS", "STAGES")
        body = _SUMMING_BODY.format(before=before, body=textwrap.indent(body, "    "), after=after)
    else:
        body = _BODY.format(before=before, body=body)
    return Function(
        name_kernel("rows", program), tuple(writer.parameters()), sizes, constants, body.strip("\n")
    )
