"""From the name of a device to one that is there, or to one line that says why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dspark.errors import UserError

_NAME = re.compile(r"cpu|cuda(:(0|[1-9]\d*))?")


def check_device_name(name: str, option: str) -> None:
    """UserError, naming `option`, unless `name` is cpu, cuda or cuda:N. Looks at no device."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{option}: expected cpu, cuda or cuda:N; got {name!r}")


def find_device(name: str, option: str) -> torch.device:
    """The device of that name; UserError, naming `option`, where torch sees none."""
    check_device_name(name, option)
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"{option} {name}: torch sees no usable GPU; `dspark doctor` says why")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        seen = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UserError(f"{option} {name}: no such GPU; torch sees {seen}")
    return device


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, without waiting for what the device is still busy with."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_all(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """`send` of many small tensors: those of one dtype travel as one, and are views of it.

    Each begins at a multiple of 16 elements, as one of its own would.
    """
    if device.type == "cpu" or any(each.device.type != "cpu" for each in tensors):
        return [send(each, device) for each in tensors]
    sent: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in {each.dtype for each in tensors}:
        mine = [each.reshape(-1) for each in tensors if each.dtype == dtype]
        padded = [torch.nn.functional.pad(each, (0, -len(each) % 16)) for each in mine]
        parts = send(torch.cat(padded), device).split([len(each) for each in padded])
        sent[dtype] = [part[: len(own)] for part, own in zip(parts, mine, strict=True)]
    return [sent[each.dtype].pop(0).view(each.shape) for each in tensors]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, the host works with one thread.

    Sorting or counting a few thousand numbers takes microseconds; waking 31 threads for it, on a
    host that has other work, takes milliseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fetch(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Send a tensor to the host; what is returned gives it, once it is there.

    Work that is queued on the device in between is not waited for.
    """
    if tensor.device.type == "cpu":
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    sent = torch.cuda.Event()
    sent.record()

    def landed() -> torch.Tensor:
        sent.synchronize()
        return copy

    return landed
