"""Checks on finished rows, and the file that saves a resumed run from answering prompts again.

Two things go wrong silently in other toolkits: a file whose loss mask is all zeros or all ones,
and answers written in another model's chat format. Both stop here with one decoded row to look at.

The cache is JSONL: a header with everything that decides the rows, then one row a line. It is
written in one step and refused, naming what differs, when the header is not the expected one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.distill.chat import ROW_ERRORS, ChatFormat, TrainingRow
from dspark.distill.prompts import PromptRow
from dspark.errors import UserError
from dspark.files import atomic_write_text
from dspark.wording import counted

if TYPE_CHECKING:
    from dspark.runtime.target import Target

DROP_REASONS: dict[str, str] = {
    **ROW_ERRORS,
    "prompt-too-long": "the prompt leaves no room for an answer within max_length",
    "too-few-supervised": "fewer supervised tokens than min_supervised, after truncation",
}
_FORMAT = "dspark-rows-2"
_PLACES_SHOWN = 5
_TEXT_SHOWN = 300


@dataclass(frozen=True)
class RowSet:
    """Training rows in the order of their prompts, and every row that was dropped, by reason.

    dropped  key of ``DROP_REASONS`` -> "file:line" of each
    ended    how many of the rows answered by the target end with an end token
    cut      how many rows lost their end to max_length and were kept
    """

    rows: tuple[TrainingRow, ...]
    dropped: Mapping[str, tuple[str, ...]]
    ended: int = 0
    cut: int = 0

    def summary(self) -> str:
        """One line of totals, one for the answers, then one line for each reason of a drop."""
        lost = sum(len(places) for places in self.dropped.values())
        tokens = sum(row.supervised for row in self.rows)
        answered = sum(row.provenance == "target" for row in self.rows)
        out = [
            f"{counted(len(self.rows), 'row')}, {counted(tokens, 'supervised token')}; "
            f"{counted(lost, 'row')} dropped",
            f"  {answered} answered by the target ({self.ended} to their end), "
            f"{len(self.rows) - answered} as given",
        ]
        if self.cut:
            out.append(f"  {self.cut} cut at max_length")
        for reason, places in self.dropped.items():
            more = len(places) - _PLACES_SHOWN
            shown = ", ".join(places[:_PLACES_SHOWN]) + (f" and {more} more" if more > 0 else "")
            out.append(f"  {len(places)} dropped, {reason}: {DROP_REASONS[reason]} ({shown})")
        return "\n".join(out)


def check_supervised_share(rows: Sequence[TrainingRow], chat: ChatFormat) -> None:
    """Raise ``UserError`` for a file in which 0 % or 100 % of all tokens are supervised.

    To be called before truncation, so that long prompts are not mistaken for a broken template.
    """
    for file, group in _by_file(rows):
        total = sum(len(row.ids) for row in group)
        supervised = sum(row.supervised for row in group)
        if 0 < supervised < total:
            continue
        share = "100 %" if supervised else "0 %"
        raise UserError(
            f"{file}:{group[0].line}: {share} of the tokens of this file are supervised; the chat "
            f"template does not set assistant turns apart. One row: {_one_line(group[0], chat)}"
        )


def check_target_format(rows: Sequence[TrainingRow], chat: ChatFormat, target: Target) -> None:
    """Raise ``UserError`` for a file whose rows the target cannot have written.

    Either an id lies outside its vocabulary, or no answer of the file ends with one of its end
    tokens. The second is how another model's chat template shows: its markers are ordinary text
    here, and the target would never stop. ``rows`` are given rows before truncation.
    """
    for file, group in _by_file(rows):
        place = f"{file}:{group[0].line}"
        highest = max(max(row.ids, default=0) for row in group)
        if highest >= target.vocab_size:
            raise UserError(
                f"{place}: token id {highest} is outside the {target.vocab_size} ids of target "
                f"{target.name}; use the target's own tokenizer"
            )
        ends = [_last_supervised(row) for row in group]
        if any(end in target.end_token_ids for end in ends):
            continue
        seen = chat.decode([token for token in ends[:1] if token is not None])
        wanted = " or ".join(repr(chat.decode([token])) for token in target.end_token_ids)
        raise UserError(
            f"{place}: answers end with {seen!r}, but target {target.name} stops at {wanted}; "
            f"is this its chat template? One row: {_one_line(group[0], chat)}"
        )


def check_given(rows: Sequence[TrainingRow], chat: ChatFormat, target: Target) -> None:
    """Both checks on given answers, before truncation and before the target is asked anything."""
    check_supervised_share(rows, chat)
    check_target_format(rows, chat, target)


def prompts_digest(prompts: Sequence[PromptRow]) -> str:
    """SHA-256 of all conversations in order, wherever their files lie; part of a cache key."""
    digest = hashlib.sha256()
    for row in prompts:
        digest.update(json.dumps(list(row.messages), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def rows_to_jsonl(path: Path, rows: RowSet, key: Mapping[str, Any]) -> None:
    """Write ``rows`` in one step under ``key`` (JSON values; see ``responses.cache_key``)."""
    header = {
        "format": _FORMAT,
        "key": dict(key),
        "rows": len(rows.rows),
        "dropped": {reason: list(places) for reason, places in rows.dropped.items()},
        "ended": rows.ended,
        "cut": rows.cut,
    }
    lines = [json.dumps(header, allow_nan=False), *(json.dumps(_pack(row)) for row in rows.rows)]
    atomic_write_text(path, "\n".join(lines) + "\n")


def rows_from_jsonl(path: Path, key: Mapping[str, Any]) -> RowSet:
    """Read what ``rows_to_jsonl`` wrote.

    Raises ``UserError`` when the file is damaged or was made under another key, naming the
    components that differ.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0])
        if header["format"] != _FORMAT:
            raise ValueError(f"format {header['format']!r}")
        stored = header["key"]
        rows = tuple(_unpack(json.loads(line)) for line in lines[1:])
        if len(rows) != header["rows"]:
            raise ValueError(f"{len(rows)} rows where {header['rows']} were written")
        dropped = {reason: tuple(places) for reason, places in header["dropped"].items()}
        ended, cut = header["ended"], header["cut"]
    except OSError as problem:
        raise UserError(f"{path}: cannot be read ({problem.strerror})") from problem
    except (ValueError, KeyError, IndexError, TypeError) as problem:
        raise UserError(f"{path}: not a complete row cache ({problem}); delete it") from problem
    wanted = json.loads(json.dumps(dict(key)))  # tuples become lists, as in the file
    differing = [name for name in {**stored, **wanted} if stored.get(name) != wanted.get(name)]
    if differing:
        raise UserError(
            f"{path}: made with another {', '.join(differing)}; delete it to answer the prompts "
            "again, or restore the old settings"
        )
    return RowSet(rows, dropped, ended, cut)


