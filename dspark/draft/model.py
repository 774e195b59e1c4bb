"""The DSpark drafter: taps of the target in, one block of hidden states out.

    c = hidden_norm(fc([tap_1 ; ... ; tap_N]))        context feature of one position
    h = norm(backbone([embed(anchor), embed(mask), ...], c before the anchor))

Logits of slot k are the target's LM head on h_k plus the bias of the sequential head; both
embedding and LM head belong to the target and are not stored here. With a reduced draft vocabulary
they are logits of those ids alone (`vocabulary.py`). Training runs all blocks of a row at once
(`train_hidden`), drafting one block against an incremental context (`extend`, `block_hidden`); the
two agree to rounding. (DSpark paper; layout and tensor names of DeepSpec.)

Letters: B batch, S context, A anchors, G slots, D hidden, N taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark import ops
from dspark.draft import passes
from dspark.draft.attention import RMSNorm
from dspark.draft.backbone import build_backbone, build_layers
from dspark.draft.calibration import Calibration
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.heads import ConfidenceHead, sequential_head
from dspark.draft.packed import project
from dspark.draft.vocabulary import vocabulary_ids, vocabulary_maps
from dspark.k3.storage import Storage
from dspark.taps import TapSet

INIT_STD = 0.02
"""Standard deviation of fresh weights, Qwen3's `initializer_range`."""


