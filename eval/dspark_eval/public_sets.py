"""The public prompt sets by name: where they come from and how a row becomes a question.

    NAME.jsonl in --suite-dir or DSPARK_SUITES     a local file, `turns` in each line (DeepSpec's
                                                   eval_datasets), `answer`, `tests` where known
    else the Hugging Face hub through `datasets`   an extra: pip install 'dspark[suites]'

Questions are worded as in DeepSpec's evaluation, which took them from DFlash's, so that accepted
lengths can be set beside the paper's. None of these sets ships here: some forbid it.

`size` is how many rows the DSpark paper measures, drawn as everywhere: shuffle by the seed, then
the first ones.
"""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from dspark.distill.messages import SkipRow, user_turn
from dspark.distill.prompts import PromptRow, Scalar, read_prompts
from dspark.errors import UserError

FOLDER_VARIABLE = "DSPARK_SUITES"

Grader = Literal["exact", "maths"]
"""How rows with an `answer` are judged. Rows with `tests` are judged by running them."""

Asked = tuple[Sequence[str], Mapping[str, Scalar]]
"""User turns and metadata of a row."""

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n"
_LCB_HEAD = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program"
)


@dataclass(frozen=True)
class PublicSet:
    """One set.

    path, config, split, files   for `datasets.load_dataset`
    names   of a local file, without .jsonl, the first that exists
    """

    path: str
    split: str
    size: int
    ask: Callable[[Mapping[str, Any]], Asked]
    names: tuple[str, ...]
    config: str | None = None
    files: tuple[str, ...] | None = None
    grader: Grader = "exact"


def _gsm8k(row: Mapping[str, Any]) -> Asked:
    answer = row["answer"].rsplit("####", 1)[-1].strip().replace(",", "")
    return [row["question"] + _BOXED], {"answer": answer}


def _problem(row: Mapping[str, Any]) -> Asked:
    return [row["problem"] + _BOXED], {"answer": str(row["answer"])}


def _humaneval(row: Mapping[str, Any]) -> Asked:
    name = row["entry_point"]
    facts = {
        "id": row["task_id"],
        "setup": row["prompt"],  # imports and helpers; the function itself is defined anew
        "tests": f"{row['test']}\ncheck({name})",
        "entry_point": name,
    }
    return [f"{_TESTED}```python\n{row['prompt']}\n```"], facts


def _mbpp(row: Mapping[str, Any]) -> Asked:
    """The question does not say how the function is called; its tests do."""
    tests = "\n".join((*row.get("test_imports", ()), *row["test_list"]))
    facts = {"id": str(row["task_id"]), "tests": tests, "entry_point": _tested(row["test_list"])}
    return [row["prompt"]], facts


def _tested(tests: Sequence[str]) -> str:
    """The name that follows `assert`, behind brackets and `set(` and the like, that is called."""
    calls = (n for n in ast.walk(ast.parse(tests[0])) if isinstance(n, ast.Call))
    names = [n.func.id for n in calls if isinstance(n.func, ast.Name)]
    known = {"set", "sorted", "list", "tuple", "round", "abs", "str", "len"}
    return next((name for name in names if name not in known), "")


def _known(row: Mapping[str, Any], **columns: str) -> dict[str, Scalar]:
    """The columns that are there, as text."""
    return {name: str(row[column]) for name, column in columns.items() if column in row}


def _mt_bench(row: Mapping[str, Any]) -> Asked:
    return list(row["prompt"]), _known(row, id="prompt_id", family="category")


def _alpaca(row: Mapping[str, Any]) -> Asked:
    extra = f"\n\nInput:\n{row['input']}" if row["input"] else ""
    return [row["instruction"] + extra], {}


def _arena(row: Mapping[str, Any]) -> Asked:
    return [row["prompt"]], _known(row, id="uid", family="category")


