"""Prompts -> training rows, answered by the target itself.

A drafter learns to say what its target says, so the target writes the answers. A row is

    ids  = prompt ids + emitted ids        exactly; the answer is never decoded and tokenised again
    mask = 0 ... 0      1 ... 1

Conversations that end with an assistant turn either keep it (``responses="given"``, masked by the
template, every assistant turn supervised) or have that last turn answered anew
(``"regenerate"``); all others are answered. Order of filters: template, then truncation to
``max_length``, then the count of supervised tokens, so that a row which loses its answer to
truncation is seen and dropped. Every dropped row is counted by reason and named.

Each prompt draws from a generator of its own, chosen by ``seed`` and its place in the list, and
rows come back in the order of the prompts: the batch size and the order in which batches are
formed (by length, to waste little padding) do not show in the result. (Where the hardware rounds a
batched product differently for another batch size, a draw on the very edge may still differ.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark.distill.chat import ChatFormat, RowError, TrainingRow
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.prompts import PromptRow
from dspark.distill.rows import (
    DROP_REASONS,
    RowSet,
    check_supervised_share,
    check_target_format,
    prompts_digest,
)
from dspark.errors import UserError
from dspark.runtime.plain import generate_batch
from dspark.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark.runtime.target import Target

Progress = Callable[[int, int, int], None]
"""Called after every batch with (prompts answered, prompts to answer, tokens emitted so far)."""

RESPONSES = ("regenerate", "given")


@dataclass(frozen=True)
class ResponseSettings:
    """How answers are made and which rows are kept. Invalid values raise ``UserError``.

    max_new_tokens  longest answer, in tokens
    max_length      longest row, in tokens; longer rows lose their end
    min_supervised  rows with fewer supervised tokens are dropped; two make one anchor and its label
    batch_size      prompts answered at once; changes speed and memory only
    thinking        thinking switch of the chat template
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    max_length: int = 1024
    min_supervised: int = 2
    seed: int = 0
    batch_size: int = 16
    responses: str = "regenerate"
    thinking: bool = False

    def __post_init__(self) -> None:
        SamplingParams(self.temperature, self.top_p, self.top_k)
        for name, low in (("max_new_tokens", 1), ("min_supervised", 2), ("batch_size", 1)):
            if getattr(self, name) < low:
                raise UserError(f"{name} is {getattr(self, name)}: expected at least {low}")
        if self.max_length <= self.min_supervised:
            raise UserError(
                f"max_length is {self.max_length}: expected more than min_supervised, "
                f"{self.min_supervised}"
            )
        if self.responses not in RESPONSES:
            raise UserError(f"responses is {self.responses!r}: expected {' or '.join(RESPONSES)}")

    @property
    def sampling(self) -> SamplingParams:
        """The sampling part, as the runtime takes it."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)


def build_rows(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    settings: ResponseSettings,
    on_progress: Progress | None = None,
) -> RowSet:
    """Training rows of ``prompts``, in order.

    Raises ``UserError`` when a file of given answers has 0 % or 100 % supervised tokens or is
    written in another chat format than the target's, and when no row is left.
    """
    chat = ChatFormat(tokenizer, thinking=settings.thinking)
    given, asked, dropped = _read(chat, prompts, settings)
    check_supervised_share(list(given.values()), chat)
    check_target_format(list(given.values()), chat, target)

    rows = dict(given)
    for index, answer in _answers(target, asked, settings, on_progress):
        ids = (*asked[index], *answer)
        mask = (False,) * len(asked[index]) + (True,) * len(answer)
        rows[index] = _at(prompts[index], TrainingRow(ids, mask, "target"))

    kept = []
    for index in sorted(rows):
        row = rows[index].truncated(settings.max_length)
        if row.supervised < settings.min_supervised:
            dropped[index] = "too-few-supervised"
        else:
            kept.append(row)
    answered = (row for row in kept if row.provenance == "target")
    ended = sum(row.ids[-1] in target.end_token_ids for row in answered)
    row_set = RowSet(tuple(kept), _by_reason(prompts, dropped), ended)
    if not kept:
        raise UserError(_nothing_left(row_set, settings))
    return row_set


def cache_key(
    target_fingerprint: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    settings: ResponseSettings,
) -> dict[str, Any]:
    """Everything that decides the rows, for ``rows_to_jsonl`` and ``rows_from_jsonl``.

    The batch size is left out, since it decides nothing. ``target_fingerprint`` names the weights.
    """
    choices = asdict(settings)
    del choices["batch_size"]
    return {
        "target": target_fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": ChatFormat(tokenizer, thinking=settings.thinking).fingerprint,
        "prompts": prompts_digest(prompts),
        **choices,
    }


def _read(
    chat: ChatFormat, prompts: Sequence[PromptRow], settings: ResponseSettings
) -> tuple[dict[int, TrainingRow], dict[int, list[int]], dict[int, str]]:
    """Rows with a given answer, prompt ids of those to answer, reasons of those dropped."""
    given: dict[int, TrainingRow] = {}
    asked: dict[int, list[int]] = {}
    dropped: dict[int, str] = {}
    for index, prompt in enumerate(prompts):
        try:
            if prompt.has_response and settings.responses == "given":
                given[index] = _at(prompt, chat.training_row(prompt.messages))
                continue
            ids = chat.prompt_ids(prompt.prompt)
        except RowError as problem:
            dropped[index] = problem.reason
            continue
        if len(ids) + settings.min_supervised > settings.max_length:
            dropped[index] = "prompt-too-long"
        else:
            asked[index] = ids
    return given, asked, dropped


def _at(prompt: PromptRow, row: TrainingRow) -> TrainingRow:
    return replace(row, file=prompt.file, line=prompt.line)


def _answers(
    target: Target,
    asked: dict[int, list[int]],
    settings: ResponseSettings,
    on_progress: Progress | None,
) -> Iterator[tuple[int, list[int]]]:
    """(index, emitted ids) of every prompt, batch by batch, longest prompts first.

    Longest first, so that a batch that does not fit into memory fails at once.
    """
    order = sorted(asked, key=lambda index: (-len(asked[index]), index))
    emitted = 0
    for start in range(0, len(order), settings.batch_size):
        batch = order[start : start + settings.batch_size]
        # Nothing beyond max_length would be kept: no row of the batch needs more than this.
        room = settings.max_length - min(len(asked[index]) for index in batch)
        answers = generate_batch(
            target,
            [asked[index] for index in batch],
            max_new_tokens=min(settings.max_new_tokens, room),
            sampling=settings.sampling,
            seed=settings.seed,
            indices=batch,
        )
        yield from zip(batch, answers, strict=True)
        emitted += sum(map(len, answers))
        if on_progress is not None:
            on_progress(start + len(batch), len(order), emitted)


def _by_reason(prompts: Sequence[PromptRow], dropped: dict[int, str]) -> dict[str, tuple[str, ...]]:
    return {
        reason: tuple(
            f"{prompts[index].file}:{prompts[index].line}"
            for index in sorted(dropped)
            if dropped[index] == reason
        )
        for reason in DROP_REASONS
        if reason in dropped.values()
    }


def _nothing_left(row_set: RowSet, settings: ResponseSettings) -> str:
    reasons = "; ".join(
        f"{len(places)} {reason}: {DROP_REASONS[reason]} (first {places[0]})"
        for reason, places in row_set.dropped.items()
    )
    return (
        f"no training row is left ({reasons or 'no prompts were given'}); max_length is "
        f"{settings.max_length}, min_supervised is {settings.min_supervised}"
    )
