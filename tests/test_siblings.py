"""Siblings from proposal to verdict: how they are drawn, laid out as rows, tried, and at T = 0."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dspark.runtime.draft_head import DraftHead
from dspark.runtime.judge import Coins, Sent, judge_greedy, judge_sampled
from dspark.runtime.proposal import propose
from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, CUT, SIBLING, Plan, Proposal, Verdict
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.sampling import BadLogits, SamplingParams, to_probs
from dspark.runtime.siblings import draw_siblings, next_best
from dspark.runtime.tree import Rows, build_rows
from dspark.runtime.verify import verify
from tests.laws import pvalue, seeded
from tests.table_target import TableDrafter, TableTarget

GREEDY = SamplingParams()
ALPHA = 1e-5
"""False-alarm rate of each chi-square here."""


def offered(
    tokens: list[list[int]], siblings: list[list[list[int]]], probs: Tensor | None = None
) -> Proposal:
    """A proposal of these tokens; confidence and entropy do not matter."""
    ids = torch.tensor(tokens)
    return Proposal(
        ids, probs, torch.zeros(ids.shape), torch.zeros(ids.shape), torch.tensor(siblings)
    )


# Drawing ----------------------------------------------------------------------------------------


def test_siblings_are_drawn_without_replacement_and_without_the_primary() -> None:
    """The law of ordered pairs: q(y1) / (1 - q(x)) * q(y2) / (1 - q(x) - q(y1))."""
    q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    draws, primary = 200_000, 1
    u = torch.rand(draws, 2, generator=seeded(), dtype=torch.float64)
    found = draw_siblings(q.expand(draws, 5), torch.full((draws,), primary), u)
    law = np.zeros((5, 5))
    exact = q.double().numpy()
    for a, b in itertools.permutations((0, 2, 3), 2):
        law[a, b] = exact[a] / (1 - exact[primary]) * exact[b] / (1 - exact[primary] - exact[a])
    assert law.sum() == pytest.approx(1)
    assert pvalue(found[:, 0] * 5 + found[:, 1], law.reshape(-1)) > ALPHA


def test_no_token_is_invented_where_q_has_run_out() -> None:
    q = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    u = torch.full((3, 3), 0.99, dtype=torch.float64)
    assert draw_siblings(q, torch.tensor([0, 1, 2]), u).tolist() == [
        [2, -1, -1],
        [-1] * 3,
        [1, 0, -1],
    ]


def test_next_best_are_the_largest_logits_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, -torch.inf]])
    best = logits.argmax(dim=-1)
    assert next_best(logits, best, 4).tolist() == [[2, 4, 0, 3], [1, 2, 3, -1]]


def test_greedy_proposals_carry_the_next_best_with_the_sequential_bias_included() -> None:
    target, drafter = TableTarget.random(6, seed=0), TableDrafter.random(6, 3, seed=1)
    drafter.slots = drafter.slots.round()  # many ties
    head, context = DraftHead(target, None), drafter.new_context(1, 8)
    made = propose(drafter, head, context, torch.tensor([2]), 3, GREEDY, seeded(), siblings=2)
    previous = 2
    for k in range(3):
        bias = drafter.markov_head.bias(torch.eye(6)[previous])
        scores = (drafter.slots[k, 2] + bias).tolist()
        ranked = sorted(range(6), key=lambda token: (-scores[token], token))
        assert [made.tokens[0, k].item(), *made.siblings[0, k].tolist()] == ranked[:3]
        previous = ranked[0]
    assert made.probs is None


@pytest.mark.parametrize("siblings", [0, 1, 2])
def test_sampled_proposals_draw_alike_whatever_the_draft_length(siblings: int) -> None:
    target, drafter = TableTarget.random(6, seed=0), TableDrafter.random(6, 4, seed=1)
    head, params = DraftHead(target, None), SamplingParams(1.0)
    made, after = [], []
    for length in (4, 2, 1):
        generator = seeded(3)
        context = drafter.new_context(1, 8)
        ask = (drafter, head, context, torch.tensor([1]), length, params, generator)
        made.append(propose(*ask, siblings=siblings))
        after.append(torch.rand(1, generator=generator).item())
    assert len(set(after)) == 1
    for short in made[1:]:
        length = short.tokens.shape[1]
        assert torch.equal(short.tokens, made[0].tokens[:, :length])
        if siblings:
            assert torch.equal(short.siblings, made[0].siblings[:, :length])
        else:
            assert short.siblings is None


def test_a_sampled_draft_near_temperature_zero_is_the_greedy_one() -> None:
    """Logits one apart: at T = 0.05 the runner-up has a chance of 2e-9. T = 0 is the limit."""
    target, drafter = TableTarget.random(6, seed=0), TableDrafter.random(6, 3, seed=1)
    order = torch.stack([torch.randperm(6, generator=seeded(s)) for s in range(18)]).view(3, 6, 6)
    drafter.slots = order.float()
    drafter.markov_head.bias = lambda code: torch.zeros(1, 6)
    head = DraftHead(target, None)
    made = [
        propose(
            drafter,
            head,
            drafter.new_context(1, 8),
            torch.tensor([4]),
            3,
            params,
            seeded(),
            siblings=2,
        )
        for params in (GREEDY, SamplingParams(0.05))
    ]
    assert torch.equal(made[0].tokens, made[1].tokens)
    assert torch.equal(made[0].siblings, made[1].siblings)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)])
def test_siblings_of_a_reduced_vocabulary_are_ids_of_the_target(params: SamplingParams) -> None:
    """Three draft ids, so that primary and two siblings are all of them and a third is none."""
    ids = torch.tensor([1, 3, 4])
    target, drafter = TableTarget.random(6, seed=0), TableDrafter.random(6, 2, seed=1)
    wide = drafter.markov_head.bias
    drafter.markov_head.bias = lambda code: wide(code)[..., ids]
    head, context = DraftHead(target, ids), drafter.new_context(1, 8)
    ask = (drafter, head, context, torch.tensor([2]), 2, params, seeded(5))
    made = propose(*ask, siblings=3)
    for k in range(2):
        found = made.siblings[0, k].tolist()
        assert found[2] == -1
        assert {made.tokens[0, k].item(), *found[:2]} == set(ids.tolist())
    if params.greedy:
        scores = drafter.slots[0, 2] + wide(torch.eye(6)[2])
        best = ids[scores[ids].argsort(descending=True)].tolist()
        assert [made.tokens[0, 0].item(), *made.siblings[0, 0, :2].tolist()] == best
    else:
        assert (made.probs[..., [0, 2, 5]] == 0).all()


# Rows -------------------------------------------------------------------------------------------


def test_rows_of_a_tree() -> None:
    offer = offered(
        [[10, 11, 12], [20, 21, 22]],
        [[[1, 2], [3, 4], [5, -1]], [[6, -1], [-1, -1], [7, 8]]],
    )
    plan = Plan(torch.tensor([3, 1]), torch.tensor([[0, 2, 2], [2, 2, 2]]))
    rows = build_rows(torch.tensor([9, 19]), offer, plan)
    assert rows.tokens.tolist() == [[9, 10, 11, 12, 3, 4, 5], [19, 20, 0, 0, 6, 0, 0]]
    assert rows.parents.tolist() == [[-1, 0, 1, 2, 1, 1, 2], [-1, 0, 0, 0, 0, 0, 0]]
    assert rows.valid.tolist() == [[True] * 7, [True, True, False, False, True, False, False]]
    assert rows.sibling_rows.tolist() == [
        [[-1, -1], [4, 5], [6, -1]],
        [[4, -1], [-1, -1], [-1, -1]],
    ]
    assert torch.equal(rows.forward_parents, rows.parents)


@pytest.mark.parametrize("siblings", [None, [[[1, 2]] * 3] * 2])
def test_rows_of_a_chain_need_no_parents(siblings: list | None) -> None:
    tokens = torch.tensor([[10, 11, 12], [20, 21, 22]])
    blank = torch.zeros(tokens.shape)
    beside = None if siblings is None else torch.tensor(siblings)
    offer = Proposal(tokens, None, blank, blank, beside)
    rows = build_rows(torch.tensor([9, 19]), offer, Plan.chain(offer, torch.tensor([2, 0])))
    assert rows.tokens.tolist() == [[9, 10, 11], [19, 0, 0]]
    assert rows.valid.tolist() == [[True] * 3, [True, False, False]]
    assert rows.forward_parents is None


def test_rows_of_a_captured_size_leave_out_the_last_siblings() -> None:
    offer = offered([[10, 11]], [[[1, 2], [3, 4]]])
    plan = Plan.whole(offer, 2)
    rows = build_rows(torch.tensor([9]), offer, plan, primaries=2, sibling_rows=3)
    assert rows.tokens.tolist() == [[9, 10, 11, 1, 2, 3]]
    assert rows.sibling_rows.tolist() == [[[3, 4], [5, -1]]]
    wide = build_rows(torch.tensor([9]), offer, plan, primaries=1, sibling_rows=4)
    assert wide.tokens.tolist() == [[9, 10, 1, 2, 0, 0]]
    assert wide.valid.tolist() == [[True] * 4 + [False] * 2]
    empty = build_rows(torch.tensor([9]), offer, plan, primaries=0, sibling_rows=0)
    assert empty.tokens.tolist() == [[9]]


def test_a_plain_step_is_a_row() -> None:
    blank = torch.zeros(2, 0)
    offer = Proposal(blank.long(), None, blank, blank)
    rows = build_rows(torch.tensor([9, 8]), offer, Plan.whole(offer))
    assert rows.tokens.tolist() == [[9], [8]]
    verdict = verify(
        offer, torch.eye(4)[torch.tensor([[1], [3]])], GREEDY, seeded(), Plan.whole(offer), rows
    )
    assert verdict.next_token.tolist() == [1, 3]
    assert rows.path(verdict).tolist() == [[0, -1], [0, -1]]


# Verdicts ---------------------------------------------------------------------------------------


def peaks(best: list[list[int]], vocab: int = 12) -> Tensor:
    return 30.0 * torch.nn.functional.one_hot(torch.tensor(best), vocab).float()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)])
@pytest.mark.parametrize("method", ["token", "block"])
def test_siblings_rescue_a_round(params: SamplingParams, method: str) -> None:
    """Target laws so peaked that sampling has no choice either. Rows: anchor, two, siblings."""
    offer = offered([[1, 2]] * 6, [[[4, 5], [6, 7]]] * 6)
    plan = Plan(torch.tensor([2, 2, 2, 2, 1, 0]), torch.full((6, 2), 2))
    rows = build_rows(torch.full((6,), 9), offer, plan)
    assert rows.tokens[0].tolist() == [9, 1, 2, 4, 5, 6, 7]
    best = [
        [1, 2, 3, 0, 0, 0, 0],  # all accepted
        [5, 0, 0, 0, 8, 0, 0],  # second sibling of the first position, then its bonus 8
        [1, 6, 0, 0, 0, 9, 0],  # first sibling of the second position
        [1, 8, 0, 0, 0, 0, 0],  # nobody's
        [1, 6, 0, 0, 0, 9, 0],  # cut before the position that a sibling would have rescued
        [4, 6, 0, 0, 0, 0, 0],  # cut at once
    ]
    verdict = verify(offer, peaks(best), params, seeded(), plan, rows, method=method)
    assert verdict.accepted.tolist() == [2, 0, 1, 1, 1, 0]
    assert verdict.sibling.tolist() == [-1, 5, 6, -1, -1, -1]
    assert verdict.sibling_row.tolist() == [-1, 4, 5, -1, -1, -1]
    assert verdict.next_token.tolist() == [3, 8, 9, 8, 6, 4]
    assert verdict.level.tolist() == [ALL_ACCEPTED, SIBLING, SIBLING, CORRECTED, CUT, CUT]
    assert rows.path(verdict).tolist() == [
        [0, 1, 2, -1],
        [0, 4, -1, -1],
        [0, 1, 5, -1],
        [0, 1, -1, -1],
        [0, 1, -1, -1],
        [0, -1, -1, -1],
    ]
    two = torch.full((6,), 2)
    assert rows.path(verdict, two)[:3].tolist() == [[0, 1, -1, -1], [0, 4, -1, -1], [0, 1, -1, -1]]


def test_a_sibling_that_was_not_sent_is_not_accepted() -> None:
    offer = offered([[1], [1]], [[[4, 5]], [[4, 5]]])
    plan = Plan(torch.tensor([1, 1]), torch.tensor([[1], [2]]))
    rows = build_rows(torch.tensor([9, 9]), offer, plan)
    verdict = verify(offer, peaks([[5, 0, 0, 7]] * 2), GREEDY, seeded(), plan, rows)
    assert verdict.sibling.tolist() == [-1, 5]
    assert verdict.next_token.tolist() == [5, 7]


def test_temperature_zero_is_what_sampling_does_with_point_masses() -> None:
    """One-hot p, point masses for q, every coin: the general code says what the greedy one says."""
    texts = list(itertools.product(range(4), repeat=2))
    offer = offered(
        [list(t) for t in texts], [[[(a + 1) % 4, (a + 3) % 4] for a in t] for t in texts]
    )
    plan = Plan.whole(offer, 2)
    rows = build_rows(torch.zeros(len(texts), dtype=torch.int64), offer, plan)
    sent = Sent.of(offer, 2, plan, rows)
    seen = set()
    for best in itertools.product(range(4), repeat=3):
        leaves = [(best[0] + j) % 4 for j in range(4)]
        logits = peaks([[*best, *leaves]], 4).expand(len(texts), -1, -1)
        greedy = judge_greedy(sent, logits, None)
        for u, method in itertools.product((0.0, 0.5, 1 - 1e-9), ("token", "block")):
            coins = Coins(
                *(torch.full(s, u, dtype=torch.float64) for s in ((16, 2), (16, 2), (16,)))
            )
            sampled = judge_sampled(sent, 1e6 * logits, SamplingParams(1.0), coins, method, None)
            for name in ("accepted", "sibling", "sibling_row", "next_token"):
                assert torch.equal(getattr(greedy, name), getattr(sampled, name)), name
        seen |= set(zip(greedy.accepted.tolist(), (greedy.sibling >= 0).tolist(), strict=True))
    assert seen == {(0, False), (0, True), (1, False), (1, True), (2, False)}


def test_one_row_of_a_batch_is_judged_as_it_would_be_alone() -> None:
    """Trees, cuts and generators of its own: nothing of the neighbours reaches a row."""
    params, vocab, batch = SamplingParams(1.2, 0.95), 9, 8
    q = to_probs(torch.randn(batch, 3, vocab, generator=seeded(1)), params)
    tokens = q.argmax(dim=-1)
    siblings = draw_siblings(
        q, tokens, torch.rand(batch, 3, 2, generator=seeded(2), dtype=torch.float64)
    )
    lengths = torch.tensor([0, 1, 2, 3, 3, 2, 3, 1])
    counts = torch.randint(3, (batch, 3), generator=seeded(3))
    p = torch.randn(batch, 3 + 7, vocab, generator=seeded(4))

    def run(which: slice) -> tuple[Verdict, Rows]:
        blank = torch.zeros(tokens[which].shape)
        offer = Proposal(tokens[which], q[which], blank, blank, siblings[which])
        plan = Plan(lengths[which], counts[which])
        rows = build_rows(
            torch.zeros(len(blank), dtype=torch.int64), offer, plan, primaries=3, sibling_rows=6
        )
        coins = [seeded(50 + b) for b in range(batch)[which]]
        return verify(offer, p[which], params, coins, plan, rows), rows

    together, _ = run(slice(None))
    for b in range(batch):
        alone, _ = run(slice(b, b + 1))
        for name in ("accepted", "sibling", "sibling_row", "next_token", "level"):
            assert getattr(alone, name) == getattr(together, name)[b]


# Waits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 0.9, 5)])
@pytest.mark.parametrize(
    ("method", "relaxed"), [("token", None), ("token", Relaxed()), ("block", None)]
)
def test_nothing_waits_for_the_device(
    params: SamplingParams, method: str, relaxed: Relaxed | None
) -> None:
    """On fake tensors, which have shapes and no values: whoever asks for a value gets an error."""
    target, drafter = TableTarget.random(6, seed=0), TableDrafter.random(6, 3, seed=1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        block = torch.zeros(2, 3, 6)
        drafter.block_hidden = lambda embeds, context: block + 0
        anchor = torch.zeros(2, dtype=torch.int64)
        head = DraftHead(target, None)
        ask = (drafter, head, None, anchor, 3, params, seeded())
        made = propose(*ask, siblings=2, check=False)
        plan = Plan.whole(made, 1)
        rows = build_rows(anchor, made, plan, primaries=3, sibling_rows=4)
        logits = torch.zeros(2, 8, 6)
        judge = (made, logits, params, seeded(), plan, rows)
        verdict = verify(*judge, method=method, relaxed=relaxed, check=False)
        assert rows.path(verdict, verdict.accepted).shape == (2, 5)
        for wait in (
            lambda: verify(*judge),
            lambda: build_rows(anchor, made, plan),
            lambda: propose(*ask, siblings=2),
        ):
            with pytest.raises(DataDependentOutputException):
                wait()


# Faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [(torch.nan, "NaN"), (torch.inf, "[+]inf"), (-torch.inf, "nothing but -inf")],
)
def test_a_fault_names_the_row_of_a_tree_and_padding_has_none(value: float, found: str) -> None:
    offer = offered([[1, 2], [1, 2]], [[[4], [6]], [[4], [6]]])
    plan = Plan(torch.tensor([2, 1]), torch.tensor([[1, 1], [1, 1]]))
    rows = build_rows(torch.tensor([9, 9]), offer, plan)
    logits = torch.zeros(2, 5, 12)
    logits[1, 2] = value  # behind the cut: nobody reads it
    assert verify(offer, logits, GREEDY, seeded(), plan, rows).fault.tolist() == [0, 0]
    logits[0, 4] = value
    with pytest.raises(BadLogits, match=f"target logits of row 0, position 4 hold {found}"):
        verify(offer, logits, GREEDY, seeded(), plan, rows)
    verdict = verify(offer, logits, GREEDY, seeded(), plan, rows, check=False)
    assert verdict.fault[0] > 0
    assert verdict.fault[1] == 0


def test_a_drafters_fault_travels_with_the_verdict() -> None:
    target, drafter = TableTarget.random(6, seed=0), TableDrafter.random(6, 3, seed=1)
    drafter.slots[1, 2, 4] = torch.nan
    head, context = DraftHead(target, None), drafter.new_context(1, 8)
    ask = (drafter, head, context, torch.tensor([2]), 3)
    for params in (GREEDY, SamplingParams(0.7, 0.9)):
        with pytest.raises(BadLogits, match="drafter logits of row 0, position 1 hold NaN"):
            propose(*ask, params, seeded())
        made = propose(*ask, params, seeded(), siblings=2, check=False)
        assert ((made.tokens >= 0) & (made.tokens < 6)).all()
        assert ((made.siblings >= -1) & (made.siblings < 6)).all()
        with pytest.raises(BadLogits, match="drafter logits of row 0, position 1 hold NaN"):
            verify(made, torch.zeros(1, 4, 6), params, seeded())
