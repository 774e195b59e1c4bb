"""What a person sees while a run trains: a bar on a terminal, a line per evaluation elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter:
    """Progress of `total` things, `done` of them already; silent unless `enabled`.

    The bar shows only on a terminal. Lines always show, so a log file keeps what matters.
    """

    def __init__(
        self, what: str, total: int, *, done: int = 0, enabled: bool = True, console: Console
    ) -> None:
        self.console = console
        self.enabled = enabled
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._bar.add_task(what, total=total, completed=done, detail="")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, detail: str = "", by: int = 1) -> None:
        """One more thing done; `detail` stands beside the bar."""
        self._bar.update(self._task, advance=by, detail=detail)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
