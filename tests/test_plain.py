"""Plain decoding and batch generation on a table-driven target."""

from __future__ import annotations

import pytest
import torch

from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from tests.table_target import TableTarget

GREEDY = SamplingParams()
PROMPT = [3, 1, 4]


def _plain(target: TableTarget, prompt: list[int], new: int, **options: object) -> Generation:
    return plain_generate(target, prompt, max_new_tokens=new, sampling=GREEDY, **options)


def test_plain_streams_what_it_returns() -> None:
    target = TableTarget.random(9, 3)
    stream: list[list[int]] = []
    result = _plain(target, PROMPT, 20, on_tokens=stream.append)
    assert stream == [[t] for t in result.tokens]
    assert result.rounds == []
    assert target.caches[-1].rows == [(PROMPT + result.tokens)[:-1]]


def test_the_targets_own_end_tokens_are_the_default() -> None:
    target = TableTarget.random(9, 3)
    text = _plain(target, PROMPT, 20).tokens
    target.end_token_ids = (text[4],)
    assert _plain(target, PROMPT, 20).tokens == text[: text.index(text[4]) + 1]
    assert _plain(target, PROMPT, 20, end_token_ids=()).tokens == text


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0), SamplingParams(0.7, 0.9, 4)])
def test_a_row_of_a_batch_is_the_text_it_is_alone(sampling: SamplingParams) -> None:
    target = TableTarget.random(9, 6, scale=1.0)
    prompts = [torch.randint(0, 9, (n,)).tolist() for n in (3, 17, 64, 1, 3, 8)]
    options = {"max_new_tokens": 25, "sampling": sampling, "end_token_ids": (1, 2, 5), "seed": 11}
    together = generate_batch(target, prompts, **options)
    selected = target.caches[-1].rows
    assert len(selected) < len(prompts)  # rows did leave
    assert len({len(text) for text in together}) > 1
    for i, prompt in enumerate(prompts):
        assert generate_batch(target, [prompt], **options, indices=[i]) == [together[i]]
    backwards = generate_batch(target, prompts[::-1], **options, indices=range(5, -1, -1))
    assert backwards == together[::-1]
    for text in together:
        assert len(text) == 25 or text[-1] in (1, 2, 5)
        assert not {1, 2, 5} & set(text[:-1])


def test_greedy_batch_equals_plain() -> None:
    target = TableTarget.random(9, 6)
    prompts = [torch.randint(0, 9, (n,)).tolist() for n in (3, 17, 64)]
    batch = generate_batch(target, prompts, max_new_tokens=25, sampling=GREEDY)
    assert batch == [_plain(target, prompt, 25).tokens for prompt in prompts]
    assert generate_batch(target, [], max_new_tokens=3, sampling=GREEDY) == []
    assert generate_batch(target, prompts, max_new_tokens=1, sampling=GREEDY) == [
        text[:1] for text in batch
    ]
