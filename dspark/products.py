"""Products of half-precision matrices that are summed in a wider dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """out += a b, or out = a b if `fresh`; the sum is taken, and kept, in the dtype of `out`.

    On a GPU it is taken inside the product: `out` is read and written once.
    """
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0 if fresh else 1, out=out)
    elif not out.is_cuda:
        out.copy_(a.to(out.dtype) @ b.to(out.dtype) + (0 if fresh else out))
    elif fresh:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
