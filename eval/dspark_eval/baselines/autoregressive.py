"""A small causal LM that drafts token by token: speculative decoding as it began.

    x_k ~ q_k = draft model(text, x_1..x_{k-1})

The model is any target that can be opened (`load_target`) and has the same vocabulary; it keeps a
cache of its own, of the committed tokens before the anchor. The first pass of a round reads what
was committed since the last one and the anchor; pass k reads [anchor, x_1..x_{k-1}] again, as
pending rows that are taken back. That needs nothing a target does not have (recurrent ones take
back rows too) and g passes a round, each of which reads the model's weights once.

(Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al.
2023, "Accelerating Large Language Model Decoding with Speculative Sampling".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.prefill import read_prompt
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import Generators, SamplingParams
from dspark.runtime.target import Cache, Target
from dspark_eval.baselines.base import Baseline, Block, walk


@dataclass(eq=False)
class Read:
    """The draft model's cache and how many tokens of the text it holds."""

    cache: Cache
    length: int = 0


class Autoregressive(Baseline):
    """Drafts with a causal LM. Raises UserError if its vocabulary is not the target's.

    Args:
        model: The draft model.
        target: Whose tokens it proposes.
        block_size: Longest proposal.
    """

    name = "ar"

    def __init__(self, model: Target, target: Target, block_size: int) -> None:
        if model.vocab_size != target.vocab_size:
            raise UserError(
                f"draft model {model.name}: has {model.vocab_size} tokens, target {target.name} "
                f"{target.vocab_size}; a model with the target's tokenizer is needed"
            )
        self.model, self.config = model, Block(block_size)

    def new_context(self, batch: int, max_length: int) -> Read:
        return Read(self.model.new_cache(batch, max_length))

    def read(self, context: Read, prompt: Sequence[int]) -> None:
        read_prompt(self.model, context.cache, prompt)
        context.length = len(prompt)

    def propose(
        self,
        context: Read,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        new = torch.tensor([text[context.length :]], device=self.model.device)
        rows: list[Tensor] = []

        def after(token: Tensor) -> Tensor:
            rows.append(token)
            first = len(rows) == 1
            read = new if first else torch.stack(rows, dim=1)
            out = self.model.forward(read, context.cache, commit=False)
            context.cache.commit(new.shape[1] - 1 if first else 0)  # never the anchor
            return self.model.logits(out.hidden[:, -1])

        anchor = new[:, -1]
        context.length = len(text) - 1
        return walk(after, anchor, length, sampling, generator)
