"""Long contexts: what stands before a question, one reading for all prompts, figures by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.draft.checkpoint import load_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.shapes import KDAShape
from dspark.files import read_json
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import load_target
from dspark.runtime.policies import Fixed
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target, TargetOutput
from dspark_eval.acceptance import run_eval
from dspark_eval.drafting import Drafted
from dspark_eval.long_context import (
    CHAT,
    LENGTHS,
    PADDED,
    LongContext,
    earlier_turns,
    prompts_in_context,
    shared_length,
    speculative_after,
)
from dspark_eval.pair import load_pair
from dspark_eval.settings import EvalOptions
from dspark_eval.study.long import measure_long
from dspark_eval.suites import load_suites
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair

QUESTION = ({"role": "user", "content": "What is 3 + 4?"},)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def chat(pair: TinyPair):
    return load_pair(EvalOptions(draft=pair.draft, target=pair.target)).chat


# ------------------------------------------------------------------ what stands before a question


@pytest.mark.parametrize("tokens", [1, 200, 700])
def test_a_chat_is_the_shortest_that_is_long_enough(chat, tokens: int) -> None:
    turns = earlier_turns(chat, tokens)
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    bare = len(chat.prompt_ids(QUESTION))

    def length(shown) -> int:
        return len(chat.prompt_ids((*shown, *QUESTION))) - bare

    assert length(turns) >= tokens > length(turns[:-2])
    assert prompts_in_context(chat, LongContext(CHAT, tokens))(QUESTION) == chat.prompt_ids(
        (*turns, *QUESTION)
    )


def test_a_longer_chat_goes_on_where_a_shorter_one_ends(chat) -> None:
    assert earlier_turns(chat, 0) == ()
    short, long = earlier_turns(chat, 200), earlier_turns(chat, 700)
    assert long[: len(short)] == short


def test_padding_repeats_the_first_token(chat) -> None:
    ids = chat.prompt_ids(QUESTION)
    padded = prompts_in_context(chat, LongContext(PADDED, 5))(QUESTION)
    assert padded == [ids[0]] * 5 + ids


def test_the_sets_of_a_name_ask_the_same_questions() -> None:
    plain = load_suites("nano-problems", n_prompts=5, seed=3)[0]
    for name, kind in (("nano-long", CHAT), ("nano-padded", PADDED)):
        suites = load_suites(name, n_prompts=5, seed=3)
        assert [s.name for s in suites] == [f"{name}-{n}" for n in LENGTHS]
        assert [s.context for s in suites] == [LongContext(kind, n) for n in LENGTHS]
        assert all(s.rows == plain.rows for s in suites)
        (one,) = load_suites(f"{name}-2048", n_prompts=5, seed=3)
        assert one == suites[1]


# ------------------------------------------------------------------ one reading for all prompts


def test_shared_length_leaves_every_prompt_a_token() -> None:
    assert shared_length([[1, 2, 3, 4], [1, 2, 9]]) == 2
    assert shared_length([[1, 2, 3], [1, 2, 3]]) == 2
    assert shared_length([[1, 2, 3], [1, 2]]) == 1
    assert shared_length([[1], [2, 3]]) == 0


def _drafter(pair: TinyPair, backbone: str) -> DSparkDrafter:
    target = load_target(pair.target).target
    drafter = load_drafter(pair.draft, target).eval()
    if backbone == "attention":
        return drafter
    shape = {**vars(drafter.config), "backbone": "kda", "num_key_value_heads": 2}
    torch.manual_seed(1)
    kda = DSparkDrafter(DraftConfig(**{**shape, "kda": KDAShape()}))
    for parameter in kda.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return kda.eval()


@pytest.mark.parametrize("backbone", ["attention", "kda"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_read_together_are_answered_as_if_read_alone(
    pair: TinyPair, backbone: str, temperature: float
) -> None:
    """The same tokens and rounds as from the first token on, in any order and again."""
    target = load_target(pair.target).target
    drafter = _drafter(pair, backbone)
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(target.vocab_size, (300,), generator=generator).tolist()
    prompts = [[*common, 7 + i, 11, 13 + i] for i in range(3)]
    settings = {"max_new_tokens": 12, "sampling": SamplingParams(temperature=temperature)}
    whole_block = Drafted(Fixed(BLOCK_SIZE))
    read = _rows_read(target)
    decode = speculative_after(target, drafter, prompts, drafted=whole_block, **settings)
    assert read == [300]
    alone = SpeculativeDecoder(target, drafter)
    for index in (0, 2, 1, 0):
        read.clear()
        together = decode(prompts[index], index)
        assert read[0] == 3  # what no other prompt has
        expected = alone.generate(prompts[index], seed=index, draft_length=BLOCK_SIZE, **settings)
        assert together.tokens == expected.tokens
        for ours, whole in zip(together.rounds, expected.rounds, strict=True):
            assert (ours.accepted, ours.emitted) == (whole.accepted, whole.emitted)
            # the drafter's own context too: it decides the confidence, accepted or not
            assert ours.confidence == pytest.approx(whole.confidence, abs=1e-5)


def _rows_read(target: Target) -> list[int]:
    """Grows by the rows of every pass of the target from here on."""
    seen: list[int] = []
    forward = target.forward

    def watch(tokens: torch.Tensor, *args: Any, **options: Any) -> TargetOutput:
        seen.append(tokens.shape[1])
        return forward(tokens, *args, **options)

    target.forward = watch  # type: ignore[method-assign]
    return seen


# ------------------------------------------------------------------ figures by length


def test_eval_reports_every_length_and_says_where_the_target_is_lost(
    pair: TinyPair, tmp_path: Path
) -> None:
    """All rounds of a set stand behind its context, so one bucket holds them all."""
    suites = ("nano-long-512", "nano-padded-512")
    document = run_eval(
        EvalOptions(
            draft=pair.draft,
            target=pair.target,
            suites=suites,
            n_prompts=2,
            max_new_tokens=6,
            quiet=True,
        )
    )
    for name in suites:
        result = document["suites"][name]
        (bucket,) = result["context_buckets"]
        assert (bucket["low"], bucket["rounds"]) == (512, result["n_rounds"])
        assert bucket["accepted_length"] == pytest.approx(result["accepted_length"])
        assert any(f"{name}: the target itself gets 0 %" in text for text in document["warnings"])


def test_study_measures_by_length(pair: TinyPair) -> None:
    path = measure_long(
        pair.draft, target=str(pair.target), draft_length=3, prompts=2, lengths=(40, 80)
    )
    document = read_json(path)
    assert [(r["context"], r["tokens"]) for r in document["results"]] == [
        ("none", 0), (CHAT, 40), (CHAT, 80), (PADDED, 40), (PADDED, 80)
    ]  # fmt: skip
    for result in document["results"]:
        assert len(result["rounds"]) == len(result["emitted"]) == document["prompts"] == 2
        assert result["accepted_length"] == pytest.approx(
            sum(result["emitted"]) / sum(result["rounds"])
        )
