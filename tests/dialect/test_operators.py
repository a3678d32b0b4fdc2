"""Every operator of the dialect is in all tables, and its shape rule matches its result."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.codegen.tuned_lowerings import LOWERINGS
from fp8pass.dialect.ops import OPERATORS
from fp8pass.graph.classify import AMAX_OPERATORS, Kind, kind

fp8 = torch.ops.fp8pass


def codes(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(rows, columns).to(dtype)


X = torch.randn(20, 32).bfloat16()
ONE = torch.tensor(0.5)
ROWS = torch.full((20, 1), 0.5)
GROUPS = torch.full((20, 2), 0.5).bfloat16()
BLOCKS = torch.full((5, 2), 0.5)
TENSORS = "e4m3 tensor", "e4m3 tensor"
# 20 rows of three experts. The second expert has no rows; two rows belong to no expert.
OFFSETS = torch.tensor([7, 7, 18], dtype=torch.int32)
SEGMENTS = torch.tensor([[0.5], [0.25], [2.0]])

# Calls of every operator, with all kinds of arguments that its shape and dtype depend on.
CALLS: dict[object, list[tuple]] = {
    fp8.amax.default: [(X, "tensor"), (X.float(), "row"), (X, "1×16"), (X, "4×16")],
    fp8.scale.default: [
        (ONE, "e4m3 tensor"),
        (ROWS, "e5m2 row"),
        (ONE, "exact tensor"),
        (GROUPS.float(), "e2m1 1×16"),
        (GROUPS.float(), "e4m3 1×16 e8m0"),
    ],
    fp8.quantize.default: [
        (X, ONE, "e4m3 tensor"),
        (X, ROWS, "e5m2 row"),
        (X, ONE, "exact tensor"),
        (X, GROUPS, "e4m3 1×16"),
        (X.t().contiguous().t(), GROUPS, "e4m3 1×16"),
        (X, GROUPS, "e2m3 1×16", 1),
        (X, GROUPS, "exact 1×16"),
        (X, BLOCKS, "e4m3 4×16 fp32"),
    ],
    fp8.dequantize.default: [
        ([codes(20, 32)], ROWS, "e4m3 row", torch.bfloat16),
        ([codes(20, 32)], ONE, "e4m3 tensor", torch.float32),
        ([codes(20, 32)], GROUPS, "e4m3 1×16", torch.bfloat16),
        ([codes(20, 32)], BLOCKS, "e4m3 4×16 fp32", torch.bfloat16),
        ([codes(20, n, torch.uint8) for n in (16, 8)], GROUPS, "e2m3 1×16", torch.float32),
        ([X], GROUPS, "exact 1×16", torch.bfloat16),
    ],
    fp8.transpose.default: [(codes(20, 32),), (codes(32, 16),), (X,)],
    fp8.joined.default: [([codes(20, 32), codes(20, 16)],)],
    fp8.as_bytes.default: [(codes(20, 32),)],
    fp8.as_codes.default: [(torch.zeros(20, 32, dtype=torch.uint8), "e5m2")],
    fp8.scaled_mm.default: [
        (*(codes(20, 32), ONE, codes(48, 32), ONE), None, torch.bfloat16, False, *TENSORS),
        (
            *(codes(20, 32), ROWS, codes(20, 32), ROWS),
            *(torch.randn(20), torch.float32, False, "e4m3 row", "e4m3 row"),
        ),
        (
            *(codes(20, 32), GROUPS.float(), codes(20, 32), BLOCKS, None),
            *(torch.bfloat16, False, "e4m3 1×16 fp32", "e4m3 4×16 fp32"),
        ),
        (X, ONE, X, ONE, None, torch.bfloat16, False, "exact tensor", "exact tensor"),
    ],
    fp8.padded_ends.default: [(OFFSETS,)],
    fp8.segment_amax.default: [(ROWS, OFFSETS)],
    fp8.transpose_segments.default: [
        (X, SEGMENTS, OFFSETS, "e4m3"),
        (X.float(), SEGMENTS, OFFSETS, "e5m2"),
        (X[:8], SEGMENTS, OFFSETS, "e4m3", torch.randint(8, (20,))),
        (codes(20, 32), SEGMENTS, OFFSETS, "e4m3", None, ROWS),
    ],
    fp8.scaled_grouped_mm.default: [
        (codes(20, 32), ROWS, codes(48, 32), torch.ones(48, 1), OFFSETS, torch.bfloat16)
    ],
    fp8.scaled_grouped_outer.default: [
        (
            fp8.transpose_segments(X, SEGMENTS, OFFSETS, "e4m3"),
            SEGMENTS,
            fp8.transpose_segments(X[:, :16], SEGMENTS, OFFSETS, "e4m3"),
            SEGMENTS,
            fp8.padded_ends(OFFSETS),
            torch.float32,
        )
    ],
    fp8.mask_format.default: [
        (X, "e8m3", True, True),
        (X.float().t(), "e5m2", True, False),
        (X[:, :8].half(), "e4m3", False, True),
    ],
}
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


def test_every_operator_is_called():
    assert CALLS.keys() == OPERATORS.keys()


def test_tuned_lowerings_are_of_operators():
    assert LOWERINGS.keys() <= OPERATORS.keys()


@each_operator
def test_class(operator):
    node = fx.Graph().call_function(operator)
    node.meta["val"] = torch.empty(1)
    assert kind(node) is (Kind.GEMM if OPERATORS[operator].multiplies else Kind.QUANTIZE)
    assert (operator in AMAX_OPERATORS) == OPERATORS[operator].reduces


@each_operator
def test_the_operator_computes_its_reference(operator):
    for arguments in CALLS[operator]:
        got, want = operator(*arguments), OPERATORS[operator].reference(*arguments)
        assert got.dtype == want.dtype
        assert torch.equal(got.double(), want.double())


@each_operator
def test_shape_rule_matches_the_result(operator):
    for arguments in CALLS[operator]:
        want = operator(*arguments)
        with FakeTensorMode() as mode:
            fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            for fake in (operator(*fakes), OPERATORS[operator].fake(*fakes)):
                assert (fake.shape, fake.dtype) == (want.shape, want.dtype)
                assert fake.stride() == want.stride()
