"""A busy machine is told before seconds are measured, on stderr, whatever is printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dspark import cli, console
from tests.tiny_pair import TinyPair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


COMMANDS = (
    ("bench", "--prompts", "{prompts}", "--draft", "{draft}", "--json", "-", "--warmup", "1"),
    ("eval", "--suite", "{prompts}", "--draft", "{draft}", "--json", "--concurrency", "1"),
    ("eval", "--suite", "{prompts}", "--json", "--compare", "{draft}", "lookup"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=("bench", "concurrency", "compare"))
@pytest.mark.parametrize("load", [0.25, 1000.5])
def test_whoever_measures_seconds_says_it(
    words: tuple[str, ...],
    load: float,
    pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    paths: dict[str, Path] = {"prompts": pair.prompts, "draft": pair.draft}
    asked = [word.format(**paths) for word in words]
    more = ["--target", str(pair.target), "--max-new-tokens", "4"]
    assert console.run(cli.app, [*asked, *more]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert ("busy machine: load 1000.5" in said.err) == (load > 1000)


def test_an_evaluation_without_seconds_is_quiet(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.5, 1000.5, 1000.5))
    words = ["eval", "--suite", str(pair.prompts), "--draft", str(pair.draft), "--json"]
    more = ["--target", str(pair.target), "--max-new-tokens", "4"]
    assert console.run(cli.app, [*words, *more]) == 0
    assert "busy" not in capsys.readouterr().err
