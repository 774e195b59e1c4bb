"""Answers to thousands of prompts side by side: steps of a Llama over fixed buffers.

A row's keys and values lie at its own positions, its mask is its length, its tokens are drawn by
the runtime's rule from random numbers of its own (`dspark.runtime.sampling`). So a text is that of
`generate_batch` with the same seed and index, up to the rounding of other products, and depends on
nothing beside it. What differs is the cost: no step waits for the host, a key is read once for all
heads that share it, and keys are read no further than the longest text is, up to `WIDTH`.

As many rows run at once as fit into the memory that is free; where it was not enough after all, the
batch is halved and asked again.

Letters: B rows, S slots, H key-value heads, g query heads of each, K head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

from dspark.errors import UserError
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.sampling import (
    SamplingParams,
    check_logits,
    draw_at,
    request_generator,
    to_probs,
    uniform,
)
from dspark.runtime.target import Target

WIDTH = 64
"""Slots by which the attended context grows."""
PREFILL_TOKENS = 32_768
"""Tokens of a pass that reads prompts, padding included."""
SHARE = 0.6
"""Of the free memory that a batch may fill by our count."""
VOCABULARY_BYTES = 40
"""Bytes that choosing a token takes for each id: logits, probabilities, float64 sums, copies."""
LOOK_EVERY = 16
"""Steps after which the host asks whether all texts have ended."""


def generate_wide(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    seed: int = 0,
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """New tokens of each prompt, end token included, as `generate_batch` gives them.

    Raises UserError for a target that is no Llama of transformers, BadLogits for non-finite logits
    of a prompt, and OutOfMemoryError if not even one row fits.
    """
    if not isinstance(target, HFTarget) or not isinstance(target.parts.model, LlamaForCausalLM):
        raise UserError(f"{target.name}: expected a Llama of transformers")
    numbers = list(range(len(prompts)) if indices is None else indices)
    answers: list[list[int]] = []
    size = len(prompts)
    while len(answers) < len(prompts):
        rest = prompts[len(answers) :]
        slots = max(map(len, rest)) + max_new_tokens
        size = max(1, min(size, len(rest), _fitting(target, slots)))
        chosen = slice(len(answers), len(answers) + size)
        try:
            answers += _Batch(target, prompts[chosen], max_new_tokens).run(
                sampling, seed, numbers[chosen]
            )
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size //= 2
            print(f"out of memory: {size} rows at a time from here on", flush=True)
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    return answers


def _fitting(target: HFTarget, slots: int) -> int:
    """Rows that fit into the free memory of the device; no limit on a CPU."""
    if target.device.type != "cuda":
        return 1 << 30
    free = torch.cuda.mem_get_info(target.device)[0]
    config = target.parts.config
    cache = 2 * target.num_layers * config.num_key_value_heads * config.head_dim * slots
    row = cache * target.dtype.itemsize + VOCABULARY_BYTES * target.vocab_size
    return int(SHARE * free) // row


class _Batch:
    """The buffers of some prompts on their way."""

    def __init__(self, target: HFTarget, prompts: Sequence[Sequence[int]], new: int) -> None:
        self._target, self._new = target, new
        config, device = target.parts.config, target.device
        self._heads, self._size = config.num_key_value_heads, config.head_dim
        rows, width = len(prompts), max(map(len, prompts))
        self._slots = -(-(width + new) // WIDTH) * WIDTH
        shape = (target.num_layers, 2, rows, self._heads, self._slots, self._size)
        self._cache = torch.zeros(shape, dtype=target.dtype, device=device)
        self._prompts = prompts
        self._rows = torch.arange(rows, device=device)
        self._places = torch.arange(self._slots, device=device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._ends = torch.tensor(target.end_token_ids, device=device)
        self._texts = torch.zeros(rows, new, dtype=torch.int64, device=device)
        self._done = torch.zeros(rows, dtype=torch.bool, device=device)

    @torch.inference_mode()
    def run(self, sampling: SamplingParams, seed: int, numbers: Sequence[int]) -> list[list[int]]:
        """Decode all rows to their ends."""
        device = self._target.device
        generators = [request_generator(seed, number, device) for number in numbers]
        self._uniforms = uniform((len(numbers), self._new), generators, device)
        self._sampling = sampling
        logits = self._read_prompts()
        check_logits(logits)
        self._take(logits, 0)
        del logits
        longest = max(map(len, self._prompts))
        for step in range(1, self._new):
            if step % LOOK_EVERY == 0 and bool(self._done.all()):
                break
            self._advance(step, -(-(longest + step) // WIDTH) * WIDTH)
        return [self._text(row) for row in self._texts.tolist()]

    def _text(self, row: list[int]) -> list[int]:
        ends = set(self._target.end_token_ids)
        stop = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
        return row[: stop + 1]

    def _read_prompts(self) -> Tensor:
        """Fill the buffers with the prompts; [B, V] logits after each one's last token."""
        hidden = []
        width = max(map(len, self._prompts))
        count = max(1, PREFILL_TOKENS // width)
        for start in range(0, len(self._prompts), count):
            part = self._prompts[start : start + count]
            wide = max(map(len, part))
            # padding comes after all that a row's tokens look at
            padded = [[*prompt, *[0] * (wide - len(prompt))] for prompt in part]
            tokens = torch.tensor(padded, device=self._target.device)
            read = DynamicCache()
            states, _ = self._target.parts.run(tokens, read, None, {})
            for layer, held in enumerate(read.layers):
                place = self._cache[layer, :, start : start + len(part), :, :wide]
                place[0].copy_(held.keys)
                place[1].copy_(held.values)
            last = torch.tensor([len(prompt) - 1 for prompt in part], device=tokens.device)
            rows = torch.arange(len(part), device=tokens.device)
            hidden.append(states[rows, last])
            del read, states
        return self._target.logits(torch.cat(hidden))

    def _take(self, logits: Tensor, step: int) -> None:
        """Draw every row's token of this step and write it down."""
        if self._sampling.greedy:
            self._token = logits.argmax(-1)
        else:
            probs = to_probs(logits, self._sampling, check=False)
            self._token = draw_at(probs, self._uniforms[:, step])
        self._texts[:, step] = self._token
        self._done |= (self._token.unsqueeze(1) == self._ends).any(1)

    def _advance(self, step: int, width: int) -> None:
        """Run the last tokens through the model, over the first `width` slots; draw the next."""
        parts = self._target.parts
        decoder: Any = parts.decoder
        layers: Any = parts.layers
        x = parts.embed(self._token).unsqueeze(1)
        turn = decoder.rotary_emb(x, self._lengths.unsqueeze(1))
        hidden_from = self._places[:width] > self._lengths.unsqueeze(1)
        for layer, cache in zip(layers, self._cache, strict=True):
            x = x + self._attend(
                layer.self_attn, layer.input_layernorm(x), cache, turn, hidden_from
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self._lengths += 1
        self._take(self._target.logits(decoder.norm(x).squeeze(1)), step)

    def _attend(
        self,
        attention: Any,
        x: Tensor,
        cache: Tensor,
        turn: tuple[Tensor, Tensor],
        hidden_from: Tensor,
    ) -> Tensor:
        """Attention of one new token a row: x [B, 1, D], cache [2, B, H, S, K] -> [B, 1, D]."""
        rows, size, width = len(x), self._size, hidden_from.shape[1]

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, 1, -1, size).transpose(1, 2)

        query, key = apply_rotary_pos_emb(
            heads(attention.q_proj(x)), heads(attention.k_proj(x)), *turn
        )
        for held, new in zip(cache, (key, heads(attention.v_proj(x))), strict=True):
            held[self._rows, :, self._lengths] = new.squeeze(2)
        keys, values = (held.flatten(0, 1)[:, :width] for held in cache)
        query = query.reshape(rows * self._heads, -1, size) * size**-0.5
        scores = torch.bmm(query, keys.mT).view(rows, -1, width)
        scores = scores.masked_fill(hidden_from.unsqueeze(1), -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        mixed = torch.bmm(weights.view(rows * self._heads, -1, width), values)
        out: Tensor = attention.o_proj(mixed.view(rows, 1, -1))
        return out
