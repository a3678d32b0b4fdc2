"""Log compilations: a line for each training graph, warnings, and a spinner.

When PyTorch takes a graph from its caches, fp8pass's passes do not run, and there is no plan to
report. Therefore the messages of the original compilation are stored in files, in the folder of
Inductor's caches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from torch import fx, nn

from fp8pass import compat, hardware
from fp8pass.compilation import describe_config, match_names, source_hash
from fp8pass.config import Config
from fp8pass.graph.dropped_logits import find_returned_logits
from fp8pass.hooks import CompiledGraph, CompileVersion, Hooks, Program, Wrap
from fp8pass.option_checks import bytes_text
from fp8pass.passes.runner import disabled_passes
from fp8pass.plan import Plan

log = logging.getLogger("fp8pass")

# If more than this share of a graph's weights unexpectedly stays in high precision, log a warning.
ROUTINE_SHARE = 0.05
# If `return_logits=False` saves more than this number of bytes, log a hint.
LARGE_LOGITS = 1 << 30
# The kind of the line that summarizes a graph. All other kinds of messages are warnings.
SUMMARY = "summary"


@dataclass(frozen=True)
class CompileLog(Hooks):
    """Logs one line for each graph with a backward, and each kind of warning once per model.

    In distributed training only the first rank logs. If PyTorch takes a graph from its caches, the
    messages of the graph's original compilation are logged, once in each process.
    """

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap:
        """Return a function to call with the compiled graph.

        If PyTorch took the graph from its caches, the function logs the graph's stored messages.
        Otherwise it stores the messages of this compilation.
        """
        stored = StoredMessages.find(gm, config)
        returns_logits = bool(find_returned_logits(gm))

        def finish(program: Program, compiled: CompiledGraph | None) -> Program:
            if compiled:
                hint = {"logits": large_logits(compiled.plan)} if returns_logits else {}
                _log(hint)
                stored.write(describe(compiled) | hint)
            elif stored.key not in _logged:
                _log(stored.read())
            _logged.add(stored.key)
            return program

        return finish

    def after_passes(self, compiled: CompiledGraph) -> None:
        messages = describe(compiled)
        if not messages:
            log.debug("%s", compiled.plan.summary())
        _log(messages)

    @contextlib.contextmanager
    def while_compiling(self, what: str) -> Iterator[None]:
        """Show `what` with a spinner while the context is open, if stderr is a terminal."""
        console = Console(stderr=True)
        if not console.is_terminal or is_later_rank():
            yield
            return
        with console.status(Text(f"fp8pass: {what} …")):
            yield


def describe(compiled: CompiledGraph) -> dict[str, str]:
    """Return the messages about a graph, by kind.

    The result is empty if the graph has no backward or no linear layer.
    """
    plan = compiled.plan
    if plan.inference or not plan.linears:
        return {}
    return {SUMMARY: plan.summary(), "precision": unexpected_precision(plan)}


def _log(messages: dict[str, str]) -> None:
    if is_later_rank():
        return
    for kind, text in messages.items():
        if kind == SUMMARY:
            _inform(text)
        else:
            _warn_once(kind, text)


def unexpected_precision(plan: Plan) -> str:
    """Return a warning about weights that unexpectedly stay in high precision, or ''."""
    share = plan.unexpected_share
    if share <= ROUTINE_SHARE:
        return ""
    first = max(plan.unexpected, key=lambda y: y.weights)
    return (
        f"{share:.0%} of the weights of a graph unexpectedly stay in high precision, for example "
        f"{first.module or 'the top level'}: {first.reason}. fp8pass.explain(model, ...) lists "
        "them."
    )


def large_logits(plan: Plan) -> str:
    """Return a hint about large logits that a model returns, or ''."""
    avoidable = sum(head.avoidable_bytes for head in plan.heads)
    if plan.inference or avoidable <= LARGE_LOGITS:
        return ""
    return (
        "The model returns its logits together with the loss. If training needs only the loss, "
        f"return_logits=False saves {bytes_text(avoidable)} of logits and their gradients: "
        "options={'return_logits': False}."
    )


# The keys of the graphs that this process has logged.
_logged: set[str] = set()
# For each call of `torch.compile`, the kinds of warnings that were logged.
_warned: compat.WeakIdKeyDictionary = compat.WeakIdKeyDictionary()


def _warn_once(kind: str, text: str) -> None:
    """Log a warning, unless another graph of the model had a warning of the same kind."""
    call = compat.compile_call()
    before: set[str] = _warned.setdefault(call, set()) if call is not None else set()
    if text and kind not in before:
        before.add(kind)
        log.warning("%s", text)


def _inform(line: str) -> None:
    """Log a line as INFO, or print it to stderr if logging is not set up and would drop it."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        log.info("%s", line)
    else:
        print(f"fp8pass: {line}", file=sys.stderr)


def is_later_rank() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    )


@dataclass(frozen=True)
class StoredMessages:
    """The file with the messages about one graph. Failures to read or write it are ignored."""

    key: str  # hash of the graph, its inputs, the configuration and the source of fp8pass
    path: Path | None  # None if compiled graphs are not cached

    @classmethod
    def find(cls, gm: fx.GraphModule, config: Config) -> StoredMessages:
        """Return the file for the Dynamo graph `gm`. The file may not exist yet."""
        values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        text = repr(
            (
                [part.code for part in gm.modules() if isinstance(part, fx.GraphModule)],
                [_describe(x) for x in values],
                torch.is_grad_enabled(),
                [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
                describe_config(config),
                match_names(gm, config),
                disabled_passes(),
                source_hash(),
            )
        )
        key = hashlib.sha256(text.encode()).hexdigest()
        folder = compat.cache_folder()
        return cls(key, Path(folder, "fp8pass", f"{key}.json") if folder else None)

    def read(self) -> dict[str, str]:
        """Return the stored messages by kind, or {} if the file cannot be read."""
        try:
            return dict(json.loads(self.path.read_text())) if self.path else {}
        except (OSError, ValueError, TypeError):
            return {}

    def write(self, messages: dict[str, str]) -> None:
        """Store messages, if any. The file is replaced atomically, so it is never incomplete."""
        if not self.path or not messages:
            return
        part = self.path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(messages))
            os.replace(part, self.path)


def _describe(x: object) -> str:
    """Return the properties of a graph input that messages depend on."""
    if not isinstance(x, torch.Tensor):
        return str(x)
    is_parameter = isinstance(x, nn.Parameter)
    device = f"{x.device} {hardware.name_of(x.device)}"
    return f"{x.dtype} {tuple(x.shape)} {device} {x.requires_grad} {is_parameter}"
