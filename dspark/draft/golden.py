"""The golden vector: what a drafter computes on inputs that anybody can make again.

    row t of the context     u(TAPS, t, c)            [N*D]       t = 0, 1, 2, ...
    embedding of id i        u(EMBED, i, c)           [D]
    head row of id i         u(HEAD, i, c) / sqrt(D)  [D]
    tokens of a block        h(TOKENS, p, k) mod V    x_0 is the anchor
    u = sqrt(3) (h / 2^23 - 1), unit variance; h: 24 bits of an integer hash, the same everywhere

With p rows of context a block is run at the positions 1, 100 and 5,000: short ones say whether the
weights and the layout are right, the long one whether rotary positions and windows are. Kept are,
slot by slot, the logits of a few ids by that made-up head (`hidden`: every channel enters each of
them), the sequential head's bias for these ids and the confidence before its sigmoid. The file
does not grow with the drafter, some 20 kB, and needs no target. Where the target is at hand, its
own reading of a fixed text stands there too.

It is JSON and not safetensors because engines load every `*.safetensors` of a folder as weights.

Letters: N taps, D hidden, G slots, K ids, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.draft.anchors import block_inputs
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter

if TYPE_CHECKING:
    from dspark.runtime.target import Target

POSITIONS = (1, 100, 5000)
IDS = 16
"""K, at most: a smaller draft vocabulary has fewer."""
TEXT = 24
"""Tokens of the text that the target reads."""
TOP = 8
ROWS = 512
"""Context rows made at once: 5,000 of a large drafter would be most of a gigabyte."""

TAPS, EMBED, HEAD, TOKENS, CHOSEN, WORDS = range(1, 7)
"""Streams of the hash."""

TOLERANCE = {torch.float64: 5e-4, torch.float32: 5e-4, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Largest difference that arithmetic explains, in root mean squares of what is kept. What is kept
was computed in float32 from the weights as they are stored."""

Rows = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Reading:
    """One block: `hidden` and `bias` [G][K], `confidence` [G][1] or nothing. None: not finite."""

    hidden: Rows
    bias: Rows
    confidence: Rows

    def parts(self) -> dict[str, Rows]:
        """By name, in the order in which they are computed."""
        return {"hidden": self.hidden, "bias": self.bias, "confidence": self.confidence}


@dataclass(frozen=True)
class TargetReading:
    """Logits of the first block after a fixed text, read by the target: its best ids [G][TOP].

    `dtype` is the target's, as "float32".
    """

    dtype: str
    ids: tuple[tuple[int, ...], ...]
    logits: Rows


@dataclass(frozen=True)
class Difference:
    """The first number that is not the one kept."""

    position: int
    slot: int
    part: str
    kept: float | None
    found: float | None
    tolerance: float

    def __str__(self) -> str:
        return (
            f"position {self.position}, slot {self.slot}: {self.part} is {_shown(self.found)}, "
            f"{_shown(self.kept)} when it was written (tolerance {self.tolerance:.2g})"
        )


def hashed(stream: int, rows: Tensor, columns: Tensor) -> Tensor:
    """24 bits for every pair of a row and a column: [n], [c] int64 -> [n, c] int64."""
    start = _mix(torch.tensor(stream))
    return _mix((_mix((start + rows) & _MASK)[:, None] + columns) & _MASK) >> 8


def uniform(stream: int, rows: Tensor, columns: int) -> Tensor:
    """[n] int64 -> [n, columns] float32, unit variance."""
    drawn = hashed(stream, rows, torch.arange(columns))
    return (drawn - 2**23).float() * (math.sqrt(3) / 2**23)


def chosen_columns(config: DraftConfig) -> Tensor:
    """Rows of the draft vocabulary whose logits are kept, [K] int64 ascending."""
    drawn = hashed(CHOSEN, torch.zeros(1, dtype=torch.int64), torch.arange(IDS))[0]
    return torch.unique(drawn % config.draft_vocab)


def chosen_ids(drafter: DSparkDrafter) -> tuple[int, ...]:
    """Target ids of `chosen_columns`."""
    columns = chosen_columns(drafter.config)
    ids = drafter.draft_ids
    return tuple((columns if ids is None else ids.cpu()[columns]).tolist())


@torch.no_grad()
def read_golden(drafter: DSparkDrafter, positions: Sequence[int] = POSITIONS) -> dict[int, Reading]:
    """What the drafter computes at those positions, ascending, on its own device and in its dtype.

    Takes as many context rows as the last position says.
    """
    device = drafter.fc.weight.device
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    context = drafter.new_context(1, positions[-1])
    found, length = {}, 0
    for position in positions:
        for start in range(length, position, ROWS):
            rows = torch.arange(start, min(start + ROWS, position))
            drafter.extend(context, uniform(TAPS, rows, width)[None].to(device))
        length = position
        found[position] = _read_block(drafter, context, position)
    return found


