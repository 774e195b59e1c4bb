"""The knobs of a distillation run, one frozen dataclass per section, each value checked.

Defaults are sized for the shipped nano target on two CPU cores; eval/LOG.md has the measurements
that chose them. (DeepSpec's recipe is ce 0.1, confidence_detach false and every anchor.) A field's
description travels with it into the saved `run.yaml`. Raises UserError naming the key, its value
and what was expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.distill.terms import SLOT_WEIGHTS
from dspark.draft.config import BACKBONES, MARKOV_HEAD_TYPES
from dspark.draft.shapes import GLA
from dspark.errors import UserError

TOKEN_TERMS = ("ce", "tv", "kl", "reverse_kl", "nla", "lk_hybrid", "length")
"""Weights in TrainSettings that teach the drafter tokens."""


def option(default: Any, doc: str) -> Any:
    """A dataclass field that carries its one-line description into `run.yaml`."""
    return field(default=default, metadata={"doc": doc})


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise UserError(what)


def _check_at_least(section: str, settings: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            _check(
                math.isfinite(value) and value >= low,
                f"{section}.{name} is {value}: expected at least {low}",
            )


@dataclass(frozen=True)
class TargetSettings:
    """The model whose distribution the drafter learns."""

    name: str = option("nano", "shipped target `nano` or the folder of a checkpoint")
    dtype: str = option("float32", "float32 | bfloat16: dtype of the target's weights")
    device: str = option("auto", "auto | cpu | cuda: where target and drafter live")

    def __post_init__(self) -> None:
        _check(bool(self.name), "target.name is empty: expected `nano` or a checkpoint folder")
        _check(
            self.dtype in ("float32", "bfloat16"),
            f"target.dtype is {self.dtype!r}: expected float32 or bfloat16",
        )
        _check(
            self.device in ("auto", "cpu", "cuda"),
            f"target.device is {self.device!r}: expected auto, cpu or cuda",
        )


@dataclass(frozen=True)
class DataSettings:
    """Prompts, and how the target answers them."""

    prompts: tuple[str, ...] = option((), "JSONL files; empty means the shipped training prompts")
    max_prompts: int | None = option(1600, "use this many prompts, spread evenly; null means all")
    strict: bool = option(False, "stop at the first bad row instead of skipping and counting it")
    responses: str = option("regenerate", "regenerate: the target answers | given: file's answers")
    thinking: Literal["off", "on", "both"] = option(
        "off", "the chat template's thinking switch; both: every prompt once each way"
    )
    template: str | None = option(None, "chat template: a file or a shipped name; null: target's")
    temperature: float = option(1.0, "of the answers; 1 is the distribution that TV is measured on")
    top_p: float = option(1.0, "nucleus of the answers; 1 keeps everything")
    top_k: int = option(0, "top-k of the answers; 0 keeps everything")
    max_new_tokens: int = option(224, "longest answer, in tokens")
    max_length: int = option(320, "longest row (prompt and answer), in tokens; longer ones are cut")
    min_supervised: int = option(4, "rows with fewer supervised tokens, once cut, are dropped")
    batch_size: int = option(128, "prompts answered at once")
    seed: int | None = option(None, "decides answers and held-out rows; null: train.seed")
    held_out: int = option(32, "rows kept away from training, for evaluation")

    def __post_init__(self) -> None:
        _check_at_least("data", self, 1, "max_prompts", "max_new_tokens", "batch_size")
        _check_at_least("data", self, 0, "temperature", "top_k", "held_out", "seed")
        _check_at_least("data", self, 2, "min_supervised")
        _check_at_least("data", self, self.min_supervised + 1, "max_length")
        _check(
            self.responses in ("regenerate", "given"),
            f"data.responses is {self.responses!r}: expected regenerate or given",
        )
        _check(0 < self.top_p <= 1, f"data.top_p is {self.top_p}: expected 0 < top_p <= 1")
        _check(
            self.max_prompts is None or self.held_out < self.max_prompts,
            f"data.held_out is {self.held_out}: expected less than data.max_prompts, "
            f"{self.max_prompts}",
        )


@dataclass(frozen=True)
class DrafterSettings:
    """Shape of the drafter; its hidden size and vocabulary are the target's."""

    backbone: str = option("attention", "attention | mla | kda")
    num_layers: int = option(2, "layers of the backbone")
    num_heads: int = option(6, "query heads")
    num_kv_heads: int = option(2, "attention: key/value heads; divides num_heads")
    head_dim: int = option(32, "channels per head; mla: half as many rotated ones beside them")
    sliding_window: int | None = option(None, "not kda: context positions seen; null: all")
    yarn_factor: float | None = option(
        None, "not kda: positions stretched to so many times data.max_length; null: as they are"
    )
    mla_q_rank: int = option(48, "mla: width of the query latent")
    mla_kv_rank: int = option(32, "mla: width of the key-value latent, what the context keeps")
    kda_order: str = option("0", "kda: terms of the block's series, 0..block_size-1, or gla")
    kda_conv: int = option(4, "kda: rows of the short convolution")
    kda_gate_rank: int = option(32, "kda: width of the low-rank decay projection")
    kda_block_softmax: bool = option(False, "kda: also a small softmax attention in the block")
    intermediate_size: int | None = option(None, "MLP width; null: 2.5 x hidden")
    head: str = option("vanilla", "vanilla | gated | rnn: the sequential head")
    markov_rank: int = option(48, "rank of the previous-token bias")
    draft_vocab: int | None = option(
        None, "target ids it can propose, the most frequent of the answers; null: all"
    )
    confidence_with_markov: bool = option(True, "the confidence head reads the previous token")
    block_size: int = option(8, "proposals per round that the drafter is trained for")
    tap_ids: tuple[int, ...] | None = option(None, "target layers it reads (0-based); null: spread")
    tap_kind: str | None = option(None, "kind of tap; null means the target's first kind")
    mask_token_id: int | None = option(None, "id that fills the block; null: an unused id")
    init_from: str | None = option(None, "drafter folder whose weights to start from; null: fresh")

    def __post_init__(self) -> None:
        _check_at_least(
            "drafter", self, 1, "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "intermediate_size", "markov_rank", "block_size", "sliding_window", "yarn_factor",
            "mla_q_rank", "mla_kv_rank", "kda_conv", "kda_gate_rank", "draft_vocab",
        )  # fmt: skip
        for name, known in (("backbone", BACKBONES), ("head", MARKOV_HEAD_TYPES)):
            value = getattr(self, name)
            _check(value in known, f"drafter.{name} is {value!r}: expected {' or '.join(known)}")
        order = self.kda_order
        _check(
            order == GLA or (order.isdecimal() and int(order) < self.block_size),
            f"drafter.kda_order is {order!r}: expected 0..{self.block_size - 1} or {GLA}",
        )
        _check_at_least("drafter", self, 0, "mask_token_id")
        _check(self.init_from != "", "drafter.init_from is empty: expected a folder, or null")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"drafter.num_heads is {self.num_heads}: expected a multiple of drafter.num_kv_heads, "
            f"{self.num_kv_heads}",
        )
        _check(self.head_dim % 2 == 0, f"drafter.head_dim is {self.head_dim}: expected an even one")


