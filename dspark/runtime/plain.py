"""One token per step: the baseline that speculation is measured against, and batch generation.

Both use the target pass, the sampling code and the checks of the speculative loop; the only
difference is that every step yields exactly one token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from dspark.runtime.ending import Ending
from dspark.runtime.prefill import (
    PREFILL_CHUNK,
    TokenCallback,
    check_request,
    clock,
    end_ids,
    prefill,
)
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.records import Emitted, EmittedKind, Generation
from dspark.runtime.rules import Rules
from dspark.runtime.sampling import (
    SamplingParams,
    check_logits,
    draw_at,
    request_generator,
    sample,
    text_positions,
    to_probs,
    uniform,
)
from dspark.runtime.stops import StopStrings
from dspark.runtime.target import Cache, Target

WIDE_CHUNK = 32_768
"""Rows of a pass in which a batch's prompts are read on an accelerator."""
DRAWS = 32
"""Steps whose random numbers a row draws at once."""


@torch.inference_mode()
def plain_generate(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    rules: Rules | None = None,
    stop: StopStrings | None = None,
    end_token_ids: Collection[int] | None = None,
    seed: int = 0,
    on_tokens: TokenCallback | None = None,
    on_round: Callable[[Sequence[Emitted]], None] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    prefix_cache: PrefixCache | None = None,
) -> Generation:
    """Generate up to `max_new_tokens` tokens, one target pass each; `rounds` stays empty.

    `end_token_ids` replaces the target's; `on_tokens` and `on_round` get one token at a time; what
    `prefix_cache`, made for this target and no drafter, holds of the prompt is not read again.
    Raises UserError for a wrong request and BadLogits for non-finite logits, which name the place
    in the text.
    """
    check_request(target, prompt_ids, max_new_tokens)
    ends = end_ids(target, end_token_ids)
    bound = rules.bind(prompt_ids, ends, target.vocab_size, target.device) if rules else None
    search = stop.start(min_new_tokens=rules.min_new_tokens if rules else 0) if stop else None
    ending = Ending(ends, max_new_tokens, search)
    tokens: list[int] = []

    def emit(anchor: Tensor) -> None:
        new = ending.cut(anchor.tolist())
        if bound is not None:
            bound.extend(anchor)
        kind: EmittedKind = "plain" if tokens else "first"
        tokens.extend(new)
        if on_tokens is not None:
            on_tokens(new)
        if on_round is not None:
            on_round([Emitted(token, kind) for token in new])

    start = clock(target.device)
    generator = request_generator(seed, 0, target.device)
    cache = target.new_cache(1, len(prompt_ids) + max_new_tokens)
    prefix = None
    if prefix_cache is not None:
        prefix_cache.check(target, None)
        prefix = prefix_cache.open(prompt_ids, cache, None)
    anchor = prefill(
        target,
        cache,
        prompt_ids,
        sampling,
        generator,
        rules=bound,
        chunk=prefill_chunk,
        prefix=prefix,
    )
    emit(anchor)
    decode_start = clock(target.device)
    while ending.finish is None:
        out = target.forward(anchor.unsqueeze(1), cache, commit=True)
        logits = target.logits(out.hidden[:, -1])
        with text_positions(cache.lengths.tolist):
            anchor = sample(bound.after(logits) if bound else logits, sampling, generator)
        emit(anchor)
    return Generation(
        tokens=tokens,
        finish=ending.finish,
        prefill_s=decode_start - start,
        decode_s=clock(target.device) - decode_start,
    )


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    end_token_ids: Collection[int] | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """New tokens of each prompt (end token included), all decoded plainly side by side.

    Every prompt draws from its own generator, seeded by `seed` and its index (`indices`, else its
    place in `prompts`), so its text does not depend on what else is in the batch: whoever splits
    or sorts a long list passes the indices in the whole list. Finished rows leave the batch once
    they are half of it. The prompts are read side by side, padded on the left, in passes of at most
    `PREFILL_CHUNK` rows in all (`WIDE_CHUNK` on an accelerator).

    Raises UserError for a wrong request and BadLogits for non-finite logits, which name the prompt
    and the place in its text.
    """
    for prompt in prompts:
        check_request(target, prompt, max_new_tokens)
    if not prompts:
        return []
    ends = end_ids(target, end_token_ids)
    draws = _Draws(
        [
            request_generator(seed, index, target.device)
            for index in (range(len(prompts)) if indices is None else indices)
        ],
        sampling,
    )
    cache = target.new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens)
    with text_positions(lambda: list(map(len, prompts))):
        anchor = draws.sample(_prefill_batch(target, cache, prompts))
    texts: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # batch row -> prompt
    while True:
        for row, token in zip(rows, anchor.tolist(), strict=True):
            if _unfinished(texts[row], ends, max_new_tokens):
                texts[row].append(token)
        live = [at for at, row in enumerate(rows) if _unfinished(texts[row], ends, max_new_tokens)]
        if not live:
            return texts
        if 2 * len(live) <= len(rows):
            kept = torch.tensor(live, device=target.device)
            cache.select(kept)
            anchor = anchor[kept]
            draws.select(live)
            rows = [rows[at] for at in live]
        out = target.forward(anchor.unsqueeze(1), cache, commit=True)
        logits = target.logits(out.hidden[:, -1])
        with text_positions(partial(_places, prompts, texts, rows), rows):
            anchor = draws.sample(logits)


class _Draws:
    """The random numbers of a batch: a row's come from its generator, `DRAWS` steps at a time.

    One call for each row and step would cost an accelerator more than its pass.
    """

    def __init__(self, generators: list[torch.Generator], sampling: SamplingParams) -> None:
        self._generators, self._sampling = generators, sampling
        self._uniforms: list[Tensor] = []

    def sample(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] tokens, one for each row that is left."""
        if self._sampling.greedy:
            check_logits(logits)
            return logits.argmax(dim=-1)
        if not self._uniforms:
            drawn = uniform((len(logits), DRAWS), self._generators, logits.device)
            self._uniforms = list(drawn.unbind(1))[::-1]
        return draw_at(to_probs(logits, self._sampling), self._uniforms.pop())

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self._generators = [self._generators[row] for row in rows]
        self._uniforms = [drawn[rows] for drawn in self._uniforms]


def _places(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], rows: Sequence[int]
) -> list[int]:
    """Where in its text the next token of each batch row stands."""
    return [len(prompts[row]) + len(texts[row]) for row in rows]


def _unfinished(text: list[int], ends: frozenset[int], max_new_tokens: int) -> bool:
    return len(text) < max_new_tokens and not (text and text[-1] in ends)


def _prefill_batch(target: Target, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """[B, V] logits of each prompt's last token; a prompt sits out passes before its first one."""
    chunk = PREFILL_CHUNK if target.device.type == "cpu" else WIDE_CHUNK
    width, columns = max(map(len, prompts)), max(1, chunk // len(prompts))
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(padded, dtype=torch.int64, device=target.device)
    first = torch.tensor([width - len(prompt) for prompt in prompts], device=target.device)
    ragged = bool(first.any())
    last = torch.empty(0)
    for start in range(0, width, columns):
        place = torch.arange(start, min(start + columns, width), device=target.device)
        valid = place >= first.unsqueeze(1) if ragged else None
        out = target.forward(tokens[:, place], cache, valid=valid, commit=True)
        last = out.hidden[:, -1].clone()
        del out
    return target.logits(last)
