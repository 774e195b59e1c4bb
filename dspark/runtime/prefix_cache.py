"""Prompts that begin alike are read once: a radix tree whose nodes carry checkpoints.

A prompt uses the deepest checkpoint on its path and reads on from there. It leaves checkpoints
itself: at its end, and where it parts from what others began with too, since the next one may part
there as well. Nothing is linked into the tree before the prompt's own first token was drawn from
finite logits, so a failed request leaves nothing behind.

Two budgets. Over the device budget the states that were idle longest move to host memory as long as
that has room (latents stay), then leaves of the tree are dropped, least recently used first.

Restoring copies bits. What follows a hit is read in other chunks than without one, so logits agree
to rounding (1e-5 in float32), and bit for bit where the chunks begin at the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspark.runtime.checkpoint import Checkpoint, restore, take
from dspark.runtime.prefill import clock
from dspark.runtime.prefix_tree import Leaf, RadixTree
from dspark.runtime.target import Cache, Target

LEAST_TOKENS = 16
"""A shorter prefix is not worth a state."""


@dataclass(frozen=True)
class Hit:
    """A prefix of a text that need not be read: its length, and the checkpoints that hold it."""

    length: int
    chain: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class PrefixStats:
    """What a prefix cache did since it was made, and what it holds.

    requests, hits    prompts asked for, and those of which it had a part
    asked, reused     tokens of them, and those that were not read again
    read_s            seconds that the others took
    restore_s         seconds of copying states back
    saved_s           reused tokens at the pace of the tokens read, less `restore_s`; an estimate.
                      None before anything was read
    checkpoints, device_bytes, host_bytes   held now
    evicted, offloaded, refused             checkpoints dropped, moved to the host, not let in
    """

    requests: int
    hits: int
    asked: int
    reused: int
    read_s: float
    restore_s: float
    saved_s: float | None
    checkpoints: int
    device_bytes: int
    host_bytes: int
    evicted: int
    offloaded: int
    refused: int

    @property
    def hit_rate(self) -> float | None:
        """Hits per request; None before the first."""
        return self.hits / self.requests if self.requests else None

    @property
    def token_hit_rate(self) -> float | None:
        """Tokens reused per token asked for; None before the first."""
        return self.reused / self.asked if self.asked else None


class PrefixCache:
    """Checkpoints of one target, and of one drafter beside it.

    Args:
        target, drafter: whose states it keeps; None: of plain decoding.
        budget_bytes: of device memory, for everything that is kept. A checkpoint in the making is
            beside it.
        host_bytes: of host memory, for states that moved there.
        least_tokens: shortest prefix that is kept.
    """

    def __init__(
        self,
        target: Target,
        drafter: Any | None,
        budget_bytes: int,
        *,
        host_bytes: int = 0,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        if budget_bytes < 1 or host_bytes < 0 or least_tokens < 1:
            raise ValueError(
                f"budget_bytes {budget_bytes}, host_bytes {host_bytes}, least_tokens "
                f"{least_tokens}: expected at least 1, 0 and 1"
            )
        self.target, self.drafter = target, drafter
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.least_tokens = least_tokens
        self._tree: RadixTree[Checkpoint] = RadixTree()
        self._clock = 0
        self._counts = dict.fromkeys(("evicted", "offloaded", "refused"), 0)
        self._work = PrefillWork()

    def check(self, target: Target, drafter: Any | None) -> None:
        """Raise ValueError unless it was made for these."""
        if target is not self.target or drafter is not self.drafter:
            raise ValueError("prefix cache: made for another target or drafter")

    def lookup(self, tokens: Sequence[int]) -> Hit | None:
        """The longest prefix of a text that it holds, or None."""
        nodes = self._tree.path(tokens).nodes
        self._clock += 1
        for node in nodes:
            node.used = self._clock
        return _hit([node.value for node in nodes if node.value is not None])

    def parting(self, tokens: Sequence[int]) -> int:
        """How many first tokens of a text other texts here begin with too."""
        return self._tree.path(tokens).shared

    def insert(self, tokens: Sequence[int], checkpoint: Checkpoint) -> bool:
        """Keep the state after a text; whether there was room for it.

        Raises:
            ValueError: a checkpoint of another number of tokens.
        """
        if checkpoint.length != len(tokens):
            raise ValueError(f"a checkpoint of {checkpoint.length} tokens for {len(tokens)}")
        known = [node.value for node in self._tree.path(tokens).nodes if node.value is not None]
        if known and known[-1].length == len(tokens):
            return True
        joins = _hit([*known, checkpoint]) is not None  # what it starts behind may have left
        if not joins or not self._make_room(checkpoint.nbytes, tokens):
            self._counts["refused"] += 1
            return False
        self._clock += 1
        self._tree.put(tokens, checkpoint, self._clock, lambda later: later.behind(len(tokens)))
        return True

    def open(self, prompt: Sequence[int], cache: Cache, context: Any | None) -> PrefixSession:
        """Begin a prompt: the empty cache and context become what the longest known prefix left.

        The caller reads on from `PrefixSession.start`.
        """
        return PrefixSession(self, prompt, cache, context)

    def stats(self) -> PrefixStats:
        held = self._held()
        work, counts = self._work, self._counts
        pace = work.read_s / work.read if work.read else None
        return PrefixStats(
            requests=work.requests,
            hits=work.hits,
            asked=work.read + work.reused,
            reused=work.reused,
            read_s=work.read_s,
            restore_s=work.restore_s,
            saved_s=None if pace is None else work.reused * pace - work.restore_s,
            checkpoints=len(held),
            device_bytes=sum(c.nbytes - c.host_nbytes for c in held),
            host_bytes=sum(c.host_nbytes for c in held),
            evicted=counts["evicted"],
            offloaded=counts["offloaded"],
            refused=counts["refused"],
        )

    def clear(self) -> None:
        """Forget all texts; the counts stay."""
        self._tree = RadixTree()

    def _held(self) -> list[Checkpoint]:
        return [node.value for node in self._tree.nodes() if node.value is not None]

    def _make_room(self, needed: int, tokens: Sequence[int]) -> bool:
        """Move and drop until so many bytes of the device budget are free; drops nothing on the
        path of the text that needs them, since it builds on that."""
        while True:
            held = self._held()
            if sum(c.nbytes - c.host_nbytes for c in held) + needed <= self.budget_bytes:
                return True
            if needed > self.budget_bytes or not (self._offload_one() or self._drop_one(tokens)):
                return False

    def _offload_one(self) -> bool:
        room = self.host_bytes - sum(c.host_nbytes for c in self._held())
        idle = [
            node
            for node in self._tree.nodes()
            if node.value is not None and not node.value.on_host and node.value.movable <= room
        ]
        if not idle:
            return False
        node = min(idle, key=lambda node: node.used)
        assert node.value is not None
        node.value = node.value.to_host()
        self._counts["offloaded"] += 1
        return True

    def _drop_one(self, tokens: Sequence[int]) -> bool:
        path = self._tree.path(tokens).nodes
        leaves = [leaf for leaf in self._tree.leaves() if leaf.node not in path]
        if not leaves:
            return False
        self._tree.drop(min(leaves, key=_last_use))
        self._counts["evicted"] += 1
        return True


class PrefillWork:
    """Counts of what prompts asked for and what it took; all of one request at once."""

    def __init__(self) -> None:
        self.requests = self.hits = self.read = self.reused = 0
        self.read_s = self.restore_s = 0.0

    def add(self, read: int, reused: int, read_s: float, restore_s: float) -> None:
        self.requests += 1
        self.hits += reused > 0
        self.read += read
        self.reused += reused
        self.read_s += read_s
        self.restore_s += restore_s


class PrefixSession:
    """One prompt on its way through a prefix cache.

    Attributes:
        start: tokens that the cache and the context hold already.
        stops: where reading must pause for `keep`, ascending: where the prompt parts from what
            others began with, and its end; neither within `least_tokens` of the one before.
        hidden: [1, D] of token `start` - 1, None at the beginning of a text.
    """

    def __init__(
        self, owner: PrefixCache, prompt: Sequence[int], cache: Cache, context: Any | None
    ) -> None:
        self._owner, self._prompt = owner, tuple(prompt)
        self._cache, self._context = cache, context
        self._made: list[Checkpoint] = []
        parting = owner.parting(prompt)  # before the lookup, which changes nothing of it
        hit = owner.lookup(prompt)
        self.start = 0
        self.hidden: Tensor | None = None
        self._restore_s = 0.0
        if hit is not None:
            before = clock(owner.target.device)
            restore(hit.chain, cache, context)
            self.start, self.hidden = hit.length, hit.chain[-1].hidden
            self._restore_s = clock(owner.target.device) - before
        self._begun = clock(owner.target.device)
        self.stops: list[int] = []
        last = self.start
        for length in sorted({parting, len(self._prompt)}):
            if length - last >= owner.least_tokens:
                self.stops.append(length)
                last = length

    def keep(self, hidden: Tensor) -> None:
        """Take a checkpoint of what has been read; [1, D] of the last token. Not linked yet."""
        start = self._made[-1].length if self._made else self.start
        owner = self._owner
        self._made.append(take(self._cache, owner.drafter, self._context, hidden, start))

    def finish(self) -> None:
        """The prompt's first token was drawn: link what was kept, count what was done."""
        owner = self._owner
        read_s = clock(owner.target.device) - self._begun
        for checkpoint in self._made:
            owner.insert(self._prompt[: checkpoint.length], checkpoint)
        self._made.clear()
        owner._work.add(len(self._prompt) - self.start, self.start, read_s, self._restore_s)


def _hit(known: Sequence[Checkpoint]) -> Hit | None:
    """The last of the checkpoints on a path with those that it starts behind."""
    if not known:
        return None
    by_length = {checkpoint.length: checkpoint for checkpoint in known}
    chain = [known[-1]]
    while chain[0].start:
        before = by_length.get(chain[0].start)
        if before is None:
            return None
        chain.insert(0, before)
    return Hit(known[-1].length, tuple(chain))


def _last_use(leaf: Leaf[Checkpoint]) -> int:
    return leaf.node.used
