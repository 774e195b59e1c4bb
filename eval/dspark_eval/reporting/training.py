"""Sections of training: a run's curves, a study of many runs, a pruning curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dspark.wording import counted
from dspark_eval.cells import number
from dspark_eval.reporting.blocks import (
    Block,
    Picture,
    Prose,
    Section,
    from_markdown,
    table,
)
from dspark_eval.reporting.words import name
from dspark_eval.study import plots as study_plots
from dspark_eval.study.markdown import markdown
from dspark_eval.study.table import read_table
from dspark_eval.training_plot import plot_training

SETTINGS_FILE = "run.yaml"


def load_training(path: Path, value: Any) -> dict[str, Any]:
    """The history with the settings that lie beside it; null for a run whose file is gone.
    `environment`: who finished the run, as its last record says."""
    settings = path.parent / SETTINGS_FILE
    try:
        known = yaml.safe_load(settings.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        known = None
    return {
        "history": value,
        "settings": known if isinstance(known, dict) else None,
        "environment": value[-1].get("environment"),
    }


def training(source: str, value: Any) -> Section:
    """The curves of a run and where they ended."""
    history = value["history"]
    last = history[-1]
    held_out = last.get("held_out") or {}
    blocks: list[Block] = [
        Prose(
            f"{counted(last['step'], 'step')} in {last['train_s']:.0f} s{_settings(value)}. Under "
            "teacher forcing, training rows as they came and held-out rows: what a drafter would "
            "have accepted of the row itself. Real rounds are measured by eval."
        ),
        table(
            "Where it ended",
            ("rows", "loss", "accepted length"),
            (
                (rows, number(part.get("loss"), 3), number(part.get("accepted_length"), 2))
                for rows, part in (("training", last), ("held-out", held_out))
            ),
        ),
        Picture(
            "training",
            "Loss and accepted length under teacher forcing, by step.",
            f"From loss {number(history[0].get('loss'), 2)} to {number(last.get('loss'), 2)}, "
            f"from accepted length {number(history[0].get('accepted_length'), 2)} to "
            f"{number(last.get('accepted_length'), 2)}",
            partial(plot_training, history, title=_rows(value)),
            wide=True,
        ),
    ]
    return Section(f"Training: {name(str(Path(source).parent))}", tuple(blocks), source)


def _settings(value: Mapping[str, Any]) -> str:
    """What of the settings tells one run from another."""
    known = value.get("settings")
    if not known:
        return ""
    drafter, train = known.get("drafter", {}), known.get("train", {})
    return (
        f", target `{known.get('target', {}).get('name')}`, backbone {drafter.get('backbone')}, "
        f"block {drafter.get('block_size')}, {train.get('optimizer')}, seed {train.get('seed')}"
    )


def _rows(value: Mapping[str, Any]) -> str:
    """What a point of the curves is of."""
    known = value.get("settings") or {}
    taken = known.get("train", {}).get("rows_per_step")
    kept = known.get("data", {}).get("held_out")
    return "" if taken is None else f"n = {taken} rows a step, at most {kept} held out"


def load_study(path: Path, value: Any) -> Any:
    """The table of all arms, rebuilt from their runs."""
    return read_table(path.parent)


def study(source: str, value: Any) -> Section:
    """Every arm of a study, in one table."""
    return Section(
        value["question"],
        (
            Prose(f"Study `{Path(source).parent}`."),
            *from_markdown(markdown(value).splitlines()[1:], "Every arm of the study"),
            *_study_pictures(value),
        ),
        source,
    )


def _study_pictures(value: Any) -> Iterator[Picture]:
    rows = value["rows"]
    lengths = "; ".join(
        f"{row['arm']}: {number(row['results'][0]['accepted_length'], 2)}" for row in rows
    )
    for key, caption, drawn, wanted in (
        ("accepted", "Accepted length by arm.", study_plots.plot_accepted, True),
        ("positions", "Acceptance by position.", study_plots.plot_positions, True),
        ("long", "Accepted length by context.", study_plots.plot_long,
         any(row["long"] for row in rows)),
        ("costs", "Cost of a draft by context.", study_plots.plot_costs,
         any(row["drafting"] for row in rows)),
    ):  # fmt: skip
        if wanted:
            alt = f"{caption} Accepted length of each arm: {lengths}"
            yield Picture(key, caption, alt, partial(drawn, value), wide=True)


def curve(source: str, value: Any) -> Section:
    """Size against accepted length and predicted speed."""
    from dspark_eval.prune_curve import plot_curve
    from dspark_eval.prune_curve import table as curve_table

    blocks: tuple[Block, ...] = (
        Prose(
            f"`{value['draft']}` cut to shares of its parameters, "
            f"{counted(value['steps'], 'step')} of recovery, "
            f"{counted(value['prompts'], 'held-out prompt')} decoded at temperature "
            f"{value['temperature']:g}. Tokens per second are predicted from "
            f"{value['speed_from']}, not measured."
        ),
        *from_markdown(curve_table(value).splitlines(), "Each size"),
        Picture(
            "curve",
            "Accepted length and predicted tokens per second by size.",
            "; ".join(
                f"{point['parameters'] / 1e6:.2f} M parameters: accepted length "
                f"{number(point['recovered']['accepted_length'], 2)} after recovery"
                for point in value["points"]
            ),
            partial(plot_curve, value),
            wide=True,
        ),
    )
    return Section(f"Pruning: {name(value['draft'])}", blocks, source)
