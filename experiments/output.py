"""The output folder: appears whole or not at all, and never replaces a finished one unasked."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibration.profile import differences
from sim.errors import BadInput, Interrupted

MANIFEST = "manifest.json"  # every finished output folder holds one
LEDGER = "ledger"  # in the folder of an unfinished run: what it has finished

KEPT = "what was finished is kept; --resume goes on with it"


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raises `BadInput` if `path` exists and may not be replaced: asked before the work, not after it."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise BadInput(str(path), "already exists; give another --out or --overwrite")
    if not _is_ours(path):
        raise BadInput(str(path), "is not an output folder of this program and is not overwritten")


def _is_ours(path: Path) -> bool:
    return _manifest(path).keys() >= {"schema", "record", "identity"}


def _manifest(path: Path) -> dict[str, Any]:
    """Of an output folder; nothing of another one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def is_finished(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether there is nothing to resume because the run of these settings ended in `path`. Raises `BadInput` if one of
    other settings did."""
    if _unfinished_of(path.resolve()).exists() or not _is_ours(path):
        return False
    found = differences(_manifest(path).get("settings", {}), settings)
    if found:
        raise BadInput(str(path), f"holds the finished run of another experiment; {found}")
    return True


def _unfinished_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def output_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into that takes the place of `path` when the block ends; an error leaves nothing behind. Raises
    `BadInput` if another run is writing there."""
    with resumable_folder(path, overwrite=overwrite, resume=False) as folder:
        yield folder


def _take_place(folder: Path, path: Path) -> None:
    """Rename; what stood there goes once the new one is there, all of it on the disk."""
    sync(folder)
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    folder.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder with all that it holds, is on the disk."""
    if not path.is_dir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return
    for entry in path.iterdir():
        sync(entry)
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def resumable_folder(path: Path, *, overwrite: bool, resume: bool) -> Iterator[Path]:
    """A folder as of `output_folder`, which stays where it is if the block is killed or fails after something was
    finished (its `LEDGER`). Then `resume` gives the same folder again, and `overwrite` without it an empty one.

    Raises `BadInput` if there is such a folder and neither is asked for, or if another run is writing there, and
    `Interrupted` in place of a `KeyboardInterrupt` after which something is kept.
    """
    path = path.resolve()
    check_free(path, overwrite=overwrite)
    folder = _unfinished_of(path)
    with _locked(folder, path):
        begun = (folder / LEDGER).exists()
        if begun and not (resume or overwrite):
            raise BadInput(str(path), "was begun and not finished; --resume goes on with it, --overwrite begins anew")
        if not resume:
            _empty(folder)
        try:
            yield folder
            check_free(path, overwrite=overwrite)
        except BaseException as error:
            if not (folder / LEDGER).exists():
                shutil.rmtree(folder)
                raise
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(KEPT) from None
            error.add_note(KEPT)
            raise
        _take_place(folder, path)
        shutil.rmtree(path / LEDGER, ignore_errors=True)


@contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone; the lock ends with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BadInput(str(path), f"cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise BlockingIOError  # the other run ended in between and took the folder along
        yield
    except BlockingIOError:
        raise BadInput(str(path), "another run is writing there; give another --out") from None
    finally:
        os.close(handle)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


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
        sync(folder)
        for file in files:
            os.replace(file, path.parent / file.name)
        sync_folder(path.parent)


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
