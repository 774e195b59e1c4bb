"""The switch between plain torch and Triton: who runs, who refuses, and what is said of it."""

from __future__ import annotations

import types

import pytest
import torch

from dspark import ops
from dspark.errors import UserError


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> ops.Op:
    """An op whose kernel triples, so that it shows who ran, and takes vectors alone."""
    made = ops.Op("double", _double, "nowhere:triple")
    kernels = types.SimpleNamespace(
        triple=lambda x: 3 * x, refuses=lambda x: None if x.dim() == 1 else "not a vector"
    )
    monkeypatch.setattr(ops, "import_module", lambda name: kernels)
    monkeypatch.setattr(ops, "_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return made


def _run(op: ops.Op, x: torch.Tensor) -> list[float]:
    result: list[float] = op.pick((x,), {})(x).flatten().tolist()
    return result


VECTOR = torch.tensor([1.0, 2.0])


def test_auto_runs_torch_on_a_cpu(op: ops.Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPARK_OPS", raising=False)
    assert _run(op, VECTOR) == [2.0, 4.0]
    assert op.ran == {"torch"}


def test_auto_runs_the_kernel_on_a_gpu_where_it_takes_the_tensors(
    op: ops.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSPARK_OPS", raising=False)
    monkeypatch.setattr(ops, "_on_gpu", lambda args, more: True)
    assert _run(op, VECTOR) == [3.0, 6.0]
    assert _run(op, VECTOR[None]) == [2.0, 4.0]
    assert op.ran == {"torch", "triton"}


def test_triton_runs_the_kernel_or_says_why_not(
    op: ops.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_OPS", "triton")
    assert _run(op, VECTOR) == [3.0, 6.0]
    with pytest.raises(UserError, match="kernel of double does not take this: not a vector"):
        _run(op, VECTOR[None])
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="Triton cannot run here: no CUDA"):
        _run(op, VECTOR)


def test_without_triton_a_gpu_runs_torch_and_a_demand_is_refused(
    op: ops.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_installed", lambda: False)
    monkeypatch.setattr(ops, "_on_gpu", lambda args, more: True)
    monkeypatch.delenv("DSPARK_OPS", raising=False)
    assert _run(op, VECTOR) == [2.0, 4.0]
    monkeypatch.setenv("DSPARK_OPS", "triton")
    with pytest.raises(UserError, match="Triton cannot run here: Triton is not installed"):
        _run(op, VECTOR)


def test_a_demand_for_kernels_names_the_ops_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no error by itself: a run that calls none of them is a run by kernels alone."""
    monkeypatch.setattr(ops, "_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DSPARK_OPS", "triton")
    found = ops.backends()
    assert found["kda_step"] == "triton"
    assert {name for name, runs in found.items() if runs == "none"} == {
        name for name, op in ops._OPS.items() if op.kernel is None
    }


def test_torch_never_runs_a_kernel(op: ops.Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "torch")
    monkeypatch.setattr(ops, "_on_gpu", lambda args, more: True)
    assert _run(op, VECTOR) == [2.0, 4.0]


def test_an_op_without_a_kernel_is_an_error_only_where_one_is_demanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = ops.Op("bare", _double)
    monkeypatch.setattr(ops, "_on_gpu", lambda args, more: True)
    monkeypatch.delenv("DSPARK_OPS", raising=False)
    assert _run(bare, VECTOR) == [2.0, 4.0]
    monkeypatch.setenv("DSPARK_OPS", "triton")
    with pytest.raises(UserError, match="bare has no Triton kernel"):
        _run(bare, VECTOR)
    monkeypatch.setenv("DSPARK_OPS", "tritn")
    with pytest.raises(UserError, match="expected one of auto, torch, triton"):
        _run(bare, VECTOR)


def test_every_kernel_has_the_signature_of_its_reference() -> None:
    """Same names in the same order, so that a caller cannot tell which one runs; a kernel may have
    cuts of its own behind them, which have defaults."""
    import inspect

    pytest.importorskip("triton", reason="`make test-kernels` brings it")
    for op in ops._OPS.values():
        if op.kernel is None:
            continue
        expected = list(inspect.signature(op.reference).parameters)
        own = list(inspect.signature(op.triton).parameters.values())
        assert [p.name for p in own[: len(expected)]] == expected, op.name
        assert all(p.default is not p.empty for p in own[len(expected) :]), op.name
        # one `refuses` may serve the ops of a module: it takes the arguments of each
        taken = inspect.signature(op.refuses).parameters
        rest = any(p.kind is p.VAR_POSITIONAL for p in taken.values())
        assert rest or set(expected) <= set(taken), op.name


def test_what_ran_is_remembered_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "torch")
    ops.forget()
    k = torch.randn(1, 2, 1, 4)
    ops.kda_step(k, k, k, -k.abs(), k[..., 0].sigmoid(), torch.zeros(1, 1, 4, 4), 1)
    assert ops.ran() == {"kda_step": "torch"}
    ops.forget()
    assert ops.ran() == {}
