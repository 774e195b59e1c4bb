"""All that one round can do, enumerated with its chances: the law of the verdict in closed form.

The world is small enough to list: every primary, every list of siblings, every side of every coin.
Conditional laws are float64 tables, `p[k][prefix]` and `q[k][prefix]` with k tokens in the prefix.
The real `judge_sampled` decides; the coins it gets lie just below and exactly on the chance that it
computes, each side weighted by its probability, so that a chance which is not the threshold shows
as well as a wrong one. The last draw enters as the weights that the code would draw from.

A round says t_1..t_j for certain and t_{j+1} by those weights; what follows comes from p, so that
the joint law of the first G + 1 tokens is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dspark.runtime import judge
from dspark.runtime.judge import Coins, Sent, judge_sampled
from dspark.runtime.records import Plan, Proposal
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.tree import build_rows

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class World:
    """Laws of target and drafter after every prefix; q None: the drafter names one token each."""

    vocab: int
    length: int
    p: dict[Prefix, Tensor]
    q: dict[Prefix, Tensor]
    point_mass: bool = False

    @classmethod
    def random(
        cls, vocab: int, length: int, seed: int, *, holes: float = 0.0, point_mass: bool = False
    ) -> World:
        """Laws with a share of impossible tokens, never all of them."""
        generator = torch.Generator().manual_seed(seed)

        def law(sharp: float) -> Tensor:
            weights = torch.rand(vocab, generator=generator, dtype=torch.float64) ** sharp
            gone = torch.rand(vocab, generator=generator) < holes
            gone[torch.randint(vocab, (1,), generator=generator)] = False
            weights = weights.masked_fill(gone, 0.0)
            return weights / weights.sum()

        prefixes = [
            prefix
            for k in range(length + 1)
            for prefix in itertools.product(range(vocab), repeat=k)
        ]
        p = {prefix: law(2.0) for prefix in prefixes}
        q = {prefix: law(2.0) for prefix in prefixes if len(prefix) < length}
        if point_mass:
            q = {
                prefix: torch.eye(vocab, dtype=torch.float64)[row.argmax()]
                for prefix, row in q.items()
            }
        return cls(vocab, length, p, q, point_mass)

    def target_law(self) -> Tensor:
        """[V] * (G + 1) joint law of the target."""
        joint = torch.zeros([self.vocab] * (self.length + 1), dtype=torch.float64)
        for text in itertools.product(range(self.vocab), repeat=self.length):
            chance = torch.ones((), dtype=torch.float64)
            for k in range(self.length):
                chance = chance * self.p[text[:k]][text[k]]
            joint[text] = chance * self.p[text]
        return joint


@dataclass(frozen=True)
class Draft:
    """One thing that the drafter can propose, and its probability."""

    tokens: Prefix
    siblings: tuple[tuple[int, ...], ...]
    chance: float


def drafts(world: World, count: int, *, replace: bool = False) -> list[Draft]:
    """Every primary with every list of `count` siblings; `replace`: drawn with replacement."""
    found = []
    for tokens in itertools.product(range(world.vocab), repeat=world.length):
        chance, lists = 1.0, []
        for k, token in enumerate(tokens):
            q = world.q[tokens[:k]]
            chance *= float(q[token])
            lists.append(_sibling_lists(world, q, token, count, replace))
        if chance == 0:
            continue
        for choice in itertools.product(*lists):
            total = chance
            for _, share in choice:
                total *= share
            found.append(Draft(tokens, tuple(names for names, _ in choice), total))
    return found


def _sibling_lists(
    world: World, q: Tensor, token: int, count: int, replace: bool
) -> list[tuple[tuple[int, ...], float]]:
    if world.point_mass:  # any fixed order will do: the ids after the primary, around the corner
        names = [(token + 1 + j) % world.vocab for j in range(count)]
        return [(tuple(name if name != token else -1 for name in names), 1.0)]
    lists: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(count):
        longer = []
        for names, chance in lists:
            left = q.clone()
            left[[token, *(() if replace else (n for n in names if n >= 0))]] = 0
            mass = float(left.sum())
            if mass == 0:
                longer.append(((*names, -1), chance))
                continue
            longer += [
                ((*names, y), chance * float(left[y]) / mass)
                for y in range(world.vocab)
                if left[y] > 0
            ]
        lists = longer
    return lists


Planner = Callable[[Draft], tuple[int, tuple[int, ...]]]
"""What a draft is cut to, and how many siblings of each position are sent."""


def everything(draft: Draft) -> tuple[int, tuple[int, ...]]:
    return len(draft.tokens), tuple(len(names) for names in draft.siblings)


class Round:
    """The real code at work on all drafts of a world at once, one per batch row."""

    def __init__(
        self,
        world: World,
        offers: list[Draft],
        planner: Planner,
        method: judge.Method,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.world, self.offers, self.method = world, offers, method
        tokens = torch.tensor([d.tokens for d in offers]).view(len(offers), world.length)
        siblings = torch.tensor([d.siblings for d in offers], dtype=torch.int64).view(
            *tokens.shape, -1
        )
        probs = None
        if not world.point_mass:
            stacked = [
                torch.stack([world.q[d.tokens[:k]] for k in range(world.length)]) for d in offers
            ]
            probs = torch.stack(stacked)
        blank = torch.zeros(tokens.shape)
        proposal = Proposal(tokens, probs, blank, blank, siblings)
        lengths, counts = zip(*(planner(d) for d in offers), strict=True)
        plan = Plan(torch.tensor(lengths), torch.tensor(counts).view_as(tokens))
        self.rows = build_rows(torch.zeros(len(offers), dtype=torch.int64), proposal, plan)
        self.sent = Sent.of(proposal, self.rows.primaries, plan, self.rows)
        self.target = self._target_rows()
        self.tokens = tokens
        self.chances = self.rungs = self.left = torch.empty(0)
        self._watch(monkeypatch)

    def _target_rows(self) -> Tensor:
        """[B, R, V] p of every row, found by walking up its parents."""
        laws = []
        for tokens, parents in zip(
            self.rows.tokens.tolist(), self.rows.parents.tolist(), strict=True
        ):
            paths: list[Prefix] = []
            for row, parent in enumerate(parents):
                paths.append((*paths[parent], tokens[row]) if parent >= 0 else ())
            laws.append(torch.stack([self.world.p[path] for path in paths]))
        return torch.stack(laws)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(judge, "to_probs", lambda laws, sampling, check: laws)
        monkeypatch.setattr(judge, "draw_at", self._last_draw)
        for name, attribute in (
            ("token_chances", "chances"),
            ("block_chances", "chances"),
            ("ladder", "rungs"),
        ):
            monkeypatch.setattr(judge, name, self._recorded(getattr(judge, name), attribute))

    def _recorded(self, function: Callable[..., object], attribute: str) -> Callable[..., object]:
        def run(*args: object) -> object:
            result = function(*args)
            setattr(self, attribute, result.chances if attribute == "rungs" else result)
            return result

        return run

    def _last_draw(self, weights: Tensor, u: Tensor) -> Tensor:
        self.left = weights / weights.sum(dim=1, keepdim=True)
        return weights.argmax(dim=1)

    def judge(self, coins: Tensor, sibling_coins: Tensor) -> judge.Judged:
        thrown = Coins(coins, sibling_coins, torch.zeros(len(coins), dtype=torch.float64))
        return judge_sampled(self.sent, self.target, SamplingParams(1.0), thrown, self.method, None)


def sides(chances: Tensor, yes: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    """Coins [B, n] on the chosen side of each chance, and the probability [B] of that side."""
    side = torch.tensor(yes, dtype=torch.bool).expand(chances.shape)
    below = torch.nextafter(chances, torch.zeros_like(chances))
    coins = torch.where(side, below, chances)
    return coins, torch.where(side, chances, 1 - chances).prod(dim=1)


def output_law(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    *,
    siblings: int = 0,
    planner: Planner = everything,
    method: judge.Method = "token",
    replace: bool = False,
) -> Tensor:
    """[V] * (G + 1) joint law of what the real code makes of everything that can be drafted."""
    offers = drafts(world, siblings, replace=replace)
    # The undo at the end gives the next call the real functions back.
    with monkeypatch.context() as patch:
        round_ = Round(world, offers, planner, method, patch)
        joint = torch.zeros([world.vocab] * (world.length + 1), dtype=torch.float64)
        offered = torch.tensor([d.chance for d in offers], dtype=torch.float64)
        count, width = round_.sent.count, round_.sent.width
        zeros = torch.zeros(len(offers), count, dtype=torch.float64)
        round_.judge(zeros, torch.zeros(len(offers), width, dtype=torch.float64))
        primary_chances = round_.chances[:, :count].clone()
        for yes in itertools.product((True, False), repeat=count):
            coins, chance = sides(primary_chances, yes)
            # Once to learn what the siblings' chances are behind these coins.
            round_.judge(coins, torch.ones(len(offers), width, dtype=torch.float64))
            rungs = (
                round_.rungs.clone() if width else torch.zeros(len(offers), 0, dtype=torch.float64)
            )
            for also in itertools.product((True, False), repeat=width):
                sibling_coins, sibling_chance = sides(rungs, also)
                judged = round_.judge(coins, sibling_coins)
                _add(joint, world, round_, judged, offered * chance * sibling_chance)
    return joint


def _add(joint: Tensor, world: World, round_: Round, judged: judge.Judged, weight: Tensor) -> None:
    accepted, sibling = judged.accepted.tolist(), judged.sibling.tolist()
    for row, chance in enumerate(weight.tolist()):
        if chance == 0:
            continue
        said = tuple(round_.tokens[row, : accepted[row]].tolist())
        said += (sibling[row],) if sibling[row] >= 0 else ()
        _spread(joint, world, said, chance * round_.left[row])


def _spread(joint: Tensor, world: World, said: Prefix, law: Tensor) -> None:
    """Add what starts with `said`, goes on by the weights `law` [V] and then by p."""
    if len(said) == world.length:
        joint[said] += law
        return
    for token in range(world.vocab):
        if law[token] > 0:
            following = (*said, token)
            _spread(joint, world, following, law[token] * world.p[following])
