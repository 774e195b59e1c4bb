"""What stands beside every number: whether answers are right, and whether a confidence is.

    exact   the text behind the last `####`, or the whole text, is the row's `answer`
    maths   math-verify: the last `\\boxed{}` (else the last number or formula) equals it as an
            expression: 1/2, 0.5 and \\frac{1}{2} are one answer
    code    the row's `tests` pass (`code_tests`), only where running model-written code was asked
            for

A row with neither `answer` nor `tests` is not graded, and neither is one whose grader is missing or
off: None, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util

from dspark.distill.prompts import PromptRow
from dspark.draft.calibration import NOT_CALIBRATED
from dspark.nano.grade import is_correct
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark.wording import counted
from dspark_eval.code_tests import run_tests
from dspark_eval.drafting import Drafted
from dspark_eval.pair import Pair
from dspark_eval.suites import Suite


@dataclass(frozen=True)
class Grades:
    """marks: right, wrong or not graded, one for each row; notes: why some could not be graded."""

    marks: tuple[bool | None, ...]
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        """Right ones of those graded."""
        known = [mark for mark in self.marks if mark is not None]
        return sum(known) / len(known) if known else None


def grade(suite: Suite, texts: Sequence[str], *, run_code: bool = False) -> Grades:
    """Judge one text for each row of the suite."""
    maths = suite.grader == "maths" and util.find_spec("math_verify") is not None
    marks: list[bool | None] = []
    for row, text in zip(suite.rows, texts, strict=True):
        if "tests" in row.metadata:
            marks.append(_passes(row, text) if run_code else None)
        elif "answer" not in row.metadata:
            marks.append(None)
        elif suite.grader == "maths":
            marks.append(equal_maths(str(row.metadata["answer"]), text) if maths else None)
        else:
            marks.append(is_correct(text, str(row.metadata["answer"])))
    notes = []
    tested = sum("tests" in row.metadata for row in suite.rows)
    if tested and not run_code:
        notes.append(
            f"the tests of {counted(tested, 'answer')} were not run; --run-code "
            "runs model-written code, in a container best"
        )
    if run_code and not tested:
        notes.append("no code was run: no row has `tests`")
    if suite.grader == "maths" and not maths and any("answer" in r.metadata for r in suite.rows):
        notes.append("not graded, math-verify is not installed; pip install 'dspark[suites]'")
    return Grades(tuple(marks), tuple(notes))


def _passes(row: PromptRow, text: str) -> bool:
    tests, setup, name = (str(row.metadata.get(k, "")) for k in ("tests", "setup", "entry_point"))
    return run_tests(text, tests, setup=setup, entry_point=name) == "passed"


def equal_maths(answer: str, text: str) -> bool:
    """Whether what `text` gives as its answer equals `answer`; unparsable is not equal."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{answer}}}"), parse(text)))


def exact_answers(pair: Pair, suite: Suite, answers: Sequence[Generation]) -> float | None:
    """Share of right answers among rows that can be graded without running code; None if none."""
    return grade(suite, answer_texts(pair, answers)).share


def answer_texts(pair: Pair, answers: Sequence[Generation]) -> list[str]:
    """The answers without their end tokens, which are no part of the text."""
    return [pair.chat.decode(_text_ids(answer)) for answer in answers]


def confidence_warnings(pair: Pair, drafted: Drafted, sampling: SamplingParams) -> list[str]:
    """What to say where decisions rest on a confidence that was not fitted for this setting."""
    if not drafted.policy.needs_confidence and drafted.relaxed is None:
        return []
    calibration = pair.drafter.calibration
    said = NOT_CALIBRATED if calibration is None else calibration.warning(sampling)
    return [] if said is None else [said]


def _text_ids(answer: Generation) -> list[int]:
    """The answer without its end token, which is no part of the text."""
    return answer.tokens[:-1] if answer.finish == "end" else answer.tokens
