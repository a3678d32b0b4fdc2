"""TARGET: the model of a command, and the arguments that it is called with."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8pass.config import LISTS, RECIPES, Config, ConfigError, configured, unknown
from fp8pass.tools.cli.inputs import FLOATS, Input, dtype_name, parse_input
from fp8pass.tools.cli.parsing import UsageError, device_name, device_of
from fp8pass.tools.cli.tasks import task

DESCRIPTION = """\
TARGET is one of
  package.module:build    a function without arguments, importable from here
  path/to/file.py:build   the same in a file
  config.json             of a Hugging Face model, or its folder; random weights, no download
and build returns a model, or a tuple of the model, its inputs (a tuple of arguments, a dict of
keyword arguments, or both in this order) and loss_fn(model, batch), where batch is the inputs as
returned: what fp8pass.diagnose, bisect and calibrate take."""

_FORMS = "TARGET is module:function, file.py:function or a Hugging Face config.json"
_RETURNS = "a model, (model, args), (model, kwargs) or (model, args, kwargs), and loss_fn last"


@dataclass(frozen=True)
class Target:
    """A model, the arguments to call it with, and what its loss is computed by.

    Attributes:
        loss_fn: gives the loss of model and batch; None for models that return it.
        batch: the arguments as TARGET returned them: a tensor, a tuple, a dict, or both.
        note: what to know of the model, as a sentence; '' if there is nothing.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any, Any], Any] | None = None
    batch: Any = None
    note: str = ""

    @property
    def module(self) -> Any:
        """The model without `torch.compile` around it."""
        from fp8pass import compat

        return compat.original_of(self.model)

    def call(self, model: Any, batch: Any) -> Any:
        """What a model returns for a batch that is made up as that of TARGET is."""
        from torch import Tensor

        if self.args and self.kwargs:
            args, kwargs = batch
        else:
            args, kwargs = ((), batch) if self.kwargs else (batch, {})
        return model(*((args,) if isinstance(args, Tensor) else args), **kwargs)


def add_options(parser: argparse.ArgumentParser, *, runs: bool = True) -> None:
    """Add TARGET to a parser, and the options for its inputs and its configuration.

    Args:
        parser: of a command.
        runs: whether the command runs the model, on a device.
    """
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model, see above")
    add(
        "--input",
        action="append",
        default=[],
        type=parse_input,
        metavar="[NAME=]SHAPE[:DTYPE[:BELOW]]",
        help="a random input in place of TARGET's own, once for each: 4x128:int64:32000 (integers "
        "below 32000), 4x128x256:bfloat16 (normal), x=4x256 (a keyword argument)",
    )
    recipes = ", ".join(RECIPES)
    add("--recipe", help=f"one of {recipes} (default: that of a compiled TARGET, or coat)")
    add(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="KEY=VALUE",
        help="an option of fp8pass.Config, once for each: memory_budget=0.6, skip=layers.0,lm_head",
    )
    if runs:
        add("--device", type=device_name, help="cpu, cuda or cuda:N, for model and inputs")
    add(
        "--dtype",
        type=partial(dtype_name, among=FLOATS),
        help=f"{', '.join(FLOATS)}, for model and inputs",
    )


def config_of(options: argparse.Namespace) -> Config | None:
    """The configuration given by options; None if there are none.

    Raises:
        UsageError: there is no such recipe, option or value.
    """
    if not options.recipe and not options.option:
        return None
    recipe = {"recipe": options.recipe} if options.recipe else {}
    return _configured({**recipe, **dict(options.option)})


def config_beside(options: argparse.Namespace, config: Config) -> Config | None:
    """`config` with the options `--beside`; None if there are none.

    Another recipe takes the place of the first one, with the options that were given to that.
    """
    given = dict(options.beside)
    if not given:
        return None
    if "recipe" in given:
        return _configured({**dict(options.option), **given})
    return replace(config, **given)


def check_beside(options: argparse.Namespace) -> None:
    """Check the options `--beside` before anything runs.

    Raises:
        UsageError: there is no such recipe, option or value.
    """
    _configured(dict(options.option) | dict(options.beside))


def _configured(options: dict[str, Any]) -> Config:
    try:
        return configured(options)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def load(options: argparse.Namespace) -> Target:
    """Build the model and its inputs, and check that they fit.

    For a command that does not run it, the model is on the meta device.

    Raises:
        UsageError: TARGET or its inputs are not of the required form.
        Failure: the code of TARGET failed.
    """
    import torch

    torch.manual_seed(0)
    runs = hasattr(options, "device")
    device = device_of(options.device) if runs and options.device else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with task(f"building {options.target}", "--traceback shows where."):
        if _is_config(options.target):
            from fp8pass.tools.cli import huggingface

            default = device_of(None) if runs else torch.device("meta")
            config = huggingface.read(options.target)
            note = huggingface.note_on_dtype(config, dtype)  # before the model writes one there
            model = huggingface.build(config, device or default, dtype)
            inputs = {} if options.input else huggingface.example_inputs(model)
            target = Target(model, kwargs=inputs, batch=inputs, note=note)
        else:
            target = moved(unpacked(build(options.target)), device, dtype)
        if options.input:
            target = with_inputs(target, options.input)
    check_arguments(target)
    return target


