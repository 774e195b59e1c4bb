"""From a request to its first token: what plain and speculative decoding have in common.

The prompt's last row gives the first new token, the first *anchor*: emitted, but not yet fed to
the target. From there on a cache always holds everything before the anchor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.rules import RequestRules
from dspark.runtime.sampling import Generators, SamplingParams, sample, text_positions
from dspark.runtime.target import Cache, Target
from dspark.taps import TapSet

if TYPE_CHECKING:
    from dspark.runtime.prefix_cache import PrefixSession

PREFILL_CHUNK = 2048
"""Prompt rows per pass: bounds the memory of activations and taps, not the result."""

TokenCallback = Callable[[list[int]], None]
"""Receives every new token exactly once, in order, a few at a time."""

ReadCallback = Callable[[int, int], None]
"""Receives how many tokens of a text have been read, and how many there are: before the first pass,
and after each. On an accelerator a pass may still be queued then."""

_on_read: ContextVar[ReadCallback | None] = ContextVar("on_read", default=None)


@contextmanager
def watch_reading(on_read: ReadCallback) -> Iterator[None]:
    """Inside, every text that is read pass by pass says how far it is."""
    before = _on_read.set(on_read)
    try:
        yield
    finally:
        _on_read.reset(before)


def say_read(read: int, total: int) -> None:
    """Tell whoever watches; nobody, as a rule."""
    on_read = _on_read.get()
    if on_read is not None:
        on_read(read, total)


def check_request(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Raise UserError for an empty prompt, ids outside the vocabulary, or no tokens asked for."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if len(prompt_ids) == 0:
        raise UserError("prompt: expected at least one token, got none; add a begin token or text")
    odd = next((token for token in prompt_ids if not hasattr(token, "__index__")), None)
    if odd is not None:
        raise UserError(f"prompt: expected whole numbers, got {odd!r}; pass the tokenizer's ids")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= target.vocab_size:
        raise UserError(
            f"prompt: expected token ids 0..{target.vocab_size - 1} of target {target.name}, got "
            f"{low if low < 0 else high}; was it encoded with another tokenizer?"
        )


def too_long_note(target: Target, tokens: int) -> str | None:
    """A sentence for a text of more tokens than the target claims to read: it is read all the same,
    since some targets have no positions at all, but what comes may make no sense."""
    if tokens <= target.max_positions:
        return None
    return (
        f"{tokens:,} tokens of prompt and answer are beyond the {target.max_positions:,} that "
        f"target {target.name} claims to read: what it says there may make no sense"
    )


def end_ids(target: Target, end_token_ids: Collection[int] | None) -> frozenset[int]:
    """The ids that end a text: the target's own unless given; an empty collection never ends."""
    return frozenset(target.end_token_ids if end_token_ids is None else end_token_ids)


def prefill(
    target: Target,
    cache: Cache,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    generator: Generators,
    *,
    taps: TapSet | None = None,
    on_taps: Callable[[Tensor], None] | None = None,
    rules: RequestRules | None = None,
    chunk: int = PREFILL_CHUNK,
    prefix: PrefixSession | None = None,
) -> Tensor:
    """Commit one prompt to `cache`, chunk by chunk, and sample the first anchor [1] int64.

    `on_taps` receives each chunk's taps [1, t, N*D] before the next chunk runs, and nothing of a
    chunk but its last hidden state outlives it: what a prompt needs beside its cache does not grow
    with its length. `rules` hold for the anchor as for any token; the caller extends them.
    `prefix` says what of the prompt the cache holds already, and keeps some of it for others.
    """
    last = read_prompt(
        target, cache, prompt_ids, taps=taps, on_taps=on_taps, chunk=chunk, prefix=prefix
    )
    logits = target.logits(last)
    with text_positions(lambda: [len(prompt_ids)]):
        anchor = sample(logits if rules is None else rules.after(logits), sampling, generator)
    if prefix is not None:
        prefix.finish()
    return anchor


def read_prompt(
    target: Target,
    cache: Cache,
    prompt_ids: Sequence[int],
    *,
    taps: TapSet | None = None,
    on_taps: Callable[[Tensor], None] | None = None,
    chunk: int = PREFILL_CHUNK,
    prefix: PrefixSession | None = None,
) -> Tensor:
    """The part of `prefill` before sampling: the last hidden state of a prompt, [1, D]."""
    last = None if prefix is None else prefix.hidden
    say_read(0 if prefix is None else prefix.start, len(prompt_ids))
    for start, stop in _chunks(len(prompt_ids), chunk, prefix):
        rows = torch.tensor([list(prompt_ids[start:stop])], device=target.device)
        out = target.forward(rows, cache, taps=taps, commit=True)
        if on_taps is not None and out.taps is not None:
            on_taps(out.taps)
        last = out.hidden[:, -1].clone()
        del rows, out
        say_read(stop, len(prompt_ids))
        if prefix is not None and stop in prefix.stops:
            prefix.keep(last)
    assert last is not None, "check_request refuses an empty prompt"
    return last


def _chunks(length: int, chunk: int, prefix: PrefixSession | None) -> Iterator[tuple[int, int]]:
    """The ranges of a prompt that are read in one pass each. They end at multiples of `chunk`,
    wherever reading begins, and at stops."""
    start, stops = (0, []) if prefix is None else (prefix.start, prefix.stops)
    while start < length:
        stop = min(
            [start - start % chunk + chunk, length, *(stop for stop in stops if stop > start)]
        )
        yield start, stop
        start = stop


def clock(device: torch.device) -> float:
    """Seconds of `perf_counter` with all work queued on an accelerator finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
