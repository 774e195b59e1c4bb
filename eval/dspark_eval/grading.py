"""What stands beside every number: whether answers are right, and whether a confidence is."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.draft.calibration import NOT_CALIBRATED
from dspark.nano.grade import is_correct
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark_eval.drafting import Drafted
from dspark_eval.pair import Pair
from dspark_eval.suites import Suite


def exact_answers(pair: Pair, suite: Suite, answers: Sequence[Generation]) -> float | None:
    """Share of right final answers among rows that carry one; None if no row does."""
    graded = [
        is_correct(pair.chat.decode(_text_ids(answer)), str(row.metadata["answer"]))
        for row, answer in zip(suite.rows, answers, strict=True)
        if "answer" in row.metadata
    ]
    return sum(graded) / len(graded) if graded else None


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
