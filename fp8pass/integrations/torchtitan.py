"""Run `torchtitan.train` with `--compile.backend fp8pass` and FP8 communication.

    torchrun --nproc_per_node 8 -m fp8pass.integrations.torchtitan --compress \\
        --module llama3 --config llama3_8b --compile.enable --compile.backend fp8pass

With several ranks, `--compress` calls `fp8pass.distributed.compress` for each part of the model.
All other arguments are passed to torchtitan.

Since version 0.3, all language models of torchtitan use FlexAttention. torchtitan compiles
FlexAttention only with Inductor, because other backends would compute the full matrix of attention
scores. fp8pass generates code with Inductor, so this module exempts fp8pass from torchtitan's check
of the backend. The module has no effect if torchtitan accepts fp8pass
(docs/upstream/torchtitan_backends.md) or has no such check.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib import util
from typing import Any

from torch import distributed as dist

NAME = "fp8pass"
MODULE = "torchtitan.distributed.compile"  # since 0.3
CHECK = "_maybe_regional_inductor_backend"


def register() -> None:
    """Exempt fp8pass from torchtitan's check of the backend. Repeated calls do nothing."""
    if util.find_spec(MODULE) is None:
        return
    module = importlib.import_module(MODULE)
    check: Callable[[Any, Any], Any] | None = getattr(module, CHECK, None)
    if check is None or hasattr(check, "__wrapped__"):
        return

    @wraps(check)
    def check_others(model: Any, backend: Any) -> Any:
        return backend if backend == NAME else check(model, backend)

    setattr(module, CHECK, check_others)


def compress_models() -> None:
    from fp8pass.distributed import compress

    trainer = _find_trainer()
    build = trainer.__init__

    @wraps(build)
    def build_and_compress(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for part in self.model_parts if dist.get_world_size() > 1 else ():
            compress(part)

    trainer.__init__ = build_and_compress


def _find_trainer() -> Any:
    found = util.find_spec("torchtitan.trainer")  # since 0.3
    return importlib.import_module(found.name if found else "torchtitan.train").Trainer


def main() -> None:
    compresses = "--compress" in sys.argv
    if compresses:
        sys.argv.remove("--compress")  # torchtitan 0.2 parses arguments when it is imported
    register()
    if compresses:
        compress_models()
    train = importlib.import_module("torchtitan.train").main
    train(*[_find_trainer()] if inspect.signature(train).parameters else [])


if __name__ == "__main__":
    main()
else:
    register()
