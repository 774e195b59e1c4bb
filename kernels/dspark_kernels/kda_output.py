"""A KDA layer from its packed product to its output projection: `kda_decode` and `linear_rows`.

    out = kda_decode(..) W^T + residual

Of one row that counts at once this is two launches that share what neither can do alone: the norm
of a head, a factor of its columns, is applied inside the projection.

Letters as in `kda_decode`, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.kda_decode import kda_decode
from dspark_kernels.linear_rows import linear_rows


def kda_output(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    state: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    lower_bound: float | None,
    second: Tensor | None,
    weight: Tensor,
    residual: Tensor | None = None,
    soon: Tensor | None = None,
) -> Tensor:
    """One row of each sequence, accepted already, through layer and projection.

    Args:
        rows, decay, beta, gate, held_rows, state, conv, A_log, dt_bias, norm, eps, lower_bound,
            second: as of `kda_decode`, T = 1 and R = 0.
        weight: [D, H V] in the dtype of ``rows``.
        residual: [B, D], added; never written.
        soon: as of `linear_rows`.

    Returns:
        [B, D] in that dtype.
    """
    decays, betas = (rows.new_empty(len(rows), 0, n) for n in (len(dt_bias), len(A_log)))
    accepted = rows.new_zeros(len(rows)).long()
    y = kda_decode(
        rows, decay, beta, gate, held_rows, decays, betas, accepted, state, conv, A_log, dt_bias,
        norm, eps, lower_bound, fold=True, second=second,
    )  # fmt: skip
    return linear_rows(y.flatten(0, 1), weight, residual=residual, soon=soon)
