"""One optimiser step, the same whatever the number of processes and the micro-batch size.

A step is one global batch of rows. Every process runs its micro-batches (some may hold nothing),
adds up gradients of *sums*, and then two all-reduces settle the step: the sums with a fault flag,
and the flat gradient. Only after that is anything divided, by the weight of the whole step. So a
row counts by its supervised slots and never by the company it is in, and a process with nothing to
learn adds exactly zero and waits for nobody.

A fault on one process (a target state or a loss that is not finite) stops all of them before the
weights change, with the step, the rows and the first bad tensor in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark.devices import fetch, send
from dspark.distill.ahead import Ahead
from dspark.distill.apart import ApartGradients
from dspark.distill.batches import Batch, Schedule, deal, make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.loss import LossSums
from dspark.distill.objective import (
    batch_sums,
    from_vector,
    objective,
    prepare,
    report,
    through_head,
    to_vector,
    zero_sums,
)
from dspark.distill.optim import Optimiser, learning_rate
from dspark.distill.processes import Processes
from dspark.distill.sharding import ShardedOptimiser
from dspark.distill.taps import BadFeatures, FeatureSource, KeptFeatures
from dspark.distill.train_settings import TrainSettings
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.target import Target

HELD_OUT_EPOCH = -1
"""Anchors of held-out rows are drawn once, for an epoch that training never reaches."""


class NonFinite(UserError):
    """Training met NaN or infinity. Weights and earlier checkpoints are as before the step."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one optimiser step did, over all processes.

    sums       loss sums of the whole global batch, float64
    lr         learning rate applied
    grad_norm  before clipping; 0 when nothing was supervised and the weights stayed
    tokens     real tokens the target ran over
    stop       some process was asked to stop
    """

    step: int
    epoch: int
    sums: LossSums
    lr: float
    grad_norm: float
    tokens: int
    stop: bool


class Trainer:
    """A drafter, its optimiser and its rows. All state besides the weights is in `optimiser`.

    `source` gives the target's states; without one the target is run, once a row if it fits.
    Set `stop_requested` (from a signal handler, say) to have the next step report it everywhere.
    """

    def __init__(
        self,
        target: Target,
        drafter: DSparkDrafter,
        rows: Sequence[TrainingRow],
        settings: TrainSettings,
        processes: Processes,
        source: FeatureSource | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.rows = rows
        self.settings = settings
        self.processes = processes
        self.optimiser: Optimiser | ShardedOptimiser = (
            ShardedOptimiser(drafter, settings, processes)
            if settings.sharded
            else Optimiser(drafter, settings, _apart(target, drafter, settings, processes))
        )
        self.schedule = Schedule(
            len(rows), settings.rows_per_step, settings.epochs, settings.max_steps, settings.seed
        )
        self.source = source or _feature_source(target, drafter, settings)
        self.stop_requested = False
        self._ahead = Ahead(processes.device)

    def run_step(self, step: int) -> StepResult:
        """Do optimiser step `step` (from 0). Raises NonFinite, with the weights unchanged."""
        self.drafter.train()
        gradients = self.optimiser.gradients
        epoch, row_ids = self.schedule.step_rows(step)
        batches = list(self._batches(self.rows, row_ids, epoch, self._ahead.batch(step)))
        gradients.zero(len(batches))
        sums: LossSums | None = None
        tokens, fault = 0, None
        parts: list[tuple[Batch, LossSums]] = []
        for at, batch in enumerate(batches):
            tokens += batch.tokens
            if fault is None:
                part, fault = self._accumulate(batch, step if at == 0 else None)
                parts.append((batch, part))
                sums = part if sums is None else sums + part
            gradients.collect()  # after a fault too: the others may wait for this process in it
        gradients.reduce(self.processes)
        gradients.measure()
        lr = learning_rate(step, self.schedule.total_steps, self.settings)
        self._ahead.mark()
        self._begin(step + 1)  # while the device is still busy with this step's gradients
        landed = self._reduce(sums, tokens, fault is not None, lr)
        sums, finite, (tokens, faults, stops) = self._read(landed())
        if faults or not finite:
            self._stop(step, self.processes.texts(fault or self._fault(parts)))
        weight = float(sums.normaliser)
        norm = 0.0
        if weight > 0:
            norm, bad = gradients.finish(weight, self.settings.clip)
            if bad is not None:
                self._stop(step, [f"gradient of {bad} not finite; rows {sorted(row_ids)}"])
            self.optimiser.step(lr)
        else:
            self._drop_step()
        return StepResult(step, epoch, sums, lr, norm, tokens, stops > 0)

    @torch.no_grad()
    def measure(self, rows: Sequence[TrainingRow]) -> dict[str, Any]:
        """Loss and acceptance under teacher forcing on other rows, over all processes."""
        sums = zero_sums(self.drafter.config.block_size, self.processes.device)
        for batch in self._batches(rows, range(len(rows)), HELD_OUT_EPOCH):
            part = batch_sums(self.target, self.drafter, batch, self.settings, self.source)
            sums = sums + part
        sums, _, _ = self._read(self._reduce(sums, 0, False)())
        return report(sums, objective(self.settings))

    def _batches(
        self,
        rows: Sequence[TrainingRow],
        row_ids: Sequence[int],
        epoch: int,
        first: Batch | None = None,
    ) -> Iterator[Batch]:
        """Micro-batches of this process, at least one, each made when it is asked for.

        `first`: the first of them, where it has been made.
        """
        lengths = {i: len(rows[i].ids) for i in row_ids}
        settings, processes = self.settings, self.processes
        dealt = deal(row_ids, lengths, settings.micro_rows, processes.rank, processes.world)
        scored = settings.anchor_choice != "uniform" and epoch != HELD_OUT_EPOCH
        for at, ids in enumerate(dealt):
            yield (
                first
                if at == 0 and first is not None
                else make_batch(
                    rows,
                    ids,
                    anchors=settings.anchors,
                    seed=settings.seed,
                    epoch=epoch,
                    noise=scored,
                )
            )

    def _begin(self, step: int) -> None:
        """Have the first micro-batch of a later step made ready meanwhile."""
        if self.processes.device.type == "cuda" and step < self.schedule.total_steps:
            epoch, row_ids = self.schedule.step_rows(step)
            batch = next(self._batches(self.rows, row_ids, epoch))
            settings, source = self.settings, self.source
            make = partial(prepare, self.target, self.drafter, settings=settings, source=source)
            self._ahead.begin(step, batch, make)

    def _accumulate(self, batch: Batch, first_of: int | None) -> tuple[LossSums, str | None]:
        """Add the gradient of a micro-batch's summed loss; returns its sums, or a fault.

        A loss that is not finite is found when the sums of the step are read: asking here would
        have the device wait for the host before every backward pass.
        """
        with self.optimiser.computing():
            setup = self.target, self.drafter, batch, self.settings, self.source
            try:
                ready = None if first_of is None else self._ahead.take(first_of)
                sums = batch_sums(*setup, ready)
            except BadFeatures as error:
                return zero_sums(self.drafter.config.block_size, self.processes.device), str(error)
            if sums.objective.requires_grad:
                sums.objective.backward()
        return sums.detached(), None

    def _fault(self, parts: Sequence[tuple[Batch, LossSums]]) -> str | None:
        """What is not finite in the first micro-batch of this process that has such a thing."""
        for batch, sums in parts:
            for name in ("ce", "l1", "bce", "objective"):
                if _finite(getattr(sums, name)):
                    continue
                broken = [n for n, p in self.drafter.named_parameters() if not _finite(p)]
                culprit = f"parameter {broken[0]}" if broken else f"loss term {name}"
                return f"{culprit} not finite; rows {sorted(batch.row_ids)}"
        return None

    def _reduce(
        self, sums: LossSums | None, tokens: int, faulty: bool, lr: float | None = None
    ) -> Callable[[], Tensor]:
        """Sums over processes, on their way to the host, for `_read`.

        With `lr` an update that needs nothing of the host is queued behind them.
        """
        if sums is None:
            sums = zero_sums(self.drafter.config.block_size, self.processes.device)
        flags = torch.tensor([tokens, faulty, self.stop_requested], dtype=torch.float64)
        vector = torch.cat([to_vector(sums), send(flags, self.processes.device)])
        values = self.processes.sum(vector)
        landed = fetch(values)
        if lr is not None and isinstance(self.optimiser, Optimiser):
            weight = from_vector(values[:-3], self.drafter.config.block_size).normaliser
            finite = torch.isfinite(values).all() & (values[-2] == 0)
            self.optimiser.begin_step(lr, weight, finite)
        return landed

    def _read(self, values: Tensor) -> tuple[LossSums, bool, tuple[int, int, int]]:
        """Sums, whether all are finite, and (tokens, faults, stop requests)."""
        counts = tuple(int(value) for value in values[-3:].tolist())
        found = from_vector(values[:-3], self.drafter.config.block_size)
        return found, _finite(values), (counts[0], counts[1], counts[2])

    def _drop_step(self) -> None:
        if isinstance(self.optimiser, Optimiser):
            self.optimiser.drop_step()

    def _stop(self, step: int, faults: Sequence[str]) -> None:
        self._drop_step()
        raise NonFinite(
            f"step {step + 1}: {'; '.join(faults)}; nothing was changed in this step. Earlier "
            "checkpoints are intact: lower train.lr, or remove the rows, and start a new run"
        )


def _apart(
    target: Target, drafter: DSparkDrafter, settings: TrainSettings, processes: Processes
) -> ApartGradients | None:
    """Gradients and update for one process on a GPU; None where they have to be flat.

    Everything that is a product under autocast gets a copy in half precision. The sequential head
    is multiplied outside of it: in float32, unless its products are taken with those of the LM
    head.
    """
    if processes.world > 1 or processes.device.type == "cpu" or settings.optimizer != "adamw":
        return None
    half: list[str] = []
    config = drafter.config
    if settings.precision == "bf16" and config.backbone == "attention":
        half = [
            n
            for n, p in drafter.named_parameters()
            if n.startswith(("fc", "layers")) and p.ndim == 2
        ]
        with_head = through_head(target, drafter, settings) is not None
        if with_head and config.markov_head_type == "vanilla":
            half += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    return ApartGradients(drafter, half)


def _feature_source(
    target: Target, drafter: DSparkDrafter, settings: TrainSettings
) -> FeatureSource | None:
    """Keep target states where rows come again; None: run the target over every batch."""
    if settings.epochs == 1 or settings.keep_gib == 0:
        return None
    return KeptFeatures(target, drafter.taps, int(settings.keep_gib * 2**30))


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
