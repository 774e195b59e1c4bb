"""A report as Markdown, with its pictures beside it.

Names and notes are somebody's text: whatever Markdown or HTML would take for more than letters is
escaped, but for `code` between backticks, which all of a report's text may hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark.generation.screen import BRACKETS, LEGEND
from dspark_eval.reporting.blocks import Block, Notes, Picture, Prose, Samples, Section, Table


def write(sections: Sequence[Section], files: Sequence[Mapping[str, str]]) -> str:
    """`files`: of each section, picture name to file name."""
    lines = ["# Report", ""]
    for section, drawn in zip(sections, files, strict=True):
        lines += [f"## {plain(section.title)}", ""]
        lines += [f"From {_code(section.source)}.", ""] if section.source else []
        for block in section.blocks:
            lines += [*_block(block, drawn), ""]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block, drawn: Mapping[str, str]) -> Iterator[str]:
    if isinstance(block, Prose):
        yield plain(block.text, start=True)
    elif isinstance(block, Notes):
        yield from (f"- Note: {plain(line)}" for line in block.lines)
    elif isinstance(block, Picture):
        yield f"![{plain(block.caption)}]({drawn[block.name]})"
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Samples):
        yield from _samples(block)


def _table(block: Table) -> Iterator[str]:
    yield f"**{plain(block.caption)}**"
    yield ""
    yield f"| {' | '.join(map(_cell, block.heads))} |"
    numbers = len(block.heads) - block.texts
    yield "|" + "---|" * block.texts + "--:|" * numbers
    for row in block.rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    lines = (plain(line).replace("|", "\\|") for line in text.strip().splitlines())
    return "<br>".join(lines)


_CODE = re.compile(r"(`[^`]+`)")
_ACTIVE = re.compile(
    r"[\\*<`]|~~|(?<=\])\(|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#"  # emphasis, HTML, links
)
_OPENING = re.compile(r"[>=+-]|\d+(?P<stop>[.)])(?=\s|\Z)")  # a quotation, a rule, a list


def plain(text: str, start: bool = False) -> str:
    """One line in which nothing but `code` means anything to Markdown; `start`: of a paragraph.

    A bracket alone, an underscore inside a word and a single tilde mean nothing, and stay.
    """
    parts = _CODE.split(" ".join(text.split()))
    parts[::2] = [_ACTIVE.sub(r"\\\g<0>", words) for words in parts[::2]]
    line = "".join(parts)
    opening = _OPENING.match(line) if start else None
    if opening is None:
        return line
    place = max(opening.start("stop"), 0)
    return f"{line[:place]}\\{line[place:]}"


def _code(text: str) -> str:
    """A name as code, whatever backticks stand in it."""
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _samples(block: Samples) -> Iterator[str]:
    marks = (
        f"{BRACKETS[kind][0]}{name}{BRACKETS[kind][1]}{'97' if kind == 'accepted' else ''}"
        for kind, name in LEGEND
    )
    yield f"Where each token came from: {', '.join(f'`{mark}`' for mark in marks)}; 97: "
    yield "confidence, %."
    for entry in block.entries:
        text = "".join(marked(entry))
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
        yield ""
        label = plain(entry["label"], start=True)
        yield f"{label}, {entry['why']} accepted length ({entry['accepted_length']:.2f}):"
        yield ""
        yield from (f"{fence}text", *text.splitlines(), fence)


def marked(entry: Mapping[str, Any]) -> Iterator[str]:
    """Each token in the brackets that `dspark generate --show-draft` puts around its kind."""
    columns = (entry["text"], entry["kind"], entry["confidence"])
    for text, kind, confidence in zip(*columns, strict=True):
        opening, closing = BRACKETS[kind]
        breaks = "\n" * text.count("\n")
        number = "" if confidence is None else str(min(99, int(100 * confidence)))
        yield f"{opening}{text.replace(chr(10), chr(92) + 'n') if opening else text}{closing}"
        yield number + (breaks if opening else "")
