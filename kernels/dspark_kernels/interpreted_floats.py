"""Narrow floats in Triton 3.6's interpreter: rounded as a GPU rounds them, multiplied as numbers.

The interpreter cuts float32 to bfloat16 instead of rounding it, loses the carry where a float8
rounds up to the next power of two, and multiplies the bits of bfloat16 matrices as integers. Torch
knows all of these types: conversions go through it. Nothing changes on a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def exact_floats() -> None:
    """Let the interpreter convert and multiply bfloat16 and float8 right; idempotent."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    if getattr(original, "exact", False):
        return
    known = {
        tl.float32: (torch.float32, torch.int32),
        tl.float16: (torch.float16, torch.int16),
        tl.bfloat16: (torch.bfloat16, torch.int16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.int8),
        tl.float8e5: (torch.float8_e5m2, torch.int8),
    }
    unsigned = {torch.int32: "uint32", torch.int16: "uint16", torch.int8: "uint8"}
    to_zero = interpreter._ir.ROUNDING_MODE.RTZ

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding == to_zero or source not in known or target not in known:
            return original(data, source, target, rounding)
        (floats, bits), (narrow, narrow_bits) = known[source], known[target]
        raw = torch.from_numpy(data.copy().view(unsigned[bits]).view(str(bits).split(".")[1]))
        rounded = raw.view(floats).to(narrow).view(narrow_bits).numpy()
        return rounded.view(unsigned[narrow_bits])

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, _widened(a), _widened(b), *rest)

    def _widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = convert(handle.data, tl.bfloat16, tl.float32, None).view("float32")
        return interpreter.TensorHandle(wide, tl.float32)

    convert.exact = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
