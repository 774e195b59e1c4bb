"""Tensor names of other tools -> ours. No two tools use one name for two things, so one table does.

model.*                       vLLM and SGLang accept the prefix
markov_w1, gate_proj, ...     ModelOpt writes the heads flat
logit_head.*                  early SpecForge runs
context_proj, final_norm, ... the MLA-native K3 drafter
"""

from __future__ import annotations

from collections.abc import Iterable

COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's tensors, under the names that all layouts use."""

_RENAMED = (
    ("logit_head.", "markov_head."),
    ("markov_w1.", "markov_head.markov_w1."),
    ("markov_w2.", "markov_head.markov_w2."),
    ("gate_proj.", "markov_head.gate_proj."),
    ("joint_proj.", "markov_head.joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
    ("context_proj.", "fc."),
    ("context_norm.", "hidden_norm."),
    ("final_norm.", "norm."),
)
# Recomputed by whoever loads it, or the target's: not part of a drafter.
_SKIPPED = ("rotary_emb.", "verifier_lm_head.", "verifier_norm.")

# Part of a name -> what such a drafter has that ours do not.
_FOREIGN = {
    "attention_sink_bias": "attention sinks are not built here",
    "sinks": "attention sinks are not built here",
    "fc_norm": "a norm for each tap is not built here",
    "context_norms": "a norm for each tap is not built here",
    "input_norms": "a norm for each tap is not built here",
    "weight_scale": "quantised drafters are not read; dequantise it first",
    "weight_packed": "quantised drafters are not read; dequantise it first",
    "draft_adapter": "an adapter before the LM head is not built here",
    "selector": "DFlash2 is another kind of drafter",
    "mtp.": "a drafter bundled into its target is not read",
}

MARKOV_FLAT = ("markov_head.markov_w1.", "markov_head.markov_w2.", "markov_head.gate_proj.")


def our_name(name: str) -> str | None:
    """Our name of a tensor; None for one that is not part of a drafter."""
    bare = name.removeprefix("model.")
    if any(part in bare for part in _SKIPPED):
        return None
    for theirs, ours in _RENAMED:
        if bare.startswith(theirs):
            return ours + bare.removeprefix(theirs)
    return bare


def our_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Our name -> their name for all tensors of a folder, and the names that are skipped.

    Raises:
        ValueError: Two tensors that are the same one for us.
    """
    found: dict[str, str] = {}
    skipped = []
    for name in names:
        ours = our_name(name)
        if ours is None:
            skipped.append(name)
        elif ours in found:
            raise ValueError(f"{found[ours]} and {name} are both {ours}")
        else:
            found[ours] = name
    return found, skipped


def why_foreign(names: Iterable[str]) -> str | None:
    """What such a drafter has that ours do not, if one of its tensor names tells."""
    for name in names:
        for part, reason in _FOREIGN.items():
            if part in name:
                return f"{name}: {reason}"
    return None
