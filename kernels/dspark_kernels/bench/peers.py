"""A peer whose kernels try many settings before their first call: fewer, compiled side by side.

Each of its kernels is compiled for every setting and timed; hundreds of compilations one after
another take longer than everything that is measured. So a few settings of each are kept, evenly
spread, and several processes compile them into Triton's cache, each its share, before anything is
timed. `python -m dspark_kernels.bench.peers OP ONLY KEPT SHARE SHARES` is one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from typing import Any

Pick = Callable[[list[Any]], list[Any]]


def spread(kept: int) -> Pick:
    """At most ``kept`` of some settings, evenly spread; 0: all."""

    def pick(settings: list[Any]) -> list[Any]:
        if not 0 < kept < len(settings):
            return settings
        return [settings[i * len(settings) // kept] for i in range(kept)]

    return pick


def try_only(pick: Pick) -> None:
    """Of all tuned kernels that are imported from now on. Ours are not tuned when they run."""
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner.__init__

    def _init(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        plain(self, fn, names, pick(list(configs or [])) or configs, *rest, **named)

    Autotuner.__init__ = _init


def compile_ahead(op: str, only: str, kept: int, processes: int, seconds: float) -> None:
    """Let processes fill Triton's cache; those that are not done by then are ended."""
    command = [sys.executable, "-m", "dspark_kernels.bench.peers", op, only, str(kept)]
    running = [
        subprocess.Popen([*command, str(i), str(processes)], stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, env=dict(os.environ))
        for i in range(processes)
    ]  # fmt: skip
    try:
        with at_most(seconds):
            for process in running:
                process.wait()
    except TimeoutError:
        pass
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so many seconds; a compilation that runs is finished first."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal(SIGALRM, stop)
    setitimer(ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)


def share(kept: int, which: int, shares: int) -> tuple[int, int, int]:
    """Of one process: the setting that it compiles each kernel with, its first case and how many
    it goes on by from case to case. Together they are every setting of every case."""
    settings = min(kept, shares) if kept > 0 else shares
    return which % settings, which // settings, -(-shares // settings)


def main() -> None:
    (op, only), (kept, which, shares) = sys.argv[1:3], (int(x) for x in sys.argv[3:6])
    setting, first, step = share(kept, which, shares)
    settings = min(kept, shares) if kept > 0 else shares

    def mine(found: list[Any]) -> list[Any]:
        chosen = spread(kept)(found)
        return chosen[setting::settings] or chosen[:1]

    try_only(mine)
    cases = import_module(f"dspark_kernels.bench.{op}").every_kernel()
    for case in [x for x in cases if only in x.name][first::step]:
        for make in (case.make, case.peer):
            if make is not None:
                make()()


if __name__ == "__main__":
    main()
