"""Are these texts the target's? One pass of the target over every answer of the run tells.

Greedy. Every token has to be the target's best after the tokens before it. A token that is not has
a margin, best logit less its own; within a few rounding steps of the dtype it is a near-tie that a
pass over several rows may settle otherwise, beyond them a defect.

Sampling. With p_t the target's law at token t (same filter, same code), in the order of falling
probability, and V uniform,

    U_t = p_t(tokens before x_t in that order) + V p_t(x_t)        uniform on [0, 1], independent
    S   = sum_t -ln p_t(x_t) - H_t                                 mean 0
    M   = mean over l in TILTS of exp(l S - sum_t K_t(l))          mean 1, K_t(l) = ln E exp(l s_t)

hold for a text drawn from p and for hardly any other (Rosenblatt 1952). U is held against equal
bins by chi-square. S is far from normal where the target is sure (one token of 1 in 1,000 counts
as much as hundreds of others), but M > 1 / a has a chance of a at most, whatever the laws (Markov;
a mixture of exponential martingales), so 1 / M serves as its p-value: a bound, most often far above
the exact one. Each is tested at `ALPHA` / tests, so that a run of a
right decoder raises an alarm with a chance below `ALPHA`; `detectable_tv` is the total variation
between the true and the expected law of U's bins that is found with a chance of `POWER`, whatever
its shape. An error that leaves ranks and surprise alone (equal tokens exchanged) is not seen: for
that there is `python -m dspark_eval.lossless`, where laws are known in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.runtime.prefill import PREFILL_CHUNK, say_read
from dspark.runtime.sampling import SamplingParams, to_probs
from dspark.runtime.target import Target
from dspark_eval.lossless.statistics import ALPHA, FEWEST, detectable, fit
from dspark_eval.mismatches import NEAR_TIE_STEPS
from dspark_eval.verdicts import NOT_LOSSLESS, fails, verdict

POWER = 0.99
MOST_BINS = 20
TILTS = tuple(sign * 2.0**step for step in range(-5, 1) for sign in (1, -1))
"""l of M: one of them is near the best for sums of 20 to 20,000 tokens."""
SHOWN = 20
"""Greedy mismatches listed one by one."""
ROWS = 64
"""Logits at a time: a vocabulary of 160k in float64 is 80 MB then."""


@dataclass(frozen=True)
class NotBest:
    """A greedy token that is not the target's best after what stands before it."""

    answer: int
    position: int
    token: int
    best: int
    margin: float
    near_tie: bool


@dataclass
class Evidence:
    """What the answers of one prompt set say, collected token by token.

    edge        tokens at the very edge of a top-k or top-p filter: rounding decides, left out
    impossible  tokens that the filter excludes beyond rounding
    surprise, variance   sums of -ln p - H and of its variance
    cumulants   sums of K_t(l), one for each of `TILTS`
    """

    tokens: int = 0
    ranks: list[float] = field(default_factory=list)
    edge: int = 0
    impossible: int = 0
    surprise: float = 0.0
    variance: float = 0.0
    cumulants: list[float] = field(default_factory=lambda: [0.0] * len(TILTS))
    not_best: list[NotBest] = field(default_factory=list)


