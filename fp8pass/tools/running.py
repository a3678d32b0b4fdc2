"""Run a model to inspect it, with the options of its compilation, and restore its state."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat, graph
from fp8pass.config import FIELDS, RECIPES, Config, checked_config, split_options
from fp8pass.dynamo import Backend, fp8pass
from fp8pass.optim.shards import local


def find_configuration(model: nn.Module) -> Config:
    """Return the configuration that a model or its parts were compiled with, or the default."""
    own = _read_configuration(model)
    if own is not None:
        return own
    parts = {c for part in model.modules() if (c := _read_configuration(part)) is not None}
    if len(parts) > 1:
        raise ValueError(
            "Parts of the model were compiled with different configurations. Pass one "
            "configuration, config=fp8pass.Config(...), or pass a part instead of the model."
        )
    return parts.pop() if parts else Config()


def check_configuration(tool: str, model: Any, config: Any) -> Config:
    """Check a tool's arguments. Return `config`, or the model's own if `config` is None.

    Raises:
        TypeError: `model` is not a module, or `config` not a `Config`.
        ValueError: parts were compiled with different configurations.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{tool} takes a torch.nn.Module, got {type(model).__name__}.")
    return find_configuration(model) if config is None else checked_config(config)


def find_recipe(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the recipe that differs from `config` in the fewest options, and these options.

    The option `compiler` is ignored. If several recipes differ equally, `coat` is preferred.
    """
    found = {}
    for name in ("coat", *RECIPES):
        recipe = Config.recipe(name, compiler=config.compiler)
        found[name] = {k: v for k, v in vars(config).items() if v != getattr(recipe, k)}
    nearest = min(found, key=lambda name: len(found[name]))
    return nearest, found[nearest]


def check_arguments(tool: Callable[..., Any], model: nn.Module, given: Collection[str]) -> None:
    """Raise TypeError if a keyword argument of the model looks like an argument of the tool.

    A forward with `**kwargs`, as in transformers, would accept misspellings.
    """
    named = set().union(*(_list_arguments(m) for m in model.modules())) if given else set()
    own = [p.name for p in inspect.signature(tool).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in sorted(set(given) - named):
        if name in (*FIELDS, "recipe", "options"):
            raise TypeError(
                f"{tool.__name__} got the option {name}=. Pass options as "
                "config=fp8pass.Config.recipe(...)."
            )
        if nearest := difflib.get_close_matches(name, own, n=1, cutoff=0.85):
            raise TypeError(
                f"{tool.__name__} got {name!r}, which is not an argument of "
                f"{type(model).__name__}. Did you mean {nearest[0]!r}?"
            )


def _list_arguments(module: nn.Module) -> Collection[str]:
    """Return the names of the forward's arguments; () if they are unknown, as for code in C++."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return ()


def why_not_callable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return why a function does not accept these arguments, or ''."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # functions written in C have no signature
        pass
    return ""


def compute_loss(loss_fn: Callable[[Any, Any], Tensor], program: Any, batch: Any) -> Tensor:
    """Call `loss_fn(program, batch)`, and return the loss.

    Raises:
        TypeError: `loss_fn` takes other arguments, or does not return a tensor of one element.
    """
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of the model and the batch, such as lambda m, b: "
            f"m(**b).loss, got {type(loss_fn).__name__}. Pass loss_fn before the batch."
        )
    if problem := why_not_callable(loss_fn, program, batch):
        raise TypeError(
            f"loss_fn must take the model and the batch, like lambda m, b: m(**b).loss: {problem}."
        )
    loss = loss_fn(program, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            "loss_fn must return a tensor of one element, like lambda m, b: m(**b).loss, but it "
            f"returned {describe_value(loss)}."
        )
    return loss


def describe_value(value: Any) -> str:
    """Describe a tensor by its shape, another value by its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def run_step(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, backend: Callable[..., Any]
) -> list[Tensor | None]:
    """Run one forward and backward, compiled with `backend`, and restore the model's state.

    Returns the gradients of the parameters, and of tensors of the batch that require a gradient.
    """
    module = compat.original_of(model)
    with (
        _isolate_gradients(module, batch) as leaves,
        restore_state(module),
        compile_as(model, backend) as program,
    ):
        loss = compute_loss(loss_fn, program, batch)
        if loss.requires_grad:
            loss.backward()
        return [x.grad for x in leaves]


def is_compiled(model: nn.Module) -> bool:
    """Whether fp8pass compiles the model as a whole."""
    return not compat.compiled_in_vain(model) and _read_configuration(model) is not None


def find_compiled_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled parts by path; {} if the whole model or nothing is compiled."""
    parts: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if not is_compiled(part):
            continue
        if not name:
            return {}
        if not any(name.startswith(f"{outer}.") for outer in parts):
            parts[name] = part
    return parts


