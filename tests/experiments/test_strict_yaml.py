"""Scalars mean what YAML 1.2 says they mean, or stay text; messages point at the line and the key."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.strict_yaml import parse_yaml, read_yaml
from sim.errors import BadInput


def value_of(text: str) -> object:
    return parse_yaml(f"key: {text}", "x.yaml").data["key"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        ("1E+10", 1e10),
        ("5e-6", 5e-6),
        (".5", 0.5),
        ("-2.", -2.0),
        ("0", 0),
        ("-12", -12),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
    ],
)
def test_numbers_and_truth_values_of_yaml_1_2(text: str, expected: object) -> None:
    value = value_of(text)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("text", ["no", "yes", "on", "Off", "True", "NaN", ".nan", ".inf", "'3'", '"true"'])
def test_other_words_stay_text(text: str) -> None:
    assert value_of(text) == text.strip("'\"")


@pytest.mark.parametrize(
    "text", ["010", "0x10", "0o17", "12:30", "1_000", "1e999", "2024-01-01", "+", ".", "e5", "1.2.3"]
)
def test_what_resembles_a_number_stays_text(text: str) -> None:
    assert value_of(text) == text


@given(st.integers(-(10**12), 10**12))
def test_integers_round_trip(number: int) -> None:
    assert value_of(str(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number: float) -> None:
    value = value_of(repr(number))
    assert isinstance(value, float) and (value == number) and math.copysign(1, value) == math.copysign(1, number)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", r"x\.yaml, line 2: b\.c: duplicate key, first given on line 2"),
        ("a: 1\na: 1", r"x\.yaml, line 2: a: duplicate key, first given on line 1"),
        ("a: &x 1\nb: *x", r"x\.yaml, line 1: anchors, aliases and tags are not supported"),
        ("a: !!int '010'", r"anchors, aliases and tags"),
        ("a: [1", r"x\.yaml, line 1: is not one valid YAML document"),
        ("a: 1\n\tb: 2", r"x\.yaml, line 2: is not one valid YAML document"),
        ("a: 1\n---\nb: 2", r"is not one valid YAML document"),
        ("- 1\n- 2", r"x\.yaml: must hold a mapping"),
        ("", r"x\.yaml: must hold a mapping"),
        ("? [1, 2]\n: 3", r"x\.yaml, line 1: a key must be a plain word"),
        ("a: \x00", r"x\.yaml: is not one valid YAML document \(unreadable characters\)"),
    ],
)
def test_bad_documents_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_yaml(text, "x.yaml")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"missing\.yaml: no such file"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(BadInput, match="cannot be read"):
        read_yaml(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: caf\xe9".encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin\.yaml: cannot be read"):
        read_yaml(latin)
