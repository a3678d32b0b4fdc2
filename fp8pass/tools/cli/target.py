"""Build the model given by TARGET, and the inputs to call it with."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fp8pass.config import FIELDS, LISTS, RECIPES, Config, configured
from fp8pass.option_checks import unknown
from fp8pass.tools.cli.parsing import UsageError, check_device, check_name, find_device, task

if TYPE_CHECKING:
    import torch

TARGET_HELP = """\
TARGET is one of
  package.module:build    a function without arguments, importable from here
  path/to/file.py:build   such a function in a file
  config.json             of a Hugging Face model, or its folder; random weights, no download
build returns a model, or a tuple of a model, its inputs and a loss_fn. Inputs are a tuple of
arguments, a dict of keyword arguments, or both in this order. loss_fn(model, batch) returns the
loss, as in fp8pass.diagnose, where batch holds the inputs. Inputs and loss_fn may be left out."""

_FORMS = "TARGET is module:function, file.py:function or a Hugging Face config.json"
_RETURNS = (
    "a model, (model, args), (model, kwargs) or (model, args, kwargs), with an optional loss_fn at "
    "the end"
)

FLOAT_NAMES = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPE_NAMES = (*FLOAT_NAMES, *INTEGERS, "bool")

_INPUT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?(?::(?P<below>\d+))?"
)


@dataclass(frozen=True)
class Target:
    """A model, the inputs to call it with, and its loss function."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Returns the loss for a model and a batch; None if the model itself returns the loss.
    loss_fn: Callable[[Any, Any], Any] | None = None
    # The inputs as TARGET returned them: a tensor, a tuple, a dict, or a tuple and a dict.
    batch: Any = None
    notes: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        """The original model, without the wrapper of `torch.compile`."""
        from fp8pass import compat

        return compat.original_of(self.model)

    def call(self, model: Any, batch: Any) -> Any:
        """Call `model` with a batch that has the structure of TARGET's own batch."""
        from torch import Tensor

        if self.args and self.kwargs:
            args, kwargs = batch
        else:
            args, kwargs = ((), batch) if self.kwargs else (batch, {})
        return model(*((args,) if isinstance(args, Tensor) else args), **kwargs)


def add_options(parser: argparse.ArgumentParser, *, runs: bool = True) -> None:
    """Add TARGET and its options, with `--device` if the command runs the model."""
    add = parser.add_argument
    repeatable = partial(add, action="append", default=[])
    add("target", metavar="TARGET", help="the model, see above")
    repeatable(
        "--input",
        type=parse_input,
        metavar="[NAME=]SHAPE[:DTYPE[:BELOW]]",
        help="a random input instead of the inputs of TARGET, such as 4x128:int64:32000 (integers "
        "below 32000), 4x128x256:bfloat16 (normal), x=4x256 (a keyword argument); may be repeated",
    )
    recipes = ", ".join(RECIPES)
    add("--recipe", help=f"one of {recipes} (default: the options of a compiled TARGET, or coat)")
    repeatable(
        "--option",
        type=option,
        metavar="KEY=VALUE",
        help="an option of fp8pass.Config; repeatable: memory_budget=0.6, skip=layers.0,lm_head",
    )
    if runs:
        add("--device", type=check_device, help="device of model and inputs: cpu, cuda, cuda:N")
    dtype = partial(check_name, "dtype", choices=FLOAT_NAMES)
    add("--dtype", type=dtype, help=f"dtype of model and inputs: {', '.join(FLOAT_NAMES)}")


def parse_config(options: argparse.Namespace) -> Config | None:
    """Return the configuration of `--recipe` and `--option`, if given.

    Raises:
        ConfigError: the recipe, an option or a value is invalid.
    """
    if not options.recipe and not options.option:
        return None
    recipe = {"recipe": options.recipe} if options.recipe else {}
    return configured({**recipe, **dict(options.option)})


