"""dspark: distil, run and measure block drafters for large language models.

    from dspark import SamplingParams, SpeculativeDecoder, load_drafter, load_target

Nothing heavy is imported here: `import dspark` costs milliseconds, and each name below loads what
it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.draft.checkpoint import load_drafter
    from dspark.runtime.decode import SpeculativeDecoder
    from dspark.runtime.loading import load_target
    from dspark.runtime.plain import plain_generate
    from dspark.runtime.pool import StatePool
    from dspark.runtime.prefix_cache import PrefixCache
    from dspark.runtime.rules import Rules
    from dspark.runtime.sampling import SamplingParams
    from dspark.runtime.stops import StopStrings

__version__ = "0.1.0"

__all__ = [
    "PrefixCache",
    "Rules",
    "SamplingParams",
    "SpeculativeDecoder",
    "StatePool",
    "StopStrings",
    "__version__",
    "load_drafter",
    "load_target",
    "plain_generate",
]

_HOMES = {
    "PrefixCache": "dspark.runtime.prefix_cache",
    "Rules": "dspark.runtime.rules",
    "SamplingParams": "dspark.runtime.sampling",
    "SpeculativeDecoder": "dspark.runtime.decode",
    "StatePool": "dspark.runtime.pool",
    "StopStrings": "dspark.runtime.stops",
    "load_drafter": "dspark.draft.checkpoint",
    "load_target": "dspark.runtime.loading",
    "plain_generate": "dspark.runtime.plain",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
