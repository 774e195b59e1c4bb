"""From a folder in Hugging Face's layout, or a model in memory, to a target that is right.

Three adapters are tried, the fastest first, and each must give back the model's own logits
(`dspark.runtime.hf_check`) before it is used:

    RowTarget                    attention layers over buffers of ours: batches, trees
    ReplayTarget                 any other cache: restored and run again after a rejection
    ReplayTarget, one by one     caches that take one token at a time once they hold something

A model that fits none is refused with what each of them ran into. So is, before its weights are
read, what is no causal LM of the installed transformers, needs code from its folder, or has its
weights in pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from dspark.errors import UserError
from dspark.runtime.hf_check import failure
from dspark.runtime.hf_replay import ReplayTarget
from dspark.runtime.hf_target import RowTarget

Adapted = RowTarget | ReplayTarget

_ADAPTERS: tuple[tuple[str, Callable[..., Adapted]], ...] = (
    ("as attention layers", RowTarget),
    ("by replay", ReplayTarget),
    ("by replay, token by token", partial(ReplayTarget, one_by_one=True)),
)


def hf_target(
    model: PreTrainedModel,
    *,
    name: str,
    end_token_ids: Sequence[int],
    vocab_size: int | None = None,
) -> Adapted:
    """The adapter that is right for a causal LM of transformers, which it then owns.

    Args:
        model: In the dtype and on the device it will run with.
        name: For messages and records.
        end_token_ids: What ends a text.
        vocab_size: Ids that are tokens, where the model's tables are padded; None: all rows are.

    Raises UserError with the reasons if none of them is.
    """
    reasons: list[str] = []
    for way, adapter in _ADAPTERS:
        try:
            target = adapter(model, name, tuple(end_token_ids), vocab_size)
        except UserError as error:
            problem: str | None = str(error)
        else:
            problem = failure(target)
            if problem is None:
                return target
        if f"{problem}" not in " ".join(reasons):
            reasons.append(f"{way}: {problem}")
    raise UserError(
        f"target {name}: {type(model).__name__} cannot be verified against ({'; '.join(reasons)})"
    )


def open_folder(
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    tokens: int,
    end_token_ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Adapted:
    """Read a folder's weights, all of them, and adapt the model.

    Args:
        config: Its config.json.
        tokens: Ids that the tokenizer knows.

    Raises UserError as `hf_target` does, and for a folder that is incomplete or unsupported.
    """
    _check_kind(folder, config)
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise UserError(
            f"{folder}: no safetensors; "
            + ("pickles are not opened, convert them" if pickled else "the weights are missing")
        )
    with _quiet():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers and safetensors raise whatever they meet
            raise UserError(
                f"{folder}: the model cannot be read ({error})".split("\n")[0]
            ) from None
        _check_complete(folder, report)
        return hf_target(
            model.to(device), name=name, end_token_ids=end_token_ids, vocab_size=tokens
        )


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises UserError for a config.json of something that is no text-only causal LM."""
    kind, where = config.get("model_type"), folder / "config.json"
    if not isinstance(kind, str):
        raise UserError(f"{where}: model_type is missing; expected a causal LM's")
    if config.get("is_encoder_decoder") or kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{where}: {kind} is an encoder-decoder; a target reads and writes one text"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if config.get("auto_map"):
            why = "brings its own code, which is not run"
        else:
            why = "is no causal LM of the installed transformers"
        raise UserError(f"{where}: {kind} {why}")
    wrapped = sorted(key for key in ("vision_config", "audio_config") if config.get(key))
    if wrapped:
        raise UserError(
            f"{where}: {kind} wraps a text model ({', '.join(wrapped)}); save the text model alone"
        )


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Raises UserError where transformers would have started a tensor at random."""
    for what in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(what) or ())
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            there = sorted(map(str, report.get("unexpected_keys") or ()))[:3]
            hint = f"; unused in the files: {', '.join(there)}" if there else ""
            raise UserError(f"{folder}: {what[:-5]} {', '.join(keys[:3])}{more}{hint}")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no remarks of transformers while a model is read."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
