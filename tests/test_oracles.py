"""The pinned peers are there, and a missing one cannot pass for a success in CI."""

from __future__ import annotations

import pytest
import torch

from tests import oracles


@pytest.mark.oracle
def test_peers_import() -> None:
    k3 = oracles.require("nemo_automodel.components.models.kimi_k3.model")
    assert hasattr(k3, "KimiK3ForCausalLM")
    assert hasattr(oracles.require("speculators.models.dspark"), "DSparkDraftModel")
    oracles.require("compressed_tensors")


@pytest.mark.oracle
def test_naive_kda_runs_without_triton() -> None:
    q, k, g = (torch.randn(1, 3, 2, 4) for _ in range(3))
    v, beta = torch.randn(1, 3, 2, 4), torch.rand(1, 3, 2)
    out, _ = oracles.fla_naive().naive_recurrent_kda(q, k, v, -g.abs(), beta)
    assert out.shape == v.shape
    assert out.isfinite().all()


def test_missing_peer_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make oracles"):
        oracles.require("no_such_peer")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make oracles"):
        oracles.require("no_such_peer")
