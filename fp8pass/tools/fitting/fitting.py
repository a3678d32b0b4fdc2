"""`fp8pass.fit`: find how a model can train on a GPU, before anything is allocated."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.hardware import GPUS, REFERENCE, Gpu, known_gpu, normalize
from fp8pass.option_checks import ConfigError, bytes_text, is_whole, parse_bytes, unknown
from fp8pass.plan import Plan
from fp8pass.runtime import arena
from fp8pass.tools import running
from fp8pass.tools.fitting.candidates import PROCESS_BYTES, Candidates
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.result import UNNAMED, Fit
from fp8pass.tools.fitting.step import LossFunction, compute_own_loss
from fp8pass.tools.fitting.traced import trace

# If the step waits for copies during a larger share of its time, `fit` prints a note.
MUCH = 0.02
# If logits take a larger share of the used GPU memory, `fit` prints a note.
SMALL_SHARE = 0.001
# Largest relative error of the predicted memory (docs/fit.md).
PREDICTION_ERROR = 0.04
# A smaller integer probably means GiB instead of bytes.
LEAST = 1 << 20


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
    """Find the fastest training setup that fits a GPU and its host, without allocating memory.

    Traces one forward and backward on fake tensors, and plans the traced graphs for several
    configurations. This machine need not have the GPU. Parameters and inputs may be on any device,
    including the meta device:

        with torch.device("meta"):
            model = LlamaForCausalLM(config).bfloat16()
            ids = torch.empty(4, 2048, dtype=torch.long)
        print(fp8pass.fit(model, input_ids=ids, labels=ids, gpu="16GiB", host="64GiB",
                          accumulate=8, blocks="model.layers"))

    Args:
        model: the module to train, in the dtype to train it in.
        *args: arguments of the model for one micro-batch.
        gpu: a name, a memory size, or both: `"RTX 4090"`, `"16GiB"`, `"H200, 16GiB"`; or a number
            of bytes. Default: the GPU of this machine. If `gpu` is only a size, the rates of this
            machine's GPU are used. If there is no GPU, or its rates are unknown, the times are
            estimates for an H200, and the result has a note about this.
        host: host memory for offloaded data and the process itself, as a size or bytes. Default:
            the available memory of this machine.
        config: the configuration that the search varies. Default: the model's own, or else the
            default recipe. If it sets `memory_budget` or `head_chunks`, the search does not vary
            these options.
        accumulate: number of micro-batches whose gradients are summed before an update.
        blocks: paths of modules that are compiled one by one, as shell-style patterns. A list of
            modules stands for its members. Default: the model is compiled as a whole.
        loss_fn: `loss_fn(model, batch)` returns the loss. `batch` is `args`, `kwargs`, or both as a
            tuple. Default: the loss is the model's output, or the output's `loss`.
        **kwargs: keyword arguments of the model, besides those named here.

    Returns:
        A Fit: `print` it, use `.lines`, `.best`, `.to_json()` or `.plot("memory.png")`.

    Raises:
        ConfigError: an option has an invalid value, or a pattern matches nothing.
        TypeError: the model, its configuration, an argument or the loss has the wrong type.
        ValueError: the model is sharded, its loss does not depend on a trainable parameter, or its
            forward reads the values of tensors.
    """
    base = running.check_configuration("fit", model, config)
    running.check_arguments(fit, model, kwargs)
    module = compat.original_of(model)
    if running.is_sharded(module):
        raise ValueError("fit supports one GPU: pass the model before fully_shard.")
    if not is_whole(accumulate) or accumulate < 1:
        raise ConfigError(f"accumulate must be a positive int, got {accumulate!r}.")
    target, host_bytes = find_gpu(gpu), _parse_host(host)
    paths = _match_paths(module, (blocks,) if isinstance(blocks, str) else tuple(blocks))
    parameters = Parameters(module)
    found = Fit(
        type(module).__name__,
        target,
        host_bytes,
        accumulate,
        _fold_lists(module, paths),
        parameters=sum(p.numel() for p in parameters.all),
        dtype=_find_dtype(parameters.all),
        inputs=_describe_inputs(args, kwargs),
    )
    with hardware.planning_for(target):
        traced = trace(module, paths, (args, kwargs), _make_loss(loss_fn))
        candidates = Candidates(traced, parameters, base, accumulate, target)
        _search(candidates, found)
        _add_notes(candidates, found)
    return found


def _find_dtype(parameters: Sequence[Tensor]) -> str:
    counts: Counter[torch.dtype] = Counter()
    for p in parameters:
        counts[p.dtype] += p.numel()
    return graph.dtype_text(counts.most_common(1)[0][0]) if counts else ""


def _describe_inputs(*values: Any) -> str:
    """Describe the first input, e.g. `4 × 2048 tokens`."""
    first = next(iter(compat.tensor_leaves(values)), None)
    if first is None:
        return "no tensors"
    is_tokens = not first.is_floating_point() and first.ndim <= 2
    return " × ".join(map(str, first.shape)) + " tokens" * is_tokens


def _search(candidates: Candidates, found: Fit) -> None:
    """Try candidates until one fits. If the host is too small for any process, try only one
    candidate.
    """
    for candidate in candidates.all():
        why_not = candidate.why_not(found.gpu.memory, found.host)
        found.tried.append((candidate, why_not))
        found.best = None if why_not else candidate
        if found.fits or found.host < PROCESS_BYTES:
            break
    if not found.tried:
        raise ConfigError(next(iter(candidates.impossible.values())))
    setup = found.shown.setup
    held = candidates.parameters.held_gradients(setup, found.accumulate)
    found.moments = candidates.traced.moments(setup.config, held)


def _add_notes(candidates: Candidates, found: Fit) -> None:
    setup, seconds = found.shown.setup, found.shown.seconds
    if seconds.waiting > MUCH * seconds.total:
        found.notes.append(
            f"Copies to and from the host, at {found.gpu.link / 1e9:.0f} GB/s each way, take "
            f"{seconds.link:.3g} s per step; the GPU waits {seconds.waiting:.3g} s for them "
            f"(compute: {seconds.total - seconds.waiting:.3g} s). Accumulate more micro-batches, "
            "or use larger micro-batches."
        )
    plans = candidates.traced.plans(setup.config)
    found.notes += dict.fromkeys(_describe_heads(plans, found))
    found.notes += dict.fromkeys(f"GEMMs are emulated: {p.emulated}." for p in plans if p.emulated)
    for config, why in list(candidates.impossible.items())[:1]:
        found.notes.append(
            f"Some memory budgets, such as {config.memory_budget}, cannot be met: {why}"
        )
    if not found.fits and candidates.parameters.why_not_movable:
        found.notes.append(candidates.parameters.why_not_movable)
    used, memory = found.shown.gpu_bytes, found.gpu.memory
    with_margin = (1 - PREDICTION_ERROR) * memory
    if found.fits and used > with_margin:
        name = f"{found.gpu.name}, " if found.gpu.name in GPUS else ""
        found.notes.append(
            f"This is tight: the prediction may be {PREDICTION_ERROR:.0%} too low, and "
            f"{used / memory:.1%} of the memory is used. For a margin pass "
            f"gpu='{name}{bytes_text(with_margin)}'."
        )
    if setup.step_in_backward:
        found.notes.append(
            "step_in_backward (fp8pass.optim) updates each weight within the backward, so "
            "gradients cannot be clipped by their common norm or scaled by a GradScaler."
        )


def _describe_heads(plans: Sequence[Plan], found: Fit) -> Iterator[str]:
    for head in (head for plan in plans for head in plan.heads if head.reason):
        if head.bytes > SMALL_SHARE * found.shown.gpu_bytes:
            yield (
                f"Logits of {head.module or 'the output head'}, {head.shape}, "
                f"{bytes_text(head.bytes)}, exist for all tokens at once, because {head.reason}."
            )


def _match_paths(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of modules that match a pattern. A module list stands for its members."""
    modules = dict(module.named_modules())
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = fnmatch.filter(modules, pattern) if pattern else []
        if not matching:
            raise ConfigError(
                f"blocks={pattern!r} matches no module of the model. "
                f"{unknown('path', pattern, modules)}"
            )
        for path in matching:
            members = modules[path] if isinstance(modules[path], nn.ModuleList) else ()
            found.update(dict.fromkeys([f"{path}.{i}" for i in range(len(members))] or [path]))
    return tuple(found)


