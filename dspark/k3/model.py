"""Kimi K3's text decoder: KDA and MLA mixers, dense and LatentMoE MLPs, Attention Residuals, taps.

With Attention Residuals (block size b), for each layer l:

    h = mix(prefix, bank);  if l % b == 0: bank gains prefix, prefix restarts
    prefix += Attn(norm(h));  prefix += MLP(norm(mix(prefix, bank)))

and the head reads norm(mix(prefix, bank)) after the last layer. Without them (Kimi-Linear) the
prefix is the ordinary residual stream. Module names are the published tensor names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dspark.k3.attn_res import mix
from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.layers import GatedMLP, Packable, RMSNorm, linear
from dspark.k3.mla import MLA
from dspark.k3.moe import Experts, LatentMoE
from dspark.k3.state import Block, KDAState, LatentState
from dspark.k3.storage import Storage
from dspark.taps import TapSet


class DecoderLayer(nn.Module):
    """Mixer, MLP, their norms, and with Attention Residuals the two reads in front of them."""

    def __init__(self, config: K3Config, layer: int) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.full_attention, self.moe = config.is_full_attention(layer), config.is_moe(layer)
        self.self_attn = MLA(config) if self.full_attention else KDA(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        if self.moe:
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = GatedMLP(config, config.intermediate_size)
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm, self.self_attention_res_proj = (
                RMSNorm(D, eps),
                linear(D, 1),
            )
            self.mlp_res_norm, self.mlp_res_proj = RMSNorm(D, eps), linear(D, 1)

    def attend(
        self, h: Tensor, state: KDAState | LatentState | None, block: Block | None
    ) -> Tensor:
        return self.self_attn(self.input_layernorm(h), state, block)

    def transform(self, h: Tensor) -> Tensor:
        h = self.post_attention_layernorm(h)
        return self.block_sparse_moe(h) if self.moe else self.mlp(h)

    def read_attention(self, prefix: Tensor, bank: Sequence[Tensor]) -> Tensor:
        return mix(prefix, bank, self.self_attention_res_norm, self.self_attention_res_proj)

    def read_mlp(self, prefix: Tensor, bank: Sequence[Tensor]) -> Tensor:
        return mix(prefix, bank, self.mlp_res_norm, self.mlp_res_proj)


class K3Model(nn.Module):
    """Embedding, layers, final read and norm."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = linear(config.hidden_size, 1)

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        return cast("Sequence[DecoderLayer]", self.layers)

    def forward(
        self, tokens: Tensor, cache: K3Cache | None, block: Block | None, taps: TapSet | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """tokens [B, T] -> input of the final norm [B, T, D], and the taps by layer id."""
        x = self.embed_tokens(tokens)
        states = cache.layers if cache is not None else [None] * len(self.layers)
        if self.config.attn_res_block_size is None:
            return self._residual(x, states, block, taps)
        return self._attention_residuals(x, states, block, taps, self.config.attn_res_block_size)

    def _residual(
        self,
        x: Tensor,
        states: list[KDAState | LatentState] | list[None],
        block: Block | None,
        taps: TapSet | None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.decoder_layers):
            x = x + layer.attend(x, states[i], block)
            x = x + layer.transform(x)
            if taps is not None and i in taps.layer_ids:
                tapped[i] = x
        return x, tapped

    def _attention_residuals(
        self,
        x: Tensor,
        states: list[KDAState | LatentState] | list[None],
        block: Block | None,
        taps: TapSet | None,
        block_size: int,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        wanted = taps.layer_ids if taps is not None else ()
        raw = taps is not None and taps.kind == "raw_prefix"
        tapped: dict[int, Tensor] = {}
        prefix = x
        bank: list[Tensor] = []
        for i, layer in enumerate(self.decoder_layers):
            h = layer.read_attention(prefix, bank)
            if not raw and i - 1 in wanted:
                tapped[i - 1] = h
            out = layer.attend(h, states[i], block)
            if i % block_size == 0:
                bank.append(prefix)
                prefix = out
            else:
                prefix = prefix + out
            del h, out  # released before the MLP runs
            prefix = prefix + layer.transform(layer.read_mlp(prefix, bank))
            if raw and i in wanted:
                tapped[i] = prefix
        last = mix(prefix, bank, self.output_attn_res_norm, self.output_attn_res_proj)
        if not raw and len(self.layers) - 1 in wanted:
            tapped[len(self.layers) - 1] = last
        return last, tapped


class K3ForCausalLM(nn.Module):
    """The decoder with its head."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self.model = K3Model(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def tap_kinds(self) -> tuple[str, ...]:
        """The kinds of tap this model has."""
        plain = self.config.attn_res_block_size is None
        return ("residual",) if plain else ("attn_res_mixture", "raw_prefix")

    def new_cache(self, batch: int, max_length: int, storage: Storage | None = None) -> K3Cache:
        """An empty cache; ``storage`` is where its tensors live, None: in memory of its own."""
        weight = self.lm_head.weight
        return K3Cache(self.config, batch, max_length, weight.dtype, weight.device, storage)

    def forward(
        self,
        tokens: Tensor,
        cache: K3Cache | None = None,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows through the decoder.

        Args:
            tokens: [B, T] int64.
            cache: continues the requests in it; None runs whole sequences from nothing.
            valid: [B, T] bool, False at padding, on either side; None: every row is real. What
                padding rows return means nothing. Without a cache, padding on the right only.
            parents: [B, T] or [T] int64, the row of the block that each row follows, -1 for the
                committed text; a parent stands before its children. None: each row follows the one
                before it. Only with a cache and ``commit=False``.
            taps: which hidden states to return; their kind must be one of ``tap_kinds``.
            commit: False leaves the rows pending in the cache until ``cache.commit(n)``.

        Returns:
            Last hidden state after the final norm [B, T, D] (times ``lm_head`` = logits), and the
            taps side by side in ascending layer id [B, T, N D] or None.

        Raises:
            ValueError: a tap kind or layer id that this model does not have; a cache of another
            configuration; left padding or a tree without a cache; what ``cache.begin`` refuses.
        """
        self._check_taps(taps)
        if cache is not None and cache.config is not self.config and cache.config != self.config:
            raise ValueError("this cache is of a model of another configuration")
        if parents is not None:
            if cache is None:
                raise ValueError("a tree of rows needs a cache that it can stay pending in")
            block = cache.begin(tokens.shape[1], None, commit, parents, valid)
            return self._run(tokens, cache, block, taps)
        if cache is None:
            if valid is not None and not bool((valid[:, :-1] >= valid[:, 1:]).all()):
                raise ValueError("without a cache only right padding is possible")
            return self._run(tokens, None, None, taps)
        if valid is None:
            return self._run(tokens, cache, cache.begin(tokens.shape[1], None, commit), taps)
        # real rows first: inside the decoder padding stands on the right
        order = torch.argsort(~valid, dim=1, stable=True)
        block = cache.begin(tokens.shape[1], valid.sum(1), commit)
        hidden, tapped = self._run(tokens.gather(1, order), cache, block, taps)
        back = torch.argsort(order, dim=1).unsqueeze(-1)
        hidden = hidden.gather(1, back.expand_as(hidden))
        return hidden, None if tapped is None else tapped.gather(1, back.expand_as(tapped))

    def _run(
        self, tokens: Tensor, cache: K3Cache | None, block: Block | None, taps: TapSet | None
    ) -> tuple[Tensor, Tensor | None]:
        last, tapped = self.model(tokens, cache, block, taps)
        if cache is not None and block is not None:
            cache.finish(block)
        joined = None if taps is None else torch.cat([tapped[i] for i in taps.layer_ids], dim=-1)
        return self.model.norm(last), joined

    def _check_taps(self, taps: TapSet | None) -> None:
        if taps is None:
            return
        if taps.kind not in self.tap_kinds:
            raise ValueError(
                f"this model has no {taps.kind} taps; expected one of {', '.join(self.tap_kinds)}"
            )
        if taps.layer_ids[-1] >= self.config.num_hidden_layers:
            raise ValueError(
                f"tap layer id {taps.layer_ids[-1]} is out of range; "
                f"expected 0..{self.config.num_hidden_layers - 1}"
            )

    def pack_(self) -> None:
        """Fuse projections that share an input; for inference, after loading and moving."""
        for module in self.modules():
            if isinstance(module, (Packable, Experts)):
                module.pack_()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """A fresh start: normal(0, initializer_range), zero reads, spread decay rates."""
        for name, p in self.named_parameters():
            if name.endswith(("res_proj.weight", "e_score_correction_bias")):
                p.zero_()
            elif name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(1.0, 4.0, generator=generator).log())
            elif name.endswith("dt_bias"):
                p.copy_(torch.empty_like(p).uniform_(-4.0, 0.0, generator=generator))
            elif "conv1d" in name:
                bound = 1 / math.sqrt(p.shape[-1])
                p.uniform_(-bound, bound, generator=generator)
            elif p.dim() > 1:
                p.normal_(0.0, self.config.initializer_range, generator=generator)
