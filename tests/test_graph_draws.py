"""Random numbers of recorded frames: no text reads one twice, and no two texts share any."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import Tensor

from dspark import ops
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.policies import Auto, Fixed
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from tests.k3_tiny import tiny_model
from tests.test_graph_decode import ATTENTION, PROMPTS, SMALL
from tests.tiny_drafters import make_drafter


@pytest.mark.parametrize("draft", [False, True])
def test_no_number_is_read_twice(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first token, which a prompt's last row gives, and of frames of any size; seats are
    used again, and two requests ask the same."""
    target = K3Target(tiny_model(SMALL), "tiny", ())
    drafter = make_drafter(ATTENTION) if draft else None
    policy = Auto(Fixed()) if draft else None
    decoder = GraphDecoder(
        target, drafter, seats=2, max_length=30, policy=policy, sampling=SamplingParams(1.0)
    )
    read: Counter[tuple[int, int, int]] = Counter()
    uniform = ops.uniform

    def recorded(seed: Tensor, position: Tensor, stream: int, count: int) -> Tensor:
        seats = decoder.seats
        for seat in range(len(seed)):
            if seed is not seats.seed or seats.left[seat] > 0:  # what an idle seat reads is dropped
                read[int(seed[seat]), int(position[seat]), stream] += 1
        return uniform(seed, position, stream, count)

    monkeypatch.setattr(ops, "uniform", recorded)
    asked = [Request(prompt, 9, end_token_ids=(), index=i) for i, prompt in enumerate(PROMPTS)]
    asked.append(Request(PROMPTS[0], 9, end_token_ids=(), index=len(asked)))
    found = decoder.generate_many(asked)
    assert max(read.values()) == 1
    judged = Counter(seed for seed, _, stream in read if stream == ops.JUDGE_STREAM)
    if draft:
        rounds = sorted(1 + len(text.rounds) for text in found)
        assert any(stream == ops.DRAFT_STREAM for _, _, stream in read)
    else:
        rounds = [9] * len(asked)
    assert sorted(judged.values()) == rounds
