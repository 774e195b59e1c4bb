"""One step of KDA at K3's heads, 96 of 128 x 128, beside fla.

`step` is like with like: the recurrence with norms, gate and beta inside, states written after the
last row. `decode` is all that a layer does between its projections: convolution, accepted rows of
the last round, new rows, norm and output gate; fla's side of it is what it takes there, a launch
for each: convolution, recurrence over accepted and over new rows, gated norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from dspark_kernels import kda_decode
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.kda_decode_triton import kda_decode as decode
from dspark_kernels.kda_step_triton import gated_step

HEADS, WIDTH, TAPS, BOUND, EPS = 96, 128, 4, -5.0, 1e-5
STEPS = [(1, 1), (1, 8), (64, 1), (64, 8)]  # sequences, rows
ROUNDS = [(1, 1, 1), (1, 8, 7), (1, 8, 1), (64, 8, 7)]  # sequences, new rows, accepted ones


def cases() -> Iterator[Case]:
    for batch, rows in STEPS:
        yield Case(
            f"step, {batch} x {rows} rows",
            *step_cost(batch, rows),
            partial(_step, batch, rows),
            partial(_fla_step, batch, rows),
            "fla 0.6.0",
        )
    for batch, rows, accepted in ROUNDS:
        yield Case(
            f"decode, {batch} x ({accepted} accepted, {rows} new)",
            *kda_decode.cost(batch, rows, accepted, HEADS, WIDTH, WIDTH, TAPS),
            partial(_round, batch, rows, accepted),
            partial(_fla_round, batch, rows, accepted),
            "fla 0.6.0, unfused",
        )


def step_cost(batch: int, rows: int) -> tuple[int, int]:
    """Bytes and operations: state in and out, rows in bfloat16, outputs in float32."""
    each = HEADS * (2 * 4 * WIDTH * WIDTH + rows * (2 * (4 * WIDTH + 1) + 4 * WIDTH))
    return batch * each, batch * HEADS * rows * 6 * WIDTH * WIDTH


def _bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _rows(batch: int, rows: int) -> tuple[Tensor, ...]:
    """q, k, v, decay, beta, A_log, dt_bias, state."""
    q, k, v, a = (_bf16(batch, rows, HEADS, WIDTH) for _ in range(4))
    A_log, dt = torch.rand(HEADS, device="cuda"), torch.randn(HEADS * WIDTH, device="cuda")
    state = torch.randn(batch, HEADS, WIDTH, WIDTH, device="cuda")
    return q, k, v, a, _bf16(batch, rows, HEADS), A_log, dt, state


def _step(batch: int, rows: int) -> Thunk:
    q, k, v, a, b, A_log, dt, state = _rows(batch, rows)
    return partial(gated_step, q, k, v, a, b, A_log, dt, state, rows, out=state, lower_bound=BOUND)


def _fla_recurrence(rows: Sequence[Tensor], last: bool = True) -> tuple[Tensor, Tensor]:
    fused_recurrent_kda = import_module("fla.ops.kda").fused_recurrent_kda
    q, k, v, a, b, A_log, dt, state = rows
    out: tuple[Tensor, Tensor] = fused_recurrent_kda(
        q, k, v, a, b, A_log=A_log, dt_bias=dt, initial_state=state, output_final_state=last,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        lower_bound=BOUND,
    )  # fmt: skip
    return out


def _fla_step(batch: int, rows: int) -> Thunk:
    import_module("fla.ops.kda")  # missing is said before anything is timed
    return partial(_fla_recurrence, _rows(batch, rows))


def _round(batch: int, rows: int, accepted: int) -> Thunk:
    slots, channels = max(rows, accepted), 3 * HEADS * WIDTH
    return partial(
        decode, _bf16(batch, rows, channels), _bf16(batch, rows, HEADS * WIDTH),
        _bf16(batch, rows, HEADS), _bf16(batch, rows, HEADS * WIDTH),
        _bf16(batch, TAPS - 1 + slots, channels), _bf16(batch, slots, HEADS * WIDTH),
        _bf16(batch, slots, HEADS), torch.full((batch,), accepted, device="cuda"),
        torch.randn(batch, HEADS, WIDTH, WIDTH, device="cuda"),
        torch.randn(TAPS, channels, device="cuda"), torch.rand(HEADS, device="cuda"),
        torch.randn(HEADS * WIDTH, device="cuda"), torch.rand(WIDTH, device="cuda"), EPS, BOUND,
    )  # fmt: skip


def _fla_round(batch: int, rows: int, accepted: int) -> Thunk:
    causal_conv1d = import_module("fla.modules.causal_conv1d").causal_conv1d
    rms_norm_gated = import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    channels, all_rows = 3 * HEADS * WIDTH, accepted + rows
    raw, window = _bf16(batch, all_rows, channels), _bf16(batch, channels, TAPS)
    taps, gate = _bf16(channels, TAPS), _bf16(batch, rows, HEADS, WIDTH)
    norm = torch.rand(WIDTH, device="cuda")
    _, _, _, a, b, A_log, dt, state = _rows(batch, all_rows)

    def run() -> Tensor:
        x, _ = causal_conv1d(raw, taps, initial_state=window, activation="silu")
        q, k, v = x.view(batch, all_rows, 3, HEADS, WIDTH).unbind(2)
        old, new = zip(*(y.split((accepted, rows), 1) for y in (q, k, v, a, b)), strict=True)
        _, end = _fla_recurrence((*old, A_log, dt, state))
        out, _ = _fla_recurrence((*new, A_log, dt, end), last=False)
        y: Tensor = rms_norm_gated(out, gate, norm, None, activation="sigmoid", eps=EPS)
        return y

    return run
