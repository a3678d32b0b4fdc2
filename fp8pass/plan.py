"""The plan as data: the GEMMs in FP8, the tensors kept for the backward, and the reasons."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fp8pass.config import bytes_text
from fp8pass.hardware import Work


@dataclass
class KernelUse:
    """How the matrices of one graph are quantized.

    Attributes:
        programs: programs that hand-written kernels run, by the kernel.
        launches: how often they are launched for that.
        generated: how many matrices Inductor's generated code quantizes instead, by the reason.
    """

    programs: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    generated: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor that crosses from forward to backward, on the host if so decided."""

    name: str
    dtype: str
    shape: str
    bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class HostCopy:
    """A tensor that is on the host between forward and backward.

    Attributes:
        module: path of the module that computes it.
        shape: as text.
        dtype: of what is copied.
        bytes: of that, once; they cross the link twice.
        made_s, sent_s: when it is made, and when the copy to the host is done, in seconds from the
            beginning of the forward, by the roofline.
        fetched_s, used_s: when its copy back begins, and when it is first used, in seconds from the
            beginning of the backward.
    """

    module: str
    shape: str
    dtype: str
    bytes: int
    made_s: float
    sent_s: float
    fetched_s: float
    used_s: float


@dataclass
class Offload:
    """What one graph keeps on the host.

    Attributes:
        copies: the tensors, in the order in which they are made.
        bandwidth: bytes a second that can be copied, each way.
        forward_s, backward_s: seconds that both halves compute, by the roofline.
        forward_wait_s, backward_wait_s: seconds that they wait for copies besides.
        in_flight_bytes: the most that is on its way at once and takes memory of the GPU, too.
    """

    bandwidth: float
    forward_s: float
    backward_s: float
    copies: list[HostCopy] = field(default_factory=list)
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    in_flight_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes on the host."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def link_s(self) -> float:
        """Seconds that the link is busy in a step, both ways together."""
        return 2 * self.bytes / self.bandwidth

    @property
    def wait_s(self) -> float:
        """Seconds of a step that nothing hides."""
        return self.forward_wait_s + self.backward_wait_s


@dataclass(frozen=True)
class SavedTensor:
    """One forward value that the backward uses, and how it is kept.

    Attributes:
        name: node of the joint graph.
        module: path of the module that computes it.
        op: operator that computes it.
        shape: as text, `8×2048×4096`; sizes that vary appear as symbols.
        dtype: of the value in the forward.
        kept_as: `exact`, or format and group, `e4m3 1×128`.
        bytes_exact: bytes of the value itself.
        bytes: bytes kept, scales included. 0 for what is held anyway: autograd keeps a leaf that
            requires a gradient alive whether or not we use it. What is on the host is not counted.
        reason: why it is kept this way.
        value: its name in `keep_exact` and `calibration`.
        place: how many of the graph's linear layers come before it in the forward.
        expected_error: root-mean-square relative error that gradients are expected to have because
            of this value: the rounding error of its format times how much the backward amplifies
            it. 0 for a value kept exactly.
        tensors: the tensors that cross.
    """

    name: str
    module: str
    op: str
    shape: str
    dtype: str
    kept_as: str
    bytes_exact: int
    bytes: int
    reason: str
    value: str
    place: int
    expected_error: float
    tensors: tuple[CrossingTensor, ...]

    @property
    def host_bytes(self) -> int:
        """Bytes kept on the host."""
        return sum(t.bytes for t in self.tensors if t.on_host)

    @property
    def is_scalar(self) -> bool:
        """Whether it is a single number: a scale, a seed."""
        return self.shape == "scalar"

    @property
    def is_low_bit(self) -> bool:
        """Whether it is saved in 8 bits or fewer, as a copy or as an operand of FP8 GEMMs."""
        return bool(self.expected_error) or self.dtype.startswith("float8")


