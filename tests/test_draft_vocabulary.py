"""Drafting, verifying and training with a reduced or a padded draft vocabulary.

Previous tokens are ids of the target, the drafter's distribution is over draft ids, and what is
verified is over ids of the target again. Hand-drafted blocks, exact laws and the chi-square of
`test_decode_law.py` (26 degrees of freedom, false alarms at 1e-4) hold the three together.
"""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from dspark.distill.config import load_config
from dspark.distill.fused import DraftVocabulary
from dspark.distill.loss import distill_loss
from dspark.distill.run import run_distill
from dspark.distill.terms import Objective
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.vocabulary import most_frequent, reduce_vocabulary
from dspark.errors import UserError
from dspark.k3.checkpoint import save_k3
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.k3_target import K3Target
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.proposal import propose
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import SamplingParams, draw, to_probs
from dspark.runtime.verify import verify
from tests import chat_tokenizers
from tests.k3_tiny import TINY, tiny_model
from tests.laws import pvalue, reference, seeded
from tests.table_target import TableDrafter, TableTarget
from tests.toy_target import ToyTarget

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)
IDS = torch.tensor([2, 3, 11, 12, 40, 63])
"""Of the toy target's 64: neighbours, gaps and the last one, neither 0 nor the end token 1."""


def toy_drafter(target: ToyTarget, head: str = "vanilla", **changes: object) -> DSparkDrafter:
    torch.manual_seed(0)
    config = DraftConfig(
        hidden_size=target.hidden_size, num_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, vocab_size=target.table_size,
        num_target_layers=target.num_layers, target_layer_ids=(0, 2), target_tap_kind="residual",
        mask_token_id=0, block_size=4, markov_rank=4, markov_head_type=head,
    )  # fmt: skip
    drafter = DSparkDrafter(replace(config, **changes))
    with torch.no_grad():  # recognisable rows: the bias is as large as the logits
        drafter.markov_head.markov_w1.weight.normal_(0, 2.0)
        drafter.markov_head.markov_w2.weight.normal_(0, 2.0)
    return drafter


def hand_logits(
    drafter: DSparkDrafter, head: Tensor, hidden: Tensor, text: list[int]
) -> list[Tensor]:
    """[V'] float64 logits of every slot, tensor by tensor: `text` is the anchor and what follows.

    Written from the formulas of the heads, with a full-width LM head of which rows are taken last.
    """
    names = {n: t.double() for n, t in drafter.markov_head.state_dict().items()}
    rank, ids = names["markov_w1.weight"].shape[1], drafter.draft_ids
    state, rows = torch.zeros(rank, dtype=torch.float64), []
    for slot, token in enumerate(text):
        h, e = hidden[slot].double(), names["markov_w1.weight"][token]
        code = e
        if "gate_proj.weight" in names:
            z = names["gate_proj.weight"] @ torch.cat((h, e)) + names["gate_proj.bias"]
            code = e / (1 + torch.exp(-z))
        if "joint_proj.weight" in names:
            z = names["joint_proj.weight"] @ torch.cat((state, e, h)) + names["joint_proj.bias"]
            gate = 1 / (1 + torch.exp(-z[:rank]))
            state = gate * state + (1 - gate) * torch.tanh(z[rank : 2 * rank])
            code = torch.tanh(z[2 * rank :])
        logits = head.double() @ h
        rows.append((logits if ids is None else logits[ids]) + names["markov_w2.weight"] @ code)
    return rows


def with_context(target: ToyTarget, drafter: DSparkDrafter) -> object:
    context = drafter.new_context(1, 32)
    tokens = torch.tensor([[5, 7, 11]])
    out = target.forward(tokens, target.new_cache(1, 32), taps=drafter.taps, commit=True)
    assert out.taps is not None
    drafter.extend(context, out.taps)
    return context


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_block_drafted_by_hand_is_the_runtimes(head: str, reduced: bool) -> None:
    """Ids, probabilities and entropy; each token goes back to the table as the target's id."""
    target = ToyTarget()
    drafter = toy_drafter(target, head)
    drafter = reduce_vocabulary(drafter, IDS) if reduced else drafter
    ids = IDS if reduced else torch.arange(64)
    head_weight, context = target.weights["head"], with_context(target, drafter)
    block = torch.tensor([[9, 0, 0, 0]])
    hidden = drafter.block_hidden(target.embed(block), context)[0]
    for seed in range(10):
        for sampling in (GREEDY, WARM, SamplingParams(0.7, 0.9), SamplingParams(1.3, 1.0, 2)):
            proposal = propose(
                drafter, DraftHead(target, drafter.draft_ids), context, torch.tensor([9]), 4,
                sampling, seeded(seed),
            )  # fmt: skip
            tokens = proposal.tokens[0].tolist()
            assert set(tokens) <= set(ids.tolist())
            rows = hand_logits(drafter, head_weight, hidden, [9, *tokens[:-1]])
            for slot, logits in enumerate(rows):
                q1 = torch.softmax(logits, 0)
                entropy = -(q1 * q1.log()).sum()
                torch.testing.assert_close(
                    proposal.entropy[0, slot].double(), entropy, rtol=0, atol=1e-4
                )
                if sampling.greedy:
                    assert tokens[slot] == int(ids[logits.argmax()])
                    continue
                assert proposal.probs is not None
                wanted = np.zeros(64)
                wanted[ids.numpy()] = reference(logits, sampling)
                found = proposal.probs[0, slot].double().numpy()
                np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
                assert wanted[tokens[slot]] > 0


