"""The knobs of a distillation run, one frozen dataclass per section, each value checked.

Defaults are sized for the shipped nano target on two CPU cores; eval/LOG.md has the measurements
that chose them. (How it is trained: `train_settings.py`.) A field's description travels with it
into the saved `run.yaml`. Raises UserError naming the key, its value and what was expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from dspark.distill.options import check, check_at_least, option
from dspark.draft.config import MARKOV_HEAD_TYPES
from dspark.draft.kinds import BACKBONES, backbone_names
from dspark.draft.shapes import GLA, INIT_SCALES
from dspark.seeds import check_seed

INITS = ("random", "target")
"""What a drafter without `init_from` starts as."""


@dataclass(frozen=True)
class TargetSettings:
    """The model whose distribution the drafter learns."""

    name: str = option("nano", "shipped target `nano` or the folder of a checkpoint")
    dtype: str = option("float32", "float32 | bfloat16: dtype of the target's weights")
    device: str = option("auto", "auto | cpu | cuda: where target and drafter live")

    def __post_init__(self) -> None:
        check(bool(self.name), "target.name is empty: expected `nano` or a checkpoint folder")
        check(
            self.dtype in ("float32", "bfloat16"),
            f"target.dtype is {self.dtype!r}: expected float32 or bfloat16",
        )
        check(
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
    greedy: float = option(0.0, "share of the prompts answered at temperature 0, by whole parts")
    top_p: float = option(1.0, "nucleus of the answers; 1 keeps everything")
    top_k: int = option(0, "top-k of the answers; 0 keeps everything")
    max_new_tokens: int = option(224, "longest answer, in tokens")
    max_length: int = option(320, "longest row (prompt and answer), in tokens; longer ones are cut")
    min_supervised: int = option(4, "rows with fewer supervised tokens, once cut, are dropped")
    batch_size: int = option(128, "prompts answered at once")
    seed: int | None = option(None, "decides answers and held-out rows; null: train.seed")
    held_out: int = option(32, "rows kept away from training, for evaluation")

    def __post_init__(self) -> None:
        check_at_least("data", self, 1, "max_prompts", "max_new_tokens", "batch_size")
        check_at_least("data", self, 0, "temperature", "top_k", "held_out")
        if self.seed is not None:
            check_seed("data.seed", self.seed)
        check_at_least("data", self, 2, "min_supervised")
        check_at_least("data", self, self.min_supervised + 1, "max_length")
        check(
            self.responses in ("regenerate", "given"),
            f"data.responses is {self.responses!r}: expected regenerate or given",
        )
        check(0 <= self.greedy <= 1, f"data.greedy is {self.greedy}: expected a share of 0 to 1")
        check(0 < self.top_p <= 1, f"data.top_p is {self.top_p}: expected 0 < top_p <= 1")
        check(
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
    init: str = option("random", "random | target: kda only, layers start as pruned target layers")
    init_layers: tuple[int, ...] | None = option(
        None, "init target: ids of the target's KDA layers (0-based) to start from; null: chosen"
    )
    init_scale: str = option("fan_in", "fan_in | normal: fresh weights by fan-in, or all at 0.02")
    init_from: str | None = option(None, "drafter folder whose weights to start from; null: fresh")

    def __post_init__(self) -> None:
        check_at_least(
            "drafter", self, 1, "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "intermediate_size", "markov_rank", "block_size", "sliding_window", "yarn_factor",
            "mla_q_rank", "mla_kv_rank", "kda_conv", "kda_gate_rank", "draft_vocab",
        )  # fmt: skip
        words = {
            "backbone": backbone_names(),
            "head": MARKOV_HEAD_TYPES,
            "init": INITS,
            "init_scale": INIT_SCALES,
        }
        for name, known in words.items():
            value = getattr(self, name)
            check(value in known, f"drafter.{name} is {value!r}: expected {' or '.join(known)}")
        for entry in fields(self):
            owner = entry.name.partition("_")[0]
            if owner in BACKBONES and owner != self.backbone:
                check(
                    getattr(self, entry.name) == entry.default,
                    f"drafter.{entry.name} is {getattr(self, entry.name)!r}: it has no effect with "
                    f"backbone {self.backbone}; leave it out, or set drafter.backbone={owner}",
                )
        order = self.kda_order
        check(
            order == GLA or (order.isdecimal() and int(order) < self.block_size),
            f"drafter.kda_order is {order!r}: expected 0..{self.block_size - 1} or {GLA}",
        )
        check_at_least("drafter", self, 0, "mask_token_id")
        self._check_init()
        check(self.init_from != "", "drafter.init_from is empty: expected a folder, or null")
        check(
            self.backbone != "attention" or self.num_heads % self.num_kv_heads == 0,
            f"drafter.num_heads is {self.num_heads}: expected a multiple of drafter.num_kv_heads, "
            f"{self.num_kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"drafter.head_dim is {self.head_dim}: expected an even one")

    def _check_init(self) -> None:
        if self.init == "random":
            check(
                self.init_layers is None,
                f"drafter.init_layers is {list(self.init_layers or ())}: expected null with "
                "drafter.init random",
            )
            return
        check(
            self.backbone == "kda",
            f"drafter.init is target: expected drafter.backbone kda, not {self.backbone}",
        )
        check(
            self.init_from is None,
            "drafter.init is target and drafter.init_from is given: one start only; leave one out",
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
    rows: int = option(
        1, "rows that go through the target together; states change in the last bits"
    )

    def __post_init__(self) -> None:
        check(
            self.mode in ("online", "cached"),
            f"cache.mode is {self.mode!r}: expected online or cached",
        )
        check(
            self.dtype in ("float32", "bfloat16", "float8"),
            f"cache.dtype is {self.dtype!r}: expected float32, bfloat16 or float8",
        )
        check(self.dir != "", "cache.dir is empty: expected a folder, or null")
        check_at_least("cache", self, 0, "max_gib")
        check_at_least("cache", self, 1, "rows")


@dataclass(frozen=True)
class EvalSettings:
    """What is measured while training."""

    every: int = option(300, "steps between evaluations; the last step is always evaluated")
    prompts: int = option(12, "held-out prompts decoded with the real loop")
    max_new_tokens: int = option(96, "longest answer decoded")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "sampling temperatures decoded at")
    draft_length: int = option(7, "proposals per round, at most drafter.block_size")
    calibrate: bool = option(True, "at the end, fit the confidence on all held-out prompts")

    def __post_init__(self) -> None:
        check_at_least("eval", self, 1, "every", "max_new_tokens", "draft_length")
        check_at_least("eval", self, 0, "prompts")
        for value in self.temperatures:
            check(
                math.isfinite(value) and value >= 0,
                f"eval.temperatures holds {value}: expected numbers of at least 0",
            )


@dataclass(frozen=True)
class OutSettings:
    """Where the run lives."""

    dir: str = option("runs/nano-drafter", "run folder; becomes the drafter's checkpoint folder")
    checkpoint_every: int = option(150, "steps between resumable checkpoints")
    keep: int = option(2, "resumable checkpoints kept")
    tensorboard: bool = option(False, "also write the records as Tensorboard events")

    def __post_init__(self) -> None:
        check(bool(self.dir), "out.dir is empty: expected a folder")
        check_at_least("out", self, 1, "checkpoint_every", "keep")
