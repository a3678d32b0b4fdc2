"""The choices of a user: a frozen, validated `Config` and its named presets, the recipes."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8pass.dialect.formats import (
    EXPONENT_BITS,
    FORMATS,
    MANTISSA_BITS,
    SAVED_FORMATS,
    simulated_format,
)

LINEAR_FORMATS = (*(f.name for f in FORMATS.values() if f.multiplies), "exact")
SCALES = ("rowwise", "tensorwise")
SAVE_FORMATS = (*(f.name for f in reversed(SAVED_FORMATS)), "none", "exact")
ATTENTION_OUTPUTS = ("exact", "e2m5")
COMPILERS = ("inductor", "eager")
GEMMS = ("forward", "dgrad", "wgrad")
# The largest share of its own plan that a budget is of use for: all saved values in 8 bits for 4.
MOST_SHARE = SAVED_FORMATS[-1].bits / SAVED_FORMATS[0].bits
# Arguments of `torch.compile` that look like options.
ARGUMENTS = ("mode", "dynamic", "fullgraph")
# The options that are tuples of names.
LISTS = ("skip", "keep_exact", "simulate_gemms", "fast_accumulation")

RECIPES: dict[str, dict[str, Any]] = {
    # FP8 GEMMs only: every other saved value is kept as it is. GEMMs keep their operands'
    # codes for the backward, which therefore need the backward's scale.
    "linear": {"save_format": "none", "forward_scales": "tensorwise"},
    # FP8 GEMMs, and the saved values of non-linear layers in 1×G groups (COAT section 5.2).
    "coat": {},
    # As coat, but in 4 bits where the error rules allow that (AGoQ section 4).
    "agoq": {"save_format": "e2m1"},
    # The whole rewrite with lossless formats: bit-equal to the model without fp8pass.
    "exact": {
        "forward_format": "exact",
        "gradient_format": "exact",
        "save_format": "exact",
        "head_chunks": 1,
    },
}

# What `simulate` leaves of the choices about codes: there are none.
SIMULATED: dict[str, tuple[str, ...]] = {
    "forward_format": ("exact",),
    "gradient_format": ("exact",),
    "save_format": ("none", "exact"),
    "attention_output": ("exact",),
}


# Name, mean and standard deviation of a value, as `fp8pass.calibrate` measures them.
ValueMoments = tuple[str, float, float]


class ConfigError(ValueError):
    """A recipe, option or value that does not exist; the message names the nearest that does."""


# A pass of the user: `before` or `after`, the name of one of our passes, and the function.
AddedPass = tuple[str, str, Callable[..., None]]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The choices of one compilation. `Config()` is recipe `coat`.

    Attributes:
        forward_format: format of activations and weights in the GEMMs of linear layers, one of
            `e4m3`, `e5m2`, `exact`. Scales are made just in time (COAT 5.2, LLMQ 3).
        gradient_format: format of output gradients in those GEMMs.
        forward_scales: `rowwise`, one scale for each token and each output feature in the GEMMs of the
            forward, which take one pass over a tensor to quantize it, and round it less; or
            `tensorwise`. GEMMs of the backward have one scale for each tensor. Those of experts have
            scales by row in forward and dgrad whatever this says: PyTorch's kernel takes no others.
        fast_accumulation: the roles of FP8 GEMMs, out of `forward`, `dgrad` and `wgrad`, that may
            use Hopper's fast accumulation: the tensor cores keep a running sum of 14 bits over the
            whole contraction, instead of adding it to an FP32 sum after 128 products. Truncation
            has a bias, which grows with the length of the contraction.
        longest_fast: the longest contraction with fast accumulation. A GEMM whose length is dynamic
            accumulates precisely; experts' wgrad counts the tokens of an average expert.
        save_format: smallest format of the values that non-linear layers keep for the backward,
            in 1×`group_size` groups: `e4m3`, `e2m3`, `e2m2` or `e2m1`, of 8, 6, 5 and 4 bits.
            Values that amplify its errors too much get a larger one or stay as they are. `none`
            keeps all as they are. `exact` quantizes nothing but takes the same path through the
            compiler, to test it.
        attention_output: how the output of attention is kept, of which its backward needs row sums:
            `exact`, or in 8 bits as `e2m5`, less its mean over tokens, in 1×32 groups. The worst
            case is not bounded then; measured errors are less than half of what FP8 linear layers
            add to the same gradients. q, k and v stay exact.
        error_tolerance: how large the relative error of a gradient may get through one stored value, in
            the worst case and to first order. `inf` switches the error rules off.
        calibration: means and standard deviations of values, from `fp8pass.calibrate`, for the error
            rules; they assume unit variance elsewhere.
        memory_budget: how much the backward may keep of each graph, besides parameters: a share of
            its plan without a budget (a float up to 2), or bytes (`"24GiB"`, an int). Values that
            do not fit are computed again, GEMMs and attention included; a graph of less than 4 KiB
            keeps all whatever its share. What a larger budget leaves over is spent on formats of
            more bits than `save_format`, up to `e4m3`.
        offload: whether values that do not fit may be kept in the memory of the host instead, where
            copying them there and back, beside the step, takes less time than computing them again.
            Without a budget, or within one that they fit, nothing is.
        host_bandwidth: bytes a second that can be copied each way between host and device. None
            measures it.
        group_size: elements that share one scale in a saved value; COAT's paper uses 16.
        skip: shell-style patterns of module paths that stay in high precision. A pattern matches
            a module and all below it, from any level: `"layers.0"`, `"*.down_proj"`. One may stand
            by itself, without a tuple.
        keep_exact: shell-style patterns of values that the backward gets exactly: kept as they are
            or computed again from exact values. A pattern matches a value's name, as `explain`
            and `calibrate` give it, or the module that computes it, as in `skip`.
        quantize_lm_head: also run the output head in FP8 (FP8 and back, LLMQ: better not).
        head_chunks: how many parts of the tokens the output head and the loss take in turn, forward
            and backward, so that no logits of all tokens exist (LLMQ 3). None chooses; 1 is all at
            once. The gradient of the head's weight is added up over them in the weight's dtype.
        simulate: a format ExMy, `e8m3`, of 1 to 8 exponent and 0 to 23 mantissa bits, that linear
            layers, output heads among them, compute in as if a GPU had it (FP8 and back 3.2):
            operands and results of their GEMMs are masked to it, and the GEMMs run in the model's
            own precision. Nothing runs in FP8 or is kept in low bits, as in recipe `exact`.
        simulate_gemms: those of `forward`, `dgrad` and `wgrad` that are masked.
        simulate_inner: whether magnitudes below the smallest normal number of the simulated format
            become that number; zeros stay.
        simulate_outer: whether finite magnitudes beyond its largest number become that.
        compiler: `inductor`, or `eager` to run the rewritten graphs op by op (for debugging).
        passes: passes of your own, each with its position: `("after", "quantize_linears", my_pass)`
            or `("before", ...)`. See "A pass from outside" in CONTRIBUTING.md.
    """

    forward_format: str = "e4m3"
    gradient_format: str = "e4m3"
    forward_scales: str = "rowwise"
    fast_accumulation: tuple[str, ...] = GEMMS
    longest_fast: int = 4096
    save_format: str = "e4m3"
    attention_output: str = "exact"
    error_tolerance: float = 1.0
    calibration: tuple[ValueMoments, ...] = ()
    memory_budget: float | int | str | None = None
    offload: bool = False
    host_bandwidth: float | None = None
    group_size: int = 128
    skip: tuple[str, ...] = ()
    keep_exact: tuple[str, ...] = ()
    quantize_lm_head: bool = False
    head_chunks: int | None = None
    simulate: str | None = None
    simulate_gemms: tuple[str, ...] = GEMMS
    simulate_inner: bool = True
    simulate_outer: bool = True
    compiler: str = "inductor"
    passes: tuple[AddedPass, ...] = ()

    def __new__(cls, *args: Any, **options: Any) -> Config:
        """A configuration to be filled; an unknown option is an error that names the nearest."""
        if args:
            recipe = args[0] if args[0] in RECIPES else "coat"
            raise ConfigError(
                f"Config takes options by name, got {args[0]!r}. For a recipe write "
                f"Config.recipe({recipe!r})."
            )
        if "recipe" in options:
            name = options.pop("recipe")
            rest = "".join(f", {option}=..." for option in options)
            raise ConfigError(
                f"For a recipe write Config.recipe({name!r}{rest}) in place of "
                f"Config(recipe={name!r}{rest})."
            )
        for name in options:
            _check_known(name)
        if options.get("simulate") is not None:
            _check_simulated_alone(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field, check in CHECKS.items():
            object.__setattr__(self, field, check(field, getattr(self, field)))
        if self.simulate is not None:
            for field, allowed in SIMULATED.items():
                object.__setattr__(self, field, allowed[0])
            if self.head_chunks is None:  # as recipe `exact`: chunks would change sums
                object.__setattr__(self, "head_chunks", 1)
        for conflicts, message in CONFLICTS:
            if conflicts(self):
                raise ConfigError(message.format_map(vars(self)))

    @classmethod
    def recipe(cls, name: str, /, **overrides: Any) -> Config:
        """The preset `name` (`linear`, `coat`, `agoq`, `exact`) with single fields changed.

        Raises:
            ConfigError: unknown recipe or field, or a value that the field does not take.
        """
        check_choice("recipe", name, tuple(RECIPES))
        for field in overrides:
            _check_known(field)
        if (simulated := overrides.get("simulate")) is not None and name != "exact":
            raise ConfigError(
                f"simulate={simulated!r} runs nothing in FP8 and keeps nothing in low bits, which "
                f"is what recipe {name!r} is for: leave the recipe out, or say recipe 'exact'."
            )
        return cls(**{**RECIPES[name], **overrides})

    def budget_bytes(self, unlimited: float) -> float:
        """The budget of a graph that would keep `unlimited` bytes without one."""
        budget = self.memory_budget
        if budget is None:
            return math.inf
        if isinstance(budget, str):
            return parse_bytes(budget)
        return budget * unlimited if isinstance(budget, float) else float(budget)

    @property
    def quantizes_linears(self) -> bool:
        """Whether GEMMs run in FP8 (False in recipe `exact`, which only rewrites them)."""
        return self.forward_format != "exact"

    @property
    def quantizations(self) -> dict[tuple[str, str], str]:
        """The quantization of each operand of each GEMM, as text; keys are role and operand."""
        forward, gradient = f"{self.forward_format} tensor", f"{self.gradient_format} tensor"
        by_row = self.quantizes_linears and self.forward_scales == "rowwise"
        block = "row" if by_row else "tensor"
        return {
            ("forward", "input"): f"{self.forward_format} {block}",
            ("forward", "weight"): f"{self.forward_format} {block}",
            ("dgrad", "gradient"): gradient,
            ("dgrad", "weight"): forward,
            ("wgrad", "gradient"): gradient,
            ("wgrad", "input"): forward,
        }

    def accumulates_fast(self, gemm: str, length: Any) -> bool:
        """Whether an FP8 GEMM uses fast accumulation.

        `gemm` is its role, one of `GEMMS`, `length` that of its contraction, which may be symbolic.
        """
        allowed = self.quantizes_linears and gemm in self.fast_accumulation
        return allowed and isinstance(length, int) and length <= self.longest_fast

    @property
    def packs(self) -> bool:
        """Whether saved values may take less than a byte each."""
        return self.save_format != "none" and FORMATS[self.save_format].packed


FIELDS = tuple(f.name for f in dataclasses.fields(Config))


def split_options(
    options: Mapping[str, Any], inductor_options: Iterable[str]
) -> tuple[Config, dict[str, Any]]:
    """Split `torch.compile(options=...)` into our `Config` and options for Inductor.

    Raises:
        ConfigError: an option that neither knows.
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
                + " Options of fp8pass: "
                + ", ".join(("recipe", *FIELDS))
                + "; those of torch._inductor.config pass through."
            )
    return configured(ours), theirs


def checked_config(config: Any, argument: str = "config") -> Config:
    """A configuration that an argument gives, the default one if it gives none.

    Raises:
        TypeError: it gives something else.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        recipe = config if isinstance(config, str) and config in RECIPES else "coat"
        raise TypeError(
            f"{argument} must be a fp8pass.Config, got {type(config).__name__}. For a recipe by "
            f"name: {argument}=fp8pass.Config.recipe({recipe!r})."
        )
    return config


def configured(options: Mapping[str, Any]) -> Config:
    """The configuration of options that may name a recipe, `coat` unless they simulate a format."""
    default = "coat" if options.get("simulate") is None else "exact"
    fields = {name: value for name, value in options.items() if name != "recipe"}
    return Config.recipe(options.get("recipe", default), **fields)


def parse_bytes(
    text: str, what: str = f"memory_budget must be a share up to {MOST_SHARE} (a number), or"
) -> float:
    """A size as `24GiB`, `512 MiB` or `1.5GB`, in bytes; `what` begins the message of an error.

    Raises:
        ConfigError: it is not one.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?)B\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{what} a size such as '24GiB' or '800MB', got {text!r}.")
    exponent = " KMGT".index(match[2].upper() or " ")
    return float(match[1]) * float((1024 if match[3] else 1000) ** exponent)


def bytes_text(count: float) -> str:
    """A number of bytes as `parse_bytes` reads it, with about three significant digits."""
    units = ["B", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.0f} {units[0]}" if count >= 100 else f"{count:.3g} {units[0]}"


# A check gets an option's name and value. It returns the value to store, or raises ConfigError.
Check = Callable[[str, Any], Any]


def _must_be(what: str, fits: Callable[[Any], bool], hint: str = "") -> Check:
    """Return a check that a value `fits`."""

    def check(field: str, value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"{field} must be {what}, got {value!r}.{hint}")
        return value

    return check


def _one_of(choices: Sequence[str]) -> Check:
    return lambda field, value: check_choice(field, value, choices)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def checked_patterns(field: str, given: object, of: str = "module path") -> tuple[str, ...]:
    """Return the patterns that an option was given, one or several, as a tuple.

    Raises:
        ConfigError: they are not text. The message names the option and what they are patterns of.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given, (tuple, list)) and all(isinstance(p, str) for p in given):
        return tuple(given)
    raise ConfigError(f"{field} must be a {of} pattern, or a tuple of them, got {given!r}.")


