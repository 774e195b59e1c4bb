"""The token-by-token samples of `eval` and `bench`: what they say is what the decoder said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.policies import Fixed
from dspark.runtime.policies.bands import Bands
from dspark.runtime.records import Emitted, Generation, RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval.lengths_by_entropy import lengths_by_entropy
from dspark_eval.pair import Pair, load_pair
from dspark_eval.samples import (
    PROMPT_CHARACTERS,
    TOKENS,
    Answered,
    asked,
    emitted,
    pieces,
    samples,
)
from dspark_eval.settings import EvalOptions
from dspark_eval.suites import load_suites
from tests import chat_tokenizers
from tests.tiny_pair import write_pair


def record(accepted: int, emitted: int, entropy: float = 0.5) -> RoundRecord:
    """A round of four drafts."""
    return RoundRecord(4, 4, accepted, emitted, 2, 0.001, 0.002, 0.003, (0.5,) * 4, (entropy,) * 4)


def answer(emitted_by_round: list[int]) -> Generation:
    rounds = [record(count - 1, count) for count in emitted_by_round]
    tokens = list(range(100, 101 + sum(emitted_by_round)))
    return Generation(tokens, "length", 0.1, 1.0, rounds)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random pair."""
    files = write_pair(tmp_path_factory.mktemp("pair"))
    return load_pair(EvalOptions(draft=files.draft, target=files.target, quiet=True))


@pytest.mark.parametrize("siblings", [False, True])
def test_kinds_read_back_from_rounds_are_those_the_decoder_streamed(
    pair: Pair, siblings: bool
) -> None:
    prompts = [[5, 6, 7], [9, 8, 7, 6]]
    # thresholds that put every position into the band with siblings
    policy = Bands(Fixed(4), high=1.0, low=0.0, count=3) if siblings else Fixed(4)
    seen = set()
    for seed, prompt in enumerate(prompts * 2):
        streamed: list[Emitted] = []
        found = SpeculativeDecoder(pair.target, pair.drafter).generate(
            prompt,
            max_new_tokens=48,
            sampling=SamplingParams(temperature=1.0),
            policy=policy,
            seed=seed,
            on_round=streamed.extend,
        )
        assert emitted(found) == streamed
        seen |= {token.kind for token in streamed}
    assert seen >= {"first", "accepted", "corrected"} | (
        {"sibling", "bonus"} if siblings else set()
    )


def test_a_token_that_ended_inside_the_accepted_run_has_no_bonus_behind_it() -> None:
    ended = Generation([1, 2, 3], "end", 0.0, 0.0, [record(2, 2)])
    assert [token.kind for token in emitted(ended)] == ["first", "accepted", "accepted"]


def test_the_median_and_the_hardest_answer_are_kept() -> None:
    answers = [answer([5, 5]), answer([1, 1]), answer([3, 3]), answer([4, 4]), answer([2, 2])]
    found = samples([Answered(str(i), a) for i, a in enumerate(answers)], chat_tokenizers.k3())
    assert [(s["prompt"], s["why"], s["accepted_length"]) for s in found] == [
        (2, "median", 3.0), (1, "lowest", 1.0)
    ]  # fmt: skip
    assert found[1]["question"] == "1"
    assert found[1]["kind"] == ["first", "corrected", "corrected"]
    (only,) = samples([Answered("?", answers[0])], chat_tokenizers.k3())
    assert only["why"] == "only"
    assert samples([Answered("?", Generation([7], "end", 0.0, 0.0))], chat_tokenizers.k3()) == []


def test_a_sample_is_bounded_and_its_columns_are_as_long_as_each_other() -> None:
    long = answer([5] * 500)
    (found,) = samples([Answered("x" * 5000, long)], chat_tokenizers.k3())
    for column in ("text", "kind", "confidence", "round"):
        assert len(found[column]) == TOKENS
    assert len(found["question"]) == PROMPT_CHARACTERS
    assert found["tokens"] == 2501
    assert len(found["rounds"]) == found["round"][-1] + 1 == 32
    assert found["rounds"][0] == {
        "drafted": 4, "verified": 4, "accepted": 4, "emitted": 5, "end": "corrected",
        "draft_ms": 1.0, "verify_ms": 2.0, "other_ms": 3.0,
    }  # fmt: skip
    assert len(json.dumps(found)) < 20_000


def test_pieces_add_up_to_the_text_also_where_a_character_has_several_tokens() -> None:
    tokenizer = chat_tokenizers.k3()
    text = "12 + 4 → 16 🎈 apples"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokens, tokenizer)
    assert len(parts) == len(tokens)
    assert "".join(parts) == text
    assert pieces([], tokenizer) == []


def test_the_question_is_the_last_turn(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
             {"role": "user", "content": "three"}]  # fmt: skip
    path.write_text(json.dumps({"messages": turns}), encoding="utf-8")
    (suite,) = load_suites(path, n_prompts=1, seed=0)
    assert asked(suite, [answer([2])])[0].question == "three"


def test_lengths_are_counted_by_the_mean_entropy_of_a_block() -> None:
    rounds = [record(0, 1, 0.05), record(3, 4, 0.1), record(3, 4, 0.2), record(4, 5, 2.0)]
    plain = RoundRecord(0, 0, 0, 1, 0, 0.0, 0.0, 0.0, (), ())
    assert lengths_by_entropy([*rounds, plain]) == [
        {"low": 0.0, "high": 0.1, "rounds": 1, "verified": [0, 0, 0, 0, 1],
         "accepted": [1, 0, 0, 0, 0]},
        {"low": 0.1, "high": 0.25, "rounds": 2, "verified": [0, 0, 0, 0, 2],
         "accepted": [0, 0, 0, 2, 0]},
        {"low": 1.0, "high": None, "rounds": 1, "verified": [0, 0, 0, 0, 1],
         "accepted": [0, 0, 0, 0, 1]},
    ]  # fmt: skip
    assert lengths_by_entropy([plain]) == lengths_by_entropy([]) == []
