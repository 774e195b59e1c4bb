"""What a distillation run trained on, read back from its folder, so that others train on the same.

    RUN/run.yaml    settings: target, rows, batch, steps, seed
    RUN/rows/       the target's answers

Nothing is answered anew unless the run never came to it: rows are kept under a key of all that made
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dspark.distill.answers import (
    RunRows,
    answer_prompts,
    choose_prompts,
    folder_digest,
    hold_out,
    response_settings,
)
from dspark.distill.config import DistillConfig, config_from_dict, load_config
from dspark.distill.processes import Processes
from dspark.distill.prompts import read_prompts
from dspark.distill.run import ROWS, RUN_FILE, prompt_files
from dspark.errors import UserError
from dspark.runtime.loading import LoadedTarget, load_target
from dspark_eval.equal_size import count_parameters


@dataclass(frozen=True)
class RunData:
    """A run's settings, its target and its rows; `processes` is this one alone."""

    config: DistillConfig
    loaded: LoadedTarget
    rows: RunRows
    processes: Processes

    def changed(self, settings: Mapping[str, Any]) -> DistillConfig:
        """The run's settings with some dotted keys changed."""
        values = self.config.to_dict()
        for dotted, value in settings.items():
            section, _, key = dotted.partition(".")
            if key not in values.get(section, {}):
                raise UserError(
                    f"--set {dotted}: no such setting; docs/reference/config.md has all"
                )
            values[section][key] = value
        return config_from_dict(values)

    def parameters(self) -> int:
        """Trainable parameters of the run's own drafter."""
        return count_parameters(self.config, self.loaded)


def read_run(run: Path, device: str | None = None) -> RunData:
    """A run's data. `device` replaces the run's own.

    Raises UserError if the folder holds no run, or what it names is gone.
    """
    path = run / RUN_FILE
    if not path.is_file():
        raise UserError(f"{path}: no run here; give a folder that `dspark distill` wrote")
    config = load_config(path)
    data = config.data
    processes = Processes.start(device or config.target.device)
    dtype = getattr(torch, config.target.dtype)
    loaded = load_target(config.target.name, dtype=dtype, device=processes.device)
    prompts = read_prompts(prompt_files(config), strict=data.strict)
    answered = answer_prompts(
        run / ROWS,
        loaded.target,
        loaded.tokenizer,
        choose_prompts(prompts.rows, data.max_prompts),
        response_settings(data, config.data_seed),
        greedy=data.greedy,
        target_digest=folder_digest(loaded.path),
        processes=processes,
        console=Console(stderr=True, quiet=True),
    )
    return RunData(config, loaded, hold_out(answered, data.held_out, config.data_seed), processes)
