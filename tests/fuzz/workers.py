"""Processes that run programs. A process that dies or hangs is a failure of its program."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .checks import Outcome, check
from .drawing import draw
from .program import Program
from .shrinking import shrink

TIMEOUT_S = 900.0  # seconds for a program and for shrinking it
LIFETIME = 150  # programs before a process is replaced, because compilations leak memory


@dataclass(frozen=True)
class Settings:
    """Settings of all workers."""

    seed: int = 0
    device: str = "cpu"
    inductor_share: float = 0.0
    recipe: str | None = None
    shrink_seconds: float = 120.0


@dataclass
class Result:
    """The outcome of a program. A failing program is the shrunk program."""

    index: int
    recipe: str
    compiler: str
    outcome: Outcome
    program: Program | None = None


Try = Callable[[Settings, int], Result]


def try_program(settings: Settings, index: int) -> Result:
    """Draw and check a program. Shrink it if it fails."""
    program = draw(settings.seed, index, settings.inductor_share, settings.recipe)
    outcome = check_safely(program, settings.device)
    result = Result(index, program.recipe, program.compiler, outcome)
    if outcome.failure:
        smaller = shrink(
            program,
            outcome.failure,
            lambda p: check_safely(p, settings.device),
            settings.shrink_seconds,
        )
        result.program = smaller
        result.outcome = check_safely(smaller, settings.device)
        if not result.outcome.failure:  # it does not always fail
            result.program, result.outcome = program, outcome
    return result


def check_safely(program: Program, device: str) -> Outcome:
    """Check a program. An exception of the check is a failure, too."""
    try:
        return check(program, device)
    except Exception:
        return Outcome("check", traceback.format_exc(limit=-8))


def set_up_process() -> None:
    """Set up a process: one thread, no warnings, no logs, and rare garbage collection."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 20, 20)


def use_deterministic_kernels() -> None:
    """Use deterministic GPU kernels, so that results can be compared bit by bit."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def _serve(pipe: Connection, settings: Settings, try_: Try) -> None:
    set_up_process()
    if settings.device == "cuda":
        use_deterministic_kernels()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the main process has ended
        while True:
            pipe.send(try_(settings, pipe.recv()))


class _Worker:
    """A process, and the program that it runs."""

    def __init__(self, settings: Settings, try_: Try) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings, try_), daemon=True)
        self.process.start()
        theirs.close()
        self.tried = 0
        self.index = -1
        self.since = time.monotonic()

    def start(self, index: int) -> None:
        self.index, self.since = index, time.monotonic()
        self.tried += 1
        self.pipe.send(index)

    def result(self) -> Result:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return self.fail(f"the process ended with exit code {self.process.exitcode}")

    def fail(self, message: str) -> Result:
        """Return a failure of the current program."""
        self.tried = LIFETIME
        return Result(self.index, "?", "?", Outcome("crash", message))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def results(
    settings: Settings,
    first: int,
    count: int | None,
    seconds: float | None,
    workers: int,
    try_: Try = try_program,
) -> Iterator[Result]:
    """Yield results of `count` programs, or of as many as the time allows."""
    end = time.monotonic() + seconds if seconds else None
    index = first
    busy: list[_Worker] = []
    idle = [_Worker(settings, try_) for _ in range(workers)]
    try:
        while True:
            late = end is not None and time.monotonic() > end
            while idle and not late and (count is None or index < first + count):
                worker = idle.pop()
                if worker.tried >= LIFETIME:
                    worker.stop()
                    worker = _Worker(settings, try_)
                worker.start(index)
                busy.append(worker)
                index += 1
            if not busy:
                return
            for worker, result in _finished(busy):
                busy.remove(worker)
                idle.append(worker)
                yield result
    finally:
        for worker in (*busy, *idle):
            worker.stop()


def _finished(busy: list[_Worker]) -> list[tuple[_Worker, Result]]:
    """Wait up to a second, and return the workers that are done or take too long."""
    ready = wait([w.pipe for w in busy], timeout=1.0)
    done = [(w, w.result()) for w in busy if w.pipe in ready]
    hanging = [w for w in busy if w.pipe not in ready and time.monotonic() - w.since > TIMEOUT_S]
    return done + [(w, w.fail(f"it takes more than {TIMEOUT_S:.0f} s")) for w in hanging]
