"""The sequential head on the device: the runtime's own walk, then the kernel against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.draft.heads import ConfidenceHead, VanillaMarkovHead
from dspark.runtime import proposal
from dspark.runtime.sampling import SamplingParams
from dspark_kernels import law_triton
from dspark_kernels.law import draw, law_of, probs_of, weights
from dspark_kernels.markov_sample import Drafted, markov_sample
from dspark_kernels.markov_sample_triton import markov_sample as kernel
from dspark_kernels.markov_sample_triton import refuses

# -inf - -inf and the like, where the result is not used; a GPU says nothing about it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

SETTINGS = [
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(0.7, 0.9),
    SamplingParams(1.3, 1.0, 3),
    SamplingParams(0.8, 0.5, 20),
    SamplingParams(1e-4, 0.9),
    SamplingParams(1.0, 1e-4),
    SamplingParams(100.0, 0.999, 10_000),
    SamplingParams(1e-8),
    SamplingParams(1.0, 1.0, 1),
]


def controls(batch: int, *settings: SamplingParams, device: str = "cpu") -> dict[str, Any]:
    """Settings dealt out to the rows of a batch in turn."""
    dealt = [settings[i % len(settings)] for i in range(batch)]
    found = {
        "temperature": torch.tensor([s.temperature for s in dealt], device=device),
        "top_k": torch.tensor([s.top_k for s in dealt], device=device),
        "top_p": torch.tensor([s.top_p for s in dealt], device=device),
    }
    if all(s.top_k == 0 for s in dealt):
        found["top_k"] = None
    if all(s.top_p == 1 for s in dealt):
        found["top_p"] = None
    return found


def block(
    batch: int, slots: int, width: int, rank: int, *, hidden: int = 24, dtype: Any = torch.float32,
    device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a block with a confidence head and ties among its logits."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=device)).to(dtype)

    base = normal(batch, slots, width, scale=2.0)
    base[0, 0] = base[0, 0].round()
    return {
        "base": base,
        "anchor": torch.randint(0, width, (batch,), device=device),
        "w1": normal(width, rank, scale=0.5),
        "w2": normal(width + 2, rank, scale=0.5),
        "coins": torch.rand(batch, slots, dtype=torch.float64, device=device),
        "hidden": normal(batch, slots, hidden),
        "confidence": (normal(1, hidden + rank, scale=0.2), normal(1)),
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_reference_is_the_walk_of_the_runtime(setting: SamplingParams) -> None:
    given = block(4, 3, 50, 6)
    head, trust = VanillaMarkovHead(50, 6), ConfidenceHead(24, 6)
    with torch.no_grad():
        head.markov_w1.weight.copy_(given["w1"])
        head.markov_w2.weight.copy_(given["w2"][:50])
        trust.proj.weight.copy_(given["confidence"][0])
        trust.proj.bias.copy_(given["confidence"][1])
        coins = None if setting.greedy else given["coins"].unsqueeze(-1)
        logits = given["base"].clone()
        walk = proposal._Walk(head, Plain(), setting, coins, None)
        tokens, choices = walk.run(logits, given["hidden"], given["anchor"])
        found = markov_sample(**given, **controls(4, setting))
        before = torch.cat((given["anchor"][:, None], tokens[:, :-1]), 1)
        confidence = trust(given["hidden"], head.embed(before))
    assert torch.equal(found.tokens, tokens)
    warm = torch.tensor([setting.temperature]).expand(4, 3)
    probs = probs_of(found.scores, found.law, warm)
    wanted = probs if setting.greedy else torch.stack(choices, 1).double()
    torch.testing.assert_close(probs, wanted, rtol=0, atol=3e-7)
    torch.testing.assert_close(found.entropy, proposal._entropy(logits), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.confidence, confidence, rtol=1e-5, atol=1e-5)


class Plain:
    """A drafter's head whose ids are the target's."""

    ids = None

    def tokens(self, drawn: Tensor) -> Tensor:
        return drawn


def agree(found: Drafted, wanted: Drafted, warm: Tensor | None) -> None:
    """The kernel's walk `found`, and what the reference makes of the same scores, exactly."""
    assert torch.equal(found.tokens, wanted.tokens)
    near = {"rtol": 1e-4, "atol": 2e-4}
    for name in ("scores", "entropy", "confidence", "peak"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **near)
    assert torch.equal(found.peak, found.scores.amax(-1))
    if warm is None:
        return
    drawn = warm > 0
    for name in ("base", "cut"):
        exact = getattr(found.law, name)[drawn]
        torch.testing.assert_close(exact, getattr(wanted.law, name)[drawn], **near)
    total = weights(found.scores, found.law, warm[:, None].expand(found.tokens.shape)).sum(-1)
    torch.testing.assert_close(found.law.mass[drawn], total[drawn], rtol=1e-5, atol=0)


