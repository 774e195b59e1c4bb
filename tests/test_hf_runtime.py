"""Everything the runtime does with a cache, done with those of transformers models.

Texts are compared with transformers' `generate`, greedily and in float32, so whatever goes through
siblings, batches, frames or kept prefixes must come out as if nothing had.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.frames import FrameScheduler
from dspark.runtime.hf_open import hf_target
from dspark.runtime.policies import Bands, Entropy, Fixed
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from tests.hf_tiny import tiny_hf
from tests.test_hf_targets import (
    BLOCK,
    GREEDY,
    NEW,
    Scripted,
    Target,
    drafter_for,
    generated,
    prompt_of,
)

KINDS = (
    "llama",
    "mamba2",
    pytest.param("gemma3", marks=pytest.mark.slow),
    pytest.param("kimi-linear", marks=pytest.mark.slow),
)
TREES = ("llama", "gemma3", "mistral-window")


@pytest.fixture(scope="module")
def opened() -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def find(name: str) -> Target:
        if name not in made:
            made[name] = hf_target(tiny_hf(name), name=name, end_token_ids=())
        return made[name]

    return find


class WithSiblings(Scripted):
    """Where its primary is wrong, the right token is the next best."""

    def __init__(self, text: list[int], right: list[int], vocabulary: int) -> None:
        super().__init__(text, right, vocabulary)
        self.markov_head.embed = lambda prev: prev
        self.future: list[int] = []

    def confidence_head(self, hidden: Tensor, prev: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros(hidden.shape[:-1])

    def block_hidden(self, block_embeds: Tensor, context: object) -> Tensor:
        out = super().block_hidden(block_embeds, context)
        self.future = (self.text[context.rows + 1 :] + [0] * BLOCK)[:BLOCK]  # type: ignore[attr-defined]
        return out

    def _bias(self, prev: Tensor) -> Tensor:
        second = 50.0 * F.one_hot(torch.tensor([self.future.pop(0)]), self.vocabulary)
        return super()._bias(prev) + second


@pytest.mark.parametrize("name", TREES)
def test_siblings_are_accepted_and_change_nothing(name: str, opened: Callable) -> None:
    target, prompt = opened(name), prompt_of(9)
    theirs = generated(target, prompt, NEW)
    drafter = WithSiblings(prompt + theirs, [0, 3, 1, 5, 2, 0], target.vocab_size)
    result = SpeculativeDecoder(target, drafter).generate(
        prompt, max_new_tokens=NEW, sampling=GREEDY, policy=Bands(Fixed(BLOCK), count=1)
    )
    assert result.tokens == theirs
    assert sum(record.sibling for record in result.rounds) >= 4


def test_siblings_are_refused_where_a_state_cannot_branch(opened: Callable) -> None:
    target = opened("kimi-linear")
    with pytest.raises(UserError, match="verifies chains only"):
        SpeculativeDecoder(target, drafter_for(target)).generate(
            prompt_of(3), max_new_tokens=4, sampling=GREEDY, policy=Bands(Fixed(BLOCK))
        )


@pytest.mark.parametrize("name", KINDS)
def test_requests_in_a_batch_join_and_leave(name: str, opened: Callable) -> None:
    """Five requests of their own lengths on two seats: rows accept different numbers of tokens."""
    target = opened(name)
    requests = [
        Request(prompt_of(n), NEW // 2 + n % 5, end_token_ids=()) for n in (1, 14, 3, 8, 22)
    ]
    decoder = SpeculativeDecoder(target, drafter_for(target))
    results = decoder.generate_many(requests, sampling=GREEDY, batch=2, policy=Entropy())
    for request, result in zip(requests, results, strict=True):
        theirs = generated(target, list(request.prompt_ids), request.max_new_tokens)
        assert result.tokens == theirs


@pytest.mark.parametrize("name", KINDS)
def test_frames_say_the_same(name: str, opened: Callable) -> None:
    target = opened(name)
    frames = FrameScheduler(target, drafter_for(target), max_length=64, slots=2, groups=2)
    handles = {
        n: frames.submit(Request(prompt_of(n), 8 + n % 3, end_token_ids=()))
        for n in (2, 11, 5, 7, 3)
    }
    frames.run()
    for n, handle in handles.items():
        theirs = generated(target, prompt_of(n), 8 + n % 3)
        assert handle.generation().tokens == theirs


@pytest.mark.parametrize("name", KINDS)
def test_a_kept_prefix_is_not_read_again(name: str, opened: Callable) -> None:
    target = opened(name)
    drafter = drafter_for(target)
    prefixes = PrefixCache(target, drafter, 2**24, least_tokens=4)
    decoder = SpeculativeDecoder(target, drafter)
    start = prompt_of(18)
    for tail in ([], [5, 9], [7, 7, 7]):
        prompt = start + tail
        result = decoder.generate(prompt, max_new_tokens=10, sampling=GREEDY, prefix_cache=prefixes)
        assert result.tokens == generated(target, prompt, 10)
    assert prefixes.lookup([*start, 5, 9, 4]) is not None


@pytest.mark.parametrize("name", KINDS)
def test_sampled_texts_do_not_depend_on_the_batch(name: str, opened: Callable) -> None:
    target = opened(name)
    sampling = SamplingParams(0.9, 0.95)
    requests = [Request(prompt_of(n), 9, end_token_ids=(), seed=n) for n in (4, 13, 6)]
    decoder = SpeculativeDecoder(target, drafter_for(target))
    together = decoder.generate_many(requests, sampling=sampling, batch=3)
    for request, result in zip(requests, together, strict=True):
        alone = decoder.generate(
            request.prompt_ids,
            max_new_tokens=9,
            sampling=sampling,
            end_token_ids=(),
            seed=request.seed,
        )
        assert result.tokens == alone.tokens
