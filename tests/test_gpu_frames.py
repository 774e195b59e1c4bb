"""Frames on a GPU: two streams, late reading, and the texts of the unscheduled loop."""

from __future__ import annotations

import pytest

from dspark.runtime.frames import FrameScheduler
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Bands, Fixed, Policy
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from tests.test_gpu import GPU, GREEDY, drafter_on, target_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("policy", [Fixed(4), Bands(Fixed(4), 0.9, 0.1, 2, 1)])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, 0.95)])
def test_frames_on_two_streams_say_what_single_seats_say(
    groups: int, policy: Policy, sampling: SamplingParams
) -> None:
    target, drafter = target_on(GPU), drafter_on(GPU)
    options = {"max_length": 60, "policy": policy, "sampling": sampling}
    scheduler = FrameScheduler(target, drafter, slots=2, groups=groups, **options)
    requests = [
        Request([3 + n] * (1 + 3 * n), 5 + 4 * n, end_token_ids=(9, 40), index=n) for n in range(7)
    ]
    handles = [scheduler.submit(request) for request in requests]
    report = scheduler.run()
    for request, handle in zip(requests, handles, strict=True):
        alone = FrameScheduler(target, drafter, slots=1, groups=1, **options)
        expected = alone.submit(request)
        alone.run()
        assert handle.tokens == expected.tokens
        if sampling.greedy:
            plain = plain_generate(
                target,
                request.prompt_ids,
                max_new_tokens=request.max_new_tokens,
                sampling=sampling,
                end_token_ids=(9, 40),
            )
            assert handle.tokens == plain.tokens
    assert report.frame_ms_p50 is not None
    assert 0 < report.frame_ms_p50 <= report.frame_ms_p99
