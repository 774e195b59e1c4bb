"""The parts of a transformers causal LM: embedding, decoder with its layers, and what makes logits.

    hidden = decoder(tokens)          after the final norm
    logits = cap * tanh(scale * (W hidden + b) / cap)

Scale and cap are what Granite (1 / logits_scaling), Cohere (logit_scale), Falcon H1
(lm_head_multiplier) and Gemma (final_logit_softcapping) put behind the matrix; most models have
neither. `dspark.runtime.hf_check` compares the outcome with the model's own logits, so that an
architecture with another rule is refused and not approximated.

A tap is the residual stream after a layer, read where the layer returns it.
Letters: B batch, T rows, D hidden, V vocabulary, N taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dspark.errors import UserError
from dspark.taps import TapSet

_SCALES: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1.0 / value,
    "logit_scale": lambda value: value,
    "lm_head_multiplier": lambda value: value,
}
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_CACHE_WORDS = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True)
class HeadRule:
    """What follows the LM head's matrix."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> HeadRule:
        """Read from a model's configuration."""
        scale = 1.0
        for key, rule in _SCALES.items():
            value = getattr(config, key, None)
            if isinstance(value, int | float):
                scale *= rule(float(value))
        caps = [getattr(config, key, None) for key in _CAPS]
        cap = next((float(value) for value in caps if value), None)
        return cls(scale, cap)

    def __call__(self, logits: Tensor) -> Tensor:
        """Any shape -> the same, float32."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class HFModel:
    """A causal LM of transformers taken apart. Frozen and in evaluation mode from here on.

    Raises UserError for a model that lacks one of the parts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config(decoder=True)
        self.kind = str(model.config.model_type)
        if model.config.is_encoder_decoder:
            raise UserError(f"{self.kind}: an encoder-decoder model reads its prompt elsewhere")
        self.decoder = model.base_model
        if self.decoder is model:
            raise UserError(f"{self.kind}: {type(model).__name__} has no LM head of its own")
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers, self.kind)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Module):
            raise UserError(f"{self.kind}: expected an embedding and a linear LM head")
        self.embed: Callable[[Tensor], Tensor] = embedding
        self.table_size = int(embedding.weight.shape[0])  # type: ignore[index]
        width = int(embedding.weight.shape[1])  # type: ignore[index]
        self.hidden_size = int(head.in_features)
        if not width == self.hidden_size == self.config.hidden_size:
            raise UserError(
                f"{self.kind}: embedding ({width}), layers ({self.config.hidden_size}) and LM head "
                f"({self.hidden_size}) differ in width; a drafter needs one"
            )
        self.weight: Tensor = head.weight
        self.bias: Tensor | None = head.bias
        self.rule = HeadRule.of(self.config)
        self._parameters = inspect.signature(self.decoder.forward).parameters
        self.cache_word = next((word for word in _CACHE_WORDS if word in self._parameters), None)
        if self.cache_word is None:
            raise UserError(f"{self.kind}: the model takes no cache; it can only be run whole")

    def takes(self, keyword: str) -> bool:
        """Whether the decoder's forward names this argument."""
        return keyword in self._parameters

    def logits(self, hidden: Tensor, ids: Tensor | slice) -> Tensor:
        """[..., D] -> [..., n] float32, of some rows of the head."""
        bias = None if self.bias is None else self.bias[ids]
        return self.rule(F.linear(hidden, self.weight[ids], bias))

    def run(
        self, tokens: Tensor, cache: Any, taps: TapSet | None, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T] tokens -> hidden [B, T, D] and taps [B, T, N*D]; `cache` is a transformers one.

        `given` are further arguments of the decoder's forward.
        """
        arguments: dict[str, Any] = {str(self.cache_word): cache, **given}
        with self._tapping(taps) as seen:
            out = self.decoder(input_ids=tokens, use_cache=True, return_dict=True, **arguments)
        if taps is None:
            return out.last_hidden_state, None
        return out.last_hidden_state, torch.cat([seen[i] for i in taps.layer_ids], dim=-1)

    @contextmanager
    def _tapping(self, taps: TapSet | None) -> Iterator[dict[int, Tensor]]:
        seen: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                seen[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [
            self.layers[layer].register_forward_hook(keep(layer))
            for layer in (() if taps is None else taps.layer_ids)
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


def _decoder_layers(decoder: nn.Module, count: int, kind: str) -> nn.ModuleList:
    """The list of the decoder's layers, nearest to the root. Raises UserError if there is none."""
    for _, module in sorted(decoder.named_modules(), key=lambda item: item[0].count(".")):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{kind}: found no list of {count} decoder layers to tap")
