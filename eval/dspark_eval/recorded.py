"""Plain and speculative decoding by recorded frames: what `dspark bench --graphs` measures.

Both ways replay frames of one target (`GraphDecoder`), which share its static pass and have as many
seats as prompts are decoded at once. A prompt is read by each way itself, so that the figures with
prefill hold. Alone in its seat, a text's seconds are the wall clock from its first token to its
last; of several side by side, whose prompts are read between, they are an equal share of the
seconds of all their frames. Plain decoding pass by pass answers the first prompts as well: what
recording gains, and whether a frame says what the target says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_sizes import frame_sizes
from dspark.runtime.policies import Auto, Fixed
from dspark.runtime.policies.frontier import Policy
from dspark.runtime.records import Generation, RoundRecord
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.static_pass import StaticPass
from dspark_eval import metrics
from dspark_eval.environment import describe_environment
from dspark_eval.frame_runs import Always
from dspark_eval.intervals import ratio_of_ratios
from dspark_eval.mismatches import find_mismatches
from dspark_eval.pair import Pair
from dspark_eval.speed import PromptTimings, decoded
from dspark_eval.step_times import MACHINE

EAGER_PROMPTS = 8
"""Prompts that plain decoding answers pass by pass too; it is the slow way."""
COST_PROMPTS = 4
"""Prompts that a frame of each size is timed on."""
UNDIVIDED = dict.fromkeys(("draft_ms", "verify_ms", "other_ms"))
"""Parts of a round that nobody can tell in a frame."""
_ALL_SIZES = Auto(Fixed())
"""A policy whose frames are of every size, plain steps among them."""


class Recorder:
    """Makes the decoders of a pair, for one sampling setting after the other.

    Args:
        pair: Target and drafter.
        prompts: Those that will be decoded; the longest of them and its answer fill a seat.
        seats: Prompts decoded at once.
        new: Most new tokens of an answer.
    """

    def __init__(self, pair: Pair, prompts: Sequence[list[int]], seats: int, new: int) -> None:
        self.pair, self.seats, self.new = pair, seats, new
        self.max_length = max(map(len, prompts)) + new
        self._static: StaticPass | None = None

    def frames(self, sampling: SamplingParams, policy: Policy) -> Frames:
        """Both ways. Raises UserError for a pair or a policy that a frame cannot hold."""
        fast, plain = self._decoder(sampling, policy), self._decoder(sampling, None)
        return Frames(plain, fast, self.new)

    def _decoder(self, sampling: SamplingParams, policy: Policy | None) -> GraphDecoder:
        decoder = GraphDecoder(
            self.pair.target,
            None if policy is None else self.pair.drafter,
            seats=self.seats,
            max_length=self.max_length,
            policy=policy,
            sampling=sampling,
            static=self._static,
        )
        self._static = decoder.decoder  # the next ones share it
        return decoder

    @property
    def timings(self) -> int:
        """How often `costs` calls `advance`."""
        return 1 + len(frame_sizes(_ALL_SIZES, self.pair.drafter.config.block_size))

    def costs(self, prompts: Sequence[Sequence[int]], advance: Callable[[], None]) -> CostModel:
        """Median seconds of a greedy frame of each size, as a cost model.

        A frame of any size drafts the whole block, so drafting has no seconds of its own.
        `advance` is called after each size.
        """
        decoder = self._decoder(SamplingParams(), _ALL_SIZES)
        some = [list(ids) for ids in islice(cycle(prompts), max(COST_PROMPTS, self.seats))]
        seconds: dict[int, float] = {}
        for size in (decoder.sizes[-1], *decoder.sizes):  # what runs first, runs slowly
            decoder.rule = Always(size)
            decoder.frame_s.clear()
            for start in range(0, len(some), self.seats):
                _decode(decoder, some[start : start + self.seats], 0, self.new)
            seconds[size] = float(np.median(decoder.frame_s))
            advance()
        drafts = {size: 0.0 for size in decoder.sizes if size}
        verify = {1 + size: each for size, each in seconds.items()}
        target = self.pair.target
        environment = describe_environment(target.device, target.dtype)
        return CostModel(
            (BatchCosts(self.seats, seconds[0], drafts, verify, 0.0),),
            target.name,
            self.pair.drafter_name,
            round(sum(map(len, some)) / len(some)),
            {key: environment[key] for key in MACHINE},
            {**environment, "frames": in_a_word(decoder)},
        )


@dataclass(frozen=True, eq=False)
class Frames:
    """Plain and speculative frames of one sampling setting."""

    plain_decoder: GraphDecoder
    fast_decoder: GraphDecoder
    new: int

    def plain(self, prompts: Sequence[list[int]], seed: int) -> list[Generation]:
        """A token a frame; see `speed.DecodeMany`."""
        return _decode(self.plain_decoder, prompts, seed, self.new)

    def speculative(self, prompts: Sequence[list[int]], seed: int) -> list[Generation]:
        """Draft and verify in each frame."""
        return _decode(self.fast_decoder, prompts, seed, self.new)

    def document(self, rounds: Sequence[RoundRecord], eager: dict[str, Any]) -> dict[str, Any]:
        """For JSON: what was recorded, what a frame took, and decoding pass by pass beside it."""
        spent = [1e3 * record.verify_s for record in rounds]
        return {
            "frames": in_a_word(self.plain_decoder, self.fast_decoder),
            "seats": self.fast_decoder.seats.batch,
            "max_length": self.fast_decoder.max_length,
            "sizes": list(self.fast_decoder.sizes),
            "frame_ms_mean": float(np.mean(spent)) if spent else None,
            "eager": eager,
        }


def in_a_word(*decoders: GraphDecoder) -> str:
    """What ran: "recorded", or "unrecorded" where frames are called and not replayed."""
    return "recorded" if all(decoder.turns.recorded for decoder in decoders) else "unrecorded"


def _decode(
    decoder: GraphDecoder, prompts: Sequence[list[int]], seed: int, new: int
) -> list[Generation]:
    before = len(decoder.frame_s)
    asked = [Request(prompt, new, seed=seed + at) for at, prompt in enumerate(prompts)]
    texts = decoder.generate_many(asked)
    if decoder.seats.batch == 1:
        return texts
    share = sum(decoder.frame_s[before:]) / len(texts)
    return [replace(text, decode_s=share) for text in texts]


def measure_eager(
    pair: Pair,
    prompts: Sequence[list[int]],
    timings: Sequence[PromptTimings],
    sampling: SamplingParams,
    *,
    new: int,
    seed: int,
    batch: int,
) -> dict[str, Any]:
    """Plain decoding pass by pass of the first prompts, one at a time, beside plain frames.

    `mismatches`: greedy texts that part, None when sampling. Where frames had a `batch` of
    seats, no ratio: more than one thing differs.
    """
    few = list(prompts[:EAGER_PROMPTS])
    decode = pair.plain(sampling, new)
    decode(few[0], seed)  # not counted
    beside = [
        PromptTimings(len(prompt), [decode(prompt, seed + at)], entry.plain[:1])
        for at, (prompt, entry) in enumerate(zip(few, timings, strict=False))
    ]
    eager = np.array([decoded(entry.plain) for entry in beside])
    both = np.concatenate([[decoded(entry.speculative) for entry in beside], eager], axis=1)
    parted = find_mismatches(pair.target, few, beside) if sampling.greedy else None
    interval = metrics.bootstrap_ci95(both, ratio_of_ratios, seed=seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens_per_s, ratio = (
            float(x) for x in (_rate(eager.sum(0)), ratio_of_ratios(both.sum(0)))
        )
    return {
        "n_prompts": len(few),
        "plain_tokens_per_s": _finite(tokens_per_s),
        "plain_tokens_per_s_ci95": metrics.bootstrap_ci95(eager, _rate, seed=seed),
        "frames_over_eager": _finite(ratio) if batch == 1 else None,
        "frames_over_eager_ci95": interval if batch == 1 else None,
        "mismatches": None if parted is None else [asdict(entry) for entry in parted],
    }


def frame_warnings(graphs: Mapping[str, Any] | None) -> list[str]:
    """That frames ran which were not recorded; None: no frames were asked for."""
    if graphs is None or graphs["frames"] == "recorded":
        return []
    return [
        "--graphs: this device records no frames; unrecorded ones ran, slower than they will be"
    ]


def _rate(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
