"""Prompt lookup: what followed the last few tokens when they stood in the text before.

    n = 3, 2, 1:   the earliest place where the text's last n tokens stood before
    proposal:      the tokens that followed there, up to where the text ends

No model, no taps: a draft costs a look into a table. Each token is a point mass, so at temperature
0 it is accepted if it is the target's argmax and above with probability p(x); the correction is
drawn from p without x. Where nothing matches, nothing is proposed and the round is a plain step.

(Saxena 2023, "Prompt Lookup Decoding"; n from 3 down and the earliest match are its defaults. The
continuation is cut where the text ends, as transformers does it.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.runtime.records import Proposal
from dspark.runtime.sampling import Generators, SamplingParams
from dspark_eval.baselines.base import Baseline, Block, nothing

LONGEST = 3


class Seen:
    """Where every run of 1..n tokens stood first, by what follows it."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def grow(self, text: Sequence[int]) -> None:
        """`text` is what was seen before and more. A run counts once a token follows it."""
        for end in range(max(1, len(self.tokens)), len(text)):
            for n in range(1, min(self.longest, end) + 1):
                self._after.setdefault(tuple(text[end - n : end]), end)
        self.tokens = list(text)

    def continuation(self, length: int) -> list[int]:
        """At most `length` tokens that followed the longest run that the text ends with."""
        for n in range(min(self.longest, len(self.tokens) - 1), 0, -1):
            start = self._after.get(tuple(self.tokens[-n:]))
            if start is not None:
                return self.tokens[start : start + length]
        return []


class PromptLookup(Baseline):
    """Proposes from the text itself.

    Args:
        block_size: Longest proposal.
        device: Of the target.
        longest: Most tokens that are matched.
    """

    name = "lookup"

    def __init__(
        self, block_size: int, device: torch.device | str = "cpu", longest: int = LONGEST
    ) -> None:
        self.config, self.device, self.longest = Block(block_size), torch.device(device), longest

    def new_context(self, batch: int, max_length: int) -> Seen:
        del batch, max_length
        return Seen(self.longest)

    def read(self, context: Seen, prompt: Sequence[int]) -> None:
        context.grow(prompt)

    def propose(
        self,
        context: Seen,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        del sampling, generator  # nothing is drawn
        context.grow(text)
        found = context.continuation(length)
        if not found:
            return nothing(self.device)
        tokens = torch.tensor([found], device=self.device)
        return Proposal(tokens, None, None, torch.zeros(tokens.shape, device=self.device))