def test_confidence_of_a_reduced_drafter_reads_the_targets_ids() -> None:
    target = ToyTarget()
    drafter = reduce_vocabulary(toy_drafter(target), IDS)
    context, head = with_context(target, drafter), DraftHead(target, drafter.draft_ids)
    proposal = propose(drafter, head, context, torch.tensor([9]), 4, GREEDY, seeded())
    hidden = drafter.block_hidden(target.embed(torch.tensor([[9, 0, 0, 0]])), context)
    before = torch.tensor([[9, *proposal.tokens[0, :-1].tolist()]])
    assert drafter.confidence_head is not None
    scores = drafter.confidence_head(hidden, drafter.markov_head.markov_w1.weight[before])
    assert proposal.confidence is not None
    torch.testing.assert_close(proposal.confidence, scores.sigmoid(), rtol=0, atol=1e-6)


def test_drafting_reads_the_rows_of_its_ids_and_no_others() -> None:
    """What is not read may be anything: NaN in every other row of the head stays unseen."""
    target = K3Target(tiny_model(), "tiny", ())
    ids = torch.tensor([1, 5, 6, 30])
    hidden = torch.randn(2, 3, TINY.hidden_size)
    wanted = target.logits(hidden)[..., ids]
    head = target.model.lm_head.weight
    with torch.no_grad():
        keep = head[ids].clone()
        head.fill_(torch.nan)
        head[ids] = keep
    draft_head = DraftHead(target, ids)
    found = draft_head.logits(hidden)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert found.dtype == torch.float32
    head.data.fill_(torch.nan)  # copied once, side by side
    assert torch.equal(draft_head.logits(hidden), found)


# Laws -------------------------------------------------------------------------------------------


def reduced_table(drafter: TableDrafter, ids: Tensor) -> TableDrafter:
    """The same drafter, proposing `ids` only."""
    bias = drafter.markov_head.bias
    drafter.draft_ids = ids
    drafter.markov_head.bias = lambda code: bias(code)[..., ids]
    return drafter


SETTINGS = [WARM, SamplingParams(0.6), SamplingParams(1.3, 0.8), SamplingParams(1.0, 1.0, 2)]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("ids", [[1, 3, 4], [2], [0, 1, 2, 3, 4]])
def test_the_emitted_token_has_the_targets_law_exactly(
    ids: list[int], sampling: SamplingParams
) -> None:
    """First slot in closed form from the proposal's own q: kept mass plus residual is p.

    For every anchor of a table target; and tokens outside the vocabulary come out of the residual
    with all of their probability, since q has none there.
    """
    vocab = 5
    target = TableTarget.random(vocab, 8, scale=1.0)
    drafter = reduced_table(TableDrafter.of(target, 2, 1.0, 2), torch.tensor(ids))
    outside = [token for token in range(vocab) if token not in ids]
    for anchor in range(vocab):
        head = DraftHead(target, drafter.draft_ids)
        context = drafter.new_context(1, 8)
        proposal = propose(drafter, head, context, torch.tensor([anchor]), 2, sampling, seeded(3))
        assert proposal.probs is not None
        assert proposal.probs.shape == (1, 2, vocab)
        assert not proposal.probs[..., outside].any()
        q = proposal.probs[0, 0].double()
        torch.testing.assert_close(q.sum(), torch.tensor(1.0).double(), rtol=0, atol=1e-6)
        p = to_probs(target.table[1, anchor], sampling).double()
        kept, residual = torch.minimum(p, q), (p - q).clamp(min=0)
        law = kept + (1 - kept.sum()) * residual / residual.sum().clamp(min=1e-300)
        torch.testing.assert_close(law, p, rtol=0, atol=1e-6)
        torch.testing.assert_close(residual[outside], p[outside], rtol=0, atol=0)


