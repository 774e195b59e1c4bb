"""Static passes of transformers' models: their own hidden states, and frames that say their texts.

Hidden states are compared with the model's uncached forward in float64, texts with transformers'
`generate`, token for token. Windows are 8 tokens, texts several times longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_draft import Drafting
from dspark.runtime.graph_seats import Chances, GraphSeats
from dspark.runtime.hf_open import hf_target
from dspark.runtime.hf_static import HFStatic
from dspark.runtime.hf_static_cache import HFStaticCache
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.k3_target import K3Target
from dspark.runtime.policies import Auto, Fixed
from dspark.runtime.requests import Request
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.taps import TapSet
from tests.hf_tiny import ROWS, tiny_hf
from tests.k3_tiny import TINY, tiny_model
from tests.test_hf_targets import ALWAYS, BLOCK, drafter_for, generated, prompt_of
from tests.tolerance import assert_close

TAPS = TapSet((0, 1, 2), "residual")
FLOAT32 = {"gemma2", "gpt-oss", "deepseek-v3"}
"""Their softmax or router is float32 in a model of any dtype: it rounds by the shape it runs on."""

every_model = pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in ROWS],
)


@pytest.fixture(scope="module")
def opened() -> Callable[[str], RowTarget]:
    """Targets by name, opened once."""
    made: dict[str, RowTarget] = {}

    def find(name: str) -> RowTarget:
        if name not in made:
            target = hf_target(tiny_hf(name), name=name, end_token_ids=())
            assert isinstance(target, RowTarget)
            made[name] = target
        return made[name]

    return find


def row_target(model: Any, name: str = "tiny") -> RowTarget:
    target = hf_target(model, name=name, end_token_ids=())
    assert isinstance(target, RowTarget)
    return target


def seat_text(cache: HFStaticCache, seat: int, static: HFStatic, text: list[int]) -> None:
    """A prompt, read by the ordinary target."""
    read = static.target.new_cache(1, len(text))
    static.target.forward(torch.tensor([text]), read, commit=True)
    cache.load(seat, read)


def own_states(target: RowTarget, text: list[int]) -> tuple[Tensor, Tensor]:
    """last [T, D] and taps [T, N*D] of the model alone, all at once."""
    seen = target.parts.model.base_model(
        input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True
    )
    taps = [seen.hidden_states[layer + 1][0] for layer in TAPS.layer_ids]
    return seen.last_hidden_state[0], torch.cat(taps, dim=-1)


def check_step(
    static: HFStatic,
    cache: HFStaticCache,
    texts: list[list[int]],
    blocks: list[list[int]],
    rounds: bool = False,
) -> None:
    """A step behind the texts against the model's pass over text and block."""
    out = static.step(torch.tensor(blocks), cache, taps=TAPS)
    assert out.taps is not None
    for seat, (text, block) in enumerate(zip(texts, blocks, strict=True)):
        if not text:
            continue
        last, taps = own_states(static.target, text + block)
        for what, found, wanted in (("last", out.last, last), ("taps", out.taps, taps)):
            limit = {"dtype": torch.float32, "limit": 1e-6} if rounds else {"limit": 1e-9}
            assert_close(found[seat], wanted[len(text) :], **limit, what=f"{what} of seat {seat}")


@every_model
@torch.no_grad()
def test_states_are_the_models_own(name: str) -> None:
    """Steps of 1 to 4 rows on three seats, of which one is idle; rows are accepted and are not."""
    model = tiny_hf(name).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the other one knows no float64
    static = HFStatic(row_target(model, name))
    texts = [prompt_of(3), [], prompt_of(21)]
    cache = static.new_cache(3, 40, 4)
    for seat in (0, 2):
        seat_text(cache, seat, static, texts[seat])
    generator = torch.Generator().manual_seed(3)
    for rows in (4, 1, 4, 2, 3, 1, 1, 4, 4):
        blocks = torch.randint(3, 120, (3, rows), generator=generator).tolist()
        check_step(static, cache, texts, blocks, name in FLOAT32)
        counts = torch.randint(0, rows + 1, (3,), generator=generator)
        counts[1] = 0
        cache.lengths += counts
        for text, block, count in zip(texts, blocks, counts.tolist(), strict=True):
            text += block[:count]
    assert max(map(len, texts)) > 28


