"""Many Python processes, some at a time, their output in files, spread over the GPUs there are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch

from dspark.errors import UserError

Result = TypeVar("Result")


def together(calls: Sequence[Callable[[], Result]], jobs: int) -> list[Result]:
    """Results of all calls, `jobs` of them at a time.

    One that fails stops no other; the first failure is raised at the end. Ctrl-C starts no more.
    """
    with ThreadPoolExecutor(jobs) as pool:
        submitted = [pool.submit(call) for call in calls]
        try:
            wait(submitted)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [job.result() for job in submitted]


class Devices:
    """GPUs by number, each handed to whoever comes while it has the fewest users."""

    def __init__(self, names: Sequence[str]) -> None:
        self._users = Counter(dict.fromkeys(names, 0))
        self._lock = Lock()

    @contextmanager
    def one(self) -> Iterator[str | None]:
        """The name of a GPU to use for a while; None where there is no choice."""
        if len(self._users) < 2:
            yield None
            return
        with self._lock:
            name = min(self._users, key=lambda name: self._users[name])
            self._users[name] += 1
        try:
            yield name
        finally:
            with self._lock:
                self._users[name] -= 1


def visible_gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` may be set to for one GPU each."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[: torch.cuda.device_count()] or [str(i) for i in range(torch.cuda.device_count())]


def call_module(arguments: Sequence[str], log: Path, gpu: str | None = None) -> None:
    """Run `python -m ARGUMENTS` on one thread, its output in `log`.

    Raises UserError with the last line of the output if it fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    # several processes share a GPU: none may hold on to memory in pieces that nobody can use
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    if done.returncode:
        lines = log.read_text().strip().splitlines() or ["no output"]
        raise UserError(f"{log}: the run failed: {lines[-1]}")
