"""The hybrid cache: every way of feeding the same tokens ends in the same state and logits.

The oracle is always a fresh prefill of the committed tokens in one call (``tests.k3_fresh``).
"Unchanged" means bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.state import KDAState, LatentState
from dspark.k3.tree import plant
from dspark.taps import TapSet
from dspark_kernels import kda as kernel
from tests.k3_fresh import LIMIT, assert_equal_contents, assert_same, contents, prefill, shared
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

CONFIGS = pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])


def feed(model: K3ForCausalLM, tokens: Tensor, pieces: Sequence[int], held: K3Cache) -> Tensor:
    """Hidden states of ``tokens`` given in pieces, each committed at once."""
    out, done = [], 0
    for rows in pieces:
        out.append(model(tokens[:, done : done + rows], held)[0])
        done += rows
    assert done == tokens.shape[1]
    return torch.cat(out, dim=1)


# --- one text, many chunkings ------------------------------------------------------------------


@CONFIGS
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 64])
def test_chunked_prefill_is_full_prefill(config: K3Config, chunk: int):
    model, tokens = shared(config), tiny_tokens(2, 70)
    whole, _ = model(tokens)
    pieces = [min(chunk, 70 - start) for start in range(0, 70, chunk)]
    held = model.new_cache(2, 80)
    assert_close(feed(model, tokens, pieces, held), whole, limit=LIMIT)
    for row in range(2):
        assert_same(model, held, row, tokens[row], torch.tensor(7))


@CONFIGS
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_shorter_than_the_convolution(config: K3Config, length: int):
    """Window rows older than the new ones must survive."""
    model, tokens = shared(config), tiny_tokens(1, length + 6)
    whole, _ = model(tokens)
    held = model.new_cache(1, 16)
    pieces = [length, 1, 2, 1, 2]
    assert_close(feed(model, tokens, pieces, held), whole, limit=LIMIT)
    assert_same(model, held, 0, tokens[0], torch.tensor(7))


@CONFIGS
@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_verify_blocks_are_full_prefill(config: K3Config, rows: int):
    """Pending rows see what committed ones would, whether a replay is waiting or not."""
    model, tokens = shared(config), tiny_tokens(2, 6 + 4 * rows)
    whole, _ = model(tokens)
    held = model.new_cache(2, tokens.shape[1] + 1)
    model(tokens[:, :6], held)
    for start in range(6, tokens.shape[1], rows):
        out, _ = model(tokens[:, start : start + rows], held, commit=False)
        assert_close(out, whole[:, start : start + rows], limit=LIMIT)
        held.commit(rows)
    for row in range(2):
        assert_same(model, held, row, tokens[row], torch.tensor(7))


@pytest.mark.parametrize("kind", ["raw_prefix", "attn_res_mixture"])
def test_taps_do_not_depend_on_how_rows_arrive(kind: str):
    model, tokens = shared(), tiny_tokens(1, 20)
    taps = TapSet((0, 3, 6), kind)
    _, whole = model(tokens, taps=taps)
    held = model.new_cache(1, 20)
    pieces = [model(tokens[:, :11], held, taps=taps)[1]]
    pieces.append(model(tokens[:, 11:12], held, taps=taps)[1])
    pieces.append(model(tokens[:, 12:], held, taps=taps, commit=False)[1])
    assert_close(torch.cat(pieces, dim=1), whole, limit=LIMIT)


# --- padding -----------------------------------------------------------------------------------


def padded(rows: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and validity, with random tokens as padding."""
    width = max(map(len, rows))
    tokens = tiny_tokens(len(rows), width, seed=99)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, place], valid[i, place] = row, True
    return tokens, valid


