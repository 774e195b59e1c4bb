"""Sampling rules as functions of a row's prefix.

Oracles: transformers' own processors called on one row and one prefix at a time, transformers'
`generate` on the same table of logits, and joint laws enumerated prefix by prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PretrainedConfig,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.modeling_outputs import CausalLMOutput

from dspark.errors import UserError
from dspark.runtime.plain import plain_generate
from dspark.runtime.rules import Processor, RequestRules, Rules
from dspark.runtime.sampling import BadLogits, SamplingParams
from tests.table_target import TableTarget

VOCAB = 7
PROMPT = [3, 1, 4]
ENDS = (0, 5)
GREEDY = SamplingParams()

PROCESSORS: dict[str, Callable[[], Sequence[Processor]]] = {
    "repetition": lambda: [RepetitionPenaltyLogitsProcessor(1.8)],
    "ngram": lambda: [NoRepeatNGramLogitsProcessor(2)],
    "bad-words": lambda: [NoBadWordsLogitsProcessor([[2], [1, 4], [3, 1, 6]])],
    "sequence-bias": lambda: [SequenceBiasLogitsProcessor([[[1, 2], 3.0], [[6], -2.5]])],
    "begin": lambda: [SuppressTokensAtBeginLogitsProcessor([1, 2], len(PROMPT) + 2)],
    "min-p": lambda: [MinPLogitsWarper(0.3)],
    "watermark": lambda: [WatermarkLogitsProcessor(VOCAB, "cpu", bias=2.0)],
    "several": lambda: LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3)]
    ),
}
each_processor = pytest.mark.parametrize("name", PROCESSORS)


def _alone(processors: Sequence[Processor], prefix: list[int], row: Tensor) -> Tensor:
    """Transformers' way: the batch is one row, the ids are its prefix."""
    scores = row.clone().unsqueeze(0)
    for processor in processors:
        scores = processor(torch.tensor([prefix]), scores)
    return scores[0]


def _bound(rules: Rules, emitted: Sequence[int] = ()) -> RequestRules:
    bound = rules.bind(PROMPT, ENDS, VOCAB)
    bound.extend(list(emitted))
    return bound


@each_processor
def test_every_row_of_a_chain_is_processed_as_if_alone(name: str) -> None:
    processors = PROCESSORS[name]()
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    block = torch.tensor([2, 3, 1, 4, 2])  # its first token is the anchor
    bound = _bound(Rules(processors=processors), [6, 2])
    assert bound.history.tolist() == [*PROMPT, 6, 2]
    ruled = bound.block(logits, block)
    for row in range(5):
        prefix = [*PROMPT, 6, *block[: row + 1].tolist()]
        assert torch.equal(ruled[row], _alone(processors, prefix, logits[row]))
    assert not torch.equal(ruled, logits)
    assert torch.equal(bound.after(logits[:1]), ruled[:1])


@each_processor
def test_every_row_of_a_tree_is_processed_by_its_own_path(name: str) -> None:
    """Rows [anchor, x1, x2, y1, y1', y2]: siblings of x1 follow the anchor, y2 follows x1."""
    processors = PROCESSORS[name]()
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([2, 3, 1, 4, 6, 2, 0])
    parents = torch.tensor([-1, 0, 1, 0, 0, 1, -1])  # the last row pads
    paths = [[], [3], [3, 1], [4], [6], [3, 2]]
    ruled = _bound(Rules(processors=processors), [2]).block(logits, tokens, parents)
    for row, path in enumerate(paths):
        assert torch.equal(ruled[row], _alone(processors, [*PROMPT, 2, *path], logits[row]))


def test_the_given_logits_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB)
    kept = logits.clone()
    rules = Rules({1: 2.0}, 9, PROCESSORS["several"]())
    _bound(rules, [2]).block(logits, torch.tensor([2, 2]))
    assert torch.equal(logits, kept)


