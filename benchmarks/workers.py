"""Run the jobs of a benchmark on all GPUs of a machine, with one process for each GPU."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch import multiprocessing

_END = None
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


def run_jobs(work: Work, jobs: list[Any], *, ranks: int = 1) -> Iterator[Any]:
    """Yield the results of `work(job, device)` for all jobs, from processes with one GPU each.

    Each job runs on `ranks` GPUs, as the ranks of a process group. Rank 0's results are yielded.
    Without a GPU one group runs on the CPU, and a single rank runs in this process.

    Raises:
        RuntimeError: jobs failed; the message has their tracebacks. A job that fails on one GPU
            does not end other jobs.
    """
    gpus = torch.cuda.device_count()
    if not gpus and ranks == 1:
        for job in jobs:
            yield from work(job, torch.device("cpu"))
        return
    groups = max(gpus // ranks, 1)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        waiting, results = context.Queue(), context.Queue()
        for job in (*jobs, *[_END] * groups):
            waiting.put(job)
        processes = [
            context.Process(target=_serve, args=(work, rank, group, waiting, results))
            for group in (Group(g, ranks, gpus > 0, folder) for g in range(groups))
            for rank in range(ranks)
        ]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        names = visible.split(",") if gpus else [""] * len(processes)
        for process, name in zip(processes, names, strict=False):
            with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=name):
                process.start()  # the child inherits the variable
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


def _serve(work: Work, rank: int, group: Group, waiting: Any, results: Any) -> None:
    """Run jobs as one rank of a group until no jobs are left."""
    device = _device(group)
    if group.ranks > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{group.folder}/store{group.number}",
            rank=rank,
            world_size=group.ranks,
        )
    while (job := _next_job(rank, group, waiting)) is not _END:
        try:
            for result in work(job, device):
                if rank == 0:
                    results.put(("found", result))
        except Exception:
            results.put(("failed", f"{job}\n{traceback.format_exc()}"))
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
