"""Random programs, compiled with fp8pass and compared: `python -m tests.fuzz --seconds 60`.

operators.py   the operators that programs are drawn from
parts.py       functions that they call
events.py      what happens between its steps
program.py     a program as data, and as Python
drawing.py     draws one
checks.py      what must hold for it
shrinking.py   makes one that fails smaller
script.py      writes it as a script
workers.py     processes that try programs
__main__.py    the command
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# What the tests set in conftest.py and find beside it.
os.environ.setdefault("FP8PASS_CHECK", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if (tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.insert(0, tests)
