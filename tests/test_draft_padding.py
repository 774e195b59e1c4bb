"""Rows that pad the target's tables, and a reduced draft vocabulary in training: neither is ever
emitted or learned by mistake."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from dspark.distill.config import load_config
from dspark.distill.fused import DraftVocabulary
from dspark.distill.loss import distill_loss
from dspark.distill.run import run_distill
from dspark.distill.terms import Objective
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.model import DSparkDrafter
from dspark.draft.vocabulary import reduce_vocabulary
from dspark.errors import UserError
from dspark.k3.checkpoint import save_k3
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.k3_target import K3Target
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from tests import chat_tokenizers
from tests.draft_vocabulary_setup import GREEDY, IDS, WARM, bigram_drafter, hand_logits, toy_drafter
from tests.k3_tiny import TINY, tiny_model
from tests.toy_target import ToyTarget


def padded(vocab: int, seed: int = 0) -> K3Target:
    """Of 61 rows only `vocab` are tokens; the target's favourite ids would be padding."""
    model = tiny_model(seed=seed)
    with torch.no_grad():
        model.lm_head.weight[vocab:] = 4.0 * model.lm_head.weight[:1]
    return K3Target(model, "padded", (), vocab)


@pytest.mark.parametrize("rows", [50, 61])
def test_padding_is_identity_and_is_never_emitted(rows: int, tmp_path: Path) -> None:
    """Logical vocabulary 50, tables of 61 rows; a drafter of 50 rows and one of 61, reloaded."""
    target = padded(50)
    assert (target.vocab_size, target.table_size) == (50, 61)
    for sampling in (GREEDY, WARM):
        plain = plain_generate(target, [3, 4], max_new_tokens=40, sampling=sampling)
        assert max(plain.tokens) < 50
        drafter = bigram_drafter(target, plain.tokens)
        if rows == 50:
            tensors = {
                n: t[:50] if n.startswith("markov_head") else t
                for n, t in drafter.state_dict().items()
            }
            drafter = DSparkDrafter(replace(drafter.config, vocab_size=50, draft_vocab_size=61))
            drafter.load_state_dict(tensors)
        else:  # the padding would be its favourite too
            drafter.markov_head.markov_w2.weight.data[50:] = 100.0
        save_drafter(tmp_path / "d", drafter)
        loaded = load_drafter(tmp_path / "d", target)
        assert loaded.draft_ids is None
        result = SpeculativeDecoder(target, loaded).generate(
            [3, 4], max_new_tokens=40, sampling=sampling, draft_length=4
        )
        assert max(result.tokens) < 50
        if sampling.greedy:
            assert result.tokens == plain.tokens
            assert sum(r.accepted for r in result.rounds) > 0


def test_a_drafter_of_other_rows_than_the_target_has_is_refused(tmp_path: Path) -> None:
    drafter = bigram_drafter(K3Target(tiny_model(), "tiny", ()), [3, 4])
    save_drafter(tmp_path / "d", drafter)
    small = K3Target(tiny_model(replace(TINY, vocab_size=60)), "small", (), 50)
    with pytest.raises(UserError, match="vocab_size is 61, the target small has 50 of 60 rows"):
        load_drafter(tmp_path / "d", small)


def test_the_tokenizer_says_which_rows_are_tokens(tmp_path: Path) -> None:
    tokenizer = chat_tokenizers.k3()
    size = len(tokenizer)
    save_k3(tmp_path, tiny_model(replace(TINY, vocab_size=size + 30)))
    tokenizer.save_pretrained(tmp_path)
    target = load_target(tmp_path).target
    assert (target.vocab_size, target.table_size) == (size, size + 30)
    assert target.logits(torch.randn(2, TINY.hidden_size)).shape == (2, size)
    nano = load_target("nano").target
    assert nano.vocab_size == nano.table_size == 2048


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_training_loss_both_ways(head: str) -> None:
    """Against q written out over all ids of the target in float64, slot by slot.

    L1 is the plain one of two distributions over V: where q is zero it counts p, so mass outside
    the draft vocabulary is distance. A label outside adds no cross-entropy; its slot keeps its
    weight.
    """
    target = ToyTarget()
    drafter = reduce_vocabulary(toy_drafter(target, head), IDS)
    text = torch.tensor([[9, 11, 12, 5, 63], [2, 3, 2, 40, 2], [30, 31, 32, 33, 34]])
    hidden, states = torch.randn(3, 4, 32), torch.tanh(torch.randn(3, 4, 32))
    supervised = torch.ones(3, 4, dtype=torch.bool)
    supervised[1, 3] = False
    sums = distill_loss(
        hidden, states, text[:, :-1], text[:, 1:], supervised,
        to_logits=target.logits, markov_head=drafter.markov_head, confidence_head=None,
        objective=Objective(), vocabulary=DraftVocabulary(IDS),
        to_draft_logits=DraftHead(target, IDS).logits,
    )  # fmt: skip
    ce, l1, weights = torch.zeros(4).double(), torch.zeros(4).double(), torch.zeros(4).double()
    for block in range(3):
        rows = hand_logits(
            drafter, target.weights["head"], hidden[block], text[block, :-1].tolist()
        )
        for slot in range(4):
            if not supervised[block, slot]:
                continue
            q, weight = torch.zeros(64).double(), np.exp(-slot / 4)
            q[IDS] = torch.softmax(rows[slot], 0)
            p = torch.softmax(target.logits(states[block, slot]).double(), 0)
            label = text[block, slot + 1]
            l1[slot] += weight * (q - p).abs().sum()
            ce[slot] += -weight * q[label].log() if label in IDS else 0.0
            weights[slot] += weight
    torch.testing.assert_close(sums.l1.double(), l1, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.ce.double(), ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.weight.double(), weights, rtol=1e-6, atol=0)


