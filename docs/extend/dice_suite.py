"""A suite in 30 lines: 200 questions with known answers, in a file that `--suite` reads.

python dice_suite.py dice.jsonl && dspark eval --draft runs/mine --suite dice.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

QUESTION = "{name} throws {count} dice and adds up the points. What is the expected sum?"
NAMES = ("Ada", "Emmy", "Sonya", "Maryam")


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` prompts; `answer` is kept beside each, for whoever grades."""
    draw = random.Random(seed)
    chosen = [(draw.choice(NAMES), draw.randint(1, 9)) for _ in range(count)]
    return [
        {"prompt": QUESTION.format(name=name, count=dice), "answer": str(3.5 * dice)}
        for name, dice in chosen
    ]


if __name__ == "__main__":
    text = "".join(json.dumps(row) + "\n" for row in rows(200))
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
