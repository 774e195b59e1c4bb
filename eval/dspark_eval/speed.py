"""Timing two ways of decoding against each other, and what follows from the times.

Per prompt and repeat: n tokens, the first from prefill, d seconds for the other n - 1. Pooled over
prompts: tokens/s = sum (n - 1) / sum d, speed-up = speculative tokens/s / plain tokens/s, and the
break-even accepted length = milliseconds of a round / milliseconds of a plain step: below it
speculation loses. Intervals resample prompts and keep all measurements of a prompt together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np

from dspark.runtime.records import Generation, RoundRecord
from dspark_eval import metrics, outcomes
from dspark_eval.intervals import ratio_of_ratios
from dspark_eval.transformers_peer import PEER_NAME, PeerTiming, TransformersPeer

Decode = Callable[[list[int], int], Generation]
"""Prompt ids and seed to an answer."""
DecodeMany = Callable[[Sequence[list[int]], int], list[Generation]]
"""Prompts decoded side by side to their answers; the seed is the first one's, the next one's is one
more."""

PEER_PROMPTS = 12  # transformers is slow; a dozen prompts give its speed to a few per cent


@dataclass
class PromptTimings:
    """Everything measured on one prompt, one entry per repeat.

    turn_lengths: prompt length of each speculative answer where they are turns of a conversation.
    """

    prompt_length: int
    plain: list[Generation] = field(default_factory=list)
    speculative: list[Generation] = field(default_factory=list)
    peer: list[PeerTiming] = field(default_factory=list)
    turn_lengths: list[int] = field(default_factory=list)

    @property
    def prompt_lengths(self) -> list[int]:
        """Of each speculative answer."""
        return self.turn_lengths or [self.prompt_length] * len(self.speculative)

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds of all repeats."""
        return metrics.pool(g.rounds for g in self.speculative)

    def beside(self, peer: TransformersPeer) -> None:
        """Let it make as many tokens as plain decoding: both see the same context lengths."""
        tokens = max(2, len(self.plain[-1].tokens))
        self.peer.append(peer.measure(self.prompt_length, tokens))


def alone(decode: Decode) -> DecodeMany:
    """One prompt after the other."""
    return lambda prompts, seed: [decode(ids, seed + at) for at, ids in enumerate(prompts)]


