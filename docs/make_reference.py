"""Write docs/reference: the command line and the configuration, out of the code that reads them.

python docs/make_reference.py            write both pages
python docs/make_reference.py --check    exit code 1 where a page is not what the code says
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import get_type_hints

import typer
from typer.cli import get_docs_for_click

from dspark.cli import app
from dspark.distill.config import SECTIONS
from dspark.distill.presets import PRESETS
from dspark.draft.config import DraftConfig

OUT = Path(__file__).parent / "reference"
GENERATED = "<!-- written by docs/make_reference.py; do not edit -->\n\n"


def command_line() -> str:
    """Every command with its arguments, options, defaults and example, as `--help` has them."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="dspark")
    return get_docs_for_click(obj=command, ctx=context, name="dspark", title="Command line")


def configuration() -> str:
    """Every key of `run.yaml` and of a drafter's configuration."""
    lines = [
        "# Configuration",
        "",
        "A run of `dspark distill` is described by these keys, which it writes, all of them, to",
        "`run.yaml`. `--set section.key=value` changes one, `--config FILE` brings many.",
    ]
    for name, section in SECTIONS.items():
        lines += ["", f"## {name}", "", (section.__doc__ or "").strip().splitlines()[0], ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for entry in dataclasses.fields(section):
            doc = _cell(entry.metadata["doc"])
            lines.append(f"| `{name}.{entry.name}` | `{_value(entry)}` | {doc} |")
    lines += ["", "## Presets"]
    for name, preset in PRESETS.items():
        lines += ["", f"`--preset {name}`: {preset.doc}.", ""]
        lines += [f"- `{key}={_plain(value)}`" for key, value in preset.values.items()]
    return "\n".join([*lines, "", *_drafter(), ""])


def _drafter() -> list[str]:
    """`DraftConfig`, whose docstring describes its attributes."""
    hints = get_type_hints(DraftConfig)
    doc = (DraftConfig.__doc__ or "").split("Attributes:")[1]
    lines = [
        "## A drafter's own configuration",
        "",
        "`dspark.draft.DraftConfig`, in `config.json`:",
    ]
    lines += ["", "```text", *(line[4:] for line in doc.strip("\n").splitlines()), "```", ""]
    lines += ["| field | type | default |", "| --- | --- | --- |"]
    for entry in dataclasses.fields(DraftConfig):
        kind = _cell(getattr(hints[entry.name], "__name__", "") or str(hints[entry.name]))
        if "|" in str(hints[entry.name]) or "[" in str(hints[entry.name]):
            kind = _cell(str(hints[entry.name]).replace("dspark.draft.shapes.", ""))
        lines.append(f"| `{entry.name}` | {kind} | `{_value(entry)}` |")
    return lines


def _value(entry: dataclasses.Field[object]) -> str:
    if entry.default is not dataclasses.MISSING:
        return _plain(entry.default)
    return "required" if entry.default_factory is dataclasses.MISSING else "computed"


def _plain(value: object) -> str:
    """As YAML spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple | list) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"cli.md": command_line, "config.md": configuration}


def main() -> int:
    """Write the pages, or compare them."""
    stale = []
    for name, page in PAGES.items():
        text, path = GENERATED + page(), OUT / name
        if "--check" in sys.argv[1:]:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            OUT.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"docs/reference/{name} is not what the code says: run python docs/make_reference.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
