"""Frames of fixed shape, unrecorded on a CPU: the texts of the loops that wait for every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dspark import ops
from dspark.draft.config import DraftConfig
from dspark.draft.shapes import KDAShape, MLAShape
from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_draft import Drafting
from dspark.runtime.graph_seats import Chances, GraphSeats
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.requests import Request
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.runtime.stops import StopStrings
from tests.k3_tiny import PLAIN, TINY, tiny_model
from tests.tiny_drafters import make_drafter

GREEDY = SamplingParams()
BLOCK = 4
SMALL = replace(
    TINY, num_hidden_layers=4, full_attention_layers=(2,), num_experts=4, attn_res_block_size=2
)
SMALL_PLAIN = replace(PLAIN, num_hidden_layers=4, full_attention_layers=(2,), num_experts=4)
PROMPTS = [[5, 9, 13, 4], [20], [7, 7, 31, 8, 44, 3, 12], [50, 2, 6]]

ATTENTION = DraftConfig(
    hidden_size=SMALL.hidden_size,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=SMALL.vocab_size,
    num_target_layers=SMALL.num_hidden_layers,
    target_layer_ids=(0, 2),
    target_tap_kind="attn_res_mixture",
    mask_token_id=0,
    block_size=BLOCK,
    markov_rank=8,
)
DRAFTERS = {
    "attention": ATTENTION,
    "sliding": replace(
        ATTENTION, sliding_window=5, layer_types=("sliding_attention", "full_attention")
    ),
    "mla": replace(
        ATTENTION,
        backbone="mla",
        num_key_value_heads=4,
        mla=MLAShape(
            q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16
        ),
    ),
    "kda": replace(
        ATTENTION, backbone="kda", num_key_value_heads=4, kda=KDAShape(gate_rank=8, order=2)
    ),
    "gated": replace(ATTENTION, markov_head_type="gated"),
    "rnn": replace(ATTENTION, markov_head_type="rnn"),
}


@pytest.fixture(scope="module")
def target() -> K3Target:
    return K3Target(tiny_model(SMALL), "tiny", ())


class Marks:
    """Token i is the text <i>."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def requests(count: int = len(PROMPTS), length: int = 8) -> list[Request]:
    return [Request(prompt, length + 2 * i, index=i) for i, prompt in enumerate(PROMPTS[:count])]


def plain_texts(target: K3Target, asked: list[Request]) -> list[list[int]]:
    return [
        plain_generate(
            target,
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=GREEDY,
            end_token_ids=request.end_token_ids,
        ).tokens
        for request in asked
    ]


def scripted(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], seed: int) -> None:
    """Drafts that are right for a prescribed number of tokens, then wrong: every accepted length,
    ragged over the batch. A seat's text is found by the seed that names its request."""
    propose = Drafting.propose
    generator = torch.Generator().manual_seed(seed)

    def draft(self: Drafting, seats: GraphSeats, length: int, chances: Chances) -> ops.Drafted:
        made = propose(self, seats, length, chances)
        tokens = made.tokens.clone()
        for b, place in enumerate(self.context.lengths.tolist()):
            text = next((x for x in texts if x[place : place + 1] == [int(seats.anchor[b])]), None)
            right = int(torch.randint(0, length + 1, (), generator=generator))
            future = (text or [])[place + 1 :][:length]
            for k, token in enumerate(future):
                tokens[b, k] = token if k < right else (token + 1) % SMALL.vocab_size
        return made._replace(tokens=tokens)

    monkeypatch.setattr(Drafting, "propose", draft)


