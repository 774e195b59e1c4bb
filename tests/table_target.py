"""A target and drafters that are lookup tables, so that every distribution is known in closed form.

The target is an order-2 Markov chain: the logits after ..., a, b are `table[a, b]` (a = 0 before
the first token). Its "hidden state" is the row of logits itself and its one tap is the one-hot
token, so what reaches the drafter's context can be read back. The cache holds plain token lists
and refuses everything the protocol forbids.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.calibration import Calibration
from dspark.runtime.target import TargetOutput
from dspark.taps import TapSet

TAPS = TapSet((0,), "residual")


class TableCache:
    """Committed and pending tokens of each row; `log` is the history of committed counts."""

    def __init__(self, batch: int, max_length: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.pending: list[list[int]] | None = None
        self.parents: list[list[int]] | None = None
        self.max_length = max_length
        self.log: list[int] = []

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(row) for row in self.rows])

    @property
    def nbytes(self) -> int:
        return 8 * sum(len(row) for row in self.rows)

    def feed(self, new: list[list[int]], commit: bool, parents: list[list[int]] | None) -> None:
        """`new` holds the block's rows, in a tree those that are padding too."""
        assert self.pending is None, "a block is still pending"
        depth = [len(tokens) for tokens in new]
        if parents is not None:
            depth = [max(_depths(above)) for above in parents]
        for row, rows in zip(self.rows, depth, strict=True):
            assert len(row) + rows <= self.max_length, "the cache is full"
        self.pending, self.parents = new, parents
        if commit:
            for row, tokens in zip(self.rows, new, strict=True):
                row.extend(tokens)
            self.pending = None

    def commit(self, n: int | Tensor) -> None:
        if self.pending is None:
            raise ValueError("nothing is pending")
        counts = [n] * len(self.rows) if isinstance(n, int) else n.tolist()
        for row, tokens, count in zip(self.rows, self.pending, counts, strict=True):
            if not 0 <= count <= len(tokens):
                raise ValueError(f"commit({count}) of {len(tokens)} rows")
            row.extend(tokens[:count])
        self.log += counts
        self.pending = None

    def commit_path(self, path: Tensor) -> None:
        if self.pending is None or self.parents is None:
            raise ValueError("no tree is pending")
        for b, padded in enumerate(path.tolist()):
            rows = [r for r in padded if r >= 0]
            assert padded == rows + [-1] * (len(padded) - len(rows)), "padding at the end only"
            for above, row in zip([-1, *rows], rows, strict=False):
                assert self.parents[b][row] == above, f"row {row} does not follow {above}"
            self.rows[b].extend(self.pending[b][r] for r in rows)
            self.log.append(len(rows))
        self.pending = None

    def rollback(self) -> None:
        self.commit(0)

    def select(self, rows: Tensor) -> None:
        assert self.pending is None
        self.rows = [self.rows[r] for r in rows.tolist()]

    def put(self, row: int, other: TableCache) -> None:
        assert self.pending is other.pending is None
        assert len(other.rows) == 1
        assert len(other.rows[0]) <= self.max_length
        self.rows[row] = list(other.rows[0])

    def reset(self, row: int) -> None:
        assert self.pending is None
        self.rows[row] = []

    def fork(self) -> TableCache:
        assert self.pending is None
        other = TableCache(0, self.max_length)
        other.rows = [list(row) for row in self.rows]
        return other


def _depths(parents: list[int]) -> list[int]:
    """Rows on the path from the first row to each."""
    depths: list[int] = []
    for above in parents:
        depths.append(1 + (depths[above] if above >= 0 else 0))
    return depths


