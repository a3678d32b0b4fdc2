"""The versions of a graph that a monitor selects from: sampled, careful and normal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from fp8pass import compat
from fp8pass.config import Config
from fp8pass.hooks import CompiledGraph, CompileVersion, Hooks, Program, Wrap
from fp8pass.stability.monitor.monitor import Monitor
from fp8pass.stability.monitor.sampler import Sampler


@dataclass(frozen=True)
class Versions(Hooks):
    """Compiles the versions of each graph that has a backward."""

    monitor: Monitor

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap | None:
        """Compile the sampled version, and with a fallback the careful version."""
        if not torch.is_grad_enabled():
            return None
        monitor, sampler = self.monitor, Sampler(self.monitor)
        sampled = compile_version(config, sampler)
        if not sampler.trains:
            return None
        careful: Program | None = None
        if monitor.fallback:
            careful = compile_version(
                replace(config, skip=(*config.skip_patterns, *monitor.fallback))
            )

        def wrap(normal: Program, compiled: CompiledGraph | None) -> Program:
            return dispatch(monitor, sampled, careful or normal, normal)

        return wrap


def dispatch(monitor: Monitor, sampled: Program, careful: Program, normal: Program) -> Program:
    """Run the version that the monitor selects for each step."""

    def run(*args: object) -> object:
        if monitor.falls_back:
            return careful(*args)
        samples = monitor.sampling and not compat.in_shape_inference()
        return sampled(*args) if samples else normal(*args)

    return run
