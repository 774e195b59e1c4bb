"""Sharded training: the weights of unsharded training from a part of its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dspark.distill import sharding
from dspark.distill.processes import Processes
from dspark.distill.sharding import MOMENTS, ShardedGradients, ShardedOptimiser
from dspark.distill.trainer import NonFinite, Trainer
from tests.distill_setup import ALONE, SETTINGS, config, run, same, trainer, weights
from tests.test_distributed import on_ranks
from tests.test_trainer import Inject

SMALL = 3000
"""Elements of a bucket: the toy drafter has 20 k parameters in tensors of up to 6 k."""

STEPS = 8
SMOOTH = {"eps": 1e-3, "micro_rows": 2, "rows_per_step": 10}
"""Adam divides by the gradient's size: with a tiny epsilon, rounding in an entry whose gradient is
rounding itself turns its whole update. This epsilon makes the update a smooth function of it."""


def steps(made: Trainer, count: int = STEPS) -> Trainer:
    for step in range(count):
        made.run_step(step)
    return made


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative difference (in the Euclidean norm) of a tensor."""
    return max(
        float((ours[name] - theirs[name]).norm() / (theirs[name].norm() + 1e-30)) for name in theirs
    )


def live_gradients(made: Trainer) -> list[int]:
    """Filled as training goes on: elements of unsharded gradients that exist at each arrival."""
    seen: list[int] = []

    def note(_: Tensor) -> None:
        grads = (p.grad for p in made.drafter.parameters())
        seen.append(sum(g.numel() for g in grads if g is not None))

    for parameter in made.drafter.parameters():
        # Before the sharding's own hook, which drops what it has summed.
        hooks = parameter._post_accumulate_grad_hooks
        parameter.register_post_accumulate_grad_hook(note)
        hooks.move_to_end(list(hooks)[-1], last=False)
    return seen


# --- jobs, run inside the ranks ------------------------------------------------------------------


def trained(processes: Processes, **changes: Any) -> dict[str, Any]:
    with mock.patch.object(sharding, "BUCKET", SMALL):
        made = trainer(processes=processes, sharded=True, **{**SMOOTH, **changes})
    seen = live_gradients(made)
    steps(made)
    optimiser = made.optimiser
    assert isinstance(optimiser, ShardedOptimiser)
    own = [optimiser._adamw.state[bucket.own] for bucket in optimiser.gradients.buckets]
    return {
        "weights": weights(made),
        "state": {name: tensor.clone() for name, tensor in optimiser.state_tensors().items()},
        "moments": sum(state[key].numel() for state in own for key in MOMENTS),
        "gradients": optimiser.gradients.buffer.numel(),
        "live": max(seen),
        "left": [n for n, p in made.drafter.named_parameters() if p.grad is not None],
        "buckets": len(optimiser.gradients.buckets),
    }


def unsharded(processes: Processes, micro_rows: int) -> dict[str, Tensor]:
    return weights(steps(trainer(processes=processes, **{**SMOOTH, "micro_rows": micro_rows})))


def fault(processes: Processes) -> str:
    target = Inject()
    made = trainer(target=target, rows_per_step=16, micro_rows=2, processes=processes, sharded=True)
    target.poison(made.rows[3].ids, "taps", float("inf"))
    before = weights(made)
    with pytest.raises(NonFinite) as caught:
        made.run_step(0)
    assert same(weights(made), before)
    return str(caught.value)


