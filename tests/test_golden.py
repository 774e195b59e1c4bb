"""The golden vector: inputs that anybody can make again, readings that tell what changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.draft import DraftConfig, DSparkDrafter, TargetRecord
from dspark.draft.anchors import block_inputs
from dspark.draft.checkpoint import load_drafter, read_calibration, read_config, save_drafter
from dspark.draft.golden import (
    EMBED,
    HEAD,
    POSITIONS,
    TAPS,
    TOKENS,
    chosen_columns,
    chosen_ids,
    first_difference,
    hashed,
    read_golden,
    read_target,
    uniform,
)
from dspark.draft.golden_check import QUICK, check_meaning, check_readings, golden_warnings
from dspark.draft.golden_file import GOLDEN_FILE, Golden, digest, meaning, read_golden_file
from dspark.draft.shapes import KDAShape, Yarn
from dspark.errors import UserError
from tests.tiny_drafters import CASES, FULL, make_drafter
from tests.toy_target import ToyTarget

KDA = replace(FULL, backbone="kda", num_key_value_heads=6, kda=KDAShape(order=2, gate_rank=8))
REDUCED = replace(FULL, draft_vocab_size=40)
HEADS = {
    "gated": replace(FULL, markov_head_type="gated"),
    "rnn": replace(FULL, markov_head_type="rnn"),
    "silent": replace(FULL, enable_confidence_head=False),
}
ALL = {"full": FULL, "kda": KDA, "reduced": REDUCED, **HEADS, **CASES}


def made(config: DraftConfig, seed: int = 0) -> DSparkDrafter:
    drafter = make_drafter(config, seed)
    if config.draft_vocab_size is not None:
        drafter.set_draft_ids(torch.arange(config.draft_vocab_size) * 3)
    return drafter


def saved(folder: Path, config: DraftConfig, **options: Any) -> Golden:
    save_drafter(folder, made(config), **options)
    golden = read_golden_file(folder)
    assert golden is not None
    return golden


def mixed(x: int) -> int:
    """The hash's mixer in Python's own integers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x31848BAB % 2**32
    return x ^ (x >> 16)


def test_the_hash_is_integer_arithmetic_that_any_language_has() -> None:
    rows, columns = torch.tensor([0, 1, 4999]), torch.tensor([0, 7, 35_839])
    found = hashed(TAPS, rows, columns)
    for i, row in enumerate(rows.tolist()):
        for j, column in enumerate(columns.tolist()):
            start = mixed((mixed(TAPS) + row) % 2**32)
            assert found[i, j] == mixed((start + column) % 2**32) >> 8


def test_inputs_are_evenly_spread_unit_variance_and_independent_of_seeds() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    drawn = uniform(TAPS, torch.arange(400), 500)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn.dtype == torch.float32
    n = drawn.numel()
    assert abs(drawn.mean().item()) < 5 / math.sqrt(n)
    assert abs(drawn.square().mean().item() - 1) < 5 * math.sqrt(0.8 / n)  # var of u^2 is 4/5
    counts = np.histogram(drawn.numpy(), bins=64, range=(-math.sqrt(3), math.sqrt(3)))[0]
    chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
    assert chi2 < 63 + 6 * math.sqrt(2 * 63)
    # neither neighbours in a row nor in a column know of each other
    for shift in (drawn[:, 1:] * drawn[:, :-1], drawn[1:] * drawn[:-1]):
        assert abs(shift.mean().item()) < 5 / math.sqrt(n)


def test_a_reading_is_what_the_definition_says() -> None:
    """Position 100 of full attention, recomputed from the definition in one piece."""
    drafter, config = made(FULL), FULL
    reading = read_golden(drafter, QUICK)[100]
    context = drafter.new_context(1, 100)
    drafter.extend(context, uniform(TAPS, torch.arange(100), 3 * 48)[None])
    prev = hashed(TOKENS, torch.tensor([100]), torch.arange(5)) % config.vocab_size
    embeds = uniform(EMBED, block_inputs(prev[0, :1], 5, config.mask_token_id)[0], 48)
    hidden = drafter.block_hidden(embeds[None], context)[0].double()
    ids = list(chosen_ids(drafter))
    head = uniform(HEAD, torch.tensor(ids), 48).double() / math.sqrt(48)
    torch.testing.assert_close(
        torch.tensor(reading.hidden), (hidden @ head.T).float(), rtol=1e-5, atol=1e-5
    )
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    torch.testing.assert_close(torch.tensor(reading.bias), w1[prev[0]] @ w2[ids].T)
    both = torch.cat((hidden.float(), w1[prev[0]]), -1)
    assert drafter.confidence_head is not None
    proj = drafter.confidence_head.proj
    torch.testing.assert_close(
        torch.tensor(reading.confidence)[:, 0], both @ proj.weight[0] + proj.bias[0]
    )


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_saved_drafter_replays_in_every_dtype(
    tmp_path: Path, config: DraftConfig, dtype: torch.dtype
) -> None:
    golden = saved(tmp_path / "d", config, dtype=dtype)
    assert tuple(golden.readings) == POSITIONS
    assert golden.dtype == dtype
    same = load_drafter(tmp_path / "d")  # the stored weights, in float32
    assert check_meaning(golden, same) == []
    assert check_readings(golden, same) == []
    assert first_difference(golden.readings, read_golden(same), torch.float32) is None
    assert check_readings(golden, load_drafter(tmp_path / "d", dtype=dtype)) == []
    for name, tensor in same.state_dict().items():
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert digest(stored) == golden.digests[name]


