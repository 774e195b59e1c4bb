"""The verdict on the device: the runtime's law and its tokens, coin by coin.

`test_law` enumerates a small world: every draft, every side of every coin, every step of the last
draw, and adds up the law of what comes out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.runtime import faults
from dspark.runtime.judge import Coins, Sent, judge_greedy, judge_sampled
from dspark.runtime.records import Plan, Proposal
from dspark.runtime.sampling import SamplingParams
from dspark_kernels import law_triton
from dspark_kernels.law import Law, draw, law_of, probs_of
from dspark_kernels.verify_sample import Judged, verify_sample
from dspark_kernels.verify_sample_triton import refuses
from dspark_kernels.verify_sample_triton import verify_sample as kernel
from tests.exact import World, drafts

# -inf - -inf and the like, where the result is not used; a GPU says nothing about it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

SETTINGS = [
    SamplingParams(1.0),
    SamplingParams(0.7, 0.9),
    SamplingParams(1.3, 1.0, 3),
    SamplingParams(0.0),
    SamplingParams(0.8, 0.5, 20),
]
Judge = Callable[..., Judged]


def controls(batch: int, settings: list[SamplingParams], device: str = "cpu") -> dict[str, Any]:
    dealt = [settings[i % len(settings)] for i in range(batch)]
    return {
        "temperature": torch.tensor([s.temperature for s in dealt], device=device),
        "top_k": None
        if all(s.top_k == 0 for s in dealt)
        else torch.tensor([s.top_k for s in dealt], device=device),
        "top_p": None
        if all(s.top_p == 1 for s in dealt)
        else torch.tensor([s.top_p for s in dealt], device=device),
    }


def case(
    batch: int, count: int, width: int, settings: list[SamplingParams], *, point: bool = False,
    reduced: int = 0, dtype: Any = torch.float32, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """A drafted chain that resembles the target, of ragged length; NaN in all that is not sent."""
    logits = (2 * torch.randn(batch, count + 1, width, device=device)).to(dtype)
    logits[0, 0] = logits[0, 0].round()  # ties
    lengths = torch.randint(0, count + 1, (batch,), device=device)
    lengths[0] = count
    sampling = controls(batch, settings, device)
    ids = torch.randperm(width, device=device)[: reduced or width].sort().values
    near = logits[:, :count].float().index_select(-1, ids)
    scores = near + torch.randn_like(near)
    spread = [None if x is None else x[:, None].expand(batch, count) for x in sampling.values()]
    law = Law(*(x.contiguous() for x in law_of(scores, *spread)))  # type: ignore[arg-type]
    coins = torch.rand(batch, count + 1, dtype=torch.float64, device=device)
    thrown = torch.rand(batch, count, dtype=torch.float64, device=device)
    probs = probs_of(scores, law, spread[0])  # type: ignore[arg-type]
    tokens = ids[scores.argmax(-1) if point else draw(probs, thrown)]
    rows = torch.arange(count + 1, device=device)
    logits[rows > lengths[:, None]] = torch.nan
    where = torch.full((width,), -1, device=device)
    where[ids] = torch.arange(len(ids), device=device)
    return {
        "logits": logits,
        "tokens": tokens,
        "lengths": lengths,
        "scores": None if point else scores,
        "law": None if point else law,
        "coins": coins,
        **sampling,
        "where": where if reduced else None,
    }


def same(found: Judged, wanted: Judged) -> None:
    for name, a, b in zip(found._fields, found, wanted, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("point", [False, True], ids=["drafted", "point mass"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_reference_judges_as_the_runtime_does(setting: SamplingParams, point: bool) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        given = case(8, 4, 40, [setting], point=point)
        sent, runtime = _runtime(given, setting)
        found = verify_sample(**given)
        assert torch.equal(found.accepted, runtime.accepted)
        assert torch.equal(found.next_token, runtime.next_token)
        lengths = given["lengths"]
        rows = torch.arange(5) <= lengths[:, None]
        assert torch.equal(found.fault, faults.fault_of(given["logits"], rows))
        cut = (found.accepted == lengths) & (lengths < 4)
        assert torch.equal(found.level == 3, cut)
        assert torch.equal(found.level == 2, found.accepted < sent.lengths)


def _runtime(given: dict[str, Any], setting: SamplingParams) -> tuple[Sent, Any]:
    tokens, coins = given["tokens"], given["coins"]
    warm = given["temperature"][:, None].expand(tokens.shape)
    probs = None
    if given["scores"] is not None and not setting.greedy:
        probs = probs_of(given["scores"], given["law"], warm).float()
    blank = torch.zeros(tokens.shape)
    proposed = Proposal(tokens, probs, blank, blank)
    plan = Plan.chain(proposed, given["lengths"])
    sent = Sent.of(proposed, tokens.shape[1], plan, None)
    logits = given["logits"].nan_to_num()
    if setting.greedy:
        return sent, judge_greedy(sent, logits, None)
    thrown = Coins(coins[:, :-1], coins[:, :0], coins[:, -1])
    return sent, judge_sampled(sent, logits, setting, thrown, "token", None)


@pytest.fixture
def wide_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer passes of a search: what the interpreter is slow at."""
    monkeypatch.setattr(law_triton, "BITS", 8)


