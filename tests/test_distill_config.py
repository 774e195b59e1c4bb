"""A configuration is read, checked and written without losing or inventing anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dspark.distill.config import SECTIONS, DistillConfig, config_from_dict, load_config
from dspark.distill.settings import DrafterSettings
from dspark.errors import UserError


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_file_and_no_overrides_are_the_defaults() -> None:
    assert load_config() == DistillConfig()


def test_yaml_round_trip_of_defaults_and_of_everything_changed(tmp_path: Path) -> None:
    changed = load_config(
        None,
        {
            "target.name": "some/folder: with a colon",
            "data.prompts": ["a b.jsonl", "#c.jsonl"],
            "drafter.tap_ids": [1, 3],
            "eval.temperatures": [0.5],
            "train.lr": 1e-4,
            "train.confidence_detach": True,
        },
    )
    for config in (DistillConfig(), changed):
        assert load_config(written(tmp_path, config.to_yaml())) == config
        assert config_from_dict(config.to_dict()) == config


def test_every_option_has_a_description_and_reaches_the_file() -> None:
    text = DistillConfig().to_yaml()
    for section, kind in SECTIONS.items():
        assert f"{section}:\n" in text
        for entry in dataclasses.fields(kind):
            assert entry.metadata["doc"]
            assert f"  {entry.name}: " in text


def test_later_sources_win_and_absent_overrides_do_not_count(tmp_path: Path) -> None:
    path = written(tmp_path, "train:\n  lr: 2e-3\n  anchors: 9\n")
    config = load_config(path, {"train.anchors": 11})
    assert (config.train.lr, config.train.anchors) == (2e-3, 11)
    assert config.train.clip == DistillConfig().train.clip


def test_null_is_a_value_where_the_type_allows_it(tmp_path: Path) -> None:
    path = written(tmp_path, "data:\n  max_prompts: null\n")
    assert load_config(path).data.max_prompts is None
    assert load_config(None, {"data.max_prompts": None}).data.max_prompts is None
    with pytest.raises(UserError, match=r"run\.yaml:2: train\.lr is None: expected float"):
        load_config(written(tmp_path, "train:\n  lr: null\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  epochz: 3\n",
            r"run\.yaml:2: unknown key train\.epochz; did you mean train",
        ),
        ("trian:\n  lr: 1\n", r"run\.yaml:1: unknown key trian; did you mean train"),
        ("train:\n  xyzzy: 1\n", r"run\.yaml:2: unknown key train\.xyzzy; known: epochs"),
        ("train:\n  lr: fast\n", r"run\.yaml:2: train\.lr is 'fast': expected float"),
        ("train:\n  epochs: 2.5\n", r"run\.yaml:2: train\.epochs is 2\.5: expected int"),
        ("train:\n  epochs: true\n", r"run\.yaml:2: train\.epochs is True: expected int"),
        ("data:\n  strict: 1\n", r"run\.yaml:2: data\.strict is 1: expected bool"),
        ("train:\n  lr: -1\n", r"run\.yaml: train\.lr is -1\.0: expected a finite number above 0"),
        ("train:\n  lr: .nan\n", r"train\.lr is nan"),
        ("train:\n  lr: 1\n  lr: 2\n", r"run\.yaml:3: train\.lr is given twice"),
        ("train: 3\n", r"run\.yaml:1: expected `key: value` lines"),
        ("train:\n  lr: [\n", r"run\.yaml:\d: not valid YAML"),
        ("train: {ce: 0, tv: 0}\n", r"would learn no tokens"),
        ("drafter: {num_heads: 3}\n", r"expected a multiple of drafter\.num_kv_heads, 2"),
        ("eval: {draft_length: 9}\n", r"eval\.draft_length is 9: expected at most .*block_size, 8"),
        ("data: {top_p: 0}\n", r"data\.top_p is 0\.0"),
        ("train:\n  lr: 2024-13-45\n", r"run\.yaml:2: train\.lr: a value that YAML cannot read"),
        ("train:\n  lr: !!python/name:os.system\n", r"run\.yaml:2: train\.lr: a value that"),
        ("train:\n  lr: \x01\n", r"run\.yaml: not text in UTF-8 that YAML allows"),
    ],
)
def test_wrong_files_name_the_place_and_what_was_expected(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(written(tmp_path, text))


def test_wrong_overrides_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown key train\.learning_rate"):
        load_config(None, {"train.learning_rate": 1e-3})
    with pytest.raises(UserError, match="unknown key nothing"):
        load_config(None, {"nothing": 1})
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "train:\n  lr: 1e-3\n")).train.lr == 1e-3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("both", "both"),
        ("'on'", "on"),
        ("false", "off"),
        ("true", "on"),
    ],
)
def test_a_switch_is_read_although_yaml_reads_a_bare_on_as_true(
    tmp_path: Path, text: str, value: str
) -> None:
    """Also what older files say, in which the switch was a truth value."""
    config = load_config(written(tmp_path, f"data:\n  thinking: {text}\n"))
    assert config.data.thinking == value
    assert load_config(written(tmp_path, config.to_yaml())) == config
    with pytest.raises(UserError, match=r"data\.thinking is 'maybe': expected off, on, both"):
        load_config(written(tmp_path, "data:\n  thinking: maybe\n"))


@pytest.mark.parametrize("backbone", ["mla", "kda"])
def test_key_heads_count_only_where_there_are_any(backbone: str) -> None:
    assert DrafterSettings(backbone=backbone, num_heads=5).num_heads == 5
    with pytest.raises(UserError, match=r"expected a multiple of drafter\.num_kv_heads, 2"):
        DrafterSettings(num_heads=5)


@pytest.mark.parametrize(
    ("key", "value"), [("kda_order", "2"), ("kda_block_softmax", True), ("mla_kv_rank", 16)]
)
def test_a_key_of_another_backbone_is_refused(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"drafter.{key} is .*no effect with backbone attention"):
        load_config(None, {f"drafter.{key}": value})
    owner = key.partition("_")[0]
    load_config(None, {f"drafter.{key}": value, "drafter.backbone": owner})
