"""Plain torch forms of the ops of a static step, until each has its kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark import ops
from dspark.k3.layers import rms_norm, situ


def linear_rows(x, weight, *, norm=None, eps=0.0, residual=None):
    if norm is not None:
        x = rms_norm(x, norm, eps)
    y = F.linear(x, weight)
    return y if residual is None else residual + y


def kda_decode(
    rows, decay, beta, gate, held_rows, held_decay, held_beta, accepted, state,
    conv, A_log, dt_bias, norm, eps, lower_bound, upto=None, taps=None,
):
    """One KDA layer: rows [B, T, C] raw; returns [B, T, HK] in the dtype of rows."""
    B, T, C = rows.shape
    H, K = state.shape[1:3]
    W = conv.shape[0]
    P = held_decay.shape[1]
    pos = torch.arange(P, device=rows.device)
    ok = pos < accepted[:, None]  # [B, P]
    held = held_rows.float()
    held = torch.cat((held[:, : W - 1], held[:, W - 1 :].masked_fill(~ok[..., None], 0.0)), 1)
    at = accepted[:, None] + torch.arange(W - 1, device=rows.device)
    window = held.gather(1, at[..., None].expand(-1, -1, C))
    new = torch.cat((window, rows.float()), 1)

    def conv_of(u, n):
        out = u[:, :n] * conv[0]
        for i in range(1, W):
            out = out + u[:, i : i + n] * conv[i]
        return out

    if taps is None:
        y = conv_of(new, T)
    else:
        batch = torch.arange(B, device=rows.device)[:, None, None]
        y = (new[batch, taps] * conv).sum(2)
    y = F.silu(torch.cat((conv_of(held, P), y), 1)).view(B, P + T, 3, H, K)
    q, k, v = y.unbind(2)
    unit = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    q, k = unit(q) * K**-0.5, unit(k)
    held_decay = held_decay.float().masked_fill(~ok[..., None], 0.0)
    f = (torch.cat((held_decay, decay.float()), 1) + dt_bias).view(B, P + T, H, K)
    rate = A_log.exp()[:, None]
    g = -rate * F.softplus(f) if lower_bound is None else lower_bound * torch.sigmoid(rate * f)
    held_beta = held_beta.float().masked_fill(~ok[..., None], 0.0)
    b = torch.cat((held_beta, beta.float()), 1).sigmoid()
    live = torch.cat((ok, ok.new_ones(B, T)), 1)
    g = g.masked_fill(~live[..., None, None], 0.0)
    b = b.masked_fill(~live[..., None], 0.0)
    if upto is not None:
        whole = upto.new_ones(len(upto), P + T, P + T).tril_()
        whole[:, P:, P:] = upto
        upto = whole
    out, _ = ops.kda_step(q, k, v, g, b, state, P, out=state, upto=upto)
    out = rms_norm(out[:, P:], norm, eps) * gate.float().view(B, T, H, K).sigmoid()
    return out.to(rows.dtype).flatten(2)


def latent_write(rows, norm, eps, rank, latents, lengths):
    c = rms_norm(rows[..., :rank], norm, eps)
    rows = torch.cat((c, rows[..., rank:]), -1)
    at = lengths[:, None] + torch.arange(rows.shape[1], device=rows.device)
    latents.scatter_(1, at[..., None].expand_as(rows), rows)


def mla_decode(q, latents, lengths, upto, rank):
    B, T, H, _ = q.shape
    L = latents.shape[1]
    place = torch.arange(L, device=q.device) - lengths[:, None]  # [B, L]
    if upto is None:
        seen = place[:, None] <= torch.arange(T, device=q.device)[:, None]
    else:
        inside = (place >= 0) & (place < T)
        index = place.clamp(0, T - 1)[:, None].expand(-1, T, -1)
        seen = (place < 0)[:, None] | (inside[:, None] & upto.expand(B, -1, -1).gather(2, index))
    scores = torch.matmul(q.transpose(1, 2).reshape(B, H * T, -1), latents.transpose(1, 2))
    scores = scores.view(B, H, T, L).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    out = torch.matmul(weights.view(B, H * T, L), latents[..., :rank])
    return out.view(B, H, T, rank).transpose(1, 2)


def attn_res_mix(prefix, bank, key_weight, eps, norm, norm_eps):
    """prefix [n, D], bank [m, n, D] -> (mixed, normed) [n, D]."""
    mixed = prefix
    if len(bank):
        values = torch.cat((bank, prefix[None])).transpose(0, 1).float()
        scores = torch.matmul(values, key_weight)
        scores = scores * torch.rsqrt(values.square().mean(-1) + eps)
        mixed = torch.matmul(scores.softmax(-1)[:, None], values)[:, 0].to(prefix.dtype)
    return mixed, rms_norm(mixed, norm, norm_eps)


def act(gate, up, situ_betas):
    return F.silu(gate) * up if situ_betas is None else situ(gate, up, *situ_betas)


def mlp(x, w, betas, *, norm=None, eps=0.0, residual=None):
    gate, up = linear_rows(x, w.gate_up, norm=norm, eps=eps).chunk(2, -1)
    return linear_rows(act(gate, up, betas), w.down, residual=residual)


def moe_decode(x, w, config, betas, *, norm=None, eps=0.0, residual=None):
    if norm is not None:
        x = rms_norm(x, norm, eps)
    scores = F.linear(x.float(), w.router.float()).sigmoid()
    chosen = (scores + w.bias).topk(config.num_experts_per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if config.moe_renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * config.routed_scaling_factor
    z = x if w.down is None else F.linear(x, w.down)
    n, k = chosen.shape
    w1, w3, w2 = (m[chosen.flatten()] for m in (w.w1, w.w3, w.w2))
    zz = z.repeat_interleave(k, 0)[..., None]
    h = act(torch.bmm(w1, zz).squeeze(-1), torch.bmm(w3, zz).squeeze(-1), betas)
    y = torch.bmm(w2, h[..., None]).squeeze(-1).view(n, k, -1).float()
    y = (y * weights[..., None]).sum(1).to(z.dtype)
    if w.norm is not None:
        y = rms_norm(y, w.norm, config.rms_norm_eps)
    if w.up is not None:
        y = F.linear(y, w.up)
    if w.shared is not None:
        y = y + mlp(x, w.shared, betas)
    return y if residual is None else residual + y
