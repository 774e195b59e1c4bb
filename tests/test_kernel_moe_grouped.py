"""Experts over more than 16 rows: sorted, cut into blocks, and each expert's rows at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark_kernels import moe_decode as plain
from dspark_kernels import moe_grouped_triton as kernel
from dspark_kernels.linear_rows import activate, normed
from dspark_kernels.linear_rows_triton import Plan
from dspark_kernels.moe_decode import MoE
from dspark_kernels.moe_grouped_triton import BlockPlan
from dspark_kernels.mxfp4 import dequantise
from tests.test_kernel_moe_decode import DEVICE, EPS, ROUNDING, _random, _rows

NEAR = 4e-3
"""Of two scores that bfloat16's rounding of the normed row may turn round."""


def _plan(rows: int, packed: bool = False) -> BlockPlan:
    """Few and large programs: the interpreter pays for each. Packed experts step by words."""
    cut = Plan(64, 16, 4, 2, dot=True) if packed else Plan(32, 32, 4, 2, dot=True)
    return BlockPlan(rows, 32, Plan(64, 16, 4, 2, dot=True), cut, cut)


def oracle(
    x: Tensor, moe: MoE, norm: Tensor | None, residual: Tensor | None, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """In float64, expert by expert: the layer of rows whose choice is given, and what each of all
    experts counts for in a choice, [n, E]."""
    E, L, S = moe.experts.count, moe.experts.width, moe.shared
    h = normed(x.double(), None if norm is None else norm.double(), EPS)
    inputs = moe.inputs.double()
    scores = (h @ inputs[:E].T).sigmoid()
    weights = scores.gather(1, chosen.long())
    if moe.renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    z = h @ inputs[E : E + L].T if moe.latent else h
    y = torch.zeros_like(z)
    for expert in chosen.unique().tolist():
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        w1, w3, w2 = (_expert(moe, which, expert) for which in range(3))
        out = activate(z[rows] @ w1.T, z[rows] @ w3.T, moe.situ) @ w2.T
        y.index_add_(0, rows, moe.scaling * weights[rows, place, None] * out)
    parts = [normed(y, None if moe.norm is None else moe.norm.double(), moe.norm_eps)]
    if S:
        gate, up = (h @ inputs[-2 * S :].T).chunk(2, dim=1)
        parts.append(activate(gate, up, moe.situ))
    if moe.latent:
        assert moe.outputs is not None
        parts = [torch.cat(parts, 1) @ moe.outputs.double().T]
    elif moe.outputs is not None:
        parts[1] = parts[1] @ moe.outputs.double().T
    return sum(parts) + (0 if residual is None else residual.double()), scores + moe.bias


def _expert(moe: MoE, which: int, expert: int) -> Tensor:
    weight = (moe.experts.w1, moe.experts.w3, moe.experts.w2)[which][expert]
    if moe.experts.scales is None:
        return weight.double()
    return dequantise(weight, moe.experts.scales[which][expert], torch.float32).double()


def check(
    moe: MoE, n: int, how: BlockPlan, *, normed: bool = True, adds: bool = True
) -> tuple[Tensor, Tensor]:
    """n random rows against the oracle: the choice, and every row by itself."""
    x, scale, added = _rows(n, moe.inputs.shape[1])
    norm, residual = scale if normed else None, added if adds else None
    assert kernel.refuses(x, moe, norm=norm, eps=EPS, residual=residual) is None
    found, chosen = kernel.by_blocks(x, moe, norm, EPS, residual, how)
    assert chosen.dtype == torch.int32
    assert chosen.shape == (n, moe.top_k)
    wanted, keys = oracle(x, moe, norm, residual, chosen)
    assert all(len(set(row)) == moe.top_k for row in chosen.tolist())
    best, own = keys.topk(moe.top_k).values, keys.gather(1, chosen.long())
    assert float((best - own).abs().max()) < NEAR
    off = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(off.max()) < ROUNDING
    return found, chosen


def test_the_oracle_is_the_reference() -> None:
    """More rows than the reference gathers at once, against one matrix of each expert."""
    for latent in (None, 96):
        moe = _random(64, 7, 3, 32, 48, latent=latent, packed=False)
        x, norm, residual = (t.float() for t in _rows(21, 64))
        wide = replace(
            moe,
            inputs=moe.inputs.float(),
            outputs=None if moe.outputs is None else moe.outputs.float(),
            norm=None if moe.norm is None else moe.norm.float(),
        )
        found, chosen = plain.moe_decode(x, wide, norm=norm, eps=EPS, residual=residual)
        wanted, _ = oracle(x, wide, norm, residual, chosen)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("n", "sizes", "rows"),
    [
        (17, (64, 7, 2, 32, 48), 16),
        (18, (64, 40, 1, 32, 16), 16),
        (50, (64, 6, 3, 96, 0), 32),
        (80, (96, 5, 2, 32, 32), 16),
        (33, (64, 9, 9, 64, 48), 64),
    ],
)
@pytest.mark.parametrize("latent", [None, 96])
def test_against_float64(
    n: int, sizes: tuple[int, ...], rows: int, latent: int | None, poison: None
) -> None:
    """Fewer pairs than experts, more, all, no shared expert."""
    D, E, k, inner, S = sizes
    moe = _random(D, E, k, inner, S, latent=latent, packed=False)
    check(moe, n, _plan(rows))