def test_it_is_small_at_any_size_and_can_be_left_out(tmp_path: Path) -> None:
    sizes = []
    for hidden in (48, 512):
        save_drafter(tmp_path / str(hidden), made(replace(FULL, hidden_size=hidden)))
        sizes.append((tmp_path / str(hidden) / GOLDEN_FILE).stat().st_size)
    assert max(sizes) < 40_000
    assert sizes[1] < 1.1 * sizes[0]
    save_drafter(tmp_path / "without", made(FULL), golden=False)
    assert read_golden_file(tmp_path / "without") is None
    assert golden_warnings(tmp_path / "without", made(FULL)) == []
    # engines load every *.safetensors of a folder as weights: there is one
    assert [p.name for p in (tmp_path / "48").glob("*.safetensors")] == ["model.safetensors"]


def test_saving_draws_nothing_and_changes_nothing(tmp_path: Path) -> None:
    drafter = made(FULL)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    state = torch.get_rng_state()
    save_drafter(tmp_path / "d", drafter)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert drafter.training


# config key, value: what a hand can change in config.json and still have load
EDITS: dict[str, tuple[DraftConfig, dict[str, Any], str]] = {
    "rms_norm_eps": (FULL, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, 1e-05 when"),
    "tap kind": (FULL, {"target_tap_kind": "raw_prefix"}, "target_tap_kind is 'raw_prefix'"),
    "mask id": (FULL, {"mask_token_id": 8}, "mask_token_id is 8, 7 when"),
    "layer ids": (FULL, {"target_layer_ids": [2, 5, 7]}, "target_layer_ids is [2, 5, 7]"),
    "depth": (FULL, {"num_target_layers": 10}, "num_target_layers is 10, 9 when"),
    "block": (FULL, {"block_size": 4}, "block_size is 4, 5 when"),
    "theta": (FULL, {"rope_theta": 500.0}, "rope_theta is 500.0, 10000.0 when"),
    "yarn": (CASES["yarn"], {"factor": 8.0}, "yarn.factor is 8.0, 4.0 when"),
    "window": (CASES["sliding"], {"sliding_window": 5}, "sliding_window is 5, 6 when"),
    "causal": (FULL, {"block_causal": "all"}, "block_causal is 'all', 'none' when"),
    "order": (KDA, {"order": 0}, "kda.order is 0, 2 when"),
    "length": (FULL, {"max_position_embeddings": 64}, "max_position_embeddings is 64, 4096"),
}
SEEN_BY_REPLAY = ("mask id", "theta", "yarn", "window", "causal", "order")


def edit(folder: Path, values: dict[str, Any]) -> None:
    """Change keys of config.json wherever they stand."""

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value)
                if key in values:
                    node[key] = values[key]

    path = folder / "config.json"
    raw = json.loads(path.read_text())
    if "block_causal" in values:
        raw["dflash_config"]["causal"] = True
    walk(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_config_is_named(tmp_path: Path, name: str) -> None:
    config, values, expected = EDITS[name]
    golden = saved(tmp_path / "d", config)
    edit(tmp_path / "d", values)
    drafter = load_drafter(tmp_path / "d")
    (found,) = check_meaning(golden, drafter)
    assert expected in found
    replayed = check_readings(golden, drafter)
    if name in SEEN_BY_REPLAY:
        assert replayed
    assert any(expected in text for text in golden_warnings(tmp_path / "d", drafter))


def test_the_first_position_that_differs_is_named_and_those_that_agree() -> None:
    """YaRN from 2,048 on: the block before it is the same, at 5,000 it is not."""
    config = replace(FULL, yarn=Yarn(4.0, 2048), sliding_window=None)
    kept, wrong = made(config), made(replace(config, yarn=Yarn(4.0, 1024)))
    golden = Golden(torch.float32, meaning(config), {}, chosen_ids(kept), read_golden(kept), None)
    (found,) = check_readings(golden, wrong)
    assert "golden vector: position" in found
    # a window of 100 rows: nothing differs before there are more of them
    slides = ("sliding_attention",) * 2
    near = replace(FULL, sliding_window=200, layer_types=slides)
    golden = Golden(torch.float32, {}, {}, chosen_ids(kept), read_golden(made(near)), None)
    (found,) = check_readings(golden, made(FULL))
    assert "position 5000, slot 0: hidden is" in found
    assert "1 and 100 agree" in found
    assert check_readings(golden, made(FULL), QUICK) == []


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("layers.1.mlp.up_proj.weight", "hidden"),
        ("norm.weight", "hidden"),
        ("fc.weight", "hidden"),
        ("confidence_head.proj.weight", "confidence"),
        ("markov_head.markov_w1.weight", "bias"),
    ],
)
def test_a_changed_tensor_is_seen(tensor: str, part: str) -> None:
    drafter = made(FULL)
    golden = Golden(torch.float32, {}, {}, chosen_ids(drafter), read_golden(drafter, QUICK), None)
    with torch.no_grad():
        drafter.get_parameter(tensor)[..., ::2].mul_(1.05)  # all of it would not pass a norm
    (found,) = check_readings(golden, drafter, QUICK)
    assert f"position 1, slot 0: {part}" in found or part != "hidden"
    assert part in found


