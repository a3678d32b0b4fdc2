"""`fp8pass.fit`: whether a model trains on a GPU, and how, before anything is allocated."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fp8pass import compat
from fp8pass.config import Config, ConfigError, bytes_text, parse_bytes, unknown
from fp8pass.hardware import Gpu
from fp8pass.plan import Plan
from fp8pass.runtime import arena
from fp8pass.tools.fitting.candidates import PROCESS_BYTES, Candidates
from fp8pass.tools.fitting.deep import trace
from fp8pass.tools.fitting.gpu import find_gpu
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.result import Fit
from fp8pass.tools.fitting.step import LossFunction, own_loss
from fp8pass.tools.running import (
    check_arguments,
    checked_configuration,
    checked_loss,
    is_sharded,
)

# A step that waits for the link for a larger share of its time is told so.
MUCH = 0.02
# Logits of a smaller share of the GPU's bytes are not worth a word.
FEW = 0.001


def fit(
    model: nn.Module,
    *args: Any,
    gpu: str | int | Gpu | None = None,
    host: str | int | None = None,
    config: Config | None = None,
    accumulate: int = 1,
    blocks: str | Sequence[str] = (),
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    **kwargs: Any,
) -> Fit:
    """Find the fastest way to train a model that fits a GPU and its host; allocates nothing.

    Traces one forward and backward without memory and plans them for several configurations. The
    GPU need not be there. Parameters and inputs may be on any device, on the meta device, too:

        with torch.device("meta"):
            model = LlamaForCausalLM(config).bfloat16()
            ids = torch.empty(4, 2048, dtype=torch.long)
        print(fp8pass.fit(model, input_ids=ids, labels=ids, gpu="16GiB", host="64GiB",
                          accumulate=8, blocks="model.layers"))

    Args:
        model: the module to train, in the dtype that it is to have.
        *args: arguments of the model for one micro-batch.
        gpu: a name, a size, or both: `"RTX 4090"`, `"16GiB"`, `"H200, 16GiB"`; bytes; by default
            the GPU of this machine. Rates are those of the named one, else of this machine's, else
            of an H200.
        host: memory for what is offloaded and the process, by default what this machine has left.
        config: where to begin, in place of the model's own configuration or the default recipe. A
            `memory_budget` or `head_chunks` that it gives is not changed.
        accumulate: micro-batches whose gradients are added up before an update.
        blocks: paths of modules that are compiled one by one, with * for parts of them; of a list
            of modules all that are in it. By default the model is compiled as a whole.
        loss_fn: gives the loss of the model and the batch, `args`, `kwargs`, or both as a tuple; by
            default that is the `loss` in the model's output, or the output.
        **kwargs: keyword arguments of the model, besides those named here.

    Returns:
        A Fit: `print` it, use `.lines`, `.best`, `.to_json()` or `.plot("memory.png")`.

    Raises:
        ConfigError: an option has an invalid value, or names nothing.
        TypeError: the model, its configuration, an argument or the loss is something else.
        ValueError: the model is sharded, gives no loss that depends on what is trained, or looks at
            the values of tensors.
    """
    base = checked_configuration("fit", model, config)
    check_arguments(fit, model, kwargs)
    module = compat.original_of(model)
    if is_sharded(module):
        raise ValueError("fit looks at one GPU: give the model before fully_shard.")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ConfigError(f"accumulate must be a positive int, got {accumulate!r}.")
    target, room = find_gpu(gpu), _host_bytes(host)
    paths = _matching(module, (blocks,) if isinstance(blocks, str) else tuple(blocks))
    traced = trace(module, paths, (args, kwargs), _loss_of(loss_fn))
    parameters = Parameters(module)
    candidates = Candidates(traced, parameters, base, accumulate, target)
    blocks = _as_lists(module, paths)
    found = Fit(type(module).__name__, target, room, accumulate, blocks)
    _search(candidates, found)
    _add_notes(candidates, found)
    return found


def _search(candidates: Candidates, found: Fit) -> None:
    """Try ways to train until one fits; one alone where none can."""
    for candidate in candidates.all():
        why_not = candidate.why_not(found.gpu.memory, found.host)
        found.tried.append((candidate, why_not))
        found.best = None if why_not else candidate
        if found.fits or found.host < PROCESS_BYTES:
            break
    if not found.tried:
        raise ConfigError(next(iter(candidates.impossible.values())))
    setup = found.shown.setup
    fate = candidates.parameters.fate_of_gradients(setup, found.accumulate)
    found.moments = candidates.traced.moments(setup.config, fate)


def _add_notes(candidates: Candidates, found: Fit) -> None:
    """What there is to know of the way that is shown."""
    setup, seconds = found.shown.setup, found.shown.seconds
    if seconds.waiting > MUCH * seconds.total:
        found.notes.append(
            f"The link of {found.gpu.link / 1e9:.0f} GB/s each way is busy for "
            f"{seconds.link:.3g} s a step, of which {seconds.waiting:.3g} s cannot be hidden "
            f"behind {seconds.total - seconds.waiting:.3g} s of compute: accumulate more "
            "micro-batches, or larger ones."
        )
    found.notes += dict.fromkeys(_notes_on_heads(candidates.traced.plans(setup.config), found))
    for config, why in list(candidates.impossible.items())[:1]:
        found.notes.append(f"Some memory budgets are left out, {config.memory_budget} first: {why}")
    if not found.fits and candidates.parameters.why_not_coded:
        found.notes.append(candidates.parameters.why_not_coded)
    if setup.attach:
        found.notes.append(
            "attach (fp8pass.optim) updates each weight within the backward: gradients cannot be "
            "clipped by their common norm there, nor scaled by a GradScaler."
        )


def _notes_on_heads(plans: Sequence[Plan], found: Fit) -> Iterator[str]:
    """Why output heads are whole whose logits matter."""
    for head in (head for plan in plans for head in plan.heads if head.reason):
        if head.bytes > FEW * found.shown.gpu_bytes:
            yield (
                f"Logits of {head.module or 'the output head'}, {head.shape}, "
                f"{bytes_text(head.bytes)}, exist for all tokens at once, because {head.reason}."
            )


def _matching(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The paths of modules that patterns name; of a list those of its members.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    modules = dict(module.named_modules())
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = fnmatch.filter(modules, pattern) if pattern else []
        if not matching:
            raise ConfigError(
                f"blocks={pattern!r} names no module. {unknown('path', pattern, modules)}"
            )
        for path in matching:
            members = [f"{path}.{name}" for name, _ in _members(modules[path])]
            found.update(dict.fromkeys(members or [path]))
    return tuple(found)


def _members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules in a list of modules; none of any other."""
    return list(module.named_children()) if isinstance(module, nn.ModuleList) else []


def _as_lists(module: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """Paths with `list.*` in the place of all that are in a list."""
    found = dict.fromkeys(paths)
    for path, m in module.named_modules():
        members = [f"{path}.{name}" for name, _ in _members(m)]
        if members and set(members) <= set(paths):
            found = dict.fromkeys(f"{path}.*" if p in members else p for p in found)
    return tuple(found)


def _host_bytes(host: str | int | None) -> float:
    """Bytes of the host.

    Raises:
        ConfigError: it is no size, or this machine does not say how much it has left.
    """
    if host is None:
        left = arena.available()
        if left is None:
            raise ConfigError(
                "This machine does not say how much memory it has: give it, as host='64GiB'."
            )
        return float(left)
    return parse_bytes(host, "host must be") if isinstance(host, str) else float(host)


def _loss_of(loss_fn: Callable[[Any, Any], Tensor] | None) -> LossFunction:
    """How the loss of a model and its arguments is computed."""
    if loss_fn is None:
        return own_loss

    def loss_of(run: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return checked_loss(loss_fn, run, (args, kwargs) if args and kwargs else args or kwargs)

    return loss_of
