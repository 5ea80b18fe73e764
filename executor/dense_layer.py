"""A linear layer whose weights lie as is quickest for the few rows of a decoding pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

SMALLEST_PACKED = 2**18  # weights: below, the call of the packed product costs more than it saves
FEWEST_PACKED_ROWS = 4  # oneDNN is slower on fewer rows than on four


class DenseLayer(Protocol):
    """x W^T + b for (rows, in) values x."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""

    def add_to(self, values: Tensor, x: Tensor) -> Tensor:
        """(rows, out) values and (rows, in) x -> their sum, once x has gone through the layer."""


def dense_layer(linears: Sequence[nn.Linear], may_copy: bool) -> DenseLayer:
    """Layers that read the same values as one: their outputs stand side by side.

    On a CPU the quickest layout is a copy of the weights, made if `may_copy`. Without one the layers' own weights
    serve; those of several layers become parts of one matrix, and the layers keep working.
    """
    weight, bias = _joined_weight(linears), _joined_bias(linears)
    if may_copy and weight.device.type == "cpu":
        if weight.numel() < SMALLEST_PACKED:
            return PlainLayer(weight.t().contiguous(), bias)
        if weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
            return PackedLayer(weight, bias)
    _become_parts(linears, weight)
    return PlainLayer(weight.t(), bias)


class PlainLayer:
    """The usual product. The (in, out) weights may be a view; in memory in that order they are read quicker."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return x.mm(self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def add_to(self, values: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(values if self._bias is None else values + self._bias, x, self._weight)


class PackedLayer:
    """float32 (out, in) weights in oneDNN's order. The usual product of two to some twenty rows spends most of its time
    on bringing the weights into such an order, in every pass anew."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows < FEWEST_PACKED_ROWS:
            x = pad(x, (0, 0, 0, FEWEST_PACKED_ROWS - num_rows))
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")[:num_rows]

    def add_to(self, values: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(values)


def _joined_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """(all outputs, in), without a copy of one."""
    weights = [linear.weight.detach() for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases: list[Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return torch.cat(biases).detach()


def _become_parts(linears: Sequence[nn.Linear], weight: Tensor) -> None:
    for linear, part in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