@CONFIGS
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_does_not_know_its_batch(config: K3Config, side: str):
    """Ragged prompts, then ragged second turns, then a ragged verify: each row as if alone."""
    model = shared(config)
    texts = [tiny_tokens(1, length, seed=length)[0] for length in (40, 7, 1, 22)]
    turns = [(0, 30), (30, 33), (33, 40)], [(0, 1), (1, 6), (6, 7)], [(0, 0), (0, 1), (1, 1)]
    turns = *turns, [(0, 20), (20, 20), (20, 22)]
    alone = [model(text.unsqueeze(0))[0][0] for text in texts]
    held = model.new_cache(4, 64)
    for turn in range(3):
        cuts = [slice(*turns[row][turn]) for row in range(4)]
        tokens, valid = padded([text[cut] for text, cut in zip(texts, cuts, strict=True)], side)
        out, _ = model(tokens, held, valid=valid, commit=turn < 2)
        for row, cut in enumerate(cuts):
            if cut.stop > cut.start:
                assert_close(out[row][valid[row]], alone[row][cut], limit=LIMIT, what=f"row {row}")
    held.commit(valid.sum(1))
    for row, text in enumerate(texts):
        assert_same(model, held, row, text, torch.tensor(7))


def test_right_padding_without_a_cache_and_left_padding_refused():
    model = shared()
    rows = [tiny_tokens(1, length, seed=length)[0] for length in (9, 4)]
    tokens, valid = padded(rows, "right")
    out, _ = model(tokens, valid=valid)
    for row, text in enumerate(rows):
        alone = model(text.unsqueeze(0))[0][0]
        assert_close(out[row, : len(text)], alone, limit=LIMIT)
    with pytest.raises(ValueError, match="right padding"):
        model(tokens.flip(1), valid=valid.flip(1))


def test_select_keeps_rows_and_their_order():
    model = shared()
    texts = [tiny_tokens(1, length, seed=length)[0] for length in (5, 9, 3)]
    tokens, valid = padded(texts, "left")
    held = model.new_cache(3, 24)
    model(tokens, held, valid=valid)
    model(tiny_tokens(3, 4, seed=5), held, commit=False)
    held.commit(torch.tensor([1, 4, 0]))
    held.select(torch.tensor([2, 1]))
    extra = tiny_tokens(3, 4, seed=5)
    assert_same(model, held, 0, texts[2], torch.tensor(7))
    assert_same(model, held, 1, torch.cat((texts[1], extra[1])), torch.tensor(7))


# --- commit and rollback -----------------------------------------------------------------------


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """(block length, accepted per batch row) of each round."""
    return [
        (rows, draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
        for rows in draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    ]


def play(
    model: K3ForCausalLM, held: K3Cache, texts: list[Tensor], script: list[tuple[int, list[int]]]
) -> list[Tensor]:
    """Run draft rounds with random drafts; returns what is committed per row."""
    for number, (rows, accepted) in enumerate(script):
        block = tiny_tokens(len(texts), rows, seed=1000 + number)
        model(block, held, commit=False)
        held.commit(accepted[0] if len(set(accepted)) == 1 else torch.tensor(accepted))
        texts = [torch.cat((t, b[:n])) for t, b, n in zip(texts, block, accepted, strict=True)]
    return texts


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from([1, 3, 21]), rounds())
def test_any_rounds_leave_the_state_of_the_committed_text(
    length: int, script: list[tuple[int, list[int]]]
):
    model, prompt = shared(), tiny_tokens(2, length)
    held = model.new_cache(2, 96)
    model(prompt, held)
    for row, text in enumerate(play(model, held, list(prompt), script)):
        assert_same(model, held, row, text, torch.tensor(7))


def fill(held: K3Cache, pattern: float) -> None:
    """Stale content in every latent slot, as in memory that another request left behind."""
    for layer in held.layers:
        if isinstance(layer, LatentState):
            layer.latents.fill_(pattern)


@CONFIGS
@pytest.mark.parametrize("pattern", [0.0, 1e30, math.nan])
@pytest.mark.parametrize("accepted", [0, 1, 7, 8])
@pytest.mark.usefixtures("poison")
def test_rejection_at_each_slot_over_dirty_memory(config: K3Config, pattern: float, accepted: int):
    model, prompt = shared(config), tiny_tokens(2, 5)
    held = model.new_cache(2, 32)
    fill(held, pattern)
    model(prompt, held)
    script = [(8, [accepted] * 2), (3, [2, 2]), (8, [accepted] * 2)]
    for row, text in enumerate(play(model, held, list(prompt), script)):
        assert_same(model, held, row, text, torch.tensor(7))


