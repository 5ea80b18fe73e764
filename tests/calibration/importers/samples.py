"""Sample files, written by hand from the public descriptions of the formats."""

from __future__ import annotations

from pathlib import Path

from calibration.importers.imported import Source

FOLDER = Path(__file__).parent / "samples"


def sample(name: str, *, is_plain: bool = False) -> Source:
    return Source(name, (FOLDER / name).read_text(), is_plain)
