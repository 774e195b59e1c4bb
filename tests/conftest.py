"""What every test stands on: fixed seeds, few threads, no network, no writing into the checkout."""

from __future__ import annotations

import os

# Before torch and transformers are imported anywhere: both read these once. Spinning OpenMP
# threads on a shared two-core machine cost more than they bring at test sizes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import fcntl
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported; kernels run only where they are asked for by name.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

REPO = Path(__file__).resolve().parent.parent

if find_spec("triton") is None:
    # `make test-kernels` brings Triton for these alone: where it is installed, fla and with it some
    # models of transformers take a CPU for a GPU.
    collect_ignore_glob = ["test_kernel_*.py", "test_static_kernels.py"]


LONG_FILES = ("test_nano_calibration.py", "test_kills.py")
"""Minutes each: begun last, they would keep one process busy after the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first. GPU tests skip where there is no GPU; what else is missing is an error."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same global seeds and leaves the defaults as it found them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


GIB = 2**30
PATIENCE_S = 240.0
LARGE_GIB = 24


@pytest.fixture(autouse=True)
def _room_on_the_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """`@pytest.mark.gpu(gib=N)`: wait until the card has so much left, for it may be shared. Large
    ones run one at a time: two that see the same room would both take it."""
    marker = request.node.get_closest_marker("gpu")
    if marker is None or not torch.cuda.is_available():
        yield
        return
    needed = marker.kwargs.get("gib", 1)
    with _one_at_a_time() if needed >= LARGE_GIB else nullcontext():
        _wait_for_room(needed)
        yield
        torch.cuda.empty_cache()  # what a process keeps, its neighbours on the card lack


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    name = f"dspark-large-gpu-test-{os.getuid()}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wait_for_room(needed: float) -> None:
    started = time.monotonic()
    while (free := torch.cuda.mem_get_info()[0] / GIB) < needed:
        if time.monotonic() - started > PATIENCE_S:
            pytest.skip(f"{needed} GiB of a card with {free:.1f} free for {PATIENCE_S:.0f} s")
        time.sleep(1.0)


@pytest.fixture
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder, where relative defaults such as `runs/` land."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its relatives return NaN (integers: a huge value) instead of luck.

    A kernel that reads memory it never wrote then fails every time, not once a month.
    """
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    return poisoned
