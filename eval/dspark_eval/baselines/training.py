"""Training the baselines on the rows, steps and seed of a distillation run.

Every baseline sees the rows of every step that the run's drafter saw (`distill.batches`: pure
functions of the seed), with the run's optimiser and schedule, and is made as wide as brings it to
the run's number of trainable parameters.

    dflash   the run's loss, without a sequential head
    eagle3   0.8^k KL(p || q) over the slots of the run's blocks (the paper's soft cross-entropy)
    ar       KL(p || q) at every position whose next token the target wrote (Zhou et al. 2024,
             "DistillSpec", forward KL on the target's own texts)

Letters: B rows, S positions, A anchors, G slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.distill.batches import Batch, Schedule, deal, make_batch
from dspark.distill.fresh import new_drafter
from dspark.distill.loss import distill_loss
from dspark.distill.optim import Optimiser, learning_rate
from dspark.distill.taps import FeatureSource, KeptFeatures, target_features
from dspark.distill.terms import Objective
from dspark.distill.train_settings import TrainSettings
from dspark.distill.trainer import NonFinite, Trainer
from dspark.draft.anchors import blocks
from dspark.draft.config import default_tap_ids
from dspark.draft.model import DSparkDrafter
from dspark.taps import TapSet
from dspark_eval.baselines.dflash import NoHead, without_head
from dspark_eval.baselines.eagle import EagleConfig, EagleModel
from dspark_eval.baselines.rows import RunData
from dspark_eval.equal_size import matched_width

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

STEP_WEIGHT = 0.8
"""EAGLE-3: slot k weighs 0.8^k."""
EAGLE_TAPS = 3
AR_LAYERS = 2


@dataclass(frozen=True)
class Trained:
    """Seconds in steps, and the loss of the last one."""

    seconds: float
    steps: int
    loss: float


BatchLoss = Callable[[Batch], tuple[Tensor, float]]
"""A micro-batch to the sum of its loss, differentiable, and what to divide the step's sums by."""


def fit(module: nn.Module, data: RunData, settings: TrainSettings, loss: BatchLoss) -> Trained:
    """The run's steps. Raises NonFinite if a gradient is not finite."""
    rows = data.rows.training
    schedule = Schedule(
        len(rows), settings.rows_per_step, settings.epochs, settings.max_steps, settings.seed
    )
    optimiser, start, value = Optimiser(module, settings), time.perf_counter(), math.nan
    module.train()
    for step in range(schedule.total_steps):
        epoch, row_ids = schedule.step_rows(step)
        lengths = {i: len(rows[i].ids) for i in row_ids}
        dealt = deal(row_ids, lengths, settings.micro_rows, 0, 1)
        gradients = optimiser.gradients
        gradients.zero(len(dealt))
        total, weight = 0.0, 0.0
        for ids in dealt:
            batch = make_batch(rows, ids, anchors=settings.anchors, seed=settings.seed, epoch=epoch)
            summed, part = loss(batch)
            if part > 0:
                summed.backward()
            gradients.collect()
            total, weight = total + float(summed.detach()), weight + part
        if weight > 0:
            _, bad = gradients.finish(weight, settings.clip)
            if bad is not None:
                raise NonFinite(f"step {step + 1}: gradient of {bad} not finite; lower --lr")
            optimiser.step(learning_rate(step, schedule.total_steps, settings))
            value = total / weight
    optimiser.settle()
    return Trained(time.perf_counter() - start, schedule.total_steps, value)


def train_dflash(data: RunData, goal: int | None) -> tuple[DSparkDrafter, Trained]:
    """The run's drafter without a sequential head; the smallest table of one stays, all zero."""
    bare = {"drafter.head": "vanilla", "drafter.markov_rank": 1, "train.confidence": 0.0}

    def build(width: int | None) -> DSparkDrafter:
        shape = bare if width is None else bare | {"drafter.intermediate_size": width}
        return new_drafter(data.changed(shape), data.loaded.target, data.loaded.tokenizer)

    def size(drafter: nn.Module) -> int:
        return count(drafter) - count(drafter.get_submodule("markov_head"))

    width = None if goal is None else matched_width(lambda w: size(build(w)), goal)
    drafter = without_head(build(width)).to(data.processes.device)
    settings = data.changed(bare).train
    trainer = Trainer(data.loaded.target, drafter, data.rows.training, settings, data.processes)
    start, loss = time.perf_counter(), math.nan
    for step in range(trainer.schedule.total_steps):
        sums = trainer.run_step(step).sums
        loss = float(sums.objective) / max(float(sums.normaliser), 1e-9)
    trainer.optimiser.settle()
    took = time.perf_counter() - start
    return without_head(drafter), Trained(took, trainer.schedule.total_steps, loss)


