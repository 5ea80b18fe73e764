"""The pages of docs/ and the scripts of examples/ do what they say, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import experiments.bench
import experiments.run
from experiments.cli import app
from experiments.config import SearchConfig
from sim.search_space import SearchSpace
from tests.experiments.fake_bench import FakeBench
from tests.saguaro_commands import check_understood, shown_in

ROOT = Path(__file__).parents[1]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
PAGES = sorted(DOCS.glob("*.md"))
WORKED = ("model", "your-hardware", "engine-logs", "add-a-policy", "add-an-importer", "add-a-latency-model")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ONLY_UNDERSTOOD = {"doctor", "bench", "check", "validate"}  # of a machine, or long
IN_SHORT = {
    "run": ["--reduced"],
    "profile": ["--reduced"],
    "import": ["--draws", "1"],
    "search": ["--draws", "1"],
}  # added to a command here
WIDTH = "150"  # of what is printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the repository's files in it, on a machine that obeys the simulator."""

    @contextmanager
    def open_bench(config: Any, stages: Any) -> Iterator[FakeBench]:
        yield FakeBench(config)

    for name in ("experiments", "tests", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    monkeypatch.setattr(experiments.bench, "open_bench", open_bench)
    return tmp_path


def thinned(config: SearchConfig) -> SearchSpace:
    """Few policies of those that a file asks for: what a page shows of a search does not depend on their number."""
    return SearchSpace(config.speculation_lengths[:2], config.budgets[:1], ("uniform",), config.fallbacks[:1])


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and content of every block, in order."""
    return BLOCK.findall(page.read_text())


def run_command(words: list[str]) -> str:
    """What it prints. Fails unless it ends well."""
    check_understood(words)
    if words[1] in ONLY_UNDERSTOOD:
        return ""
    done = CliRunner().invoke(app, [*words[1:], *IN_SHORT.get(words[1], [])])
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.stdout


def run_shell(text: str) -> str:
    return "".join(run_command(words) for words in shown_in(text))


def run_python(text: str, name: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, name, "exec"), names)
    return printed.getvalue()


def same_lines(printed: str, shown: str) -> bool:
    return [line.rstrip() for line in printed.splitlines()] == [line.rstrip() for line in shown.splitlines()]


@pytest.mark.parametrize("name", WORKED)
def test_a_page_can_be_followed_from_top_to_bottom(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments.run, "search_space", thinned)
    module = ModuleType(name)  # where classes of the page look for themselves
    monkeypatch.setitem(sys.modules, name, module)
    printed = ""
    for language, content in blocks_of(DOCS / f"{name}.md"):
        if language == "python":
            printed = run_python(content, f"{name}.md", module.__dict__)
        elif language == "sh":
            printed = run_shell(content)
        else:
            assert language == "text"
            assert same_lines(printed, content), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_understood_and_its_files_exist(page: Path) -> None:
    text = page.read_text()
    for language, content in blocks_of(page):
        for words in shown_in(content) if language in ("sh", "bash") else ():
            check_understood(words)
    for target in re.findall(r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (DOCS / "index.md").read_text()))
    assert {page.name for page in PAGES} - {"index.md"} <= named


def test_options_in_running_text_exist() -> None:
    known = {option for command in every_command(typer.main.get_command(app)) for option in options_of(command)}
    known |= {"--save-result", "--output-json", "--spec", "--full"}  # of the engines, and of a script
    for name in WORKED:
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", (DOCS / f"{name}.md").read_text())) <= known


def every_command(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from every_command(inner)


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_an_example_prints_what_stands_beside_it(script: Path, folder: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    assert printed.getvalue() == script.with_suffix(".out").read_text()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda script: script.stem)
def test_a_command_prints_what_stands_beside_it(script: Path, folder: Path) -> None:
    assert same_lines(run_shell(script.read_text()), script.with_suffix(".out").read_text())


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"^\| `([\w.]+)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    scripts = {*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")}
    assert listed == {script.name for script in scripts}
