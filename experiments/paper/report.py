"""All sections of the report on the paper, and its files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibration.digest import digest
from calibration.report import markdown_table
from experiments.output import MANIFEST, output_folder
from experiments.paper import batches, contradictions, decoders, draft_devices, miss_curves, sampling, temperature
from experiments.paper.pair_fit import Study, study
from experiments.paper.published import PAIRS, Published, read_published
from experiments.paper.questions import QUESTIONS
from experiments.paper.section import Cell, Residual, Section, Table

SCHEMA = 1
TITLE = "Speculative speculative decoding: the published figures beside ours"
RESIDUAL_HEAD = ("source", "quantity", "unit", "published", "ours", "ours - published", "known to", "role")


def assemble(published: Published, progress: Callable[[str], None] = lambda doing: None) -> list[Section]:
    """Every section, in the order of the report."""
    studies = studies_of(published, progress)
    sections = []
    for name, build in (builders(published, studies) | dict(QUESTIONS)).items():
        progress(name)
        sections.append(build())
    return sections


def builders(published: Published, studies: Mapping[str, Study]) -> dict[str, Callable[[], Section]]:
    """What makes each section on the published figures, by what is shown while it works."""
    return {
        "miss rates": lambda: miss_curves.section(published),
        "decoders": lambda: decoders.section(published, studies),
        "temperature": lambda: temperature.section(published, studies),
        "batches": lambda: batches.section(published, studies),
        "draft devices": lambda: draft_devices.section(published, studies),
        "sampling": lambda: sampling.section(published),
        "contradictions": lambda: contradictions.section(published, studies),
    }


def studies_of(published: Published, progress: Callable[[str], None] = lambda doing: None) -> dict[str, Study]:
    """The fits of every pair."""
    found = {}
    for pair in PAIRS:
        progress(f"fitting {pair}")
        found[pair] = study(published, pair)
    return found


def write_report(out: Path, *, overwrite: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """`paper.md`, `paper.json`, the tables (CSV) and the figures (SVG) in a folder; returns what `paper.json` holds."""
    with output_folder(out, overwrite=overwrite) as folder:
        published = read_published()
        sections = assemble(published, progress)
        content = to_json(published, sections)
        write_sections(folder, sections, content)
    return content


def to_json(published: Published, sections: Sequence[Section]) -> dict[str, Any]:
    """JSON-safe; equal for equal results."""
    body = {
        "source": published.source,
        "sections": [_section_to_json(section) for section in sections],
        "residuals": [residual.to_dict() for section in sections for residual in section.residuals],
    }
    return {"schema": SCHEMA, "digest": digest(body), **body}


def _section_to_json(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "text": list(section.text),
        "answers": [answer.to_dict() for answer in section.answers],
        "tables": {
            table.name: {"caption": table.caption, "head": list(table.head), "rows": [list(row) for row in table.rows]}
            for table in section.tables
        },
        "figures": {figure.name: figure.caption for figure in section.figures},
    }


def write_sections(folder: Path, sections: Sequence[Section], content: Mapping[str, Any]) -> None:
    """Every file of the report."""
    for table in [*(table for section in sections for table in section.tables), residual_table(sections)]:
        with (folder / f"{table.name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table.head)
            writer.writerows(table.rows)
    for section in sections:
        for figure in section.figures:
            figure.draw(folder / f"{figure.name}.svg")
    (folder / "paper.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "paper.md").write_text(in_markdown(sections))
    manifest = {"schema": SCHEMA, "record": "paper", "identity": {"source": content["source"]}}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"digest": content["digest"]}, indent=1) + "\n")


def residual_table(sections: Sequence[Section]) -> Table:
    """Every published number beside ours."""
    rows = [_residual_row(residual) for section in sections for residual in section.residuals]
    caption = "Every published number beside ours; *predicted* ones had no part in the fit that predicts them"
    return Table("residuals", caption, RESIDUAL_HEAD, tuple(rows))


def _residual_row(residual: Residual) -> tuple[Cell, ...]:
    digits = 4 if residual.unit == "rate" else 1
    ours, difference = round(residual.ours, digits), round(residual.difference, digits)
    numbers = (residual.published, ours, difference, residual.error)
    return residual.source, residual.quantity, residual.unit, *numbers, residual.role.value


def in_markdown(sections: Sequence[Section]) -> str:
    """The report: answers first, then each section, then all residuals."""
    parts = [f"# {TITLE}", "## Answers", _answers(sections)]
    for section in sections:
        parts += [f"## {section.title}", *section.text, *(f"![{f.caption}]({f.name}.svg)" for f in section.figures)]
        parts += [_table(table) for table in section.tables]
    parts += ["## All residuals", _table(residual_table(sections))]
    return "\n\n".join(parts) + "\n"


def _answers(sections: Sequence[Section]) -> str:
    answers = [answer for section in sections for answer in section.answers]
    return "\n".join(
        f"- **{answer.question}** {answer.answer}{f' ({answer.evidence})' if answer.evidence else ''}"
        for answer in answers
    )


def _table(table: Table) -> str:
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    return f"{table.caption} (`{table.name}.csv`):\n\n{markdown_table(table.head, rows)}"


def _cell(cell: Cell) -> str:
    """Four digits are enough to read; the CSV files have all of them."""
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
