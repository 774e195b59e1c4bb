"""`auto`: when it gives up speculating and when it comes back, on a clock that the tests own."""

from __future__ import annotations

import pytest

from dspark.errors import UserError
from dspark.runtime.policies import Auto, AutoSettings, Fixed
from dspark.runtime.policies.auto import RunningTime, Times
from dspark.runtime.records import RoundRecord

RULES = AutoSettings(patience=3, probe=2, gauge=3, pause=8, longest_pause=32, weight=1)
"""A weight of 1: a mean is the last value, which may be twice the one before at most."""


def run(policy: Auto, steps: int, *, emitted: int, round_s: float, plain_s: float) -> str:
    """One letter for each round: s speculative, p plain."""
    letters = ""
    for _ in range(steps):
        drafted = policy.draft_length(8)
        letters += "s" if drafted else "p"
        tokens, seconds = (emitted, round_s) if drafted else (1, plain_s)
        confidence = (0.5,) * drafted
        policy.observe(
            RoundRecord(
                drafted, drafted, tokens - 1, tokens, 2, 0, seconds, 0, confidence, confidence
            )
        )
    return letters


def test_it_measures_a_plain_step_and_stays_where_speculation_pays():
    """Three tokens in 2 s against one in 1 s."""
    policy = Auto(Fixed(), rules=RULES)
    letters = run(policy, 60, emitted=3, round_s=2.0, plain_s=1.0)
    assert letters == "ppp" + "s" * 57
    assert policy.times.plain.seconds == pytest.approx(1.0)


def test_it_falls_back_probes_at_growing_distances_and_comes_back():
    """Two tokens in 3 s lose one a round: plain after three, and again after probes of two rounds,
    for 8, 16, 32 and 32 steps. Then a round takes 1 s and gains one: the next probe pays, and the
    pause is back at 8."""
    policy = Auto(Fixed(), rules=RULES)
    letters = run(policy, 100, emitted=2, round_s=3.0, plain_s=1.0)
    slow = "ppp" + "sss" + "p" * 8 + "ss" + "p" * 16 + "ss" + "p" * 32 + "ss" + "p" * 32
    assert letters == slow
    assert run(policy, 30, emitted=2, round_s=1.0, plain_s=1.0) == "s" * 30
    assert policy.pause == 8
    assert run(policy, 14, emitted=1, round_s=2.0, plain_s=1.0) == "sss" + "p" * 8 + "ss" + "p"


def test_at_break_even_it_goes_on_and_a_probe_that_says_nothing_goes_on_probing():
    policy = Auto(Fixed(), rules=RULES)
    assert run(policy, 50, emitted=2, round_s=2.0, plain_s=1.0) == "ppp" + "s" * 47
    lost = Auto(Fixed(), rules=RULES)
    assert run(lost, 14, emitted=1, round_s=2.0, plain_s=1.0) == "pppsss" + "p" * 8
    assert run(lost, 50, emitted=2, round_s=2.0, plain_s=1.0) == "s" * 50
    assert lost.mode == "probing"


def test_gains_of_the_past_do_not_pay_for_losses_now():
    """However long it went well, three bad rounds end it; single ones between good ones do not."""
    policy = Auto(Fixed(), rules=RULES)
    run(policy, 103, emitted=9, round_s=2.0, plain_s=1.0)
    for _ in range(20):
        assert run(policy, 2, emitted=1, round_s=2.0, plain_s=1.0) == "ss"
        assert run(policy, 1, emitted=9, round_s=2.0, plain_s=1.0) == "s"
    assert run(policy, 5, emitted=1, round_s=2.0, plain_s=1.0) == "ssspp"


def test_a_single_stall_decides_nothing():
    """A round of 100 s among rounds of 2 s counts for 4: it loses one token of three, no more."""
    rules = AutoSettings(patience=3, gauge=1, weight=0.1)
    policy = Auto(Fixed(), rules)
    assert run(policy, 20, emitted=3, round_s=2.0, plain_s=1.0) == "p" + "s" * 19
    for _ in range(5):
        assert run(policy, 1, emitted=3, round_s=100.0, plain_s=1.0) == "s"
        assert run(policy, 20, emitted=3, round_s=2.0, plain_s=1.0) == "s" * 20
    assert policy.times.round.seconds == pytest.approx(2.0, abs=0.1)


def test_a_machine_that_is_slower_for_good_is_believed():
    """Rounds of 9 s from now on: the mean gets there, and 3 tokens no longer pay."""
    policy = Auto(Fixed(), AutoSettings(patience=3, gauge=1, weight=0.5))
    run(policy, 20, emitted=3, round_s=2.0, plain_s=1.0)
    assert "p" in run(policy, 6, emitted=3, round_s=9.0, plain_s=1.0)


def warm() -> Auto:
    """One that knows its machine: a plain step of 1 s."""
    return Auto(Fixed(), RULES, Times(RunningTime(1.0)))


def test_what_is_learnt_of_the_text_ends_with_the_request_and_the_clock_stays():
    policy = Auto(Fixed(), rules=RULES)
    run(policy, 20, emitted=1, round_s=3.0, plain_s=1.0)
    assert policy.draft_length(8) == 0
    new = policy.fresh()
    assert new.draft_length(8) == 8
    assert new.mode == "speculating"
    assert new.pause == 8
    assert new.times is policy.times
    assert run(new, 8, emitted=2, round_s=3.0, plain_s=1.0) == "sssppppp"  # nothing to gauge


def test_the_last_token_of_an_answer_is_no_speculated_round():
    """A plain step while speculating is a measurement of the clock, not of the text; and a round
    that is read late, when it is plain already, changes nothing."""
    policy = warm()
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 0.7, 0, (), ()))
    assert policy.times.plain.seconds == pytest.approx(0.7)
    assert policy.mode == "speculating"
    assert run(policy, 4, emitted=1, round_s=1.4, plain_s=0.7) == "sssp"
    policy.observe(RoundRecord(8, 8, 7, 8, 2, 0, 0.1, 0, (0.5,) * 8, (0.5,) * 8))
    assert policy.mode == "plain"


def test_a_row_with_nothing_left_to_draft_is_no_plain_step_where_its_batch_speculated():
    """Its pass had the rows of the others: the seconds are those of a speculated round."""
    policy = warm()
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 5.0, 0, (), (), rows=9))
    assert policy.times.plain.seconds == 1.0
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 0.7, 0, (), (), rows=1))
    assert policy.times.plain.seconds == pytest.approx(0.7)


def test_wrong_rules_are_refused():
    with pytest.raises(UserError, match="patience"):
        AutoSettings(patience=0)
    with pytest.raises(UserError, match="longest_pause"):
        AutoSettings(pause=64, longest_pause=32)
