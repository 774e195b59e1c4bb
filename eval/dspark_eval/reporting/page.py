"""A report as one HTML file that opens anywhere: no request leaves it, no script runs in it.

What stands in the files is somebody's text (prompts, answers, names), so the template escapes all
of it; only pictures and the marks made here are inserted as they are. The page's own policy
(Content-Security-Policy) forbids scripts and requests on top of that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dspark.generation.screen import LEGEND
from dspark_eval.reporting.blocks import Block, Picture, Samples, Section
from dspark_eval.reporting.svg import inline

TEMPLATE = "page.html.jinja"
KINDS = {**dict(LEGEND), "first": "from the prompt", "plain": "plain step"}


@dataclass(frozen=True)
class Token:
    """One token of an answer as the page shows it. `opens`: the first one of its round."""

    text: str
    kind: str
    says: str
    opens: bool


def write(sections: Sequence[Section], subject: str, made_by: Mapping[str, str | None]) -> str:
    """The page; `subject` stands under its title."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": prose, "cell": cell}
    titles = Counter(section.title for section in sections)
    return environment.get_template(TEMPLATE).render(
        sections=[
            {
                "title": section.title,
                # two of one title are told apart by where they come from
                "link": section.title
                if titles[section.title] == 1 or not section.source
                else f"{section.title} ({section.source})",
                "source": section.source,
                "groups": list(_groups(section, n)),
            }
            for n, section in enumerate(sections, 1)
        ],
        subject=subject,
        made_by=made_by,
        kinds=LEGEND,
    )


def prose(text: str) -> Markup:
    """Escaped text in which backticks mark code; a number stays beside its percent sign."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"(\d) %", r"\1&nbsp;%", marked))


def cell(text: str) -> Markup:
    """A table's cell: an interval in brackets steps back behind the number it belongs to."""
    marked = re.sub(
        r"(\[[^\]]*\])$", r'<span class="interval">\1</span>', str(prose(text)), flags=re.MULTILINE
    )
    return Markup(marked.replace("\n", "<br>"))


def _groups(section: Section, number: int) -> Iterator[dict[str, Any]]:
    """Blocks in order, the pictures that follow each other together."""
    for kind, blocks in groupby(section.blocks, key=_kind):
        if kind == "pictures":
            pictures = [block for block in blocks if isinstance(block, Picture)]
            yield {"kind": kind, "pictures": [_picture(p, number) for p in pictures]}
        else:
            yield from ({"kind": kind, "block": _shown(block)} for block in blocks)


def _kind(block: Block) -> str:
    return "pictures" if isinstance(block, Picture) else type(block).__name__.lower()


def _picture(picture: Picture, number: int) -> dict[str, Any]:
    """`svg` comes from matplotlib, which escapes the names that stand in it."""
    return {
        "svg": Markup(inline(picture, f"s{number}-{picture.name}")),
        "caption": picture.caption,
        "alt": picture.alt,
        "wide": picture.wide,
    }


def _shown(block: Block) -> Any:
    return [_sample(entry) for entry in block.entries] if isinstance(block, Samples) else block


def _sample(entry: Mapping[str, Any]) -> dict[str, Any]:
    tokens = list(_tokens(entry))
    kinds = Counter(entry["kind"])
    return {
        "label": entry["label"],
        "why": entry["why"],
        "length": f"{entry['accepted_length']:.2f}",
        "question": entry["question"],
        "tokens": tokens,
        "counts": [(says, kinds[kind]) for kind, says in KINDS.items() if kinds[kind]],
        "shown": len(tokens),
        "total": entry["tokens"],
        "ended": entry["finish"] == "end" and len(tokens) == entry["tokens"],
    }


def _tokens(entry: Mapping[str, Any]) -> Iterator[Token]:
    columns = (entry["text"], entry["kind"], entry["confidence"], entry["round"])
    before = None
    for text, kind, confidence, number in zip(*columns, strict=True):
        says = KINDS[kind]
        if confidence is not None:
            says += f", confidence {100 * confidence:.0f} %"
        if number >= 0:
            says += f", round {number + 1}"
        yield Token(text.replace("\n", "⏎\n"), kind, says, number != before)
        before = number
