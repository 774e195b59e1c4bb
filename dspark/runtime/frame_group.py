"""One group of a frame scheduler: fixed seats, a draft slot, a verify slot, and late reading.

    draft    queue the drafts of frame n                      uses frames <= n - 2 on the host
    verify   queue pass, verdict, commit and extend of n      uses nothing of the host
    read     take the outcomes of frame n - 1                 while frame n runs

What a frame needs of the one before stays on the device: anchors, tokens left, lengths. The host
learns one frame late that a text has ended; the device knew, and ran the row as an idle one.

Letters: B seats, G drafted, L primaries sent, V vocab.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.runtime.faults import named
from dspark.runtime.frame_sizes import Wish, slot_sizes
from dspark.runtime.frame_step import Kept, Pass, keep, lay_out, marks
from dspark.runtime.lanes import Lanes, Mail, Span
from dspark.runtime.policies.frontier import plan_block
from dspark.runtime.proposal import propose
from dspark.runtime.records import Plan, Proposal, Verdict
from dspark.runtime.requests import Spent, Text
from dspark.runtime.rounds import Rounds
from dspark.runtime.sampling import BadLogits, Generators
from dspark.runtime.seats import Seats, outcome_of
from dspark.runtime.target import Cache
from dspark.runtime.verify import verify

HEADS = 8
"""Numbers of a row's mail before its tokens: six of the verdict, the length sent, the wish."""


@dataclass(eq=False)
class Frame:
    """A frame on its way. `texts` are the requests of its rows; `proposal` lives until it is read.

    size   primaries of the verify slot;  sizes  of each row
    """

    number: int
    texts: tuple[Text | None, ...]
    size: int
    sizes: list[int]
    proposal: Proposal
    drafted: Span
    verified: Span | None = None
    rows: int = 0
    mail: Mail | None = None


