"""Sampling rules and stop strings through the whole loop: chains and trees, both verifications.

Greedy texts are held against plain decoding, which test_rules.py holds against transformers.
Sampled ones against the joint law of three tokens, enumerated prefix by prefix in float64, by
Pearson's chi-square at a false-alarm rate of 1e-4 per test; the planted defects at the end show
that both can fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.hf_open import hf_target
from dspark.runtime.judge import Method
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.policies import Fixed
from dspark.runtime.policies.bands import Bands
from dspark.runtime.records import Emitted, Generation
from dspark.runtime.rules import RequestRules, Rules
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.runtime.stops import StopStrings
from tests.hf_tiny import tiny_hf
from tests.laws import pvalue
from tests.table_target import TableDrafter, TableTarget
from tests.tiny_drafters import FULL, make_drafter

GREEDY = SamplingParams()
BLOCK = 4
RULES: dict[str, Callable[[], Rules]] = {
    "bias": lambda: Rules({1: 2.0, 2: -3.0}),
    "min-new": lambda: Rules(min_new_tokens=14),
    "repetition": lambda: Rules(processors=[RepetitionPenaltyLogitsProcessor(1.8)]),
    "ngram": lambda: Rules(processors=[NoRepeatNGramLogitsProcessor(2)]),
    "all": lambda: Rules(
        {1: 1.0}, 9, [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3)]
    ),
}
# A table drafter's confidence is no probability: every position is in the band with siblings.
SIBLINGS = Bands(Fixed(BLOCK), high=1.0, low=0.0, count=2)
SHAPES = {"chain": Fixed(BLOCK), "siblings": SIBLINGS}

each_rule = pytest.mark.parametrize("name", RULES)
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_method = pytest.mark.parametrize("method", ["token", "block"])


def _pair(vocab: int, seed: int, scale: float = 1.5) -> tuple[TableTarget, TableDrafter]:
    target = TableTarget.random(vocab, seed, scale)
    return target, TableDrafter.of(target, BLOCK, noise=1.0, seed=seed + 1)


def _speculative(
    pair: tuple[TableTarget, TableDrafter], shape: str = "chain", **options: Any
) -> Generation:
    decoder = SpeculativeDecoder(*pair)
    return decoder.generate([3, 1, 2], policy=SHAPES[shape], **options)


@each_rule
@each_shape
@each_method
def test_greedy_texts_equal_plain_ones(name: str, shape: str, method: Method) -> None:
    texts = set()
    for seed in range(6):
        pair = _pair(9, seed)
        options = {"max_new_tokens": 30, "sampling": GREEDY, "end_token_ids": (0, 5)}
        plain = plain_generate(pair[0], [3, 1, 2], rules=RULES[name](), **options)
        fast = _speculative(pair, shape, method=method, rules=RULES[name](), **options)
        assert fast.tokens == plain.tokens
        assert fast.finish == plain.finish
        assert len(fast.tokens) == 1 + sum(r.emitted for r in fast.rounds)
        texts.add(tuple(plain.tokens))
    assert len(texts) > 1


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
@pytest.mark.parametrize("seed", range(2))
def test_a_transformers_model_says_what_its_own_generate_says(kind: str, seed: int) -> None:
    """Plain, chain and siblings against `generate` with the same processors, on a real model."""
    model, prompt, ends = tiny_hf(kind, seed), [7, 3, 9, 3], (2, 11)
    processors = [RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2)]
    theirs = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=24,
        min_new_tokens=8,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        eos_token_id=list(ends),
    )
    target = hf_target(model, name=kind, end_token_ids=ends)
    config = replace(
        FULL, vocab_size=target.vocab_size, hidden_size=target.hidden_size, target_layer_ids=(0, 2),
        num_target_layers=target.num_layers,
    )  # fmt: skip
    decoder = SpeculativeDecoder(target, make_drafter(config))
    options = {"max_new_tokens": 24, "sampling": GREEDY, "rules": Rules({}, 8, processors)}
    expected = theirs[0, len(prompt) :].tolist()
    assert plain_generate(target, prompt, **options).tokens == expected
    for policy in SHAPES.values():
        assert decoder.generate(prompt, policy=policy, **options).tokens == expected


# ---------------------------------------------------------------------------------- sampled texts

VOCAB, PROMPT = 4, [3, 1, 2]
LAW_RULES = {
    "all": lambda: Rules(
        {1: 0.7}, 2, [RepetitionPenaltyLogitsProcessor(1.6), NoRepeatNGramLogitsProcessor(2)]
    ),
    "bias": lambda: Rules({0: -1.0, 2: 1.0}),
}


def _law(target: TableTarget, rules: Rules, sampling: SamplingParams) -> np.ndarray:
    """[V, V, V] law of the first three tokens; rules and softmax written out once more here."""
    law = np.zeros((VOCAB,) * 3)
    for text in itertools.product(range(VOCAB), repeat=3):
        chance = 1.0
        for place, token in enumerate(text):
            prefix = [*PROMPT, *text[:place]]
            row = target.table[prefix[-2], prefix[-1]].clone()
            for biased, bias in rules.logit_bias.items():
                row[biased] += bias
            scores = row.unsqueeze(0)
            for processor in rules.processors:
                scores = processor(torch.tensor([prefix]), scores)
            if place < rules.min_new_tokens:
                scores[0, 0] = -torch.inf  # the end token
            chance *= float((scores[0].double() / sampling.temperature).softmax(-1)[token])
        law[text] = chance
    assert abs(law.sum() - 1) < 1e-6
    return law


def _texts(
    pair: tuple[TableTarget, TableDrafter],
    rules: Rules,
    sampling: SamplingParams,
    count: int,
    **options: Any,
) -> Tensor:
    """[count] first three tokens as one number; texts that end early are filled up with zeros."""
    tokens = []
    for seed in range(count):
        result = _speculative(
            pair, rules=rules, sampling=sampling, max_new_tokens=5, seed=seed,
            end_token_ids=(0,), **options,
        )  # fmt: skip
        tokens.append([*result.tokens, 0, 0][:3])
    return torch.tensor(tokens) @ torch.tensor([VOCAB**2, VOCAB, 1])


def _folded(law: np.ndarray) -> np.ndarray:
    """As `_texts` counts them: whatever would follow the end token 0 counts as zeros."""
    folded = law.copy()
    folded[0], folded[0, 0, 0] = 0.0, law[0].sum()
    for first in range(1, VOCAB):
        folded[first, 0], folded[first, 0, 0] = 0.0, law[first, 0].sum()
    return folded.reshape(-1)


@pytest.mark.parametrize(
    ("name", "shape", "method"),
    [
        ("all", "chain", "token"),
        ("all", "siblings", "token"),
        ("all", "siblings", "block"),
        ("bias", "chain", "block"),
    ],
)
@pytest.mark.parametrize("count", [400, pytest.param(4_000, marks=pytest.mark.slow)])
def test_sampled_texts_follow_the_ruled_law(
    name: str, shape: str, method: Method, count: int
) -> None:
    pair, sampling = _pair(VOCAB, 8, scale=1.0), SamplingParams(1.0)
    law = _folded(_law(pair[0], LAW_RULES[name](), sampling))
    found = _texts(pair, LAW_RULES[name](), sampling, count, shape=shape, method=method)
    assert pvalue(found, law) > 1e-4


def test_the_law_does_not_rest_on_the_rules_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft without rules is lossless too, and accepted less often: that is why it has them."""
    pair, sampling, rules = _pair(VOCAB, 8, scale=1.0), SamplingParams(1.0), LAW_RULES["all"]()

    def accepted() -> int:
        runs = (
            _speculative(pair, rules=rules, sampling=sampling, max_new_tokens=6, seed=seed)
            for seed in range(60)
        )
        return sum(record.accepted for run in runs for record in run.rounds)

    obedient = accepted()
    monkeypatch.setattr(RequestRules, "slot", lambda self, logits, drafted, ids=None: logits)
    assert accepted() < obedient
    law = _folded(_law(pair[0], rules, sampling))
    assert pvalue(_texts(pair, rules, sampling, 400), law) > 1e-4


