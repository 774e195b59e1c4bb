"""transformers models whose cache cannot forget: a recurrent state is restored and run again.

Linear attention, Mamba and the like fold every row into a state that no crop can undo, and their
batches take left padding only. So each request has a transformers cache of its own, batch row by
batch row, and a block that was not accepted whole runs again as far as it was
(`dspark.runtime.hf_states`). Right for any cache of transformers, and slow: one pass per batch row,
a second one after each rejection. Models that cannot continue from a state with several rows at
once run row by row.

Letters: B batch, T rows, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dspark.runtime.hf_states import ReplayCache, Request
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.target import Cache, TargetOutput
from dspark.taps import TapSet


class ReplayTarget(HFTarget):
    """A model with recurrent layers, or one that only its own cache fits.

    Args:
        one_by_one: Rows after the first pass of a request run one at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        end_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
        *,
        one_by_one: bool = False,
    ) -> None:
        super().__init__(model, name, end_token_ids, vocab_size)
        self._one_by_one = one_by_one
        slow = ["slow: batch rows run one after the other, rejected blocks run twice"]
        if one_by_one:
            slow.append("slow: its cache takes one token at a time, so a block saves no pass")
        self.notes = tuple(slow)

    def new_cache(self, batch: int, max_length: int) -> ReplayCache:
        """See `Target.new_cache`."""
        requests = [Request(self._fresh()) for _ in range(batch)]
        return ReplayCache(self._fresh, self._run, self.device, requests)

    def _fresh(self) -> DynamicCache:
        return DynamicCache(config=self.parts.config)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        """See `Target.forward`. Raises ValueError for trees: a state has one past."""
        if not isinstance(cache, ReplayCache):
            raise TypeError(f"expected a cache of this target, got {type(cache).__name__}")
        if parents is not None:
            raise ValueError(
                f"target {self.name} verifies chains only: its state cannot branch; use siblings 0"
            )
        cache.settled("the next forward")
        batch, rows = tokens.shape
        hidden = torch.zeros(batch, rows, self.hidden_size, dtype=self.dtype, device=self.device)
        width = 0 if taps is None else len(taps.layer_ids) * self.hidden_size
        tapped = hidden.new_zeros(batch, rows, width)
        for b, request in enumerate(cache.requests):
            real = slice(None) if valid is None else valid[b].nonzero()[:, 0]
            fresh = tokens[b, real]
            if not commit:
                request.before, request.pending = request.states().copied(), fresh
            if fresh.shape[0]:
                hidden[b, real], seen = self._run(request, fresh, taps)
                if seen is not None:
                    tapped[b, real] = seen
        return TargetOutput(hidden, None if taps is None else tapped)

    def _run(
        self, request: Request, rows: Tensor, taps: TapSet | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows [T] after what the request holds -> [T, D], and taps."""
        step = 1 if self._one_by_one and request.length else max(1, rows.shape[0])
        outputs: list[tuple[Tensor, Tensor | None]] = []
        for piece in rows.split(step):
            given: dict[str, Tensor] = {}
            at = torch.arange(request.length, request.length + len(piece), device=self.device)
            if self.parts.takes("position_ids"):
                given["position_ids"] = at.unsqueeze(0)
            if self.parts.takes("cache_position"):
                given["cache_position"] = at
            outputs.append(self.parts.run(piece.unsqueeze(0), request.cache, taps, given))
            request.length += len(piece)
        seen = [tap[0] for _, tap in outputs if tap is not None]
        return torch.cat([out[0] for out, _ in outputs]), torch.cat(seen) if seen else None
