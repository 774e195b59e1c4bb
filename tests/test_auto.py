"""`auto`: when it gives up speculating and when it comes back, on a clock that the tests own."""

from __future__ import annotations

import pytest

from dspark.errors import UserError
from dspark.runtime.policies import Auto, AutoSettings, Fixed
from dspark.runtime.records import RoundRecord
from tests.test_policies import cost

RULES = AutoSettings(patience=3, probe=2, gauge=3, pause=8, longest_pause=32, weight=0.5)


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
    assert policy.plain.seconds == pytest.approx(1.0)


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


def test_a_cost_model_saves_the_first_measurement():
    policy = Auto(Fixed(), cost=cost(10, 1), rules=RULES)
    assert policy.plain.seconds == 11
    assert run(policy, 8, emitted=2, round_s=33.0, plain_s=11.0) == "sssppppp"
    assert policy.plain.seconds == pytest.approx(11)


def test_what_is_learnt_of_the_text_ends_with_the_request_and_the_clock_stays():
    policy = Auto(Fixed(), rules=RULES)
    run(policy, 20, emitted=1, round_s=3.0, plain_s=1.0)
    assert policy.draft_length(8) == 0
    new = policy.fresh()
    assert new.draft_length(8) == 8
    assert new.mode == "speculating"
    assert new.pause == 8
    assert new.plain is policy.plain
    assert run(new, 8, emitted=2, round_s=3.0, plain_s=1.0) == "sssppppp"  # nothing to gauge


def test_the_last_token_of_an_answer_is_no_speculated_round():
    """A plain step while speculating is a measurement of the clock, not of the text; and a round
    that is read late, when it is plain already, changes nothing."""
    policy = Auto(Fixed(), cost=cost(10, 1), rules=RULES)
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 0.7, 0, (), ()))
    assert policy.plain.seconds == pytest.approx(0.7)
    assert policy.mode == "speculating"
    assert run(policy, 4, emitted=1, round_s=1.4, plain_s=0.7) == "sssp"
    policy.observe(RoundRecord(8, 8, 7, 8, 2, 0, 0.1, 0, (0.5,) * 8, (0.5,) * 8))
    assert policy.mode == "plain"


def test_a_row_with_nothing_left_to_draft_is_no_plain_step_where_its_batch_speculated():
    """Its pass had the rows of the others: the seconds are those of a speculated round."""
    policy = Auto(Fixed(), cost=cost(10, 1), rules=RULES)
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 5.0, 0, (), (), rows=9))
    assert policy.plain.measured == 0
    policy.observe(RoundRecord(0, 0, 0, 1, 0, 0, 0.7, 0, (), (), rows=1))
    assert policy.plain.seconds == pytest.approx(0.7)


def test_wrong_rules_are_refused():
    with pytest.raises(UserError, match="patience"):
        AutoSettings(patience=0)
    with pytest.raises(UserError, match="longest_pause"):
        AutoSettings(pause=64, longest_pause=32)