def measure(
    prompts: Sequence[list[int]],
    plain: DecodeMany,
    speculative: DecodeMany,
    *,
    repeats: int,
    seed: int,
    batch: int = 1,
    peer: TransformersPeer | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[PromptTimings]:
    """Decode every `batch` prompts both ways; who goes first changes with each and with the repeat.

    The seed depends on the prompt's index and the repeat, so that repeats at temperature > 0 are
    new samples and not the same one again. `advance` is called after each prompt.
    """
    timings = [PromptTimings(len(prompt)) for prompt in prompts]
    starts = enumerate(range(0, len(prompts), batch))
    for repeat, (turn, start) in product(range(repeats), starts):
        some, entries = prompts[start : start + batch], timings[start : start + batch]
        first_seed = seed + start + repeat * len(prompts)
        ways = [(plain, "plain"), (speculative, "speculative")]
        for decode, name in ways if (turn + repeat) % 2 == 0 else reversed(ways):
            _keep(entries, name, decode(some, first_seed))
        for index, entry in enumerate(entries, start):
            metrics.check_generation(entry.speculative[-1])
            if peer is not None and index < PEER_PROMPTS:
                entry.beside(peer)
            advance()
    return timings


def _keep(entries: Sequence[PromptTimings], name: str, answers: Sequence[Generation]) -> None:
    for entry, answer in zip(entries, answers, strict=True):
        getattr(entry, name).append(answer)


# ------------------------------------------------------------------ the figures


def _sums(answers: Sequence[Generation]) -> tuple[int, float, int, float]:
    """Tokens after the first, their seconds, all tokens, and seconds with prefill."""
    after_first = sum(max(len(g.tokens) - 1, 0) for g in answers)
    decode_s = sum(g.decode_s for g in answers)
    total = sum(len(g.tokens) for g in answers)
    return after_first, decode_s, total, decode_s + sum(g.prefill_s for g in answers)


def _rate(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1]


def _finite(value: np.ndarray) -> float | None:
    """A scalar result, None where it had nothing to divide by."""
    return float(value) if np.isfinite(value) else None


def decoded(answers: Sequence[Generation]) -> tuple[int, float]:
    """Tokens after the first, and their seconds."""
    return _sums(answers)[:2]


def _together(sums: np.ndarray, batch: int) -> np.ndarray:
    """Rows of prompts added up to those of the batches that they were decoded in: the seconds of
    such prompts are not independent."""
    return np.add.reduceat(sums, np.arange(0, len(sums), batch)) if batch > 1 else sums


def summarize(timings: Sequence[PromptTimings], *, seed: int, batch: int = 1) -> dict[str, Any]:
    """The speed and acceptance keys of the JSON document, pooled over prompts and repeats; of
    `batch` prompts decoded side by side, speed over batches."""
    plain = _together(np.array([decoded(t.plain) for t in timings]), batch)
    fast = _together(np.array([decoded(t.speculative) for t in timings]), batch)
    both = np.concatenate([fast, plain], axis=1)
    by_prompt = [t.rounds for t in timings]
    rounds = metrics.pool(by_prompt)
    with np.errstate(divide="ignore", invalid="ignore"):
        plain_rate, fast_rate = _rate(plain.sum(0)), _rate(fast.sum(0))
        speedup = ratio_of_ratios(both.sum(0))
    return {
        "n_prompts": len(timings),
        "plain_tokens_per_s": _finite(plain_rate),
        "speculative_tokens_per_s": _finite(fast_rate),
        "speedup": _finite(speedup),
        "speedup_ci95": metrics.bootstrap_ci95(both, ratio_of_ratios, seed=seed),
        "accepted_length": metrics.accepted_length(rounds),
        "accepted_length_ci95": metrics.accepted_length_ci95(by_prompt, seed=seed),
        "acceptance_rate": metrics.acceptance_rate(rounds),
        "acceptance_rate_with_bonus": metrics.acceptance_rate_with_bonus(rounds),
        "conditional_acceptance": metrics.conditional_acceptance(rounds),
        "draft_length_mean": metrics.draft_length_mean(rounds),
        "sibling_rate": metrics.sibling_rate(rounds),
        "rows_per_round": metrics.rows_per_round(rounds),
        "levels": outcomes.level_shares(rounds),
        "bands": outcomes.band_table(by_prompt),
        "break_even": break_even(rounds, plain_step_s(timings, batch)),
        **metrics.round_times_ms(rounds),
        "host_syncs_per_token": None,  # nothing counts them in this loop
    }


def plain_step_s(timings: Sequence[PromptTimings], batch: int) -> float:
    """Mean seconds of a step of plain decoding, nan without one.

    Of `batch` texts side by side, whose seconds are shares of those of all steps, the longest says
    how many there were: seats whose text has ended are stepped as well.
    """
    groups = (timings[start : start + batch] for start in range(0, len(timings), batch))
    sides = [side for some in groups for side in zip(*(t.plain for t in some), strict=True)]
    steps = sum(max(max(len(g.tokens) for g in side) - 1, 0) for side in sides)
    return sum(g.decode_s for side in sides for g in side) / steps if steps else float("nan")


def break_even(rounds: Sequence[RoundRecord], step_s: float) -> float | None:
    """Accepted length at which the rounds that drafted are as fast as plain decoding."""
    spent = [r.draft_s + r.verify_s + r.other_s for r in rounds if r.drafted]
    with np.errstate(divide="ignore", invalid="ignore"):
        return _finite(np.mean(spent) / np.float64(step_s)) if spent else None


def details(timings: Sequence[PromptTimings], *, seed: int, batch: int = 1) -> dict[str, Any]:
    """What stands under `extra`: intervals of both rates, prefill included, loops, percentiles."""
    plain = _together(np.array([_sums(t.plain) for t in timings]), batch)
    fast = _together(np.array([_sums(t.speculative) for t in timings]), batch)
    by_prompt = [t.rounds for t in timings]
    answers = [g for t in timings for g in t.speculative]
    with np.errstate(divide="ignore", invalid="ignore"):
        plain_all, fast_all = _rate(plain.sum(0)[2:]), _rate(fast.sum(0)[2:])
    rounds = metrics.pool(by_prompt)
    return {
        "n_rounds": len(rounds),
        "plain_tokens": int(plain[:, 2].sum()),
        "speculative_tokens": int(fast[:, 2].sum()),
        "plain_tokens_per_s_ci95": metrics.bootstrap_ci95(plain, _rate, seed=seed),
        "speculative_tokens_per_s_ci95": metrics.bootstrap_ci95(fast, _rate, seed=seed),
        "plain_tokens_per_s_with_prefill": _finite(plain_all),
        "speculative_tokens_per_s_with_prefill": _finite(fast_all),
        "speedup_with_prefill": _finite(fast_all / plain_all),
        "plain_ms_per_token": _finite(np.float64(1e3 * plain_step_s(timings, batch))),
        "prefix_survival": metrics.prefix_survival(rounds),
        "positions": {
            name: [asdict(value) for value in found]
            for name, found in metrics.position_estimates(by_prompt, seed=seed).items()
        },
        "accepted_length_percentiles": metrics.accepted_length_percentiles(by_prompt),
        "accepted_length_without_loops": metrics.accepted_length_without_loops(answers),
        "loop_share": metrics.loop_share([g.tokens for g in answers]),
        "plain_sha256": hash_tokens([g.tokens for t in timings for g in t.plain]),
        "speculative_sha256": hash_tokens([g.tokens for g in answers]),
    }


def summarize_peer(
    timings: Sequence[PromptTimings], peer: TransformersPeer, *, seed: int
) -> dict[str, Any]:
    """Plain decoding against the peer, on the prompts that both decoded."""
    shared = [t for t in timings if t.peer]
    theirs = [(sum(p.tokens for p in t.peer), sum(p.decode_s for p in t.peer)) for t in shared]
    ours = [_sums(t.plain)[:2] for t in shared]
    both = np.concatenate([np.array(ours), np.array(theirs)], axis=1)
    return {
        "name": PEER_NAME,
        "n_prompts": len(shared),
        "parameters": peer.parameters,
        "tokens_per_s": _finite(_rate(both.sum(0)[2:])),
        "tokens_per_s_ci95": metrics.bootstrap_ci95(theirs, _rate, seed=seed),
        "plain_tokens_per_s": _finite(_rate(both.sum(0))),
        "plain_over_peer": _finite(ratio_of_ratios(both.sum(0))),
        "plain_over_peer_ci95": metrics.bootstrap_ci95(both, ratio_of_ratios, seed=seed),
    }


def hash_tokens(sequences: Sequence[Sequence[int]]) -> str:
    """SHA-256 of token sequences, to see whether two runs decoded the same text."""
    digest = hashlib.sha256()
    for tokens in sequences:
        digest.update((",".join(map(str, tokens)) + ";").encode())
    return digest.hexdigest()
