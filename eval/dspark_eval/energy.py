"""Joules that a GPU has used, from its own counter (NVML), and joules per token.

    J / token = (E_1 - E_0) / tokens made in between

The counter stands still for tens of milliseconds and then jumps, longer than a short text takes. So
work is repeated for seconds, and E_0 and E_1 are read where the counter was seen to jump: either
end is off by one piece of work at most. What the card draws at rest is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from typing import Any, Protocol

import torch

PATIENCE = 10.0
"""A counter that does not jump in so many times the least seconds is none."""


class EnergyMeter:
    """Reads the counter of one GPU, by torch's index; without NVML every reading is None."""

    def __init__(self, index: int = 0) -> None:
        self._handle = None
        if util.find_spec("pynvml") is None or not torch.cuda.is_available():
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            handle = _handle(pynvml, index)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            return
        self._handle = handle

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        if self._handle is None:
            return None
        import pynvml

        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


class Meter(Protocol):
    """Anything with a counter of joules."""

    def joules(self) -> float | None: ...


@dataclass(frozen=True)
class Energy:
    """What a stretch of work took."""

    joules: float
    seconds: float
    tokens: int

    def document(self) -> dict[str, float]:
        """JSON-ready."""
        return {
            "joules_per_token": self.joules / self.tokens,
            "watts": self.joules / self.seconds,
            "seconds": self.seconds,
            "tokens": self.tokens,
        }


def measure_energy(
    work: Callable[[], int],
    meter: Meter,
    least_s: float,
    now: Callable[[], float] = time.perf_counter,
) -> Energy | None:
    """Repeat ``work`` between two jumps of the counter that are ``least_s`` apart or more.

    Args:
        work: Returns the tokens that it made, once the device has made them.
        meter: None from it, or no jump in `PATIENCE` times ``least_s``: no result.
        now: Seconds.
    """
    last, started = meter.joules(), now()
    if last is None:
        return None
    first: tuple[float, float] | None = None
    tokens = 0
    while now() - started < PATIENCE * least_s:
        tokens += work()
        read, at = meter.joules(), now()
        if read is None or read == last:
            continue
        last = read
        if first is None:
            first, tokens = (read, at), 0
        elif at - first[1] >= least_s:
            return Energy(read - first[0], at - first[1], tokens)
    return None


def _handle(nvml: Any, index: int) -> Any:
    """NVML counts all GPUs of the machine, torch those it may see: the card's own id is common."""
    card = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if card is None:  # torch before 2.4
        return nvml.nvmlDeviceGetHandleByIndex(index)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{card}".encode())
