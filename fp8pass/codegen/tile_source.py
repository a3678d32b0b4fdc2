"""The Triton source of tile kernels.

A tile is cut into slices of its rows: of n slices, slice i has rows i, i + n, i + 2n, ..., so that
a thread has the codes of a word. Where columns move within the heads of attention it is cut into
pieces of heads, too: of n pieces, piece p has the p-th n-th of the columns of every head. What is
rolled by a piece is then another piece, which has been read for itself, and whether a condition on
the column holds is known here. A slice of a piece is a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from fp8pass.codegen.launch import Function
from fp8pass.codegen.program import Load, Program, Step, Store, pieces_of_heads
from fp8pass.codegen.triton_ops import CODE_TYPES, coded, expression, kernel_name, pointers

# Codes in a word.
WORD = 4

# Run-time and compile-time parameters.
SIZES = "M", "M_PADDED", "N"
CONSTANTS = "M_TILE", "N_TILE", "FULL"

_TILE = """
tiles_in_row = tl.cdiv(N, N_TILE)
row_tile = index // tiles_in_row
column_tile = index % tiles_in_row
in_tile = tl.arange(0, M_TILE // {slices})
"""
_COLUMNS = """
first_column = column_tile * N_TILE
in_row_0 = tl.arange(0, N_TILE)
column_0 = first_column + in_row_0
column_there = FULL | (column_0 < N)
"""
# The columns of a piece, side by side, are its positions. Both are counted from the matrix's first:
# from the tile's, Triton does not see which columns are neighbours, and reads them one by one.
_POSITIONS = """
first_column = column_tile * 0
position = column_tile * (N_TILE // {pieces}) + tl.arange(0, N_TILE // {pieces})
column_there = FULL | (position < N // {pieces})
"""
_PIECE = """
in_head_{p} = {start} + position % {width}
column_{p} = position // {width} * {head} + in_head_{p}
in_row_{p} = column_{p}
"""
_SLICE = """
in_tile_{i} = {slices} * in_tile + {i}
row_{i} = row_tile * M_TILE + in_tile_{i}
row_there_{i} = FULL | (row_{i} < M)
there_{i} = row_there_{i}[:, None] & column_there[None, :]
"""
# A matrix may have more elements than 32 bits count, a tile has not.
_FIRST = "first = (row_tile * M_TILE).to(tl.int64) * N + first_column"
_FULL = "full_{i}_{p} = in_tile_{i}[:, None] * N + in_row_{p}[None, :]"
_TRANSPOSED = """
in_column = row_tile * (M_TILE // {word}) + in_tile
place_there = column_there[:, None] & (FULL | (in_column < M_PADDED // {word}))[None, :]
"""

_LOADS = {
    "full": "tl.load({0} + first + full_{i}_{p}, there_{i}, other=0.0).to(tl.float32)",
    "row": "tl.load({0} + row_{i}, row_there_{i}, other=0.0).to(tl.float32)[:, None]",
    "column": "tl.load({0} + column_{p}, column_there, other=0.0).to(tl.float32)[None, :]",
    "scalar": "tl.load({0}).to(tl.float32)",
    "table": "tl.load({0} + (row_{i}{repeats})[:, None] * {head} + in_head_{p}[None, :],"
    " there_{i}, other=0.0).to(tl.float32)",
}


@dataclass(frozen=True)
class Part:
    """A slice of a piece; the names of its values end in both numbers."""

    slice: int
    piece: int

    def __str__(self) -> str:
        return f"_{self.slice}_{self.piece}"


@dataclass(frozen=True)
class Writer:
    """Writes the function of a program."""

    program: Program

    @cached_property
    def slices(self) -> int:
        """How many slices a tile has: words are of codes that lie below one another."""
        transposes = any("columns" in store.layouts for store in self.program.stores)
        return WORD if transposes else 1

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Columns of a head, 0 if there are none, and its pieces."""
        return pieces_of_heads(self.program.loads, self.program.steps)

    @property
    def pieces(self) -> int:
        """How many pieces a head has."""
        return self.heads[1]

    @cached_property
    def conditions(self) -> dict[str, Step]:
        """The conditions on columns, by name."""
        return {step.name: step for step in self.program.steps if step.target == "in_head"}

    def write(self) -> Function:
        """The Triton function."""
        program = self.program
        results = [f"out{i}" for i in range(sum(len(s.layouts) for s in program.stores))]
        body = [_TILE.format(slices=self.slices), *self._places()]
        for i in range(self.slices):
            body += self._loads(i)
            body += self._steps(i)
        remaining = iter(results)
        for store in program.stores:
            body += self._store(store, [next(remaining) for _ in store.layouts])
        return Function(
            kernel_name("tiles", program),
            pointers=(*(f"in{i}" for i in range(program.input_count)), *results),
            sizes=SIZES,
            constants=CONSTANTS,
            body="\n".join(part.strip("\n") for part in body),
        )

    def _places(self) -> Iterator[str]:
        """Where the tile's elements lie in matrices."""
        head, pieces = self.heads
        if pieces == 1:
            yield _COLUMNS + f"in_head_0 = column_0 % {head}" * bool(head)
        else:
            yield _POSITIONS.format(pieces=pieces)
            for p, start in enumerate(range(0, head, head // pieces)):
                yield _PIECE.format(p=p, start=start, head=head, width=head // pieces)
        yield _FIRST
        for i in range(self.slices):
            yield _SLICE.format(i=i, slices=self.slices)
            yield from (_FULL.format(i=i, p=p) for p in range(self.pieces))
        if self.slices > 1:
            yield _TRANSPOSED.format(word=WORD)

    def _loads(self, i: int) -> Iterator[str]:
        where = pointers(self.program)
        for load, p in product(self.program.loads, range(self.pieces)):
            yield from self._load(load, where[load], Part(i, p))

    def _load(self, load: Load, where: list[str], part: Part) -> list[str]:
        name, i, p = f"{load.name}{part}", part.slice, part.piece
        if load.operand == "groups":
            return self._load_groups(load.group_size, where, name, part)
        repeats = f" % {load.period}" if load.period else ".to(tl.int64)"
        value = _LOADS[load.operand].format(*where, i=i, p=p, head=load.head, repeats=repeats)
        return [f"{name} = {value}"]

    def _load_groups(self, size: int, where: list[str], name: str, part: Part) -> list[str]:
        (codes, scales), i, p = where, part.slice, part.piece
        first = f"{scales} + row_{i}.to(tl.int64) * (N // {size})"
        return [
            # A tile within one group has one scale in each row.
            f"if {self.pieces} == 1 and {size} % N_TILE == 0:",
            f"    {name}_scale = tl.load({first} + first_column // {size}, row_there_{i},"
            " other=0.0).to(tl.float32)[:, None]",
            "else:",
            f"    {name}_scale = tl.load(({first})[:, None] + (column_{p} // {size})[None, :],"
            f" there_{i}, other=0.0).to(tl.float32)",
            f"{name} = tl.load({codes} + first + full{part}, there_{i}, other=0.0).to(tl.float32)"
            f" * {name}_scale",
        ]

    def _steps(self, i: int) -> Iterator[str]:
        for step, p in product(self.program.steps, range(self.pieces)):
            part = Part(i, p)
            if step.target != "in_head":
                yield f"{step.name}{part} = {self._value(step, part)}"

    def _value(self, step: Step, part: Part) -> str | None:
        if step.target == "rolled":
            x, head, shift = step.args
            other = (part.piece + shift * self.pieces // head) % self.pieces
            return f"{x}{Part(part.slice, other)}"
        if step.target == "aten.where.self" and step.args[0] in self.conditions:
            chosen = step.args[1 if self._holds(step.args[0], part.piece) else 2]
            if not isinstance(chosen, str):
                return f"tl.full([1, 1], {chosen}, tl.float32)"
            return f"{chosen}{part}"
        args = tuple(f"{x}{part}" if isinstance(x, str) else x for x in step.args)
        return expression(replace(step, args=args))

    def _holds(self, condition: str, piece: int) -> bool:
        _, head, shift, start, end = self.conditions[condition].args
        return start <= (piece * head // self.pieces + shift) % head < end

    def _store(self, store: Store, where: list[str]) -> Iterator[str]:
        if store.layouts == ("amax",):
            yield from self._store_amax(store, where[0])
            return
        for i, p in product(range(self.slices), range(self.pieces)):
            # What pads a matrix must be zero, whatever the body makes of it.
            name = f"{store.name}{Part(i, p)}"
            codes = coded(name, f"{store.scale}{Part(i, p)}")
            yield f"{name}_coded = tl.where(there_{i}, {codes}, 0.0)"
        for layout, pointer in zip(store.layouts, where, strict=True):
            if layout == "rows":
                yield from self._store_rows(store, pointer)
            else:
                yield from self._store_columns(store, pointer)

    def _store_amax(self, store: Store, pointer: str) -> Iterator[str]:
        """In a program of its own, which has one slice."""
        amax = ""
        for p in range(self.pieces):
            magnitude = f"tl.where(there_0, tl.abs({store.name}{Part(0, p)}), 0.0)"
            amax = f"largest({amax}, {magnitude})" if amax else magnitude
        amax = f"tl.reduce(tl.reduce({amax}, 1, largest), 0, largest)"
        yield f"tl.store({pointer} + index, {amax})"

    def _store_rows(self, store: Store, pointer: str) -> Iterator[str]:
        first = f"{pointer} + first"
        if store.width:
            row = f"(row_tile * M_TILE).to(tl.int64) * {store.width}"
            first = f"{pointer} + {row} + first_column + {store.offset}"
        for i, p in product(range(self.slices), range(self.pieces)):
            place = f"full{Part(i, p)}"
            if store.width:
                place = f"in_tile_{i}[:, None] * {store.width} + in_row_{p}[None, :]"
            codes = f"{store.name}{Part(i, p)}_coded.to({CODE_TYPES[store.format]})"
            yield f"tl.store({first} + {place}, {codes}, there_{i})"

    def _store_columns(self, store: Store, pointer: str) -> Iterator[str]:
        width = f"({store.width or 'M_PADDED'} // {WORD})"
        first = f"first_column.to(tl.int64) * {width} + {store.offset // WORD}"
        wide = ".to(tl.int64)" if self.pieces > 1 else ""  # which may be any column of the matrix
        for p in range(self.pieces):
            codes = (f"{store.name}{Part(i, p)}_coded" for i in range(self.slices))
            place = f"in_row_{p}{wide}[:, None] * {width} + in_column[None, :]"
            where = f"{pointer}.to(tl.pointer_type(tl.int32)) + {first} + {place}"
            yield f"tl.store({where}, tl.trans(word_of({', '.join(codes)})), place_there)"
