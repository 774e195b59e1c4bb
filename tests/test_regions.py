"""Layers in regions: the same numbers and gradients as layer by layer, compiled or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from dspark.draft import flex, regions
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from tests.test_flex import CONFIG, SLIDING, _states_and_gradients
from tests.tolerance import assert_close

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIGS = pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])


def dense(mask: BlockMask, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`flex.attend_whole`, which has no backward pass on a CPU."""
    whole = create_mask(mask.mask_mod, len(q), 1, q.shape[2], keys.shape[2], device="cpu")
    q, keys = q.to(values.dtype), keys.to(values.dtype)
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=whole, scale=scale, enable_gqa=True
    )


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every pass counts as large, on the CPU too; what is compiled stays as it is written."""
    monkeypatch.setenv("DSPARK_OPS", "torch")
    taken: list[str] = []
    monkeypatch.setattr(flex, "pays", lambda *_: True)
    monkeypatch.setattr(flex, "attend_whole", lambda *a: taken.append("layer") or dense(*a))
    monkeypatch.setattr(regions, "_compiled", regions._regions)
    return taken


def trained(config: DraftConfig, half: bool) -> list[Tensor]:
    torch.manual_seed(0)
    drafter = DSparkDrafter(config)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return _states_and_gradients(drafter, CPU)


@CONFIGS
def test_states_and_gradients_are_those_of_the_layers(
    config: DraftConfig, request: pytest.FixtureRequest
) -> None:
    reference = trained(config, half=False)
    taken = request.getfixturevalue("large")
    for found, expected in zip(trained(config, half=False), reference, strict=True):
        assert_close(found, expected, limit=1e-5)
    assert len(taken) == config.num_layers


def test_under_autocast_they_differ_by_rounding(request: pytest.FixtureRequest) -> None:
    reference, layers = (trained(CONFIG, half) for half in (False, True))
    request.getfixturevalue("large")
    for found, near, exact in zip(trained(CONFIG, half=True), layers, reference, strict=True):
        if exact.any():
            assert (found - exact).norm() < 1.5 * (near - exact).norm() + 1e-6 * exact.norm()


def test_regions_capture_whole(large: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph break inside a region: a break would leave what follows it eager, in silence."""
    graphs: list[int] = []

    def captured(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def compiled(*shape: object) -> tuple[object, ...]:
        return tuple(
            torch.compile(each, dynamic=True, fullgraph=True, backend=captured)
            for each in regions._regions(*shape)  # type: ignore[arg-type]
        )

    monkeypatch.setattr(regions, "_compiled", compiled)
    trained(CONFIG, half=True)
    assert len(large) == CONFIG.num_layers
    assert len(graphs) <= 4  # two regions, for sizes of the first and of any later layer


@pytest.mark.gpu
@CONFIGS
def test_compiled_on_a_gpu_as_on_the_cpu(
    config: DraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    drafter = DSparkDrafter(config)
    reference = _states_and_gradients(drafter, CPU)
    monkeypatch.setattr(flex, "PAYS_FROM", 0)
    for found, expected in zip(_states_and_gradients(drafter.to(GPU), GPU), reference, strict=True):
        assert_close(found, expected)