def test_verdicts_on_reduced_proposals_follow_the_target() -> None:
    """300,000 draws of one slot; total-variation errors of 0.01 are caught (test_lossless.py)."""
    draws, vocab, ids = 300_000, 24, torch.tensor([0, 1, 5, 6, 7, 12, 20])
    generator = seeded(11)
    p_logits = 1.5 * torch.randn(2, vocab, generator=generator)
    for sampling in (WARM, SamplingParams(0.7, 0.9), SamplingParams(1.0, 1.0, 3)):
        q = to_probs(p_logits[0, ids] + 0.8 * torch.randn(7, generator=generator), sampling)
        wide = torch.zeros(1, 1, vocab).index_copy_(-1, ids, q[None, None]).expand(draws, 1, vocab)
        tokens = draw(wide, generator)
        blank = torch.zeros(draws, 1)
        proposal = Proposal(tokens, wide, blank, blank)
        verdict = verify(proposal, p_logits.expand(draws, 2, vocab), sampling, generator)
        first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.next_token)
        assert pvalue(first, reference(p_logits[0], sampling)) > 1e-5
        bonus = verdict.next_token[verdict.accepted > 0]
        assert pvalue(bonus, reference(p_logits[1], sampling)) > 1e-5


@pytest.mark.parametrize(
    ("sampling", "count"),
    [*((s, 1_500) for s in SETTINGS), pytest.param(WARM, 15_000, marks=pytest.mark.slow)],
)
def test_the_whole_loop_follows_the_targets_law(sampling: SamplingParams, count: int) -> None:
    """First three tokens of texts drafted from two of three ids, jointly."""
    target = TableTarget.random(3, 8, scale=1.0)
    drafter = reduced_table(TableDrafter.of(target, 3, noise=1.0, seed=2), torch.tensor([0, 2]))
    decoder = SpeculativeDecoder(target, drafter)
    texts, accepted = [], set()
    for seed in range(count):
        result = decoder.generate(
            [1, 2], max_new_tokens=5, sampling=sampling, draft_length=3, seed=seed
        )
        texts.append(result.tokens[:3])
        accepted.add(result.rounds[0].accepted)
    p = to_probs(target.table, sampling).double()
    law = torch.einsum("x,xy,xyz->xyz", p[1, 2], p[2], p).numpy().reshape(-1)
    assert pvalue(torch.tensor(texts) @ torch.tensor([9, 3, 1]), law) > 1e-4
    assert accepted == {0, 1, 2, 3}


def test_a_target_without_mass_on_the_draft_vocabulary_is_a_defined_case() -> None:
    """top-k 1 leaves p one token outside the draft vocabulary: always rejected, always that one."""
    table = torch.zeros(5, 5, 5)
    table[..., 4] = 9.0
    target = TableTarget(table)
    drafter = reduced_table(TableDrafter.random(5, 3, 0), torch.tensor([0, 1]))
    for sampling in (GREEDY, SamplingParams(1.0, 1.0, 1), SamplingParams(1.0, 1e-3)):
        result = SpeculativeDecoder(target, drafter).generate(
            [1, 2], max_new_tokens=12, sampling=sampling, draft_length=3
        )
        assert result.tokens == [4] * 12
        assert all(r.accepted == 0 for r in result.rounds)


# Real targets -----------------------------------------------------------------------------------


def bigram_drafter(target: K3Target, text: list[int]) -> DSparkDrafter:
    """A drafter whose table knows which token of a text follows which, so it is often right."""
    torch.manual_seed(1)
    drafter = DSparkDrafter(
        DraftConfig(
            hidden_size=target.hidden_size, num_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, intermediate_size=48,
            vocab_size=target.table_size, num_target_layers=target.num_layers,
            target_layer_ids=(1, 3), target_tap_kind="attn_res_mixture", mask_token_id=0,
            block_size=4, markov_rank=64,
        )
    )  # fmt: skip
    first, second = (drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight)
    with torch.no_grad():
        drafter.norm.weight.mul_(0.01)
        first.copy_(torch.nn.functional.normalize(torch.randn_like(first), dim=-1))
        second.zero_()
        for before, after in pairwise(text):
            second[after] += 5.0 * first[before]
    return drafter


def test_nano_says_greedily_the_same_with_a_tenth_of_its_vocabulary() -> None:
    nano = load_target("nano", dtype=torch.float32)
    accepted = set()
    for question in ("Tom has 3 apples and buys 4 more. How many apples?", "Write about rain."):
        messages = [{"role": "user", "content": question}]
        prompt = nano.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        plain = plain_generate(nano.target, prompt, max_new_tokens=64, sampling=GREEDY)
        counts = torch.bincount(torch.tensor(plain.tokens), minlength=nano.target.vocab_size)
        drafter = bigram_drafter(nano.target, plain.tokens)
        # half of the ids of the text, so that some of it can never be proposed
        size = int((counts > 0).sum()) // 2
        reduced = reduce_vocabulary(drafter, most_frequent(counts, size))
        result = SpeculativeDecoder(nano.target, reduced).generate(
            prompt, max_new_tokens=64, sampling=GREEDY, draft_length=4
        )
        assert result.tokens == plain.tokens
        accepted |= {r.accepted for r in result.rounds}
    assert {0, 1, 2} <= accepted


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


# Training ---------------------------------------------------------------------------------------


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
