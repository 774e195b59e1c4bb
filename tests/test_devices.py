"""Device names: what is no name, and what names nothing here."""

from __future__ import annotations

import pytest
import torch

from dspark import devices
from dspark.devices import check_device_name, find_device, send_all
from dspark.distill.processes import Processes
from dspark.errors import UserError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    "name", ["", "tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "cuda:0:1", "cpu:0", "cuda0"]
)
def test_what_is_no_name_is_said_without_looking_for_a_gpu(name: str) -> None:
    for check in (check_device_name, find_device):
        with pytest.raises(UserError, match=r"^--device: expected cpu, cuda or cuda:N; got '"):
            check(name, "--device")


def test_a_name_gives_its_device(two_gpus: None) -> None:
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert find_device(name, "--device") == torch.device(name)


def test_an_index_that_no_gpu_has_is_refused(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"^--device cuda:2: no such GPU; torch sees cuda:0 to c"):
        find_device("cuda:2", "--device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"cuda:7: no such GPU; torch sees cuda:0$"):
        find_device("cuda:7", "--device")


def test_no_gpu_at_all_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("cpu", "--device").type == "cpu"
    with pytest.raises(UserError, match=r"^--device cuda: torch sees no usable GPU; `dspark doct"):
        find_device("cuda", "--device")
    with pytest.raises(UserError, match=r"^target\.device cuda: torch sees no usable GPU"):
        Processes.start("cuda")


def test_more_processes_than_gpus_is_said_before_any_group_forms(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"^process 3 of this machine: cuda:3: no such GPU"):
            Processes.start(device)


def test_small_tensors_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    journeys: list[torch.Tensor] = []

    def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        journeys.append(tensor)
        return tensor

    monkeypatch.setattr(devices, "send", send)
    given = [
        torch.arange(6).view(2, 3), torch.tensor([True, False]), torch.zeros(0, dtype=torch.int64),
        torch.arange(20), torch.tensor([[False]]),
    ]  # fmt: skip
    found = send_all(given, torch.device("cuda"))
    assert len(journeys) == 2
    for mine, wanted in zip(found, given, strict=True):
        assert mine.shape == wanted.shape
        assert torch.equal(mine, wanted)
        assert mine.storage_offset() % 16 == 0
    monkeypatch.undo()
    assert all(a is b for a, b in zip(send_all(given, torch.device("cpu")), given, strict=True))
