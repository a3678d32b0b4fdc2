"""Run the jobs of a benchmark on all GPUs of a machine, in one or several processes per GPU."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch import multiprocessing

_END = None
# A job yields this when it is ready to measure, and gets control back when no job of the same GPU
# prepares or measures.
ALONE = "alone"
Work = Callable[[Any, torch.device], Iterable[Any]]


@dataclass(frozen=True)
class Group:
    """Processes that run the same jobs, as the ranks of one process group.

    Attributes:
        number: number of the group.
        ranks: number of processes, with one GPU each.
        on_gpu: whether the processes use GPUs.
        folder: a temporary folder that all processes share.
    """

    number: int
    ranks: int
    on_gpu: bool
    folder: str


@dataclass
class Turn:
    """Lets several jobs of a GPU prepare at the same time, and measure one after the other.

    Attributes:
        ready: a barrier, which all jobs pass when the last job is ready.
        measuring: a lock, which the job holds that measures.
    """

    ready: Any
    measuring: Any
    is_ready: bool = False

    def take(self) -> None:
        """Wait until all jobs are ready and no other job measures."""
        self.is_ready = True
        self.ready.wait()
        self.measuring.acquire()

    def end(self) -> None:
        """Let the next job measure. A job that failed lets the other jobs start."""
        if not self.is_ready:
            self.take()
        self.measuring.release()


def run_jobs(work: Work, jobs: list[Any], *, ranks: int = 1, at_once: int = 1) -> Iterator[Any]:
    """Yield the results of `work(job, device)` for all jobs, from processes with one GPU each.

    Each job runs on `ranks` GPUs, as the ranks of a process group. Rank 0's results are yielded.
    Without a GPU one group runs on the CPU, and a single rank runs in this process. With one rank,
    `at_once` jobs share a GPU. They compile at the same time and measure alone (`ALONE`).

    Raises:
        RuntimeError: jobs failed; the message has their tracebacks. A job that fails on one GPU
            does not end other jobs.
    """
    gpus = torch.cuda.device_count()
    if not gpus and ranks == 1:
        for job in jobs:
            yield from (result for result in work(job, torch.device("cpu")) if result is not ALONE)
        return
    if at_once == 1:
        yield from _run_groups(work, jobs, max(gpus // ranks, 1), ranks)
        return
    assert ranks == 1
    size, failures = gpus * at_once, list[str]()
    for batch in (jobs[i : i + size] for i in range(0, len(jobs), size)):
        try:
            yield from _run_groups(work, batch, len(batch), shared=True)
        except RuntimeError as error:
            failures.append(str(error))
    if failures:
        raise RuntimeError("\n".join(failures))


def _run_groups(
    work: Work, jobs: Iterable[Any], groups: int, ranks: int = 1, *, shared: bool = False
) -> Iterator[Any]:
    """Run jobs in groups of processes. If GPUs are `shared`, each group runs one job."""
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        waiting, results = context.Queue(), context.Queue()
        for job in (*jobs, *[_END] * groups):
            waiting.put(job)
        ready = context.Barrier(groups)
        locks = [context.Lock() for _ in range(max(gpus, 1))]
        turns = [Turn(ready, locks[i % len(locks)]) if shared else None for i in range(groups)]
        processes = [
            context.Process(
                target=_serve, args=(work, rank, group, waiting, results, turns[group.number])
            )
            for group in (Group(g, ranks, gpus > 0, folder) for g in range(groups))
            for rank in range(ranks)
        ]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        names = visible.split(",") if gpus else [""]
        threads = max((os.cpu_count() or 1) // len(processes), 1)
        own = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} if shared else {}
        for process, name in zip(processes, cycle(names), strict=False):
            with patch.dict(os.environ, own, CUDA_VISIBLE_DEVICES=name):
                process.start()  # the child inherits the variables
        try:
            yield from _results_of(results, len(processes), ranks)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _results_of(results: Any, processes: int, ranks: int) -> Iterator[Any]:
    ended, failures = 0, list[str]()
    while ended < processes and not (failures and ranks > 1):
        kind, value = results.get()
        if kind == "found":
            yield value
        if kind == "failed":
            print(value, file=sys.stderr, flush=True)
            failures.append(value)
        ended += kind == "ended"
    if failures:
        raise RuntimeError("\n".join(failures))


def _serve(
    work: Work, rank: int, group: Group, waiting: Any, results: Any, turn: Turn | None
) -> None:
    """Run jobs as one rank of a group until no jobs are left."""
    device = _device(group)
    if group.ranks > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{group.folder}/store{group.number}",
            rank=rank,
            world_size=group.ranks,
        )
    while (job := _next_job(rank, group, waiting)) is not _END:
        try:
            for result in work(job, device):
                if result is ALONE and turn is not None:
                    turn.take()
                elif result is not ALONE and rank == 0:
                    results.put(("found", result))
        except Exception:
            results.put(("failed", f"{job}\n{traceback.format_exc()}"))
        if turn is not None:
            turn.end()
    results.put(("ended", None))
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(group: Group) -> torch.device:
    """Return the only visible GPU, number 0 in each process, so that processes share code."""
    if not group.on_gpu:
        torch.set_num_threads(1)
        return torch.device("cpu")
    if (count := torch.cuda.device_count()) != 1:
        raise RuntimeError(f"a process sees {count} GPUs")
    return torch.device("cuda", 0)


def _next_job(rank: int, group: Group, waiting: Any) -> Any:
    job = [waiting.get() if rank == 0 else None]
    if group.ranks > 1:
        dist.broadcast_object_list(job)
    return job[0]
