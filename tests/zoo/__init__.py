"""Architectures from tiny configs, compiled with fp8pass and compared with eager PyTorch.

huggingface.py   those of transformers
modules.py       those of torch.nn: its modules, and blocks as timm and diffusion models have
stock.py         what stock PyTorch cannot compile
test_zoo.py      a sample in every run, all of them under `make test-long` and on a GPU
__main__.py      records what becomes of each, for docs/supported.md
"""

import os
import sys
from pathlib import Path

# What the tests set in conftest.py and find beside it.
os.environ.setdefault("FP8PASS_SEED", "0")
if (tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.insert(0, tests)
