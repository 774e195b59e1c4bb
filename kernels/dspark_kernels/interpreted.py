"""Loops whose length a kernel only knows when it runs, in Triton's interpreter.

The interpreter keeps a scalar as an array of one number and turns it into the bound of a Python
range with `int`, which NumPy 2.4 refuses for an array that has a dimension. Nothing changes on a
GPU.
"""

from __future__ import annotations

import os
from typing import Any


def allow_loops() -> None:
    """Let `tl.range(n)` and `range(n)` run in the interpreter with any NumPy; idempotent."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "allows_loops", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.allows_loops = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
