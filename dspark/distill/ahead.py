"""The next micro-batch, made ready beside what the device is still doing for this step.

What a batch brings with it (its tensors, which slots are trained, the target's states, which
positions slots imitate) depends on no weight that trains. On a GPU it is queued on a stream of its
own once a step's gradients are, and runs beside their update. On a CPU nothing is made before it is
needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark.distill.batches import Batch
from dspark.distill.objective import Ready
from dspark.distill.taps import BadFeatures


class Ahead:
    """At most one prepared micro-batch, known by the step it belongs to."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._step: int | None = None
        self._batch: Batch | None = None
        self._ready: Ready | BadFeatures | None = None
        self._marked = torch.cuda.Event() if self._stream is not None else None

    def mark(self) -> None:
        """What is queued by now comes before the next micro-batch: it reads, or frees, memory."""
        if self._marked is not None:
            self._marked.record()

    def begin(self, step: int, batch: Batch, make: Callable[[Batch], Ready]) -> None:
        """Queue the first micro-batch of a step, after everything up to the last `mark`."""
        if self._stream is None or self._marked is None:
            return
        self._stream.wait_event(self._marked)
        with torch.cuda.stream(self._stream):
            try:
                self._ready = make(batch)
            except BadFeatures as error:  # to be raised in the step that it belongs to
                self._ready = error
        self._step, self._batch = step, batch

    def batch(self, step: int) -> Batch | None:
        """The first micro-batch of a step as it was given to `begin`, if it was."""
        return self._batch if self._step == step else None

    def take(self, step: int) -> Ready | None:
        """The first micro-batch of a step, if it was begun. Raises BadFeatures."""
        ready, known = self._ready, self._step
        self._ready = self._step = self._batch = None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if isinstance(ready, BadFeatures) and known == step:
            raise ready
        return ready if isinstance(ready, Ready) and known == step else None
