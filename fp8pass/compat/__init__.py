"""All private PyTorch symbols that fp8pass uses, for all supported versions.

No module outside of this folder imports from `torch._*`. `fp8pass.compat` re-exports the names in
each module's `__all__`.

compiling.py      Dynamo, AOTAutograd and Inductor
joint.py          joint graphs: inputs, checkpointing tags, partitioning
operators.py      properties of tensors, sizes and operators
reductions.py     Inductor's choice of kernels for reductions
launching.py      makes Inductor's generated code use fp8pass's kernels and buffers
fakes.py          runs a model without memory
tracing.py        traces a function into operators that Inductor lowers
frames.py         looks up the function that Dynamo is tracing
attributes.py     sets attributes for a limited time
hooks.py          finds, disables and removes hooks of tensors, modules and optimizers
loading.py        prepares and completes loads of checkpoints
pipelining.py     schedules of pipeline parallelism
data_parallel.py  FSDP2 and `replicate`; imported separately, as it needs torch.distributed
"""

from __future__ import annotations

import torch

SUPPORTED = ">=2.11,<2.15"
_MINIMUM, _BELOW = (2, 11), (2, 15)


def check_version(version: str) -> None:
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not _MINIMUM <= release < _BELOW:
        raise ImportError(
            f"fp8pass supports PyTorch {SUPPORTED}, but version {version} is installed. "
            f"Install a supported version: pip install 'torch{SUPPORTED}'"
        )


check_version(torch.__version__)

from fp8pass.compat.compiling import *  # noqa: E402, F403
from fp8pass.compat.fakes import *  # noqa: E402, F403
from fp8pass.compat.frames import *  # noqa: E402, F403
from fp8pass.compat.hooks import *  # noqa: E402, F403
from fp8pass.compat.joint import *  # noqa: E402, F403
from fp8pass.compat.launching import *  # noqa: E402, F403
from fp8pass.compat.loading import *  # noqa: E402, F403
from fp8pass.compat.operators import *  # noqa: E402, F403
from fp8pass.compat.pipelining import *  # noqa: E402, F403
from fp8pass.compat.reductions import *  # noqa: E402, F403
from fp8pass.compat.tracing import *  # noqa: E402, F403
