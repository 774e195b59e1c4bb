"""What the notebooks share: a drafter to look at, and sections of the report shown in a cell.

The drafter is a small one, distilled in about two minutes on two cores and kept in `RUN`; whatever
is measured of it is an illustration and no result. With a better one at hand, give its folder.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_eval.reporting import build
from dspark_eval.reporting.blocks import Block, Notes, Picture, Prose, Samples, Table
from dspark_eval.reporting.sources import find_all

RUN = Path("runs/notebook")
SMALL = {
    "data.max_prompts": 360,
    "data.held_out": 24,
    "data.max_new_tokens": 128,
    "train.max_steps": 160,
    "train.epochs": 10,
    "eval.prompts": 8,
    "eval.every": 1000,
}
COLOURS = {
    "first": "#666666",
    "accepted": "#1b7837",
    "sibling": "#2166ac",
    "corrected": "#b2182b",
    "bonus": "#762a83",
    "plain": "#666666",
}
TAGS = {"first": "small", "sibling": "i", "corrected": "ins", "bonus": "b", "plain": "small"}
"""The same without colours, which pages of code hosts strip: small, italic, underlined, bold."""


def drafter(folder: Path = RUN, settings: Mapping[str, Any] = SMALL) -> Path:
    """The folder of a finished drafter: what lies there, or a small one distilled now.

    An interrupted distillation is taken up again. `settings`: dotted keys of a run.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    from rich.console import Console

    from dspark.distill.config import load_config
    from dspark.distill.run import run_distill

    config = load_config(None, {**settings, "out.dir": str(folder)})
    silent = Console(file=io.StringIO(), force_jupyter=False)
    return run_distill(config, (folder / "run.yaml").is_file(), silent)


def show(*paths: Path, only: Sequence[str] = ()) -> None:
    """Sections of the report over these files, as a cell's output.

    only: names of pictures and captions of tables that are wanted; none given: everything but the
    page's own summary.
    """
    from IPython.display import display

    sections = [section for section in build(find_all(paths)) if section.source]
    blocks = [block for section in sections for block in section.blocks]
    for block in blocks:
        for shown in _shown(block) if not only or _name(block) in only else ():
            display(shown)


def _name(block: Block) -> str:
    if isinstance(block, Picture):
        return block.name
    return block.caption if isinstance(block, Table) else ""


def _shown(block: Block) -> Iterable[Any]:
    from IPython.display import Image, Markdown

    if isinstance(block, Picture):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{block.name}.png"
            block.draw(path)
            yield Image(path.read_bytes(), width=620, alt=block.alt)
    elif isinstance(block, Table):
        yield table(block.heads, block.rows, block.caption)
    elif isinstance(block, Samples):
        yield from map(coloured, block.entries)
    elif isinstance(block, Notes):
        yield Markdown("\n".join(f"- {line}" for line in block.lines))
    elif isinstance(block, Prose):
        yield Markdown(block.text)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> Any:
    """A table as a cell's output; numbers with three digits, None as a dash."""
    from IPython.display import Markdown

    lines = [f"**{caption}**", ""] if caption else []
    lines += ["| " + " | ".join(map(_text, heads)) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(map(_text, row)) + " |" for row in rows]
    return Markdown("\n".join(lines))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value).replace("|", "\\|").replace("\n", "⏎")


def coloured(sample: Mapping[str, Any]) -> Any:
    """An answer, each token marked by how it came to be; hovering shows its confidence.

    sample: as `dspark_eval.samples` keeps it.
    """
    from html import escape

    from IPython.display import HTML

    spans = []
    for text, kind, sure in zip(sample["text"], sample["kind"], sample["confidence"], strict=True):
        title = kind if sure is None else f"{kind}, confidence {100 * sure:.0f} %"
        shown = escape(text).replace("\n", "<br>")
        spans.append(f'<span title="{title}">{_marked(kind, shown)}</span>')
    legend = ", ".join(_marked(kind, kind) for kind in COLOURS if kind in sample["kind"])
    return HTML(f"<p>{legend}</p><p>{''.join(spans)}</p>")


def _marked(kind: str, text: str) -> str:
    tag = TAGS.get(kind, "span")
    return f'<{tag} style="color:{COLOURS[kind]}">{text}</{tag}>'
