"""Deterministic kernels for the time of a run: the flag, cuBLAS's workspace, and the way back."""

from __future__ import annotations

import os

import pytest
import torch

from dspark.distill.determinism import CUBLAS_WORKSPACE, deterministic


@pytest.mark.parametrize("before", [False, True])
def test_the_flag_is_up_inside_and_as_it_was_after(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":0:0")  # put back by the fixture
    torch.use_deterministic_algorithms(before)
    try:
        with pytest.raises(KeyError), deterministic(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ[CUBLAS_WORKSPACE] == ":4096:8"
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled() is before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_reproducible_workspace_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":16:8")
    with deterministic(True):
        assert os.environ[CUBLAS_WORKSPACE] == ":16:8"


def test_a_run_that_does_not_ask_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
        assert CUBLAS_WORKSPACE not in os.environ
