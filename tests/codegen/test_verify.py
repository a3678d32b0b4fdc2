"""Malformed programs are rejected with a message that names the place and the problem."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_helpers import (
    CAST,
    ROW_CAST,
    norm,
    norm_backward,
    operands,
    swiglu,
    swiglu_backward,
)
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.codegen.kernels import row_kernel, row_source, tile_kernel, tile_source
from fp8pass.codegen.kernels.supported import UnsupportedProgram
from fp8pass.codegen.program.emit import emit_batch
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.codegen.program.verify import MalformedProgram, verify

X = Load("x", "full")
R = Load("r", "row")
S = Load("s", "scalar")
SUM = Step("y", "aten.add.Tensor", ("x", "r"))
VALUE = Store("y", ("full",), dtype="bfloat16")
DATA = Store("y", ("rows", "columns"), "s", "e4m3")


def program(
    *, loads: tuple = (S, R, X), steps: tuple = (SUM,), stores: tuple = (VALUE, DATA)
) -> Program:
    return Program(loads, steps, stores)


WELL_FORMED = {
    "as it is": program(),
    "cast": CAST,
    "row cast": ROW_CAST,
    "norm": norm(128, 32),
    "swiglu": swiglu(32),
    "norm backward": norm_backward(128),
    "swiglu backward": swiglu_backward(32),
    "amax": program(stores=(Store("y", ("amax",)), Store("x", ("amax",)))),
    "sums of tiles": program(
        stores=(Store("y", ("amax",)), Store("y", ("tile_sums",), dtype="bfloat16"))
    ),
    "a value of rows": program(stores=(Store("r", ("row",), dtype="float32"),)),
    "sums twice": program(stores=(Store("y", ("sums",)), Store("y", ("sums",)))),
    "in a wider matrix": program(stores=(Store("y", ("rows",), "s", "e4m3", width=96, offset=32),)),
}


@pytest.mark.parametrize("case", WELL_FORMED)
def test_well_formed(case):
    verify(WELL_FORMED[case], operands(WELL_FORMED[case], 4, 128 - 64 * ("wider" in case), "cpu"))


MALFORMED = {
    "load twice": (program(loads=(S, R, X, X)), "load x (full): is defined twice"),
    "load as a block": (
        program(loads=(S, R, replace(X, operand="block"))),
        "load x (block): unknown operand 'block'",
    ),
    "groups of nothing": (
        program(loads=(S, R, Load("x", "groups", format="e4m3"))),
        "load x (groups): has groups of 0",
    ),
    "groups of nothing known": (
        program(loads=(S, R, Load("x", "groups", 16))),
        "load x (groups): '' is not a format of quantized data",
    ),
    "full with a format": (
        program(loads=(S, R, Load("x", "full", format="e4m3"))),
        "load x (full): has a format, which only groups have",
    ),
    "full in groups": (
        program(loads=(S, R, Load("x", "full", 16))),
        "load x (full): has groups of 16",
    ),
    "a part of nothing": (
        program(loads=(S, R, Load("x", "full", columns=64))),
        "load x (full): is a part, but has no width",
    ),
    "a part that ends outside": (
        program(loads=(S, R, Load("x", "full", columns=64, width=96, offset=48))),
        "load x (full): lies outside of 96 columns",
    ),
    "a part of a row's number": (
        program(loads=(S, replace(R, columns=1, width=2), X)),
        "load r (row): is a part of a matrix, but only unpacked matrices",
    ),
    "half a group": (
        program(loads=(S, R, Load("x", "groups", 32, "e4m3", columns=64, width=128, offset=16))),
        "load x (groups): cuts groups of 32",
    ),
    "no matrix": (
        program(loads=(S, R), steps=(), stores=(Store("r", ("row",), dtype="float32"),)),
        "the program: reads no matrix",
    ),
    "step twice": (program(steps=(SUM, SUM)), "step y = aten.add.Tensor(x, r): is defined twice"),
    "step named as a load": (program(steps=(replace(SUM, name="x"),)), "is defined twice"),
    "used before": (
        program(steps=(replace(SUM, args=("z", "r")), Step("z", "aten.neg.default", ("x",)))),
        "uses z, which is not defined before",
    ),
    "used by itself": (program(steps=(replace(SUM, args=("y", "r")),)), "uses y, which"),
    "unknown operator": (
        program(steps=(replace(SUM, target="aten.atan2.default"),)),
        "is not an operator that kernels compute",
    ),
    "too few arguments": (program(steps=(replace(SUM, args=("x",)),)), "is not an operator that"),
    "a reduction of two": (
        program(steps=(replace(SUM, target="row_sum"),)),
        "step y = row_sum(x, r): takes one value",
    ),
    "exponentials of one": (
        program(steps=(Step("m", "row_max", ("x",)), Step("y", "row_exp_sum", ("x",)))),
        "step y = row_exp_sum(x): takes two values",
    ),
    "exponentials of another maximum": (
        program(steps=(Step("m", "row_amax", ("x",)), Step("y", "row_exp_sum", ("x", "m")))),
        "step y = row_exp_sum(x, m): m is not the maximum of each row of x",
    ),
    "exponentials twice": (
        program(
            steps=(
                Step("m", "row_max", ("x",)),
                *(Step(name, "row_exp_sum", ("x", "m")) for name in "yz"),
            )
        ),
        "step y = row_exp_sum(x, m): is computed twice",
    ),
    "columns of a matrix": (
        program(steps=(Step("y", "is_column", ("x",)),)),
        "step y = is_column(x): compares columns with a value that varies along a row",
    ),
    "a scale of nothing": (program(steps=(Step("y", "scale", ("x",)),)), "an amax and a format"),
    "a scale of no format": (
        program(steps=(Step("y", "scale", ("r", "e9m9")),)),
        "'e9m9' is not a format of quantized data",
    ),
    "a lossless scale": (
        program(steps=(Step("y", "scale", ("r", "exact")),)),
        "'exact' is not a format of quantized data",
    ),
    "no store": (program(stores=()), "the program: stores nothing"),
    "nothing by that name": (
        program(stores=(replace(VALUE, name="z"),)),
        "store of z (full): is not defined",
    ),
    "no layout": (program(stores=(replace(VALUE, layouts=()),)), "has no layout"),
    "unknown layout": (
        program(stores=(replace(VALUE, layouts=("diagonal",)),)),
        "store of y (diagonal): unknown layout 'diagonal'",
    ),
    "values and codes": (
        program(stores=(replace(DATA, layouts=("rows", "full")),)),
        "rows and full are not stored together",
    ),
    "twice in one layout": (
        program(stores=(replace(DATA, layouts=("rows", "rows")),)),
        "rows and rows are not stored together",
    ),
    "data without a scale": (program(stores=(replace(DATA, scale=""),)), "has no scale"),
    "data without a format": (program(stores=(replace(DATA, format=""),)), "has no format"),
    "data of a dtype": (
        program(stores=(replace(DATA, dtype="float32"),)),
        "has a dtype, which",
    ),
    "data of no format": (
        program(stores=(replace(DATA, format="exact"),)),
        "'exact' is not a format of quantized data",
    ),
    "no such scale": (program(stores=(replace(DATA, scale="z"),)), "scale z is not defined"),
    "a scale for each column": (
        program(stores=(replace(DATA, scale="x"),)),
        "its scale x varies along a row",
    ),
    "groups without a size": (
        program(stores=(Store("y", ("groups",), format="e4m3"),)),
        "has no group_size",
    ),
    "groups with a scale": (
        program(stores=(Store("y", ("groups",), "s", "e4m3", 16),)),
        "has a scale, which groups do not take",
    ),
    "values of no dtype": (program(stores=(replace(VALUE, dtype=""),)), "has no dtype"),
    "values as integers": (
        program(stores=(replace(VALUE, dtype="int32"),)),
        "'int32' is not a floating point dtype",
    ),
    "values as something else": (
        program(stores=(replace(VALUE, dtype="randn"),)),
        "'randn' is not a floating point dtype",
    ),
    "a matrix as a value of rows": (
        program(stores=(Store("y", ("row",), dtype="float32"),)),
        "store of y (row): varies along a row",
    ),
    "sums of a dtype": (
        program(stores=(Store("y", ("sums",), dtype="float32"),)),
        "has a dtype, which sums do not take",
    ),
    "amaxes beside values": (
        program(stores=(Store("y", ("amax",)), VALUE)),
        "store of y (full): is stored together with amaxes or sums of tiles",
    ),
    "sums of tiles beside data": (
        program(stores=(Store("y", ("tile_sums",)), DATA)),
        "store of y (rows, columns): is stored together with amaxes or sums of tiles",
    ),
    "rounded two ways": (
        program(stores=(VALUE, replace(VALUE, dtype="float32"))),
        "is rounded to bfloat16, too",
    ),
    "an offset alone": (
        program(stores=(replace(DATA, offset=16),)),
        "has an offset, but no width",
    ),
    "both layouts in a wider matrix": (
        program(stores=(replace(DATA, width=96),)),
        "which needs exactly one quantized layout",
    ),
    "values in a wider matrix": (
        program(stores=(replace(VALUE, width=96),)),
        "which needs exactly one quantized layout",
    ),
    "outside": (
        program(stores=(replace(DATA, layouts=("rows",), width=96, offset=96),)),
        "lies outside of 96 columns",
    ),
    "between words": (
        program(stores=(replace(DATA, layouts=("columns",), width=96, offset=8),)),
        "its columns do not start at a multiple of 16",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case):
    malformed, problem = MALFORMED[case]
    with pytest.raises(MalformedProgram) as raised:
        verify(malformed)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("well_formed", "problem"),
    [
        (swiglu(48), "store of g (groups): groups of 48 do not divide 64 columns"),
        (norm_backward(64), "load x (groups): groups of 128 do not divide 64 columns"),
        (
            program(stores=(replace(DATA, layouts=("rows",), width=96, offset=48),)),
            "do not fit",
        ),
        (
            program(loads=(S, R, X, Load("p", "full", columns=32, width=64))),
            "load p (full): has 32 columns instead of 64",
        ),
    ],
)
def test_sizes_that_do_not_fit(well_formed, problem):
    verify(well_formed)
    inputs = operands(well_formed, 4, 64, "cpu")
    with pytest.raises(MalformedProgram) as raised:
        verify(well_formed, inputs)
    assert problem in str(raised.value)
    with pytest.raises(MalformedProgram, match=r"reads \d tensors, not \d"):
        verify(well_formed, inputs[1:])


@pytest.mark.parametrize("operand", ["full", "groups"])
def test_a_part_of_another_matrix(operand):
    grouped = {"group_size": 16, "format": "e4m3"} if operand == "groups" else {}
    part = program(loads=(S, R, Load("x", operand, columns=64, width=96, offset=16, **grouped)))
    inputs = operands(part, 4, 64, "cpu")
    verify(part, inputs)
    inputs[-1] = inputs[-1][:, :-1]
    with pytest.raises(MalformedProgram, match=r"is a part of \d+ columns, but its tensor has"):
        verify(part, inputs)


def test_programs_are_verified_when_they_are_emitted():
    gm = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.randn(32, 64))
    x, y, _ = gm.graph.nodes
    malformed = Program((X,), (), (Store("y", ("amax",)),))
    with pytest.raises(MalformedProgram, match="store of y"):
        emit_batch(tile_kernel.tiles, Batch((malformed,)), [x], like=y)


# --- stores that kernels support ----------------------------------------------------------------


def test_kernels_can_store_all_their_layouts():
    assert tile_source.TILE_STORES.keys() == tile_kernel.FORMATS_BY_LAYOUT.keys()
    assert row_source.ROW_STORES.keys() | {"row"} == row_kernel.FORMATS_BY_LAYOUT.keys()


STORES = {
    "rows": Store("x", ("rows",), "s", "e4m3"),
    "columns": Store("x", ("columns",), "s", "e4m3"),
    "groups": Store("x", ("groups",), format="e4m3", group_size=16),
    "full": Store("x", ("full",), dtype="bfloat16"),
    "row": Store("s", ("row",), dtype="bfloat16"),
    "sums": Store("x", ("sums",)),
    "amax": Store("x", ("amax",)),
    "tile_sums": Store("x", ("tile_sums",), dtype="bfloat16"),
}


@pytest.mark.parametrize("layout", STORES)
@pytest.mark.parametrize(("module", "kind"), [(row_kernel, "row"), (tile_kernel, "tile")])
def test_a_kernel_refuses_other_layouts(module, kind, layout):
    stored = Program((S, X), (), (STORES[layout],))
    verify(stored)
    if layout in module.FORMATS_BY_LAYOUT:
        assert module.prepare(stored, 64, 128).function.body
        return
    with pytest.raises(UnsupportedProgram) as raised:
        module.prepare(stored, 64, 128)
    assert f"the {kind} kernel cannot store layout '{layout}' of" in str(raised.value)


@pytest.mark.parametrize(("module", "kind"), [(row_kernel, "row"), (tile_kernel, "tile")])
def test_a_kernel_refuses_other_formats(module, kind):
    stored = Program((S, X), (), (replace(STORES["rows"], format="e5m2"),))
    verify(stored)
    with pytest.raises(UnsupportedProgram, match=f"the {kind} kernel cannot store format 'e5m2'"):
        module.prepare(stored, 64, 128)


def test_the_tile_kernel_refuses_reductions():
    with pytest.raises(UnsupportedProgram, match="the tile kernel cannot compute row_amax"):
        tile_kernel.prepare(ROW_CAST, 64, 128)


@pytest.mark.parametrize(
    ("store", "columns", "problem"),
    [
        (replace(STORES["rows"], width=256), 128, "cannot store x in a wider matrix"),
        (replace(STORES["groups"], group_size=48), 96, "cannot store groups of 48"),
        (replace(STORES["groups"], group_size=8192), 8192, "cannot store groups of 8192"),
        (STORES["sums"], 1 << 15, "cannot sum over rows of 32768"),
    ],
)
def test_other_stores_that_the_row_kernel_refuses(store, columns, problem):
    with pytest.raises(UnsupportedProgram, match=f"the row kernel {problem}"):
        row_kernel.prepare(Program((S, X), (), (store,)), 64, columns)
