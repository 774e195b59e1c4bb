"""The published tensor names of K3 and Kimi-Linear checkpoints, and how they fit a model.

Three things differ between file and model: names of ``kimi_k3`` carry a prefix (``kimi_linear`` has
none), routed experts are stored one by one (MXFP4 or plain) but held stacked, and A_log is stored
padded. The vision tower and its projector are not part of the text decoder. Source: the public
header listing of the released shards and Moonshot's Kimi-Linear code.
Letters: E experts, H heads of KDA.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.k3.config import K3Config

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
FLOAT32_SUFFIXES = (
    "A_log",
    "dt_bias",
    "q_conv1d.weight",
    "k_conv1d.weight",
    "v_conv1d.weight",
    "o_norm.weight",
    "e_score_correction_bias",
)
"""Parameters that are float32 on disk and in the model, whatever the rest is."""
A_LOG_MULTIPLE = 128
PACKED, SCALE = "_packed", "_scale"
_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<matrix>w[123])")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight")
_LISTED = 10


def bare(name: str) -> str:
    """The name without the prefix that the multimodal release puts before its text decoder."""
    return name.removeprefix(TEXT_PREFIX)


def is_float32(name: str) -> bool:
    return name.endswith(FLOAT32_SUFFIXES)


def expert_stems(parameter: str, count: int) -> list[str] | None:
    """Stored names of the ``count`` matrices of a stacked parameter; None if it is not stacked."""
    stacked = _STACKED.fullmatch(parameter)
    if stacked is None:
        return None
    return [f"{stacked['experts']}.{e}.{stacked['matrix']}.weight" for e in range(count)]


def place_of(stem: str) -> tuple[str, int | None]:
    """The parameter a stored tensor belongs to and, if that is stacked, its row."""
    expert = _EXPERT.fullmatch(stem)
    if expert is None:
        return stem, None
    return f"{expert['experts']}.{expert['matrix']}", int(expert["expert"])


def split_packed(name: str) -> tuple[str, str]:
    """``w1.weight_packed`` -> (``w1.weight``, ``_packed``); a plain name has no second part."""
    for suffix in (PACKED, SCALE):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def a_log_to_disk(a_log: Tensor, config: K3Config) -> Tensor:
    """K3 stores A_log [H] zero-padded to a multiple of 128; Kimi-Linear as [1, 1, H, 1]."""
    if config.model_type == "kimi_linear":
        return a_log.view(1, 1, -1, 1)
    return F.pad(a_log, (0, -a_log.numel() % A_LOG_MULTIPLE))


def a_log_from_disk(stored: Tensor, heads: int) -> Tensor | None:
    """A_log [H] from any published form; None when the size fits none of them."""
    if stored.numel() not in (heads, heads + -heads % A_LOG_MULTIPLE):
        return None
    return stored.reshape(-1)[:heads]


def misfit(shapes: Mapping[str, torch.Size], stored: Collection[str]) -> str | None:
    """What is missing or unexpected among the ``stored`` bare names; None if all fits.

    Every parameter must be there exactly once: an expert matrix plain or packed, not both.
    """
    stored = set(stored)
    missing, used = [], set()
    for name in _expected(shapes):
        forms = [[name]]
        if place_of(name)[1] is not None:
            forms.append([name + PACKED, name + SCALE])
        found = next((form for form in forms if stored.issuperset(form)), None)
        if found:
            used.update(found)
        else:
            missing.append(name)
    parts = [
        f"{len(names)} {what}: {_first(names)}"
        for what, names in (("missing", missing), ("unexpected", sorted(stored - used)))
        if names
    ]
    if "lm_head.weight" in missing:
        close = difflib.get_close_matches("lm_head.weight", sorted(stored), n=3, cutoff=0.3)
        parts.append(f"candidates for lm_head.weight: {', '.join(close) or 'none'}")
        if "model.embed_tokens.weight" in stored:
            parts.append("if the head is the embedding, set tie_word_embeddings to true")
    return "; ".join(parts) or None


def _expected(shapes: Mapping[str, torch.Size]) -> Iterator[str]:
    for name, shape in shapes.items():
        yield from expert_stems(name, shape[0]) or [name]


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
