"""The whole run, spread over processes: cases, real models, planted defects, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any, Literal

import torch

from dspark.wording import counted
from dspark_eval.lossless.defects import defects
from dspark_eval.lossless.statistics import ALPHA, TV, detectable, power
from dspark_eval.lossless.suite import (
    LAWS,
    SETTINGS,
    Outcome,
    accepted_lengths,
    grid,
    model_cases,
    plant,
    run_case,
    run_model,
)

DRAWS = 300_000
MODEL_DRAWS = {True: 350_000, False: 20_000}
"""Texts of a real model in the full and in the short form."""
POWER = 0.99
ACCEPTED_DRAWS = 60_000

Kind = Literal["case", "model", "defect"]


@dataclass(frozen=True)
class Report:
    """A whole run.

    level     what each test is held to
    accepted  mean accepted length by verification method, on the same drafts
    """

    full: bool
    level: float
    accepted: dict[str, float]
    cases: list[Outcome]
    models: list[Outcome]
    planted: list[Outcome]

    @property
    def deviating(self) -> list[Outcome]:
        """Cases that do not have the target's law."""
        return [found for found in self.cases + self.models if found.deviates(self.level)]

    @property
    def missed(self) -> list[Outcome]:
        """Defects that the tests did not find."""
        return [found for found in self.planted if not found.deviates(self.level)]

    def power(self, distance: float = TV) -> float:
        """Least chance of any test of the tables to find a law that far away."""
        tests = [found for found in self.cases + self.planted if found.freedom]
        return min(power(f.draws, distance, f.freedom, self.level) for f in tests)

    def model_distance(self) -> float:
        """The smallest total variation that the test of a real model finds with POWER."""
        return max(detectable(f.draws, f.freedom, self.level, POWER) for f in self.models)

    @property
    def passed(self) -> bool:
        """All laws right, all defects found, and no error of TV likely to have been missed."""
        strong = self.power() >= POWER and (not self.full or self.model_distance() <= TV)
        return not self.deviating and not self.missed and strong

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **asdict(self),
            "tv": TV,
            "false_alarm": ALPHA,
            "power": self.power(),
            "model_tv": self.model_distance(),
            "passed": self.passed,
        }

    def text(self) -> str:
        """For people."""
        sampled = [found for found in self.cases + self.models if found.p is not None]
        smallest = min(found.p for found in sampled if found.p is not None)
        draws = f"{sampled[0].draws} texts each ({self.models[0].draws} of a real model)"
        return "\n".join(
            [
                f"{counted(len(self.cases), 'case')} and {len(self.models)} of a real model: "
                f"{draws}",
                f"  level of each test {self.level:.1e}, of the whole run {ALPHA}",
                f"  power against a TV of {TV}: at least {self.power():.4f}; of a real model "
                f"{POWER} against a TV of {self.model_distance():.3f}",
                f"  smallest p-value {smallest:.1e}, deviating {len(self.deviating)}",
                *(_line(found, "DEVIATES") for found in self.deviating),
                "  accepted of three drafted tokens: "
                + ", ".join(f"{mean:.3f} by {method}" for method, mean in self.accepted.items()),
                f"{counted(len(self.planted), 'planted defect')}, missed {len(self.missed)}",
                *(
                    _line(found, "MISSED" if found in self.missed else "caught")
                    for found in self.planted
                ),
                "passed" if self.passed else "FAILED",
            ]
        )


def _line(found: Outcome, word: str) -> str:
    if found.p is None:
        return f"  {word}  {found.name}: {found.wrong} texts are not the target's"
    return f"  {word}  {found.name}: TV {found.distance:.3f}, p {found.p:.1e}"


def run_suite(
    full: bool,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    workers: int = 1,
    advance: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run everything. `advance` gets the name of each case as it is done."""
    cases = grid(full)
    sizes: dict[Kind, int] = {
        "case": len(cases),
        "model": len(model_cases(full)),
        "defect": len(defects()),
    }
    sampled = sum(not SETTINGS[case.setting].greedy for case in cases)
    tests = LAWS * (sampled + sizes["defect"]) + sizes["model"]
    tasks = [(kind, index) for kind, size in sizes.items() for index in range(size)]
    found: dict[tuple[Kind, int], Outcome] = {}
    if workers == 1:
        for task in tasks:
            found[task] = _run(task, (full, seed, draws))
            advance(found[task].name)
    else:
        _spread(tasks, found, (full, seed, draws), workers, advance)
    lists = {kind: [found[kind, index] for index in range(size)] for kind, size in sizes.items()}
    accepted = accepted_lengths(seed, ACCEPTED_DRAWS)
    return Report(full, ALPHA / tests, accepted, lists["case"], lists["model"], lists["defect"])


def _spread(
    tasks: list[tuple[Kind, int]],
    found: dict[tuple[Kind, int], Outcome],
    options: tuple[bool, int, int],
    workers: int,
    advance: Callable[[str], None],
) -> None:
    """Real models first: they take longest."""
    order = sorted(tasks, key=lambda task: task[0] != "model")
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running: dict[Future[Outcome], tuple[Kind, int]] = {
            pool.submit(_run, task, options): task for task in order
        }
        for done in as_completed(running):
            found[running[done]] = done.result()
            advance(done.result().name)


def _run(task: tuple[Kind, int], options: tuple[bool, int, int]) -> Outcome:
    (kind, index), (full, seed, draws) = task, options
    if kind == "case":
        return run_case(grid(full)[index], seed, draws)
    if kind == "model":
        return run_model(model_cases(full)[index], seed, MODEL_DRAWS[full])
    return plant(defects()[index], seed, draws)
