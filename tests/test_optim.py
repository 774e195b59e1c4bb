"""Update rules against torch's and against closed forms; packed moments against their bounds; every
state saved, restored and continued to the bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dspark.distill.average import Average
from dspark.distill.moments import CODECS, Codec
from dspark.distill.muon import Muon, hidden_matrices, orthogonalise
from dspark.distill.optim import Optimiser
from dspark.distill.rules import AdamW, PackedAdamW
from dspark.distill.train_settings import TrainSettings
from dspark.errors import UserError
from dspark.ops import MOMENT_BLOCK as BLOCK
from tests.distill_setup import drafter, same, trainer, weights
from tests.tolerance import assert_close
from tests.toy_target import ToyTarget

SETTINGS = TrainSettings(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)
BOTH = pytest.mark.parametrize("kind", CODECS)
KINDS = [
    {},
    {"moments": "bf16"},
    {"moments": "int8"},
    {"optimizer": "muon"},
    {"ema": 0.9},
    {"optimizer": "muon", "moments": "int8", "ema": 0.99, "muon_lr": 1e-3, "weight_decay": 0.1},
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed(codec: Codec, value: Tensor, signed: bool, seed: int = 0) -> Tensor:
    parts = codec.pack(value, signed, generator(seed))
    return codec.unpack(parts, value.shape, signed)


# --- packed moments ------------------------------------------------------------------------------


def moment(signed: bool, size: int = 3000, seed: int = 0) -> Tensor:
    """Values over nine orders of magnitude, as moments of different layers are."""
    torch.manual_seed(seed)
    value = torch.randn(size).sign() * 10 ** (9 * torch.rand(size) - 9)
    return value if signed else value.abs()


def neighbours(kind: str, value: Tensor, signed: bool) -> Tensor:
    """Distance of the representable values around each element, from the format's definition."""
    if kind == "bf16":  # 8 bits of mantissa: 2^-7 of the power of two below
        return 2.0 ** (value.abs().log2().floor() - 7)
    codes, power = (127, 2) if signed else (255, 4)
    scales = torch.cat([b.abs().max().expand(len(b)) for b in value.split(BLOCK)]).double()
    below = ((value.abs() / scales) ** (1 / power) * codes + 1e-4).floor()  # fp32 roots are inexact
    high, low = (below + 1) / codes, (below - 1).clamp_min(0) / codes
    return scales * (high**power - low**power)


@BOTH
@pytest.mark.parametrize("signed", [True, False])
def test_a_packed_moment_is_one_of_the_two_neighbours(kind: str, signed: bool) -> None:
    value = moment(signed)
    got = packed(CODECS[kind], value, signed)
    assert ((got - value).abs() <= neighbours(kind, value, signed)).all()
    assert ((got == 0) | (got.sign() == value.sign())).all()


@BOTH
@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_right_on_average(kind: str, signed: bool) -> None:
    """The mean of n draws is within 6 standard errors, a draw's being half a gap at most."""
    value, draws = moment(signed, 500), 400
    if not signed and kind == "int8":  # below code 1 it is kept from zero instead
        value = value[value > value.max() * (2 / 255) ** 4]
    mean = torch.stack([packed(CODECS[kind], value, signed, seed) for seed in range(draws)])
    error = (mean.double().mean(0) - value).abs()
    assert (error <= 6 * neighbours(kind, value, signed) / 2 / draws**0.5).all()


@BOTH
def test_small_changes_of_a_moment_are_not_lost(kind: str) -> None:
    """v <- 0.999 v with g = 0, 500 times: 0.61 v. Rounding to the nearest would leave it at v."""
    value = torch.rand(4096, generator=generator(1)) + 0.5
    now = value
    for step in range(500):
        now = packed(CODECS[kind], now * 0.999, False, step)
    assert (now.sum() / value.sum()).item() == pytest.approx(0.999**500, rel=0.05)
    nearest = value.bfloat16()
    for _ in range(500):
        nearest = (nearest.float() * 0.999).bfloat16()
    assert (nearest.sum() / value.bfloat16().sum()).item() > 0.9


@BOTH
def test_a_second_moment_above_zero_stays_above_zero(kind: str) -> None:
    value = moment(False)
    value[::7] = 0
    value[1::7] *= 1e-12  # below the least code of int8, (1/255)^4 of the largest
    got = packed(CODECS[kind], value, False)
    assert torch.equal(got > 0, value > 0)
    assert not packed(CODECS[kind], torch.zeros(300), True).any()


@BOTH
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(1,), (256,), (3, 100)])
def test_layout_is_what_packing_gives(kind: str, signed: bool, shape: tuple[int, ...]) -> None:
    codec = CODECS[kind]
    parts = codec.pack(torch.rand(shape), signed, generator(0))
    assert {k: (tuple(v.shape), v.dtype) for k, v in parts.items()} == codec.layout(
        torch.Size(shape), signed
    )
    assert tuple(parts) == codec.parts