def build(text: str) -> Any:
    """The return value of the function that `text` names.

    Raises:
        UsageError: there is no such function, or it needs arguments.
    """
    from torch import nn

    where, _, name = text.rpartition(":")
    if not where or not name:
        raise UsageError(f"No target {text!r}: {_FORMS}.")
    _make_importable(Path.cwd())
    module = _loaded(Path(where)) if where.endswith(".py") else _imported(where)
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
        raise UsageError(f"{text} is a {type(found).__name__}; it should be a function.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(f"{text} is called without arguments: {error}.") from error
    return found()


def unpacked(made: Any) -> Target:
    """The target in the return value of a function.

    Raises:
        UsageError: the value is not of the required form.
    """
    from torch import Tensor, nn

    model, *rest = made if isinstance(made, tuple) and made else (made,)
    loss_fn = rest.pop() if rest and callable(rest[-1]) else None
    batch = rest[0] if len(rest) == 1 else tuple(rest)
    kwargs = rest.pop() if rest and isinstance(rest[-1], Mapping) else {}
    args = rest.pop() if rest and isinstance(rest[-1], (tuple, list, Tensor)) else ()
    if rest or not isinstance(model, nn.Module):
        types = ", ".join(type(x).__name__ for x in (made if isinstance(made, tuple) else (made,)))
        raise UsageError(f"TARGET returned ({types}); it should return {_RETURNS}.")
    if loss_fn and not _takes_model_and_batch(loss_fn):
        raise UsageError(
            "loss_fn of TARGET takes the model and the batch, as that of fp8pass.diagnose does: "
            "lambda model, batch: model(*batch).square().mean()."
        )
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    return Target(model, args, dict(kwargs), loss_fn, batch)


def _takes_model_and_batch(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # written in C: nothing is known
        return True
    return True


def moved(target: Target, device: Any, dtype: Any) -> Target:
    """The target on `device`, with floating point numbers in `dtype`; None changes nothing."""
    import torch

    from fp8pass import compat

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype if x.is_floating_point() else None)

    inputs = (target.args, target.kwargs, target.batch)
    args, kwargs, batch = compat.tree_map_only(torch.Tensor, move, inputs)
    model = target.model.to(device, dtype)
    return replace(target, model=model, args=args, kwargs=kwargs, batch=batch)


def with_inputs(target: Target, inputs: list[Input]) -> Target:
    """The target with these inputs in place of its own."""
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


def check_arguments(target: Target) -> None:
    """Check that the model's forward takes the inputs.

    Raises:
        UsageError: it does not take them.
    """
    signature = inspect.signature(target.module.forward)
    try:
        signature.bind(*target.args, **target.kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise UsageError(
            f"The inputs do not fit the model: {error}; its forward takes {takes}. Return them "
            "from TARGET or describe them: --input 4x128:int64:32000, --input x=4x128x256:bfloat16."
        ) from error


def option(text: str) -> tuple[str, Any]:
    """An option of `fp8pass.Config` and its value.

    Raises:
        argparse.ArgumentTypeError: it is not of the form KEY=VALUE.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as memory_budget=0.6")
    return key, tuple(filter(None, value.split(","))) if key in LISTS else _literal(value)


def _literal(text: str) -> Any:
    """A Python literal or infinity; other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return math.inf if text == "inf" else text


def _is_config(text: str) -> bool:
    """Whether TARGET is a configuration: a file or folder, and no Python code.

    Raises:
        UsageError: it looks like a file, but does not exist or names no function.
    """
    path = Path(text)
    if path.suffix == ".py":
        raise UsageError(f"{text}: which function? Give {text}:NAME.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"No config.json in the folder {text}. {_FORMS}.")
    if path.suffix == ".json" and not path.exists():
        raise UsageError(f"No file {text}. {_FORMS}.")
    return path.exists()


def _imported(name: str) -> ModuleType:
    """The module of that name, from the current directory or installed."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is no module. {_FORMS}.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
        nearby = [p.stem for p in Path.cwd().iterdir() if p.suffix == ".py" or p.is_dir()]
        message = unknown("module", error.name, nearby)
        raise UsageError(f"{message} Looked in {Path.cwd()} and in installed packages.") from error


def _loaded(path: Path) -> ModuleType:
    """The module in a file, whose folder is made importable."""
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
