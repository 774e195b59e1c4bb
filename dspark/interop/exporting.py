"""Our drafter folder -> the layout of another tool.

A writer refuses what its layout, or the engines that read it, would drop. As a second lock, what it
wrote is read back and has to be the same drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.draft.checkpoint import TargetCopies, check_vocabulary, read_calibration, read_config
from dspark.draft.config import DraftConfig
from dspark.draft.folder import TensorFolder, carried_files, check_folder, check_inside
from dspark.draft.golden_file import GOLDEN_FILE, golden_text
from dspark.draft.vocabulary import OFFSETS
from dspark.errors import UserError
from dspark.files import read_json
from dspark.interop.formats import format_named
from dspark.interop.importing import KEPT_FILE, require_new, unknown_keys, write
from dspark.interop.names import COPIES
from dspark.interop.spec import Format, Given, Source
from dspark.interop.target_tables import copies_of
from dspark.interop.tensors import draft_ids, own_tensors

# Written anew from what the drafter is, but the original says more.
_RESTORED = ("speculators_config", "speculators_version")


@dataclass(frozen=True)
class Exported:
    """What an export did.

    Attributes:
        format: Layout it was written in.
        config: The drafter.
        copies: Tables of the target that were stored along.
        verifier: Where its engine will look for the target, if the layout says so.
        left_out: Keys kept from another layout, which have no place in this one.
    """

    format: Format
    config: DraftConfig
    copies: tuple[str, ...]
    verifier: str | None
    left_out: tuple[str, ...]


def export_drafter(
    draft: Path,
    out: Path,
    *,
    layout: str,
    target_copies: TargetCopies | None = None,
    verifier: str | None = None,
) -> Exported:
    """Write the drafter in `draft` to `out`, which must not exist yet.

    Args:
        draft: A drafter folder of ours.
        out: The other tool's folder.
        layout: Name of the layout.
        target_copies: The target's tables, for layouts that store some.
        verifier: The target's folder or id, for layouts that name it; None: as the drafter has it.

    Raises:
        UserError: One line: why the layout cannot hold this drafter, or what is wrong with it.
    """
    found = format_named(layout)
    require_new(out)
    check_folder(draft)
    config = read_config(draft)
    read_calibration(draft, config)
    stored = TensorFolder(draft)
    names = own_tensors(stored, {name: name for name in stored.entries}, config)
    tensors = stored.read(names)
    if OFFSETS in tensors:
        check_vocabulary(draft, tensors)
    try:
        raw = found.write(config, tensors["fc.weight"].dtype)
        tables = _tables(found, config, tensors, target_copies)
        _read_back(found, config, raw, tensors)
    except ValueError as error:
        raise UserError(f"{draft}: --format {found.name}: {error}") from None
    renamed = {found.their_name(name): tensor for name, tensor in tensors.items()}
    left_out = _put_back(found, draft, raw)
    named = _name_verifier(raw, verifier)
    texts = {} if (draft / GOLDEN_FILE).exists() else golden_text(config, tensors)
    write(out, raw, {**renamed, **tables}, texts, carried_files(draft))
    return Exported(found, config, tuple(tables), named, left_out)


def _tables(
    found: Format,
    config: DraftConfig,
    tensors: dict[str, Tensor],
    target: TargetCopies | None,
) -> dict[str, Tensor]:
    """Copies of the target's tables, in the dtype of the weights."""
    wanted = found.copies(config)
    if not wanted:
        return {}
    if target is None:
        raise ValueError(f"stores the target's {' and '.join(wanted)} along; give --target")
    if target.head_rest and "lm_head.weight" in wanted:
        raise ValueError(
            f"stores a copy of the target's LM head, but the target puts {target.head_rest} behind "
            "that matrix, which a copy does not carry: its engine would draft from other logits"
        )
    shape = (config.vocab_size, config.hidden_size)
    for name, table in zip(COPIES, (target.embed, target.lm_head), strict=True):
        if tuple(table.shape) != shape:
            raise ValueError(f"{name} of the target is {tuple(table.shape)}, expected {shape}")
    ids = draft_ids(tensors)
    dtype = tensors["fc.weight"].dtype
    return {name: table.to(dtype) for name, table in copies_of(target, wanted, ids).items()}


def _read_back(
    found: Format, config: DraftConfig, raw: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Raises ValueError unless the written configuration means the drafter it was written from."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    back = found.read(Source(raw, shapes), Given()).config
    plain = _canonical(config)
    for field in DraftConfig.__dataclass_fields__:
        ours, theirs = getattr(plain, field), getattr(_canonical(back), field)
        if ours != theirs:
            raise ValueError(f"{field}: {ours!r} would become {theirs!r}; this layout loses it")


def _canonical(config: DraftConfig) -> DraftConfig:
    """Without what only differs in spelling: causal in all layers, all of which slide."""
    every = all(config.window(layer) for layer in range(config.num_layers))
    if config.block_causal == "all" and every:
        return replace(config, block_causal="sliding")
    return config


def _put_back(found: Format, draft: Path, raw: dict[str, Any]) -> tuple[str, ...]:
    """Add the keys that an import from this layout had kept; name those of another layout."""
    path = draft / KEPT_FILE
    if not path.exists():
        return ()
    check_inside(draft, path)
    kept = read_json(path)
    keys = kept.get("kept_keys") if isinstance(kept, dict) else None
    if not isinstance(keys, dict):
        raise UserError(f"{path}: an object with kept_keys was expected")
    if kept.get("format") != found.name:
        return unknown_keys(keys)
    for key, value in keys.items():
        if isinstance(raw.get(key), dict) and isinstance(value, dict) and key not in _RESTORED:
            raw[key] = {**value, **raw[key]}
        elif key not in raw or key in _RESTORED:
            raw[key] = value
    return ()


def _name_verifier(raw: dict[str, Any], name: str | None) -> str | None:
    """What `speculators_config` calls the target, after calling it `name`; None without the block.

    speculators opens it when it loads the drafter, for embedding, LM head and final norm.
    """
    entry = (raw.get("speculators_config") or {}).get("verifier")
    if not isinstance(entry, dict):
        return None
    if name is not None:
        entry["name_or_path"] = name
    return entry.get("name_or_path")