@pytest.mark.parametrize(("kind", "size"), [("bf16", 4), ("int8", 2 + 8 / BLOCK)])
def test_bytes_of_both_moments_per_parameter(kind: str, size: float) -> None:
    weight = nn.Parameter(torch.zeros(64, BLOCK))
    rule = PackedAdamW([("w", weight)], SETTINGS, CODECS[kind])
    weight.grad = torch.randn_like(weight)
    rule.step(1e-3)
    state = {name: t for name, t in rule.state().items() if not name.endswith("step")}
    assert sum(t.nbytes for t in state.values()) / weight.numel() == size


# --- AdamW and Muon ------------------------------------------------------------------------------


class Exact:
    """A codec that loses nothing."""

    parts: tuple[str, ...] = ("",)

    def pack(self, value: Tensor, signed: bool, generator: torch.Generator) -> dict[str, Tensor]:
        return {"": value.clone()}

    def unpack(self, parts: Any, shape: torch.Size, signed: bool) -> Tensor:
        return parts[""].clone()

    def layout(self, shape: torch.Size, signed: bool) -> Any:
        return {"": (tuple(shape), torch.float32)}


def least_squares(make: Any, steps: int = 200, lr: float = 1e-2) -> tuple[float, Tensor]:
    """Loss and weights after fitting 24 -> 16 with noisy batches under rule `make`."""
    torch.manual_seed(3)
    weight, truth = nn.Parameter(torch.zeros(16, 24)), torch.randn(16, 24)
    rule, data = make([("w", weight)]), torch.randn(4096, 24)
    for step in range(steps):
        x = data[step * 16 % 4096 :][:16]
        weight.grad = (x @ (weight.detach() - truth).T).T @ x / 16
        rule.step(lr)
    return float((data @ (weight.detach() - truth).T).square().mean()), weight.detach()


def test_adamw_over_exact_moments_is_torchs() -> None:
    settings = replace(SETTINGS, weight_decay=0.3)
    _, ours = least_squares(lambda named: PackedAdamW(named, settings, Exact()), 50)
    _, theirs = least_squares(lambda named: AdamW(named, settings), 50)
    assert_close(ours, theirs, limit=1e-5)


