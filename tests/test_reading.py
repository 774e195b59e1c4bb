"""A long prompt says how far it is, to a terminal that has waited, and that it is too long."""

from __future__ import annotations

import json
import time
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dspark import cli, console
from dspark.reading import WORDS, reading_bar, shown_in
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.prefill import say_read, too_long_note, watch_reading
from dspark.runtime.sampling import SamplingParams
from dspark_eval.fidelity import logits_of_answer
from dspark_eval.report import progress
from tests.k3_tiny import TINY, tiny_model
from tests.tiny_pair import write_pair

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def target() -> K3Target:
    return K3Target(tiny_model(TINY), "tiny", (2,))


def _bar(terminal: bool) -> tuple[Progress, StringIO]:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=True, width=80)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, disable=not terminal, transient=True), out


def test_every_pass_says_how_far_it_is(target: K3Target) -> None:
    """Five tokens, two a pass; before and after the context nobody is told."""
    told: list[tuple[int, int]] = []
    generate = partial(
        plain_generate, target, PROMPT, max_new_tokens=1, sampling=SamplingParams(), prefill_chunk=2
    )
    generate()
    with watch_reading(lambda read, total: told.append((read, total))):
        generate()
    generate()
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_reading_a_text_again_says_so_too(target: K3Target) -> None:
    """The last token of the answer is judged, not read: seven tokens of eight."""
    told: list[tuple[int, int]] = []
    with watch_reading(lambda read, total: told.append((read, total))), torch.inference_mode():
        list(logits_of_answer(target, PROMPT, [8, 9, 10]))
    assert told == [(0, 7), (7, 7)]


def _read(bar: Progress, patience: float, passes: int) -> None:
    with shown_in(bar, patience):
        for read in range(passes):
            say_read(read, passes)
            time.sleep(0.05)
        say_read(passes, passes)
        assert not bar.live.is_started, "the first token would land in the bar"


def test_a_terminal_that_has_waited_sees_a_bar_that_goes_away() -> None:
    bar, out = _bar(terminal=True)
    _read(bar, patience=0.02, passes=6)
    shown = out.getvalue()
    assert WORDS in shown
    assert "0/6" in shown  # where reading was when the wait was over
    assert shown.rindex("\x1b[2K") > shown.rindex("/6")  # the line is empty again


@pytest.mark.parametrize(("terminal", "patience"), [(True, 60.0), (False, 0.0)])
def test_short_prompts_and_pipes_never_see_it(terminal: bool, patience: float) -> None:
    bar, out = _bar(terminal)
    _read(bar, patience, passes=2)
    assert out.getvalue() == ""


def test_an_error_takes_the_bar_away() -> None:
    bar, out = _bar(terminal=True)
    with pytest.raises(ValueError, match="odd"), shown_in(bar, 0.02):
        say_read(0, 9)
        time.sleep(0.2)
        raise ValueError("odd")
    assert WORDS in out.getvalue()
    assert not bar.live.is_started


def test_a_bar_that_runs_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `dspark eval`: the line of a prompt goes, its own does not."""
    bar, out = _bar(terminal=True)
    with bar:
        bar.add_task("eval nano", total=3)
        with shown_in(bar, 0.02):
            say_read(0, 9)
            time.sleep(0.2)
            say_read(9, 9)
        assert bar.live.is_started
        assert [task.visible for task in bar.tasks] == [True, False]
    assert "0/9" in out.getvalue()


def test_what_tests_and_pipes_have_for_stderr_gets_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with reading_bar(), progress("eval", 1) as advance:
        say_read(0, 2)
        say_read(2, 2)
        advance()
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------ longer than the target reads


def test_a_text_beyond_the_targets_positions_is_one_sentence(target: K3Target) -> None:
    assert too_long_note(target, target.max_positions) is None
    said = too_long_note(target, target.max_positions + 1)
    assert said is not None
    assert f"beyond the {target.max_positions:,} that target tiny" in said


def test_generate_and_eval_say_it_beside_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_pair(tmp_path)
    config = pair.target / "config.json"
    known = json.loads(config.read_text())
    held = known.get("text_config", known)
    held["max_position_embeddings"] = 8
    config.write_text(json.dumps(known))
    words = ["--target", str(pair.target), "--max-new-tokens", "4", "--json"]
    assert console.run(cli.app, ["generate", "one two three", "--plain", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    tokens = document["prompt_tokens"] + 4
    assert tokens > 8
    (said,) = document["warnings"]
    assert said.startswith(f"{tokens} tokens of prompt and answer are beyond the 8 that target")
    where = ["--draft", str(pair.draft), "--suite", str(pair.prompts)]
    assert console.run(cli.app, ["eval", *where, *words]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert sum("are beyond the 8 that target" in text for text in warnings) == 1
