"""Targets from transformers against transformers itself: `generate`, token for token, in float32.

Every architecture is a tiny random model of which one thing is known: what its own `generate` says.
The loops of dspark must say the same, whatever a drafter proposes: noise, or the right tokens for a
prescribed number of slots, so that every number of accepted tokens is committed in changing order.
Windows are 8 tokens, texts are several times longer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.hf_open import hf_target
from dspark.runtime.hf_replay import ReplayTarget
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark.taps import TapSet
from tests.hf_tiny import REPLAY, ROWS, tiny_hf

Target = RowTarget | ReplayTarget
GREEDY = SamplingParams()
BLOCK, NEW = 5, 24
ONE_BY_ONE = {"mamba", "jamba"}
"""Their caches give wrong states when several rows follow a state: transformers', not ours."""

ALWAYS = {
    "llama", "qwen2-window", "qwen3", "mistral-window", "gemma2", "gemma3", "granite", "cohere2",
    "gpt-neox", "gpt-oss", "kimi-linear", "qwen3-next", "mamba", "mamba2", "jamba", "bloom",
}  # fmt: skip
"""What differs most; the others only in the whole suite."""

every_model = pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow)
        for name in (*ROWS, *REPLAY)
    ],
)


@pytest.fixture(scope="module")
def opened() -> Callable[[str], Target]:
    """Targets by name, opened once."""
    made: dict[str, Target] = {}

    def find(name: str) -> Target:
        if name not in made:
            made[name] = hf_target(tiny_hf(name), name=name, end_token_ids=())
        return made[name]

    return find


def prompt_of(length: int, vocabulary: int = 120) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def generated(target: Target, prompt: list[int], count: int) -> list[int]:
    """What transformers says."""
    ids = torch.tensor([prompt])
    model = target.parts.model
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def drafter_for(target: Target) -> DSparkDrafter:
    torch.manual_seed(2)
    return DSparkDrafter(
        DraftConfig(
            hidden_size=target.hidden_size,
            num_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            vocab_size=target.table_size,
            num_target_layers=target.num_layers,
            target_layer_ids=(0, 2),
            target_tap_kind="residual",
            mask_token_id=0,
            block_size=BLOCK,
            markov_rank=4,
        )
    )


class Scripted:
    """Proposes a known text as far as `right[round]` tokens, then something else."""

    calibration = confidence_head = draft_ids = None
    taps = TapSet((0, 3), "residual")

    def __init__(self, text: list[int], right: list[int], vocabulary: int) -> None:
        self.text, self.right, self.vocabulary = text, list(right), vocabulary
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
        context.rows += features.shape[1] if counts is None else int(torch.as_tensor(counts))

    def block_hidden(self, block_embeds: Tensor, context: SimpleNamespace) -> Tensor:
        right = self.right.pop(0) if self.right else BLOCK
        future = (self.text[context.rows + 1 :] + [0] * BLOCK)[:BLOCK]
        self.plan = [t if k < right else (t + 1) % self.vocabulary for k, t in enumerate(future)]
        return torch.zeros_like(block_embeds)

    def _bias(self, prev: Tensor) -> Tensor:
        return 99.0 * F.one_hot(torch.tensor([self.plan.pop(0)]), self.vocabulary)


@every_model
def test_each_model_gets_the_fastest_adapter_that_is_right(name: str, opened: Callable) -> None:
    target = opened(name)
    assert isinstance(target, RowTarget if name in ROWS else ReplayTarget)
    assert target.supports_trees == (name in ROWS)
    assert any("one token at a time" in note for note in target.notes) == (name in ONE_BY_ONE)
    assert bool(target.notes) == (name in REPLAY)


@every_model
@pytest.mark.parametrize("length", [1, 19])
def test_greedy_equals_generate(name: str, length: int, opened: Callable) -> None:
    """Plain, with noise as proposals one at a time and by the block, and through every count."""
    target, prompt = opened(name), prompt_of(length)
    theirs = generated(target, prompt, NEW)
    plain = plain_generate(target, prompt, max_new_tokens=NEW, sampling=GREEDY)
    assert plain.tokens == theirs
    drafter = SpeculativeDecoder(target, drafter_for(target))
    for draft_length in (BLOCK,) if length > 1 else (1, BLOCK):
        drafted = drafter.generate(
            prompt, max_new_tokens=NEW, sampling=GREEDY, draft_length=draft_length
        )
        assert drafted.tokens == theirs
    right = torch.randperm(BLOCK + 1, generator=torch.Generator().manual_seed(length)).tolist()
    scripted = Scripted(prompt + theirs, right, target.vocab_size)
    result = SpeculativeDecoder(target, scripted).generate(
        prompt, max_new_tokens=NEW, sampling=GREEDY, draft_length=BLOCK
    )
    assert result.tokens == theirs
    full = [r.accepted for r in result.rounds if r.drafted == BLOCK]
    assert full == (right + [BLOCK] * NEW)[: len(full)]
    assert len(set(full)) >= 4


@every_model
def test_texts_are_not_loops(name: str, opened: Callable) -> None:
    """A text that repeats itself would forgive a wrong cache."""
    text = generated(opened(name), prompt_of(6), NEW)
    assert len(set(text)) > 6


@every_model
def test_a_ragged_batch_equals_its_rows(name: str, opened: Callable) -> None:
    """Prompts of 3, 17 and 40 tokens; rows leave as they end."""
    target = opened(name)
    prompts = [prompt_of(n) for n in (3, 17, 40)]
    options = {"max_new_tokens": 16, "sampling": GREEDY, "end_token_ids": range(0, 120, 11)}
    together = generate_batch(target, prompts, **options)
    for i, prompt in enumerate(prompts):
        assert generate_batch(target, [prompt], **options, indices=[i]) == [together[i]]
        theirs = generated(target, prompt, len(together[i]))
        assert together[i] == theirs


@every_model
def test_logits_and_taps_are_the_models_own(name: str, opened: Callable) -> None:
    """Head with its scale and cap, and the residual stream after each layer but the last."""
    target, prompt = opened(name), prompt_of(11)
    taps = TapSet((0, 1, 2), "residual")
    out = target.forward(torch.tensor([prompt]), target.new_cache(1, 16), taps=taps, commit=True)
    whole = target.parts.model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(target.logits(out.hidden), whole.logits, atol=2e-4, rtol=2e-4)
    some = torch.tensor([5, 99, 7])
    torch.testing.assert_close(target.head(some)(out.hidden), target.logits(out.hidden)[..., some])
    first = whole.hidden_states[0]  # what layer 0 reads; in older Mambas, what it has made of it
    older = name.startswith("mamba") and not torch.equal(
        first, target.embed(torch.tensor([prompt]))
    )
    before = 0 if older else 1
    states = torch.cat([whole.hidden_states[i + before] for i in taps.layer_ids], dim=-1)
    torch.testing.assert_close(out.taps, states, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", list(REPLAY))
def test_a_chain_target_refuses_trees(name: str, opened: Callable) -> None:
    target = opened(name)
    with pytest.raises(ValueError, match="verifies chains only"):
        target.forward(
            torch.tensor([[3, 4]]),
            target.new_cache(1, 8),
            parents=torch.tensor([[-1, 0]]),
            commit=False,
        )
