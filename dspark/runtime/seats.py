"""What a batch holds between two rounds, and what the host reads of one.

Letters: B rows of the batch, G drafted, R rows of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.runtime.faults import named
from dspark.runtime.records import ALL_ACCEPTED, CUT, Plan, Proposal, Verdict
from dspark.runtime.requests import Outcome, Text
from dspark.runtime.rules import RequestRules
from dspark.runtime.sampling import Generators
from dspark.runtime.target import Cache
from dspark.runtime.tree import Rows


@dataclass(eq=False)
class Seats:
    """The rows of a batch between two rounds.

    anchor  [B] int64
    texts   the request of each row
    """

    cache: Cache
    context: Any
    anchor: Tensor
    texts: list[Text]

    def put(self, row: int, alone: Seats) -> None:
        """The only row of another batch takes this seat."""
        self.cache.put(row, alone.cache)
        self.context.put(row, alone.context)
        self.anchor = self.anchor.clone()
        self.anchor[row] = alone.anchor[0]
        self.texts[row] = alone.texts[0]

    def select(self, rows: list[int]) -> None:
        """Keep these seats."""
        index = torch.tensor(rows, device=self.anchor.device)
        self.cache.select(index)
        self.context.select(index)
        self.anchor = self.anchor[index]
        self.texts = [self.texts[row] for row in rows]

    @property
    def rules(self) -> list[RequestRules | None]:
        """Of each row."""
        return [text.rules for text in self.texts]

    @property
    def draft_draws(self) -> Generators:
        draws = [text.draft_draws for text in self.texts]
        return draws if len(draws) > 1 else draws[0]

    @property
    def judge_draws(self) -> Generators:
        draws = [text.judge_draws for text in self.texts]
        return draws if len(draws) > 1 else draws[0]


@dataclass(frozen=True, eq=False)
class Judged:
    """A verified round whose rows are still pending.

    rows    layout of the pass; None: a chain
    width   R
    plan    None: everything that was drafted was sent
    taps    [B, R, N*D]
    """

    proposal: Proposal
    plan: Plan | None
    rows: Rows | None
    width: int
    taps: Tensor | None
    verdict: Verdict

    def read(self, texts: list[Text]) -> list[Outcome]:
        """In one transfer, since each is a wait: float64 holds ids and float32 values exactly.

        What was drafted for a row beyond the end of its text, because others have longer to go, is
        no part of its outcome. A text whose logits were not finite fails, and its outcome is void.
        """
        proposal, verdict = self.proposal, self.verdict
        drafted = proposal.tokens.shape[1]
        heads = [
            verdict.accepted,
            verdict.next_token,
            verdict.level,
            verdict.sibling,
            verdict.sibling_row,
            verdict.fault,
        ]
        if self.plan is not None:
            heads.append(self.plan.lengths)
        parts = [torch.stack(heads, dim=1), proposal.tokens, proposal.entropy]
        parts += [x for x in (proposal.confidence, verdict.distance) if x is not None]
        table = torch.cat([part.double() for part in parts], dim=1).tolist()
        for row, text in zip(table, texts, strict=True):
            if (error := named(int(row[5]))) is not None:
                text.fail(error.located([text.position]))
        cuts = [len(heads), drafted, drafted, 0 if proposal.confidence is None else drafted]
        return [
            outcome_of(row, cuts, text.left - 1) for row, text in zip(table, texts, strict=True)
        ]


def outcome_of(row: list[float], cuts: list[int], limit: int) -> Outcome:
    """A row of numbers: heads, tokens, entropies, confidences of `cuts` many, and distances.

    Heads are accepted, next token, level, sibling and its row, fault, and the length if one was
    planned. `limit` is the most that may be drafted for the row.
    """
    pieces, at = [], 0
    for width in cuts:
        pieces.append(row[at : at + width])
        at += width
    heads = [int(x) for x in pieces[0]]
    tokens = [int(x) for x in pieces[1][:limit]]
    level, length = heads[2], heads[6] if len(heads) > 6 else len(tokens)
    return Outcome(
        accepted=heads[0],
        next_token=heads[1],
        level=ALL_ACCEPTED if level == CUT and length == len(tokens) else level,
        sibling=heads[3],
        sibling_row=heads[4],
        length=length,
        tokens=tokens,
        entropy=pieces[2][:limit],
        confidence=pieces[3][:limit],
        distance=row[at:],
    )
