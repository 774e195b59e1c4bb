"""Gluon kernels run without a GPU: `gluon` and its language over numpy, one program after another.

What a kernel computes does not depend on where its numbers lie, so layouts are ignored here; that
they fit is what the compiler checks (`convert_layout(.., assert_trivial=True)`). Shared memory is
poisoned with NaN, loads outside a mask read nothing, tf32 products see 11 bits of each factor.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch


class Tensor(np.ndarray):
    """A block of numbers with the methods that Gluon gives it."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        return _block(self.view(dtype) if bitcast else self.astype(dtype))

    def permute(self, *dims: int) -> Tensor:
        return self.transpose(*dims)


def _block(x: Any) -> Tensor:
    return np.ascontiguousarray(x).view(Tensor)


class Pointer:
    """Places in one flat array."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def load(self, layout: Any) -> Tensor:
        return _block(self.values.copy())

    def store(self, x: np.ndarray) -> None:
        assert x.shape == self.values.shape
        self.values[...] = x

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert start + length <= self.shape[dim]
        return Shared(self.values[(slice(None),) * dim + (slice(start, start + length),)])

    def index(self, at: int) -> Shared:
        return Shared(self.values[at])

    def permute(self, dims: tuple[int, ...]) -> Shared:
        return Shared(self.values.transpose(dims))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        view = self.values.view()
        view.shape = tuple(shape)
        return Shared(view)


def _load(ptr: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    at, mask = np.broadcast_arrays(ptr.at, mask)
    found = np.full(at.shape, other, ptr.memory.dtype)
    found[mask] = ptr.memory[at[mask]]
    return _block(found)


def _store(ptr: Pointer, x: Any, mask: Any = True) -> None:
    at, mask, x = np.broadcast_arrays(ptr.at, mask, x)
    ptr.memory[at[mask]] = x[mask]


def _tf32(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x).view(np.int32) & -8192).view(np.float32).astype(np.float64)


def _mma(a: Tensor, b: Tensor, total: Tensor, input_precision: str) -> Tensor:
    assert input_precision == "tf32"
    return _block((np.asarray(total) + _tf32(a) @ _tf32(b)).astype(np.float32))


def _copy(shared: Shared, ptr: Pointer, mask: Any = True, cache_modifier: str = "") -> None:
    shared.store(_load(ptr, mask))


def _copies() -> ModuleType:
    """`ampere.async_copy`; a copy is done where it is asked for."""
    module = ModuleType("async_copy")
    done: dict[str, Any] = {
        "async_copy_global_to_shared": _copy,
        "commit_group": lambda: None, "wait_group": lambda left: None,
    }  # fmt: skip
    for name, value in done.items():
        setattr(module, name, value)
    return module


def _language(place: list[int]) -> ModuleType:
    """`triton.experimental.gluon.language`, as far as kernels here use it."""
    gl = ModuleType("language")
    layouts = ("NVMMADistributedLayout", "DistributedLinearLayout", "BlockedLayout", "SliceLayout",
               "SwizzledSharedLayout", "DotOperandLayout")  # fmt: skip
    offered: dict[str, Any] = {name: lambda *a, **k: None for name in layouts}
    offered |= {
        "constexpr": lambda x: x,
        "float32": np.float32, "int32": np.int32, "int64": np.int64,
        "static_range": range,
        "program_id": lambda axis: _block(np.int64(place[axis])),
        "arange": lambda start, end, layout: _block(np.arange(start, end)),
        "zeros": lambda shape, dtype, layout: _block(np.zeros(shape, dtype)),
        "load": _load, "store": _store,
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(
            np.full(shape, np.nan, dtype)
        ),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "thread_barrier": lambda: None,
        "where": lambda c, x, y: _block(np.where(c, x, y)),
        "exp2": lambda x: _block(np.exp2(x)),
        "rsqrt": lambda x: _block(1 / np.sqrt(x)),
        "minimum": lambda x, y: _block(np.minimum(x, y)),
        "xor_sum": lambda x, axis: _block(np.bitwise_xor.reduce(x, axis)),
        "sum": lambda x, axis: _block(np.sum(x, axis)),
        "join": lambda x, y: _block(np.stack((x, y), -1)),
    }  # fmt: skip
    for name, value in offered.items():
        setattr(gl, name, value)
    return gl


@contextmanager
def _in_place_of(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def on_numpy(*modules: ModuleType) -> tuple[ModuleType, list[int]]:
    """The last module's kernels as plain functions, and the place of the program that runs.

    The others are those that it imports, in the order of their imports.
    """
    place = [0, 0, 0]
    base = "triton.experimental"
    experimental, gluon, ampere = (ModuleType(x) for x in ("experimental", "gluon", "ampere"))
    experimental.gluon = gluon  # type: ignore[attr-defined]
    gluon.jit = gluon.constexpr_function = lambda f: f  # type: ignore[attr-defined]
    gluon.language = _language(place)  # type: ignore[attr-defined]
    ampere.mma_v2, ampere.async_copy = _mma, _copies()  # type: ignore[attr-defined]
    names = {base: experimental, f"{base}.gluon": gluon, f"{base}.gluon.language": gluon.language,
             f"{base}.gluon.language.nvidia.ampere": ampere}  # fmt: skip
    for module in modules:
        plain = ModuleType(module.__name__)
        with _in_place_of(names):
            exec(compile(inspect.getsource(module), str(module.__file__), "exec"), plain.__dict__)
        names[module.__name__] = plain
    return plain, place


def launch(
    kernel: Callable[..., None], place: list[int], grid: int, *args: Any, **sizes: Any
) -> None:
    """Every program of a grid; tensors are changed in place."""
    arrays = [Pointer(x.numpy().reshape(-1)) if isinstance(x, torch.Tensor) else x for x in args]
    for place[0] in range(grid):
        kernel(*arrays, **sizes)
