"""Reading a YAML file against a model: strict types, no unknown keys, every message with file, line and key."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from sim.errors import BadInput

Keys = tuple[str | int, ...]  # the way from the top of the document to a value


class Section(BaseModel):
    """A mapping with known keys only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Section)


@dataclass(frozen=True)
class Document:
    """Plain data, the line of each of its keys, and the name of the file for messages."""

    name: str
    data: Mapping[str, Any]
    lines: Mapping[Keys, int]
    override: tuple[str, Mapping[str, Any]] | None = None  # name and content of the section that replaced values
    given: Mapping[Keys, str] = field(default_factory=dict)  # values of the command line, and the option of each

    def place(self, path: Keys) -> str:
        """File, line and full key, as messages begin, or the option that gave the value. A missing key stands at the
        line of the section it belongs to."""
        for keys, option in self.given.items():
            if path[: len(keys)] == keys or (path not in self.lines and keys[: len(path)] == path):
                return option if path == keys else f"{option}: {'.'.join(map(str, path))}"
        if self.override is not None and _holds(self.override[1], path):
            path = (self.override[0], *path)
        known = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        where = self.name if known is None else f"{self.name}, line {self.lines[known]}"
        return f"{where}: {'.'.join(map(str, path))}"

    def without(self, section: str) -> Document:
        """The document but for one section."""
        return replace(self, data={key: value for key, value in self.data.items() if key != section})

    def merged(self, section: str) -> Document:
        """The document with the values of one section in place of those of the same name outside it."""
        values = self.data.get(section, {})
        if not isinstance(values, Mapping):
            raise BadInput(self.place((section,)), "must be a mapping of the settings to replace", values)
        data = _merge(self.without(section).data, values)
        return replace(self, data=data, override=(section, values))

    def with_value(self, keys: Sequence[str], value: Any, option: str) -> Document:
        """The document with a value that an option of the command line gave. Raises `BadInput` if another option gave
        it already, or if the way to it leads through a list or a plain value."""
        path = tuple(keys)
        if path in self.given:
            raise BadInput(option, f"must be given once; {self.given[path]} gave it already")
        here: Any = self.data
        for depth, key in enumerate(path[:-1], 1):
            here = {} if here.get(key) is None else here[key]
            if not isinstance(here, Mapping):
                what = "a list; set all of it" if isinstance(here, list) else "no section"
                raise BadInput(option, f"{'.'.join(path[:depth])} is {what}")
        return replace(self, data=_with_value(self.data, path, value), given={**self.given, path: option})

    def with_settings(self, settings: Iterable[str]) -> Document:
        """The document with what `--set` gave, each like `section.key=value`. Raises `BadInput` as `with_value`."""
        chosen = self
        for text in settings:
            keys, value = parse_setting(text, "--set")
            chosen = chosen.with_value(keys, value, f"--set {'.'.join(keys)}")
        return chosen


def _with_value(data: Mapping[str, Any] | None, path: Keys, value: Any) -> dict[str, Any]:
    """A mapping with the value at the end of the way, in place of whatever stood there."""
    first, rest = str(path[0]), path[1:]
    inner = _with_value((data or {}).get(first), rest, value) if rest else value
    return {**(data or {}), first: inner}


def _merge(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _holds(values: Any, path: Keys) -> bool:
    """Whether the way leads to a value; inside a list every way does, for lists are replaced whole."""
    for key in path:
        if not isinstance(values, Mapping):
            return isinstance(values, list)
        if key not in values:
            return False
        values = values[key]
    return True


# Scalars by YAML 1.2's core schema, decimal only. Anything else that is not quoted stays text, so that `no`, `010`,
# `12:30` or `1_000` fail where a number or a truth value is due instead of turning into another value.
_SCALARS = (
    (re.compile(r"(true|false)"), lambda text: text == "true"),
    (re.compile(r"[-+]?(0|[1-9][0-9]*)"), int),
    (re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"(null|~|)"), lambda text: None),
)


