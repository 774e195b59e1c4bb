"""A KDA layer of one row with its output projection: the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels import kda_output as plain
from dspark_kernels import kda_output_triton as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
WINDOW = 3
ROUNDING = 8e-3
"""bfloat16 rounds to 2^-9; the heads' columns are rounded before they are projected."""


def _given(B: int, H: int, K: int, D: int, factors: int, rank: int = 32) -> dict[str, Tensor]:
    """A layer of bfloat16 with state and small weights in float32; views of one packed product."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    C, wide = 3 * H * K, H * K
    widths = (C, wide if factors < 2 else rank, wide if factors < 1 else rank, H)
    packed = numbers(B, 1, sum(widths)).bfloat16()
    rows, gate, decay, beta = packed.split(widths, dim=-1)
    second = (rank**-0.5 * numbers(max(1, factors), wide, rank)).bfloat16()
    return {
        "rows": rows,
        "decay": decay,
        "beta": beta,
        "gate": gate,
        "held_rows": numbers(B, WINDOW, C).bfloat16(),
        "state": numbers(B, H, K, K),
        "conv": 0.5 * numbers(WINDOW + 1, C),
        "A_log": 0.3 * numbers(H),
        "dt_bias": numbers(wide),
        "norm": 1 + 0.1 * numbers(K),
        "second": second,
        "weight": (wide**-0.5 * numbers(D, wide)).bfloat16(),
    }


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _check(
    B: int, H: int, K: int, D: int, factors: int, bound: float | None, more: bool, rank: int = 32
) -> None:
    """Two steps, so that what the first leaves behind is read."""
    given = _given(B, H, K, D, factors, rank)
    second = given.pop("second") if factors else None
    given.pop("second", None)
    weight = given.pop("weight")
    wide = {name: x.double() for name, x in given.items()}
    second64 = None if second is None else second.double()
    for _ in range(2):
        residual = torch.randn(B, D, device=DEVICE).bfloat16() if more else None
        soon = weight if more else None
        assert (
            kernel.refuses(
                **given, eps=EPS, lower_bound=bound, second=second, weight=weight,
                residual=residual, soon=soon,
            )
            is None
        )  # fmt: skip
        found = kernel.kda_output(
            **given, eps=EPS, lower_bound=bound, second=second, weight=weight, residual=residual,
            soon=soon,
        )  # fmt: skip
        wanted = plain.kda_output(
            **wide, eps=EPS, lower_bound=bound, second=second64, weight=weight.double(),
            residual=None if residual is None else residual.double(),
        )  # fmt: skip
        assert found.dtype == weight.dtype
        assert _error(found, wanted) < ROUNDING
        assert _error(given["state"], wide["state"]) < 2e-3
        assert torch.equal(given["held_rows"].double(), wide["held_rows"])


@pytest.mark.parametrize(
    ("factors", "bound", "more"), [(2, None, True), (1, -5.0, False), (0, -5.0, True)]
)
def test_heads_in_parts(factors: int, bound: float | None, more: bool, poison: None) -> None:
    """Low-rank gate and decay, the decay alone, neither; 8 outputs over four programs."""
    _check(1, 2, 64, 8, factors, bound, more)


@pytest.mark.parametrize(("B", "most"), [(2, 4608), (1, 64)])
def test_several_sequences_or_rows_too_long_take_whole_heads(
    B: int, most: int, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MOST_INPUTS", most)
    _check(B, 2, 64, 8, 1, -5.0, True)


def test_a_window_of_more_channels_than_programs_share_evenly(poison: None) -> None:
    """384 channels over five programs of 128 places each: the last have none."""
    _check(1, 2, 64, 9, 0, -5.0, False)


def test_what_it_refuses() -> None:
    given = _given(1, 2, 64, 24, 2)
    more = {"eps": EPS, "lower_bound": None}
    assert kernel.refuses(**given, **more) is None
    assert "float32" in str(kernel.refuses(**{**given, "state": given["state"].half()}, **more))
    two = {name: given[name].expand(1, 2, -1) for name in ("rows", "decay", "beta", "gate")}
    assert "it takes one" in str(kernel.refuses(**{**given, **two}, **more))
    odd = given["weight"][:, ::2]
    assert "contiguous" in str(kernel.refuses(**{**given, "weight": odd}, **more))


@pytest.mark.gpu
@pytest.mark.parametrize("factors", [1, 2])
def test_kimi_linears_width(factors: int, poison: None) -> None:
    _check(1, 32, 128, 2304, factors, None, True, rank=128)
