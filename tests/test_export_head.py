"""What a layout stores of a target whose logits are more than hidden states times a matrix.

    logits = cap * tanh((scale * W hidden + b) / cap)

A scale goes into the copy of W. A cap or a bias has no place in it, so such an export is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dspark import cli, console
from dspark.draft.checkpoint import save_drafter
from dspark.runtime.hf_open import hf_target
from dspark.runtime.loading import load_target
from tests import chat_tokenizers
from tests.hf_tiny import tiny_hf
from tests.tiny_drafters import FULL, make_drafter


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("llama", ""),
        ("granite", ""),
        ("cohere", ""),
        ("gemma2", "a soft cap at 0.5"),
        ("phi", "a bias"),
    ],
)
def test_the_matrix_gives_the_logits_unless_something_is_said_to_follow(
    name: str, rest: str
) -> None:
    model = tiny_hf(name)
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    target = hf_target(model, name=name, end_token_ids=())
    hidden = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(1))
    ours = F.linear(hidden, target.head_weight())
    assert target.head_rest == rest
    agree = torch.allclose(ours, target.logits(hidden), atol=1e-6, rtol=1e-5)
    assert agree == (rest == "")


def _folders(name: str, path: Path) -> tuple[Path, Path]:
    """A target folder of that architecture and a drafter of all ids, or of a few, for it."""
    tokenizer, model = chat_tokenizers.smollm2(), tiny_hf(name)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    config = replace(
        FULL,
        hidden_size=32,
        num_target_layers=4,
        target_layer_ids=(0, 1, 2),
        vocab_size=len(tokenizer),
    )
    save_drafter(path / "draft", make_drafter(config))
    return path / "target", path / "draft"


def _export(target: Path, draft: Path, layout: str, out: Path) -> int:
    words = ["export", "--draft", draft, "--format", layout, "--target", target, "--out", out]
    return console.run(cli.app, [str(word) for word in words])


def test_a_scale_is_part_of_the_stored_head(tmp_path: Path) -> None:
    folder, draft = _folders("granite", tmp_path)
    assert _export(folder, draft, "deepspec", tmp_path / "out") == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    target = load_target(folder).target
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    logits = F.linear(hidden, stored["lm_head.weight"])
    torch.testing.assert_close(logits, target.logits(hidden), atol=1e-6, rtol=1e-5)
    table = target.embed(torch.arange(target.table_size))  # its factor is in there as well
    torch.testing.assert_close(stored["embed_tokens.weight"], table, atol=0, rtol=0)
    back = ["import", tmp_path / "out", "--target", folder, "--out", tmp_path / "back"]
    assert console.run(cli.app, [str(word) for word in back]) == 0


def test_a_cap_cannot_be_stored_and_the_export_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, draft = _folders("gemma2", tmp_path)
    capsys.readouterr()  # the bar of save_pretrained
    assert _export(folder, draft, "deepspec", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the target puts a soft cap at 0.5 behind that matrix" in error
    assert not (tmp_path / "out").exists()
    assert _export(folder, draft, "sglang", tmp_path / "out") == 0  # stores no head
