"""A sequence of launches that is recorded once and replayed: a CUDA or HIP graph.

What is recorded is a function without arguments that reads and writes tensors which stay where they
are, looks at no value on the host, and whose shapes depend on nothing. On a CPU the same function
is simply called, so that its text can be tested there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

WARM_UPS = 2
"""Runs before recording: kernels are compiled and libraries start in the first."""

_BEGUN: set[torch.device] = set()
"""Devices on which this process has recorded a graph before."""


class NotRecorded(RuntimeError):
    """The function does what no graph can hold."""


class Replay(Generic[Result]):
    """One function, recorded where its device can.

    Args:
        function: What it returns are tensors that every replay overwrites.
        device: Where it runs.
        pool: Memory that several graphs share, which never run at the same time.

    The function runs ``WARM_UPS`` times here: whatever it changes must be fit to be changed.

    Raises NotRecorded if the function cannot be recorded.
    """

    def __init__(
        self,
        function: Callable[[], Result],
        device: torch.device,
        pool: Any = None,
    ) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            self._result = self._record(device, pool)

    def _record(self, device: torch.device, pool: Any) -> Result:
        assert self._graph is not None
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._function()
        torch.cuda.current_stream(device).wait_stream(aside)
        _record_a_first(device)
        here = torch.cuda.current_stream(device)
        try:
            with torch.cuda.graph(self._graph, pool=pool):
                return self._function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it ran before: recording is what failed
            # A broken recording leaves its stream the current one and the generator recording.
            torch.cuda.set_stream(here)
            _record_addition(device)
            first = error.__context__ or error  # what ends it raises once more
            raise NotRecorded(str(first).splitlines()[0]) from error

    @property
    def recorded(self) -> bool:
        """Whether a graph is replayed, and not the function called."""
        return self._graph is not None

    def run(self) -> Result:
        """Queue it once more."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result


def _record_a_first(device: torch.device) -> None:
    """A graph of one addition, once in a process.

    The first graph that a process records is replayed 4 % slower than it could be until another one
    has been recorded, whichever that is and whether or not it is kept (docs/graphs.md).
    """
    if device not in _BEGUN:
        _BEGUN.add(device)
        _record_addition(device)


def _record_addition(device: torch.device) -> None:
    number = torch.zeros(1, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        number.add_(1)
