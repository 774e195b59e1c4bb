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
from dspark.k3.static.cache import StaticCache
from dspark.k3.static.decode import StaticDecoder, StepOutput
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
