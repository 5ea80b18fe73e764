"""Linear layers in other layouts: the same products, for any number of rows."""

import pytest
import torch
from torch import nn

from executor.dense_layer import SMALLEST_PACKED, PackedLayer, PlainLayer, dense_layer

NUM_ROWS = (1, 2, 3, 4, 5, 9, 33)


def linears(num_in: int, sizes: list[int], dtype: torch.dtype, biases: bool = True) -> list[nn.Linear]:
    """Of which every second has a bias."""
    torch.manual_seed(0)
    return [nn.Linear(num_in, size, bias=biases and i % 2 == 0, dtype=dtype) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(
    ("num_in", "sizes", "dtype", "may_copy", "kind"),
    [
        (24, [16], torch.float64, True, PlainLayer),
        (24, [16, 8, 8], torch.float32, True, PlainLayer),
        (24, [16, 8, 8], torch.float64, False, PlainLayer),
        (256, [512, 512], torch.float64, True, PlainLayer),
        (256, [512, 512], torch.float32, False, PlainLayer),
        (256, [512, 512], torch.float32, True, PackedLayer),
        (2048, [130], torch.float32, True, PackedLayer),
    ],
)
def test_a_layer_gives_what_its_parts_give(num_in, sizes, dtype, may_copy, kind, biases) -> None:
    parts = linears(num_in, sizes, dtype, biases)
    layer = dense_layer(parts, may_copy)
    assert isinstance(layer, kind)
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype is torch.float64 else 1e-5}
    for num_rows in NUM_ROWS:
        x, values = torch.randn(num_rows, num_in, dtype=dtype), torch.randn(num_rows, sum(sizes), dtype=dtype)
        with torch.inference_mode():
            expected = torch.cat([part(x) for part in parts], -1)
            assert torch.allclose(layer(x), expected, **tolerance)
            before = values.clone()
            assert torch.allclose(layer.add_to(values, x), values + expected, **tolerance)
            assert torch.equal(values, before)


def test_a_row_of_a_packed_layer_depends_on_no_other_row() -> None:
    layer = dense_layer(linears(256, [2 * SMALLEST_PACKED // 256], torch.float32), may_copy=True)
    x = torch.randn(5, 256)
    with torch.inference_mode():
        for num_rows in (1, 2, 5):
            together, other = layer(x[:num_rows]), x[:num_rows].clone()
            other[1:] = torch.nan
            assert torch.equal(layer(other)[0], together[0])


def test_without_copies_the_parts_share_the_joined_weights() -> None:
    parts = linears(24, [16, 8], torch.float64)
    before = [part.weight.clone() for part in parts]
    dense_layer(parts, may_copy=False)
    assert all(torch.equal(part.weight, weight) for part, weight in zip(parts, before, strict=True))
    assert parts[0].weight.untyped_storage().data_ptr() == parts[1].weight.untyped_storage().data_ptr()
