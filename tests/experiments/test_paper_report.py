"""The report on the paper: every section on reduced numbers, its files, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.paper import decoders, draft_devices, report
from experiments.paper.pair_fit import study
from experiments.paper.published import PAIRS, Published, read_published
from experiments.paper.section import Answer, Figure, Residual, Role, Section, Table

FIGURES = ("miss rates", "decoders", "temperature", "batches", "draft devices", "sampling", "contradictions")


def reduced() -> Published:
    """The mean of the data sets in their place: a quarter of the work."""
    published = read_published()
    means = {pair: {"average": row} for pair, row in published.averages.items()}
    return published.model_copy(update={"decoders": means})


@pytest.fixture(scope="module")
def sections() -> list[Section]:
    published = reduced()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "LENGTHS_LEFT_OUT", (6, 7))
        patch.setattr(decoders, "FAN_OUTS_LEFT_OUT", (5,))
        patch.setattr(draft_devices, "FAN_OUTS_OF_ONE", (2,))
        studies = {pair: study(published, pair, (6, 7), (1, 5)) for pair in PAIRS}
        builders = report.builders(published, studies)
        return [builders[name]() for name in FIGURES]


def written(folder: Path, sections: list[Section]) -> dict[str, bytes]:
    folder.mkdir()
    report.write_sections(folder, sections, report.to_json(read_published(), sections))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_published_figure_has_residuals_and_some_of_them_are_predicted(sections):
    residuals = [entry for section in sections for entry in section.residuals]
    sources = {entry.source for entry in residuals}
    assert sources == {
        *("Table B.3", "figures 3, 10", "figures 4, 12", "figures 6, 13", "figure 6 right", "figure 5 left"),
    }
    for source in sources:
        roles = {entry.role for entry in residuals if entry.source == source}
        assert roles == set(Role), source


def test_residuals_hold_every_published_number(sections):
    """Of the figures: misses, temperatures, batches, draft devices, sampling; the quantities differ from each other."""
    published = read_published()
    misses = sum(2 * len(published.misses.fan_outs) for of_draft in published.misses.drafts.values() for _ in of_draft)
    temperatures = sum(5 * len(published.temperatures.temperatures) for _ in PAIRS)
    batches = sum(len(row) for sweep in published.batches.pairs.values() for row in sweep.model_dump().values() if row)
    expected = {"figures 3, 10": misses, "figures 4, 12": temperatures, "figures 6, 13": batches}
    expected |= {"figure 6 right": len(published.draft_devices.tokens_per_s), "figure 5 left": 6}
    residuals = [entry for section in sections for entry in section.residuals]
    for source, number in expected.items():
        assert len({entry.quantity for entry in residuals if entry.source == source}) == number


def test_every_section_says_what_was_assumed_and_answers_something(sections):
    assert all(section.text and section.answers and section.tables for section in sections)


def test_files_are_whole_and_the_same_every_time(sections, tmp_path):
    first, second = (written(tmp_path / name, sections) for name in ("first", "second"))
    assert first == second
    names = [table.name for section in sections for table in section.tables]
    figures = [figure.name for section in sections for figure in section.figures]
    assert len(set(names)) == len(names) and len(set(figures)) == len(figures)
    assert first.keys() == {
        *("paper.md", "paper.json", "manifest.json", "residuals.csv", "residual_summary.csv"),
        *(f"{name}.csv" for name in names),
        *(f"{name}.svg" for name in figures),
    }
    for name in figures:
        ElementTree.fromstring(first[f"{name}.svg"])
    told = json.loads(first["paper.json"])
    rows = list(csv.reader(first["residuals.csv"].decode().splitlines()))
    assert len(rows) - 1 == len(told["residuals"]) == sum(len(section.residuals) for section in sections)
    text = first["paper.md"].decode()
    assert all(f"({name}.svg)" in text for name in figures)
    assert all(f"`{name}.csv`" in text for name in names)


def small_section(*_: object) -> Section:
    """A stand-in with one of everything."""
    return Section(
        title="A stand-in",
        text=("Nothing was assumed.",),
        tables=(Table("numbers", "Some numbers", ("a", "b"), ((1, None), ("x|y", 2.5))),),
        figures=(Figure("drawing", "A drawing", lambda path: path.write_text("<svg/>") and None),),
        answers=(Answer("Why?", "Because.", "table numbers"),),
        residuals=(Residual("figure 0", "speed", "tokens/s", 10.0, 11.0, 0.5, Role.PREDICTED),),
    )


def test_the_command_writes_the_report_and_refuses_to_replace_it(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "study", lambda *_: None)
    monkeypatch.setattr(report, "builders", lambda *_: {"a stand-in": small_section})
    monkeypatch.setattr(report, "QUESTIONS", {})
    out = tmp_path / "paper"
    first = CliRunner().invoke(app, ["paper", "--out", str(out), "--quiet", "--num-workers", "1"])
    assert first.exit_code == 0, first.output
    assert "Why? Because." in first.output and "a stand-in" not in first.output
    assert "| x\\|y | 2.5 |" in (out / "paper.md").read_text()
    assert json.loads((out / "paper.json").read_text())["residuals"][0]["difference"] == 1.0
    again = CliRunner().invoke(app, ["paper", "--out", str(out)])
    assert "already exists" in str(again.exception)
    replaced = CliRunner().invoke(app, ["paper", "--out", str(out), "--overwrite", "--json", "--num-workers", "1"])
    assert json.loads(replaced.stdout)["source"] == read_published().source