@dataclass(frozen=True)
class Linear:
    """One use of a linear layer in the forward.

    Attributes:
        module: path of the module.
        rows: rows of the input, as text.
        in_features, out_features: sizes of the weight.
        fp8: the GEMMs that run in FP8, out of `forward`, `dgrad`, `wgrad`.
        reason: why it stays in high precision, '' where it does not.
        chosen: whether that was asked for, by a skip pattern or the default for output heads.
        routine: whether there is nothing to change or to gain, as for an adapter of rank 8.
        simulated: the GEMMs that compute in a simulated format, out of the same.
        experts: how many weights there are, of which each row meets one; 0 for a single weight.
        fast: the GEMMs of `fp8` with fast accumulation.
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

    @property
    def accumulation(self) -> str:
        """How the FP8 GEMMs accumulate: `precise`, `fast`, or `fast in` some; '' without any."""
        if not self.fp8 or not self.fast:
            return "precise" if self.fp8 else ""
        return "fast" if self.fast == self.fp8 else f"fast in {' '.join(self.fast)}"

    @property
    def weights(self) -> int:
        """Elements of the weight, or of all experts' weights."""
        return self.in_features * self.out_features * max(self.experts, 1)


@dataclass(frozen=True)
class Head:
    """An output head that has a loss behind it.

    Attributes:
        module: path of the module.
        shape: of its logits, of all tokens.
        bytes: of the logits that exist at once.
        chunks: how many parts of the tokens it computes logits, loss and gradients of, in turn.
        reason: why all at once, '' where it does not.
        can_chunk: whether its logits can be computed in chunks, if `head_chunks` asks for it.
    """

    module: str
    shape: str
    bytes: int
    chunks: int
    reason: str
    can_chunk: bool = True


