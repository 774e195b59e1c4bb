"""What the fused loss holds at once, by the profiler's record of every allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.distill import fused
from dspark_eval.loss_memory import LossSize, main, measure, predicted_bytes
from tests.headings import assert_headed

CPU = torch.device("cpu")
SIZE = LossSize(vocab=8192, hidden=64, rank=16, blocks=32, slots=7, chunk=28, dtype="float32")


def peak(size: LossSize, method: str = "fused") -> int:
    return int(measure(size, CPU, method)["peak_bytes"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [28, 100, 224])
def test_peak_is_three_buffers_of_a_chunk_and_what_is_said(dtype: str, chunk: int) -> None:
    size = LossSize(**{**vars(SIZE), "chunk": chunk, "dtype": dtype})
    assert peak(size) == pytest.approx(predicted_bytes(size, CPU), rel=0.05)


def test_whole_logits_cost_many_times_more() -> None:
    logits = 32 * 7 * 8192 * 4  # eight chunks
    assert peak(SIZE, "whole") > 3 * logits
    assert peak(SIZE) < 0.2 * peak(SIZE, "whole")


def test_buffers_that_outlive_their_chunk_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    compare = fused._compare

    def keeping(*arguments: Any) -> Any:
        kept[:] = [compare(*arguments)]
        return kept[0]

    monkeypatch.setattr(fused, "_compare", keeping)
    assert peak(SIZE) > 1.3 * predicted_bytes(SIZE, CPU)


def test_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    sizes = ["--vocab", "500", "--hidden", "8", "--rank", "4", "--blocks", "6", "--chunk", "14"]
    asked = [*sizes, "--whole", "--json", str(file)]
    assert main(asked) == 0
    written = json.loads(file.read_text())
    assert_headed(written, "loss_memory", asked, None, "bfloat16")
    text = capsys.readouterr().out
    assert json.loads(text[text.index("{") :]) == written
    assert [entry["method"] for entry in written["measured"]] == ["fused", "whole"]
    assert written["chunk"] == 14
    assert main(["--vocab", "0"]) == 2
    assert "--vocab is 0: expected at least 1" in capsys.readouterr().err
