"""A pair in a folder: `target/` and `draft/` as transformers saves models, tokenizer.json, prompts.jsonl."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import BadInput, require_count

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from executor.language_model import LanguageModel

ROLES = ("target", "draft")
SPLITS = ("calibration", "test")


@dataclass(frozen=True)
class FolderPair:
    """A checked folder. The pair's ids are those of the target's tokenizer.

    A model may have more of them (a head padded to a round width, or a tokenizer with further tokens): those are
    never drafted and never emitted, which transformers' own `generate` does not rule out. A draft whose tokenizer lacks
    some of the ids never drafts them.
    """

    name: str
    folder: Path

    # --------------------------------------------------------------------------------------------- description

    @property
    def dataset(self) -> str:
        return f"{self.name}/prompts.jsonl"

    @property
    def vocab_size(self) -> int:
        return max(self._known_ids["target"]) + 1

    def unused_ids(self, role: str) -> frozenset[int]:
        """The pair's ids that stand for no string in the role's tokenizer."""
        return frozenset(range(self.vocab_size)) - self._known_ids[role]

    @cached_property
    def _known_ids(self) -> dict[str, frozenset[int]]:
        return {role: frozenset(_vocabulary(_tokenizer_file(self.folder, role))) for role in ROLES}

    @property
    def max_positions(self) -> int:
        return min(_entry(self.folder, role, "max_position_embeddings", "n_positions") for role in ROLES)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        config = _read_json(self.folder / "target" / "config.json")
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(_tokenizer_file(self.folder, "target")))

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the weights and the tokenizer."""
        files = {role: _weights(self.folder / role) for role in ROLES}
        files["tokenizer"] = [_tokenizer_file(self.folder, "target")]
        return {name: sha256(*paths) for name, paths in files.items()}

    def prompts(self, split: str, num: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        return read_prompts(self.folder / "prompts.jsonl", self.tokenizer, split, num, num_tokens)

    # ------------------------------------------------------------------------------------------------- models

    def load(self, role: str, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
        """The model of a role, self-tested."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from executor.language_model import LanguageModel

        folder = self.folder / role
        logging.disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
            )
        except Exception as error:  # the libraries raise many kinds
            raise BadInput(str(folder), f"cannot be loaded ({error})") from error
        unused_ids = self.unused_ids(role)
        language_model = LanguageModel(
            model.to(device), name=str(folder), vocab_size=self.vocab_size, unused_ids=unused_ids
        )
        language_model.check()
        return language_model


def load_folder(folder: Path, *, allow_other_tokenizer: bool = False) -> FolderPair:
    """Check a folder. Raises `BadInput` naming the file or the token that is wrong."""
    for role in ROLES:
        _require_file(folder / role / "config.json")
        _weights(folder / role)
    _check_tokenizers(folder, allow_other_tokenizer=allow_other_tokenizer)
    pair = FolderPair(folder.name, folder)
    _check_vocabularies(pair)
    return pair


def require_split(split: str) -> str:
    """The split itself. Raises `BadInput` unless there is one of this name."""
    if split not in SPLITS:
        raise BadInput("split", f"must be one of {', '.join(SPLITS)}", split)
    return split


def read_prompts(
    path: Path, tokenizer: Tokenizer, split: str, num: int, num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The first `num` prompts of a split that have `num_tokens` tokens, cut to that length, from a prompts.jsonl.

    Raises `BadInput` if there are not that many.
    """
    require_split(split)
    num, num_tokens = require_count("prompts: num", num, 0), require_count("prompts: num_tokens", num_tokens, 1)
    prompts: list[tuple[int, ...]] = []
    for text in list(_texts(path, split)):  # a damaged line is found wherever it stands
        if len(prompts) == num:
            break
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= num_tokens:
            prompts.append(tuple(ids[:num_tokens]))
    if len(prompts) < num:
        raise BadInput(str(path), f"must hold {num} {split} prompts of {num_tokens} tokens", len(prompts))
    return tuple(prompts)


# -------------------------------------------------------------------------------------------------------- vocabularies


def _check_vocabularies(pair: FolderPair) -> None:
    """Each model must know every id of the pair as an input, for any may be committed."""
    for role in ROLES:
        size = _entry(pair.folder, role, "vocab_size")
        if size < pair.vocab_size:
            rule = f"vocab_size must cover the {pair.vocab_size} ids of the tokenizer, any of which may be fed"
            raise BadInput(str(pair.folder / role / "config.json"), rule, size)


def _check_tokenizers(folder: Path, *, allow_other_tokenizer: bool) -> None:
    """No id may stand for different strings. One that a tokenizer lacks is no difference."""
    files = _tokenizer_files(folder)
    vocabularies = [_vocabulary(path) for path in files]
    first = vocabularies[0]
    for path, vocabulary in zip(files[1:], vocabularies[1:], strict=True):
        shared = sorted(first.keys() & vocabulary.keys())
        differing = [token_id for token_id in shared if first[token_id] != vocabulary[token_id]]
        if not differing:
            continue
        token_id = differing[0]
        rule = f"must be that of {files[0].relative_to(folder)}: id {token_id} is {first[token_id]!r} there"
        if not allow_other_tokenizer:
            raise BadInput(str(path), rule, vocabulary[token_id])
        warnings.warn(
            f"ANOTHER TOKENIZER: {path} {rule} and {vocabulary[token_id]!r} here, as are {len(differing)} ids; "
            "whatever the draft proposes means something else",
            stacklevel=4,
        )


def _tokenizer_files(folder: Path) -> list[Path]:
    """The target's first; a role's own file counts even where there is a shared one."""
    shared, own = folder / "tokenizer.json", [folder / role / "tokenizer.json" for role in ROLES]
    if shared.is_file():
        return [shared, *(path for path in own if path.is_file())]
    return [_require_file(path) for path in own]


def _tokenizer_file(folder: Path, role: str) -> Path:
    """The one that says which ids a role knows."""
    files, own = _tokenizer_files(folder), folder / role / "tokenizer.json"
    return own if role == "draft" and own in files else files[0]


def _vocabulary(path: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadInput(str(path), f"must be a tokenizer.json ({error})") from None
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    if not vocabulary:
        raise BadInput(str(path), "must know at least one token")
    return vocabulary


# --------------------------------------------------------------------------------------------------------------- files


def _entry(folder: Path, role: str, *names: str) -> int:
    """The first of these entries that config.json states, in the part about text where there are several parts."""
    path = folder / role / "config.json"
    config = _read_json(path)
    config = config.get("text_config", config)
    values = [config[name] for name in names if config.get(name)]
    if not values:
        raise BadInput(str(path), f"must state {names[0]}")
    return int(values[0])


def _weights(folder: Path) -> list[Path]:
    """One file, or the parts of a large one."""
    parts = sorted(folder.glob("model-*-of-*.safetensors"))
    return parts or [_require_file(folder / "model.safetensors")]


def sha256(*paths: Path) -> str:
    """Of the contents of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


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
