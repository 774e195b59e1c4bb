"""The documentation says what the code does: generated pages, links, pages that the site lists."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
import yaml

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OUT = re.compile(r"\[([^\]]*)\]\(((?:\w+:)?//[^)\s]*)\)")
FENCE = re.compile(r"^```.*?^```|^    .*?$|`[^`]*`", re.M | re.S)


def _pages(repo: Path) -> list[Path]:
    top = [repo / name for name in ("README.md", "CONTRIBUTING.md", "eval/README.md")]
    return top + sorted(repo.glob("docs/**/*.md")) + sorted(repo.glob("kernels/**/*.md"))


def test_reference_pages_are_what_the_code_says(repo: Path) -> None:
    """They are compared with what the generator writes today."""
    done = subprocess.run(
        [sys.executable, str(repo / "docs" / "make_reference.py"), "--check"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{repo}:{repo / 'kernels'}:{repo / 'eval'}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere(repo: Path) -> None:
    """Every relative link of every page is a file; anchors are what `make docs` checks."""
    pages = _pages(repo)
    broken = [
        f"{page.relative_to(repo)}: {link}"
        for page in pages
        for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
        if "://" not in link and not link.startswith(("#", "mailto:"))
        if not (page.parent / link.partition("#")[0]).exists()
    ]
    assert len(pages) > 20
    assert broken == []


def _written(repo: Path) -> Iterator[tuple[Path, str]]:
    """Every page, and what the notebooks say between their cells of code."""
    yield from ((page, page.read_text(encoding="utf-8")) for page in _pages(repo))
    for path in sorted(repo.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path, "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def test_links_out_of_here_are_whole(repo: Path) -> None:
    """What can be said without a network: a scheme, a host that somebody could own, no space left
    for a name; and a thread's words (`owner#7`) are those of its address."""
    found = [(page, link) for page, text in _written(repo) for link in OUT.findall(text)]
    for page, (words, address) in found:
        told = f"{page.name}: [{words}]({address})"
        parts = urlsplit(address)
        assert parts.scheme == "https", told
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), told
        assert not re.search(r"example\.|localhost|[<>{}]|\.\.\.|your[-_]|TODO|XXX", address), told
        thread = re.fullmatch(r"/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)", parts.path)
        assert thread is not None or parts.netloc != "github.com", told
        if thread is not None:
            assert words.rpartition("/")[2] == f"{thread[1]}#{thread[2]}", told
    assert len(found) > 100
    assert {page.suffix for page, _ in _written(repo)} == {".md", ".ipynb"}


def test_links_of_notebooks_lead_somewhere(repo: Path) -> None:
    broken = [
        f"{page.name}: {link}"
        for page, text in _written(repo)
        for link in LINK.findall(FENCE.sub("", text))
        if page.suffix == ".ipynb" and "://" not in link and not link.startswith("#")
        if not (page.parent / link.partition("#")[0]).exists()
    ]
    assert broken == []


def _listed(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry if isinstance(entry, list) else list(entry.values())  # type: ignore[attr-defined]
    return [page for value in values for page in _listed(value)]


@pytest.fixture
def site(repo: Path) -> ModuleType:
    """The hooks that MkDocs runs."""
    spec = importlib.util.spec_from_file_location("site_hooks", repo / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_lists_every_page(repo: Path, site: ModuleType) -> None:
    nav = _listed(yaml.safe_load((repo / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = {str(page.relative_to(repo / "docs")) for page in repo.glob("docs/**/*.md")}
    there |= {page for page in site.sources().values() if not page.startswith("kernels/")}
    assert sorted(nav) == sorted({*there, "kernels/index.md"})


def test_pages_beside_the_code_keep_their_links(site: ModuleType) -> None:
    pages = {"eval/README.md": "measuring.md", "kernels/docs/a.md": "kernels/a.md"}
    text = "[p](../../docs/policies.md#x) [m](../../eval/README.md) [c](../a.py) [s](#s) ![](i.png)"
    there = "[p](../policies.md#x) [m](../measuring.md) c [s](#s) ![](i.png)"
    assert site.moved(text, "kernels/docs/a.md", pages) == there
    text = "[a](../../kernels/docs/a.md) [b](../concepts.md#b)"
    there = "[a](../kernels/a.md) [b](../concepts.md#b)"
    assert site.moved(text, "docs/guides/k3.md", pages) == there


@pytest.mark.parametrize("word", [r"(?<![\w.])/(home|root|tmp|work)/", "TODO", "FIXME"])
def test_pages_speak_of_dspark_alone(repo: Path, word: str) -> None:
    """No path of somebody's machine, no mark of unfinished work."""
    pages = {str(page): page.read_text(encoding="utf-8") for page in _pages(repo)}
    assert [name for name, text in pages.items() if re.search(word, text)] == []
