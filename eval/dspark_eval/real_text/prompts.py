"""Prompts to train on, and the promise that none of them is measured on.

    train/*.jsonl    each asked several times, since answers are drawn at temperature 1
    generator        word problems of `dspark.nano`, one answer each
    written          what the target makes of their beginnings (`writing.py`), one answer each
    test/*.jsonl     measured on, one file for each set

A training prompt is a near copy if more than `THRESHOLD` of its word trigrams occur in one prompt
of the test files (numbers count as one word). Trigrams that a set's prompts share by their form
("please reason step by step, ...") say nothing and are not counted: those in more than `COMMON` of
a set. `training_prompts` leaves near copies out, and `refuse_seen`, which every run calls on what
it is about to train on, raises if one is there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.distill.messages import user_turn
from dspark.distill.prompts import PromptRow, read_prompts
from dspark.errors import UserError
from dspark.nano.generate import problem
from dspark.nano.overlap import THRESHOLD, trigrams

COMMON = 0.15
"""Share of a set's prompts from which on a trigram is the set's form."""
HELD_OUT_EVERY = 12
"""Every so many-th training prompt is kept for fitting: never trained on, never measured on."""
GENERATOR = "generator"
_SHORTEST = 6
"""Fewer telling trigrams than this make no near copy, unless the text is the same."""


def test_files(folder: Path) -> list[Path]:
    """The files to measure on. Raises UserError if there are none."""
    return _files(folder / "test")


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.jsonl"))
    if not found:
        raise UserError(f"{folder}: no prompt files; expected NAME.jsonl with `turns` in each line")
    return found


def _turns(path: Path) -> list[list[str]]:
    """All user turns of every line: later ones are never asked, but are not to be trained on."""
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line)["turns"] for line in lines if line.strip()]


class Unseen:
    """The test prompts by trigram, and how close a text comes to one of them.

    `aside` are texts of other prompts that are not to be trained on.
    """

    def __init__(self, files: Sequence[Path], aside: Sequence[str] = ()) -> None:
        self.questions: list[str] = []
        self._common: set[tuple[str, str, str]] = set()
        rows: dict[tuple[str, str, str], list[int]] = {}
        sets = [[text for turns in _turns(path) for text in turns] for path in files]
        for texts in [*sets, list(aside)]:
            counts = Counter(trigram for text in texts for trigram in trigrams(text))
            least = max(2.0, COMMON * len(texts))
            self._common |= {trigram for trigram, count in counts.items() if count >= least}
            for text in texts:
                for trigram in trigrams(text):
                    rows.setdefault(trigram, []).append(len(self.questions))
                self.questions.append(text)
        self._rows = {key: found for key, found in rows.items() if key not in self._common}
        self._exact = {_plain(text): at for at, text in enumerate(self.questions)}

    def closest(self, text: str) -> tuple[float, str]:
        """The largest share of a text's telling trigrams in one test prompt, and that prompt."""
        same = self._exact.get(_plain(text))
        if same is not None:
            return 1.0, self.questions[same]
        own = trigrams(text) - self._common
        counts = Counter(at for trigram in own for at in self._rows.get(trigram, ()))
        if not counts:
            return 0.0, ""
        at, count = counts.most_common(1)[0]
        return count / max(len(own), _SHORTEST), self.questions[at]

    def holds(self, row: PromptRow) -> bool:
        """Whether one of its user turns is a test prompt or a near copy."""
        turns = [turn["content"] for turn in row.messages if turn["role"] == "user"]
        return any(self.closest(text)[0] > THRESHOLD for text in turns)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def refuse_seen(rows: Iterable[PromptRow], unseen: Unseen) -> None:
    """Raise UserError for the first training prompt that is measured on, or nearly so."""
    for row in rows:
        for turn in row.messages:
            share, question = unseen.closest(turn["content"])
            if turn["role"] == "user" and share > THRESHOLD:
                raise UserError(
                    f"{row.file}:{row.line}: shares {share:.2f} of its word trigrams with a test "
                    f"prompt ({' '.join(question.split())[:60]!r}...); at most {THRESHOLD} may be "
                    "trained on: leave this prompt out"
                )


@dataclass(frozen=True)
class TrainingPrompts:
    """What drafters may learn from, and what was left out for being too close to a test prompt.

    training   every prompt as often as it is asked
    held_out   prompts to fit calibration on
    dropped    near copies, by file
    """

    training: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    dropped: dict[str, int]


def training_prompts(
    folder: Path, samples: int, generated: int, written: Sequence[PromptRow] = ()
) -> TrainingPrompts:
    """`samples` times FOLDER/train, `generated` problems and those `written`; nothing close to a
    test prompt.

    Raises UserError for a folder without prompt files, or in which nothing is left.
    """
    unseen = Unseen(test_files(folder))
    public = list(read_prompts(_files(folder / "train")).rows)
    dropped: Counter[str] = Counter()
    kept: list[list[PromptRow]] = []
    for rows in (public, _generated(generated), written):
        seen = {id(row) for row in rows if unseen.holds(row)}
        dropped.update(Path(row.file).stem for row in rows if id(row) in seen)
        kept.append([row for row in rows if id(row) not in seen])
    held_out = kept[0][::HELD_OUT_EVERY]
    asked = [row for at, row in enumerate(kept[0]) if at % HELD_OUT_EVERY]
    training = [*asked * samples, *kept[1], *kept[2]]
    if not training:
        raise UserError(f"{folder}: every training prompt is a near copy of a test prompt")
    return TrainingPrompts(tuple(training), tuple(held_out), dict(dropped))


def _generated(count: int) -> list[PromptRow]:
    rows: dict[str, PromptRow] = {}
    index = 0
    while len(rows) < count:
        text = problem(0, index, "train").question
        index += 1
        rows.setdefault(text, PromptRow(GENERATOR, index, user_turn(text)))
    return list(rows.values())
