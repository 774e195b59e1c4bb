"""Which files were measured: hashes beside the numbers, since a path says nothing of its content.

    drafter   SHA-256 of each file that decides what it proposes, as `sha256sum` prints it, and one
              over all of them, whose beginning names it in a report
    target    the digest of its checkpoint as the card of a distilled drafter has it, up to
              `MOST_HASHED` of weights; its configuration, tokenizer and size always

Files are read and never written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dspark.distill.answers import folder_digest
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.state import sha256
from dspark.draft.calibration import CALIBRATION_FILE
from dspark.draft.folder import CONFIG_FILE
from dspark_eval.baselines.folders import BASELINE_FILE

MOST_HASHED = 4 * 2**30
"""Bytes of weights that are read once more for their digest, a few seconds; a target of hundreds of
gigabytes is told by its size, configuration and tokenizer."""
SHORT = 12
"""Digits of a hash that tables show."""


def drafter_files(folder: Path) -> dict[str, Any]:
    """`sha256` over the lines of `sha256sum`, and `files`: name to SHA-256 of weights,
    configuration and, where there is one, calibration."""
    names = [CONFIG_FILE, CALIBRATION_FILE, BASELINE_FILE]
    paths = [folder / name for name in names if (folder / name).is_file()]
    paths += folder.glob("*.safetensors")
    files = {path.name: sha256(path) for path in sorted(paths)}
    lines = "".join(f"{digest}  {name}\n" for name, digest in files.items())
    return {"sha256": hashlib.sha256(lines.encode()).hexdigest(), "files": files}


def target_files(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`sha256` (`folder_digest`) or null for a target beyond `MOST_HASHED`, and what is cheap."""
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "sha256": folder_digest(folder) if weight_bytes <= MOST_HASHED else None,
        "config_sha256": sha256(folder / CONFIG_FILE),
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "weight_bytes": weight_bytes,
    }


def short_hash(identity: Mapping[str, Any] | None) -> str:
    """What a table shows behind a drafter's name; nothing for a file that recorded none."""
    digest = (identity or {}).get("sha256")
    return f" (sha256 {digest[:SHORT]})" if digest else ""