def requests(count: int = 5, **options: Any) -> list[Request]:
    lengths = (2, 17, 5, 11, 9)[:count]
    return [
        Request(prompt_of(n), 8 + n % 4, **{"end_token_ids": (), "index": i, **options})
        for i, n in enumerate(lengths)
    ]


def expected(target: RowTarget, asked: list[Request]) -> list[list[int]]:
    """Of `generate`, up to an end token."""
    texts = []
    for request in asked:
        text = generated(target, list(request.prompt_ids), request.max_new_tokens)
        ends = request.end_token_ids or ()
        stop = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
        texts.append(text[:stop])
    return texts


@every_model
def test_frames_say_what_generate_says(name: str, opened: Callable) -> None:
    """Plain and with noise as drafts; five requests come and go on two seats."""
    target = opened(name)
    asked = requests()
    theirs = expected(target, asked)
    for drafter in (None, drafter_for(target)):
        decoder = GraphDecoder(target, drafter, seats=2, max_length=40)
        assert [g.tokens for g in decoder.generate_many(asked)] == theirs


def scripted(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], seed: int) -> None:
    """Drafts right for a random number of tokens, then wrong: every accepted length."""
    propose = Drafting.propose
    generator = torch.Generator().manual_seed(seed)

    def draft(self: Drafting, seats: GraphSeats, length: int, chances: Chances) -> ops.Drafted:
        made = propose(self, seats, length, chances)
        tokens = made.tokens.clone()
        for b, place in enumerate(self.context.lengths.tolist()):
            text = next((x for x in texts if x[place : place + 1] == [int(seats.anchor[b])]), None)
            right = int(torch.randint(0, length + 1, (), generator=generator))
            for k, token in enumerate((text or [])[place + 1 :][:length]):
                tokens[b, k] = token if k < right else (token + 1) % 120
        return made._replace(tokens=tokens)

    monkeypatch.setattr(Drafting, "propose", draft)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "deepseek-v3"])
