"""The DSpark drafter: taps of the target in, one block of hidden states out.

    c = hidden_norm(fc([tap_1 ; ... ; tap_N]))        context feature of one position
    h = norm(layers([embed(anchor), embed(mask), ...], c before the anchor))

Logits of slot k are the target's LM head on h_k plus the markov bias; both embedding and LM head
belong to the target and are not stored here. Training runs all blocks of a row at once
(`train_hidden`), drafting one block against an incremental context (`extend`, `block_hidden`); the
two agree to rounding. (DSpark paper; layout and tensor names of DeepSpec.)

Letters: B batch, S context, A anchors, G slots, D hidden, N taps, H/J query/key heads, K head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft.attention import DraftLayer, RMSNorm, block_layout, rms_norm
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.heads import ConfidenceHead, VanillaMarkovHead
from dspark.draft.packed import PackedLayer, PackedWeights, pack, weight_stamp
from dspark.taps import TapSet

INIT_STD = 0.02
"""Standard deviation of fresh weights, Qwen3's `initializer_range`."""

GROUP_SLOTS = 64
"""Block slots that share one attention call in training (measured on CPU; see `block_layout`)."""


class DSparkDrafter(nn.Module):
    """Attention backbone with a sequential and a confidence head.

    Fresh weights are normal with `INIT_STD`, norms one and the confidence bias zero, drawn from
    torch's global generator.

    Attributes:
        config: Its shape and meaning.
        markov_head: Sequential head.
        confidence_head: None when the config leaves it out, so that nothing is trained unused.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.markov_head = VanillaMarkovHead(config.vocab_size, config.markov_rank)
        self.confidence_head = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(width, config.confidence_inputs - width)
        self._packed: tuple[tuple[tuple[int, int], ...], PackedWeights] | None = None
        self.apply(_initialise)

    @property
    def taps(self) -> TapSet:
        """What the target has to deliver."""
        return self.config.taps

    def features(self, taps: Tensor) -> Tensor:
        """Context features c of concatenated taps, ascending layer id: [..., N*D] -> [..., D]."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    def new_context(self, batch: int, max_length: int) -> DraftContext:
        """An empty context for `batch` texts of at most `max_length` tokens.

        It drafts with the weights of this moment; after training further, make a new one.
        """
        weight = self.fc.weight
        return DraftContext(
            self.config, batch, max_length, weight.device, weight.dtype, self._pack()
        )

    @torch.no_grad()
    def extend(
        self, context: DraftContext, features: Tensor, counts: int | Tensor | None = None
    ) -> None:
        """Appends committed positions to a context, in place.

        Args:
            context: Of this drafter.
            features: [B, n, N*D] concatenated taps of the positions after the context's lengths.
            counts: Rows to keep, from the first: one number, [B] numbers, or None for all n.

        Raises:
            ValueError: counts outside 0..n, or more positions than the context was made for.
        """
        rows = features.shape[1]
        kept = context.counts(rows, counts)
        length = context.common_length
        uniform = length is not None and all(count == kept[0] for count in kept)
        if uniform:
            features = features[:, : kept[0]]
        else:
            # Rows beyond a count land behind the length, where they are masked: keep them finite.
            device = features.device
            dropped = (
                torch.arange(rows, device=device) >= torch.tensor(kept, device=device)[:, None]
            )
            features = features.masked_fill(dropped[..., None], 0)
        if features.shape[1]:
            packed, config = context.weights, self.config
            heads = (2, config.num_layers, config.num_key_value_heads, config.head_dim)
            projected = F.linear(self.features(features), packed.context).unflatten(-1, heads)
            keys, values = projected.permute(2, 3, 0, 1, 4, 5)  # each [L, B, n, J, K]
            if uniform:
                assert length is not None
                span = slice(length, length + kept[0])
                keys = context.rotary.at(span).turn(self._norm_keys(keys, packed))
                context.keys[:, :, :, span] = keys.transpose(2, 3)
                context.values[:, :, :, span] = values.transpose(2, 3)
            else:
                positions = context.positions(rows)
                keys = context.rotary.at(positions).turn(self._norm_keys(keys, packed))
                context.scatter(context.keys, keys.transpose(2, 3), positions)
                context.scatter(context.values, values.transpose(2, 3), positions)
        context.row_lengths = [a + b for a, b in zip(context.row_lengths, kept, strict=True)]

    @torch.no_grad()
    def block_hidden(self, block_embeds: Tensor, context: DraftContext) -> Tensor:
        """Final-normed hidden states of one block per row, anchored at the context's length.

        Args:
            block_embeds: [B, G, D] target embeddings of [anchor, mask, ..., mask]. The block runs
                at its full trained size: a shorter draft is cut from its result.
            context: Holds exactly the positions before the anchor. Its lengths do not change.

        Returns:
            [B, G, D]; slot k predicts position length+1+k.
        """
        batch, slots, width = block_embeds.shape
        if slots != self.config.block_size or batch != context.batch:
            raise ValueError(
                f"block of shape [{batch}, {slots}]: batch {context.batch} and the trained block "
                f"size {self.config.block_size} are needed; cut a shorter draft from the full block"
            )
        length, mask = context.common_length, None
        if length is not None:
            positions = None
            rotary = context.rotary.at(slice(length, length + slots))
            end = length + slots
        else:
            positions = context.positions(slots)
            rotary = context.rotary.at(positions)
            end = max(context.row_lengths) + slots
            columns = torch.arange(end, device=block_embeds.device)
            mask = (columns < context.lengths[:, None] + slots)[:, None, None]
        hidden = block_embeds.to(self.fc.weight.dtype).reshape(batch * slots, width)
        for index, layer in enumerate(context.weights.layers):
            keys, values = context.keys[index], context.values[index]
            qk, v = self._block_heads(hidden, layer, (batch, slots))
            qk = rotary.turn(qk)
            heads = self.config.num_attention_heads
            k, v = qk[:, :, heads:].transpose(1, 2), v.transpose(1, 2)
            if positions is None:
                keys[:, :, length:end] = k
                values[:, :, length:end] = v
            else:
                context.scatter(keys, k, positions)
                context.scatter(values, v, positions)
            mixed = self._attend(qk[:, :, :heads], keys[:, :, :end], values[:, :, :end], mask)
            hidden = torch.addmm(hidden, mixed, layer.output)
            hidden = self._mlp(hidden, layer)
        return self.norm(hidden).view(batch, slots, width)

    def train_hidden(
        self,
        features: Tensor,
        valid: Tensor,
        block_embeds: Tensor,
        anchors: Tensor,
        anchor_valid: Tensor,
    ) -> Tensor:
        """Final-normed hidden states of all blocks of a batch, in one differentiable pass.

        Args:
            features: [B, S, N*D] concatenated taps; row s of a batch row is its position s, so
                padding goes on the right.
            valid: [B, S] bool, real positions.
            block_embeds: [B, A, G, D] target embeddings of every block's input ids.
            anchors: [B, A] int64 positions p; a block sees valid positions before p and itself.
            anchor_valid: [B, A] bool.

        Returns:
            [B, A, G, D]; exactly zero, with zero gradient, where an anchor is not valid.
        """
        batch, count, slots, width = block_embeds.shape
        if slots != self.config.block_size:
            raise ValueError(f"blocks of {slots} slots given, {self.config.block_size} are trained")
        dtype = self.fc.weight.dtype
        # Whatever a target leaves in its padding rows, 0 * NaN must not reach a gradient.
        context = self.features(features.masked_fill(~valid[..., None], 0))
        layout = block_layout(
            self.config,
            valid,
            anchors,
            anchors_per_group=max(1, GROUP_SLOTS // slots),
            dtype=dtype,
        )
        hidden = block_embeds.to(dtype).reshape(batch, count * slots, width)
        for layer in self.layers:
            hidden = layer(hidden, context, layout)
        hidden = self.norm(hidden).view(batch, count, slots, width)
        return hidden.masked_fill(~anchor_valid[..., None, None], 0)

    def _pack(self) -> PackedWeights:
        stamp = weight_stamp(self.layers.parameters())
        if self._packed is None or self._packed[0] != stamp:
            self._packed = (stamp, pack(self.layers))  # type: ignore[arg-type]
        return self._packed[1]

    def _norm_keys(self, keys: Tensor, packed: PackedWeights) -> Tensor:
        """Key norm of all layers at once: [L, B, n, J, K]."""
        return _norm_heads(keys, packed.context_norm[:, None, None], self.config.rms_norm_eps)

    def _block_heads(
        self, hidden: Tensor, layer: PackedLayer, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Normed queries and keys side by side [B, G, H+J, K], and values [B, G, J, K]."""
        config = self.config
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        qkv = F.linear(normed, layer.qkv).view(*shape, -1, config.head_dim)
        turned = config.num_attention_heads + config.num_key_value_heads
        qk = _norm_heads(qkv[:, :, :turned], layer.qk_norm, config.rms_norm_eps)
        return qk, qkv[:, :, turned:]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, G, H, K] over keys and values [B, J, C, K] -> [B*G, H*K].

        All slots of a block see the same positions, so the query heads that share a key head are
        stacked as more rows of it: keys are never repeated.
        """
        batch, slots, heads, dim = q.shape
        key_heads = keys.shape[1]
        split = (batch, slots, key_heads, heads // key_heads, dim)
        q = q.reshape(split).permute(0, 2, 3, 1, 4).reshape(batch, key_heads, -1, dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed = mixed.view(batch, key_heads, heads // key_heads, slots, dim)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch * slots, heads * dim)

    def _mlp(self, hidden: Tensor, layer: PackedLayer) -> Tensor:
        normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
        return torch.addmm(hidden, F.silu(gate) * up, layer.down)


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` per head with a weight that differs between heads or layers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype) * weight


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
