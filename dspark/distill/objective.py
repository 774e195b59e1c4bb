"""From a batch of rows to the sums of its loss, and from sums to the numbers that are reported.

    batch -> taps, hidden (target, no gradient) -> blocks -> drafter -> LossSums

Training, evaluation under teacher forcing and every test of either go through `batch_sums`.

Letters: B batch, S sequence, A anchors, G block slots, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dspark.devices import one_thread, send_all
from dspark.distill import fused_head
from dspark.distill.batches import Batch
from dspark.distill.fused import DraftVocabulary
from dspark.distill.fused_head import Imitated, imitate
from dspark.distill.hardness import hard_anchors
from dspark.distill.loss import LossSums, chunk_slots, distill_loss
from dspark.distill.places import Places
from dspark.distill.taps import Features, FeatureSource, target_features
from dspark.distill.terms import Objective
from dspark.distill.train_settings import TrainSettings
from dspark.draft.anchors import Blocks, block_inputs, blocks
from dspark.draft.model import DSparkDrafter
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.target import Target

SCALARS = ("objective", "normaliser", "accepted_length", "blocks")
"""Fields of LossSums without a position."""


def objective(settings: TrainSettings) -> Objective:
    """What the settings ask to minimise. They speak of TV: the loss takes 2 TV, as DeepSpec's."""
    return Objective(
        ce=settings.ce,
        l1=settings.tv,
        confidence=settings.confidence,
        kl=settings.kl,
        reverse_kl=settings.reverse_kl,
        nla=settings.nla,
        lk_hybrid=settings.lk_hybrid,
        length=settings.length,
        slot_weights=settings.slot_weights,
        decay=settings.decay,
    )


@dataclass(frozen=True, eq=False)
class Ready:
    """A batch on its device, with what no weight that trains has a part in.

    batch: with the anchors that are used. features: the target's states. block: its blocks, where
    the batch was given: on the host, nothing has to wait for the device. prev, labels: those of the
    blocks, on the device. head, imitated: see `fused_head.py`; None for the path of `fused.py`.
    places: supervised slots, where `block` is and on the device. padded: whether a position or an
    anchor is none.
    """

    batch: Batch
    features: Features
    block: Blocks
    prev: Tensor
    labels: Tensor
    head: Tensor | None
    imitated: Imitated | None
    places: tuple[Places, Places]
    padded: bool


def batch_sums(
    target: Target,
    drafter: DSparkDrafter,
    batch: Batch,
    settings: TrainSettings,
    source: FeatureSource | None = None,
    ready: Ready | None = None,
) -> LossSums:
    """Loss sums on the target's device of a batch from anywhere; differentiable in the weights.

    `source` gives the target's states; without one the target runs over the padded batch. `ready`
    is what `prepare` gave for this batch, if it was made ready before. Raises BadFeatures when the
    states are not finite.
    """
    if ready is None:
        ready = prepare(target, drafter, batch, settings, source)
    return _ready_sums(target, drafter, ready, settings)


def prepare(
    target: Target,
    drafter: DSparkDrafter,
    batch: Batch,
    settings: TrainSettings,
    source: FeatureSource | None = None,
) -> Ready:
    """Everything of `batch_sums` that comes before the drafter."""
    device = target.device
    given, batch = batch, batch.to(device)
    features = source(batch) if source else target_features(target, batch, drafter.taps)
    if batch.noise is not None:
        chunk = settings.chunk or chunk_slots(target.vocab_size, device)
        hard = hard_anchors(batch, features.hidden, target.logits, settings.anchor_choice, chunk)
        given = batch = replace(batch, anchors=hard)
    head = through_head(target, drafter, settings)
    return _placed(given, batch, features, head, drafter.config.block_size, settings.chunk)


@one_thread()
def _placed(
    given: Batch,
    batch: Batch,
    features: Features,
    head: Tensor | None,
    slots: int,
    chunk: int | None,
) -> Ready:
    """Blocks and places of a batch, found where it was `given` and sent to where `batch` is."""
    device = batch.ids.device
    block = blocks(given.ids, given.loss_mask, given.anchors, slots)
    rows = _flat_rows(block.rows, given.ids.shape[1])
    prev, labels = send_all([block.prev, block.labels], device)
    found = Places.of(block.supervised)
    imitated = None
    if head is not None:
        size = chunk or fused_head.even_chunk(len(found.block), len(head), slots)
        imitated = imitate(found.picked(found.in_use(rows)), found.counts, size, device)
    padded = not bool(given.valid.all() and given.anchors.valid.all())
    return Ready(
        batch, features, replace(block, rows=rows), prev, labels, head, imitated,
        (found, found.to(device)), padded,
    )  # fmt: skip


