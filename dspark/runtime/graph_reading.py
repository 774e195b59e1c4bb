"""Prompts read by recorded passes: a fixed number of rows at a time, on a seat of their own.

    chunk     rows of the prompt behind what was read; the last one is padded
    target    one pass over them; padded rows lie behind the length and count for nothing
    drafter   its context reads the taps of the rows that are the prompt's

A graph for each number of rows, recorded once and replayed for every chunk of every prompt. The
seat lies apart from those of frames: reading cannot touch them, they need no room for a chunk, and
one graph serves them all. What was read is copied to the seat that it is for.

Letters: T rows of a chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark.draft.context import DraftContext
from dspark.draft.model import DSparkDrafter
from dspark.k3.storage import PrivateStorage
from dspark.runtime.graph_prompts import ReadPrompt
from dspark.runtime.graph_replay import Replay
from dspark.runtime.prefill import say_read
from dspark.runtime.static_pass import Reading, StaticPass


class StaticReader:
    """Reads prompts by a target's static pass; see `dspark.runtime.graph_prompts.PromptReader`.

    Args:
        static: The pass.
        reading: Its seat for prompts and how many rows it reads at a time.
        drafter: None: nobody reads the taps.
        length: What the drafter's contexts of the frames are made for.
        pool: Memory that graphs share, see `Replay`.

    Raises NotRecorded if a chunk cannot be recorded.
    """

    def __init__(
        self,
        static: StaticPass,
        reading: Reading,
        drafter: DSparkDrafter | None,
        length: int,
        pool: Any = None,
    ) -> None:
        self._static, self._cache, self._drafter = static, reading.seat, drafter
        device = static.device
        self._context: DraftContext | None = None
        if drafter is not None:
            self._context = drafter.new_context(1, length, PrivateStorage())
            self._context.fix_shapes(in_place=True)
        self._tokens = {
            rows: torch.zeros(1, rows, dtype=torch.int64, device=device) for rows in reading.rows
        }
        self._count = torch.ones(1, dtype=torch.int64, device=device)
        self._chunks: dict[int, Replay[Tensor]] = {}
        for rows in reversed(reading.rows):  # the largest first: the others fit into its memory
            self._empty()
            self._chunks[rows] = Replay(partial(self._read, rows), device, pool)

    @property
    def recorded(self) -> bool:
        """Whether all of them are graphs."""
        return all(chunk.recorded for chunk in self._chunks.values())

    @torch.inference_mode()
    def read(self, prompt_ids: Sequence[int]) -> ReadPrompt:
        """A prompt; what is said of it holds until the next one is read."""
        total, start = len(prompt_ids), 0
        last: Tensor | None = None
        self._empty()
        # padded by a token that is read anyway: what it gives is finite if the prompt's is
        padded = [*prompt_ids, *[prompt_ids[-1]] * max(self._tokens)]
        ids = torch.tensor([padded], dtype=torch.int64, device=self._static.device)
        say_read(0, total)
        while start < total:
            rows = self._rows(total - start)
            self._tokens[rows].copy_(ids[:, start : start + rows])
            self._count.fill_(min(rows, total - start))
            last = self._chunks[rows].run()
            start += rows
            say_read(min(start, total), total)
        assert last is not None, "check_request refuses an empty prompt"
        return ReadPrompt(self._cache, self._context, last)

    def _rows(self, left: int) -> int:
        """Of the next chunk: the fewest that hold what is left, or as many as there may be."""
        return min((rows for rows in self._tokens if rows >= left), default=max(self._tokens))

    def _empty(self) -> None:
        self._cache.reset(0)
        if self._context is not None:
            self._context.reset(0)

    def _read(self, rows: int) -> Tensor:
        """A chunk; [1, D], the state of its last row that counts. What the graph records."""
        taps = None if self._drafter is None else self._drafter.taps
        out = self._static.step(self._tokens[rows], self._cache, taps=taps)
        if self._drafter is not None:
            assert self._context is not None
            assert out.taps is not None
            self._drafter.extend(self._context, out.taps, self._count)
        self._cache.lengths.add_(self._count)
        return out.last[0].index_select(0, self._count - 1)
