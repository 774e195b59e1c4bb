"""The same training step as recipes publish it: all logits at once, weights and moments in bf16.

    logits of every slot, drafter's and target's, [n, V] -> softmaxes in float32 -> loss -> autograd
    -> clip -> torch's fused AdamW over bfloat16 weights

The drafter, its attention and the terms are those of `train_step.py`; what is compared is the loss,
the dtype of weights and moments, and the update. (DeepSpec's trainer has this form. Its weights
stop moving where an update is under half a unit of bfloat16: the speed is comparable, what comes
out is not.)

Letters: A anchors, G slots, n = A G, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.anchors import block_inputs, blocks, sample_anchors
from dspark_eval.train_step_target import HeadTarget, random_states

CE, L1, DECAY = 0.1, 0.9, 4.0
"""DeepSpec's constants."""


def plain_loss(logits: Tensor, target_logits: Tensor, labels: Tensor, confidence: Tensor) -> Tensor:
    """0.1 CE + 0.9 L1 + BCE, weighed by exp(-k / 4), over all slots [A, G]."""
    log_q = logits.float().log_softmax(-1)
    p = target_logits.float().softmax(-1)
    ce = -log_q.gather(-1, labels[..., None])[..., 0]
    l1 = (log_q.exp() - p).abs().sum(-1)
    bce = F.binary_cross_entropy_with_logits(
        confidence.float(), (1 - l1.detach() / 2).clamp(0, 1), reduction="none"
    )
    weight = torch.exp(-torch.arange(labels.shape[1], device=labels.device) / DECAY)
    return (weight * (CE * ce + L1 * l1 + bce)).sum() / (weight.sum() * len(labels))


def measure_plain(size: Any, device: torch.device, steps: int, warm_up: int) -> dict[str, Any]:
    """Median milliseconds of a step and peak bytes. `size`: a `train_step.StepSize` of one row."""
    step = _step(size, device)
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"ms": median(times), "peak_bytes": torch.cuda.max_memory_allocated()}


def _step(size: Any, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    drafter = size.drafter(device).bfloat16()
    target = HeadTarget(size.vocab, size.hidden, device)
    states = random_states(1, size.length, size.taps, size.hidden, device)
    ids = torch.tensor([size.text()[0].ids], device=device)
    valid = torch.ones_like(ids, dtype=torch.bool)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=6e-4, weight_decay=0.0, fused=True)
    loss = torch.compile(plain_loss)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        anchors = sample_anchors(valid, size.anchors, generator)
        block = blocks(ids, valid, anchors, size.slots)
        inputs = block_inputs(block.prev[..., 0], size.slots, 0)
        hidden = drafter.train_hidden(
            states.taps, valid, target.embed(inputs), anchors.positions, anchors.valid
        )[0].bfloat16()
        embed = drafter.markov_head.embed(block.prev[0])
        logits = F.linear(hidden, target.table) + drafter.markov_head.bias(embed)
        target_logits = F.linear(states.hidden[0, block.rows[0]], target.table)
        assert drafter.confidence_head is not None
        confidence = drafter.confidence_head(hidden, embed)
        loss(logits, target_logits, block.labels[0], confidence).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step
