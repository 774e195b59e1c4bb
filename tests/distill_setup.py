"""A distillation small enough for tests: the toy target, its rows, a drafter of 20 k parameters."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dspark.distill.chat import TrainingRow
from dspark.distill.config import DistillConfig, load_config
from dspark.distill.loop import find_checkpoint, train
from dspark.distill.processes import Processes
from dspark.distill.state import Progress
from dspark.distill.train_settings import TrainSettings
from dspark.distill.trainer import Trainer
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from tests.toy_target import ToyTarget, toy_rows

ALONE = Processes(torch.device("cpu"))

SETTINGS = TrainSettings(
    epochs=4, rows_per_step=4, micro_rows=4, anchors=6, lr=5e-3, warmup=0.1, seed=11, log_every=1
)


def rows(target: ToyTarget, count: int = 16, length: int = 24) -> list[TrainingRow]:
    return [TrainingRow(ids, mask) for ids, mask in toy_rows(target, count, length)]


def drafter(target: ToyTarget, seed: int = 0, block_size: int = 4) -> DSparkDrafter:
    torch.manual_seed(seed)
    return DSparkDrafter(
        DraftConfig(
            hidden_size=target.hidden_size,
            num_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=48,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            target_layer_ids=(0, 2),
            target_tap_kind="residual",
            mask_token_id=0,
            block_size=block_size,
            markov_rank=8,
        )
    )


def trainer(
    settings: TrainSettings = SETTINGS,
    *,
    training_rows: Sequence[TrainingRow] | None = None,
    target: ToyTarget | None = None,
    processes: Processes = ALONE,
    **changes: Any,
) -> Trainer:
    target = target or ToyTarget()
    training_rows = rows(target) if training_rows is None else training_rows
    return Trainer(target, drafter(target), training_rows, replace(settings, **changes), processes)


def config(out: Path, **overrides: Any) -> DistillConfig:
    """A run of 12 steps of the toy, a checkpoint every 3, as `section__key=value`."""
    values = {
        "train.epochs": 3, "train.rows_per_step": 4, "train.micro_rows": 4, "train.anchors": 6,
        "train.lr": 5e-3, "train.seed": 11, "train.log_every": 1, "eval.every": 100,
        "eval.draft_length": 4, "drafter.block_size": 4, "out.checkpoint_every": 3,
        "out.dir": str(out),
    }  # fmt: skip
    return load_config(None, values | {k.replace("__", "."): v for k, v in overrides.items()})


def run(
    settings: DistillConfig,
    *,
    rows_digest: str = "toy",
    processes: Processes = ALONE,
    on_step: Any = None,
) -> tuple[Trainer, Progress, str]:
    """`train` on the toy; returns the trainer, the progress and what was printed."""
    made = trainer(settings.train, processes=processes)
    if on_step is not None:
        step = made.run_step

        def watched(number: int) -> Any:
            on_step(made, number)
            return step(number)

        made.run_step = watched  # type: ignore[method-assign]
    text = io.StringIO()
    console = Console(file=text, width=400)
    progress = train(
        made,
        settings,
        rows_digest=rows_digest,
        evaluate=dict,
        checkpoint=find_checkpoint(settings, processes, console),
        console=console,
    )
    return made, progress, text.getvalue()


def weights(made: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.drafter.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit-equal, name by name."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
