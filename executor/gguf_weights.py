"""A Llama model stored as GGUF: its configuration, its float32 weights, its tokenizer.

The format and the block types are read by the `gguf` package (extra `smollm2`); what is done here is what turns a file
of llama.cpp into the model transformers knows. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sim.errors import BadInput

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of a token that no text is split into."""


class GgufFile:
    """The metadata and tensors of one GGUF file. Raises `BadInput` naming the file or the key that is wrong."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise BadInput(str(path), f"must be a GGUF file ({error})") from error
        if self.value("general.architecture") != "llama":
            raise BadInput(str(path), "must hold a llama model", self.value("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value; a list where the file has an array. Raises `BadInput` without it and without a default."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise BadInput(str(self.path), f"must have the metadata key {key}")
        return default

    def config(self) -> dict[str, Any]:
        """config.json of transformers' LlamaForCausalLM."""
        num_heads = int(self.value("llama.attention.head_count"))
        hidden_size = int(self.value("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": len(self.value("tokenizer.ggml.tokens")),
            "hidden_size": hidden_size,
            "intermediate_size": int(self.value("llama.feed_forward_length")),
            "num_hidden_layers": int(self.value("llama.block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self.value("llama.attention.head_count_kv", num_heads)),
            "head_dim": int(self.value("llama.rope.dimension_count", hidden_size // num_heads)),
            "max_position_embeddings": int(self.value("llama.context_length")),
            "rms_norm_eps": float(self.value("llama.attention.layer_norm_rms_epsilon")),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(self.value("llama.rope.freq_base", 10000.0)),
            },
            "hidden_act": "silu",
            "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in self._reader.tensors),
            "bos_token_id": int(self.value("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self.value("tokenizer.ggml.eos_token_id")),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """float32 arrays under the names of transformers' LlamaForCausalLM; block types are dequantised."""
        from gguf.quants import dequantize

        config = self.config()
        num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        weights: dict[str, np.ndarray] = {}
        for tensor in self._reader.tensors:
            name = _model_name(self.path, tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            projection = name.split(".")[-2]
            if projection in num_heads:
                values = halves_from_pairs(values, num_heads[projection])
            weights[name] = np.ascontiguousarray(values)
        return weights

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE that the file describes. Raises `BadInput` for any other kind."""
        kind = (self.value("tokenizer.ggml.model"), self.value("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise BadInput(str(self.path), "must have a byte-level BPE that splits as smollm's", kind)
        tokens = self.value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges")]
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.value("tokenizer.ggml.token_type")
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        return tokenizer


def halves_from_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the output rows of a query or key projection, (num_heads * head_dim, ...).

    llama.cpp rotates neighbouring pairs of a head's dimensions, transformers dimension i with i + head_dim / 2.
    """
    rows, *rest = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _model_name(path: Path, name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER_TENSOR_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_TENSOR_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TENSOR_NAMES:
        return f"{TENSOR_NAMES[parts[0]]}.{parts[1]}"
    raise BadInput(str(path), "must hold only tensors of a llama model", name)
