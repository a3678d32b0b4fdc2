"""Check the values of options. The error messages contain the nearest valid choice."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from fp8pass.dialect.formats import (
    EXPONENT_BITS,
    MANTISSA_BITS,
    SAVED_FORMATS,
    simulated_format,
)

# The largest `memory_budget` that is a share: the ratio of a plan's bytes with 8 bits for every
# tensor to its bytes with 4 bits for every tensor.
LARGEST_SHARE = SAVED_FORMATS[-1].bits / SAVED_FORMATS[0].bits


class ConfigError(ValueError):
    """A recipe or option is unknown, has a wrong value, or conflicts with another option.

    If a name is unknown, the message contains the nearest valid name.
    """


def unknown(what: str, got: object, choices: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return a message that `got` is unknown.

    The message contains the most similar name in `choices`, or else in `also`.
    """
    nearest = difflib.get_close_matches(str(got), list(choices), n=1) or difflib.get_close_matches(
        str(got), list(also), n=1, cutoff=0.8
    )
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown {what} {got!r}.{hint}"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return `value`. Raise ConfigError, with the nearest choice, if `value` is not a choice."""
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ConfigError(f"{unknown(name, value, choices)} {name} is one of {listed}.")
    return value


def parse_bytes(
    text: str, what: str = f"memory_budget must be a share, a number up to {LARGEST_SHARE}, or"
) -> float:
    """Return the number of bytes of a size such as `24GiB`, `512 MiB` or `1.5GB`.

    Raises:
        ConfigError: `text` is not a size. `what` begins the message.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?)B\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{what} a size such as '24GiB' or '800MB', got {text!r}.")
    exponent = " KMGT".index(match[2].upper() or " ")
    return float(match[1]) * float((1024 if match[3] else 1000) ** exponent)


def bytes_text(count: float, *, up: bool = False) -> str:
    """Format a number of bytes with about three digits, so that `parse_bytes` can read it.

    With `up` the number is never rounded down. The smallest possible memory budget is formatted
    with `up`, because a smaller budget could not be met.
    """
    units = ["B", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    if up:
        digits = 0 if count >= 100 else 1 if count >= 10 else 2
        count = math.ceil(count * 10**digits) / 10**digits
    return f"{count:.0f} {units[0]}" if count >= 100 else f"{count:.3g} {units[0]}"


# A function of the name and value of an option. It returns the value to store, or raises
# ConfigError.
Check = Callable[[str, Any], Any]


def must_be(what: str, fits: Callable[[Any], bool], hint: str = "") -> Check:
    """Return a check that raises ConfigError unless `fits(value)`; `what` names valid values."""

    def check(field: str, value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"{field} must be {what}, got {value!r}.{hint}")
        return value

    return check


def one_of(kind: Any) -> Check:
    """Return a check that raises ConfigError unless a value is one of the values of a `Literal`."""
    return lambda field, value: check_choice(field, value, get_args(kind))


def is_whole(value: object) -> bool:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a number that fits into a float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def checked_patterns(
    field: str, given: object, of: str = "module path", *, functions: bool = True
) -> tuple[Any, ...]:
    """Return a tuple of patterns, from one pattern or a sequence of patterns.

    Args:
        field: the option, for the message.
        given: the value of the option.
        of: what the patterns match, for the message.
        functions: whether a pattern may also be a function that takes a path and returns a bool.

    Raises:
        ConfigError: `given` contains an object that is not a pattern.
    """
    several = given if isinstance(given, (tuple, list)) else (given,)
    if all(isinstance(p, str) or (functions and _is_function(p)) for p in several):
        return tuple(several)
    function = ", or a function that takes a path and returns a bool" if functions else ""
    raise ConfigError(
        f"{field} must be a {of} pattern, or a tuple of them{function}, got {given!r}."
    )


def _is_function(given: object) -> bool:
    """Whether an object is a hashable callable that is neither a class nor an `nn.Module`."""
    is_module = isinstance(given, type) or hasattr(given, "forward")
    return callable(given) and not is_module and getattr(given, "__hash__", None) is not None


def checked_subset(field: str, given: Any, choices: Sequence[str]) -> tuple[Any, ...]:
    """Return the chosen names, in the order of `choices`. Raise ConfigError for other names."""
    if not isinstance(given, (tuple, list)) or not all(given):
        fix = f". Write {field}=({given!r},)" if given in choices else ""
        raise ConfigError(f"{field} must be a tuple with some of {choices}, got {given!r}{fix}.")
    for name in given:
        check_choice(field, name, choices)
    return tuple(name for name in choices if name in given)


def checked_calibration(field: str, given: Iterable[Any]) -> tuple[tuple[str, float, float], ...]:
    """Return the moments of tensors as a tuple. Raise ConfigError if a number is not finite."""
    try:
        found = tuple((str(name), float(mean), float(std)) for name, mean, std in given)
        if all(math.isfinite(mean) and 0 <= std < math.inf for _, mean, std in found):
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(
        f"{field} must be a tuple of (tensor name, mean, standard deviation) with finite numbers, "
        f"got {str(given)[:60]!r}. Pass the return value of fp8pass.calibrate."
    )


def checked_budget(field: str, budget: Any) -> Any:
    """Return a memory budget as a number, or as text with a unit, such as `24GiB`."""
    if isinstance(budget, str) and (share := re.fullmatch(r"\s*(\d*\.?\d+)\s*%\s*", budget)):
        budget = float(share[1]) / 100
    elif isinstance(budget, str) and re.fullmatch(r"\s*\d*\.\d+\s*", budget):
        budget = float(budget)
    size = parse_bytes(budget) if isinstance(budget, str) else budget
    if budget is not None and not (is_number(size) and size > 0):
        raise ConfigError(
            f"{field} must be positive and finite, got {budget!r}: give a share up to "
            f"{LARGEST_SHARE}, a number of bytes, or a size such as '24GiB'."
        )
    if isinstance(budget, float) and budget > LARGEST_SHARE:
        raise ConfigError(
            f"{field}={budget!r} is too large: a float is a share, up to {LARGEST_SHARE}. For "
            "bytes give an int, or a size such as '24GiB'."
        )
    return budget


def check_simulated_format(name: Any) -> None:
    """Raise ConfigError, with the nearest format, if `name` is not an ExMy format."""
    try:
        simulated_format(str(name))
    except ValueError:
        hint = ""
        if match := re.search(r"e(\d+)m(\d+)", str(name).lower()):
            limits = zip(match.groups(), (EXPONENT_BITS, MANTISSA_BITS), strict=True)
            exponent, mantissa = (min(max(int(x), low), high) for x, (low, high) in limits)
            hint = f" Did you mean 'e{exponent}m{mantissa}'?"
        raise ConfigError(
            "simulate must be a format of 1 to 8 exponent and 0 to 23 mantissa bits, such as "
            f"'e8m3', got {name!r}.{hint}"
        ) from None


def _is_added_pass(given: Any) -> bool:
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        return False
    return given[0] in ("before", "after") and callable(given[2]) and hasattr(given[2], "__name__")


def checked_passes(field: str, passes: Any) -> tuple[tuple[str, str, Callable[..., None]], ...]:
    """Return added passes as a tuple. Raise ConfigError if an entry is not a pass."""
    if not isinstance(passes, (tuple, list)) or not all(map(_is_added_pass, passes)):
        raise ConfigError(
            f"{field} must be a tuple of (position, name of a pass, function), such as "
            f"(('after', 'quantize_linears', my_pass),), got {passes!r}. The position is 'before' "
            "or 'after'."
        )
    return tuple((when, name, function) for when, name, function in passes)


checked_switch = must_be("a bool, True or False", lambda x: isinstance(x, bool))
