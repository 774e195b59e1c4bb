"""Prompts -> training rows, answered by the target itself.

A drafter learns to say what its target says, so the target writes the answers. A row is

    ids  = prompt ids + emitted ids        exactly; the answer is never decoded and tokenised again
    mask = 0 ... 0      1 ... 1

Conversations that end with an assistant turn either keep it (``responses="given"``, masked by the
template, every assistant turn supervised) or have that last turn answered anew
(``"regenerate"``); all others are answered, with ``thinking="both"`` once each way. A given answer
belongs to one way: thinking, if it carries reasoning. Order of filters: template, then truncation
to ``max_length``, then the count of supervised tokens, so that a row which loses its answer to
truncation is seen and dropped. Every dropped row is counted by reason and named; with ``strict``
the first is an error, before the target is asked anything.

Each prompt draws from a generator of its own, chosen by ``seed`` and its place in the list, and
rows come back in the order of the prompts: the batch size and the order in which batches are
formed (by length, to waste little padding) do not show in the result. (Where the hardware rounds a
batched product differently for another batch size, a draw on the very edge may still differ.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark.distill.chat import ChatFormat, RowError, TrainingRow, chat_formats
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.prompts import PromptRow
from dspark.distill.rows import (
    DROP_REASONS,
    RowSet,
    check_given,
    check_supervised_share,
    prompts_digest,
)
from dspark.distill.templates import THINKING
from dspark.errors import UserError
from dspark.runtime.plain import generate_batch
from dspark.runtime.sampling import SamplingParams
from dspark.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark.runtime.target import Target

Progress = Callable[[int, int, int], None]
"""Called after every batch with (prompts answered, prompts to answer, tokens emitted so far)."""

Generate = Callable[..., list[list[int]]]
"""Something that is called, and answers, as ``generate_batch``."""

Job = tuple[PromptRow, ChatFormat]
"""One prompt in one way of asking it."""

Drop = tuple[str, str]
"""(key of ``DROP_REASONS``, detail)."""

RESPONSES = ("regenerate", "given")


@dataclass(frozen=True)
class ResponseSettings:
    """How answers are made and which rows are kept. Invalid values raise ``UserError``.

    max_new_tokens  longest answer, in tokens
    max_length      longest row, in tokens; longer rows lose their end
    min_supervised  rows with fewer supervised tokens are dropped; two make one anchor and its label
    batch_size      prompts answered at once; changes speed and memory only
    thinking        thinking switch of the chat template: off, on or both
    template        chat template: a file or a shipped name; None: the tokenizer's own
    strict          the first row that would be dropped for what its file says is an error
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
    thinking: str = "off"
    template: str | None = None
    strict: bool = False

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
        if self.thinking not in THINKING:
            raise UserError(f"thinking is {self.thinking!r}: expected {', '.join(THINKING)}")

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
    generate: Generate = generate_batch,
) -> RowSet:
    """Training rows of ``prompts``, in order.

    Raises ``UserError`` when a file of given answers has 0 % or 100 % supervised tokens or is
    written in another chat format than the target's, and when no row is left.
    """
    formats = chat_formats(tokenizer, settings.thinking, settings.template)
    jobs = [(prompt, chat) for chat in formats for prompt in prompts]
    given, asked, dropped = _read(jobs, settings)
    check_given([row for rows in given.values() for row in rows], formats[0], target)

    rows = dict(given)
    for index, answer in _answers(target, asked, settings, on_progress, generate):
        ids = (*asked[index], *answer)
        mask = (False,) * len(asked[index]) + (True,) * len(answer)
        rows[index] = [_at(jobs[index][0], TrainingRow(ids, mask, "target"))]
    row_set = _keep(rows, jobs, dropped, settings, target)
    if not row_set.rows:
        raise UserError(_nothing_left(row_set, dropped, settings))
    return row_set


def read_given(
    prompts: Sequence[PromptRow], formats: Sequence[ChatFormat], settings: ResponseSettings
) -> tuple[RowSet, list[tuple[PromptRow, list[int]]]]:
    """Rows of given answers, and prompt ids of the rest: ``build_rows`` without a target."""
    jobs = [(prompt, chat) for chat in formats for prompt in prompts]
    given, asked, dropped = _read(jobs, settings)
    check_supervised_share([row for rows in given.values() for row in rows], formats[0])
    return _keep(given, jobs, dropped, settings), [(jobs[i][0], ids) for i, ids in asked.items()]


