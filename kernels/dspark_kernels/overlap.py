"""A launch that begins before the one in front of it has ended, where the GPU knows how.

On Hopper and later a kernel may be resident and have asked for its weights while its predecessor
still runs (programmatic dependent launch). ``begin`` lets the successor do that to us; ``wait``
stands before anything that a predecessor writes or reads. Every program of a kernel launched with
``early()`` must pass ``wait``, or what comes after it would no longer be ordered behind what came
before. ``ahead`` asks the L2 cache for weights, so that memory works while small launches wait for
one another. ``publish`` stands before a late ``begin``: what the program wrote until then may be
read by the successor before its own wait. Elsewhere, AMD's GPUs and the interpreter included, all
four are nothing.
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


@triton.jit
def publish(EARLY: tl.constexpr):
    """What this program's threads wrote is seen by kernels that a later ``begin`` lets go."""
    if EARLY:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()


@triton.jit
def ahead(start, count, EARLY: tl.constexpr, KEEP: tl.constexpr = False):
    """Bring ``count`` numbers from a pointer on into the L2 cache; both ends stand on 16 bytes.

    One thread asks the copy engine for all of them: it costs no register and no load. KEEP: they
    are to outlast what streams through the cache before their turn.
    """
    if EARLY:
        size = count * (start.dtype.element_ty.primitive_bitwidth // 8)
        if KEEP:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .u32 t; .reg .b64 c; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
                "createpolicy.fractional.L2::evict_last.b64 c, 1.0; "
                "@p cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, c; mov.u32 $0, 0; }",
                "=r,l,r", [start, size], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
                "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [start, size], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
