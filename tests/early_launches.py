"""Launches that begin early, in Triton's interpreter, in the order that does most harm.

On Hopper a kernel launched early may run up to its `overlap.wait` as soon as every program of the
one before has called `overlap.begin` or ended. The interpreter runs one launch after the other, so
nothing there ever reads what is not yet written. Inside `adversary` launches are queued instead,
their programs are threads of which one runs at a time, and of all that may run the youngest launch
goes first: whatever is read ahead of its `wait` is read before an older launch has gone on.

Any op of torch but an allocation or a view waits for the queue to run dry, as it would on a GPU.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from dspark_kernels import overlap

MADE = ("empty", "new_empty", "empty_like", "empty_strided")
VIEWS = (
    "view", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
)  # fmt: skip
"""Ops that read no numbers."""


@dataclass(eq=False)
class _Program:
    """One program: runs until it waits, begins or ends, and then hands back."""

    launch: _Launch
    index: tuple[int, int, int]
    begun: bool = False
    waits: bool = False
    ended: bool = False
    error: BaseException | None = None
    thread: threading.Thread | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self) -> None:
        """Let it run to its next stop."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._body, daemon=True)
            self.thread.start()
        interpreter.interpreter_builder.set_grid_dim(*self.launch.grid)
        interpreter.interpreter_builder.set_grid_idx(*self.index)
        self.go.release()
        self.back.acquire()
        if self.error is not None:
            raise self.error

    def _body(self) -> None:
        self.go.acquire()
        _here.program = self
        try:
            self.launch.function(**self.launch.arguments)
        except BaseException as error:
            self.error = error
        self.ended = True
        self.back.release()

    def stop(self) -> None:
        """From inside: hand back until the next `run`."""
        self.back.release()
        self.go.acquire()


@dataclass(eq=False)
class _Launch:
    """A kernel that was launched; `early`: it may begin before the one in front has ended."""

    function: Callable[..., None]
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    early: bool
    kept: Any
    ready: deque[_Program] = field(default_factory=deque)
    waiting: deque[_Program] = field(default_factory=deque)
    holding: int = 0
    """Programs that have neither begun the next launch nor ended."""

    @property
    def ended(self) -> bool:
        return not (self.ready or self.waiting)

    def run(self) -> None:
        """One program to its next stop; those that wait come after all others."""
        program = self.ready.popleft() if self.ready else self.waiting.popleft()
        held = not program.begun
        program.run()
        self.holding -= held and (program.begun or program.ended)
        if not program.ended:
            (self.waiting if program.waits else self.ready).append(program)


class _Here(threading.local):
    program: _Program | None = None


_here = _Here()


class Queue:
    """Launches that have not ended; `ran_ahead` counts programs that began before their turn."""

    def __init__(self) -> None:
        self.launches: list[_Launch] = []
        self.ran_ahead = 0

    def add(self, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        names = inspect.getfullargspec(executor.fn).args
        early = bool(kwargs.get("launch_pdl", False))
        known = {name: x for name, x in kwargs.items() if name in names}
        given = inspect.getcallargs(executor.fn, *args, **known)
        made = {
            name: x if name in executor.constexprs else interpreter._implicit_cvt(x)
            for name, x in given.items()
        }
        grid = executor.grid(made) if callable(executor.grid) else executor.grid
        whole = (*grid, 1, 1)[:3]
        launch = _Launch(executor.fn, made, whole, early, (args, kwargs))
        places: Iterator[Any] = product(*(range(count) for count in whole))
        launch.ready.extend(_Program(launch, place) for place in places)
        launch.holding = len(launch.ready)
        self.launches.append(launch)

    def flush(self) -> None:
        """Run until all have ended."""
        scopes = [interpreter._patch_lang(launch.function) for launch in self.launches]
        try:
            while self.launches:
                if self.launches[0].ended:
                    self.launches.pop(0)
                else:
                    self._youngest().run()
        finally:
            self.launches.clear()
            for scope in reversed(scopes):
                scope.restore()

    def _youngest(self) -> _Launch:
        """The last launch that has a program to run."""
        found = self.launches[0]
        for before, launch in pairwise(self.launches):
            if before.holding or not launch.early:
                break
            if launch.ready:
                found = launch
        self.ran_ahead += found is not self.launches[0]
        return found


class _Barrier(TorchDispatchMode):
    """Torch's ops come behind every launch that was made before them."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in MADE and name not in VIEWS:
            self.queue.flush()
        result = func(*args, **(kwargs or {}))
        if name in MADE:  # what nobody wrote: NaN, or a number that is an id of something
            result.fill_(float("nan") if result.is_floating_point() else 0)
        return result


def _begin(_early: Any) -> None:
    program = _here.program
    if program is not None and _early:
        program.begun = True
        program.stop()


def _wait(_early: Any) -> None:
    program = _here.program
    if program is not None and _early:
        program.waits = True
        program.stop()
        program.waits = False


def _nothing(*_: Any) -> None:
    """Asks for numbers, or orders what one thread at a time orders anyway."""


@contextmanager
def adversary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """Inside, kernels are launched early and run as described above."""
    queue = Queue()
    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("dspark_kernels.") and hasattr(module, "early"):
                patch.setattr(module, "early", lambda: {"EARLY": True, "launch_pdl": True})
        hooks: dict[Any, Callable[..., None]] = {
            overlap.begin: _begin,
            overlap.wait: _wait,
            overlap.publish: _nothing,
            overlap.ahead: _nothing,
        }
        for function, hook in hooks.items():
            patch.setitem(InterpretedFunction.rewritten_fn, function.fn, hook)
        patch.setattr(GridExecutor, "__call__", lambda self, *a, **k: queue.add(self, *a, **k))
        with _Barrier(queue):
            yield queue
            queue.flush()