class DSparkDrafter(nn.Module):
    """A backbone with a sequential and a confidence head.

    Fresh weights are normal with `INIT_STD`, norms one and the confidence bias zero, drawn from
    torch's global generator.

    Attributes:
        config: Its shape and meaning.
        markov_head: Sequential head.
        confidence_head: None when the config leaves it out, so that nothing is trained unused.
        backbone: Runs `layers`; holds no weights.
        calibration: What its confidence is worth, once measured. It belongs to these weights: who
            changes them sets it to None.
        d2t, t2d: Maps of a reduced draft vocabulary, as in `vocabulary.py`; only it has them.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = build_layers(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.markov_head = sequential_head(config)
        self.confidence_head = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(width, config.confidence_inputs - width)
        self.backbone = build_backbone(config, self.layers)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            first = torch.arange(config.vocab_size) < config.draft_vocab_size
            self.register_buffer("t2d", first)
        self.calibration: Calibration | None = None
        self.apply(_initialise)

    @property
    def taps(self) -> TapSet:
        """What the target has to deliver."""
        return self.config.taps

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids of a reduced draft vocabulary, [V'] int64 ascending; None: all of them."""
        return None if self.config.draft_vocab_size is None else vocabulary_ids(self.d2t)

    def set_draft_ids(self, ids: Tensor) -> None:
        """Say which target ids [V'] a fresh drafter of reduced vocabulary proposes.

        Until then they are the first V'. Raises ValueError for ids that do not ascend strictly, lie
        outside the target's, or are not V' many.
        """
        if len(ids) != self.config.draft_vocab_size:
            raise ValueError(
                f"{len(ids)} draft ids given, draft_vocab_size is {self.config.draft_vocab_size}"
            )
        self.d2t, self.t2d = vocabulary_maps(ids.to(self.d2t.device), self.config.vocab_size)

    def features(self, taps: Tensor) -> Tensor:
        """Context features c of concatenated taps, ascending layer id: [..., N*D] -> [..., D]."""
        taps = taps.to(self.fc.weight.dtype)
        if not torch.is_grad_enabled() and taps.dim() == 3:
            projected = project(taps, self.fc.weight)
        else:
            projected = self.fc(taps)
        norm = self.hidden_norm
        kinds = projected.dtype, norm.weight.dtype
        if kinds == (torch.bfloat16, torch.float32) and ops.by_kernel("norm_rows", projected):
            return passes.normed(projected, norm.weight, norm.eps)
        normed: Tensor = norm(projected)
        return normed

    def new_context(
        self, batch: int, max_length: int, storage: Storage | None = None
    ) -> DraftContext:
        """An empty context for `batch` texts of at most `max_length` tokens.

        It drafts with the weights of this moment; after training further, make a new one.
        `storage`: where its tensors live; None: in memory of its own.
        """
        return self.backbone.new_context(batch, max_length, storage)

    @torch.no_grad()
    def extend(
        self, context: DraftContext, features: Tensor, counts: int | Tensor | None = None
    ) -> None:
        """Appends committed positions to a context, in place.

        Args:
            context: Of this drafter.
            features: [B, n, N*D] concatenated taps of the positions after the context's lengths.
            counts: Rows to keep, from the first: one number, [B] numbers, or None for all n.

        Raises:
            ValueError: counts outside 0..n, or more positions than the context was made for.
        """
        kept = context.counts(features.shape[1], counts)
        if isinstance(kept, list):
            features = features[:, : max(kept)]
        rows, device = features.shape[1], features.device
        if rows == 0:
            return
        if isinstance(kept, Tensor) or min(kept) < rows:
            # Nothing beyond a count is used, but some of it is computed: keep it finite.
            keep = torch.arange(rows, device=device) < torch.as_tensor(kept, device=device)[:, None]
            features = features.masked_fill(~keep[..., None], 0)
        self.backbone.extend(context, self.features(features), kept)
        context.move(kept)

    @torch.no_grad()
    def block_hidden(self, block_embeds: Tensor, context: DraftContext) -> Tensor:
        """Final-normed hidden states of one block per row, anchored at the context's length.

        Args:
            block_embeds: [B, G, D] target embeddings of [anchor, mask, ..., mask]. The block runs
                at its full trained size: a shorter draft is cut from its result.
            context: Holds exactly the positions before the anchor. Its lengths do not change.

        Returns:
            [B, G, D]; slot k predicts position length+1+k.
        """
        batch, slots, _ = block_embeds.shape
        if slots != self.config.block_size or batch != context.batch:
            raise ValueError(
                f"block of shape [{batch}, {slots}]: batch {context.batch} and the trained block "
                f"size {self.config.block_size} are needed; cut a shorter draft from the full block"
            )
        hidden = self.backbone.block(block_embeds.to(self.fc.weight.dtype), context)
        return self.norm(hidden)

    def train_hidden(
        self,
        features: Tensor,
        valid: Tensor,
        block_embeds: Tensor,
        anchors: Tensor,
        anchor_valid: Tensor,
        padded: bool = True,
        alike: bool = False,
    ) -> Tensor:
        """Final-normed hidden states of all blocks of a batch, in one differentiable pass.

        Args:
            features: [B, S, N*D] concatenated taps; row s of a batch row is its position s, so
                padding goes on the right.
            valid: [B, S] bool, real positions.
            block_embeds: [B, A, G, D] target embeddings of every block's input ids.
            anchors: [B, A] int64 positions p; a block sees valid positions before p and itself.
            anchor_valid: [B, A] bool.
            padded: False promises that all of `valid` and `anchor_valid` is true.
            alike: Promises that slots 1.. of all blocks have the same embedding, that of the mask.

        Returns:
            [B, A, G, D]; exactly zero, with zero gradient, where an anchor is not valid.
        """
        slots = block_embeds.shape[2]
        if slots != self.config.block_size:
            raise ValueError(f"blocks of {slots} slots given, {self.config.block_size} are trained")
        # Whatever a target leaves in its padding rows, 0 * NaN must not reach a gradient.
        if padded:
            features = features.masked_fill(~valid[..., None], 0)
        context = self.features(features)
        # The dtype of a norm: the residual stream may be wider than the matrices.
        embeds = block_embeds.to(self.norm.weight.dtype)
        hidden = self.norm(self.backbone.train(embeds, context, valid, anchors, alike))
        return hidden.masked_fill(~anchor_valid[..., None, None], 0) if padded else hidden


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
