"""A sign of life while a long prompt is read: a bar on stderr, on a terminal alone.

It comes once reading has taken `PATIENCE` and goes with the last token, so that whoever asks short
questions never sees it. A pipe or a file gets nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dspark.runtime.prefill import watch_reading

PATIENCE = 2.0
"""Seconds without a word."""
WORDS = "reading, tokens"


@contextmanager
def reading_bar(quiet: bool = False) -> Iterator[None]:
    """Inside, prompts that take long to read have a bar of their own."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    with shown_in(bar):
        yield


@contextmanager
def shown_in(bar: Progress, patience: float = PATIENCE) -> Iterator[None]:
    """Inside, a line of `bar` says how far a long prompt is; `bar` is started where it was not."""
    line = _Line(bar, patience)
    with watch_reading(line):
        try:
            yield
        finally:
            line.end()


class _Line:
    """One text after the other; the line of each appears late, out of a timer's thread."""

    def __init__(self, bar: Progress, patience: float) -> None:
        self._bar, self._patience = bar, patience
        self._own = not bar.live.is_started
        self._lock = threading.Lock()
        self._read, self._total = 0, 0
        self._task = bar.add_task(WORDS, visible=False)
        self._timer: threading.Timer | None = None

    def __call__(self, read: int, total: int) -> None:
        with self._lock:
            self._read, self._total = read, total
            if self._timer is None and read < total and not self._bar.disable:
                self._timer = threading.Timer(self._patience, self._appear)
                self._timer.daemon = True
                self._timer.start()
            self._bar.update(self._task, completed=read, total=total)
        if read >= total:
            self.end()

    def _appear(self) -> None:
        with self._lock:
            if self._timer is None:
                return  # it ended meanwhile
            self._bar.reset(self._task, completed=self._read, total=self._total, visible=True)
            self._bar.start()

    def end(self) -> None:
        """Nothing is being read any more."""
        with self._lock:
            if self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            self._bar.update(self._task, visible=False)
            if self._own:
                self._bar.stop()
