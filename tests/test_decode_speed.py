"""The commands that time recorded frames, tried out on a CPU: what they count must be right."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dspark.draft.checkpoint import save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.shapes import KDAShape
from dspark.k3.cost import pass_bytes
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.k3_target import K3Target
from dspark_eval import decode_speed, frame_speed
from dspark_eval.device_profile import _union
from dspark_eval.random_k3 import SHAPES, TINY, random_model
from dspark_eval.reporting import run_report
from dspark_eval.same_weights import peer_model
from tests.k3_tiny import TINY as K3_TINY
from tests.k3_tiny import tiny_model
from tests.tiny_drafters import make_drafter
from tests.tolerance import assert_close


def test_bytes_of_a_token_are_those_of_the_cost_model() -> None:
    """Counted from the packed tensors here, from the configuration there."""
    target = K3Target(random_model(TINY, torch.device("cpu"), torch.float32), "tiny", ())
    decoder = GraphDecoder(target, max_length=30)
    found = decode_speed.token_bytes(decoder, TINY, 20)
    expected = pass_bytes(TINY, 1, 20, torch.float32)
    assert found.shared == pytest.approx(expected.shared, rel=0.01)
    assert found.experts == expected.experts
    assert found.latents == expected.latents
    assert found.state == pytest.approx(expected.state, rel=0.01)


def test_the_published_shape_with_32_experts() -> None:
    """The numbers that the floor of number 1 stands on."""
    found = pass_bytes(SHAPES["kimi-linear-32"], 1, 0, torch.bfloat16)
    assert found.total == pytest.approx(6.28e9, rel=0.01)


@pytest.mark.skipif(
    find_spec("fla") is not None and not torch.cuda.is_available(),
    reason="transformers would run fla's kernels, which need a GPU",
)
def test_transformers_says_the_same_on_the_same_weights() -> None:
    model = random_model(TINY, torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, TINY.vocab_size, (1, 12))
    assert_close(peer_model(model)(tokens).logits, model.lm_head(model(tokens)[0]))


def test_a_peer_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="neither Attention Residuals"):
        peer_model(tiny_model(K3_TINY))


def test_decode_speed_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--tokens", "6", "--frames", "2"]
    assert decode_speed.main([*arguments, "--prompt", "9", "--check", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["logits_errors"]["static"] < 1e-5
    assert found["floor_tokens_per_s"] > found["generate_tokens_per_s"] > 0
    assert found["ops"]["settle"] == "torch"
    assert (found["schema_version"], found["n_prompts"], found["seed"]) == (1, 1, 0)
    made = found["generate"]
    run_report([out], tmp_path / "page")
    page = (tmp_path / "page" / "report.md").read_text()
    assert f"| generate | {found['generate_tokens_per_s']:.1f} |" in page
    assert found["generate_tokens_per_s"] == pytest.approx(made["tokens"] / made["seconds"])


def test_frame_speed_runs(tmp_path: Path, nano_drafter: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--draft", str(nano_drafter), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--n-prompts", "1", "--new", "8", "--max-length", "300", "--draft-length", "3"]
    assert frame_speed.main([*arguments, "--suite", "nano-problems", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    (result,) = found["suites"].values()
    assert result["texts_equal"] == result["n_prompts"] == 1
    assert result["plain"]["tokens"] == 7
    assert result["experts_per_frame"]["plain"] == 2.0
    assert 2.0 < result["experts_per_frame"]["speculative"] <= 8.0
    assert set(found["tuning_tokens_per_s"]) == {"plain", "3"}
    assert result["experts_per_frame"]["n_prompts"] == 1
    assert found["schema_version"] == 1
    assert sum(result["speculative"]["by_prompt"]["tokens"]) == 7
    assert "few prompts (1)" in " ".join(found["warnings"])


@pytest.fixture
def nano_drafter(tmp_path: Path) -> Path:
    """An untrained drafter of k3-nano."""
    config = DraftConfig(
        hidden_size=192,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        vocab_size=2048,
        num_target_layers=9,
        target_layer_ids=(1, 4),
        target_tap_kind="attn_res_mixture",
        mask_token_id=0,
        block_size=4,
        markov_rank=8,
        backbone="kda",
        kda=KDAShape(gate_rank=8, order=1),
    )
    save_drafter(tmp_path / "draft", make_drafter(config))
    return tmp_path / "draft"


def test_gaps_between_launches() -> None:
    """Overlapping and nested intervals count once."""
    assert _union([(0, 4), (1, 2), (3, 6), (8, 9), (8, 8.5)]) == (7.0, 2.0)