@pytest.mark.usefixtures("poison")
def test_ragged_rows_do_not_read_the_slots_of_longer_ones():
    model, prompt = shared(), tiny_tokens(2, 5)
    held = model.new_cache(2, 48)
    fill(held, 1e30)
    model(prompt, held)
    script = [(8, [8, 0]), (8, [7, 1]), (1, [1, 0])]
    for row, text in enumerate(play(model, held, list(prompt), script)):
        assert_same(model, held, row, text, torch.tensor(7))


@CONFIGS
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("undo", [K3Cache.rollback, lambda held: held.commit(0)])
def test_undoing_a_whole_block_changes_no_bit(
    config: K3Config, rows: int, undo: Callable[[K3Cache], None]
):
    model = shared(config)
    _, held = prefill(model, tiny_tokens(2, 9))
    before = [contents(held, row) for row in range(2)]
    model(tiny_tokens(2, rows, seed=4), held, commit=False)
    undo(held)
    for row in range(2):
        for name, part in contents(held, row).items():
            assert torch.equal(part, before[row][name]), name


def test_pending_rows_touch_nothing_that_is_committed():
    model = shared()
    _, held = prefill(model, tiny_tokens(2, 9))
    before = contents(held, 0)
    model(tiny_tokens(2, 8, seed=4), held, commit=False)
    assert held.lengths.tolist() == [9, 9]
    for name, part in contents(held, 0).items():
        assert torch.equal(part, before[name]), name


def test_a_second_undo_is_refused_and_harmless():
    model, prompt = shared(), tiny_tokens(2, 6)
    held = model.new_cache(2, 32)
    model(prompt, held)
    (a, b) = play(model, held, list(prompt), [(5, [2, 2])])
    for again in (held.rollback, lambda: held.commit(0), lambda: held.commit(1)):
        with pytest.raises(ValueError, match="nothing to commit"):
            again()
    assert_same(model, held, 0, a, torch.tensor(7))
    assert_same(model, held, 1, b, torch.tensor(7))


@pytest.mark.parametrize("count", [-1, 6, torch.tensor([0, 6]), torch.tensor([-1, 2])])
def test_counts_outside_the_block_raise_and_change_nothing(count: int | Tensor):
    model, prompt = shared(), tiny_tokens(2, 6)
    held = model.new_cache(2, 32)
    model(prompt, held)
    block = tiny_tokens(2, 5, seed=3)
    model(block, held, commit=False)
    with pytest.raises(ValueError, match="expected 0 to"):
        held.commit(count)
    held.commit(5)  # the block is still pending and whole
    assert_same(model, held, 0, torch.cat((prompt[0], block[0])), torch.tensor(7))


def test_counts_beyond_the_real_rows_of_a_ragged_block_raise():
    model = shared()
    held = model.new_cache(2, 32)
    model(tiny_tokens(2, 6), held)
    tokens, valid = padded([tiny_tokens(1, 4)[0], tiny_tokens(1, 2)[0]], "right")
    model(tokens, held, valid=valid, commit=False)
    for count in (3, torch.tensor([4, 3])):
        with pytest.raises(ValueError, match="expected 0 to"):
            held.commit(count)
    held.commit(torch.tensor([4, 2]))
    assert held.lengths.tolist() == [10, 8]


def test_a_pending_block_must_be_settled_first():
    model = shared()
    held = model.new_cache(1, 32)
    model(tiny_tokens(1, 3), held, commit=False)
    with pytest.raises(RuntimeError, match="a block is pending"):
        model(tiny_tokens(1, 1), held)
    with pytest.raises(RuntimeError, match="a block is pending"):
        held.select(torch.tensor([0]))


def test_a_full_cache_refuses_and_stays_usable():
    model, tokens = shared(), tiny_tokens(1, 10)
    held = model.new_cache(1, 10)
    model(tokens[:, :8], held)
    with pytest.raises(ValueError, match="max_length 10"):
        model(tokens[:, :3], held, commit=False)
    model(tokens[:, 8:], held)
    _, fresh = prefill(model, tokens)
    assert_equal_contents(held, 0, fresh, 0)