def _pack(row: TrainingRow) -> dict[str, Any]:
    """The mask as run lengths, beginning with an unsupervised run: it is long and dull."""
    runs = [0] if row.loss_mask[:1] == (True,) else []
    runs += [len(list(run)) for _, run in groupby(row.loss_mask)]
    return {
        "ids": row.ids,
        "mask_runs": runs,
        "provenance": row.provenance,
        "file": row.file,
        "line": row.line,
    }


def _unpack(item: dict[str, Any]) -> TrainingRow:
    mask: list[bool] = []
    for place, length in enumerate(item["mask_runs"]):
        mask += [place % 2 == 1] * length
    return TrainingRow(
        tuple(item["ids"]), tuple(mask), item["provenance"], item["file"], item["line"]
    )


def _by_file(rows: Sequence[TrainingRow]) -> list[tuple[str, list[TrainingRow]]]:
    grouped: dict[str, list[TrainingRow]] = {}
    for row in rows:
        grouped.setdefault(row.file, []).append(row)
    return list(grouped.items())


def _one_line(row: TrainingRow, chat: ChatFormat) -> str:
    """Decoded row for an error message: line breaks escaped, supervised text between ⟦ and ⟧."""
    shown = repr(chat.marked_row(row))[1:-1]
    return shown if len(shown) <= _TEXT_SHOWN else shown[:_TEXT_SHOWN] + " ..."


def _last_supervised(row: TrainingRow) -> int | None:
    """Id of the last supervised token of a row."""
    pairs = zip(reversed(row.ids), reversed(row.loss_mask), strict=True)
    return next((token for token, supervised in pairs if supervised), None)
