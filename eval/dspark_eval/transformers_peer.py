"""The yardstick for plain decoding: transformers' `generate` on a `kimi_linear` of equal shape.

A speed-up over a slow baseline means nothing. So plain decoding is itself held against the way
most people would run such a model: transformers' own Kimi-Linear, greedy `generate`, cache on, same
threads, same dtype, same number of tokens, prompts of the same lengths. The weights are random,
since speed does not depend on their values; end tokens are switched off so that the number of
tokens is fixed.

"Equal shape" is: same vocabulary, hidden size, layers and which of them are full attention, heads,
head sizes, latent ranks, dense width, experts, experts per token, shared experts. What Kimi-Linear
does not have (Attention Residuals, output gate on full attention, latent experts, SiTU) is left
out, which favours the peer. Its routed experts read the full hidden state, so their width is scaled
by latent / hidden to give an expert as many weights as the target's. Kimi-Linear takes the width of
its shared experts from the same key, so they shrink by that factor as well (by half in k3-nano),
although the target's are not latent: this favours the peer once more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark.k3.config import K3Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEER_NAME = "transformers generate (kimi_linear, equal shape)"


@dataclass(frozen=True)
class PeerTiming:
    """Decoded tokens after the first, the seconds they took, and the seconds before the first."""

    tokens: int
    decode_s: float
    prefill_s: float


class _Stopwatch:
    """A `generate` streamer that only notes when tokens come: the prompt first, then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def kimi_linear_settings(config: K3Config) -> dict[str, Any]:
    """Constructor arguments of transformers' `KimiLinearConfig` for a model of the same shape."""
    layers = range(config.num_hidden_layers)
    expert_width = config.moe_intermediate_size * config.expert_width / config.hidden_size
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": max(1, round(expert_width)),
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "num_local_experts": max(1, config.num_experts),
        "num_experts_per_tok": max(1, config.num_experts_per_token),
        "n_shared_experts": max(1, config.num_shared_experts),
        # explicit on purpose: the class default places full attention elsewhere
        "layer_types": [
            "full_attention" if config.is_full_attention(i) else "linear_attention" for i in layers
        ],
        "mlp_layer_types": ["sparse" if config.is_moe(i) else "dense" for i in layers],
        "linear_num_heads": config.kda_num_heads,
        "linear_head_dim": config.kda_head_dim,
        "linear_conv_kernel_dim": config.kda_conv_size,
        "linear_attn_config": {
            "num_heads": config.kda_num_heads,
            "head_dim": config.kda_head_dim,
            "short_conv_kernel_size": config.kda_conv_size,
            "full_attn_layers": [i + 1 for i in layers if config.is_full_attention(i)],
            "kda_layers": [i + 1 for i in layers if not config.is_full_attention(i)],
        },
        # the class defaults lie outside a small vocabulary
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from announcing, amid our table, which kernel packages are missing."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class TransformersPeer:
    """A random `kimi_linear` model of the target's shape and the time its `generate` takes."""

    def __init__(
        self, config: K3Config, *, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        from transformers import KimiLinearConfig, KimiLinearForCausalLM

        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            model = KimiLinearForCausalLM(KimiLinearConfig(**kimi_linear_settings(config)))
        self.model: PreTrainedModel = model.to(device=device, dtype=dtype).eval()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.vocab_size = config.vocab_size

    @torch.inference_mode()
    def measure(self, prompt_length: int, n_tokens: int, *, seed: int = 0) -> PeerTiming:
        """Generate exactly `n_tokens` greedily after `prompt_length` random tokens."""
        device = self.model.device
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(self.vocab_size, (1, prompt_length), generator=generator).to(device)
        watch = _Stopwatch()
        start = time.perf_counter()
        with _quiet():
            answer = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=n_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                streamer=watch,
            )
        if answer.shape[1] != prompt_length + n_tokens:
            raise RuntimeError(f"expected {n_tokens} tokens, got {answer.shape[1] - prompt_length}")
        first, last = watch.times[1], watch.times[-1]
        return PeerTiming(tokens=n_tokens - 1, decode_s=last - first, prefill_s=first - start)
