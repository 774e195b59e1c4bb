"""The KDA kernels' forms against the recurrence in float64, values and gradients.

The chunked form has two ways to the decay between rows, chosen by what the gate guarantees. Both
must survive the strongest decay that the gate allows, held over whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels import kda
from tests.tolerance import assert_close

B, T, H, K, V = 2, 2 * kda.CHUNK + 5, 3, 12, 7
BOUND = -5.0
Form = Callable[..., tuple[Tensor, Tensor]]


def inputs(g: Tensor) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and an entering state, float64, of order one."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = F.normalize(draw(B, T, H, K), dim=-1), F.normalize(draw(B, T, H, K), dim=-1)
    beta = torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    return q * K**-0.5, k, draw(B, T, H, V), g.double(), beta, draw(B, H, K, V)


def answers(form: Form, given: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs, last state, and the gradient of both with respect to every input."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
    out, state = form(*leaves)
    (out.sin().sum() + state.sin().sum()).backward()
    names = ("d q", "d k", "d v", "d g", "d beta", "d state")
    grads = {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}
    return {"out": out, "state": state, **grads}


EVEN = torch.rand(B, T, H, K, generator=torch.Generator().manual_seed(4))
DECAYS = {
    "strongest": torch.full((B, T, H, K), BOUND),
    "strongest or none": BOUND * (EVEN < 0.5),
    "even": BOUND * EVEN,
    "weak": -1e-3 * EVEN,
}


@pytest.mark.parametrize("bound", [BOUND, None], ids=["factors", "differences"])
@pytest.mark.parametrize("decay", DECAYS)
def test_chunks_are_the_recurrence(decay: str, bound: float | None):
    given = inputs(DECAYS[decay])
    expected = answers(kda.recurrent, given, torch.float64)
    ours = answers(lambda *x: kda.chunk(*x, bound), given, torch.float32)
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert_close(tensor, expected[name], what=name)


def test_a_gate_too_strong_to_factor_is_not_factored():
    """16 rows at -40: exp(640) has no float32, and 0 times it no value."""
    given = inputs(torch.full((B, T, H, K), -40.0))
    expected = answers(kda.recurrent, given, torch.float64)
    for bound in (-40.0, None):
        ours = answers(lambda *x, bound=bound: kda.chunk(*x, bound), given, torch.float32)
        assert_close(ours["out"], expected["out"])
    # what the choice guards against
    out, _ = kda.chunk(*(x.float() for x in given), BOUND)
    assert not torch.isfinite(out).all()
