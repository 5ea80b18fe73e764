"""A pair: a target and a draft model that share a vocabulary, and prompts of their domain.

Describing a pair (folder, tokenizer, prompts, hashes) needs no torch; the models are loaded on demand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from executor.language_model import LanguageModel

ROLES = ("target", "draft")
SPLITS = ("calibration", "test")
DTYPES = ("float32", "float64", "bfloat16", "float16")
_PACKAGED = Path(__file__).parent / "packaged_pairs"


@dataclass(frozen=True)
class Pair:
    """A checked folder: `target/` and `draft/` (config.json, model.safetensors), tokenizer.json, prompts.jsonl."""

    name: str
    folder: Path

    # --------------------------------------------------------------------------------------------- description

    @cached_property
    def configs(self) -> dict[str, dict[str, Any]]:
        """config.json of each role."""
        return {role: _read_json(self.folder / role / "config.json") for role in ROLES}

    @property
    def vocab_size(self) -> int:
        return int(self.configs["target"]["vocab_size"])

    @property
    def max_positions(self) -> int:
        """The smaller of the two models' limits."""
        return min(int(_max_positions(self.configs[role])) for role in ROLES)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The target's end-of-text ids."""
        ids = self.configs["target"].get("eos_token_id")
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(_tokenizer_files(self.folder)[0]))

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the weights and the tokenizer."""
        files = {role: self.folder / role / "model.safetensors" for role in ROLES}
        files["tokenizer"] = _tokenizer_files(self.folder)[0]
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}

    def prompts(self, split: str, num: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The first `num` prompts of a split that have `num_tokens` tokens, cut to that length.

        Raises `BadInput` if there are not that many.
        """
        if split not in SPLITS:
            raise BadInput("split", f"must be one of {', '.join(SPLITS)}", split)
        path = self.folder / "prompts.jsonl"
        prompts: list[tuple[int, ...]] = []
        for text in list(_texts(path, split)):  # a damaged line is found wherever it stands
            if len(prompts) == num:
                break
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) >= num_tokens:
                prompts.append(tuple(ids[:num_tokens]))
        if len(prompts) < num:
            raise BadInput(str(path), f"must hold {num} {split} prompts of {num_tokens} tokens", len(prompts))
        return tuple(prompts)

    # ------------------------------------------------------------------------------------------------- models

    def load(self, role: str, dtype: str = "float32") -> LanguageModel:
        """The model of a role on the CPU, self-tested."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from executor.language_model import LanguageModel

        folder = self.folder / role
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
            )
        except Exception as error:  # the libraries raise many kinds
            raise BadInput(str(folder), f"cannot be loaded ({error})") from error
        language_model = LanguageModel(model, name=str(folder))
        language_model.check()
        return language_model


def load_pair(name_or_path: str | Path) -> Pair:
    """A packaged pair by name, or a folder. Raises `BadInput` naming the file or the token that is wrong."""
    packaged = _PACKAGED / str(name_or_path)
    is_packaged = str(name_or_path).isidentifier() and packaged.is_dir()
    folder = packaged if is_packaged else Path(name_or_path)
    if not folder.is_dir():
        known = ", ".join(sorted(p.name for p in _PACKAGED.iterdir() if p.is_dir())) if _PACKAGED.is_dir() else "none"
        raise BadInput("pair", f"must be a folder or a packaged pair ({known})", str(name_or_path))
    for role in ROLES:
        for file in ("config.json", "model.safetensors"):
            _require_file(folder / role / file)
    pair = Pair(folder.name, folder)
    sizes = {role: int(pair.configs[role]["vocab_size"]) for role in ROLES}
    if sizes["target"] != sizes["draft"]:
        rule = f"vocab_size must equal the target's {sizes['target']}"
        raise BadInput(str(folder / "draft" / "config.json"), rule, sizes["draft"])
    _check_tokenizers(folder, sizes["target"])
    return pair


def _max_positions(config: dict[str, Any]) -> int:
    return config.get("max_position_embeddings") or config["n_positions"]


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise BadInput(str(path), "this file of the pair is missing")
    return path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_require_file(path).read_text())
    except ValueError as error:
        raise BadInput(str(path), f"must be JSON ({error})") from None


def _texts(path: Path, split: str) -> Iterator[str]:
    for number, line in enumerate(_require_file(path).read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            text, row_split = row["text"], row["split"]
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{path}, line {number}", 'must be JSON with "text" and "split"') from None
        if row_split == split:
            yield text


def _tokenizer_files(folder: Path) -> list[Path]:
    """The target's first; a role's own file counts even where there is a shared one."""
    shared, own = folder / "tokenizer.json", [folder / role / "tokenizer.json" for role in ROLES]
    if shared.is_file():
        return [shared, *(path for path in own if path.is_file())]
    return [_require_file(path) for path in own]


def _check_tokenizers(folder: Path, vocab_size: int) -> None:
    files = _tokenizer_files(folder)
    vocabularies = [_vocabulary(path) for path in files]
    for path, vocabulary in zip(files, vocabularies, strict=True):
        if max(vocabulary, default=-1) >= vocab_size:
            raise BadInput(str(path), f"ids must be below the models' vocab_size {vocab_size}", max(vocabulary))
    first = vocabularies[0]
    for path, vocabulary in zip(files[1:], vocabularies[1:], strict=True):
        for token_id in sorted(first.keys() | vocabulary.keys()):
            if first.get(token_id) != vocabulary.get(token_id):
                rule = f"must be that of {files[0].relative_to(folder)}: id {token_id} is {first.get(token_id)!r} there"
                raise BadInput(str(path), rule, vocabulary.get(token_id))


def _vocabulary(path: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadInput(str(path), f"must be a tokenizer.json ({error})") from None
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
