"""The forward pass of Llama and its near relatives, step by step: the numbers of the transformers model, sooner.

A small transformers model spends two thirds of its time between the matrix products: in modules that call modules, in
norms and rotations of many operations each, in masks and output objects. Here a layer is some twenty operations on
tensors. Matrices that read the same values are one; how they lie in memory `dense_layer` decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from executor.dense_layer import dense_layer

# Model types that are a Llama but for biases, and for norms of queries and keys.
RELATIVES = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROTARY_TYPES = ("default", "linear", "llama3")  # frequencies that do not depend on the length of the text
MOST_COPIED_BYTES = 2**32  # the weights of larger models are not kept twice


def is_llama(model: PreTrainedModel) -> bool:
    """Whether `LlamaPass` knows all that the model does: its very class, plain linear layers, a usual config."""
    config: Any = model.config
    return (
        config.model_type in RELATIVES
        and type(model).__module__ == f"transformers.models.{config.model_type}.modeling_{config.model_type}"
        and type(model).__name__.endswith("ForCausalLM")
        and config.rope_parameters["rope_type"] in FIXED_ROTARY_TYPES
        and config.hidden_act == "silu"
        and config._attn_implementation == "sdpa"
        and all(type(module) is nn.Linear for module in model.modules() if hasattr(module, "in_features"))
    )


class LlamaPass:
    """A `forward_pass.ForwardPass`, with the weights that the model has when it is made.

    Where query heads share keys, `folds_queries` makes them further queries of one head: the kernels of GPUs that take
    a mask know no shared keys, and would have every key copied for every head.
    """

    def __init__(self, model: Any, *, folds_queries: bool | None = None) -> None:
        if folds_queries is None:
            folds_queries = model.device.type == "cuda"
        decoder = model.model
        may_copy = sum(weight.nbytes for weight in model.parameters()) <= MOST_COPIED_BYTES
        self._embedding = decoder.embed_tokens.weight.detach()
        self._num_folded = decoder.layers[0].self_attn.num_key_value_groups if folds_queries else 1
        self._layers = [_Layer(layer, may_copy) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm.weight, decoder.norm.variance_epsilon)
        self._head = dense_layer([model.lm_head], may_copy)
        self._rotations = _rotations(decoder.rotary_emb, model.config.max_position_embeddings, self._embedding)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, wanted: int | Tensor | None
    ) -> Tensor:
        rotations = self._rotations.index_select(0, positions.flatten())
        cos, sin = rotations.view(*tokens.shape, 1, -1).chunk(2, -1)
        if self._num_folded > 1:
            mask = mask.repeat(1, 1, self._num_folded, 1)
        shared = _Shared(tokens.shape, cos, sin, mask, cache, self._num_folded)
        hidden = self._embedding.index_select(0, tokens.flatten())
        for layer in self._layers:
            hidden = layer(hidden, shared)
        hidden = hidden.view(*tokens.shape, -1)
        hidden = of_wanted(hidden, wanted)
        return self._head(self._norm(hidden.flatten(0, 1))).view(*hidden.shape[:2], -1)


class _Shared(NamedTuple):
    """What all layers see of a pass over (rows, n) tokens."""

    shape: torch.Size
    cos: Tensor  # (rows, n, 1, head_dim)
    sin: Tensor  # likewise, its first half negated
    mask: Tensor
    cache: Cache
    num_folded: int  # query heads that are further queries of one head


class _Layer:
    """One decoder layer: (rows n, d) hidden states -> the same after attention and MLP."""

    def __init__(self, layer: Any, may_copy: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.config.num_attention_heads
        self._num_rotated: int = self._num_heads + attention.config.num_key_value_heads
        self._shares_keys = attention.num_key_value_groups > 1
        self._norm_of_heads = self._joined_norm(attention) if hasattr(attention, "q_norm") else None
        self._norms = [
            _Norm(n.weight, n.variance_epsilon) for n in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self._query_key_value = dense_layer([attention.q_proj, attention.k_proj, attention.v_proj], may_copy)
        self._output = dense_layer([attention.o_proj], may_copy)
        self._gate_up = dense_layer([mlp.gate_proj, mlp.up_proj], may_copy)
        self._down = dense_layer([mlp.down_proj], may_copy)

    def __call__(self, hidden: Tensor, shared: _Shared) -> Tensor:
        hidden = self._output.add_to(hidden, self._attention(self._norms[0](hidden), shared))
        gate, up = self._gate_up(self._norms[1](hidden)).chunk(2, -1)
        return self._down.add_to(hidden, silu(gate).mul_(up))

    def _attention(self, hidden: Tensor, shared: _Shared) -> Tensor:
        """(rows n, d) normed hidden states -> (rows n, heads head_dim) that the tokens gather from what they see."""
        heads = self._query_key_value(hidden).view(*shared.shape, -1, self._head_dim)
        rotated = self._rotate(heads[:, :, : self._num_rotated], shared).transpose(1, 2)
        queries, new_keys = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        new_values = heads[:, :, self._num_rotated :].transpose(1, 2)
        keys, values = shared.cache.update(new_keys, new_values, self._index)
        if shared.num_folded > 1:
            folded = queries.reshape(len(queries), keys.shape[1], -1, self._head_dim)
            gathered = scaled_dot_product_attention(folded, keys, values, shared.mask, scale=self._scale)
            gathered = gathered.reshape(queries.shape)
        else:
            gathered = scaled_dot_product_attention(
                queries, keys, values, shared.mask, scale=self._scale, enable_gqa=self._shares_keys
            )
        return gathered.transpose(1, 2).reshape(hidden.shape[0], -1)

    def _rotate(self, heads: Tensor, shared: _Shared) -> Tensor:
        """Rotary position embedding of (rows, n, heads, head_dim) queries and keys."""
        if self._norm_of_heads is not None:
            heads = self._norm_of_heads(heads)
        return torch.addcmul(heads * shared.cos, heads.roll(self._head_dim // 2, -1), shared.sin)

    def _joined_norm(self, attention: Any) -> _Norm:
        """The norm of queries and that of keys, side by side as their heads are."""
        num_key_heads = self._num_rotated - self._num_heads
        weights = [
            attention.q_norm.weight.expand(self._num_heads, -1),
            attention.k_norm.weight.expand(num_key_heads, -1),
        ]
        return _Norm(torch.cat(weights), attention.q_norm.variance_epsilon)


class _Norm:
    """Root mean square norm of the last dimension, w x / sqrt(mean(x^2) + eps).

    Of float32 values in four operations; of others in float32 as transformers does, operation by operation.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._weight, self._eps = weight.detach(), eps
        self._scaled_weight = self._weight * size**0.5
        self._scaled_eps = torch.tensor((size * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._scaled_eps)
            return (x / length).mul_(self._scaled_weight)
        single = x.float()
        normed = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._weight * normed.to(x.dtype)


@torch.inference_mode()
def _rotations(rotary: Any, num_positions: int, like: Tensor) -> Tensor:
    """(num_positions, 2 head_dim): the cosines, then the sines, the first half of them negated.

    With these the rotation of x is x cos + x' sin, where x' is x with its halves exchanged.
    """
    positions = torch.arange(num_positions, device=like.device)[None]
    cos, sin = (table[0] for table in rotary(like.new_zeros(1), positions))
    first, second = sin.chunk(2, -1)
    return torch.cat((cos, -first, second), -1)


def of_wanted(values: Tensor, wanted: int | Tensor | None) -> Tensor:
    """(rows, n, d) values -> those of each row's last tokens, or of the tokens at (rows, m) places; all if None."""
    if wanted is None:
        return values
    if isinstance(wanted, int):
        return values[:, -wanted:]
    return values[torch.arange(len(values), device=values.device)[:, None], wanted]
