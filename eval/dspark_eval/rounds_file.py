"""Every round of an evaluation as a line of JSON, so that any figure of rounds can be computed
again.

    suite, prompt, id, turn, round   where it stands: place in the set, the row's own id or null,
                                     turn of the conversation and round of the answer from 0
    prompt_tokens, context           tokens in front of the answer, and in front of the round's
                                     anchor, which `context_buckets` of eval.json go by
    drafted, verified, accepted, emitted, level, rows, sibling, bands, confidence, entropy,
    draft_s, verify_s, other_s, distance      as `dspark.runtime.records.RoundRecord` says

Lines without `prompt_tokens` are of an older dspark: their `context` is the prompt's length. An
answer that is no more than its first token has no round and no line; `n_prompts` of eval.json
counts it. With S_j = #(accepted >= j) / #(verified >= j) over the lines of a set, and accepted
length = sum emitted / number of lines, eval.json's figures of rounds come out again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dspark.errors import UserError
from dspark.files import atomic_write_text
from dspark_eval.conversations import Conversation
from dspark_eval.suites import Suite


@dataclass
class RoundsFile:
    """Lines in the order of sets, prompts, turns and rounds, until all are there."""

    lines: list[str] = field(default_factory=list)

    def add(self, suite: Suite, held: Sequence[Conversation]) -> None:
        """The conversations of one set, one for each of its rows."""
        for prompt, (row, conversation) in enumerate(zip(suite.rows, held, strict=True)):
            for number, turn in enumerate(conversation.turns):
                place = {
                    "suite": suite.name,
                    "prompt": prompt,
                    "id": row.metadata.get("id"),
                    "turn": number,
                }
                prompt_tokens = context = len(turn.prompt)  # the first anchor begins the answer
                for index, record in enumerate(turn.answer.rounds):
                    facts = {
                        **place,
                        "round": index,
                        "prompt_tokens": prompt_tokens,
                        "context": context,
                    }
                    entry = {**facts, **asdict(record), "rows": record.target_rows}
                    self.lines.append(json.dumps(entry, allow_nan=False))
                    context += record.emitted

    def write(self, path: Path) -> None:
        """All of it in one step. Raises UserError where that fails, a full disk perhaps."""
        try:
            atomic_write_text(path, "".join(f"{line}\n" for line in self.lines))
        except OSError as error:
            raise UserError(f"--rounds {path}: cannot be written ({error.strerror})") from None
