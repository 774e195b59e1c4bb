"""The whole study on the GPUs there are, within a budget of seconds.

    answer                several shares at once: one alone waits for the host most of the time
    compared drafters     side by side on the first GPU, starting together: equal conditions
    their measurement     side by side: what the study is for comes before anything else
    speed                 alone
    long, smaller ones    beside each other and beside the measurements, spread over the GPUs

Every job is a process of its own and one step of the command; what is done is not repeated, so a
killed study goes on. A job waits for those that it needs, and is skipped, with a line that says so,
if one of them failed or if the budget has no room for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.errors import UserError
from dspark_eval.real_text.arms import COMPARED
from dspark_eval.study.processes import call_module

MODULE = "dspark_eval.real_text"
LONGEST = 600.0
"""Seconds of the longest training."""
OVERHEAD = 40.0
"""Seconds of a training besides its steps: opening the target, its states, compiling, writing."""
MEASURING = 80.0
SHARES = 4
"""Shares of the prompts that a GPU answers at once."""
VARIANTS, SIZES = ("deep", "kda"), ("middle", "small")
"""Further drafters, if the budget has room for them, and smaller ones."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One step of the command on one GPU.

    needs: names of jobs that come first. least: seconds it must have left to be started. flexible:
    it trains for what the budget leaves, up to `LONGEST`.
    """

    name: str
    gpu: int
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    least: float = 0.0
    flexible: bool = False


def jobs(gpus: int, seconds: float) -> list[list[Job]]:
    """Lanes of jobs: those of a lane run one after the other, lanes side by side."""
    answers = [_answer(shard, shard % gpus, SHARES * gpus) for shard in range(SHARES * gpus)]
    rows = tuple(job.name for job in answers)
    compared = tuple(f"train-{arm}" for arm in COMPARED)
    together = ("--beside", *COMPARED)
    last = gpus - 1
    first = [_measure(arm, at % gpus, compared) for at, arm in enumerate(COMPARED)]
    timed = Job(
        "speed", 0, ("speed", "--dtype", "bfloat16"), tuple(job.name for job in first), MEASURING
    )
    after = (timed.name,)
    return [
        *([job] for job in answers),
        *([_train(arm, 0, seconds, rows, together)] for arm in COMPARED),
        *([job] for job in first),
        [timed],
        [_long(last, after)],
        *([_train(arm, at % gpus, seconds, after)] for at, arm in enumerate(SIZES)),
        [_train(arm, 0, seconds, tuple(f"train-{size}" for size in SIZES)) for arm in VARIANTS],
        [_measure(arm, last, after) for arm in (*SIZES, "long", *VARIANTS)],
    ]


def _answer(shard: int, gpu: int, shards: int) -> Job:
    arguments = ("answer", "--shard", str(shard), "--shards", str(shards), "--new-tokens", "288")
    return Job(f"answer-{shard}", gpu, (*arguments, "--batch", "1408", "--dtype", "bfloat16"))


def _train(
    arm: str, gpu: int, seconds: float, needs: tuple[str, ...], more: tuple[str, ...] = ()
) -> Job:
    arguments = ("train", "--arm", arm, "--dtype", "bfloat16", "--seconds", f"{seconds:g}", *more)
    return Job(f"train-{arm}", gpu, arguments, needs, seconds + OVERHEAD)


def _long(gpu: int, needs: tuple[str, ...]) -> Job:
    arguments = ("train", "--arm", "long", "--dtype", "bfloat16")
    return Job("train-long", gpu, arguments, needs, 2 * OVERHEAD + MEASURING, True)


def _measure(arm: str, gpu: int, needs: tuple[str, ...] = ()) -> Job:
    needs = (f"train-{arm}", *needs)
    return Job(f"measure-{arm}", gpu, ("measure", "--arm", arm), needs, MEASURING)


@dataclass
class Study:
    """The jobs of a study under way.

    Args:
        out: Folder of the study.
        common: Arguments of every step (prompts, target, device).
        budget: Seconds in all.
        training: Arguments of steps that train.
        last: Arguments of every step that come last, and so decide.
    """

    out: Path
    common: Sequence[str]
    budget: float
    say: Say
    training: Sequence[str] = ()
    last: Sequence[str] = ()
    _ended: dict[str, bool] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _started: float = field(default_factory=time.monotonic)

    def run(self, lanes: Sequence[Sequence[Job]]) -> dict[str, bool]:
        """Run all lanes; which jobs were done. Those that failed are named, none stops another."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self._lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return dict(self._ended)

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self._started)

    def _lane(self, lane: Sequence[Job]) -> None:
        for job in lane:
            done = False
            try:
                done = self._ready(job) and self._play(job)
            finally:  # whatever happened, others wait for this
                self._end(job, done)

    def _ready(self, job: Job) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: all(name in self._ended for name in job.needs))
            missing = [name for name in job.needs if not self._ended[name]]
        if missing:
            self.say(f"{job.name}: skipped, {missing[0]} was not done")
        elif self.left() < job.least:
            self.say(f"{job.name}: skipped, {self.left():.0f} s are left, {job.least:.0f} needed")
        return not missing and self.left() >= job.least

    def _play(self, job: Job) -> bool:
        arguments = list(job.arguments)
        if job.flexible:
            room = self.left() - OVERHEAD - MEASURING
            arguments += ["--seconds", f"{min(LONGEST, room):.0f}"]
        if job.arguments[0] == "train":
            arguments += self.training
        step, *rest = arguments
        started = time.monotonic()
        command = [MODULE, step, str(self.out), *self.common, *rest, *self.last]
        try:
            call_module(command, self.out / "logs" / f"{job.name}.log", str(job.gpu))
        except UserError as error:
            self.say(f"{job.name}: failed: {error}")
            return False
        self.say(f"{job.name}: done in {time.monotonic() - started:.0f} s")
        return True

    def _end(self, job: Job, done: bool) -> None:
        with self._changed:
            self._ended[job.name] = done
            self._changed.notify_all()
