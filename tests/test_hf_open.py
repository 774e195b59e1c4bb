"""Folders in Hugging Face's layout: opened whole or refused with the reason, checked, distilled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.distill.fresh import new_drafter
from dspark.errors import UserError
from dspark.runtime import hf_cache, hf_check, hf_mask, hf_model, hf_open, hf_target
from dspark.runtime.hf_check import failure
from dspark.runtime.hf_open import hf_target as adapt
from dspark.runtime.hf_replay import ReplayTarget
from dspark.runtime.hf_states import ReplayCache
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.loading import load_target
from tests import chat_tokenizers
from tests.hf_tiny import tiny_hf
from tests.test_distill_run import distill, settings

PADDING = 8
"""Rows of the tables past the tokenizer's last id."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a ChatML tokenizer; the tables are padded."""
    path = tmp_path_factory.mktemp("targets") / "llama"
    tokenizer = chat_tokenizers.smollm2()
    model = tiny_hf("llama")
    model.resize_token_embeddings(len(tokenizer) + PADDING)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_opens_with_its_end_tokens_and_without_padding(folder: Path) -> None:
    loaded = load_target(folder)
    target, tokens = loaded.target, len(loaded.tokenizer)
    assert isinstance(target, RowTarget)
    assert (target.vocab_size, target.table_size) == (tokens, tokens + PADDING)
    assert set(target.end_token_ids) == {2, 5, loaded.tokenizer.eos_token_id}
    assert target.max_positions == 256
    out = target.forward(torch.tensor([[7, 8, 9]]), target.new_cache(1, 4), commit=True)
    assert target.logits(out.hidden).shape == (1, 3, tokens)
    assert target.embed(torch.tensor(tokens + 1)).shape == (32,)
    assert target.head_weight().shape == (tokens + PADDING, 32)


def test_weights_in_several_files_and_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    whole = load_target(folder).target
    whole.parts.model.save_pretrained(tmp_path, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = load_target(tmp_path).target
    torch.testing.assert_close(again.head_weight(), whole.head_weight(), atol=0, rtol=0)
    half = load_target(tmp_path, dtype=torch.bfloat16).target
    assert half.dtype == torch.bfloat16
    out = half.forward(torch.tensor([[7, 8]]), half.new_cache(1, 2), commit=True)
    assert half.logits(out.hidden).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "m.Mine"}}, "own code, which is not run"),
        ({"model_type": "vit"}, "no causal LM of the installed transformers"),
        ({"model_type": None}, "model_type is missing"),
        ({"vision_config": {"hidden_size": 8}}, "wraps a text model"),
    ],
)
def test_what_is_no_text_model_is_refused(copy: Path, changes: dict[str, Any], reason: str) -> None:
    _config(copy, **changes)
    with pytest.raises(UserError, match=reason):
        load_target(copy)


def test_a_missing_tensor_is_named_and_never_random(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.other.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing.*up_proj.*unused.*other"):
        load_target(copy)


def test_pickles_damage_and_absence_are_one_line(copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read") as caught:
        load_target(copy)
    assert "\n" not in str(caught.value)
    weights.unlink()
    with pytest.raises(UserError, match="weights are missing"):
        load_target(copy)
    (copy / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="pickles are not opened"):
        load_target(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        load_target(copy)
    with pytest.raises(UserError, match="nano, smollm2 or a folder"):
        load_target("no-such-target")


def test_models_that_fit_no_adapter_are_refused_with_every_reason() -> None:
    from transformers import BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertLMHeadModel(BertConfig(vocab_size=60, intermediate_size=32, **shape))
    with pytest.raises(UserError, match="cannot be verified against"):
        adapt(bert, name="bert", end_token_ids=())
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    )
    with pytest.raises(UserError, match="encoder-decoder"):
        adapt(t5, name="t5", end_token_ids=())


def _no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model.HeadRule, "of", classmethod(lambda cls, config: cls()))


def _no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_target, "_ring", lambda window, length: hf_mask.Ring(window or None))
    real = hf_mask.visible
    monkeypatch.setattr(
        hf_cache, "visible", lambda a, b, ring, w: real(a, b, hf_mask.Ring(None, ring.capacity), w)
    )


def _shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_cache.RowCache.begin

    def begin(self: Any, valid: Any, parents: Any) -> Any:
        block = real(self, valid, parents)
        late = block.positions + (block.positions > 6)
        return hf_cache.Pass(late, block.masks)

    monkeypatch.setattr(hf_cache.RowCache, "begin", begin)


def _keeps_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_cache.RowCache._advance
    monkeypatch.setattr(
        hf_cache.RowCache, "_advance", lambda self, counts: real(self, [n + 1 for n in counts])
    )


