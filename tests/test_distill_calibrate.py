"""The last step of a distillation: entries fitted on held-out prompts, one for all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dspark.distill.calibrate import MIN_PROMPTS, _together, calibrate_held_out
from dspark.distill.card import Provenance
from dspark.distill.finished import write_drafter_folder
from dspark.distill.processes import Processes
from dspark.draft.calibration import Fitted
from dspark.draft.checkpoint import read_calibration
from dspark.draft.reliability import ConfidenceRounds
from tests import distill_setup as setup
from tests.toy_target import ToyTarget

TARGET = ToyTarget()
HELD_OUT = setup.rows(TARGET, 20, 16)


def fit(tmp_path: Path, held_out=HELD_OUT, processes=setup.ALONE, **changes):
    config = setup.config(tmp_path, data__max_new_tokens=24, data__max_length=64, **changes)
    return calibrate_held_out(config, TARGET, setup.drafter(TARGET), held_out, processes)


def test_there_is_an_entry_for_each_temperature_of_the_evaluations(tmp_path: Path) -> None:
    greedy, warm = fit(tmp_path, eval__temperatures=[0.0, 0.7])
    assert (greedy.temperature, warm.temperature) == (0.0, 0.7)
    assert greedy.prompts == warm.prompts == 20
    assert min(greedy.rounds, warm.rounds) > 20
    assert len(greedy.temperatures) == len(greedy.curves) == 4


def test_it_says_what_it_does_before_each_temperature(tmp_path: Path) -> None:
    said: list[str] = []
    changes = {"data__max_new_tokens": 24, "data__max_length": 64}
    config = setup.config(tmp_path, eval__temperatures=[0.0, 0.7], **changes)
    drafter = setup.drafter(TARGET)
    calibrate_held_out(config, TARGET, drafter, HELD_OUT, setup.ALONE, said.append)
    assert [line.partition(" to fit")[0] for line in said] == [
        "confidence: decoding 20 held-out prompts at temperature 0",
        "confidence: decoding 20 held-out prompts at temperature 0.7",
    ]
    calibrate_held_out(config, TARGET, drafter, [], setup.ALONE, said.append)
    assert len(said) == 2


def test_nothing_is_fitted_where_it_is_switched_off_or_there_is_too_little(tmp_path: Path) -> None:
    assert fit(tmp_path, eval__calibrate=False) == ()
    assert fit(tmp_path, held_out=HELD_OUT[: MIN_PROMPTS - 1]) == ()
    assert fit(tmp_path, held_out=[]) == ()


def test_two_processes_fit_what_one_does(tmp_path: Path) -> None:
    """Each takes every other prompt; what they exchange is put back in the order of the prompts."""
    alone = fit(tmp_path, eval__temperatures=[1.0])
    shares: dict[int, str] = {}

    class Pretend(Processes):
        def texts(self, text: str | None) -> list[str]:
            shares[self.rank] = str(text)
            return [shares[rank] for rank in sorted(shares)]

    halves = [Pretend(setup.ALONE.device, rank, 2) for rank in (0, 1)]
    # The first to arrive sees its own half only, and too few prompts: nothing comes of it.
    assert fit(tmp_path, processes=halves[0], eval__temperatures=[1.0]) == ()
    together = fit(tmp_path, processes=halves[1], eval__temperatures=[1.0])
    assert together == alone


def test_rounds_travel_exactly() -> None:
    rounds = ConfidenceRounds(
        np.array([[1 / 3, np.nan], [-2.0, 1e-17]]), np.array([1, 0]), np.array([1, 2]),
        np.array([4, 2]),
    )  # fmt: skip
    found = _together(rounds, setup.ALONE)
    assert found.prompt.tolist() == [2, 4]
    assert found.logits.tobytes() == rounds.logits[::-1].tobytes()
    none = rounds.take(np.array([], dtype=np.int64))
    assert _together(none, setup.ALONE).logits.shape == (0, 2)


def test_longer_training_leaves_no_fit_of_the_weights_before_it(tmp_path: Path) -> None:
    """However many prompts that one had, and at whatever temperature."""
    drafter = setup.drafter(TARGET)
    facts = Provenance(
        target="toy", target_digest="", tokenizer_hash="", template_hash="", prompt_files=(),
        rows_digest="", training_rows=1, supervised_tokens=1, held_out_rows=20, parameters=1,
        steps=1, epochs=1, seed=0, processes=1, started_with="fresh weights",
    )  # fmt: skip

    def finish(fitted: Sequence[Fitted]) -> tuple[Fitted, ...]:
        write_drafter_folder(tmp_path / "run", drafter, (), facts, {}, fitted)
        calibration = read_calibration(tmp_path / "run", drafter.config)
        assert calibration is not None
        return calibration.settings

    (new,) = fit(tmp_path, held_out=HELD_OUT[:MIN_PROMPTS], eval__temperatures=[1.0])
    tuned = replace(new, prompts=500, rounds=20_000)
    assert finish([tuned, replace(tuned, temperature=2.0)])[0] == tuned
    assert finish([new]) == (new,)
    assert finish([]) == ()
