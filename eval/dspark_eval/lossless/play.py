"""Rounds of the real proposal and the real verdict, thousands at once, and the text they make.

One round says between one and G + 2 tokens. What it leaves of the first `TEXT` tokens is drawn from
the target's law itself: a law that is right after one round is right after many, because every
round starts from nothing but its anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dspark.runtime.draft_head import DraftHead
from dspark.runtime.judge import Method
from dspark.runtime.proposal import Drafter, propose
from dspark.runtime.records import Plan, Proposal, Verdict
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.tree import build_rows
from dspark.runtime.verify import verify
from dspark_eval.lossless.world import VOCAB, Tables, World

TEXT = 3
CHUNK = 30_000
"""Rows at a time; a multiple of three."""

Planner = Callable[[Proposal], Plan]
Tamper = Callable[[Proposal], Proposal]


@dataclass(frozen=True)
class Setup:
    """How rounds are played.

    length    tokens drafted, 0 for a plain step
    siblings  drafted beside each of them
    tamper    what a planted defect does to the proposal before it is planned and judged
    """

    params: SamplingParams
    planner: Planner
    length: int
    siblings: int = 0
    method: Method = "token"
    tamper: Tamper | None = None


@dataclass(frozen=True, eq=False)
class Played:
    """Rounds of one chunk: text [B, n] int64 with -1 where the round said no more, and why."""

    text: Tensor
    verdict: Verdict
    plan: Plan


def play(tables: Tables, setup: Setup, generator: torch.Generator) -> Played:
    """One round in every row."""
    head = DraftHead(tables, None)  # type: ignore[arg-type]
    proposal = _draft(tables, head, setup, generator)
    if setup.tamper is not None:
        proposal = setup.tamper(proposal)
    plan = setup.planner(proposal)
    length = proposal.tokens.shape[1]
    rows = build_rows(
        tables.anchor, proposal, plan, primaries=length, sibling_rows=length * setup.siblings
    )
    logits = tables.after(rows.tokens)
    verdict = verify(proposal, logits, setup.params, generator, plan, rows, method=setup.method)
    return Played(row_text(proposal, verdict), verdict, plan)


def _draft(tables: Tables, head: DraftHead, setup: Setup, generator: torch.Generator) -> Proposal:
    if setup.length == 0:
        blank = torch.empty(len(tables.variant), 0)
        return Proposal(blank.long(), None, blank, blank)
    return propose(
        cast(Drafter, tables),  # never extended: it has no context
        head,
        None,
        tables.anchor,
        setup.length,
        setup.params,
        generator,
        siblings=setup.siblings,
        check=False,
    )


def row_text(proposal: Proposal, verdict: Verdict) -> Tensor:
    """[B, G + 2]: accepted primaries, the sibling if there is one, the next token, then -1."""
    batch, length = proposal.tokens.shape
    index = torch.arange(length + 2)
    end = verdict.accepted.unsqueeze(1)
    text = torch.cat((proposal.tokens, proposal.tokens.new_full((batch, 2), -1)), dim=1)
    saved = (verdict.sibling >= 0).long().unsqueeze(1)
    text = torch.where(index < end, text, -1)
    text = torch.where((index == end) & (saved > 0), verdict.sibling.unsqueeze(1), text)
    return torch.where(index == end + saved, verdict.next_token.unsqueeze(1), text)


def canonical_texts(
    world: World, setup: Setup, draws: int, law: Tensor, generator: torch.Generator
) -> Iterator[Tensor]:
    """Chunks of the first TEXT tokens [b, TEXT], shifted back to canonical ids."""
    cdf = law.cumsum(dim=1)
    for start in range(0, draws, CHUNK):
        count = min(CHUNK, draws - start)
        variant = torch.arange(count) % len(world.shifts)
        tables = Tables(world, variant)
        text = play(tables, setup, generator).text[:, :TEXT]
        text = torch.where(text < 0, text, (text - tables.anchor.unsqueeze(1)) % VOCAB)
        yield complete(text, cdf, generator)


def complete(text: Tensor, cdf: Tensor, generator: torch.Generator) -> Tensor:
    """Fill the open end (-1) of texts [b, n] by draws from the law whose rows sum up to `cdf`."""
    missing = TEXT - text.shape[1]
    text = torch.nn.functional.pad(text, (0, missing), value=-1)
    for k in range(1, TEXT):
        u = torch.rand(len(text), 1, generator=generator, dtype=torch.float64)
        rows = cdf[text[:, k - 1].clamp(min=0)]
        drawn = torch.searchsorted(rows, u * rows[:, -1:], right=True).squeeze(1)
        text[:, k] = torch.where(text[:, k] < 0, drawn.clamp(max=cdf.shape[1] - 1), text[:, k])
    return text
