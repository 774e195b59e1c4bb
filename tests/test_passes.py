"""Layers as written-out passes: the numbers and gradients of the layers themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.draft import flex, passes, regions, sight
from dspark.draft.attention import rms_norm
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from tests.test_flex import CONFIG, SLIDING, _states_and_gradients, batch
from tests.tolerance import assert_close

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

    def watched(*given: Any, **named: Any) -> Tensor:
        taken.append("pass")
        return run(*given, **named)

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


@CONFIGS
def test_their_gradients_are_autograds_in_float64(config: DraftConfig) -> None:
    """Everything in float64, padded rows and dummy anchors too: no rounding hides a wrong term."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(config).double()
    for name, weight in drafter.named_parameters():
        if "norm" in name:  # ones would hide a weight that is left out
            weight.data.add_(0.3 * torch.randn_like(weight))
    valid, anchors = batch()
    hidden, context = torch.randn(2, 5, 5, 64).double(), torch.randn(2, 23, 64).double()
    layers = drafter.backbone.layers

    def written_out(hidden: Tensor, context: Tensor) -> Tensor:
        turns = sight._rotations(config, valid, anchors, hidden.dtype)
        attend = regions.by_kernel(valid, anchors, config.block_size)
        tables = regions.side_by_side(*turns)
        flat = hidden.flatten(1, 2)
        out = passes.run_layers(config, layers, flat, context, tables, attend, torch.float64)
        return out.view(hidden.shape)

    def as_modules(hidden: Tensor, context: Tensor) -> Tensor:
        return drafter.backbone.train(hidden, context, valid, anchors)

    def found(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (hidden, context)]
        out = run(*inputs)
        pulled = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return [out, *torch.autograd.grad(out, [*inputs, *layers.parameters()], pulled)]

    for mine, exact in zip(found(written_out), found(as_modules), strict=True):
        assert_close(mine, exact, limit=1e-10)


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_rows_that_are_alike_are_projected_once(config: DraftConfig, dtype: torch.dtype) -> None:
    """The promise changes nothing but rounding, in float64 nothing; without it nothing at all."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    drafter = DSparkDrafter(config).to(wide)
    layers = drafter.backbone.layers
    valid, anchors = batch()
    hidden, read = torch.randn(2, 5, 5, 64).to(wide), torch.randn(2, 23, 64).to(wide)
    hidden[:, :, 1:] = torch.randn(2, 1, 1, 64).to(wide)  # a row of its own in each batch row
    attend = regions.by_kernel(valid, anchors, config.block_size)
    tables = regions.side_by_side(*sight._rotations(config, valid, anchors, wide))

    def found(alike: int, trained: bool = False) -> list[Tensor]:
        context, flat = read.clone().requires_grad_(), hidden.flatten(1, 2).requires_grad_(trained)
        out = passes.run_layers(config, layers, flat, context, tables, attend, dtype, alike=alike)
        pulled = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return [out, *torch.autograd.grad(out, [context, *layers.parameters()], pulled)]

    limit = 1e-10 if dtype == torch.float64 else None
    for mine, other in zip(found(5), found(0), strict=True):
        assert_close(mine, other, limit=limit, dtype=dtype)
    if dtype == torch.float64:  # where embeddings train, rows have gradients of their own
        assert all(torch.equal(a, b) for a, b in zip(found(5, True), found(0, True), strict=True))


@pytest.mark.usefixtures("written_out")
def test_a_block_of_one_slot_has_no_rows_that_are_alike() -> None:
    torch.manual_seed(0)
    drafter = DSparkDrafter(replace(CONFIG, block_size=1))
    valid, anchors = batch()
    hidden, read = torch.randn(2, 5, 1, 64), torch.randn(2, 23, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = [drafter.backbone.train(hidden, read, valid, anchors, x) for x in (True, False)]
    assert torch.equal(*found)


def test_the_norm_of_context_features_in_float64() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 7, 12).double(), torch.randn(12).double()
    pulled = torch.randn_like(x)

    def found(run: Callable[[Tensor, Tensor, float], Tensor]) -> list[Tensor]:
        inputs = [each.clone().requires_grad_() for each in (x, weight)]
        out = run(*inputs, 1e-6)
        return [out, *torch.autograd.grad(out, inputs, pulled)]

    for mine, exact in zip(found(passes.normed), found(rms_norm), strict=True):
        assert_close(mine, exact, limit=1e-10)


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
