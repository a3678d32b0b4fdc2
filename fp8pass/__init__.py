"""fp8pass: train any PyTorch model with FP8 linear layers and low-bit saved activations.

model = torch.compile(model, backend="fp8pass")
"""

from __future__ import annotations

from fp8pass.backend import backend
from fp8pass.bisect import Bisection, bisect
from fp8pass.calibration import calibrate
from fp8pass.config import RECIPES, Config, ConfigError
from fp8pass.diagnose import Diagnosis, diagnose
from fp8pass.explain import Explanation, explain
from fp8pass.pipeline import stage_format

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Bisection",
    "Config",
    "ConfigError",
    "Diagnosis",
    "Explanation",
    "backend",
    "bisect",
    "calibrate",
    "diagnose",
    "explain",
    "stage_format",
]
