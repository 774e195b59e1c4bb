"""More prompts to train on, written by the target itself.

A chat model is given the beginning of a user's turn and ends it: the first words of a training
prompt, of which a share between `LEAST` and `MOST` is kept, at temperature 0.8. What it writes
reads much like what it was trained to answer, and no two are alike. A form that the prompts of a
set end with ("Please reason step by step, ...") is put behind what was written.

Left out: texts that did not end within `LONGEST` tokens, repeated ones, and near copies of a test
prompt or of one kept aside.

    OUT/written.jsonl    a header with what was asked for, then a prompt a line
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from dspark.distill.chat import ChatFormat
from dspark.distill.messages import user_turn
from dspark.distill.prompts import PromptRow
from dspark.errors import UserError
from dspark.files import atomic_write_text
from dspark.runtime.loading import LoadedTarget
from dspark.runtime.sampling import SamplingParams
from dspark_eval.real_text.prompts import Unseen, test_files, training_prompts
from dspark_eval.real_text.wide import generate_wide

WRITTEN = "written.jsonl"
LEAST, MOST = 0.15, 0.7
LONGEST = 96
"""Tokens of what is written behind a beginning."""
SEED = 20_611
BATCH = 6_144
SAMPLING = SamplingParams(temperature=0.8)


def write_prompts(loaded: LoadedTarget, prompts: Path, out: Path, count: int) -> int:
    """Have `count` prompts written and keep what is usable; returns how many that is."""
    found = training_prompts(prompts, 1, 0)
    rows = [(row, row.messages[0]["content"]) for row in found.training]
    forms = shared_endings(found.training)
    begun: list[tuple[str, str]] = []
    for at in range(count if rows else 0):
        row, text = rows[at % len(rows)]
        form = forms.get(row.file, "")
        begun.append((beginning(text.removesuffix(form), random.Random(f"{SEED}/{at}")), form))
    aside = [row.messages[0]["content"] for row in found.held_out]
    unseen = Unseen(test_files(prompts), aside)
    kept: dict[str, None] = {}
    endings = _ended(loaded, [start for start, _ in begun])
    for ending, (start, form) in zip(endings, begun, strict=True):
        if ending is not None:
            made = user_turn((start + ending).strip() + form)
            if not unseen.holds(PromptRow(WRITTEN, 0, made)):
                kept[made[0]["content"]] = None
    lines = [json.dumps({"asked": count}), *(json.dumps({"turns": [text]}) for text in kept)]
    atomic_write_text(out / WRITTEN, "\n".join(lines) + "\n")
    return len(kept)


def read_written(out: Path, count: int) -> tuple[PromptRow, ...]:
    """What was written when `count` prompts were asked for. Raises UserError for another number."""
    path = out / WRITTEN
    head, *lines = path.read_text("utf-8").splitlines()
    if (asked := json.loads(head)["asked"]) != count:
        raise UserError(f"{path}: {asked} prompts were asked for, not {count}; take another folder")
    texts = [json.loads(line)["turns"][0] for line in lines]
    return tuple(PromptRow(WRITTEN, at + 2, user_turn(text)) for at, text in enumerate(texts))


def shared_endings(rows: Sequence[PromptRow]) -> dict[str, str]:
    """By file: the last line, with its break, that more than half of its prompts end with."""
    endings: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        text = row.messages[0]["content"]
        endings[row.file]["\n" + text.rpartition("\n")[2] if "\n" in text else ""] += 1
    usual = {file: counts.most_common(1)[0] for file, counts in endings.items()}
    return {file: text for file, (text, n) in usual.items() if 2 * n > endings[file].total()}


def beginning(text: str, draw: random.Random) -> str:
    """The first words of a text, at least one and not all."""
    words = re.findall(r"\s*\S+", text)
    count = round(draw.uniform(LEAST, MOST) * len(words))
    return "".join(words[: max(1, min(count, len(words) - 1))])


def _ended(loaded: LoadedTarget, starts: Sequence[str]) -> list[str | None]:
    """How the target ends each user turn; None where it did not."""
    chat, ends = ChatFormat(loaded.tokenizer), set(loaded.target.end_token_ids)
    asked = [_open_turn(chat.prompt_ids(user_turn(start)), ends) for start in starts]
    order = sorted(range(len(asked)), key=lambda at: -len(asked[at]))
    found: list[str | None] = [None] * len(asked)
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        ids = generate_wide(
            loaded.target,
            [asked[at] for at in batch],
            max_new_tokens=LONGEST,
            sampling=SAMPLING,
            seed=SEED,
            indices=batch,
        )
        for at, tokens in zip(batch, ids, strict=True):
            if tokens[-1] in ends:
                found[at] = loaded.tokenizer.decode(tokens[:-1], skip_special_tokens=True)
        print(f"wrote {first + len(batch)} of {len(order)} prompts", flush=True)
    return found


def _open_turn(ids: list[int], ends: set[int]) -> list[int]:
    """Prompt ids up to the end of the user's turn, which the template closed."""
    last = max(at for at, token in enumerate(ids) if token in ends)
    return ids[:last]