def test_the_drafts_of_another_vocabulary_map_are_seen(tmp_path: Path) -> None:
    golden = saved(tmp_path / "d", REDUCED)
    other = load_drafter(tmp_path / "d")
    other.set_draft_ids(torch.arange(40) * 2)
    (found,) = check_readings(golden, other)
    assert "vocabulary" in found
    assert len(chosen_columns(REDUCED)) == len(golden.ids)


def test_weights_that_are_no_numbers_are_kept_as_such(tmp_path: Path) -> None:
    drafter = made(FULL)
    with torch.no_grad():
        drafter.norm.weight[3] = math.nan
    save_drafter(tmp_path / "d", drafter)
    golden = read_golden_file(tmp_path / "d")
    assert golden is not None
    assert golden.readings[1].hidden[0][0] is None
    assert check_readings(golden, drafter) == []
    (found,) = check_readings(golden, made(FULL))
    assert "not finite when it was written" in found


def test_behind_a_target_its_own_states_and_head_count(tmp_path: Path) -> None:
    target = ToyTarget(vocab_size=120, hidden_size=48, num_layers=9)
    golden = saved(tmp_path / "d", FULL, target=target)
    assert golden.target is not None
    assert golden.target.dtype == "float32"
    drafter = load_drafter(tmp_path / "d")
    again = read_target(drafter, target, golden.target.ids)
    assert again.ids == golden.target.ids
    torch.testing.assert_close(
        torch.tensor(again.logits), torch.tensor(golden.target.logits), rtol=1e-5, atol=1e-5
    )
    best = torch.tensor(golden.target.logits)
    assert bool((best[:, :-1] >= best[:, 1:]).all())
    target.weights["head"][golden.target.ids[0][0]] *= -1
    other = read_target(drafter, target, golden.target.ids)
    assert abs(other.logits[0][0] - golden.target.logits[0][0]) > 0.1  # type: ignore[operator]


def test_the_target_record_says_whether_thinking_was_on(tmp_path: Path) -> None:
    record = TargetRecord("t", "ab", "cd", thinking=True, row_length=512)
    golden = saved(tmp_path / "d", replace(FULL, target=record))
    assert read_config(tmp_path / "d").target == record
    assert golden.meaning["target.thinking"] is True
    assert "target.name" not in golden.meaning  # a path on somebody's disk
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["sample_from_anchor"] is True
    assert raw["layer_id_origin"] == "completed_layer_0_based"
    for key, value in (("thinking", "on"), ("row_length", 0), ("row_length", True)):
        raw["target"] = {"name": "t", key: value}
        (tmp_path / "d" / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UserError, match=f"target.{key}"):
            read_config(tmp_path / "d")


def damage_schema(raw: dict[str, Any]) -> None:
    raw["schema_version"] = 2


def damage_reading(raw: dict[str, Any]) -> None:
    raw["readings"]["100"]["hidden"] = 3


def damage_positions(raw: dict[str, Any]) -> None:
    del raw["readings"]["5000"]


def damage_key(raw: dict[str, Any]) -> None:
    del raw["ids"]


@pytest.mark.parametrize("damage", [damage_schema, damage_reading, damage_positions, damage_key])
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None]
) -> None:
    save_drafter(tmp_path / "d", made(FULL))
    path = tmp_path / "d" / GOLDEN_FILE
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"golden\.json: not a golden vector"):
        read_golden_file(tmp_path / "d")


def test_an_edited_block_size_is_not_blamed_on_the_calibration(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", made(FULL))
    nothing = [None] * 5
    (tmp_path / "d" / "calibration.json").write_text(
        json.dumps(
            {
                "schema_version": 2, "calibrated": False, "measured_on": None, "rows": 0,
                "confidence_per_slot": nothing, "acceptance_per_slot": nothing, "settings": [],
            }
        )
    )  # fmt: skip
    assert read_calibration(tmp_path / "d", FULL) is not None
    edit(tmp_path / "d", {"block_size": 4})
    with pytest.raises(UserError, match=r"config\.json: block_size is 4, calibration.json beside"):
        load_drafter(tmp_path / "d")


def test_a_missing_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; a drafter folder was expected"):
        read_config(tmp_path / "nowhere")
