"""fp8pass: train any PyTorch model with FP8 linear layers and low-bit saved activations.

model = torch.compile(model, backend="fp8pass")
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8pass import optim as optim
    from fp8pass.backend import backend as backend
    from fp8pass.bisect import Bisection as Bisection
    from fp8pass.bisect import bisect as bisect
    from fp8pass.calibration import calibrate as calibrate
    from fp8pass.config import RECIPES as RECIPES
    from fp8pass.config import Config as Config
    from fp8pass.config import ConfigError as ConfigError
    from fp8pass.diagnose import Diagnosis as Diagnosis
    from fp8pass.diagnose import diagnose as diagnose
    from fp8pass.explain import Explanation as Explanation
    from fp8pass.explain import explain as explain
    from fp8pass.monitor import Monitor as Monitor
    from fp8pass.pipeline import stage_format as stage_format

__version__ = "0.1.0"

# The public names, each with its module, which is loaded when the name is first used: the command
# line answers `--help` without waiting for PyTorch, and `fp8pass env` where there is none.
_MODULES = {
    "RECIPES": "config",
    "Bisection": "bisect",
    "Config": "config",
    "ConfigError": "config",
    "Diagnosis": "diagnose",
    "Explanation": "explain",
    "Monitor": "monitor",
    "backend": "backend",
    "bisect": "bisect",
    "calibrate": "calibration",
    "diagnose": "diagnose",
    "explain": "explain",
    "stage_format": "pipeline",
}

_SUBMODULES = ("optim",)

__all__ = [*_MODULES, *_SUBMODULES]


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the module fp8pass.explain would put it in the place of the function.
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
