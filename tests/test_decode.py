"""The speculative loop on table-driven models: exact lengths, ends, counts, streams, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, Generation
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.taps import TapSet
from tests.table_target import ScriptedDrafter, TableDrafter, TableTarget

GREEDY = SamplingParams()
PROMPT = [3, 1, 4]
WALK = 2


def _walker() -> TableTarget:
    """A target whose greedy text after PROMPT visits many different tokens before it repeats."""
    return TableTarget.random(41, WALK)


def _plain(target: TableTarget, prompt: list[int], new: int, **options: object) -> Generation:
    return plain_generate(target, prompt, max_new_tokens=new, sampling=GREEDY, **options)


def _check_counts(result: Generation, draft_length: int) -> None:
    """The counting rules of records.py."""
    assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds)
    for r in result.rounds:
        assert 0 <= r.accepted <= r.verified <= r.drafted <= draft_length
        assert len(r.confidence) == len(r.entropy) == r.drafted
        assert r.emitted in (r.accepted, r.accepted + 1)
        assert min(r.draft_s, r.verify_s, r.other_s) >= 0
        assert r.level == (CORRECTED if r.accepted < r.verified else ALL_ACCEPTED)
    for r in result.rounds[:-1]:
        assert r.emitted == r.accepted + 1
    parts = sum(r.draft_s + r.verify_s + r.other_s for r in result.rounds)
    assert parts <= result.decode_s


@pytest.mark.parametrize("draft_length", [1, 2, 5, 8])
def test_greedy_equals_plain(draft_length: int) -> None:
    accepted = verified = 0
    for seed in range(25):  # x 4 sets of end tokens x 4 draft lengths: 400 texts
        target = TableTarget.random(11, seed)
        drafter = TableDrafter.of(target, 8, noise=0.5 * (seed % 4), seed=seed)
        decoder = SpeculativeDecoder(target, drafter)
        prompt = torch.randint(0, 11, (1 + seed % 7,)).tolist()
        for ends in [(), (5,), (2, 7), (0, 1, 3, 9)]:
            plain = _plain(target, prompt, 40, end_token_ids=ends)
            fast = decoder.generate(
                prompt,
                max_new_tokens=40,
                sampling=GREEDY,
                draft_length=draft_length,
                end_token_ids=ends,
            )
            assert fast.tokens == plain.tokens
            assert fast.finish == plain.finish
            _check_counts(fast, draft_length)
            accepted += sum(r.accepted for r in fast.rounds)
            verified += sum(r.verified for r in fast.rounds)
    # The test means nothing if everything, or nothing, is accepted.
    assert 0.1 < accepted / verified < 0.9


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0), SamplingParams(0.7, 0.9, 5)])
def test_cache_and_context_hold_exactly_what_was_emitted(sampling: SamplingParams) -> None:
    """Rejected tokens leave no trace: both hold prompt plus output, all but the last token."""
    target = TableTarget.random(9, 0)
    drafter = TableDrafter.of(target, 6, noise=1.0, seed=1)
    decoder = SpeculativeDecoder(target, drafter)
    for seed, new in itertools.product(range(10), (1, 2, 7, 30)):
        result = decoder.generate(
            PROMPT,
            max_new_tokens=new,
            sampling=sampling,
            draft_length=6,
            end_token_ids=(4,),
            seed=seed,
        )
        text = PROMPT + result.tokens
        assert target.caches[-1].rows == [text[:-1]]
        assert drafter.contexts[-1].tokens == text[:-1]
        assert target.caches[-1].pending is None
        assert target.caches[-1].log == [r.emitted for r in result.rounds]


def _scripted(
    new: int, block: int, wrong: set[tuple[int, int]], ends: tuple[int, ...] = ()
) -> tuple[list[int], Generation, list[list[int]]]:
    """Plain text, result and stream for a drafter wrong at the (round, slot) pairs of `wrong`."""
    target = _walker()
    plain = _plain(target, PROMPT, 64).tokens
    drafter = ScriptedDrafter(PROMPT + plain, 41, block, lambda r, k: (r, k) not in wrong)
    stream: list[list[int]] = []
    result = SpeculativeDecoder(target, drafter).generate(
        PROMPT,
        max_new_tokens=new,
        sampling=GREEDY,
        draft_length=block,
        end_token_ids=ends,
        on_tokens=stream.append,
    )
    return plain, result, stream


def test_matches_after_the_first_rejection_do_not_count() -> None:
    """[yes, no, yes] accepts one token, and the correction makes two."""
    plain, result, stream = _scripted(9, 3, {(0, 1), (1, 0)})
    counts = [(r.drafted, r.verified, r.accepted, r.emitted, r.level) for r in result.rounds]
    assert counts == [
        (3, 3, 1, 2, CORRECTED),
        (3, 3, 0, 1, CORRECTED),
        (3, 3, 3, 4, ALL_ACCEPTED),
        (0, 0, 0, 1, ALL_ACCEPTED),
    ]
    assert result.tokens == plain[:9]
    assert [len(part) for part in stream] == [1, 2, 1, 4, 1]
    assert result.finish == "length"


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("extra", [(), (25, 31)])
def test_an_end_token_anywhere_in_a_block_is_the_last_token(at: int, extra: tuple[int]) -> None:
    """Block of 4 after the first token: `at` 0 is that token, 1..4 the slots, 5 the bonus."""
    target = _walker()
    plain = _plain(target, PROMPT, 64).tokens
    end = plain[at]
    stop = min(plain.index(e) for e in (end, *extra))
    _, result, stream = _scripted(64, 4, set(), (end, *extra))
    assert result.tokens == plain[: stop + 1]
    assert result.finish == "end"
    assert list(itertools.chain(*stream)) == result.tokens
    assert _plain(target, PROMPT, 64, end_token_ids=(end, *extra)).tokens == result.tokens
    _check_counts(result, 4)
    if result.rounds:
        last, slot = result.rounds[-1], (stop - 1) % 5  # a full round emits 4 + 1
        in_block = slot < 4
        assert last.drafted == 4
        assert last.verified == last.accepted == (slot + 1 if in_block else 4)
        assert last.emitted == (slot + 1 if in_block else 5)


def test_every_slot_of_the_block_was_hit_by_the_end_tokens_above() -> None:
    plain = _plain(_walker(), PROMPT, 64).tokens
    first_seen = {plain.index(plain[at]) for at in range(8)}
    assert {0, 1, 2, 3, 4, 5} <= first_seen


def test_an_end_token_behind_a_rejection_ends_nothing() -> None:
    """The drafter's wrong guess is an end token; the text goes on with the correction."""
    target = _walker()
    plain = _plain(target, PROMPT, 64).tokens
    wrong = (plain[2] + 1) % 41  # what the scripted drafter proposes for slot 1 of round 0
    expected = _plain(target, PROMPT, 64, end_token_ids=(wrong,)).tokens
    _, result, _ = _scripted(64, 4, {(0, 1)}, (wrong,))
    assert result.tokens == expected
    assert len(result.tokens) > 3


