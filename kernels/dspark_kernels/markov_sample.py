"""The sequential head: one block of tokens, left to right, each conditioned on the one before.

    s_k(x) = base_k(x) + W_2[x] . u_k                      accumulated in float32
    u_k    = W_1[x_{k-1}],  x_0 = anchor                   or as `markov_code` makes it
    x_k    = argmax s_k, or a draw from the law of s_k     `law`
    H_k    = -sum_x q(x) ln q(x),  q = softmax(s_k)        nats, temperature 1, unfiltered
    c_k    = w . [h_k ; W_1[x_{k-1}]] + b                  the logit of the confidence

W_2 is read once per slot and nothing else of that size is: the rest of the work is on rows that
the cache holds. The scores leave with their law instead of as probabilities: `verify_sample` judges
by the same numbers. With a reduced draft vocabulary rows of W_2 and scores are draft ids, tokens
are the target's.

Letters: B batch, G slots, V' rows of the vocabulary drafted from, R rank, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_kernels.law import Law, draw, law_of, weights
from dspark_kernels.markov_code import Coder, code


class Drafted(NamedTuple):
    """One block.

    tokens      [B, G] int64, ids of the target
    scores      [B, G, V'] float32, what each was chosen from
    law         of the scores, [B, G] each; meaningless where a row's temperature is 0
    entropy     [B, G] float32 nats
    confidence  [B, G] float32, the head's raw logits; None: there is no such head
    peak        [B, G] float32, the largest score of each row: finite exactly if the row is fine
    """

    tokens: Tensor
    scores: Tensor
    law: Law
    entropy: Tensor
    confidence: Tensor | None
    peak: Tensor


def markov_sample(
    base: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    coins: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    ids: Tensor | None = None,
    hidden: Tensor | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
    coder: Coder | None = None,
) -> Drafted:
    """Walk over the slots of a block.

    Args:
        base: [B, G, V'] logits of the LM head, any float dtype. Not changed.
        anchor: [B] int64, the token before the first slot.
        w1: [V, R], table of previous tokens, ids of the target.
        w2: [V' or more, R]; rows past V' pad the table.
        coins: [B, G] float64 uniforms in [0, 1); not read where a temperature is 0.
        temperature: [B] float32, 0 is greedy; None: every row is, and coins may be None.
        top_k: [B] int64, 0 is off; None: off everywhere.
        top_p: [B] float32, 1 is off; None: off everywhere.
        ids: [V'] int64 target ids of a reduced draft vocabulary; None: V' = V.
        hidden: [B, G, D] states of the slots, read by the confidence head alone.
        confidence: That head's weight [1, D + R] or [1, D] and bias [1]; None: there is none. It
            reads embeddings, however codes are made.
        coder: Makes the codes; None: they are the embeddings.
    """
    batch, slots, width = base.shape
    cold = torch.zeros(batch, device=base.device) if temperature is None else temperature
    tokens, scores, laws, state = [anchor], [], [], None
    for k in range(slots):
        made = w1[tokens[-1]]
        if coder is not None:
            made, state = code(coder, k, made, state)
        row = base[:, k].float() + made.float() @ w2[:width].float().t()
        law = law_of(row, cold, top_k, top_p)
        token = row.argmax(-1)
        if coins is not None:
            drawn = draw(weights(row, law, cold), coins[:, k])
            token = torch.where(cold == 0, token, drawn)
        tokens.append(token if ids is None else ids[token])
        scores.append(row)
        laws.append(law)
    found = torch.stack(scores, 1)
    before = torch.stack(tokens[:-1], 1)
    return Drafted(
        tokens=torch.stack(tokens[1:], 1),
        scores=found,
        law=Law(*(torch.stack(part, 1) for part in zip(*laws, strict=True))),
        entropy=_entropy(found),
        confidence=None if confidence is None else _confidence(hidden, w1[before], *confidence),
        peak=found.amax(-1),
    )


def _entropy(scores: Tensor) -> Tensor:
    log_q = torch.log_softmax(scores, dim=-1)
    return -(log_q.exp() * log_q.clamp(min=torch.finfo(log_q.dtype).min)).sum(-1)


def _confidence(hidden: Tensor | None, embed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    assert hidden is not None, "the confidence head reads the hidden states of the slots"
    with_embed = weight.shape[-1] > hidden.shape[-1]
    inputs = torch.cat((hidden.float(), embed.float()), -1) if with_embed else hidden.float()
    return torch.nn.functional.linear(inputs, weight.float(), bias.float()).squeeze(-1)


def moved_bytes(batch: int, slots: int, vocab: int, rank: int, itemsize: int) -> int:
    """Bytes of one call: the table once per slot, logits in, scores out in float32."""
    return slots * (vocab * rank * itemsize + batch * vocab * (itemsize + 4))


def flops(batch: int, slots: int, vocab: int, rank: int) -> int:
    """Of the bias alone, a multiply and an add being two."""
    return 2 * batch * slots * vocab * rank
