"""A drafter folder of another tool -> ours.

Read the configuration, hold every tensor against the shape it must have, compare copies of the
target's tensors with the target and leave them out, write. Weights keep their bits and their dtype.
What our configuration has no place for is kept in `interop.json`, so that an export to the same
layout puts it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.draft.checkpoint import TargetCopies, read_calibration
from dspark.draft.config import DraftConfig
from dspark.draft.config_file import config_to_dict
from dspark.draft.folder import (
    CONFIG_FILE,
    TensorFolder,
    carried_files,
    check_folder,
    read_object,
    write_folder,
)
from dspark.draft.golden_file import GOLDEN_FILE, golden_text
from dspark.errors import UserError
from dspark.files import json_text
from dspark.interop.formats import format_of
from dspark.interop.names import COPIES, our_names, why_foreign
from dspark.interop.spec import Format, Given, Reading, Source
from dspark.interop.target_tables import compare_copies
from dspark.interop.tensors import draft_ids, read_tensors

KEPT_FILE = "interop.json"

# Keys of no consequence for what a drafter computes, which every Hugging Face file has.
_HOUSEKEEPING = (
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "dspark_version", "eos_token_id", "initializer_range", "is_decoder", "model_type",
    "num_anchors", "pad_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "use_cache", "max_window_layers", "return_dict", "speculators_config", "speculators_version",
    "speculators_model_type", "target_hidden_size", "sliding_window", "confidence_head_alpha",
    "_torchspec_version", "has_embed_tokens", "has_lm_head", "num_aux_layers",
)  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """What an import did.

    Attributes:
        format: Layout it was read from.
        config: The drafter.
        recognised: Name of the published drafter that this is, if it is one.
        decided: What the file did not say, and why it is what it is.
        dropped: Tensors that are not the drafter's own.
        compared: Whether copies among them were compared with the target's.
        unknown: Keys that mean nothing here; kept in `interop.json`.
    """

    format: Format
    config: DraftConfig
    recognised: str | None
    decided: tuple[str, ...]
    dropped: tuple[str, ...]
    compared: bool
    unknown: tuple[str, ...]


def import_drafter(
    folder: Path,
    out: Path,
    *,
    layout: str | None = None,
    given: Given | None = None,
    target_copies: TargetCopies | None = None,
) -> Imported:
    """Read the drafter in `folder` and write it to `out`, which must not exist yet.

    Args:
        folder: `config.json` and safetensors.
        out: Our folder.
        layout: Name of the layout; None: the one that the configuration claims.
        given: What the file leaves open.
        target_copies: Tables of the target, to compare copies in the folder with.

    Raises:
        UserError: One line: the file, what is wrong with it, and what to give.
    """
    given = given or Given()
    require_new(out)
    check_folder(folder)
    raw, path = read_object(folder), folder / CONFIG_FILE
    try:
        found = format_of(raw, layout)
        stored = TensorFolder(folder)
        theirs, skipped = our_names(stored.entries)
        shapes = {name: stored.entries[their].shape for name, their in theirs.items()}
        foreign = why_foreign(theirs)
        if foreign:
            raise ValueError(foreign)
        reading = found.read(Source(raw, shapes), given)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    _check_sizes(path, reading.config, given)
    tensors = read_tensors(stored, theirs, reading.config, given)
    copies = [name for name in COPIES if name in theirs]
    compared = target_copies is not None
    if target_copies is not None:
        held = stored.read(theirs[name] for name in copies)
        mine = {name: held[theirs[name]] for name in copies}
        compare_copies(folder, mine, target_copies, draft_ids(tensors))
    _check_tying(path, raw, copies, target_copies)
    dropped = (*skipped, *(theirs[name] for name in copies))
    read_calibration(folder, reading.config)
    texts = {KEPT_FILE: json_text(_kept(found, reading, dropped))}
    if not (folder / GOLDEN_FILE).exists():  # what an export carried along holds here too
        texts |= golden_text(reading.config, tensors)
    dtype = tensors["fc.weight"].dtype
    config = config_to_dict(reading.config, dtype=dtype, with_copies=False)
    write(out, config, tensors, texts, carried_files(folder))
    return Imported(
        found,
        reading.config,
        reading.recognised,
        reading.decided,
        dropped,
        compared,
        unknown_keys(reading.rest or {}),
    )


def require_new(out: Path) -> None:
    """Refuses a folder that is there already: whatever it holds would be gone."""
    if out.exists():
        raise UserError(f"--out {out}: exists already; choose a folder that does not")


def write(
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    files: Iterable[Path],
) -> None:
    """Write a folder; a disk that does not take it is the user's to know."""
    try:
        write_folder(out, config, tensors, texts, files)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None


def unknown_keys(rest: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of keys with a value that were not read and are not housekeeping; a dot for nests."""
    found: list[str] = []
    for key, value in rest.items():
        if key in _HOUSEKEEPING or value is None:
            continue
        inner = value if isinstance(value, dict) and key.endswith("_config") else None
        found += [key] if inner is None else [
            f"{key}.{name}"
            for name, held in inner.items()
            if name not in _HOUSEKEEPING and held is not None
        ]  # fmt: skip
    return tuple(found)


def _check_sizes(path: Path, config: DraftConfig, given: Given) -> None:
    if given.target is None:
        return
    target = given.target
    for key, found, wanted in (
        ("hidden_size", config.hidden_size, (target.hidden_size,)),
        # rows that pad the target's tables may be there or not: no token needs them
        ("vocab_size", config.vocab_size, target.vocab_sizes),
        ("num_target_layers", config.num_target_layers, (target.num_layers,)),
    ):
        if not min(wanted) <= found <= max(wanted):
            raise UserError(
                f"{path}: {key} is {found}, the target {target.name} has {wanted[0]}; "
                "a drafter only works with the target it was distilled from"
            )


def _check_tying(
    path: Path, raw: Mapping[str, Any], copies: list[str], target: TargetCopies | None
) -> None:
    """A drafter whose head is its embedding is the target's only if the target's is, too."""
    if not raw.get("tie_word_embeddings") or "lm_head.weight" in copies:
        return
    if target is None:
        raise UserError(
            f"{path}: tie_word_embeddings is true: its LM head is an embedding; give --target, to "
            "see whether the target's is"
        )
    if not torch.equal(target.embed[: len(target.lm_head)], target.lm_head):
        raise UserError(
            f"{path}: tie_word_embeddings is true, the target's LM head is not its embedding: this "
            "drafter has a head of its own, which is not built here"
        )


def _kept(found: Format, reading: Reading, dropped: tuple[str, ...]) -> dict[str, Any]:
    return {
        "format": found.name,
        "recognised": reading.recognised,
        "decided": list(reading.decided),
        "dropped_tensors": list(dropped),
        "kept_keys": dict(reading.rest or {}),
    }
