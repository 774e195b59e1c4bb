"""Logits -> probabilities -> token: the one way, for target and drafter alike.

Verification is lossless only if p (target) and q (drafter) are made by the same function and the
tensor a token was drawn from is the tensor it is judged against. `to_probs` is that function:

    probs = softmax(top_p(top_k((logits - max) / temperature)))        in float32

Order and cut rules are those of transformers' warpers. Filters cut by *value*: every token tied
with the last one kept is kept too (transformers breaks top-p ties by an unstable sort, here equal
logits always share one fate). The most likely token survives every filter, so no row can end up
empty. Temperature 0 is the argmax, ties to the lowest id.

Letters: V vocab; "..." any leading shape.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import UserError

Generators = torch.Generator | Sequence[torch.Generator]
"""One generator for all rows, or one per batch row (a row's draws then ignore its neighbours)."""

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_BELOW_ONE = 1.0 - torch.finfo(torch.float64).eps


def in_float32(number: float) -> float:
    """A temperature or top-p as float32 holds it; beyond, every one says what the last one says."""
    return min(max(number, _TINY), _HUGE)


class BadLogits(UserError):
    """A row of logits that defines no distribution: NaN, +inf, or nothing but -inf.

    row       batch row of the first such row of logits
    position  which of its rows ([B, T, V]; else 0), or, once `located`, the place in the text of
              the token that could not be chosen: 0 is the first token of the prompt
    """

    def __init__(self, whose: str, row: int, position: int, found: str) -> None:
        super().__init__(
            f"{whose} logits of row {row}, position {position} hold {found}: no token can be "
            "chosen; check the weights for non-finite values or run in float32"
        )
        self.whose = whose
        self.row = row
        self.position = position
        self.found = found

    def located(self, starts: Sequence[int], rows: Sequence[int] | None = None) -> BadLogits:
        """The same, where row 0 of batch row b decides token `starts[b]` of text `rows[b]`."""
        row = self.row if rows is None else rows[self.row]
        return BadLogits(self.whose, row, starts[self.row] + self.position, self.found)


@contextmanager
def text_positions(
    starts: Callable[[], Sequence[int]], rows: Sequence[int] | None = None
) -> Iterator[None]:
    """Inside, BadLogits are `located`; `starts` is only asked if there is one."""
    try:
        yield
    except BadLogits as error:
        raise error.located(starts(), rows) from None


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits. Invalid values raise UserError at construction.

    temperature  0 (greedy) or any finite positive number
    top_p        in (0, 1]; 1 is off
    top_k        0 is off; larger than the vocabulary is off too
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"temperature: expected a finite number >= 0, got {self.temperature}; 0 is greedy"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: expected 0 < top_p <= 1, got {self.top_p}; 1 turns it off")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise UserError(f"top_k: expected an integer >= 0, got {self.top_k}; 0 turns it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def to_probs(
    logits: Tensor, params: SamplingParams, *, whose: str = "target", check: bool = True
) -> Tensor:
    """[..., V] logits of any float dtype -> [..., V] float32 probabilities.

    Raises BadLogits, which costs a host synchronisation on an accelerator; `check=False` leaves
    that to a later `check_logits` over many rows at once.
    """
    scores = logits.float()
    if check:
        check_logits(scores, whose)
    if params.greedy:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0)
    # Shifting before scaling: the largest score is 0 at any temperature, so that a tiny one can
    # push the others to -inf (probability 0) but never makes inf - inf. The floor keeps 0/T = 0
    # for temperatures that float32 cannot hold.
    if params.temperature != 1:
        scores = (scores - scores.amax(-1, keepdim=True)) / in_float32(params.temperature)
    if 0 < params.top_k < scores.shape[-1]:
        scores = _top_k(scores, params.top_k)
    if params.top_p < 1:
        scores = _top_p(scores, params.top_p)
    return torch.softmax(scores, dim=-1)


def _top_k(scores: Tensor, k: int) -> Tensor:
    kth = torch.topk(scores, k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf)


def _top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches p."""
    ascending = scores.sort(dim=-1).values
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    # Least likely first, a token goes if all mass up to and including it fits into 1 - p.
    dropped = (below <= 1 - p).sum(dim=-1, keepdim=True).clamp_(max=scores.shape[-1] - 1)
    return scores.masked_fill(scores < ascending.gather(-1, dropped), -torch.inf)


def check_logits(logits: Tensor, whose: str = "target") -> None:
    """Raise BadLogits for the first row that holds NaN or +inf, or only -inf."""
    peak = logits.amax(dim=-1)  # NaN, +inf or -inf exactly if the row is bad
    finite = torch.isfinite(peak)
    if bool(finite.all()):
        return
    first = (~finite).nonzero()[0].tolist()
    value = float(peak[tuple(first)])
    found = "NaN" if math.isnan(value) else "+inf" if value > 0 else "nothing but -inf"
    row, position = (*first, 0, 0)[:2]
    raise BadLogits(whose, row, position, found)


def sample(logits: Tensor, params: SamplingParams, generator: Generators) -> Tensor:
    """[B, V] target logits -> [B] int64 tokens: argmax at temperature 0, else a draw."""
    if params.greedy:
        check_logits(logits)
        return logits.argmax(dim=-1)
    return draw(to_probs(logits, params), generator)


def draw(weights: Tensor, generator: Generators) -> Tensor:
    """[..., V] non-negative weights -> [...] int64 tokens, one uniform each; see `draw_at`."""
    return draw_at(weights, uniform(weights.shape[:-1], generator, weights.device))


def draw_at(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: [..., V] non-negative weights, [...] uniforms in [0, 1) -> [...] int64.

    Weights need not be normalised. The CDF is summed in float64 and u has 53 bits, so the law of
    the result differs from the float32 weights by about 1e-16 per token. A token of weight 0 is
    never returned; a row that is all zero or NaN returns some id below V (callers exclude it).
    """
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    # u * total must stay below total, which rounding alone would not promise.
    level = (u * _BELOW_ONE).unsqueeze(-1) * cdf[..., -1:]
    token = torch.searchsorted(cdf, level, right=True).clamp_(max=weights.shape[-1] - 1)
    if weights.device.type != "cpu":
        # A parallel prefix sum need not be monotone to the last bit: step off a weightless token.
        token = torch.where(
            weights.gather(-1, token) > 0, token, weights.argmax(dim=-1, keepdim=True)
        )
    return token.squeeze(-1)


def uniform(shape: tuple[int, ...], generator: Generators, device: torch.device) -> Tensor:
    """Float64 uniforms in [0, 1). With one generator per row, shape[0] is the number of rows."""
    if isinstance(generator, torch.Generator):
        return torch.rand(
            shape, generator=generator, device=generator.device, dtype=torch.float64
        ).to(device)
    rows = [
        torch.rand(shape[1:], generator=g, device=g.device, dtype=torch.float64) for g in generator
    ]
    return torch.stack(rows).to(device)


def request_seed(seed: int, index: int) -> int:
    """What names the random numbers of request `index` in a run with `seed`: 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_generator(seed: int, index: int, device: torch.device) -> torch.Generator:
    """Generator of request `index` in a run with `seed`: the same on every call, unlike others."""
    return torch.Generator(device=device).manual_seed(request_seed(seed, index))
