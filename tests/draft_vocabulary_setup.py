"""A toy drafter over a few of its target's ids."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.runtime.k3_target import K3Target
from dspark.runtime.sampling import SamplingParams
from tests.toy_target import ToyTarget

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)


IDS = torch.tensor([2, 3, 11, 12, 40, 63])
"""Of the toy target's 64: neighbours, gaps and the last one, neither 0 nor the end token 1."""


def toy_drafter(target: ToyTarget, head: str = "vanilla", **changes: object) -> DSparkDrafter:
    torch.manual_seed(0)
    config = DraftConfig(
        hidden_size=target.hidden_size, num_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, vocab_size=target.table_size,
        num_target_layers=target.num_layers, target_layer_ids=(0, 2), target_tap_kind="residual",
        mask_token_id=0, block_size=4, markov_rank=4, markov_head_type=head,
    )  # fmt: skip
    drafter = DSparkDrafter(replace(config, **changes))
    with torch.no_grad():  # recognisable rows: the bias is as large as the logits
        drafter.markov_head.markov_w1.weight.normal_(0, 2.0)
        drafter.markov_head.markov_w2.weight.normal_(0, 2.0)
    return drafter


def hand_logits(
    drafter: DSparkDrafter, head: Tensor, hidden: Tensor, text: list[int]
) -> list[Tensor]:
    """[V'] float64 logits of every slot, tensor by tensor: `text` is the anchor and what follows.

    Written from the formulas of the heads, with a full-width LM head of which rows are taken last.
    """
    names = {n: t.double() for n, t in drafter.markov_head.state_dict().items()}
    rank, ids = names["markov_w1.weight"].shape[1], drafter.draft_ids
    state, rows = torch.zeros(rank, dtype=torch.float64), []
    for slot, token in enumerate(text):
        h, e = hidden[slot].double(), names["markov_w1.weight"][token]
        code = e
        if "gate_proj.weight" in names:
            z = names["gate_proj.weight"] @ torch.cat((h, e)) + names["gate_proj.bias"]
            code = e / (1 + torch.exp(-z))
        if "joint_proj.weight" in names:
            z = names["joint_proj.weight"] @ torch.cat((state, e, h)) + names["joint_proj.bias"]
            gate = 1 / (1 + torch.exp(-z[:rank]))
            state = gate * state + (1 - gate) * torch.tanh(z[rank : 2 * rank])
            code = torch.tanh(z[2 * rank :])
        logits = head.double() @ h
        rows.append((logits if ids is None else logits[ids]) + names["markov_w2.weight"] @ code)
    return rows


def bigram_drafter(target: K3Target, text: list[int]) -> DSparkDrafter:
    """A drafter whose table knows which token of a text follows which, so it is often right."""
    torch.manual_seed(1)
    drafter = DSparkDrafter(
        DraftConfig(
            hidden_size=target.hidden_size, num_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, intermediate_size=48,
            vocab_size=target.table_size, num_target_layers=target.num_layers,
            target_layer_ids=(1, 3), target_tap_kind="attn_res_mixture", mask_token_id=0,
            block_size=4, markov_rank=64,
        )
    )  # fmt: skip
    first, second = (drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight)
    with torch.no_grad():
        drafter.norm.weight.mul_(0.01)
        first.copy_(torch.nn.functional.normalize(torch.randn_like(first), dim=-1))
        second.zero_()
        for before, after in pairwise(text):
            second[after] += 5.0 * first[before]
    return drafter