def train_eagle(data: RunData, goal: int | None) -> tuple[EagleModel, Trained]:
    """One layer of the run's heads over three taps, trained on the run's blocks."""
    target, shape = data.loaded.target, data.config.drafter
    config = EagleConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=4 * target.hidden_size,
        vocab_size=target.vocab_size,
        target_layer_ids=default_tap_ids(target.num_layers, EAGLE_TAPS),
        target_tap_kind=shape.tap_kind or target.tap_kinds[0],
        block_size=shape.block_size,
    )

    def build(width: int) -> EagleModel:
        return EagleModel(replace(config, intermediate_size=width))

    with torch.random.fork_rng(devices=[]):
        width = config.intermediate_size
        if goal is not None:
            width = matched_width(lambda w: count(build(w)), goal)
        torch.manual_seed(data.config.train.seed)
        model = build(width).to(data.processes.device)
    loss = EagleLoss(data, model)
    return model, fit(model, data, data.config.train, loss)


class EagleLoss:
    """Slots of a batch's blocks against the target, the layer running on its own output."""

    def __init__(self, data: RunData, model: EagleModel) -> None:
        self.data, self.model, self.target = data, model, data.loaded.target
        self.source = feature_source(data, model.config.taps)
        self.head = NoHead(self.target.table_size, 1).to(data.processes.device)
        self.head.requires_grad_(False)
        decay = -1 / math.log(STEP_WEIGHT)
        self.objective = Objective(ce=0.0, l1=0.0, confidence=0.0, kl=1.0, decay=decay)

    def __call__(self, batch: Batch) -> tuple[Tensor, float]:
        batch = batch.to(self.data.processes.device)
        features = self.source(batch)
        block = blocks(batch.ids, batch.loss_mask, batch.anchors, self.model.config.block_size)
        embed = self.target.embed
        hidden = self.model.train_hidden(
            features.taps,
            embed(batch.ids).float(),
            embed(block.prev).float(),
            batch.anchors.positions,
        )
        length = batch.ids.shape[1]
        first = torch.arange(len(batch.ids), device=batch.ids.device)[:, None, None] * length
        sums = distill_loss(
            hidden,
            features.hidden.flatten(0, 1),
            block.prev,
            block.labels,
            block.supervised,
            to_logits=lambda states: self.target.logits(states.to(self.target.dtype)),
            markov_head=self.head,
            confidence_head=None,
            objective=self.objective,
            target_rows=first + block.rows,
        )
        return sums.objective, float(sums.normaliser)


def train_ar(data: RunData, goal: int | None) -> tuple[LlamaForCausalLM, Trained]:
    """A small Llama with the target's vocabulary and a table of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    target, shape = data.loaded.target, data.config.drafter

    def build(width: int) -> LlamaForCausalLM:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=target.table_size,
                hidden_size=target.hidden_size,
                intermediate_size=width,
                num_hidden_layers=AR_LAYERS,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=target.max_positions,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=list(target.end_token_ids),
                attn_implementation="sdpa",
            )
        )

    with torch.random.fork_rng(devices=[]):
        width = 2 * target.hidden_size
        if goal is not None:
            width = matched_width(lambda w: count(build(w)), goal)
        torch.manual_seed(data.config.train.seed)
        model = build(width).to(data.processes.device)
    loss = ArLoss(data, model)
    return model, fit(model, data, data.config.train, loss)


class ArLoss:
    """Every position whose next token the target wrote, against the target's own distribution."""

    def __init__(self, data: RunData, model: LlamaForCausalLM) -> None:
        self.data, self.model, self.target = data, model, data.loaded.target
        taps = TapSet((0,), self.target.tap_kinds[0])  # a source gives taps; these are not read
        self.source = feature_source(data, taps)

    def __call__(self, batch: Batch) -> tuple[Tensor, float]:
        batch = batch.to(self.data.processes.device)
        hidden = self.source(batch).hidden
        at = batch.loss_mask[:, 1:]
        # right padding: what stands behind a row's end is seen by no position of it
        states = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(states[:, :-1][at]).float()[:, : self.target.vocab_size]
        wanted = torch.log_softmax(self.target.logits(hidden[:, :-1][at]), dim=-1)
        log_q = torch.log_softmax(logits, dim=-1)
        summed = F.kl_div(log_q, wanted, reduction="sum", log_target=True)
        return summed, float(at.sum())


def feature_source(data: RunData, taps: TapSet) -> FeatureSource:
    """Target states of a batch, kept in memory as the run's own were."""
    target, gib = data.loaded.target, data.config.train.keep_gib
    if gib == 0:
        return lambda batch: target_features(target, batch, taps)
    return KeptFeatures(target, taps, int(gib * 2**30))


def count(module: nn.Module) -> int:
    """Trainable parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters())
