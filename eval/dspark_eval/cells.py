"""Numbers as tables show them; what was not measured is a dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_MEASURED = "-"


def number(value: float | None, digits: int) -> str:
    """With that many digits behind the point."""
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return number(value, 1)


def percent(value: float | None) -> str:
    """A share."""
    return NOT_MEASURED if value is None else f"{100 * value:.1f} %"


def interval(bounds: Sequence[float] | None) -> str:
    """A confidence interval; nothing for none."""
    return "" if bounds is None else f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def round_parts(run: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What a round's mean milliseconds are made of; a frame has no parts."""
    graphs = run["extra"].get("graphs")
    if graphs is not None:
        return [("frame", graphs["frame_ms_mean"])]
    return [(part, run[f"{part}_ms"]) for part in ("draft", "verify", "other")]


def percent_of(found: Mapping[str, Any] | None) -> str:
    """A share and its interval, as the JSON of an estimate has them."""
    if found is None or found["value"] is None:
        return NOT_MEASURED
    bounds = found["ci95"]
    inside = "" if bounds is None else f" [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"
    return percent(found["value"]) + inside
