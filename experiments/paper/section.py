"""What the report on the paper is made of: sections of tables, figures, residuals and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

Cell = str | int | float | None  # None: nothing is known


class Role(StrEnum):
    """Whether a number went into the prediction of itself."""

    FITTED = "fitted"
    PREDICTED = "predicted"


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head; `name` is that of its CSV file, without the ending. Units stand in the head."""

    name: str
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Figure:
    """`draw` writes an SVG to the path that it is given; `name` is that of the file, without the ending."""

    name: str
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Answer:
    """A question, the answer in a sentence with its figures, and where they stand (a table, a law)."""

    question: str
    answer: str
    evidence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"question": self.question, "answer": self.answer, "evidence": self.evidence}


@dataclass(frozen=True)
class Residual:
    """A published number beside ours. `error` is what the published one is known to, in its own unit: rounding, or the
    reading off a figure."""

    source: str  # the paper's figure or table
    quantity: str
    unit: str
    published: float
    ours: float
    error: float
    role: Role

    @property
    def difference(self) -> float:
        """Ours over the published one."""
        return self.ours - self.published

    @property
    def relative(self) -> float:
        """The difference as a share of the published number."""
        return self.difference / self.published

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "source": self.source,
            "quantity": self.quantity,
            "unit": self.unit,
            "published": self.published,
            "ours": self.ours,
            "difference": self.difference,
            "error": self.error,
            "role": self.role.value,
        }


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs on what was assumed, and what was found."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    answers: tuple[Answer, ...] = ()
    residuals: tuple[Residual, ...] = ()
