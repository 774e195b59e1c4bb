"""Experts over a few rows: the reference against the model's layer, the kernel against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.k3 import mxfp4
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.moe import LatentMoE
from dspark_kernels import linear_rows_triton
from dspark_kernels import moe_decode as plain
from dspark_kernels import moe_decode_triton as kernel
from dspark_kernels import mxfp4 as plain_mxfp4
from dspark_kernels.linear_rows_triton import Plan
from dspark_kernels.moe_decode import Experts, MoE
from dspark_kernels.moe_decode_triton import MoEPlan
from tests.k3_tiny import PLAIN, TINY, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROUNDING = 8e-3
"""bfloat16 rounds to 2^-9; z, the hidden rows, the routed sum and the output are rounded."""
SITU = (4.0, 25.0)


def _random(D: int, E: int, k: int, inner: int, S: int, *, latent: int | None, packed: bool) -> MoE:
    """A layer of random weights: with a latent space K3's settings, without Kimi-Linear's."""
    L = latent or D

    def weights(*shape: int) -> Tensor:
        return (shape[-1] ** -0.5 * torch.randn(shape, device=DEVICE)).bfloat16()

    stacked = [weights(E, inner, L), weights(E, inner, L), weights(E, L, inner)]
    experts = Experts(*stacked)
    if packed:
        (w1, s1), (w3, s3), (w2, s2) = (mxfp4.quantise(w) for w in stacked)
        experts = Experts(w1, w3, w2, (s1, s3, s2))
    return plain.pack(
        weights(E, D),
        0.1 * torch.randn(E, device=DEVICE),
        experts,
        down=weights(L, D) if latent else None,
        up=weights(D, L) if latent else None,
        shared_gate_up=weights(2 * S, D) if S else None,
        shared_down=weights(D, S) if S else None,
        norm=(1 + 0.1 * torch.randn(L, device=DEVICE)).bfloat16() if latent else None,
        norm_eps=EPS,
        top_k=k,
        renormalise=True,
        scaling=1.5,
        situ=SITU if latent else None,
    )


def _double(moe: MoE) -> MoE:
    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.double()

    experts = moe.experts
    if experts.scales is None:
        experts = Experts(experts.w1.double(), experts.w3.double(), experts.w2.double())
    more = {"outputs": wide(moe.outputs), "norm": wide(moe.norm)}
    return replace(moe, inputs=moe.inputs.double(), bias=moe.bias.double(), experts=experts, **more)


def _rows(n: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = (torch.randn(n, D, device=DEVICE).bfloat16() for _ in range(2))
    return 3 * x, (1 + 0.1 * torch.randn(D, device=DEVICE)).bfloat16(), residual


def _whole_tiles(n: int, packed: bool = False, dot: bool = True) -> MoEPlan:
    """Few and large programs: the interpreter pays for each. Packed experts step by words."""
    dot = dot and n > 1
    cut = Plan(32, 4 if packed else 32, 4, 2, dot=dot, held=int(n == 1))
    return MoEPlan(Plan(64, 32, 4, 2, dot=n > 1), cut, cut)


def _check(moe: MoE, n: int, how: MoEPlan, normed: bool = True) -> Tensor:
    x, scale, residual = _rows(n, moe.inputs.shape[1])
    norm = scale if normed else None
    assert kernel.refuses(x, moe, norm=norm, eps=EPS, residual=residual) is None
    found, chosen = kernel.by_plan(x, moe, norm, EPS, residual, how)
    norm64 = None if norm is None else norm.double()
    wanted, ids = plain.moe_decode(
        x.double(), _double(moe), norm=norm64, eps=EPS, residual=residual.double()
    )
    assert torch.equal(chosen, ids)
    assert float((found.double() - wanted).norm() / wanted.norm()) < ROUNDING
    return chosen


def _packed_layer(config: K3Config, layer: LatentMoE) -> MoE:
    shared = layer.shared_experts
    return plain.pack(
        layer.gate.weight,
        layer.gate.e_score_correction_bias,
        Experts(layer.experts.w1, layer.experts.w3, layer.experts.w2),
        down=layer.routed_expert_down_proj.weight if layer.latent else None,
        up=layer.routed_expert_up_proj.weight if layer.latent else None,
        shared_gate_up=torch.cat([shared.gate_proj.weight, shared.up_proj.weight]),
        shared_down=shared.down_proj.weight,
        norm=layer.routed_expert_norm.weight if layer.normed else None,
        norm_eps=config.rms_norm_eps,
        top_k=config.num_experts_per_token,
        renormalise=config.moe_renormalize,
        scaling=config.routed_scaling_factor,
        situ=(config.situ_beta, config.situ_linear_beta) if config.hidden_act == "situ" else None,
    )


@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi-linear"])
def test_the_reference_is_the_models_layer(config: K3Config) -> None:
    model: K3ForCausalLM = tiny_model(config)
    layer = model.model.layers[3].block_sparse_moe
    x, residual = torch.randn(5, config.hidden_size), torch.randn(5, config.hidden_size)
    found, chosen = plain.moe_decode(x, _packed_layer(config, layer), residual=residual)
    torch.testing.assert_close(found, residual + layer(x[None])[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(chosen, layer.gate(x)[1].int())


def test_unpacking_is_the_checkpoints() -> None:
    """All codes at every place of a word, under all scales, NaN and the smallest included."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    rows = packed.repeat_interleave(16, 0)
    found = plain_mxfp4.dequantise(rows, scale, torch.float32)
    wanted = mxfp4.dequantise(rows, scale.contiguous(), torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n", "few"), [(1, 64), (1, 0), (3, 64)])
def test_kernel_without_a_latent_space(
    n: int, few: int, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row finds its own experts where they are few, and reads a list where they are many."""
    monkeypatch.setattr(kernel, "FEW", few)
    _check(_random(64, 7, 2, 32, 48, latent=None, packed=False), n, _whole_tiles(n))


@pytest.mark.parametrize("shared", [0, 48])
@pytest.mark.parametrize("tiles", [1, 3, 5])
def test_one_row_in_programs_of_several_tiles(shared: int, tiles: int, poison: None) -> None:
    """Shared expert and experts of other widths than a tile; 64 outputs are 2 programs of 48, or of
    80 with most of the last beyond the end."""
    wide = Plan(16, 32, 4, 1, held=2)
    how = MoEPlan(wide, wide, Plan(16, 64, 4, 1, tiles=tiles))
    _check(_random(64, 6, 2, 96, shared, latent=None, packed=False), 1, how)


@pytest.mark.parametrize(
    "sizes", [(256, 3, 3, 32, 0), (512, 4, 1, 288, 16), (256, 5, 2, 32, 96), (96, 4, 2, 32, 32)]
)
def test_one_row_by_steps_of_its_plan(sizes: tuple[int, ...], poison: None) -> None:
    """A shared expert narrower and wider than the others, none, and a row that no tiles hold."""
    D, E, k, inner, S = sizes
    moe = _random(D, E, k, inner, S, latent=None, packed=False)
    how = kernel.moe_plan(1, moe)
    assert bool(how.gate_up.held) == (D % 256 == 0)
    # larger programs than the plan's: the interpreter pays for each
    wide, narrow = replace(how.gate_up, out=32), replace(how.down, out=16, tiles=3)
    _check(moe, 1, replace(how, gate_up=wide, down=narrow))


def test_how_one_row_is_cut() -> None:
    """The measured shape, wide experts in wide programs, and no second row beside a long one."""

    def cuts(*sizes: int) -> list[tuple[int, int, int]]:
        D, k, inner, S = sizes
        stacked = torch.empty(9, inner, D, device="meta"), torch.empty(9, D, inner, device="meta")
        experts = Experts(stacked[0], stacked[0], stacked[1])
        inputs, bias = torch.empty(9 + 2 * S, D, device="meta"), torch.empty(9, device="meta")
        moe = MoE(inputs, bias, experts, None, None, EPS, k, True, 1.0, False, None)
        how = kernel.moe_plan(1, moe)
        return [(p.step, p.warps, p.tiles) for p in (how.gate_up, how.down)]

    assert cuts(2304, 8, 1024, 1024) == [(256, 1, 1), (1024, 4, 6)]
    assert cuts(4096, 8, 2048, 2048) == [(512, 2, 1), (2048, 8, 12)]
    assert cuts(2304, 9, 4096, 0)[1] == (2048, 8, 1)


@pytest.mark.parametrize(("n", "dot"), [(1, False), (3, True), (3, False)])
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "mxfp4"])
def test_kernel_with_a_latent_space(n: int, dot: bool, packed: bool, poison: None) -> None:
    """Rows of one expert at once, and one after the other."""
    moe = _random(64, 7, 2, 32, 48, latent=96, packed=packed)
    _check(moe, n, _whole_tiles(n, packed, dot))


def test_more_choices_than_experts_and_no_shared_one(poison: None) -> None:
    """Slots are experts there; two of them are chosen by nobody."""
    moe = _random(64, 5, 2, 32, 0, latent=None, packed=False)
    moe = replace(moe, bias=torch.tensor([0.0, -9.0, 0.0, -9.0, 0.0], device=DEVICE))
    chosen = _check(moe, 4, _whole_tiles(4))
    assert not ({1, 3} & set(chosen.flatten().tolist()))


def test_experts_that_nobody_chose_are_not_read(poison: None) -> None:
    moe = _random(64, 6, 2, 32, 32, latent=None, packed=False)
    moe = replace(moe, bias=torch.tensor([0.0, 9.0, 0.0, 0.0, 9.0, 0.0], device=DEVICE))
    for w in (moe.experts.w1, moe.experts.w3, moe.experts.w2):
        w[[0, 2, 3, 5]] = torch.nan
    x, norm, _ = _rows(3, 64)
    found, chosen = kernel.by_plan(x, moe, norm, EPS, None, _whole_tiles(3))
    assert set(chosen.flatten().tolist()) == {1, 4}
    assert found.isfinite().all()


@pytest.mark.parametrize("few", [True, False])
def test_equal_scores_take_the_lowest_ids_and_bias_only_chooses(few: bool) -> None:
    moe = _random(64, 5, 2, 32, 0, latent=None, packed=False)
    inputs = torch.zeros_like(moe.inputs)
    bias = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.5], device=DEVICE)
    moe = replace(moe, inputs=inputs, bias=bias, scaling=2.0)
    x, _, _ = _rows(1, 64)
    if few:
        _, ids, weights, _ = kernel._gate_up_one(x, moe, None, 0.0, _whole_tiles(1))
    else:
        projected = torch.zeros(1, 5, device=DEVICE)
        ids, weights, _, _ = kernel.route_rows(x, moe, None, 0.0, projected)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.ones_like(weights))


def test_a_row_of_nan_names_experts_that_exist_and_harms_no_other() -> None:
    moe = _random(64, 6, 2, 32, 32, latent=None, packed=False)
    x, norm, _ = _rows(3, 64)
    alone, _ = kernel.by_plan(x[:2], moe, norm, EPS, None, _whole_tiles(2))
    x[2] = torch.nan
    found, chosen = kernel.by_plan(x, moe, norm, EPS, None, _whole_tiles(3))
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert found[2].isnan().all()
    assert torch.equal(found[:2], alone)


def test_what_the_kernel_refuses() -> None:
    moe = _random(64, 5, 2, 32, 16, latent=None, packed=False)
    x, norm, residual = _rows(2, 64)
    assert kernel.refuses(x, moe, norm=norm, eps=EPS, residual=residual) is None
    assert "float32" in str(kernel.refuses(x.float(), moe))
    assert "dtype" in str(kernel.refuses(x, moe, residual=residual.half()))
    assert "rows" in str(kernel.refuses(x.repeat(9, 1), moe))
    assert "latent" in str(kernel.refuses(x, replace(moe, norm=norm)))
    turned = replace(moe.experts, w2=moe.experts.w2.transpose(1, 2).contiguous().transpose(1, 2))
    assert "contiguous" in str(kernel.refuses(x, replace(moe, experts=turned)))
    odd = _random(64, 5, 2, 24, 16, latent=None, packed=False)
    assert "multiples" in str(kernel.refuses(x, odd))


@pytest.mark.gpu(gib=32)
@pytest.mark.parametrize("n", [1, 2, 8, 16])
@pytest.mark.parametrize("experts", [32, 256])
def test_kimi_linear_at_real_sizes(n: int, experts: int, poison: None) -> None:
    """Without a norm: its rounding moves scores, and among 256 some are closer than that."""
    moe = _random(2304, experts, 8, 1024, 1024, latent=None, packed=False)
    _check(moe, n, kernel.moe_plan(n, moe), normed=False)


@pytest.mark.gpu(gib=80)
@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("dot", [False, True])
def test_k3_at_real_widths(n: int, dot: bool, poison: None) -> None:
    moe = _random(7168, 40, 16, 3072, 6144, latent=3584, packed=True)
    how = kernel.moe_plan(n, moe)
    if dot:
        cut = Plan(64, 64, 4, 2, dot=True)
        how = replace(how, gate_up=cut, down=cut)
    _check(moe, n, how, normed=False)


@pytest.mark.gpu(gib=40)
@pytest.mark.parametrize("n", [1, 4])
def test_offsets_beyond_32_bits(n: int) -> None:
    """Only experts that lie behind 2^31 numbers are chosen; the same as a layer of those alone."""
    moe, last = _random(2304, 1024, 8, 1024, 0, latent=None, packed=False), 16
    moe.bias[:-last] -= 9.0
    e = moe.experts
    experts = Experts(e.w1[-last:], e.w3[-last:], e.w2[-last:])
    few = replace(moe, inputs=moe.inputs[-last:], bias=moe.bias[-last:], experts=experts)
    x, _, residual = _rows(n, 2304)
    found, chosen = kernel.moe_decode(x, moe, residual=residual)
    wanted, ids = plain.moe_decode(x.double(), _double(few), residual=residual.double())
    assert torch.equal(chosen, ids + 1024 - last)
    assert int(chosen.min()) * e.w1[0].numel() > 2**31
    assert float((found.double() - wanted).norm() / wanted.norm()) < ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 4])
def test_captured_calls_route_at_replay(n: int) -> None:
    moe = _random(2304, 32, 8, 1024, 1024, latent=None, packed=False)
    x, norm, residual = _rows(n, 2304)
    kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, chosen = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        again, ids = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
        assert torch.equal(chosen, ids)
        assert torch.equal(found, again)


@pytest.mark.gpu(gib=16)
@pytest.mark.parametrize(
    "sizes",
    [
        (2304, 32, 8, 1024, 1024),
        (2304, 32, 8, 1024, 0),
        (2304, 256, 8, 1024, 1024),
        (4096, 16, 4, 1408, 2816),
        (256, 64, 2, 96, 32),
        (1600, 12, 6, 512, 48),
    ],
)
def test_asking_early_changes_nothing(
    sizes: tuple[int, ...], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers one behind the other in a graph, replayed with other rows: whoever read an old choice,
    or a row before it was there, shows. Launches that wait for one another are the measure."""
    D, E, k, inner, S = sizes
    layers = [_random(D, E, k, inner, S, latent=None, packed=False) for _ in range(3)]
    xs, norm = torch.randn(6, 1, D, device=DEVICE).bfloat16(), _rows(1, D)[1]

    def run() -> list[tuple[Tensor, Tensor]]:
        pairs = zip(xs, layers * 2, strict=True)
        return [kernel.moe_decode(x, m, norm=norm, eps=EPS, residual=x) for x, m in pairs]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        early = run()
    for module in (kernel, linear_rows_triton):
        monkeypatch.setattr(module, "early", lambda: {"EARLY": False})
    for _ in range(30):
        xs.copy_(torch.randn_like(xs))
        graph.replay()
        for (found, chosen), (wanted, ids) in zip(early, run(), strict=True):
            assert torch.equal(chosen, ids)
            assert float((found - wanted).float().norm() / wanted.float().norm()) < ROUNDING