@contextmanager
def compile_as(model: nn.Module, backend: Callable[..., Any]) -> Iterator[Any]:
    """Compile the parts that were compiled with fp8pass, or else the whole model, with `backend`.

    Caches of compiled code start empty, and gradients are enabled.
    """
    parts = find_compiled_parts(model)
    module = model if parts else compat.original_of(model)
    with compat.run_uncompiled(module), compat.fresh_compilation(), torch.enable_grad():
        program: Any = module if parts else torch.compile(module, backend=backend)
        with compat.recompile(parts.values(), backend):
            yield program


def find_owners(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter to its module's path."""
    return {
        id(p): graph.clean_path(name.rpartition(".")[0]) for name, p in model.named_parameters()
    }


def find_module_of_run(weights: Mapping[str, Tensor], owners: Mapping[int, str]) -> str:
    """Return the path of the module that ran a graph, to which the graph's paths are relative.

    If a weight is in `layers.3.mlp` of the model (`owners`) and in `mlp` of the graph (`weights`),
    the result is `layers.3`.
    """
    named_first = sorted(weights.items(), key=lambda item: not item[0])
    pairs = ((owners.get(id(w), ""), path) for path, w in named_first)
    above = (
        owner.removesuffix(path).rstrip(".")
        for owner, path in pairs
        if not path or f".{owner}".endswith(f".{path}")
    )
    return next(above, "")


def _read_configuration(module: nn.Module) -> Config | None:
    compiled_with, options = compat.backend_of(module)
    if compiled_with is not fp8pass and not isinstance(compiled_with, Backend):
        return None
    if compat.compiled_in_vain(module):
        name = type(module).__name__
        warnings.warn(
            f"fp8pass: {name}.compile() has no effect: before version 2.14 PyTorch does not trace "
            "classes of torch.nn that are compiled in place. Use torch.compile(model, ...).",
            stacklevel=4,
        )
    if options:
        return split_options(options, compat.list_options())[0]
    return compiled_with.config if isinstance(compiled_with, Backend) else Config()


@contextmanager
def restore_state(module: nn.Module) -> Iterator[None]:
    """Restore buffers and random number generators on exit."""
    without = [name for name, p in module.named_parameters() if p.is_meta]
    if without:
        raise ValueError(
            f"{len(without)} parameters, such as {without[0]}, are on the meta device and have no "
            "memory. Allocate memory with model.to_empty(device='cpu'); if the model is too large, "
            "use fewer layers, because equal layers get the same plan."
        )
    modules = [(m, dict(m._buffers)) for m in module.modules()]
    values = {b: b.detach().clone() for b in module.buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for part, buffers in modules:
            part._buffers.clear()
            part._buffers.update(buffers)
        _restore(values)


@torch.no_grad()
def _restore(values: Mapping[Tensor, Tensor]) -> None:
    """Restore the values of tensors. Only changed tensors are written."""
    for x, value in values.items():
        if local(x).shape != value.shape:
            x.resize_(value.shape)
        now = local(x.detach())
        if not torch.equal(now, value):
            now.copy_(value)


@contextmanager
def _isolate_gradients(module: nn.Module, batch: Any) -> Iterator[list[Tensor]]:
    """Yield the leaf tensors with `grad` set to None, and restore their gradients on exit.

    Leaves are parameters, and tensors of the batch that require a gradient. Values of gradients are
    restored, too, because DistributedDataParallel writes to their memory. Inside of this context,
    FSDP2 reduces all gradients; its unreduced sums from earlier backwards are restored on exit.
    Hooks on accumulated gradients do not run, because an optimizer in such a hook would train the
    model.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Gradients cannot be computed under torch.inference_mode(). Leave inference mode "
            "first; torch.no_grad() is fine."
        )
    leaves = [*module.parameters(), *find_leaves(batch)]
    gradients = [x.grad for x in leaves]
    dense = [g for g in gradients if g is not None and g.layout is torch.strided]
    values = {g: local(g.detach()).clone() for g in dense}
    for x in leaves:
        x.grad = None
    reset_unreduced: AbstractContextManager[None] = nullcontext()
    if is_sharded(module):
        from fp8pass.compat.data_parallel import reduce_separately

        reset_unreduced = reduce_separately(module)
    try:
        with compat.disable_gradient_hooks(leaves), reset_unreduced:
            yield leaves
    finally:
        for x, gradient in zip(leaves, gradients, strict=True):
            x.grad = gradient
        _restore(values)


def is_sharded(module: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(m, FSDPModule) for m in module.modules())


def find_leaves(batch: Any) -> list[Tensor]:
    return [x for x in compat.tensor_leaves(batch) if x.is_leaf and x.requires_grad]
