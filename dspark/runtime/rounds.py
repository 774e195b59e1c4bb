"""One round of a batch: draft, plan, verify, read, commit.

    draft     x_1..x_G of every row, one pass                              -> Proposal
    plan      what of it is sent: a policy's cut, within each row's limit  -> Plan
    verify    target([anchor, x_1..x_L, siblings]), rows pending           -> Verdict
    read      everything the host wants to know, in one transfer           -> Outcome per row
    commit    the rows before each new anchor; their taps extend the draft context

Between rounds cache and draft context hold every token before the anchor, which has been emitted
and not yet been run. Rows are requests: they have their own lengths, limits, draws and rules, and
accept different numbers of tokens. A batch of one runs as slices, without masks or index tensors.

Letters: B rows of the batch, G drafted, L primaries sent, m siblings per position, R rows of a
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.judge import Method
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Policy, plan_block
from dspark.runtime.prefill import clock
from dspark.runtime.proposal import Drafter, check_draft_length, propose
from dspark.runtime.records import Plan, Proposal
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.requests import Outcome, Spent
from dspark.runtime.rules import RequestRules
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.runtime.seats import Judged, Seats
from dspark.runtime.target import Target
from dspark.runtime.tree import Rows, build_rows
from dspark.runtime.verify import verify


@dataclass(frozen=True)
class Rounds:
    """What every round of one run shares.

    Args:
        sampling: Of all requests of the run.
        policy: One object for the run, whose rows are decided together.
        method, relaxed: See `dspark.runtime.verify`.

    Raises UserError for what the pair cannot do: a draft beyond the trained block, siblings on a
    target without trees, a policy or a relaxation that reads a confidence which is not there.
    """

    target: Target
    drafter: Drafter
    head: DraftHead
    sampling: SamplingParams
    policy: Policy
    method: Method = "token"
    relaxed: Relaxed | None = None

    def __post_init__(self) -> None:
        length = self.policy.draft_length(self.drafter.config.block_size)
        if length > 0 or isinstance(self.policy, Fixed):
            check_draft_length(self.drafter, length)
        if self.policy.siblings > 0 and not self.target.supports_trees:
            raise UserError(
                f"siblings: target {self.target.name} verifies chains only; ask for 0 siblings"
            )
        if self.drafter.confidence_head is None:
            for wanted, who in (
                (self.policy.needs_confidence, f"policy {self.policy.name}"),
                (self.relaxed is not None, "relaxed acceptance"),
            ):
                if wanted:
                    raise UserError(
                        f"{who}: this drafter has no confidence head, which it reads; use `fixed` "
                        "or `entropy`, without relaxation"
                    )
        if self.relaxed is not None and self.method != "token":
            raise UserError(
                f"relaxed acceptance works with method token, got {self.method}; use one of them"
            )

    @property
    def block(self) -> int:
        """The trained block size."""
        return self.drafter.config.block_size

    @property
    def sibling_rows(self) -> int:
        """Most rows that siblings add to a pass; a cache needs room for them while they wait."""
        return self.block * self.policy.siblings

    def run(self, seats: Seats) -> None:
        """One round of every row: emitted, committed and on record, but of texts that failed."""
        device = self.target.device
        start = clock(device)
        limits = [text.left - 1 for text in seats.texts]
        proposal = self.draft(seats, min(self.policy.draft_length(self.block), max(limits)))
        plan = self.plan(proposal, limits)
        drafted = clock(device)
        judged = self.judge(seats, proposal, plan)
        outcomes = judged.read(seats.texts)
        verified = clock(device)
        kept = [
            0 if text.fault else text.take(outcome)
            for text, outcome in zip(seats.texts, outcomes, strict=True)
        ]
        taps = self.commit(seats, judged, outcomes, kept)
        committed = clock(device)
        self.extend(seats, taps, kept)
        draft_s = drafted - start + clock(device) - committed
        spent = Spent(draft_s, verified - drafted, committed - verified, judged.width)
        for text, outcome, count in zip(seats.texts, outcomes, kept, strict=True):
            if text.fault is not None:
                continue
            bands = self.policy.bands(outcome.confidence)
            text.rounds.append(outcome.record(count, spent, bands))
            self.policy.observe(text.rounds[-1])

    def draft(self, seats: Seats, length: int) -> Proposal:
        """Propose `length` tokens for every row; 0: none, the round is a plain step."""
        if length == 0:
            empty = torch.empty((len(seats.texts), 0), device=self.target.device)
            beside = empty.long().unsqueeze(-1).expand(-1, -1, self.policy.siblings)
            return Proposal(
                empty.long(), None, empty, empty, beside if self.policy.siblings else None
            )
        return propose(
            self.drafter,
            self.head,
            seats.context,
            seats.anchor,
            length,
            self.sampling,
            seats.draft_draws,
            siblings=self.policy.siblings,
            rules=seats.rules if any(seats.rules) else None,
            check=False,
        )

    def plan(self, proposal: Proposal, limits: Sequence[int]) -> Plan | None:
        """What is sent of each row, at most `limits[b]` primaries; None: all that was drafted."""
        drafted = proposal.tokens.shape[1]
        tight = min(limits) < drafted
        if drafted == 0 or (isinstance(self.policy, Fixed) and not tight):
            return None
        bound = torch.tensor(limits, device=self.target.device).clamp(max=drafted)
        return plan_block(self.policy, proposal, bound if tight else None)

    def judge(self, seats: Seats, proposal: Proposal, plan: Plan | None) -> Judged:
        """Run the target over what is sent and let it decide."""
        rows, tokens, valid = self._layout(seats.anchor, proposal, plan)
        out = self.target.forward(
            tokens,
            seats.cache,
            valid=valid,
            parents=None if rows is None else rows.forward_parents,
            taps=self.drafter.taps,
            commit=False,
        )
        logits = self.target.logits(out.hidden)
        for b, text in enumerate(seats.texts):
            if text.rules is not None:
                with suppress(BadLogits):  # left as they are, and found again with the verdict
                    self._rule(text.rules, b, logits, tokens, valid, rows)
        verdict = verify(
            proposal,
            logits,
            self.sampling,
            seats.judge_draws,
            plan,
            rows,
            method=self.method,
            relaxed=self.relaxed,
            coins=self.block,
            check=False,
        )
        return Judged(proposal, plan, rows, tokens.shape[1], out.taps, verdict)

    def commit(
        self, seats: Seats, judged: Judged, outcomes: Sequence[Outcome], kept: Sequence[int]
    ) -> Tensor | None:
        """Commit the first `kept[b]` rows of each path; their taps, for `extend`."""
        seats.anchor = judged.verdict.next_token
        taps, device = judged.taps, seats.anchor.device
        if not any(kept):
            seats.cache.rollback()
            return None
        if judged.rows is None or judged.rows.forward_parents is None:
            seats.cache.commit(_counts(kept, device))
            return None if taps is None else taps[:, : max(kept)]
        paths = [outcome.path(count) for outcome, count in zip(outcomes, kept, strict=True)]
        padded = [path + [-1] * (max(kept) - len(path)) for path in paths]
        path = torch.tensor(padded, device=device)
        seats.cache.commit_path(path)
        if taps is None:
            return None
        return taps.gather(1, path.clamp(min=0).unsqueeze(-1).expand(-1, -1, taps.shape[2]))

    def extend(self, seats: Seats, taps: Tensor | None, kept: Sequence[int]) -> None:
        """Feed the taps of committed rows to the draft context."""
        if taps is not None:
            self.drafter.extend(seats.context, taps, _counts(kept, taps.device))

    def _layout(
        self, anchor: Tensor, proposal: Proposal, plan: Plan | None
    ) -> tuple[Rows | None, Tensor, Tensor | None]:
        """Rows if there may be siblings, tokens [B, R], and what of them is real (None: all)."""
        if proposal.siblings is not None:
            rows = build_rows(anchor, proposal, plan or Plan.whole(proposal))
            return rows, rows.tokens, None if len(anchor) == 1 else rows.valid
        if plan is None:
            return None, torch.cat((anchor.unsqueeze(1), proposal.tokens), dim=1), None
        lengths = plan.lengths.tolist()
        sent = max(lengths)
        tokens = torch.cat((anchor.unsqueeze(1), proposal.tokens[:, :sent]), dim=1)
        if min(lengths) == sent:
            return None, tokens, None
        steps = torch.arange(sent + 1, device=tokens.device)
        return None, tokens, steps <= plan.lengths.unsqueeze(1)

    def _rule(
        self,
        rules: RequestRules,
        b: int,
        logits: Tensor,
        tokens: Tensor,
        valid: Tensor | None,
        rows: Rows | None,
    ) -> None:
        """Apply the rules of request b to its logits [R, V], in place, by the path of each row."""
        parents = None if rows is None else rows.forward_parents
        if valid is None:
            above = None if parents is None else parents[b]
            logits[b] = rules.block(logits[b], tokens[b], above)
            return
        real = valid[b].nonzero().squeeze(1)
        above = None
        if parents is not None:  # by their place among the real rows
            place = valid[b].long().cumsum(0) - 1
            above = parents[b, real]
            above = torch.where(above < 0, above, place[above.clamp(min=0)])
        logits[b, real] = rules.block(logits[b, real], tokens[b, real], above)


def _counts(kept: Sequence[int], device: torch.device) -> int | Tensor:
    """One number where all rows keep the same, which costs no mask."""
    return kept[0] if min(kept) == max(kept) else torch.tensor(kept, device=device)