def _blind_to_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_mask.new_rows
    monkeypatch.setattr(hf_cache, "new_rows", lambda valid, parents: real(valid, None))


@pytest.mark.parametrize(
    ("name", "defect"),
    [
        ("granite", _no_rule),
        ("cohere2", _no_rule),
        ("gemma2", _no_rule),
        ("mistral-window", _no_window),
        ("gemma3", _no_window),
        ("llama", _shifted),
        ("llama", _keeps_rejected),
        ("llama", _blind_to_siblings),
    ],
)
def test_the_check_sees_planted_defects(
    name: str, defect: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failure(RowTarget(tiny_hf(name), name, ())) is None
    defect(monkeypatch)
    assert failure(RowTarget(tiny_hf(name), name, ())) is not None


@pytest.mark.parametrize("name", ["kimi-linear", "qwen3-next", "mamba2", "lfm2"])
def test_the_check_sees_a_state_that_is_not_taken_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cropping the cache of a hybrid model does: lengths go back, recurrent states do not."""
    assert failure(ReplayTarget(tiny_hf(name), name, ())) is None

    def keep(self: Any, request: Any, count: int) -> None:
        request.length = request.before.length + count
        request.pending = request.before = None

    monkeypatch.setattr(ReplayCache, "_keep", keep)
    assert "continuation" in str(failure(ReplayTarget(tiny_hf(name), name, ())))


def test_a_precision_that_rounds_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    target = adapt(tiny_hf("llama").bfloat16(), name="llama", end_token_ids=())
    assert isinstance(target, RowTarget)
    monkeypatch.setattr(hf_check, "LOOSE", 1e-6)
    assert "other logits" in str(failure(target))


def test_a_folder_is_distilled_and_drafts(folder: Path, tmp_path: Path) -> None:
    """The whole way: answers, taps, training, calibration, decoding, on an ordinary model."""
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"3 + {n} = 7."}) + "\n" for n in range(12)))
    config = settings(folder, prompts, tmp_path / "run", train__epochs=1, drafter__tap_ids=[0, 1])
    text = distill(config)
    assert "drafter written" in text
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["target_tap_kind"] == "residual"
    assert written["mask_token_id"] == len(chat_tokenizers.smollm2())  # the first padding row


def full_vocabulary(target: Any, tokens: int) -> Any:
    """As much of a target as a fresh drafter asks for, its tables not padded."""
    names = ("name", "hidden_size", "num_layers", "tap_kinds", "max_positions")
    kept = {name: getattr(target, name) for name in names}
    return SimpleNamespace(**kept, table_size=tokens, vocab_size=tokens, end_token_ids=(2,))


def test_a_full_vocabulary_fills_its_blocks_with_a_special_token_that_chats_leave_alone(
    folder: Path, tmp_path: Path
) -> None:
    loaded = load_target(folder)
    tokenizer = loaded.tokenizer
    tokenizer.add_special_tokens({"extra_special_tokens": ["<spare_a>", "<spare_b>"]})
    tokenizer.chat_template += "{# never <spare_b> #}"
    full = full_vocabulary(loaded.target, len(tokenizer))
    config = settings(folder, tmp_path, tmp_path, drafter__tap_ids=[0, 1])
    chosen = new_drafter(config, full, tokenizer).config.mask_token_id
    assert tokenizer.convert_ids_to_tokens(chosen) == "<spare_a>"


@pytest.mark.parametrize("apart", [True, False])
def test_a_vocabulary_without_a_token_to_spare_names_the_padding_token(
    folder: Path, tmp_path: Path, apart: bool
) -> None:
    """Unless padding is what ends a text: then it is in every row, and no advice."""
    loaded = load_target(folder)
    tokenizer = loaded.tokenizer
    tokenizer.add_special_tokens({"pad_token": "<pad>" if apart else tokenizer.eos_token})
    tokenizer.chat_template += "".join(str(t) for t in tokenizer.added_tokens_decoder.values())
    full = full_vocabulary(loaded.target, len(tokenizer))
    config = settings(folder, tmp_path, tmp_path, drafter__tap_ids=[0, 1])
    with pytest.raises(UserError, match="no special token to spare") as refused:
        new_drafter(config, full, tokenizer)
    advice = f"in drafter.mask_token_id, as its padding token, {tokenizer.pad_token_id}"
    assert (advice in str(refused.value)) == apart


def test_opening_a_k3_target_leaves_the_other_adapters_alone() -> None:
    """They import what a K3 target does not need."""
    code = (
        "import sys; import dspark; from dspark.runtime.loading import load_target; "
        "load_target('nano'); assert 'dspark.runtime.hf_open' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hf_open is not None
