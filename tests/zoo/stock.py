"""Architectures that stock PyTorch cannot compile, and its error.

They are compiled with fp8pass as far as Inductor, and run op by op. `test_zoo.py` checks that they
still fail.
"""

from __future__ import annotations

FAILS: dict[str, str] = {}