@each_shape
@each_method
def test_a_dead_end_of_a_draft_does_not_end_the_text(
    monkeypatch: pytest.MonkeyPatch, shape: str, method: Method
) -> None:
    """Nothing may follow a 4, and 4 itself may not come: only unruled drafts ever hold one."""

    def barred(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 4] = -torch.inf
        return scores.masked_fill(ids[:, -1:] == 4, -torch.inf)

    met = 0

    def counting(self: RequestRules, *args: Any) -> Tensor:
        nonlocal met
        ruled = block(self, *args)
        met += len(self._dead_ends)
        return ruled

    block = RequestRules.block
    monkeypatch.setattr(RequestRules, "block", counting)
    monkeypatch.setattr(RequestRules, "slot", lambda self, logits, drafted, ids=None: logits)
    for seed in range(4):
        pair = _pair(9, seed)
        options = {"max_new_tokens": 30, "sampling": GREEDY, "rules": Rules(processors=[barred])}
        plain = plain_generate(pair[0], [3, 1, 2], **options)
        assert _speculative(pair, shape, method=method, **options).tokens == plain.tokens
    assert met


# -------------------------------------------------------------------------------- planted defects


def _history_only(
    self: RequestRules, logits: Tensor, tokens: Tensor, parents: Any = None
) -> Tensor:
    """Rules that do not see the block: what a loop does that applies them once per round."""
    return self.apply(logits, [self.history] * logits.shape[0])