def _read_block(drafter: DSparkDrafter, context: object, position: int) -> Reading:
    config, device = drafter.config, drafter.fc.weight.device
    prev = hashed(TOKENS, torch.tensor([position]), torch.arange(config.block_size))
    prev = prev % config.vocab_size  # [1, G]
    inputs = block_inputs(prev[:, 0], config.block_size, config.mask_token_id)
    embeds = uniform(EMBED, inputs[0], config.hidden_size)[None].to(device)
    hidden = drafter.block_hidden(embeds, context)  # type: ignore[arg-type]
    columns = chosen_columns(config)
    head = uniform(HEAD, torch.tensor(chosen_ids(drafter)), config.hidden_size)
    logits = hidden[0].float().cpu() @ head.T / math.sqrt(config.hidden_size)
    prev = prev.to(device)
    bias = drafter.markov_head.bias(drafter.markov_head.codes(prev, hidden))[0][:, columns]
    confidence: Rows = ()
    if drafter.confidence_head is not None:
        scores = drafter.confidence_head(hidden, drafter.markov_head.embed(prev))[0]
        confidence = _rows(scores[:, None])
    return Reading(_rows(logits), _rows(bias), confidence)


@torch.no_grad()
def read_target(
    drafter: DSparkDrafter, target: Target, ids: Sequence[Sequence[int]] | None = None
) -> TargetReading:
    """The drafter's logits after the target has read a fixed text.

    Args:
        drafter: On the target's device.
        target: Its target.
        ids: [G][TOP], those whose logits are wanted; None: the best of every slot.
    """
    config = drafter.config
    one = torch.ones(1, dtype=torch.int64)
    words = hashed(WORDS, one, torch.arange(TEXT)) % target.vocab_size
    prev = hashed(TOKENS, one, torch.arange(config.block_size)) % target.vocab_size
    words, prev = words.to(target.device), prev.to(target.device)
    out = target.forward(words, target.new_cache(1, TEXT), taps=drafter.taps, commit=True)
    assert out.taps is not None
    context = drafter.new_context(1, TEXT)
    drafter.extend(context, out.taps)
    inputs = block_inputs(prev[:, 0], config.block_size, config.mask_token_id)
    hidden = drafter.block_hidden(target.embed(inputs), context)
    names = drafter.draft_ids
    head = target.logits if names is None else target.head(names)
    logits = head(hidden.to(target.dtype))[0].float()
    bias = drafter.markov_head.bias(drafter.markov_head.codes(prev, hidden))[0].float()
    logits = (logits + bias[:, : logits.shape[1]]).cpu()
    names = torch.arange(logits.shape[1]) if names is None else names.cpu()
    if ids is None:
        columns = logits.topk(min(TOP, logits.shape[1])).indices
    else:
        columns = torch.searchsorted(names, torch.tensor(ids)).clamp(max=len(names) - 1)
    picked = names[columns]
    dtype = str(target.dtype).removeprefix("torch.")
    best = tuple(tuple(map(int, row)) for row in picked.tolist())
    return TargetReading(dtype, best, _rows(logits.gather(1, columns)))


def first_difference(
    kept: Mapping[int, Reading], found: Mapping[int, Reading], dtype: torch.dtype
) -> Difference | None:
    """The first number that differs by more than `TOLERANCE`; None: they agree.

    Positions in order, within one `hidden`, `bias`, `confidence`, and slots in order. Positions
    and slots that only one of them has are not compared.
    """
    for position in sorted(kept.keys() & found.keys()):
        ours = found[position].parts()
        for part, rows in kept[position].parts().items():
            bad = compare(rows, ours[part], dtype)
            if bad is not None:
                return Difference(position, bad[0], part, *bad[1:])
    return None


def compare(
    kept: Rows, found: Rows, dtype: torch.dtype
) -> tuple[int, float | None, float | None, float] | None:
    """Slot, both numbers and the tolerance of the first that differs; None: they agree."""
    finite = [value for row in kept for value in row if value is not None]
    rms = math.sqrt(sum(value * value for value in finite) / max(len(finite), 1))
    tolerance = TOLERANCE[dtype] * rms + 1e-6
    for slot, (old, new) in enumerate(zip(kept, found, strict=False)):
        for a, b in zip(old, new, strict=False):
            if (a is None) != (b is None) or (
                a is not None and b is not None and not abs(a - b) <= tolerance
            ):
                return slot, a, b, tolerance
    return None


_MASK = 2**32 - 1


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits that lets every bit reach every other; int64 never overflows."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x31848BAB & _MASK
    return x ^ (x >> 16)


def _rows(values: Tensor) -> Rows:
    """float32 as the shortest decimals that give it back."""
    return tuple(
        tuple(float(f"{v:.9g}") if math.isfinite(v) else None for v in row)
        for row in values.detach().float().cpu().tolist()
    )


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"
