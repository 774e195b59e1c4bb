"""Look at data before a run is spent on it: counts by reason, shares, lengths, decoded rows.

The data stage itself, without the target's weights: files are read, rendered, masked and cut by the
functions that `dspark distill` uses. Given answers are masked; of a prompt that the target will
answer, only its own tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.distill.chat import ChatFormat, TrainingRow, chat_formats
from dspark.distill.prompts import PromptRow, PromptSet, scan_prompts, shared_questions
from dspark.distill.report import show_places
from dspark.distill.responses import ResponseSettings, read_given
from dspark.distill.rows import DROP_REASONS
from dspark.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class FileReview:
    """One prompt file. `answered` rows carry their answers; `asked` are (place, prompt ids)."""

    file: str
    prompts: PromptSet
    answered: tuple[TrainingRow, ...]
    asked: tuple[tuple[PromptRow, tuple[int, ...]], ...]
    dropped: dict[str, tuple[str, ...]]
    cut: int
    shared: tuple[tuple[str, int], ...] = ()

    @property
    def bad(self) -> int:
        """Lines and rows that a strict run refuses, and questions that measurements share."""
        lost = sum(len(places) for places in self.dropped.values())
        return len(self.prompts.report.skipped) + lost + len(self.shared)

    @property
    def supervised_share(self) -> float | None:
        """Supervised tokens of all tokens in rows with answers; None if there are none."""
        tokens = sum(len(row.ids) for row in self.answered)
        return sum(row.supervised for row in self.answered) / tokens if tokens else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what was not measured is None."""
        return {
            "file": self.file,
            **self.prompts.report.to_dict(),
            "dropped": {
                reason: {"count": len(places), "lines": list(places)}
                for reason, places in self.dropped.items()
            },
            "shared": [f"{file}:{line}" for file, line in self.shared],
            "bad": self.bad,
            "cut": self.cut,
            "rows": len(self.answered),
            "supervised_tokens": sum(row.supervised for row in self.answered) or None,
            "supervised_share": self.supervised_share,
            "anchors": sum(map(anchor_count, self.answered)) or None,
            "row_tokens": spread([len(row.ids) for row in self.answered]),
            "prompts_to_answer": len(self.asked),
            "prompt_tokens": spread([len(ids) for _, ids in self.asked]),
        }

    def summary(self) -> str:
        """The report of the file, then what its rows come to."""
        out = [f"{self.file}: {self.prompts.report.summary()}"]
        for reason, places in self.dropped.items():
            named = [(file, int(line)) for file, _, line in (p.rpartition(":") for p in places)]
            out.append(
                f"  {len(places)} dropped, {reason}: {DROP_REASONS[reason]} ({show_places(named)})"
            )
        if self.shared:
            shown = show_places(self.shared)
            out.append(f"  {len(self.shared)} ask what the other files ask too ({shown})")
        if self.answered:
            tokens = sum(row.supervised for row in self.answered)
            anchors = sum(map(anchor_count, self.answered))
            out.append(
                f"  {counted(len(self.answered), 'row')} with answers, "
                f"{_lengths(self.answered_lengths)}; {counted(tokens, 'supervised token')} "
                f"({100 * (self.supervised_share or 0):.1f} %), {counted(anchors, 'anchor')}; "
                f"{self.cut} cut at the end"
            )
        if self.asked:
            lengths = [len(ids) for _, ids in self.asked]
            out.append(
                f"  {counted(len(self.asked), 'prompt')} for the target, {_lengths(lengths)}"
            )
        return "\n".join(out)

    @property
    def answered_lengths(self) -> list[int]:
        """Tokens of each row with an answer."""
        return [len(row.ids) for row in self.answered]


def review_files(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    settings: ResponseSettings,
    against: Sequence[Path] = (),
) -> tuple[tuple[ChatFormat, ...], list[FileReview]]:
    """The formats that rows are written in, and every file by itself.

    Raises `UserError` for a file that cannot be read, for a template that does not fit the
    tokenizer, and for a file of answers in which 0 % or 100 % of the tokens are supervised.
    """
    formats = chat_formats(tokenizer, settings.thinking, settings.template)
    others = scan_prompts(against).rows
    reviews = []
    for path in files:
        prompts = scan_prompts([path])
        rows, asked = read_given(prompts.rows, formats, settings)
        reviews.append(
            FileReview(
                str(path),
                prompts,
                rows.rows,
                tuple((prompt, tuple(ids)) for prompt, ids in asked),
                dict(rows.dropped),
                rows.cut,
                shared_questions(prompts.rows, others),
            )
        )
    return formats, reviews


def anchor_count(row: TrainingRow) -> int:
    """Positions at which a training block can start: the token and the next are supervised."""
    return sum(a and b for a, b in zip(row.loss_mask, row.loss_mask[1:], strict=False))


def sample(review: FileReview, count: int) -> list[TrainingRow]:
    """`count` rows spread evenly over a file; those for the target to answer have no label yet."""
    rows = [
        *review.answered,
        *(
            TrainingRow(ids, (False,) * len(ids), "target", prompt.file, prompt.line)
            for prompt, ids in review.asked
        ),
    ]
    rows.sort(key=lambda row: row.line)
    if count >= len(rows):
        return rows
    return [rows[i * len(rows) // count] for i in range(count)]


def inspected(review: FileReview, chat: ChatFormat, count: int) -> dict[str, Any]:
    """`sample`, as JSON values: what each row holds, decoded in supervised and other stretches."""
    return {
        "file": review.file,
        "answered": len(review.answered),
        "asked": len(review.asked),
        "bad": review.bad,
        "rows": [
            {
                "line": row.line,
                "tokens": len(row.ids),
                "supervised": row.supervised,
                "anchors": anchor_count(row),
                "ids": list(row.ids),
                "spans": [
                    {"supervised": supervised, "text": text} for supervised, text in chat.spans(row)
                ],
            }
            for row in sample(review, count)
        ],
    }


def spread(lengths: Sequence[int]) -> dict[str, int] | None:
    """Smallest, median and largest; None for nothing."""
    if not lengths:
        return None
    ordered = sorted(lengths)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}


def _lengths(lengths: Sequence[int]) -> str:
    found = spread(lengths) or {}
    return f"{found['min']} to {found['max']} tokens (median {found['median']})"
