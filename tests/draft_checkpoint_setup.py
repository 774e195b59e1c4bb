"""A small drafter's configuration, and changes to the file that holds one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.draft import TargetRecord
from tests.interop_drafters import PLAIN

CONFIG = replace(PLAIN, target=TargetRecord("nano", tokenizer_hash="ab12", template_hash=None))


@dataclass
class FakeTarget:
    """As much of a target as a checkpoint is checked against."""

    name: str = "nano"
    hidden_size: int = 16
    vocab_size: int = 50
    num_layers: int = 6
    tap_kinds: tuple[str, ...] = ("attn_res_mixture", "raw_prefix")

    @property
    def table_size(self) -> int:
        return self.vocab_size


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
