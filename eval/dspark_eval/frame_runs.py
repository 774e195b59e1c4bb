"""Runs of recorded frames side by side: plain and speculative, on the same prompts and seeds.

With one seat a run's time is the wall clock from the first token on; with more, prompts come in
between, and it is the sum of its frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.draft.model import DSparkDrafter
from dspark.k3.static.decode import StaticDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_frame import FrameResult
from dspark.runtime.k3_target import K3Target
from dspark.runtime.records import Generation, RoundRecord
from dspark.runtime.requests import Outcome, Request
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval import metrics
from dspark_eval.device_profile import profile
from dspark_eval.energy import EnergyMeter, measure_energy
from dspark_eval.frame_document import speedup
from dspark_eval.mismatches import NEAR_TIE_STEPS, first_divergence, top2_gap

PROFILED = 20


@dataclass(frozen=True)
class Subject:
    """A pair of target and drafter, its static pass, and how it is asked."""

    target: K3Target
    drafter: DSparkDrafter
    static: StaticDecoder
    sampling: SamplingParams
    batch: int
    max_length: int

    def decoder(self, length: int | None) -> GraphDecoder:
        """Plain frames for None, else speculative ones of that draft length."""
        return GraphDecoder(
            self.target,
            None if length is None else self.drafter,
            seats=self.batch,
            max_length=self.max_length,
            draft_length=length,
            sampling=self.sampling,
            static=self.static,
        )


class Always:
    """One size, whatever is said."""

    def __init__(self, size: int) -> None:
        self._size = size

    def join(self, seat: int) -> None:
        """Nothing depends on the text."""

    def next(self, seats: Sequence[int]) -> int:
        return self._size

    def learn(self, said: Mapping[int, Outcome]) -> None:
        """Nothing is learnt."""

    def observe(self, record: RoundRecord) -> None:
        """Nothing is learnt."""


@dataclass
class Run:
    """What one way of decoding did on a set of prompts."""

    texts: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    frame_s: list[float] = field(default_factory=list)
    frame_sizes: list[int] = field(default_factory=list)

    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        frames = np.array(self.frame_s) * 1e3
        return {
            "tokens_per_s": self.rate(),
            "tokens": sum(self.tokens),
            "by_prompt": {
                "tokens": [max(len(text.tokens) - 1, 0) for text in self.texts],
                "rounds": [len(text.rounds) for text in self.texts],
                "emitted": [sum(r.emitted for r in text.rounds) for text in self.texts],
            },
            "by_batch": {"tokens": self.tokens, "seconds": self.seconds},
            "frame_ms_p50": float(np.percentile(frames, 50)),
            "frame_ms_p99": float(np.percentile(frames, 99)),
        }


def decode(
    decoder: GraphDecoder, prompts: Sequence[Sequence[int]], new: int, first: int, run: Run
) -> None:
    """One batch of prompts into ``run``; its time is that of its frames, prompts left out."""
    asked = [Request(p, new, index=first + i) for i, p in enumerate(prompts)]
    decoder.frame_s.clear()
    decoder.frame_sizes.clear()
    found = decoder.generate_many(asked)
    run.texts += found
    alone = len(prompts) == 1
    run.seconds.append(found[0].decode_s if alone else sum(decoder.frame_s))
    run.tokens.append(sum(len(g.tokens) - 1 for g in found))
    run.frame_s += decoder.frame_s
    run.frame_sizes += decoder.frame_sizes


def energy(
    decoder: GraphDecoder, prompts: Sequence[Sequence[int]], new: int, least_s: float
) -> dict[str, float] | None:
    """Joules per token of these prompts over and over; None: not asked for (0), or no counter."""
    size = decoder.seats.batch
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    turn = cycle(enumerate(batches))

    def work() -> int:
        at, batch = next(turn)
        run = Run()
        decode(decoder, batch, new, at * size, run)
        return run.tokens[0]

    found = measure_energy(work, EnergyMeter(), least_s) if least_s else None
    return None if found is None else found.document()


def compare(
    plain: GraphDecoder,
    fast: GraphDecoder,
    prompts: list[list[int]],
    new: int,
    energy_s: float = 0.0,
) -> dict[str, Any]:
    """Both ways on the same prompts, in batches of as many as there are seats; then, where asked
    for, each of them over and over for so many seconds of energy."""
    runs = Run(), Run()
    size = plain.seats.batch
    for turn, start in enumerate(range(0, len(prompts), size)):
        pairs = list(zip((plain, fast), runs, strict=True))
        for decoder, run in pairs if turn % 2 == 0 else reversed(pairs):
            decode(decoder, prompts[start : start + size], new, start, run)
    slow, quick = runs
    by_prompt = [g.rounds for g in quick.texts]
    rounds = metrics.pool(by_prompt)
    greedy = fast.sampling.greedy
    told = [run.document() for run in runs]
    ratio, interval = speedup(told[1], told[0])
    return {
        "n_prompts": len(prompts),
        "plain": told[0] | {"energy": energy(plain, prompts, new, energy_s)},
        "speculative": told[1] | {"energy": energy(fast, prompts, new, energy_s)},
        "speedup": ratio,
        "speedup_ci95": interval,
        "accepted_length": metrics.accepted_length(rounds),
        "accepted_length_ci95": metrics.accepted_length_ci95(by_prompt),
        "conditional_acceptance": metrics.conditional_acceptance(rounds),
        "texts_equal": sum(
            a.tokens == b.tokens for a, b in zip(slow.texts, quick.texts, strict=True)
        )
        if greedy
        else None,
    }


def distinct_experts(
    subject: Subject, length: int | None, prompts: list[list[int]], new: int
) -> float | None:
    """Mean number of experts of a layer that a frame of that draft length reads."""
    return experts_per_frame(subject.decoder(length), prompts, new)


def experts_per_frame(
    decoder: GraphDecoder, prompts: Sequence[Sequence[int]], new: int
) -> float | None:
    """Mean number of experts of a layer that a decoder's frames read; None: there are none."""
    target, counts = decoder.target, list[Tensor]()

    def count(result: FrameResult) -> None:
        if result.chosen and isinstance(target, K3Target):
            chosen = torch.stack(result.chosen).flatten(1).long()
            seen = torch.zeros(len(chosen), target.model.config.num_experts)
            seen = seen.to(chosen.device).scatter_(1, chosen, 1.0)
            counts.append(seen.sum(1).mean())

    before, decoder.on_frame = decoder.on_frame, count
    decoder.generate_many([Request(p, new, index=i) for i, p in enumerate(prompts)])
    decoder.on_frame = before
    return float(torch.stack(counts).mean()) if counts else None


