"""The curves of a training run: loss and accepted length by step, training and held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark_eval.plots import BLUE, GREY, RED, save

PANELS = (("loss", "loss"), ("accepted_length", "accepted length, teacher forcing"))


def plot_training(history: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Draw the records of `training.json`, held-out rows where they were evaluated; `title`: what
    the points rest on."""
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for name, colour, marker, points in (
            ("training rows", BLUE, "", [(r["step"], r.get(key)) for r in history]),
            (
                "held-out rows", RED, "o",
                [(r["step"], r["held_out"].get(key)) for r in history if r.get("held_out")],
            ),
        ):  # fmt: skip
            known = [(step, value) for step, value in points if value is not None]
            if known:
                axes.plot(*zip(*known, strict=True), color=colour, marker=marker, label=name)
        axes.set_title(title, fontsize=8.5, color=GREY, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)
