"""The HTML report: one file, no requests, no scripts, right on a phone, readable without eyes."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dspark.files import atomic_write_json, read_json
from dspark_eval import compare_table
from dspark_eval.reporting import markdown, run_report
from dspark_eval.reporting.blocks import from_markdown, table
from dspark_eval.reporting.confidence import pooled
from dspark_eval.reporting.page import cell, prose
from dspark_eval.reporting.svg import clean
from tests import browser
from tests.report_documents import BENCH, COMPARISON, COSTS, EVAL, EVIL, FRAMES, RELIABILITY

CSS = Path(__file__).parents[1] / "eval/dspark_eval/reporting/page.css"
VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect"}


class Page(HTMLParser):
    """Tags with their attributes, in order, and the text that is not in a style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        wanted = attributes.items()
        return [found for name, found in self.tags if name == tag and wanted <= found.items()]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of one document of each kind, in which every name and text is hostile."""
    folder = tmp_path_factory.mktemp("report")
    documents = {
        "bench": BENCH, "eval": EVAL, "reliability": RELIABILITY, "costs": COSTS,
        "frames": FRAMES, "compare": COMPARISON,
    }  # fmt: skip
    for name, document in documents.items():
        atomic_write_json(folder / "run" / f"{name}.json", document)
    run_report([folder / "run"], folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def text(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


# ------------------------------------------------------------------ what is in the file


def test_nothing_is_fetched_and_nothing_runs(text: str, page: Page) -> None:
    assert not page.all("script")
    assert not page.all("img")
    assert not page.all("link")
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (name, value)
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                assert value.startswith("#"), (name, value)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_a_page_of_every_kind_can_be_sent(text: str, page: Page) -> None:
    """Six documents; a mail takes ten times as much."""
    assert len(page.all("section")) >= 6
    assert len(text.encode()) < 2_000_000


def test_somebodys_text_is_shown_as_it_is(page: Page, out: Path) -> None:
    assert page.text.count(EVIL) >= 5  # question, token, prompt set, drafter, warning
    (bench,) = (s for s in read_json(out / "report.json")["sources"] if s["kind"] == "bench")
    assert bench["value"] == BENCH


def test_a_cell_and_a_paragraph_mark_no_more_than_they_should() -> None:
    assert prose("`<b>` & [1, 2]") == "<code>&lt;b&gt;</code> &amp; [1, 2]"
    assert cell("4.38 [4.19, 4.60]") == '4.38 <span class="interval">[4.19, 4.60]</span>'
    assert cell("a\nb [x] <i>") == "a<br>b [x] &lt;i&gt;"


def test_ids_are_unique_and_every_reference_has_its_end(text: str, page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("href", "xlink:href", "aria-labelledby"):
            if name in attributes:
                assert attributes[name].removeprefix("#") in ids
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_it_can_be_read_without_seeing_it(page: Page) -> None:
    assert page.all("html", lang="en")
    drawings = page.all("div", role="img")
    assert len(drawings) == len(page.all("figure")) >= 15
    assert all(len(drawing["aria-label"]) > 20 for drawing in drawings)
    tables = page.all("table")
    assert len(tables) == len(page.all("caption")) == len(page.all("div", role="region"))
    assert all(head.get("scope") in ("col", "row") for head in page.all("th"))
    assert len(page.all("h1")) == 1
    assert len(page.all("h2")) == len(page.all("section"))


def test_figures_name_their_n_and_their_units(text: str) -> None:
    words = set(re.findall(r"<text[^>]*>([^<]+)</text>", text))
    for expected in (
        "tokens per second, after the first token", "milliseconds per round", "draft position",
        "milliseconds after the first token", "predicted survival", "observed survival",
        "expected calibration error (%)", "requests at once", "tokens per second, all requests",
        "confidence threshold of a cut", "accepted length to break even",
        "speed-up against plain decoding",
    ):  # fmt: skip
        assert expected in words
    assert any(word.startswith("n = 2 prompts, Test CPU") for word in words)
    assert any(word.startswith("temperature 0, n = 40 rounds of 2 prompts") for word in words)


def _channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(colour)
    ]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_contrast_is_enough_by_day_and_by_night() -> None:
    schemes = re.findall(r":root \{(.*?)\}", CSS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for ink, papers in (
            ("ink", ("paper", "wash", "accepted", "sibling", "corrected", "bonus")),
            ("muted", ("paper", "wash")),
            ("link", ("paper",)),
        ):
            for paper in papers:
                dark, light = sorted((_luminance(colours[ink]), _luminance(colours[paper])))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)


def test_svg_keeps_its_text_and_loses_what_points_outside() -> None:
    raw = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "x" "http://www.w3.org/svg.dtd">\n'
        '<svg width="9pt" viewBox="0 0 9 9" xmlns="http://www.w3.org/2000/svg">'
        '<metadata><a href="http://purl.org"/></metadata><defs><path id="m1"/></defs>'
        '<use xlink:href="#m1" style="fill: #000000" clip-path="url(#m1)"/>'
        "<text style=\"font: 9px 'DejaVu Sans', serif; text-anchor: end\">a &lt; b</text></svg>"
    )
    assert clean(raw, "p") == (
        '<svg viewBox="0 0 9 9"><defs><path id="p-m1"/></defs>'
        '<use href="#p-m1" style="fill: currentColor" clip-path="url(#p-m1)"/>'
        '<text style="font-size: 9px; text-anchor: end">a &lt; b</text></svg>'
    )


def test_markdown_of_other_parts_becomes_blocks() -> None:
    blocks = list(from_markdown(["One", "line.", "", "| a | b |", "|---|--:|", "| x | |"], "c"))
    assert blocks[0].__class__.__name__ == "Prose"
    assert blocks[1] == table("c", ["a", "b"], [["x", ""]])
    with pytest.raises(ValueError, match="2 heads, a row with 1 cells"):
        table("c", ["a", "b"], [["x"]])


@given(st.lists(st.text(alphabet="ab|\\ ", max_size=8), min_size=2, max_size=2))
@example(["runs/a|b", "x"])
@example(["\\|", "|"])
def test_a_bar_in_a_name_is_no_border(cells: list[str]) -> None:
    lines = compare_table.table(["a", "b"], [cells])
    (block,) = from_markdown(lines, "c")
    assert block == table("c", ["a", "b"], [[cell.strip() for cell in cells]])


@given(st.text(alphabet="ab1 *_`<>[]()!&;#~|\\\n-+.=:/", max_size=24))
@example("1. of\n*three* <b>")
@example("[2.04, 2.30] of __init__ and a_b, see [x](y)")
def test_somebodys_text_means_nothing_to_markdown(text: str) -> None:
    text = text.replace("`", "'")
    words = " ".join(text.split())
    shown = MarkdownIt("commonmark").render(markdown.plain(text, start=True))
    assert html.unescape(re.sub("</?p>", "", shown)).strip() == words
    assert not words or shown.startswith("<p>")


def test_code_stays_code_in_markdown() -> None:
    assert markdown.plain("`a*b*` of *c* and `d") == "`a*b*` of \\*c\\* and \\`d"


def test_forecasts_of_all_positions_are_pooled_bin_by_bin() -> None:
    setting = {"diagram": [
        {"before": {"rounds": [2, 0], "predicted_sum": [0.4, 0.0], "survived": [1, 0]}},
        {"before": {"rounds": [2, 1], "predicted_sum": [0.8, 0.9], "survived": [0, 1]}},
    ]}  # fmt: skip
    points = pooled(setting, "before")
    assert [(round(x, 6), y, n) for x, y, n in points] == [(0.3, 0.25, 4), (0.9, 1.0, 1)]


def test_a_report_is_made_again_from_its_own_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of the code that writes the page: somebody may commit in between
    monkeypatch.setattr("dspark_eval.reporting.git_revision", lambda: "abc")
    for name, document in (("frames", FRAMES), ("costs", COSTS)):
        atomic_write_json(tmp_path / f"{name}.json", document)
    run_report([tmp_path], tmp_path / "one")
    run_report([tmp_path / "one" / "report.json"], tmp_path / "two")
    for name in ("report.html", "report.md", "report.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


# ------------------------------------------------------------------ in a browser

WIDTHS = (1280, 390)
MEASURE = """(window, document) => {
  const style = (node, pseudo) => window.getComputedStyle(node, pseudo);
  const tokens = [...document.querySelectorAll(".answer .t")];
  const accepted = tokens.find(token => token.classList.contains("accepted"));
  accepted.focus();
  const small = [...document.querySelectorAll(".pictures figure:not(.wide) svg")].map(svg => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return Math.min(...[...svg.querySelectorAll("text")].map(
      text => scale * parseFloat(style(text).fontSize)));
  });
  return {
    page: document.documentElement.scrollWidth,
    view: document.documentElement.clientWidth,
    scrolling: [...document.querySelectorAll(".scroll")].map(
      box => [box.scrollWidth, box.clientWidth, style(box).overflowX]),
    drawn: [...document.querySelectorAll("figure svg")].map(
      svg => svg.getBoundingClientRect().height),
    smallest: Math.min(...small),
    fetched: window.performance.getEntriesByType("resource").map(entry => entry.name),
    owned: [document.title, String(window.owned), document.scripts.length, document.images.length],
    kinds: Object.fromEntries(tokens.map(token => [token.classList[1],
      [style(token).backgroundColor, style(token).textDecorationLine + " "
        + style(token).textDecorationStyle]])),
    says: style(accepted, "::after").content,
    body: parseFloat(style(document.body).fontSize),
  };
}"""


@pytest.fixture(scope="module")
def seen(out: Path) -> dict[int, dict[str, Any]]:
    """What a browser made of the page, by width in pixels."""
    found = browser.measure(out / "report.html", MEASURE, WIDTHS)
    return dict(zip(WIDTHS, found, strict=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_itself_never_scrolls_sideways(
    seen: dict[int, dict[str, Any]], width: int
) -> None:
    assert seen[width]["view"] == width
    assert seen[width]["page"] == width
    assert all(overflow == "auto" for *_, overflow in seen[width]["scrolling"])


def test_wide_tables_scroll_in_their_own_box_on_a_phone(seen: dict[int, dict[str, Any]]) -> None:
    assert any(content > box for content, box, _ in seen[390]["scrolling"])


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_are_drawn_and_legible(seen: dict[int, dict[str, Any]], width: int) -> None:
    assert min(seen[width]["drawn"]) > 100
    assert seen[width]["smallest"] >= 7
    assert seen[width]["body"] >= 16


def test_a_browser_fetches_nothing_and_runs_nothing(seen: dict[int, dict[str, Any]]) -> None:
    for found in seen.values():
        title, owned, scripts, images = found["owned"]
        assert found["fetched"] == []
        assert title.startswith("dspark report")
        assert (owned, scripts, images) == ("undefined", 0, 0)


def test_a_token_shows_its_kind_by_colour_and_line_and_its_confidence_when_pointed_at(
    seen: dict[int, dict[str, Any]],
) -> None:
    kinds = {name: look for name, look in seen[1280]["kinds"].items() if name != "first"}
    assert set(kinds) == {"accepted", "sibling", "corrected", "bonus"}
    assert len({colour for colour, _ in kinds.values()}) == 4
    assert len({line for _, line in kinds.values()}) == 4
    assert seen[390]["says"] == '"accepted, confidence 91 %, round 1"'


def test_a_missing_browser_skips_here_and_fails_where_everything_must_be_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.browser.shutil.which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        browser.require()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="chromium"):
        browser.require()