@pytest.mark.parametrize("new", [1, 2, 3, 5, 6, 7, 10, 11, 12])
@pytest.mark.parametrize("draft_length", [1, 2, 4, 5])
def test_max_new_tokens_is_exact_and_nothing_beyond_it_is_verified(
    new: int, draft_length: int
) -> None:
    target = TableTarget.random(13, 2)
    drafter = TableDrafter.of(target, 5, noise=0.3, seed=3)
    for sampling in (GREEDY, SamplingParams(1.0)):
        before = target.rows_seen
        result = SpeculativeDecoder(target, drafter).generate(
            PROMPT, max_new_tokens=new, sampling=sampling, draft_length=draft_length
        )
        assert len(result.tokens) == new
        assert result.finish == "length"
        _check_counts(result, draft_length)
        emitted = 1
        for r in result.rounds:
            assert r.drafted == min(draft_length, new - emitted - 1)
            emitted += r.emitted
        rows = sum(r.verified + 1 for r in result.rounds)
        assert target.rows_seen - before == len(PROMPT) + rows


@pytest.mark.parametrize("draft_length", [0, -1, 6])
def test_draft_lengths_outside_the_trained_block_are_refused(draft_length: int) -> None:
    target = TableTarget.random(7, 0)
    decoder = SpeculativeDecoder(target, TableDrafter.random(7, 5, 0))
    with pytest.raises(UserError, match=r"expected 1\.\.5 .* got " + str(draft_length)):
        decoder.generate(PROMPT, max_new_tokens=4, sampling=GREEDY, draft_length=draft_length)
    assert target.rows_seen == 0  # refused before the target ran


