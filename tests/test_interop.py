"""Every layout both ways: bit-exact, or refused in a line where it cannot hold a drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.draft.checkpoint import TargetCopies, load_drafter, save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.folder import CARRIED_FILES
from dspark.errors import UserError
from dspark.interop import exporting, specforge
from dspark.interop.exporting import export_drafter
from dspark.interop.importing import import_drafter
from tests.interop_drafters import (
    MLA,
    NAMES,
    PLAIN,
    STATED,
    VARIANTS,
    drafter,
    published,
    raw_config,
    same_tensors,
    stored,
    tables,
    write_published,
)

# What each layout holds. Everything else is refused, with a reason in the message.
ATTENTION = {"plain", "yarn", "mscale", "no record"}
HOLDS: dict[str, set[str]] = {
    "deepspec": ATTENTION | {"gated", "rnn"},
    "sglang": ATTENTION | {"gated", "rnn", "window", "mixed"},
    "modelopt": ATTENTION | {"gated", "rnn", "window", "mixed", "causal", "all causal"},
    "vllm": ATTENTION | {"window", "mixed", "causal", "causal windows", "all causal", "reduced"},
    "speculators": ATTENTION
    | {"gated", "rnn", "window", "mixed", "causal", "causal windows", "reduced"},
    "k3-mla": {"mla"},
}
REASONS = {
    "kda": "served by no engine",
    "mla": "k3-mla",
    "reduced": "draft_vocab_size 20 of 50|latent attention",
    "gated": "markov_head_type 'gated'|latent attention",
    "rnn": "markov_head_type 'rnn'|latent attention",
    "situ": "hidden_act|latent attention",
    "nope": "k3-mla|K3's own",
    "window": "sliding_window|latent attention",
    "mixed": "sliding_window|latent attention",
    "causal": "block_causal|sliding_window|latent attention",
    "causal windows": "block_causal|sliding_window|latent attention",
    "all causal": "block_causal|latent attention",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_is_bit_exact_or_refused_with_a_reason(
    tmp_path: Path, name: str, variant: str
) -> None:
    config = VARIANTS[variant]
    save_drafter(tmp_path / "ours", drafter(config), dtype=torch.bfloat16)
    target = tables()
    if variant not in HOLDS[name]:
        reason = REASONS.get(variant, "latent attention")
        with pytest.raises(UserError, match=f"--format {name}: .*({reason})") as refusal:
            export_drafter(tmp_path / "ours", tmp_path / "out", layout=name, target_copies=target)
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / "out").exists()
        return
    export_drafter(tmp_path / "ours", tmp_path / "out", layout=name, target_copies=target)
    done = import_drafter(tmp_path / "out", tmp_path / "back", target_copies=target)
    assert done.format.name == name
    assert done.decided == done.unknown == ()
    same_tensors(tmp_path / "ours", tmp_path / "back")
    assert raw_config(tmp_path / "ours") == raw_config(tmp_path / "back")
    # and once more from the outside: what came in goes out the same
    export_drafter(tmp_path / "back", tmp_path / "again", layout=name, target_copies=target)
    same_tensors(tmp_path / "out", tmp_path / "again")
    assert raw_config(tmp_path / "out") == raw_config(tmp_path / "again")


def test_a_reduced_vocabulary_carries_both_maps_and_its_rows_of_the_head(tmp_path: Path) -> None:
    config, target = VARIANTS["reduced"], tables()
    made = drafter(config)
    save_drafter(tmp_path / "ours", made)
    for name in ("vllm", "speculators"):
        with pytest.raises(
            UserError, match=f"--format {name}: stores .*lm_head.weight along; give"
        ):
            export_drafter(tmp_path / "ours", tmp_path / "x", layout=name)
        export_drafter(tmp_path / "ours", tmp_path / name, layout=name, target_copies=target)
        out = stored(tmp_path / name)
        ids = torch.arange(20) + out["d2t"]  # offsets, as both engines add them
        assert torch.equal(ids, made.draft_ids)
        assert torch.equal(out["t2d"].nonzero().squeeze(1), ids)
        assert torch.equal(out["lm_head.weight"], target.lm_head[ids])
        assert raw_config(tmp_path / name)["draft_vocab_size"] == 20
        # another head than the target's: refused, the swapped map of equal size as well
        wrong = TargetCopies(target.embed, target.lm_head.flip(0))
        with pytest.raises(UserError, match=r"lm_head.weight differs"):
            import_drafter(tmp_path / name, tmp_path / "y", target_copies=wrong)
        out["d2t"] = out["d2t"] + torch.arange(20)
        save_file(out, tmp_path / name / "model.safetensors")
        with pytest.raises(UserError, match="d2t: "):
            import_drafter(tmp_path / name, tmp_path / "y", target_copies=target)


def test_a_layout_that_stores_the_targets_tables_asks_for_the_target(tmp_path: Path) -> None:
    save_drafter(tmp_path / "ours", drafter(PLAIN))
    with pytest.raises(
        UserError, match=r"embed_tokens.weight and lm_head.weight along; give --targ"
    ):
        export_drafter(tmp_path / "ours", tmp_path / "x", layout="deepspec")
    small = TargetCopies(torch.zeros(50, 8), torch.zeros(50, 8))
    with pytest.raises(UserError, match=r"embed_tokens.weight of the target is \(50, 8\)"):
        export_drafter(tmp_path / "ours", tmp_path / "x", layout="deepspec", target_copies=small)


def test_folders_that_exist_are_left_alone_and_missing_ones_named(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "theirs", published())
    (tmp_path / "full").mkdir()
    with pytest.raises(UserError, match="full: exists already"):
        import_drafter(folder, tmp_path / "full", given=STATED)
    with pytest.raises(UserError, match="nowhere: no such folder"):
        import_drafter(tmp_path / "nowhere", tmp_path / "x")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        export_drafter(tmp_path / "nowhere", tmp_path / "x", layout="vllm")
    with pytest.raises(UserError, match=r"--format gguf: expected one of deepspec\|speculators"):
        export_drafter(folder, tmp_path / "x", layout="gguf")
    with pytest.raises(UserError, match=r"--format k3-mla: architectures .* of --format vllm"):
        import_drafter(folder, tmp_path / "x", layout="k3-mla", given=STATED)


def test_what_is_written_next_to_the_weights_comes_along(tmp_path: Path) -> None:
    from dspark.draft.calibration import Calibration

    made = drafter(PLAIN)
    made.calibration = Calibration("held out", (0.5,) * 4, (0.25,) * 4, 10, ())
    save_drafter(tmp_path / "ours", made)
    export_drafter(tmp_path / "ours", tmp_path / "out", layout="vllm")
    import_drafter(tmp_path / "out", tmp_path / "back")
    assert load_drafter(tmp_path / "back").calibration == made.calibration
    for name in CARRIED_FILES:
        if (tmp_path / "ours" / name).exists():
            assert (tmp_path / "back" / name).read_bytes() == (
                tmp_path / "ours" / name
            ).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_export_says_what_no_layout_asks_for(tmp_path: Path, name: str) -> None:
    """Slot layout, tap kind and origin of the ids: an engine's own default decides otherwise."""
    config = MLA if name == "k3-mla" else PLAIN
    save_drafter(tmp_path / "ours", drafter(config))
    export_drafter(tmp_path / "ours", tmp_path / "out", layout=name, target_copies=tables())
    raw = raw_config(tmp_path / "out")
    assert raw["sample_from_anchor"] is True
    assert raw["target_tap_kind"] == "attn_res_mixture"
    nested = raw.get("dflash_config", {})
    assert nested.get("sample_from_anchor", True) is True
    if name == "speculators":  # its ids index hidden states, of which 0 is the embedding
        assert raw["aux_hidden_state_layer_ids"] == [2, 4]
        assert "target_layer_ids" not in raw
        assert raw["layer_id_origin"] == "hidden_states_index"
        proposals = raw["speculators_config"]["proposal_methods"][0]
        assert proposals["speculative_tokens"] == raw["block_size"] == 4
    else:
        assert nested.get("target_layer_ids", raw["target_layer_ids"]) == [1, 3]
        assert raw["layer_id_origin"] == "completed_layer_0_based"
    if name == "vllm":
        assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4]  # the input of the next layer
        assert nested["causal"] is False
        assert raw["pard_token"] == nested["mask_token_id"] == 49
    if name == "modelopt":
        assert nested["shift_label"] is True
        held = set(stored(tmp_path / "out"))
        assert {"markov_w1.weight", "markov_w2.weight", "confidence_proj.weight"} <= held
    if name == "k3-mla":
        assert (raw["num_target_layers"], raw["target_num_hidden_layers"]) == (2, 6)
        assert {"context_proj.weight", "final_norm.weight"} <= set(stored(tmp_path / "out"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_kept_even_if_the_heads_have_another(tmp_path: Path, dtype: torch.dtype) -> None:
    save_drafter(tmp_path / "ours", drafter(PLAIN), dtype=dtype)
    tensors = stored(tmp_path / "ours")
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"].float()
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    export_drafter(tmp_path / "ours", tmp_path / "out", layout="vllm")
    import_drafter(tmp_path / "out", tmp_path / "back")
    same_tensors(tmp_path / "ours", tmp_path / "back")
    assert raw_config(tmp_path / "back")["dtype"] == str(dtype).removeprefix("torch.")


def test_a_writer_that_says_something_else_is_caught_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lock: what was written is read back and has to be the same drafter."""
    save_drafter(tmp_path / "ours", drafter(PLAIN))
    written = specforge.FORMAT.write

    def wrong(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
        return {**written(config, dtype), "rms_norm_eps": 0.005}

    monkeypatch.setattr(exporting, "format_named", lambda _: replace(specforge.FORMAT, write=wrong))
    with pytest.raises(UserError, match=r"rms_norm_eps: .* would become 0\.005; this"):
        export_drafter(tmp_path / "ours", tmp_path / "x", layout="sglang")
    assert not (tmp_path / "x").exists()
