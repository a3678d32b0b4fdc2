"""Running a model to inspect it: the options it was compiled with, and its state put back."""

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
from fp8pass.config import FIELDS, Config, checked_config, split_options
from fp8pass.dynamo import Backend, fp8pass
from fp8pass.optim.shards import local


def configuration_of(model: nn.Module) -> Config:
    """The configuration that a model, or its parts, were compiled with; else the default one.

    Raises:
        ValueError: parts were compiled with different configurations.
    """
    own = _own_configuration(model)
    if own is not None:
        return own
    parts = {c for part in model.modules() if (c := _own_configuration(part)) is not None}
    if len(parts) > 1:
        raise ValueError(
            "Parts of the model were compiled with different configurations: give one of them, "
            "config=fp8pass.Config(...), or give a part in place of the model."
        )
    return parts.pop() if parts else Config()


def checked_configuration(tool: str, model: Any, config: Any) -> Config:
    """The configuration that a tool takes: the one that it was given, or the model's own.

    Raises:
        TypeError: `model` is no module or `config` no `Config`.
        ValueError: parts were compiled with different configurations.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{tool} takes a torch.nn.Module, got {type(model).__name__}.")
    return configuration_of(model) if config is None else checked_config(config)


def check_arguments(tool: Callable[..., Any], model: nn.Module, given: Collection[str]) -> None:
    """Raise TypeError if a keyword argument of the model looks like one of the tool.

    A forward that takes `**kwargs`, as transformers' do, would take it, and nobody would tell.
    """
    named = set().union(*(_named_arguments(m) for m in model.modules())) if given else set()
    own = [p.name for p in inspect.signature(tool).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in sorted(set(given) - named):
        if name in (*FIELDS, "recipe", "options"):
            raise TypeError(
                f"{tool.__name__} takes options as config=fp8pass.Config.recipe(...), got {name}=."
            )
        if nearest := difflib.get_close_matches(name, own, n=1, cutoff=0.85):
            raise TypeError(
                f"{tool.__name__} got {name!r}, which {type(model).__name__} does not name: did "
                f"you mean {nearest[0]!r}?"
            )


def _named_arguments(module: nn.Module) -> Collection[str]:
    """The arguments that a forward names; none if it does not say, as compiled code in C++."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return ()


def checked_loss(loss_fn: Callable[[Any, Any], Tensor], program: Any, batch: Any) -> Tensor:
    """`loss_fn(program, batch)`.

    Raises:
        TypeError: it takes other arguments, or gives no loss.
    """
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of the model and the batch, as lambda m, b: m(**b).loss, "
            f"got {type(loss_fn).__name__}: it comes after the model, and before the batch."
        )
    try:
        inspect.signature(loss_fn).bind(program, batch)
    except TypeError as error:
        raise TypeError(
            f"loss_fn takes the model and the batch, as lambda m, b: m(**b).loss does: {error}."
        ) from None
    except ValueError:  # written in C: nothing is known
        pass
    loss = loss_fn(program, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"loss_fn must give the loss, a tensor of one element, as lambda m, b: m(**b).loss "
            f"does; it gave {given}."
        )
    return loss


def compiled_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost parts of a model that fp8pass compiles, by their paths.

    Empty where the model is compiled as a whole, or not at all.
    """
    parts: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if compat.compiled_in_vain(part) or _own_configuration(part) is None:
            continue
        if not name:
            return {}
        if not any(name.startswith(f"{outer}.") for outer in parts):
            parts[name] = part
    return parts


@contextmanager
def compiled_as(model: nn.Module, backend: Callable[..., Any]) -> Iterator[Any]:
    """A program that runs `model` compiled with `backend`, as a whole or in the parts that it is.

    Whatever caches hold is compiled anew, and gradients are enabled.
    """
    parts = compiled_parts(model)
    module = model if parts else compat.original_of(model)
    with compat.run_uncompiled(module), compat.fresh_compilation(), torch.enable_grad():
        program: Any = module if parts else torch.compile(module, backend=backend)
        with compat.recompile(parts.values(), backend):
            yield program


def owners_of(model: nn.Module) -> dict[int, str]:
    """The path of the module that has a parameter, by the parameter's id."""
    return {
        id(p): graph.clean_path(name.rpartition(".")[0]) for name, p in model.named_parameters()
    }