@pytest.mark.parametrize("seed", range(4))
def test_layers_drawn_at_random(seed: int, poison: None) -> None:
    torch.manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, ()))

    E = draw(2, 30)
    moe = _random(
        32 * draw(1, 3), E, draw(1, min(E, 6)), 32 * draw(1, 2), 16 * draw(0, 3),
        latent=None if seed % 2 else 64, packed=False,
    )  # fmt: skip
    moe = replace(moe, renormalise=bool(draw(0, 1)))
    check(moe, draw(17, 80), _plan(16 << draw(0, 2)), normed=bool(draw(0, 1)), adds=seed > 1)


@pytest.mark.parametrize("rows", [16, 32])
def test_mxfp4(rows: int, poison: None) -> None:
    moe = _random(80, 6, 3, 128, 48, latent=128, packed=True)
    check(moe, 21, _plan(rows, packed=True))


def test_an_expert_of_all_and_experts_of_nobody(poison: None) -> None:
    """NaN in the weights of experts that nobody chose: whoever reads them shows."""
    moe = _random(64, 6, 2, 32, 32, latent=None, packed=False)
    moe = replace(moe, bias=torch.tensor([-9.0, 0.0, -9.0, 9.0, 0.0, -9.0], device=DEVICE))
    for w in (moe.experts.w1, moe.experts.w3, moe.experts.w2):
        w[[0, 2, 5]] = torch.nan
    _, chosen = check(moe, 35, _plan(16))
    assert (chosen[:, 0] == 3).all()
    assert set(chosen[:, 1].tolist()) == {1, 4}


def test_blocks_of_a_choice(poison: None) -> None:
    """Every pair once, ascending within its expert, in blocks that are full but for the last."""
    for n, k, E, rows in ((17, 3, 5, 16), (70, 2, 33, 16), (40, 1, 90, 32), (300, 16, 20, 64)):
        ids = torch.rand(n, E, device=DEVICE).argsort(1)[:, :k].int()
        blocks = kernel.blocks_of(ids, E, rows)
        flat = ids.flatten()
        assert torch.equal(blocks.order.long(), flat.argsort(stable=True))
        at, table = 0, blocks.table[: int(blocks.count)].tolist()
        for expert, count in enumerate(flat.long().bincount(minlength=E).tolist()):
            for start in range(0, count, rows):
                assert table.pop(0) == [expert, at + start, at + count]
            at += count
        assert not table


def test_no_choice_makes_more_blocks_than_there_is_room_for(poison: None) -> None:
    """Four experts of 17 rows each are two blocks each: all that the table holds."""
    ids = torch.tensor([[0, 1]] * 17 + [[2, 3]] * 17, dtype=torch.int32, device=DEVICE)
    blocks = kernel.blocks_of(ids, 4, 16)
    assert int(blocks.count) == len(blocks.table) == 8
    alone = kernel.blocks_of(ids[:17], 4, 16)
    assert int(alone.count) == 4 < len(alone.table)