def _checked_gemms(field: str, gemms: Any) -> tuple[str, ...]:
    """Return the GEMMs that an option names, in the order of `GEMMS`."""
    if isinstance(gemms, str) or not isinstance(gemms, Iterable) or not all(gemms):
        fix = f": {field}=({gemms!r},)" if gemms in GEMMS else ""
        raise ConfigError(f"{field} must be a tuple out of {GEMMS}, got {gemms!r}{fix}.")
    for gemm in gemms:
        check_choice(field, gemm, GEMMS)
    return tuple(g for g in GEMMS if g in gemms)


def _checked_moments(field: str, given: Iterable[Any]) -> tuple[ValueMoments, ...]:
    try:
        found = tuple((str(name), float(mean), float(std)) for name, mean, std in given)
        if all(math.isfinite(mean) and 0 <= std < math.inf for _, mean, std in found):
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(
        f"{field} must be a tuple of (value name, mean, standard deviation), with finite numbers: "
        f"pass what fp8pass.calibrate returns. Got {str(given)[:60]!r}."
    )


def _checked_budget(field: str, budget: Any) -> Any:
    size = parse_bytes(budget) if isinstance(budget, str) else budget
    if budget is not None and not (_is_number(size) and size > 0):
        raise ConfigError(
            f"{field} must be positive and finite, got {budget!r}: it is a share up to "
            f"{MOST_SHARE}, a number of bytes, or a size such as '24GiB'."
        )
    if isinstance(budget, float) and budget > MOST_SHARE:
        raise ConfigError(
            f"{field}={budget!r}: a float is a share, up to {MOST_SHARE}; for bytes give an int or "
            "a size such as '24GiB'."
        )
    return budget


