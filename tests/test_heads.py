"""Sequential heads: against an independent implementation, slot by slot against whole blocks, and
against what a slot must not know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.draft.config import MARKOV_HEAD_TYPES, DraftConfig
from dspark.draft.heads import ConfidenceHead, SequentialHead, sequential_head
from dspark.draft.model import DSparkDrafter
from dspark.draft.start import initialise
from dspark_kernels.markov_code import code
from tests import oracles
from tests.tolerance import assert_close

HIDDEN, RANK, VOCAB, DRAFT_VOCAB, SLOTS, BLOCKS = 20, 6, 50, 17, 5, 7


def config(kind: str, draft_vocab: int | None = None) -> DraftConfig:
    return DraftConfig(
        hidden_size=HIDDEN, num_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=24, vocab_size=VOCAB, num_target_layers=5, target_layer_ids=(1, 3),
        target_tap_kind="residual", mask_token_id=7, block_size=SLOTS, markov_rank=RANK,
        markov_head_type=kind, draft_vocab_size=draft_vocab,
    )  # fmt: skip


def head_of(kind: str, dtype: torch.dtype = torch.float32) -> SequentialHead:
    """Weights of the size at which sigmoid and tanh bend."""
    head = sequential_head(config(kind, DRAFT_VOCAB)).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def stepped(head: SequentialHead, prev: Tensor, hidden: Tensor) -> Tensor:
    """Codes [B, G, R] as drafting forms them."""
    state, codes = head.start(len(prev)), []
    for slot in range(prev.shape[1]):
        code, state = head.step(prev[:, slot], hidden[:, slot], state)
        codes.append(code)
    return torch.stack(codes, 1)


def coded(head: SequentialHead, prev: Tensor, hidden: Tensor) -> Tensor:
    """Codes [B, G, R] as the walk on the device forms them."""
    coder = head.coder(hidden)
    if coder is None:
        return head.embed(prev)
    state, codes = None, []
    for slot in range(prev.shape[1]):
        made, state = code(coder, slot, head.embed(prev[:, slot]), state)
        codes.append(made)
    return torch.stack(codes, 1)


def blocks(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (BLOCKS, SLOTS)), torch.randn(BLOCKS, SLOTS, HIDDEN, dtype=dtype)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", MARKOV_HEAD_TYPES)
def test_bias_of_a_block_equals_speculators(kind: str) -> None:
    definitions = oracles.require("speculators.models.dspark.model_definitions")
    ours = head_of(kind)
    theirs = definitions.MarkovHead(
        verifier_vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        markov_rank=RANK,
        hidden_size=HIDDEN,
        head_type=kind,
    )
    theirs.load_state_dict(ours.state_dict(), strict=True)
    prev, hidden = blocks()
    with torch.no_grad():
        wanted = theirs.block_bias(prev_token_ids=prev, hidden_states=hidden)
        assert wanted.shape == (BLOCKS, SLOTS, DRAFT_VOCAB)
        assert_close(ours.bias(ours.codes(prev, hidden)), wanted, limit=1e-6, what="block")
        assert_close(ours.bias(stepped(ours, prev, hidden)), wanted, limit=1e-6, what="steps")
        assert_close(ours.embed(prev), theirs.prev_embeddings(prev), limit=0, what="embed")


@pytest.mark.parametrize("kind", MARKOV_HEAD_TYPES)
def test_steps_equal_the_block_in_float64_whatever_the_leading_shape(kind: str) -> None:
    head = head_of(kind, torch.float64)
    prev, hidden = blocks(torch.float64)
    codes = head.codes(prev, hidden)
    torch.testing.assert_close(stepped(head, prev, hidden), codes, rtol=0, atol=1e-13)
    torch.testing.assert_close(coded(head, prev, hidden), codes, rtol=0, atol=1e-13)
    nested = head.codes(prev[None, :, None], hidden[None, :, None])
    torch.testing.assert_close(nested[0, :, 0], codes, rtol=0, atol=1e-13)
    nothing = head.codes(prev[:0], hidden[:0])
    assert nothing.shape == (0, SLOTS, RANK)


@pytest.mark.parametrize(("kind", "memory"), [("vanilla", 0), ("gated", 0), ("rnn", SLOTS)])
def test_a_slot_depends_on_the_past_it_should_and_on_no_future(kind: str, memory: int) -> None:
    """Gradient of each slot's code in every slot's inputs: a triangle for the rnn, else a diagonal.

    In the previous tokens the pattern is read by exchanging one token at a time.
    """
    head = head_of(kind, torch.float64)
    prev, hidden = blocks(torch.float64)
    hidden.requires_grad_()
    codes = head.codes(prev, hidden)
    other = (prev + 1) % VOCAB
    for slot in range(SLOTS):
        seen = [slot - memory <= source <= slot for source in range(SLOTS)]
        if kind != "vanilla":
            [gradient] = torch.autograd.grad(codes[:, slot].sum(), hidden, retain_graph=True)
            assert [bool(g.any()) for g in gradient.unbind(1)] == seen
        for source in range(SLOTS):
            changed = torch.where(torch.arange(SLOTS) == source, other, prev)
            moved = head.codes(changed, hidden)[:, slot] != codes[:, slot]
            assert bool(moved.any()) == seen[source]


def test_an_rnn_step_needs_the_state_it_starts_with() -> None:
    head = head_of("rnn")
    assert not head.start(3).any()
    with pytest.raises(ValueError, match=r"start\(\)"):
        head.step(torch.zeros(3, dtype=torch.int64), torch.zeros(3, HIDDEN), None)


@pytest.mark.parametrize("kind", MARKOV_HEAD_TYPES)
def test_names_are_those_of_published_checkpoints(kind: str) -> None:
    shapes = {n: tuple(t.shape) for n, t in DSparkDrafter(config(kind)).state_dict().items()}
    extra = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)},
        "rnn": {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)},
    }[kind]
    wanted = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (VOCAB, RANK), **extra}
    found = {n: s for n, s in shapes.items() if n.startswith("markov_head.")}
    assert found == {f"markov_head.{name}": shape for name, shape in wanted.items()}


@pytest.mark.parametrize("kind", MARKOV_HEAD_TYPES)
def test_every_head_starts_silent_and_all_of_it_learns(kind: str) -> None:
    drafter = DSparkDrafter(config(kind))
    initialise(drafter, torch.Generator().manual_seed(0))
    head = drafter.markov_head
    prev, hidden = blocks()
    assert not head.bias(head.codes(prev, hidden)).any()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(2):  # the first step moves w2 alone: it was zero
        optimizer.zero_grad()
        logits = head.bias(head.codes(prev, hidden)).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, prev.flatten()).backward()
        optimizer.step()
    assert all(bool(p.grad.any()) for p in head.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in head.parameters())


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("kind", MARKOV_HEAD_TYPES)
def test_confidence_reads_the_table_and_not_the_code(kind: str, with_markov: bool) -> None:
    drafter = DSparkDrafter(replace(config(kind), confidence_head_with_markov=with_markov))
    assert drafter.confidence_head is not None
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    prev, hidden = blocks()
    weight, bias = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias
    table = drafter.markov_head.markov_w1.weight[prev]
    wanted = hidden @ weight[:HIDDEN] + bias
    if with_markov:
        wanted = wanted + table @ weight[HIDDEN:]
    else:
        assert weight.shape == (HIDDEN,)
    found = drafter.confidence_head(hidden, drafter.markov_head.embed(prev))
    assert_close(found, wanted, limit=1e-6, what="confidence")


@pytest.mark.parametrize("rank", [0, 4])
def test_the_confidence_of_a_half_precision_drafter_is_computed_in_float32(rank: int) -> None:
    torch.manual_seed(0)
    head = ConfidenceHead(64, rank).bfloat16()
    with torch.no_grad():
        head.proj.weight.mul_(20)
    hidden, embed = torch.randn(200, 64).bfloat16(), torch.randn(200, 4).bfloat16()
    logits = head(hidden, embed)
    inputs = torch.cat((hidden, embed), -1) if rank else hidden
    wanted = inputs.double() @ head.proj.weight[0].double() + head.proj.bias.double()
    assert logits.dtype == torch.float32
    assert (logits.double() - wanted).abs().max() < 1e-4 < wanted.abs().max() / 1e4
