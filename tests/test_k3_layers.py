"""One layer of a K3 shape, timed: what is counted of it is what it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.k3.cost import pass_bytes
from dspark_eval import k3_layers
from dspark_eval.k3_layers import TINY, Step, random_layer
from tests.headings import assert_headed

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", k3_layers.KINDS)
def test_bytes_of_a_layer_are_those_of_the_cost_model(kind: str) -> None:
    """Two layers less one, so that nothing outside a layer is counted; a plain row behind 40."""
    layer = random_layer(TINY, kind, CPU, torch.float32)
    counted = []
    for count in (1, 2):
        config = replace(layer.repeated(count).config, expert_quantization="mxfp4")
        counted.append(pass_bytes(config, 1, 40, torch.float32).total)
    expected = counted[1] - counted[0]
    assert layer.nbytes(1, 40, 4.0) == pytest.approx(expected, rel=0.05)
    more = layer.nbytes(1, 40, 5.0) - layer.nbytes(1, 40, 4.0)
    assert more == 3 * 32 * 32 * (1 / 2 + 1 / 32), "codes of half a byte, a scale for 32"


@pytest.mark.parametrize("kind", k3_layers.KINDS)
def test_a_step_is_so_many_layers_of_its_own_state(kind: str) -> None:
    layer = random_layer(TINY, kind, CPU, torch.float32)
    one, three = (Step(layer, count, 2, 30) for count in (1, 3))
    assert len(three.replay.run()) == 3
    assert three.cache.nbytes > 2 * one.cache.nbytes
    assert 4 <= three.distinct() <= 8, "two rows of four experts each"
    assert all(torch.isfinite(x).all() for x in (three.cache.state, three.cache.latents))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "layers.json"
    asked = ["--shape", "tiny", "--device", "cpu", "--context", "20", "--count", "1"]
    whole = [*asked, "--rows", "1", "3", "--seed", "4", "--json", str(out)]
    assert k3_layers.main(whole) == 0
    found = json.loads(out.read_text())
    assert_headed(found, "k3_layers", whole, 4)
    assert [row["rows"] for row in found["layers"]["mla"]] == [1, 3]
    assert found["layers"]["kda"][0]["experts"] == 4
    assert "kda layer, 3 rows" in capsys.readouterr().out
    assert k3_layers.main([*asked, "--rows", "0"]) == 2
    assert "--rows: expected 1 or more" in capsys.readouterr().err
