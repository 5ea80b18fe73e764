"""Run the ready configs by the commands that they state, and print question, command, time and answer of each.

    python -m experiments.scripts.run_ready_configs [--full] [NAME...]

Files of numbers are answered at full size. Experiments are run with `--reduced`, a check that everything works and no
measurement, unless `--full` is given; at full size each of them takes minutes.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.config import QUICKSTART
from experiments.strict_yaml import read_yaml

CONFIGS = QUICKSTART.parent
READY = (
    "quickstart",
    "choose_k_and_fan_out",
    "fallback_by_batch_size",
    "saguaro_sampling",
    "draft_target_ratio",
    "pairs",
    "temperature",
    "serving_numbers",
    "draft_devices",
    "shared_draft",
    "five_numbers",
)
MEASURED = ("run", "sweep")  # commands that write a folder if their file is an experiment


def comment_of(path: Path) -> str:
    """What stands before the first key of a file, without the signs of a comment."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return "\n".join(lines)


def question_of(path: Path) -> str:
    """The first sentence or question of a file's comment."""
    text = " ".join(comment_of(path).split("\nsaguaro ")[0].split())
    ends = [text.find(mark) for mark in ("? ", ". ", ": ") if mark in text]
    return text[: min(ends) + 1] if ends else text


def command_of(path: Path) -> list[str]:
    """The words of the command that a file's comment states."""
    lines = comment_of(path).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("saguaro "))
    last = next(number for number in range(first, len(lines)) if not lines[number].endswith("\\"))
    return shlex.split(" ".join(line.rstrip("\\") for line in lines[first : last + 1]))


def run(name: str, out: Path, *, full: bool) -> tuple[list[str], float, str, int]:
    """The command as it was run, its seconds, its answer or what it complains of, its exit code."""
    path = CONFIGS / f"{name}.yaml"
    command = command_of(path)
    is_measured = command[1] in MEASURED and "pair" in read_yaml(path).data
    options = [*([] if full else ["--reduced"]), "--quiet"] if is_measured else []
    written = ["--out", str(out / name)] if is_measured else []
    program = [sys.executable, "-c", "from experiments.cli import main; main()"]
    start_s = time.perf_counter()
    words = [*program, *command[1:], *options, *written]
    done = subprocess.run(words, capture_output=True, text=True, cwd=CONFIGS.parents[1])
    seconds = time.perf_counter() - start_s
    return [*command, *options], seconds, answer_in(done.stdout) or done.stderr.strip(), done.returncode


def answer_in(printed: str) -> str:
    """What stands behind the last table; its first and its third column where nothing does."""
    table, _, behind = printed.rpartition("┘")
    if behind.strip():
        return " ".join(behind.partition("\ndigest")[0].split())
    rows = [[cell.strip() for cell in line.split("│")] for line in table.splitlines() if line.startswith("│")]
    heads = [[cell.strip() for cell in line.split("┃")] for line in table.splitlines() if line.startswith("┃")]
    return "; ".join(f"{row[1]}: {heads[-1][3]} {row[3]}" for row in rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(READY)}; all unless given")
    parser.add_argument("--full", action="store_true", help="run experiments at their full size")
    given = parser.parse_args(arguments)
    failed = 0
    print("| config | question | command | time, s | answer |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or READY:
            command, seconds, said, code = run(name, Path(folder), full=given.full)
            failed += code != 0
            question = question_of(CONFIGS / f"{name}.yaml")
            cells = (name, question, f"`{shlex.join(command)}`", f"{seconds:.0f}", said)
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
