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
from experiments.paper.published import NAMES, PAIRS, Published, read_published
from experiments.paper.questions import QUESTIONS
from experiments.paper.section import Cell, Residual, Section, Table

SCHEMA = 1
TITLE = "Speculative speculative decoding: the published figures beside ours"
RESIDUAL_HEAD = ("source", "quantity", "unit", "published", "ours", "ours - published", "known to", "role")


def assemble(
    published: Published, progress: Callable[[str], None] = lambda doing: None, num_workers: int = 1
) -> list[Section]:
    """Every section, in the order of the report; processes do not change what is in them."""
    from joblib import Parallel, delayed

    progress(f"fitting {' and '.join(NAMES[pair] for pair in PAIRS)}")
    with Parallel(n_jobs=num_workers) as run:
        studies = dict(zip(PAIRS, run(delayed(study)(published, pair) for pair in PAIRS), strict=True))
        sections = builders(published, studies) | dict(QUESTIONS)
        progress(f"sections: {', '.join(sections)}")
        built: list[Section] = run(delayed(build)() for build in sections.values())
    return built


def builders(published: Published, studies: Mapping[str, Study]) -> dict[str, Callable[[], Section]]:
    """What makes each section on the published figures, by a short name."""
    return {
        "miss rates": lambda: miss_curves.section(published),
        "decoders": lambda: decoders.section(published, studies),
        "temperature": lambda: temperature.section(published, studies),
        "batches": lambda: batches.section(published, studies),
        "draft devices": lambda: draft_devices.section(published, studies),
        "sampling": lambda: sampling.section(published),
        "contradictions": lambda: contradictions.section(published, studies),
    }


def write_report(out: Path, *, overwrite: bool, progress: Callable[[str], None], num_workers: int) -> dict[str, Any]:
    """`paper.md`, `paper.json`, the tables (CSV) and the figures (SVG) in a folder; returns what `paper.json` holds."""
    with output_folder(out, overwrite=overwrite) as folder:
        published = read_published()
        sections = assemble(published, progress, num_workers)
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
    tables = [table for section in sections for table in section.tables]
    for table in (*tables, summary_table(sections), residual_table(sections)):
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


def summary_table(sections: Sequence[Section]) -> Table:
    """How far ours lie from the published numbers, by where these stand and whether they were fitted."""
    groups: dict[tuple[str, str, str], list[Residual]] = {}
    for residual in (residual for section in sections for residual in section.residuals):
        groups.setdefault((residual.source, residual.unit, residual.role.value), []).append(residual)
    return Table(
        "residual_summary",
        "Ours less published by figure: in % of the published number for tokens/s, in points (hundredths) for rates",
        ("source", "unit", "role", "numbers", "mean absolute", "mean", "worst"),
        tuple((*group, len(residuals), *_summary(residuals)) for group, residuals in groups.items()),
    )


def _summary(residuals: Sequence[Residual]) -> tuple[float, float, float]:
    off: list[float] = [100 * (entry.difference if entry.unit == "rate" else entry.relative) for entry in residuals]
    worst: float = max(off, key=abs)
    return round(sum(map(abs, off)) / len(off), 2), round(sum(off) / len(off), 2), round(worst, 2)


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
    """The report: answers and errors first, then each section, then all residuals."""
    parts = [f"# {TITLE}", "## Answers", _answers(sections), "## How far off", _table(summary_table(sections))]
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
