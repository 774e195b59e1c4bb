"""Folders of other engines: keys wherever readers look for them, a line for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.draft.checkpoint import TargetCopies, load_drafter
from dspark.draft.shapes import Yarn
from dspark.errors import UserError
from dspark.interop.exporting import export_drafter
from dspark.interop.formats import FORMATS
from dspark.interop.importing import import_drafter
from dspark.interop.spec import Given, Source
from tests.interop_drafters import (
    MIXED,
    MLA,
    NAMES,
    PLAIN,
    SLIDING,
    STATED,
    VARIANTS,
    drafter,
    facts,
    nest,
    published,
    raw_config,
    stored,
    tables,
    write_published,
)

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask under vLLM's old name": (
        {"dflash_config": {"target_layer_ids": [1, 3]}, "pard_token": 49},
        {},
    ),
    "mask and its alias": ({"pard_token": 49}, {}),
    "mask as DeepSeek names it": (
        {"dflash_config": {"target_layer_ids": [1, 3]}, "dspark_noise_token_id": 49},
        {},
    ),
    "keys with the prefix": (
        {"block_size": None, "dspark_block_size": 4, "markov_rank": None, "dspark_markov_rank": 6},
        {},
    ),
    "nest of the other name": (
        {"dflash_config": None, "dspark_config": nest(sample_from_anchor=True)},
        {},
    ),
    "ids that vLLM captures": ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}),
    "labels shifted": ({"dflash_config": nest(shift_label=True)}, {}),
    "no bonus anchor": ({"dspark_bonus_anchor": False}, {}),
    "head type told by the tensors": ({"markov_head_type": None}, {}),
    "head size told by the tensors": ({"head_dim": None}, {}),
    "flat rope": ({"rope_parameters": None, "rope_theta": 5000, "rope_scaling": None}, {}),
    "yarn in the older form": (
        {
            "rope_parameters": None,
            "rope_theta": 5000,
            "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
        },
        {"yarn": Yarn(4.0, 128)},
    ),
    "window of ModelOpt": (
        {
            "layer_types": ["sliding_attention"] * 2,
            "dflash_config": nest(use_swa=True, swa_window_size=5, causal=True),
        },
        {**SLIDING, "block_causal": "all"},
    ),
    "window of vLLM": (
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "sliding_window_non_causal": True,
        },
        MIXED,
    ),
    "window that no layer has": ({"sliding_window": 2048}, {}),
    "a padded draft vocabulary": ({"draft_vocab_size": 64}, {}),
}


@pytest.mark.parametrize("case", READ)
def test_keys_are_found_wherever_engines_look_for_them(tmp_path: Path, case: str) -> None:
    changes, fields = READ[case]
    raw = published(**changes)
    folder = write_published(tmp_path / "theirs", raw)
    done = import_drafter(folder, tmp_path / "ours", given=STATED)
    assert done.config == replace(PLAIN, target=None, **fields)
    assert load_drafter(tmp_path / "ours").config == done.config
    assert done.unknown == ()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": (
        {"dflash_config": {"target_layer_ids": [1, 3]}},
        "mask_token_id: not in the file.*--mask-token-id",
    ),
    "two masks": ({"pard_token": 48}, "mask_token_id: dflash_config.mask_token_id is 49 but pard"),
    "mask outside": ({"dflash_config": nest(mask_token_id=50)}, "mask_token_id: 50 is not in"),
    "no block size": ({"block_size": None}, "block_size: not in the file.*--block-size"),
    "no layers": ({"num_target_layers": None}, "num_target_layers: not in.*--target-layers"),
    "no ids": ({"dflash_config": {"mask_token_id": 49}}, "target_layer_ids: missing"),
    "ids of two origins": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3]},
        r"target_layer_ids: \[1, 3\] does not agree with eagle_aux_hidden_state_layer_ids \[1, 3\]",
    ),
    "origin of another layout": (
        {"layer_id_origin": "hidden_states_index"},
        "layer_id_origin: 'hidden_states_index' given",
    ),
    "last layer": ({"dflash_config": nest(target_layer_ids=[1, 5])}, "target_layer_ids: 5 .*last"),
    "mask slots predict": (
        {"sample_from_anchor": False},
        "--slot-layout anchor: sample_from_anchor: the file says mask",
    ),
    "two slot layouts": (
        {"sample_from_anchor": True, "dspark_bonus_anchor": True},
        "contradict each other",
    ),
    "no rope": ({"rope_parameters": None}, "rope_parameters: not in the file.*--rope"),
    "yarn from nowhere": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 16.0}},
        "original_max_position_embeddings is None",
    ),
    "mrope": (
        {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "mrope_section is not known, and would be lost",
    ),
    "interleaved": ({"rope_is_neox_style": False}, "rope_is_neox_style: false"),
    "half rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    "window without a word on causality": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
        r"block_causal: not in the file.*--block-causal none\|sliding\|all",
    ),
    "window without layers": (
        {"use_sliding_window": True, "sliding_window": 5},
        "layer_types: mis",
    ),
    "layers without end": (
        {"num_hidden_layers": 10**12},
        "num_hidden_layers is 1000000000000, the missing tensors say otherwise: 2 layers",
    ),
    "a size beyond all tensors": ({"hidden_size": 10**30}, "has a size that no tensor can have"),
    "heads beyond all tensors": (
        {"num_attention_heads": 2**62, "num_key_value_heads": 2},
        "a size",
    ),
    "another width than the target's": ({"target_hidden_size": 32}, "target_hidden_size: a draf"),
    "attention of another mode": (
        {"dflash_config": nest(attention_mode="linear")},
        "attention_mode: 'linear'",
    ),
    "an empty head type": ({"markov_head_type": ""}, "markov_head_type: ''"),
    "no rank beside a head": ({"markov_rank": 0}, "markov_rank: 0"),
    "layers of no kind": (
        {"layer_types": ["chunked_attention", 3]},
        r"layer_types: .*expected full_attention or sliding_attention each",
    ),
    "window of no size": ({"layer_types": ["sliding_attention"] * 2}, "sliding_window: missing"),
    "sinks": ({"attention_sink_bias": True}, "attention_sink_bias: True: attention sinks"),
    "biases": ({"attention_bias": True}, "attention_bias: True: biases"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    "noise": ({"log_snr_conditioning": True}, "log_snr_conditioning"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
    "plain DFlash": ({"markov_rank": 0, "dflash_config": nest(projector_type="dflash")}, "DFlash"),
    "another head": ({"markov_head_type": "lstm"}, "markov_head_type: 'lstm'"),
    "confidence without tensors": (
        {"enable_confidence_head": False},
        "enable_confidence_head: false, but",
    ),
    "a number as text": ({"block_size": "4"}, "block_size: '4' given, an integer was expected"),
    "true as a number": ({"block_size": True}, "block_size: True given, an integer"),
    "nest a list": ({"dflash_config": []}, r"dflash_config: \[\] given, an object"),
    "tied to itself": ({"tie_word_embeddings": True}, "tie_word_embeddings is true.*--target"),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 is another kind"),
    "Gemma": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma's backbone"),
    "a target": (
        {"architectures": ["Qwen3ForCausalLM"]},
        r"tell no layout; give --format deepspec",
    ),
    "another speculator": ({"speculators_model_type": "eagle3"}, "'eagle3' is another kind"),
    "fewer draft ids without a map": (
        {"draft_vocab_size": 20},
        "draft_vocab_size 20 of 50 but no d2t",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_known_or_run_is_one_line_that_says_what_to_give(
    tmp_path: Path, case: str
) -> None:
    changes, message = REFUSED[case]
    folder = write_published(tmp_path / "theirs", published(**changes))
    with pytest.raises(UserError, match=message) as refusal:
        import_drafter(folder, tmp_path / "ours", given=STATED)
    assert str(refusal.value).startswith(str(folder))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ours").exists()


JUNK = (None, "", "x", -1, 0, 1.5, True, [], {}, [[]], [1, "a"], {"a": 1}, 10**30)


def _places(raw: dict[str, Any]) -> list[tuple[str, ...]]:
    inner = [(key, name) for key, value in raw.items() if isinstance(value, dict) for name in value]
    return [(key,) for key in raw] + inner


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_any_key_escapes_as_anything_but_a_named_error(name: str) -> None:
    """Every key of every layout, one at a time, with every kind of junk: read, or ValueError."""
    layout = next(found for found in FORMATS if found.name == name)
    config = MLA if name == "k3-mla" else VARIANTS["yarn"]
    raw = layout.write(config, torch.float32)
    shapes = {key: tuple(t.shape) for key, t in drafter(config).state_dict().items()}
    assert layout.read(Source(raw, shapes), Given()).config == config
    refused = 0
    for place in _places(raw):
        for junk in JUNK:
            changed = json.loads(json.dumps(raw))
            holder = changed if len(place) == 1 else changed[place[0]]
            holder[place[-1]] = junk
            try:
                layout.read(Source(changed, shapes), Given())
            except ValueError:  # and nothing else: a KeyError or TypeError would be ours
                refused += 1
    assert refused > 200


def test_tap_kind_and_slot_layout_are_asked_for_and_a_wrong_word_is_refused(tmp_path: Path) -> None:
    folder, out = write_published(tmp_path / "theirs", published()), tmp_path / "ours"
    with pytest.raises(UserError, match=r"sample_from_anchor: not in .*--slot-layout anchor\|mask"):
        import_drafter(folder, out, given=Given(tap_kind="residual"))
    with pytest.raises(UserError, match=r"target_tap_kind: not in .*--tap-kind residual\|attn_res"):
        import_drafter(folder, out, given=Given(slot_layout="anchor"))
    with pytest.raises(UserError, match="'mask': the anchor does not predict"):
        import_drafter(folder, out, given=Given(tap_kind="residual", slot_layout="mask"))
    for given, message in (
        (replace(STATED, mask_token_id=3), "--mask-token-id 3: mask_token_id: the file says 49"),
        (replace(STATED, block_size=8), "--block-size 8: block_size: the file says 4"),
        (replace(STATED, num_target_layers=7), "--target-layers 7: .*the file says 6"),
    ):
        with pytest.raises(UserError, match=message):
            import_drafter(folder, out, given=given)
    done = import_drafter(folder, out, given=STATED)
    assert done.decided == (
        "sample_from_anchor: anchor, as stated by --slot-layout",
        "target_tap_kind: attn_res_mixture, as stated by --tap-kind",
    )
    # what is once written is known: another word for it is refused
    export_drafter(out, tmp_path / "again", layout="sglang")
    with pytest.raises(UserError, match=r"--tap-kind raw_prefix: .*the file says attn_res_mixture"):
        import_drafter(tmp_path / "again", tmp_path / "b", given=Given(tap_kind="raw_prefix"))


def test_a_target_at_hand_settles_what_it_can_and_refuses_a_stranger(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "theirs", published(num_target_layers=None))
    plain = Given(slot_layout="anchor", target=facts(tap_kinds=("residual",)))
    done = import_drafter(folder, tmp_path / "a", given=plain)
    assert (done.config.target_tap_kind, done.config.num_target_layers) == ("residual", 6)
    for change, message in (
        ({"hidden_size": 32}, "hidden_size is 16, the target nano has 32"),
        ({"vocab_sizes": (64,)}, "vocab_size is 50, the target nano has 64"),
        ({"tap_kinds": ("residual",)}, "'attn_res_mixture' is not offered by the target nano"),
    ):
        given = replace(STATED, target=facts(**change))
        with pytest.raises(UserError, match=message):
            import_drafter(folder, tmp_path / "b", given=given)
    written = write_published(tmp_path / "deep", published())
    with pytest.raises(UserError, match="num_target_layers is 6, the target nano has 9"):
        import_drafter(written, tmp_path / "b", given=replace(STATED, target=facts(num_layers=9)))


def test_copies_of_the_target_are_compared_and_left_out(tmp_path: Path) -> None:
    target = tables()
    extra = {"embed_tokens.weight": target.embed.bfloat16(), "lm_head.weight": target.lm_head}
    folder = write_published(tmp_path / "theirs", published(), **extra)
    done = import_drafter(folder, tmp_path / "a", given=STATED, target_copies=target)
    assert done.compared
    assert done.dropped == ("embed_tokens.weight", "lm_head.weight")
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored(tmp_path / "a").keys()
    assert not import_drafter(folder, tmp_path / "b", given=STATED).compared
    with pytest.raises(UserError, match=r"lm_head.weight differs from the target's by up to"):
        other = TargetCopies(target.embed, target.lm_head + 1e-3)
        import_drafter(folder, tmp_path / "c", given=STATED, target_copies=other)
    short = TargetCopies(target.embed, target.lm_head[:48])  # a padded table: rows nobody reads
    assert import_drafter(folder, tmp_path / "d", given=STATED, target_copies=short).compared


def test_a_head_tied_to_its_embedding_is_the_targets_or_refused(tmp_path: Path) -> None:
    target = tables()
    raw = published(tie_word_embeddings=True)
    folder = write_published(tmp_path / "t", raw, **{"embed_tokens.weight": target.embed})
    tied = TargetCopies(target.embed, target.embed)
    import_drafter(folder, tmp_path / "a", given=STATED, target_copies=tied)
    with pytest.raises(UserError, match="a head of its own"):
        import_drafter(folder, tmp_path / "b", given=STATED, target_copies=target)
    # a tied target is written twice, since readers want both names
    export_drafter(tmp_path / "a", tmp_path / "d", layout="deepspec", target_copies=tied)
    out = stored(tmp_path / "d")
    assert torch.equal(out["embed_tokens.weight"], out["lm_head.weight"])


def test_unknown_keys_are_kept_told_and_put_back(tmp_path: Path) -> None:
    raw = published(
        num_anchors=512, dspark_draft_topk=16, dflash_config=nest(training={"steps": 3}), novel=[1]
    )
    folder = write_published(tmp_path / "theirs", raw)
    done = import_drafter(folder, tmp_path / "a", given=STATED)
    assert set(done.unknown) == {"dspark_draft_topk", "novel", "dflash_config.training"}
    export_drafter(tmp_path / "a", tmp_path / "back", layout="vllm")
    back = raw_config(tmp_path / "back")
    for key in ("num_anchors", "dspark_draft_topk", "novel"):
        assert back[key] == raw[key]
    assert back["dflash_config"]["training"] == {"steps": 3}
    other = export_drafter(tmp_path / "a", tmp_path / "other", layout="sglang")
    assert set(other.left_out) == set(done.unknown)
    assert "novel" not in raw_config(tmp_path / "other")


FOREIGN_NAMES: dict[str, Callable[[str], str]] = {
    "prefix": lambda name: f"model.{name}",
    "ModelOpt": lambda name: name.replace("markov_head.", "").replace(
        "confidence_head.proj", "confidence_proj"
    ),
    "early SpecForge": lambda name: name.replace("markov_head.", "logit_head."),
}


@pytest.mark.parametrize("case", FOREIGN_NAMES)
def test_tensors_are_known_under_their_other_names(tmp_path: Path, case: str) -> None:
    folder = write_published(
        tmp_path / "theirs",
        published(),
        FOREIGN_NAMES[case],
        **{"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    done = import_drafter(folder, tmp_path / "ours", given=STATED)
    assert done.dropped == ("layers.0.self_attn.rotary_emb.inv_freq",)
    ours = stored(tmp_path / "ours")
    for name, tensor in drafter(PLAIN).state_dict().items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"layers.0.self_attn.attention_sink_bias": torch.ones(4)}, "attention sinks"),
        ({"fc_norm.0.weight": torch.ones(16)}, "a norm for each tap"),
        ({"fc.weight_scale": torch.ones(1)}, "quantised drafters are not read"),
        ({"model.fc.weight": torch.ones(16, 32)}, "model.fc.weight are both fc.weight|both fc"),
        ({"strange.weight": torch.ones(1)}, "unexpected tensors: strange.weight"),
        ({"norm.weight": torch.ones(15)}, r"norm.weight has shape \(15,\), expected \(16,\)"),
        ({"norm.weight": torch.ones(16, dtype=torch.int8)}, "norm.weight is stored as torch.int8"),
    ],
)
def test_tensors_that_a_drafter_of_ours_has_not_are_refused(
    tmp_path: Path, extra: dict[str, torch.Tensor], message: str
) -> None:
    folder = write_published(tmp_path / "theirs", published(), **extra)
    with pytest.raises(UserError, match=message):
        import_drafter(folder, tmp_path / "ours", given=STATED)


def test_a_drafter_without_rows_for_the_targets_padding_is_the_whole_vocabulary(
    tmp_path: Path,
) -> None:
    """50 rows of a padded table of which 48 are tokens, and 48 draft ids without a map."""
    raw = published(draft_vocab_size=48)
    folder = write_published(tmp_path / "theirs", raw, config=replace(PLAIN, draft_vocab_size=48))
    tensors = stored(folder)
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="draft_vocab_size 48 of 50 but no d2t"):
        import_drafter(folder, tmp_path / "x", given=STATED)
    import_drafter(folder, tmp_path / "ours", given=replace(STATED, target=facts()))
    ids = load_drafter(tmp_path / "ours").draft_ids
    assert ids is not None
    assert torch.equal(ids, torch.arange(48))
