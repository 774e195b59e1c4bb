"""Baselines: what they propose, from which q, and that the verdict keeps the target's law."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.plain import plain_generate
from dspark.runtime.proposal import propose
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import Generators, SamplingParams
from dspark_eval import metrics
from dspark_eval.baselines.autoregressive import Autoregressive
from dspark_eval.baselines.base import Baseline, BaselineDecoder
from dspark_eval.baselines.dflash import DFlash, without_head
from dspark_eval.baselines.eagle import EagleConfig, EagleModel
from dspark_eval.baselines.eagle_drafter import Eagle
from dspark_eval.baselines.lookup import PromptLookup, Seen
from dspark_eval.lossless.statistics import fit
from dspark_eval.lossless.world import reference
from tests.table_target import TableTarget

VOCAB = 5
GREEDY, ONE = SamplingParams(), SamplingParams(1.0)
PROMPT = [3, 1, 4, 1, 0, 2, 1]


def target() -> TableTarget:
    return TableTarget.random(VOCAB, seed=0)


def eagle_model(seed: int = 1) -> EagleModel:
    """Weights of order one, so that attention and feedback both matter."""
    config = EagleConfig(
        hidden_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=12,
        vocab_size=VOCAB,
        target_layer_ids=(0,),
        target_tap_kind="residual",
        block_size=5,
    )
    model = EagleModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            parameter.add_(1.0 if parameter.ndim == 1 else 0.0)
    return model.eval().requires_grad_(False)


def block_drafter(seed: int = 1) -> DSparkDrafter:
    torch.manual_seed(seed)
    drafter = DSparkDrafter(
        DraftConfig(
            hidden_size=VOCAB,
            num_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            intermediate_size=12,
            vocab_size=VOCAB,
            num_target_layers=2,
            target_layer_ids=(0,),
            target_tap_kind="residual",
            mask_token_id=0,
            block_size=5,
            markov_rank=1,
            enable_confidence_head=False,
        )
    )
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return drafter.eval().requires_grad_(False)


def ways(of: TableTarget) -> dict[str, Baseline]:
    return {
        "lookup": PromptLookup(5),
        "ar": Autoregressive(TableTarget.random(VOCAB, seed=1), of, 5),
        "dflash": DFlash(without_head(block_drafter()), of),
        "eagle3": Eagle(eagle_model(), of),
    }


TEXTS = 500
KINDS = tuple(ways(target()))


# ------------------------------------------------------------------ prompt lookup


def continued(text: list[int], length: int = 9) -> list[int]:
    seen = Seen(3)
    seen.grow(text)
    return seen.continuation(length)


def test_lookup_continues_what_followed_the_last_tokens() -> None:
    assert continued([5, 6, 7, 8, 9, 5, 6]) == [7, 8, 9, 5, 6]
    assert continued([5, 6, 7, 8, 9, 5, 6], length=2) == [7, 8]


def test_lookup_prefers_the_longer_match_and_the_earlier_place() -> None:
    # (2, 3) first stands before 4, (1, 2, 3) before 9
    assert continued([2, 3, 4, 1, 2, 3, 9, 1, 2, 3], length=1) == [9]
    assert continued([2, 3, 4, 2, 3, 5, 2, 3], length=1) == [4]


def test_lookup_may_overlap_and_may_find_nothing() -> None:
    assert continued([7, 7, 7]) == [7]  # (7, 7) stands at 0 and is followed by the last 7
    assert continued([1, 2, 3]) == []
    assert continued([1]) == []


def test_lookup_grown_in_pieces_is_lookup_of_the_whole() -> None:
    text = torch.randint(3, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    seen = Seen(3)
    for stop in (1, 2, 9, 10, 33, 60):
        seen.grow(text[:stop])
        assert seen.continuation(6) == continued(text[:stop], 6)


# ------------------------------------------------------------------ q is what was drawn from


class Recorded(Baseline):
    """Passes proposals on and keeps them, with the text they continue."""

    def __init__(self, inner: Baseline) -> None:
        self.inner, self.config, self.taps = inner, inner.config, inner.taps
        self.made: list[tuple[list[int], Proposal]] = []

    def new_context(self, batch: int, max_length: int) -> object:
        return self.inner.new_context(batch, max_length)

    def extend(self, context: object, features: Tensor, counts: int | Tensor | None = None) -> None:
        self.inner.extend(context, features, counts)

    def read(self, context: object, prompt: Sequence[int]) -> None:
        self.inner.read(context, prompt)

    def propose(
        self,
        context: object,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        made = self.inner.propose(context, text, length, sampling, generator)
        self.made.append((list(text), made))
        return made


def rounds_of(inner: Baseline, of: TableTarget, params: SamplingParams = ONE) -> Recorded:
    """Many rounds, with rejections in all places."""
    recorded = Recorded(inner)
    BaselineDecoder(of, recorded).generate(PROMPT, max_new_tokens=40, sampling=params, seed=3)
    return recorded


def test_ar_draws_from_its_own_law_whatever_was_rejected_before() -> None:
    of = target()
    model = TableTarget.random(VOCAB, seed=1)
    for text, made in rounds_of(Autoregressive(model, of, 5), of).made:
        path = [*text, *made.tokens[0].tolist()]
        assert made.probs is not None
        for k in range(made.tokens.shape[1]):
            a, b = path[len(text) + k - 2], path[len(text) + k - 1]
            wanted = torch.softmax(model.table[a, b].double(), dim=-1)
            assert (made.probs[0, k].double() - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("params", [SamplingParams(0.7, 0.9), SamplingParams(1.0, 1.0, 2)])
def test_drafts_are_filtered_as_the_target_is(params: SamplingParams) -> None:
    of, model = target(), TableTarget.random(VOCAB, seed=1)
    for baseline in (Autoregressive(model, of, 5), *list(ways(of).values())[2:]):
        recorded = Recorded(baseline)
        text = BaselineDecoder(of, recorded).generate(
            PROMPT, max_new_tokens=20, sampling=params, seed=1
        )
        metrics.check_generation(text)
        for _, made in recorded.made:
            assert made.probs is not None
            chosen = made.probs.gather(-1, made.tokens.unsqueeze(-1))
            assert bool((chosen > 0).all())  # what the filter took away is never drawn
            assert bool((made.entropy <= math.log(VOCAB)).all())  # unfiltered, in nats
        assert any(bool((made.probs == 0).any()) for _, made in recorded.made)
    made = rounds_of(Autoregressive(model, of, 5), of, params=params).made[0]
    a, b = made[0][-2:]
    wanted = reference(model.table[a, b], params)
    assert made[1].probs is not None
    assert (made[1].probs[0, 0].double() - wanted).abs().max() < 1e-6


def test_ar_keeps_only_committed_tokens_and_reads_g_passes() -> None:
    of = target()
    model = TableTarget.random(VOCAB, seed=1)
    recorded = rounds_of(Autoregressive(model, of, 5), of)
    (cache,) = model.caches
    text, _ = recorded.made[-1]
    assert cache.rows[0] == text[:-1]
    # a round reads the old anchor and what came after it, then [anchor, x_1..x_k] for each k
    new = [
        len(b) - len(a) for (a, _), (b, _) in zip(recorded.made, recorded.made[1:], strict=False)
    ]
    again = sum(sum(range(2, made.tokens.shape[1] + 1)) for _, made in recorded.made)
    assert model.rows_seen == len(PROMPT) + 1 + sum(new) + len(new) + again


def test_eagle_drafts_what_its_training_pass_computes() -> None:
    of, model = target(), eagle_model()
    made_any = 0
    for text, made in rounds_of(Eagle(model, of), of).made:
        drafted = made.tokens[0]
        ids = torch.tensor([text])
        prev = torch.cat((ids[0, -1:], drafted[:-1]))[None, None]
        hidden = model.train_hidden(
            of.embed(ids), of.embed(ids), of.embed(prev), torch.tensor([[len(text) - 1]])
        )
        wanted = torch.softmax(of.logits(hidden)[0], dim=-1)
        assert made.probs is not None
        torch.testing.assert_close(made.probs, wanted, rtol=0, atol=2e-5)
        made_any += len(drafted)
    assert made_any > 60


def test_eagle_blocks_see_nothing_behind_their_anchor() -> None:
    of, model = target(), eagle_model()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (1, 20), generator=generator)
    other = ids.clone()
    other[:, 9:] = torch.randint(VOCAB, (1, 11), generator=generator)
    other[0, 8] = ids[0, 8]  # the anchor's own token is known
    prev, anchors = ids[:, 8:13][:, None], torch.tensor([[8]])
    taps, changed = of.embed(ids), of.embed(other)
    changed[:, 8] = 5.0  # its tap is not: the target has not read it
    one, two = (
        model.train_hidden(tap, of.embed(row), of.embed(prev), anchors)
        for tap, row in ((taps, ids), (changed, other))
    )
    assert torch.equal(one, two)
    shifted = prev.clone()
    shifted[..., 3] = (shifted[..., 3] + 1) % VOCAB
    three = model.train_hidden(taps, of.embed(ids), of.embed(shifted), anchors)
    differs = (one != three).any(-1)[0, 0].tolist()
    assert differs == [False, False, False, True, True]  # a slot's token reaches later slots


def test_dflash_is_a_drafter_whose_head_adds_nothing() -> None:
    of = target()
    drafter = without_head(block_drafter())
    recorded = rounds_of(DFlash(drafter, of), of)
    head = DraftHead(of, None)
    for text, made in recorded.made:
        context = drafter.new_context(1, 64)
        drafter.extend(context, of.embed(torch.tensor([text[:-1]])))
        anchor, length = torch.tensor([text[-1]]), made.tokens.shape[1]
        generator = torch.Generator().manual_seed(0)
        walked = propose(drafter, head, context, anchor, length, ONE, generator)
        assert made.probs is not None
        assert walked.probs is not None
        torch.testing.assert_close(made.probs, walked.probs, rtol=0, atol=2e-6)


def test_dflash_refuses_a_head_that_adds_something() -> None:
    with pytest.raises(UserError, match="sequential head is not zero"):
        DFlash(block_drafter(), target())


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="has 9 tokens, target table 5"):
        Autoregressive(TableTarget.random(9, seed=1), target(), 5)


# ------------------------------------------------------------------ lossless


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_plain_decoding(kind: str) -> None:
    of = target()
    decoder, accepted = BaselineDecoder(of, ways(of)[kind]), 0
    for start in range(4):
        prompt = [start, *PROMPT]
        found = decoder.generate(prompt, max_new_tokens=50, sampling=GREEDY, draft_length=4)
        metrics.check_generation(found)
        assert found.tokens == plain_generate(of, prompt, max_new_tokens=50, sampling=GREEDY).tokens
        accepted += sum(record.accepted for record in found.rounds)
    assert accepted > 0


def joint_law(of: TableTarget, prompt: list[int]) -> Tensor:
    """[V, V, V] float64 of three tokens after a prompt."""
    p = torch.softmax(of.table.double(), dim=-1)
    first, second = p[prompt[-2], prompt[-1]], p[prompt[-1]]
    return first[:, None, None] * second[:, :, None] * p


def texts_of(baseline: Baseline, of: TableTarget, count: int) -> Tensor:
    """Counts [V, V, V] of the first three tokens after the prompt; rounds draft more than that."""
    decoder, counts = BaselineDecoder(of, baseline), torch.zeros(VOCAB, VOCAB, VOCAB)
    for seed in range(count):
        said = decoder.generate(PROMPT, max_new_tokens=5, sampling=ONE, seed=seed).tokens
        counts[tuple(said[:3])] += 1
    return counts


@pytest.mark.parametrize(
    "kind",
    [
        "lookup",
        "ar",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dflash", "eagle3")),
    ],
)
def test_three_tokens_have_the_law_of_the_target(kind: str) -> None:
    # a false alarm once in 10,000 seeds; as many texts show the defect below
    of = target()
    found = fit(texts_of(ways(of)[kind], of, TEXTS).flatten(), joint_law(of, PROMPT).flatten())
    assert found.p > 1e-4


class Boast(Baseline):
    """A defect: draws like the model inside and says that each token was certain."""

    def __init__(self, inner: Baseline) -> None:
        self.inner, self.config, self.taps = inner, inner.config, inner.taps

    def new_context(self, batch: int, max_length: int) -> object:
        return self.inner.new_context(batch, max_length)

    def read(self, context: object, prompt: Sequence[int]) -> None:
        self.inner.read(context, prompt)

    def propose(
        self,
        context: object,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        made = self.inner.propose(context, text, length, sampling, generator)
        assert made.probs is not None
        wrong = made.probs.roll(1, dims=-1)
        return Proposal(made.tokens, wrong, None, made.entropy, fault=made.fault)


def test_a_q_that_is_not_what_was_drawn_from_is_found() -> None:
    of = target()
    found = fit(
        texts_of(Boast(ways(of)["ar"]), of, TEXTS).flatten(), joint_law(of, PROMPT).flatten()
    )
    assert found.p < 1e-6


def test_a_draft_longer_than_the_block_is_refused() -> None:
    of = target()
    with pytest.raises(UserError, match=r"expected 1\.\.5"):
        BaselineDecoder(of, ways(of)["lookup"]).generate(
            PROMPT, max_new_tokens=5, sampling=GREEDY, draft_length=6
        )
