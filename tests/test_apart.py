"""Gradients apart and AdamW as kernels: the same training as with the flat buffer."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.distill import trainer as trainer_module
from dspark.distill.apart import ApartGradients
from dspark.distill.chat import TrainingRow
from dspark.distill.optim import Optimiser
from dspark.distill.trainer import NonFinite, Trainer, _apart
from tests.distill_setup import ALONE, SETTINGS, trainer, weights
from tests.tolerance import assert_close

STEPS = 4


def matrices(made: Trainer) -> list[str]:
    """What `_apart` gives a copy: the products under autocast."""
    named = made.drafter.named_parameters()
    return [n for n, p in named if n.startswith(("fc", "layers")) and p.ndim == 2]


def apart(half: bool = False, **changes: Any) -> Trainer:
    """A trainer of the toy as it is alone on a GPU, here on the CPU."""
    made = trainer(**changes)
    names: Collection[str] = matrices(made) if half else ()
    gradients = ApartGradients(made.drafter, names)
    made.optimiser = Optimiser(made.drafter, made.settings, gradients)
    return made


def compare(made: Trainer, other: Trainer, limit: float) -> None:
    for name, weight in weights(other).items():
        assert_close(weights(made)[name], weight, limit=limit, what=name)


@pytest.mark.parametrize("micro_rows", [1, 4])
def test_the_weights_are_those_of_the_flat_buffer(micro_rows: int) -> None:
    flat, made = trainer(micro_rows=micro_rows), apart(micro_rows=micro_rows)
    for step in range(STEPS):
        wanted, found = flat.run_step(step), made.run_step(step)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    compare(made, flat, 1e-5)


@pytest.mark.parametrize("micro_rows", [2, 4])
def test_copies_give_what_autocast_gives(micro_rows: int) -> None:
    """bf16 gradients of one micro-batch are the very ones; of several they are added in float32."""
    changes = {"precision": "bf16", "micro_rows": micro_rows}
    flat, made = trainer(**changes), apart(half=True, **changes)
    wanted, found = flat.run_step(0), made.run_step(0)
    assert found.sums.loss() == wanted.sums.loss()
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    compare(made, flat, 1e-6)
    gradients = made.optimiser.gradients
    for name, parameter in gradients.named:
        if name in gradients.copies:
            assert torch.equal(gradients.copies[name], parameter.detach().bfloat16())
            assert parameter.grad is None


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_resumed_run_ends_with_the_same_bits(moments: str) -> None:
    changes = {"moments": moments, "precision": "bf16"}
    straight, first = apart(True, **changes), apart(True, **changes)
    for step in range(STEPS):
        straight.run_step(step)
    for step in range(STEPS // 2):
        first.run_step(step)
    state = {name: tensor.clone() for name, tensor in first.optimiser.state_tensors().items()}
    second = apart(True, **changes)
    second.drafter.load_state_dict(weights(first))
    second.optimiser.load_state_tensors(state)
    for step in range(STEPS // 2, STEPS):
        second.run_step(step)
    expected = weights(straight)
    assert all(torch.equal(tensor, expected[n]) for n, tensor in weights(second).items())


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_states_of_both_have_the_same_names_shapes_and_dtypes(moments: str) -> None:
    states = []
    for made in (trainer(moments=moments), apart(moments=moments)):
        made.run_step(0)
        states.append(made.optimiser.state_tensors())
    kinds = [{n: (tuple(t.shape), t.dtype) for n, t in state.items()} for state in states]
    assert kinds[0] == kinds[1]
    other = apart(moments=moments)
    other.optimiser.load_state_tensors(states[0])
    loaded = other.optimiser.state_tensors()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in states[0].items())


def test_packed_moments_train_as_float32_ones_do() -> None:
    losses = {}
    for moments in ("fp32", "bf16", "int8"):
        made = apart(moments=moments, epochs=12)
        results = [made.run_step(step) for step in range(40)]
        losses[moments] = sum(float(r.sums.loss()) for r in results[-8:]) / 8
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)
    assert losses["int8"] == pytest.approx(losses["fp32"], rel=0.03)


def test_a_bad_gradient_is_named_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = apart()
    before = weights(made)
    gradients = made.optimiser.gradients
    measured = gradients.measure

    def spoiled() -> None:
        dict(gradients.named)["layers.0.mlp.up_proj.weight"].grad[0, 0] = torch.nan
        measured()

    monkeypatch.setattr(gradients, "measure", spoiled)
    with pytest.raises(NonFinite, match=r"gradient of layers\.0\.mlp\.up_proj\.weight not finite"):
        made.run_step(0)
    assert all(torch.equal(tensor, before[n]) for n, tensor in weights(made).items())


def learning_and_silent() -> tuple[Trainer, Trainer]:
    """Two trainers over rows of which every second step has nothing to learn: apart and flat."""
    silent = TrainingRow((4, 5, 6), (False, False, True))  # one supervised token: no anchor
    made = []
    for build in (apart, trainer):
        each = build()
        steps = [each.schedule.step_rows(step)[1] for step in range(STEPS)]
        each.rows = [silent if at in steps[1] else row for at, row in enumerate(each.rows)]
        made.append(each)
    return made[0], made[1]


def test_a_step_without_an_update_changes_and_counts_nothing() -> None:
    """The update is queued before the host knows; the next one is the second, not the third."""
    made, flat = learning_and_silent()
    for each in (made, flat):
        each.run_step(0)
        before = weights(each) | each.optimiser.state_tensors()
        assert each.run_step(1).grad_norm == 0
        after = weights(each) | each.optimiser.state_tensors()
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
        each.run_step(2)
    compare(made, flat, 1e-5)
    counts = [t for name, t in made.optimiser.state_tensors().items() if name.endswith(".step")]
    assert all(float(count) == 2 for count in counts)


def test_a_loss_that_is_not_finite_changes_and_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum that overflows while gradients stay finite."""
    made = apart()
    made.run_step(0)
    before = weights(made) | made.optimiser.state_tensors()
    vector = trainer_module.to_vector
    monkeypatch.setattr(trainer_module, "to_vector", lambda sums: vector(sums).fill_(torch.inf))
    with pytest.raises(NonFinite, match="nothing was changed in this step"):
        made.run_step(1)
    after = weights(made) | made.optimiser.state_tensors()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("weight", "finite", "limit", "expected"),
    [
        (4.0, True, 100.0, 1 / 4),
        (4.0, True, 1.0, 1 / 10),  # the norm is 10 / 4: clipped to 1, divided by 4
        (4.0, False, 1.0, math.nan),
        (0.0, True, 1.0, math.nan),
    ],
)
def test_the_scale_is_settled_on_the_device(
    weight: float, finite: bool, limit: float, expected: float
) -> None:
    made = apart()
    gradients = made.optimiser.gradients
    gradients.zero(1)
    named = dict(gradients.named)
    named["norm.weight"].grad = torch.zeros(32)
    named["norm.weight"].grad[:2] = torch.tensor([6.0, -8.0])
    gradients.measure()
    gradients.settle(torch.tensor(weight), torch.tensor(finite), limit)
    assert float(gradients.scale) == pytest.approx(expected, nan_ok=True)
    if weight and finite:
        assert gradients.finish(weight, limit) == (pytest.approx(10 / weight), None)


def test_no_gradient_outlives_its_step_and_masters_are_back() -> None:
    made = apart(half=True, precision="bf16")
    masters = dict(made.drafter.named_parameters())
    made.run_step(0)
    assert all(dict(made.drafter.named_parameters())[n] is p for n, p in masters.items())
    made.optimiser.gradients.drop()
    copies: dict[str, Tensor] = made.optimiser.gradients.copies
    assert all(p.grad is None for p in (*masters.values(), *copies.values()))


def test_a_cpu_keeps_its_buffer() -> None:
    made = trainer()
    assert _apart(made.target, made.drafter, SETTINGS, ALONE) is None