@torch.inference_mode()
def logits_of_answer(
    target: Target, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of ([n, V] float32 logits, [n] answer tokens that stand there), in order."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    cache = target.new_cache(1, ids.shape[1])
    first, total = len(prompt) - 1, ids.shape[1] - 1  # first: its row gives the first token
    say_read(0, total)
    for start in range(0, total, PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, total)
        hidden = target.forward(ids[:, start:stop], cache, commit=True).hidden[0]
        say_read(stop, total)
        for row in range(max(first, start), stop, ROWS):
            end = min(row + ROWS, stop)
            logits = target.logits(hidden[row - start : end - start]).float()
            yield logits, ids[0, row + 1 : end + 1]


def collect(
    target: Target,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling: SamplingParams,
    *,
    seed: int,
) -> Evidence:
    """Read every (prompt, answer) once. The draws V come from `seed`."""
    found = Evidence()
    generator = torch.Generator().manual_seed(seed)
    steps = NEAR_TIE_STEPS * torch.finfo(target.dtype).eps
    for number, (prompt, answer) in enumerate(texts):
        position = 0
        for logits, tokens in logits_of_answer(target, prompt, answer):
            if sampling.greedy:
                found.not_best += _not_best(logits, tokens, steps, number, position)
            else:
                _add_draws(found, logits, tokens, sampling, steps, generator)
            position += len(tokens)
        found.tokens += position
    return found


def _not_best(
    logits: Tensor, tokens: Tensor, steps: float, answer: int, position: int
) -> list[NotBest]:
    best = logits.argmax(dim=-1)
    rows = (best != tokens).nonzero().squeeze(1).tolist()
    margins = logits.amax(-1) - logits.gather(-1, tokens[:, None]).squeeze(1)
    slack = steps * logits.abs().amax(-1)
    return [
        NotBest(
            answer,
            position + row,
            int(tokens[row]),
            int(best[row]),
            float(margins[row]),
            bool(margins[row] <= slack[row]),
        )
        for row in rows
    ]


def _add_draws(
    found: Evidence,
    logits: Tensor,
    tokens: Tensor,
    sampling: SamplingParams,
    steps: float,
    generator: torch.Generator,
) -> None:
    p = to_probs(logits, sampling).double()
    p = p / p.sum(-1, keepdim=True)
    own = p.gather(-1, tokens[:, None])
    missing = own.squeeze(1) == 0
    lowest = logits.masked_fill(p == 0, torch.inf).amin(-1)
    gap = lowest - logits.gather(-1, tokens[:, None]).squeeze(1)
    edge = missing & (gap <= steps * logits.abs().amax(-1))
    found.edge += int(edge.sum())
    found.impossible += int((missing & ~edge).sum())
    ids = torch.arange(p.shape[-1], device=p.device)
    ahead = (p > own) | ((p == own) & (ids < tokens[:, None]))
    before = (p * ahead).sum(-1)
    draws = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(p.device)
    kept = ~missing
    found.ranks += (before + draws * own.squeeze(1))[kept].tolist()
    surprise = -torch.where(p > 0, p, torch.ones_like(p)).log()
    entropy = (p * surprise).sum(-1)
    variance = (p * surprise.square()).sum(-1) - entropy.square()
    found.surprise += float((-own.squeeze(1)[kept].log() - entropy[kept]).sum())
    found.variance += float(variance[kept].clamp(min=0).sum())
    p, surprise, entropy = p[kept], surprise[kept], entropy[kept]
    for at, tilt in enumerate(TILTS):
        powers = ((tilt - 1) * surprise).masked_fill(p == 0, -torch.inf)  # ln p^(1 - l)
        found.cumulants[at] += float((powers.logsumexp(-1) - tilt * entropy).sum())


def judge(found: Evidence, sampling: SamplingParams, *, tests: int) -> dict[str, Any]:
    """JSON of one prompt set: `passed`, `verdict` in words, and what they rest on. tests: of the
    whole run."""
    if sampling.greedy:
        defects = [entry for entry in found.not_best if not entry.near_tie]
        return _with_verdict(
            {
                "method": "greedy",
                "tokens": found.tokens,
                "passed": not defects,
                "not_best": len(found.not_best),
                "near_ties": len(found.not_best) - len(defects),
                "largest_margin": max((entry.margin for entry in found.not_best), default=None),
                "entries": [asdict(entry) for entry in (*defects, *found.not_best)[:SHOWN]],
            }
        )
    level = ALPHA / tests
    rank, surprise = rank_test(found.ranks), surprise_test(found)
    values = [float(test["p"]) for test in (rank, surprise) if test is not None]
    passed = found.impossible == 0 and all(p >= level for p in values)
    if rank is not None:
        tv = detectable(len(found.ranks), rank["bins"] - 1, level, POWER)
        rank = {**rank, "detectable_tv": tv, "power": POWER}
    return _with_verdict(
        {
            "method": "sampling",
            "tokens": found.tokens,
            "passed": passed if values else None,
            "impossible": found.impossible,
            "edge": found.edge,
            "false_alarm": ALPHA,
            "level": level,
            "rank": rank,
            "surprise": surprise,
        }
    )


def _with_verdict(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "verdict": verdict(found)}


def rank_test(ranks: Sequence[float]) -> dict[str, Any] | None:
    """Chi-square of U over equal bins; None for too few tokens to fill two of them."""
    bins = min(MOST_BINS, len(ranks) // FEWEST)
    if bins < 2:
        return None
    counts = torch.histc(torch.tensor(ranks, dtype=torch.float64), bins, 0.0, 1.0)
    found = fit(counts, torch.full((bins,), 1 / bins, dtype=torch.float64))
    return {"p": found.p, "tv": found.distance, "bins": bins}


def surprise_test(found: Evidence) -> dict[str, Any] | None:
    """1 / M as `p`; None where nothing was uncertain.

    `z` is S in standard deviations; `mean` that of -ln p(x) - H per token in nats: above 0 the text
    is less likely than the target's own.
    """
    if found.variance <= 0 or len(found.ranks) < FEWEST:
        return None
    exponents = torch.tensor(TILTS, dtype=torch.float64) * found.surprise
    exponents -= torch.tensor(found.cumulants, dtype=torch.float64)
    evidence = float(exponents.logsumexp(0)) - math.log(len(TILTS))
    return {
        "z": found.surprise / math.sqrt(found.variance),
        "p": math.exp(-max(evidence, 0.0)),
        "mean": found.surprise / len(found.ranks),
    }


def fidelity_warnings(found: dict[str, Any] | None) -> list[str]:
    """A sentence if a text is not the target's."""
    if found is None or not fails(found):
        return []
    if found["method"] == "greedy":
        count = found["not_best"] - found["near_ties"]
        are = "is" if count == 1 else "are"
        return [
            f"{NOT_LOSSLESS}: {count} of {found['tokens']} tokens {are} not the target's best, "
            f"by up to {found['largest_margin']:.3g} in logits, more than rounding explains"
        ]
    parts = [f"{key} p = {found[key]['p']:.1e}" for key in ("rank", "surprise") if found[key]]
    return [
        f"{NOT_LOSSLESS}: the text does not look drawn from the target "
        f"({', '.join(parts)}, {found['impossible']} impossible tokens; a right decoder shows this "
        f"in less than one of {1 / found['false_alarm']:.0f} runs)"
    ]
