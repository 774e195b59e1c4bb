"""A real browser without a window, for pages that must look right in one.

A harness page holds the page under test in frames of given widths and writes what it measures into
itself; what the browser made of the harness is read back. The page under test need not run a single
script, and nothing beside the browser is installed.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

HARNESS = """<!doctype html><meta charset="utf-8"><body><script>
const measure = {measure};
const frames = {widths}.map(width => {{
  const frame = document.createElement("iframe");
  frame.style = `border:0; width:${{width}}px; height:800px`;
  frame.src = "{page}";
  document.body.append(frame);
  return frame;
}});
addEventListener("load", () => {{
  let found;
  try {{ found = frames.map(frame => measure(frame.contentWindow, frame.contentDocument)); }}
  catch (problem) {{ found = String(problem); }}
  document.body.textContent = "found:" + JSON.stringify(found) + ":end";
}});
</script>"""


def require() -> str:
    """The browser's program. Skips where there is none, and fails where CI is set: there the
    system package `chromium` is installed first."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("no browser: install Debian's `chromium`")
        pytest.skip("no browser")
    return program


def measure(page: Path, script: str, widths: Sequence[int]) -> list[Any]:
    """What `script`, a function of window and document, returns of the page at each width."""
    text = HARNESS.format(measure=script, widths=list(widths), page=page.resolve().as_uri())
    with tempfile.TemporaryDirectory() as folder:
        harness = Path(folder) / "harness.html"
        harness.write_text(text, encoding="utf-8")
        dump = _dump(harness, folder)
    found = re.search(r"found:(.*):end", dump, flags=re.DOTALL)
    assert found, dump[-2000:]
    value = json.loads(html.unescape(found[1]))
    assert isinstance(value, list), value
    return value


def _dump(page: Path, folder: str) -> str:
    result = subprocess.run(
        [
            require(),
            "--headless=new",
            "--no-sandbox",  # containers have no user namespaces
            "--disable-gpu",
            "--hide-scrollbars",  # a phone's lie over the page
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--allow-file-access-from-files",  # lets the harness look into its frames
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder}/profile",
            "--window-size=1600,900",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.stdout
