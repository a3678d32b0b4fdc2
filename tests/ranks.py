"""Persistent processes, one for each rank, that run functions for tests.

Starting a process and importing PyTorch takes as long as ten small test cases.
"""

from __future__ import annotations

import os
import queue
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

from fp8pass import hardware

# Limit for a rank that waits for a failed rank, or for a collective that no other rank joins.
TIMEOUT = timedelta(seconds=60)
# Seconds in which a rank must return. On two cores, the C++ compiler takes over two minutes for the
# generated code of a layer with experts.
ANSWER = 300


class Ranks:
    """Runs functions on all ranks at once. Their first argument is the device type."""

    def __init__(self, tasks: list[Any], results: Any, device: str) -> None:
        self._tasks, self._results, self.device = tasks, results, device
        self.broken = ""

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of `function(device, *args)` on each rank: CPU tensors and numbers.

        Raises:
            AssertionError: the function raised an error on a rank, or took too long.
        """
        assert not self.broken, f"an earlier function broke the process group: {self.broken}"
        for tasks in self._tasks:
            tasks.put((function, (self.device, *args)))
        found: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(found) + len(errors) < len(self._tasks):
            try:
                rank, result, error = self._results.get(timeout=ANSWER)
            except queue.Empty:
                self.broken = function.__name__
                missing = set(range(len(self._tasks))) - found.keys() - errors.keys()
                errors |= dict.fromkeys(missing, "did not answer")
                break
            (errors if error else found)[rank] = error or result
        if found and errors:  # some ranks may wait in a collective
            self.broken = function.__name__
        assert not errors, "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())
        return [found[rank] for rank in range(len(self._tasks))]


@contextmanager
def ranks(folder: Path, device: str, world: int = 2) -> Iterator[Ranks]:
    """Start processes with a process group: NCCL on GPUs, gloo on CPUs."""
    context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    # The server imports once and forks the ranks. CUDA does not work in forked processes.
    context.set_forkserver_preload(["fp8pass.dynamo", "torch.distributed.fsdp"])
    tasks, results = [context.Queue() for _ in range(world)], context.Queue()
    store = folder / "store"
    processes = [
        context.Process(target=_serve, args=(rank, world, device, store, tasks[rank], results))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        yield Ranks(tasks, results, device)
    finally:
        for each in tasks:
            each.put(None)
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _serve(rank: int, world: int, device: str, store: Path, tasks: Any, results: Any) -> None:
    """Run tasks until a task is None."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        hardware.rates_of = lambda device: None  # as `all_in_fp8` in worker.py
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    while (task := tasks.get()) is not None:
        function, args = task
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            results.put((rank, function(*args), ""))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Threads of process groups may outlive the interpreter, which then aborts.
    os._exit(0)
