"""`python -m fp8pass`: the command line (`cli/`)."""

from __future__ import annotations

import sys

from fp8pass.cli import main

sys.exit(main())
