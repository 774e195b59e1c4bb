"""What every layout is made of, and what a reader may be told beside the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.shapes import BLOCK_CAUSAL, Yarn
from dspark.errors import UserError
from dspark.taps import TAP_KINDS

SLOT_LAYOUTS = ("anchor", "mask")
"""Whether slot 0, the anchor, predicts the token after it (block size = proposals), or only the
mask slots predict (block size = proposals + 1)."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of rotary positions."""

    theta: float
    yarn: Yarn | None = None

    def __str__(self) -> str:
        base = f"theta={self.theta:g}"
        if self.yarn is None:
            return base
        original = self.yarn.original_max_position_embeddings
        return f"{base},factor={self.yarn.factor:g},original={original}"


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter has to agree with: the sizes and tap kinds of the target at hand.

    `vocab_sizes`: rows of its tables, and those of them that are tokens where the rest is padding.
    `folder`: where it lies, if it does.
    """

    name: str
    hidden_size: int
    vocab_sizes: tuple[int, ...]
    num_layers: int
    tap_kinds: tuple[str, ...]
    folder: str | None = None


@dataclass(frozen=True)
class Given:
    """What the user states. It fills what a file leaves open; it never overrules a file."""

    tap_kind: str | None = None
    slot_layout: str | None = None
    block_causal: str | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    num_target_layers: int | None = None
    rope: Rope | None = None
    target: TargetFacts | None = None


def check_given(given: Given) -> None:
    """Refuses statements that are none. Raises UserError naming the option and the choices."""
    for option, value, choices in (
        ("--tap-kind", given.tap_kind, TAP_KINDS),
        ("--slot-layout", given.slot_layout, SLOT_LAYOUTS),
        ("--block-causal", given.block_causal, BLOCK_CAUSAL),
    ):
        if value is not None and value not in choices:
            raise UserError(f"{option} {value}: expected one of {', '.join(choices)}")


@dataclass(frozen=True)
class Source:
    """A drafter as somebody else wrote it.

    Attributes:
        raw: Its `config.json`.
        shapes: Shapes of its tensors, by our names.
    """

    raw: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Reading:
    """What a reader made of a source.

    Attributes:
        config: The drafter's shape and meaning.
        decided: What the file did not say, one sentence each with the reason.
        recognised: Name of the published drafter that this is, if it is one.
        rest: Keys that were not read, as they stood.
    """

    config: DraftConfig
    decided: tuple[str, ...] = ()
    recognised: str | None = None
    rest: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Format:
    """One layout.

    Attributes:
        name: As `--format` takes it.
        aliases: Other spellings of it.
        title: In words.
        claims: Whether a `config.json` is of this layout.
        read: Source and statements -> configuration. Raises ValueError("key: what is wrong").
        write: Configuration and dtype -> `config.json`. Raises ValueError with the reason why the
            layout or its engines cannot hold that drafter.
        their_name: Our name of a tensor -> its name there.
        copies: Tensors of the target that the layout stores along.
        engines: Who reads it, from which version on.
    """

    name: str
    aliases: tuple[str, ...]
    title: str
    claims: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Source, Given], Reading]
    write: Callable[[DraftConfig, torch.dtype], dict[str, Any]]
    their_name: Callable[[str], str]
    copies: Callable[[DraftConfig], tuple[str, ...]]
    engines: str


def same_name(name: str) -> str:
    """Of layouts with our own (DeepSpec's) names."""
    return name


def no_copies(config: DraftConfig) -> tuple[str, ...]:
    """Of layouts that leave embedding and LM head with the target."""
    del config
    return ()


def reduced_head(config: DraftConfig) -> tuple[str, ...]:
    """Of layouts whose engines cannot cut the target's head to a reduced vocabulary themselves."""
    return ("lm_head.weight",) if config.draft_vocab_size is not None else ()


def architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names of a configuration; empty where there are none."""
    names = raw.get("architectures")
    return tuple(str(name) for name in names) if isinstance(names, list) else ()
