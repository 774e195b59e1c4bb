"""Drafting with an EAGLE-3 layer: one pass over what was committed, then one pass a token.

The context keeps keys and values of the pairs (g_t, x_{t+1}) that the target has made true; those
of drafted slots are written behind them and overwritten by the next round, so that a rejected token
leaves nothing.

Letters: n pairs of a pass, J key heads, K head dim, D hidden, N taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.runtime.draft_head import DraftHead
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import Generators, SamplingParams
from dspark.runtime.target import Target
from dspark_eval.baselines.base import Baseline, Block, walk
from dspark_eval.baselines.eagle import EagleModel


class Pairs:
    """Keys and values [max_length, J, K], of which the first `length` are of committed pairs.

    `waiting` holds taps of committed tokens whose pair has no key yet: the token after the last of
    them may not be known.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0
        self.waiting: list[Tensor] = []

    def write(self, at: int, keys: Tensor, values: Tensor) -> None:
        """Rows [n, J, K] from place `at` on."""
        self.keys[at : at + len(keys)], self.values[at : at + len(values)] = keys, values


class Eagle(Baseline):
    """Drafts with an EAGLE-3 layer on a target's taps, embedding and LM head."""

    name = "eagle3"

    def __init__(self, model: EagleModel, target: Target) -> None:
        self.model, self.head = model, DraftHead(target, None)
        self.config, self.taps = Block(model.config.block_size), model.config.taps

    def new_context(self, batch: int, max_length: int) -> Pairs:
        del batch  # one text
        config, weight = self.model.config, self.model.fc.weight
        rows = max_length + config.block_size
        shape = (rows, config.num_key_value_heads, config.head_dim)
        return Pairs(weight.new_empty(shape), weight.new_empty(shape))

    def extend(self, context: Pairs, features: Tensor, counts: int | Tensor | None = None) -> None:
        kept = features.shape[1] if counts is None else int(counts)
        context.waiting.append(features[0, :kept])

    def read(self, context: Pairs, prompt: Sequence[int]) -> None:
        if len(prompt) > 1:
            self._commit(context, prompt)

    def propose(
        self,
        context: Pairs,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        state = self._commit(context, text)
        place = context.length  # of the next slot's own pair
        first = True

        def after(token: Tensor) -> Tensor:
            nonlocal state, place, first
            if not first:
                state = self._run(context, self.head.embed(token), state, place)
                place += 1
            first = False
            return self.head.logits(self.model.norm(state))

        anchor = torch.tensor([text[-1]], device=state.device)
        return walk(after, anchor, length, sampling, generator)

    def _commit(self, context: Pairs, text: Sequence[int]) -> Tensor:
        """Write every pair that `text` completes; the output [1, D] of the last one."""
        taps = torch.cat(context.waiting)
        count = len(text) - 1 - context.length
        tokens = torch.tensor(text[context.length + 1 :], device=taps.device)
        context.waiting = [taps[count:]]
        states = self.model.fused(taps[:count])
        out = self._run(context, self.head.embed(tokens), states, context.length)
        context.length += count
        return out[-1:]

    def _run(self, context: Pairs, embeds: Tensor, states: Tensor, place: int) -> Tensor:
        """The layer over n pairs [n, D] from `place` on, each seeing those before it and itself."""
        model, layer = self.model, self.model.midlayer
        states = states.to(model.fc.weight.dtype)
        z = layer.inputs(embeds.to(states.dtype), states)
        count = len(z)
        positions = torch.arange(place, place + count, device=z.device)
        context.write(place, *model.keys(z, positions))
        attention, total = layer.self_attn, place + count
        query = model.query(z, positions)
        keys, values = (
            attention.spread(kept[:total]).transpose(0, 1)
            for kept in (context.keys, context.values)
        )
        seen = torch.arange(total, device=z.device) <= positions[:, None]
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen
        )
        return layer.output(states, mixed[0].transpose(0, 1))
