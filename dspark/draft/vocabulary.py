"""A reduced draft vocabulary: the drafter proposes only the target's ids that pay for themselves.

Draft id i stands for target id ids[i]; ids ascend strictly. The map is part of the weights, in the
two forms that serving engines read:

    d2t [V'] int64   offsets: ids[i] = i + d2t[i]
    t2d [V] bool     whether a target id is in the draft vocabulary

Tokens that were emitted (the anchor, the token before a slot) are always target ids; only the
drafter's own distribution is over draft ids. What the target says outside of it can never be
accepted. A drafter that proposed the target's own distribution inside is accepted in a slot with
probability p(ids), which is the chance that a token the target samples is one of them: so the
text of the target itself tells how long its rounds could be at most (`Coverage`).

Letters: V vocabulary of the target, V' of the drafter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dspark.draft.model import DSparkDrafter

OFFSETS, MEMBERS = "d2t", "t2d"
"""Names of the two maps among the tensors of a drafter."""
BIAS = "markov_head.markov_w2.weight"
"""The one tensor with a row for every draft id."""


class Row(Protocol):
    """A text with a mask of the tokens that the target produced."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def loss_mask(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Coverage:
    """How much of the target's own text a draft vocabulary can say.

    Attributes:
        tokens: Tokens of the text that would have been drafted: all but the first of each answer.
        covered: Those among them that are in the vocabulary.
        rounds: Rounds in which a drafter that is right wherever it can be would emit them.
    """

    tokens: int
    covered: int
    rounds: int

    @property
    def share(self) -> float | None:
        """Ceiling of the chance that a proposed token is accepted; None without any text."""
        return self.covered / self.tokens if self.tokens else None

    @property
    def accepted_length(self) -> float | None:
        """Ceiling of the tokens per round, the bonus token included; None without any text."""
        return self.tokens / self.rounds if self.rounds else None


def vocabulary_maps(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """`d2t` and `t2d` of target ids [V'] int64.

    Raises:
        ValueError: The ids do not ascend strictly, or lie outside 0..V-1.
    """
    _check_ids(ids, vocab_size)
    members = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    members[ids] = True
    return ids - torch.arange(len(ids), device=ids.device), members


def vocabulary_ids(offsets: Tensor) -> Tensor:
    """Target ids [V'] int64 of `d2t`."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def check_maps(offsets: Tensor, members: Tensor) -> None:
    """Raises ValueError unless `d2t` [V'] and `t2d` [V] are maps and say the same."""
    if offsets.dtype != torch.int64 or members.dtype != torch.bool:
        raise ValueError(
            f"{OFFSETS}, {MEMBERS}: stored as {offsets.dtype}, {members.dtype}; "
            "int64 offsets and a bool mask were expected"
        )
    wanted, ids = members.nonzero().squeeze(1), vocabulary_ids(offsets)
    if torch.equal(offsets, wanted) and not torch.equal(ids, wanted):
        raise ValueError(
            f"{OFFSETS}: holds target ids, offsets were expected: subtract 0, 1, 2, ... so that "
            f"target id = draft id + {OFFSETS}[draft id]"
        )
    try:
        _check_ids(ids, len(members))
    except ValueError as error:
        raise ValueError(f"{OFFSETS}: {error}") from None
    if not torch.equal(ids, wanted):
        raise ValueError(
            f"{MEMBERS}: marks {len(wanted)} ids that are not the {len(ids)} of {OFFSETS}; "
            "the two maps must name the same ids"
        )


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"draft ids of shape {list(ids.shape)} given, a list of ids is needed")
    falling = (ids[1:] <= ids[:-1]).nonzero()
    if len(falling):
        at = int(falling[0])
        raise ValueError(
            f"draft ids {at} and {at + 1} stand for target ids {int(ids[at])} and "
            f"{int(ids[at + 1])}; target ids must ascend strictly"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"target ids {int(ids[0])}..{int(ids[-1])} given, the target has 0..{vocab_size - 1}"
        )


def token_frequency(rows: Iterable[Row], vocab_size: int) -> Tensor:
    """How often the target produced each id, over the supervised tokens of rows: [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        ids = torch.tensor(row.ids)[torch.tensor(row.loss_mask, dtype=torch.bool)]
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def most_frequent(counts: Tensor, size: int, always: Collection[int] = ()) -> Tensor:
    """The draft vocabulary of `size` ids with the highest counts: [size] int64, ascending.

    Args:
        counts: [V], from `token_frequency`. Equal counts: the lower id first, so that ids that
            never occurred fill up from 0.
        size: V'.
        always: Ids that are in it whatever their count, such as the end tokens: a drafter that
            cannot end a text wastes the last round of each.

    Raises:
        ValueError: size outside 1..V, or too small for `always`.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"{size} given, expected 1..{len(counts)}, the target's ids")
    if size < len(set(always)):
        raise ValueError(f"{size} given, {len(set(always))} ids have to be in it in any case")
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def coverage(rows: Iterable[Row], ids: Tensor, block_size: int) -> Coverage:
    """What draft ids [V'] can say of the target's own text, drafted in blocks of `block_size`."""
    inside = frozenset(ids.tolist())
    tokens = covered = rounds = 0
    for answer in _answers(rows):
        known = [token in inside for token in answer[1:]]  # the first is no proposal but an anchor
        tokens += len(known)
        covered += sum(known)
        rounds += _rounds(known, block_size)
    return Coverage(tokens, covered, rounds)


def _answers(rows: Iterable[Row]) -> Iterator[list[int]]:
    """Every unbroken run of supervised tokens."""
    for row in rows:
        answer: list[int] = []
        for token, supervised in zip(row.ids, row.loss_mask, strict=True):
            if supervised:
                answer.append(token)
            elif answer:
                yield answer
                answer = []
        if answer:
            yield answer


def _rounds(known: Sequence[bool], block_size: int) -> int:
    """Rounds that emit these tokens: up to `block_size` known ones, then any one token."""
    rounds = accepted = 0
    for token in known:
        if token and accepted < block_size:
            accepted += 1
        else:  # the correction or the bonus ends the round
            rounds, accepted = rounds + 1, 0
    return rounds + (accepted > 0)


def reduce_vocabulary(drafter: DSparkDrafter, ids: Tensor) -> DSparkDrafter:
    """A copy of a drafter that proposes only the target ids `ids` [V'] int64.

    Its logits of these ids are those of `drafter`, so its distribution is that of `drafter`,
    renormalised. All ids of the target give a drafter without a map. The calibration does not come
    along: acceptance changes.

    Raises:
        ValueError: The ids do not ascend strictly, or are not all proposed by `drafter`.
    """
    config = drafter.config
    own = drafter.draft_ids
    ids = ids.to(drafter.fc.weight.device)
    _check_ids(ids, config.vocab_size)
    rows = ids
    if own is not None:
        rows = torch.searchsorted(own, ids).clamp_max(len(own) - 1)
        if not torch.equal(own[rows], ids):
            missing = int(ids[own[rows] != ids][0])
            raise ValueError(f"target id {missing} is not in the drafter's vocabulary")
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    tensors[BIAS] = tensors[BIAS][rows]
    size = len(ids) if len(ids) < config.vocab_size else None
    if size is None:
        tensors.pop(OFFSETS, None)
        tensors.pop(MEMBERS, None)
    else:
        tensors[OFFSETS], tensors[MEMBERS] = vocabulary_maps(ids, config.vocab_size)
    with torch.device("meta"):
        reduced = type(drafter)(replace(config, draft_vocab_size=size))
    reduced.load_state_dict(tensors, assign=True)
    return reduced.train(drafter.training)
