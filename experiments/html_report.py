"""The report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from calibration.report import Block, Picture, Section, Table, answer, lost_texts, sections, title

STYLE = """
:root { --ink: #16202b; --soft: #55616e; --line: #d5dbe1; --paper: #fff; --tint: #f2f6fa; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p, li { max-width: 75ch; }
li { margin: .35rem 0; }
.answer { font-size: 1.15rem; line-height: 1.5; background: var(--tint); border-left: 5px solid #1f4e79;
  padding: .9rem 1.1rem; margin: 0 0 1rem; max-width: none; }
.warning, .note { border: 1px solid var(--line); border-left: 5px solid #d98c00; padding: .5rem .9rem; margin: .6rem 0;
  max-width: none; }
.warning { border-left-color: #000; font-weight: 700; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--soft); font-weight: 600; vertical-align: bottom; min-width: 5rem; }
tbody th { font-weight: 500; min-width: 9rem; }
td { white-space: nowrap; }
td.text { white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; }
figure .wide { margin: 0; }
figure svg { display: block; height: auto; max-width: 100%; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .3rem; }
nav { font-size: .9rem; margin: 1rem 0; }
nav a { color: #1f4e79; margin-right: 1rem; white-space: nowrap; }
@media (max-width: 700px) { main { padding: 1rem .8rem 3rem; } .answer { font-size: 1.05rem; } }
@media (max-width: 700px) { figure svg { max-width: none; width: 560px; } figure.broad svg { width: 860px; } }
@media print { .wide { overflow: visible; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""
LONGEST_CELL = 40  # characters that a cell may have without being folded
BROAD = 2.1  # width over height above which a figure needs more room to stay readable


def html_report(
    summary: Mapping[str, Any], details: Mapping[str, Any], manifest: Mapping[str, Any], figures: Path
) -> str:
    """`report.html`: arguments as of `calibration.report.report`, and the folder of the SVG files that it takes in."""
    notes = [*map(warning, lost_texts(summary)), *map(note, details["notes"])]
    return page(title(manifest), answer(summary), notes, sections(summary, details, manifest), figures)


def warning(text: str) -> str:
    """What must not be overlooked beside the answer."""
    return f'<p class="warning">{_inline(text)}</p>'


def note(text: str) -> str:
    """What belongs beside the answer."""
    return f'<p class="note">Note: {_inline(text)}</p>'


def page(heading: str, answered: str, notes: Sequence[str], parts: Sequence[Section], figures: Path) -> str:
    """A document of a heading, the answer, its notes, links to the sections, and these."""
    front = [f'<p class="answer">{_inline(answered)}</p>', *notes]
    links = "\n".join(f'<a href="#{_anchor(part.title)}">{escape(part.title)}</a>' for part in parts)
    body = [f"<h1>{escape(heading)}</h1>", *front, f"<nav>{links}</nav>"]
    for part in parts:
        body.append(f'<h2 id="{_anchor(part.title)}">{escape(part.title)}</h2>')
        body += [_block(block, figures) for block in part.blocks]
    inside = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(heading)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{inside}\n</main>\n</body>\n</html>\n"
    )


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _block(block: Block, figures: Path) -> str:
    match block:
        case Table(head, rows):
            return _table(head, rows)
        case Picture(name, caption):
            return _figure((figures / f"{name}.svg").read_text(), name, caption)
        case str():
            return f"<p>{_inline(block)}</p>"
    return "<ul>\n" + "\n".join(f"<li>{_inline(entry)}</li>" for entry in block) + "\n</ul>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in head)
    lines = "\n".join(f'<tr><th scope="row">{_inline(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows)
    table = f"<table>\n<thead><tr>{first}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>"
    return f'<div class="wide">{table}</div>'


def _cell(text: str) -> str:
    kind = ' class="text"' if len(text) > LONGEST_CELL else ""
    return f"<td{kind}>{_inline(text)}</td>"


def _figure(svg: str, name: str, caption: str) -> str:
    """The drawing itself in place of its file: no width of its own, and no id that another drawing has."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawing)
    width, height = (float(number) for number in re.findall(r'(?:width|height)="([0-9.]+)pt"', drawing)[:2])
    label = escape(caption, quote=True)
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    kind = ' class="broad"' if width > BROAD * height else ""
    figure = f'<div class="wide">{drawing}</div>\n<figcaption>{escape(caption)}</figcaption>'
    return f'<figure id="{name}"{kind}>{figure}</figure>'


def _inline(text: str) -> str:
    """Markdown's strength, emphasis and code in a line of text."""
    line = escape(text, quote=False)
    for mark, tag in ((r"\*\*", "strong"), (r"\*", "em"), ("`", "code")):
        line = re.sub(rf"{mark}(?=\S)(.+?)(?<=\S){mark}", rf"<{tag}>\1</{tag}>", line)
    return line