def test_a_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = torch.randn(1, VOCAB)
    ruled = _bound(Rules({1: 2.5, 6: -math.inf})).after(logits)
    assert ruled[0, 1] == logits[0, 1] + 2.5
    assert ruled[0, 6] == -math.inf
    rest = [0, 2, 3, 4, 5]
    assert torch.equal(ruled[0, rest], logits[0, rest])


@pytest.mark.parametrize("emitted", [0, 1, 2, 5])
def test_end_tokens_wait_for_the_least_number_of_new_tokens(emitted: int) -> None:
    """As transformers', also in the middle of a block, where rows are past the limit and not."""
    logits = torch.randn(4, VOCAB)
    bound = _bound(Rules(min_new_tokens=4), [2] * emitted)
    theirs = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, torch.tensor(ENDS))
    block = torch.tensor([2, 1, 3, 6])
    ruled = bound.block(logits, block)
    for row in range(4):
        prefix = [*PROMPT, *[2] * emitted, *block[1 : row + 1].tolist()]
        assert torch.equal(ruled[row], _alone([theirs], prefix, logits[row]))


def test_nothing_brings_an_end_token_back() -> None:
    rules = Rules({0: 50.0}, 2, [lambda ids, scores: scores + 100.0 * (scores > 40)])
    ruled = _bound(rules).after(torch.zeros(1, VOCAB))
    assert ruled[0, list(ENDS)].tolist() == [-math.inf, -math.inf]


# ---------------------------------------------------------------------------------------- drafts


def test_a_slot_of_the_draft_gets_the_rules_of_its_prefix() -> None:
    processors = PROCESSORS["several"]()
    bound = _bound(Rules(processors=processors), [2])
    logits = torch.randn(VOCAB)
    expected = _alone(processors, [*PROMPT, 2, 6, 3], logits)
    assert torch.equal(bound.slot(logits, torch.tensor([6, 3])), expected)
    ids = torch.tensor([1, 3, 6])
    assert torch.equal(bound.slot(logits[ids], torch.tensor([6, 3]), ids), expected[ids])


def test_a_draft_that_may_say_nothing_stays_as_it_was() -> None:
    """The rules may leave the target tokens that a reduced vocabulary lacks."""
    bound = _bound(Rules(dict.fromkeys((1, 3), -math.inf)))
    logits = torch.randn(2)
    ids = torch.tensor([1, 3])
    assert torch.equal(bound.slot(logits, torch.tensor([2]), ids), logits)


# -------------------------------------------------------------------------------- wrong requests


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rules({-1: 1.0}), "token ids >= 0, got -1"),
        (lambda: Rules({1: math.nan}), "finite number or -inf for token 1, got nan"),
        (lambda: Rules({1: math.inf}), "finite number or -inf for token 1, got inf"),
        (lambda: Rules(min_new_tokens=-1), "min_new_tokens: expected at least 0, got -1"),
        (lambda: _bound(Rules({VOCAB: 1.0})), r"token ids 0\.\.6 of the target, got 7"),
    ],
)
def test_wrong_rules_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_processors_that_look_at_more_than_the_prefix_are_refused() -> None:
    stateful = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=8, sampling_table_seed=0,
        context_history_size=4, device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(UserError, match="SynthIDTextWatermarkLogitsProcessor: its scores depend"):
        Rules(processors=[stateful])


def test_a_processor_that_changes_the_shape_is_named() -> None:
    class Halves:
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores[:, ::2]

    with pytest.raises(UserError, match=r"Halves: expected scores \[1, 7\].*got \[1, 4\]"):
        _bound(Rules(processors=[Halves()])).after(torch.zeros(1, VOCAB))


def test_rules_that_leave_no_token_stop_with_the_place_in_the_text() -> None:
    bound = _bound(Rules(processors=[NoRepeatNGramLogitsProcessor(1)]), [0, 2, 5])
    bound.after(torch.randn(1, VOCAB))  # 6 is left
    bound.extend([6])
    with pytest.raises(UserError, match="no token is left for position 7 of the text"):
        bound.after(torch.randn(1, VOCAB))


