"""The shipped prompt files: user turns only, one JSON object per line.

`train.jsonl` and `validation.jsonl` follow the mixture of `row`; `test.jsonl` holds 300 word
problems and 50 instructions. `answer` is given where one answer is right. No question occurs twice.

    python -m dspark.nano.prompts --out data/prompts
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

from dspark.nano.generate import Instruction, Problem, instruction, problem, row

PROMPT_SEED = 1
"""Not the seed of the target's training rows."""
SIZES = {"train": 2000, "validation": 200}
TEST_PROBLEMS, TEST_INSTRUCTIONS = 300, 50


def _record(name: str, question: str, family: str, answer: str | None) -> dict[str, object]:
    record: dict[str, object] = {
        "id": name,
        "family": family,
        "messages": [{"role": "user", "content": question}],
    }
    return record if answer is None else {**record, "answer": answer}


def _mixed(split: str, index: int) -> dict[str, object]:
    made = row(PROMPT_SEED, index, split)
    return _record(made.id, made.messages[0]["content"], made.family, made.answer)


def _test(kind: str, index: int) -> dict[str, object]:
    maker: Callable[[int, int, str], Problem | Instruction]
    maker = problem if kind == "problem" else instruction
    made = maker(PROMPT_SEED, index, "test")
    name = f"test-{kind}-{PROMPT_SEED}-{index}"
    return _record(name, made.question, made.family, made.answer)


def _distinct(
    make: Callable[[str, int], dict[str, object]], kind: str, size: int
) -> list[dict[str, object]]:
    """The first `size` records of `make` whose questions differ."""
    records: dict[str, dict[str, object]] = {}
    for index in count():
        record = make(kind, index)
        records.setdefault(json.dumps(record["messages"]), record)
        if len(records) == size:
            return list(records.values())
    raise AssertionError("unreachable: the indices never end")


def prompt_files() -> dict[str, list[dict[str, object]]]:
    """The records of each shipped file by its name."""
    files = {f"{split}.jsonl": _distinct(_mixed, split, size) for split, size in SIZES.items()}
    files["test.jsonl"] = [
        *_distinct(_test, "problem", TEST_PROBLEMS),
        *_distinct(_test, "instruction", TEST_INSTRUCTIONS),
    ]
    return files


def write_prompts(folder: Path) -> None:
    """Write all prompt files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in prompt_files().items():
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        (folder / name).write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the shipped prompt files.")
    parser.add_argument("--out", type=Path, required=True, help="folder, for example data/prompts")
    write_prompts(parser.parse_args().out)


if __name__ == "__main__":
    main()
