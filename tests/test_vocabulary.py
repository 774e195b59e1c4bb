"""Maps of a reduced draft vocabulary, how its ids are chosen, and what they can say of a text."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.vocabulary import (
    Coverage,
    check_maps,
    coverage,
    most_frequent,
    reduce_vocabulary,
    token_frequency,
    vocabulary_ids,
    vocabulary_maps,
)
from dspark.errors import UserError
from tests import oracles

IDS = torch.tensor([0, 3, 4, 9, 17])
VOCAB = 20

CONFIG = DraftConfig(
    hidden_size=24, num_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    intermediate_size=32, vocab_size=VOCAB, num_target_layers=5, target_layer_ids=(1, 3),
    target_tap_kind="residual", mask_token_id=7, block_size=4, markov_rank=6,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def row(text: str) -> Row:
    """Digits are ids; those in parentheses were produced by the target."""
    ids, mask, inside = [], [], False
    for sign in text:
        if sign in "()":
            inside = sign == "("
        else:
            ids.append(int(sign))
            mask.append(inside)
    return Row(tuple(ids), tuple(mask))


# Maps -------------------------------------------------------------------------------------------


def test_maps_follow_the_offset_convention() -> None:
    offsets, members = vocabulary_maps(IDS, VOCAB)
    assert offsets.tolist() == [0, 2, 2, 6, 13]
    assert members.nonzero().squeeze(1).tolist() == IDS.tolist()
    assert torch.equal(vocabulary_ids(offsets), IDS)
    check_maps(offsets, members)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 4, 3], "draft ids 1 and 2 stand for target ids 4 and 3"),
        ([0, 3, 3], "ascend strictly"),
        ([3, 20], r"target ids 3\.\.20 given, the target has 0\.\.19"),
        ([-1, 3], r"-1\.\.3"),
        ([], "a list of ids is needed"),
    ],
)
def test_ids_that_are_no_vocabulary_are_refused(ids: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vocabulary_maps(torch.tensor(ids, dtype=torch.int64), VOCAB)


OFFSETS, MEMBERS = vocabulary_maps(IDS, VOCAB)


@pytest.mark.parametrize(
    ("offsets", "members", "said"),
    [
        (IDS, MEMBERS, "holds target ids, offsets were expected"),
        (OFFSETS.flip(0), MEMBERS, "ascend strictly"),
        (OFFSETS + 5, MEMBERS, r"the target has 0\.\.19"),
        (torch.zeros(5, dtype=torch.int64), MEMBERS, "that are not the 5 of d2t"),
        (OFFSETS, MEMBERS.roll(1), "that are not the 5 of d2t"),
        (OFFSETS[:4], MEMBERS, "marks 5 ids that are not the 4 of d2t"),
        (OFFSETS.int(), MEMBERS, "int64 offsets and a bool mask"),
        (OFFSETS, MEMBERS.int(), "int64 offsets and a bool mask"),
    ],
)
def test_maps_that_contradict_each_other_are_refused(
    offsets: Tensor, members: Tensor, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        check_maps(offsets, members)
    assert "\n" not in str(refusal.value)


# Choosing ids -----------------------------------------------------------------------------------


def test_only_what_the_target_produced_is_counted() -> None:
    counts = token_frequency([row("11(122)3(4)"), row("9"), row("(2)")], 10)
    assert counts.tolist() == [0, 1, 3, 0, 1, 0, 0, 0, 0, 0]


def test_the_most_frequent_ids_ties_to_the_lowest_and_some_always() -> None:
    counts = torch.tensor([5, 0, 7, 7, 1, 0, 5])
    assert most_frequent(counts, 3).tolist() == [0, 2, 3]
    assert most_frequent(counts, 5).tolist() == [0, 2, 3, 4, 6]
    assert most_frequent(counts, 6).tolist() == [0, 1, 2, 3, 4, 6]  # a zero fills up, the lowest
    assert most_frequent(counts, 3, always=(5, 5)).tolist() == [2, 3, 5]
    assert most_frequent(counts, 7).tolist() == list(range(7))
    for size, always in ((0, ()), (8, ()), (1, (2, 3))):
        with pytest.raises(ValueError, match=str(size)):
            most_frequent(counts, size, always)


# Coverage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # block 3, ids 1 and 2; the first token of an answer is not drafted
        ("5(1)", Coverage(0, 0, 0)),
        ("(9)", Coverage(0, 0, 0)),
        ("(11112)", Coverage(4, 4, 1)),  # three drafted and the bonus
        ("(111121)", Coverage(5, 5, 2)),
        ("(1919)", Coverage(3, 1, 2)),  # 9 | 1 9: the round ends at what cannot be drafted
        ("(1999)", Coverage(3, 0, 3)),
        ("(11)7(12)", Coverage(2, 2, 2)),  # two answers, each drafted for itself
    ],
)
def test_coverage_by_hand(text: str, wanted: Coverage) -> None:
    assert coverage([row(text)], torch.tensor([1, 2]), 3) == wanted


def test_coverage_is_what_a_perfect_drafter_gets_from_the_real_loop() -> None:
    """A drafter that knows the text, but can only propose its ids, needs exactly those rounds."""
    from dspark.runtime.decode import SpeculativeDecoder
    from dspark.runtime.plain import plain_generate
    from dspark.runtime.sampling import SamplingParams
    from tests.table_target import ScriptedDrafter, TableTarget

    target = TableTarget.random(13, 3)
    ids = torch.tensor([0, 1, 2, 5, 6, 7, 9, 10, 12])
    greedy = SamplingParams()
    inside = set(ids.tolist())
    for prompt in ([1, 2], [4, 4], [7, 3, 9]):
        plain = plain_generate(target, prompt, max_new_tokens=80, sampling=greedy).tokens
        text = [*prompt, *plain]
        drafter = ScriptedDrafter(text, 13, 4, lambda round_, slot: True)
        drafter.draft_ids = ids
        drafter.markov_head.bias = lambda code: torch.zeros(len(code), len(ids))
        result = SpeculativeDecoder(target, drafter).generate(
            prompt, max_new_tokens=80, sampling=greedy, draft_length=4
        )
        assert result.tokens == plain
        mask = (False,) * len(prompt) + (True,) * len(plain)
        ceiling = coverage([Row(tuple(text), mask)], ids, 4)
        assert ceiling.tokens == 79
        assert ceiling.covered == sum(token in inside for token in plain[1:])
        # The last round's length is cut by max_new_tokens, which adds a round at most.
        assert 0 <= len(result.rounds) - ceiling.rounds <= 1


def test_shares_of_nothing_are_unknown() -> None:
    nothing = coverage([], IDS, 4)
    assert nothing.share is None
    assert nothing.accepted_length is None
    assert Coverage(10, 9, 4).share == 0.9
    assert Coverage(10, 9, 4).accepted_length == 2.5


def test_everything_covered_is_the_block_and_its_bonus() -> None:
    text = Row(tuple(random.Random(0).choices(range(9), k=61)), (True,) * 61)
    found = coverage([text], torch.arange(9), 5)
    assert (found.share, found.accepted_length) == (1.0, 6.0)


# Drafters ---------------------------------------------------------------------------------------


def fresh(**changes: object) -> DSparkDrafter:
    torch.manual_seed(0)
    drafter = DSparkDrafter(replace(CONFIG, **changes))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    return drafter


@pytest.mark.parametrize("size", [20, 21, 32])
def test_a_vocabulary_as_large_as_the_targets_or_padded_is_no_reduced_one(size: int) -> None:
    config = replace(CONFIG, draft_vocab_size=size)
    assert config.draft_vocab_size is None
    assert config.draft_vocab == VOCAB
    assert "d2t" not in DSparkDrafter(config).state_dict()


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_reduced_drafter_keeps_the_rows_of_its_ids(head: str) -> None:
    whole = fresh(markov_head_type=head)
    reduced = reduce_vocabulary(whole, IDS)
    assert reduced.config == replace(whole.config, draft_vocab_size=5)
    assert reduced.draft_ids is not None
    assert torch.equal(reduced.draft_ids, IDS)
    check_maps(reduced.d2t, reduced.t2d)
    rows = whole.markov_head.markov_w2.weight[IDS]
    assert torch.equal(reduced.markov_head.markov_w2.weight, rows)
    theirs, ours = whole.state_dict(), reduced.state_dict()
    assert set(ours) - set(theirs) == {"d2t", "t2d"}
    for name in set(theirs) - {"markov_head.markov_w2.weight"}:
        assert torch.equal(ours[name], theirs[name])
        assert ours[name].data_ptr() != theirs[name].data_ptr()
    assert all(p.requires_grad for p in reduced.parameters())


def test_a_reduced_drafter_can_be_reduced_again_and_not_widened() -> None:
    whole = fresh()
    twice = reduce_vocabulary(reduce_vocabulary(whole, IDS), IDS[[1, 4]])
    once = reduce_vocabulary(whole, IDS[[1, 4]])
    for name, tensor in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], tensor)
    with pytest.raises(ValueError, match="target id 5 is not in the drafter's vocabulary"):
        reduce_vocabulary(reduce_vocabulary(whole, IDS), torch.tensor([3, 5]))
    with pytest.raises(ValueError, match="ascend strictly"):
        reduce_vocabulary(whole, torch.tensor([3, 2]))
    assert reduce_vocabulary(whole, torch.arange(VOCAB)).draft_ids is None


def test_a_fresh_drafter_is_told_its_ids() -> None:
    drafter = fresh(draft_vocab_size=5)
    drafter.set_draft_ids(IDS)
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == IDS.tolist()
    with pytest.raises(ValueError, match="4 draft ids given, draft_vocab_size is 5"):
        drafter.set_draft_ids(IDS[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_map_travels_in_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """From a folder that has only its config and safetensors: ids unchanged, of any size."""
    drafter = reduce_vocabulary(fresh(), IDS)
    save_drafter(tmp_path / "d", drafter, dtype=dtype)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        "config.json",
        "golden.json",
        "model.safetensors",
    ]
    (tmp_path / "d" / "golden.json").unlink()
    loaded = load_drafter(tmp_path / "d", dtype=dtype)
    assert loaded.config == drafter.config
    assert loaded.draft_ids is not None
    assert loaded.draft_ids.tolist() == IDS.tolist()
    assert loaded.d2t.dtype == torch.int64
    assert loaded.t2d.dtype == torch.bool


def test_a_folder_with_an_absolute_map_is_refused_in_one_line(tmp_path: Path) -> None:
    drafter = reduce_vocabulary(fresh(), IDS)
    drafter.d2t = IDS.clone()
    save_drafter(tmp_path / "d", drafter)
    with pytest.raises(UserError, match="offsets were expected") as refusal:
        load_drafter(tmp_path / "d")
    assert str(tmp_path / "d") in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.oracle
def test_speculators_takes_the_reduced_tensors_and_reads_the_same_ids() -> None:
    core = oracles.require("speculators.models.dspark.core")
    from transformers import Qwen3Config

    drafter = reduce_vocabulary(fresh(), IDS)
    layers = Qwen3Config(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    config = core.DSparkSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=5, block_size=4,
        aux_hidden_state_layer_ids=[2, 4], mask_token_id=7, markov_rank=6,
    )  # fmt: skip
    model = core.DSparkDraftModel(config).float().eval()
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) == {
        "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"
    }  # fmt: skip
    assert torch.equal(model.t2d.nonzero().squeeze(1), drafter.draft_ids)
    model.load_vocab_mappings(drafter.t2d, drafter.d2t)  # with its own checks of sizes
    prev, hidden = torch.randint(VOCAB, (3, 4)), torch.randn(3, 4, 24)
    theirs = model.markov_head.block_bias(prev_token_ids=prev, hidden_states=hidden)
    ours = drafter.markov_head.bias(drafter.markov_head.codes(prev, hidden))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
