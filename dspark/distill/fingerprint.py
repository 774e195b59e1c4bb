"""Do two tokenizers map text to the same ids? Sizes alone do not tell.

A drafter trained with another tokenizer of the same size is accepted by every shape check and
drafts nonsense. So the whole mapping is compared: token of every id, merges in order, what happens
before and after the model (normaliser, pre-tokenizer, post-processor), and the special ids. Rows
that only pad the table at its end (special tokens after the last shared id) never appear in text
and are allowed, as is another padding token.

A drafter folder keeps the tokenizer and the chat template it was trained with: a few megabytes
beside gigabytes of weights, and the only way to say *which* id differs. Folders from elsewhere may
hold neither; then hashes, where they were recorded, tell at least that something differs.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SPECIAL = ("bos_token_id", "eos_token_id", "unk_token_id")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything listed at the top of the file; equal means the same mapping."""
    content = {
        "tokens": sorted(_tokens(tokenizer).items()),
        "special": [getattr(tokenizer, name) for name in _SPECIAL],
        "marked_special": sorted(_marked_special(tokenizer)),
        **_rules(tokenizer),
    }
    text = json.dumps(content, sort_keys=True)  # ASCII: any token string can be hashed
    return hashlib.sha256(text.encode()).hexdigest()


def compare_tokenizers(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """None when both map text to the same ids, else one sentence naming the first difference."""
    ours, theirs = _tokens(a), _tokens(b)
    for token_id in sorted(ours.keys() | theirs.keys()):
        left, right = ours.get(token_id), theirs.get(token_id)
        if left == right:
            continue
        if right is None and _pads(a, ours, token_id, theirs):
            continue
        if left is None and _pads(b, theirs, token_id, ours):
            continue
        return f"token id {token_id} is {left!a} in one and {right!a} in the other"
    for name in _SPECIAL:
        left_id, right_id = getattr(a, name), getattr(b, name)
        if left_id != right_id:
            return f"{name} is {left_id} in one and {right_id} in the other"
    shared = ours.keys() & theirs.keys() - {a.pad_token_id, b.pad_token_id}
    special = sorted(shared & (_marked_special(a) ^ _marked_special(b)))
    if special:
        return f"token id {special[0]} is special in only one of them"
    return _compare_rules(_rules(a), _rules(b))


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, str]:
    """Name -> text of what a drafter folder keeps: the tokenizer and the chat template."""
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        found = {file: Path(name) / file for file in TOKENIZER_FILES}
        texts = {
            file: path.read_text(encoding="utf-8") for file, path in found.items() if path.is_file()
        }
    return {**texts, "chat_template.jinja": template}


def check_stored_tokenizer(folder: Path | str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the drafter in `folder` keeps a tokenizer; raises UserError if it is another one.

    The message names the first id that differs.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return False
    from transformers import PreTrainedTokenizerFast

    try:
        stored = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{folder}: its tokenizer.json cannot be read ({error!r})") from None
    difference = compare_tokenizers(stored, tokenizer)
    if difference:
        raise UserError(
            f"{folder}: drafts for another tokenizer than the target's: {difference} (the "
            "drafter's first); use the target that it was trained for"
        )
    return True


def _compare_rules(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    for name in sorted(a.keys() | b.keys()):
        left, right = a.get(name), b.get(name)
        if left == right:
            continue
        if isinstance(left, list) and isinstance(right, list):
            place = next(
                (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
                min(len(left), len(right)),
            )
            return f"{name} differ from number {place} on"
        return f"their {name} differs"
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Token of every id, added tokens included."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _marked_special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _pads(
    tokenizer: PreTrainedTokenizerBase,
    tokens: dict[int, str],
    token_id: int,
    other: dict[int, str],
) -> bool:
    """Whether an id that only one side has merely pads its table: special and past the end."""
    return token_id > max(other, default=-1) and token_id in _marked_special(tokenizer)


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything but the vocabulary that decides ids; empty for tokenizers without a backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    state = json.loads(backend.to_str())
    model = {k: v for k, v in state["model"].items() if k not in ("vocab", "merges")}
    rules: dict[str, Any] = {name: state.get(name) for name in _PIPELINE}
    return {**rules, "merges": state["model"].get("merges", []), "model": model}
