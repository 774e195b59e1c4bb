"""How an op is timed: replayed from a graph, over inputs that no cache holds, beside a copy.

    time       median over replays of (one graph of n calls on n sets of inputs) / n
    floor      bytes that must move / copy rate; the copy rate is measured in the same run

A graph leaves out what a launch costs the host. The sets of inputs take turns until they fill
`ROTATE` bytes, so that a call reads memory and not the L2 that the call before has filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

Thunk = Callable[[], object]

ROTATE = 256 * 2**20
"""Bytes that the inputs of one graph spread over; four times the L2 of an H200."""
REPLAYS = 15
MOST_SETS = 64


@dataclass(frozen=True)
class Case:
    """One size of one op.

    Attributes:
        name: What the table says: op and shape.
        bytes: That must move if every input is read once and every output written once.
        flops: Operations, a multiply and an add being two; 0: not counted.
        make: Fresh inputs on the GPU, and the call on them; what it returns is kept alive.
        peer: The same of another implementation. None: there is none.
        peer_name: The peer, with its version.
    """

    name: str
    bytes: int
    flops: int
    make: Callable[[], Thunk]
    peer: Callable[[], Thunk] | None = None
    peer_name: str = ""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: the median replay, and the fastest and slowest one."""

    median_us: float
    fastest_us: float
    slowest_us: float


def time_case(make: Callable[[], Thunk], nbytes: int) -> Timing:
    """Time the calls that ``make`` builds, each of which moves about ``nbytes``."""
    sets = max(2, min(MOST_SETS, -(-ROTATE // max(1, nbytes))))
    thunks = [make() for _ in range(sets)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # inputs are still being made
    with torch.cuda.stream(side):  # kernels compile and tune before anything is captured
        for thunk in thunks[:2]:
            thunk()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [thunk() for thunk in thunks]
    for _ in range(2):
        graph.replay()
    times = sorted(_replays(graph, sets))
    del kept
    return Timing(median(times), times[0], times[-1])


def _replays(graph: torch.cuda.CUDAGraph, calls: int) -> Iterator[float]:
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        yield start.elapsed_time(end) * 1e3 / calls


def copy_rate(nbytes: int = 2 * 2**30) -> float:
    """Bytes per second, read and written, of a large copy on the device.

    Not from a graph: there a copy becomes a node of its own kind, which moved 2.7 TB/s on an H200
    where the same copy moves 4.3.
    """
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * nbytes / median(times)
