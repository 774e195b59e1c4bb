"""What a drafter is: the frozen configuration every part of it is built from.

A drafter reads N taps of its target at an anchor and proposes G tokens in one pass. With the
`attention` backbone its sizes are those of a small Qwen3-style decoder, the layout that DeepSpec,
SpecForge and SGLang exchange; `mla` is the layout of the MLA-native K3 drafter; `kda` is ours.

Letters: N taps, G block slots (`block_size`), D hidden (the target's own), R markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dspark.draft.kinds import backbone_names
from dspark.draft.record import TargetRecord
from dspark.draft.shapes import (
    ACTIVATIONS,
    ATTENTION_KINDS,
    BLOCK_CAUSAL,
    GLA,
    KDAShape,
    MLAShape,
    Yarn,
)
from dspark.taps import TAP_KINDS, TapSet

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_ID_ORIGIN = "completed_layer_0_based"


@dataclass(frozen=True)
class DraftConfig:
    """Shape and meaning of one drafter; impossible combinations raise `ValueError("key: why")`.

    Attributes:
        hidden_size: D, equal to the target's, whose embedding and LM head the drafter shares.
        num_layers: Backbone layers.
        num_attention_heads: Query heads; a multiple of `num_key_value_heads`.
        num_key_value_heads: Key and value heads.
        head_dim: Width of one head; even, because rotary positions turn pairs of channels. `mla`
            has its own widths and does not read it.
        intermediate_size: Width of the SwiGLU MLP.
        vocab_size: V, equal to the target's.
        num_target_layers: Decoder layers of the target.
        target_layer_ids: Taps: 0-based completed layers, ascending, up to num_target_layers-2. The
            last layer is refused: serving engines capture the input of layer id + 1.
        target_tap_kind: What a tap holds, one of `dspark.taps.TAP_KINDS`.
        mask_token_id: Id whose embedding fills the slots after the anchor.
        block_size: G, input slots and proposals of one pass.
        markov_rank: R, rank of the sequential head's logit bias.
        markov_head_type: One of `MARKOV_HEAD_TYPES`.
        enable_confidence_head: Whether a confidence head is built.
        confidence_head_with_markov: Whether it also reads the previous token's markov embedding.
        rms_norm_eps: Epsilon of every norm.
        rope_theta: Base of the rotary frequencies.
        max_position_embeddings: Longest context the drafter claims: the target's, or what YaRN
            stretches to. Nothing is sized by it here, in engines the rotary tables are.
        sample_from_anchor: Slot 0, the anchor, already predicts. The only layout built here.
        layer_id_origin: Written into every checkpoint, so that nobody has to guess an offset.
        target: Which target it was distilled from, where known.
        backbone: `attention`, `mla`, `kda`, or a registered one (`kinds.py`). All but `attention`
            have as many key heads as query heads.
        yarn: Scaling of rotary positions; None is rope type `default`.
        sliding_window: Context positions that a `sliding_attention` layer sees: the last so many
            before the anchor, the same ones for every slot of the block.
        layer_types: Per layer `full_attention` or `sliding_attention`; None: all full.
        block_causal: One of `BLOCK_CAUSAL`: in which layers a slot sees only itself and the slots
            before it, and not the whole block.
        hidden_act: Activation of the MLPs, one of `ACTIVATIONS`.
        mla, kda: Sizes of that backbone; exactly the one that `backbone` names is given.
        draft_vocab_size: Rows of a reduced draft vocabulary, whose map is part of the weights;
            None: the whole one. As many as `vocab_size`, or more where a table is padded, is the
            whole one too and becomes None.
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    target_tap_kind: str
    mask_token_id: int
    block_size: int = 8
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096
    sample_from_anchor: bool = True
    layer_id_origin: str = LAYER_ID_ORIGIN
    target: TargetRecord | None = None
    backbone: str = "attention"
    yarn: Yarn | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    block_causal: str = "none"
    hidden_act: str = "silu"
    mla: MLAShape | None = None
    kda: KDAShape | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if self.draft_vocab_size is not None and self.draft_vocab_size >= self.vocab_size:
            object.__setattr__(self, "draft_vocab_size", None)
        self._check_sizes()
        self._check_meaning()
        self._check_backbone()

    def _check_sizes(self) -> None:
        sizes = (
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "num_target_layers",
            "block_size",
            "markov_rank",
            "max_position_embeddings",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 is needed")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd, rotary positions need pairs")
        # Wide around every published model: what lies outside is a slip, and would only cost
        # acceptance.
        for name, low, high in (("rms_norm_eps", 0, 1e-2), ("rope_theta", 1, 1e12)):
            if not low < getattr(self, name) <= high:
                raise ValueError(
                    f"{name}: {getattr(self, name)} given, it must be above {low} and at most "
                    f"{high:g}"
                )

    def _check_meaning(self) -> None:
        if self.target_tap_kind not in TAP_KINDS:
            raise ValueError(
                f"target_tap_kind: {self.target_tap_kind!r} is unknown, "
                f"expected one of {', '.join(TAP_KINDS)}"
            )
        ids = self.target_layer_ids
        if not ids or any(a >= b for a, b in pairwise(ids)):
            raise ValueError(f"target_layer_ids: {list(ids)} is not strictly ascending")
        last = self.num_target_layers - 1
        for layer in ids:
            if not 0 <= layer < last:
                raise ValueError(
                    f"target_layer_ids: {layer} is outside [0, {last - 1}] for a target of "
                    f"{self.num_target_layers} layers (the last layer cannot be tapped)"
                )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id: {self.mask_token_id} is not in a vocabulary of {self.vocab_size}"
            )
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"markov_head_type: {self.markov_head_type!r} is unknown, "
                f"expected one of {', '.join(MARKOV_HEAD_TYPES)}"
            )
        if not self.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor: false is the slot layout in which the anchor does not "
                "predict; only true is built here"
            )
        if self.layer_id_origin != LAYER_ID_ORIGIN:
            raise ValueError(
                f"layer_id_origin: {self.layer_id_origin!r} is unknown, expected "
                f"{LAYER_ID_ORIGIN!r}; convert the layer ids first"
            )

    def _check_backbone(self) -> None:
        names = backbone_names()
        if self.backbone not in names:
            raise ValueError(
                f"backbone: {self.backbone!r} is unknown, expected one of {', '.join(names)}"
            )
        for name in ("mla", "kda"):
            if (getattr(self, name) is None) == (self.backbone == name):
                raise ValueError(f"{name}: its sizes belong to backbone {name!r} and to no other")
        if self.backbone != "attention" and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_key_value_heads} given, backbone "
                f"{self.backbone!r} has as many as query heads, {self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act: {self.hidden_act!r} is unknown, expected {' or '.join(ACTIVATIONS)}"
            )
        order = GLA if self.kda is None else self.kda.order
        if isinstance(order, int) and order >= self.block_size:
            raise ValueError(
                f"kda.order: {order} given, at most block_size - 1 = "
                f"{self.block_size - 1} (that is exact)"
            )
        self._check_window()
        vocab = self.draft_vocab_size
        if vocab is not None and vocab < 1:
            raise ValueError(f"draft_vocab_size: {vocab} given, at least 1 is needed")

    def _check_window(self) -> None:
        kinds = self.layer_types or ()
        if kinds and len(kinds) != self.num_layers:
            raise ValueError(
                f"layer_types: {len(kinds)} given, one for each of {self.num_layers} layers needed"
            )
        for kind in kinds:
            if kind not in ATTENTION_KINDS:
                raise ValueError(
                    f"layer_types: {kind!r} is unknown, expected {' or '.join(ATTENTION_KINDS)}"
                )
        slides = "sliding_attention" in kinds
        if slides and self.backbone == "kda":
            raise ValueError("layer_types: backbone 'kda' has no sliding layers")
        if self.block_causal not in BLOCK_CAUSAL:
            raise ValueError(
                f"block_causal: {self.block_causal!r} is unknown, "
                f"expected one of {', '.join(BLOCK_CAUSAL)}"
            )
        if self.block_causal != "none" and self.backbone == "kda":
            raise ValueError("block_causal: backbone 'kda' is causal by itself; leave it at 'none'")
        if slides != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window: {self.sliding_window} given; it goes with sliding_attention in "
                "layer_types, one does not make sense without the other"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: {self.sliding_window} given, at least 1 is needed")

    @property
    def draft_vocab(self) -> int:
        """Rows of the drafter's own distribution: the draft vocabulary, or the whole one."""
        return self.draft_vocab_size or self.vocab_size

    def window(self, layer: int) -> int | None:
        """Context positions that layer `layer` sees before the anchor; None: all of them."""
        slides = self.layer_types is not None and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None

    def causal(self, layer: int) -> bool:
        """Whether a slot of layer `layer` sees only itself and the slots before it in its block."""
        if self.block_causal == "sliding":
            return self.window(layer) is not None
        return self.block_causal == "all"

    @property
    def taps(self) -> TapSet:
        """The taps of the target this drafter reads."""
        return TapSet(self.target_layer_ids, self.target_tap_kind)

    @property
    def confidence_inputs(self) -> int:
        """Input width of the confidence head: D, plus R when it reads the markov embedding."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)


def default_tap_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers to tap in a target of `num_layers`: `count` of them, spread evenly over its depth.

    DeepSpec's rule, evenly from 1 to N-3 ([1, 9, 17, 25, 33] of 36). A target too shallow for that
    uses what [0, N-2] holds: fewer taps, never the same one twice, never the last layer.

    Raises:
        ValueError: `num_layers` is 1, where only the untappable last layer exists.
    """
    if num_layers < 2:
        raise ValueError(f"a target of {num_layers} layer(s) has no layer below its last to tap")
    if count < 1:
        raise ValueError(f"count: {count} given, a drafter reads at least one tap")
    low, high = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 2)
    count = min(count, high - low + 1)
    if count == 1:
        return ((low + high) // 2,)
    return tuple(low + round(i * (high - low) / (count - 1)) for i in range(count))
