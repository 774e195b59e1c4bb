"""The shipped code prompts: right answers pass their tests, others do not, nothing runs unasked."""

from __future__ import annotations

import inspect

import pytest

from dspark.nano.overlap import trigrams
from dspark_eval.acceptance import _sense_warnings
from dspark_eval.code_tests import run_tests
from dspark_eval.grading import grade
from dspark_eval.suites import Suite, load_suites
from tests import code_solutions


@pytest.fixture(scope="module")
def suite() -> Suite:
    (found,) = load_suites("code", n_prompts=None, seed=0)
    return found


def answer(name: str, body: str | None = None) -> str:
    code = inspect.getsource(getattr(code_solutions, name)) if body is None else body
    return f"Here it is.\n\n```python\n{code}\n```\n"


def test_right_answers_pass_and_nothing_else_is_in_the_file(suite: Suite) -> None:
    names = [str(row.metadata["entry_point"]) for row in suite.rows]
    known = [n for n, f in inspect.getmembers(code_solutions, inspect.isfunction)]
    assert sorted(names) == sorted(known)
    assert len(set(names)) == suite.available == 40
    assert all(f"`{name}(" in row.question for name, row in zip(names, suite.rows, strict=True))
    grades = grade(suite, [answer(name) for name in names], run_code=True)
    assert grades.marks == (True,) * 40


def test_one_value_for_every_question_is_no_answer(suite: Suite) -> None:
    """None, and the first value that is asked for: the tests of a task differ in what they want."""
    for row in suite.rows[:12]:
        name, tests = str(row.metadata["entry_point"]), str(row.metadata["tests"])
        first = tests.splitlines()[0].rsplit(" == ", 1)[1]
        for value in ("None", first):
            body = f"def {name}(*given):\n    return {value}\n"
            assert run_tests(answer(name, body), tests, entry_point=name) == "failed", (name, value)


def test_tests_are_not_run_unless_asked(suite: Suite) -> None:
    grades = grade(suite, ["```python\nraise SystemExit\n```"] * 40)
    assert grades.marks == (None,) * 40
    assert grades.notes[0].startswith("the tests of 40 answers were not run")


def test_the_nano_is_said_to_be_no_judge_of_code(suite: Suite) -> None:
    results = {"code": {"exact_answers": None}}
    assert list(_sense_warnings([suite], results, "models/other")) == []
    (said,) = _sense_warnings([suite], results, "nano")
    assert said.startswith("code: nano cannot write Python")


def test_no_question_is_a_near_copy_of_another(suite: Suite) -> None:
    own = [trigrams(row.question) for row in suite.rows]
    for at, mine in enumerate(own):
        assert max(len(mine & other) / len(mine) for other in own[:at] + own[at + 1 :]) < 0.4
