"""Decoding by replayed frames: the host queues them and reads what came of each one frame late.

    queue      frame n
    read       the letter of frame n - 1, while frame n runs

Prompts are read between frames, by recorded passes of their own (`graph_reading`) or, where the
target has none, by the ordinary target and drafter; what they left is loaded into the seats. From
there on the device decides alone: what was accepted, where a text ends, what the next frame starts
from. A text that the host ends (a stop string) leaves its seat one frame later, and what that frame
said of it is dropped. On a CPU the same frames run unrecorded.

Frames have one size for the whole run or, under a policy, a few, each recorded once: which is next
depends on letters that were read (`graph_sizes`). No rules: they would need the host in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark import ops
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.k3.storage import PrivateStorage
from dspark.runtime.decode import check_taps
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.faults import raise_fault
from dspark.runtime.graph_draft import Drafting
from dspark.runtime.graph_frame import FrameResult, GraphFrame
from dspark.runtime.graph_prompts import PromptReader, Reader
from dspark.runtime.graph_reading import StaticReader
from dspark.runtime.graph_replay import NotRecorded, Replay
from dspark.runtime.graph_run import GraphRun
from dspark.runtime.graph_seats import Chances, GraphSeats
from dspark.runtime.graph_sizes import SMALL, frame_sizes, size_rule
from dspark.runtime.graph_taps import WaitingTaps
from dspark.runtime.graph_turns import Between, Turns
from dspark.runtime.lanes import Lanes
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Policy
from dspark.runtime.prefill import TokenCallback
from dspark.runtime.proposal import check_draft_length
from dspark.runtime.records import Generation
from dspark.runtime.requests import Request, Text
from dspark.runtime.sampling import SamplingParams, text_positions
from dspark.runtime.static_pass import StaticPass, StaticSeats, not_recorded, static_pass
from dspark.runtime.target import Target


class GraphDecoder:
    """A target that has a static pass, with or without a drafter, in frames of fixed shape.

    Args:
        target: Its weights are shared, not copied.
        drafter: None: plain decoding, a token per frame.
        seats: Requests that run side by side.
        max_length: Longest text in tokens, prompt included.
        draft_length: Primaries of every frame; None: the drafter's whole block. 0: plain steps.
        policy: Chooses the size of the next frame instead.
        sizes: Of frames it may choose from, beside the longest; see `frame_sizes`.
        sampling: Of all requests.
        static: The target's static pass, where several decoders share one; None: a new one.
        reader: Of prompts, in place of the decoder's own; with the drafter if there is one.
        on_frame: Hears of every frame that is queued; for measurements.

    Raises UserError for a pair that cannot work together, or that a frame cannot hold, for a policy
    that needs a confidence head where there is none, and for a target without a static pass.
    """

    def __init__(
        self,
        target: Target,
        drafter: DSparkDrafter | None = None,
        *,
        seats: int = 1,
        max_length: int,
        draft_length: int | None = None,
        policy: Policy | None = None,
        sizes: Sequence[int] = SMALL,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        static: StaticPass | None = None,
        reader: Reader | None = None,
        on_frame: Callable[[FrameResult], None] | None = None,
    ) -> None:
        if seats < 1 or max_length < 1:
            raise UserError(f"seats {seats}, max_length {max_length}: expected at least 1")
        self.target, self.drafter, self.max_length = target, drafter, max_length
        if drafter is not None:
            check_taps(target, drafter)
        self.policy = self._policy(drafter, draft_length, policy)
        block = 0 if drafter is None else drafter.config.block_size
        self.sizes = frame_sizes(self.policy, block, sizes)
        """Primaries of the frames, ascending; 0 is a plain step."""
        self.length, self.sampling = self.sizes[-1], sampling
        self.rule = size_rule(self.policy, self.sizes, seats, block)
        self.decoder = static_pass(target) if static is None else static
        self._reader = reader
        self.on_frame = on_frame
        self.frame_s: list[float] = []
        """Seconds of every frame that was read."""
        self.frame_sizes: list[int] = []
        """Its size."""
        with torch.inference_mode():
            self._build(seats)

    @staticmethod
    def _policy(
        drafter: DSparkDrafter | None, draft_length: int | None, policy: Policy | None
    ) -> Policy:
        if policy is None:
            length = draft_length if drafter is not None else 0
            if drafter is not None and length:
                check_draft_length(drafter, length)
            return Fixed(length)
        if drafter is None or draft_length is not None:
            raise UserError("policy: expected a drafter, and no draft_length beside it")
        if policy.needs_confidence and drafter.confidence_head is None:
            raise UserError("policy: the drafter has no confidence head; use fixed or entropy")
        return policy

    def _build(self, seats: int) -> None:
        target, drafter, most = self.target, self.drafter, self.length
        room = self.max_length
        self.cache: StaticSeats = self.decoder.new_cache(seats, room, most + 1, slots=most > 0)
        self.seats = GraphSeats(seats, target.vocab_size, target.device, most)
        self.drafting: Drafting | None = None
        if drafter is not None and most:
            context = drafter.new_context(seats, room + most + 1, PrivateStorage())
            context.fix_shapes(in_place=True)
            self.drafting = Drafting(drafter, DraftHead(target, drafter.draft_ids), context)
        self._alone = Chances(self.sampling, 1, target.device)
        try:
            pool = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else None
            self.turns = self._record(Chances(self.sampling, seats, target.device), pool)
        except NotRecorded as error:
            raise not_recorded(target, str(error)) from error
        self.reader = self._own_reader(pool) if self._reader is None else self._reader
        self.lanes = Lanes(target.device)
        for seat in range(seats):  # recording ran frames on nothing
            self.empty(seat)

    def _own_reader(self, pool: Any) -> Reader:
        """Recorded, where the static pass reads prompts and so many rows can be recorded."""
        ordinary = PromptReader(self.target, self.drafter)
        reading, drafting = self.decoder.reading(self.max_length), self.drafting
        if reading is None:
            return ordinary
        drafter, length = None, 0
        if drafting is not None:
            drafter, length = drafting.drafter, drafting.context.max_length
        try:
            return StaticReader(self.decoder, reading, drafter, length, pool)
        except NotRecorded:
            return ordinary

    def _record(self, chances: Chances, pool: Any) -> Turns[FrameResult]:
        target, most, drafting = self.target, self.length, self.drafting
        self._waiting: WaitingTaps | None = None
        if drafting is not None and 0 in self.sizes:
            width = len(drafting.drafter.taps.layer_ids) * target.hidden_size
            batch = self.seats.batch
            self._waiting = WaitingTaps(batch, width, self.decoder.dtype, target.device)

        def recorded(size: int, cache: StaticSeats) -> Replay[FrameResult]:
            frame = GraphFrame(
                self.decoder,
                cache,
                target.vocab_size,
                self.seats,
                drafting,
                size,
                most if size else 0,
                chances,
                turns=len(self.sizes) > 1,
                waiting=None if size else self._waiting,
            )
            return Replay(frame.run, target.device, pool)

        drafts = {size: recorded(size, self.cache) for size in reversed(self.sizes) if size}
        if self._waiting is None:
            return Turns(drafts or {0: recorded(0, self.cache)})
        plain = first = recorded(0, self.cache.folding(waits=False))
        if self.cache.waits:
            first = recorded(0, self.cache.folding(waits=True))
        assert drafting is not None
        read = partial(self._waiting.read, drafting.drafter, drafting.context)
        return Turns({**drafts, 0: plain}, Between(first, Replay(read, target.device, pool)))

    @property
    def replay(self) -> Replay[FrameResult]:
        """The largest frame."""
        return self.turns.frames[self.length]

    def empty(self, seat: int) -> None:
        """Idle from now on; whatever the seat held is gone."""
        self.seats.leave(seat)
        self.cache.reset(seat)
        if self.drafting is not None:
            self.drafting.context.reset(seat)
        if self._waiting is not None:
            self._waiting.count[seat] = 0

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        end_token_ids: Collection[int] | None = None,
        seed: int = 0,
        on_tokens: TokenCallback | None = None,
    ) -> Generation:
        """One request; see `SpeculativeDecoder.generate`."""
        request = Request(
            prompt_ids,
            max_new_tokens,
            end_token_ids=end_token_ids,
            seed=seed,
            on_tokens=on_tokens,
        )
        return self.generate_many([request])[0]

    @torch.inference_mode()
    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        """All of them, in their order; as many at a time as there are seats.

        At temperature 0 each text is that of plain decoding; at others it has the same law. With
        frames of one size it depends on its seed and index alone, up to rounding between batch
        shapes; a policy's sizes go by all seats, and some by earlier texts or measured times, so
        that the same seed may then give another sample.

        Raises UserError for a wrong request and BadLogits for non-finite logits, which name the
        place in the text.
        """
        texts = [self._check(request) for request in requests]
        return GraphRun(self, texts).finish()

    def _check(self, request: Request) -> Text:
        text = Text(self.target, request)
        if request.rules is not None:
            raise UserError("rules: they read the text on the host, for which no frame waits")
        if request.max_length > self.max_length:
            raise UserError(
                f"max_new_tokens: prompt and answer may become {request.max_length} tokens, the "
                f"seats hold {self.max_length}"
            )
        return text

    def join(self, seat: int, text: Text) -> None:
        """Read a prompt, emit its first token and, unless that ends the text, take the seat."""
        request = text.request
        prompt = self.reader.read(request.prompt_ids)
        anchor = self._first(prompt.last, text)
        text.first(int(anchor))
        if text.finished:
            return
        self.cache.load(seat, prompt.cache)
        if self.drafting is not None:
            assert prompt.context is not None, "a reader without the drafter"
            self.drafting.context.put(seat, prompt.context)
        self.seats.join(seat, anchor, text.left, text.ends, request.seed, request.index)

    def _first(self, last: Tensor, text: Text) -> Tensor:
        """The first anchor [1], drawn where no round draws: at the prompt's last token."""
        logits, device = self.target.logits(last).unsqueeze(1), last.device
        seats = GraphSeats(1, self.target.vocab_size, device)
        request = text.request
        none = torch.zeros(1, dtype=torch.int64, device=device)
        seats.join(0, none, 0, (), request.seed, request.index)
        place = torch.full((1,), len(request.prompt_ids) - 1, device=device)
        coins = self._alone.coins(seats.seed, place, ops.JUDGE_STREAM, 1)
        alone = self._alone
        judged = ops.verify_sample(
            logits,
            none.new_empty(1, 0),
            none,
            coins=coins,
            temperature=alone.temperature,
            top_k=alone.top_k,
            top_p=alone.top_p,
        )
        with text_positions(lambda: [len(request.prompt_ids)]):
            raise_fault(judged.fault.tolist())
        return judged.next_token
