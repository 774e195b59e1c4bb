"""`dspark report`: one page out of the JSON files that the other commands left in folders.

Nothing is measured here: every number stands in a file already, and stands again under the
protocol it was measured by. What a JSON file is, is told by what it holds and not by its name, so
that `dspark bench --json anything.json` is found. A folder is searched itself and one level down;
of a study or a pruning curve, whose runs lie below it, only the whole is shown.

    OUT/report.md      the page
    OUT/NN-*.png       its pictures, linked from there
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.files import atomic_write_text
from dspark_eval import sections
from dspark_eval.sections import Section

REPORT_FILE = "report.md"
EXPECTED = (
    "expected a study, or the JSON of eval, bench, calibrate (reliability.json), distill "
    "(training.json) or a pruning curve (curve.json)"
)


@dataclass(frozen=True)
class Kind:
    """One sort of file: how to tell it, and how to show it; `whole` hides what lies below it."""

    fits: Callable[[Any], bool]
    section: Callable[[Path, Any], Section]
    whole: bool = False


@dataclass(frozen=True)
class Found:
    """A file that is known, and what it holds."""

    kind: Kind
    path: Path
    value: Any


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _has("step", "train_s", "loss")(value[-1])


STUDY = Kind(_has("study", "arms", "reference", "seeds"), sections.study, whole=True)
KINDS = (
    STUDY,
    Kind(_has("points", "speed_from"), sections.curve, whole=True),
    Kind(_has("speedup", "extra"), sections.bench),
    Kind(_has("suites", "draft_length"), sections.evaluation),
    Kind(_has("settings", "bins", "dataset"), sections.calibration),
    Kind(_is_history, sections.training),
)


def run_report(paths: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the report of all folders and files given; returns where it and its parts are.

    Raises UserError for a path that is not there or holds nothing known, for a file that lacks
    what its kind should hold, and for an `out` that cannot be written.
    """
    found = {item.path.resolve(): item for path in paths for item in find(path)}
    written = [_section(item) for item in found.values()]
    lines, parts = ["# Report", ""], []
    try:
        for number, (item, section) in enumerate(zip(found.values(), written, strict=True), 1):
            pictures = _draw(section, number, out)
            lines += [*section.lines, *(line for _, text in pictures for line in (text, ""))]
            parts.append(
                {
                    "title": section.lines[0].lstrip("# "),
                    "source": str(item.path),
                    "pictures": [str(path) for path, _ in pictures],
                }
            )
        atomic_write_text(out / REPORT_FILE, "\n".join(lines).rstrip() + "\n")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    return {"schema_version": 1, "report": str(out / REPORT_FILE), "sections": parts}


def find(path: Path) -> list[Found]:
    """What `path`, a folder or a JSON file, has to show. Raises UserError if that is nothing."""
    if not path.exists():
        raise UserError(f"{path}: no such folder or file")
    if path.is_file():
        found = list(_known([path]))
    else:
        found = list(_known(sorted(path.glob("*.json"))))
        whole = [item for item in found if item.kind.whole]
        found = whole or found + list(_known(sorted(path.glob("*/*.json"))))
    if not found:
        raise UserError(f"{path}: nothing to report in it; {EXPECTED}")
    return found


def _known(files: Sequence[Path]) -> Iterator[Found]:
    """The files of a known kind. Of a study there are two, one made from the other."""
    for path in files:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # somebody else's file, or a damaged one: nothing to show
            continue
        kind = next((kind for kind in KINDS if kind.fits(value)), None)
        if kind is not None and not (kind is STUDY and path.name != sections.STUDY_FILE):
            yield Found(kind, path, value)


def _section(item: Found) -> Section:
    try:
        return item.kind.section(item.path, item.value)
    except (KeyError, IndexError, TypeError) as problem:
        raise UserError(
            f"{item.path}: not as this version of dspark writes it ({problem!r}); measure again, "
            "or leave it out"
        ) from None


def _draw(section: Section, number: int, out: Path) -> list[tuple[Path, str]]:
    """Each picture's file, now written, and the line of Markdown that shows it."""
    drawn = []
    for picture in section.pictures:
        path = out / f"{number:02d}-{picture.name}.png"
        picture.draw(path)
        drawn.append((path, f"![{picture.caption}]({path.name})"))
    return drawn
