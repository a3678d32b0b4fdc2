"""`Config`, the options of a compilation, and recipes, which are named sets of options."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast, get_args

from fp8pass.dialect.formats import FORMATS
from fp8pass.option_checks import (
    Check,
    ConfigError,
    check_choice,
    check_simulated_format,
    checked_budget,
    checked_calibration,
    checked_passes,
    checked_patterns,
    checked_subset,
    checked_switch,
    is_number,
    is_whole,
    must_be,
    one_of,
    parse_bytes,
    unknown,
)

# The valid values of some options, for type checkers. Tests compare these values with the tables in
# `dialect/formats.py`.
LinearFormat = Literal["e4m3", "e5m2", "exact"]
SaveFormat = Literal["e4m3", "e2m3", "e2m2", "e2m1", "none", "exact"]
Scales = Literal["rowwise", "tensorwise", "blockwise", "mx"]
AttentionOutput = Literal["exact", "e2m5"]
ScatterFormat = Literal["exact", "e4m3"]
Compiler = Literal["inductor", "eager"]
Gemm = Literal["forward", "dgrad", "wgrad"]
Fp8Gemms = Literal["where_faster", "all"]
CompactSaves = Literal["where_free", "all"]
Recipe = Literal["linear", "coat", "agoq", "block", "mxfp8", "exact"]

GEMMS: tuple[Gemm, ...] = get_args(Gemm)
# Arguments of `torch.compile` that users mistake for options.
ARGUMENTS = ("mode", "dynamic", "fullgraph")
# The options that are tuples of names.
LISTS = ("skip", "keep_exact", "fast_accumulation")

RECIPES: dict[Recipe, dict[str, Any]] = {
    # Only FP8 GEMMs, without low-bit saved tensors of other layers. The backward reuses operands
    # that the forward quantized, which requires one scale per tensor.
    "linear": {"save_format": "none", "scales": "tensorwise"},
    # FP8 GEMMs. Tensors that non-linear layers save are quantized in groups of 1×G (section 5.2 of
    # the paper COAT).
    "coat": {},
    # Like coat, but with 5 bits for saved tensors where the error rules allow 5 bits. The paper
    # AGoQ (section 4) saves 4 bits, which raises the loss by another 0.12% (docs/quality.md).
    "agoq": {"save_format": "e2m2"},
    # Like coat, with the blocks of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) in forward and
    # dgrad.
    "block": {"scales": "blockwise"},
    # Like coat, with the groups of the OCP Microscaling Formats (MXFP8) in all GEMMs. Most GPUs
    # emulate these GEMMs, so with `where_faster` no GEMM would run in FP8.
    "mxfp8": {"scales": "mx", "fp8_gemms": "all"},
    # All rewrites, with lossless formats. Results are bit-equal to results without fp8pass.
    "exact": {
        "forward_format": "exact",
        "gradient_format": "exact",
        "save_format": "exact",
        "head_chunks": 1,
    },
}

# For each value of `scales`: the GEMMs without tensor scales, the scales of their activations and
# gradients, and the scales of their weights. The text for scales is a block, followed by a key of
# `SCALE_FORMS` if the form is not the default.
OPERAND_SCALES: dict[Scales, tuple[tuple[Gemm, ...], str, str]] = {
    "tensorwise": ((), "", ""),
    "rowwise": (("forward",), "row", "row"),
    # On an H100, cuBLASLt's wgrad with blocks reaches 0.74 of its speed with tensor scales.
    "blockwise": (("forward", "dgrad"), "1×128 fp32", "128×128 fp32"),
    "mx": (GEMMS, "1×32 e8m0", "1×32 e8m0"),
}
OPERANDS: dict[Gemm, tuple[str, str]] = {
    "forward": ("input", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "input"),
}

# The values that other options may have together with `simulate`. With `simulate` the first value
# is the default.
WITH_SIMULATION: dict[str, tuple[str, ...]] = {
    "forward_format": ("exact",),
    "gradient_format": ("exact",),
    "save_format": ("none", "exact"),
    "attention_output": ("exact",),
}


# Name, mean and standard deviation of a tensor, as `fp8pass.calibrate` measures them.
ValueMoments = tuple[str, float, float]


# A pass that the user adds: `before` or `after`, the name of a pass of fp8pass, and the function.
AddedPass = tuple[str, str, Callable[..., None]]
# A shell-style pattern of module paths, or a function that takes a path and returns a bool.
Pattern = str | Callable[[str], bool]


@dataclass(frozen=True)
class Simulation:
    """A number format that linear layers simulate (section 3.2 of the paper FP8 and back).

    Operands and results of GEMMs are rounded to the format. The GEMMs themselves run in the model's
    precision.

    Attributes:
        format: `e8m3` or another ExMy of 1 to 8 exponent bits and 0 to 23 mantissa bits.
        gemms: the GEMMs that are simulated, out of `forward`, `dgrad` and `wgrad`.
        inner_clamp: whether nonzero magnitudes below the smallest normal number become that number.
        outer_clamp: whether finite magnitudes above the largest number become that number.

    Raises:
        ConfigError: an argument has a wrong value.
    """

    format: str
    gemms: tuple[Gemm, ...] = GEMMS
    inner_clamp: bool = True
    outer_clamp: bool = True

    def __post_init__(self) -> None:
        check_simulated_format(self.format)
        object.__setattr__(self, "gemms", checked_subset("gemms", self.gemms, GEMMS))
        for field in ("inner_clamp", "outer_clamp"):
            checked_switch(field, getattr(self, field))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one compilation. `Config()` is recipe `coat`.

    Attributes:
        forward_format: format of activations and weights in the GEMMs of linear layers: `e4m3`,
            `e5m2` or `exact`. Scales are computed from the values of the current step (papers COAT,
            section 5.2, and LLMQ, section 3).
        gradient_format: format of output gradients in the GEMMs of linear layers.
        scales: the elements that share a scale in the GEMMs of linear layers. `rowwise`: in the
            forward, one scale per token and per output feature, so that quantizing takes one pass
            over a tensor; in the backward, one scale per tensor. `tensorwise`: one scale per
            tensor. `blockwise`: in forward and dgrad, one scale per 1×128 elements of activations
            and gradients, and per 128×128 elements of weights (DeepSeek-V3, arXiv 2412.19437,
            section 3.3.2); in wgrad, one scale per tensor, which is faster and no less accurate.
            `mx`: one scale per 1×32 elements, in E8M0 (OCP Microscaling Formats). A GEMM whose
            sizes do not fit the blocks has one scale per tensor. Experts always have row scales in
            forward and dgrad, because PyTorch's grouped GEMM requires row scales.
        fp8_gemms: the GEMMs of linear layers and experts that run in FP8: `where_faster`, the GEMMs
            in which FP8 is estimated to save more time than the casts of the operands take, or
            `all`. On GPUs with unknown rates, and on a CPU, all these GEMMs run in FP8.
        fast_accumulation: the GEMMs, out of `forward`, `dgrad` and `wgrad`, that may use Hopper's
            fast accumulation. With fast accumulation the tensor cores keep a running sum of 14 bits
            over the whole contraction. Otherwise the running sum is added to an FP32 sum every 128
            products. Fast accumulation truncates sums, with a bias that grows with the length of
            the contraction. GEMMs with scales in blocks always accumulate precisely.
        longest_fast: largest length of a contraction with fast accumulation. A GEMM whose
            contraction has a dynamic length accumulates precisely. In the wgrad of experts the
            length is the average number of tokens per expert.
        save_format: smallest format of the tensors that non-linear layers save for backward, in
            groups of 1×`group_size`: `e4m3`, `e2m3`, `e2m2` or `e2m1`, of 8, 6, 5 and 4 bits. A
            tensor with too large an amplification gets a larger format or is saved exactly. `none`
            saves all these tensors exactly. `exact` does the same through the compiler's path for
            low-bit formats, for tests.
        compact_saves: the tensors that are saved in low-bit formats or recomputed. `where_free`: as
            many tensors as fit in the time that FP8 GEMMs save. `all`: all tensors that the error
            rules allow. With a `memory_budget`, on GPUs with unknown rates, and on a CPU, the value
            is `all`. If a GEMM must run in FP8, `where_free` has no time limit, but it leaves out
            tensors that save too few bytes to justify a kernel launch.
        attention_output: format in which the output of attention is saved for the backward:
            `exact`, or `e2m5` (8 bits after subtracting the mean over tokens, in groups of 1×32).
            The worst-case error of `e2m5` has no bound. In measurements, the errors of `e2m5` in
            gradients are less than half of the errors that FP8 linear layers add to the same
            gradients. q, k and v are saved exactly.
        scatter_format: format in which reduce-scatters of the graph (tensor parallel layers with
            sharded outputs, SimpleFSDP) send their terms: `exact`, or `e4m3` in groups of 128 with
            sums in FP32. Each rank's term is then rounded once.
        error_tolerance: largest relative error that one saved tensor may cause in a gradient, in
            the worst case and to first order. `inf` disables the error rules.
        calibration: means and standard deviations of tensors, from `fp8pass.calibrate`. The error
            rules use these values. For tensors without an entry the error rules assume unit
            variance.
        memory_budget: limit of the bytes that each graph saves, except parameters: a share of the
            bytes that the graph saves without a budget (a float up to 2), or a number of bytes
            (`"24GiB"`, an int). Tensors that do not fit are recomputed, even if this repeats GEMMs
            or attention. A budget that is larger than needed is spent on formats with more bits
            than `save_format`, up to `e4m3`. A share does not apply to graphs that save less than 4
            KiB.
        offload: whether tensors that do not fit in the budget may be saved in host memory, if
            copying them takes less time than recomputing them. The option has no effect without a
            budget.
        host_bandwidth: bytes per second of copies between GPU and host, in each direction; measured
            if None.
        group_size: number of consecutive elements of a saved tensor that share a scale; the COAT
            paper uses 16.
        skip: modules that stay in high precision: shell-style patterns of module paths, or a
            function that takes a path and returns a bool. A pattern matches a module and all
            modules below it, at any level: `"layers.0"`, `"*.down_proj"`. A single pattern may be
            passed without a tuple.
        keep_exact: shell-style patterns of tensors that the backward gets exactly: saved exactly,
            or recomputed from exact tensors. A pattern matches the name of a tensor, as `explain`
            and `calibrate` print it, or the path of the module that computes the tensor, as in
            `skip`.
        quantize_lm_head: whether the output head runs in FP8, too. The papers "FP8 and back" and
            "LLMQ" advise against FP8 in the output head.
        head_chunks: number of chunks into which the tokens are split in the output head and the
            loss. Forward and backward run chunk by chunk, so that the logits of all tokens never
            exist at once (section 3 of the paper LLMQ). None chooses the number by the sizes of the
            head's input; 1 disables chunking. The gradient of the head's weight is summed over
            chunks in the weight's dtype.
        return_logits: whether a model that returns logits alongside its loss, as models of Hugging
            Face do, returns their values during training. With False, the model returns NaN instead
            of the logits, and the output head can run in chunks.
        simulate: a format that linear layers simulate: a name such as `e8m3`, or a `Simulation`.
            With `simulate` no layer runs in FP8 and no tensor is saved in low-bit formats, as in
            recipe `exact`.
        compiler: `inductor`, or `eager` to run the rewritten graphs op by op, for debugging.
        passes: your own passes, each with a position: `("after", "quantize_linears", my_pass)` or
            `("before", ...)`. See "A pass from outside" in CONTRIBUTING.md.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or conflicts with another option. The
            message names the nearest valid choice.
    """

    forward_format: LinearFormat = "e4m3"
    gradient_format: LinearFormat = "e4m3"
    scales: Scales = "rowwise"
    fp8_gemms: Fp8Gemms = "where_faster"
    fast_accumulation: tuple[Gemm, ...] = GEMMS
    longest_fast: int = 4096
    save_format: SaveFormat = "e4m3"
    compact_saves: CompactSaves = "where_free"
    attention_output: AttentionOutput = "exact"
    scatter_format: ScatterFormat = "exact"
    error_tolerance: float = 1.0
    calibration: tuple[ValueMoments, ...] = ()
    memory_budget: float | int | str | None = None
    offload: bool = False
    host_bandwidth: float | None = None
    group_size: int = 128
    skip: Pattern | tuple[Pattern, ...] = ()
    keep_exact: str | tuple[str, ...] = ()
    quantize_lm_head: bool = False
    head_chunks: int | None = None
    return_logits: bool = True
    simulate: str | Simulation | None = None
    compiler: Compiler = "inductor"
    passes: tuple[AddedPass, ...] = ()

    def __new__(cls, *args: Any, **options: Any) -> Config:
        if args:
            recipe = args[0] if args[0] in RECIPES else "coat"
            raise ConfigError(
                f"Config takes only keyword arguments, got {args[0]!r}. To choose a recipe, write "
                f"Config.recipe({recipe!r})."
            )
        if "recipe" in options:
            name = options.pop("recipe")
            rest = "".join(f", {option}=..." for option in options)
            raise ConfigError(
                f"recipe is not an option of Config. Write Config.recipe({name!r}{rest}) instead "
                f"of Config(recipe={name!r}{rest})."
            )
        for name in options:
            _check_known(name)
        if options.get("simulate") is not None:
            _check_with_simulation(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field, check in OPTION_CHECKS.items():
            object.__setattr__(self, field, check(field, getattr(self, field)))
        if self.simulate is not None:
            for field, allowed in WITH_SIMULATION.items():
                object.__setattr__(self, field, allowed[0])
            if self.head_chunks is None:  # as in recipe `exact`: chunking reorders sums
                object.__setattr__(self, "head_chunks", 1)
        for conflicts, message in CONFLICTS:
            if conflicts(self):
                raise ConfigError(message.format_map(vars(self)))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError, because `torch.compile` got this object as its backend."""
        raise TypeError(
            "A Config is not a backend. Write torch.compile(model, "
            "backend=fp8pass.backend(config))."
        )

    @classmethod
    def recipe(cls, name: Recipe, /, **overrides: Any) -> Config:
        """Return the preset `name` (see `Recipe`) with some options changed.

        Raises:
            ConfigError: the recipe or an option is unknown, or a value is wrong.
        """
        check_choice("recipe", name, tuple(RECIPES))
        for field in overrides:
            _check_known(field)
        if (simulated := overrides.get("simulate")) is not None and name != "exact":
            raise ConfigError(
                f"simulate={simulated!r} excludes recipe {name!r}, because simulation does not use "
                "FP8 or low-bit formats. Leave the recipe out, or use recipe 'exact'."
            )
        return cls(**{**RECIPES[name], **overrides})

    @property
    def skip_patterns(self) -> tuple[Pattern, ...]:
        """The value of `skip`, which is always stored as a tuple."""
        return cast("tuple[Pattern, ...]", self.skip)

    @property
    def exact_patterns(self) -> tuple[str, ...]:
        """The value of `keep_exact`, which is always stored as a tuple."""
        return cast("tuple[str, ...]", self.keep_exact)

    @property
    def simulation(self) -> Simulation | None:
        """The value of `simulate`, which is always stored as a `Simulation` or None."""
        return cast("Simulation | None", self.simulate)

    def budget_bytes(self, unlimited: float) -> float:
        """Return the budget in bytes, for a graph that saves `unlimited` bytes without a budget."""
        budget = self.memory_budget
        if budget is None:
            return math.inf
        if isinstance(budget, str):
            return parse_bytes(budget)
        return budget * unlimited if isinstance(budget, float) else float(budget)

    @property
    def quantizes_linears(self) -> bool:
        """Whether GEMMs run in FP8. Recipe `exact` rewrites GEMMs without quantization."""
        return self.forward_format != "exact"

    @property
    def quantizations(self) -> dict[tuple[Gemm, str], str]:
        """For each GEMM and operand, the quantization as text, such as `e4m3 row`."""
        gemms, values, weights = OPERAND_SCALES[
            self.scales if self.quantizes_linears else "tensorwise"
        ]
        found = {}
        for gemm, operands in OPERANDS.items():
            for operand in operands:
                format = self.gradient_format if operand == "gradient" else self.forward_format
                block = weights if operand == "weight" else values
                found[gemm, operand] = f"{format} {block if gemm in gemms else 'tensor'}"
        return found

    def accumulates_fast(self, gemm: str, length: Any) -> bool:
        """Return whether an FP8 GEMM with tensor or row scales uses fast accumulation.

        Args:
            gemm: `forward`, `dgrad` or `wgrad`.
            length: the length of the GEMM's contraction, which may be symbolic.
        """
        allowed = self.quantizes_linears and gemm in self.fast_accumulation
        return allowed and isinstance(length, int) and length <= self.longest_fast

    @property
    def packs(self) -> bool:
        """Whether saved tensors may take less than a byte per element."""
        return self.save_format != "none" and FORMATS[self.save_format].packed


FIELDS = tuple(f.name for f in dataclasses.fields(Config))


def split_options(
    options: Mapping[str, Any], inductor_options: Iterable[str]
) -> tuple[Config, dict[str, Any]]:
    """Split `torch.compile(options=...)` into our `Config` and options for Inductor.

    Raises:
        ConfigError: an option belongs neither to `Config` nor to Inductor.
    """
    known = set(inductor_options)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in options.items():
        if key in FIELDS or key == "recipe":
            ours[key] = value
        elif (name := str(key).replace("-", "_")) in known:
            theirs[name] = value
        elif key in ARGUMENTS:
            raise ConfigError(
                f"{key!r} is an argument of torch.compile, not an option: torch.compile(model, "
                f"{key}=..., backend=fp8pass.backend(fp8pass.Config(...)))."
            )
        else:
            raise ConfigError(
                unknown("option", key, ("recipe", *FIELDS), also=known)
                + f" Options are: {', '.join(('recipe', *FIELDS))}, "
                "and the options of torch._inductor.config."
            )
    return configured(ours), theirs


def checked_config(config: Any, argument: str = "config") -> Config:
    """Return `config`, or the default `Config` if `config` is None.

    `argument` is the name of the argument that has the value `config`, for the message.

    Raises:
        TypeError: `config` is neither a `Config` nor None.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        recipe = config if isinstance(config, str) and config in RECIPES else "coat"
        raise TypeError(
            f"{argument} must be a fp8pass.Config, got {type(config).__name__}. To choose a "
            f"recipe, write {argument}=fp8pass.Config.recipe({recipe!r})."
        )
    return config


def configured(options: Mapping[str, Any]) -> Config:
    """Return the `Config` for a dict of options, which may contain `recipe`.

    The default recipe is `coat`, or `exact` with `simulate`.
    """
    default = "coat" if options.get("simulate") is None else "exact"
    fields = {name: value for name, value in options.items() if name != "recipe"}
    return Config.recipe(options.get("recipe", default), **fields)


def _checked_simulation(field: str, given: Any) -> Any:
    if isinstance(given, str):
        return Simulation(given)
    if given is None or isinstance(given, Simulation):
        return given
    raise ConfigError(f"{field} must be a format such as 'e8m3', or a Simulation, got {given!r}.")


OPTION_CHECKS: dict[str, Check] = {
    "forward_format": one_of(LinearFormat),
    "gradient_format": one_of(LinearFormat),
    "scales": one_of(Scales),
    "fp8_gemms": one_of(Fp8Gemms),
    "fast_accumulation": lambda field, x: checked_subset(field, x, GEMMS),
    "longest_fast": must_be(
        "a whole number (the longest contraction with fast accumulation), such as 4096",
        lambda x: is_whole(x) and x >= 0,
        hint=" To accumulate precisely in all GEMMs, set fast_accumulation=().",
    ),
    "save_format": one_of(SaveFormat),
    "compact_saves": one_of(CompactSaves),
    "attention_output": one_of(AttentionOutput),
    "scatter_format": one_of(ScatterFormat),
    "error_tolerance": must_be(
        "a positive number, or float('inf')", lambda x: is_number(x) and x > 0
    ),
    "calibration": checked_calibration,
    "memory_budget": checked_budget,
    "offload": checked_switch,
    "host_bandwidth": must_be(
        "a number of bytes per second, such as 25e9, or None to measure it",
        lambda x: x is None or (is_number(x) and 0 < x < math.inf),
    ),
    "group_size": must_be(
        "a positive multiple of 16, such as 128", lambda x: is_whole(x) and x > 0 and x % 16 == 0
    ),
    "skip": checked_patterns,
    "keep_exact": lambda field, x: checked_patterns(
        field, x, "tensor name or module path", functions=False
    ),
    "quantize_lm_head": checked_switch,
    "return_logits": checked_switch,
    "head_chunks": must_be(
        "a whole number of at least 1 (all tokens in one chunk), or None to choose by size",
        lambda x: x is None or (is_whole(x) and x >= 1),
    ),
    "simulate": _checked_simulation,
    "compiler": one_of(Compiler),
    "passes": checked_passes,
}

# Options that exclude each other: a condition, and the error message if the condition holds.
CONFLICTS: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (
        lambda c: c.attention_output != "exact" and c.save_format in ("none", "exact"),
        "attention_output={attention_output!r} saves a tensor in low-bit formats, but "
        "save_format={save_format!r} does not allow low-bit formats. Use a save_format of 8 bits "
        "or less.",
    ),
    (
        lambda c: (c.forward_format == "exact") != (c.gradient_format == "exact"),
        "forward_format={forward_format!r} and gradient_format={gradient_format!r} mix FP8 and "
        "high precision in one GEMM, which is not supported. Set both to FP8 formats, such as "
        "'e4m3', or both to 'exact'.",
    ),
    (
        lambda c: c.forward_format == c.gradient_format == "e5m2",
        "forward_format and gradient_format cannot both be 'e5m2': FP8 tensor cores take at most "
        "one E5M2 operand. Use forward_format='e4m3'.",
    ),
)


def _check_with_simulation(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option enables FP8 or low-bit formats together with `simulate`."""
    for field, allowed in WITH_SIMULATION.items():
        given = options.get(field, allowed[0])
        if given not in allowed:
            raise ConfigError(
                f"simulate={options['simulate']!r} excludes {field}={given!r}, because simulation "
                f"does not use FP8 or low-bit formats. Leave {field} out."
            )


def _check_known(option: str) -> None:
    if option not in FIELDS:
        listed = ", ".join(FIELDS)
        raise ConfigError(f"{unknown('option', option, FIELDS)} Options are: {listed}.")


def checks_are_on() -> bool:
    """Whether `FP8PASS_CHECK=1` enables checks of fp8pass's own code, as in the tests."""
    return os.environ.get("FP8PASS_CHECK", "0") != "0"


# The last sentence of messages about errors that only a bug of fp8pass can cause.
BUG = "This is a bug of fp8pass: please report it, with the output of fp8pass env."
