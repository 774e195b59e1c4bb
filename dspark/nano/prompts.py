"""The shipped prompt files: user turns only, one JSON object per line.

`train.jsonl` and `validation.jsonl` follow the mixture of `row`; `test.jsonl` holds 300 word
problems and 50 instructions. `answer` is given where one answer is right. No question occurs twice.

    python -m dspark.nano.prompts --out data/prompts
    python -m dspark.nano.prompts --out runs/prompts --more 16000

The second writes `more.jsonl` alone: training prompts whose questions are in no shipped file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from dspark.console import Parser, module_command
from dspark.errors import UserError
from dspark.nano.generate import Instruction, Problem, instruction, problem, row
from dspark.seeds import seed_argument

PROMPT_SEED = 1
"""Not the seed of the target's training rows."""
SIZES = {"train": 2000, "validation": 200}
TEST_PROBLEMS, TEST_INSTRUCTIONS = 300, 50


MORE_SEED = 2
"""Of training prompts beyond the shipped ones."""


def _record(name: str, question: str, family: str, answer: str | None) -> dict[str, object]:
    record: dict[str, object] = {
        "id": name,
        "family": family,
        "messages": [{"role": "user", "content": question}],
    }
    return record if answer is None else {**record, "answer": answer}


def _mixed(split: str, index: int, seed: int = PROMPT_SEED) -> dict[str, object]:
    made = row(seed, index, split)
    return _record(made.id, made.messages[0]["content"], made.family, made.answer)


def _test(kind: str, index: int) -> dict[str, object]:
    maker: Callable[[int, int, str], Problem | Instruction]
    maker = problem if kind == "problem" else instruction
    made = maker(PROMPT_SEED, index, "test")
    name = f"test-{kind}-{PROMPT_SEED}-{index}"
    return _record(name, made.question, made.family, made.answer)


def _question(record: dict[str, object]) -> str:
    return json.dumps(record["messages"])


def _distinct(
    make: Callable[[str, int], dict[str, object]],
    kind: str,
    size: int,
    known: Collection[str] = (),
) -> list[dict[str, object]]:
    """The first `size` records of `make` whose questions differ, and are none of `known`."""
    records: dict[str, dict[str, object]] = {}
    for index in count():
        record = make(kind, index)
        if _question(record) not in known:
            records.setdefault(_question(record), record)
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


def more_prompts(size: int, seed: int = MORE_SEED) -> list[dict[str, object]]:
    """`size` training prompts of the mixture whose questions are in no shipped file."""
    shipped = {_question(record) for records in prompt_files().values() for record in records}
    return _distinct(partial(_mixed, seed=seed), "train", size, shipped)


def write_prompts(folder: Path, files: Mapping[str, Sequence[dict[str, object]]]) -> None:
    """Write prompt files (name -> records) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        (folder / name).write_text("\n".join(lines) + "\n", "utf-8")


@module_command
def main(arguments: Sequence[str]) -> None:
    """Write the files."""
    parser = Parser(prog="python -m dspark.nano.prompts", description="Write prompt files.")
    parser.add_argument("--out", type=Path, required=True, help="folder, for example data/prompts")
    parser.add_argument("--more", type=_positive, help="write so many further training prompts")
    parser.add_argument("--seed", type=seed_argument, default=MORE_SEED, help="of --more")
    given = parser.parse_args(arguments)
    files = {"more.jsonl": more_prompts(given.more, given.seed)} if given.more else prompt_files()
    try:
        write_prompts(given.out, files)
    except OSError as error:
        raise UserError(f"--out {given.out}: cannot be written ({error.strerror})") from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no count of prompts; give 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
