"""Taps: which hidden states of the target a drafter reads, and what they mean.

A layer id counts completed layers from 0: tap k is what the target knows after decoder layer k.
The kind says *which* tensor that is, because on a target with Attention Residuals three different
tensors of the same shape compete for the name "hidden state after layer k", and taking the wrong
one fails silently.
"""

from __future__ import annotations

from dataclasses import dataclass

TAP_KINDS = ("residual", "attn_res_mixture", "raw_prefix")
"""residual: the residual stream after layer k (ordinary decoders).
attn_res_mixture: the Attention Residuals mixture that layer k+1 reads, before its input norm.
raw_prefix: the within-block partial sum after layer k."""


@dataclass(frozen=True)
class TapSet:
    """Layer ids (0-based completed layers, strictly ascending) and the kind of tensor tapped there.

    Raises:
        ValueError: unknown kind, no ids, negative ids, or ids that are not strictly ascending.
    """

    layer_ids: tuple[int, ...]
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in TAP_KINDS:
            raise ValueError(
                f"unknown tap kind {self.kind!r}; expected one of {', '.join(TAP_KINDS)}"
            )
        if not self.layer_ids:
            raise ValueError("a tap set needs at least one layer id")
        ascending = all(a < b for a, b in zip(self.layer_ids, self.layer_ids[1:], strict=False))
        if self.layer_ids[0] < 0 or not ascending:
            raise ValueError(
                f"tap layer ids must be >= 0 and strictly ascending, got {list(self.layer_ids)}"
            )
