"""A launch that begins before the one in front of it has ended, where the GPU knows how.

On Hopper and later a kernel may be resident and have asked for its weights while its predecessor
still runs (programmatic dependent launch). ``begin`` lets the successor do that to us; ``wait``
stands before anything that a predecessor writes or reads. Every program of a kernel launched with
``early()`` must pass ``wait``, or what comes after it would no longer be ordered behind what came
before. Elsewhere, AMD's GPUs and the interpreter included, both are nothing.
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs
import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def early() -> dict[str, bool]:
    """What a launch adds to its arguments."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None:
        return {"EARLY": False}
    if torch.cuda.get_device_capability() < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def begin(EARLY: tl.constexpr):
    """The next kernel may be launched."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """The kernels before this one have ended, and what they wrote is there."""
    if EARLY:
        gdc_wait()