class TableTarget:
    """Order-2 Markov chain over `table` [V, V, V] of logits."""

    name = "table"
    num_layers = 1
    max_positions = 100_000
    tap_kinds = ("residual",)
    device = torch.device("cpu")
    supports_trees = True

    def __init__(self, table: Tensor, end_token_ids: tuple[int, ...] = ()) -> None:
        self.table = table
        self.vocab_size = self.table_size = self.hidden_size = table.shape[-1]
        self.end_token_ids = end_token_ids
        self.dtype = table.dtype
        self.caches: list[TableCache] = []
        self.rows_seen = 0

    @classmethod
    def random(cls, vocab: int, seed: int, scale: float = 1.5) -> TableTarget:
        """Mostly order 1, so that a drafter that sees one token back can be right."""
        generator = torch.Generator().manual_seed(seed)
        order1 = torch.randn(vocab, vocab, generator=generator)
        order2 = torch.randn(vocab, vocab, vocab, generator=generator)
        return cls(scale * (order1 + 0.5 * order2))

    def embed(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, self.vocab_size).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float().clone()

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden.float()[..., ids]

    def new_cache(self, batch: int, max_length: int) -> TableCache:
        self.caches.append(TableCache(batch, max_length))
        return self.caches[-1]

    def forward(
        self,
        tokens: Tensor,
        cache: TableCache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        keep = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        hidden = torch.full((*tokens.shape, self.vocab_size), torch.nan, dtype=self.dtype)
        if parents is None:
            new = [row[kept].tolist() for row, kept in zip(tokens, keep, strict=True)]
            above = None
        else:
            assert not commit, "a tree cannot be committed at once"
            new, above = tokens.tolist(), parents.expand_as(tokens).tolist()
        for b, (past, fresh) in enumerate(zip(cache.rows, new, strict=True)):
            paths = _chain(fresh) if above is None else _paths(fresh, above[b])
            last = [[0, 0, *past[-2:], *path][-2:] for path in paths]
            pairs = torch.tensor(last, dtype=torch.int64).view(-1, 2)
            rows = self.table[pairs[:, 0], pairs[:, 1]]
            hidden[b, keep[b]] = rows if above is None else rows[keep[b]]
        cache.feed(new, commit, above)
        self.rows_seen += tokens.shape[1]
        return TargetOutput(hidden, None if taps is None else self.embed(tokens))


def _chain(tokens: list[int]) -> list[list[int]]:
    return [tokens[: k + 1] for k in range(len(tokens))]


def _paths(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """The tokens from the first row to each row of a tree."""
    paths: list[list[int]] = []
    for token, above in zip(tokens, parents, strict=True):
        paths.append([*(paths[above] if above >= 0 else []), token])
    return paths


class TableContext:
    """What a table drafter was fed: the committed tokens of each row, read back from the taps."""

    def __init__(self, batch: int = 1, max_length: int = 1 << 30) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.max_length = max_length

    @property
    def tokens(self) -> list[int]:
        """Of a batch of one."""
        assert len(self.rows) == 1
        return self.rows[0]

    def fix_shapes(self) -> None:
        """Its lengths are on the host in any case: this is a table."""

    def put(self, row: int, other: TableContext) -> None:
        assert len(other.rows) == 1
        self.rows[row] = list(other.rows[0])

    def reset(self, row: int) -> None:
        assert 0 <= row < len(self.rows)
        self.rows[row] = []

    def select(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]

    def fork(self) -> TableContext:
        other = TableContext(0, self.max_length)
        other.rows = [list(row) for row in self.rows]
        return other


class TableDrafter:
    """Logits of slot k are `slots[k, anchor] + bias[previous token]`."""

    taps = TAPS
    calibration: Calibration | None = None
    draft_ids: Tensor | None = None

    def __init__(self, slots: Tensor, bias: Tensor) -> None:
        block, vocab = slots.shape[:2]
        self.slots = slots
        self.config = SimpleNamespace(block_size=block, mask_token_id=vocab - 1)
        self.markov_head = SimpleNamespace(
            start=lambda batch: None,
            step=lambda prev, hidden, state: (F.one_hot(prev, vocab).float(), state),
            bias=lambda code: bias[code.argmax(dim=-1)],
            embed=lambda prev: F.one_hot(prev, vocab).float(),
        )
        self.contexts: list[TableContext] = []

    @classmethod
    def random(cls, vocab: int, block: int, seed: int, scale: float = 1.0) -> TableDrafter:
        generator = torch.Generator().manual_seed(seed)
        return cls(
            scale * torch.randn(block, vocab, vocab, generator=generator),
            scale * torch.randn(vocab, vocab, generator=generator),
        )

    @classmethod
    def of(cls, target: TableTarget, block: int, noise: float, seed: int) -> TableDrafter:
        """An order-1 approximation of the target: right often, but not always."""
        vocab = target.vocab_size
        generator = torch.Generator().manual_seed(seed)
        slots = noise * torch.randn(block, vocab, vocab, generator=generator)
        return cls(slots, target.table.float().mean(dim=0))

    @property
    def confidence_head(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        return lambda hidden, prev_embed: hidden.amax(dim=-1) + prev_embed.argmax(dim=-1)

    def new_context(self, batch: int, max_length: int) -> TableContext:
        self.contexts.append(TableContext(batch, max_length))
        return self.contexts[-1]

    def extend(
        self, context: TableContext, features: Tensor, counts: int | Tensor | None = None
    ) -> None:
        if counts is None:
            counts = features.shape[1]
        kept = [counts] * len(context.rows) if isinstance(counts, int) else counts.tolist()
        for row, tokens, count in zip(
            context.rows, features.argmax(dim=-1).tolist(), kept, strict=True
        ):
            assert 0 <= count <= len(tokens)
            row.extend(tokens[:count])
            assert len(row) <= context.max_length

    def block_hidden(self, block_embeds: Tensor, context: TableContext) -> Tensor:
        block = block_embeds.argmax(dim=-1)
        assert block.shape == (len(context.rows), self.config.block_size)
        assert (block[:, 1:] == self.config.mask_token_id).all()
        return self.slots[:, block[:, 0]].transpose(0, 1)


class ScriptedDrafter(TableDrafter):
    """Proposes a known text, wrong wherever `script(round, slot)` is False.

    `text` is prompt plus plain greedy continuation; a wrong token is the right one plus one.
    """

    def __init__(
        self, text: list[int], vocab: int, block: int, script: Callable[[int, int], bool]
    ) -> None:
        super().__init__(torch.zeros(block, vocab, vocab), torch.zeros(vocab, vocab))
        self.text, self.vocab, self.script = text, vocab, script
        self.round = 0

    def block_hidden(self, block_embeds: Tensor, context: TableContext) -> Tensor:
        block = self.config.block_size
        first = len(context.tokens) + 1  # the anchor stands at len(context)
        future = (self.text[first:] + [0] * block)[:block]
        tokens = [t + (not self.script(self.round, k)) for k, t in enumerate(future)]
        self.round += 1
        return 9.0 * F.one_hot(torch.tensor([tokens]) % self.vocab, self.vocab).float()
