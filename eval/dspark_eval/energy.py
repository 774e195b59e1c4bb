"""Joules that a GPU has used, from its own counter (NVML)."""

from __future__ import annotations

from importlib import util
from typing import Any

import torch


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


def _handle(nvml: Any, index: int) -> Any:
    """NVML counts all GPUs of the machine, torch those it may see: the card's own id is common."""
    card = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if card is None:  # torch before 2.4
        return nvml.nvmlDeviceGetHandleByIndex(index)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{card}".encode())
