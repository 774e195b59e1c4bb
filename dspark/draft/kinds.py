"""Which backbones there are: three that dspark brings, and those that a program registers.

A registered backbone is trained, saved, opened, verified and measured like the others. Its name
stands in `config.json`, so a process that opens such a drafter has to register it first. The how-to
is docs/extend/backbone.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dspark.draft.backbone import Backbone
    from dspark.draft.config import DraftConfig

BACKBONES = ("attention", "mla", "kda")
"""What dspark brings."""


@dataclass(frozen=True)
class BackboneKind:
    """What has to be known of a registered backbone.

    layers         fresh layers of a configuration; the drafter keeps them as `layers`
    run            the backbone that runs them
    context_bytes  bytes of context that a draft step of one text reads: configuration, tokens
                   before the anchor, dtype of the weights
    """

    layers: Callable[[DraftConfig], nn.ModuleList]
    run: Callable[[DraftConfig, nn.ModuleList], Backbone[Any]]
    context_bytes: Callable[[DraftConfig, int, torch.dtype], int]


_registered: dict[str, BackboneKind] = {}


def register_backbone(name: str, kind: BackboneKind) -> None:
    """Make a backbone known by name, for `DraftConfig.backbone` and `drafter.backbone`.

    It has the sizes that all have (`hidden_size`, `num_layers`, `num_attention_heads`, `head_dim`,
    `intermediate_size`) and as many key heads as query heads. The same name again replaces it.

    Raises ValueError for a name of dspark's own, or one that is no lower-case identifier (it
    becomes part of `model_type`).
    """
    if name in BACKBONES:
        raise ValueError(f"backbone {name!r} is dspark's own; choose another name")
    if not (name.isidentifier() and name == name.lower()):
        raise ValueError(f"backbone {name!r}: a lower-case identifier is needed")
    _registered[name] = kind


def registered(name: str) -> BackboneKind | None:
    """A registered backbone; None: there is none of that name."""
    return _registered.get(name)


def backbone_names() -> tuple[str, ...]:
    """All names that a configuration may have, dspark's own first."""
    return (*BACKBONES, *_registered)
