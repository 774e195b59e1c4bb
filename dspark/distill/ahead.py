"""The next micro-batch, made ready beside what the device is still doing for this step.

What a batch brings with it (its tensors, the target's states, the logits that slots imitate)
depends on no weight that trains. On a GPU it is queued on a stream of its own once a step's
gradients are, and runs beside their update: products beside a pass over memory. On a CPU nothing is
made before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.distill.objective import Ready
from dspark.distill.taps import BadFeatures


class Ahead:
    """At most one prepared micro-batch, known by the step it belongs to."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._step: int | None = None
        self._ready: Ready | BadFeatures | None = None

    def begin(self, step: int, make: Callable[[], Ready]) -> None:
        """Queue the first micro-batch of a step, after everything that is queued by now."""
        if self._stream is None:
            return
        # What it reads, and the memory it is given, may be in use until then.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                self._ready = make()
            except BadFeatures as error:  # to be raised in the step that it belongs to
                self._ready = error
        self._step = step

    def take(self, step: int) -> Ready | None:
        """The first micro-batch of a step, if it was begun. Raises BadFeatures."""
        ready, known = self._ready, self._step
        self._ready = self._step = None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if isinstance(ready, BadFeatures) and known == step:
            raise ready
        return ready if isinstance(ready, Ready) and known == step else None
