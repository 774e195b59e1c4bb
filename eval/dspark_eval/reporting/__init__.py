"""`dspark report`: one page out of the JSON files that the other commands left in folders.

Nothing is measured here: every number stands in a file already, and stands again under the
protocol it was measured by.

    OUT/report.html    the page: one file without a single request, pictures and styles inside
    OUT/report.json    the same for machines, and everything it was made from
    OUT/report.md      the same as Markdown
    OUT/NN-*.png       the pictures

    sources    finds the files          speed, acceptance, confidence, cost, ...: a section
    blocks     what sections are of     for each kind; headline: what draws on all of them
    figures    what they look like      markdown, page: the writers
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dspark
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text
from dspark_eval.environment import git_revision
from dspark_eval.reporting import headline, markdown, page, throughput
from dspark_eval.reporting.blocks import Section, block_json
from dspark_eval.reporting.refusals import as_written
from dspark_eval.reporting.sources import REPORT_KIND, Found, find, find_all

__all__ = ["find", "run_report"]

SCHEMA_VERSION = 1


def run_report(paths: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the report of all folders and files given; returns where it and its parts are.

    Raises UserError for a path that is not there or holds nothing known, for a file of a newer
    schema or without what its kind should hold, and for an `out` that cannot be written.
    """
    found = find_all(paths)
    sections = build(found)
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = [_draw(section, number, out) for number, section in enumerate(sections, 1)]
        atomic_write_json(out / "report.json", _document(found, sections, files))
        atomic_write_text(out / "report.md", markdown.write(sections, files))
        atomic_write_text(
            out / "report.html", page.write(sections, headline.subject(found), made_by())
        )
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    return {
        "schema_version": SCHEMA_VERSION,
        "report": str(out / "report.html"),
        "markdown": str(out / "report.md"),
        "json": str(out / "report.json"),
        "sections": [
            {
                "title": section.title,
                "source": section.source,
                "pictures": [str(out / name) for name in drawn.values()],
            }
            for section, drawn in zip(sections, files, strict=True)
        ],
    }


def build(found: Sequence[Found]) -> list[Section]:
    """All sections in reading order."""
    sections = [item.section() for item in found]
    for item in found:  # each alone, so that the one that is not as it should be has a name
        with as_written(item.path):
            headline.headline([item])
            throughput.throughput([(item.kind.name, item.value)])
            headline.origin([item])
    measured = [(item.kind.name, item.value) for item in found]
    first, rates = headline.headline(found), throughput.throughput(measured)
    return [
        *([first] if first else []),
        *sections,
        *([rates] if rates else []),
        headline.origin(found),
    ]


def made_by() -> dict[str, str | None]:
    """The code that writes a page; not the code that measured, which each source names."""
    return {"dspark": dspark.__version__, "git_revision": git_revision()}


def _draw(section: Section, number: int, out: Path) -> dict[str, str]:
    """Every picture as a PNG: its name to its file's."""
    files = {picture.name: f"{number:02d}-{picture.name}.png" for picture in section.pictures}
    for picture in section.pictures:
        with as_written(section.source or section.title):
            picture.draw(out / files[picture.name])
    return files


def _document(
    found: Sequence[Found], sections: Sequence[Section], files: Sequence[dict[str, str]]
) -> dict[str, Any]:
    return {
        "kind": REPORT_KIND,
        "schema_version": SCHEMA_VERSION,
        "made_by": made_by(),
        "sections": [
            {
                "title": section.title,
                "source": section.source,
                "blocks": [block_json(block, drawn) for block in section.blocks],
            }
            for section, drawn in zip(sections, files, strict=True)
        ],
        "sources": [
            {"path": str(item.path), "kind": item.kind.name, "value": item.value} for item in found
        ],
    }
