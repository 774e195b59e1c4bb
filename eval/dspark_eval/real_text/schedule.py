"""The whole study on the GPUs there are, within a budget of seconds.

    answer, warm          prompts written and answered; kernels compiled meanwhile
    compared drafters     side by side on the first GPU, starting together: equal conditions
    their measurement     the reference and the chosen candidate, a process a temperature: what the
                          study is for comes before anything else
    long                  beside the measurements and the smaller ones
    smaller ones          beside each other, then their measurement
    speed                 when nothing else runs
    other candidates      measured last

Every job is a process of its own and one step of the command; what is done is not repeated, so a
killed study goes on. A job waits for those that it needs, and is skipped, with a line that says so,
if one of them failed or if the budget has no room for it: so what stands last is dropped first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.errors import UserError
from dspark.files import read_json
from dspark_eval.real_text.arms import CHOSEN, REFERENCE, SIZES
from dspark_eval.real_text.measuring import TEMPERATURES
from dspark_eval.real_text.training import TRAINED
from dspark_eval.study.processes import call_module

MODULE = "dspark_eval.real_text"
LONGEST = 600.0
"""Seconds of the longest training."""
OVERHEAD = 30.0
"""Seconds of a training besides its steps: opening the target, its states, writing."""
MEASURING, SPEED = 75.0, 75.0
POLL = 1.0
"""Seconds between two looks for a file."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One step of the command on one GPU.

    needs: names of jobs that come first. after: names of jobs that must have ended, one way or the
    other. least: seconds it must have left to be started. flexible: it trains for what the budget
    leaves beside `spare`, up to the study's longest; all that are flexible for as long. file and
    maker: a file of the study that must be there, and the job that writes it while it runs.
    """

    name: str
    gpu: int
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    least: float = 0.0
    flexible: bool = False
    spare: float = OVERHEAD + MEASURING + SPEED
    file: str = ""
    maker: str = ""


def jobs(gpus: int, seconds: float, candidates: Sequence[str]) -> list[list[Job]]:
    """Lanes of jobs: those of a lane run one after the other, lanes side by side."""
    arms = (REFERENCE, *candidates)
    last = gpus - 1
    ready = ("answer", "warm")
    together = ("--beside", *arms)
    compared = tuple(f"train-{arm}" for arm in arms)
    first = [
        job for arm in (REFERENCE, CHOSEN) for job in _measured(arm, 0, compared[:1], compared)
    ]
    told = tuple(job.name for job in first)
    sizes = tuple(f"train-{arm}" for arm in SIZES)
    later = [
        job
        for arm in (*SIZES, "long")
        for job in _measured(arm, last, (f"train-{arm}",), (*told, *sizes))
    ]
    alone = tuple(job.name for job in later)
    rest = [
        job for arm in candidates for job in _measured(arm, 0, (f"train-{arm}",), (*alone, "speed"))
    ]
    return [
        [Job("answer", 0, ("answer", "--dtype", "bfloat16"))],
        [Job("warm", 0, ("warm", "--dtype", "bfloat16", *together))],
        *([_train(arm, 0, seconds, ready[:1], ready, together)] for arm in arms),
        *([job] for job in first),
        [_long(last, compared[:1], compared)],
        *([_train(arm, at % gpus, seconds, compared[:1], told)] for at, arm in enumerate(SIZES)),
        *([job] for job in later),
        [Job("speed", 0, ("speed", "--dtype", "bfloat16"), told, (*told, *alone), SPEED)],
        *([job] for job in rest),
    ]


def _train(
    arm: str,
    gpu: int,
    seconds: float,
    needs: tuple[str, ...],
    after: tuple[str, ...],
    more: tuple[str, ...] = (),
) -> Job:
    arguments = ("train", "--arm", arm, "--dtype", "bfloat16", "--seconds", f"{seconds:g}", *more)
    return Job(f"train-{arm}", gpu, arguments, needs, after, seconds + OVERHEAD)


def _long(gpu: int, needs: tuple[str, ...], after: tuple[str, ...]) -> Job:
    arguments = ("train", "--arm", "long", "--dtype", "bfloat16")
    least = 2 * OVERHEAD + MEASURING + SPEED
    return Job("train-long", gpu, arguments, needs, after, least, flexible=True)


def _measured(arm: str, gpu: int, needs: tuple[str, ...], after: tuple[str, ...]) -> list[Job]:
    return [
        Job(
            f"measure-{arm}-{temperature:g}",
            gpu,
            ("measure", "--arm", arm, "--temperature", f"{temperature:g}"),
            needs,
            after,
            MEASURING,
        )
        for temperature in TEMPERATURES
    ]


@dataclass
class Study:
    """The jobs of a study under way.

    Args:
        out: Folder of the study.
        common: Arguments of every step (prompts, target, device).
        budget: Seconds in all.
        training: Arguments of steps that train.
        last: Arguments of every step that come last, and so decide.
        without: Names of jobs that are left out.
        longest: Seconds of the longest training.
    """

    out: Path
    common: Sequence[str]
    budget: float
    say: Say
    training: Sequence[str] = ()
    last: Sequence[str] = ()
    without: Sequence[str] = ()
    longest: float = LONGEST
    _long: float | None = None
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
        if job.name in self.without:
            self.say(f"{job.name}: left out")
            return False
        with self._changed:
            awaited = {*job.needs, *job.after}
            self._changed.wait_for(lambda: all(name in self._ended for name in awaited))
            missing = [name for name in job.needs if not self._ended[name]]
            while job.file and not (self.out / job.file).is_file() and not missing:
                if job.maker in self._ended:
                    missing = [job.maker]
                self._changed.wait(POLL)
        if missing:
            self.say(f"{job.name}: skipped, {missing[0]} was not done")
        elif self.left() < job.least:
            self.say(f"{job.name}: skipped, {self.left():.0f} s are left, {job.least:.0f} needed")
        return not missing and self.left() >= job.least

    def _play(self, job: Job) -> bool:
        arguments = list(job.arguments)
        if job.flexible:
            arguments += ["--seconds", f"{self._room(job):.0f}"]
        if job.arguments[0] in ("train", "warm"):
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

    def _room(self, job: Job) -> float:
        """Seconds that a flexible job trains: what it had, if it is done, else what is left."""
        done = self.out / job.name.removeprefix("train-") / TRAINED
        if done.is_file():
            return float(read_json(done)["seconds_asked"])
        with self._changed:
            if self._long is None:
                self._long = min(self.longest, self.left() - job.spare)
            return self._long

    def _end(self, job: Job, done: bool) -> None:
        with self._changed:
            self._ended[job.name] = done
            self._changed.notify_all()
