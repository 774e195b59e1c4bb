"""What `dspark import` and `dspark export` share: the target's facts and tables, and one report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dspark.errors import UserError
from dspark.wording import counted

if TYPE_CHECKING:
    from dspark.draft.checkpoint import TargetCopies
    from dspark.draft.config import DraftConfig
    from dspark.interop.spec import Rope, TargetFacts


def target_at_hand(name: str | None) -> tuple[TargetFacts | None, TargetCopies | None]:
    """Sizes, tap kinds and tables of a target; nothing without a name."""
    if name is None:
        return None, None
    import torch

    from dspark.draft.checkpoint import TargetCopies
    from dspark.interop.spec import TargetFacts
    from dspark.runtime.loading import load_target

    loaded = load_target(name)
    target = loaded.target
    facts = TargetFacts(
        target.name,
        target.hidden_size,
        (target.table_size, target.vocab_size),
        target.num_layers,
        target.tap_kinds,
        str(loaded.path.resolve()),
    )
    embed = target.embed(torch.arange(target.table_size, device=target.device))
    return facts, TargetCopies(embed, target.head_weight(), target.head_rest)


def parse_rope(text: str | None) -> Rope | None:
    """THETA, or THETA,FACTOR,ORIGINAL for YaRN."""
    if text is None:
        return None
    from dspark.draft.shapes import Yarn
    from dspark.interop.spec import Rope

    parts = text.split(",")
    try:
        if len(parts) == 3:
            return Rope(float(parts[0]), Yarn(float(parts[1]), int(parts[2])))
        if len(parts) == 1 and float(text) > 0:
            return Rope(float(text))
    except ValueError as error:
        raise UserError(
            f"--rope {text}: expected THETA or THETA,FACTOR,ORIGINAL ({error})"
        ) from None
    raise UserError(f"--rope {text}: expected THETA or THETA,FACTOR,ORIGINAL, as 10000,16,65536")


def describe(config: DraftConfig) -> list[tuple[str, str]]:
    """What decides between a drafter that works and one that only runs."""
    from dspark.interop.spec import Rope

    vocabulary = (
        f", {config.draft_vocab_size} of {config.vocab_size} ids" if config.draft_vocab_size else ""
    )
    window = f", window {config.sliding_window}" if config.sliding_window else ""
    causal = f", causal blocks: {config.block_causal}" if config.block_causal != "none" else ""
    layers = " ".join(map(str, config.target_layer_ids))
    return [
        (
            "backbone",
            f"{config.backbone}, {counted(config.num_layers, 'layer')}{window}{causal}{vocabulary}",
        ),
        ("tap kind", config.target_tap_kind),
        ("taps", f"{layers} of {config.num_target_layers} layers (completed layers from 0)"),
        ("slot layout", "anchor: slot 0 predicts (sample_from_anchor true)"),
        ("block size", str(config.block_size)),
        ("mask token", str(config.mask_token_id)),
        ("rope", str(Rope(config.rope_theta, config.yarn))),
        ("max context", f"{config.max_position_embeddings} tokens"),
        ("head", f"{config.markov_head_type}, rank {config.markov_rank}"),
        ("confidence", "yes" if config.enable_confidence_head else "no"),
    ]


def print_fields(title: str, fields: list[tuple[str, str]]) -> None:
    """A title and one line for each field."""
    typer.echo(title)
    for name, value in fields:
        typer.echo(f"  {name:<12} {value}")
