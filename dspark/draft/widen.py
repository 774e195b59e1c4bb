"""The drafter of a widened twin: the same proposals from more bytes (see `dspark.k3.widen`).

For the `kda` backbone with a vanilla head. The hidden size is the twin's, whose embedding and LM
head it shares; heads, their width and the MLP may be any that hold the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.k3.widen import place


@dataclass(frozen=True)
class WideDraft:
    """Sizes of the wide drafter, each at least the drafter's own."""

    hidden: int
    heads: int
    head_dim: int
    gate_rank: int
    intermediate: int


@torch.no_grad()
def widen_drafter(
    drafter: DSparkDrafter,
    wide: WideDraft,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    std: float = 0.02,
) -> DSparkDrafter:
    """A drafter of these sizes that proposes what `drafter` does.

    Args:
        std: Of the random weights that meet zeros.

    Raises:
        UserError: Another backbone or head, or sizes that cannot hold the drafter.
    """
    config = wide_draft_config(drafter.config, wide)
    with torch.device("meta"):
        big = DSparkDrafter(config)
    big = big.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    small = dict(drafter.named_parameters())
    maps = _Maps(drafter.config, config, torch.device(device))
    for name, weight in big.named_parameters():
        weight.requires_grad_(False)
        axes, scale = maps.of(name)
        inputs = "conv1d" not in name and "markov" not in name
        place(weight, small[name], axes, scale, generator, std, inputs=inputs)
        if "slot_embedding" in name:  # whose columns are outputs
            dead = torch.arange(drafter.config.hidden_size, wide.hidden, device=device)
            weight.index_fill_(1, dead, 0)
    big.calibration = drafter.calibration
    return big


def wide_draft_config(config: DraftConfig, wide: WideDraft) -> DraftConfig:
    """The wide drafter's configuration. Raises UserError for what cannot be widened."""
    kda = config.kda
    if kda is None or kda.block_softmax or config.markov_head_type != "vanilla":
        raise UserError(
            f"a {config.backbone} drafter with a {config.markov_head_type} head: only kda drafters "
            "with a vanilla head and no softmax in the block can be widened"
        )
    pairs = (
        ("hidden size", config.hidden_size, wide.hidden),
        ("heads", config.num_attention_heads, wide.heads),
        ("head width", config.head_dim, wide.head_dim),
        ("gate rank", kda.gate_rank, wide.gate_rank),
        ("MLP width", config.intermediate_size, wide.intermediate),
    )
    for what, own, asked in pairs:
        if asked < own:
            raise UserError(f"{what} {asked}: the drafter itself has {own}")
    return replace(
        config,
        hidden_size=wide.hidden,
        num_attention_heads=wide.heads,
        num_key_value_heads=wide.heads,
        head_dim=wide.head_dim,
        intermediate_size=wide.intermediate,
        kda=replace(kda, gate_rank=wide.gate_rank),
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / wide.hidden,
    )


class _Maps:
    """Where the rows and columns of every parameter go."""

    def __init__(self, old: DraftConfig, new: DraftConfig, device: torch.device) -> None:
        assert old.kda is not None
        D, K = (torch.arange(n, device=device) for n in (old.hidden_size, old.head_dim))
        H = torch.arange(old.num_attention_heads, device=device)
        taps = torch.arange(len(old.target_layer_ids), device=device)
        channels = (H[:, None] * new.head_dim + K).flatten()
        rank = torch.arange(old.kda.gate_rank, device=device)
        inner = torch.arange(old.intermediate_size, device=device)
        vocab, code = (torch.arange(n, device=device) for n in (old.vocab_size, old.markov_rank))
        conv = (channels, D[:1], torch.arange(old.kda.conv_size, device=device))
        read = torch.cat((D, new.hidden_size + code)) if old.confidence_head_with_markov else D
        self._axes: dict[str, tuple[Tensor, ...]] = {
            "fc": (D, (taps[:, None] * new.hidden_size + D).flatten()),
            "A_log": (H,), "dt_bias": (channels,), "slot_embedding": (
                torch.arange(old.block_size, device=device), D,
            ),
            "q_proj": (channels, D), "k_proj": (channels, D), "v_proj": (channels, D),
            "g_proj": (channels, D), "o_proj": (D, channels), "b_proj": (H, D),
            "q_conv1d": conv, "k_conv1d": conv, "v_conv1d": conv,
            "f_a_proj": (rank, D), "f_b_proj": (channels, rank), "o_norm": (K,),
            "gate_proj": (inner, D), "up_proj": (inner, D), "down_proj": (D, inner),
            "markov_w1": (vocab, code), "markov_w2": (vocab, code), "proj": (D[:1], read),
        }  # fmt: skip
        self._bias = D[:1]
        self._D = D
        self._widths = {
            "o_norm": (old.head_dim / new.head_dim) ** 0.5,
            "norm": (old.hidden_size / new.hidden_size) ** 0.5,
        }

    def of(self, name: str) -> tuple[tuple[Tensor, ...], float]:
        """The maps of each dimension of a parameter, and the factor of its live part."""
        parts = name.split(".")
        if parts[-1] == "bias":
            return (self._bias,), 1.0
        owner = parts[-2] if parts[-1] == "weight" else parts[-1]
        axes = self._axes.get(owner, (self._D,))  # what is left are norms of the hidden state
        kind = owner if owner == "o_norm" else "norm" if "norm" in owner else ""
        return axes, self._widths.get(kind, 1.0)
