"""The static pass against the ordinary decoder: same rows, same commits, same numbers.

The ordinary cache is the oracle: it has its own tests against fresh prefills. Both see the same
prompts, the same blocks and the same ragged counts, so that any state that a static step leaves
behind wrongly shows in the logits of a later one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.mxfp4 import dequantise, quantise
from dspark.k3.static.cache import StaticCache
from dspark.k3.static.decode import StaticDecoder, StepOutput
from dspark.k3.static.weights import tensors
from dspark.taps import TapSet
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

CONFIGS = {
    "k3": TINY,
    "kimi_linear": PLAIN,
    "no_residual_bank": replace(TINY, attn_res_block_size=None),
    "wide_experts": replace(TINY, routed_expert_hidden_size=None, latent_moe_norm=False),
    "softplus": replace(TINY, kda_gate_lower_bound=None),
    "low_rank_gate": replace(TINY, kda_full_rank_output_gate=False),
    "dense": replace(TINY, num_experts=0, num_experts_per_token=0, num_shared_experts=0),
    "tied": replace(TINY, tie_word_embeddings=True),
}
EXACT = 1e-5
ROWS = 5


def prefilled(
    model: K3ForCausalLM, prompts: list[int], decoder: StaticDecoder, room: int = 40
) -> tuple[K3Cache, StaticCache]:
    """The same texts in both caches; a static seat more than there are texts stays empty."""
    ordinary = model.new_cache(len(prompts), room)
    static = decoder.new_cache(len(prompts), room - ROWS, ROWS)
    for row, length in enumerate(prompts):
        alone = model.new_cache(1, room)
        if length:
            model(tiny_tokens(1, length, model.config, seed=row), alone)
        ordinary.put(row, alone)
        static.load(row, alone)
    return ordinary, static


def both(
    model: K3ForCausalLM,
    decoder: StaticDecoder,
    caches: tuple[K3Cache, StaticCache],
    tokens: Tensor,
    taps: TapSet | None = None,
    parents: Tensor | None = None,
) -> StepOutput:
    """One pending block in both; asserts that they agree."""
    hidden, tapped = model(tokens, caches[0], parents=parents, taps=taps, commit=False)
    expected = model.lm_head(hidden).float()
    out = decoder.step(tokens, caches[1], parents=parents, taps=taps)
    assert_close(decoder.logits(out.last), expected, limit=EXACT, what="logits")
    if tapped is not None:
        assert out.taps is not None
        assert_close(out.taps, tapped, limit=EXACT, what="taps")
    return out


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_blocks_and_ragged_counts_follow_the_ordinary_cache(config: K3Config) -> None:
    model = tiny_model(config)
    decoder = StaticDecoder(model)
    caches = prefilled(model, [7, 1, 4], decoder)
    kind = "residual" if config.attn_res_block_size is None else "attn_res_mixture"
    taps = TapSet((0, 3, 6), kind)
    generator = torch.Generator().manual_seed(3)
    for rows in (1, 5, 3, 1, 4, 2, 5, 1, 1):
        tokens = torch.randint(3, config.vocab_size, (3, rows), generator=generator)
        both(model, decoder, caches, tokens, taps)
        counts = torch.randint(0, rows + 1, (3,), generator=generator)
        caches[0].commit(counts)
        caches[1].commit(counts)
        assert torch.equal(caches[0].lengths, caches[1].lengths)


@torch.no_grad()
def test_experts_of_more_rows_than_a_matrix_instruction_holds() -> None:
    """18 rows of 6 seats are one call, and say which experts each row chose."""
    model = tiny_model(TINY)
    decoder = StaticDecoder(model)
    caches = prefilled(model, [7, 1, 4, 2, 9, 3], decoder)
    out = both(model, decoder, caches, tiny_tokens(6, 3, TINY))
    layers = sum(layer.moe for layer in model.model.decoder_layers)
    assert [c.shape for c in out.chosen] == [(18, TINY.num_experts_per_token)] * layers


@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])
@torch.no_grad()
def test_plain_steps_fold_at_once(config: K3Config) -> None:
    model = tiny_model(config)
    decoder = StaticDecoder(model)
    ordinary, _ = prefilled(model, [6, 2], decoder)
    plain = decoder.new_cache(2, 20, slots=False)
    for seat in range(2):
        plain.load(seat, ordinary, seat)
    everything = torch.ones(2, dtype=torch.int64)
    for step in range(6):
        tokens = tiny_tokens(2, 1, config, seed=step)
        hidden, _ = model(tokens, ordinary)
        out = decoder.step(tokens, plain)
        assert_close(decoder.logits(out.last), model.lm_head(hidden).float(), limit=EXACT)
        plain.commit(everything)


@pytest.mark.parametrize("kind", ["attn_res_mixture", "raw_prefix"])
@torch.no_grad()
def test_trees_and_their_paths_follow_the_ordinary_cache(kind: str) -> None:
    model = tiny_model()
    decoder = StaticDecoder(model)
    caches = prefilled(model, [5, 9], decoder)
    taps = TapSet((1, 2, 6), kind)
    rounds = [
        (torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 3]]), [[0, 2, 4], [0, 1, 3]]),
        (torch.tensor([-1, -1, 1, 0, 2]), [[1, 2, 4], [0, 3, -1]]),
        (torch.tensor([-1, 0, 1, 2, 3]), [[0, 1, 2], [-1, -1, -1]]),
        (torch.tensor([-1, 0, 0, 0, 0]), [[0, 4], [0, 1]]),
        (torch.tensor([-1]), [[0], [0]]),
    ]
    for step, (parents, accepted) in enumerate(rounds):
        tokens = tiny_tokens(2, parents.shape[-1], seed=step)
        both(model, decoder, caches, tokens, taps, parents)
        path = torch.tensor(accepted)
        caches[0].commit_path(path)
        counts = (path >= 0).sum(1)
        own = torch.arange(path.shape[1]).expand_as(path)
        caches[1].commit(counts, torch.where(path >= 0, path, own))
        assert torch.equal(caches[0].lengths, caches[1].lengths)


@torch.no_grad()
def test_seats_come_and_go_and_rejected_rows_may_hold_anything() -> None:
    """A rejected row of NaN, an empty seat and a request that joins leave the others alone."""
    model = tiny_model()
    decoder = StaticDecoder(model)
    caches = prefilled(model, [4, 0, 3], decoder)
    both(model, decoder, caches, tiny_tokens(3, 4))
    counts = torch.tensor([2, 0, 1])
    caches[0].commit(counts)
    caches[1].commit(counts)
    static = caches[1]
    for held in (static.rows[:, :, 3:], static.decay, static.beta):
        for seat, kept in enumerate(counts.tolist()):
            held[:, seat, kept:] = torch.nan
    for seat, length in enumerate(static.lengths.tolist()):
        static.latents[:, seat, length:] = torch.nan
    alone = model.new_cache(1, 40)
    model(tiny_tokens(1, 11, seed=9), alone)
    caches[0].put(1, alone)
    static.load(1, alone)
    both(model, decoder, caches, tiny_tokens(3, 3, seed=5))
    counts = torch.tensor([3, 1, 2])
    caches[0].commit(counts)
    static.commit(counts)
    # a replay that is still pending is folded on the way
    static.load(0, caches[0], 2)
    caches[0].restore(0, caches[0].snapshot(2))
    both(model, decoder, caches, tiny_tokens(3, 2, seed=6))


@torch.no_grad()
@pytest.mark.parametrize("seats", [1, 3])
@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi-linear"])
def test_plain_steps_among_drafts_fold_their_rows(config: K3Config, seats: int) -> None:
    """What waits in the slots is folded by the first of them, and a draft goes on from the last."""
    model = tiny_model(config)
    decoder = StaticDecoder(model)
    caches = prefilled(model, [5, 2, 9][:seats], decoder)
    theirs, mine = caches
    for step, rows in enumerate((4, 1, 1, 1, 3, 4, 1)):
        plain = rows == 1
        waits = bool(mine.accepted.any())
        used = mine.folding(waits=waits) if plain else mine
        both(model, decoder, (theirs, used), tiny_tokens(seats, rows, config, seed=step))
        counts = torch.ones(seats, dtype=torch.int64) if plain else torch.tensor([2, 0, 3][:seats])
        theirs.commit(counts)
        used.commit(counts)
        if plain:
            mine.accepted.zero_()
        assert torch.equal(theirs.lengths, mine.lengths)


@torch.no_grad()
def test_more_rows_than_kernels_take_go_in_parts() -> None:
    """Five seats of five rows: 25 rows, experts in two parts."""
    model = tiny_model()
    decoder = StaticDecoder(model)
    caches = prefilled(model, [3, 1, 8, 2, 5], decoder)
    out = both(model, decoder, caches, tiny_tokens(5, 5))
    assert [len(chosen) for chosen in out.chosen] == [25] * 6


@torch.no_grad()
def test_a_text_that_does_not_fit_is_refused() -> None:
    model = tiny_model()
    decoder = StaticDecoder(model)
    alone = model.new_cache(1, 40)
    model(tiny_tokens(1, 11), alone)
    with pytest.raises(ValueError, match="11 tokens into seats of 10"):
        decoder.new_cache(1, 10).load(0, alone)
    other = StaticDecoder(tiny_model(PLAIN)).new_cache(1, 20)
    with pytest.raises(ValueError, match="another configuration"):
        other.load(0, alone)


@torch.no_grad()
def test_weights_are_shared_and_counted() -> None:
    """Packing leaves the model's results as they are, and stores no big matrix twice."""
    model = tiny_model()
    tokens = tiny_tokens(1, 6)
    before = model(tokens)[0]
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    decoder = StaticDecoder(model)
    assert_close(model(tokens)[0], before, limit=EXACT)
    memory = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in (*model.parameters(), *tensors(decoder.weights))
    }
    assert sum(memory.values()) < 1.03 * parameters
    moe = TINY.num_experts * decoder.weights.expert_nbytes
    table = decoder.weights.embedding.numel() * 4
    assert decoder.weights.shared_nbytes + moe + table == pytest.approx(parameters, rel=0.01)


@torch.no_grad()
def test_experts_in_mxfp4_are_those_the_model_has_after_packing() -> None:
    """Weights that MXFP4 can hold come back bit for bit, so both must say the same."""
    config = replace(TINY, moe_intermediate_size=32, routed_expert_hidden_size=96)
    model = tiny_model(config)
    for layer in model.model.decoder_layers:
        if layer.moe:
            for weight in (p for p in layer.block_sparse_moe.experts.parameters()):
                weight.copy_(dequantise(*quantise(weight), torch.float32))
    decoder = StaticDecoder(model, mxfp4=True)
    caches = prefilled(model, [5], decoder)
    both(model, decoder, caches, tiny_tokens(1, 3, config))
    assert decoder.weights.expert_nbytes < StaticDecoder(model).weights.expert_nbytes / 7
