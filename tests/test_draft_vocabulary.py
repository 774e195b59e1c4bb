"""Drafting and verifying with a reduced draft vocabulary.

Previous tokens are ids of the target, the drafter's distribution is over draft ids, and what is
verified is over ids of the target again. Hand-drafted blocks, exact laws and the chi-square of
`test_decode_law.py` (26 degrees of freedom, false alarms at 1e-4) hold the three together. Training
and padded tables are in `test_draft_padding.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.draft.model import DSparkDrafter
from dspark.draft.vocabulary import most_frequent, reduce_vocabulary
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.k3_target import K3Target
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.proposal import propose
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import SamplingParams, draw, to_probs
from dspark.runtime.verify import verify
from tests.draft_vocabulary_setup import GREEDY, IDS, WARM, bigram_drafter, hand_logits, toy_drafter
from tests.k3_tiny import TINY, tiny_model
from tests.laws import pvalue, reference, seeded
from tests.table_target import TableDrafter, TableTarget
from tests.toy_target import ToyTarget


def with_context(target: ToyTarget, drafter: DSparkDrafter) -> object:
    context = drafter.new_context(1, 32)
    tokens = torch.tensor([[5, 7, 11]])
    out = target.forward(tokens, target.new_cache(1, 32), taps=drafter.taps, commit=True)
    assert out.taps is not None
    drafter.extend(context, out.taps)
    return context


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_block_drafted_by_hand_is_the_runtimes(head: str, reduced: bool) -> None:
    """Ids, probabilities and entropy; each token goes back to the table as the target's id."""
    target = ToyTarget()
    drafter = toy_drafter(target, head)
    drafter = reduce_vocabulary(drafter, IDS) if reduced else drafter
    ids = IDS if reduced else torch.arange(64)
    head_weight, context = target.weights["head"], with_context(target, drafter)
    block = torch.tensor([[9, 0, 0, 0]])
    hidden = drafter.block_hidden(target.embed(block), context)[0]
    for seed in range(10):
        for sampling in (GREEDY, WARM, SamplingParams(0.7, 0.9), SamplingParams(1.3, 1.0, 2)):
            proposal = propose(
                drafter, DraftHead(target, drafter.draft_ids), context, torch.tensor([9]), 4,
                sampling, seeded(seed),
            )  # fmt: skip
            tokens = proposal.tokens[0].tolist()
            assert set(tokens) <= set(ids.tolist())
            rows = hand_logits(drafter, head_weight, hidden, [9, *tokens[:-1]])
            for slot, logits in enumerate(rows):
                q1 = torch.softmax(logits, 0)
                entropy = -(q1 * q1.log()).sum()
                torch.testing.assert_close(
                    proposal.entropy[0, slot].double(), entropy, rtol=0, atol=1e-4
                )
                if sampling.greedy:
                    assert tokens[slot] == int(ids[logits.argmax()])
                    continue
                assert proposal.probs is not None
                wanted = np.zeros(64)
                wanted[ids.numpy()] = reference(logits, sampling)
                found = proposal.probs[0, slot].double().numpy()
                np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
                assert wanted[tokens[slot]] > 0


def test_confidence_of_a_reduced_drafter_reads_the_targets_ids() -> None:
    target = ToyTarget()
    drafter = reduce_vocabulary(toy_drafter(target), IDS)
    context, head = with_context(target, drafter), DraftHead(target, drafter.draft_ids)
    proposal = propose(drafter, head, context, torch.tensor([9]), 4, GREEDY, seeded())
    hidden = drafter.block_hidden(target.embed(torch.tensor([[9, 0, 0, 0]])), context)
    before = torch.tensor([[9, *proposal.tokens[0, :-1].tolist()]])
    assert drafter.confidence_head is not None
    scores = drafter.confidence_head(hidden, drafter.markov_head.markov_w1.weight[before])
    assert proposal.confidence is not None
    torch.testing.assert_close(proposal.confidence, scores.sigmoid(), rtol=0, atol=1e-6)


def test_drafting_reads_the_rows_of_its_ids_and_no_others() -> None:
    """What is not read may be anything: NaN in every other row of the head stays unseen."""
    target = K3Target(tiny_model(), "tiny", ())
    ids = torch.tensor([1, 5, 6, 30])
    hidden = torch.randn(2, 3, TINY.hidden_size)
    wanted = target.logits(hidden)[..., ids]
    head = target.model.lm_head.weight
    with torch.no_grad():
        keep = head[ids].clone()
        head.fill_(torch.nan)
        head[ids] = keep
    draft_head = DraftHead(target, ids)
    found = draft_head.logits(hidden)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert found.dtype == torch.float32
    head.data.fill_(torch.nan)  # copied once, side by side
    assert torch.equal(draft_head.logits(hidden), found)


def reduced_table(drafter: TableDrafter, ids: Tensor) -> TableDrafter:
    """The same drafter, proposing `ids` only."""
    bias = drafter.markov_head.bias
    drafter.draft_ids = ids
    drafter.markov_head.bias = lambda code: bias(code)[..., ids]
    return drafter