def of_frames(decoder: GraphDecoder) -> dict[str, Any] | None:
    """Launches, busy and idle time of frames back to back."""
    if not decoder.replay.recorded:
        return None

    def run() -> None:
        for _ in range(PROFILED):
            decoder.replay.run()

    seen = profile(run, PROFILED)
    print(seen.table(24), flush=True)
    return seen.document()


def best_length(
    subject: Subject, lengths: Sequence[int], prompts: list[list[int]], new: int
) -> tuple[int | None, dict[str, float]]:
    """The fastest draft length on these prompts; None: plain decoding is."""
    rates: dict[int | None, float] = {}
    for length in (None, *lengths):
        run, decoder = Run(), subject.decoder(length)
        for start in range(0, len(prompts), subject.batch):
            decode(decoder, prompts[start : start + subject.batch], new, start, run)
        rates[length] = run.rate()
    best = max(rates, key=lambda length: rates[length])
    return best, {"plain" if k is None else str(k): v for k, v in rates.items()}


def divergences(
    target: Target, prompts: list[list[int]], plain: Run, other: Run
) -> list[dict[str, Any]]:
    """Prompts whose greedy texts differ: where, and the gap between the two best logits there."""
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, plain.texts, other.texts, strict=True)):
        at = first_divergence(a.tokens, b.tokens)
        if at is None:
            continue
        gap, largest = top2_gap(target, [*prompt, *a.tokens[:at]])
        steps = gap / (torch.finfo(target.dtype).eps * largest)
        entry = {"prompt": index, "position": at, "top2_gap": gap, "rounding_steps": steps}
        found.append(entry | {"near_tie": steps <= NEAR_TIE_STEPS})
    return found
