"""Two processes compute what one computes, wait for nobody, and stop together."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dspark.distill import trainer as trainer_module
from dspark.distill.chat import TrainingRow
from dspark.distill.objective import objective, report
from dspark.distill.processes import Processes
from dspark.distill.trainer import NonFinite, Trainer
from tests.distill_setup import ALONE, config, rows, run, same, trainer, weights
from tests.test_trainer import Inject, gradient_of_a_step, prescribed, uneven_rows
from tests.tolerance import assert_close
from tests.toy_target import ToyTarget

pytestmark = pytest.mark.slow

WATCHDOG_S = 120

Job = Callable[..., Any]


def child(rank: int, world: int, port: int, job: Job, args: tuple[Any, ...], pipe: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    processes = Processes.start("cpu")
    assert (processes.rank, processes.world) == (rank, world)
    pipe.send(job(processes, *args))
    pipe.recv()  # leave together: a peer may still be in a collective
    dist.destroy_process_group()


def on_ranks(world: int, job: Job, *args: Any) -> list[Any]:
    """The results of `job(processes, *args)` on every rank; fails if one hangs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distill_setup", "torch._dynamo", "accelerate"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, children = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        started = context.Process(target=child, args=(rank, world, port, job, args, theirs))
        started.start()
        theirs.close()
        pipes.append(ours)
        children.append(started)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(WATCHDOG_S), f"rank {rank} hangs"
            results.append(pipe.recv())
        for pipe in pipes:
            pipe.send("leave")
        for started in children:
            started.join(WATCHDOG_S)
            assert started.exitcode == 0
        return results
    finally:
        for started in children:
            started.kill()


# --- jobs, run inside the ranks ------------------------------------------------------------------


def uneven_step(processes: Processes, copies: int, micro_rows: int) -> tuple[float, Tensor]:
    """Logged loss and gradient of one step on rows of 1 and 9 tokens, losses 2.0 and 1.0."""
    data = uneven_rows() * copies
    made = trainer(
        training_rows=data, rows_per_step=len(data), micro_rows=micro_rows, ce=1.0,
        processes=processes,
    )  # fmt: skip
    sums = prescribed({4: 2.0, 12: 1.0}.__getitem__)
    with mock.patch.object(trainer_module, "batch_sums", sums):
        gradient = gradient_of_a_step(made)
        result = made.run_step(0)
    return float(report(result.sums, objective(made.settings))["loss"]), gradient


def real_step(processes: Processes, micro_rows: int) -> Tensor:
    return gradient_of_a_step(trainer(rows_per_step=10, micro_rows=micro_rows, processes=processes))


def half_silent_steps(processes: Processes, micro_rows: int) -> dict[str, Any]:
    """Five steps in which the short rows, one rank's share, have nothing to learn."""
    data = rows(ToyTarget(), 4)
    silent = [TrainingRow((4, 5, 6), (False, False, True))] * 4
    made = trainer(
        training_rows=[*data, *silent], rows_per_step=8, micro_rows=micro_rows, epochs=5,
        processes=processes,
    )  # fmt: skip
    own = [batch.row_ids for batch in made._batches(made.rows, range(8), 0)]
    results = [made.run_step(step) for step in range(5)]
    state = made.optimiser.state_tensors()
    return {
        "own": own,
        "losses": [report(r.sums, objective(made.settings))["loss"] for r in results],
        "weights": weights(made),
        "updates": {float(v) for k, v in state.items() if k.endswith(".step")},
    }


def poisoned_step(processes: Processes) -> tuple[str, bool, bool]:
    """(message, weights unchanged, whether the bad row was this rank's own)."""
    target = Inject()
    made = trainer(target=target, rows_per_step=16, micro_rows=4, processes=processes)
    target.poison(made.rows[3].ids, "taps", math.inf)
    before = weights(made)
    mine = any(3 in batch.row_ids for batch in made._batches(made.rows, range(16), 0))
    try:
        made.run_step(0)
    except NonFinite as error:
        return str(error), same(weights(made), before), mine
    return "", False, mine


def stopped_run(processes: Processes, out: str, stop: int) -> tuple[int, dict[str, Tensor]]:
    """Steps begun and weights of a run in which rank 1 alone is asked to stop at step `stop`."""
    kept: list[Trainer] = []

    def on_step(made: Trainer, step: int) -> None:
        kept.append(made)
        if step == stop and processes.rank == 1:
            made.stop_requested = True

    settings = config(Path(out), train__micro_rows=1)
    with pytest.raises(KeyboardInterrupt):
        run(settings, processes=processes, on_step=on_step)
    return len(kept), weights(kept[-1])


# --- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("copies", "micro_rows"), [(1, 1), (2, 2), (2, 1)])
def test_loss_and_gradient_are_the_token_mean_however_rows_are_split(
    copies: int, micro_rows: int
) -> None:
    expected_loss, expected = uneven_step(ALONE, copies, 2 * copies)
    assert expected_loss == pytest.approx(1.1)
    for loss, gradient in on_ranks(2, uneven_step, copies, micro_rows):
        assert loss == pytest.approx(1.1)  # not 1.5, the mean of rank means
        assert_close(gradient, expected, limit=1e-6)


@pytest.mark.parametrize(("world", "micro_rows"), [(2, 8), (2, 2), (4, 1)])
def test_real_gradients_do_not_depend_on_the_number_of_processes(
    world: int, micro_rows: int
) -> None:
    expected = real_step(ALONE, 10)
    gradients = on_ranks(world, real_step, micro_rows)
    for gradient in gradients:
        assert torch.equal(gradient, gradients[0])
        assert_close(gradient, expected, limit=1e-5)


@pytest.mark.parametrize("micro_rows", [4, 1])
def test_a_rank_with_nothing_to_learn_neither_hangs_nor_counts(micro_rows: int) -> None:
    alone = half_silent_steps(ALONE, 8)
    first, second = on_ranks(2, half_silent_steps, micro_rows)
    if micro_rows == 4:
        assert all(row >= 4 for ids in second["own"] for row in ids)  # only silent rows
    assert first["updates"] == second["updates"] == {5.0}
    assert same(first["weights"], second["weights"])
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_a_fault_on_one_rank_stops_all_with_the_same_line() -> None:
    (first, kept_first, mine_first), (second, kept_second, mine_second) = on_ranks(2, poisoned_step)
    assert mine_first != mine_second
    assert first == second
    assert "step 1: target taps not finite in row 3 at position 3" in first
    assert kept_first
    assert kept_second


def test_a_run_on_two_processes_stops_together_and_resumes_on_one(tmp_path: Path) -> None:
    straight, _, _ = run(config(tmp_path / "straight", train__micro_rows=1))
    out = tmp_path / "run"
    (steps, first), (_, second) = on_ranks(2, stopped_run, str(out), 4)
    assert steps == 5  # rank 0 stopped in the step in which rank 1 was asked to
    assert same(first, second)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000003", "step-000005"]
    made, progress, text = run(config(out, train__micro_rows=1))
    assert "saved by 2 processes, now 1" in text
    assert progress.step == 12
    for name, tensor in weights(made).items():
        # Adam's first updates have the size of the rate whatever the gradient, so rounding in a
        # near-zero gradient may turn one entry; 12 steps of 5e-3 bound what that can do.
        assert (tensor - straight.drafter.state_dict()[name]).abs().mean() < 5e-4, name
