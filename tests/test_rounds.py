"""Everything a round can do, through the whole loop: siblings, cuts, methods, kinds, records."""

from __future__ import annotations

import itertools

import pytest
import torch

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Bands, Confidence, Entropy, Fixed, Policy
from dspark.runtime.records import (
    ALL_ACCEPTED,
    CORRECTED,
    CUT,
    SIBLING,
    Emitted,
    Generation,
)
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.sampling import SamplingParams
from tests.k3_tiny import tiny_model
from tests.table_target import TableDrafter, TableTarget
from tests.test_decode_k3 import real_drafter
from tests.test_decode_law import assert_law, joint

GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, 0.95)
VOCAB = 11
POLICIES: dict[str, Policy] = {
    "fixed": Fixed(4),
    "entropy": Entropy(1, h_stop=1.6),
    "confidence": Confidence(1, s_stop=0.3),
    "bands": Bands(Fixed(5), 0.97, 0.05, 2, 1),
    "bands with a cut": Bands(Confidence(1, s_stop=0.2), 0.9, 0.4, 3, 1),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
both = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class _Unsure(TableDrafter):
    """A table drafter whose confidence falls along the block and with the previous token, so that
    every band and every cut occurs."""

    @property
    def confidence_head(self) -> object:
        return lambda hidden, prev: (
            3.5 - torch.arange(hidden.shape[1]) - 0.6 * (prev.argmax(dim=-1) % 4)
        )


def _pair(seed: int, noise: float = 0.6) -> tuple[TableTarget, TableDrafter]:
    target = TableTarget.random(VOCAB, seed)
    return target, _Unsure.of(target, 5, noise=noise, seed=seed)


def _check(result: Generation, said: list[Emitted]) -> None:
    """The counting rules of records.py, and kinds that agree with the records."""
    assert [each.token for each in said] == result.tokens
    assert said[0].kind == "first"
    at = 1
    for n, r in enumerate(result.rounds):
        kinds = [each.kind for each in said[at : at + r.emitted]]
        at += r.emitted
        assert 0 <= r.accepted <= r.verified <= r.drafted
        assert kinds[: r.accepted] == ["accepted"] * r.accepted
        rest = kinds[r.accepted :]
        if n < len(result.rounds) - 1:  # nothing ended the text here
            last = {ALL_ACCEPTED: "bonus", CUT: "bonus", CORRECTED: "corrected"}.get(r.level)
            assert rest == (["sibling", "bonus"] if r.level == SIBLING else [last])
        assert r.sibling == ("sibling" in rest)
        assert r.level != CUT or r.verified < r.drafted
        assert r.target_rows >= 1 + r.verified
    assert at == len(said)
    for each in said:
        assert (each.confidence is not None) == (each.kind == "accepted")


@every_policy
def test_every_policy_says_greedily_what_plain_decoding_says(policy: Policy) -> None:
    levels: set[int] = set()
    for seed in range(8):
        target, drafter = _pair(seed)
        prompt = [seed % VOCAB, 3][: 1 + seed % 2]
        for ends in ((), (5,), (2, 7)):
            said: list[Emitted] = []
            result = SpeculativeDecoder(target, drafter).generate(
                prompt,
                max_new_tokens=40,
                sampling=GREEDY,
                policy=policy,
                end_token_ids=ends,
                on_round=said.extend,
            )
            plain = plain_generate(
                target, prompt, max_new_tokens=40, sampling=GREEDY, end_token_ids=ends
            )
            assert result.tokens == plain.tokens
            assert result.finish == plain.finish
            _check(result, said)
            levels |= {r.level for r in result.rounds}
    assert {ALL_ACCEPTED, CORRECTED} <= levels
    assert (SIBLING in levels) == (policy.siblings > 0)
    assert (CUT in levels) == (policy not in (POLICIES["fixed"], POLICIES["bands"]))


@every_policy
@both
def test_cache_and_context_hold_what_was_emitted_and_no_sibling(
    policy: Policy, sampling: SamplingParams
) -> None:
    rescued = 0
    for seed, new in itertools.product(range(8), (1, 2, 3, 30)):
        target, drafter = _pair(seed)
        decoder = SpeculativeDecoder(target, drafter)
        result = decoder.generate(
            [3, 1],
            max_new_tokens=new,
            sampling=sampling,
            policy=policy,
            end_token_ids=(4,),
            seed=seed,
        )
        text = [3, 1, *result.tokens]
        assert target.caches[-1].rows == [text[:-1]]
        assert drafter.contexts[-1].tokens == text[:-1]
        assert target.caches[-1].pending is None
        assert len(result.tokens) <= new
        rescued += sum(r.sibling for r in result.rounds)
    assert (rescued > 0) == (policy.siblings > 0)


LAWS = [
    pytest.param(method, policy, id=f"{method}-{name}", marks=marks)
    for method in ("token", "block")
    for name, policy in POLICIES.items()
    for marks in ([] if name == "bands with a cut" else [pytest.mark.slow],)
]


@pytest.mark.parametrize(("method", "policy"), LAWS)
def test_the_loop_follows_the_targets_law(method: str, policy: Policy) -> None:
    """Joint law of three tokens at a false-alarm rate of 1e-4; power as in test_decode_law.py."""
    target = TableTarget.random(3, 8, scale=1.0)
    drafter = _Unsure.of(target, 5, noise=1.0, seed=2)
    decoder = SpeculativeDecoder(target, drafter)
    sampling = SamplingParams(1.0)
    texts = [
        decoder.generate(
            [1, 2], max_new_tokens=6, sampling=sampling, policy=policy, method=method, seed=seed
        ).tokens[:3]
        for seed in range(800)
    ]
    assert_law(texts, joint(target, [1, 2], sampling))


@both
def test_siblings_on_a_hybrid_target(sampling: SamplingParams) -> None:
    """Whatever path of the tree was taken, states and windows are those of the text."""
    target, drafter = K3Target(tiny_model(), "tiny", ()), real_drafter()
    policy = Bands(Fixed(4), 1.0, 0.0, 3, 4)
    result = SpeculativeDecoder(target, drafter).generate(
        [5, 6, 7], max_new_tokens=50, sampling=sampling, policy=policy, seed=4
    )
    assert len(result.tokens) == 50
    assert any(r.sibling for r in result.rounds)
    if sampling.greedy:
        plain = plain_generate(target, [5, 6, 7], max_new_tokens=50, sampling=GREEDY)
        assert result.tokens == plain.tokens


def test_an_end_token_that_is_a_sibling_is_the_last_token() -> None:
    """Its bonus is dropped; the record says that a sibling was the end."""
    policy = Bands(Fixed(5), 1.0, 0.0, 3, 5)
    found = 0
    for seed in range(12):
        target, drafter = _pair(seed)
        decoder = SpeculativeDecoder(target, drafter)
        said: list[Emitted] = []
        decoder.generate(
            [1], max_new_tokens=30, sampling=GREEDY, policy=policy, on_round=said.extend
        )
        for at, each in enumerate(said):
            if each.kind != "sibling" or each.token in [s.token for s in said[:at]]:
                continue
            again: list[Emitted] = []
            result = decoder.generate(
                [1],
                max_new_tokens=30,
                sampling=GREEDY,
                policy=policy,
                end_token_ids=[each.token],
                on_round=again.extend,
            )
            assert again == said[: at + 1]
            assert result.finish == "end"
            assert result.rounds[-1].level == SIBLING
            assert result.rounds[-1].sibling
            assert result.rounds[-1].emitted == result.rounds[-1].accepted + 1
            assert target.caches[-1].rows == [[1, *result.tokens[:-1]]]
            found += 1
    assert found > 5


def test_relaxed_rounds_say_how_far_they_are_from_the_target() -> None:
    target, drafter = _pair(3)
    decoder = SpeculativeDecoder(target, drafter)
    options = {"max_new_tokens": 40, "sampling": SAMPLED, "draft_length": 4, "seed": 1}
    exact = decoder.generate([3], **options)
    lossy = decoder.generate([3], relaxed=Relaxed(0.0, 0.05, 0.3), **options)
    assert all(r.distance == () for r in exact.rounds)
    assert all(len(r.distance) <= r.emitted for r in lossy.rounds)
    assert max(d for r in lossy.rounds for d in r.distance) > 0.01
    none = decoder.generate([3], relaxed=Relaxed(1.0, 1.0, 1.0), **options)
    assert none.tokens == exact.tokens  # nobody is that confident


def test_bands_are_on_record_as_the_policy_saw_them() -> None:
    target, drafter = _pair(2)
    policy = Bands(Fixed(5), 0.9, 0.4, 2, 1)
    result = SpeculativeDecoder(target, drafter).generate(
        [3], max_new_tokens=40, sampling=GREEDY, policy=policy
    )
    for r in result.rounds:
        assert r.bands == policy.bands(r.confidence)
        low = [k for k, band in enumerate(r.bands) if band == "low"]
        assert r.level != CUT or r.verified == low[0]
    assert {band for r in result.rounds for band in r.bands} == {"high", "mid", "low"}


def test_a_policy_starts_anew_with_every_request() -> None:
    class Learns(Fixed):
        """Drafts one token more after every round."""

        seen = 0

        def draft_length(self, block_size: int) -> int:
            return min(1 + self.seen, block_size)

        def observe(self, record: object) -> None:
            object.__setattr__(self, "seen", self.seen + 1)

        def fresh(self) -> Learns:
            return Learns(self.length)

    target, drafter = _pair(2)
    decoder = SpeculativeDecoder(target, drafter)
    policy = Learns(5)
    for _ in range(2):
        result = decoder.generate([3], max_new_tokens=40, sampling=GREEDY, policy=policy)
        assert [r.drafted for r in result.rounds[:5]] == [1, 2, 3, 4, 5]
    assert policy.seen == 0


def test_a_policy_may_choose_plain_steps() -> None:
    class OnAndOff(Entropy):
        turn = 0

        def draft_length(self, block_size: int) -> int:
            return 3 * (self.turn % 2)

        def observe(self, record: object) -> None:
            object.__setattr__(self, "turn", self.turn + 1)

        def fresh(self) -> OnAndOff:
            return OnAndOff(1)

    target, drafter = _pair(2)
    decoder = SpeculativeDecoder(target, drafter)
    plain = plain_generate(target, [3], max_new_tokens=20, sampling=GREEDY).tokens
    said: list[Emitted] = []
    result = decoder.generate(
        [3], max_new_tokens=20, sampling=GREEDY, policy=OnAndOff(1), on_round=said.extend
    )
    assert result.tokens == plain
    assert [r.drafted for r in result.rounds[:4]] == [0, 3, 0, 3]
    assert said[1].kind == "plain"


def test_what_a_pair_cannot_do_is_refused_before_it_runs() -> None:
    target, drafter = _pair(2)
    decoder = SpeculativeDecoder(target, drafter)
    options = {"max_new_tokens": 4, "sampling": GREEDY}
    with pytest.raises(UserError, match="beside a policy"):
        decoder.generate([1], draft_length=2, policy=Fixed(3), **options)
    with pytest.raises(UserError, match=r"expected 1\.\.5 .* got 8"):
        decoder.generate([1], policy=Fixed(8), **options)
    with pytest.raises(UserError, match="works with method token"):
        decoder.generate([1], relaxed=Relaxed(), method="block", **options)
    target.supports_trees = False
    with pytest.raises(UserError, match="target table verifies chains only"):
        decoder.generate([1], policy=Bands(Fixed(3)), **options)

    class Headless(TableDrafter):
        confidence_head = None

    headless = SpeculativeDecoder(target, Headless(drafter.slots, torch.zeros(VOCAB, VOCAB)))
    for asked in ({"policy": Confidence()}, {"relaxed": Relaxed()}):
        with pytest.raises(UserError, match="no confidence head"):
            headless.generate([1], **asked, **options)
    assert target.rows_seen == 0
    assert headless.generate([1], policy=Entropy(1), **options).tokens == [
        *plain_generate(target, [1], **options).tokens
    ]
