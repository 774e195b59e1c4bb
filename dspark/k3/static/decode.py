"""One pass of T rows over a static cache: the decoder, op by op, in launches that never change.

    residual stream        x <- x + mixer(norm(x));  x <- x + mlp(norm(x))
    Attention Residuals    h = mixture of bank and prefix; prefix <- prefix + mixer(norm(h)); ..

Norms go into the product that follows them and sums into the one before, so that a layer is as few
launches as its data allows: at batch 1 the gaps between launches cost as much as bytes do.
Nothing here reads a value on the host and no shape depends on one.

Letters: B seats, T rows of a step, n = B T, D hidden, N taps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark import ops
from dspark.k3.layers import LORA_NORM_EPS
from dspark.k3.model import K3ForCausalLM
from dspark.k3.static.cache import StaticCache
from dspark.k3.static.weights import KDAWeights, LayerWeights, MLAWeights, pack, situ_betas
from dspark.k3.tree import Tree, ancestors
from dspark.taps import TapSet


@dataclass(frozen=True, eq=False)
class StepOutput:
    """Result of a step.

    last    [B, T, D], before the final norm: `StaticDecoder.logits` takes it from there
    taps    [B, T, N*D], tapped states side by side, ascending layer id; None if none were asked
    chosen  of every layer with experts, those that each row chose: [n, k] int32
    """

    last: Tensor
    taps: Tensor | None
    chosen: list[Tensor]


@dataclass
class _Rows:
    """What the layers of one step share, and what they leave.

    upto [B or 1, T, T] and reach [B or 1, T, W] of a tree, see `dspark.k3.tree`
    """

    cache: StaticCache
    batch: int
    count: int
    upto: Tensor | None
    reach: Tensor | None
    chosen: list[Tensor] = field(default_factory=list)
    linear: int = 0
    full: int = 0

    @property
    def alone(self) -> bool:
        """Whether a single row of each seat is folded at once, and nothing before it."""
        return self.count == 1 and self.cache.folds and not self.cache.waits


class StaticDecoder:
    """A `K3ForCausalLM` as a static pass; the model goes on working and shares the weights."""

    def __init__(self, model: K3ForCausalLM, *, mxfp4: bool = False) -> None:
        self.config = model.config
        self.weights = pack(model, mxfp4=mxfp4)
        self._situ = situ_betas(self.config)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.weights.head.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.weights.head.dtype

    def new_cache(
        self, batch: int, max_length: int, rows: int = 1, *, slots: bool = True
    ) -> StaticCache:
        """Empty seats for steps of at most ``rows`` rows; see `StaticCache`."""
        place = (self.dtype, self.device)
        return StaticCache(self.config, batch, max_length, rows, *place, slots=slots)

    def reading(self, max_length: int) -> None:
        """None: a step takes few rows, so the model itself reads prompts."""

    def step(
        self,
        tokens: Tensor,
        cache: StaticCache,
        *,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
    ) -> StepOutput:
        """Read rows; they wait for `StaticCache.commit`, which must follow.

        Args:
            tokens: [B, T] int64, T no more than the cache's ``rows``.
            parents: [B, T] or [T] int64, as of `K3ForCausalLM.forward` but not checked; None: each
                row follows the one before it.
            taps: which hidden states to return.
        """
        B, T = tokens.shape
        upto = reach = None
        if parents is not None:
            parents = parents.unsqueeze(0) if parents.dim() == 1 else parents
            tree = Tree(parents, None, ancestors(parents))
            upto, reach = tree.upto, tree.taps(self.config.kda_conv_size)
        rows = _Rows(cache, B, T, upto, reach)
        x = F.embedding(tokens.reshape(-1), self.weights.embedding)
        plain = self.config.attn_res_block_size is None
        last, tapped = (self._residual if plain else self._attention_residuals)(x, rows, taps)
        joined = None if taps is None else torch.cat([tapped[i] for i in taps.layer_ids], dim=-1)
        joined = None if joined is None else joined.view(B, T, -1)
        return StepOutput(last.view(B, T, -1), joined, rows.chosen)

    def logits(self, last: Tensor) -> Tensor:
        """[..., D] of `step` -> [..., V] in the weights' dtype."""
        flat = last.reshape(-1, last.shape[-1])
        logits = ops.linear_rows(
            flat, self.weights.head, norm=self.weights.norm, eps=self.config.rms_norm_eps
        )
        return logits.view(*last.shape[:-1], -1)

    def _residual(
        self, x: Tensor, rows: _Rows, taps: TapSet | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.weights.layers):
            x = self._attend(layer, x, rows, self._soon(i), norm=layer.mixer_norm, residual=x)
            x = self._transform(layer, x, rows, norm=layer.mlp_norm, residual=x)
            if taps is not None and i in taps.layer_ids:
                tapped[i] = x
        return x, tapped

    def _attention_residuals(
        self, x: Tensor, rows: _Rows, taps: TapSet | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        size = self.config.attn_res_block_size
        assert size is not None
        wanted = taps.layer_ids if taps is not None else ()
        raw = taps is not None and taps.kind == "raw_prefix"
        tapped: dict[int, Tensor] = {}
        bank = x.new_empty(-(-len(self.weights.layers) // size), *x.shape)
        prefix, held = x, 0
        for i, layer in enumerate(self.weights.layers):
            starts = i % size == 0
            read = (prefix, bank, held)
            h, normed = self._read(*read, layer.mixer_key, layer.mixer_norm, append=starts)
            held += starts
            if not raw and i - 1 in wanted:
                tapped[i - 1] = h
            residual = None if starts else prefix
            prefix = self._attend(layer, normed, rows, self._soon(i), residual=residual)
            _, normed = self._read(prefix, bank, held, layer.mlp_key, layer.mlp_norm)
            prefix = self._transform(layer, normed, rows, residual=prefix)
            if raw and i in wanted:
                tapped[i] = prefix
        last, _ = self._read(prefix, bank, held, self.weights.key, self.weights.norm)
        if not raw and len(self.weights.layers) - 1 in wanted:
            tapped[len(self.weights.layers) - 1] = last
        return last, tapped

    def _read(
        self,
        prefix: Tensor,
        bank: Tensor,
        count: int,
        key: Tensor | None,
        norm: Tensor,
        *,
        append: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """A read of Attention Residuals and the norm behind it."""
        assert key is not None
        eps = self.config.rms_norm_eps
        return ops.attn_res_mix(prefix, bank, count, key, eps, norm, eps, append=append)

    def _soon(self, i: int) -> Tensor:
        """The weight that is read first behind layer i."""
        layers = self.weights.layers
        return layers[i + 1].mixer.inputs if i + 1 < len(layers) else self.weights.head

    def _attend(
        self,
        layer: LayerWeights,
        x: Tensor,
        rows: _Rows,
        soon: Tensor,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None,
    ) -> Tensor:
        """``soon``: the weight behind this layer's MLP, which waits for a router first."""
        mixer = layer.mixer
        inputs = ops.linear_rows(x, mixer.inputs, norm=norm, eps=self.config.rms_norm_eps)
        if isinstance(mixer, MLAWeights):
            out = self._mla(mixer, inputs, rows)
        elif rows.batch == 1 and rows.alone:
            return self._kda_row(mixer, inputs, rows, residual, soon)
        else:
            out = self._kda(mixer, inputs, rows)
        return ops.linear_rows(out, mixer.output, residual=residual, soon=soon)

    def _kda_row(
        self, w: KDAWeights, inputs: Tensor, rows: _Rows, residual: Tensor | None, soon: Tensor
    ) -> Tensor:
        """`_kda` and the projection of a single row that counts at once."""
        raw, gate, decay, beta = (x.view(1, 1, -1) for x in inputs.split(w.splits, dim=-1))
        index = rows.linear
        rows.linear += 1
        return ops.kda_output(
            raw, decay, beta, gate, rows.cache.rows[index], rows.cache.state[index], w.conv,
            w.A_log, w.dt_bias, w.norm, self.config.rms_norm_eps, self.config.kda_gate_lower_bound,
            w.second, w.output, residual, soon,
        )  # fmt: skip

    def _kda(self, w: KDAWeights, inputs: Tensor, rows: _Rows) -> Tensor:
        """[n, HK] of the packed products [n, O] of one KDA layer."""
        shape = (rows.batch, rows.count, -1)
        raw, gate, decay, beta = inputs.split(w.splits, dim=-1)
        cache, index = rows.cache, rows.linear
        if not rows.alone:
            factors, _, rank = w.second.shape
            end = sum(w.splits[:3])
            first = inputs[:, end - factors * rank : end].unflatten(1, (factors, rank))
            made = ops.low_rank_rows(first, w.second)
            gate, decay = made[0] if factors > 1 else gate, made[-1]
        rows.linear += 1
        out = ops.kda_decode(
            raw.view(shape), decay.view(shape), beta.view(shape), gate.view(shape),
            cache.rows[index], cache.decay[index], cache.beta[index], cache.accepted,
            cache.state[index], w.conv, w.A_log, w.dt_bias, w.norm, self.config.rms_norm_eps,
            self.config.kda_gate_lower_bound, rows.upto, rows.reach, cache.folds,
            w.second if rows.alone else None,
        )  # fmt: skip
        return out.flatten(0, 1)

    def _mla(self, w: MLAWeights, inputs: Tensor, rows: _Rows) -> Tensor:
        """[n, H v] of the packed products [n, O] of one MLA layer."""
        config, rank = self.config, self.config.kv_lora_rank
        latents, lengths = rows.cache.latents[rows.full], rows.cache.lengths
        rows.full += 1
        q, latent, gate = inputs.split(w.splits, dim=-1)
        if w.query is not None:
            q = ops.linear_rows(q.contiguous(), w.query, norm=w.query_norm, eps=LORA_NORM_EPS)
        heads, nope = w.key.shape[:2]
        shape = (rows.batch, rows.count)
        q = ops.mla_absorb(
            q.view(*shape, heads, -1),
            latent.view(*shape, -1),
            w.key,
            (nope + config.qk_rope_head_dim) ** -0.5,
            latents,
            w.latent_norm,
            LORA_NORM_EPS,
            lengths,
        )
        gates = gate.view(*shape, -1) if w.splits[2] else None
        out = ops.mla_output(q, latents, lengths, rank, w.value, gates, rows.upto)
        return out.flatten(0, 1)

    def _transform(
        self,
        layer: LayerWeights,
        x: Tensor,
        rows: _Rows,
        *,
        norm: Tensor | None = None,
        residual: Tensor,
    ) -> Tensor:
        w, eps = layer.mlp, self.config.rms_norm_eps
        if isinstance(w, ops.MoE):
            out, chosen = ops.moe_decode(x, w, norm=norm, eps=eps, residual=residual)
            rows.chosen.append(chosen)
            return out
        hidden = ops.gated_rows(x, w.gate_up, norm=norm, eps=eps, situ=self._situ)
        return ops.linear_rows(hidden, w.down, residual=residual)
