"""The dimensions of a drafter that can shrink, and every tensor that shrinks with each.

An `Axis` is a row of like units (the heads of a layer, the channels of its MLP, the ranks of the
sequential head). Its `Piece`s say which rows or columns of which tensor belong to a unit. Removing
a unit removes all of them at once, so that what is left computes exactly what the whole drafter
computes with that unit's outputs set to zero. Key-value groups of grouped-query attention are one
unit each, with all their query heads: the ratio stays whole. Embedding and LM head are the target's
and appear nowhere.

Letters: H heads, J key heads, K head dim, D hidden, R markov rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspark.draft.config import DraftConfig
from dspark.draft.kda import kda_shape
from dspark.draft.mla import mla_shape


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that belongs to an axis.

    Unit u owns indices s + u*block .. s + (u+1)*block along `dim`, for every s of `starts`.
    """

    name: str
    dim: int
    block: int = 1
    starts: tuple[int, ...] = (0,)

    def indices(self, units: Iterable[int]) -> list[int]:
        """What those units own along `dim`."""
        return [
            s + u * self.block + i for s in self.starts for u in units for i in range(self.block)
        ]


@dataclass(frozen=True)
class Axis:
    """Units that are removed one by one.

    Attributes:
        name: Such as `layers.0.heads`.
        units: How many there are.
        pieces: All that a unit owns.
        output: The piece through which units act: zero there means no effect at all. None where a
            unit acts through more than a product.
    """

    name: str
    units: int
    pieces: tuple[Piece, ...]
    output: Piece | None


def head_units(config: DraftConfig) -> int:
    """Heads that can be removed from a layer: key-value groups where queries share keys."""
    return config.num_key_value_heads if config.backbone == "attention" else _heads(config)


def axes(config: DraftConfig) -> dict[str, Axis]:
    """Every axis of a drafter, by name."""
    found = [markov_axis(config)]
    for layer in range(config.num_layers):
        found += [head_axis(config, layer), mlp_axis(config, layer)]
    return {axis.name: axis for axis in found}


def head_axis(config: DraftConfig, layer: int) -> Axis:
    """The heads of one layer."""
    prefix = f"layers.{layer}.self_attn"
    widths = _HEAD_WIDTHS[config.backbone](config)
    output = Piece(f"{prefix}.o_proj.weight", 1, widths.pop("o_proj.weight"))
    pieces = [Piece(f"{prefix}.{name}", 0, width) for name, width in widths.items()]
    return Axis(f"layers.{layer}.heads", head_units(config), (*pieces, output), output)


def mlp_axis(config: DraftConfig, layer: int) -> Axis:
    """The channels of one layer's MLP."""
    prefix = f"layers.{layer}.mlp"
    output = Piece(f"{prefix}.down_proj.weight", 1)
    inputs = [Piece(f"{prefix}.{name}_proj.weight", 0) for name in ("gate", "up")]
    return Axis(f"layers.{layer}.mlp", config.intermediate_size, (*inputs, output), output)


def markov_axis(config: DraftConfig) -> Axis:
    """The ranks of the sequential head, and what the confidence head reads of them."""
    rank, width = config.markov_rank, config.hidden_size
    output = Piece("markov_head.markov_w2.weight", 1)
    pieces = [Piece("markov_head.markov_w1.weight", 1)]
    if config.markov_head_type == "gated":
        gate = "markov_head.gate_proj"
        pieces += [Piece(f"{gate}.weight", 0), Piece(f"{gate}.bias", 0)]
        pieces += [Piece(f"{gate}.weight", 1, starts=(width,))]
    elif config.markov_head_type == "rnn":
        joint, parts = "markov_head.joint_proj", (0, rank, 2 * rank)
        pieces += [Piece(f"{joint}.weight", 0, starts=parts), Piece(f"{joint}.bias", 0, 1, parts)]
        pieces += [Piece(f"{joint}.weight", 1, starts=(0, rank))]
    if config.enable_confidence_head and config.confidence_head_with_markov:
        pieces += [Piece("confidence_head.proj.weight", 1, starts=(width,))]
    return Axis("markov", rank, (*pieces, output), output)


def channel_axis(config: DraftConfig, layer: int) -> Axis:
    """The channels inside the heads of a `kda` layer, the same one of every head at once.

    Unit c is channel c of keys and queries and of values and gates. Unlike heads, channels share
    norms with each other: what is left computes something near, not the same with zeros.
    """
    prefix, width = f"layers.{layer}.self_attn", config.head_dim
    starts = tuple(head * width for head in range(config.num_attention_heads))
    names = [name for name, block in _kda_widths(config).items() if block > 1]
    names.remove("o_proj.weight")
    pieces = [Piece(f"{prefix}.{name}", 0, 1, starts) for name in names]
    pieces += [Piece(f"{prefix}.o_proj.weight", 1, 1, starts), Piece(f"{prefix}.o_norm.weight", 0)]
    return Axis(f"layers.{layer}.channels", width, tuple(pieces), None)


def _heads(config: DraftConfig) -> int:
    return config.num_attention_heads


def _attention_widths(config: DraftConfig) -> dict[str, int]:
    shared = config.num_attention_heads // config.num_key_value_heads
    key = config.head_dim
    return {
        "q_proj.weight": shared * key,
        "k_proj.weight": key,
        "v_proj.weight": key,
        "o_proj.weight": shared * key,
    }


def _mla_widths(config: DraftConfig) -> dict[str, int]:
    shape = mla_shape(config)
    widths = {
        "q_b_proj.weight": shape.qk_nope_head_dim + shape.qk_rope_head_dim,
        "kv_b_proj.weight": shape.qk_nope_head_dim + shape.v_head_dim,
        "o_proj.weight": shape.v_head_dim,
    }
    return widths | ({"g_proj.weight": shape.v_head_dim} if shape.output_gate else {})


def _kda_widths(config: DraftConfig) -> dict[str, int]:
    wide: Sequence[str] = (
        *(f"{name}_proj.weight" for name in "qkvgo"),
        *(f"{name}_conv1d.weight" for name in "qkv"),
        "f_b_proj.weight",
        "dt_bias",
    )
    scalars = ["b_proj.weight", "A_log"]
    if kda_shape(config).block_softmax:
        scalars += ["softmax_sharpness", "softmax_gain"]
    return dict.fromkeys(wide, config.head_dim) | dict.fromkeys(scalars, 1)


_HEAD_WIDTHS = {"attention": _attention_widths, "mla": _mla_widths, "kda": _kda_widths}
"""Per backbone: tensors of a layer's attention and the width of one unit in them."""