def _checked_simulated(field: str, name: Any) -> Any:
    try:
        if name is not None:
            simulated_format(str(name))
    except ValueError:
        hint = ""
        if match := re.search(r"e(\d+)m(\d+)", str(name).lower()):
            limits = zip(match.groups(), (EXPONENT_BITS, MANTISSA_BITS), strict=True)
            exponent, mantissa = (min(max(int(x), low), high) for x, (low, high) in limits)
            hint = f" Did you mean 'e{exponent}m{mantissa}'?"
        raise ConfigError(
            f"{field} must be a format of 1 to 8 exponent and 0 to 23 mantissa bits, such as "
            f"'e8m3', got {name!r}.{hint}"
        ) from None
    return name


def _is_added_pass(given: Any) -> bool:
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        return False
    return given[0] in ("before", "after") and callable(given[2]) and hasattr(given[2], "__name__")


def _checked_passes(field: str, passes: Any) -> tuple[AddedPass, ...]:
    if not isinstance(passes, (tuple, list)) or not all(map(_is_added_pass, passes)):
        raise ConfigError(
            f"{field} must be a tuple of functions with positions, such as (('after', "
            f"'quantize_linears', my_pass),) or (('before', ...),), got {passes!r}."
        )
    return tuple((when, name, function) for when, name, function in passes)