@BOTH
def test_packed_moments_learn_as_fast(kind: str) -> None:
    settings = replace(SETTINGS, weight_decay=0.0)
    reference, _ = least_squares(lambda named: AdamW(named, settings))
    start, _ = least_squares(lambda named: AdamW(named, settings), 0)
    loss, _ = least_squares(lambda named: PackedAdamW(named, settings, CODECS[kind]))
    assert reference < 0.2 * start
    assert loss == pytest.approx(reference, rel=0.1)


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40), (7, 1)])
def test_orthogonalising_nearly_gives_the_polar_factor(shape: tuple[int, int]) -> None:
    """Same singular vectors as the argument, all singular values close to one."""
    torch.manual_seed(0)
    matrix = torch.randn(shape) * 37.0
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    core = u.T @ orthogonalise(matrix) @ v.T
    singular = core.diagonal()
    assert (core - torch.diag(singular)).abs().max() < 1e-4
    assert (singular > 0.6).all()
    assert (singular < 1.3).all()
    assert not orthogonalise(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_muon_is_torchs_up_to_bfloat16(shape: tuple[int, int]) -> None:
    """torch's runs its Newton-Schulz steps in bfloat16 everywhere; ours on the CPU in float32."""
    settings = replace(SETTINGS, muon_momentum=0.9)
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    rule = Muon([("w", ours)], settings)
    oracle = torch.optim.Muon(
        [theirs], lr=settings.lr, weight_decay=settings.weight_decay, momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        rule.step(settings.lr)
        oracle.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    # A step has the size of one of AdamW: 0.2 per weight and unit of rate, whatever the shape.
    rule = Muon([("w", ours)], replace(settings, weight_decay=0.0))
    before = ours.detach().clone()
    rule.step(1e-2)
    size = (ours - before).square().mean().sqrt().item() / 1e-2
    assert size == pytest.approx(0.2, rel=0.3)


def test_muon_gets_the_matrices_of_hidden_layers_and_nothing_else() -> None:
    made = drafter(ToyTarget())
    chosen = hidden_matrices(made)
    assert "fc.weight" in chosen
    assert "layers.0.self_attn.q_proj.weight" in chosen
    assert not any("markov" in name or "confidence" in name or "norm" in name for name in chosen)
    named = dict(made.named_parameters())
    assert all(named[name].ndim == 2 for name in chosen)
    state = stepped(Optimiser(made, replace(SETTINGS, optimizer="muon"))).state_tensors()
    momentum = {name.removesuffix(".momentum") for name in state if name.endswith(".momentum")}
    moments = {name.removesuffix(".exp_avg") for name in state if name.endswith(".exp_avg")}
    assert momentum == chosen
    assert momentum | moments == named.keys()
    assert not momentum & moments


def test_muon_rate_follows_the_schedule_of_the_other() -> None:
    weight = nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.randn(8, 8)
    sizes = []
    for muon_lr, lr in [(None, 1e-2), (5e-3, 1e-2), (5e-3, 5e-3)]:
        with torch.no_grad():
            weight.zero_()
        Muon([("w", weight)], replace(SETTINGS, optimizer="muon", muon_lr=muon_lr)).step(lr)
        sizes.append(float(weight.detach().norm()))
    assert sizes[1] / sizes[0] == pytest.approx(0.5)
    assert sizes[2] / sizes[0] == pytest.approx(0.25)


# --- the mean of the weights ---------------------------------------------------------------------


def test_the_mean_follows_its_formula() -> None:
    weight = nn.Parameter(torch.zeros(3))
    mean = Average([("w", weight)], 0.8)
    values = [torch.randn(3) for _ in range(60)]
    expected = values[0].double()
    for t, value in enumerate(values):
        with torch.no_grad():
            weight.copy_(value)
        mean.update()
        decay = min(0.8, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * value.double()
    assert_close(mean.state()["w.average"], expected, dtype=torch.float32, limit=1e-5)
    with mean.in_place():
        assert_close(weight, expected, dtype=torch.float32, limit=1e-5)
    assert torch.equal(weight, values[-1])
    with pytest.raises(RuntimeError, match="evaluation"), mean.in_place():
        raise RuntimeError("evaluation")
    assert torch.equal(weight, values[-1])
    mean.settle()
    assert_close(weight, expected, dtype=torch.float32, limit=1e-5)


def test_without_an_update_the_mean_is_the_weights() -> None:
    weight = nn.Parameter(torch.ones(3))
    mean = Average([("w", weight)], 0.9)
    with mean.in_place():
        assert torch.equal(weight, torch.ones(3))
    mean.settle()
    assert torch.equal(weight, torch.ones(3))
    assert not mean.state()


def test_a_mean_does_not_change_how_weights_are_trained() -> None:
    plain, kept = trainer(), trainer(ema=0.99)
    for step, made in itertools.product(range(3), (plain, kept)):
        made.run_step(step)
    assert same(weights(plain), weights(kept))


# --- saving and going on -------------------------------------------------------------------------


def stepped(optimiser: Optimiser, seed: int = 0) -> Optimiser:
    optimiser.gradients.buffer.normal_(generator=generator(seed))
    optimiser.step(1e-3)
    return optimiser


@pytest.mark.parametrize("changes", KINDS, ids=lambda c: "-".join(map(str, c.values())) or "plain")
def test_a_restored_state_goes_on_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer(epochs=2, **changes)
    for step in range(3):
        whole.run_step(step)
    save_file(whole.optimiser.state_tensors(), tmp_path / "optimizer.safetensors")
    saved = weights(whole)
    for step in range(3, 6):
        whole.run_step(step)

    resumed = trainer(epochs=2, **changes)
    resumed.drafter.load_state_dict(saved)
    resumed.optimiser.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    for step in range(3, 6):
        resumed.run_step(step)
    assert same(weights(resumed), weights(whole))
    assert same(resumed.optimiser.state_tensors(), whole.optimiser.state_tensors())
    whole.optimiser.settle()
    resumed.optimiser.settle()
    assert same(weights(resumed), weights(whole))
    assert same(weights(whole), saved) is False


@pytest.mark.parametrize("changes", KINDS, ids=lambda c: "-".join(map(str, c.values())) or "plain")
def test_state_of_another_kind_is_refused(changes: dict[str, Any]) -> None:
    target = ToyTarget()
    state = stepped(Optimiser(drafter(target), replace(SETTINGS, **changes))).state_tensors()
    for other in KINDS:
        if other != changes:
            optimiser = Optimiser(drafter(target), replace(SETTINGS, **other))
            with pytest.raises((KeyError, ValueError), match="optimiser state"):
                optimiser.load_state_tensors(state)
    optimiser = Optimiser(drafter(target), replace(SETTINGS, **changes))
    optimiser.load_state_tensors(state)
    assert same(optimiser.state_tensors(), state)
    name = next(name for name, tensor in state.items() if tensor.ndim)
    with pytest.raises(ValueError, match=f"{name}: expected"):
        optimiser.load_state_tensors({**state, name: state[name][:1]})
    optimiser.load_state_tensors({})  # saved before the first update


def test_settings_say_what_they_expect() -> None:
    for changes, message in [
        ({"optimizer": "sgd"}, "train.optimizer is 'sgd': expected adamw or muon"),
        ({"moments": "fp8"}, "train.moments is 'fp8': expected fp32 or bf16 or int8"),
        ({"ema": 1.0}, "train.ema is 1.0: expected 0 <= ema < 1"),
        ({"muon_lr": 0.0}, "train.muon_lr is 0.0: expected a finite number above 0"),
        ({"muon_lr": 0.1}, "train.muon_lr is 0.1: expected null with train.optimizer adamw"),
        ({"sharded": True, "ema": 0.9}, "train.ema is 0.9: expected 0.0 with train.sharded"),
        ({"sharded": True, "optimizer": "muon"}, "train.optimizer is 'muon': expected 'adamw'"),
    ]:
        with pytest.raises(UserError, match=message):
            TrainSettings(**changes)  # type: ignore[arg-type]
