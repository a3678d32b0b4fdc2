"""Processes that try programs: one that dies or hangs is a failure of its program."""

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

PATIENCE = 900.0  # seconds for a program and for shrinking it
LIFETIME = 150  # programs that a process tries: what a compilation leaves in memory adds up


@dataclass(frozen=True)
class Settings:
    """What all workers share."""

    seed: int = 0
    device: str = "cpu"
    inductor_share: float = 0.0
    recipe: str | None = None
    shrink_seconds: float = 120.0


@dataclass
class Result:
    """What came of the program of an index; the program is the shrunk one where it failed."""

    index: int
    recipe: str
    compiler: str
    outcome: Outcome
    program: Program | None = None


Try = Callable[[Settings, int], Result]


def try_program(settings: Settings, index: int) -> Result:
    """Draw, check, and shrink if it fails."""
    program = draw(settings.seed, index, settings.inductor_share, settings.recipe)
    outcome = guarded(program, settings.device)
    result = Result(index, program.recipe, program.compiler, outcome)
    if outcome.failure:
        smaller = shrink(
            program,
            outcome.failure,
            lambda p: guarded(p, settings.device),
            settings.shrink_seconds,
        )
        result.program = smaller
        result.outcome = guarded(smaller, settings.device)
        if not result.outcome.failure:  # it does not fail each time
            result.program, result.outcome = program, outcome
    return result


def guarded(program: Program, device: str) -> Outcome:
    """`check`; an exception of its own is a failure of the program, too."""
    try:
        return check(program, device)
    except Exception:
        return Outcome("check", traceback.format_exc(limit=-8))


def quiet() -> None:
    """One thread, no warnings, no logs, and a patient garbage collector."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 20, 20)


def deterministic() -> None:
    """Have a GPU give the same bits each time: not all its kernels do unless asked to."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def _serve(pipe: Connection, settings: Settings, try_: Try) -> None:
    quiet()
    if settings.device == "cuda":
        deterministic()
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody listens any more
        while True:
            pipe.send(try_(settings, pipe.recv()))


class _Worker:
    """A process, and the program that it tries."""

    def __init__(self, settings: Settings, try_: Try) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings, try_), daemon=True)
        self.process.start()
        theirs.close()
        self.tried = 0
        self.index = -1
        self.since = time.monotonic()

    def give(self, index: int) -> None:
        self.index, self.since = index, time.monotonic()
        self.tried += 1
        self.pipe.send(index)

    def result(self) -> Result:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return self.lost(f"the process ended with exit code {self.process.exitcode}")

    def lost(self, message: str) -> Result:
        """The program that it tried, as a failure."""
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
    """What comes of `count` programs, or of as many as are tried in that time."""
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
                worker.give(index)
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
    """Those that are done, after waiting a little, and those that take too long."""
    ready = wait([w.pipe for w in busy], timeout=1.0)
    done = [(w, w.result()) for w in busy if w.pipe in ready]
    hanging = [w for w in busy if w.pipe not in ready and time.monotonic() - w.since > PATIENCE]
    return done + [(w, w.lost(f"it takes more than {PATIENCE:.0f} s")) for w in hanging]