_switch = _must_be("a bool, True or False", lambda x: isinstance(x, bool))

CHECKS: dict[str, Check] = {
    **dict.fromkeys(("forward_format", "gradient_format"), _one_of(LINEAR_FORMATS)),
    **dict.fromkeys(("offload", "quantize_lm_head", "simulate_inner", "simulate_outer"), _switch),
    **dict.fromkeys(("fast_accumulation", "simulate_gemms"), _checked_gemms),
    "forward_scales": _one_of(SCALES),
    "longest_fast": _must_be(
        "a whole number, the length of a contraction, such as 4096",
        lambda x: _is_whole(x) and x >= 0,
        hint=" For precise accumulation everywhere: fast_accumulation=().",
    ),
    "save_format": _one_of(SAVE_FORMATS),
    "attention_output": _one_of(ATTENTION_OUTPUTS),
    "error_tolerance": _must_be(
        "a positive number, or float('inf')", lambda x: _is_number(x) and x > 0
    ),
    "calibration": _checked_moments,
    "memory_budget": _checked_budget,
    "host_bandwidth": _must_be(
        "a number of bytes a second, such as 25e9, or None to measure it",
        lambda x: x is None or (_is_number(x) and 0 < x < math.inf),
    ),
    "group_size": _must_be(
        "a positive multiple of 16, such as 128", lambda x: _is_whole(x) and x > 0 and x % 16 == 0
    ),
    "skip": checked_patterns,
    "keep_exact": lambda field, x: checked_patterns(field, x, "value name or module path"),
    "head_chunks": _must_be(
        "a whole number of at least 1 (all tokens at once), or None to choose it by size",
        lambda x: x is None or (_is_whole(x) and x >= 1),
    ),
    "simulate": _checked_simulated,
    "compiler": _one_of(COMPILERS),
    "passes": _checked_passes,
}

