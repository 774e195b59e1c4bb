"""Warm start: begin with the weights of a drafter that exists, whoever trained it.

What the settings say must be what the folder holds; what they leave open (null, or no key at all:
rotary base, norm epsilon, causal blocks, ...) comes from the folder, and so do the ids of a reduced
draft vocabulary.
Weights that fit by shape but meant something else, such as the same matrix cut into other heads,
are refused like those that do not fit.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from dspark.distill.settings import DrafterSettings
from dspark.draft.checkpoint import load_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.target import Target

_FREE = ("target", "block_size")  # may differ: the run's own hold
_NO_KEY = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act", "block_causal")
_IF_NULL = {
    "intermediate_size": ("intermediate_size",),
    "draft_vocab": ("draft_vocab_size",),
    "tap_ids": ("target_layer_ids",),
    "tap_kind": ("target_tap_kind",),
    "mask_token_id": ("mask_token_id",),
    "sliding_window": ("sliding_window", "layer_types"),
    "yarn_factor": ("yarn",),
}
"""Settings that may be null -> fields of DraftConfig that the folder decides then."""
_SHOWN = 4


def warm_start(
    fresh: DSparkDrafter, folder: Path, settings: DrafterSettings, target: Target
) -> DSparkDrafter:
    """A drafter of `fresh`'s configuration, completed and filled from `folder`.

    Raises UserError naming the first keys or tensors that differ, or what the loader refuses.
    """
    saved = load_drafter(folder, target, device=target.device)
    config = _completed(fresh.config, saved.config, settings)
    differing = [
        f"{f.name} is {getattr(saved.config, f.name)!r} there, {getattr(config, f.name)!r} here"
        for f in fields(DraftConfig)
        if f.name not in _FREE and getattr(saved.config, f.name) != getattr(config, f.name)
    ]
    if differing:
        raise _refusal(folder, differing)
    drafter = DSparkDrafter(config).to(target.device)
    theirs, ours = saved.state_dict(), drafter.state_dict()
    differing = [
        f"{name} is {_shape(theirs, name)} there, {_shape(ours, name)} here"
        for name in {**ours, **theirs}
        if _shape(theirs, name) != _shape(ours, name)
    ]
    if differing:
        raise _refusal(folder, differing)
    drafter.load_state_dict(theirs)
    return drafter


def _completed(own: DraftConfig, saved: DraftConfig, settings: DrafterSettings) -> DraftConfig:
    taken = list(_NO_KEY)
    for key, names in _IF_NULL.items():
        if getattr(settings, key) is None:
            taken += names
    values = {name: getattr(saved, name) for name in taken}
    if own.mla is not None and saved.mla is not None:
        features = {"rope": saved.mla.rope, "output_gate": saved.mla.output_gate}
        values["mla"] = replace(own.mla, **features)
    if own.kda is not None and saved.kda is not None:
        values["kda"] = replace(own.kda, gate_lower_bound=saved.kda.gate_lower_bound)
    try:
        return replace(own, **values)
    except ValueError as error:  # what is said here does not go with what the folder adds
        raise UserError(f"drafter: {error}, with what is taken from drafter.init_from") from None


def _shape(tensors: dict, name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _refusal(folder: Path, differing: list[str]) -> UserError:
    more = len(differing) - _SHOWN
    shown = "; ".join(differing[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return UserError(
        f"drafter.init_from {folder}: another shape than this run's: {shown}. Set the drafter keys "
        "to what is there, or start without it"
    )
