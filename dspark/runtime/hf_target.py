"""A causal LM of transformers behind the `Target` protocol.

`HFTarget` is what all have in common; `RowTarget` is a model of attention layers, run over buffers
of ours (`dspark.runtime.hf_cache`): batches of ragged rows, trees, one pass per block.
`dspark.runtime.hf_replay` has the one for models that carry a recurrent state.

The residual stream after a layer is what it returns, so `residual` is the only kind of tap.
Letters: B batch, T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dspark.errors import UserError
from dspark.runtime.hf_cache import RowCache
from dspark.runtime.hf_layer import ROOM
from dspark.runtime.hf_mask import Ring
from dspark.runtime.hf_model import HeadRule, HFModel
from dspark.runtime.target import Cache, TargetOutput
from dspark.taps import TapSet

_KINDS = ("full_attention", "sliding_attention")
FULL = 0
"""Stands for "no window" where None says that a layer keeps nothing."""


class HFTarget:
    """Embedding, head and facts of a transformers model; see `Target` for the members.

    Args:
        model: Owned from here on.
        name: For messages and records.
        end_token_ids: What ends a text.
        vocab_size: Ids that are tokens, where the tables are padded; None: all rows are.
    """

    supports_trees = False
    tap_kinds: tuple[str, ...] = ("residual",)
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        end_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
    ) -> None:
        self.parts = HFModel(model)
        rows = min(self.parts.table_size, int(self.parts.weight.shape[0]))
        self.name = name
        self.vocab_size = min(vocab_size or rows, rows)
        self.table_size = self.parts.table_size
        self.hidden_size = self.parts.hidden_size
        self.num_layers = int(self.parts.config.num_hidden_layers)
        self.max_positions = _longest(self.parts.config)
        self.end_token_ids = end_token_ids
        self.device = self.parts.weight.device
        self.dtype = self.parts.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., D], with the factor that the model's own embedding applies."""
        return self.parts.embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32, scaled and capped as the model does."""
        return self.parts.logits(hidden, slice(self.vocab_size))

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """See `Target.head`."""
        weight = self.parts.weight[ids]
        bias = None if self.parts.bias is None else self.parts.bias[ids]
        rule = self.parts.rule
        return lambda hidden: rule(torch.nn.functional.linear(hidden, weight, bias))

    def plain_head(self) -> Tensor | None:
        """See `Target.plain_head`."""
        if self.parts.bias is not None or self.parts.rule != HeadRule():
            return None
        return self.parts.weight[: self.vocab_size]

    def head_weight(self) -> Tensor:
        """See `Target.head_weight`."""
        weight, scale = self.parts.weight, self.parts.rule.scale
        return weight if scale == 1.0 else (weight.float() * scale).to(weight.dtype)

    @property
    def head_rest(self) -> str:
        """See `Target.head_rest`."""
        cap = self.parts.rule.cap
        bias = "" if self.parts.bias is None else "a bias"
        return " and ".join(filter(None, (bias, "" if cap is None else f"a soft cap at {cap:g}")))


class RowTarget(HFTarget):
    """A model whose layers are attention, full or behind a sliding window.

    Raises UserError for a model with other layers, or one that cannot be told positions and masks.
    """

    supports_trees = True

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        end_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(model, name, end_token_ids, vocab_size)
        for keyword in ("position_ids", "attention_mask"):
            if not self.parts.takes(keyword):
                raise UserError(f"{self.parts.kind}: the model takes no {keyword}")
        self._windows = _windows(self.parts)
        self._kinds = _mask_kinds(self.parts, self._windows)

    def new_cache(self, batch: int, max_length: int) -> RowCache:
        """See `Target.new_cache`."""
        rings = [None if window is None else _ring(window, max_length) for window in self._windows]
        return RowCache(rings, batch, max_length, self.dtype, self.device)

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
        """See `Target.forward`; prompts longer than a sliding layer's room run in pieces."""
        if not isinstance(cache, RowCache):
            raise TypeError(f"expected a cache of this target, got {type(cache).__name__}")
        if commit and parents is not None:
            raise ValueError("a tree cannot be committed at once: one of its paths is")
        room = tokens.shape[1] if cache.room is None or not commit else cache.room
        parts = tokens.split(max(room, 1), 1)
        real = [None] * len(parts) if valid is None else valid.split(max(room, 1), 1)
        pieces = [
            self._pass(rows, cache, kept, parents, taps, commit)
            for rows, kept in zip(parts, real, strict=True)
        ]
        if len(pieces) == 1:
            return pieces[0]
        tapped = [piece.taps for piece in pieces if piece.taps is not None]
        return TargetOutput(
            torch.cat([piece.hidden for piece in pieces], 1),
            torch.cat(tapped, 1) if tapped else None,
        )

    def _pass(
        self,
        tokens: Tensor,
        cache: RowCache,
        valid: Tensor | None,
        parents: Tensor | None,
        taps: TapSet | None,
        commit: bool,
    ) -> TargetOutput:
        block = cache.begin(tokens.shape[1], valid, parents)
        try:
            hidden, tapped = self.parts.run(
                tokens,
                cache.model_cache,
                taps,
                {
                    "position_ids": block.positions,
                    "attention_mask": self.mask_argument(
                        {ring.window: mask for ring, mask in block.masks.items()}
                    ),
                },
            )
        except BaseException:
            cache.rollback()
            raise
        if commit:
            cache.commit(tokens.shape[1] if valid is None else valid.sum(1))
        return TargetOutput(hidden, tapped)

    @property
    def mask_windows(self) -> tuple[int | None, ...]:
        """Sliding windows of its masks, None for full attention."""
        return tuple(dict.fromkeys(self._kinds.values()))

    def mask_argument(self, by_window: Mapping[int | None, Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks [B, 1, T, S] by window, as the model's forward takes them."""
        if len(self._kinds) == 1:
            return by_window[next(iter(self._kinds.values()))]
        return {kind: by_window[window] for kind, window in self._kinds.items()}


def _windows(parts: HFModel) -> tuple[int | None, ...]:
    """Per layer: its window, FULL, or None for a layer without keys and values.

    Raises UserError naming the first layer that is something else.
    """
    if getattr(parts.config, "attention_chunk_size", None):
        raise UserError(f"{parts.kind}: attention in chunks")
    windows: list[int | None] = []
    for index, layer in enumerate(DynamicCache(config=parts.config).layers):
        if type(layer) is DynamicLayer:
            windows.append(FULL)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        else:
            raise UserError(f"{parts.kind}: layer {index} has a {type(layer).__name__}")
    return tuple(windows)


def _mask_kinds(parts: HFModel, windows: tuple[int | None, ...]) -> dict[str, int | None]:
    """The model's word for each kind of layer, and its window; one entry: one mask serves all."""
    kinds = list(getattr(parts.config, "layer_types", None) or ())
    found: dict[str, int | None] = {}
    for kind, window in zip(kinds or ["full_attention"] * len(windows), windows, strict=True):
        if kind not in _KINDS:
            raise UserError(f"{parts.kind}: layers of kind {kind!r}")
        if found.setdefault(kind, window or None) != (window or None):
            raise UserError(f"{parts.kind}: sliding windows of several sizes")
    return found


def _ring(window: int, max_length: int) -> Ring:
    if window == FULL:
        return Ring()
    capacity = window - 1 + ROOM
    return Ring(window, None if max_length <= capacity else capacity)


def _longest(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**31 - 1  # a recurrent model: nothing ends
