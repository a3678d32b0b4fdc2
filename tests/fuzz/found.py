"""Programs that failed once, found and shrunk by the fuzzer."""

from __future__ import annotations

from .program import Input, Instruction, Parameter, Program

FOUND = {
    "an operand with gaps between elements": Program(
        seed=172720,
        inputs={"x1": Input(dims=("S", 96), kind="float", grad=False, layout="contiguous")},
        parameters={
            "w5992": Parameter(shape=(48, 48), trained=True, buffer=False),
            "w584": Parameter(shape=(128, 48), trained=False, buffer=False),
            "w8512": Parameter(shape=(16, 128), trained=False, buffer=False),
        },
        code=(
            Instruction(name="v1", operator="columns", operands=("x1",), parameters=(), buffers=()),
            Instruction(
                name="v2", operator="matmul", operands=("v1",), parameters=("w5992",), buffers=()
            ),
            Instruction(
                name="v4", operator="linear", operands=("v2",), parameters=("w584",), buffers=()
            ),
            Instruction(
                name="v5", operator="linear", operands=("v4",), parameters=("w8512",), buffers=()
            ),
        ),
        returned=("v5",),
        batches=({"S": 7},),
        dtype="float16",
        dynamic=False,
        recipe="exact",
        options={},
        compiler="eager",
        path="inductor",
        observed=True,
    ),
    "an operand of equal rows": Program(
        seed=708532,
        inputs={"x0": Input(dims=("S", 16), kind="float", grad=False, layout="expanded")},
        parameters={"w7856": Parameter(shape=(16, 16), trained=True, buffer=False)},
        code=(
            Instruction(
                name="v3", operator="matmul", operands=("x0",), parameters=("w7856",), buffers=()
            ),
        ),
        returned=("v3",),
        batches=({"S": 16},),
        dtype="float16",
        dynamic=False,
        recipe="exact",
        options={},
        compiler="eager",
        path="inductor",
        observed=True,
    ),
    "attention of one value over few tokens": Program(
        seed=947547,
        inputs={"x0": Input(dims=("B", "S", 16), kind="float", grad=False, layout="contiguous")},
        parameters={"w1890": Parameter(shape=(16, 16), trained=True, buffer=False)},
        code=(
            Instruction(
                name="v1",
                operator="fused_projections",
                operands=("x0",),
                parameters=("w1890",),
                buffers=(),
            ),
            Instruction(
                name="v2", operator="causal", operands=("v1", "v1", "v1"), parameters=(), buffers=()
            ),
        ),
        returned=("v2",),
        batches=({"S": 1, "B": 1}, {"S": 4, "B": 1}, {"S": 2, "B": 1}),
        dtype="float32",
        dynamic=True,
        recipe="coat",
        options={},
        compiler="eager",
        path="inductor",
        observed=False,
    ),
    "attention of a sum over two tokens": Program(
        seed=795764,
        inputs={"x0": Input(dims=("S", 32), kind="float", grad=True, layout="contiguous")},
        parameters={"w4319": Parameter(shape=(32, 16), trained=False, buffer=False)},
        code=(
            Instruction(
                name="v0", operator="low_rank", operands=("x0",), parameters=("w4319",), buffers=()
            ),
            Instruction(
                name="v3", operator="stacked", operands=("v0", "x0"), parameters=(), buffers=()
            ),
            Instruction(name="v7", operator="right", operands=("v3",), parameters=(), buffers=()),
            Instruction(
                name="v8", operator="causal", operands=("v7", "v7", "v7"), parameters=(), buffers=()
            ),
        ),
        returned=("v8",),
        batches=({"S": 16},),
        dtype="float32",
        dynamic=False,
        recipe="coat",
        options={},
        compiler="eager",
        path="inductor",
        observed=True,
    ),
    "a slope that is infinite": Program(
        seed=23631,
        inputs={"x0": Input(dims=("S", 16), kind="float", grad=False, layout="contiguous")},
        parameters={
            "w9217": Parameter(shape=(16, 16), trained=False, buffer=False),
            "w4650": Parameter(shape=(16, 16), trained=True, buffer=False),
        },
        code=(
            Instruction(
                name="v2", operator="penalty", operands=("x0",), parameters=("w9217",), buffers=()
            ),
            Instruction(
                name="v6", operator="standardized", operands=("v2",), parameters=(), buffers=()
            ),
            Instruction(
                name="v7", operator="linear", operands=("v6",), parameters=("w4650",), buffers=()
            ),
        ),
        returned=("v7",),
        batches=({"S": 1},),
        dtype="float32",
        dynamic=False,
        recipe="coat",
        options={"memory_budget": 0.7},
        compiler="eager",
        path="inductor",
        observed=False,
    ),
    "requantized tokens of several experts": Program(
        seed=656262,
        inputs={"x0": Input(dims=("S", 32), kind="float", grad=True, layout="contiguous")},
        parameters={
            "w7508": Parameter(shape=(3, 32, 16), trained=False, buffer=False),
            "w7654": Parameter(shape=(24, 16), trained=False, buffer=False),
            "w6350": Parameter(shape=(16, 24), trained=True, buffer=False),
        },
        code=(
            Instruction(
                name="v3",
                operator="all_experts",
                operands=("x0",),
                parameters=("w7508",),
                buffers=(),
            ),
            Instruction(
                name="v4", operator="linear", operands=("v3",), parameters=("w7654",), buffers=()
            ),
            Instruction(
                name="v6", operator="linear", operands=("v4",), parameters=("w6350",), buffers=()
            ),
        ),
        returned=("v6",),
        batches=({"S": 1},),
        dtype="float32",
        dynamic=False,
        recipe="coat",
        options={"memory_budget": 0.95},
        compiler="eager",
        path="inductor",
        observed=True,
    ),
    "one gradient for all results of experts": Program(
        seed=200430,
        inputs={"x0": Input(dims=("B", "S", 16), kind="float", grad=False, layout="contiguous")},
        parameters={"w5556": Parameter(shape=(2, 16, 16), trained=True, buffer=False)},
        code=(
            Instruction(
                name="v0", operator="experts", operands=("x0",), parameters=("w5556",), buffers=()
            ),
            Instruction(name="v1", operator="total", operands=("v0",), parameters=(), buffers=()),
        ),
        returned=("v1",),
        batches=({"S": 1, "B": 2},),
        dtype="float32",
        dynamic=False,
        recipe="coat",
        options={},
        compiler="eager",
        path="inductor",
        observed=False,
    ),
    "a norm of values that differ by rounding only": Program(
        seed=604530,
        inputs={"x0": Input(dims=("B", "S"), kind="ids", grad=False, layout="contiguous")},
        parameters={
            "w2331": Parameter(shape=(48, 16), trained=True, buffer=False),
            "w4779": Parameter(shape=(16, 16), trained=True, buffer=False),
            "w1898": Parameter(shape=(32, 16), trained=True, buffer=False),
            "w6889": Parameter(shape=(1,), trained=True, buffer=False),
            "b4987": Parameter(shape=(1,), trained=False, buffer=True),
            "b9623": Parameter(shape=(1,), trained=False, buffer=True),
        },
        code=(
            Instruction(
                name="v0", operator="embedding", operands=("x0",), parameters=("w2331",), buffers=()
            ),
            Instruction(
                name="v1",
                operator="sliced_weight",
                operands=("v0",),
                parameters=("w4779",),
                buffers=(),
            ),
            Instruction(name="v3", operator="selu", operands=("v1",), parameters=(), buffers=()),
            Instruction(
                name="v4", operator="linear", operands=("v3",), parameters=("w1898",), buffers=()
            ),
            Instruction(
                name="v6", operator="similarity", operands=("v4", "v4"), parameters=(), buffers=()
            ),
            Instruction(
                name="v7", operator="bias", operands=("v6",), parameters=("w6889",), buffers=()
            ),
            Instruction(
                name="v8",
                operator="batch_norm",
                operands=("v7",),
                parameters=("w6889", "w6889"),
                buffers=("b4987", "b9623"),
            ),
        ),
        returned=("v8",),
        batches=({"S": 1, "B": 2},),
        dtype="autocast",
        dynamic=False,
        recipe="coat",
        options={},
        compiler="eager",
        path="inductor",
        observed=True,
    ),
}
