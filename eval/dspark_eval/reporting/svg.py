"""A matplotlib picture as SVG that may stand inside a page.

Text stays text, in the page's own font; black and white become the page's ink and paper, so that
a dark page has a dark picture; ids are made unique, because a page holds many pictures.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from matplotlib import rc_context

from dspark_eval.plots import BLUE, GREY
from dspark_eval.reporting.blocks import Picture

SETTINGS = {
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
}
_INKS = (
    ("#000000", "currentColor"),
    ("#ffffff", "var(--paper)"),
    (GREY, "var(--muted)"),
    (BLUE.lower(), "var(--blue)"),  # too dark for a dark page
)


def inline(picture: Picture, prefix: str) -> str:
    """The drawing as an <svg> element without a size of its own; `prefix`: of its ids."""
    with tempfile.TemporaryDirectory() as folder, rc_context({**SETTINGS, "svg.hashsalt": prefix}):
        path = Path(folder) / "picture.svg"
        picture.draw(path)
        return clean(path.read_text(encoding="utf-8"), prefix)


def clean(text: str, prefix: str) -> str:
    """Only the element, with nothing in it that refers to anything outside."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg[^>]*?viewBox=\"([^\"]+)\"[^>]*>", r'<svg viewBox="\1">', text, count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:)?href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r"font: [^;\"]*?([\d.]+px) [^;\"]+", r"font-size: \1", text)
    for ink, name in _INKS:
        text = text.replace(ink, name)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text.strip()
