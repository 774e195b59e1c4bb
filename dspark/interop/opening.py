"""A drafter folder of any layout, looked at: what it is, and where its tensors are.

Nothing is converted and no weight is read. A folder with a `config.json` alone is enough to know
sizes. For looking, what a file leaves open may be assumed and is said to be open (`undecided`): it
changes what a drafter means, not how large it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import config_from_dict
from dspark.draft.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLES,
    TensorFolder,
    check_folder,
    read_object,
)
from dspark.errors import UserError
from dspark.interop.formats import format_of
from dspark.interop.keys import Keys
from dspark.interop.meaning import Undecided
from dspark.interop.names import our_names, why_foreign
from dspark.interop.spec import Format, Given, Reading, Rope, Source
from dspark.interop.tensors import read_tensors
from dspark.taps import TAP_KINDS

OWN = "dspark"

_CONFIDENCE = "confidence_head.proj.weight"
_ASSUMED: dict[str, dict[str, Any]] = {
    "target_tap_kind": {"tap_kind": TAP_KINDS[0]},
    "sample_from_anchor": {"slot_layout": "anchor"},
    "block_causal": {"block_causal": "none"},
    "mask_token_id": {"mask_token_id": 0},
    "block_size": {"block_size": 7},
    "rope_parameters": {"rope": Rope(10_000.0)},
}


@dataclass(frozen=True)
class Opened:
    """What a folder holds.

    Attributes:
        layout: `OWN`, or the name of a layout of `dspark export`.
        title: The same in words.
        stored: Its tensors; None for a configuration without weights.
        theirs: Our name of a tensor -> its name there.
        recognised: Name of the published drafter that this is, if it is one.
        dtype: Of its weights; without weights what the configuration says, else bf16.
        undecided: Keys that the file leaves open, whose values in `config` are assumed.
    """

    folder: Path
    layout: str
    title: str
    config: DraftConfig
    stored: TensorFolder | None
    theirs: Mapping[str, str]
    dtype: torch.dtype
    recognised: str | None = None
    undecided: tuple[str, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """The drafter's tensors by our names, as stored, each checked. Raises UserError."""
        if self.stored is None:
            raise UserError(f"{self.folder}: has no weights, only a {CONFIG_FILE}")
        return read_tensors(self.stored, self.theirs, self.config, Given())


def open_drafter(folder: Path, *, assume: bool = False) -> Opened:
    """Look at a drafter folder.

    Args:
        folder: `config.json`, with or without safetensors.
        assume: Fill what the file leaves open, and name it; otherwise it is an error.

    Raises:
        UserError: No such folder, no drafter, or one that is not read here: one line.
    """
    check_folder(folder)
    raw, path = read_object(folder), folder / CONFIG_FILE
    stored = _stored(folder)
    try:
        theirs, _ = our_names(stored.entries if stored else ())
        dtype = _dtype(raw, stored, theirs)
        try:
            return Opened(folder, OWN, "dspark", config_from_dict(raw), stored, theirs, dtype)
        except ValueError as error:
            own = error
        reading, found, undecided = _foreign(raw, stored, theirs, assume, own)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return Opened(
        folder,
        found.name,
        found.title,
        reading.config,
        stored,
        theirs,
        dtype,
        reading.recognised,
        undecided,
    )


def _stored(folder: Path) -> TensorFolder | None:
    """The tensors, or None where there is nothing that could hold any."""
    patterns = ("*.safetensors", INDEX_FILE, *PICKLES)
    return TensorFolder(folder) if any(next(folder.glob(p), None) for p in patterns) else None


def _dtype(
    raw: Mapping[str, Any], stored: TensorFolder | None, theirs: Mapping[str, str]
) -> torch.dtype:
    """That of the projection of the taps, which every drafter has."""
    found: object = raw.get("dtype") or raw.get("torch_dtype")
    if stored is not None and "fc.weight" in theirs:
        found = stored.entries[theirs["fc.weight"]].dtype
    if isinstance(found, str):
        found = getattr(torch, found.removeprefix("torch."), None)
    good = isinstance(found, torch.dtype) and found.is_floating_point
    return found if isinstance(found, torch.dtype) and good else torch.bfloat16


def _foreign(
    raw: Mapping[str, Any],
    stored: TensorFolder | None,
    theirs: Mapping[str, str],
    assume: bool,
    own: ValueError,
) -> tuple[Reading, Format, tuple[str, ...]]:
    """Read another tool's layout. Raises ValueError: `own`, for a file of ours that is wrong."""
    nested = "transformer_layer_config" in raw
    if "layer_id_origin" in raw and not nested and not str(own).startswith("architectures:"):
        raise own
    found = format_of(raw, None)
    foreign = why_foreign(theirs)
    if foreign:
        raise ValueError(foreign)
    given = Given()
    open_keys: list[str] = []
    shapes = _planned_shapes(raw)
    if stored is not None:
        shapes = {name: stored.entries[their].shape for name, their in theirs.items()}
    while True:
        try:
            return found.read(Source(raw, shapes), given), found, tuple(open_keys)
        except Undecided as error:
            filled = _ASSUMED.get(error.key, {})
            if error.key == "num_target_layers":
                filled = {"num_target_layers": _deep_enough(raw)}
            if not assume or not filled or error.key in open_keys:
                raise
            given = replace(given, **filled)
            open_keys.append(error.key)


def _planned_shapes(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What tells whether there is a confidence head, for a file without weights beside it."""
    keys = Keys(raw)
    enabled = keys.take("enable_confidence_head", "true or false", "use_confidence_head")
    width, rank = keys.take("hidden_size", "an integer"), keys.take("markov_rank", "an integer")
    if enabled is False or width is None:
        return {}
    with_markov = keys.take("confidence_head_with_markov", "true or false") is not False
    return {_CONFIDENCE: (1, width + (rank or 0 if with_markov else 0))}


def _deep_enough(raw: Mapping[str, Any]) -> int:
    """Layers of a target in which every tapped id has its place."""
    keys = Keys(raw)
    ids = keys.take("target_layer_ids", "a list", "aux_hidden_state_layer_ids") or [0]
    return max(ids) + 2
