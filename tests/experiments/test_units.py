"""A number that is a time, a rate or a size says its unit in its name."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.schema import FileKind, schema

MEASURES = re.compile(
    r"time|latency|duration|delay|wait|timeout|deadline|verify|draft_step|memory|bandwidth|bytes|_kv_"
)
UNITS = re.compile(r"_(s|ms|us|gb|kb|tokens)(_|$)|bytes_per|_over_")  # the last is a ratio of two times


def numbers(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every number that a file may hold."""
    if isinstance(node, dict):
        if node.get("type") in ("number", "integer") and path:
            yield path
        for name, inner in node.get("properties", {}).items():
            yield from numbers(inner, (*path, name))
        for key in ("anyOf", "oneOf", "items", "prefixItems"):
            yield from numbers(node.get(key), path)
    elif isinstance(node, list):
        for inner in node:
            yield from numbers(inner, path)


@pytest.mark.parametrize("kind", list(FileKind))
def test_every_measured_number_names_its_unit(kind: FileKind) -> None:
    described = schema(kind)
    found = {path for model in (described, *described.get("$defs", {}).values()) for path in numbers(model)}
    assert found
    unnamed = [".".join(path) for path in found if MEASURES.search(path[-1]) and not UNITS.search(path[-1])]
    assert unnamed == []