@contextmanager
def linears_that_run(model: nn.Module) -> Iterator[dict[int, str]]:
    """The paths of `nn.Linear`s that run meanwhile, by the ids of parameters that they run with.

    With FSDP2 those are what it gathers, not the parameters of the model. Layers that compute their
    weight are left out.
    """
    found: dict[int, str] = {}

    def noting(path: str) -> Callable[..., None]:
        def note(layer: nn.Module, args: Any) -> None:
            own = dict(layer.named_parameters(recurse=False))
            if "weight" in own:
                found.update((id(p), path) for p in own.values())

        return note

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    hooks = [m.register_forward_pre_hook(noting(graph.clean_path(n))) for n, m in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def module_of_run(weights: Mapping[str, Tensor], owners: Mapping[int, str]) -> str:
    """Path of the module that a graph ran in, where the graph's own paths start; '' is the top.

    It is the path of a weight's module in the model without its path in the graph.

    Args:
        weights: parameters that the graph ran with, by the paths of their modules in the graph.
        owners: the paths of their modules in the model, see `owners_of`.
    """
    named_first = sorted(weights.items(), key=lambda item: not item[0])
    pairs = ((owners.get(id(w), ""), path) for path, w in named_first)
    above = (
        owner.removesuffix(path).rstrip(".")
        for owner, path in pairs
        if not path or f".{owner}".endswith(f".{path}")
    )
    return next(above, "")


def _own_configuration(module: nn.Module) -> Config | None:
    """The configuration that a module was compiled with; None if fp8pass did not compile it."""
    compiled_with, options = compat.backend_of(module)
    if compiled_with is not fp8pass and not isinstance(compiled_with, Backend):
        return None
    if compat.compiled_in_vain(module):
        name = type(module).__name__
        warnings.warn(
            f"{name}.compile() has no effect: PyTorch does not trace the forward of a class of "
            f"torch.nn that is compiled in place, and this {name} runs as it is. Use "
            "model = torch.compile(model, ...).",
            stacklevel=4,
        )
    if options:
        return split_options(options, compat.list_options())[0]
    return compiled_with.config if isinstance(compiled_with, Backend) else Config()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put buffers and random number generators back after running a module.

    Raises:
        ValueError: parameters are on the meta device, so that the module cannot run.
    """
    without = [name for name, p in module.named_parameters() if p.is_meta]
    if without:
        raise ValueError(
            f"{without[0]} and {len(without) - 1} more parameters are on the meta device, where "
            "nothing can run. Give them memory with model.to_empty(device='cpu'), or make the "
            "model with fewer layers: equal ones are treated alike."
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
        _put_back(values)


@torch.no_grad()
def _put_back(values: Mapping[Tensor, Tensor]) -> None:
    """Write values to the tensors that they were copied from, where these have changed."""
    for x, value in values.items():
        if local(x).shape != value.shape:
            x.resize_(value.shape)
        now = local(x.detach())
        if not torch.equal(now, value):
            now.copy_(value)


@contextmanager
def fresh_gradients(module: nn.Module, batch: Any) -> Iterator[list[Tensor]]:
    """The leaf tensors, whose gradients are None meanwhile; the earlier ones are put back.

    So are the sums of gradients that FSDP2 has not reduced yet; it reduces meanwhile. Values are
    put back, too: DistributedDataParallel writes to the memory of the earlier gradients. No hook of
    an accumulated gradient is called: an optimizer in the backward would train the model.

    Raises:
        ValueError: inference mode is on, in which nothing has a gradient.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Nothing has a gradient under torch.inference_mode(): leave it before, or use "
            "torch.no_grad() in its place."
        )
    leaves = [*module.parameters(), *leaves_of(batch)]
    gradients = [x.grad for x in leaves]
    dense = [g for g in gradients if g is not None and g.layout is torch.strided]
    values = {g: local(g.detach()).clone() for g in dense}
    for x in leaves:
        x.grad = None
    try:
        with compat.disable_gradient_hooks(leaves), _unreduced_gradients(module):
            yield leaves
    finally:
        for x, gradient in zip(leaves, gradients, strict=True):
            x.grad = gradient
        _put_back(values)


def _unreduced_gradients(module: nn.Module) -> AbstractContextManager[None]:
    """A context without gradients that FSDP2 has not reduced, and in which it reduces all."""
    if not is_sharded(module):
        return nullcontext()
    from fp8pass.compat.data_parallel import reduce_separately

    return reduce_separately(module)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards parameters of a module."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(m, FSDPModule) for m in module.modules())


def leaves_of(batch: Any) -> list[Tensor]:
    """The leaf tensors of a batch that require a gradient."""
    tensors = compat.tree_leaves(batch)
    return [x for x in tensors if isinstance(x, Tensor) and x.is_leaf and x.requires_grad]
