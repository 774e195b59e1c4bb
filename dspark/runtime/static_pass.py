"""What a recorded frame asks of a target: a pass whose launches never change, over seats.

    pass     rows in, hidden states, taps and logits out; no value is read on the host, no shape
             depends on one, and every tensor that outlives a step stays where it is
    seats    the state of B requests at places of their own, lengths among it, on the device

`static_pass` makes the one that fits a target. `dspark.k3.static` has that of K3 models,
`dspark.runtime.hf_static` that of transformers' attention models.

Letters: B seats, T rows of a step, D hidden, V vocab, N taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.k3.static.decode import StaticDecoder, StepOutput
from dspark.runtime.k3_target import K3Target
from dspark.runtime.target import Target
from dspark.taps import TapSet

if TYPE_CHECKING:
    from dspark.runtime.hf_static import HFStatic


class StaticSeats(Protocol):
    """The state of B seats, each a request or empty.

    lengths   [B] int64, committed tokens; a frame moves it
    accepted  [B] int64, accepted rows that the next step has to read again; zero in passes without
    folds     whether every row of a step counts at once, so that ``accepted`` is not written
    """

    lengths: Tensor
    accepted: Tensor
    folds: bool

    @property
    def waits(self) -> bool:
        """Whether accepted rows may wait for the next step."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held from step to step."""
        ...

    def folding(self, *, waits: bool) -> StaticSeats:
        """The same seats for steps whose rows all count at once; see `StaticCache.folding`."""
        ...

    def load(self, seat: int, cache: Any) -> None:
        """Seat the only request of an ordinary cache of the target, or of the seat of a `Reading`;
        it stays as it is.

        Raises ValueError for one of another model, or longer than the seats.
        """
        ...

    def reset(self, seat: int) -> None:
        """Empty a seat; whatever it held, also NaN, is gone. An empty seat may be stepped."""
        ...


@dataclass(frozen=True, eq=False)
class Reading:
    """What prompts are read with: a seat, and the rows of the passes that read it, ascending."""

    seat: StaticSeats
    rows: tuple[int, ...]


class StaticPass(Protocol):
    """A model as a pass over seats. Weights are the target's own."""

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of taps."""
        ...

    def new_cache(
        self, batch: int, max_length: int, rows: int = 1, *, slots: bool = True
    ) -> StaticSeats:
        """Empty seats for texts of ``max_length`` tokens and steps of at most ``rows`` rows.

        slots: False where every step is one row and each of them counts.
        """
        ...

    def step(self, tokens: Tensor, cache: Any, *, taps: TapSet | None = None) -> StepOutput:
        """Read rows [B, T] int64 behind what the seats hold. They count as far as the caller moves
        ``cache.lengths``, which it must do before the next step.

        cache: One of this pass's own. `StepOutput.last` is what `logits` takes.
        """
        ...

    def reading(self, max_length: int) -> Reading | None:
        """One seat of its own for prompts of ``max_length`` tokens; steps of it leave rows that do
        not count behind its length. None: the ordinary target reads prompts."""
        ...

    def logits(self, last: Tensor) -> Tensor:
        """[..., D] of `step` -> [..., at least V], of any float dtype."""
        ...


def static_pass(target: Target) -> StaticPass:
    """The target as a static pass. Of transformers' models it is compared with the model itself.

    Raises UserError for a target that has none, or whose pass waits for its GPU; `unrecordable`
    gives the reason alone.
    """
    if isinstance(target, K3Target):
        return StaticDecoder(target.model)
    made = _of_transformers(target)
    if isinstance(made, str):
        raise not_recorded(target, made)
    # On a CPU frames run unrecorded, and a pass that reads values there is as good as another.
    reason = _host_read(made) if target.device.type == "cuda" else None
    if reason is not None:
        raise not_recorded(target, reason)
    return made


def not_recorded(target: Target, reason: str) -> UserError:
    """What is said of a target whose frames cannot be recorded."""
    return UserError(
        f"target {target.name}: its frames cannot be recorded: {reason}; use SpeculativeDecoder, "
        "on the command line leave --graphs out"
    )


def unrecordable(target: Target) -> str | None:
    """Why frames of this target cannot be recorded, in words that follow its name; None: they can.

    On a CPU, where nothing is recorded, it is what a GPU would meet, as far as a CPU can tell.
    """
    if isinstance(target, K3Target):
        return None
    made = _of_transformers(target)
    return made if isinstance(made, str) else _host_read(made)


def _of_transformers(target: Target) -> HFStatic | str:
    """Its static pass, or why there is none."""
    from dspark.runtime.hf_static import HFStatic  # transformers is slow to import
    from dspark.runtime.hf_static_check import wrong_logits
    from dspark.runtime.hf_target import RowTarget

    if not isinstance(target, RowTarget):
        return "it is not made of attention layers alone, and what it holds is restored by the host"
    static = HFStatic(target)
    return wrong_logits(static) or static


def _host_read(static: HFStatic) -> str | None:
    from dspark.runtime.hf_static_check import host_read

    return host_read(static)
