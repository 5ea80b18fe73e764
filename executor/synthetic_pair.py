"""A pair of random models of any shape: the latencies of large models, measured without their weights."""

from __future__ import annotations

import hashlib
import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.folder_pair import ROLES, SPLITS, require_split
from sim.errors import BadInput, require_count, require_number

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig

    from executor.language_model import LanguageModel

PREFIX = "synthetic:"
VERSION = 1  # of the way weights and prompts are made
# Logits of V ids that are normal with standard deviation sqrt(2 ln V) are at the border between noise and certainty;
# somewhat above it the likeliest id has a probability of about a half, as a language model's has.
PEAKEDNESS = 1.3
ATTENTION_SHARPNESS = 2.0  # of the queries: attention picks some tokens, so that texts do not run in circles


@dataclass(frozen=True)
class SyntheticPair:
    """A Llama with random weights as the target, its first `draft_layers` layers with the same head as the draft.

    `divergence` says how much they disagree: about the standard deviation, over the vocabulary, of what the target's
    other layers add to the logits. At 0 they add nothing (but take their time) and every draft token is accepted; at
    temperature 1 about .8 of them are at 0.75, .63 at 1.5, .4 at 3 and .2 at 5, whatever the shape (the larger the
    vocabulary the fewer at the far end); at temperature 0 nearly as many. Logits are as peaked as a language model's.

    The weights depend on this description, the precision and the kind of device, where they are made. Prompts are
    uniformly random tokens. There is no tokenizer: whatever needs one refuses.

    Raises `BadInput` on a shape that no such models have.
    """

    layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    draft_layers: int
    divergence: float = 0.75
    max_positions: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in ("divergence", "seed"):
                require_count(f"{PREFIX}{field.name}", getattr(self, field.name), 1)
        require_count(f"{PREFIX}seed", self.seed, 0)
        require_number(f"{PREFIX}divergence", self.divergence, 0.0)
        if self.draft_layers > self.layers:
            raise BadInput(f"{PREFIX}draft_layers", f"must be <= layers {self.layers}", self.draft_layers)
        if self.hidden_size % (2 * self.num_heads):
            rule = f"must be a multiple of twice num_heads {self.num_heads}"
            raise BadInput(f"{PREFIX}hidden_size", rule, self.hidden_size)
        if self.num_heads % self.num_key_value_heads:
            rule = f"must divide num_heads {self.num_heads}"
            raise BadInput(f"{PREFIX}num_key_value_heads", rule, self.num_key_value_heads)

    @classmethod
    def parse(cls, text: str) -> SyntheticPair:
        """From `synthetic:layers=32,hidden_size=4096,...`, every field once in any order; those with a default may be
        missing. Raises `BadInput` naming what is wrong."""
        given: dict[str, Any] = {}
        for part in text.removeprefix(PREFIX).split(","):
            name, _, value = part.partition("=")
            if name.strip() in given:
                raise BadInput(f"{PREFIX}{name.strip()}", "must be given once")
            given[name.strip()] = _number(name.strip(), value)
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise BadInput(f"{PREFIX}{unknown[0]}", f"no such key; known: {', '.join(names)}")
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in given]
        if missing:
            raise BadInput(f"{PREFIX}{missing[0]}", "this key is missing")
        return cls(**given)

    # --------------------------------------------------------------------------------------------- description

    @property
    def name(self) -> str:
        """`parse` reads it."""
        return PREFIX + ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def dataset(self) -> str:
        return f"synthetic: random tokens, seed {self.seed}"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """No id ends a text."""
        return ()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: its tokens stand for no text."""
        return None

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of what determines the weights of each role; there is no tokenizer, whose entry is empty."""
        texts = {role: f"{VERSION};{role};{self.name}" for role in ROLES}
        return {role: hashlib.sha256(text.encode()).hexdigest() for role, text in texts.items()} | {"tokenizer": ""}

    def prompts(self, split: str, num: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The first `num` prompts of a split, `num_tokens` uniformly random tokens each."""
        key = [self.seed, SPLITS.index(require_split(split))]
        num, num_tokens = require_count("prompts: num", num, 0), require_count("prompts: num_tokens", num_tokens, 1)
        rows = [np.random.default_rng([*key, index]).integers(self.vocab_size, size=num_tokens) for index in range(num)]
        return tuple(tuple(row.tolist()) for row in rows)

    # ------------------------------------------------------------------------------------------------- models

    def load(self, role: str, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
        """The model of a role, made on the device in the precision asked for, self-tested."""
        import torch
        from transformers import LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        from executor.language_model import LanguageModel

        config = self._config(role)
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(getattr(torch, dtype))
        model = model.to_empty(device=device)
        model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # made of numbers, not of parameters
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self._fill(name, parameter)
        language_model = LanguageModel(model, name=f"{self.name}, {role}")
        language_model.check()
        return language_model

    def _config(self, role: str) -> LlamaConfig:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers if role == "target" else self.draft_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )

    def _fill(self, name: str, parameter: torch.Tensor) -> None:
        """Random numbers of the parameter's own stream, which both roles share; the norms have gain 1."""
        import torch

        if "norm" in name:
            parameter.fill_(1.0)
            return
        key = hashlib.sha256(f"{VERSION};{self.seed};{name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(key[:7], "big"))
        parameter.normal_(0.0, self._gain(name) / math.sqrt(parameter.shape[-1]), generator=generator)

    def _gain(self, name: str) -> float:
        """Standard deviation of what a matrix makes of independent inputs of standard deviation 1."""
        if "embed_tokens" in name:
            return math.sqrt(self.hidden_size)  # its rows are the inputs themselves
        if "lm_head" in name:
            return self._spread_of_logits
        if "q_proj" in name:
            return ATTENTION_SHARPNESS
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return self._gain_of_layer(int(name.split(".")[2]))
        return 1.0

    @property
    def _spread_of_logits(self) -> float:
        return PEAKEDNESS * math.sqrt(2 * math.log(max(2, self.vocab_size)))

    def _gain_of_layer(self, layer: int) -> float:
        """Of its two outputs, so that a model's layers together change the hidden state by about its own size, and the
        target's other layers by what the divergence says; outputs of attention and gate are about half their gain."""
        if layer < self.draft_layers:
            return 1 / math.sqrt(2 * self.draft_layers)
        return 2 * self.divergence / self._spread_of_logits / math.sqrt(2 * (self.layers - self.draft_layers))


def _number(name: str, value: str) -> float:
    """A whole number stays one: 64, but not 64.0, is a number of layers."""
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    raise BadInput(f"{PREFIX}{name}", "must be a number", value)
