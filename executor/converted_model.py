"""GGUF files converted once, into a folder of the user's cache that transformers reads."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from executor.folder_pair import sha256

CONVERSION = 1
"""Counts what `gguf_weights` makes of a file: another number, another folder."""


def converted_model(gguf: Path) -> Path:
    """The folder with config.json, model.safetensors (float32) and tokenizer.json of a GGUF file.

    It is named after the file's SHA-256 and lies below `cache_home()`; what is there is complete, for a conversion
    works in a folder of its own and is renamed at its end. Raises `BadInput` if the file is not what is asked for.
    """
    folder = cache_home() / f"{sha256(gguf)}-{CONVERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as unfinished:
            convert(gguf, Path(unfinished) / "model")
            _put_in_place(Path(unfinished) / "model", folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a new folder."""
    from safetensors.numpy import save_file

    from executor.gguf_weights import GgufFile

    file = GgufFile(gguf)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(file.config(), indent=1) + "\n")
    file.tokenizer().save(str(folder / "tokenizer.json"))
    save_file(file.weights(), folder / "model.safetensors", metadata={"format": "pt"})


def cache_home() -> Path:
    """`saguaro-planner` in $XDG_CACHE_HOME, or in ~/.cache where that is not an absolute path."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "saguaro-planner"


def _put_in_place(finished: Path, folder: Path) -> None:
    """Rename, unless another process was quicker: its conversion of the same file is the same."""
    try:
        finished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