def _livecodebench(row: Mapping[str, Any]) -> Asked:
    code = row.get("starter_code") or "# YOUR CODE HERE"
    form = (
        "Use the following code structure:"
        if row.get("starter_code")
        else "Write your code in the following format:"
    )
    parts = (
        _LCB_HEAD,
        f"### Question:\n{row['question_content']}",
        f"### Format: {form}\n```python\n{code}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)], _known(row, id="question_id")


_LCB = "hf://datasets/livecodebench/code_generation_lite/"
PUBLIC_SETS: dict[str, PublicSet] = {
    "gsm8k": PublicSet(
        "openai/gsm8k", "test", 500, _gsm8k, ("gsm8k",), config="main", grader="maths"
    ),
    "math500": PublicSet(
        "HuggingFaceH4/MATH-500", "test", 500, _problem, ("math500",), grader="maths"
    ),
    "aime": PublicSet(
        "MathArena/aime_2025", "train", 30, _problem, ("aime", "aime25"), grader="maths"
    ),
    "humaneval": PublicSet("openai/openai_humaneval", "test", 164, _humaneval, ("humaneval",)),
    "mbpp": PublicSet(
        "google-research-datasets/mbpp", "test", 256, _mbpp, ("mbpp",), config="sanitized"
    ),
    "livecodebench": PublicSet(
        "json",
        "train",
        500,
        _livecodebench,
        ("livecodebench",),
        files=tuple(f"{_LCB}test{n}.jsonl" for n in ("", *range(2, 7))),
    ),
    "mt-bench": PublicSet(
        "HuggingFaceH4/mt_bench_prompts", "train", 80, _mt_bench, ("mt-bench", "mt_bench")
    ),
    "alpaca": PublicSet("tatsu-lab/alpaca", "train", 500, _alpaca, ("alpaca",)),
    "arena-hard": PublicSet(
        "lmarena-ai/arena-hard-auto",
        "train",
        500,
        _arena,
        ("arena-hard", "arena-hard-v2"),
        files=("data/arena-hard-v2.0/question.jsonl",),
    ),
}


@dataclass(frozen=True)
class PublicRows:
    """The rows of a set, where they are from, and what the reader had to say."""

    rows: tuple[PromptRow, ...]
    source: str
    notes: tuple[str, ...] = ()


def read_public(name: str, folder: Path | None = None) -> PublicRows:
    """All rows of a set. Raises UserError, one line, if it is neither in a folder nor to be had."""
    chosen = PUBLIC_SETS[name]
    folder = local_folder(folder)
    if folder is not None:
        files = (folder / f"{stem}.jsonl" for stem in chosen.names)
        found = next((path for path in files if path.is_file()), None)
        if found is not None:
            prompts = read_prompts([found])
            notes = (f"{found}: {prompts.report.summary()}",) if prompts.report.skipped else ()
            return PublicRows(prompts.rows, str(found), notes)
    return _fetched(name, chosen, folder)


def local_folder(asked: Path | None) -> Path | None:
    """--suite-dir, else DSPARK_SUITES, else None. Raises UserError if it is no folder."""
    variable = os.environ.get(FOLDER_VARIABLE, "")
    folder = asked or (Path(variable) if variable else None)
    if folder is not None and not folder.is_dir():
        label = "--suite-dir" if asked else FOLDER_VARIABLE
        raise UserError(f"{label} {folder}: expected a folder with NAME.jsonl in it")
    return folder


def _fetched(name: str, chosen: PublicSet, folder: Path | None) -> PublicRows:
    place = f"no {name}.jsonl in {folder}" if folder else "no --suite-dir was given"
    way_out = f"give --suite-dir DIR (or {FOLDER_VARIABLE}) with {name}.jsonl in it"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{name}: {place} and `datasets` is not installed; {way_out}, or "
            "pip install 'dspark[suites]'"
        ) from None
    files = None if chosen.files is None else list(chosen.files)
    try:
        with _fetching(name, chosen.path):
            data = load_dataset(chosen.path, chosen.config, data_files=files, split=chosen.split)
    except Exception as problem:  # the hub has as many ways to fail as a network has
        reason = (str(problem).strip().splitlines() or [""])[0]
        raise UserError(
            f"{name}: {place} and {chosen.path} could not be fetched "
            f"({type(problem).__name__}: {reason[:200]}); {way_out}"
        ) from None
    rows, skipped = [], 0
    for line, row in enumerate(data, start=1):
        turns, facts = chosen.ask(row)
        try:
            asked = user_turn(turns[0])
        except SkipRow:
            skipped += 1
            continue
        rows.append(PromptRow(chosen.path, line, asked, dict(facts), tuple(turns[1:])))
    notes = (f"{chosen.path}: {skipped} rows without text left out",) if skipped else ()
    return PublicRows(tuple(rows), f"{chosen.path} ({chosen.split})", notes)


@contextmanager
def _fetching(name: str, path: str) -> Iterator[None]:
    """What is going on, on a terminal; without the hub's word on each of its tries, since what
    comes of them is said in one line."""
    libraries = [logging.getLogger(library) for library in ("huggingface_hub", "datasets")]
    levels = [library.level for library in libraries]
    for library in libraries:
        library.setLevel(logging.ERROR)
    try:
        with Console(stderr=True).status(f"{name}: fetching {path}"):
            yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.setLevel(level)
