"""`python -m fp8pass`: the command line (`tools/cli/`)."""

from __future__ import annotations

import sys

from fp8pass.tools.cli import main

sys.exit(main())
