"""`markov_code` in Triton: one launch a slot, a program owns a few channels of one row's code.

Each of them needs the whole embedding and state; the new state goes beside the old one, never over
it, because other programs may still read that. The weight (0.8 MB at R = 256 in 16 bits) is read
once a row and slot, which the L2 answers but for the first time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.markov_code import Coder
from dspark_kernels.rows_tile import tanh

exact_floats()

OWN, COLUMNS = 2, 256
"""Channels of a program, 128 programs at R = 256, and how much of a row of W it takes at a time."""


@triton.jit
def _token_before(anchor, tokens, row, slot, SLOTS: tl.constexpr):
    prev = tl.load(anchor + row, mask=slot == 0, other=0)
    return prev + tl.load(tokens + row * SLOTS + slot - 1, mask=slot > 0, other=0)


@triton.jit
def _tile(weight, own, column, weight_row, live, RANK: tl.constexpr):
    """W of rows `own` and of columns `column`, float32; 0 outside."""
    at = weight + own[:, None] * weight_row + column[None, :]
    return tl.load(at, mask=(own < RANK)[:, None] & live[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["slot"])
def _gated_kernel(
    fixed, w1, weight, anchor, tokens, codes, slot, fixed_b, fixed_k, weight_row,
    SLOTS: tl.constexpr, RANK: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    table = w1 + _token_before(anchor, tokens, row, slot, SLOTS) * RANK
    total = tl.zeros([OWN, CHUNK], tl.float32)
    for start in tl.static_range(0, RANK, CHUNK):
        r = start + tl.arange(0, CHUNK)
        w = _tile(weight, own, r, weight_row, r < RANK, RANK)
        total += w * tl.load(table + r, mask=r < RANK, other=0.0).to(tl.float32)[None, :]
    inside = own < RANK
    f = tl.load(fixed + row * fixed_b + slot * fixed_k + own, mask=inside, other=0.0)
    gate = tl.sigmoid(f.to(tl.float32) + tl.sum(total, 1))
    e = tl.load(table + own, mask=inside, other=0.0)
    code = gate * e.to(tl.float32)
    tl.store(codes + row * RANK + own, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slot"])
def _rnn_kernel(
    fixed, w1, weight, anchor, tokens, states, codes, slot, fixed_b, fixed_k, weight_row,
    SLOTS: tl.constexpr, RANK: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    table = w1 + _token_before(anchor, tokens, row, slot, SLOTS) * RANK
    old = states + (row * SLOTS + slot - 1) * RANK
    w_i, w_c = weight, weight + RANK * weight_row
    w_o = weight + 2 * RANK * weight_row
    i = tl.zeros([OWN, CHUNK], tl.float32)
    c, o = i, i
    for start in tl.static_range(0, RANK, CHUNK):
        r = start + tl.arange(0, CHUNK)
        live = r < RANK
        s = tl.load(old + r, mask=live & (slot > 0), other=0.0)[None, :]
        e = tl.load(table + r, mask=live, other=0.0).to(tl.float32)[None, :]
        i += _tile(w_i, own, r, weight_row, live, RANK) * s
        c += _tile(w_c, own, r, weight_row, live, RANK) * s
        o += _tile(w_o, own, r, weight_row, live, RANK) * s
        i += _tile(w_i, own, RANK + r, weight_row, live, RANK) * e
        c += _tile(w_c, own, RANK + r, weight_row, live, RANK) * e
        o += _tile(w_o, own, RANK + r, weight_row, live, RANK) * e
    inside = own < RANK
    f = fixed + row * fixed_b + slot * fixed_k + own
    gate = tl.sigmoid(tl.sum(i, 1) + tl.load(f, mask=inside, other=0.0).to(tl.float32))
    new = tanh(tl.sum(c, 1) + tl.load(f + RANK, mask=inside, other=0.0).to(tl.float32))
    code = tanh(tl.sum(o, 1) + tl.load(f + 2 * RANK, mask=inside, other=0.0).to(tl.float32))
    s = tl.load(old + own, mask=inside & (slot > 0), other=0.0)
    tl.store(old + RANK + own, gate * s + (1.0 - gate) * new, mask=inside)
    tl.store(codes + row * RANK + own, code.to(codes.dtype.element_ty), mask=inside)


class Codes:
    """Codes of a block, made slot by slot; `table` [B, R] holds those of the slot made last.

    Args:
        coder: How.
        w1: [V, R] table of previous tokens, contiguous.
        anchor: [B] int64.
        tokens: [B, G] int64; slot k reads those before k, which are there when it is made.
    """

    def __init__(self, coder: Coder, w1: Tensor, anchor: Tensor, tokens: Tensor) -> None:
        self._coder, self._w1, self._anchor, self._tokens = coder, w1, anchor, tokens
        (batch, slots), rank = tokens.shape, w1.shape[1]
        self.table = torch.empty(batch, rank, dtype=w1.dtype, device=w1.device)
        self._states: Tensor | None = None
        if coder.recurrent:
            self._states = torch.empty(batch, slots, rank, device=w1.device)

    def make(self, slot: int) -> None:
        """Queue the codes of one slot, behind those of all before it."""
        fixed, weight, recurrent = self._coder
        (batch, rank), slots = self.table.shape, self._tokens.shape[1]
        kernel = _rnn_kernel if recurrent else _gated_kernel
        kernel[(triton.cdiv(rank, OWN), batch)](
            fixed, self._w1, weight, self._anchor, self._tokens,
            *(() if self._states is None else (self._states,)), self.table, slot,
            fixed.stride(0), fixed.stride(1), weight.stride(0),
            SLOTS=slots, RANK=rank, OWN=OWN, CHUNK=min(COLUMNS, triton.next_power_of_2(rank)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def refuses(coder: Coder, w1: Tensor) -> str | None:
    """Why the kernels cannot take these; None: they can."""
    if coder.weight.dtype != w1.dtype:
        return f"codes by {coder.weight.dtype} from a table of {w1.dtype}"
    if coder.weight.stride(-1) != 1 or coder.fixed.stride(-1) != 1:
        return "codes whose rows are not contiguous"
    return None