def test_drafts_cost_rows_not_states():
    """Bytes of a pending block: k, g, beta, the convolution's rows before and after it (q and k
    stay beside v, of which they are one result), per layer and token."""
    model = shared()
    H, K = TINY.kda_num_heads, TINY.kda_head_dim
    layers = TINY.num_hidden_layers - len(TINY.full_attention_layers)
    sizes = []
    for rows in (4, 8):
        _, held = prefill(model, tiny_tokens(1, 9))
        model(tiny_tokens(1, rows), held, commit=False)
        sizes.append(held.nbytes)
    per_token = 4 * layers * (2 * H * K + H + 6 * H * K)
    assert sizes[1] - sizes[0] == 4 * per_token


def test_a_commit_for_each_row_equals_one_for_all():
    """The per-row form neutralises rejected rows instead of cutting them off."""
    model, prompt = shared(), tiny_tokens(3, 6)
    held = [model.new_cache(3, 32) for _ in range(2)]
    block = tiny_tokens(3, 5, seed=3)
    for one, count in zip(held, (3, torch.tensor([3, 3, 1])), strict=True):
        model(prompt, one)
        model(block, one, commit=False)
        one.commit(count)
    for row in range(2):
        assert_equal_contents(held[1], row, held[0], row, limit=1e-6)


# --- precision over long texts -----------------------------------------------------------------


def slow_decay(steps: int) -> tuple[Tensor, ...]:
    """Inputs as a bfloat16 model makes them, decay 0.9999 per step, small random beta."""
    H, K = 2, 16
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(1, steps, H, K).bfloat16().float(), dim=-1) for _ in range(2))
    v = torch.randn(1, steps, H, K).bfloat16().float()
    g = torch.full((1, steps, H, K), math.log(0.9999))
    return q, k, v, g, 0.1 * torch.rand(1, steps, H), torch.zeros(1, H, K, K)


def in_steps(rows: int, inputs: tuple[Tensor, ...]) -> Tensor:
    """The state after all rows, in blocks of ``rows``, as decoding (1) or verifying (8) does."""
    *streams, state = inputs
    for start in range(0, streams[0].shape[1], rows):
        block = [x[:, start : start + rows] for x in streams]
        _, state = kernel.step(*block, state, block[0].shape[1])
    return state


def in_trees(rows: int, inputs: tuple[Tensor, ...]) -> Tensor:
    """As a verify pass with siblings does it: the rows to keep in front of a tree that is not."""
    *streams, state = inputs
    upto = plant(torch.arange(-1, 2 * rows - 1), None, 1, 2 * rows).upto
    for start in range(0, streams[0].shape[1], rows):
        block = [x[:, start : start + rows] for x in streams]
        both = [torch.cat((x, x), dim=1) for x in block]
        kernel.step(*both, state, rows, out=state, upto=upto)
    return state


def test_4096_slow_steps_stay_exact_on_every_path():
    inputs = slow_decay(4096)
    _, exact = kernel.recurrent(*(x.double() for x in inputs))
    paths = {
        "prefill": kernel.chunk(*inputs)[1],
        "decode": in_steps(1, inputs),
        "verify": in_steps(8, inputs),
        "verify with siblings": in_trees(8, (*inputs[:-1], inputs[-1].clone())),
    }
    for name, state in paths.items():
        assert state.dtype == torch.float32
        assert_close(state.double(), exact, dtype=torch.float32, limit=LIMIT, what=name)
    # what the limit guards against: a decay rounded to bfloat16 is exactly one
    q, k, v, g, beta, state = inputs
    rounded = kernel.chunk(q, k, v, g.exp().bfloat16().float().log(), beta, state)[1]
    assert (rounded - exact).abs().max() > 1e-2 * exact.abs().max()


def test_bfloat16_models_keep_decay_beta_and_state_in_float32():
    model = copy.deepcopy(tiny_model()).bfloat16()
    held = model.new_cache(1, 16)
    model(tiny_tokens(1, 5), held)
    model(tiny_tokens(1, 3), held, commit=False)
    held.commit(2)
    for layer in held.layers:
        if isinstance(layer, KDAState):
            assert layer.replay is not None
            kept = (layer.state, layer.replay.g, layer.replay.beta)
            assert all(t.dtype == torch.float32 for t in kept)
            # not merely widened: most values need more than bfloat16's eight bits
            for t in kept[1:]:
                assert (t != t.bfloat16().float()).float().mean() > 0.5
