"""The drafter that a run starts with: the settings' shape, the target's sizes, fresh weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dspark.distill.answers import first_format
from dspark.distill.chat import TrainingRow
from dspark.distill.config import DistillConfig
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.from_target import k3_target
from dspark.distill.settings import DrafterSettings
from dspark.draft.config import DraftConfig, default_tap_ids
from dspark.draft.from_target import check_copyable, target_form
from dspark.draft.model import DSparkDrafter
from dspark.draft.record import TargetRecord
from dspark.draft.shapes import GLA, KDAShape, MLAShape, Yarn
from dspark.draft.start import initialise
from dspark.draft.vocabulary import coverage, most_frequent, token_frequency
from dspark.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark.runtime.target import Target


def new_drafter(
    config: DistillConfig, target: Target, tokenizer: PreTrainedTokenizerBase
) -> DSparkDrafter:
    """A drafter for `target` with fresh weights that depend on the seed alone.

    Raises UserError naming the key of a shape that cannot be built.
    """
    shape = config.drafter
    grouped = shape.backbone == "attention"
    chat = first_format(config.data, tokenizer)
    try:
        draft_config = DraftConfig(
            hidden_size=target.hidden_size,
            backbone=shape.backbone,
            num_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads if grouped else shape.num_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size or _round_up(2.5 * target.hidden_size, 32),
            vocab_size=target.table_size,
            draft_vocab_size=_draft_vocab(shape, target),
            num_target_layers=target.num_layers,
            target_layer_ids=shape.tap_ids or default_tap_ids(target.num_layers),
            target_tap_kind=shape.tap_kind or target.tap_kinds[0],
            mask_token_id=_mask_token(config, target, tokenizer),
            block_size=shape.block_size,
            markov_rank=shape.markov_rank,
            markov_head_type=shape.head,
            confidence_head_with_markov=shape.confidence_with_markov,
            enable_confidence_head=config.train.confidence > 0,
            max_position_embeddings=_longest(config, target),
            target=TargetRecord(
                config.target.name,
                tokenizer_fingerprint(tokenizer),
                chat.fingerprint,
                chat.thinking,
                config.data.max_length,
            ),
            **_backbone_fields(config),
        )
    except ValueError as error:
        raise UserError(f"drafter: {error}") from None
    if shape.init == "target":
        source = k3_target(target).model.config
        check_copyable(draft_config, source)
        draft_config = target_form(draft_config, source)
    if draft_config.target_tap_kind not in target.tap_kinds:
        raise UserError(
            f"drafter.tap_kind is {draft_config.target_tap_kind!r}: target {target.name} has "
            f"{', '.join(target.tap_kinds)}"
        )
    drafter = DSparkDrafter(draft_config)
    generator = torch.Generator().manual_seed(config.train.seed)
    initialise(drafter, generator, shape.init_scale)
    return drafter


def choose_vocabulary(
    drafter: DSparkDrafter,
    training: Sequence[TrainingRow],
    held_out: Sequence[TrainingRow],
    target: Target,
) -> str:
    """Let a fresh drafter of reduced vocabulary propose the ids its rows hold most often.

    The target's end tokens are among them in any case. Returns what that costs, in one line.
    """
    size = drafter.config.draft_vocab
    counts = token_frequency(training, drafter.config.vocab_size)
    ids = most_frequent(counts, size, always=target.end_token_ids)
    drafter.set_draft_ids(ids)
    text = f"draft vocabulary: {size} of {target.vocab_size} ids"
    for name, rows in (("training", training), ("held-out", held_out)):
        found = coverage(rows, ids, drafter.config.block_size)
        if found.share is not None and found.accepted_length is not None:
            text += (
                f"; {100 * found.share:.2f} % of {name} tokens, at most "
                f"{found.accepted_length:.2f} a round"
            )
    return text


def _draft_vocab(shape: DrafterSettings, target: Target) -> int | None:
    """Size of a reduced draft vocabulary; None: there is none."""
    size, ends = shape.draft_vocab, len(target.end_token_ids)
    if size is None:
        return None
    if not ends <= size <= target.table_size:
        raise UserError(
            f"drafter.draft_vocab is {size}: expected {max(ends, 1)}..{target.vocab_size}, the end "
            f"tokens at least and the ids of target {target.name} at most"
        )
    return size if size < target.vocab_size else None


def _backbone_fields(config: DistillConfig) -> dict[str, Any]:
    """Fields of DraftConfig that belong to backbones, and to positions."""
    shape = config.drafter
    if shape.backbone == "kda":
        for name in ("sliding_window", "yarn_factor"):
            if getattr(shape, name) is not None:
                raise ValueError(f"{name}: backbone kda has none; leave it at null")
        return {
            "kda": KDAShape(
                order=GLA if shape.kda_order == GLA else int(shape.kda_order),
                conv_size=shape.kda_conv,
                gate_rank=shape.kda_gate_rank,
                block_softmax=shape.kda_block_softmax,
            )
        }
    fields: dict[str, Any] = {}
    if shape.backbone == "mla":
        # The widths of the published K3 drafter, 128, 64 and 128, at any size.
        fields["mla"] = MLAShape(
            q_lora_rank=shape.mla_q_rank,
            kv_lora_rank=shape.mla_kv_rank,
            qk_nope_head_dim=shape.head_dim,
            qk_rope_head_dim=shape.head_dim // 2,
            v_head_dim=shape.head_dim,
        )
    if shape.sliding_window is not None:
        fields["sliding_window"] = shape.sliding_window
        fields["layer_types"] = ("sliding_attention",) * shape.num_layers
    if shape.yarn_factor is not None:
        # DeepSeek's temperature where the softmax belongs to it, the paper's elsewhere.
        terms = 1.0 if shape.backbone == "mla" else None
        length = config.data.max_length
        fields["yarn"] = Yarn(shape.yarn_factor, length, mscale=terms, mscale_all_dim=terms)
    return fields


def _longest(config: DistillConfig, target: Target) -> int:
    """Tokens of the longest context the drafter claims, which sizes tables of serving engines.

    It is the target's, so that no engine reads past a table or stops drafting early; YaRN claims no
    more than it stretches the rows' length to.
    """
    factor = config.drafter.yarn_factor
    if factor is None:
        return target.max_positions
    return min(int(factor * config.data.max_length), target.max_positions)


def _mask_token(config: DistillConfig, target: Target, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills a block: the tokenizer's mask token, or one that no text ever holds.

    A full vocabulary has no such id. It mostly has special tokens that chats do not use; the last
    of them is taken, and what its embedding happens to hold is as good a start as any.
    """
    if config.drafter.mask_token_id is not None:
        return config.drafter.mask_token_id
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    unused = max(tokenizer.get_vocab().values()) + 1
    if unused < target.table_size:
        return unused
    template = tokenizer.chat_template
    roles = ("bos", "eos", "unk", "sep", "pad", "cls")
    named = {getattr(tokenizer, f"{role}_token_id") for role in roles} | {*target.end_token_ids}
    spare = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in named and token.content not in str(template)
    ]
    if spare:
        return int(max(spare))
    pad = tokenizer.pad_token_id
    hint = "" if pad in (None, tokenizer.eos_token_id) else f", as its padding token, {pad}"
    raise UserError(
        f"target {target.name} has no mask token, no unused id and no special token to spare; name "
        f"an id that its texts do not hold in drafter.mask_token_id{hint}"
    )


def _round_up(value: float, multiple: int) -> int:
    return -(-int(value) // multiple) * multiple
