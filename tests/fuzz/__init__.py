"""Random programs, compiled with fp8pass and compared: `python -m tests.fuzz --seconds 60`.

operators.py   the operators that programs are drawn from
parts.py       functions that programs call
events.py      changes of the model and tools between steps
program.py     a program as data, and as Python
drawing.py     draws programs
checks.py      checks the results of a program
shrinking.py   makes a failing program smaller
script.py      writes a program as a script
workers.py     processes that run programs
__main__.py    the command
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# In a test run conftest.py sets the seed, and pytest adds its folder to the path.
os.environ.setdefault("FP8PASS_CHECK", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if (tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.insert(0, tests)
