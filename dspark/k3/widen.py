"""A widened twin: the same function in a model with many more bytes per token.

Every matrix becomes [[W, R], [0, R]]: a dead output reads dead inputs alone, a live one reads them
too, and every dead activation is zero. So the random R are read from memory like any weight and
change nothing. What a width enters otherwise is made up for:

    RMSNorm     sqrt(mean x^2) falls by sqrt(D / D'): its weight carries that factor, eps its square
    KDA         q carries K^-1/2: o falls by sqrt(K / K') and the norm behind it lifts it again
    MLA         1 / sqrt(n + p) falls: the query's last projection carries the factor
    router      each live expert stands there m times with the same score, m k are chosen, and their
                weights come to the same sum; dead experts have a bias that never lets them win

With ratios of widths that are powers of 4 all factors are powers of 2, exact in any dtype. The eps
of the head norm follows too where D' / D = (K' / K)^2; that of the latent norms of MLA does not,
and lies far below their values.

Letters: D hidden, H heads, K KDA head width, n nope, p shared-key and v value width, R latent rank,
I and L inner and outer expert width, E experts, m copies of a live expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM

NEVER = -10.0
"""Correction bias of a dead expert: scores lie in (0, 1)."""


@dataclass(frozen=True)
class Wide:
    """Sizes of the twin; each at least that of the model it is made of.

    experts, per_token: total and chosen; ``per_token`` a multiple of the model's.
    """

    hidden: int
    kda_heads: int
    kda_head: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    dense: int
    experts: int
    per_token: int
    expert: int
    latent: int


def wide_config(config: K3Config, wide: Wide) -> K3Config:
    """The twin's configuration. Raises UserError for a size below the model's own."""
    if config.q_lora_rank is None or config.routed_expert_hidden_size is None:
        raise UserError("a widened twin is made of models with query rank and latent experts")
    new = replace(
        config,
        hidden_size=wide.hidden, kda_num_heads=wide.kda_heads, kda_head_dim=wide.kda_head,
        num_attention_heads=wide.heads, q_lora_rank=wide.q_rank, kv_lora_rank=wide.kv_rank,
        qk_nope_head_dim=wide.nope, qk_rope_head_dim=wide.rope, v_head_dim=wide.value,
        intermediate_size=wide.dense, num_experts=wide.experts,
        num_experts_per_token=wide.per_token, moe_intermediate_size=wide.expert,
        routed_expert_hidden_size=wide.latent,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / wide.hidden,
    )  # fmt: skip
    for name in vars(config):
        old, size = getattr(config, name), getattr(new, name)
        if isinstance(old, int) and size < old:
            raise UserError(f"{name} {size}: the model itself has {old}")
    copies, rest = divmod(wide.per_token, config.num_experts_per_token)
    if rest or copies * config.num_experts > wide.experts:
        raise UserError(
            f"{wide.per_token} of {wide.experts} experts: expected a multiple m of "
            f"{config.num_experts_per_token}, and at least m times {config.num_experts} in all"
        )
    return new


@torch.no_grad()
def widen(
    model: K3ForCausalLM,
    wide: Wide,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    std: float = 0.02,
) -> K3ForCausalLM:
    """The twin of a model.

    Args:
        std: of the random weights that meet zeros.

    Raises:
        UserError: sizes that cannot hold the model.
    """
    config = wide_config(model.config, wide)
    with torch.device("meta"):
        twin = K3ForCausalLM(config)
    twin = twin.to(dtype).to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    table = _Maps(model.config, config, torch.device(device))
    small = dict(model.named_parameters())
    for name, big in twin.named_parameters():
        big.requires_grad_(False)
        axes, scale = table.of(name)
        place(big, small[name], axes, scale, generator, std, inputs="conv1d" not in name)
        if "embed_tokens" in name:  # whose columns are outputs
            big.index_fill_(
                1, torch.arange(model.config.hidden_size, wide.hidden, device=device), 0
            )
        if name.endswith("e_score_correction_bias"):
            dead = torch.ones_like(big, dtype=torch.bool).index_fill(0, axes[0], False)
            big.masked_fill_(dead, NEVER)
    return twin


def place(
    big: Tensor,
    small: Tensor,
    axes: Sequence[Tensor],
    scale: float,
    generator: torch.Generator,
    std: float,
    *,
    inputs: bool = True,
) -> None:
    """Write [[scale W, R], [0, R]] into ``big``.

    Args:
        axes: for each dimension where the rows of ``small`` go. A map longer than the dimension of
            ``small`` repeats it: all of it once, then all of it again.
        inputs: The last dimension is the input, so that dead rows must not see live columns.
    """
    big.normal_(0.0, std, generator=generator)
    live = small.to(big.device, big.dtype) * scale
    for dim, (axis, size) in enumerate(zip(axes, small.shape, strict=True)):
        live = live.index_select(dim, torch.arange(len(axis), device=big.device) % size)
    if big.dim() > 1 and inputs:
        big.index_fill_(big.dim() - 1, axes[-1], 0.0)
    big[torch.meshgrid(*axes, indexing="ij")] = live


class _Maps:
    """Where the rows and columns of every parameter go."""

    def __init__(self, old: K3Config, new: K3Config, device: torch.device) -> None:
        def first(n: int) -> Tensor:
            return torch.arange(n, device=device)

        def heads(count: int, stride: int, *parts: tuple[int, int]) -> Tensor:
            """Channels of each head, given as (offset, width) of its parts."""
            inside = torch.cat([offset + first(width) for offset, width in parts])
            return (first(count)[:, None] * stride + inside).flatten()

        H, K = old.kda_num_heads, old.kda_head_dim
        A, n, p, v = (
            old.num_attention_heads, old.qk_nope_head_dim, old.qk_rope_head_dim, old.v_head_dim,
        )  # fmt: skip
        n2, p2, v2 = new.qk_nope_head_dim, new.qk_rope_head_dim, new.v_head_dim
        one = first(1)
        D = first(old.hidden_size)
        kda, rank = heads(H, new.kda_head_dim, (0, K)), first(K)
        query = heads(A, n2 + p2, (0, n), (n2, p))
        value = heads(A, v2, (0, v))
        q_rank, latent = first(old.q_lora_rank or 0), first(old.kv_lora_rank)
        keys = torch.cat((latent, new.kv_lora_rank + first(p)))
        keys_values = heads(A, n2 + v2, (0, n), (n2, v))
        copies = new.num_experts_per_token // max(1, old.num_experts_per_token)
        experts = first(copies * old.num_experts)
        inner, outer = first(old.moe_intermediate_size), first(old.expert_width)
        shared = first(old.moe_intermediate_size * old.num_shared_experts)
        dense = first(old.intermediate_size)
        mixer = {
            "q_conv1d": (kda, one, first(old.kda_conv_size)), "A_log": (first(H),),
            "dt_bias": (kda,), "f_a_proj": (rank, D), "f_b_proj": (kda, rank),
            "b_proj": (first(H), D), "g_a_proj": (rank, D), "g_b_proj": (kda, rank),
            "o_norm": (rank,), "q_a_proj": (q_rank, D), "q_a_layernorm": (q_rank,),
            "q_b_proj": (query, q_rank), "kv_a_proj_with_mqa": (keys, D),
            "kv_a_layernorm": (latent,), "kv_b_proj": (keys_values, latent),
        }  # fmt: skip
        mixer |= {"k_conv1d": mixer["q_conv1d"], "v_conv1d": mixer["q_conv1d"]}
        moe = {
            "gate": (experts, D), "e_score_correction_bias": (experts,),
            "w1": (experts, inner, outer), "w3": (experts, inner, outer),
            "w2": (experts, outer, inner), "routed_expert_down_proj": (outer, D),
            "routed_expert_up_proj": (D, outer), "routed_expert_norm": (outer,),
        }  # fmt: skip
        self._axes: dict[str, tuple[Tensor, ...]] = {**mixer, **moe}
        self._full = {"kda": (kda, D), "mla": (value, D)}
        self._mlp = {"shared_experts": shared, "mlp": dense}
        self._old, self._new, self._D, self._one = old, new, D, one
        self._vocab = first(old.vocab_size)

    def of(self, name: str) -> tuple[tuple[Tensor, ...], float]:
        """The maps of each dimension of a parameter, and the factor of its live part."""
        parts = name.split(".")
        owner = parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]
        return self._maps(parts, owner), self._scale(owner)

    def _maps(self, parts: list[str], owner: str) -> tuple[Tensor, ...]:
        D = self._D
        if owner in ("embed_tokens", "lm_head"):
            return self._vocab, D
        for name, width in self._mlp.items():
            if name in parts:
                return (D, width) if owner == "down_proj" else (width, D)
        if owner.endswith("res_proj"):
            return self._one, D
        if owner in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
            layer = int(parts[parts.index("layers") + 1])
            kind = "mla" if self._old.is_full_attention(layer) else "kda"
            rows, columns = self._full[kind]
            return (columns, rows) if owner == "o_proj" else (rows, columns)
        return self._axes.get(owner, (D,))  # what is left are norms of the hidden state

    def _scale(self, owner: str) -> float:
        old, new = self._old, self._new
        ratio = {
            "o_norm": (old.kda_head_dim, new.kda_head_dim),
            "routed_expert_norm": (old.expert_width, new.expert_width),
            "q_a_layernorm": (old.q_lora_rank or 1, new.q_lora_rank or 1),
            "kv_a_layernorm": (old.kv_lora_rank, new.kv_lora_rank),
            "q_b_proj": (
                new.qk_nope_head_dim + new.qk_rope_head_dim,
                old.qk_nope_head_dim + old.qk_rope_head_dim,
            ),
        }.get(owner)
        if ratio is None and "norm" in owner:
            ratio = (old.hidden_size, new.hidden_size)
        return 1.0 if ratio is None else (ratio[0] / ratio[1]) ** 0.5
