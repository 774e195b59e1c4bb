"""The K3 decoder as a target, and opening a target by name or path."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.assets import asset
from dspark.errors import UserError
from dspark.files import read_json
from dspark.k3.cache import K3Cache
from dspark.k3.checkpoint import load_k3_with_report
from dspark.k3.model import K3ForCausalLM
from dspark.k3.storage import Storage
from dspark.runtime.target import Cache, TargetOutput
from dspark.taps import TapSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = {"nano": "k3-nano"}
"""Names of shipped targets and their folders among the assets."""


class K3Target:
    """A `K3ForCausalLM` behind the `Target` protocol, its projections packed for inference.

    Only the head's logits leave the model's dtype: they are float32 whatever it is.

    Args:
        model: Owned from here on.
        name: For messages and records.
        end_token_ids: What ends a text.
        vocab_size: Ids that are tokens, where the model's tables are padded; None: all rows are.
    """

    supports_trees = True

    def __init__(
        self,
        model: K3ForCausalLM,
        name: str,
        end_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        model.pack_()
        config = model.config
        self.name = name
        self.vocab_size = vocab_size or config.vocab_size
        self.table_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_positions = config.max_position_embeddings
        self.tap_kinds = model.tap_kinds
        self.end_token_ids = end_token_ids
        self.device = model.lm_head.weight.device
        self.dtype = model.lm_head.weight.dtype
        self._head = model.lm_head.weight[: self.vocab_size]

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., D]."""
        return self.model.model.embed_tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32."""
        return F.linear(hidden, self._head).float()

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """See `Target.head`."""
        rows = self._head[ids]
        return lambda hidden: F.linear(hidden, rows).float()

    def new_cache(self, batch: int, max_length: int, storage: Storage | None = None) -> K3Cache:
        """See `Target.new_cache`; ``storage``: where the cache's tensors live (`dspark.k3`)."""
        return self.model.new_cache(batch, max_length, storage)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        """See `Target.forward`; `cache` must come from this target's `new_cache`."""
        if not isinstance(cache, K3Cache):
            raise TypeError(f"expected a K3Cache of this target, got {type(cache).__name__}")
        hidden, tapped = self.model(
            tokens, cache, valid=valid, parents=parents, taps=taps, commit=commit
        )
        return TargetOutput(hidden, tapped)


@dataclass(frozen=True)
class LoadedTarget:
    """A target with the tokenizer that belongs to it and the folder both came from."""

    target: K3Target
    tokenizer: PreTrainedTokenizerBase
    path: Path


def load_tokenizer(name_or_path: str | Path) -> tuple[PreTrainedTokenizerBase, Path]:
    """The tokenizer of a target, without its weights, and the target's folder.

    Raises UserError as `load_target` does.
    """
    # not AutoTokenizer: it would look for a model class of the folder's model_type, and complain
    from transformers import PreTrainedTokenizerFast

    name = str(name_or_path)
    folder = asset(SHIPPED[name]) if name in SHIPPED else Path(name_or_path)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name}: no such target; expected {', '.join(SHIPPED)} or a folder with a config.json"
        )
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: tokenizer.json is missing; put the target's tokenizer there")
    for name_of_file in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name_of_file).exists():
            read_json(folder / name_of_file)  # names file and line, which transformers does not
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder), folder
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{folder}: the tokenizer cannot be read ({error!r})") from None


def load_target(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedTarget:
    """Open a shipped target (`nano`) or a folder with a K3 or Kimi-Linear checkpoint.

    The end token is the tokenizer's: for K3 chats that is <|end_of_msg|>, not [EOS]. Rows of the
    model's tables past the tokenizer's last id are padding and never emitted.

    Raises:
        UserError: no such target, or a folder that is not a complete checkpoint with a tokenizer.
    """
    name = str(name_or_path)
    tokenizer, folder = load_tokenizer(name)
    model, report = load_k3_with_report(folder, dtype=dtype, device=device)
    if report.skipped:
        warnings.warn(
            f"{folder}: {len(report.skipped)} tensors of the vision tower and projector skipped; "
            "only the text decoder is read",
            stacklevel=2,
        )
    ends = {tokenizer.eos_token_id, model.config.eos_token_id} - {None}
    if not ends:
        raise UserError(f"{folder}: neither the tokenizer nor config.json names an end token")
    tokens = min(max(tokenizer.get_vocab().values()) + 1, model.config.vocab_size)
    return LoadedTarget(K3Target(model, name, tuple(sorted(ends)), tokens), tokenizer, folder)
