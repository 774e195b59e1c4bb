"""Is this the tokenizer, template and thinking switch that a drafter was trained with?

Shapes do not tell: with another tokenizer of the same size, other turn tags, or thinking switched
the other way, a drafter loads and runs, and its proposals are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspark.distill.chat import ChatFormat
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.draft.record import TargetRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def trained_format(
    draft: Path | str, trained_on: TargetRecord | None, tokenizer: PreTrainedTokenizerBase
) -> ChatFormat:
    """How prompts were written for the drafter: with its template and its thinking switch.

    The template is the target's own, or the one kept beside the drafter; the hash that the drafter
    recorded says which, and with it whether thinking was on, where the record does not say so
    itself. Where none fits, prompts are written as the target's template does (`identity_warnings`
    then says so).
    """
    kept = Path(draft) / "chat_template.jinja"
    templates: list[str | None] = [str(kept)] if kept.is_file() else []
    if tokenizer.chat_template or not templates:
        templates.insert(0, None)
    wanted = trained_on.template_hash if trained_on else None
    said = trained_on.thinking if trained_on else None
    first = ChatFormat(tokenizer, thinking=said or False, template=templates[0])
    if wanted in (None, first.fingerprint):
        return first
    for template in templates:
        for thinking in (False, True):
            chat = ChatFormat(tokenizer, thinking=thinking, template=template)
            if chat.fingerprint == wanted:
                return chat
    return first


def identity_warnings(
    trained_on: TargetRecord | None, chat: ChatFormat, *, same_tokenizer: bool = False
) -> list[str]:
    """What the drafter says of the tokenizer and chat template it was trained with, if not these.

    Where the drafter's own tokenizer has been compared (`same_tokenizer`), padding rows may differ
    and no hash is asked.
    """
    if trained_on is None:
        return []
    found = []
    here = tokenizer_fingerprint(chat.tokenizer)
    if not same_tokenizer and trained_on.tokenizer_hash not in (None, here):
        found.append(
            f"the drafter was trained with the tokenizer of {trained_on.name}, which is not the "
            "target's: expect few accepted tokens"
        )
    if trained_on.template_hash not in (None, chat.fingerprint):
        found.append(
            f"the drafter was trained with the chat template of {trained_on.name}, which is not "
            "the target's: accepted length is understated"
        )
    if trained_on.thinking not in (None, chat.thinking):
        words = {True: "on", False: "off"}
        found.append(
            f"the drafter was trained with thinking {words[bool(trained_on.thinking)]}, prompts "
            f"are written with thinking {words[chat.thinking]}: accepted length is understated"
        )
    return found
