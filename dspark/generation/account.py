"""What one generation amounts to: the JSON document, the table of its rounds, the last line.

tokens/s          tokens after the first and their seconds: the first comes from the prompt
accepted length   emitted tokens per round, the target's own included
drafting          share of the seconds of all rounds that went into drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from dspark.generation.reader import Piece
from dspark.runtime.records import (
    ALL_ACCEPTED,
    CORRECTED,
    CUT,
    SIBLING,
    Generation,
    RoundRecord,
)
from dspark.wording import counted

SCHEMA_VERSION = 1
LEVELS = {
    ALL_ACCEPTED: "all accepted",
    SIBLING: "sibling",
    CORRECTED: "corrected",
    CUT: "cut",
}


@dataclass(frozen=True)
class Account:
    """Figures of one generation; None is "not measured", never 0.

    finish  "end", "stop", "length", or "interrupted": then no round was handed over
    frames  whether rounds were frames, of whose parts nobody knows the seconds
    """

    tokens: list[int]
    finish: str
    rounds: list[RoundRecord]
    prefill_s: float | None
    decode_s: float | None
    frames: bool = False

    @classmethod
    def of(cls, generation: Generation, *, frames: bool = False) -> Account:
        return cls(
            generation.tokens,
            generation.finish,
            generation.rounds,
            generation.prefill_s,
            generation.decode_s,
            frames,
        )

    @classmethod
    def interrupted(cls, pieces: Sequence[Piece]) -> Account:
        return cls([piece.token.token for piece in pieces], "interrupted", [], None, None)

    @property
    def tokens_per_s(self) -> float | None:
        if not self.decode_s or len(self.tokens) < 2:
            return None
        return (len(self.tokens) - 1) / self.decode_s

    @property
    def accepted_length(self) -> float | None:
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def draft_share(self) -> float | None:
        spent = sum(r.draft_s + r.verify_s + r.other_s for r in self.rounds)
        return sum(r.draft_s for r in self.rounds) / spent if spent and not self.frames else None

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tokens": self.tokens,
            "new_tokens": len(self.tokens),
            "finish": self.finish,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
            "accepted_length": self.accepted_length,
            "draft_share": self.draft_share,
            "rounds": [asdict(record) | self._seconds(record) for record in self.rounds],
        }

    def _seconds(self, record: RoundRecord) -> dict[str, float | None]:
        """Those of a frame in place of those of its parts."""
        unknown = dict.fromkeys(("draft_s", "verify_s", "other_s"))
        return {**unknown, "frame_s": record.verify_s} if self.frames else {}

    def summary(self) -> str:
        """One line."""
        parts = [counted(len(self.tokens), "token")]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.accepted_length is not None:
            parts.append(
                f"accepted length {self.accepted_length:.2f} over "
                f"{counted(len(self.rounds), 'round')}"
            )
        if self.draft_share is not None:
            parts.append(f"{self.draft_share:.0%} of the time drafting")
        ended = {
            "end": "end token",
            "stop": "stop string",
            "length": "--max-new-tokens reached",
            "interrupted": "interrupted",
        }
        return ", ".join([*parts, ended[self.finish]])

    def parts(self) -> list[Table | str]:
        """What --stats prints: the table, if there were rounds, and the summary."""
        return [self.table(), self.summary()] if self.rounds else [self.summary()]

    def table(self) -> Table:
        """One line for each round."""
        # nine columns stand in 80 places: one space between them, and confidence on more lines
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        for name in ("round", "drafted", "verified", "accepted"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("level", no_wrap=True)
        table.add_column("confidence, %")
        for name in ("frame ms",) if self.frames else ("draft ms", "verify", "other"):
            table.add_column(name, justify="right", no_wrap=True)
        for number, record in enumerate(self.rounds, start=1):
            table.add_row(str(number), *_cells(record, self.frames))
        return table


def _cells(record: RoundRecord, frame: bool) -> list[str]:
    counts = (record.drafted, record.verified, record.accepted)
    level = LEVELS[record.level] if record.drafted else "plain step"
    times = [record.verify_s] if frame else [record.draft_s, record.verify_s, record.other_s]
    return [
        *map(str, counts),
        level,
        _confidence(record),
        *(f"{1e3 * seconds:.1f}" for seconds in times),
    ]


def _confidence(record: RoundRecord) -> str:
    """Percent of every drafted position; a bar behind what was accepted."""
    said = [f"{100 * value:.0f}" for value in record.confidence]
    return " ".join([*said[: record.accepted], "|", *said[record.accepted :]]) if said else "-"