def _fold_lists(module: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """Replace the paths of all members of a module list by `list.*`."""
    found = dict.fromkeys(paths)
    for path, m in module.named_modules():
        members = {f"{path}.{i}" for i in range(len(m))} if isinstance(m, nn.ModuleList) else set()
        if members and members <= set(paths):
            found = dict.fromkeys(f"{path}.*" if p in members else p for p in found)
    return tuple(found)


def _parse_host(host: str | int | None) -> float:
    if host is None:
        left = arena.available()
        if left is None:
            raise ConfigError(
                "The available host memory is unknown here: pass its size, such as host='64GiB'."
            )
        return float(left)
    return parse_bytes(host, "host must be") if isinstance(host, str) else float(host)


def _make_loss(loss_fn: Callable[[Any, Any], Tensor] | None) -> LossFunction:
    if loss_fn is None:
        return compute_own_loss

    def compute_loss(run: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return running.compute_loss(
            loss_fn, run, (args, kwargs) if args and kwargs else args or kwargs
        )

    return compute_loss


def find_gpu(wanted: str | int | Gpu | None) -> Gpu:
    """Return the GPU for the argument `gpu` of `fit`."""
    if isinstance(wanted, Gpu):
        return wanted
    if wanted is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "This machine has no GPU. Name one, gpu='RTX 4090', or give its memory, "
                "gpu='16GiB'."
            )
        return _detect_gpu()
    if not isinstance(wanted, str):
        if isinstance(wanted, bool) or wanted < LEAST:
            raise ConfigError(
                f"gpu={wanted!r} is a number of bytes, too few for a GPU. For GiB write "
                f"gpu='{int(wanted) or 16}GiB'."
            )
        return replace(_detect_gpu(), memory=float(wanted))
    parts = [part.strip() for part in wanted.split(",")]
    sizes = [part for part in parts if re.match(r"[\d.]+\s*[KMGT]?i?B$", part, re.IGNORECASE)]
    names = [part for part in parts if part not in sizes]
    if len(sizes) > 1 or len(names) > 1:
        raise ConfigError(
            f"gpu must be a name, a size or both, such as 'RTX 4090, 20GiB', got {wanted!r}."
        )
    gpu = _find_by_name(names[0]) if names else _detect_gpu()
    return replace(gpu, memory=parse_bytes(sizes[0], "gpu must be")) if sizes else gpu


def _find_by_name(name: str) -> Gpu:
    same = {normalize(known): gpu for known, gpu in GPUS.items()}
    gpu = same.get(normalize(name)) or known_gpu(name)
    if gpu is None:
        raise ConfigError(
            f"{unknown('gpu', name, GPUS)} Known GPUs: {', '.join(GPUS)}. For another GPU "
            "pass only its memory: gpu='16GiB'."
        )
    return gpu


def _detect_gpu() -> Gpu:
    """Return this machine's GPU, with the rates of an H200 if its rates are unknown."""
    if not torch.cuda.is_available():
        return replace(GPUS[REFERENCE], name=UNNAMED, rates="assumed")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    rates = known_gpu(properties.name) or replace(
        GPUS[REFERENCE], capability=(properties.major, properties.minor), rates="assumed"
    )
    return replace(rates, name=properties.name, memory=float(properties.total_memory))
