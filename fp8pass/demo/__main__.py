"""`python -m fp8pass.demo`, the same as `fp8pass demo`."""

from __future__ import annotations

import sys

from fp8pass.tools.cli import main

sys.exit(main(["demo", *sys.argv[1:]]))
