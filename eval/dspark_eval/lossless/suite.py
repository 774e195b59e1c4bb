"""The grid of cases, what each of them must show, and the planted defects.

    policies x {T = 0, 0.7, 1, 1.3 with top-p 0.9, top-k 20}
             x {chain, siblings} x batch {1, 3} x {token, block}

A sampled case holds texts of three tokens against the target's law: the three marginal laws
and the joint law of the tokens' classes. At temperature 0 every text must be the target's own.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from dspark.runtime.judge import Method
from dspark.runtime.sampling import SamplingParams
from dspark_eval.lossless.defects import CHAIN, Defect
from dspark_eval.lossless.model import TOKENS, RealPair
from dspark_eval.lossless.planners import POLICIES, SIBLINGS, PolicyPlanner, policy_named
from dspark_eval.lossless.play import TEXT, Played, Setup, canonical_texts, play
from dspark_eval.lossless.statistics import fit
from dspark_eval.lossless.world import CLASSES, SLOTS, VOCAB, Tables, World

LAWS = 4
"""Tests per sampled case: three marginal laws and one of classes."""
WORLDS = 3_000
"""Unrelated worlds of a greedy case."""

SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "T=0.7": SamplingParams(0.7),
    "T=1": SamplingParams(1.0),
    "T=1.3 top-p 0.9": SamplingParams(1.3, 0.9),
    "top-k 20": SamplingParams(1.0, 1.0, 20),
}


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    policy: str
    setting: str
    siblings: bool
    batch: int
    method: Method

    @property
    def name(self) -> str:
        shape = "siblings" if self.siblings else "chain"
        return f"{self.policy}, {self.setting}, {shape}, batch {self.batch}, {self.method}"

    def setup(self) -> Setup:
        policy = policy_named(self.policy, self.siblings)
        return Setup(
            params=SETTINGS[self.setting],
            planner=PolicyPlanner(policy, self.batch),
            length=policy.draft_length(SLOTS),
            siblings=SIBLINGS if self.siblings else 0,
            method=self.method,
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a case or a defect.

    draws      texts
    p          the smallest p-value of its tests; None at temperature 0
    distance   largest total variation of the counts from the law, their noise included
    freedom    most degrees of freedom among its tests
    wrong      greedy texts that are not the target's
    """

    name: str
    draws: int
    p: float | None
    distance: float
    freedom: int
    wrong: int = 0

    def deviates(self, level: float) -> bool:
        """Whether it is not the target's law, at this level for each test."""
        return self.wrong > 0 or (self.p is not None and self.p < level)


def grid(full: bool) -> list[Case]:
    """All cases; the short form takes every policy twice, on a chain and with siblings."""
    shapes = itertools.product((False, True), (1, 3), get_args(Method))
    cases = [
        Case(policy, setting, siblings, batch, method)
        for (siblings, batch, method), policy, setting in itertools.product(
            shapes, POLICIES, SETTINGS
        )
    ]
    if full:
        return cases
    settings, policies = list(SETTINGS), list(POLICIES)
    return [
        case
        for case in cases
        if settings.index(case.setting) == (policies.index(case.policy) + case.siblings) % 5
        and (case.batch == 3) == (case.method == "block") == bool(policies.index(case.policy) % 2)
    ]


def model_cases(full: bool) -> list[Case]:
    """Those that are decoded by a real model too."""
    cases = [
        Case("confidence", "T=1.3 top-p 0.9", True, 1, "token"),
        Case("fixed", "T=1", False, 1, "block"),
        Case("fixed", "T=0.7", False, 1, "token"),
        Case("entropy", "T=1", True, 1, "block"),
    ]
    return cases if full else cases[:1]


