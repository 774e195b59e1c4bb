"""Pages of the site that live beside the code they are about: protocol, experiments, kernels.

On a code-hosting page they are read where they are. Here each becomes a page, and links, which lead
from file to file, are turned to where those files are on the site; a link to code becomes its words
alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def sources(root: Path = ROOT) -> dict[str, str]:
    """File in the repository -> page of the site."""
    kernels = sorted((root / "kernels" / "docs").glob("*.md"))
    return {
        "eval/README.md": "measuring.md",
        "eval/LOG.md": "experiments.md",
        "kernels/README.md": "kernels/index.md",
        **{f"kernels/docs/{page.name}": f"kernels/{page.name}" for page in kernels},
    }


def moved(text: str, source: str, pages: dict[str, str]) -> str:
    """The text of `source` with its links as they have to be on its page of the site."""
    here = posixpath.dirname(_page(source, pages) or "")

    def turn(link: re.Match[str]) -> str:
        words, path, place = link[1], link[2], link[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = _page(file, pages)
        if page is None:
            return words
        return f"[{words}]({posixpath.relpath(page, here or '.')}{place})"

    return LINK.sub(turn, text)


def _page(file: str, pages: dict[str, str]) -> str | None:
    """Where a file of the repository is on the site; None: nowhere."""
    return pages.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by MkDocs for each page: what lies in `docs/` may lead to the others too."""
    pages, here = sources(), page.file.src_uri
    return markdown if here in pages.values() else moved(markdown, f"docs/{here}", pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs once it has found the pages in `docs/`."""
    from mkdocs.structure.files import File

    pages = sources()
    for source, page in pages.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=moved(text, source, pages)))
    return files
