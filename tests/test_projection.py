"""Projected speeds: bytes as published, times by hand, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark_eval.measured_layers import load_layers
from dspark_eval.projection import (
    K3,
    K3_DRAFTER,
    Machine,
    fit_wait,
    main,
    project,
    rows_bytes,
    table,
)
from tests.test_k3_traps import published

BF16 = torch.bfloat16


def test_k3_is_what_its_published_configuration_says() -> None:
    """But for special tokens, which nothing is counted of, and the packing, a block of its own."""
    said = replace(
        K3Config.from_dict(published()),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        expert_quantization="mxfp4",
    )
    assert said == K3


def test_bytes_are_the_published_ones() -> None:
    """138.1 GB for a token behind 8,192 others, 7.04 GB of weights and 47 MB of context a draft."""
    found = project(K3, K3_DRAFTER, Machine(), [0.9])
    assert found.plain_bytes == pytest.approx(138.1e9, rel=1e-3)
    assert found.draft_bytes == pytest.approx(7.04e9 + 8192 * 5760, rel=1e-3)


def test_times_by_hand() -> None:
    """Two GPUs at half their rate: one GPU's rate in all; a draft length of 2 at C = 0.5."""
    machine = Machine(gpus=2, rate=1e12, share=0.5, wait_s=0.01, draft_gpus=1, draft_wait_s=0.002)
    found = project(K3, K3_DRAFTER, machine, [0.5, 0.5])
    three = rows_bytes(K3, 3, 8192, BF16, 0.0)
    plain = found.plain_bytes / 1e12 + 0.01
    whole = three / 1e12 + 0.01 + found.draft_bytes / 0.5e12 + 0.002
    last = found.predictions[-1]
    assert (last.draft_length, last.accepted_length) == (2, 1.75)
    assert found.plain_tokens_per_s == pytest.approx(1 / plain)
    assert last.tokens_per_s == pytest.approx(1.75 / whole)
    assert last.speed_up == pytest.approx(1.75 * plain / whole)


def test_experts_that_agree_are_read_once() -> None:
    """At agreement 1, eight rows read the experts of one; nothing else of a pass changes."""
    one, eight = (rows_bytes(K3, n, 0, BF16, 1.0) for n in (1, 8))
    assert eight == pytest.approx(one)
    apart = [rows_bytes(K3, 8, 0, BF16, a) for a in (0.0, 0.5, 1.0)]
    assert apart[1] == pytest.approx((apart[0] + apart[2]) / 2)
    layers, expert = 92, 3 * 3072 * 3584 * (0.5 + 1 / 32)
    distinct = 896 * (1 - (1 - 16 / 896) ** 8) - 16
    assert apart[0] - apart[2] == pytest.approx(layers * expert * distinct, rel=1e-6)


def test_a_wait_is_fitted_to_a_published_step() -> None:
    machine = fit_wait(Machine(gpus=8, rate=8e12), 138.1e9, 8.51e-3, layers=5 / 93)
    assert machine.pass_s(138.1e9) == pytest.approx(8.51e-3)
    assert machine.draft_wait_s == pytest.approx(machine.wait_s * 5 / 93)
    with pytest.raises(UserError, match=r"the bytes alone take 2\.16 ms"):
        fit_wait(Machine(gpus=8, rate=8e12), 138.1e9, 2e-3, layers=0.0)


def test_more_positions_than_the_block_are_not_predicted() -> None:
    assert len(project(K3, K3_DRAFTER, Machine(), [0.9] * 12).predictions) == 8


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Machine(gpus=0), "--gpus: expected"),
        (lambda: Machine(share=1.5), "--share: expected"),
        (lambda: Machine(wait_s=-1), "waits"),
        (lambda: rows_bytes(K3, 2, 0, BF16, 2.0), "--agreement: expected"),
        (lambda: project(K3, K3_DRAFTER, Machine(), [1.5]), "--conditional: expected"),
    ],
)
def test_values_out_of_range_are_refused(make: object, what: str) -> None:
    with pytest.raises(UserError, match=what):
        make()  # type: ignore[operator]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--conditional", "0.9", "0.8", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [row["draft_length"] for row in read["predictions"]] == [1, 2]
    assert main(["--conditional", "0.9", "--plain-ms", "1"]) == 2
    assert "expected at least that" in capsys.readouterr().err
    found = project(K3, K3_DRAFTER, Machine(), [0.9])
    assert table(found, Machine()).endswith("A projection from bytes, not a measurement.")


def test_a_value_out_of_range_is_refused_under_the_name_of_its_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option, value, got in (
        ("--rate", "inf", "inf"), ("--rate", "0", "0"), ("--context", "-5", "-5"),
        ("--gpus", "0", "0"), ("--share", "1.5", "1.5"), ("--agreement", "nan", "nan"),
        ("--conditional", "1.5", "1.5"), ("--plain-ms", "nan", ""), ("--plain-ms", "inf", ""),
    ):  # fmt: skip
        assert main(["--conditional", "0.9", option, value]) == 2
        said = f"error: {option}: expected " if got else f"error: {option} {value}: the bytes"
        told = capsys.readouterr()
        assert told.err.startswith(said)
        assert told.err.rstrip().endswith(got)
        assert told.err.count("\n") == 1
        assert not told.out


def layers_file(path: Path, shape: str = "k3", **rows: list[dict[str, float]]) -> Path:
    """Layers of 420 MB at 4.2 TB/s, 100 us of bytes: 30 and 50 us over at 1 and 8 rows (kda)."""

    def row(n: int, us: float) -> dict[str, float]:
        return {"rows": n, "seconds": 1e-6 * us, "bytes": 420e6, "experts": 16.0}

    layers = {"kda": [row(1, 130), row(8, 150)], "mla": [row(1, 110), row(8, 90)], **rows}
    path.write_text(json.dumps({"shape": shape, "copy_bytes_per_s": 4.2e12, "layers": layers}))
    return path


def test_measured_layers_make_every_pass_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """69 KDA layers and 24 MLA layers; none is faster than its bytes; 2 rows are interpolated."""
    path = layers_file(tmp_path / "layers.json")
    found = load_layers(path, K3)
    one, eight = 69 * 30e-6 + 24 * 10e-6, 69 * 50e-6
    assert found.wait_s == pytest.approx({1: one, 8: eight})
    machine = Machine(row_waits=tuple(found.wait_s.items()))
    assert machine.pass_s(0.0, 2) == pytest.approx(one + (eight - one) / 7)
    assert main(["--conditional", "0.9", "--layers", str(path), "--gpus", "8"]) == 0
    told = capsys.readouterr().out
    plain_ms = 138.1e9 / 8 / 4.2e12 * 1e3
    shared, same = told.split("It is the same on every GPU:")
    assert f"{plain_ms + 1e3 * one / 8:.2f} ms" in shared
    assert f"{plain_ms + 1e3 * one:.2f} ms" in same
    assert shared.count("not a measurement") == 1
    assert main(["--conditional", "0.9", "--layers", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert told.rstrip().endswith("A projection from bytes and measured layers, not a measurement.")


def test_files_that_are_no_measured_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("[1]")
    cases = (
        (other, "k3_layers --json"),
        (layers_file(tmp_path / "tiny.json", "tiny"), "measured at shape 'tiny'; expected k3"),
        (layers_file(tmp_path / "rows.json", mla=[]), "the same rows"),
    )
    for path, said in cases:
        assert main(["--conditional", "0.9", "--layers", str(path)]) == 2
        told = capsys.readouterr()
        assert said in told.err
        assert told.err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["--conditional", "0.9", "--layers", str(other), "--plain-ms", "9"])