def accepted_lengths(seed: int, draws: int) -> dict[str, float]:
    """Mean number of accepted primaries of SLOTS, by method, on the same chains at T = 1."""
    world, means = World.sampled(), {}
    for method in get_args(Method):
        setup, generator = replace(CHAIN, method=method), _generator(seed, "accepted")
        tables = Tables(world, torch.arange(draws) % len(world.shifts))
        means[method] = float(play(tables, setup, generator).verdict.accepted.double().mean())
    return means


def run_case(case: Case, seed: int, draws: int) -> Outcome:
    """One cell of the grid."""
    generator = _generator(seed, case.name)
    if SETTINGS[case.setting].greedy:
        return _greedy(case, generator)
    return _sampled(case.name, World.sampled(), case.setup(), draws, generator)


def plant(defect: Defect, seed: int, draws: int) -> Outcome:
    """The same tests with a defect in force."""
    generator = _generator(seed, defect.name)
    return _sampled(defect.name, World.sampled(), defect.setup, draws, generator, defect.patch)


def run_model(case: Case, seed: int, draws: int) -> Outcome:
    """The joint law of three tokens of a real model, under one cell of the grid."""
    generator, pair = _generator(seed, f"model {case.name}"), RealPair()
    params, policy = SETTINGS[case.setting], policy_named(case.policy, case.siblings)
    siblings = SIBLINGS if case.siblings else 0
    counts, place = torch.zeros(TOKENS**TEXT), TOKENS ** torch.arange(TEXT).flip(0)
    for texts in pair.texts(draws, params, policy, siblings, case.method, generator):
        counts += torch.bincount(texts @ place, minlength=len(counts))
    found = fit(counts, pair.law(params).flatten())
    name = f"real model: {case.name}"
    return Outcome(name, draws, found.p, found.distance, found.freedom)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def _sampled(
    name: str,
    world: World,
    setup: Setup,
    draws: int,
    generator: torch.Generator,
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outcome:
    law = world.law(setup.params)
    counts = [torch.zeros(VOCAB) for _ in range(TEXT)] + [torch.zeros(CLASSES**TEXT)]
    classes = world.classes[0]
    with patch():
        for texts in canonical_texts(world, setup, draws, law, generator):
            for k in range(TEXT):
                counts[k] += torch.bincount(texts[:, k], minlength=VOCAB)
            code = torch.zeros(len(texts), dtype=torch.int64)
            for k in range(TEXT):
                code = code * CLASSES + classes[texts[:, k]]
            counts[TEXT] += torch.bincount(code, minlength=CLASSES**TEXT)
    fits = [fit(seen, wanted) for seen, wanted in zip(counts, _laws(law, classes), strict=True)]
    return Outcome(
        name,
        draws,
        p=min(f.p for f in fits),
        distance=max(f.distance for f in fits),
        freedom=max(f.freedom for f in fits),
    )


def _laws(law: Tensor, classes: Tensor) -> Iterator[Tensor]:
    """The marginal laws of TEXT tokens after canonical token 0, then the joint law of classes."""
    joint = law[0][:, None, None] * law[:, :, None] * law[None, :, :]
    for k in range(TEXT):
        yield joint.sum(dim=[other for other in range(TEXT) if other != k])
    member = torch.nn.functional.one_hot(classes, CLASSES).double()
    yield torch.einsum("xyz,xa,yb,zc->abc", joint, member, member, member).flatten()


def _greedy(case: Case, generator: torch.Generator) -> Outcome:
    """Texts of unrelated worlds against the target's argmax walk, token for token."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    world = World.greedy(seed, WORLDS)
    tables = Tables(world, torch.arange(WORLDS))
    said: Played = play(tables, case.setup(), generator)
    previous, wrong = tables.anchor, torch.zeros(WORLDS, dtype=torch.bool)
    for token in said.text.unbind(1):
        expected = tables.after(previous.unsqueeze(1)).squeeze(1).argmax(dim=-1)
        wrong |= (token >= 0) & (token != expected)
        previous = expected
    return Outcome(case.name, WORLDS, None, 0.0, 0, wrong=int(wrong.sum()))
