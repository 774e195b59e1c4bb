"""Widened twins of the shipped target: speed at scale on one GPU, of a model that can be trained.

A twin computes what k3-nano computes and reads far more bytes for it (`dspark.k3.widen`), so that
accepted lengths are real and times are those of a large model's bytes. `k3-like` copies Kimi K3's
experts: 16 of 896 chosen, and the share of a token's bytes that they are. None of it is a
measurement of K3, and whatever quotes a number says "widened twin".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.cost import context_bytes, weight_bytes
from dspark.draft.model import DSparkDrafter
from dspark.draft.widen import WideDraft, wide_draft_config, widen_drafter
from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark.k3.cost import pass_bytes
from dspark.k3.model import K3ForCausalLM
from dspark.k3.widen import Wide, wide_config, widen
from dspark.runtime.k3_target import K3Target
from dspark.runtime.loading import load_target

DRAFT_SHARE = 0.05
"""Least bytes of a draft step, of the target's: what published drafters of Kimi K3 read."""
HIDDEN = 3072
"""16 times k3-nano's, with head widths 4 times its own: then every eps is made up for as well."""


def _shape(
    *, kda_heads: int, heads: int, dense: int, experts: int, per_token: int, expert: int
) -> Wide:
    return Wide(
        hidden=HIDDEN, kda_heads=kda_heads, kda_head=128, heads=heads, q_rank=1536, kv_rank=256,
        nope=128, rope=64, value=128, dense=dense, experts=experts, per_token=per_token,
        expert=expert, latent=1536,
    )  # fmt: skip


TWINS = {
    "1gb": _shape(kda_heads=12, heads=12, dense=2048, experts=8, per_token=2, expert=1024),
    "8gb": _shape(kda_heads=96, heads=96, dense=8192, experts=128, per_token=16, expert=3072),
    "30gb": _shape(kda_heads=256, heads=256, dense=16384, experts=64, per_token=16, expert=14336),
    "k3-like": _shape(
        kda_heads=192, heads=160, dense=20480, experts=896, per_token=16, expert=1280
    ),
}


@dataclass(frozen=True)
class Twin:
    """A widened target and drafter, and the bytes that one token and one draft step read."""

    target: K3Target
    drafter: DSparkDrafter
    target_bytes: float
    draft_bytes: float


def twin_config(name: str, config: K3Config) -> K3Config:
    """Configuration of a twin by name. Raises UserError with the names there are."""
    if name not in TWINS:
        raise UserError(f"twin {name!r}: expected one of {', '.join(TWINS)}")
    return wide_config(config, TWINS[name])


def load_twin(
    name: str, drafter: DSparkDrafter, *, device: torch.device | str, seed: int = 0
) -> Twin:
    """The twin of k3-nano and of a drafter for it, in bfloat16.

    Raises:
        UserError: another name, or a drafter that cannot be widened.
    """
    nano = load_target("nano").target
    assert isinstance(nano, K3Target)
    config = twin_config(name, nano.model.config)
    read = pass_bytes(config, 1, 0, torch.bfloat16).total
    draft = draft_shape(drafter.config, DRAFT_SHARE * read)
    wide = widen_drafter(drafter, draft, dtype=torch.bfloat16, device=device, seed=seed)
    model: K3ForCausalLM = widen(
        nano.model, TWINS[name], dtype=torch.bfloat16, device=device, seed=seed
    )
    target = K3Target(model, f"widened twin {name}", nano.end_token_ids)
    return Twin(target, wide, read, _draft_bytes(wide.config))


def draft_shape(config: DraftConfig, least: float) -> WideDraft:
    """The narrowest wide drafter, in steps of 8 heads and 512 MLP channels, that reads so much and
    holds the drafter itself."""
    heads = 8 * -(-config.num_attention_heads // 8)
    inner = 512 * -(-config.intermediate_size // 512)
    while True:
        shape = WideDraft(HIDDEN, heads, 4 * config.head_dim, 128, inner)
        if _draft_bytes(wide_draft_config(config, shape)) >= least:
            return shape
        heads, inner = heads + 8, inner + 512


def _draft_bytes(config: DraftConfig) -> float:
    weights = weight_bytes(config, torch.bfloat16).total
    return float(weights + context_bytes(config, 0, torch.bfloat16))
