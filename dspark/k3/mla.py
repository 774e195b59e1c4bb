"""Multi-head latent attention without rotary positions, with an elementwise output gate.

    q = RMSNorm(x W_qa) W_qb = [q_n | q_p] per head;  [c | k_p] = x W_kva;  c = RMSNorm(c)
    expanded:  [k_n | v]_h = c W_kvb,h;  s = (q_n k_n + q_p k_p) / sqrt(n + p);  o_h = softmax(s) v
    absorbed:  s = ((q_n W_k,h) c + q_p k_p) / sqrt(n + p);  o_h = W_v,h (softmax(s) c)
    y = (o * sigmoid(x W_g)) W_o

Nothing is rotated (NoPE): order enters through the KDA layers and the causal mask alone. The cache
holds c and k_p only. ``absorbed`` reads them as they are: a decode step expands no keys or values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.k3 import tiled_attention
from dspark.k3.config import K3Config
from dspark.k3.layers import LORA_NORM_EPS, Packable, RMSNorm, linear
from dspark.k3.state import Block, LatentState


class MLA(Packable):
    """One gated NoPE MLA layer.

    Letters: R latent rank, n nope width, p shared-key width, v value width.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        D, H, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.config, self.heads = config, H
        self.nope, self.rope, self.value = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        if config.q_lora_rank is None:
            self.q_proj = linear(D, H * (self.nope + self.rope))
        else:
            self.q_a_proj = linear(D, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LORA_NORM_EPS)
            self.q_b_proj = linear(config.q_lora_rank, H * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(D, R + self.rope)
        self.kv_a_layernorm = RMSNorm(R, LORA_NORM_EPS)
        self.kv_b_proj = linear(R, H * (self.nope + self.value))
        if config.mla_output_gate:
            self.g_proj = linear(D, H * self.value)
        self.o_proj = linear(H * self.value, D)
        self.scale = (self.nope + self.rope) ** -0.5

    def _packable(self) -> list[nn.Linear]:
        query = self.q_proj if self.config.q_lora_rank is None else self.q_a_proj
        return [
            query,
            self.kv_a_proj_with_mqa,
            *([self.g_proj] if self.config.mla_output_gate else []),
        ]

    def forward(self, x: Tensor, state: LatentState | None, block: Block | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]. Without a state: a whole causal sequence, for training."""
        B, T, _ = x.shape
        q, kv, *gate = self._project(x)
        if self.config.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_BHTX = q.view(B, T, self.heads, self.nope + self.rope).transpose(1, 2)
        c, k_p = kv.split((self.config.kv_lora_rank, self.rope), dim=-1)
        c = self.kv_a_layernorm(c)
        if state is not None and block is not None:
            latents = state.write(torch.cat((c, k_p), dim=-1), block)
            out = self.absorbed(q_BHTX, latents, block)
        else:
            out = self.expanded(q_BHTX, c, k_p)
        out = out.transpose(1, 2).reshape(B, T, self.heads * self.value)
        if gate:
            out = out * gate[0].sigmoid()
        return self.o_proj(out)

    def expanded(self, q: Tensor, c: Tensor, k_p: Tensor) -> Tensor:
        """Causal attention over whole sequences: q [B, H, T, n+p], c [B, T, R], k_p [B, T, p] ->
        [B, H, T, v]."""
        B, T, _ = c.shape
        kv = self.kv_b_proj(c).view(B, T, self.heads, self.nope + self.value).transpose(1, 2)
        k_n, v = kv.split((self.nope, self.value), dim=-1)
        k = torch.cat((k_n, k_p.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)

    def absorbed(self, q: Tensor, latents: Tensor, block: Block) -> Tensor:
        """Attention of a block's rows over cached latents [B, L, R+p]. Softmax in float32."""
        B, H, T, _ = q.shape
        w = self.kv_b_proj.weight.view(H, self.nope + self.value, -1)
        q_n, q_p = q.split((self.nope, self.rope), dim=-1)
        q_latent = torch.cat((torch.matmul(q_n, w[:, : self.nope]), q_p), dim=-1) * self.scale
        rank = self.config.kv_lora_rank
        if block.tiled:
            out = tiled_attention.attend(q_latent, latents, rank, block.lengths)
            return torch.matmul(out, w[:, self.nope :].transpose(1, 2))
        scores = torch.matmul(q_latent.reshape(B, H * T, -1), latents.transpose(1, 2)).view(
            B, H, T, -1
        )
        if block.mask is not None:
            scores = scores.masked_fill(~block.mask.unsqueeze(1), -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(weights.view(B, H * T, -1), latents[..., :rank]).view(B, H, T, -1)
        return torch.matmul(out, w[:, self.nope :].transpose(1, 2))
