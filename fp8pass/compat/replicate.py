"""What is private of `replicate`, DDP that leaves a model the module that it was."""

from __future__ import annotations

from typing import Any, cast

from torch import distributed as dist
from torch.distributed._composable.replicate import DDP as Replicated
from torch.distributed._composable.replicate import replicate


def _state(module: Replicated) -> Any:
    return replicate.state(cast(Any, module))


def replicas_of(module: Replicated) -> Any:
    """The process group whose ranks have a copy of a module that has not run yet."""
    given = _state(module)._init_kwargs
    mesh = given.get("device_mesh")
    return given.get("process_group") or (mesh.get_group(0) if mesh else dist.group.WORLD)


def replicas_have_begun(module: Replicated) -> bool:
    """Whether it has run, and takes no hook for its gradients any more."""
    return _state(module).has_initialized
