"""The benchmark of a draft step, at sizes a CPU has: what it counts and what it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspark_eval import draft_step
from tests.headings import assert_headed

TINY = [
    "--device", "cpu", "--hidden", "32", "--layers", "2", "--vocab", "90", "--shrink", "16",
    "--block", "4", "--repeats", "2",
]  # fmt: skip


def test_rows_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    asked = [*TINY, "--contexts", "64", "16", "--seed", "3", "--json", str(file)]
    assert draft_step.main(asked) == 0
    document = json.loads(file.read_text())
    assert_headed(document, "draft_step", asked, 3)
    rows = {(row["backbone"], row["context"]): row for row in document["rows"]}
    assert list(rows) == [(b, n) for b in ("attention", "mla", "kda") for n in (16, 64)]
    grown = {
        name: rows[name, 64]["read_bytes"] - rows[name, 16]["read_bytes"]
        for name in ("attention", "mla", "kda")
    }
    # 48 tokens, 2 layers, 4 bytes: keys and values of one head of 4, a latent of 32 + 4, nothing.
    assert grown == {"attention": 48 * 2 * 4 * 2 * 4, "mla": 48 * 2 * 4 * 36, "kda": 0}
    assert all(row["median_s"] > 0 for row in rows.values())
    assert {"kda_linear", "mla_output", "markov_sample"} <= set(document["ran"])


def test_the_step_reads_the_whole_context() -> None:
    for name in ("attention", "mla", "kda"):
        config = draft_step.drafter_config(name, 32, 2, 90, 4, 16)
        step = draft_step.DraftStep(config, torch.device("cpu"), torch.float32)
        context = step.context(20)
        assert context.lengths.tolist() == [20]
        tokens = step.run(context)
        assert tokens.shape == (1, 4)
        for buffer in draft_step._buffers(context):
            buffer.fill_(torch.nan)
        hidden = step.drafter.block_hidden(torch.zeros(1, 4, 32), context)
        assert hidden.isnan().all()


def test_wrong_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for more, words in ((["--backbones", "rnn"], "rnn"), (["--repeats", "0"], "at least 1")):
        assert draft_step.main([*TINY, *more]) == 2
        assert words in capsys.readouterr().err
