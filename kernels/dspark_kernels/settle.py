"""The end of a frame, as one launch: which tokens count, and what every seat goes on from.

    said     x_1 .. x_a, then the verdict's own token
    count    how many of them the text gets: up to its first end token; 0 in an idle seat
    left     tokens that may still come; 0 where the text has ended
    sent     primaries that the next frame may send, min(left - 1, L), never below 0

Written in place: anchor, left, sent, lengths, and accepted where there are slots to replay. Nothing
is read on the host; what it wants to know leaves as a letter,

    [accepted, next token, level, -1, -1, fault, sent] + tokens + entropy + confidence    float64

in which -1, -1 stand where siblings would, so that every reader of frames reads these too.

Letters: B seats, L primaries, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HEADS = 7
"""Numbers of a letter before its tokens."""


class Seats(NamedTuple):
    """What is written in place, [B] int64 each; ``accepted`` None: nothing waits to be replayed."""

    anchor: Tensor
    left: Tensor
    sent: Tensor
    lengths: Tensor
    accepted: Tensor | None


def settle(
    tokens: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    level: Tensor,
    fault: Tensor,
    ends: Tensor,
    seats: Seats,
    entropy: Tensor | None = None,
    confidence: Tensor | None = None,
    peak: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Settle one frame.

    Args:
        tokens: [B, L] int64, the primaries.
        accepted, next_token, level, fault: [B] int64, the verdict.
        ends: [B, V] bool, marks the ids that end the text.
        seats: Changed in place; before, ``sent`` is what this frame sent.
        entropy, confidence: [B, L] of the letter; None: left out.
        peak: [B, L] float32, the drafter's largest scores; one that is not finite is the letter's
            fault, -(1 + 3 slot + kind) with the kinds of `verify_sample`. None: not looked at.

    Returns:
        count [B] int64, and the letter [B, 7 + L (1 to 3)] float64.
    """
    if peak is not None and peak.shape[1]:
        drafters = _drafters_fault(peak)
        fault = torch.where(drafters != 0, drafters, fault)
    letter = _letter(tokens, accepted, next_token, level, fault, seats.sent, entropy, confidence)
    most = tokens.shape[1]
    step = torch.arange(most + 1, device=tokens.device)
    said = torch.cat((tokens, next_token.unsqueeze(1)), dim=1)
    said = torch.where(step < accepted.unsqueeze(1), said, next_token.unsqueeze(1))
    count, left = up_to_the_end(said, accepted + 1, seats.left, ends)
    seats.left.copy_(left)
    seats.sent.copy_((seats.left - 1).clamp(0, most))
    seats.anchor.copy_(next_token)
    seats.lengths.add_(count)
    if seats.accepted is not None:
        seats.accepted.copy_(count)
    return count, letter


def up_to_the_end(said: Tensor, count: Tensor, left: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """What counts of the first ``count`` [B] tokens of ``said`` [B, n]: those up to an end token.

    Args:
        said: int64.
        count: [B] int64, at least 1.
        left: [B] int64, tokens that may still come, at least ``count`` where it is not 0.
        ends: [B, V] bool, marks the ids that end the text.

    Returns:
        How many count, [B] int64, 0 where nothing was left; tokens that may still come, 0 where the
        text has ended.
    """
    step = torch.arange(said.shape[1], device=said.device)
    over = ends.gather(1, said) & (step < count.unsqueeze(1))
    ended, live = over.any(dim=1), left > 0
    count = torch.where(ended, over.byte().argmax(dim=1) + 1, count)
    count = torch.where(live, count, 0)
    return count, torch.where(live & ~ended, left - count, 0)


def _drafters_fault(peak: Tensor) -> Tensor:
    bad = ~torch.isfinite(peak)
    slot = bad.byte().argmax(dim=1, keepdim=True)
    found = peak.gather(1, slot)
    kind = torch.where(found.isnan(), 0, torch.where(found > 0, 1, 2))
    return torch.where(bad.any(dim=1), -(1 + 3 * slot + kind).squeeze(1), 0)


def _letter(
    tokens: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    level: Tensor,
    fault: Tensor,
    sent: Tensor,
    entropy: Tensor | None,
    confidence: Tensor | None,
) -> Tensor:
    none = torch.full_like(accepted, -1)
    heads = torch.stack((accepted, next_token, level, none, none, fault, sent), dim=1)
    parts = [heads, tokens, *(x for x in (entropy, confidence) if x is not None)]
    return torch.cat([part.double() for part in parts], dim=1)


def moved_bytes(batch: int, primaries: int) -> int:
    """Bytes of one call: too few to matter; it is the launches that it saves."""
    return 8 * batch * (3 * primaries + 2 * HEADS + 10)
