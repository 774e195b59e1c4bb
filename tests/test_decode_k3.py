"""The decode loop on a tiny K3: recurrent state, latents and windows through every accept count.

A table target forgets nothing it should not; a hybrid one does if a rejected row leaks into its
recurrent state. The scripted drafter here is right for a prescribed number of tokens per round, so
that every accepted length from 0 to the block is committed, in changing order.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark.taps import TapSet
from tests.k3_tiny import TINY, tiny_model

GREEDY = SamplingParams()
BLOCK = 5


@pytest.fixture(scope="module")
def target() -> K3Target:
    return K3Target(tiny_model(), "tiny", ())


class _Scripted:
    """Proposes `text` as far as `right[round]` tokens, then something else."""

    calibration = confidence_head = draft_ids = None
    taps = TapSet((0, 1), "attn_res_mixture")

    def __init__(self, text: list[int], right: list[int]) -> None:
        self.text, self.right = text, list(right)
        self.config = SimpleNamespace(block_size=BLOCK, mask_token_id=0)
        self.markov_head = SimpleNamespace(
            start=lambda batch: None,
            step=lambda prev, hidden, state: (prev, state),
            bias=self._bias,
            embed=None,
        )
        self.plan: list[int] = []

    def new_context(self, batch: int, max_length: int) -> SimpleNamespace:
        return SimpleNamespace(rows=0)

    def extend(self, context: SimpleNamespace, features: Tensor, counts: object = None) -> None:
        context.rows += features.shape[1]

    def block_hidden(self, block_embeds: Tensor, context: SimpleNamespace) -> Tensor:
        right = self.right.pop(0) if self.right else BLOCK
        future = (self.text[context.rows + 1 :] + [0] * BLOCK)[:BLOCK]
        self.plan = [t if k < right else (t + 1) % TINY.vocab_size for k, t in enumerate(future)]
        return torch.zeros_like(block_embeds)

    def _bias(self, prev: Tensor) -> Tensor:
        return 9.0 * F.one_hot(torch.tensor([self.plan.pop(0)]), TINY.vocab_size)


@pytest.mark.parametrize("seed", range(6))
def test_greedy_equals_plain_through_every_accepted_length(target: K3Target, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, TINY.vocab_size, (1 + 3 * seed,), generator=generator).tolist()
    plain = plain_generate(target, prompt, max_new_tokens=60, sampling=GREEDY)
    assert len(set(plain.tokens)) > 15  # a text stuck in a loop would forgive a wrong state
    right = torch.randperm(3 * (BLOCK + 1), generator=generator).remainder(BLOCK + 1).tolist()
    drafter = _Scripted(prompt + plain.tokens, right)
    result = SpeculativeDecoder(target, drafter).generate(
        prompt, max_new_tokens=60, sampling=GREEDY, draft_length=BLOCK
    )
    assert result.tokens == plain.tokens
    full = [r.accepted for r in result.rounds if r.drafted == BLOCK]
    assert full == (right + [BLOCK] * 60)[: len(full)]
    assert set(full) == set(range(BLOCK + 1))


def real_drafter() -> DSparkDrafter:
    """A random drafter for the tiny target."""
    torch.manual_seed(1)
    return DSparkDrafter(
        DraftConfig(
            hidden_size=TINY.hidden_size,
            num_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            vocab_size=TINY.vocab_size,
            num_target_layers=TINY.num_hidden_layers,
            target_layer_ids=(0, 1),
            target_tap_kind="attn_res_mixture",
            mask_token_id=3,
            block_size=BLOCK,
            markov_rank=8,
        )
    )


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, 0.9)])
def test_the_real_drafter_runs_the_loop(target: K3Target, sampling: SamplingParams) -> None:
    drafter = real_drafter()
    prompt = [5, 6, 7]
    result = SpeculativeDecoder(target, drafter).generate(
        prompt, max_new_tokens=30, sampling=sampling, draft_length=4
    )
    assert len(result.tokens) == 30
    for r in result.rounds:
        assert len(r.confidence) == r.drafted
        assert all(0 < c < 1 for c in r.confidence)
        assert all(0 <= h <= torch.log(torch.tensor(TINY.vocab_size)) + 1e-4 for h in r.entropy)
    if sampling.greedy:
        plain = plain_generate(target, prompt, max_new_tokens=30, sampling=GREEDY)
        assert result.tokens == plain.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8)])
def test_ragged_batches_equal_single_rows(target: K3Target, sampling: SamplingParams) -> None:
    """Prompts of 3, 17 and 64 tokens; rows leave the batch as they end."""
    prompts = [torch.randint(0, TINY.vocab_size, (n,)).tolist() for n in (3, 17, 64, 5)]
    options = {"max_new_tokens": 24, "sampling": sampling, "end_token_ids": range(0, 200, 16)}
    together = generate_batch(target, prompts, **options)
    assert len({len(text) for text in together}) > 1
    for i, prompt in enumerate(prompts):
        assert generate_batch(target, [prompt], **options, indices=[i]) == [together[i]]