def _row_order(self: RequestRules, logits: Tensor, tokens: Tensor, parents: object) -> Tensor:
    """Rules that take the rows of a tree for a chain."""
    paths = [torch.cat((self.history, tokens[1 : row + 1])) for row in range(tokens.shape[0])]
    return self.apply(logits, paths)


@pytest.mark.parametrize(
    ("defect", "shape"), [(_history_only, "chain"), (_history_only, "siblings"),
                          (_row_order, "siblings")],
)  # fmt: skip
def test_a_wrong_prefix_is_noticed(
    monkeypatch: pytest.MonkeyPatch, defect: Callable[..., Tensor], shape: str
) -> None:
    options = {"max_new_tokens": 30, "sampling": GREEDY, "rules": RULES["all"]()}
    pairs = [_pair(9, seed) for seed in range(6)]
    plain = [plain_generate(each[0], [3, 1, 2], **options).tokens for each in pairs]
    monkeypatch.setattr(RequestRules, "block", defect)
    fast = [_speculative(each, shape, **options).tokens for each in pairs]
    assert fast != plain


@each_shape
def test_a_wrong_law_is_noticed(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    pair, sampling, rules = _pair(VOCAB, 8, scale=1.0), SamplingParams(1.0), LAW_RULES["all"]()
    monkeypatch.setattr(RequestRules, "block", _history_only)
    law = _folded(_law(pair[0], rules, sampling))
    assert pvalue(_texts(pair, rules, sampling, 200, shape=shape), law) < 1e-6


# --------------------------------------------------------------------------------- stops in a loop


class Letters:
    """Token i is the i-th letter."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def _stopped(pair: tuple[TableTarget, TableDrafter], shape: str, **options: Any) -> None:
    """Speculative and plain decoding end at the same token, and so does everything on record."""
    plain = plain_generate(pair[0], [3, 1, 2], **options)
    seen: list[Emitted] = []
    fast = _speculative(pair, shape, on_round=seen.extend, **options)
    assert fast.tokens == plain.tokens
    assert fast.finish == plain.finish
    assert [emitted.token for emitted in seen] == fast.tokens
    assert len(fast.tokens) == 1 + sum(record.emitted for record in fast.rounds)
    assert pair[0].caches[-1].rows == [[3, 1, 2, *fast.tokens[:-1]]]
    assert all(record.accepted <= record.verified for record in fast.rounds)


@each_shape
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_tokens_records_and_cache(shape: str, length: int) -> None:
    """The stop is what greedy decoding says from token 9 on, wherever it then comes first."""
    finishes = set()
    for seed in range(8):
        pair = _pair(9, seed)
        options = {"max_new_tokens": 24, "sampling": GREEDY, "end_token_ids": ()}
        free = Letters().decode(plain_generate(pair[0], [3, 1, 2], **options).tokens)
        stop = StopStrings([free[9 : 9 + length], "zz"], Letters())
        _stopped(pair, shape, stop=stop, **options)
        ended = plain_generate(pair[0], [3, 1, 2], stop=stop, **options)
        assert Letters().decode(ended.tokens) == free[: free.index(stop.strings[0]) + length]
        finishes.add(ended.finish)
        _stopped(pair, shape, stop=stop, rules=Rules(min_new_tokens=12), **options)
    assert finishes == {"stop"}


def test_the_first_of_end_tokens_and_stops_ends_the_text() -> None:
    finishes = set()
    for seed in range(12):
        pair = _pair(9, seed)
        options = {"max_new_tokens": 24, "sampling": GREEDY, "end_token_ids": (0, 5)}
        _stopped(pair, "chain", stop=StopStrings(["ec", "h"], Letters()), **options)
        finishes.add(
            plain_generate(
                pair[0], [3, 1, 2], stop=StopStrings(["ec", "h"], Letters()), **options
            ).finish
        )
    assert {"end", "stop"} <= finishes


def _poisoned(target: TableTarget, prompt: list[int], least: int) -> int:
    """Makes the logits bad at the first place from `least` on that repeats no earlier pair."""
    options = {"max_new_tokens": least + 9, "sampling": GREEDY, "end_token_ids": ()}
    text = prompt + plain_generate(target, prompt, **options).tokens
    pairs = [tuple(text[n - 2 : n]) for n in range(len(text) + 1)]
    place = next(n for n in range(least, len(text)) if pairs[n] not in pairs[len(prompt) : n])
    target.table[(*pairs[place], 4)] = torch.nan
    return place


def test_bad_logits_name_the_place_in_the_text() -> None:
    """0 is the first token of the prompt: for the first token, in plain steps and in rounds."""
    for least in (3, 5, 6):
        pair = _pair(9, 3)
        place = _poisoned(pair[0], [3, 1, 2], least)
        message = f"target logits of row 0, position {place} hold NaN"
        options = {"max_new_tokens": 20, "sampling": GREEDY, "end_token_ids": ()}
        with pytest.raises(BadLogits, match=message):
            plain_generate(pair[0], [3, 1, 2], **options)
        for rules in (None, Rules({1: 0.0})):
            with pytest.raises(BadLogits, match=message):
                _speculative(pair, rules=rules, **options)


def test_bad_logits_of_a_batch_name_the_prompt_even_after_others_have_left() -> None:
    target = TableTarget.random(9, 3)
    place = _poisoned(target, [3, 1, 2], 5)
    options = {"max_new_tokens": place - 3, "sampling": GREEDY}
    text = plain_generate(target, [3, 1, 2], **options).tokens
    firsts = {a: int(target.table[0, a].argmax()) for a in range(1, 9)}
    a = next(a for a, first in firsts.items() if first not in text)  # leaves after its first token
    prompts, ends = [[a], [a], [3, 1, 2]], [firsts[a]]
    with pytest.raises(BadLogits, match=f"target logits of row 2, position {place} hold NaN"):
        generate_batch(target, prompts, max_new_tokens=20, sampling=GREEDY, end_token_ids=ends)