@dataclass(frozen=True)
class Collective:
    """What ranks send each other at one place of a graph.

    Attributes:
        module: path of the module that asks for it; a parametrization, for a gathered weight.
        op: the collective.
        half: `forward` or `backward`.
        shape: of what this rank sends.
        dtype: of that; codes and the bytes that they are sent as are `uint8`.
        bytes: of that, once however many ranks get it.
        reason: why it does not send codes, '' where it does, or sends what codes are scaled by.
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
    """A plan that a memory budget would give.

    Attributes:
        bytes: kept for the backward.
        peak_bytes: the most that the backward holds at once, estimated, gradients included.
        seconds: that it adds to a step, by computing values again and by waiting for copies of the
            host, to that of the plan without a budget; estimated by the roofline of one GPU
            (`hardware.py`).
        error: root mean square of the gradient errors that the kept values are expected to cause.
        host_bytes: kept on the host besides.
    """

    bytes: int
    peak_bytes: int
    seconds: float
    error: float
    host_bytes: int = 0


@dataclass(frozen=True)
class Checkpointing:
    """What `torch.utils.checkpoint` has the backward compute again, with all that lies between.

    Attributes:
        products: matrix products of the forward that run twice.
        bytes_without: bytes that would be kept if nothing were checkpointed; None if that was not
            computed, which takes as long as the plan itself.
        least_without: the smallest `memory_budget` that could then be met.
    """

    products: int
    bytes_without: int | None = None
    least_without: int | None = None


@dataclass(frozen=True)
class RuleSummary:
    """The error rule of one non-linear region (AGoQ 4.1).

    Attributes:
        module: where the region begins.
        inputs: the values that enter it and may be stored.
        cached: the values that Case 2 stores besides.
        operators: those of the forward in it.
        case_1: amplification with the inputs stored and all else recomputed: at most so large is
            the relative error of a gradient per unit relative error of all that is stored.
        case_2: the same with the cached values stored and read, too.
        bound: formula of Case 1: the absolute error of the gradient whose relative one is largest.
        reason: why nothing could be derived, '' where it was.
    """

    module: str
    inputs: tuple[str, ...]
    cached: tuple[str, ...]
    operators: tuple[str, ...]
    case_1: float
    case_2: float
    bound: str
    reason: str


@dataclass
class Plan:
    """Everything decided about one graph.

    `saved_bytes` counts what the backward keeps besides parameters. Where that was asked for,
    `frontier` traces memory against time, `point` is where this plan lies, and `least_bytes` is the
    smallest budget that can be met; `rules` are the error rules that it follows; `merged` names the
    layers that share a GEMM for the gradient of their common input; `collectives` is what ranks
    send each other; `heads` are output heads with a loss behind them; `checkpointing` says what the
    user has computed again; `simulated` is the format that linear layers compute in as if there
    were hardware for it; `offload` is what is on the host, if anything; `inference` is true for a
    graph without a backward; `fp8_work` is what FP8 GEMMs compute, and the casts of their
    operands move. Where somebody observes: `stock_bytes` is
    what PyTorch's own partitioner would keep for the same graph, `flops` counts the operations of
    all GEMMs, convolutions and attention, `fp8_flops` those of FP8 GEMMs, and `kernels` has an
    entry for the forward and one for the backward.
    """

    linears: list[Linear] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    stock_bytes: int | None = None
    flops: float = 0.0
    fp8_flops: float = 0.0
    fp8_work: Work = field(default_factory=Work)
    frontier: list[FrontierPoint] = field(default_factory=list)
    least_bytes: int | None = None
    point: FrontierPoint | None = None
    rules: list[RuleSummary] = field(default_factory=list)
    kernels: list[KernelUse] = field(default_factory=list)
    merged: list[tuple[str, ...]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    checkpointing: Checkpointing | None = None
    simulated: str | None = None
    offload: Offload | None = None
    inference: bool = False
    note: str = ""

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward.

        Parameters, held inputs and what is on the host are not counted.
        """
        return sum(s.bytes for s in self.saved)

    @property
    def exact_bytes(self) -> int:
        """Bytes of the same values without low-bit formats."""
        return sum(s.bytes_exact for s in self.saved if s.bytes or s.host_bytes)

    @property
    def high_precision(self) -> list[Linear]:
        """The linear layers that stay in high precision."""
        return [linear for linear in self.linears if linear.reason]

    @property
    def unexpected(self) -> list[Linear]:
        """The linear layers that stay in high precision unasked, where the user can change it."""
        return [y for y in self.high_precision if not y.chosen and not y.routine]

    @property
    def unexpected_share(self) -> float:
        """Their share of all weights."""
        total = sum(y.weights for y in self.linears)
        return sum(y.weights for y in self.unexpected) / total if total else 0.0

    def accumulate_precisely(self, modules: Collection[str], role: str) -> None:
        """Record that a GEMM of some modules, which a pass changed, accumulates precisely."""
        self.linears = [
            replace(y, fast=tuple(r for r in y.fast if r != role)) if y.module in modules else y
            for y in self.linears
        ]

    def summary(self) -> str:
        """One line for the log."""
        rewritten = len(self.linears) - len(self.high_precision)
        format = f"simulated {self.simulated}" if self.simulated else "FP8"
        tensors = [s for s in self.saved if not s.is_scalar]
        low_bit = sum(1 for s in tensors if s.is_low_bit)
        smaller = self.saved_bytes < self.exact_bytes
        return (
            f"{rewritten} of {len(self.linears)} linear layers in {format}, {low_bit} of"
            f" {len(tensors)} saved tensors in low bits, {bytes_text(self.saved_bytes)} kept"
            " for the backward"
            + (f" instead of {bytes_text(self.exact_bytes)}" if smaller else "")
            + (f", {bytes_text(self.offload.bytes)} on the host" if self.offload else "")
            + "; inference" * self.inference
            + (f"; {self.note}" if self.note else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
        totals = {"saved_bytes": self.saved_bytes, "exact_bytes": self.exact_bytes}
        return {**asdict(self), **totals, "host_bytes": self.offload.bytes if self.offload else 0}
