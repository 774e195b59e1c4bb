"""The comparison of the reference and one of our recipes from more seeds, and ten minutes of both.

    answer, warm     as in the study
    four processes   the reference and ours, seed after seed, `seconds` each; beside them the longer
                     runs of both, from the first seed. All start together, and the runs of a seed
    measurements     of a seed's runs as soon as they are there, both temperatures, a process each;
                     of the longer ones when the processes are done
    speed            when nothing else runs

The states of all rows stay where they are from one seed to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_eval.real_text.arms import REFERENCE
from dspark_eval.real_text.measuring import TEMPERATURES
from dspark_eval.real_text.runs import Run
from dspark_eval.real_text.schedule import MEASURING, OVERHEAD, SPEED, Job
from dspark_eval.real_text.training import TRAINED

BESIDE_BATCH, BESIDE_MEMORY = 64, 5.5
"""Prompts measured side by side while others train, and GB that it may take: four trainings of 33
leave little of an H200."""
READY = ("answer", "warm")


def repeats(
    arm: str, seeds: Sequence[int], seconds: float, memory: float | None
) -> list[list[Job]]:
    """Lanes of jobs on one GPU; `memory`: GB that each measurement may take beside trainings."""
    arms = (REFERENCE, arm)
    longer = [Run(name, seeds[0], long=True) for name in arms]
    together = ("--beside", *arms, *(Run(name, long=True).name for name in arms))
    trained = tuple(f"train-{name}" for name in (*arms, *(run.name for run in longer)))
    bounds = ("--memory", f"{memory or BESIDE_MEMORY:g}")
    coming = (*(Run(name, seeds[-1]).name for name in arms), *(run.name for run in longer))
    measured = [_measured(name, seeds, bounds) for name in arms]
    last = [
        _longer_measured(run, trained, temperature)
        for run in longer
        for temperature in TEMPERATURES
    ]
    told = tuple(job.name for lane in (*measured, *last) for job in lane)
    speed = ("speed", "--dtype", "bfloat16", "--arm", Run(arm, seeds[0]).name)
    return [
        [Job("answer", 0, ("answer", "--dtype", "bfloat16"))],
        [Job("warm", 0, ("warm", "--dtype", "bfloat16", "--beside", *coming))],
        *([_short(name, seeds, seconds, together)] for name in arms),
        *([_long(run, together)] for run in longer),
        *measured,
        *last,
        [Job("speed", 0, speed, (f"train-{arm}",), told, least=SPEED)],
    ]


def _short(arm: str, seeds: Sequence[int], seconds: float, together: tuple[str, ...]) -> Job:
    """All seeds of a recipe in one process."""
    several = ("--seeds", *map(str, seeds), "--seconds", f"{seconds:g}")
    arguments = ("train", "--arm", arm, "--dtype", "bfloat16", *several, *together)
    return Job(f"train-{arm}", 0, arguments, READY[:1], READY, least=seconds + OVERHEAD)


def _long(run: Run, together: tuple[str, ...]) -> Job:
    arguments = ("train", "--arm", run.name, "--dtype", "bfloat16", *together)
    return Job(
        f"train-{run.name}",
        0,
        arguments,
        READY[:1],
        READY,
        least=2 * OVERHEAD + MEASURING,
        flexible=True,
        spare=2 * OVERHEAD + MEASURING,
    )


def _measured(arm: str, seeds: Sequence[int], bounds: tuple[str, ...]) -> list[Job]:
    """A recipe's runs, seed after seed, each as soon as it is trained."""
    beside = ("--batch", str(BESIDE_BATCH), *bounds)
    return [
        Job(
            f"measure-{run.name}",
            0,
            ("measure", "--arm", run.name, *beside),
            file=f"{run.name}/{TRAINED}",
            maker=f"train-{arm}",
            least=MEASURING,
        )
        for run in (Run(arm, seed) for seed in seeds)
    ]


def _longer_measured(run: Run, trained: tuple[str, ...], temperature: float) -> list[Job]:
    arguments = ("measure", "--arm", run.name, "--temperature", f"{temperature:g}")
    name = f"measure-{run.name}-{temperature:g}"
    return [Job(name, 0, arguments, (f"train-{run.name}",), trained, least=MEASURING / 2)]