# Options that exclude each other: a condition, and the message where it holds.
CONFLICTS: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (
        lambda c: c.attention_output != "exact" and c.save_format in ("none", "exact"),
        "attention_output={attention_output!r} saves a value in low bits, which "
        "save_format={save_format!r} excludes: give a save_format of 8 bits or less.",
    ),
    (
        lambda c: (c.forward_format == "exact") != (c.gradient_format == "exact"),
        "forward_format={forward_format!r} and gradient_format={gradient_format!r}: one matrix "
        "product cannot mix FP8 and high precision. Give an FP8 format for both, such as 'e4m3', "
        "or 'exact' for both.",
    ),
    (
        lambda c: c.forward_format == c.gradient_format == "e5m2",
        "forward_format and gradient_format cannot both be 'e5m2': FP8 tensor cores take at most "
        "one E5M2 operand. Use forward_format='e4m3'.",
    ),
)


def _check_simulated_alone(options: Mapping[str, Any]) -> None:
    """Check that no option besides `simulate` asks for codes."""
    for field, allowed in SIMULATED.items():
        given = options.get(field, allowed[0])
        if given not in allowed:
            raise ConfigError(
                f"simulate={options['simulate']!r} rounds what linear layers compute with, runs "
                f"nothing in FP8 and keeps nothing in low bits: {field} has no effect beside it. "
                f"Leave {field}={given!r} out."
            )


def _is_number(value: object) -> bool:
    """Whether a value is a number, and none too large for a float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _check_known(option: str) -> None:
    if option not in FIELDS:
        listed = ", ".join(FIELDS)
        raise ConfigError(f"{unknown('option', option, FIELDS)} Options are: {listed}.")


def checks_are_on() -> bool:
    """Whether `FP8PASS_CHECK=1` asks for checks of our own code. The tests set it."""
    return os.environ.get("FP8PASS_CHECK", "0") != "0"


# Ends the message of an error that no user can cause.
BUG = "This is a bug of fp8pass: please report it, with the output of fp8pass env."


def unknown(what: str, got: object, choices: Iterable[str], also: Iterable[str] = ()) -> str:
    """An error message for `got` that names the nearest of `choices`, then of `also`."""
    nearest = difflib.get_close_matches(str(got), list(choices), n=1) or difflib.get_close_matches(
        str(got), list(also), n=1, cutoff=0.8
    )
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown {what} {got!r}.{hint}"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return `value`. Raise ConfigError, with the nearest choice, if it is not in `choices`."""
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ConfigError(f"{unknown(name, value, choices)} {name} is one of {listed}.")
    return value
