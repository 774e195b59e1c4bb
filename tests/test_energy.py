"""Joules per token from a counter that jumps seldom."""

from __future__ import annotations

import pytest

from dspark_eval import frame_runs
from dspark_eval.energy import Energy, measure_energy


class Card:
    """Draws so many watts and counts them every so often; work takes time on it."""

    def __init__(self, watts: float, every: float) -> None:
        self.watts, self.every, self.time = watts, every, 0.4 * every

    def joules(self) -> float | None:
        return 5e5 + self.watts * self.every * (self.time // self.every)

    def now(self) -> float:
        return self.time

    def work(self) -> int:
        """Six tokens in 30 ms."""
        self.time += 0.03
        return 6


@pytest.mark.parametrize("every", [0.001, 0.02, 0.1, 0.37])
def test_a_slow_counter_costs_no_accuracy(every: float) -> None:
    """400 W at 200 tokens a second are 2 J a token; either end is off by one text of 30 ms."""
    card = Card(400.0, every)
    found = measure_energy(card.work, card, 3.0, card.now)
    assert found is not None
    assert 3.0 <= found.seconds < 3.1 + every
    assert found.tokens == pytest.approx(200 * found.seconds)
    told = found.document()
    assert told["joules_per_token"] == pytest.approx(2.0, rel=2 * 0.03 / 3.0)
    assert told["watts"] == pytest.approx(400, rel=2 * 0.03 / 3.0)


def test_one_short_text_would_have_told_nothing() -> None:
    """Why: over 30 ms of a counter that jumps every 100 ms the joules are 0, or those of 100 ms."""
    card = Card(400.0, 0.1)
    seen = set()
    for _ in range(20):
        before = card.joules()
        card.work()
        seen.add(round((card.joules() or 0) - (before or 0)))
    assert seen == {0, 40}


def test_no_counter_and_a_counter_that_stands_still() -> None:
    class None_:
        def joules(self) -> float | None:
            return None

    card = Card(0.0, 0.1)
    assert measure_energy(card.work, None_(), 1.0, card.now) is None
    assert card.time == pytest.approx(0.04), "nothing was decoded for it"
    assert measure_energy(card.work, card, 1.0, card.now) is None
    assert card.time == pytest.approx(10, rel=0.01)


def test_the_prompts_are_asked_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of as many as there are seats, with their own indices, around and around."""
    asked = []

    class Decoder:
        class seats:
            batch = 2

    def decode(
        decoder: object, prompts: list[list[int]], new: int, first: int, run: object
    ) -> None:
        asked.append((prompts, first))
        run.tokens.append(7 * len(prompts))

    def three_pieces(work, meter, least_s):
        return Energy(60.0, 3.0, sum(work() for _ in range(3)))

    monkeypatch.setattr(frame_runs, "decode", decode)
    monkeypatch.setattr(frame_runs, "measure_energy", three_pieces)
    found = frame_runs.energy(Decoder(), [[1], [2], [3]], 9, 2.0)
    assert asked == [([[1], [2]], 0), ([[3]], 2), ([[1], [2]], 0)]
    assert found == {"joules_per_token": 60 / 35, "watts": 20.0, "seconds": 3.0, "tokens": 35}
    assert frame_runs.energy(Decoder(), [[1]], 9, 0.0) is None
