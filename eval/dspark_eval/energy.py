"""Joules that a GPU has used, from its own counter (NVML)."""

from __future__ import annotations

from importlib import util


class EnergyMeter:
    """Reads the counter of one GPU; without NVML every reading is None."""

    def __init__(self, index: int = 0) -> None:
        self._handle = None
        if util.find_spec("pynvml") is None:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
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
