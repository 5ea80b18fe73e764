"""The output folder: appears whole or not at all, and never replaces a finished one unasked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sim.errors import BadInput

MANIFEST = "manifest.json"  # every finished output folder holds one


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raises `BadInput` if `path` exists and may not be replaced: asked before the work, not after it."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise BadInput(str(path), "already exists; give another --out or --overwrite")
    if not _is_ours(path):
        raise BadInput(str(path), "is not an output folder of this program and is not overwritten")


def _is_ours(path: Path) -> bool:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"schema", "record", "identity"} <= manifest.keys()


@contextmanager
def output_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into that takes the place of `path` when the block ends; an error leaves nothing behind."""
    path = path.resolve()  # `.`, or a link to a folder
    check_free(path, overwrite=overwrite)
    with _unfinished(path) as folder:
        yield folder
        check_free(path, overwrite=overwrite)
        if path.exists():
            shutil.rmtree(path)
        folder.rename(path)


@contextmanager
def output_files(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A stand-in for the file `path`, in an empty folder whose files move beside `path` when the block ends."""
    if path.exists() and not overwrite:
        raise BadInput(str(path), "already exists; give another --out or --overwrite")
    if path.is_dir():
        raise BadInput(str(path), "is a folder; give the name of a file")
    with _unfinished(path) as folder:
        yield folder / path.name
        files = list(folder.iterdir())
        taken = [path.parent / file.name for file in files if (path.parent / file.name).exists()]
        if taken and not overwrite:
            raise BadInput(str(taken[0]), "already exists; give another --out or --overwrite")
        for file in files:
            os.replace(file, path.parent / file.name)


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path` that is gone when the block ends, unless it was renamed."""
    folder = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(str(path), f"cannot be written ({error.strerror})") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