KINDS: dict[str, dict[str, Any]] = {
    "drafted": {},
    "point mass": {"point": True},
    "reduced vocabulary": {"reduced": 90},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_without_cuts(kind: str, poison: None) -> None:
    given = case(5, 3, 300, [SETTINGS[0], SETTINGS[3]], **KINDS[kind])
    assert refuses(**given) is None
    same(kernel(**given, block=128), verify_sample(**given))


def test_kernel_with_cuts(wide_steps: None, poison: None) -> None:
    given = case(5, 1, 150, SETTINGS)
    same(kernel(**given, block=128), verify_sample(**given))


def test_kernel_greedy(poison: None) -> None:
    given = case(5, 3, 300, [SETTINGS[3]], point=True)
    given.update(temperature=None, coins=None)
    same(kernel(**given, block=128), verify_sample(**given))


@pytest.mark.parametrize("greedy", [False, True])
def test_columns_of_wider_tensors(greedy: bool, poison: None) -> None:
    """Tokens behind their anchors, lengths and coins as columns: any strides."""
    given = case(4, 3, 200, [SETTINGS[0]], point=greedy)
    if greedy:
        given.update(temperature=None, coins=None)
    wanted = verify_sample(**given)
    for name in ("tokens", "coins"):
        if given[name] is not None:
            wide = given[name].new_zeros(4, given[name].shape[1] + 2)
            wide[:, 1:-1] = given[name]
            given[name] = wide[:, 1:-1]
    given["lengths"] = torch.stack((torch.zeros(4).long(), given["lengths"]), 1)[:, 1]
    same(kernel(**given, block=128), wanted)


@pytest.mark.parametrize("greedy", [False, True])
def test_no_draft_is_plain_sampling(greedy: bool, poison: None) -> None:
    given = case(4, 0, 200, [SETTINGS[0]], point=True)
    if greedy:
        given.update(temperature=None, coins=None)
    found = kernel(**given, block=128)
    same(found, verify_sample(**given))
    wanted = given["logits"][:, 0].argmax(-1)
    if not greedy:
        p = torch.softmax(given["logits"][:, 0].double(), -1)
        wanted = draw(p, given["coins"][:, 0])
    assert torch.equal(found.next_token, wanted)


@pytest.mark.parametrize("judge", [verify_sample, kernel])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_faults_name_the_row_and_take_no_request_along(judge: Judge, bad: float) -> None:
    given = case(3, 2, 140, [SETTINGS[0]])
    given["lengths"][:] = 2
    given["logits"].nan_to_num_()
    fine = judge(**given)
    logits = given["logits"].clone()
    logits[1, 1] = bad
    if bad != -torch.inf:
        logits[1, 1, :100] = 0.0
    found = judge(**{**given, "logits": logits})
    assert torch.equal(found.fault, faults.fault_of(logits))
    assert found.fault[1] > 0
    assert 0 <= int(found.next_token[1]) < 140
    for a, b in zip(found, fine, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@pytest.mark.parametrize("judge", [verify_sample, kernel])
def test_equal_laws_accept_everything_and_leave_p(judge: Judge) -> None:
    """p = q leaves a residual of zeros, should rounding ever ask for one."""
    given = case(4, 2, 60, [SETTINGS[0]])
    given["lengths"][:] = 2
    # Even over some tokens: sums that no order of adding can round.
    even = torch.where(torch.rand(4, 3, 60) < 0.7, 0.0, -torch.inf)
    even[:, :, :2] = 0.0
    scores = even[:, :2].contiguous()
    given.update(logits=even, scores=scores, tokens=torch.ones(4, 2, dtype=torch.int64))
    given["law"] = Law(*law_of(scores, torch.ones(4, 2)))
    coins = given["coins"].clone()
    coins[:, :2] = 1 - 2.0**-53
    assert judge(**{**given, "coins": coins}).accepted.tolist() == [2] * 4
    coins[:, :2] = 1.0  # no coin is that high: the rejection that rounding might bring about
    found = judge(**{**given, "coins": coins})
    assert found.accepted.tolist() == [0] * 4
    wanted = draw(torch.softmax(even[:, 0].double(), -1), coins[:, 2])
    assert torch.equal(found.next_token, wanted)


WORLDS = {"whole": 0.0, "with holes": 0.5}


@pytest.mark.parametrize(("judge", "count"), [(verify_sample, 2), (kernel, 1)])
@pytest.mark.parametrize("holes", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("cut", [False, True], ids=["everything", "cut by the past"])
def test_law(judge: Judge, count: int, holes: float, cut: bool) -> None:
    """The joint law of the first tokens is the target's, to the width of the probes.

    Coins lie next to every threshold that the closed form knows, on both sides, and between two
    thresholds nothing may change: so the law found is exact to that width.
    """
    world = World.random(3, count, seed=4, holes=holes)
    offers = drafts(world, 0)
    lengths = [_length(draft.tokens) if cut else count for draft in offers]
    coins, weight, owner = [], [], []
    for index, (draft, length) in enumerate(zip(offers, lengths, strict=True)):
        for point, volume in _cells(world, draft.tokens, length):
            coins.append(point)
            weight.append(draft.chance * volume)
            owner.append(index)
    picked = [offers[i] for i in owner]
    laws = [[world.p[d.tokens[:k]] for k in range(count + 1)] for d in picked]
    offered = [[world.q[d.tokens[:k]] for k in range(count)] for d in picked]
    logits = torch.stack([torch.stack(rows) for rows in laws]).log().float()
    scores = torch.stack([torch.stack(rows) for rows in offered]).log().float()
    warm = torch.ones(len(picked))
    found = judge(
        logits,
        torch.tensor([d.tokens for d in picked]),
        torch.tensor([lengths[i] for i in owner]),
        scores,
        Law(*law_of(scores, warm[:, None].expand(-1, count))),
        torch.tensor(coins, dtype=torch.float64),
        warm,
    )
    joint = torch.zeros([3] * (count + 1), dtype=torch.float64)
    for draft, share, accepted, token in zip(
        picked, weight, found.accepted.tolist(), found.next_token.tolist(), strict=True
    ):
        _follow(joint, world, (*draft.tokens[:accepted], token), share)
    torch.testing.assert_close(joint, world.target_law(), rtol=0, atol=2e-6)


def _length(tokens: tuple[int, ...]) -> int:
    """Whether position 1 is sent may depend on token 0; position 0 is, where it is not the last."""
    return 0 if len(tokens) == 1 else 2 if tokens[0] != 1 else 1


def _cells(
    world: World, tokens: tuple[int, ...], length: int
) -> list[tuple[tuple[float, ...], float]]:
    """Cells of the cube of coins on whose inside nothing changes: a point of each, its volume."""
    edges = []
    for k, token in enumerate(tokens):
        p, q = world.p[tokens[:k]], world.q[tokens[:k]]
        edges.append(_sides([min(1.0, float(p[token] / q[token]))]))
    cells = []
    for thrown in itertools.product(*edges):
        prefix = 0
        while prefix < length and thrown[prefix].taken:
            prefix += 1
        left = world.p[tokens[:prefix]]
        if prefix < length:
            left = (left - world.q[tokens[:prefix]]).clamp(min=0)
        steps = (left / left.sum()).cumsum(0)[:-1] if left.sum() > 0 else torch.empty(0)
        for last in _sides(steps.tolist()):
            volume = math.prod(side.width for side in (*thrown, last))
            cells.append((tuple(side.coin for side in (*thrown, last)), volume))
    return [cell for cell in cells if cell[1] > 0]


@dataclass(frozen=True)
class Side:
    """A piece of [0, 1): a coin in it, its width, and whether it lies below the first edge."""

    coin: float
    width: float
    taken: bool


def _sides(edges: list[float]) -> list[Side]:
    """[0, 1) cut at the edges, each part as two halves with a coin next to either end."""
    parts = []
    for low, high in itertools.pairwise([0.0, *edges, 1.0]):
        if high - low > 1e-5:
            half, taken = (high - low) / 2, low == 0.0 and edges != [0.0]
            start = low + 2e-6 if low > 0 else low
            parts += [Side(start, half, taken), Side(high - 2e-6, half, taken)]
    return parts


def _follow(joint: Tensor, world: World, said: tuple[int, ...], share: float) -> None:
    if len(said) == joint.dim():
        joint[said] += share
        return
    for token, chance in enumerate(world.p[said].tolist()):
        if chance:
            _follow(joint, world, (*said, token), share * chance)


def test_refused_in_words() -> None:
    given = case(3, 2, 30, SETTINGS)
    assert refuses(**given) is None
    for change, reason in (
        ({"logits": given["logits"].double()}, "float64"),
        ({"logits": given["logits"].mT.contiguous().mT}, "contiguous"),
        ({"logits": torch.zeros(3, 5, 30)[:, :3]}, "evenly"),
        ({"coins": None}, "coins"),
        ({"top_p": given["top_p"].repeat_interleave(2)[::2]}, "contiguous"),
        ({"tokens": given["tokens"][:0]}, "no requests"),
    ):
        assert reason in (refuses(**{**given, **change}) or "taken")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "count"), [(1, 7), (5, 8), (33, 3), (3, 0)])
def test_gpu(batch: int, count: int, kind: str, dtype: torch.dtype, poison: None) -> None:
    for settings in (SETTINGS[:1], SETTINGS):
        more = {"reduced": 32_000} if kind == "reduced vocabulary" else KINDS[kind]
        given = case(batch, count, 163_840, settings, dtype=dtype, device="cuda", **more)
        assert refuses(**given) is None
        same(kernel(**given), verify_sample(**given))
