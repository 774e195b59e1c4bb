"""The JSON files that a report is made of: how to find them, tell them apart and refuse them.

What a file is, is told by what it holds and not by its name, so that `dspark bench --json any.json`
is found. A folder is searched itself and one level down; of a study or a pruning curve, whose runs
lie below it, only the whole is shown. A report is a source itself: `report.json` holds everything
it was made from. A file of a newer schema is refused, since what it says may mean something else,
and so is a damaged one: a number must not be missing from a page without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.cost_model import is_cost_model
from dspark_eval.reporting import acceptance, comparison, confidence, cost, frames, speed, training
from dspark_eval.reporting.blocks import Section
from dspark_eval.reporting.refusals import as_written, check_contents, check_schema
from dspark_eval.study.runs import STUDY_FILE

EXPECTED = (
    "expected a study, or the JSON of eval, bench, calibrate (reliability.json), distill "
    "(training.json), a cost model, a comparison, a pruning curve (curve.json), policies, "
    "frames, decode_speed, real text or a report"
)
REPORT_KIND = "dspark report"


@dataclass(frozen=True)
class Kind:
    """One sort of file.

    fits     how to tell it
    section  source and value to what is shown of it
    whole    hides what lies below its folder
    load     from the file's value to what the section needs, where that is more
    newest   the newest schema that is understood here
    versioned   every dspark has written the schema into it
    """

    name: str
    fits: Callable[[Any], bool]
    section: Callable[[str, Any], Section]
    whole: bool = False
    load: Callable[[Path, Any], Any] = lambda path, value: value
    newest: int = 1
    versioned: bool = True

    def check(self, path: Path, value: Any) -> None:
        """Raises UserError for a schema or numbers that cannot be shown."""
        check_schema(path, value, self.newest, versioned=self.versioned)
        check_contents(path, value)


@dataclass(frozen=True)
class Found:
    """A file that is known, and what it holds."""

    kind: Kind
    path: Path
    value: Any

    def section(self) -> Section:
        """What is shown of it. Raises UserError where it lacks what its kind should hold."""
        with as_written(self.path):
            return self.kind.section(str(self.path), self.value)


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _has("step", "train_s", "loss")(value[-1])


def _is(kind: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and value.get("kind") == kind


STUDY = Kind(
    "study",
    _has("study", "arms", "reference", "seeds"),
    training.study,
    whole=True,
    load=training.load_study,
    versioned=False,
)
KINDS = (
    Kind("bench", _has("speedup", "extra"), speed.bench),
    Kind("frames", _has("plain_frames", "frames", "suites"), speed.frames),
    Kind("frames by rule", _has("runs", "skipped", "schema_version"), frames.by_rule),
    Kind("decoding floor", _has("frame_share", "generate_share", "schema_version"), frames.floor),
    Kind("eval", _has("suites", "draft_length", "drafter"), acceptance.evaluation),
    Kind("comparison", _is("comparison"), comparison.comparison),
    Kind("ordering", _is("table1"), comparison.ordering, newest=2, whole=True),
    Kind(
        "real text",
        _has("arms", "against_reference"),
        comparison.real_text,
        whole=True,
        versioned=False,
    ),
    Kind("calibration", _has("settings", "bins", "dataset"), confidence.calibration),
    Kind("policies", _has("sweeps", "stops", "sets"), confidence.policies),
    Kind("cost model", is_cost_model, cost.cost_model),
    Kind("training", _is_history, training.training, load=training.load_training, versioned=False),
    STUDY,
    Kind("pruning curve", _has("points", "speed_from"), training.curve, whole=True),
)
"""In the order in which a report shows them."""
NEWEST = max(kind.newest for kind in KINDS)
MEASURED = ("eval.json", "compare.json", "reliability.json", "curve.json")
"""Names under which a measurement is looked for even where nothing in the file tells its kind."""


def find(path: Path) -> list[Found]:
    """What `path`, a folder or a JSON file, has to show. Raises UserError if that is nothing."""
    if not path.exists():
        raise UserError(f"{path}: no such folder or file")
    if path.is_file():
        found = list(_known([path]))
        if not found:
            check_schema(path, read_json(path), NEWEST, versioned=False)
    else:
        found = list(_known(sorted(path.glob("*.json"))))
        whole = [item for item in found if item.kind.whole]
        found = whole or found + list(_known(sorted(path.glob("*/*.json"))))
    if not found:
        raise UserError(f"{path}: nothing to report in it; {EXPECTED}")
    return found


def find_all(paths: Sequence[Path]) -> list[Found]:
    """Every file once, in the order of `KINDS`; what a report holds beside what it was made of
    counts once too."""
    found: dict[tuple[str, str], Found] = {}
    for path in paths:
        for item in find(path):
            found.setdefault((item.kind.name, str(item.path.resolve())), item)
    return sorted(found.values(), key=lambda item: KINDS.index(item.kind))


def _known(files: Sequence[Path]) -> Iterator[Found]:
    """The files of a known kind. Of a study there are two, one made from the other."""
    for path in files:
        value = read_json(path)
        if _is(REPORT_KIND)(value):
            yield from _of_report(path, value)
            continue
        kind = next((kind for kind in KINDS if kind.fits(value)), None)
        if kind is None and path.name in MEASURED:
            check_schema(path, value, NEWEST, versioned=False)
        if kind is None or (kind is STUDY and path.name != STUDY_FILE):
            continue
        with as_written(path):
            kind.check(path, value)
            loaded = kind.load(path, value)
        yield Found(kind, path, loaded)


def _of_report(path: Path, value: Mapping[str, Any]) -> Iterator[Found]:
    """What an earlier report was made from."""
    check_schema(path, value, 1, versioned=True)
    kinds = {kind.name: kind for kind in KINDS}
    with as_written(path):
        sources = [(s["kind"], Path(s["path"]), s["value"]) for s in value.get("sources", ())]
    for name, place, held in sources:
        kind = kinds.get(name)
        if kind is None:
            raise UserError(
                f"{path}: holds a {name!r}, which this dspark does not know; update dspark"
            )
        with as_written(path):
            kind.check(path, held)
        yield Found(kind, place, held)
