"""report.html is well-formed, complete, and needs nothing beside it."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from calibration.report import PICTURES, answer
from experiments.config import QUICKSTART, load_config
from experiments.html_report import _inline
from experiments.ledger import NOWHERE
from experiments.run import run_experiment
from experiments.stages import Stages
from tests.experiments.browser import assert_sound, needs_browser
from tests.experiments.fake_bench import FakeBench

HTML, SVG = "", "{http://www.w3.org/2000/svg}"
SETTINGS = ("search={speculation_lengths: [2], budgets: [4], fan_out_rules: [uniform], fallbacks: [draft]}",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load_config(QUICKSTART, reduced=True, settings=SETTINGS)
    path = tmp_path_factory.mktemp("report")
    summary = run_experiment(config, FakeBench(config), path, Stages(Console(), quiet=True), ledger=NOWHERE)
    (path / "answer.txt").write_text(answer(summary))
    return path


@pytest.fixture(scope="module")
def document(folder: Path) -> ET.Element:
    return ET.fromstring((folder / "report.html").read_text())


def text_of(element: ET.Element) -> str:
    return "".join(element.itertext())


def test_the_answer_comes_first(document: ET.Element, folder: Path) -> None:
    main = document.find("body/main")
    assert main is not None
    assert [child.tag for child in main][:2] == ["h1", "p"]
    assert text_of(main[1]) == (folder / "answer.txt").read_text()


def test_nothing_is_fetched(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    for word in ("<script", "<link", "<img", "@import", "src=", "url(http"):
        assert word not in text


def test_every_figure_is_a_drawing_in_the_document(document: ET.Element) -> None:
    figures = {figure.attrib["id"]: figure for figure in document.iter("figure")}
    assert list(figures) == [picture.name for picture in PICTURES]
    for picture in PICTURES:
        drawing = figures[picture.name].find(f".//{SVG}svg")
        assert drawing is not None and drawing.attrib["aria-label"] == picture.caption
        assert len(list(drawing.iter(f"{SVG}path"))) > 10
        assert picture.caption in text_of(figures[picture.name])


def test_ids_are_unique_and_references_lead_somewhere(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_colours_are_those_of_the_figures(document: ET.Element) -> None:
    colours = {element.attrib["fill"] for element in document.iter() if element.attrib.get("fill", "").startswith("#")}
    assert colours and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_both_reports_say_the_same(document: ET.Element, folder: Path) -> None:
    markdown = (folder / "report.md").read_text()
    assert [text_of(title) for title in document.iter("h2")] == re.findall(r"^## (.+)$", markdown, re.MULTILINE)
    cells = [text_of(cell) for table in document.iter("table") for cell in table.iter() if cell.tag in ("th", "td")]
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert cells == [cell.strip() for row in rows for cell in row.removeprefix("|").removesuffix("|").split(" | ")]
    for figure in PICTURES:
        assert f"(figures/{figure.name}.svg)" in markdown
    assert "digest" in cells and "hit rate by fan-out" in text_of(document)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a < b & c", "a &lt; b &amp; c"),
        ("**strong** and *soft*", "<strong>strong</strong> and <em>soft</em>"),
        ("`generate` of 2 * 3 * 4", "<code>generate</code> of 2 * 3 * 4"),
    ],
)
def test_marks_of_the_text(text: str, html: str) -> None:
    assert _inline(text) == html


@needs_browser
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_without_network_shows_it_whole(folder: Path, tmp_path: Path, width: int) -> None:
    assert_sound(folder / "report.html", tmp_path, width=width, figures=[picture.name for picture in PICTURES])
