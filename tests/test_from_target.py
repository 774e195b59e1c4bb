"""Drafter layers copied from a target: at full size and exact order they compute what it does.

The copied layer runs as a drafter's, blocks at anchors against a state of the context, and is
compared with the target's own layer over the whole text.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.distill.chat import TrainingRow
from dspark.distill.config import load_config
from dspark.distill.contribution import channel_energy, ridge
from dspark.distill.from_target import start_from_target
from dspark.distill.observe import block_influence, observe
from dspark.draft.config import DraftConfig
from dspark.draft.from_target import (
    check_copyable,
    compose_experts,
    copy_layer,
    dense_mlp,
    low_rank,
    target_form,
    uncut_config,
)
from dspark.draft.kda import KDALayer
from dspark.draft.model import DSparkDrafter
from dspark.draft.shapes import KDAShape
from dspark.draft.start import initialise
from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.runtime.k3_target import K3Target
from dspark.taps import TapSet
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

pytest.importorskip("torch_pruning")

SLOTS = 5
RESIDUAL = replace(TINY, attn_res_block_size=None)
LOW_RANK_GATE = replace(RESIDUAL, kda_full_rank_output_gate=False)


def drafter_config(source: K3Config, **changes: object) -> DraftConfig:
    values: dict[str, object] = {
        "hidden_size": source.hidden_size,
        "num_layers": 1,
        "num_attention_heads": source.kda_num_heads,
        "num_key_value_heads": source.kda_num_heads,
        "head_dim": source.kda_head_dim,
        "intermediate_size": source.intermediate_size,
        "vocab_size": source.vocab_size,
        "num_target_layers": source.num_hidden_layers,
        "target_layer_ids": (0, 2, 3),
        "target_tap_kind": "residual" if source.attn_res_block_size is None else "attn_res_mixture",
        "mask_token_id": 3,
        "block_size": SLOTS,
        "markov_rank": 6,
        "backbone": "kda",
        "kda": KDAShape(order=SLOTS - 1, gate_rank=source.kda_head_dim),
    }
    return target_form(DraftConfig(**(values | changes)), source)  # type: ignore[arg-type]


def copied(model: K3ForCausalLM, layer: int) -> KDALayer:
    """The target's layer as a drafter's, its MLP the dense or the shared one."""
    source = model.model.decoder_layers[layer]
    mlp = dense_mlp(source.block_sparse_moe.shared_experts if source.moe else source.mlp)
    config = uncut_config(drafter_config(model.config), model.config, mlp.width)
    ours = KDALayer(config)
    copy_layer(ours, source, mlp)
    return ours.requires_grad_(False)


def texts(model: K3ForCausalLM, length: int = 23) -> Tensor:
    return model.model.embed_tokens(tiny_tokens(2, length, model.config)) * 1.7


def as_blocks(rows: Tensor, anchors: Tensor) -> Tensor:
    """[B, S, D] -> [B, A, G, D], the rows from each anchor on."""
    index = anchors[..., None] + torch.arange(SLOTS)
    return rows[torch.arange(len(rows))[:, None, None], index]


ANCHORS = torch.tensor([[0, 1, 9], [2, 17, 18]])


@pytest.mark.parametrize("config", [RESIDUAL, LOW_RANK_GATE], ids=["full gate", "low-rank gate"])
def test_a_whole_copied_layer_is_the_targets_own(config: K3Config) -> None:
    """Layer 0, whose MLP is dense: mixer, norms, MLP and residuals."""
    model = tiny_model(config)
    source, rows = model.model.decoder_layers[0], texts(model)
    wanted = rows + source.attend(rows, None, None)
    wanted = wanted + source.transform(wanted)
    context = F.rms_norm(rows, rows.shape[-1:], None, config.rms_norm_eps)
    ours = copied(model, 0)
    found = ours(as_blocks(rows, ANCHORS), context, ANCHORS)
    assert_close(found, as_blocks(wanted, ANCHORS))


def test_a_copied_mixer_deep_in_the_target_is_the_targets_own() -> None:
    model = tiny_model(RESIDUAL)
    source, rows = model.model.decoder_layers[4], texts(model)
    wanted = source.attend(rows, None, None)
    ours = copied(model, 4)
    normed = F.rms_norm(rows, rows.shape[-1:], None, RESIDUAL.rms_norm_eps)
    found = ours.self_attn(ours.input_layernorm(as_blocks(rows, ANCHORS)), normed, ANCHORS)
    assert_close(found, as_blocks(wanted, ANCHORS))


def test_a_lower_order_is_another_function() -> None:
    """The comparison above would see a wrong order."""
    model = tiny_model(RESIDUAL)
    rows = texts(model)
    ours = copied(model, 0)
    context = F.rms_norm(rows, rows.shape[-1:], None, RESIDUAL.rms_norm_eps)
    blocks = as_blocks(rows, ANCHORS)
    exact = ours(blocks, context, ANCHORS)
    ours.self_attn.shape = replace(ours.self_attn.shape, order=0)
    assert float((ours(blocks, context, ANCHORS) - exact).abs().max()) > 1e-2


def test_a_longer_convolution_is_the_same_and_a_shorter_one_its_end() -> None:
    model = tiny_model(RESIDUAL)
    source = model.model.decoder_layers[0]
    mlp = dense_mlp(source.mlp)
    for size in (6, 3):
        kda = KDAShape(order=0, gate_rank=16, conv_size=size)
        layer = KDALayer(drafter_config(RESIDUAL, kda=kda))
        copy_layer(layer, source, mlp)
        taps, theirs = layer.self_attn.k_conv1d.weight, source.self_attn.k_conv1d.weight
        rows = min(size, 4)
        assert torch.equal(taps[..., -rows:], theirs[..., -rows:])
        assert not bool(taps[..., :-rows].any())


def test_low_rank_factors_are_the_best() -> None:
    matrix = torch.randn(9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, right = low_rank(matrix, 3)
    tail = torch.linalg.svdvals(matrix)[3:].square().sum().sqrt()
    assert float(torch.linalg.matrix_norm(left @ right - matrix)) == pytest.approx(float(tail))
    left, right = low_rank(matrix, 11)
    assert (left.shape, right.shape) == ((9, 11), (11, 7))
    assert torch.allclose(left @ right, matrix)


def test_experts_that_are_always_chosen_alike_are_one_dense_mlp() -> None:
    config = replace(RESIDUAL, num_experts_per_token=6, latent_moe_norm=False)
    model = tiny_model(config)
    moe = model.model.decoder_layers[3].block_sparse_moe
    moe.gate.weight.zero_()  # every score is 1/2, so every weight scaling / E
    x = texts(model)[0]
    weights = torch.full((6,), config.routed_scaling_factor / 6)
    dense = compose_experts(moe, range(6), weights, 1.0)
    assert dense.width == 6 * 32 + 2 * 32
    assert_close(F.linear(dense.hidden(x, "situ"), dense.down), moe(x[None])[0])


# ------------------------------------------------------------------ observation


def target_and_rows(config: K3Config = TINY) -> tuple[K3Target, list[TrainingRow]]:
    target = K3Target(tiny_model(config), "tiny", (2,))
    ids = tiny_tokens(24, 21, config, seed=4).tolist()
    return target, [TrainingRow(tuple(row), (False, *[True] * 20)) for row in ids]


@pytest.mark.parametrize("config", [TINY, RESIDUAL], ids=["mixture", "residual"])
def test_observed_reads_are_the_taps_before_them(config: K3Config) -> None:
    target, rows = target_and_rows(config)
    kind = target.tap_kinds[0]
    view = observe(target, rows, [1, 4], TapSet((0, 3), kind), 60)
    assert view.tokens == 63  # three rows of 21
    taps = torch.cat(view.taps)
    for place, layer in enumerate((1, 4)):
        seen = view.layers[layer]
        assert_close(torch.cat(seen.reads), taps[:, 64 * place : 64 * (place + 1)])
        own = target.model.model.decoder_layers[layer]
        assert_close(torch.cat(seen.mixes) @ own.self_attn.o_proj.weight.t(), torch.cat(seen.mixed))
        assert_close(own.block_sparse_moe(torch.cat(seen.mlp_in)[None])[0], torch.cat(seen.mlp_out))
        assert float(seen.routed.sum()) == pytest.approx(
            63 * config.routed_scaling_factor, rel=1e-5
        )


def test_block_influence_is_the_turn_between_two_reads() -> None:
    target, rows = target_and_rows()
    found = block_influence(target, rows, 60)
    layers = tuple(range(TINY.num_hidden_layers))
    total = torch.zeros(len(layers))
    for row in rows[:3]:
        ids = torch.tensor([row.ids])
        taps = TapSet(layers, "attn_res_mixture")
        output = target.forward(ids, target.new_cache(1, 21), taps=taps, commit=True)
        reads = [target.embed(ids), *output.taps.split(64, -1)]
        for layer in layers:
            cosine = F.cosine_similarity(reads[layer], reads[layer + 1], -1)
            total[layer] += cosine.sum()
    assert_close(torch.tensor(found), 1 - total / 63)
    hooks = [m for m in target.model.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert not hooks


# ------------------------------------------------------------- the whole start


def start(config: DraftConfig, source: K3Config = TINY, layers: tuple[int, ...] | None = None):
    target, rows = target_and_rows(source)
    fresh = DSparkDrafter(config)
    initialise(fresh, torch.Generator().manual_seed(1))
    drafter, begun = start_from_target(fresh, target, rows, layers, 0)
    return target, rows, fresh, drafter, begun


def test_at_full_size_the_context_side_is_exact() -> None:
    """fc finds the tap that the layer reads, and the copied mixer is not touched by any refit."""
    config = drafter_config(RESIDUAL)
    target, rows, _, drafter, begun = start(config, RESIDUAL, (4,))
    assert begun.layers == (4,)
    ids = torch.tensor([row.ids for row in rows[:2]])
    output = target.forward(ids, target.new_cache(2, 21), taps=drafter.taps, commit=True)
    read = output.taps[..., -RESIDUAL.hidden_size :]  # tap 3: what layer 4 reads
    wanted = F.rms_norm(read, read.shape[-1:], None, RESIDUAL.rms_norm_eps)
    assert_close(drafter.features(output.taps), wanted)
    whole = copied(target.model, 4).self_attn
    for name, tensor in drafter.layers[0].self_attn.state_dict().items():
        if name != "slot_embedding":
            assert torch.equal(tensor, whole.state_dict()[name]), name
    assert torch.equal(drafter.norm.weight, target.model.model.norm.weight)


def test_a_smaller_drafter_has_its_own_sizes_and_keeps_what_is_fresh() -> None:
    config = drafter_config(
        TINY, num_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, kda=KDAShape(order=1, gate_rank=5),
    )  # fmt: skip
    _, _, fresh, drafter, begun = start(config)
    assert drafter.config == config
    assert len(begun.layers) == 2
    assert not set(begun.layers) & set(TINY.full_attention_layers)
    assert str(begun.layers[0]) in begun.summary()
    own = fresh.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert tensor.shape == own[name].shape
        assert bool(torch.isfinite(tensor).all())
        if name.startswith(("markov", "confidence")) or name.endswith("slot_embedding"):
            assert torch.equal(tensor, own[name])


def test_the_same_seed_starts_the_same_drafter() -> None:
    config = drafter_config(TINY, num_attention_heads=2, num_key_value_heads=2)
    first, second = start(config)[3], start(config)[3]
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_a_refit_is_no_worse_than_the_columns_that_stay() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(300, 12, generator=generator) @ torch.randn(12, 12, generator=generator)
    down = torch.randn(5, 12, generator=generator)
    wanted = hidden @ down.t()
    kept = channel_energy(hidden, down).topk(6).indices
    plain = (hidden[:, kept] @ down[:, kept].t() - wanted).square().sum()
    fitted = (hidden[:, kept] @ ridge(hidden[:, kept], wanted, 1e-9) - wanted).square().sum()
    exact = torch.linalg.lstsq(hidden[:, kept].double(), wanted.double()).solution
    best = (hidden[:, kept].double() @ exact - wanted).square().sum()
    assert float(fitted) < float(plain)
    assert float(fitted) == pytest.approx(float(best), rel=1e-3)


@pytest.mark.parametrize(("layers", "message"), [
    ((2,), "KDA layers, of 0, 1, 3, 4"),
    ((9,), "KDA layers"),
    ((0, 1), "expected 1 ascending ids"),
])  # fmt: skip
def test_layers_that_cannot_be_copied_are_named(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        start(drafter_config(TINY), TINY, layers)


def test_what_cannot_start_from_the_target_is_refused() -> None:
    larger = drafter_config(TINY, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(UserError, match=r"num_heads is 4: .* at most 3"):
        check_copyable(larger, TINY)
    with pytest.raises(UserError, match=r"head_dim is 32: .* at most 16"):
        check_copyable(drafter_config(TINY, head_dim=32), TINY)
    with pytest.raises(UserError, match="no lower bound"):
        check_copyable(drafter_config(TINY), PLAIN)
    with pytest.raises(UserError, match="SiTU constants"):
        check_copyable(drafter_config(TINY), replace(TINY, situ_beta=3.0))
    with pytest.raises(UserError, match=r"num_layers is 5: .* at most 4"):
        start(drafter_config(TINY, num_layers=5))


@pytest.mark.parametrize(("changes", "message"), [
    ({"drafter.init": "target"}, "expected drafter.backbone kda, not attention"),
    ({"drafter.init": "both"}, "expected random or target"),
    ({"drafter.init_layers": [1]}, "expected null with drafter.init random"),
    ({"drafter.init": "target", "drafter.backbone": "kda", "drafter.init_from": "x"}, "one start"),
])  # fmt: skip
def test_settings_that_contradict_each_other(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, changes)
