"""A pair: a target and a draft model that share a vocabulary, and prompts of their domain.

Describing a pair (vocabulary, prompts, hashes) needs no torch; the models are loaded on demand.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from executor.folder_pair import load_folder
from executor.smollm2_pair import load_smollm2
from executor.synthetic_pair import PREFIX, SyntheticPair
from sim.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from executor.language_model import LanguageModel

DTYPES = ("float32", "float64", "bfloat16", "float16")
_PACKAGED = Path(__file__).parent / "packaged_pairs"


class Pair(Protocol):
    """What a runner and an experiment ask of a pair. It can be pickled: a draft process loads its own model."""

    @property
    def name(self) -> str: ...

    @property
    def dataset(self) -> str:
        """Where the prompts come from."""

    @property
    def vocab_size(self) -> int:
        """The pair's ids are 0 .. `vocab_size` - 1; both models' logits are those of these ids (`head.Head`)."""

    @property
    def max_positions(self) -> int:
        """The smaller of the two models' limits."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The target's end-of-text ids."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if the tokens stand for no text."""

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of what determines `target`, `draft` and `tokenizer`."""

    def prompts(self, split: str, num: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The first `num` prompts of a split (`calibration` or `test`) of `num_tokens` tokens. Raises `BadInput` if
        there are not that many."""

    def load(self, role: str, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
        """The model of a role (`target` or `draft`), self-tested."""


def load_pair(name_or_path: str | Path, *, allow_other_tokenizer: bool = False) -> Pair:
    """A packaged pair by name (`stdlib`, or `smollm2`, see `smollm2_pair`), a folder (see `folder_pair`), or
    `synthetic:...` (see `SyntheticPair.parse`).

    Raises `BadInput` naming the file or the token that is wrong. `allow_other_tokenizer` takes a draft whose ids mean
    other strings all the same, with a warning: texts stay right, but the draft can hardly guess them.
    """
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path):
        raise BadInput("pair", "must be a name or a folder", name_or_path)
    if str(name_or_path).startswith(PREFIX):
        return SyntheticPair.parse(str(name_or_path))
    if name_or_path == "smollm2":
        return load_smollm2()
    packaged = _PACKAGED / str(name_or_path)
    is_packaged = str(name_or_path).isidentifier() and packaged.is_dir()
    folder = packaged if is_packaged else Path(name_or_path)
    if not folder.is_dir():
        known = ", ".join(sorted(p.name for p in _PACKAGED.iterdir() if p.is_dir())) if _PACKAGED.is_dir() else "none"
        raise BadInput("pair", f"must be a folder, a packaged pair ({known}) or {PREFIX}...", str(name_or_path))
    return load_folder(folder, allow_other_tokenizer=allow_other_tokenizer)
