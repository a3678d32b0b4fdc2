"""Find, disable and remove hooks of tensors, modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = [
    "disable_gradient_hooks", "has_step_hooks", "remove_forward_pre_hooks", "runs_gradient_hooks",
]  # fmt: skip


@contextmanager
def disable_gradient_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Disable hooks on accumulated gradients."""
    # The autograd engine holds a reference to the dict of hooks, so the dict must be cleared
    # instead of replaced.
    hooks = [h for x in leaves if (h := x._post_accumulate_grad_hooks)]
    registered = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, before in zip(hooks, registered, strict=True):
            h.update(before)


def runs_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether a leaf has hooks on its accumulated gradient that are not disabled."""
    return bool(leaf._post_accumulate_grad_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions run before or after each step of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def remove_forward_pre_hooks(module: nn.Module, package: str) -> None:
    """Remove a module's forward pre-hooks that are functions of `package`."""
    hooks = module._forward_pre_hooks
    for key in [k for k, hook in hooks.items() if hook.__module__.split(".")[0] == package]:
        del hooks[key]