class FrameGroup:
    """Seats that are drafted and verified together.

    Args:
        rounds: What all rounds share; its policy decides the rows of all groups.
        cache, context: Of B rows, empty; the group fixes the context's shapes.
        sibling_rows: Rows of a verify slot that siblings may take.
    """

    def __init__(
        self, rounds: Rounds, lanes: Lanes, cache: Cache, context: Any, sibling_rows: int
    ) -> None:
        self.rounds, self.lanes = rounds, lanes
        self.cache, self.context = cache, context
        context.fix_shapes()
        device = rounds.target.device
        seats = int(cache.lengths.shape[0])
        self.texts: list[Text | None] = [None] * seats
        self._wishes = [Wish() for _ in range(seats)]
        self.anchor = torch.zeros(seats, dtype=torch.int64, device=device)
        self.left = torch.zeros_like(self.anchor)
        self.ends = torch.zeros(seats, rounds.target.vocab_size, dtype=torch.bool, device=device)
        self._sibling_rows = sibling_rows
        self._spare = torch.Generator(device=device)  # for empty seats, whose draws nobody sees
        self.ahead: Frame | None = None
        """Drafted, not yet verified."""
        self._flying: deque[Frame] = deque()
        self._last: Span | None = None
        self.frames = 0

    @property
    def live(self) -> bool:
        """Whether a text is known to go on."""
        return any(text is not None and not text.finished for text in self.texts)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to queue or to read."""
        return self.live or self.ahead is not None or bool(self._flying)

    def free(self) -> list[int]:
        """Seats whose text has ended, or that never had one. Nothing may be between the slots."""
        assert self.ahead is None, "a frame is between its slots"
        return [b for b, text in enumerate(self.texts) if text is None or text.finished]

    def join(self, row: int, alone: Seats) -> None:
        """A request whose prompt was read takes a seat."""
        text = alone.texts[0]
        with self.lanes.verify(self._last) as self._last:
            self.cache.put(row, alone.cache)
            self.context.put(row, alone.context)
            self.anchor, self.left = self.anchor.clone(), self.left.clone()
            self.anchor[row] = alone.anchor[0]
            self.left[row] = text.left
            self.ends[row] = marks(text.ends, self.ends[row])
        self.texts[row], self._wishes[row] = text, Wish()

    def leave(self, row: int) -> None:
        """Empty a seat, also between the slots of a frame: what it held is gone, also NaN."""
        with self.lanes.verify(self._last if self.ahead is None else self.ahead.drafted) as span:
            self.cache.reset(row)
            self.context.reset(row)
            self.left = self.left.clone()
            self.left[row] = 0
        self._last = span
        self.texts[row] = None

    def draft(self) -> None:
        """Queue the draft slot of the next frame; its verify slot must be the group's next."""
        assert self.ahead is None, "a frame is between its slots"
        rounds = self.rounds
        length = rounds.policy.draft_length(rounds.block)
        sizes = self._sizes(length)
        with self.lanes.draft(self._last) as span:
            proposal = self._propose(length)
        texts = tuple(self.texts)
        self.ahead = Frame(self.frames, texts, max(sizes), sizes, proposal, span)
        self.frames += 1

    def verify(self) -> Frame:
        """Queue the verify slot of the frame that was drafted."""
        frame, self.ahead = self.ahead, None
        assert frame is not None, "no frame is between its slots"
        with self.lanes.verify(frame.drafted) as span:
            self._judge(frame)
        frame.verified = self._last = span
        self._flying.append(frame)
        return frame

    def read(self, behind: int) -> Iterator[tuple[Frame, bool, dict[int, BadLogits]]]:
        """Take the outcomes of all frames but the newest `behind`, oldest first.

        With each frame comes whether the host waited for it, and the rows whose logits were not
        finite: their texts stay where they were, and the caller empties the seats.
        """
        while len(self._flying) > behind:
            frame = self._flying.popleft()
            assert frame.mail is not None
            table, waited = frame.mail.read()
            broken: dict[int, BadLogits] = {}
            for row, text in enumerate(frame.texts):
                if text is None or text.finished or self.texts[row] is not text:
                    continue
                try:
                    self._take(frame, row, text, table[row])
                except BadLogits as error:
                    broken[row] = error
            yield frame, waited, broken

    def _sizes(self, length: int) -> list[int]:
        """How many primaries of each row the next frame may send; 0 in empty seats."""
        choices = slot_sizes(length)
        return [
            0 if text is None or text.finished else wish.size(choices)
            for text, wish in zip(self.texts, self._wishes, strict=True)
        ]

    def _propose(self, length: int) -> Proposal:
        rounds, seats = self.rounds, len(self.texts)
        if length == 0:
            empty = torch.empty((seats, 0), device=self.anchor.device)
            return Proposal(empty.long(), None, empty, empty)
        return propose(
            rounds.drafter,
            rounds.head,
            self.context,
            self.anchor,
            length,
            rounds.sampling,
            self._draws("draft_draws"),
            siblings=rounds.policy.siblings,
            check=False,
        )

    def _draws(self, kind: str) -> Generators:
        return [self._spare if text is None else getattr(text, kind) for text in self.texts]

    def _judge(self, frame: Frame) -> None:
        rounds, proposal = self.rounds, frame.proposal
        whole = torch.where(self.left > 0, proposal.tokens.shape[1], 0)  # idle rows have no wish
        wished = plan_block(rounds.policy, proposal, whole)
        limits = torch.tensor(frame.sizes, device=self.left.device)
        limits = torch.minimum(limits, (self.left - 1).clamp(min=0))
        plan = Plan(torch.minimum(wished.lengths, limits), wished.siblings)
        run = lay_out(self.anchor, proposal, plan, self.left > 0, frame.size, self._sibling_rows)
        out = rounds.target.forward(
            run.tokens,
            self.cache,
            valid=run.valid,
            parents=run.parents,
            taps=rounds.drafter.taps,
            commit=False,
        )
        verdict = verify(
            proposal,
            rounds.target.logits(out.hidden),
            rounds.sampling,
            self._draws("judge_draws"),
            plan,
            run.rows,
            method=rounds.method,
            relaxed=rounds.relaxed,
            coins=rounds.block,
            check=False,
        )
        kept = keep(proposal.tokens[:, : frame.size], verdict, self.left, self.ends)
        self._commit(run, verdict, kept, out.taps)
        self.anchor, self.left = verdict.next_token, kept.left
        frame.rows = run.tokens.shape[1]
        frame.mail = Mail.send(_letter(proposal, verdict, plan, wished))

    def _commit(self, run: Pass, verdict: Verdict, kept: Kept, taps: Tensor | None) -> None:
        if run.parents is None:
            self.cache.commit(kept.count)
        else:
            assert run.rows is not None
            path = run.rows.path(verdict, kept.count)
            self.cache.commit_path(path)
            if taps is not None:
                index = path.clamp(min=0).unsqueeze(-1).expand(-1, -1, taps.shape[2])
                taps = taps.gather(1, index)
        if taps is not None:
            self.rounds.drafter.extend(self.context, taps, kept.count)

    def _take(self, frame: Frame, row: int, text: Text, numbers: list[float]) -> None:
        """One row of a frame that has ended: emitted and on record. Raises BadLogits."""
        if (error := named(int(numbers[5]))) is not None:
            raise error.located([text.position])
        assert frame.verified is not None
        drafted = frame.proposal.tokens.shape[1]
        has_confidence = frame.proposal.confidence is not None
        cuts = [HEADS, drafted, drafted, drafted if has_confidence else 0]
        outcome = outcome_of(numbers, cuts, text.left - 1)
        self._wishes[row].learn(int(numbers[7]))
        spent = Spent(frame.drafted.seconds(), frame.verified.seconds(), 0.0, frame.rows)
        count = text.take(outcome)
        bands = self.rounds.policy.bands(outcome.confidence)
        text.rounds.append(outcome.record(count, spent, bands))
        self.rounds.policy.observe(text.rounds[-1])


def _letter(proposal: Proposal, verdict: Verdict, plan: Plan, wished: Plan) -> Tensor:
    """All that the host will want to know of a frame, [B, n] float64."""
    heads = [
        verdict.accepted,
        verdict.next_token,
        verdict.level,
        verdict.sibling,
        verdict.sibling_row,
        verdict.fault,
        plan.lengths,
        wished.lengths,
    ]
    parts = [torch.stack(heads, dim=1), proposal.tokens, proposal.entropy]
    parts += [x for x in (proposal.confidence, verdict.distance) if x is not None]
    return torch.cat([part.double() for part in parts], dim=1)
