"""`dspark inspect`: the published drafters to the byte, and speed-ups in closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import cli, console
from dspark.draft.checkpoint import save_drafter
from dspark.draft.model import DSparkDrafter
from dspark.draft.speedup import accepted_length, best, predict
from dspark.errors import UserError
from dspark.files import read_json
from dspark.inspection import inspect_drafter
from dspark.inspection_inputs import acceptance_beside, read_acceptance, read_cost_table
from dspark.interop.exporting import export_drafter
from dspark.interop.opening import open_drafter
from dspark.k3.config import K3Config
from dspark.k3.cost import expected_share, pass_bytes
from dspark_eval.sglang_files import sps_table
from tests import published_drafters as published
from tests.k3_tiny import TINY, tiny_model
from tests.published_drafters import PUBLISHED
from tests.test_calibration import CONFIG, GOOD
from tests.test_golden import REDUCED, edit, made
from tests.tiny_drafters import FULL

BF16 = torch.bfloat16
K3 = K3Config(
    vocab_size=163_840, hidden_size=7168, num_hidden_layers=93, num_attention_heads=96,
    full_attention_layers=(*range(3, 92, 4), 92), intermediate_size=33_792, kda_num_heads=96,
    kda_head_dim=128, q_lora_rank=1536, num_experts=896, num_experts_per_token=16,
    num_shared_experts=2, moe_intermediate_size=3072, routed_expert_hidden_size=3584,
    expert_quantization="mxfp4",
)  # fmt: skip


def config_alone(folder: Path, raw: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# ------------------------------------------------------------------ published drafters


@pytest.mark.parametrize(
    ("name", "raw", "layout", "owned", "gigabytes", "token", "million"),
    [
        ("inferact", published.inferact, "k3-mla", 2_387_907_841, 7.04, 5_760, 6.04),
        ("radixark", published.radixark, "sglang", 2_249_289_601, 6.76, 20_480, 21.47),
    ],
)
def test_the_published_k3_drafters_from_their_config_alone(
    tmp_path: Path, name: str, raw: Any, layout: str, owned: int, gigabytes: float, token: int,
    million: float,
) -> None:  # fmt: skip
    folder = config_alone(tmp_path / name, raw(PUBLISHED[name]))
    assert open_drafter(folder, assume=True).layout == layout
    found = inspect_drafter(folder, contexts=(8192,))
    assert found.parameters == owned
    assert found.dtype == "bfloat16"
    assert round(found.step["total"] / 1e9, 2) == gigabytes
    assert found.step["total"] == sum(v for k, v in found.step.items() if k != "total")
    assert found.context_per_token == token
    assert found.context[8192] == 8192 * token
    assert round(found.context[1_048_576] / 1e9, 2) == million
    assert found.recognised is not None
    assert found.undecided == ()
    assert sum(group.parameters for group in found.groups) == owned
    assert any(g.name == "layers.*.mlp.up_proj.weight" and g.count == 5 for g in found.groups)


def test_what_a_file_leaves_open_is_open_and_no_reason_not_to_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_alone(tmp_path / "redhat", published.redhat(PUBLISHED["redhat"]))
    found = inspect_drafter(folder)
    assert found.undecided == ("target_tap_kind",)
    assert found.config["target_tap_kind"] is None
    assert found.parameters == 4_744_900_481 - 2 * 163_840 * 7168
    with pytest.raises(UserError, match="--tap-kind"):
        open_drafter(folder)
    assert console.run(cli.app, ["inspect", str(folder)]) == 0
    assert "target_tap_kind          not in the file" in capsys.readouterr().out


# ------------------------------------------------------------------ what a target moves


def test_a_plain_step_of_kimi_k3() -> None:
    """Against an itemised count: 111.16 GB shared, 25.83 GB experts, 138.1 GB at 8,192 tokens."""
    one = pass_bytes(K3, 1, 8192, BF16)
    assert round(one.shared / 1e9, 2) == 111.16
    assert round(one.experts / 1e9, 2) == 25.83
    assert round(one.state / 1e9, 2) == 0.90
    assert round(one.latents / 1e9, 3) == 0.226
    assert round(one.total / 1e9, 1) == 138.1
    assert round(pass_bytes(K3, 1, 1_048_576, BF16).total / 1e9, 1) == 166.9
    eight = pass_bytes(K3, 8, 8192, BF16)
    assert eight.shared == one.shared
    assert round(eight.experts / 1e9, 1) == 194.2
    assert round(896 * expected_share(K3, 8), 1) == 120.3


def test_bytes_of_a_tiny_decoder_are_those_of_its_tensors() -> None:
    """All experts at once, so that every weight but the embedding is read."""
    model = tiny_model()
    held = sum(p.numel() * 4 for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    rows = 10_000
    cost = pass_bytes(TINY, rows, 50, torch.float32)
    assert cost.shared + cost.experts == pytest.approx(held)
    cache = model.new_cache(1, 1)
    states = sum(t.nbytes for t in _tensors(cache) if t.dim() == 4)
    width = TINY.kda_num_heads * TINY.kda_head_dim
    windows = (TINY.kda_conv_size - 1) * 3 * width * 4
    linear = TINY.num_hidden_layers - len(TINY.full_attention_layers)
    assert cost.state == 2 * (states + linear * windows)
    latent = (TINY.kv_lora_rank + TINY.qk_rope_head_dim) * 4
    assert cost.latents == 50 * latent * len(TINY.full_attention_layers)


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [
        value
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor)
    ]


# ------------------------------------------------------------------ prediction


def test_accepted_length_is_the_geometric_series() -> None:
    for chance in (0.0, 0.5, 0.9, 1.0):
        for length in (1, 3, 8):
            series = length + 1 if chance == 1 else (1 - chance ** (length + 1)) / (1 - chance)
            assert accepted_length([chance] * 8, length) == pytest.approx(series)
    assert accepted_length([0.5, 0.4], 2) == pytest.approx(1 + 0.5 + 0.2)
    with pytest.raises(ValueError, match="2 positions are known"):
        accepted_length([0.5, 0.4], 3)


def test_speed_up_in_closed_form() -> None:
    """C = 1/2 everywhere, a plain step of 10 ms, a round of 12 ms + 1 ms for each token."""
    times = {1: 0.010, 2: 0.013, 3: 0.014, 5: 0.016, 20: 0.031}
    found = predict([0.5] * 7, times, seconds=True)
    assert [p.draft_length for p in found] == [1, 2, 4]  # 19 are more than is known
    for entry in found:
        tau = 2 - 0.5**entry.draft_length
        seconds = 0.012 + 0.001 * entry.draft_length
        assert entry.accepted_length == pytest.approx(tau)
        assert entry.speed_up == pytest.approx(tau * 0.010 / seconds)
        assert entry.tokens_per_s == pytest.approx(tau / seconds)
    top = best(found)
    assert top is not None
    assert top.draft_length == 2
    assert best([]) is None
    # only proportions: the same speed-up, no rate
    scaled = predict([0.5] * 7, {rows: 7e9 * t for rows, t in times.items()}, seconds=False)
    assert [p.speed_up for p in scaled] == pytest.approx([p.speed_up for p in found])
    assert {p.tokens_per_s for p in scaled} == {None}


def test_a_speed_up_from_bytes(tmp_path: Path) -> None:
    """K3 and its MLA drafter: tau t(1) / t(1 + g), t the bytes that each of them moves."""
    folder = config_alone(tmp_path / "draft", published.inferact(PUBLISHED["inferact"]))
    target = config_alone(tmp_path / "k3", K3.to_dict())
    chances = {"as given": (0.9, 0.8, 0.7)}
    found = inspect_drafter(folder, target=str(target), acceptance=chances, bandwidth=8e12)
    last = found.predictions["as given"][-1]
    assert last.draft_length == 3
    tau = 1 + 0.9 + 0.72 + 0.504
    plain = pass_bytes(K3, 1, 4096, BF16).total
    whole = pass_bytes(K3, 4, 4096, BF16).total + found.step["total"] + 4096 * 5_760
    assert last.accepted_length == pytest.approx(tau)
    assert last.speed_up == pytest.approx(tau * plain / whole)
    assert last.tokens_per_s == pytest.approx(tau * 8e12 / whole)
    assert found.target_step is not None
    assert found.target_step["total"] == plain
    with_no_rate = inspect_drafter(folder, target=str(target), acceptance=chances)
    assert with_no_rate.predictions["as given"][-1].speed_up == pytest.approx(last.speed_up)
    assert with_no_rate.predictions["as given"][-1].tokens_per_s is None


def test_measured_times_come_before_bytes(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", made(FULL), golden=False)
    table = tmp_path / "sps.json"
    times = {1: 0.01, 2: 0.012, 3: 0.013}
    table.write_text(json.dumps(sps_table(times)))
    assert read_cost_table(table) == pytest.approx(times)
    found = inspect_drafter(
        tmp_path / "d", acceptance={"x": (0.5, 0.5)}, times=read_cost_table(table)
    )
    assert found.times_from == "measured step times"
    assert found.predictions["x"][0].speed_up == pytest.approx(1.5 * 0.01 / 0.012)


def test_a_bench_gives_back_its_own_speed_up(tmp_path: Path) -> None:
    """tau 2.5 with rounds of 14 ms against plain steps of 10 ms is a speed-up of 2.5 * 10 / 14."""
    path = tmp_path / "bench.json"
    path.write_text(
        json.dumps(
            {
                "plain_tokens_per_s": 100.0, "draft_ms": 2.0, "verify_ms": 11.0, "other_ms": 1.0,
                "conditional_acceptance": [1.0, 0.5], "extra": {"draft_length": 2},
            }
        )
    )  # fmt: skip
    (chances,) = read_acceptance(str(path)).values()
    (entry,) = predict(chances, read_cost_table(path), seconds=True)
    assert entry.accepted_length == 2.5
    assert entry.speed_up == pytest.approx(25 / 14)
    assert entry.tokens_per_s == pytest.approx(2.5 / 0.014)


# ------------------------------------------------------------------ where acceptance comes from


def test_acceptance_of_every_document(tmp_path: Path) -> None:
    def read(raw: Any) -> dict[str, tuple[float, ...]]:
        path = tmp_path / "a.json"
        path.write_text(json.dumps(raw))
        return read_acceptance(str(path))

    suites = {"easy": {"conditional_acceptance": [0.9, 0.8, None]}, "none": {}}
    assert read({"suites": suites}) == {"easy": (0.9, 0.8)}
    runs = [
        {"temperature": 0, "conditional_acceptance": [0.7]},
        {"temperature": 1, "conditional_acceptance": [0.5]},
    ]
    assert list(read({"runs": runs}).values()) == [(0.7,), (0.5,)]
    decoded = [{"temperature": 0.0, "conditional_acceptance": [0.6, 0.5]}]
    history = [{"step": 1, "decoded": [{"conditional_acceptance": [0.1]}]}, {"decoded": decoded}]
    assert read([*history, {"step": 3}]) == {"held-out rows, temperature 0.0": (0.6, 0.5)}
    assert read({"acceptance_per_slot": [0.4, None]}) == {"a.json, teacher-forced": (0.4,)}
    assert read([0.3, 0.2]) == {"a.json": (0.3, 0.2)}
    assert read_acceptance("0.9,0.8") == {"as given": (0.9, 0.8)}
    for bad in ({}, [], [1.5], {"suites": {}}, "x", None, {"acceptance_per_slot": [None]}):
        with pytest.raises(UserError, match="no acceptance in it"):
            read(bad)
    for bad in ("0.9;0.8", "1.2", "nan", str(tmp_path / "nowhere.json")):
        with pytest.raises(UserError, match="neither a file nor numbers"):
            read_acceptance(bad)


def test_slots_without_a_fit_of_their_own_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = DSparkDrafter(CONFIG)
    drafter.calibration = GOOD
    save_drafter(tmp_path / "d", drafter)
    assert console.run(cli.app, ["inspect", str(tmp_path / "d")]) == 0
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("calibrated for")
    ]
    assert len(lines) == 2
    for line in lines:
        assert line.endswith("; slot 3 reached by n = 0 rounds: corrected as slot 2")


def test_the_best_file_of_a_folder_is_taken(tmp_path: Path) -> None:
    assert acceptance_beside(tmp_path) == {}
    (tmp_path / "calibration.json").write_text(json.dumps({"acceptance_per_slot": [0.4]}))
    assert list(acceptance_beside(tmp_path).values()) == [(0.4,)]
    (tmp_path / "training.json").write_text(
        json.dumps([{"decoded": [{"temperature": 0.0, "conditional_acceptance": [0.5]}]}])
    )
    assert list(acceptance_beside(tmp_path).values()) == [(0.5,)]
    suite = {"suites": {"s": {"conditional_acceptance": [0.6]}}}
    (tmp_path / "eval.json").write_text(json.dumps(suite))
    assert acceptance_beside(tmp_path) == {"s": (0.6,)}


def test_a_bench_of_recorded_frames_gives_back_its_own_speed_up(tmp_path: Path) -> None:
    """A frame has no parts; of several seats neither rate nor frame is one text's."""
    path = tmp_path / "bench.json"
    parts = dict.fromkeys(("draft_ms", "verify_ms", "other_ms"))
    extra = {"draft_length": 2, "graphs": {"frame_ms_mean": 14.0}}
    bench = {"plain_tokens_per_s": 100.0, "batch": 1, **parts, "extra": extra}
    path.write_text(json.dumps(bench))
    assert read_cost_table(path) == pytest.approx({1: 0.01, 3: 0.014})
    path.write_text(json.dumps({**bench, "batch": 4}))
    with pytest.raises(UserError, match="one prompt at a time"):
        read_cost_table(path)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        [],
        {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]},
        {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, 0]},
        {"sample_batch_tokens": [2, 3], "sample_steps_per_sec": [1.0, 2.0]},
        {"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0]},
        {"plain_tokens_per_s": 3.0},
        {"plain_tokens_per_s": None, "draft_ms": 1, "extra": {"draft_length": 2}},
    ],
    ids=str,
)
def test_cost_tables_that_are_none(tmp_path: Path, raw: Any) -> None:
    (tmp_path / "t.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"t\.json: "):
        read_cost_table(tmp_path / "t.json")


# ------------------------------------------------------------------ the command


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.draft.folder import TensorFolder

    save_drafter(tmp_path / "d", made(FULL), dtype=BF16)
    export_drafter(tmp_path / "d", tmp_path / "out", layout="speculators")
    monkeypatch.setattr(TensorFolder, "read", lambda *_: pytest.fail("weights were read"))
    ours, theirs = (inspect_drafter(tmp_path / name) for name in ("d", "out"))
    assert ours.dtype == theirs.dtype == "bfloat16"
    assert ours.parameters == theirs.parameters
    assert ours.step == theirs.step
    assert "speculators" in theirs.layout


def test_a_reduced_vocabulary_with_its_maps(tmp_path: Path) -> None:
    drafter = made(REDUCED)
    save_drafter(tmp_path / "d", drafter, golden=False)
    found = inspect_drafter(tmp_path / "d")
    assert found.config["draft_vocab_size"] == 40
    assert found.parameters == sum(weight.numel() for weight in drafter.parameters())


def test_the_command_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(tmp_path / "d", made(FULL), golden=False)
    args = ["inspect", str(tmp_path / "d"), "--acceptance", "0.8,0.5", "--context", "10"]
    assert console.run(cli.app, args) == 0
    out = capsys.readouterr().out
    for text in ("target_tap_kind          residual", "context of 10", "no step times known"):
        assert text in out
    (tmp_path / "t.json").write_text(json.dumps(sps_table({1: 0.01, 2: 0.011, 3: 0.012})))
    assert console.run(cli.app, [*args, "--cost-table", str(tmp_path / "t.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["sample_from_anchor"] is True
    assert found["best"]["as given"]["draft_length"] == 2
    assert math.isclose(found["best"]["as given"]["speed_up"], 2.2 / 1.2)


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(tmp_path / "d", made(FULL), golden=False)
    draft, nowhere = str(tmp_path / "d"), str(tmp_path / "nowhere")
    for args, expected in (
        ([nowhere], "no such folder"),
        ([draft, "--context", "0"], "1 token or more"),
        ([draft, "--bandwidth", "0"], "above 0"),
        ([draft, "--bandwidth", "100"], "give --target with it"),
        ([draft, "--acceptance", "x"], "neither a file nor numbers"),
        ([draft, "--cost-table", nowhere], "no such file"),
        ([draft, "--target", nowhere], "no such target"),
        ([draft, "--target", "nano"], "only works with the target"),
    ):
        assert console.run(cli.app, ["inspect", *args]) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1
    raw = published.radixark(PUBLISHED["radixark"])
    absurd = config_alone(tmp_path / "absurd", {**raw, "intermediate_size": 10**30})
    with pytest.raises(UserError, match="a size that no tensor can have"):
        inspect_drafter(absurd)
    edit(tmp_path / "d", {"intermediate_size": 81})
    with pytest.raises(UserError, match="expected"):
        inspect_drafter(tmp_path / "d")
    assert read_json(tmp_path / "d" / "config.json")["intermediate_size"] == 81
