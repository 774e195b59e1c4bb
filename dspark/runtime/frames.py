"""Decoding in frames of fixed shape: the host queues work and reads what came of it a frame late.

A frame is a draft slot and a verify slot of one group of seats. Two groups take turns, so that the
draft slot of one runs beside the verify slot of the other:

    queue        A draft 1   A verify 1     A draft 2    A verify 2   ...
                             B draft 1      B verify 1   B draft 2    ...
    the host                                reads A 1    reads B 1    reads A 2 ...

On CUDA the two slots of a column run on two streams, on a CPU one after the other. The size of a
verify slot comes from a small set and from frames that were read (`frame_sizes`); what ended, what
was accepted and what is left are decided on the device (`frame_step`), so that frame n + 1 can be
queued before anything of frame n is known. Requests join and leave between the frames of a group.

Everything a pass reads has a shape that depends on the slot's size alone. What a captured frame
would still have to be given from outside are the random numbers of its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from dspark.errors import UserError
from dspark.runtime.decode import begin, check_taps
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.frame_group import Frame, FrameGroup
from dspark.runtime.frame_report import FrameReport, FrameTimes, Handle, Slot
from dspark.runtime.judge import Method
from dspark.runtime.lanes import Lanes
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Policy
from dspark.runtime.pool import PoolFull, StatePool
from dspark.runtime.prefill import PREFILL_CHUNK
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.proposal import Drafter
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.requests import Request, Text
from dspark.runtime.rounds import Rounds
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.runtime.target import Cache, Target


class FrameScheduler:
    """Seats for requests, and the frames that decode them.

    Args:
        slots: Seats of a group.
        groups: How many groups take turns; 2 lets draft and verify slots overlap, 1 is for a
            request that is alone.
        max_length: Longest text in tokens, prompt included.
        sampling, policy, method, relaxed: Of all requests; see `SpeculativeDecoder.generate`.
        pool: Where caches and contexts live, those of prompts being read too; a request waits while
            it has no room for its prompt.
        prefix_cache: See `SpeculativeDecoder.generate`.
        sibling_rows: Rows of every verify slot that siblings share; None: two positions' worth.
        on_slot: Hears what is queued and read, in order.

    Raises UserError for a pair, policy or size that cannot work, PoolFull for a pool that cannot
    hold the seats.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        max_length: int,
        slots: int = 4,
        groups: int = 2,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        policy: Policy | None = None,
        method: Method = "token",
        relaxed: Relaxed | None = None,
        pool: StatePool | None = None,
        prefix_cache: PrefixCache | None = None,
        sibling_rows: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        on_slot: Callable[[Slot], None] | None = None,
    ) -> None:
        if slots < 1 or groups < 1 or max_length < 1:
            raise UserError(
                f"slots {slots}, groups {groups}, max_length {max_length}: expected at least 1"
            )
        check_taps(target, drafter)
        head = DraftHead(target, drafter.draft_ids)
        policy = Fixed() if policy is None else policy.fresh()
        self.rounds = Rounds(target, drafter, head, sampling, policy, method, relaxed)
        self.max_length, self._pool, self._prefixes = max_length, pool, prefix_cache
        self._chunk, self._on_slot = prefill_chunk, on_slot
        rows = 2 * policy.siblings if sibling_rows is None else sibling_rows
        self._lanes = Lanes(target.device)
        self._groups = [self._group(slots, rows) for _ in range(groups)]
        self._turn = 0
        self._waiting: deque[Handle] = deque()
        self._seated: dict[Text, Handle] = {}
        self._times = FrameTimes()

    def _group(self, slots: int, sibling_rows: int) -> FrameGroup:
        target, drafter = self.rounds.target, self.rounds.drafter
        room = self.max_length + 1 + self.rounds.block + sibling_rows
        if self._pool is not None:
            lease = self._pool.admit(room, slots)
            cache, context = lease.cache, lease.context
        else:
            cache, context = target.new_cache(slots, room), drafter.new_context(slots, room)
        return FrameGroup(self.rounds, self._lanes, cache, context, sibling_rows)

    @torch.inference_mode()
    def submit(self, request: Request) -> Handle:
        """Queue a request; it joins when a seat is free. Raises UserError for a wrong one."""
        text = Text(self.rounds.target, request)
        if request.rules is not None:
            raise UserError(
                "rules: they read the text on the host, where a frame does not wait for it; use "
                "SpeculativeDecoder.generate_many"
            )
        if request.max_length > self.max_length:
            raise UserError(
                f"max_new_tokens: prompt and answer may become {request.max_length} tokens, this "
                f"scheduler's seats hold {self.max_length}"
            )
        handle = Handle(text)
        self._waiting.append(handle)
        return handle

    @torch.inference_mode()
    def cancel(self, handle: Handle) -> None:
        """Stop a request wherever it is, also between the slots of a frame. What it has said stays;
        its other frames are dropped."""
        if handle.finished:
            return
        handle.cancelled = True
        if handle in self._waiting:
            self._waiting.remove(handle)
        for group in self._groups:
            if handle.text in group.texts:
                self._end(group, group.texts.index(handle.text))

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting) or any(group.busy for group in self._groups)

    @torch.inference_mode()
    def step(self) -> None:
        """The next turn: one group's draft slot beside the verify slot of the one before it."""
        at = self._turn
        self._turn = (at + 1) % len(self._groups)
        group, before = self._groups[at], (at - 1) % len(self._groups)
        self._fill(group)
        if group.live:
            group.draft()
            assert group.ahead is not None
            self._times.queued(group.ahead.drafted)
            self._tell(at, group.ahead, "draft")
        other = self._groups[before]
        if other.ahead is not None:
            frame = other.verify()
            assert frame.verified is not None
            self._times.queued(frame.verified)
            self._tell(before, frame, "verify")
            self._read(before, behind=1)
        elif not other.live:
            self._read(before, behind=0)

    def run(self) -> FrameReport:
        """Step until every request has ended."""
        while self.busy:
            self.step()
        return self.report()

    def report(self) -> FrameReport:
        """What frames took since the scheduler was made."""
        return self._times.report()

    def _read(self, at: int, behind: int) -> None:
        group = self._groups[at]
        for frame, waited, broken in group.read(behind):
            self._tell(at, frame, "read")
            self._times.read(frame, waited)
            for row, text in enumerate(group.texts):
                if text is None:
                    continue
                self._seated[text].error = broken.get(row)
                if text.finished or row in broken:
                    self._end(group, row)

    def _end(self, group: FrameGroup, row: int) -> None:
        text = group.texts[row]
        assert text is not None
        self._seated.pop(text).ended()
        self._times.tokens += len(text.tokens)
        group.leave(row)

    def _fill(self, group: FrameGroup) -> None:
        """Seat waiting requests, an even share of them for each group."""
        running = sum(text is not None for each in self._groups for text in each.texts)
        share = -(-(running + len(self._waiting)) // len(self._groups))
        for row in group.free():
            taken = sum(text is not None for text in group.texts)
            while self._waiting and taken < share and group.texts[row] is None:
                if not self._seat(group, row):
                    return

    def _seat(self, group: FrameGroup, row: int) -> bool:
        """Read the next prompt and, unless its first token ends it, give it the seat.

        False if it has to wait for memory; it has an error if none will ever be free.
        """
        handle = self._waiting[0]
        try:
            with self._places(handle.text) as places:
                self._waiting.popleft()
                self._read_prompt(handle, group, row, places)
        except PoolFull as full:
            if any(each.busy for each in self._groups):
                return False
            self._waiting.popleft()
            handle.error = full
        except BadLogits as error:
            handle.error = error
        return True

    @contextmanager
    def _places(self, text: Text) -> Iterator[tuple[Cache, Any] | None]:
        """Cache and context of a prompt while it is read, in the pool if there is one."""
        if self._pool is None:
            yield None
            return
        with self._pool.admit(text.request.max_length + self.rounds.sibling_rows) as lease:
            yield lease.cache, lease.context

    def _read_prompt(
        self, handle: Handle, group: FrameGroup, row: int, places: tuple[Cache, Any] | None
    ) -> None:
        handle.seated()
        with self._lanes.verify(None) as span:
            alone = begin(self.rounds, handle.text, self._chunk, self._prefixes, places)
        handle.decoding()
        self._times.queued(span)
        self._times.host_syncs += 1
        if handle.text.finished:
            self._times.tokens += len(handle.tokens)
        else:
            self._seated[handle.text] = handle
            group.join(row, alone)

    def _tell(self, at: int, frame: Frame, kind: Literal["draft", "verify", "read"]) -> None:
        if self._on_slot is not None:
            self._on_slot(Slot(at, frame.number, kind, frame.size))
