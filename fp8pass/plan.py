"""The plan of a graph as data: FP8 GEMMs, saved tensors, and the reason for each decision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fp8pass.option_checks import bytes_text


@dataclass
class KernelUse:
    """How the matrices of one graph are quantized.

    Attributes:
        programs: for each hand-written kernel, the number of programs that it runs.
        launches: number of launches of these kernels.
        generated: for each reason why kernels do not quantize a matrix, the number of matrices that
            Inductor's code quantizes for this reason.
    """

    programs: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    generated: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor that the forward passes to the backward, on the device or in host memory."""

    name: str
    dtype: str
    shape: str
    bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class HostCopy:
    """A tensor that is in host memory between forward and backward.

    Attributes:
        bytes: bytes of one copy, to the host or back.
        computed_s: when the tensor is computed, in seconds from the beginning of the forward, by
            the roofline.
        used_s: when the tensor is first used, in seconds from the beginning of the backward.
    """

    module: str
    shape: str
    dtype: str
    bytes: int
    computed_s: float
    used_s: float


@dataclass
class Offload:
    """The tensors that one graph saves in host memory.

    Attributes:
        bandwidth: bytes per second of copies, in each direction.
        forward_s, backward_s: computing time of the forward and of the backward in seconds, by the
            roofline.
        wait_s: seconds that a step waits for copies, in addition to the computing time.
        in_flight_bytes: largest number of bytes of GPU memory that unfinished copies take at once.
    """

    bandwidth: float
    forward_s: float
    backward_s: float
    copies: list[HostCopy] = field(default_factory=list)
    wait_s: float = 0.0
    in_flight_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes in host memory."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def copy_s(self) -> float:
        """Seconds that all copies of a step take, to the host and back."""
        return 2 * self.bytes / self.bandwidth