@pytest.mark.parametrize("sized", [False, True])
def test_every_accepted_length(
    name: str, sized: bool, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where frames of several sizes and plain steps take turns."""
    target = opened(name)
    asked = [replace(request, max_new_tokens=16) for request in requests()]
    theirs = expected(target, asked)
    whole = [list(r.prompt_ids) + text for r, text in zip(asked, theirs, strict=True)]
    scripted(monkeypatch, whole, 4)
    policy = Auto(Fixed(BLOCK)) if sized else None
    decoder = GraphDecoder(target, drafter_for(target), seats=2, max_length=40, policy=policy)
    if sized:
        turns = cycle([BLOCK, 0, 0, 1, 2, 0, 4, 1, BLOCK, 2])
        monkeypatch.setattr(decoder.rule, "next", lambda seats: next(turns))
    found = decoder.generate_many(asked)
    assert [g.tokens for g in found] == theirs
    if sized:
        assert set(decoder.frame_sizes) == {0, 1, 2, 4, BLOCK}
    else:
        assert len({r.accepted for g in found for r in g.rounds if r.drafted == BLOCK}) > 3


def test_end_tokens_and_seats_used_again(opened: Callable) -> None:
    target = opened("mistral-window")
    free = expected(target, requests())
    asked = [replace(r, end_token_ids=[free[i][3 + i % 3]]) for i, r in enumerate(requests())]
    theirs = expected(target, asked)
    assert all(len(a) < len(b) for a, b in zip(theirs, free, strict=True))
    decoder = GraphDecoder(target, drafter_for(target), seats=2, max_length=40)
    for _ in range(2):
        found = decoder.generate_many(asked)
        assert [g.tokens for g in found] == theirs
        assert {g.finish for g in found} == {"end"}


@pytest.mark.parametrize("draft", [False, True])
def test_a_text_as_long_as_the_table_of_positions(draft: bool, monkeypatch: Any) -> None:
    """The last frames have rows behind its end, which count for nothing."""
    kind, settings = ROWS["gpt2"]
    monkeypatch.setitem(ROWS, "gpt2", (kind, {**settings, "n_positions": 32}))
    target = row_target(tiny_hf("gpt2"), "gpt2")
    drafter = drafter_for(target) if draft else None
    decoder = GraphDecoder(target, drafter, seats=2, max_length=32)
    asked = [Request(prompt_of(n), 32 - n, end_token_ids=(), index=n) for n in (12, 29, 31, 20)]
    assert [g.tokens for g in decoder.generate_many(asked)] == expected(target, asked)


@pytest.mark.parametrize("draft", [False, True])
def test_samples_do_not_depend_on_the_seat(draft: bool, opened: Callable) -> None:
    target = opened("gemma3")
    drafter = drafter_for(target) if draft else None
    sampling = SamplingParams(temperature=1.0, top_p=0.9)

    def texts(seats: int, asked: list[Request]) -> list[list[int]]:
        decoder = GraphDecoder(target, drafter, seats=seats, max_length=40, sampling=sampling)
        return [g.tokens for g in decoder.generate_many(asked)]

    together = texts(3, requests())
    assert together == texts(1, requests())
    assert together[3:] == texts(2, requests()[3:])
    assert together != texts(3, requests(seed=1))


@torch.no_grad()
def test_a_prompt_longer_than_a_ring(opened: Callable) -> None:
    """The ordinary cache holds only the last window of it, the seat as much at its own places."""
    static = HFStatic(row_target(tiny_hf("mistral-window").double()))
    text = prompt_of(150)
    cache = static.new_cache(2, 160, 3)
    seat_text(cache, 1, static, text)
    check_step(static, cache, [[], text], [[5, 5, 5], [9, 8, 7]])


@torch.no_grad()
def test_what_was_rejected_or_left_cannot_leak(opened: Callable) -> None:
    """NaN in rows of a longer step, in a seat whose text has ended, and in the seat beside."""
    static = HFStatic(row_target(tiny_hf("gemma3").double()))
    texts = [prompt_of(6), prompt_of(4)]
    cache = static.new_cache(2, 30, 4)
    for seat, text in enumerate(texts):
        seat_text(cache, seat, static, text)
    for held in cache._all():
        held[:, 0, :, 6:10] = torch.nan  # what a block of four rows left
        held[:, 1] = torch.inf
    cache.reset(1)
    seat_text(cache, 1, static, texts[1])
    check_step(static, cache, texts, [[9], [8]])
    check_step(static, cache, texts, [[9, 3, 5, 4], [8, 7, 6, 3]])


def test_a_decoder_goes_on_after_bad_logits(opened: Callable) -> None:
    model = tiny_hf("llama")
    target = row_target(model)
    decoder = GraphDecoder(target, seats=2, max_length=40)
    theirs = expected(target, requests())
    embedding = model.get_input_embeddings().weight
    token = theirs[0][4]
    kept = embedding[token].clone()
    embedding[token] = torch.nan
    with pytest.raises(BadLogits):
        decoder.generate_many(requests())
    embedding[token] = kept
    assert [g.tokens for g in decoder.generate_many(requests())] == theirs


def test_an_idle_seat_is_harmless(opened: Callable) -> None:
    static = HFStatic(opened("gpt-oss"))
    out = static.step(torch.zeros(2, 3, dtype=torch.int64), static.new_cache(2, 20, 3), taps=TAPS)
    assert out.last.isfinite().all()
    assert out.taps is not None
    assert out.taps.isfinite().all()


def test_a_cache_of_something_else_is_refused(opened: Callable) -> None:
    target = opened("llama")
    cache = HFStatic(target).new_cache(1, 5)
    with pytest.raises(ValueError, match="another kind"):
        cache.load(0, K3Target(tiny_model(TINY), "tiny", ()).new_cache(1, 8))  # type: ignore[arg-type]
    read = target.new_cache(1, 8)
    target.forward(torch.tensor([prompt_of(6)]), read, commit=True)
    with pytest.raises(ValueError, match="6 tokens into seats of 5"):
        cache.load(0, read)
    assert cache.lengths.tolist() == [0]


def test_bytes_and_sizes(opened: Callable) -> None:
    """Two tensors of [layers, B, heads, S, head dim], S a multiple of 16."""
    cache = HFStatic(opened("llama")).new_cache(3, 20, 5)
    assert cache.nbytes == 2 * 4 * 3 * 2 * 32 * 8 * 4 + 2 * 3 * 8
    assert not cache.waits
    assert cache.folding(waits=False) is cache
