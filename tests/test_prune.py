"""Cutting drafters: what is left computes what the whole computes with the rest zero.

Every backbone and sequential head, frozen parameters, floors, repetition, and drafters that cannot
be pruned as a whole. Counts are predicted before anything is cut.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dspark.draft.config import DraftConfig
from dspark.draft.cost import context_bytes, parameters, weight_bytes
from dspark.draft.heads import ConfidenceHead
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.axes import axes, channel_axis, head_units
from dspark.draft.pruning.cutting import best_units, cut_to, keep_layers
from dspark.draft.pruning.graph import remove_units
from dspark.draft.pruning.low_rank import best_factors, lower_rank
from dspark.draft.pruning.sizes import Grid, Size, resized
from dspark.draft.shapes import KDAShape
from tests.tiny_drafters import CASES, FULL, MLA, TAP_WIDTH, make_drafter, train_blocks
from tests.tiny_drafters import draft as draft_block

pytest.importorskip("torch_pruning")

KDA = replace(
    FULL,
    backbone="kda",
    num_key_value_heads=6,
    kda=KDAShape(order=1, gate_rank=6, block_softmax=True),
)
CONFIGS = {
    "attention": FULL,
    "window": CASES["mixed"],
    "mla": MLA,
    "mla gated": CASES["mla-gated-nope"],
    "kda": KDA,
    "kda plain": replace(KDA, kda=KDAShape(order=0, gate_rank=6)),
    "gated": replace(FULL, markov_head_type="gated"),
    "rnn": replace(KDA, markov_head_type="rnn"),
    "no confidence": replace(FULL, enable_confidence_head=False),
    "plain confidence": replace(FULL, confidence_head_with_markov=False, markov_head_type="rnn"),
    "reduced vocabulary": replace(FULL, draft_vocab_size=50),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
TOLERANCE = 1e-6


def scores_of(config: DraftConfig, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(axis.units, generator=generator) for name, axis in axes(config).items()
    }


def answers(drafter: DSparkDrafter) -> list[Tensor]:
    """Everything that a drafter says: hidden states both ways, biases, confidence."""
    config, generator = drafter.config, torch.Generator().manual_seed(5)
    features = torch.randn(2, 11, TAP_WIDTH, generator=generator)
    embeds = torch.randn(2, 2, config.block_size, config.hidden_size, generator=generator)
    prev = torch.randint(0, config.vocab_size, embeds.shape[:3], generator=generator)
    hidden = train_blocks(drafter, features, embeds, [[3, 9], [1, 11 - config.block_size]])
    codes = drafter.markov_head.codes(prev, hidden)
    found = [hidden, drafter.markov_head.bias(codes), draft_block(drafter, features, embeds[:, 0])]
    if drafter.confidence_head is not None:
        found.append(drafter.confidence_head(hidden, drafter.markov_head.embed(prev)))
    return found


def zeroed(drafter: DSparkDrafter, kept: dict[str, list[int]]) -> DSparkDrafter:
    """The whole drafter where the units that go have no output; of the rank, where all is zero."""
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for name, axis in axes(drafter.config).items():
        gone = [unit for unit in range(axis.units) if unit not in kept.get(name, range(axis.units))]
        assert axis.output is not None
        for piece in axis.pieces if name == "markov" else (axis.output,):
            index = torch.tensor(piece.indices(gone), dtype=torch.int64)
            tensors[piece.name].index_fill_(piece.dim, index, 0.0)
    whole = DSparkDrafter(drafter.config)
    whole.load_state_dict(tensors)
    return whole


def some_size(config: DraftConfig) -> Size:
    whole = Size.of(config)
    return replace(whole, heads=max(1, whole.heads // 2), mlp=48, rank=8)


@every_config
def test_what_is_left_computes_what_the_whole_does_with_the_rest_zero(config: DraftConfig) -> None:
    drafter, scored, size = make_drafter(config), scores_of(config), some_size(config)
    if config.markov_head_type == "vanilla":  # its rank has a test of its own
        size = replace(size, rank=config.markov_rank)
    kept = {
        name: best_units(scored[name], size.rank if name == "markov" else getattr(size, name[9:]))
        for name in axes(config)
    }
    cut = cut_to(drafter, size, scored)
    with torch.no_grad():
        for found, wanted in zip(answers(cut), answers(zeroed(drafter, kept)), strict=True):
            assert float((found - wanted).abs().max()) < TOLERANCE * float(wanted.abs().max())


@every_config
def test_counts_are_predicted_and_nothing_else_changes(config: DraftConfig) -> None:
    drafter, size = make_drafter(config), some_size(config)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    predicted = parameters(resized(config, size))
    cut = cut_to(drafter, size, scores_of(config))
    assert sum(p.numel() for p in cut.parameters()) == predicted < parameters(config)
    assert cut.config == resized(config, size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    touched = {piece.name for axis in axes(config).values() for piece in axis.pieces}
    for name, tensor in cut.state_dict().items():
        if name not in touched:
            assert torch.equal(tensor, before[name]), name
        else:
            assert tensor.shape != before[name].shape, name


@every_config
def test_the_cost_of_every_size_is_known_beforehand(config: DraftConfig) -> None:
    order = [1, 0]
    grid = Grid.of(config, order)

    def read(shape: DraftConfig) -> int:
        return weight_bytes(shape, torch.bfloat16).total + context_bytes(shape, 9, torch.bfloat16)

    for cost in (parameters, read):
        table = grid.costs(cost)
        assert table.shape == grid.shape
        corners = product(*({0, n // 2, n - 1} for n in grid.shape))
        for index in corners:
            assert table[index] == cost(resized(config, grid.size(index))), index


def test_floors_and_aligned_widths() -> None:
    grid = Grid.of(replace(FULL, intermediate_size=88, markov_rank=20), [0, 1])
    assert grid.heads == (1, 2)
    assert grid.mlp == (16, 32, 48, 64, 80, 88)
    assert grid.ranks == (8, 16, 20)
    narrow = Grid.of(replace(FULL, intermediate_size=10, markov_rank=3), [0, 1])
    assert (narrow.mlp, narrow.ranks) == ((10,), (3,))
    assert narrow.size((0, 0, 0, 0)) == Size((1,), 1, 10, 3)


def test_whole_groups_go_and_the_ratio_stays() -> None:
    drafter = make_drafter(FULL)  # 6 query heads on 2 key heads of 8 channels
    cut = cut_to(drafter, replace(Size.of(FULL), heads=1), {
        "layers.0.heads": torch.tensor([0.0, 1.0]), "layers.1.heads": torch.tensor([1.0, 0.0]),
    })  # fmt: skip
    assert (cut.config.num_attention_heads, cut.config.num_key_value_heads) == (3, 1)
    for layer, rows in ((0, slice(24, 48)), (1, slice(0, 24))):
        ours, whole = cut.layers[layer].self_attn, drafter.layers[layer].self_attn
        assert torch.equal(ours.q_proj.weight, whole.q_proj.weight[rows])
        assert torch.equal(ours.o_proj.weight, whole.o_proj.weight[:, rows])
        keys = slice(rows.start // 3, rows.stop // 3)
        assert torch.equal(ours.k_proj.weight, whole.k_proj.weight[keys])


def test_every_tensor_of_a_kda_head_goes_with_it() -> None:
    drafter = make_drafter(KDA)
    stays = [0, 2, 3, 5]
    scored = {f"layers.{i}.heads": torch.tensor([1.0, 0, 1, 1, 0, 1]) for i in (0, 1)}
    cut = cut_to(drafter, replace(Size.of(KDA), heads=4), scored)
    ours, whole = cut.layers[1].self_attn, drafter.layers[1].self_attn
    for name in ("A_log", "softmax_sharpness", "softmax_gain"):
        assert torch.equal(getattr(ours, name), getattr(whole, name)[stays])
    assert torch.equal(ours.b_proj.weight, whole.b_proj.weight[stays])
    by_head = [(ours.dt_bias, whole.dt_bias), (ours.k_conv1d.weight, whole.k_conv1d.weight)]
    by_head += [(ours.f_b_proj.weight, whole.f_b_proj.weight)]
    for tensor, full in by_head:
        assert torch.equal(tensor, full.unflatten(0, (6, -1))[stays].flatten(0, 1))
    assert torch.equal(ours.o_norm.weight, whole.o_norm.weight)


def test_a_layer_that_goes_leaves_the_others_as_they_were() -> None:
    drafter = make_drafter(CASES["mixed"])
    cut = keep_layers(drafter, [1])
    assert cut.config.layer_types is None  # the sliding layer went
    assert cut.config.sliding_window is None
    for name, tensor in cut.layers[0].state_dict().items():
        assert torch.equal(tensor, drafter.layers[1].state_dict()[name])
    kept = keep_layers(drafter, [0])
    assert kept.config.layer_types == ("sliding_attention",)


@pytest.mark.parametrize("seed", range(3))
def test_cutting_twice_is_cutting_once(seed: int) -> None:
    config = CONFIGS["rnn"]
    drafter, scored = make_drafter(config), scores_of(config, seed)
    first = Size((0, 1), 4, 64, 12)
    last = Size((0, 1), 2, 32, 8)
    once = cut_to(drafter, last, scored)
    left = {}
    for name, axis in axes(config).items():
        count = first.rank if name == "markov" else getattr(first, name[9:])
        left[name] = scored[name][best_units(scored[name], min(count, axis.units))]
    twice = cut_to(cut_to(drafter, first, scored), last, left)
    for name, tensor in twice.state_dict().items():
        assert torch.equal(tensor, once.state_dict()[name]), name


def test_nothing_removed_is_the_same_drafter() -> None:
    for config in CONFIGS.values():
        drafter = make_drafter(config)
        same = cut_to(drafter, Size.of(config), {})
        assert same.config == config
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(tensor, same.state_dict()[name])


@pytest.mark.parametrize("size", [
    Size((0, 1), 0, 48, 8), Size((0, 1), 3, 48, 8), Size((0, 1), 1, 81, 8), Size((), 1, 48, 8),
    Size((1, 0), 1, 48, 8), Size((0, 2), 1, 48, 8), Size((0,), 1, 48, 0),
])  # fmt: skip
def test_sizes_outside_the_drafter_are_refused(size: Size) -> None:
    with pytest.raises(ValueError, match="given, expected"):
        cut_to(make_drafter(FULL), size, scores_of(FULL))


# ---------------------------------------------------- frozen and unknown parts


def test_frozen_parts_are_cut_too_and_stay_frozen() -> None:
    drafter = make_drafter(KDA)
    frozen = {"layers.0.self_attn.A_log", "layers.1.mlp.up_proj.weight", "fc.weight"}
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name not in frozen)
    with torch.no_grad():
        cut = cut_to(drafter, some_size(KDA), scores_of(KDA))
    assert {n for n, p in cut.named_parameters() if not p.requires_grad} == frozen
    assert cut.layers[0].self_attn.A_log.shape == (3,)
    drafter.requires_grad_(False)
    cut = cut_to(drafter, some_size(KDA), scores_of(KDA))
    assert sum(p.numel() for p in cut.parameters()) == parameters(cut.config)
    assert not any(p.requires_grad for p in cut.parameters())


def test_a_parameter_that_no_axis_knows_is_refused_by_name() -> None:
    drafter = make_drafter(KDA)
    drafter.layers[0].self_attn.extra_gate = nn.Parameter(torch.zeros(6))
    with pytest.raises(ValueError, match=r"layers.0.self_attn.extra_gate is \(6,\), nothing"):
        cut_to(drafter, some_size(KDA), scores_of(KDA))


def test_a_module_that_never_runs_is_refused_and_not_left_whole() -> None:
    drafter = make_drafter(replace(FULL, enable_confidence_head=False))
    drafter.confidence_head = ConfidenceHead(FULL.hidden_size, FULL.markov_rank)
    with pytest.raises(ValueError, match=r"confidence_head.proj.weight is \(1, 60\), nothing"):
        cut_to(drafter, some_size(FULL), scores_of(FULL))


def test_a_forgotten_piece_is_refused_and_not_half_pruned() -> None:
    """The planted defect: an axis that lacks one of its tensors."""
    drafter = make_drafter(FULL)
    found = [replace(a, pieces=a.pieces[1:]) if "mlp" in a.name else a for a in axes(FULL).values()]
    kept = {f"layers.{i}.mlp": list(range(48)) for i in (0, 1)}
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight is \(80, 48\), \(48, 48\) was"):
        remove_units(drafter, found, kept, replace(FULL, intermediate_size=48))


# ------------------------------------------------------------------- markov rank


def test_the_lower_rank_is_the_best_there_is() -> None:
    drafter = make_drafter(FULL).double().requires_grad_(False)
    cut = lower_rank(drafter, 5)
    table = bias_table(drafter)
    u, s, v = torch.linalg.svd(table)
    error = torch.linalg.matrix_norm(bias_table(cut) - table)
    assert float(error) == pytest.approx(float(s[5:].square().sum().sqrt()), rel=1e-9)
    assert torch.allclose(bias_table(cut), (u[:, :5] * s[:5]) @ v[:5], atol=1e-9)
    head = drafter.markov_head
    for columns in ([0, 1, 2, 3, 4], [7, 8, 9, 10, 11]):
        left = head.markov_w1.weight[:, columns] @ head.markov_w2.weight[:, columns].t()
        assert float(torch.linalg.matrix_norm(left - table)) > float(error)


def bias_table(drafter: DSparkDrafter) -> Tensor:
    head = drafter.markov_head
    return (head.markov_w1.weight @ head.markov_w2.weight.t()).detach()


def test_the_confidence_head_reads_the_new_rows_as_near_as_it_can() -> None:
    drafter = make_drafter(FULL).double()
    cut = lower_rank(drafter, 5)
    width = FULL.hidden_size
    with torch.no_grad():
        old = drafter.markov_head.markov_w1.weight @ drafter.confidence_head.proj.weight[0, width:]
        rows, new = cut.markov_head.markov_w1.weight, cut.confidence_head.proj.weight[0, width:]
        # what is left over is orthogonal to everything that the new rows can say
        assert float((rows.t() @ (rows @ new - old)).abs().max()) < 1e-9
        assert torch.equal(cut.confidence_head.proj.weight[:, :width],
                           drafter.confidence_head.proj.weight[:, :width])  # fmt: skip


def test_a_table_of_lower_rank_is_kept_exactly_and_a_zero_one_stays_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right, w2 = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((30, 3), (3, 8), (20, 8))
    )
    w1 = left @ right
    first, second = best_factors(w1, w2, 3)
    assert torch.allclose(first @ second.t(), w1 @ w2.t(), atol=1e-12)
    drafter = make_drafter(FULL)
    nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    cut = lower_rank(drafter, 4)
    assert all(bool(torch.isfinite(p).all()) for p in cut.parameters())
    assert float(bias_table(cut).abs().max()) == 0.0


def test_only_a_vanilla_head_is_a_product() -> None:
    with pytest.raises(ValueError, match="gated head is no product"):
        lower_rank(make_drafter(CONFIGS["gated"]), 4)
    with pytest.raises(ValueError, match=r"rank 13: expected 1\.\.12"):
        lower_rank(make_drafter(FULL), 13)


# ---------------------------------------------------------------------- channels


def test_channels_inside_heads_go_from_every_head_and_every_tensor() -> None:
    config = replace(KDA, kda=KDAShape(order=0, gate_rank=6))
    drafter = make_drafter(config)
    found = [channel_axis(config, layer) for layer in (0, 1)]
    kept = {axis.name: [1, 2, 5, 6] for axis in found}
    cut = remove_units(drafter, found, kept, replace(config, head_dim=4))
    ours, whole = cut.layers[0].self_attn, drafter.layers[0].self_attn
    for name in ("q_proj", "v_proj", "g_proj", "f_b_proj", "v_conv1d"):
        rows = getattr(whole, name).weight.unflatten(0, (6, 8))[:, [1, 2, 5, 6]].flatten(0, 1)
        assert torch.equal(getattr(ours, name).weight, rows)
    columns = whole.o_proj.weight.unflatten(1, (6, 8))[:, :, [1, 2, 5, 6]].flatten(1)
    assert torch.equal(ours.o_proj.weight, columns)
    assert torch.equal(ours.o_norm.weight, whole.o_norm.weight[[1, 2, 5, 6]])
    assert torch.equal(ours.A_log, whole.A_log)
    answers(cut)


def test_units_are_counted_by_group() -> None:
    assert head_units(FULL) == 2
    assert head_units(MLA) == 6
    assert np.prod(Grid.of(FULL, [0, 1]).shape) == 2 * 2 * 5 * 2
