"""Architectures from tiny configs, compiled with fp8pass and compared with eager PyTorch.

huggingface.py   architectures of transformers
modules.py       modules of torch.nn, and blocks of timm and of diffusion models
stock.py         architectures that stock PyTorch cannot compile
test_zoo.py      tests of a sample in every run, of all under `make test-long` and on a GPU
__main__.py      the command that records results for docs/supported.md
"""

import os
import sys
from pathlib import Path

# In a test run conftest.py sets the seed, and pytest adds its folder to the path.
os.environ.setdefault("FP8PASS_SEED", "0")
if (tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.insert(0, tests)