def bad_gradient(processes: Processes) -> tuple[str | None, float]:
    """What the processes agree on when one entry of the last one's part is not a number."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    gradients = ShardedGradients(module, processes)
    module(torch.ones(1, 3)).sum().backward()
    gradients.collect()
    norm = gradients.clip(1e9)
    if processes.rank == processes.world - 1:
        gradients.buffer[0] = torch.nan
    return gradients.first_bad(), norm


def stopped_then_resumed(processes: Processes, out: str, stop: int | None) -> Any:
    """A sharded run that is asked to stop at a step, or one that goes to its end."""
    settings = config(Path(out), train__sharded=True, train__eps=1e-3)

    def on_step(made: Trainer, step: int) -> None:
        made.stop_requested = step == stop

    with mock.patch.object(sharding, "BUCKET", SMALL):
        if stop is None:
            made, _, text = run(settings, processes=processes)
            return weights(made), text
        with pytest.raises(KeyboardInterrupt):
            run(settings, processes=processes, on_step=on_step)
    return None


# --- claims --------------------------------------------------------------------------------------


def test_one_process_sharded_is_the_plain_optimiser() -> None:
    ours = trained(ALONE)
    plain = steps(trainer(**SMOOTH))
    assert worst_difference(ours["weights"], weights(plain)) < 1e-6
    assert not same(weights(plain), weights(trainer()))  # it did train
    assert ours["state"].keys() == plain.optimiser.state_tensors().keys()
    assert worst_difference(ours["state"], plain.optimiser.state_tensors()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("micro_rows", [1, 5])
@pytest.mark.parametrize("world", [2, 3])
def test_weights_do_not_depend_on_processes_or_sharding(world: int, micro_rows: int) -> None:
    expected = unsharded(ALONE, 10)
    ranks = on_ranks(world, trained_with, micro_rows)
    for rank in ranks:
        assert same(rank["weights"], ranks[0]["weights"])
        assert worst_difference(rank["weights"], expected) < 1e-6
    for made in on_ranks(world, unsharded, micro_rows):
        assert worst_difference(made, expected) < 1e-6


def trained_with(processes: Processes, micro_rows: int) -> dict[str, Any]:
    return trained(processes, micro_rows=micro_rows)


@pytest.mark.slow
def test_a_process_holds_its_part_of_gradients_and_moments() -> None:
    alone = trained(ALONE)
    whole = sum(tensor.numel() for tensor in alone["weights"].values())
    assert alone["gradients"] == whole
    assert alone["moments"] == 2 * whole
    largest = max(tensor.numel() for tensor in alone["weights"].values())
    for rank in on_ranks(3, trained):
        padding = rank["buckets"] * 3
        assert rank["moments"] <= (2 * whole + 2 * padding) // 3
        assert rank["gradients"] <= (whole + padding) // 3
        assert rank["left"] == []  # whole gradients are gone after the step
        assert rank["live"] <= SMALL + largest < whole / 2  # and never were all there at once
        assert len(rank["state"]) in (0, 3 * len(alone["weights"]))  # gathered on process 0 only


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_without_sharding(
    tmp_path: Path,
) -> None:
    straight, _, _ = run(config(tmp_path / "straight", train__eps=1e-3))
    out = tmp_path / "run"
    on_ranks(3, stopped_then_resumed, str(out), 2)
    on_ranks(2, stopped_then_resumed, str(out), 5)
    (two, text), (other, _) = on_ranks(2, stopped_then_resumed, str(out), None)
    assert "continuing after step 6" in text
    assert same(two, other)
    assert worst_difference(two, weights(straight)) < 1e-6
    # The same checkpoint without sharding, in one process.
    for folder in (out / "checkpoints").glob("step-000012"):
        folder.rename(tmp_path / "aside")
    made, _, text = run(config(out, train__eps=1e-3))
    assert "2 processes, sharded, now 1 process" in text
    assert worst_difference(weights(made), weights(straight)) < 1e-6


@pytest.mark.slow
def test_every_process_gets_its_own_moments_back(tmp_path: Path) -> None:
    first, second = on_ranks(2, moments_before_and_after, str(tmp_path))
    for before, after in (first, second):
        assert len(before) > 2
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not all(a.equal(b) for a, b in zip(first[0], second[0], strict=True))


def moments_before_and_after(processes: Processes, out: str) -> tuple[list[Tensor], list[Tensor]]:
    """Own moments of a run at its end, and after restoring its last checkpoint."""
    settings = config(Path(out), train__sharded=True)
    with mock.patch.object(sharding, "BUCKET", SMALL):
        made = [run(settings, processes=processes)[0] for _ in range(2)]
    return tuple(  # type: ignore[return-value]
        [
            one.optimiser._adamw.state[bucket.own][key]
            for bucket in one.optimiser.gradients.buckets
            for key in (*MOMENTS, "step")
        ]
        for one in made
    )


@pytest.mark.slow
def test_a_fault_on_one_process_stops_all_and_nobody_hangs() -> None:
    first, second = on_ranks(2, fault)
    assert first == second
    assert "step 1: target taps not finite in row 3" in first


@pytest.mark.slow
def test_processes_agree_on_a_bad_gradient_and_on_the_norm() -> None:
    torch.manual_seed(0)
    results = on_ranks(2, bad_gradient)
    assert results[0] == results[1]
    assert results[0][0] in {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_second_backward_pass_before_collecting_is_an_error() -> None:
    module = nn.Linear(3, 2)
    ShardedGradients(module, ALONE)
    module(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="after its bucket was summed"):
        module(torch.ones(1, 3)).sum().backward()


def test_moments_of_other_parameters_are_refused() -> None:
    made = steps(trainer(sharded=True), 1)
    state = made.optimiser.state_tensors()
    with pytest.raises(KeyError, match="does not fit"):
        trainer(sharded=True).optimiser.load_state_tensors(dict(list(state.items())[1:]))
    assert SETTINGS.sharded is False
    job: Callable[..., Any] = trained  # the jobs stay importable by name in the ranks
    assert job.__module__ == __name__
