"""Log compilations: one line for each training graph, warnings, a spinner."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text
from torch import fx

from fp8pass import compat
from fp8pass.config import Config
from fp8pass.graph.dropped_logits import find_returned_logits
from fp8pass.hooks import CompiledGraph, CompileVersion, Hooks, Program, Wrap
from fp8pass.option_checks import bytes_text
from fp8pass.plan import Plan
from fp8pass.progress.stored import StoredMessages

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
        """Return a function that logs a cached graph's stored messages, or stores new messages."""
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
        """Log the messages about a graph that was just compiled."""
        messages = describe(compiled)
        if not messages:
            log.debug("%s", compiled.plan.summary())
        _log(messages)

    @contextmanager
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

    Return {} for graphs of inference and for graphs without linear layers.
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
    """Log a line, or print it to stderr if logging is not set up and so would not show it."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        log.info("%s", line)
    else:
        print(f"fp8pass: {line}", file=sys.stderr)


def is_later_rank() -> bool:
    """Return whether this process is a rank of distributed training, but not the first rank."""
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    )
