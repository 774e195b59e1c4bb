"""Can frames of a transformers model be recorded, and does its static pass say what it says?

A dozen tokens run through the static pass as frames run them: a prompt that was seated, a block of
which a part is accepted, single rows, another request on another seat. Each row's logits must be
the model's own (`dspark.runtime.hf_check`). The same steps then run watched: an operation that
brings a value to the host, or whose shape depends on one, has no place in a graph. A GPU says more
than a CPU does, since there it also counts how an operation is made.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.runtime.hf_check import FAULTS, TOKENS, Step, check_text, different, own_logits
from dspark.runtime.hf_static import HFStatic
from dspark.runtime.hf_static_cache import HFStaticCache

_READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2", "bincount",
}  # fmt: skip
"""Operations of aten that read values on the host, or whose result is as large as values say."""
_METHODS = {"tolist", "numpy", "cpu", "__array__"}
_SYNC = "synchronizing CUDA operation"
"""What torch calls it where it finds one."""


class HostRead(RuntimeError):
    """An operation that no graph can hold."""


class _Operations(TorchDispatchMode):
    """Of aten; not in inference mode, where whole functions of operations pass as one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _READS or _sized_by_value(name, args, kwargs):
            raise HostRead(f"it needs values on the host ({name})")
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    """Of tensors, which on a CPU read their memory without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            raise HostRead(f"it needs values on the host ({name})")
        return func(*args, **(kwargs or {}))


@contextmanager
def watch() -> Iterator[None]:
    """Inside, the first thing that a graph cannot hold raises `HostRead`. Sets no_grad."""
    with torch.inference_mode(False), torch.no_grad(), _Methods(), _Operations():
        yield


def _sized_by_value(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """A boolean index, or repeats that a tensor counts."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return name == "repeat_interleave" and kwargs.get("output_size") is None


@torch.inference_mode()
def wrong_logits(static: HFStatic) -> str | None:
    """What is wrong with a static pass, in words that follow its target's name; None: nothing."""
    target = static.target
    text, wrong = check_text(target)
    try:
        wanted = own_logits(target, text)
        steps = _steps(static, text, wrong)
    except FAULTS as error:
        return f"its static pass cannot be run ({type(error).__name__}: {error})"
    return different(target, wanted, steps)


def _steps(static: HFStatic, text: Tensor, wrong: Tensor) -> list[Step]:
    """Two seats at different places of the text; a block of which one accepts two rows."""
    target = static.target
    cache = static.new_cache(2, TOKENS, rows=4)
    for seat, length in enumerate((5, 3)):
        read = target.new_cache(1, length)
        target.forward(text[None, :length], read, commit=True)
        cache.load(seat, read)
    block = torch.stack((torch.cat((text[5:7], wrong)), torch.cat((text[3:4], wrong, text[:1]))))
    judged = static.logits(static.step(block, cache).last)
    cache.lengths += torch.tensor([2, 1], device=static.device)
    single = static.logits(static.step(torch.stack((text[7:8], text[4:5])), cache).last)
    cache.lengths += 1
    rest = static.logits(static.step(torch.stack((text[8:12], text[5:9])), cache).last)
    return [
        ("a block", slice(5, 7), judged[0, :2]),
        ("a block beside another", slice(3, 4), judged[1, :1]),
        ("a single row", slice(7, 8), single[0]),
        ("a single row beside another", slice(4, 5), single[1]),
        ("a continuation", slice(8, 12), rest[0]),
        ("a continuation beside another", slice(5, 9), rest[1]),
    ]


def host_read(static: HFStatic) -> str | None:
    """Why a step cannot be recorded, in words that follow its target's name; None: it can."""
    with torch.inference_mode(False), torch.no_grad():
        cache = static.new_cache(1, 8, rows=3)
        tokens = torch.zeros(1, 3, dtype=torch.int64, device=static.device)
        static.step(tokens, cache)  # what a model makes once may be made on the host
        return _reads(static, tokens, cache) or _reads(static, tokens[:, :1], cache)


def _reads(static: HFStatic, tokens: Tensor, cache: HFStaticCache) -> str | None:
    try:
        with _waits_are_errors(static.device), watch():
            static.logits(static.step(tokens, cache).last)
    except RuntimeError as error:
        if not isinstance(error, HostRead) and _SYNC not in str(error):
            raise
        return f"its pass waits for the device: {_where(error)}"
    return None


@contextmanager
def _waits_are_errors(device: torch.device) -> Iterator[None]:
    """On a GPU torch itself finds most of them."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not find all of them
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _where(error: BaseException) -> str:
    """Which line of the model it was, and what that did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if "transformers" in Path(frame.filename).parts]
    place = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}, " if lines else ""
    return f"{place}{str(error).splitlines()[0]}"
