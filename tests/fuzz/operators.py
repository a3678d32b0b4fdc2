"""The operators that programs are drawn from.

An operator is a template of a Python expression. `{0}` to `{2}` are operands, `{p0}` and `{p1}`
parameters, `{b0}` buffers. In shapes `d` is the width of the first operand, `n` a drawn width.
Operands may be invalid, because programs that eager PyTorch refuses are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[str | int, ...]


@dataclass(frozen=True)
class Operator:
    """An operator of programs.

    Attributes:
        template: a Python expression.
        operands: number of operands.
        parameters, buffers: shapes of its parameters and buffers.
        weight: how often it is drawn; 1 for most operators.
        random: whether its random numbers depend on the compiler.
        ties: whether its gradient tests elements for equality with the maximum. Stock Inductor
            computes such gradients wrongly in 16 bits. It compares fp32 values with a maximum that
            was rounded to 16 bits, finds no equal element, and divides by a count of 0.
    """

    template: str
    operands: int = 1
    parameters: tuple[Shape, ...] = ()
    buffers: tuple[Shape, ...] = ()
    weight: float = 1.0
    random: bool = False
    ties: bool = False


def _unary(**templates: str) -> dict[str, Operator]:
    return {name: Operator(template) for name, template in templates.items()}


ACTIVATIONS = _unary(
    relu="{0}.relu()",
    silu="F.silu({0})",
    gelu="F.gelu({0})",
    gelu_tanh="F.gelu({0}, approximate='tanh')",
    tanh="{0}.tanh()",
    sigmoid="{0}.sigmoid()",
    softplus="F.softplus({0})",
    elu="F.elu({0})",
    celu="F.celu({0}, 0.5)",
    selu="F.selu({0})",
    mish="F.mish({0})",
    hardswish="F.hardswish({0})",
    hardsigmoid="F.hardsigmoid({0})",
    hardtanh="F.hardtanh({0})",
    relu6="F.relu6({0} * 4)",
    leaky_relu="F.leaky_relu({0}, 0.1)",
    softshrink="F.softshrink({0}, 0.2)",
    softsign="F.softsign({0})",
    logsigmoid="F.logsigmoid({0})",
    squared_relu="{0}.relu().square()",
    clamp="{0}.clamp(-1.0, 0.7)",
    threshold="F.threshold({0}, 0.1, -0.5)",
    glu="F.glu({0})",
    absolute="{0}.abs()",
    decay="torch.exp(-{0}.abs())",
    square="{0} * {0}",
    cubed="{0}.pow(3) * 0.1",
    saturated="torch.tanh({0} * 3) ** 3",
    rsqrt="torch.rsqrt({0}.square() + 1)",
    reciprocal="1 / (1 + {0} ** 2)",
    log="torch.log1p({0}.abs())",
    sqrt="({0}.square() + 1).sqrt()",
    sin="{0}.sin()",
    atan="{0}.atan()",
    erf="{0}.erf()",
    shifted="{0} * 0.5 + 1",
    masked="torch.where({0} > 0.1, {0}, -{0})",
    detached="{0} + {0}.detach().sigmoid()",
    half="{0}.to(torch.bfloat16).to({0}.dtype)",
    in_fp32="({0}.float() * 1.5).to({0}.dtype)",
    cleaned="{0}.nan_to_num()",
    rounded="straight_through({0})",
    own_backward="Doubled.apply({0})",
)

REDUCTIONS = _unary(
    softmax="{0}.softmax(-1)",
    log_softmax="{0}.log_softmax(-1)",
    softmax_rows="{0}.softmax(0)",
    masked_softmax="{0}.masked_fill({0} < -1, -1e9).softmax(-1)",
    plain_norm="F.layer_norm({0}, {0}.shape[-1:])",
    standardized="standardized({0})",
    unit="F.normalize({0}, dim=-1)",
    centered="{0} - {0}.mean(0, keepdim=True)",
    logsumexp="{0} - {0}.logsumexp(-1, keepdim=True)",
    cumulative="{0}.cumsum(-1) / 8",
    cumulative_rows="{0}.cumsum(0) / {0}.shape[0]",
    gated_by_mean="{0} * {0}.mean(-1, keepdim=True).sigmoid()",
    variance="{0} / (1 + {0}.var(-1, keepdim=True))",
    sum="{0}.sum(-1) / 4",
    mean="{0}.mean(1)",
    total="{0}.sum() / 16",
    mean_square="{0}.float().square().mean()",
    loss="loss({0})",
)

VIEWS = _unary(
    transposed="{0}.transpose(-1, -2)",
    swapped="{0}.transpose(0, 1)",
    contiguous="{0}.transpose(0, 1).contiguous()",
    flattened="{0}.flatten(0, 1)",
    merged="{0}.flatten(1)",
    heads="{0}.unflatten(-1, (2, -1))",
    heads_first="{0}.unflatten(-1, (2, -1)).transpose(-2, -3)",
    strided="{0}.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)",
    interleaved="torch.stack([{0}, -{0}], -1).flatten(-2)",
    batched="{0}.unsqueeze(0)",
    first="{0}[0]",
    rows="{0}[1:]",
    every_other="{0}[::2]",
    left="{0}[..., : {0}.shape[-1] // 2]",
    right="{0}.chunk(2, -1)[1]",
    columns="{0}[..., ::2]",
    rolled="{0}.roll(3, -1)",
    rolled_rows="{0}.roll(1, 0)",
    flipped="{0}.flip(-1)",
    expanded="{0} + {0}[:1].expand_as({0})",
    repeated="{0}.repeat_interleave(2, -1)",
    padded="F.pad({0}, (0, 16))",
    shifted_rows="F.pad({0}[..., 1:, :], (0, 0, 0, 1))",
    unfolded="{0}.unfold(-1, 16, 8).flatten(-2)",
    rotated="rotated({0})",
    copied="{0}.clone()",
)

REDUCTIONS["without_max"] = Operator("{0} - {0}.amax(-1, keepdim=True)", ties=True)
REDUCTIONS["maximum"] = Operator("{0}.amax(0)", ties=True)

MOVES = {
    "gathered": Operator("{0}.gather(-1, ({0}.detach() > 0).long())"),
    "sorted": Operator("{0}.sort(-1).values", weight=0.5),
    "top": Operator("{0}.topk(16, -1).values", weight=0.5),
    "permuted": Operator(
        "{0}.index_select(-1, torch.arange({0}.shape[-1] - 1, -1, -1, device={0}.device))"
    ),
    "taken": Operator(
        "{0}[torch.arange({0}.shape[0], device={0}.device).flip(0) // 2]", weight=0.7
    ),
    "scattered": Operator(
        "torch.zeros_like({0})"
        ".index_add(0, torch.arange({0}.shape[0], device={0}.device) // 2, {0})"
    ),
}

IN_PLACE = {
    "added_in_place": Operator("{0}.clone().mul_(2).add_(1)"),
    "in_place": Operator("{0}.mul_(0.5)"),
    "relu_in_place": Operator("{0}.relu_()"),
    "add_in_place": Operator("{0}.add_({1})", operands=2),
    "filled_in_place": Operator("{0}.masked_fill_({0} < -1, 0.0)"),
    "half_added_to": Operator("half_added_to({0}, {1})", operands=2),
    "moving_average": Operator("moving_average({0}, {b0})", buffers=(("d",),)),
    "read_before_written": Operator("read_before_written({0}, {b0})", buffers=(("d",),)),
    "counted": Operator("counted({0}, {b0})", buffers=(("d",),)),
    "observed": Operator("observed({0}, {b0})", buffers=(("d",),)),
    "batch_norm": Operator(
        "batch_norm({0}, {b0}, {b1}, {p0}, {p1})",
        parameters=(("d",), ("d",)),
        buffers=(("d",), ("d",)),
    ),
}

LINEARS = {
    "linear": Operator("F.linear({0}, {p0})", parameters=(("n", "d"),), weight=10),
    "biased": Operator("F.linear({0}, {p0}, {p1})", parameters=(("n", "d"), ("n",)), weight=8),
    "matmul": Operator("{0} @ {p0}", parameters=(("d", "n"),), weight=3),
    "einsum": Operator("torch.einsum('...d,nd->...n', {0}, {p0})", parameters=(("n", "d"),)),
    "convolution": Operator(
        "F.conv1d({0}.transpose(-1, -2), {p0}).transpose(-1, -2)", parameters=(("n", "d", 1),)
    ),
    "scaled_weight": Operator("F.linear({0}, {p0} * 0.5)", parameters=(("n", "d"),)),
    "weight_norm": Operator(
        "F.linear({0}, F.normalize({p0}, dim=-1))", parameters=(("n", "d"),), weight=0.5
    ),
    "sliced_weight": Operator("F.linear({0}, {p0}[:16])", parameters=(("n", "d"),)),
    "fused_projections": Operator(
        "sum(F.linear({0}, {p0}).chunk(2, -1))", parameters=(("n", "d"),)
    ),
    "low_rank": Operator("{0} @ {p0} @ {p0}.t()", parameters=(("d", 16),)),
    "odd": Operator("{0} @ {p0} @ {p0}.t()", parameters=(("d", 7),)),
    "mixture": Operator(
        "mixture({0}, {p0}, {p1})", parameters=((3, "d"), (3, "d", "n")), weight=0.7
    ),
    "experts": Operator("experts({0}, {p0})", parameters=((2, "d", "n"),), weight=1.5),
    "experts_in_front": Operator(
        "experts_in_front({0}, {p0})", parameters=((4, "n", "d"),), weight=0.7
    ),
    "all_experts": Operator("all_experts({0}, {p0})", parameters=((3, "d", "n"),), weight=0.7),
    "checkpointed": Operator(
        "checkpointed({0}, {p0}, {p1})", parameters=(("n", "d"), ("d", "n")), weight=1.5
    ),
    "penalty": Operator("{0} * ({p0} @ {p0}.t()).square().mean()", parameters=(("n", "d"),)),
    "layer_norm": Operator(
        "F.layer_norm({0}, {0}.shape[-1:], {p0}, {p1})", parameters=(("d",), ("d",)), weight=3
    ),
    "rms": Operator("rms({0}, {p0})", parameters=(("d",),), weight=3),
    "gain": Operator("{0} * {p0}", parameters=(("d",),)),
    "bias": Operator("{0} + {p0}", parameters=(("d",),)),
    "prelu": Operator("torch.where({0} > 0, {0}, {0} * {p0})", parameters=(("d",),)),
}

BINARY = {
    "add": Operator("{0} + {1}", 2, weight=4),
    "mul": Operator("{0} * {1}", 2, weight=2),
    "gate": Operator("F.silu({0}) * {1}", 2, weight=2),
    "gelu_gate": Operator("F.gelu({0}) * {1}", 2),
    "div": Operator("{0} / (1 + {1}.abs())", 2),
    "maximum": Operator("torch.maximum({0}, {1})", 2),
    "chosen": Operator("torch.where({0} > {1}, {0} * 2, {1})", 2),
    "lerp": Operator("torch.lerp({0}, {1}, 0.3)", 2),
    "angle": Operator("torch.atan2({0}.detach(), {1}.detach() + 3) * 2 * {1}", 2),
    "cat": Operator("torch.cat([{0}, {1}], -1)", 2, weight=1.5),
    "cat_rows": Operator("torch.cat([{0}, {1}], 0)", 2),
    "stacked": Operator("torch.stack([{0}, {1}], 1)", 2, weight=0.7),
    "product": Operator("{0} @ ({1}.transpose(-1, -2) @ {1}) / {1}.shape[-2]", 2, weight=0.7),
    "distance": Operator("F.mse_loss({0}.float(), {1}.float())", 2),
    "similarity": Operator("F.cosine_similarity({0}, {1}, dim=-1)", 2, weight=0.5),
    "attention": Operator("attention({0}, {1}, {2}, False)", 3),
    "causal": Operator("attention({0}, {1}, {2}, True)", 3),
    "scored": Operator("scored({0}, {1}, {2})", 3),
    "addcmul": Operator("torch.addcmul({0}, {1}, {2}, value=0.5)", 3, weight=0.5),
}

RANDOM = {
    "kept_random": Operator("kept_random({0})", weight=0.7),
    "dropout": Operator("F.dropout({0}, 0.3)", weight=0.7, random=True),
}

EMBEDDING = Operator("F.embedding({0}, {p0})", parameters=((48, "n"),))

FAMILIES: dict[str, tuple[float, dict[str, Operator]]] = {
    "linears": (4.0, LINEARS),
    "activations": (3.0, ACTIVATIONS),
    "binary": (2.5, BINARY),
    "reductions": (1.2, REDUCTIONS),
    "views": (1.5, VIEWS),
    "moves": (0.5, MOVES),
    "in_place": (0.8, IN_PLACE),
    "random": (0.3, RANDOM),
}

OPERATORS: dict[str, Operator] = {
    **{name: op for _, family in FAMILIES.values() for name, op in family.items()},
    "embedding": EMBEDDING,
}
