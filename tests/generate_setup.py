"""`dspark generate` with a tiny target and drafter, as fixtures for the tests of that command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from tests import tiny_pair

QUESTION = "What is 3 + 4?"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], pair: tiny_pair.TinyPair) -> Run:
    """Run `dspark generate` with the tiny target; gives exit code, stdout and stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        words = ["generate", *map(str, args), "--target", str(pair.target)]
        code = console.run(cli.app, words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def document(run: Run, pair: tiny_pair.TinyPair) -> Callable[..., dict[str, Any]]:
    """The JSON document of a run with the tiny drafter, or with --plain."""

    def call(*args: str | Path) -> dict[str, Any]:
        drafter = [] if "--plain" in args else ["--draft", pair.draft]
        code, out, err = run(QUESTION, "--json", "--max-new-tokens", "24", *args, *drafter)
        assert (code, err) == (0, "")
        return dict(json.loads(out))

    return call