def read_yaml(path: Path) -> Document:
    """The mapping in a YAML file. Raises `BadInput` as `parse_yaml` does, and on a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(str(path), "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(str(path), f"cannot be read ({error})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """The mapping in a text called `name`. Raises `BadInput` on bad syntax, a duplicate key, an anchor or a tag."""
    root = _compose(text, name)
    if not isinstance(root, yaml.MappingNode):
        raise BadInput(name, "must hold a mapping of keys to values")
    lines: dict[Keys, int] = {}
    return Document(name, _plain(root, (), name, lines), lines)


def parse_setting(text: str, option: str) -> tuple[tuple[str, ...], Any]:
    """The keys and the value of a setting `a.b=c`, whose value is YAML. Raises `BadInput` naming the option."""
    keys, equals, value = text.partition("=")
    path = tuple(keys.strip().split("."))
    if not equals or not all(path):
        raise BadInput(option, "must be like section.key=value", text)
    root = _compose(value, f"{option} {keys.strip()}")
    return path, None if root is None else _plain(root, (), f"{option} {keys.strip()}", {})


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable characters"
        raise BadInput(f"{name}{line}", f"is not one valid YAML document ({problem})") from None
    except RecursionError:
        raise BadInput(name, "is nested too deeply") from None
    for event in events:
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            line = f", line {event.start_mark.line + 1}" if event.start_mark else ""
            raise BadInput(f"{name}{line}", "anchors, aliases and tags are not supported")
    return root


def _plain(node: yaml.Node, at: Keys, name: str, lines: dict[Keys, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInput(f"{name}, line {line}", "a key must be a plain word")
            path = (*at, key_node.value)
            if key_node.value in mapping:
                rule = f"duplicate key, first given on line {lines[path]}"
                raise BadInput(f"{name}, line {line}: {'.'.join(map(str, path))}", rule)
            lines[path] = line
            mapping[key_node.value] = _plain(value_node, path, name, lines)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*at, index] = item.start_mark.line + 1
        return [_plain(item, (*at, index), name, lines) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node)


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    text: str = node.value
    if node.style is None:
        for pattern, convert in _SCALARS:
            if pattern.fullmatch(text):
                value = convert(text)
                return value if not isinstance(value, float) or math.isfinite(value) else text
    return text


# ---------------------------------------------------------------------------------------------------------- validation


def validate(model: type[Model], document: Document) -> Model:
    """The document as a value of `model`. Raises `BadInput` for the first key that breaks a rule."""
    try:
        # JSON mode: strict about scalars, yet lists may become tuples and strings enumeration members.
        return model.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        raise _first_error(error, model, document) from None


def _first_error(error: ValidationError, model: type[Section], document: Document) -> BadInput:
    # An unknown key comes first: the key that it should have been is often reported missing as well.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    path: Keys = tuple(first["loc"])
    if first["type"] == "extra_forbidden":
        return BadInput(document.place(path), f"unknown key{_suggestion(path, model)}")
    if first["type"] == "missing":
        return BadInput(document.place(path), "this key is missing")
    rule = re.sub(r"^\w+ should ", "must ", first["msg"])
    return BadInput(document.place(path), rule, first["input"])


def _suggestion(path: Keys, model: type[Section]) -> str:
    """The nearest known key: beside the given one if any is near, else the same or nearest name at another level."""
    known = list(_known_keys(model))
    given, parent = str(path[-1]), tuple(key for key in path[:-1] if isinstance(key, str))
    siblings = [key for key in known if key[:-1] == parent]
    for candidates in (siblings, known):
        near = difflib.get_close_matches(given, [key[-1] for key in candidates], n=1)
        if near:
            nearest = next(key for key in candidates if key[-1] == near[0])
            return f"; did you mean {'.'.join(nearest)}?"
    return f"; known here: {', '.join(key[-1] for key in siblings)}"


def _known_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, info in model.model_fields.items():
        path = (*prefix, info.alias or name)
        yield path
        for inner in _models(info.annotation):
            yield from _known_keys(inner, path)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type: itself, or those that it may hold or choose from."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
