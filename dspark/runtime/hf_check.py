"""Does an adapter give back the model's own logits? Asked of every model that is opened.

A dozen tokens run through the model without a cache, and through the target in pieces: a padded
batch, a block of which a part is taken back, the rest. Each row's logits must be the model's own.
A cache that forgets too little or too much, a mask that is ignored, positions that are not taken
or a head with a rule of its own all show as differences of the order of the logits themselves.

    difference = rms(ours - model's) / rms(model's, mean removed)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.runtime.hf_replay import ReplayTarget
from dspark.runtime.hf_target import RowTarget
from dspark.taps import TapSet

LIMIT = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference that is rounding; reduced precisions may differ by `LOOSE`."""
LOOSE = 0.2
TOKENS = 12
FAULTS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)
"""What a model raises that cannot be run in some way."""

Step = tuple[str, slice, Tensor]
"""What was run, where in the text, and its logits [n, V]."""


@torch.inference_mode()
def failure(target: RowTarget | ReplayTarget) -> str | None:
    """What is wrong with the target, in words that follow its name; None: nothing is."""
    text, wrong = check_text(target)
    try:
        wanted = own_logits(target, text)
        steps = _chain(target, text, wrong)
        if target.supports_trees:
            steps += _tree(target, text, wrong)
    except FAULTS as error:
        return f"it cannot be run in pieces ({type(error).__name__}: {error})"
    return different(target, wanted, steps)


def check_text(target: RowTarget | ReplayTarget) -> tuple[Tensor, Tensor]:
    """A text [TOKENS], and two tokens that do not follow it."""
    ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(5))
    ids = ids.repeat(-(-(TOKENS + 2) // len(ids)))[: TOKENS + 2].to(target.device)
    return ids[:TOKENS], ids[TOKENS:]


def own_logits(target: RowTarget | ReplayTarget, text: Tensor) -> Tensor:
    """[T, V] float32: what the model itself says of a text [T], without a cache."""
    logits = target.parts.model(input_ids=text.unsqueeze(0), use_cache=False).logits[0]
    return logits[:, : target.vocab_size].float()


def different(
    target: RowTarget | ReplayTarget, wanted: Tensor, steps: Sequence[Step]
) -> str | None:
    """Which step gives other logits than ``wanted`` [T, V], and how much; None: none does."""
    limit = LIMIT.get(target.dtype, LOOSE)
    scale = (wanted - wanted.mean(-1, keepdim=True)).square().mean().sqrt()
    for what, positions, logits in steps:
        gap = float((logits - wanted[positions]).square().mean().sqrt() / scale)
        if not gap <= limit:
            return f"{what} gives other logits than the model itself (difference {gap:.2g})"
    return None


def _chain(target: RowTarget | ReplayTarget, text: Tensor, wrong: Tensor) -> list[Step]:
    """Two batch rows at different places of the text, a part of a block taken back."""
    cache = target.new_cache(2, 2 * TOKENS)
    taps = TapSet(tuple(sorted({0, target.num_layers - 1})), "residual")
    pad = wrong[0]
    tokens = torch.stack((text[:5], torch.stack((pad, pad, *text[:3]))))
    valid = torch.tensor([[True] * 5, [False] * 2 + [True] * 3], device=target.device)
    start = target.forward(tokens, cache, valid=valid, taps=taps, commit=True)
    if start.taps is None or start.taps.shape[-1] != len(taps.layer_ids) * target.hidden_size:
        raise ValueError("its layers do not return their hidden states")
    block = torch.stack(
        (torch.stack((text[5], text[6], *wrong)), torch.stack((text[3], *wrong, pad)))
    )
    judged = target.forward(block, cache, commit=False)
    cache.commit(torch.tensor([2, 1], device=target.device))
    rest = target.forward(torch.stack((text[7:10], text[4:7])), cache, commit=True)
    logits = target.logits
    return [
        ("a prompt", slice(0, 5), logits(start.hidden[0])),
        ("a padded prompt", slice(0, 3), logits(start.hidden[1, 2:])),
        ("a block", slice(5, 7), logits(judged.hidden[0, :2])),
        ("a block in a batch", slice(3, 4), logits(judged.hidden[1, :1])),
        ("a continuation", slice(7, 10), logits(rest.hidden[0])),
        ("a continuation in a batch", slice(4, 7), logits(rest.hidden[1])),
    ]


def _tree(target: RowTarget | ReplayTarget, text: Tensor, wrong: Tensor) -> list[Step]:
    """A block with siblings, one of which is taken."""
    cache = target.new_cache(1, 2 * TOKENS)
    target.forward(text[None, :4], cache, commit=True)
    block = torch.stack((text[4], wrong[0], wrong[1], text[5])).unsqueeze(0)
    parents = torch.tensor([[-1, 0, 1, 0]], device=target.device)
    judged = target.forward(block, cache, parents=parents, commit=False)
    cache.commit_path(torch.tensor([[0, 3, -1]], device=target.device))
    rest = target.forward(text[None, 6:9], cache, commit=True)
    return [
        ("a tree", slice(4, 6), target.logits(judged.hidden[0, [0, 3]])),
        ("a continued tree", slice(6, 9), target.logits(rest.hidden[0])),
    ]