def test_rows_that_pad_a_table_take_no_part_in_training() -> None:
    target = ToyTarget()
    wide = toy_drafter(target, vocab_size=80)
    hidden, states = torch.randn(2, 4, 32), torch.tanh(torch.randn(2, 4, 32))
    text, on = torch.randint(64, (2, 5)), torch.ones(2, 4, dtype=torch.bool)
    narrow = toy_drafter(target)
    with torch.no_grad():
        narrow.markov_head.markov_w1.weight.copy_(wide.markov_head.markov_w1.weight[:64])
        narrow.markov_head.markov_w2.weight.copy_(wide.markov_head.markov_w2.weight[:64])
    losses = []
    for drafter in (wide, narrow):
        sums = distill_loss(
            hidden, states, text[:, :-1], text[:, 1:], on, to_logits=target.logits,
            markov_head=drafter.markov_head, confidence_head=None, objective=Objective(),
        )  # fmt: skip
        sums.loss().backward()
        losses.append(sums.loss().item())
    assert losses[0] == losses[1]
    for name in ("markov_w1", "markov_w2"):
        gradient = getattr(wide.markov_head, name).weight.grad
        assert torch.equal(gradient[:64], getattr(narrow.markov_head, name).weight.grad)
        assert not gradient[64:].any()


@pytest.fixture(scope="module")
def run_inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target whose tables are padded, and prompts."""
    folder = tmp_path_factory.mktemp("padded")
    tokenizer = chat_tokenizers.k3()
    end = tokenizer.convert_tokens_to_ids("<|end_of_msg|>")
    save_k3(folder, tiny_model(replace(TINY, vocab_size=len(tokenizer) + 30, eos_token_id=end)))
    tokenizer.save_pretrained(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "What is {n} + 4?"}}\n' for n in range(16)))
    return folder, prompts


def run_settings(inputs: tuple[Path, Path], out: Path, **changes: object) -> object:
    values = {
        "target.name": str(inputs[0]), "target.device": "cpu", "data.prompts": [str(inputs[1])],
        "data.max_new_tokens": 16, "data.max_length": 64, "data.held_out": 4,
        "drafter.num_heads": 2, "drafter.num_kv_heads": 1, "drafter.head_dim": 16,
        "drafter.num_layers": 1, "drafter.intermediate_size": 32, "drafter.markov_rank": 8,
        "drafter.block_size": 4, "train.rows_per_step": 4, "train.anchors": 4, "train.epochs": 2,
        "eval.prompts": 2, "eval.max_new_tokens": 8, "eval.draft_length": 4, "out.dir": str(out),
    }  # fmt: skip
    return load_config(None, values | {k.replace("__", "."): v for k, v in changes.items()})


@pytest.mark.parametrize(
    ("head", "with_markov", "draft_vocab"),
    [("gated", True, None), ("rnn", False, 12), ("vanilla", False, 12), ("rnn", True, None)],
)
def test_a_run_trains_and_decodes_every_head_and_a_reduced_vocabulary(
    head: str,
    with_markov: bool,
    draft_vocab: int | None,
    run_inputs: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    text = io.StringIO()
    config = run_settings(
        run_inputs,
        tmp_path / "run",
        drafter__head=head,
        drafter__confidence_with_markov=with_markov,
        drafter__draft_vocab=draft_vocab,
    )
    folder = run_distill(config, False, Console(file=text, width=200))
    loaded = load_target(run_inputs[0])
    drafter = load_drafter(folder, loaded.target)
    assert drafter.config.markov_head_type == head
    assert drafter.config.vocab_size == loaded.target.table_size
    assert drafter.config.confidence_inputs == TINY.hidden_size + (8 if with_markov else 0)
    if draft_vocab:
        assert f"draft vocabulary: 12 of {loaded.target.vocab_size} ids; " in text.getvalue()
        assert drafter.draft_ids is not None
        assert len(drafter.draft_ids) == 12
        assert set(loaded.target.end_token_ids) <= set(drafter.draft_ids.tolist())
        assert int(drafter.draft_ids.max()) < loaded.target.vocab_size
    prompt = [3, 4, 5]
    plain = plain_generate(loaded.target, prompt, max_new_tokens=24, sampling=GREEDY)
    result = SpeculativeDecoder(loaded.target, drafter).generate(
        prompt, max_new_tokens=24, sampling=GREEDY, draft_length=4
    )
    assert result.tokens == plain.tokens


@pytest.mark.parametrize("size", [0, 1, 10**6])
def test_a_size_that_cannot_be_is_refused_before_the_work(
    size: int, run_inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"drafter\.draft_vocab is {size}: expected"):
        run_distill(run_settings(run_inputs, tmp_path / "run", drafter__draft_vocab=size))
    assert not (tmp_path / "run" / "rows").exists()


def test_the_whole_vocabulary_is_no_reduced_one(
    run_inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Asked for as many ids as there are tokens, or as many as the padded table has rows."""
    from dspark.distill.run import new_drafter

    loaded = load_target(run_inputs[0])
    for size in (loaded.target.vocab_size, loaded.target.table_size):
        config = run_settings(run_inputs, tmp_path / "run", drafter__draft_vocab=size)
        assert new_drafter(config, loaded.target, loaded.tokenizer).draft_ids is None