def parse_beside(options: argparse.Namespace, config: Config) -> Config | None:
    """Return `config` with the options of `--beside`, if given.

    A recipe of `--beside` replaces the recipe of `config`, but not the options of `--option`.

    Raises:
        ConfigError: an option of `--beside` is invalid.
    """
    given = dict(options.beside)
    if not given:
        return None
    base = dict(options.option) if "recipe" in given else vars(config)
    return configured({**base, **given})


def option(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE`, an option of `fp8pass.Config`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as memory_budget=0.6")
    check_name("option", key, ("recipe", *FIELDS))
    if key in LISTS:
        return key, tuple(filter(None, value.split(",")))
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, math.inf if value == "inf" else value


@dataclass(frozen=True)
class Input:
    """A random tensor."""

    name: str  # of a keyword argument; empty for a positional argument
    shape: tuple[int, ...]
    dtype: str  # empty for the dtype of the model's parameters
    below: int  # exclusive upper bound of integers

    def tensor(self, device: torch.device, default_dtype: torch.dtype) -> torch.Tensor:
        """Return a random tensor: normal floats, or uniform integers or booleans."""
        import torch

        dtype = getattr(torch, self.dtype) if self.dtype else default_dtype
        if dtype.is_floating_point:
            return torch.randn(self.shape, dtype=dtype, device=device)
        below = 2 if dtype == torch.bool else self.below
        return torch.randint(below, self.shape, device=device).to(dtype)


def parse_input(text: str) -> Input:
    """Parse `[NAME=]SHAPE[:DTYPE[:BELOW]]`, such as `x=4x128x256:bfloat16`."""
    match = _INPUT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not [NAME=]SHAPE[:DTYPE[:BELOW]], such as 4x128:int64:32000 or "
            "x=4x128x256:bfloat16"
        )
    dtype, below = match["dtype"] or "", match["below"]
    if dtype:
        check_name("dtype", dtype, DTYPE_NAMES)
    if (dtype in INTEGERS) != bool(below):
        bound = "an upper bound"
        need = f"integers need {bound}" if dtype in INTEGERS else f"only integers have {bound}"
        raise argparse.ArgumentTypeError(f"{text!r}: {need}, such as 4x128:int64:32000")
    shape = tuple(int(size) for size in match["shape"].split("x"))
    return Input(match["name"] or "", shape, dtype, int(below or 0))


def load(options: argparse.Namespace) -> Target:
    """Build the model and its inputs, and check that the model accepts them.

    Commands without `--device` do not run the model: they get a Hugging Face model on the meta
    device.

    Raises:
        UsageError: TARGET or its inputs have the wrong form.
        Failure: the code of TARGET failed.
    """
    import torch

    torch.manual_seed(0)
    runs = hasattr(options, "device")
    device = find_device(options.device) if runs and options.device else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with task(f"building {options.target}", "--traceback shows where."):
        if _is_config(options.target):
            from fp8pass.tools.cli import huggingface

            default = find_device(None) if runs else torch.device("meta")
            config = huggingface.read(options.target)
            note = huggingface.note_dtype(config, dtype)  # before the model writes to the config
            model = huggingface.build(config, device or default, dtype)
            inputs = {} if options.input else huggingface.make_inputs(model)
            notes = (note, huggingface.note_inputs(model, inputs) if inputs else "")
            target = Target(model, kwargs=inputs, batch=inputs, notes=tuple(filter(None, notes)))
        else:
            target = _move(_unpack(build(options.target)), device, dtype)
        if options.input:
            target = _replace_inputs(target, options.input)
    _check_arguments(target)
    return target


def build(text: str) -> Any:
    """Import the object at `text`, such as `models:build`. Call it if it is not an `nn.Module`."""
    from torch import nn

    from fp8pass.tools.running import why_not_callable

    where, _, name = text.rpartition(":")
    if not where or not name:
        raise UsageError(f"{text!r} is not a TARGET: {_FORMS}.")
    _make_importable(Path.cwd())
    module = _load_file(Path(where)) if where.endswith(".py") else _import(where)
    try:
        found = attrgetter(name)(module)
    except AttributeError as error:
        names = [n for n, value in vars(module).items() if callable(value)]
        own = [n for n in names if getattr(module, n).__module__ == module.__name__]
        has = f"{where} has {', '.join(own[:8])}" if own else f"{where} has no functions"
        raise UsageError(f"{unknown('function', name, names)} {has}.") from error
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise UsageError(f"{text} is of type {type(found).__name__}. TARGET must name a function.")
    if problem := why_not_callable(found):
        raise UsageError(f"{text} must not require arguments: {problem}.")
    return found()


def _unpack(made: Any) -> Target:
    from torch import Tensor, nn

    from fp8pass.tools.running import why_not_callable

    model, *rest = made if isinstance(made, tuple) and made else (made,)
    loss_fn = rest.pop() if rest and callable(rest[-1]) else None
    batch = rest[0] if len(rest) == 1 else tuple(rest)
    kwargs = rest.pop() if rest and isinstance(rest[-1], Mapping) else {}
    args = rest.pop() if rest and isinstance(rest[-1], (tuple, list, Tensor)) else ()
    if rest or not isinstance(model, nn.Module):
        types = ", ".join(type(x).__name__ for x in (made if isinstance(made, tuple) else (made,)))
        raise UsageError(f"TARGET returned ({types}). It must return {_RETURNS}.")
    if loss_fn and why_not_callable(loss_fn, None, None):
        raise UsageError(
            "The loss_fn that TARGET returns must accept two arguments, the model and the batch, "
            "as in fp8pass.diagnose: lambda model, batch: model(*batch).square().mean()."
        )
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    return Target(model, args, dict(kwargs), loss_fn, batch)


def _move(target: Target, device: Any, dtype: Any) -> Target:
    import torch

    from fp8pass import compat

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype if x.is_floating_point() else None)

    inputs = (target.args, target.kwargs, target.batch)
    args, kwargs, batch = compat.tree_map_only(torch.Tensor, move, inputs)
    model = target.model.to(device, dtype)
    return replace(target, model=model, args=args, kwargs=kwargs, batch=batch)


def _replace_inputs(target: Target, inputs: list[Input]) -> Target:
    import torch

    parameters = list(target.model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    floats = (p.dtype for p in parameters if p.is_floating_point())
    dtype = next(floats, torch.get_default_dtype())
    tensors = [(x.name, x.tensor(device, dtype)) for x in inputs]
    args = tuple(x for name, x in tensors if not name)
    kwargs = {name: x for name, x in tensors if name}
    batch = (args, kwargs) if args and kwargs else kwargs or args
    return replace(target, args=args, kwargs=kwargs, batch=batch)


def _check_arguments(target: Target) -> None:
    from fp8pass.tools.running import why_not_callable

    forward = target.module.forward
    if problem := why_not_callable(forward, *target.args, **target.kwargs):
        takes = ", ".join(inspect.signature(forward).parameters) or "nothing"
        raise UsageError(
            f"The inputs do not fit the model, whose forward takes {takes}: {problem}. Return "
            "other inputs from TARGET, or describe inputs: --input 4x128:int64:32000, --input "
            "x=4x128x256:bfloat16."
        )


def _is_config(text: str) -> bool:
    """Whether TARGET is a Hugging Face config rather than Python code."""
    path = Path(text)
    if path.suffix == ".py":
        raise UsageError(f"{text} has no function name: write {text}:NAME.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"No config.json in the folder {text}. {_FORMS}.")
    if path.suffix == ".json" and not path.exists():
        raise UsageError(f"No file {text}. {_FORMS}.")
    return path.exists()


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is not a module. {_FORMS}.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports another module that does not exist
        nearby = [p.stem for p in Path.cwd().iterdir() if p.suffix == ".py" or p.is_dir()]
        message = unknown("module", error.name, nearby)
        raise UsageError(f"{message} Looked in {Path.cwd()} and in installed packages.") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"No file {str(path)!r}.")
    _make_importable(path.parent.resolve())
    spec = importlib.util.spec_from_file_location(f"_target_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # Dynamo looks up functions of the model here
    spec.loader.exec_module(module)
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
