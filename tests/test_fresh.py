"""The drafter a run starts with: settings become sizes, and every backbone starts trainable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.distill.config import DistillConfig, load_config
from dspark.distill.fresh import new_drafter
from dspark.draft import DSparkDrafter
from dspark.draft.shapes import MLAShape, Yarn
from dspark.errors import UserError
from dspark.runtime.loading import load_target
from tests.tiny_pair import write_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair")).target


def fresh(folder: Path, **changes: object) -> DSparkDrafter:
    """A drafter of the tiny target; keys of the drafter section, or `data_...`."""
    keys = {
        f"data.{name[5:]}" if name.startswith("data_") else f"drafter.{name}": value
        for name, value in changes.items()
    }
    config: DistillConfig = load_config(None, {"drafter.mask_token_id": 1, **keys})
    loaded = load_target(folder)
    return new_drafter(config, loaded.target, loaded.tokenizer)


def test_mla_has_the_proportions_of_the_published_k3_drafter(folder: Path) -> None:
    config = fresh(folder, backbone="mla", head_dim=32, mla_q_rank=24, mla_kv_rank=20).config
    assert config.mla == MLAShape(24, 20, 32, 16, 32)
    assert config.num_key_value_heads == config.num_attention_heads


@pytest.mark.parametrize("backbone", ["attention", "mla", "kda"])
def test_a_drafter_claims_its_targets_length(folder: Path, backbone: str) -> None:
    """Engines size tables by it: 4096 would end drafting early in longer texts."""
    target = load_target(folder).target
    assert target.max_positions == target.model.config.max_position_embeddings > 4096
    config = fresh(folder, backbone=backbone).config
    assert config.max_position_embeddings == target.max_positions
    if backbone != "kda":
        far = fresh(folder, backbone=backbone, yarn_factor=1e30).config
        assert far.max_position_embeddings == target.max_positions


def test_yarn_stretches_the_length_that_rows_are_cut_to(folder: Path) -> None:
    plain = fresh(folder).config
    assert plain.yarn is None
    one = fresh(folder, yarn_factor=8.0, data_max_length=200).config
    assert one.yarn == Yarn(8.0, 200)
    assert one.max_position_embeddings == 1600
    other = fresh(folder, yarn_factor=8.0, data_max_length=200, backbone="mla").config
    assert other.yarn == Yarn(8.0, 200, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize("backbone", ["attention", "mla"])
def test_a_window_makes_every_layer_slide(folder: Path, backbone: str) -> None:
    drafter = fresh(folder, sliding_window=16, backbone=backbone)
    assert [drafter.config.window(layer) for layer in range(2)] == [16, 16]
    assert not any(drafter.config.causal(layer) for layer in range(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "kda", "sliding_window": 8}, "sliding_window: backbone kda has none"),
        ({"backbone": "kda", "yarn_factor": 8.0}, "yarn_factor: backbone kda has none"),
        ({"yarn_factor": 1.0}, r"yarn\.factor: 1\.0 given, a number above 1"),
        ({"yarn_factor": 0.5}, r"drafter\.yarn_factor is 0\.5: expected at least 1"),
        ({"backbone": "mla", "head_dim": 6}, r"mla\.qk_rope_head_dim: 3 is odd"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fresh(folder, **changes)


@pytest.mark.parametrize("backbone", ["attention", "mla", "kda"])
def test_every_backbone_starts_with_a_signal_and_learns_everywhere(
    folder: Path, backbone: str
) -> None:
    """Hidden states keep the size of their input, differ between slots, and feel every weight."""
    drafter = fresh(folder, backbone=backbone)
    width, slots = drafter.config.hidden_size, drafter.config.block_size
    taps = torch.randn(2, 30, len(drafter.config.target_layer_ids) * width)
    embeds = torch.randn(2, 3, slots, width)
    anchors = torch.tensor([[4, 11, 25], [7, 19, 29]])
    valid = torch.ones(2, 30, dtype=torch.bool)
    context = drafter.features(taps)
    raw = drafter.backbone.train(embeds, context, valid, anchors)
    assert 0.7 < raw.std() / embeds.std() < 2.0
    hidden = drafter.train_hidden(taps, valid, embeds, anchors, anchors >= 0)
    torch.randn_like(hidden).mul(hidden).sum().backward()
    for name, parameter in drafter.layers.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