@pytest.mark.parametrize(
    ("prompt", "new", "what"),
    [
        ([], 4, "at least one token"),
        ([3, 7], 4, "0..6"),
        ([-1], 4, "got -1"),
        ([1, 2.0], 4, "whole numbers, got 2.0"),
        ([1], 0, "at least 1"),
    ],
)
def test_wrong_requests_are_refused(prompt: list[int], new: int, what: str) -> None:
    target = TableTarget.random(7, 0)
    decoder = SpeculativeDecoder(target, TableDrafter.random(7, 5, 0))
    with pytest.raises(UserError, match=what):
        decoder.generate(prompt, max_new_tokens=new, sampling=GREEDY, draft_length=2)
    with pytest.raises(UserError, match=what):
        _plain(target, prompt, new)
    with pytest.raises(UserError, match=what):
        generate_batch(target, [[1], prompt], max_new_tokens=new, sampling=GREEDY)


@pytest.mark.parametrize("taps", [TapSet((0,), "raw_prefix"), TapSet((0, 3), "residual")])
def test_a_drafter_whose_taps_the_target_lacks_is_refused(taps: TapSet) -> None:
    drafter = TableDrafter.random(7, 5, 0)
    drafter.taps = taps
    with pytest.raises(UserError, match="use the drafter with the target it was made for"):
        SpeculativeDecoder(TableTarget.random(7, 0), drafter)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_prefill_chunks_change_nothing(chunk: int) -> None:
    target = TableTarget.random(9, 1)
    drafter = TableDrafter.of(target, 4, noise=0.5, seed=0)
    prompt = [1, 2, 3, 4, 5]
    results = [
        SpeculativeDecoder(target, drafter).generate(
            prompt,
            max_new_tokens=12,
            sampling=SamplingParams(1.0),
            draft_length=4,
            seed=3,
            prefill_chunk=c,
        )
        for c in (2048, chunk)
    ]
    assert results[0].tokens == results[1].tokens
    assert drafter.contexts[-1].tokens == (prompt + results[1].tokens)[:-1]


def test_a_seed_repeats_and_another_differs() -> None:
    target = TableTarget.random(50, 1, scale=0.5)
    decoder = SpeculativeDecoder(target, TableDrafter.random(50, 4, 0))
    texts = [
        decoder.generate(
            PROMPT, max_new_tokens=30, sampling=SamplingParams(1.0), draft_length=4, seed=seed
        ).tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0), SamplingParams(0.7, 0.9, 3)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_logits_stop_the_run_by_name(sampling: SamplingParams, value: float) -> None:
    """The position is that of the token in the text which could not be chosen."""
    vocab = 7
    target = TableTarget.random(vocab, 0)
    bad = TableTarget(target.table.clone())
    bad.table[PROMPT[-1]] = value  # every row after the first new token
    options = {"max_new_tokens": 8, "sampling": sampling}
    good_drafter = TableDrafter.of(target, 3, 0.1, 0)
    with pytest.raises(BadLogits, match="target logits of row 0, position 4"):
        SpeculativeDecoder(bad, good_drafter).generate(PROMPT, draft_length=3, **options)
    with pytest.raises(BadLogits, match="target logits of row 0"):
        plain_generate(bad, PROMPT, **options)
    drafter = TableDrafter.random(vocab, 3, 0)
    drafter.slots[1, :, 2] = value
    with pytest.raises(BadLogits, match="drafter logits of row 0, position 5"):
        SpeculativeDecoder(target, drafter).generate(PROMPT, draft_length=3, **options)


def test_padding_of_the_drafters_vocabulary_is_never_proposed() -> None:
    """The drafter's tables have 16 rows, the target 11; its favourite token is a padding id."""
    target = TableTarget.random(11, 4)
    drafter = TableDrafter.of(target, 4, 0.2, 0)
    wide = torch.full((11, 16), 50.0)
    wide[:, :11] = target.table.mean(dim=0)
    drafter.markov_head.bias = lambda code: wide[code.argmax(dim=-1)]
    for sampling in (GREEDY, SamplingParams(1.0)):
        result = SpeculativeDecoder(target, drafter).generate(
            PROMPT, max_new_tokens=60, sampling=sampling, draft_length=4
        )
        assert max(result.tokens) < 11
        assert sum(r.accepted for r in result.rounds) > 0
