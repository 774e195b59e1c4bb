"""One request by recorded frames: `dspark generate --graphs`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.records import Generation
from dspark.runtime.requests import Request, RoundCallback
from dspark.runtime.rules import Rules
from dspark.runtime.stops import StopStrings


def by_frames(
    frames: GraphDecoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    rules: Rules | None,
    stop: StopStrings | None,
    end_token_ids: Collection[int],
    seed: int,
    on_round: RoundCallback,
) -> Generation:
    """What `SpeculativeDecoder.generate` is asked, of frames that know their sampling already."""
    request = Request(
        prompt_ids,
        max_new_tokens,
        rules=rules,
        stop=stop,
        end_token_ids=end_token_ids,
        seed=seed,
        on_round=on_round,
    )
    return frames.generate_many([request])[0]


def told(frames: GraphDecoder) -> dict[str, Any]:
    """For JSON: whether frames were recorded, and the primaries of each."""
    recorded = "recorded" if frames.turns.recorded else "unrecorded"
    return {"frames": recorded, "sizes": list(frames.sizes)}
