"""The records of training.json as Tensorboard scalars, for who likes to watch.

    {"loss": 1.2, "acceptance": [.7, .6], "decoded": [{"temperature": 1.0, "accepted_length": 2.1}]}
    -> loss, acceptance/0, acceptance/1, decoded/0/temperature, decoded/0/accepted_length

JSON stays the record; this is a copy of its numbers. The package is asked for before any work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dspark.errors import UserError

FOLDER = "tensorboard"

Record = Mapping[str, Any]
"""As in training.json: numbers, lists and mappings of them, and `step`."""


def require_tensorboard() -> None:
    """UserError where the package is missing."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "out.tensorboard: the package tensorboard is not installed; `pip install tensorboard`, "
            "or leave it false: training.json has the same numbers"
        )


@contextmanager
def scalar_log(out: Path, step: int, wanted: bool) -> Iterator[Callable[[Record], None]]:
    """A function that writes a record to the event files of run folder `out`; without `wanted` to
    nowhere.

    `step` steps are done: events of a run that got further and was cut back are dropped.
    """
    if not wanted:
        yield lambda record: None
        return
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / FOLDER), purge_step=step + 1)

    def add(record: Record) -> None:
        for name, value in scalars(record):
            writer.add_scalar(name, value, record["step"])
        writer.flush()

    try:
        yield add
    finally:
        writer.close()


def scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a nested record with their path; text and what was not measured are left out."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key != "step":
                yield from scalars(entry, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for at, entry in enumerate(value):
            yield from scalars(entry, f"{name}/{at}")
    elif isinstance(value, int | float):
        yield name, float(value)
