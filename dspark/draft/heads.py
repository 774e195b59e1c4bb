"""The two small heads on top of the backbone.

    sequential:  logits of slot k += W2 u_k, where e_k = W1[x_{k-1}] and the code u_k is
        vanilla  e_k
        gated    sigmoid(W_g [h_k ; e_k] + b_g) * e_k
        rnn      tanh(o_k), with [i_k ; c_k ; o_k] = W_j [s_{k-1} ; e_k ; h_k] + b_j,
                 s_k = sigmoid(i_k) * s_{k-1} + (1 - sigmoid(i_k)) * tanh(c_k), s_{-1} = 0
    confidence:  logit_k = w . [h_k ; e_k] + b, the chance that slot k is accepted

Both look at the token before the slot and never at the token drawn in it, so a decision taken on
the confidence of slot k leaves sampling lossless. The code of the rnn knows all tokens of the block
before the slot, that of the others only the last. (DSpark paper; tensor names are DeepSpec's.)

Letters: V vocabulary, R rank, D hidden, G slots of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
from dspark.draft.config import DraftConfig


class SequentialHead(nn.Module):
    """What every sequential head has: a table of the previous token and a map from code to bias.

    A subclass says how a slot's code follows from the tokens before it: `codes` for all slots of a
    block in training, `step` for one slot in drafting, `coder` for a walk on the device.

    Args:
        vocab: V, rows of the table of previous tokens: always the target's ids.
        rank: R.
        draft_vocab: V', width of the bias; None: V.

    Attributes:
        plain: Whether a slot's code is the embedding of the token before it.
    """

    plain = False

    def __init__(self, vocab: int, rank: int, draft_vocab: int | None = None) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab or vocab, bias=False)

    def embed(self, prev: Tensor) -> Tensor:
        """Embedding of the previous tokens, for the confidence head: ids [...] -> [..., R]."""
        return self.markov_w1(prev)

    def bias(self, code: Tensor) -> Tensor:
        """Logit bias of codes: [..., R] -> [..., V']."""
        return self.markov_w2(code)

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Codes of whole blocks under teacher forcing.

        Args:
            prev: [..., G] int64, the token before each slot, ids of the target.
            hidden: [..., G, D] final-normed states of the slots.

        Returns:
            [..., G, R]; slot k depends on slots up to k only.
        """
        raise NotImplementedError

    def start(self, batch: int) -> Tensor | None:
        """State before the first slot of `batch` blocks; None for a head without one."""
        del batch
        return None

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Code of the next slot: prev [B], hidden [B, D], state -> code [B, R], new state."""
        raise NotImplementedError

    def coder(self, hidden: Tensor) -> ops.Coder | None:
        """What `ops.markov_sample` makes codes by, given states [B, G, D] of a block's slots.

        None for a head whose code is the embedding of the token before.
        """
        raise NotImplementedError


class VanillaMarkovHead(SequentialHead):
    """First-order head: a rank-R logit bias that depends on the previous token alone."""

    plain = True

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        del hidden
        return self.markov_w1(prev)

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        del hidden
        return self.markov_w1(prev), state

    def coder(self, hidden: Tensor) -> None:
        del hidden


class GatedMarkovHead(SequentialHead):
    """First-order head whose code is gated, channel by channel, by what the backbone sees.

    Where the backbone already knows the slot's token, the gate can take the bias away.

    Args:
        vocab, rank, draft_vocab: As of `SequentialHead`.
        hidden: D.
    """

    def __init__(self, vocab: int, rank: int, hidden: int, draft_vocab: int | None = None) -> None:
        super().__init__(vocab, rank, draft_vocab)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        embed = self.markov_w1(prev)
        inputs = torch.cat((hidden.to(embed.dtype), embed), -1)
        return self.gate_proj(inputs).sigmoid() * embed

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.codes(prev, hidden), state

    def coder(self, hidden: Tensor) -> ops.Coder:
        weight, width = self.gate_proj.weight, hidden.shape[-1]
        fixed = F.linear(hidden.to(weight.dtype), weight[:, :width], self.gate_proj.bias)
        return ops.Coder(fixed, weight[:, width:], recurrent=False)


class RNNHead(SequentialHead):
    """A gated recurrence over the tokens of the block, in R channels.

    Args:
        vocab, rank, draft_vocab: As of `SequentialHead`.
        hidden: D.
    """

    def __init__(self, vocab: int, rank: int, hidden: int, draft_vocab: int | None = None) -> None:
        super().__init__(vocab, rank, draft_vocab)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        # What does not depend on the state is done for all slots at once; the loop is left with
        # one narrow product a slot.
        embed = self.markov_w1(prev)
        rank = embed.shape[-1]
        inputs = torch.cat((embed, hidden.to(embed.dtype)), -1)
        weight = self.joint_proj.weight
        fixed = F.linear(inputs, weight[:, rank:], self.joint_proj.bias)
        state = torch.zeros_like(embed[..., 0, :])
        outputs = []
        for slot in fixed.unbind(-2):
            state, output = _recur(slot + F.linear(state, weight[:, :rank]), state)
            outputs.append(output)
        return torch.stack(outputs, -2)

    def start(self, batch: int) -> Tensor:
        """Zeros [B, R]: every block starts without a memory of earlier ones."""
        weight = self.joint_proj.weight
        return weight.new_zeros(batch, self.markov_w1.embedding_dim)

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if state is None:
            raise ValueError("the rnn head has a state: begin every block with start()")
        inputs = torch.cat((state, self.markov_w1(prev), hidden.to(state.dtype)), -1)
        state, output = _recur(self.joint_proj(inputs), state)
        return output, state

    def coder(self, hidden: Tensor) -> ops.Coder:
        weight, inputs = self.joint_proj.weight, 2 * self.markov_w1.embedding_dim
        fixed = F.linear(hidden.to(weight.dtype), weight[:, inputs:], self.joint_proj.bias)
        return ops.Coder(fixed, weight[:, :inputs], recurrent=True)


def _recur(joint: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """New state and code from [gate ; candidate ; output] [..., 3R] and the state [..., R]."""
    gate, candidate, output = joint.chunk(3, -1)
    # lerp(c, s, g) = c + g (s - c) = g s + (1 - g) c
    return torch.lerp(candidate.tanh(), state, gate.sigmoid()), output.tanh()


class ConfidenceHead(nn.Module):
    """One linear unit that predicts the conditional acceptance of a slot.

    Args:
        hidden: D.
        rank: R of the previous-token embedding it also reads, or 0 to read the hidden state alone.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, hidden: Tensor, prev_embed: Tensor) -> Tensor:
        """Logits of acceptance, before any calibration.

        Args:
            hidden: [..., D] final-normed backbone output of the slot.
            prev_embed: [..., R] from `SequentialHead.embed`, whatever the type of the head; not
                read when this head has rank 0.

        Returns:
            [...] in fp32: a sigmoid near 0 or 1 has no room in a half precision.
        """
        inputs = torch.cat((hidden, prev_embed.to(hidden.dtype)), -1) if self.rank else hidden
        wide = torch.promote_types(inputs.dtype, torch.float32)
        weight, bias = self.proj.weight.to(wide), self.proj.bias.to(wide)
        return F.linear(inputs.to(wide), weight, bias).squeeze(-1)


def sequential_head(config: DraftConfig) -> SequentialHead:
    """A fresh head of the type that the configuration names."""
    vocab, rank, draft_vocab = config.vocab_size, config.markov_rank, config.draft_vocab_size
    if config.markov_head_type == "gated":
        return GatedMarkovHead(vocab, rank, config.hidden_size, draft_vocab)
    if config.markov_head_type == "rnn":
        return RNNHead(vocab, rank, config.hidden_size, draft_vocab)
    return VanillaMarkovHead(vocab, rank, draft_vocab)
