"""Word-trigram overlap of generated questions with evaluation questions.

A row is a hit if more than 0.4 of its distinct trigrams occur in one evaluation question. Numbers
count as one word whatever their digits, so a question copied with other numbers is a hit too.

    python -m dspark.nano.overlap gsm8k.jsonl math500.jsonl --rows 20000
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.console import Parser, module_command
from dspark.errors import UserError
from dspark.nano.generate import SPLITS, row
from dspark.seeds import seed_argument

THRESHOLD = 0.4
_WORD = re.compile(r"[a-z]+|\d+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A generated question too close to an evaluation question."""

    share: float
    family: str
    question: str
    evaluation: str


def trigrams(text: str) -> set[tuple[str, str, str]]:
    """The distinct word trigrams of `text`, in lower case, every number written as 0."""
    words = ["0" if w[0].isdigit() else w for w in _WORD.findall(text.lower())]
    return set(zip(words, words[1:], words[2:], strict=False))


class EvaluationIndex:
    """Evaluation questions by trigram."""

    def __init__(self, questions: Iterable[str]) -> None:
        self.questions = list(questions)
        self._rows: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for i, question in enumerate(self.questions):
            for trigram in trigrams(question):
                self._rows[trigram].append(i)

    def closest(self, text: str) -> tuple[float, str]:
        """The largest share of `text`'s trigrams in one question, and that question."""
        own = trigrams(text)
        counts = Counter(i for trigram in own for i in self._rows.get(trigram, ()))
        if not counts:
            return 0.0, ""
        index, count = counts.most_common(1)[0]
        return count / len(own), self.questions[index]


def read_questions(path: Path) -> Iterator[str]:
    """Every user text of a JSONL file whose rows hold `turns`, `messages` or `prompt`.

    Raises UserError naming file and line for a row that is not JSON or has none of them.
    """
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: expected one JSON object ({error.msg})") from error
        if "turns" in record:
            yield from record["turns"]
        elif "messages" in record:
            yield from (m["content"] for m in record["messages"] if m["role"] == "user")
        elif "prompt" in record:
            yield record["prompt"]
        else:
            raise UserError(f"{path}:{number}: expected a field turns, messages or prompt")


def find_hits(index: EvaluationIndex, rows: int, seed: int = 0) -> tuple[list[Hit], float]:
    """Hits among `rows` generated rows spread over all splits, and the largest share seen."""
    hits: list[Hit] = []
    largest = 0.0
    for i in range(rows):
        made = row(seed, i, SPLITS[i % len(SPLITS)])
        question = made.messages[0]["content"]
        share, evaluation = index.closest(question)
        largest = max(largest, share)
        if share > THRESHOLD:
            hits.append(Hit(share, made.family, question, evaluation))
    return hits, largest


@module_command
def main(arguments: Sequence[str]) -> int:
    """Count and print; 1 if there is a hit."""
    parser = Parser(
        prog="python -m dspark.nano.overlap",
        description="Overlap of generated with evaluation questions.",
    )
    parser.add_argument("files", type=Path, nargs="+", help="evaluation questions as JSONL")
    parser.add_argument("--rows", type=int, default=20_000, help="generated rows to check")
    parser.add_argument("--seed", type=seed_argument, default=0)
    given = parser.parse_args(arguments)
    index = EvaluationIndex(q for path in given.files for q in read_questions(path))
    hits, largest = find_hits(index, given.rows, given.seed)
    for hit in hits[:20]:
        print(f"{hit.share:.2f} {hit.family}: {hit.question}\n     {hit.evaluation}")
    print(
        f"{len(hits)} of {given.rows} rows share more than {THRESHOLD} of their trigrams with "
        f"one of {len(index.questions)} evaluation questions; largest share {largest:.3f}"
    )
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