@dataclass(frozen=True)
class TrainSettings:
    """Loss, batch and optimiser. One optimiser step is one global batch of `rows_per_step` rows."""

    epochs: int = option(6, "passes over the training rows")
    max_steps: int | None = option(None, "end the schedule at this step; null: epochs only")
    rows_per_step: int = option(8, "rows in one optimiser step, over all processes")
    micro_rows: int = option(8, "rows in one forward pass; a memory limit, nothing else")
    anchors: int = option(16, "blocks trained per row")
    lr: float = option(2.5e-3, "peak learning rate")
    beta1: float = option(0.9, "AdamW decay of the first moment")
    beta2: float = option(0.95, "AdamW decay of the second moment")
    eps: float = option(1e-8, "AdamW epsilon")
    weight_decay: float = option(0.0, "decoupled weight decay")
    warmup: float = option(0.04, "share of all steps with a rising learning rate")
    clip: float = option(1.0, "largest gradient norm")
    precision: str = option("fp32", "fp32 | bf16: dtype of matmuls; weights and moments stay fp32")
    ce: float = option(0.5, "weight of the cross-entropy with the row's own tokens")
    tv: float = option(0.9, "weight of 2 TV between drafter and target")
    confidence: float = option(1.0, "weight of the confidence loss")
    kl: float = option(0.0, "weight of KL(target || drafter)")
    reverse_kl: float = option(0.0, "weight of KL(drafter || target)")
    nla: float = option(0.0, "weight of -log(1 - TV), the negative log acceptance")
    lk_hybrid: float = option(0.0, "weight of s KL + (1 - s) TV, s = exp(-3 (1 - TV))")
    length: float = option(0.0, "weight of minus the drafted tokens expected to be accepted")
    slot_weights: str = option("decay", "decay: exp(-k / decay) | dpace: by how far a block gets")
    confidence_detach: bool = option(True, "stop the confidence gradient before the backbone")
    decay: float = option(4.0, "slot k weighs exp(-k / decay)")
    keep_gib: float = option(2.0, "with several epochs: memory for target states; 0 keeps none")
    chunk: int | None = option(None, "supervised slots whose logits exist at once; null: by bytes")
    seed: int = option(0, "decides initial weights, row order, anchors and answers")
    sharded: bool = option(False, "share gradients and moments out among the processes")
    log_every: int = option(10, "steps between records in training.json")

    def __post_init__(self) -> None:
        _check_at_least(
            "train", self, 1, "epochs", "max_steps", "rows_per_step", "micro_rows", "anchors",
            "chunk", "log_every",
        )  # fmt: skip
        _check_at_least(
            "train", self, 0, "weight_decay", "confidence", "seed", "keep_gib", *TOKEN_TERMS
        )
        _check(self.seed < 2**63, f"train.seed is {self.seed}: expected less than 2^63")
        for name in ("lr", "eps", "clip", "decay"):
            value = getattr(self, name)
            _check(
                math.isfinite(value) and value > 0,
                f"train.{name} is {value}: expected a finite number above 0",
            )
        for name in ("beta1", "beta2", "warmup"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"train.{name} is {value}: expected 0 <= {name} < 1")
        _check(
            self.precision in ("fp32", "bf16"),
            f"train.precision is {self.precision!r}: expected fp32 or bf16",
        )
        _check(
            self.slot_weights in SLOT_WEIGHTS,
            f"train.slot_weights is {self.slot_weights!r}: expected {' or '.join(SLOT_WEIGHTS)}",
        )
        _check(
            any(getattr(self, name) > 0 for name in TOKEN_TERMS),
            f"train.{', '.join(TOKEN_TERMS)} are all 0: the drafter would learn no tokens",
        )


