"""What README.md shows can be done as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from tests.sim.toy import markov, record_of, system_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(tmp_path, monkeypatch, capsys) -> None:
    """On a toy system in place of the demo's."""
    (tmp_path / "out" / "quickstart").mkdir(parents=True)
    record = record_of(*markov(1), num_prompts=3, length=12, seed=1)
    system_of(record).write(tmp_path / "out" / "quickstart" / "system.json")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    rate, best = capsys.readouterr().out.splitlines()
    assert float(rate.split()[0]) > 0 and rate.endswith("tokens/s")
    assert best.split()[0] in ("AR", "SD", "SSD")


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\| `saguaro (\w+)", README))))
def test_every_command_of_the_table_exists(command) -> None:
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_files_that_it_names_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    configs = [word for word in shlex.split(README.replace("'", "").replace('"', "")) if word.endswith(".yaml")]
    named = {*links, *(word for word in configs if word.startswith("experiments/"))}
    assert named and all((ROOT / name).exists() for name in named)