@dataclass(frozen=True)
class SavedTensor:
    """One forward value that the backward uses, and how it is saved.

    `name` is the name of the value's node in the joint graph. The node is the operator `op` of the
    model's submodule `module`.

    Attributes:
        saved_as: `exact`, or a format with its group, such as `e4m3 1×128`.
        bytes_exact: bytes of the value before quantization.
        bytes: bytes saved on the device, including scales. 0 for a leaf that requires a gradient,
            because autograd keeps it alive anyway.
        value: the name of the value in `keep_exact` and `calibration`.
        place: number of linear layers before the value in the forward.
        expected_error: relative RMS error that saving this value is expected to cause in gradients:
            the rounding error of the format times the amplification. 0 if the value is saved
            exactly.
    """

    name: str
    module: str
    op: str
    shape: str
    dtype: str
    saved_as: str
    bytes_exact: int
    bytes: int
    reason: str
    value: str
    place: int
    expected_error: float
    tensors: tuple[CrossingTensor, ...]

    @property
    def host_bytes(self) -> int:
        """Bytes saved in host memory."""
        return sum(t.bytes for t in self.tensors if t.on_host)

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a single number, such as a scale or a seed."""
        return self.shape == "scalar"

    @property
    def is_low_bit(self) -> bool:
        """Whether the value is saved in 8 bits or fewer. Saved operands of FP8 GEMMs count, too."""
        return bool(self.expected_error) or self.dtype.startswith("float8")


@dataclass(frozen=True)
class Linear:
    """One use of a linear layer in the forward.

    Attributes:
        fp8: the GEMMs that run in FP8: `forward`, `dgrad`, `wgrad`.
        reason: why the layer stays in high precision; else ''.
        slower: why some GEMMs stay in BF16 although the layer can run in FP8: the estimated time
            of their casts to FP8, and the time that FP8 would save in these GEMMs; else ''.
        chosen: whether the layer stays in high precision on purpose: because of an option such as
            `skip`, or because it is an output head or a router.
        routine: whether high precision needs no warning, because the user cannot change it, or
            because FP8 would not be faster, e.g. for an adapter of rank 8.
        simulated: the GEMMs that simulate a format. If there are any, `fp8` is empty.
        experts: number of experts if the layer has one weight per expert; else 0.
        fast: the GEMMs of `fp8` with fast accumulation.
        unfit: pairs of a GEMM in `fp8` and the reason why this GEMM has one scale per tensor
            instead of the scales that option `scales` requests.
        projection: `in_proj` or `out_proj` in an `nn.MultiheadAttention`; set by `explain`.
    """

    module: str
    rows: str
    in_features: int
    out_features: int
    fp8: tuple[str, ...]
    reason: str
    chosen: bool = False
    routine: bool = False
    simulated: tuple[str, ...] = ()
    experts: int = 0
    fast: tuple[str, ...] = ()
    unfit: tuple[tuple[str, str], ...] = ()
    slower: str = ""
    projection: str = ""

    @property
    def accumulation(self) -> str:
        """How FP8 GEMMs accumulate: `precise`, `fast` or `fast in ...`; '' without FP8 GEMMs."""
        if not self.fp8 or not self.fast:
            return "precise" if self.fp8 else ""
        return "fast" if self.fast == self.fp8 else f"fast in {' '.join(self.fast)}"

    @property
    def weights(self) -> int:
        """Number of elements of the weight, or of the weights of all experts."""
        return self.in_features * self.out_features * max(self.experts, 1)


@dataclass(frozen=True)
class Head:
    """An output head with its loss.

    Attributes:
        bytes: bytes of the logits that exist at once.
        chunks: number of chunks of tokens. Logits, loss and gradients are computed chunk by chunk.
        reason: why there is only one chunk; '' if there are several.
        can_chunk: whether the option `head_chunks` could split the head into chunks.
        avoidable_bytes: bytes that chunks would save in logits and their gradients if the model did
            not return its logits; 0 unless returned logits are the reason for a single chunk.
    """

    module: str
    shape: str
    bytes: int
    chunks: int
    reason: str
    can_chunk: bool = True
    avoidable_bytes: int = 0


@dataclass(frozen=True)
class Collective:
    """A collective in a graph.

    Attributes:
        module: path of the module that calls it, e.g. the parametrization of a gathered weight.
        shape: shape of the tensor that this rank sends.
        dtype: dtype of that tensor; `uint8` for FP8 data, which is sent as bytes.
        bytes: size of that tensor in bytes, counted once for any number of receivers.
        reason: why the tensor is not quantized; '' for FP8 data and scales.
    """

    module: str
    op: str
    half: str
    shape: str
    dtype: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class FrontierPoint:
    """The costs of the plan for a memory budget.

    Attributes:
        peak_bytes: estimated peak of the bytes alive during the backward, including gradients.
        seconds: time that recomputation and copies add to a step, compared with the plan without a
            budget; estimated by the roofline of one GPU (`hardware.py`).
        error: root mean square of the `expected_error` of all saved values.
    """

    bytes: int
    peak_bytes: int
    seconds: float
    error: float
    host_bytes: int = 0


@dataclass(frozen=True)
class Checkpointing:
    """The recomputation by `torch.utils.checkpoint`, and the bytes that would be saved without it.

    Attributes:
        products: number of GEMMs and attention operators of the forward that run twice.
        bytes_without: bytes that would be saved without checkpointing. None if not computed:
            computing it takes as long as planning.
        least_without: the smallest `memory_budget` that could be met without checkpointing. None
            if not computed.
    """

    products: int
    bytes_without: int | None = None
    least_without: int | None = None


@dataclass(frozen=True)
class RuleSummary:
    """The error rule of one non-linear region (section 4.1 of the paper AGoQ).

    Attributes:
        inputs: the values that enter the region and may be saved.
        operators: the operators of the region in the forward.
        case_1: upper bound of the amplification from all saved values to a gradient, if the inputs
            are saved and all other values of the region are recomputed.
        case_2: the same bound if the region's intermediate results are saved, too.
        bound: formula of the absolute error in case 1, for the gradient with the largest relative
            error.
        reason: why no rule could be derived, or ''.
    """

    module: str
    inputs: tuple[str, ...]
    operators: tuple[str, ...]
    case_1: float
    case_2: float
    bound: str
    reason: str


@dataclass
class Plan:
    """All decisions about one graph.

    Attributes:
        saved: the saved values, except parameters.
        stock_bytes: bytes that PyTorch's own partitioner would save; None if not computed.
        flops, fp8_flops: floating-point operations of all GEMMs, convolutions and attention, and of
            FP8 GEMMs alone; 0 if not computed.
        frontier: costs of the plans for other memory budgets, if requested.
        point: costs of this plan, if requested.
        least_bytes: the smallest budget that can be met, if requested.
        rules: the error rules, if requested.
        kernels: how the forward and the backward graph quantize matrices, if computed.
        merged: for each GEMM that `merge_dgrads` emitted, the module paths of the merged layers.
        merged_adapters: the same for each GEMM `x Aᵀ` that `merge_adapters` emitted.
        simulated: format that linear layers simulate, if any.
        emulated: why FP8 GEMMs multiply dequantized operands; '' if tensor cores multiply FP8 data.
        note: remark about the plan, for the log; '' if there is no remark.
    """

    linears: list[Linear] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    stock_bytes: int | None = None
    flops: float = 0.0
    fp8_flops: float = 0.0
    frontier: list[FrontierPoint] = field(default_factory=list)
    least_bytes: int | None = None
    point: FrontierPoint | None = None
    rules: list[RuleSummary] = field(default_factory=list)
    kernels: list[KernelUse] = field(default_factory=list)
    merged: list[tuple[str, ...]] = field(default_factory=list)
    merged_adapters: list[tuple[str, ...]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    checkpointing: Checkpointing | None = None
    simulated: str | None = None
    emulated: str = ""
    offload: Offload | None = None
    inference: bool = False
    note: str = ""

    @property
    def saved_bytes(self) -> int:
        """Bytes saved on the device for the backward, except parameters and leaves."""
        return sum(s.bytes for s in self.saved)

    @property
    def exact_bytes(self) -> int:
        """Bytes that the saved values would take if all of them were saved exactly."""
        return sum(s.bytes_exact for s in self.saved if s.bytes or s.host_bytes)

    @property
    def high_precision(self) -> list[Linear]:
        """The linear layers that stay in high precision."""
        return [linear for linear in self.linears if linear.reason]

    @property
    def unexpected(self) -> list[Linear]:
        """The layers in high precision that are neither `chosen` nor `routine`."""
        return [y for y in self.high_precision if not y.chosen and not y.routine]

    @property
    def unexpected_share(self) -> float:
        """The share of all weight elements in the layers of `unexpected`, from 0 to 1."""
        total = sum(y.weights for y in self.linears)
        return sum(y.weights for y in self.unexpected) / total if total else 0.0

    def make_dgrads_precise(self, modules: Collection[str]) -> None:
        """Record that the dgrads of `modules` no longer use fast accumulation."""
        self.linears = [
            replace(y, fast=tuple(r for r in y.fast if r != "dgrad")) if y.module in modules else y
            for y in self.linears
        ]

    def summary(self) -> str:
        """Return one line for the log."""
        rewritten = len(self.linears) - len(self.high_precision)
        slower = [y for y in self.linears if y.slower]
        partly = sum(bool(y.fp8) for y in slower)
        in_bf16 = len(slower) - partly
        format = f"simulated {self.simulated}" if self.simulated else "FP8"
        tensors = [s for s in self.saved if not s.is_scalar]
        low_bit = sum(1 for s in tensors if s.is_low_bit)
        smaller = self.saved_bytes < self.exact_bytes
        return (
            f"{rewritten} of {len(self.linears)} linear layers in {format}"
            + (f" ({partly} in part)" if partly else "")
            + (f", {in_bf16} in BF16 because FP8 is not faster" if in_bf16 else "")
            + f", {low_bit} of {len(tensors)} saved tensors in low-bit formats,"
            f" {bytes_text(self.saved_bytes)} saved for the backward"
            + (f" ({bytes_text(self.exact_bytes)} without low-bit formats)" if smaller else "")
            + (f", {bytes_text(self.offload.bytes)} in host memory" if self.offload else "")
            + (f"; GEMMs are emulated: {self.emulated}" if self.emulated else "")
            + "; inference" * self.inference
            + (f"; {self.note}" if self.note else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        totals = {"saved_bytes": self.saved_bytes, "exact_bytes": self.exact_bytes}
        return {**asdict(self), **totals, "host_bytes": self.offload.bytes if self.offload else 0}
