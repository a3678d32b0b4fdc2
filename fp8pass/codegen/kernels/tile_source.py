"""The Triton source of tile kernels.

Slice i of a tile has the rows i, i + n, i + 2n, ... A thread holds elements of n consecutive rows,
one element from each slice, and packs them into a word of the transposed result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain

from fp8pass.codegen.kernels.device_functions import call_quotient_of
from fp8pass.codegen.kernels.launch import Function
from fp8pass.codegen.kernels.planes import decode_bits, extract_bits, locate_byte
from fp8pass.codegen.kernels.triton_ops import (
    TRITON_TYPES,
    divide_by_scale,
    name_kernel,
    name_pointers,
    write_expression,
)
from fp8pass.codegen.program.ir import SQUARE_BLOCK, Load, Program, Step, Store
from fp8pass.dialect.formats import FORMATS

WORD = 4

SIZE_NAMES = "M", "M_PADDED", "N"
CONSTANT_NAMES = "M_TILE", "N_TILE", "FULL"

_TILE = """
tiles_in_row = tl.cdiv(N, N_TILE)
row_tile = index // tiles_in_row
column_tile = index % tiles_in_row
first_column = column_tile * N_TILE
in_row = tl.arange(0, N_TILE)
column = first_column + in_row
column_there = FULL | (column < N)
"""
# Offsets within a tile fit into 32 bits.
_FIRST = """
in_tile = tl.arange(0, M_TILE // {slices})
first = (row_tile * M_TILE).to(tl.int64) * N + first_column
"""
_SLICE = """
in_tile_{i} = {slices} * in_tile + {i}
row_{i} = row_tile * M_TILE + in_tile_{i}
row_there_{i} = FULL | (row_{i} < M)
there_{i} = row_there_{i}[:, None] & column_there[None, :]
full_{i} = in_tile_{i}[:, None] * N + in_row[None, :]
"""
_TRANSPOSED = """
in_column = row_tile * (M_TILE // {word}) + in_tile
place_there = column_there[:, None] & (FULL | (in_column < M_PADDED // {word}))[None, :]
"""

_LOADS = {
    "full": "tl.load({0} + {place}, there_{i}, other=0.0).to(tl.float32)",
    "row": "tl.load({0} + row_{i}, row_there_{i}, other=0.0).to(tl.float32)[:, None]",
    "column": "tl.load({0} + column, column_there, other=0.0).to(tl.float32)[None, :]",
    "scalar": "tl.load({0}).to(tl.float32)",
}


@dataclass(frozen=True)
class TileWriter:
    """Writes the Triton function of a program. In slice `i`, the names of values end in `_i`."""

    program: Program

    @cached_property
    def slices(self) -> int:
        transposes = any("columns" in store.layouts for store in self.program.stores)
        return WORD if transposes else 1

    def write(self) -> Function:
        program = self.program
        results = iter([f"out{i}" for i in range(sum(s.result_count for s in program.stores))])
        where = [[next(results) for _ in range(s.result_count)] for s in program.stores]
        inputs = [f"in{i}" for i in range(program.input_count)]
        return Function(
            name_kernel("tiles", program),
            pointers=(*inputs, *chain(*where)),
            sizes=SIZE_NAMES,
            constants=CONSTANT_NAMES,
            body="\n".join(part.strip("\n") for part in self._tile(where)),
        )

    def _tile(self, where: list[list[str]]) -> Iterator[str]:
        yield from self._values()
        for k, (store, pointers) in enumerate(zip(self.program.stores, where, strict=True)):
            if store.block:
                yield from self._store_scales(k, store, pointers[-1])
                yield from self._code(store, [f"scale_{k}_{i}" for i in range(self.slices)])
            elif store.format:
                scales = [store.scale and f"{store.scale}_{i}" for i in range(self.slices)]
                yield from self._code(store, scales)
            for layout, pointer in zip(store.layouts, pointers, strict=False):
                yield from TILE_STORES[layout](self, store, pointer)

    def _store_scales(self, k: int, store: Store, pointer: str) -> Iterator[str]:
        """Compute and store the scales of blocks. A tile is as wide as a block."""
        amaxes = [f"tl.reduce({self._magnitude(store, i)}, 1, largest)" for i in range(self.slices)]
        if store.block == SQUARE_BLOCK:  # a tile is a block
            amaxes = [f"tl.reduce({reduce(_largest, amaxes)}, 0, largest)"]
        for i, amax in enumerate(amaxes):
            yield f"scale_{k}_{i} = power_of_two({call_quotient_of(amax, store.format)})"
            if store.block == SQUARE_BLOCK:
                yield f"tl.store({pointer} + index, scale_{k}_{i})"
            else:
                place = f"column_tile.to(tl.int64) * M + row_{i}"
                yield f"tl.store({pointer} + {place}, scale_{k}_{i}, row_there_{i})"
                yield f"scale_{k}_{i} = scale_{k}_{i}[:, None]"
        for i in range(len(amaxes), self.slices):
            yield f"scale_{k}_{i} = scale_{k}_0"

    def _magnitude(self, store: Store, i: int) -> str:
        return f"tl.where(there_{i}, tl.abs({store.name}_{i}), 0.0)"

    def _values(self) -> Iterator[str]:
        """Return the lines that compute all values of a tile."""
        yield _TILE
        yield _FIRST.format(slices=self.slices)
        for i in range(self.slices):
            yield _SLICE.format(i=i, slices=self.slices)
        if self.slices > 1:
            yield _TRANSPOSED.format(word=WORD)
        for i in range(self.slices):
            yield from self._loads(i)
            yield from self._steps(i)

    def _loads(self, i: int) -> Iterator[str]:
        where = name_pointers(self.program)
        for load in self.program.loads:
            yield from self._load(load, where[load], i)

    def _load(self, load: Load, where: list[str], i: int) -> list[str]:
        name = f"{load.name}_{i}"
        if load.operand == "groups":
            return self._load_groups(load, where, name, i)
        return [f"{name} = {_LOADS[load.operand].format(*where, i=i, place=_place(load, i))}"]

    def _load_groups(self, load: Load, where: list[str], name: str, i: int) -> list[str]:
        (*planes, scales), size = where, load.group_size
        row = f"row_{i}.to(tl.int64) * ({load.width or 'N'} // {size})"
        first = f"{scales} + {row} + {load.offset // size}"
        return [
            # If each row of the tile lies within one group, the row has only one scale.
            f"if {size} % N_TILE == 0:",
            f"    {name}_scale = tl.load({first} + first_column // {size}, row_there_{i},"
            " other=0.0).to(tl.float32)[:, None]",
            "else:",
            f"    {name}_scale = tl.load(({first})[:, None] + (column // {size})[None, :],"
            f" there_{i}, other=0.0).to(tl.float32)",
            f"{name} = {self._elements(load, planes, i)} * {name}_scale",
        ]

    def _elements(self, load: Load, planes: list[str], i: int) -> str:
        if not load.packed:
            return f"tl.load({planes[0]} + {_place(load, i)}, there_{i}, other=0.0).to(tl.float32)"
        row, size, bytes_ = f"row_{i}.to(tl.int64)[:, None]", load.group_size, []
        for plane, width in zip(planes, FORMATS[load.format].planes, strict=True):
            byte = f"({locate_byte('column', size, width)})[None, :]"
            place = f"{row} * (N * {width} // 8) + {byte}"
            bytes_.append(f"tl.load({plane} + {place}, there_{i}, other=0)")
        elements = extract_bits(bytes_, "column[None, :]", size, load.format)
        return decode_bits(elements, load.format)

    def _steps(self, i: int) -> Iterator[str]:
        for step in self.program.steps:
            yield f"{step.name}_{i} = {self._value(step, i)}"

    def _value(self, step: Step, i: int) -> str | None:
        args = tuple(f"{x}_{i}" if isinstance(x, str) else x for x in step.args)
        return write_expression(replace(step, args=args))

    def _code(self, store: Store, scales: list[str]) -> Iterator[str]:
        """Divide a value by its scale in each slice. An empty scale marks a divided value."""
        for i, scale in enumerate(scales):
            # Padding must be zero, but the steps may compute nonzero values from zeros.
            value = f"{store.name}_{i}"
            codes = divide_by_scale(value, scale) if scale else value
            yield f"{value}_coded = tl.where(there_{i}, {codes}, 0.0)"

    def _store_amax(self, store: Store, pointer: str) -> Iterator[str]:
        """Store the amax of a tile. A program with this store has only slice 0."""
        magnitude = f"tl.where(there_0, tl.abs({store.name}_0), 0.0)"
        amax = f"tl.reduce(tl.reduce({magnitude}, 1, largest), 0, largest)"
        yield f"tl.store({pointer} + index, {amax})"

    def _store_tile_sums(self, store: Store, pointer: str) -> Iterator[str]:
        """Store the column sums of a tile. A program with this store has only slice 0."""
        value = f"{store.name}_0"
        if store.dtype:
            value = f"{value}.to(tl.{store.dtype}).to(tl.float32)"
        sums = f"tl.sum(tl.where(there_0, {value}, 0.0), 0)"
        yield f"tl.store({pointer} + row_tile.to(tl.int64) * N + column, {sums}, column_there)"

    def _store_rows(self, store: Store, pointer: str) -> Iterator[str]:
        first = f"{pointer} + first"
        if store.width:
            row = f"(row_tile * M_TILE).to(tl.int64) * {store.width}"
            first = f"{pointer} + {row} + first_column + {store.offset}"
        for i in range(self.slices):
            place = f"full_{i}"
            if store.width:
                place = f"in_tile_{i}[:, None] * {store.width} + in_row[None, :]"
            codes = f"{store.name}_{i}_coded.to({TRITON_TYPES[store.format]})"
            yield f"tl.store({first} + {place}, {codes}, there_{i})"

    def _store_columns(self, store: Store, pointer: str) -> Iterator[str]:
        width = f"({store.width or 'M_PADDED'} // {WORD})"
        first = f"first_column.to(tl.int64) * {width} + {store.offset // WORD}"
        codes = (f"{store.name}_{i}_coded" for i in range(self.slices))
        place = f"in_row[:, None] * {width} + in_column[None, :]"
        where = f"{pointer}.to(tl.pointer_type(tl.int32)) + {first} + {place}"
        yield f"tl.store({where}, tl.trans(word_of({', '.join(codes)})), place_there)"


def _largest(a: str, b: str) -> str:
    return f"largest({a}, {b})"


def _place(load: Load, i: int) -> str:
    if not load.width:
        return f"first + full_{i}"
    first = f"(row_tile * M_TILE).to(tl.int64) * {load.width} + first_column + {load.offset}"
    return f"{first} + in_tile_{i}[:, None] * {load.width} + in_row[None, :]"


TILE_STORES: dict[str, Callable[[TileWriter, Store, str], Iterator[str]]] = {
    "rows": TileWriter._store_rows,
    "columns": TileWriter._store_columns,
    "amax": TileWriter._store_amax,
    "tile_sums": TileWriter._store_tile_sums,
}
