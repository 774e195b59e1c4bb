"""Adaptive lengths where others had them fail: draining batches, thresholds, honest reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import (
    Auto,
    AutoSettings,
    Bands,
    Confidence,
    Delayed,
    Entropy,
    Policy,
    Throughput,
)
from dspark.runtime.records import Generation
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from tests.table_target import TableDrafter, TableTarget
from tests.test_policies import cost

GREEDY = SamplingParams()
BLOCK, VOCAB = 6, 13

ADAPTIVE: dict[str, Callable[[], Policy]] = {
    "confidence": lambda: Confidence(s_stop=0.3),
    "throughput": lambda: Throughput(cost=cost(4, 1, 8)),
    "throughput-packed": lambda: Throughput(cost=cost(4, 1, 8), packed=True),
    "throughput-delayed": lambda: Delayed(cost(4, 1, 8), batch=8),
    "auto": lambda: Auto(Confidence(s_stop=0.3), rules=AutoSettings(2, 1, 2, 4, 16)),
    "bands": lambda: Bands(Throughput(cost=cost(4, 1, 8)), high=0.9, low=0.2),
}


def decoder(noise: float = 0.5) -> SpeculativeDecoder:
    target = TableTarget.random(VOCAB, 2)
    return SpeculativeDecoder(target, TableDrafter.of(target, BLOCK, noise=noise, seed=2))


def plain(made: SpeculativeDecoder, request: Request) -> Generation:
    return plain_generate(
        made.target,
        request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=GREEDY,
        end_token_ids=(),
    )


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_batch_drains_to_its_last_row_with_every_adaptive_length(name: str) -> None:
    """Eight requests of 1 to 64 tokens leave one after the other, and nobody takes their place.

    Every round emits a token of every row still there, so the longest request bounds the rounds: a
    batch that stalls would not end. Texts are plain decoding's, and what a row drafts is accepted
    as often as alone: the tables are the same in every batch, so only where blocks are cut differs.
    """
    made = decoder()
    lengths = (1, 2, 3, 5, 9, 17, 33, 64)
    requests = [Request([3, k], most, end_token_ids=(), index=k) for k, most in enumerate(lengths)]
    together = made.generate_many(requests, sampling=GREEDY, policy=ADAPTIVE[name](), batch=8)
    for request, result in zip(requests, together, strict=True):
        metrics.check_generation(result)
        assert result.tokens == plain(made, request).tokens
        assert len(result.rounds) < request.max_new_tokens
        assert all(r.emitted >= 1 for r in result.rounds)
    rounds = metrics.pool(result.rounds for result in together)
    alone = metrics.pool(
        made.generate_many([r], sampling=GREEDY, policy=ADAPTIVE[name](), batch=1)[0].rounds
        for r in requests
    )
    here, there = metrics.acceptance_rate(rounds), metrics.acceptance_rate(alone)
    assert here is not None
    assert there is not None
    assert here > there - 0.15  # 90 to 200 verified drafts each: three standard errors and more


def test_the_ends_of_a_threshold_are_as_stated_and_the_text_is_the_same_everywhere() -> None:
    """Never stopping is the whole block, always stopping the floor; no value changes a token."""
    made = decoder()
    request = Request([3, 1], 60, end_token_ids=())
    expected = plain(made, request).tokens
    verified = {}
    for threshold in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        policy = Confidence(s_stop=threshold)
        result = made.generate_many([request], sampling=GREEDY, policy=policy)[0]
        assert result.tokens == expected
        verified[threshold] = [r.verified for r in result.rounds[:-3]]
    assert set(verified[0.0]) == {BLOCK}
    assert set(verified[1.0]) == {2}
    for h_stop, length in ((1e9, BLOCK), (0.0, 2)):
        result = made.generate_many([request], sampling=GREEDY, policy=Entropy(h_stop=h_stop))[0]
        assert result.tokens == expected
        assert {r.verified for r in result.rounds[:-3]} == {length}


def test_every_request_starts_from_the_stated_value_and_leaves_the_given_policy_alone() -> None:
    """A first round is as long after a text that is never accepted as before it."""
    made = decoder(noise=50.0)  # nothing is accepted: the length goes down
    policy = Delayed(cost(4, 1), start=(0.8,) * BLOCK, weight=0.5)
    runs = [
        made.generate([3, 1], max_new_tokens=40, sampling=GREEDY, policy=policy, end_token_ids=())
        for _ in range(2)
    ]
    lengths = [[r.verified for r in run.rounds] for run in runs]
    assert lengths[0] == lengths[1]
    assert policy.survival == pytest.approx([0.8**k for k in range(1, BLOCK + 1)])
    assert lengths[0][0] != lengths[0][10]  # it does move


# ------------------------------------------------------------------ what a report must not hide


def test_a_kernel_that_was_asked_for_and_cannot_run_stops_the_bench(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No figure under another backend's name: the run ends, and every report names what ran."""
    from dspark_eval.bench import run_bench
    from dspark_eval.settings import BenchOptions
    from tests.tiny_pair import write_pair

    if torch.cuda.is_available():
        pytest.skip("Triton can run here")
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    options = BenchOptions(
        draft=pair.draft, target=pair.target, prompts=pair.prompts, n_prompts=1, warmup=1,
        max_new_tokens=4, quiet=True,
    )  # fmt: skip
    monkeypatch.setenv("DSPARK_OPS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises((UserError, RuntimeError), match=r"[tT]riton"):
        run_bench(options)
    monkeypatch.setenv("DSPARK_OPS", "torch")
    report = run_bench(options)
    assert set(report["backends"].values()) == {"torch"}
    # and one prompt is said to be few, with no interval made of it
    assert any("few prompts" in line for line in report["extra"]["warnings"])
    assert report["accepted_length_ci95"] is None
    three = run_bench(dataclasses.replace(options, n_prompts=3))
    low, high = three["accepted_length_ci95"]
    assert low <= three["accepted_length"] <= high
