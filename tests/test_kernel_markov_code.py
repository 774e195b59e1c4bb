"""Codes of gated and rnn heads on the device: slot by slot, then inside the walk that draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.runtime.sampling import SamplingParams
from dspark_kernels import markov_code_triton
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.law import draw, weights
from dspark_kernels.markov_code import Coder, code
from dspark_kernels.markov_code_triton import Codes
from dspark_kernels.markov_sample import Drafted, markov_sample
from dspark_kernels.markov_sample_triton import markov_sample as kernel
from dspark_kernels.markov_sample_triton import refuses
from tests.test_kernel_markov_sample import SETTINGS, block, controls
from tests.tolerance import assert_close

# -inf - -inf and the like, where the result is not used; a GPU says nothing about it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
exact_floats()
KINDS = pytest.mark.parametrize("recurrent", [False, True], ids=["gated", "rnn"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
VOCAB = 40


def coder_of(
    batch: int, slots: int, rank: int, recurrent: bool, dtype: Any, device: str = "cpu"
) -> Coder:
    """Cut out of a wider product and a wider weight, as heads cut them."""
    outs, ins = (3 * rank, 2 * rank) if recurrent else (rank, rank)
    wide = torch.full((outs, ins + 5), torch.nan, device=device, dtype=dtype)
    wide[:, 2 : 2 + ins] = 1.5 * torch.randn(outs, ins, device=device) * ins**-0.5
    fixed = torch.randn(batch, slots + 1, outs, device=device).to(dtype)
    fixed[:, slots:] = torch.nan
    return Coder(fixed[:, :slots], wide[:, 2 : 2 + ins], recurrent)


def exact(coder: Coder, w1: Tensor, before: Tensor) -> list[Tensor]:
    """Codes [B, R] of every slot in float64."""
    wide = Coder(coder.fixed.double(), coder.weight.double(), coder.recurrent)
    state, codes = None, []
    for slot in range(before.shape[1]):
        made, state = code(wide, slot, w1[before[:, slot]].double(), state)
        codes.append(made)
    return codes


def follow(batch: int, slots: int, rank: int, recurrent: bool, dtype: Any, device: str) -> None:
    """Every slot's code, while all tokens that are still to come are 0, which none is."""
    coder = coder_of(batch, slots, rank, recurrent, dtype, device)
    w1 = torch.randn(VOCAB, rank, device=device).to(dtype)
    path = torch.randint(1, VOCAB, (batch, slots + 1), device=device)
    tokens = torch.zeros(batch, slots, dtype=torch.int64, device=device)
    made = Codes(coder, w1, path[:, 0].contiguous(), tokens)
    for slot, wanted in enumerate(exact(coder, w1, path[:, :slots])):
        made.make(slot)
        assert_close(made.table, wanted, dtype=dtype)
        tokens[:, slot] = path[:, slot + 1]


@KINDS
@DTYPES
@pytest.mark.parametrize(("batch", "slots", "rank"), [(1, 2, 20), (3, 3, 7)])
def test_interpreted(
    batch: int, slots: int, rank: int, recurrent: bool, dtype: Any, poison: None
) -> None:
    follow(batch, slots, rank, recurrent, dtype, "cpu")


@KINDS
def test_rank_of_more_than_one_step(
    recurrent: bool, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markov_code_triton, "COLUMNS", 16)
    follow(1, 2, 37, recurrent, torch.float32, "cpu")


@KINDS
@DTYPES
def test_reference_rounds_the_code_alone(recurrent: bool, dtype: Any) -> None:
    """In 16 bits the state is carried in float32: no more error at the eighth slot."""
    coder = coder_of(5, 8, 24, recurrent, dtype)
    w1, before = torch.randn(VOCAB, 24).to(dtype), torch.randint(VOCAB, (5, 8))
    state = None
    for slot, wanted in enumerate(exact(coder, w1, before)):
        made, state = code(coder, slot, w1[before[:, slot]], state)
        assert made.dtype == dtype
        assert_close(made.float(), wanted.to(dtype).double(), dtype=dtype)
        assert state is None or state.dtype == torch.float32


def hold(found: Drafted, given: dict[str, Any], dtype: Any) -> None:
    """A block against float64 codes of the tokens that were drawn, and against its own scores."""
    before = torch.cat((given["anchor"][:, None], found.tokens[:, :-1]), 1)
    codes = torch.stack(exact(given["coder"], given["w1"], before), 1)
    table = given["w2"][: given["base"].shape[-1]].double()
    assert_close(found.scores, given["base"].double() + codes @ table.T, dtype=dtype)
    warm = given["temperature"][:, None].expand(found.tokens.shape)
    drawn = draw(weights(found.scores, found.law, warm), given["coins"])
    assert torch.equal(found.tokens, torch.where(warm == 0, found.scores.argmax(-1), drawn))
    weight, bias = given["confidence"]
    inputs = torch.cat((given["hidden"], given["w1"][before]), -1).double()
    assert found.confidence is not None
    trust = inputs @ weight.double()[0] + bias.double()
    torch.testing.assert_close(found.confidence.double(), trust, rtol=1e-4, atol=1e-4)


@KINDS
@DTYPES
@pytest.mark.parametrize("batch", [1, 3])
def test_a_block_drawn_by_them(batch: int, recurrent: bool, dtype: Any, poison: None) -> None:
    given = block(batch, 3, 150, 20, dtype=dtype)
    given["coder"] = coder_of(batch, 3, 20, recurrent, dtype)
    given.update(controls(batch, SamplingParams(0.7), *SETTINGS[:2]))
    assert refuses(**given) is None
    for run in (markov_sample, kernel):
        hold(run(**given), given, dtype)


@KINDS
def test_refused_in_words(recurrent: bool) -> None:
    given = block(2, 2, 30, 4)
    given["coins"] = None
    coder = coder_of(2, 2, 4, recurrent, torch.float32)
    for change, reason in (
        ({"weight": coder.weight.bfloat16()}, "bfloat16"),
        ({"weight": coder.weight.t().contiguous().t()}, "contiguous"),
        ({"fixed": coder.fixed.mT.contiguous().mT}, "contiguous"),
    ):
        given["coder"] = coder._replace(**change)
        assert reason in (refuses(**given) or "taken")


@pytest.mark.gpu
@KINDS
@DTYPES
@pytest.mark.parametrize("batch", [1, 2, 17])
def test_gpu(batch: int, recurrent: bool, dtype: Any, poison: None) -> None:
    follow(batch, 7, 256, recurrent, dtype, "cuda")
    given = block(batch, 4, 163_840, 256, hidden=7168, dtype=dtype, device="cuda")
    given["coder"] = coder_of(batch, 4, 256, recurrent, dtype, "cuda")
    given["w1"] = 0.1 * given["w1"]
    given.update(controls(batch, SamplingParams(0.7), *SETTINGS[:2], device="cuda"))
    assert refuses(**given) is None
    for run in (markov_sample, kernel):
        hold(run(**given), given, dtype)
