"""`auto`: when it gives up speculating and when it comes back, on a clock that the tests own."""

from __future__ import annotations

import pytest

from dspark.errors import UserError
from dspark.runtime.policies import Auto, AutoSettings, Fixed
from dspark.runtime.records import RoundRecord

RULES = AutoSettings(window=4, probe=2, gauge=3, pause=8, longest_pause=32, weight=0.5)


def run(policy: Auto, steps: int, *, emitted: int, round_s: float, plain_s: float) -> str:
    """One letter for each round: s speculative, p plain."""
    letters = ""
    for _ in range(steps):
        drafted = policy.draft_length(8)
        letters += "s" if drafted else "p"
        tokens, seconds = (emitted, round_s) if drafted else (1, plain_s)
        accepted = tokens - 1
        confidence = (0.5,) * drafted
        record = RoundRecord(
            drafted, drafted, accepted, tokens, 2, 0, seconds, 0, confidence, confidence
        )
        policy.observe(record)
    return letters


def test_it_measures_a_plain_step_and_stays_where_speculation_pays():
    """Three tokens in 2 s against one in 1 s: after its first window it takes three plain steps."""
    policy = Auto(Fixed(), rules=RULES)
    letters = run(policy, 60, emitted=3, round_s=2.0, plain_s=1.0)
    assert letters == "ssss" + "ppp" + "s" * 53
    assert policy.plain.seconds == pytest.approx(1.0)


def test_it_falls_back_probes_at_growing_distances_and_comes_back():
    """Two tokens in 3 s do not pay: plain, with probes of 2 rounds after 8, 16, 32, 32 steps.

    Then rounds take 1.5 s: the next probe pays, and the pause is back at 8.
    """
    policy = Auto(Fixed(), rules=RULES)
    letters = run(policy, 119, emitted=2, round_s=3.0, plain_s=1.0)
    slow = "ssss" + "ppp" + "ssss" + "p" * 8 + "ss" + "p" * 16 + "ss" + "p" * 32 + "ss" + "p" * 32
    assert letters == (slow + "ss" + "p" * 32)[:119]
    back = run(policy, 60, emitted=2, round_s=1.5, plain_s=1.0)
    assert back.lstrip("p") == "s" * len(back.lstrip("p"))
    assert len(back.lstrip("p")) > 25
    assert policy.pause == 8
    again = run(policy, 20, emitted=1, round_s=1.5, plain_s=1.0)
    assert "p" * 8 + "ss" in again


def test_just_at_break_even_it_decodes_plainly():
    policy = Auto(Fixed(), rules=RULES)
    assert run(policy, 19, emitted=2, round_s=2.0, plain_s=1.0) == "ssss" + "ppp" + "ssss" + "p" * 8


def test_a_cost_model_saves_the_first_measurement():
    from tests.test_policies import cost

    policy = Auto(Fixed(), cost=cost(10, 1), rules=RULES)
    assert policy.plain.seconds == 11
    assert run(policy, 8, emitted=2, round_s=30.0, plain_s=11.0) == "sssspppp"
    assert policy.plain.seconds == pytest.approx(11)


def test_what_is_learnt_of_the_text_ends_with_the_request_and_the_clock_stays():
    policy = Auto(Fixed(), rules=RULES)
    run(policy, 25, emitted=1, round_s=3.0, plain_s=1.0)
    assert policy.draft_length(8) == 0
    new = policy.fresh()
    assert new.draft_length(8) == 8
    assert new.mode == "speculating"
    assert new.pause == 8
    assert new.plain is policy.plain
    assert run(new, 8, emitted=1, round_s=3.0, plain_s=1.0) == "sssspppp"  # nothing to gauge


def test_the_last_token_of_an_answer_is_no_round_of_a_window():
    """A plain step while speculating is a measurement of the clock, not of the text."""
    policy = Auto(Fixed(), rules=RULES)
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 0.7, 0, (), ()))
    assert policy.plain.seconds == pytest.approx(0.7)
    assert run(policy, 5, emitted=1, round_s=0.8, plain_s=0.7) == "ssssp"


def test_wrong_rules_are_refused():
    with pytest.raises(UserError, match="auto"):
        AutoSettings(window=0)
    with pytest.raises(UserError, match="longest_pause"):
        AutoSettings(pause=64, longest_pause=32)
