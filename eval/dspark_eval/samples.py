"""A few answers token by token, so that a report can show where each token came from.

Of every setting the answers with the median and with the lowest accepted length are kept: the
usual case and the hardest, not the nicest. Both are cut, so that a document stays small.

    text, kind, confidence, round   one entry for each token; round -1: from the prompt's last row
    rounds                          counts and milliseconds of the rounds those tokens came from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.runtime.records import CORRECTED, Emitted, EmittedKind, Generation, RoundRecord
from dspark.runtime.text import Detokenizer, TextStream
from dspark_eval import metrics
from dspark_eval.outcomes import level_name
from dspark_eval.suites import Suite

TOKENS = 160
"""Tokens kept of one answer."""
PROMPT_CHARACTERS = 600
"""Characters kept of its question, from the end."""


@dataclass(frozen=True)
class Answered:
    """A question as it was read, and its answer."""

    question: str
    answer: Generation


def asked(suite: Suite, answers: Sequence[Generation]) -> list[Answered]:
    """The last turn of each question beside its answer."""
    return [
        Answered(row.prompt[-1]["content"], answer)
        for row, answer in zip(suite.rows, answers, strict=True)
    ]


def samples(answered: Sequence[Answered], tokenizer: Detokenizer) -> list[dict[str, Any]]:
    """The median and the hardest answer, JSON-ready; fewer where fewer had a round."""
    rates = {
        index: rate
        for index, entry in enumerate(answered)
        if (rate := metrics.accepted_length(entry.answer.rounds)) is not None
    }
    order = sorted(rates, key=lambda index: (rates[index], index))
    if not order:
        return []
    chosen = {order[len(order) // 2]: "median", order[0]: "lowest"}
    if len(order) == 1:
        chosen = {order[0]: "only"}
    return [
        {"prompt": index, "why": why, **_sample(answered[index], tokenizer)}
        for index, why in chosen.items()
    ]


def _sample(entry: Answered, tokenizer: Detokenizer) -> dict[str, Any]:
    answer = entry.answer
    said = emitted(answer)
    came_from = [-1, *(i for i, r in enumerate(answer.rounds) for _ in range(r.emitted))]
    shown = said[:TOKENS]
    last = came_from[len(shown) - 1]
    return {
        "question": entry.question[-PROMPT_CHARACTERS:],
        "accepted_length": metrics.accepted_length(answer.rounds),
        "tokens": len(answer.tokens),
        "finish": answer.finish,
        "text": pieces([token.token for token in shown], tokenizer),
        "kind": [token.kind for token in shown],
        "confidence": [token.confidence and round(token.confidence, 4) for token in shown],
        "round": came_from[: len(shown)],
        "rounds": [_round(record) for record in answer.rounds[: last + 1]],
        "prefill_ms": 1e3 * answer.prefill_s,
    }


def _round(record: RoundRecord) -> dict[str, Any]:
    return {
        "drafted": record.drafted,
        "verified": record.verified,
        "accepted": record.accepted,
        "emitted": record.emitted,
        "end": level_name(record),
        **{f"{part}_ms": round(1e3 * getattr(record, f"{part}_s"), 4)
           for part in ("draft", "verify", "other")},
    }  # fmt: skip


def emitted(answer: Generation) -> list[Emitted]:
    """Where each token came from, read back from the rounds. The counting rules of
    `dspark.runtime.records` make that possible."""
    kinds: list[tuple[EmittedKind, float | None]] = [("first", None)]
    for record in answer.rounds:
        known = [*record.confidence, *[None] * record.drafted]
        said: list[tuple[EmittedKind, float | None]] = [
            ("accepted", known[k]) for k in range(record.accepted)
        ]
        said += [("sibling", None)] * record.sibling
        said.append((_own(record), None))
        kinds += said[: record.emitted]
    return [
        Emitted(token, kind, confidence)
        for token, (kind, confidence) in zip(answer.tokens, kinds, strict=True)
    ]


def _own(record: RoundRecord) -> EmittedKind:
    """The target's own token at the end of a round."""
    if not record.drafted:
        return "plain"
    return "corrected" if record.level == CORRECTED else "bonus"


def pieces(tokens: Sequence[int], tokenizer: Detokenizer) -> list[str]:
    """The text that each token made readable; of a character in parts, all with the last part."""
    stream = TextStream(tokenizer)
    texts = [stream.push(token) for token in tokens]
    if texts:
        texts[-1] += stream.flush()
    return texts
