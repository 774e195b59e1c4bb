"""Where a chat template comes from, and whether it can work with a tokenizer at all.

The tokenizer's own, or one named by ``data.template``: a file, or a shipped one
(``data/templates/NAME.jinja``) for targets that come without. A template may open with

    {#- tokens: <|open|> <|close|> -#}

and is then refused for a tokenizer in which one of these is not a single token: its turn tags would
reach the target as ordinary text. By the same line a shipped template is found, with a warning, for
a tokenizer that has none of its own.

Templates may ask for today's date. A prompt that depends on the day it is read is no prompt to
compare or to resume with, so the date is always that of Llama's own fallback, 26 Jul 2024.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.assets import assets_root
from dspark.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINKING = ("off", "on", "both")
"""Settings of the thinking switch; both answers every prompt once with and once without."""

_SUFFIX = ".jinja"
_TOKENS = re.compile(r"\{#-?\s*tokens:(.*?)-?#\}", re.DOTALL)
_NO_CLOCK = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}\n"


def chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> str:
    """Text of the template to render with; ``name`` is a shipped name, a file or None.

    Raises ``UserError`` when there is none, or when its turn tags are no tokens of ``tokenizer``.
    """
    text = _own(tokenizer) if name is None else _named(name)
    absent = missing_tokens(text, tokenizer)
    if absent:
        raise UserError(
            f"chat template {name or label(tokenizer)}: {absent[0]} is not a token of "
            f"{label(tokenizer)}; this template belongs to another model"
        )
    # the line break after the macro is eaten by the block tag: the template begins as written
    clock = "strftime_now" in text and not text.startswith(_NO_CLOCK)
    return _NO_CLOCK + text if clock else text


def shipped_templates() -> dict[str, Path]:
    """Name -> file of every shipped template."""
    folder = assets_root() / "templates"
    return {path.name.removesuffix(_SUFFIX): path for path in sorted(folder.glob(f"*{_SUFFIX}"))}


def missing_tokens(template: str, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """The tokens that ``template`` says it needs and ``tokenizer`` does not have."""
    said = _TOKENS.match(template)
    if said is None:
        return ()
    known = tokenizer.get_vocab()
    return [token for token in said[1].split() if token not in known]


def label(tokenizer: PreTrainedTokenizerBase) -> str:
    """How error messages call a tokenizer: its folder."""
    return str(tokenizer.name_or_path or "tokenizer")


def _own(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template:
        try:
            return str(tokenizer.get_chat_template())
        except ValueError as problem:  # several named templates, none of them the default
            raise UserError(f"{label(tokenizer)}: {problem}") from None
    for name, path in shipped_templates().items():
        text = path.read_text(encoding="utf-8")
        if _TOKENS.match(text) and not missing_tokens(text, tokenizer):
            warnings.warn(
                f"{label(tokenizer)}: has no chat template; its turn tags are those of {name}, "
                "whose shipped template is used",
                stacklevel=4,
            )
            return text
    raise UserError(
        f"{label(tokenizer)}: has no chat template; add chat_template.jinja to its folder, or name "
        "one in data.template"
    )


def _named(name: str) -> str:
    known = shipped_templates()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise UserError(
            f"data.template is {name!r}: no such file; expected one, or a shipped name: "
            f"{', '.join(known)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: a template that cannot be read ({problem})") from None
