"""`golden.json`: the golden vector of a folder, and what its configuration meant when written.

    meaning   every key of the configuration that changes what is computed or what it is for
    digests   SHA-256 of every tensor as stored, the first 16 hex digits
    readings  what the drafter computed (`golden.py`)
    target    what it computed behind its target, where that was at hand

An edited `rms_norm_eps` moves no number by more than arithmetic does, and an edited tap kind none
at all: those are found by comparing meanings. A tensor that came back changed is found by its
digest, and code that runs it wrongly by the readings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import FIELDS, OPTIONAL
from dspark.draft.folder import DTYPES, check_inside
from dspark.draft.golden import (
    POSITIONS,
    Reading,
    Rows,
    TargetReading,
    chosen_ids,
    read_golden,
    read_target,
)
from dspark.draft.model import DSparkDrafter
from dspark.draft.record import record_to_dict
from dspark.errors import UserError
from dspark.files import json_text, read_json

if TYPE_CHECKING:
    from dspark.runtime.target import Target

GOLDEN_FILE = "golden.json"
SCHEMA_VERSION = 1
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class Golden:
    """Everything the file holds.

    dtype    of the stored weights
    meaning  key of config.json -> value; parts of nested keys are joined by a dot
    ids      whose logits the readings hold
    """

    dtype: torch.dtype
    meaning: Mapping[str, Any]
    digests: Mapping[str, str]
    ids: tuple[int, ...]
    readings: Mapping[int, Reading]
    target: TargetReading | None

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "dtype": str(self.dtype).removeprefix("torch."),
            "meaning": dict(self.meaning),
            "digests": dict(self.digests),
            "ids": list(self.ids),
            "readings": {str(p): asdict(reading) for p, reading in self.readings.items()},
            "target": None if self.target is None else asdict(self.target),
        }


def meaning(config: DraftConfig) -> dict[str, Any]:
    """Key of `config.json` -> value, for all that a configuration says."""
    keys = {key: getattr(config, field) for key, field in {**FIELDS, **OPTIONAL}.items()}
    keys["rope_theta"] = config.rope_theta
    if config.block_causal == "all" and all(map(config.window, range(config.num_layers))):
        keys["block_causal"] = "sliding"  # the same layers, and some layouts only know one word
    for name in ("yarn", "mla", "kda"):
        part = getattr(config, name)
        keys[name] = None if part is None else asdict(part)
    keys["target"] = record_to_dict(config.target) or {}
    keys["target"].pop("name", None)  # a path on somebody's disk
    return _flat(keys)


def changed_meaning(kept: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """ "key: now and then", for every key that the file knows and that differs."""
    return [
        f"{key} is {found[key]!r}, {value!r} when it was written"
        if key in found
        else f"{key} is gone, {value!r} when it was written"
        for key, value in kept.items()
        if found.get(key) != value or (key not in found and value is not None)
    ]


def golden_text(
    config: DraftConfig,
    stored: Mapping[str, Tensor],
    target: Target | None = None,
) -> dict[str, str]:
    """File name -> text of the golden vector of a folder about to be written.

    Runs the drafter in float32 on the CPU, with the weights as they are stored: 4 bytes for each
    parameter, and one pass over 5,000 context rows. It draws nothing from any generator.

    Args:
        config: Of the drafter.
        stored: Its tensors by our names, on any device; others are ignored.
        target: Its target, to keep its reading too.
    """
    drafter = runnable(config, stored)
    names = list(drafter.state_dict())
    golden = Golden(
        dtype=stored["fc.weight"].dtype,
        meaning=meaning(config),
        digests={name: digest(stored[name]) for name in names},
        ids=chosen_ids(drafter),
        readings=read_golden(drafter),
        target=None if target is None else read_target(drafter.to(target.device), target),
    )
    return {GOLDEN_FILE: json_text(golden.to_dict())}


def runnable(config: DraftConfig, stored: Mapping[str, Tensor]) -> DSparkDrafter:
    """The drafter of these tensors, on the CPU in float32."""
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    tensors = {name: stored[name].detach().cpu() for name in drafter.state_dict()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    drafter.load_state_dict(wide, assign=True)
    return drafter.requires_grad_(False).eval()


def digest(tensor: Tensor) -> str:
    """16 hex digits over dtype, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def read_golden_file(folder: Path | str) -> Golden | None:
    """What the folder keeps; None if it has no such file.

    Raises:
        UserError: Not JSON, or not what `Golden.to_dict` writes.
    """
    path = Path(folder) / GOLDEN_FILE
    if not path.exists():
        return None
    check_inside(Path(folder), path)
    raw = read_json(path)
    try:
        if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"an object with schema_version {SCHEMA_VERSION} was expected")
        return _golden(raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{error.args[0]}: missing" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path}: not a golden vector ({what}); delete it and save the drafter again"
        ) from None


def _golden(raw: Mapping[str, Any]) -> Golden:
    readings = {int(p): Reading(**_each(parts)) for p, parts in raw["readings"].items()}
    if not set(POSITIONS) <= set(readings):
        raise ValueError(f"readings at {sorted(readings)}, expected {list(POSITIONS)}")
    target = raw["target"]
    return Golden(
        dtype=_NAMES[raw["dtype"]],
        meaning=dict(raw["meaning"]),
        digests={str(name): str(value) for name, value in raw["digests"].items()},
        ids=tuple(map(int, raw["ids"])),
        readings=readings,
        target=None
        if target is None
        else TargetReading(
            target["dtype"],
            tuple(tuple(map(int, row)) for row in target["ids"]),
            _numbers(target["logits"]),
        ),
    )


def _each(parts: Mapping[str, Any]) -> dict[str, Rows]:
    return {name: _numbers(rows) for name, rows in parts.items()}


def _numbers(rows: Any) -> Rows:
    return tuple(tuple(None if v is None else float(v) for v in row) for row in rows)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values under dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": inner for name, inner in _flat(value).items()}
        else:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found
