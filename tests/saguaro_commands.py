"""The `saguaro` commands that a text shows, and whether the command line knows what they say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from experiments.cli import app

CONTINUED = re.compile(r"\\\n(?:#)?\s*")


def shown_in(text: str) -> Iterator[list[str]]:
    """Words of every command that begins a line (after a # or a prompt), its continuation lines joined."""
    for line in CONTINUED.sub(" ", text).splitlines():
        shown = line.lstrip("#$ ").rstrip()
        if re.match(r"saguaro [a-z]", shown):
            yield shlex.split(shown, comments=True)


def check_understood(words: Sequence[str]) -> None:
    """Raises the command line's own error on a command, option or value that it does not know; runs nothing."""
    _parse(typer.main.get_command(app), words[0], list(words[1:]))


def _parse(command: Any, name: str, arguments: list[str]) -> None:
    context = command.make_context(name, arguments)
    if isinstance(command, TyperGroup):
        inner_name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        _parse(inner, str(inner_name), rest)
