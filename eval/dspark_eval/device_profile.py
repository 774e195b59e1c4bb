"""What a GPU did while something ran: launches, time by kernel, gaps between them, host waits.

Times are CUPTI's, through torch.profiler; a kernel inside a replayed graph counts as one launch.
Busy is the union of all kernels' and copies' intervals, so that what overlaps counts once; a gap is
what lies between two of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "hipStreamSynchronize")
EVENT_WAITS = ("cudaEventSynchronize", "hipEventSynchronize")


_END = "dspark: all queued"


@dataclass(frozen=True)
class Kernel:
    """One kernel: launches and microseconds per unit of work."""

    name: str
    launches: float
    microseconds: float


@dataclass(frozen=True)
class DeviceProfile:
    """Per unit of work (a token, a frame).

    waits        host waits for the whole device or stream
    event_waits  host waits for one event, such as the letter of a frame that is over
    """

    launches: float
    busy_us: float
    idle_us: float
    waits: float
    event_waits: float
    kernels: tuple[Kernel, ...]

    @property
    def idle_share(self) -> float:
        """Of the time from the first launch to the end of the last."""
        return self.idle_us / max(self.busy_us + self.idle_us, 1e-9)

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "launches": self.launches,
            "busy_us": self.busy_us,
            "idle_us": self.idle_us,
            "idle_share": self.idle_share,
            "host_waits": self.waits,
            "event_waits": self.event_waits,
            "kernels": [vars(kernel) for kernel in self.kernels],
        }

    def table(self, most: int = 30) -> str:
        """The longest kernels, a line each."""
        lines = [f"{'us':>9} {'launches':>9} {'us each':>8}  kernel"]
        for k in self.kernels[:most]:
            each = k.microseconds / k.launches
            lines.append(f"{k.microseconds:9.1f} {k.launches:9.2f} {each:8.2f}  {k.name[:88]}")
        rest = self.kernels[most:]
        if rest:
            total, count = sum(k.microseconds for k in rest), sum(k.launches for k in rest)
            lines.append(f"{total:9.1f} {count:9.2f} {'':8}  {len(rest)} more")
        lines.append(
            f"{self.busy_us:9.1f} {self.launches:9.2f} {'':8}  busy; idle {self.idle_us:.1f} us "
            f"({100 * self.idle_share:.1f} %); host waits {self.waits:.2f}, for events "
            f"{self.event_waits:.2f}"
        )
        return "\n".join(lines)


def profile(run: Callable[[], None], units: int) -> DeviceProfile:
    """Profile one call of ``run``, which does ``units`` units of work and leaves them queued."""
    from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        run()
        with torch.profiler.record_function(_END):
            torch.cuda.synchronize()
    events = list(seen.events() or [])
    end = next(event.time_range.start for event in events if event.name == _END)
    called = [event.name for event in events if event.time_range.start < end]
    spans: list[tuple[float, float]] = []
    by_name: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event.device_type != DeviceType.CUDA or event.name == _END:
            continue
        span = (event.time_range.start, event.time_range.end)
        spans.append(span)
        by_name[event.name][0] += 1
        by_name[event.name][1] += span[1] - span[0]
    busy, idle = _union(spans)
    kernels = sorted(
        (Kernel(name, n / units, us / units) for name, (n, us) in by_name.items()),
        key=lambda k: -k.microseconds,
    )
    return DeviceProfile(
        launches=len(spans) / units,
        busy_us=busy / units,
        idle_us=idle / units,
        waits=sum(name in WAITS for name in called) / units,
        event_waits=sum(name in EVENT_WAITS for name in called) / units,
        kernels=tuple(kernels),
    )


def _union(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Covered time and the gaps in it."""
    busy = idle = 0.0
    last: float | None = None
    for start, end in sorted(spans):
        if last is None:
            last = start
        idle += max(0.0, start - last)
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy, idle
