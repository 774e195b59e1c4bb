"""Failures of hybrid caches that others have reported, played as they were met.

More of them are in ``test_k3_cache``, ``test_k3_tree``, ``test_k3_requests`` and
``test_k3_storage``; the page docs/known_failures.md says which is where.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.tree import plant
from dspark_kernels import kda as kernel
from tests.k3_fresh import LIMIT, SMALL, Poisoned, assert_same, contents, prefill, shared
from tests.k3_tiny import PLAIN, TINY, tiny_tokens
from tests.tolerance import assert_close

CONFIGS = pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])
SEVEN = torch.tensor(7)


def started(batch: int, config: K3Config = TINY) -> tuple[K3Cache, list[Tensor]]:
    held, prompt = shared(config).new_cache(batch, 48, Poisoned()), tiny_tokens(batch, 6)
    shared(config)(prompt, held)
    return held, list(prompt)


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_request_cancelled_between_draft_and_verify(cancelled: int):
    """An accepted count of zero reads nothing from before the block, and never a neighbour's row;
    the slot is reused, and what the others become does not depend on it."""
    model = shared()
    held, texts = started(3)
    untouched, _ = started(3)
    rows, counts = tiny_tokens(3, 5, seed=3), torch.tensor([2, 3, 4])
    model(rows, untouched, commit=False)
    untouched.commit(counts)
    model(rows, held, commit=False)
    counts[cancelled] = 0
    held.commit(counts)
    held.reset(cancelled)
    _, other = prefill(model, tiny_tokens(1, 9, seed=8))
    held.put(cancelled, other)
    for row, count in enumerate(counts.tolist()):
        if row == cancelled:
            continue
        expected = contents(untouched, row)
        for name, part in contents(held, row).items():
            assert_close(part, expected[name], limit=LIMIT, what=name)
        assert_same(model, held, row, torch.cat((texts[row], rows[row, :count])), SEVEN)
    assert_same(model, held, cancelled, tiny_tokens(1, 9, seed=8)[0], SEVEN)


@pytest.mark.parametrize("idle", [0, 3])
def test_an_idle_slot_never_touches_a_live_one(idle: int):
    """100 rounds with a slot whose rows are all padding, beside the same rounds without it."""
    model = shared(SMALL)
    live = [row for row in range(4) if row != idle]
    padded, plain = model.new_cache(4, 240, Poisoned()), model.new_cache(3, 240, Poisoned())
    generator = torch.Generator().manual_seed(0)
    texts = [torch.zeros(0, dtype=torch.int64)] * 3
    valid = torch.ones(4, 3, dtype=torch.bool)
    valid[idle] = False
    counts = torch.zeros(4, dtype=torch.int64)
    for _ in range(100):
        rows = torch.randint(3, 61, (4, 3), generator=generator)
        ours, _ = model(rows, padded, valid=valid, commit=False)
        theirs, _ = model(rows[live], plain, commit=False)
        assert_close(ours[live], theirs, limit=LIMIT)
        counts[live] = torch.randint(0, 4, (3,), generator=generator)
        padded.commit(counts)
        plain.commit(counts[live])
        lines = zip(texts, rows[live], counts[live].tolist(), strict=True)
        texts = [torch.cat((text, row[:n])) for text, row, n in lines]
    assert padded.lengths[idle] == 0
    assert all(not kda.state[idle].any() for kda in padded._kda())
    for row, text in zip(live, texts, strict=True):
        assert_same(model, padded, row, text, SEVEN)


@CONFIGS
def test_latents_stand_behind_each_rows_own_length(config: K3Config):
    """Not where some row, or the first round, had them: the slots themselves are compared, because
    acceptance stays normal while a misplaced latent costs accuracy."""
    model = shared(config)
    held, texts = started(3, config)
    for number, counts in enumerate(([2, 0, 1], [0, 2, 2], [1, 1, 0], [2, 2, 2])):
        rows = tiny_tokens(3, 2, seed=20 + number)
        model(rows, held, commit=False)
        for mla in held._mla():
            for row, length in enumerate(held.lengths.tolist()):
                assert torch.isfinite(mla.latents[row, : length + 2]).all()
        held.commit(torch.tensor(counts))
        pairs = zip(texts, rows, counts, strict=True)
        texts = [torch.cat((text, more[:n])) for text, more, n in pairs]
        for row, text in enumerate(texts):
            _, fresh = prefill(model, text.unsqueeze(0))
            for ours, expected in zip(held._mla(), fresh._mla(), strict=True):
                assert_close(ours.latents[row, : len(text)], expected.latents[0, : len(text)],
                             limit=LIMIT)  # fmt: skip


def strided(x: Tensor) -> Tensor:
    """The same values, every second of a memory whose others are far outside any range."""
    wide = torch.full((*x.shape, 2), 10**6 if x.dtype == torch.int64 else 1).to(x.dtype)
    wide[..., 0] = x
    view = wide[..., 0]
    assert not view.is_contiguous()
    return view


def test_half_the_rows_draft_and_every_index_is_a_strided_view():
    model = shared()
    results = []
    for view in (strided, Tensor.contiguous):
        held, texts = started(4)
        rows, counts = tiny_tokens(4, 4, seed=3), torch.tensor([4, 1, 4, 1])
        valid = torch.arange(4) < counts.unsqueeze(1)
        model(view(rows), held, valid=view(valid), commit=False)
        accepted = torch.tensor([2, 1, 0, 1])
        held.commit(view(accepted))
        parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 0], [-1, 0, 1, 1], [-1, 0, 0, 0]])
        model(view(rows), held, parents=view(parents), valid=view(valid), commit=False)
        paths = torch.tensor([[0, 1, 3], [0, -1, -1], [0, 2, -1], [-1, -1, -1]])
        paths[2, 1] = 1
        held.commit_path(view(paths))
        held.select(view(torch.tensor([2, 0, 3, 1])))
        results.append(held)
        for now, row in enumerate((2, 0, 3, 1)):
            path = [r for r in paths[row].tolist() if r >= 0]
            line = torch.cat((texts[row], rows[row, : int(accepted[row])], rows[row, path]))
            assert_same(model, held, now, line, SEVEN)
    for row in range(4):
        ours = contents(results[0], row)
        assert all(torch.equal(p, ours[name]) for name, p in contents(results[1], row).items())


def test_the_kernel_reads_strided_rows_as_their_contiguous_copies():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    unit = torch.nn.functional.normalize
    x = [unit(draw(2, 6, 3, 4), dim=-1), unit(draw(2, 6, 3, 4), dim=-1), draw(2, 6, 3, 5)]
    x += [-draw(2, 6, 3, 4).abs(), draw(2, 6, 3).sigmoid(), draw(2, 3, 4, 5)]
    upto = plant(torch.tensor([-1, 0, 1, 1, 2, 1]), None, 2, 6).upto
    views = [strided(part) for part in x]
    for tree in (None, upto, strided(upto)):
        for expected, got in zip(
            kernel.step(*x, 2, upto=None if tree is None else upto),
            kernel.step(*views, 2, upto=tree),
            strict=True,
        ):
            assert torch.equal(got, expected)
    for form in (kernel.chunk, kernel.recurrent):
        for expected, got in zip(form(*x), form(*views), strict=True):
            assert torch.equal(got, expected)


@CONFIGS
@pytest.mark.parametrize("length", [1, 2, 3])
def test_trees_on_texts_shorter_than_the_convolution(config: K3Config, length: int):
    """Windows of which some rows are from before the first token, and blocks of two."""
    model, prompt = shared(config), tiny_tokens(1, length)
    held = model.new_cache(1, 24, Poisoned())
    model(prompt, held)
    text, parents = prompt[0], torch.tensor([-1, -1])
    for number, row in enumerate((1, 0, 1)):
        rows = tiny_tokens(1, 2, seed=40 + number)
        out, _ = model(rows, held, parents=parents, commit=False)
        for each in range(2):
            line = torch.cat((text, rows[0, each : each + 1])).unsqueeze(0)
            assert_close(out[0, each], model(line)[0][0, -1], limit=LIMIT)
        held.commit_path(torch.tensor([[row]]))
        text = torch.cat((text, rows[0, row : row + 1]))
        assert_same(model, held, 0, text, SEVEN)