SETTINGS = [WARM, SamplingParams(0.6), SamplingParams(1.3, 0.8), SamplingParams(1.0, 1.0, 2)]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("ids", [[1, 3, 4], [2], [0, 1, 2, 3, 4]])
def test_the_emitted_token_has_the_targets_law_exactly(
    ids: list[int], sampling: SamplingParams
) -> None:
    """First slot in closed form from the proposal's own q: kept mass plus residual is p.

    For every anchor of a table target; and tokens outside the vocabulary come out of the residual
    with all of their probability, since q has none there.
    """
    vocab = 5
    target = TableTarget.random(vocab, 8, scale=1.0)
    drafter = reduced_table(TableDrafter.of(target, 2, 1.0, 2), torch.tensor(ids))
    outside = [token for token in range(vocab) if token not in ids]
    for anchor in range(vocab):
        head = DraftHead(target, drafter.draft_ids)
        context = drafter.new_context(1, 8)
        proposal = propose(drafter, head, context, torch.tensor([anchor]), 2, sampling, seeded(3))
        assert proposal.probs is not None
        assert proposal.probs.shape == (1, 2, vocab)
        assert not proposal.probs[..., outside].any()
        q = proposal.probs[0, 0].double()
        torch.testing.assert_close(q.sum(), torch.tensor(1.0).double(), rtol=0, atol=1e-6)
        p = to_probs(target.table[1, anchor], sampling).double()
        kept, residual = torch.minimum(p, q), (p - q).clamp(min=0)
        law = kept + (1 - kept.sum()) * residual / residual.sum().clamp(min=1e-300)
        torch.testing.assert_close(law, p, rtol=0, atol=1e-6)
        torch.testing.assert_close(residual[outside], p[outside], rtol=0, atol=0)


def test_verdicts_on_reduced_proposals_follow_the_target() -> None:
    """300,000 draws of one slot; total-variation errors of 0.01 are caught (test_lossless.py)."""
    draws, vocab, ids = 300_000, 24, torch.tensor([0, 1, 5, 6, 7, 12, 20])
    generator = seeded(11)
    p_logits = 1.5 * torch.randn(2, vocab, generator=generator)
    for sampling in (WARM, SamplingParams(0.7, 0.9), SamplingParams(1.0, 1.0, 3)):
        q = to_probs(p_logits[0, ids] + 0.8 * torch.randn(7, generator=generator), sampling)
        wide = torch.zeros(1, 1, vocab).index_copy_(-1, ids, q[None, None]).expand(draws, 1, vocab)
        tokens = draw(wide, generator)
        blank = torch.zeros(draws, 1)
        proposal = Proposal(tokens, wide, blank, blank)
        verdict = verify(proposal, p_logits.expand(draws, 2, vocab), sampling, generator)
        first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.next_token)
        assert pvalue(first, reference(p_logits[0], sampling)) > 1e-5
        bonus = verdict.next_token[verdict.accepted > 0]
        assert pvalue(bonus, reference(p_logits[1], sampling)) > 1e-5


@pytest.mark.parametrize(
    ("sampling", "count"),
    [*((s, 1_500) for s in SETTINGS), pytest.param(WARM, 15_000, marks=pytest.mark.slow)],
)
def test_the_whole_loop_follows_the_targets_law(sampling: SamplingParams, count: int) -> None:
    """First three tokens of texts drafted from two of three ids, jointly."""
    target = TableTarget.random(3, 8, scale=1.0)
    drafter = reduced_table(TableDrafter.of(target, 3, noise=1.0, seed=2), torch.tensor([0, 2]))
    decoder = SpeculativeDecoder(target, drafter)
    texts, accepted = [], set()
    for seed in range(count):
        result = decoder.generate(
            [1, 2], max_new_tokens=5, sampling=sampling, draft_length=3, seed=seed
        )
        texts.append(result.tokens[:3])
        accepted.add(result.rounds[0].accepted)
    p = to_probs(target.table, sampling).double()
    law = torch.einsum("x,xy,xyz->xyz", p[1, 2], p[2], p).numpy().reshape(-1)
    assert pvalue(torch.tensor(texts) @ torch.tensor([9, 3, 1]), law) > 1e-4
    assert accepted == {0, 1, 2, 3}


def test_a_target_without_mass_on_the_draft_vocabulary_is_a_defined_case() -> None:
    """top-k 1 leaves p one token outside the draft vocabulary: always rejected, always that one."""
    table = torch.zeros(5, 5, 5)
    table[..., 4] = 9.0
    target = TableTarget(table)
    drafter = reduced_table(TableDrafter.random(5, 3, 0), torch.tensor([0, 1]))
    for sampling in (GREEDY, SamplingParams(1.0, 1.0, 1), SamplingParams(1.0, 1e-3)):
        result = SpeculativeDecoder(target, drafter).generate(
            [1, 2], max_new_tokens=12, sampling=sampling, draft_length=3
        )
        assert result.tokens == [4] * 12
        assert all(r.accepted == 0 for r in result.rounds)


def test_nano_says_greedily_the_same_with_a_tenth_of_its_vocabulary() -> None:
    nano = load_target("nano", dtype=torch.float32)
    accepted = set()
    for question in ("Tom has 3 apples and buys 4 more. How many apples?", "Write about rain."):
        messages = [{"role": "user", "content": question}]
        prompt = nano.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        plain = plain_generate(nano.target, prompt, max_new_tokens=64, sampling=GREEDY)
        counts = torch.bincount(torch.tensor(plain.tokens), minlength=nano.target.vocab_size)
        drafter = bigram_drafter(nano.target, plain.tokens)
        # half of the ids of the text, so that some of it can never be proposed
        size = int((counts > 0).sum()) // 2
        reduced = reduce_vocabulary(drafter, most_frequent(counts, size))
        result = SpeculativeDecoder(nano.target, reduced).generate(
            prompt, max_new_tokens=64, sampling=GREEDY, draft_length=4
        )
        assert result.tokens == plain.tokens
        accepted |= {r.accepted for r in result.rounds}
    assert {0, 1, 2} <= accepted
