"""Layers as written-out passes: the numbers and gradients of the layers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.draft import flex, passes, regions
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from tests.test_flex import CONFIG, SLIDING, _states_and_gradients

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIGS = pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])


def trained(config: DraftConfig, half: bool) -> list[Tensor]:
    torch.manual_seed(0)
    drafter = DSparkDrafter(config)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return _states_and_gradients(drafter, CPU)


def compare(found: list[Tensor], layers: list[Tensor], reference: list[Tensor]) -> None:
    """As far from float32 as the layers under autocast are."""
    for mine, near, exact in zip(found, layers, reference, strict=True):
        assert mine.dtype == near.dtype
        assert (mine - exact).norm() < 1.5 * (near - exact).norm() + 1e-6 * exact.norm()


@pytest.fixture
def written_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every pass counts as large, on the CPU too; kernels are their references."""
    monkeypatch.setenv("DSPARK_OPS", "torch")
    taken: list[str] = []
    run = passes.run_layers
    monkeypatch.setattr(flex, "pays", lambda *_: True)
    monkeypatch.setattr(regions, "kernel_serves", lambda *_: True)

    def watched(*given: Any) -> Tensor:
        taken.append("pass")
        return run(*given)

    monkeypatch.setattr(passes, "run_layers", watched)
    return taken


@CONFIGS
def test_they_differ_from_the_layers_by_rounding(
    config: DraftConfig, request: pytest.FixtureRequest
) -> None:
    reference, layers = (trained(config, half) for half in (False, True))
    taken = request.getfixturevalue("written_out")
    found = trained(config, half=True)
    assert taken == ["pass"]
    compare(found, layers, reference)


@pytest.mark.usefixtures("written_out")
def test_two_passes_add_up_their_gradients() -> None:
    torch.manual_seed(0)
    drafter = DSparkDrafter(CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        once = _states_and_gradients(drafter, CPU)
        again = _states_and_gradients(drafter, CPU)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.gpu
@CONFIGS
def test_on_a_gpu_as_on_the_cpu(config: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, layers = (trained(config, half) for half in (False, True))
    monkeypatch.setattr(flex, "PAYS_FROM", 0)
    torch.manual_seed(0)
    drafter = DSparkDrafter(config).to(GPU)
    with torch.autocast("cuda", torch.bfloat16):
        found = _states_and_gradients(drafter, GPU)
    compare(found, layers, reference)
