"""Public sets: local files, a stand-in for the hub, wording, sizes, and what is said without."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark.errors import UserError
from dspark_eval.public_sets import FOLDER_VARIABLE, PUBLIC_SETS, read_public
from dspark_eval.suites import SUITE_NAMES, load_suites

ROWS = {
    "gsm8k": {"question": "How many?", "answer": "2 * 600 = 1,200\n#### 1,200"},
    "math500": {"problem": "What is $1/2$?", "answer": "\\frac{1}{2}"},
    "aime": {"problem": "Find n.", "answer": 70},
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": "def f(x):\n    '''Add one.'''\n", "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    },
    "mbpp": {
        "task_id": 2, "prompt": "Write a function to add one.",
        "test_list": ["assert set(add(1)) == set([2])"], "test_imports": ["import math"],
    },
    "livecodebench": {"question_id": "7", "question_content": "Add.", "starter_code": "def f():"},
    "mt-bench": {"prompt_id": 81, "prompt": ["Write a post.", "Rewrite it."], "category": "w"},
    "alpaca": {"instruction": "Translate.", "input": "Hallo"},
    "arena-hard": {"uid": "u1", "prompt": "Explain.", "category": "hard_prompt"},
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """`datasets.load_dataset` that knows one row of each set, three times; the calls."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    calls: list[tuple] = []
    by_path = {
        (chosen.path, chosen.config, chosen.files): ROWS[name]
        for name, chosen in PUBLIC_SETS.items()
    }

    def load_dataset(path, name=None, *, data_files=None, split):
        files = None if data_files is None else tuple(data_files)
        calls.append((path, name, split))
        return [by_path[path, name, files]] * 3

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


SIZES = {  # of the DSpark paper's Table 1
    "gsm8k": 500, "math500": 500, "aime": 30, "humaneval": 164, "mbpp": 256, "livecodebench": 500,
    "mt-bench": 80, "alpaca": 500, "arena-hard": 500,
}  # fmt: skip


def test_the_nine_sets_are_suites():
    assert {name: chosen.size for name, chosen in PUBLIC_SETS.items()} == SIZES
    assert set(SIZES) == set(ROWS)
    assert set(SIZES) <= set(SUITE_NAMES)


def test_questions_are_worded_as_in_the_published_evaluation(hub):
    texts = {name: read_public(name).rows[0].prompt[0]["content"] for name in PUBLIC_SETS}
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert texts["gsm8k"] == "How many?" + boxed
    assert texts["math500"] == "What is $1/2$?" + boxed
    assert texts["humaneval"] == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f(x):\n    '''Add one.'''\n\n```"
    )
    assert texts["mbpp"] == "Write a function to add one."
    assert texts["alpaca"] == "Translate.\n\nInput:\nHallo"
    assert texts["livecodebench"].endswith(
        "### Question:\nAdd.\n\n### Format: Use the following code structure:\n```python\n"
        "def f():\n```\n\n### Answer: (use the provided format with backticks)"
    )
    assert ("openai/gsm8k", "main", "test") in hub


def test_answers_and_tests_come_along(hub):
    facts = {name: read_public(name).rows[0].metadata for name in PUBLIC_SETS}
    assert facts["gsm8k"]["answer"] == "1200"
    assert facts["aime"]["answer"] == "70"
    assert facts["humaneval"]["tests"].endswith("\ncheck(f)")
    assert facts["mbpp"]["tests"] == "import math\nassert set(add(1)) == set([2])"
    assert facts["mbpp"]["entry_point"] == "add"
    row = read_public("mt-bench").rows[0]
    assert (row.prompt[0]["content"], row.later_turns) == ("Write a post.", ("Rewrite it.",))


def test_a_local_file_comes_first_and_is_drawn_as_published(hub, tmp_path, monkeypatch):
    """DeepSpec's rule: shuffle all rows with the seed, then the first ones."""
    lines = [json.dumps({"turns": [f"question {n}"]}) for n in range(20)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines), encoding="utf-8")
    order = list(range(20))
    random.Random(980406).shuffle(order)
    (suite,) = load_suites("gsm8k", n_prompts=6, seed=980406, folder=tmp_path)
    assert [r.prompt[0]["content"] for r in suite.rows] == [f"question {n}" for n in order[:6]]
    assert (suite.name, suite.available, suite.grader) == ("gsm8k", 20, "maths")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert load_suites("gsm8k", n_prompts=None, seed=1)[0].available == 20
    assert hub == []
    (tmp_path / "aime25.jsonl").write_text(lines[0], encoding="utf-8")
    assert load_suites("aime", n_prompts=None, seed=1)[0].available == 1
    load_suites("mbpp", n_prompts=2, seed=1)  # not in the folder
    assert [path for path, _, _ in hub] == ["google-research-datasets/mbpp"]


def test_without_file_and_hub_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)

    def offline(*_, **__):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(UserError) as told:
        load_suites("humaneval", n_prompts=1, seed=0, folder=tmp_path)
    text = str(told.value)
    assert "\n" not in text
    assert f"no humaneval.jsonl in {tmp_path}" in text
    assert "ConnectionError: no route to host" in text
    assert "--suite-dir DIR" in text
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    with pytest.raises(UserError, match=r"pip install 'dspark\[suites\]'"):
        load_suites("humaneval", n_prompts=1, seed=0)
    with pytest.raises(UserError, match=r"--suite-dir .*nowhere: expected a folder"):
        read_public("gsm8k", tmp_path / "nowhere")
    monkeypatch.setenv(FOLDER_VARIABLE, str(Path(__file__)))
    with pytest.raises(UserError, match=f"{FOLDER_VARIABLE} .*expected a folder"):
        read_public("gsm8k")


def test_rows_without_text_are_counted(hub, monkeypatch):
    monkeypatch.setitem(ROWS["alpaca"], "instruction", "")
    monkeypatch.setitem(ROWS["alpaca"], "input", "")
    found = read_public("alpaca")
    assert (found.rows, found.notes) == ((), ("tatsu-lab/alpaca: 3 rows without text left out",))
