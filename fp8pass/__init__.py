"""fp8pass: train any PyTorch model with FP8 linear layers and low-bit saved activations.

model = torch.compile(model, backend="fp8pass")
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8pass import distributed as distributed
    from fp8pass import optim as optim
    from fp8pass import testing as testing
    from fp8pass.activation_memory.planner import BudgetTooSmall as BudgetTooSmall
    from fp8pass.config import RECIPES as RECIPES
    from fp8pass.config import Config as Config
    from fp8pass.config import Simulation as Simulation
    from fp8pass.dynamo import backend as backend
    from fp8pass.integrations.serving import export as export
    from fp8pass.integrations.serving import served_weights as served_weights
    from fp8pass.option_checks import ConfigError as ConfigError
    from fp8pass.stability.guard import Guard as Guard
    from fp8pass.stability.monitor import Monitor as Monitor
    from fp8pass.tools.bisection import Bisection as Bisection
    from fp8pass.tools.bisection import bisect as bisect
    from fp8pass.tools.calibration import calibrate as calibrate
    from fp8pass.tools.diagnosis import Diagnosis as Diagnosis
    from fp8pass.tools.diagnosis import diagnose as diagnose
    from fp8pass.tools.explanation import Explanation as Explanation
    from fp8pass.tools.explanation import explain as explain
    from fp8pass.tools.fitting import Fit as Fit
    from fp8pass.tools.fitting import Gpu as Gpu
    from fp8pass.tools.fitting import fit as fit
    from fp8pass.tools.sharpness import sharpness as sharpness
    from fp8pass.weights.quantize_frozen import quantize_frozen as quantize_frozen

__version__ = "0.1.0"

# The module of each public name. Modules are imported on first use, so that `fp8pass --help` does
# not import PyTorch, and `fp8pass env` works without PyTorch.
_MODULES = {
    "RECIPES": "config",
    "Bisection": "tools.bisection",
    "BudgetTooSmall": "activation_memory.planner",
    "Config": "config",
    "ConfigError": "option_checks",
    "Diagnosis": "tools.diagnosis",
    "Explanation": "tools.explanation",
    "Fit": "tools.fitting",
    "Gpu": "tools.fitting",
    "Guard": "stability.guard",
    "Monitor": "stability.monitor",
    "Simulation": "config",
    "backend": "dynamo",
    "bisect": "tools.bisection",
    "calibrate": "tools.calibration",
    "diagnose": "tools.diagnosis",
    "explain": "tools.explanation",
    "export": "integrations.serving",
    "fit": "tools.fitting",
    "quantize_frozen": "weights.quantize_frozen",
    "served_weights": "integrations.serving",
    "sharpness": "tools.sharpness",
}

_SUBMODULES = ("distributed", "optim", "testing")

__all__ = [*_MODULES, *_SUBMODULES]

# Names that users may expect in `fp8pass`, and the submodules that contain them. The AttributeError
# hints at the submodule.
_ELSEWHERE = {
    "AdamW": "optim",
    "Muon": "optim",
    "capture_step": "optim",
    "compress": "distributed",
    "offload_weights": "optim",
    "split_parameters": "optim",
    "step_in_backward": "optim",
}


def _add_prefix(record: logging.LogRecord) -> bool:
    """Prefix a message with `fp8pass:` if no handler is configured.

    Python then prints messages without the name of the logger.
    """
    if not logging.getLogger(__name__).hasHandlers():
        record.msg = f"fp8pass: {record.msg}"
    return True


logging.getLogger(__name__).addFilter(_add_prefix)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        hint = f" Use fp8pass.{_ELSEWHERE[name]}.{name}." if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