def test_a_draft_that_nothing_may_follow_stops_only_a_text_that_follows_it() -> None:
    logits = torch.randn(2, VOCAB)
    for text, dead in (([2], False), ([6], False), ([6, 1], True)):
        bound = _bound(Rules(processors=[NoRepeatNGramLogitsProcessor(1)]), [0, 2, 5])
        ruled = bound.block(logits, torch.tensor([5, 6]))
        assert ruled[0].isfinite().nonzero().flatten().tolist() == [6]
        assert torch.equal(ruled[1], logits[1])
        if dead:
            with pytest.raises(UserError, match="no token is left for position 7 of the text"):
                bound.extend(text)
        else:
            bound.extend(text)
            assert bound.history.tolist()[6:] == text


def test_rules_do_not_hide_logits_that_are_bad() -> None:
    """A penalty could put -inf over a NaN, and decoding would go on."""
    logits = torch.randn(2, VOCAB)
    logits[1, 3] = math.nan
    bound = _bound(Rules(processors=[NoRepeatNGramLogitsProcessor(1)]))
    with pytest.raises(BadLogits, match="target logits of row 0, position 1 hold NaN"):
        bound.block(logits, torch.tensor([4, 2]))


# -------------------------------------------------------------------------------- whole decoding


class TableModel(PreTrainedModel, GenerationMixin):
    """The table target as a transformers model."""

    config_class = PretrainedConfig
    _supports_cache_class = False

    def __init__(self, table: Tensor) -> None:
        super().__init__(PretrainedConfig(vocab_size=table.shape[0], num_hidden_layers=1))
        self.anything = torch.nn.Parameter(torch.zeros(1))
        self.table = table

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: object) -> dict[str, Tensor]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table[input_ids[:, -2], input_ids[:, -1]].unsqueeze(1))


def _theirs(target: TableTarget, rules: Rules, new: int, ends: tuple[int, ...]) -> list[int]:
    """`transformers.generate`, greedy."""
    processors = LogitsProcessorList(rules.processors)
    if rules.logit_bias:
        pairs = [[[token], bias] for token, bias in rules.logit_bias.items()]
        processors.insert(0, SequenceBiasLogitsProcessor(pairs))
    out = TableModel(target.table).generate(
        torch.tensor([PROMPT]),
        max_new_tokens=new,
        min_new_tokens=rules.min_new_tokens or None,
        do_sample=False,
        logits_processor=processors,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        use_cache=False,
    )
    return list(out[0, len(PROMPT) :].tolist())


RULES = {
    **{name: (lambda name=name: Rules(processors=PROCESSORS[name]())) for name in PROCESSORS},
    "bias": lambda: Rules({1: 3.0, 2: -4.0}),
    "min-new": lambda: Rules(min_new_tokens=12),
    "everything": lambda: Rules({1: 1.5}, 9, PROCESSORS["several"]()),
}
each_rule = pytest.mark.parametrize("name", [name for name in RULES if name != "min-p"])
"""A filter changes no greedy text."""


@each_rule
@pytest.mark.parametrize("seed", range(4))
def test_plain_decoding_says_what_transformers_says(name: str, seed: int) -> None:
    target = TableTarget.random(VOCAB, seed)
    result = plain_generate(
        target,
        PROMPT,
        max_new_tokens=24,
        sampling=GREEDY,
        rules=RULES[name](),
        end_token_ids=ENDS,
    )
    assert result.tokens == _theirs(target, RULES[name](), 24, ENDS)


@each_rule
def test_every_rule_matters_somewhere(name: str) -> None:
    """Else equality would say nothing."""
    options = {"max_new_tokens": 24, "sampling": GREEDY, "end_token_ids": ENDS}
    assert any(
        plain_generate(target, PROMPT, rules=RULES[name](), **options).tokens
        != plain_generate(target, PROMPT, **options).tokens
        for target in (TableTarget.random(VOCAB, seed) for seed in range(4))
    )