@pytest.fixture
def wide_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer passes of a search: what the interpreter is slow at."""
    monkeypatch.setattr(law_triton, "BITS", 8)


@pytest.mark.parametrize("batch", [1, 3])
def test_kernel_greedy(batch: int, poison: None) -> None:
    given = block(batch, 3, 300, 20)
    given["coins"] = None
    assert refuses(**given) is None
    agree(kernel(**given), markov_sample(**given), None)


@pytest.mark.parametrize("batch", [1, 3])
def test_kernel_draws(batch: int, poison: None) -> None:
    given = block(batch, 3, 300, 20)
    given.update(controls(batch, *(s for s in SETTINGS if s.top_k == 0 and s.top_p == 1)))
    if batch == 1:
        given["temperature"].fill_(0.9)
    assert refuses(**given) is None
    agree(kernel(**given), markov_sample(**given), given["temperature"])


def test_coins_may_be_the_first_of_more(poison: None) -> None:
    given = block(3, 3, 300, 20)
    given.update(controls(3, SETTINGS[0]))
    wanted = markov_sample(**given)
    given["coins"] = torch.cat((given["coins"], torch.zeros(3, 2).double()), 1)[:, :3]
    agree(kernel(**given), wanted, given["temperature"])


def test_kernel_cuts(wide_steps: None, poison: None) -> None:
    given = block(4, 1, 200, 20)
    given.update(controls(4, *SETTINGS[2:5], SETTINGS[0]))
    found, wanted = kernel(**given), markov_sample(**given)
    agree(found, wanted, given["temperature"])
    cold = controls(4, *SETTINGS[2:5], SETTINGS[0])
    again = law_of(found.scores[:, 0], cold["temperature"], cold["top_k"], cold["top_p"])
    assert torch.equal(again.cut[:3], found.law.cut[:3, 0])


def test_search_is_exact_to_the_bit_whatever_its_steps(poison: None) -> None:
    given = block(1, 1, 100, 4)
    given.update(controls(1, SamplingParams(0.8, 0.7, 40)))
    found, wanted = kernel(**given), markov_sample(**given)
    assert found.law.cut == wanted.law.cut


def test_kernel_of_a_reduced_vocabulary(poison: None) -> None:
    given = block(2, 2, 150, 8)
    given["ids"] = torch.randperm(400)[:150].sort().values
    given["w1"] = torch.randn(400, 8)
    given.update(controls(2, SETTINGS[1]))
    found, wanted = kernel(**given), markov_sample(**given)
    agree(found, wanted, given["temperature"])
    assert set(found.tokens.flatten().tolist()) <= set(given["ids"].tolist())


def test_draws_by_the_law() -> None:
    """Just below and on every step of the float64 CDF the token is the one before and after."""
    scores = torch.tensor([1.0, -torch.inf, 0.5, 2.0, 0.0])
    p = torch.softmax(scores.double(), -1)
    steps = p.cumsum(-1)[[0, 2, 3]]
    u = torch.stack((steps - 1e-7, steps + 1e-7), 1).flatten()
    given = {
        "base": scores.expand(len(u), 1, 5).contiguous(),
        "anchor": torch.zeros(len(u), dtype=torch.int64),
        "w1": torch.zeros(5, 1),
        "w2": torch.zeros(5, 1),
        "coins": u[:, None],
        "temperature": torch.ones(len(u)),
    }
    for run in (markov_sample, kernel):
        assert run(**given).tokens.flatten().tolist() == [0, 2, 2, 3, 3, 4]


def test_a_bad_row_shows_in_its_peak_and_takes_no_other_row_along(poison: None) -> None:
    given = block(3, 1, 130, 4)
    given.update(controls(3, SETTINGS[1]))
    fine = kernel(**given)
    for bad in (torch.nan, torch.inf, -torch.inf):
        row = given["base"].clone()
        row[1] = torch.where(torch.rand(130) < 0.5, bad, row[1]) if bad > 0 else bad
        row[1, 0, 7] = bad
        found = kernel(**{**given, "base": row})
        assert not torch.isfinite(found.peak[1])
        assert 0 <= int(found.tokens[1]) < 130
        assert torch.equal(found.tokens[[0, 2]], fine.tokens[[0, 2]])


def test_uniform_weights_leave_out_what_has_none() -> None:
    assert draw(torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64), torch.tensor(0.0)) == 1


def test_refused_in_words() -> None:
    given = block(2, 2, 30, 4)
    given.update(controls(2, SETTINGS[1]))
    for change, reason in (
        ({"base": given["base"].double()}, "float64"),
        ({"w2": given["w2"].bfloat16()}, "tables"),
        ({"base": given["base"].transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        ({"coins": None}, "coins"),
        ({"hidden": None}, "confidence"),
        ({"anchor": given["anchor"].repeat_interleave(2)[::2]}, "contiguous"),
        ({"temperature": given["temperature"].repeat_interleave(2)[::2]}, "contiguous"),
    ):
        assert reason in (refuses(**{**given, **change}) or "taken")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu(batch: int, dtype: torch.dtype, poison: None) -> None:
    given = block(batch, 4, 163_840, 256, hidden=7168, dtype=dtype, device="cuda")
    given["w1"], given["w2"] = 0.1 * given["w1"], given["w2"]
    for settings in ([SETTINGS[0]], SETTINGS[:2], SETTINGS):
        args = {**given, **controls(batch, *settings, device="cuda")}
        assert refuses(**args) is None
        found, wanted = kernel(**args), markov_sample(**args)
        agree(found, wanted, args["temperature"])
