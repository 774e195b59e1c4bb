"""The KDA backbone: drafting agrees with training, a context with a fresh reading of the text.

The layer is recomputed here in float64 row by row, with the exact recurrence for the context and,
at the last order, for the block too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.kda import DraftKDA
from dspark.draft.kda_context import KDAContext
from dspark.draft.shapes import KDAShape
from dspark.draft.start import FASTEST, SLOWEST, initialise
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark_kernels import kda as kernel
from dspark_kernels import linear_kda
from tests.k3_tiny import tiny_model
from tests.tolerance import assert_close

SLOTS = 5
CONFIG = DraftConfig(
    hidden_size=24,
    num_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    intermediate_size=40,
    vocab_size=60,
    num_target_layers=9,
    target_layer_ids=(1, 4),
    target_tap_kind="residual",
    mask_token_id=7,
    block_size=SLOTS,
    markov_rank=6,
    backbone="kda",
    kda=KDAShape(order=1, gate_rank=6),
)
TAPS = 2 * CONFIG.hidden_size
SHAPES = {
    "order 0": KDAShape(order=0, gate_rank=6),
    "order 1": KDAShape(order=1, gate_rank=6),
    "exact": KDAShape(order=SLOTS - 1, gate_rank=6),
    "gla": KDAShape(order="gla", gate_rank=6),
    "softmax": KDAShape(order=1, gate_rank=6, block_softmax=True),
    "no convolution": KDAShape(order=1, gate_rank=6, conv_size=1),
    "long convolution": KDAShape(order=1, gate_rank=6, conv_size=7),
    "other bound": KDAShape(order=2, gate_rank=6, gate_lower_bound=-1.5),
}


def make_drafter(shape: KDAShape = SHAPES["order 1"], seed: int = 0) -> DSparkDrafter:
    """A drafter in which every parameter is away from its start and shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    drafter = DSparkDrafter(replace(CONFIG, kda=shape))
    initialise(drafter, generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(drafter: DSparkDrafter, taps: Tensor, cuts: list[int]) -> KDAContext:
    """A context of rows [1, n, N*D] that arrived in pieces, each followed by rejected rows."""
    context = drafter.new_context(1, 200)
    start = 0
    for index, piece in enumerate(cuts):
        rejected = draw(1, 3, TAPS, seed=100 + index)
        drafter.extend(context, torch.cat((taps[:, start : start + piece], rejected), 1), piece)
        start += piece
    assert context.row_lengths == [start]
    assert isinstance(context, KDAContext)
    return context


def train(drafter: DSparkDrafter, taps: Tensor, embeds: Tensor, anchors: list[list[int]]) -> Tensor:
    valid = torch.ones(taps.shape[:2], dtype=torch.bool)
    positions = torch.tensor(anchors)
    everywhere = torch.ones_like(positions, dtype=torch.bool)
    return drafter.train_hidden(taps, valid, embeds, positions, everywhere)


ANCHORS = [0, 1, 2, 15, 16, 17, 32, 40]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafting_is_training(shape: KDAShape) -> None:
    """Every anchor of a row: before the window is full, at and around a chunk's end."""
    drafter = make_drafter(shape)
    taps, embeds = draw(1, 41, TAPS), draw(1, len(ANCHORS), SLOTS, CONFIG.hidden_size, seed=2)
    trained = train(drafter, taps, embeds, [ANCHORS])
    for at, anchor in enumerate(ANCHORS):
        context = read(drafter, taps, [anchor] if anchor else [])
        drafted = drafter.block_hidden(embeds[:, at], context)
        assert_close(drafted, trained[:, at], limit=1e-5, what=f"anchor {anchor}")


@pytest.mark.parametrize("conv", [1, 4])
def test_the_layers_are_what_they_say(conv: int) -> None:
    """Row by row in float64; at the last order the block continues the context's recurrence."""
    drafter = make_drafter(KDAShape(order=SLOTS - 1, gate_rank=6, conv_size=conv))
    taps, embeds = draw(1, 9, TAPS), draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    drafted = drafter.block_hidden(embeds, read(drafter, taps, [9]))
    wide = copy.deepcopy(drafter).double()
    with torch.no_grad():
        context, hidden = wide.features(taps.double()), embeds.double()
        for layer in wide.layers:
            x = layer.input_layernorm(hidden)
            hidden = hidden + plain_layer(layer.self_attn, x, context)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        assert_close(drafted, wide.norm(hidden), limit=1e-5)


def plain_layer(layer: DraftKDA, x: Tensor, context: Tensor) -> Tensor:
    """Context and block as one text [1, n+G, D] through K3's layer, its last G rows returned."""
    rows = torch.cat((context, x + layer.slot_embedding), 1)
    heads, total = layer.heads, rows.shape[1]

    def conv(linear: torch.nn.Linear, weight: Tensor) -> Tensor:
        u = linear(rows).transpose(1, 2)
        width = weight.shape[-1]
        out = F.conv1d(F.pad(u, (width - 1, 0)), weight, groups=weight.shape[0])
        return F.silu(out).transpose(1, 2).view(1, total, heads, -1)

    q, k, v = (
        conv(layer.q_proj, layer.q_conv1d.weight),
        conv(layer.k_proj, layer.k_conv1d.weight),
        conv(layer.v_proj, layer.v_conv1d.weight),
    )
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    f = (layer.f_b_proj(layer.f_a_proj(rows)) + layer.dt_bias).view(1, total, heads, -1)
    g = layer.shape.gate_lower_bound * (layer.A_log.exp()[:, None] * f).sigmoid()
    beta = layer.b_proj(rows).sigmoid()
    zero = torch.zeros(1, heads, layer.head_dim, layer.head_dim, dtype=torch.float64)
    out, _ = kernel.recurrent(q * layer.head_dim**-0.5, k, v, g, beta, zero)
    gate = layer.g_proj(rows).view_as(out).sigmoid()
    return layer.o_proj((layer.o_norm(out) * gate).flatten(2))[:, -SLOTS:]


def states(context: KDAContext) -> tuple[Tensor, Tensor]:
    return context.state, context.window


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 9), min_size=1, max_size=9), prefill=st.integers(0, 40))
def test_any_accept_sequence_is_a_fresh_reading(cuts: list[int], prefill: int) -> None:
    drafter = make_drafter()
    total = prefill + sum(cuts)
    taps = draw(1, max(total, 1), TAPS)
    cut = read(drafter, taps, [prefill, *cuts])
    fresh = read(drafter, taps, [total])
    for ours, expected in zip(states(cut), states(fresh), strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    embeds = draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    drafted, expected = (drafter.block_hidden(embeds, context) for context in (cut, fresh))
    assert_close(drafted, expected, limit=1e-5)


def test_one_code_path_gives_the_same_bits() -> None:
    """Rejected rows and a drafted block leave no trace at all."""
    drafter = make_drafter()
    taps, embeds = draw(1, 14, TAPS), draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    plain, busy = drafter.new_context(1, 99), drafter.new_context(1, 99)
    for start, count in ((0, 5), (5, 2), (7, 7)):
        piece = taps[:, start : start + count]
        drafter.block_hidden(embeds, busy)
        for context, rejected in ((plain, 0.0), (busy, 1e3)):
            tail = torch.full((1, 4, TAPS), rejected)
            drafter.extend(context, torch.cat((piece, tail), 1), count)
    for one, other in zip(states(plain), states(busy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [8, 40])
def test_a_ragged_batch_is_its_rows_alone(rows: int) -> None:
    """Kept counts differ in every extend, 0 and all of them included; NaN follows each count."""
    drafter = make_drafter()
    counts = [[rows, 3, 0, 7], [0, rows, 2, 5], [4, 4, 4, 4], [1, 0, rows, 2]]
    batch, lengths = drafter.new_context(4, 200), [0] * 4
    taps = draw(4, 4 * rows, TAPS)
    for step in counts:
        given_rows = torch.full((4, rows, TAPS), torch.nan)
        for row, count in enumerate(step):
            given_rows[row, :count] = taps[row, lengths[row] : lengths[row] + count]
            lengths[row] += count
        drafter.extend(batch, given_rows, torch.tensor(step))
    assert batch.row_lengths == lengths
    embeds = draw(4, SLOTS, CONFIG.hidden_size, seed=2)
    drafted = drafter.block_hidden(embeds, batch)
    for row, length in enumerate(lengths):
        alone = read(drafter, taps[row : row + 1], [length])
        for ours, expected in zip(states(batch), states(alone), strict=True):
            assert_close(ours[row : row + 1], expected, limit=1e-5, what=f"row {row}")
        expected = drafter.block_hidden(embeds[row : row + 1], alone)
        assert_close(drafted[row : row + 1], expected, limit=1e-5, what=f"row {row}")


def test_features_at_and_after_the_anchor_are_never_seen() -> None:
    drafter = make_drafter()
    anchors = [0, 3, 16, 17, 30]
    taps, embeds = draw(1, 36, TAPS), draw(1, 5, SLOTS, CONFIG.hidden_size, seed=2)
    right = train(drafter, taps, embeds, [anchors])
    for at, anchor in enumerate(anchors):
        changed = taps.clone()
        changed[:, anchor:] = 7.0 * draw(1, 36 - anchor, TAPS, seed=9)
        assert torch.equal(train(drafter, changed, embeds, [anchors])[:, at], right[:, at])
        if anchor:
            changed[:, anchor - 1] += 1.0
            assert not torch.equal(train(drafter, changed, embeds, [anchors])[:, at], right[:, at])


def test_the_first_position_is_still_remembered() -> None:
    drafter = make_drafter()
    taps, embeds = draw(1, 36, TAPS), draw(1, 1, SLOTS, CONFIG.hidden_size, seed=2)
    right = train(drafter, taps, embeds, [[36 - 1]])
    taps[:, 0] += 1.0
    assert (train(drafter, taps, embeds, [[36 - 1]]) - right).abs().max() > 1e-5


def test_a_block_sees_no_other_block_and_no_slot_the_future() -> None:
    drafter = make_drafter()
    taps, embeds = draw(1, 36, TAPS), draw(1, 3, SLOTS, CONFIG.hidden_size, seed=2)
    right = train(drafter, taps, embeds, [[9, 10, 30]])
    changed = embeds.clone()
    changed[:, 1, 2] += 1.0
    other = train(drafter, taps, changed, [[9, 10, 30]])
    assert torch.equal(other[:, [0, 2]], right[:, [0, 2]])
    assert torch.equal(other[:, 1, :2], right[:, 1, :2])
    assert (other[:, 1, 2:] != right[:, 1, 2:]).flatten(2).any(-1).all()


def test_the_softmax_lets_slots_see_both_ways() -> None:
    drafter = make_drafter(SHAPES["softmax"])
    taps, embeds = draw(1, 12, TAPS), draw(1, 1, SLOTS, CONFIG.hidden_size, seed=2)
    right = train(drafter, taps, embeds, [[9]])
    embeds[:, :, -1] += 1.0
    other = train(drafter, taps, embeds, [[9]])
    assert (other != right).flatten(2).any(-1).flatten().all()


def test_padding_and_dummy_anchors_have_exactly_no_gradient() -> None:
    """A row of padding, dummies at 0 and NaN in padding: the same gradients as without them."""
    drafter = make_drafter()
    taps, embeds = draw(2, 20, TAPS), draw(2, 3, SLOTS, CONFIG.hidden_size, seed=2)
    weight = draw(1, 2, SLOTS, CONFIG.hidden_size, seed=3)

    def gradients(hidden: Tensor) -> dict[str, Tensor]:
        drafter.zero_grad(set_to_none=True)
        (hidden * weight).sum().backward()
        return {
            name: parameter.grad.clone()
            for name, parameter in drafter.named_parameters()
            if parameter.grad is not None
        }

    positions = torch.tensor([[4, 11, 0], [0, 0, 0]])
    real = torch.tensor([[True, True, False], [False] * 3])
    valid = torch.arange(20) < torch.tensor([[13], [0]])
    taps = taps.masked_fill(~valid[..., None], torch.nan).requires_grad_()
    hidden = drafter.train_hidden(taps, valid, embeds, positions, real)
    assert (hidden[~real] == 0).all()
    padded = gradients(hidden[:1, :2])
    assert torch.equal(taps.grad[~valid], torch.zeros_like(taps.grad[~valid]))
    assert (taps.grad[0, 11:] == 0).all()
    alone = drafter.train_hidden(
        taps[:1, :13].detach(), valid[:1, :13], embeds[:1, :2], positions[:1, :2], real[:1, :2]
    )
    expected = gradients(alone)
    assert padded.keys() == expected.keys()
    for name, gradient in padded.items():
        assert_close(gradient, expected[name], limit=1e-5, what=name)
    nothing = drafter.train_hidden(taps, valid, embeds, positions, torch.zeros_like(real))
    assert all((gradient == 0).all() for gradient in gradients(nothing[:1, :2]).values())


def test_every_parameter_learns() -> None:
    drafter = make_drafter(SHAPES["softmax"])
    taps, embeds = draw(1, 20, TAPS), draw(1, 2, SLOTS, CONFIG.hidden_size, seed=2)
    train(drafter, taps, embeds, [[7, 18]]).square().mul(draw(SLOTS, 1, seed=4)).sum().backward()
    for name, parameter in drafter.layers.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).any(), name


def test_orders_differ_in_the_block_and_never_in_the_context() -> None:
    base = make_drafter(SHAPES["exact"])
    taps, embeds = draw(1, 12, TAPS), draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    hidden, contexts = [], []
    for order in ("gla", *range(SLOTS)):
        drafter = make_drafter(KDAShape(order=order, gate_rank=6))
        drafter.load_state_dict(base.state_dict())
        contexts.append(read(drafter, taps, [5, 7]))
        hidden.append(drafter.block_hidden(embeds, contexts[-1]))
    assert all(torch.equal(context.state, contexts[0].state) for context in contexts)
    gaps = [(one - hidden[-1]).abs().max().item() for one in hidden]
    assert all(gap > 1e-5 for gap in gaps[:3])
    assert gaps[1] > gaps[2] > gaps[3] > gaps[5] == 0


def test_slot_embeddings_tell_mask_tokens_apart() -> None:
    """All masks alike and no convolution: without slot embeddings slots differ by causality only,
    and with nothing before them in the block they would not differ at all."""
    drafter = make_drafter(SHAPES["no convolution"])
    same = draw(1, 1, CONFIG.hidden_size, seed=2).expand(1, SLOTS, -1).contiguous()
    context = read(drafter, draw(1, 12, TAPS), [12])
    drafted = drafter.block_hidden(same, context)
    assert torch.pdist(drafted[0]).min() > 1e-2
    moved = copy.deepcopy(drafter)
    with torch.no_grad():
        for layer in moved.layers:
            layer.self_attn.slot_embedding[2] += 1.0
    context = read(moved, draw(1, 12, TAPS), [12])
    other = moved.block_hidden(same, context)
    assert torch.equal(other[:, :2], drafted[:, :2])
    assert (other[:, 2:] != drafted[:, 2:]).flatten(1).any()


def test_the_context_has_one_size() -> None:
    drafter = make_drafter()
    short, long = drafter.new_context(2, 8), drafter.new_context(2, 1_000_000)
    before = long.nbytes
    drafter.extend(long, draw(2, 60, TAPS))
    heads, width, before_rows = 3, 8, 3
    numbers = 2 * 2 * heads * (width * width + before_rows * 3 * width)
    assert short.nbytes == before == long.nbytes == 4 * numbers


def test_a_context_keeps_the_weights_it_was_made_with() -> None:
    drafter = make_drafter()
    taps, embeds = draw(1, 12, TAPS), draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    context = read(drafter, taps, [12])
    first = drafter.block_hidden(embeds, context)
    with torch.no_grad():
        for parameter in drafter.layers.parameters():
            parameter.mul_(1.5)
    assert torch.equal(drafter.block_hidden(embeds, context), first)
    fresh = read(drafter, taps, [12])
    assert not torch.allclose(drafter.block_hidden(embeds, fresh), first)


def test_a_fresh_layer_remembers_at_every_age() -> None:
    """Without input its decays are exp(-1/tau), tau even in ratio from fastest to slowest."""
    drafter = DSparkDrafter(CONFIG)
    initialise(drafter, torch.Generator().manual_seed(0))
    for layer in drafter.layers:
        mixer = layer.self_attn
        g = mixer.shape.gate_lower_bound * mixer.dt_bias.view(3, -1).double().sigmoid()
        tau = -1 / g
        assert_close(tau[:, 0], torch.full((3,), FASTEST, dtype=torch.float64), limit=1e-5,
                     dtype=torch.float32)  # fmt: skip
        ratio = (SLOWEST / FASTEST) ** (1 / 7)
        assert_close(tau[:, 1:] / tau[:, :-1], torch.full((3, 7), ratio, dtype=torch.float64),
                     limit=1e-4, dtype=torch.float32)  # fmt: skip


def test_half_precision_drafts_with_a_float32_state() -> None:
    drafter = make_drafter()
    half = copy.deepcopy(drafter).to(torch.bfloat16)
    taps, embeds = draw(1, 12, TAPS), draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    context = read(half, taps, [12])
    assert context.state.dtype == torch.float32
    assert context.window.dtype == torch.bfloat16
    drafted = half.block_hidden(embeds, context)
    assert drafted.dtype == torch.bfloat16
    expected = drafter.block_hidden(embeds, read(drafter, taps, [12]))
    assert (drafted.float() - expected).norm() < 0.05 * expected.norm()


def test_coupling_norms_are_those_the_blocks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what the kernel is given while drafting, A summed pair by pair."""
    drafter = make_drafter()
    anchors = [3, 17]
    taps, embeds = draw(1, 20, TAPS), draw(1, 2, SLOTS, CONFIG.hidden_size, seed=2)
    norms = drafter.backbone.coupling_norms(embeds, drafter.features(taps), torch.tensor([anchors]))
    assert norms.shape == (2, 1, 2, 3)
    seen: list[Tensor] = []
    real = linear_kda.block

    def watched(*args: object) -> Tensor:
        _, k, _, g, beta = args[:5]
        G = g.cumsum(1)
        A = torch.zeros(1, 3, SLOTS, SLOTS)
        for t in range(SLOTS):
            for j in range(t):
                pair = (k[:, t] * k[:, j] * (G[:, t] - G[:, j]).exp()).sum(-1)
                A[:, :, t, j] = beta[:, t] * pair
        seen.append(torch.linalg.svdvals(A)[0, :, 0])
        return real(*args)

    monkeypatch.setattr(linear_kda, "block", watched)
    for at, anchor in enumerate(anchors):
        drafter.block_hidden(embeds[:, at], read(drafter, taps, [anchor]))
        assert_close(norms[:, 0, at], torch.stack(seen), limit=1e-5)
        seen.clear()


def test_a_real_decode_loop_says_what_the_target_says() -> None:
    target = K3Target(tiny_model(), "tiny", ())
    config = replace(
        CONFIG,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=(0, 2),
        target_tap_kind="attn_res_mixture",
    )
    drafter = DSparkDrafter(config)
    initialise(drafter, torch.Generator().manual_seed(0))
    for seed, temperature in ((0, 0.0), (1, 1.0)):
        generation = SpeculativeDecoder(target, drafter.eval()).generate(
            [3, 5, 8],
            max_new_tokens=24,
            sampling=SamplingParams(temperature=temperature),
            draft_length=SLOTS,
            end_token_ids=(),
            seed=seed,
        )
        assert len(generation.tokens) == 24
        if not temperature:
            plain = plain_generate(
                target,
                [3, 5, 8],
                max_new_tokens=24,
                sampling=SamplingParams(temperature=0.0),
                end_token_ids=(),
            )
            assert generation.tokens == plain.tokens


def test_a_saved_drafter_is_the_same(tmp_path: Path) -> None:
    drafter = make_drafter(SHAPES["softmax"])
    save_drafter(tmp_path / "drafter", drafter)
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == drafter.config
    taps, embeds = draw(1, 12, TAPS), draw(1, SLOTS, CONFIG.hidden_size, seed=2)
    hidden = [d.block_hidden(embeds, read(d, taps, [12])) for d in (drafter, loaded.eval())]
    assert torch.equal(*hidden)
