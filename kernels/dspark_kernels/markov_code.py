"""The code of a slot where it is more than the embedding of the token before it.

    e_k = W_1[x_{k-1}]                                        x_0 = anchor
    gated   u_k = sigmoid(f_k + W e_k) * e_k
    rnn     [i ; c ; o] = f_k + W [s_{k-1} ; e_k]             s_0 = 0
            s_k = sigmoid(i) * s_{k-1} + (1 - sigmoid(i)) * tanh(c),   u_k = tanh(o)

f_k is what the hidden state of the slot says, bias included: no token changes it, so it is there
for all slots before the first is drawn. `markov_sample` makes a code per slot and adds W_2 u_k.

Letters: B batch, G slots, R rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Coder(NamedTuple):
    """How codes are made of one block's tokens.

    fixed      [B, G, R], or [B, G, 3R] with a state, f of every slot
    weight     [R, R], or [3R, 2R] with a state, W in the dtype of W_1; any strides with the last 1
    recurrent  whether there is a state
    """

    fixed: Tensor
    weight: Tensor
    recurrent: bool


def code(
    coder: Coder, slot: int, embed: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Code of one slot.

    Args:
        embed: [B, R], e of the slot.
        state: [B, R] as the slot before left it, in the dtype of the result; None: s_0.

    Returns:
        The code [B, R] in the dtype of ``embed``, and the new state in float32 or wider (None where
        there is none), in which all is computed.
    """
    wide = torch.promote_types(embed.dtype, torch.float32)
    e, weight, fixed = embed.to(wide), coder.weight.to(wide), coder.fixed[:, slot].to(wide)
    if not coder.recurrent:
        return ((fixed + F.linear(e, weight)).sigmoid() * e).to(embed.dtype), None
    state = torch.zeros_like(e) if state is None else state
    gate, candidate, output = (fixed + F.linear(torch.cat((state, e), -1), weight)).chunk(3, -1)
    gate = gate.sigmoid()
    state = gate * state + (1 - gate) * candidate.tanh()
    return output.tanh().to(embed.dtype), state


def moved_bytes(rank: int, slots: int, itemsize: int, recurrent: bool) -> int:
    """Of one block: W once per slot."""
    return slots * (6 if recurrent else 1) * rank * rank * itemsize
