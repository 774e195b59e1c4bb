"""The shipped target decoded speculatively says exactly what it says plainly, token for token.

Greedy, float32, shipped prompts, and drafters whose accepted length takes every value from 0 to the
draft length: one replays the plain answer with random faults, one is distilled here. A drafter that
is never or always right would leave most commits of the hybrid cache untried.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from dspark.assets import asset
from dspark.distill.answers import choose_prompts
from dspark.distill.chat import ChatFormat
from dspark.distill.config import load_config
from dspark.distill.prompts import read_prompts
from dspark.distill.run import run_distill
from dspark.draft.checkpoint import load_drafter
from dspark.draft.model import DSparkDrafter
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.proposal import Drafter
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark.taps import TapSet

GREEDY = SamplingParams()
BLOCK, DRAFT_LENGTH = 8, 7
MAX_NEW_TOKENS = 160
FAULTS = 0.2
"""Share of replayed tokens that are wrong: one block of seven in five is right to its end."""


@pytest.fixture(scope="module")
def nano() -> LoadedTarget:
    return load_target("nano", dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """A prompt of the shipped test file and the target's plain answer to it."""

    prompt: list[int]
    answer: list[int]
    finish: str


def _cases(nano: LoadedTarget, count: int) -> list[Case]:
    """`count` prompts spread evenly over the file: word problems and plain instructions."""
    rows = read_prompts([asset("prompts/test.jsonl")], strict=True).rows
    chat = ChatFormat(nano.tokenizer)
    cases = []
    for row in choose_prompts(rows, count):
        prompt = chat.prompt_ids(row.prompt)
        plain = plain_generate(nano.target, prompt, max_new_tokens=MAX_NEW_TOKENS, sampling=GREEDY)
        cases.append(Case(prompt, plain.tokens, plain.finish))
    return cases


def _rounds_of_equal_text(nano: LoadedTarget, drafter: Drafter, case: Case) -> list[RoundRecord]:
    """Decode `case` with `drafter`, check every token, return the rounds."""
    result = SpeculativeDecoder(nano.target, drafter).generate(
        case.prompt, max_new_tokens=MAX_NEW_TOKENS, sampling=GREEDY, draft_length=DRAFT_LENGTH
    )
    assert result.tokens == case.answer
    assert result.finish == case.finish
    return result.rounds


def _accepted_lengths(rounds: Sequence[RoundRecord]) -> set[int]:
    """Accepted counts that occurred in rounds of the whole draft length."""
    return {r.accepted for r in rounds if r.drafted == DRAFT_LENGTH}


class ReplayDrafter:
    """Proposes the known answer; each token is replaced by another one with probability FAULTS.

    Its block states are zero, which the head without bias maps to zero logits, and its sequential
    head puts all weight on the planned token. `right` collects the correct prefix of every block.
    """

    calibration = confidence_head = draft_ids = None
    taps = TapSet((0, 4, 8), "attn_res_mixture")

    def __init__(self, case: Case, vocab: int, seed: int) -> None:
        self.text = [*case.prompt, *case.answer]
        self.vocab = vocab
        self.random = random.Random(seed)
        self.config = SimpleNamespace(block_size=BLOCK, mask_token_id=vocab - 1)
        self.markov_head = SimpleNamespace(
            start=lambda batch: None,
            step=lambda prev, hidden, state: (prev, state),
            bias=self._bias,
            embed=None,
        )
        self.plan: list[int] = []
        self.right: list[int] = []

    def new_context(self, batch: int, max_length: int) -> SimpleNamespace:
        return SimpleNamespace(rows=0)

    def extend(self, context: SimpleNamespace, features: Tensor, counts: object = None) -> None:
        context.rows += features.shape[1]

    def block_hidden(self, block_embeds: Tensor, context: SimpleNamespace) -> Tensor:
        after_anchor = self.text[context.rows + 1 :][:BLOCK]
        after_anchor += [0] * (BLOCK - len(after_anchor))
        wrong = [self.random.random() < FAULTS for _ in after_anchor]
        self.plan = [
            (token + fault * self.random.randrange(1, self.vocab)) % self.vocab
            for token, fault in zip(after_anchor, wrong, strict=True)
        ]
        self.right.append([*wrong, True].index(True))
        return torch.zeros_like(block_embeds)

    def _bias(self, prev: Tensor) -> Tensor:
        return F.one_hot(torch.tensor([self.plan.pop(0)]), self.vocab).float()


def test_equal_to_plain_when_an_oracle_errs_at_random(nano: LoadedTarget) -> None:
    rounds: list[RoundRecord] = []
    for seed, case in enumerate(_cases(nano, 20)):
        drafter = ReplayDrafter(case, nano.target.vocab_size, seed)
        of_case = _rounds_of_equal_text(nano, drafter, case)
        # Not only the text: every round accepts exactly what was right in it. The last one may end
        # earlier, at the end token.
        expected = [min(n, DRAFT_LENGTH) for n in drafter.right]
        assert [r.accepted for r in of_case[:-1]] == expected[: len(of_case) - 1]
        rounds += of_case
    assert _accepted_lengths(rounds) == set(range(DRAFT_LENGTH + 1))


@pytest.fixture(scope="module")
def distilled(nano: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> DSparkDrafter:
    """A drafter trained for a minute and a half: many small steps with much cross-entropy, which
    learns the first tokens of a block fastest. Far from good, far from random."""
    settings = {
        "target.device": "cpu",
        "data.max_prompts": 256,
        "data.held_out": 8,
        "data.temperature": 0.0,
        "drafter.block_size": BLOCK,
        "train.epochs": 3,
        "train.rows_per_step": 4,
        "train.micro_rows": 4,
        "train.anchors": 24,
        "train.lr": 3e-3,
        "train.ce": 1.0,
        "eval.every": 1000,
        "eval.prompts": 0,
        "out.dir": str(tmp_path_factory.mktemp("distilled") / "drafter"),
    }
    folder = run_distill(load_config(None, settings), console=Console(quiet=True))
    return load_drafter(folder, nano.target).eval()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 6 minutes of work; the machine may be shared
def test_equal_to_plain_on_200_prompts(nano: LoadedTarget, distilled: DSparkDrafter) -> None:
    rounds: list[RoundRecord] = []
    for case in _cases(nano, 200):
        rounds += _rounds_of_equal_text(nano, distilled, case)
    assert _accepted_lengths(rounds) == set(range(DRAFT_LENGTH + 1))
    assert sum(r.emitted for r in rounds) / len(rounds) > 1.5
