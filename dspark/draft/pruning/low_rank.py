"""The vanilla head at a lower rank: its bias table W1 W2^T, cut by SVD.

    W1 W2^T = U S V^T    ->    W1' = U_r S_r^1/2,   W2' = V_r S_r^1/2

No table of rank r is nearer in the Frobenius norm (Eckart and Young 1936), so this is never worse
than leaving out columns. The SVD of the [V, V'] table is that of R1 R2^T, from QR of both factors;
the table itself is never formed. The confidence head, which reads rows of W1, gets the weights that
are nearest to its own on the new rows.

Letters: V vocabulary, V' draft vocabulary, R rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.graph import assembled

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"


def lower_rank(drafter: DSparkDrafter, rank: int) -> DSparkDrafter:
    """A copy of a drafter with a vanilla head whose bias has rank `rank`, in float64 meanwhile.

    Raises ValueError for another kind of head, or a rank that is not 1..R.
    """
    config = drafter.config
    if config.markov_head_type != "vanilla":
        raise ValueError(f"a {config.markov_head_type} head is no product of two matrices")
    if not 1 <= rank <= config.markov_rank:
        raise ValueError(f"rank {rank}: expected 1..{config.markov_rank}")
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    if rank < config.markov_rank:
        w1, w2 = tensors[W1].double(), tensors[W2].double()
        first, second = best_factors(w1, w2, rank)
        tensors[W1], tensors[W2] = first.to(tensors[W1]), second.to(tensors[W2])
        if config.enable_confidence_head and config.confidence_head_with_markov:
            weight, width = tensors[CONFIDENCE], config.hidden_size
            read = w1 @ weight[:, width:].double().t()
            nearest = torch.linalg.lstsq(first, read, driver="gelsd" if first.is_cpu else None)
            parts = (weight[:, :width], nearest.solution.t().to(weight))
            tensors[CONFIDENCE] = torch.cat(parts, 1)
    return assembled(drafter, tensors, replace(config, markov_rank=rank))


def best_factors(w1: Tensor, w2: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """W1' [V, rank] and W2' [V', rank] whose product is nearest to w1 [V, R] times w2 [V', R]^T."""
    q1, r1 = torch.linalg.qr(w1)
    q2, r2 = torch.linalg.qr(w2)
    u, s, v = torch.linalg.svd(r1 @ r2.t())
    root = s[:rank].sqrt()
    return q1 @ (u[:, :rank] * root), q2 @ (v[:rank].t() * root)
