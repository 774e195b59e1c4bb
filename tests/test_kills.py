"""`dspark distill` killed with SIGKILL at twenty moments and resumed: the bytes of a quiet run.

The moments are drawn from a quiet run's own events, so that every kind of work is hit: answering,
writing rows, running the target for states, writing states, a step, writing a checkpoint, the
finish; and some by the clock alone.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dspark import files
from dspark.distill import answers, cache_build
from dspark.distill.cache import plan_cache
from dspark.distill.config import DistillConfig
from dspark.distill.run import RUN_FILE, run_distill
from dspark.distill.trainer import Trainer
from dspark.runtime.k3_target import K3Target
from tests.test_distill_run import prompt_file, settings, target_folder  # noqa: F401

pytestmark = pytest.mark.slow

KILLS = 20
KINDS = (
    "answering", "writing rows", "taking states", "writing states", "step", "writing checkpoints",
    "finishing", "time",
)  # fmt: skip


class Events:
    """Counts what a run does by kind, and kills the process at one of them."""

    def __init__(self, kind: str | None, number: float) -> None:
        self.kind, self.number, self.seen = kind, number, Counter[str]()

    def __call__(self, kind: str) -> None:
        self.seen[kind] += 1
        if kind == self.kind and self.seen[kind] > self.number:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self, out: Path) -> None:
        """Watch target passes, steps, and every flush and rename inside the run folder."""
        replace, sync = os.replace, files._sync
        forward, step = K3Target.forward, Trainer.run_step

        def where(path: object) -> str:
            name = str(path).removeprefix(str(out)).strip("/").partition("/")[0]
            known = {"rows": "writing rows", "states": "writing states"}
            known["checkpoints"] = "writing checkpoints"
            return known.get(name, "finishing")

        def watched_replace(old: Any, new: Any) -> None:
            self(where(new))
            replace(old, new)
            self(where(new))

        def watched_sync(path: Path, flags: int) -> None:
            self(where(path))
            sync(path, flags)

        def watched_forward(target: K3Target, *args: Any, taps: Any = None, **kwargs: Any) -> Any:
            self("answering" if taps is None else "taking states")
            return forward(target, *args, taps=taps, **kwargs)

        def watched_step(trainer: Trainer, number: int) -> Any:
            self("step")
            return step(trainer, number)

        os.replace, files._sync = watched_replace, watched_sync  # type: ignore[assignment]
        K3Target.forward = watched_forward  # type: ignore[method-assign]
        Trainer.run_step = watched_step  # type: ignore[method-assign]


def child(config: DistillConfig, kind: str | None, number: float, pipe: Any) -> None:
    """Start or continue a run, to be killed at event `number` of `kind`, or after that long."""
    torch.set_num_threads(1)
    answers.PART = 5  # four files of rows
    # and about eight of states
    cache_build.plan_cache = lambda *args: plan_cache(*args, shard_bytes=30_000)  # type: ignore
    out = Path(config.out.dir)
    events = Events(kind, number)
    events.install(out)
    started = time.perf_counter()
    if kind == "time":
        threading.Timer(number, os.kill, (os.getpid(), signal.SIGKILL)).start()
    resume = (out / RUN_FILE).exists()
    run_distill(config, resume, Console(file=io.StringIO()))
    pipe.send((dict(events.seen), time.perf_counter() - started))


def attempt(config: DistillConfig, kind: str | None = None, number: float = 0) -> Any:
    """Events and seconds of a run that got to its end; None if it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_kills", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(config, kind, number, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()
        if process.exitcode not in (0, -signal.SIGKILL):
            pytest.fail(f"a run that was killed at {kind} {number} ended with {process.exitcode}")


def content(out: Path) -> dict[str, bytes]:
    """Everything that a run's steps decide."""
    names = [
        "model.safetensors", "config.json", "checkpoints/step-000008/optimizer.safetensors",
        *(str(path.relative_to(out)) for path in (out / "rows").iterdir()),
        *(str(path.relative_to(out)) for path in out.glob("states/*/*")),
    ]  # fmt: skip
    return {name: (out / name).read_bytes() for name in names}


def test_twenty_kills_leave_no_trace(
    target_folder: Path,  # noqa: F811
    prompt_file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    def config(name: str) -> DistillConfig:
        return settings(
            target_folder, prompt_file, tmp_path / name, cache__mode="cached",
            cache__dtype="float32", cache__dir=None, out__checkpoint_every=1, eval__prompts=1,
        )  # fmt: skip

    seen, seconds = attempt(config("quiet"))
    quiet = content(tmp_path / "quiet")
    assert len(quiet) > 15
    assert set(seen) == set(KINDS) - {"time"}

    rng = random.Random(7)
    kills: Counter[str] = Counter()
    runs = 0
    while sum(kills.values()) < KILLS:
        runs += 1
        out = tmp_path / f"run-{runs}"
        while sum(kills.values()) < KILLS:
            # The rarest kind so far, at a moment that the whole run or its rest may have.
            kind = min(KINDS, key=lambda kind: (kills[kind], rng.random()))
            left = seconds if kind == "time" else seen[kind]
            number = rng.uniform(0, left) if kind == "time" else rng.randrange(left)
            if attempt(config(out.name), kind, number) is not None:
                break
            kills[kind] += 1
        attempt(config(out.name))
        assert content(out) == quiet, f"run {runs} after {dict(kills)}"
        assert not [p for p in out.rglob(".*") if p.name != ".cache"], "leftovers of kills"
    assert min(kills.values()) >= 2, kills