def test_company_and_order_change_no_bit_of_a_row(poison: None) -> None:
    moe = _random(64, 7, 2, 32, 48, latent=96, packed=False)
    x, norm, residual = _rows(60, 64)
    found, chosen = kernel.by_blocks(x, moe, norm, EPS, residual, _plan(16))
    again, _ = kernel.by_blocks(x, moe, norm, EPS, residual, _plan(16))
    assert torch.equal(found, again)
    other = torch.randperm(60, device=DEVICE)[:32]
    moved, ids = kernel.by_blocks(x[other], moe, norm, EPS, residual[other], _plan(16))
    assert torch.equal(ids, chosen[other])
    assert torch.equal(moved, found[other])


def test_a_row_of_nan_harms_no_other() -> None:
    moe = _random(64, 6, 2, 32, 32, latent=None, packed=False)
    x, norm, _ = _rows(20, 64)
    wanted, _ = kernel.by_blocks(x, moe, norm, EPS, None, _plan(16))
    x[7] = torch.nan
    found, chosen = kernel.by_blocks(x, moe, norm, EPS, None, _plan(16))
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert found[7].isnan().all()
    others = torch.arange(20, device=DEVICE) != 7
    assert torch.equal(found[others], wanted[others])


def test_how_blocks_are_cut() -> None:
    """By rows per expert, and in steps that divide every size."""

    def plan(n: int, E: int, k: int) -> BlockPlan:
        return kernel.block_plan(n, _random(96, E, k, 32, 16, latent=160, packed=False))

    assert [plan(n, 64, 8).rows for n in (17, 64, 65, 999)] == [32, 32, 64, 64]
    packed = _random(96, 64, 8, 32, 16, latent=160, packed=True)
    assert [kernel.block_plan(n, packed).rows for n in (32, 33, 999)] == [16, 32, 32]
    for rows in (32, 64):
        how = kernel.plan_of(200, _random(96, 4, 2, 64, 16, latent=160, packed=False), rows)
        assert (how.gate_up.step, how.down.step) == (32, 64)


def test_the_op_takes_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "triton")
    monkeypatch.setattr(kernel, "block_plan", lambda n, moe: _plan(16))
    ops.forget()
    moe = _random(64, 5, 2, 32, 16, latent=None, packed=False)
    x, norm, residual = _rows(40, 64)
    found, chosen = ops.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    wanted, ids = kernel.by_blocks(x, moe, norm, EPS, residual, _plan(16))
    assert torch.equal(found, wanted)
    assert torch.equal(chosen, ids)
    assert ops.ran()["moe_decode"] == "triton"


def test_few_rows_are_not_sorted() -> None:
    moe = _random(64, 5, 2, 32, 16, latent=None, packed=False)
    x, norm, residual = _rows(3, 64)
    found, _ = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    wanted, _ = kernel.few.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    assert torch.equal(found, wanted)


def test_what_the_kernel_refuses() -> None:
    moe = _random(64, 5, 2, 32, 16, latent=None, packed=False)
    x, norm, residual = _rows(70, 64)
    assert kernel.refuses(x, moe, norm=norm, eps=EPS, residual=residual) is None
    assert "float32" in str(kernel.refuses(x.float(), moe))
    assert "dtype" in str(kernel.refuses(x, moe, residual=residual.half()))
    assert "contiguous" in str(kernel.refuses(x.T.contiguous().T, moe))
    assert "offsets" in str(kernel.refuses(x[:1].expand(2**26, 64), moe))
    narrow = _random(64, 5, 2, 32, 24, latent=None, packed=False)
    assert "width 24" in str(kernel.refuses(x, narrow))
    packed = _random(64, 5, 2, 32, 16, latent=96, packed=True)
    assert "128" in str(kernel.refuses(x, packed))
    assert kernel.refuses(x[:16], packed) is None