def cache_key(
    target_fingerprint: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    settings: ResponseSettings,
) -> dict[str, Any]:
    """Everything that decides the rows, for ``rows_to_jsonl`` and ``rows_from_jsonl``.

    Batch size and strictness are left out, since they decide nothing; the template's text stands
    for its name. ``target_fingerprint`` names the weights.
    """
    choices = asdict(settings)
    for name in ("batch_size", "strict", "template"):
        del choices[name]
    formats = chat_formats(tokenizer, settings.thinking, settings.template)
    return {
        "target": target_fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": formats[0].fingerprint,
        "prompts": prompts_digest(prompts),
        **choices,
    }


def _read(
    jobs: Sequence[Job], settings: ResponseSettings
) -> tuple[dict[int, list[TrainingRow]], dict[int, list[int]], dict[int, Drop]]:
    """Rows with a given answer, prompt ids of those to answer, reasons of those dropped."""
    given: dict[int, list[TrainingRow]] = {}
    asked: dict[int, list[int]] = {}
    dropped: dict[int, Drop] = {}
    both = len({chat.thinking for _, chat in jobs}) > 1
    for index, (prompt, chat) in enumerate(jobs):
        keep = prompt.has_response and settings.responses == "given"
        if keep and both and chat.thinking != prompt.thinks:
            continue
        try:
            if keep:
                rows = chat.training_rows(prompt.messages)
                given[index] = [_at(prompt, row) for row in rows]
                continue
            ids = chat.prompt_ids(prompt.prompt)
        except RowError as problem:
            dropped[index] = (problem.reason, problem.detail)
        else:
            if len(ids) + settings.min_supervised > settings.max_length:
                dropped[index] = ("prompt-too-long", counted(len(ids), "token"))
            else:
                asked[index] = ids
    for index in sorted(given):
        if all(_too_short(row, settings) for row in given[index]):
            dropped[index] = ("too-few-supervised", "")
    if settings.strict and dropped:
        first = min(dropped)
        raise UserError(f"{_place(jobs[first][0])}: {_why(dropped[first])}; strict skips nothing")
    return given, asked, dropped


def _keep(
    rows: dict[int, list[TrainingRow]],
    jobs: Sequence[Job],
    dropped: dict[int, Drop],
    settings: ResponseSettings,
    target: Target | None = None,
) -> RowSet:
    """The rows of all jobs in order, cut to length and without those that teach too little."""
    kept: list[TrainingRow] = []
    cut = 0
    for index in sorted(rows):
        long_enough = [row for row in rows[index] if not _too_short(row, settings)]
        if not long_enough:
            dropped[index] = ("too-few-supervised", "")
        # how far an answer of the target overshoots depends on its batch; `ended` speaks of those
        cut += sum(len(r.ids) > settings.max_length for r in long_enough if r.provenance == "given")
        kept += [row.truncated(settings.max_length) for row in long_enough]
    answered = (row for row in kept if target and row.provenance == "target")
    ended = sum(row.ids[-1] in target.end_token_ids for row in answered) if target else 0
    by_reason: dict[str, tuple[str, ...]] = {}
    for reason in DROP_REASONS:
        places = [_place(jobs[i][0]) for i in sorted(dropped) if dropped[i][0] == reason]
        if places:
            by_reason[reason] = tuple(dict.fromkeys(places))  # a line once, in both ways of asking
    return RowSet(tuple(kept), by_reason, ended, cut)


def _too_short(row: TrainingRow, settings: ResponseSettings) -> bool:
    return row.truncated(settings.max_length).supervised < settings.min_supervised


def _place(prompt: PromptRow) -> str:
    return f"{prompt.file}:{prompt.line}"


def _why(drop: Drop) -> str:
    reason, detail = drop
    return DROP_REASONS[reason] + (f" ({detail})" if detail else "")


def _at(prompt: PromptRow, row: TrainingRow) -> TrainingRow:
    return replace(row, file=prompt.file, line=prompt.line)


def _answers(
    target: Target,
    asked: dict[int, list[int]],
    settings: ResponseSettings,
    on_progress: Progress | None,
    generate: Generate,
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
        answers = generate(
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


def _nothing_left(row_set: RowSet, dropped: dict[int, Drop], settings: ResponseSettings) -> str:
    """One line: every reason with its first place and what was said there."""
    first = dict(reversed(list(dropped.values())))
    reasons = "; ".join(
        f"{len(places)} {reason}: {_why((reason, first[reason]))}, first {places[0]}"
        for reason, places in row_set.dropped.items()
    )
    return (
        f"no training row is left ({reasons or 'no prompts were given'}); max_length is "
        f"{settings.max_length}, min_supervised is {settings.min_supervised}"
    )