@dataclass(frozen=True)
class CacheSettings:
    """Where the target's states come from: computed at every use, or kept on disk for all epochs.

    A token needs (taps + 1) x hidden x bytes of the dtype: 2 for bfloat16, 1 for float8.
    """

    mode: str = option("online", "online: run the target | cached: run it once, states on disk")
    dtype: str = option("bfloat16", "float32 | bfloat16 | float8 (e4m3, a scale per token and tap)")
    dir: str | None = option(None, "folder of the states, which runs may share; null: in the run's")
    max_gib: float = option(50.0, "largest cache that is written; a larger one is refused")

    def __post_init__(self) -> None:
        _check(
            self.mode in ("online", "cached"),
            f"cache.mode is {self.mode!r}: expected online or cached",
        )
        _check(
            self.dtype in ("float32", "bfloat16", "float8"),
            f"cache.dtype is {self.dtype!r}: expected float32, bfloat16 or float8",
        )
        _check(self.dir != "", "cache.dir is empty: expected a folder, or null")
        _check_at_least("cache", self, 0, "max_gib")


@dataclass(frozen=True)
class EvalSettings:
    """What is measured while training."""

    every: int = option(300, "steps between evaluations; the last step is always evaluated")
    prompts: int = option(12, "held-out prompts decoded with the real loop")
    max_new_tokens: int = option(96, "longest answer decoded")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "sampling temperatures decoded at")
    draft_length: int = option(7, "proposals per round, at most drafter.block_size")

    def __post_init__(self) -> None:
        _check_at_least("eval", self, 1, "every", "max_new_tokens", "draft_length")
        _check_at_least("eval", self, 0, "prompts")
        for value in self.temperatures:
            _check(
                math.isfinite(value) and value >= 0,
                f"eval.temperatures holds {value}: expected numbers of at least 0",
            )


@dataclass(frozen=True)
class OutSettings:
    """Where the run lives."""

    dir: str = option("runs/nano-drafter", "run folder; becomes the drafter's checkpoint folder")
    checkpoint_every: int = option(150, "steps between resumable checkpoints")
    keep: int = option(2, "resumable checkpoints kept")

    def __post_init__(self) -> None:
        _check(bool(self.dir), "out.dir is empty: expected a folder")
        _check_at_least("out", self, 1, "checkpoint_every", "keep")