def _ready_sums(
    target: Target, drafter: DSparkDrafter, ready: Ready, settings: TrainSettings
) -> LossSums:
    """`batch_sums` of a batch that `prepare` has made ready."""
    config, block, batch = drafter.config, ready.block, ready.batch
    inputs = block_inputs(ready.prev[..., 0], config.block_size, config.mask_token_id)
    autocast = torch.autocast(
        target.device.type, torch.bfloat16, enabled=settings.precision == "bf16"
    )
    with autocast:
        hidden = drafter.train_hidden(
            ready.features.taps,
            batch.valid,
            target.embed(inputs),
            batch.anchors.positions,
            batch.anchors.valid,
            ready.padded,
            alike=True,  # as `block_inputs` makes them
        )
    ids = drafter.draft_ids
    # Outside autocast: logits come in the target's dtype, as they do at run time, and the rest in
    # float32.
    return distill_loss(
        hidden.float(),
        ready.features.hidden.flatten(0, 1),
        ready.prev,
        ready.labels,
        block.supervised,
        to_logits=lambda states: target.logits(states.to(target.dtype)),
        markov_head=drafter.markov_head,
        confidence_head=drafter.confidence_head if settings.confidence > 0 else None,
        objective=objective(settings),
        chunk=settings.chunk,
        confidence_detach=settings.confidence_detach,
        vocabulary=None if ids is None else DraftVocabulary(ids),
        to_draft_logits=DraftHead(target, ids).logits,
        target_rows=block.rows,
        head=ready.head,
        imitated=ready.imitated,
        places=ready.places,
    )


def through_head(target: Target, drafter: DSparkDrafter, settings: TrainSettings) -> Tensor | None:
    """The LM head [V, D] if the loss multiplies by it in half precision (`fused_head.py`)."""
    if settings.precision != "bf16" or target.device.type == "cpu":
        return None
    head = target.plain_head()
    return head if fused_head.takes(head, drafter.draft_ids is not None) else None


def _flat_rows(rows: Tensor, length: int) -> Tensor:
    """Positions [B, A, G] of batch rows -> rows of their states side by side, [B S, D]."""
    batch = torch.arange(len(rows), device=rows.device)[:, None, None]
    return batch * length + rows


def zero_sums(block_size: int, device: torch.device) -> LossSums:
    """Sums of nothing, float64."""
    shapes = [() if field.name in SCALARS else (block_size,) for field in fields(LossSums)]
    return LossSums(*(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes))


def to_vector(sums: LossSums) -> Tensor:
    """All sums in one float64 vector, to be reduced in one call."""
    parts = [getattr(sums, f.name).detach().reshape(-1) for f in fields(sums)]
    return torch.cat(parts).double()


def from_vector(vector: Tensor, block_size: int) -> LossSums:
    """The inverse of `to_vector`."""
    shapes = [() if field.name in SCALARS else (block_size,) for field in fields(LossSums)]
    sizes = [block_size if shape else 1 for shape in shapes]
    parts = vector.split(sizes)
    return LossSums(*(part.reshape(s) for part, s in zip(parts, shapes, strict=True)))


def report(sums: LossSums, trained: Objective) -> dict[str, Any]:
    """Averages as they stand in training.json; None where nothing was supervised.

    `loss` is what is minimised. Terms are means by exp(-k / decay) whatever its weights are, so
    that runs compare; those that only some objectives have are there if `trained` has them. Lists
    are per slot. `accepted_length` is tokens per round under teacher forcing.
    """
    total = float(sums.weight.sum())
    weight, count = sums.weight.tolist(), sums.count.tolist()
    terms = {
        "ce": sums.ce.tolist(),
        "tv": (sums.l1 / 2).tolist(),
        "confidence_bce": sums.bce.tolist(),
    }
    for name in ("kl", "reverse_kl", "nla"):
        if getattr(trained, name) > 0:
            terms[name] = getattr(sums, name).tolist()
    return {
        "loss": _ratio(float(sums.objective), float(sums.normaliser)),
        **{name: _ratio(sum(values), total) for name, values in terms.items()},
        "accepted_length": _ratio(float(sums.accepted_length), float(sums.blocks)),
        "acceptance": _ratios(sums.acceptance.tolist(), count),
        **{f"{name}_per_slot": _ratios(values, weight) for name, values in terms.items()},
        "confidence_per_slot": _ratios(sums.confidence.tolist(), count),
    }


def _ratio(total: float, weight: float) -> float | None:
    return total / weight if weight else None


def _ratios(totals: list[float], weights: list[float]) -> list[float | None]:
    return [_ratio(t, w) for t, w in zip(totals, weights, strict=True)]
