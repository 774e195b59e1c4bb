"""EAGLE-3's drafter: one decoder layer over fused taps that feeds on its own output.

    g_t = fc([tap_1 ; ... ; tap_N])                          of position t, from the target
    z_t = [norm(embed(x_{t+1})) ; norm(g_t)]                 what attention reads, 2D wide
    a_t = layer(z_<=t, residual g_t)
    q(x_{t+2}) = softmax(LM head(norm(a_t)))

Positions up to the anchor's own have a g of the target. Behind it there is none, so slot k > 0
takes the layer's output of slot k-1 in its place and the token drawn there. Training does the same
("training-time test"): the first slot of every block reads g, slot k reads a of slot k-1 and the
row's own token, attends to the context up to its anchor and to the slots before it, and all slots
are trained. Slot k of a block at anchor p stands at rotary position p - 1 + k.

A draft of g tokens is g passes of the layer, one after the other. Embedding and LM head are the
target's here, as they are for every other drafter; the authors train a head of their own over a
reduced vocabulary.

(Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test"; tensor names are those of its released heads.)

Letters: B batch, S sequence, A anchors, G slots, D hidden, N taps, H query heads, J key heads, K
head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft.attention import RMSNorm
from dspark.draft.model import INIT_STD
from dspark.draft.rotary import Rotary, frequencies
from dspark.taps import TapSet


@dataclass(frozen=True)
class EagleConfig:
    """Sizes; `block_size` is G, the slots it was trained to run ahead."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    target_tap_kind: str
    block_size: int = 7
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))

    @property
    def taps(self) -> TapSet:
        """What the target has to deliver."""
        return TapSet(self.target_layer_ids, self.target_tap_kind)


class _Attention(nn.Module):
    """Projections of a layer that reads 2D and writes D."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, config.hidden_size
        queries, keys = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def heads(self, x: Tensor) -> Tensor:
        """[..., heads * K] -> [..., heads, K]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def spread(self, keys: Tensor) -> Tensor:
        """Key heads [..., J, K] as often as query heads share them: [..., H, K]."""
        return keys.repeat_interleave(self.groups, dim=-2)


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """The one decoder layer, in parts: attention differs between training and drafting."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = _MLP(width, config.intermediate_size)
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def inputs(self, embeds: Tensor, state: Tensor) -> Tensor:
        """z of embeddings and states [..., D] -> [..., 2D]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(state)), dim=-1)

    def output(self, state: Tensor, mixed: Tensor) -> Tensor:
        """a of the states [..., D] that came in and what attention mixed [..., H, K]."""
        state = state + self.self_attn.o_proj(mixed.flatten(-2))
        return state + self.mlp(self.post_attention_layernorm(state))


class EagleModel(nn.Module):
    """Weights, the training pass over whole blocks, and the steps that drafting takes."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
        self._rotary: Rotary | None = None

    @property
    def rotary(self) -> Rotary:
        """Positions on the device of the weights."""
        weight = self.fc.weight
        if self._rotary is None or self._rotary.signed.device != weight.device:
            one = frequencies(self.config.head_dim, self.config.rope_theta, None)
            signed = torch.cat((-one, one)).to(weight.device)
            self._rotary = Rotary(signed, 1.0, False, weight.dtype)
        return self._rotary

    def fused(self, taps: Tensor) -> Tensor:
        """g of taps [..., N*D] -> [..., D]."""
        return self.fc(taps.to(self.fc.weight.dtype))

    def query(self, z: Tensor, positions: Tensor) -> Tensor:
        """[..., 2D] at positions [...] -> [..., H, K]."""
        attention = self.midlayer.self_attn
        return self.rotary.at(positions).turn(attention.heads(attention.q_proj(z)))

    def keys(self, z: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2D] at positions [...] -> keys and values, each [..., J, K]."""
        attention = self.midlayer.self_attn
        keys = self.rotary.at(positions).turn(attention.heads(attention.k_proj(z)))
        return keys, attention.heads(attention.v_proj(z))

    def train_hidden(
        self, taps: Tensor, row_embeds: Tensor, prev_embeds: Tensor, anchors: Tensor
    ) -> Tensor:
        """Normed states of all slots of all blocks, differentiable.

        Args:
            taps: [B, S, N*D], zero at padding, which stands on the right.
            row_embeds: [B, S, D] embeddings of the row's tokens.
            prev_embeds: [B, A, G, D] embeddings of the token before each slot.
            anchors: [B, A] int64 positions p >= 1.

        Returns:
            [B, A, G, D]; slot k predicts position p + 1 + k.
        """
        fused = self.fused(taps[:, :-1])
        index = (anchors - 1).clamp(min=0)
        at = torch.arange(fused.shape[1], device=fused.device)
        keys, values = self.keys(self.midlayer.inputs(row_embeds[:, 1:], fused), at)
        seen = at <= index[..., None]
        state = fused.gather(1, index[..., None].expand(-1, -1, fused.shape[-1]))
        own: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for k, embeds in enumerate(prev_embeds.unbind(2)):
            z, position = self.midlayer.inputs(embeds, state), index + k
            if k > 0:  # the first slot's own key is the context's last
                own.append(self.keys(z, position))
            mixed = self._attend(self.query(z, position), keys, values, seen, own)
            state = self.midlayer.output(state, mixed)
            outputs.append(self.norm(state))
        return torch.stack(outputs, dim=2)

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """One slot of every block: queries [B, A, H, K] over context [B, S, J, K] and own slots."""
        attention = self.midlayer.self_attn
        keys, values = attention.spread(keys), attention.spread(values)
        query = query * self.config.head_dim**-0.5
        scores = torch.einsum("bahk,bshk->bahs", query, keys)
        scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
        mine = [(attention.spread(k), attention.spread(v)) for k, v in own]
        scores = torch.cat([scores, *((query * k).sum(-1, keepdim=True) for k, _ in mine)], dim=-1)
        weights = scores.softmax(dim=-1)
        mixed = torch.einsum("bahs,bshk->bahk", weights[..., : keys.shape[1]], values)
        for place, (_, value) in enumerate(mine, start=keys.shape[1]):
            mixed = mixed + weights[..., place, None] * value
        return mixed
