"""All layouts, and which of them a folder is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.errors import UserError
from dspark.interop import deepspec, k3_mla, modelopt, specforge, speculators, vllm
from dspark.interop.spec import Format, architectures

FORMATS = (
    deepspec.FORMAT,
    speculators.FORMAT,
    specforge.FORMAT,
    vllm.FORMAT,
    modelopt.FORMAT,
    k3_mla.FORMAT,
)

# Classes near enough to be mistaken for a drafter of ours, and what they are.
_OTHERS = {
    "DFlash2DraftModel": "DFlash2 is another kind of drafter",
    "DSparkMLADraftModel": "a drafter of dspark itself: nothing to import",
    "DSparkKDADraftModel": "a drafter of dspark itself: nothing to import",
    "Gemma4DSparkModel": "Gemma's backbone is not built here",
    "LingDSparkModel": "Ling's backbone is not built here",
    "Lfm2DSparkDraftModel": "its rotary pairs are interleaved, which is not built here",
}


def format_named(name: str) -> Format:
    """The layout that an option names. Raises UserError listing all names."""
    for found in FORMATS:
        if name == found.name or name in found.aliases:
            return found
    raise UserError(f"--format {name}: expected one of {names()}")


def format_of(raw: Mapping[str, Any], asked: str | None) -> Format:
    """The layout of a configuration: the one asked for, if it is possible, else the one it claims.

    Raises:
        ValueError: None claims it, or another than the one asked for does.
    """
    classes = architectures(raw)
    for name in classes:
        if name in _OTHERS:
            raise ValueError(f"architectures: {name}: {_OTHERS[name]}")
    if any(key.startswith("dspark_") for key in raw) and "num_nextn_predict_layers" in raw:
        raise ValueError("architectures: a drafter bundled into its target (mtp.*) is not read")
    claimed = [found for found in FORMATS if found.claims(raw)]
    if asked is None:
        if not claimed:
            raise ValueError(
                f"architectures: {list(classes)} tell no layout; give --format {names()}"
            )
        return claimed[0]
    wanted = format_named(asked)
    # DeepSpec's class is also what SGLang and vLLM load, with or without a block of their keys
    related = {found.name for found in claimed} | (
        {"deepspec", "sglang", "vllm"} if {"Qwen3DSparkModel"} & set(classes) else set()
    )
    if claimed and wanted.name not in related:
        raise ValueError(
            f"--format {asked}: architectures {list(classes)} are of --format {claimed[0].name}"
        )
    return wanted


def names() -> str:
    """All names for `--format`, in words."""
    return "|".join(found.name for found in FORMATS)