@pytest.mark.parametrize("config", [SMALL, SMALL_PLAIN], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("seats", [1, 3])
def test_plain_frames_give_plain_texts(config: K3Config, seats: int) -> None:
    target = K3Target(tiny_model(config), "tiny", ())
    asked = requests()
    decoder = GraphDecoder(target, seats=seats, max_length=30)
    found = decoder.generate_many(asked)
    assert [g.tokens for g in found] == plain_texts(target, asked)
    assert all(g.finish == "length" and not g.rounds for g in found)


@pytest.mark.parametrize("config", DRAFTERS.values(), ids=DRAFTERS)
def test_rounds_are_those_of_the_loop_that_waits(target: K3Target, config: DraftConfig) -> None:
    drafter = make_drafter(config)
    decoder = GraphDecoder(target, drafter, seats=2, max_length=30)
    waiting = SpeculativeDecoder(target, drafter)
    for request, got in zip(requests(3), decoder.generate_many(requests(3)), strict=True):
        expected = waiting.generate(
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=GREEDY,
            draft_length=BLOCK,
        )
        assert got.tokens == expected.tokens
        pairs = zip(got.rounds, expected.rounds, strict=True)
        for mine, its in pairs:
            assert (mine.accepted, mine.emitted) == (its.accepted, its.emitted)
            count = min(mine.drafted, its.drafted)
            assert mine.entropy[:count] == pytest.approx(its.entropy[:count], abs=1e-4)
            assert mine.confidence[:count] == pytest.approx(its.confidence[:count], abs=1e-4)


@pytest.mark.parametrize("backbone", ["attention", "kda"])
@pytest.mark.parametrize("seed", range(2))
def test_every_accepted_length_in_ragged_batches(
    target: K3Target, backbone: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(length=12)
    plain = plain_texts(target, asked)
    texts = [list(r.prompt_ids) + text for r, text in zip(asked, plain, strict=True)]
    scripted(monkeypatch, texts, seed)
    drafter = make_drafter(DRAFTERS[backbone])
    found = GraphDecoder(target, drafter, seats=2, max_length=30).generate_many(asked)
    assert [g.tokens for g in found] == plain
    accepted = {r.accepted for g in found for r in g.rounds if r.drafted == BLOCK}
    assert len(accepted) > 3


def test_texts_end_where_they_should(target: K3Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """End tokens inside an accepted run, one token only, and a seat that is used again."""
    free = plain_texts(target, requests(length=12))
    asked = [
        replace(request, end_token_ids=[free[i][6]])
        for i, request in enumerate(requests(length=12))
    ]
    asked += [Request(PROMPTS[0], 1), Request(PROMPTS[1], 9, end_token_ids=[free[1][0]])]
    plain = plain_texts(target, asked)
    texts = [list(r.prompt_ids) + text for r, text in zip(asked, plain, strict=True)]
    scripted(monkeypatch, texts, 5)
    drafter = make_drafter(ATTENTION)
    found = GraphDecoder(target, drafter, seats=2, max_length=30).generate_many(asked)
    assert [g.tokens for g in found] == plain
    assert [g.finish for g in found] == ["end"] * 4 + ["length", "end"]


def test_a_stop_string_ends_a_text_one_frame_late(target: K3Target) -> None:
    free = plain_texts(target, requests(1, 12))[0]
    told: list[int] = []
    stop = StopStrings([Marks().decode(free[5:7])], Marks())
    asked = [Request(PROMPTS[0], 12, stop=stop, on_tokens=told.extend), Request(PROMPTS[1], 5)]
    decoder = GraphDecoder(target, seats=1, max_length=30)
    found = decoder.generate_many(asked)
    assert found[0].tokens == free[:7] == told
    assert found[0].finish == "stop"
    assert found[1].tokens == plain_texts(target, asked[1:])[0]
    decoder.generate_many(asked[:1])
    seats = decoder.seats  # idle: no frame goes on with the text
    assert (seats.left.item(), seats.sent.item(), decoder.cache.lengths.item()) == (0, 0, 0)


def test_a_seat_forgets_the_end_tokens_of_the_text_before(target: K3Target) -> None:
    free = plain_texts(target, requests(2, 8))
    asked = [
        Request(PROMPTS[0], 8, end_token_ids=[*free[1][1:7], free[0][2]]),
        Request(PROMPTS[1], 8, end_token_ids=()),
    ]
    found = GraphDecoder(target, seats=1, max_length=30).generate_many(asked)
    assert found[0].finish == "end"
    assert (found[1].tokens, found[1].finish) == (plain_texts(target, asked[1:])[0], "length")


@pytest.mark.parametrize("draft", [False, True])
def test_samples_depend_on_seed_and_index_alone(target: K3Target, draft: bool) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=20)
    drafter = make_drafter(ATTENTION) if draft else None

    def texts(seats: int, asked: list[Request]) -> list[list[int]]:
        decoder = GraphDecoder(target, drafter, seats=seats, max_length=30, sampling=sampling)
        return [g.tokens for g in decoder.generate_many(asked)]

    together = texts(3, requests())
    assert together == texts(1, requests())
    assert together[2:] == texts(2, requests()[2:])
    other = texts(1, [replace(request, seed=1) for request in requests()])
    assert all(a != b for a, b in zip(together, other, strict=True))


@pytest.mark.slow
def test_sampled_frames_keep_the_targets_law(target: K3Target) -> None:
    """The second token of many short texts, with and without a drafter, against the target."""
    sampling = SamplingParams(temperature=1.0)
    count, prompt = 4000, PROMPTS[0]
    seen = []
    for drafter in (None, make_drafter(ATTENTION)):
        decoder = GraphDecoder(target, drafter, seats=50, max_length=12, sampling=sampling)
        asked = [Request(prompt, 3, index=i) for i in range(count)]
        found = decoder.generate_many(asked)
        seen.append(torch.tensor([g.tokens for g in found]))
    for place in range(3):
        a, b = (torch.bincount(x[:, place], minlength=SMALL.vocab_size).float() for x in seen)
        chi2 = ((a - b).square() / (a + b).clamp(min=1)).sum()
        freedom = int(((a + b) > 0).sum()) - 1
        assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_bad_logits_name_the_place(target: K3Target) -> None:
    broken = K3Target(tiny_model(SMALL), "tiny", ())
    decoder = GraphDecoder(broken, seats=1, max_length=20)
    decoder.decoder.weights.norm[0] = torch.nan
    with pytest.raises(BadLogits, match="position 4"):
        decoder.generate(PROMPTS[0], max_new_tokens=4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda t: GraphDecoder(t, seats=0, max_length=9), "at least 1"),
        (
            lambda t: GraphDecoder(t, make_drafter(ATTENTION), max_length=9, draft_length=9),
            "draft_length",
        ),
        (lambda t: GraphDecoder(t, max_length=9).generate([3], max_new_tokens=9), "seats hold 9"),
    ],
)
def test_what_cannot_work_is_refused(
    target: K3Target, build: Callable[[K3Target], object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(target)


def test_a_model_without_a_drafter_still_works_after_packing(target: K3Target) -> None:
    """Target and frames share their weights: neither disturbs the other."""
    model = tiny_model(SMALL)
    alone = K3Target(model, "tiny", ())
    before = plain_generate(alone, PROMPTS[0], max_new_tokens=9, sampling=GREEDY).tokens
    GraphDecoder(alone, seats=1, max_length=20).generate(PROMPTS[0], max_new_tokens=9)
    after = plain_generate(alone, PROMPTS[0], max_new_tokens=9, sampling=GREEDY).tokens
    assert before == after == plain_texts(target, requests(1))[0] + before[8:]
