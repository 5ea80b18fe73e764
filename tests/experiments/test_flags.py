"""Every option of every command changes what is asked or what is answered, or is known not to, with the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from experiments import cli, searching
from experiments.config import QUICKSTART, load_config
from experiments.planning import Plan
from tests.sim.served import served
from tests.sim.toy import markov, record_of, system_of

NUMBERS = """
schema: 1
name: small
text: {prompt_tokens: 16, new_tokens: 24, batch_size: 2}
acceptance: {conditional: [0.75]}
times: {verify_ms: 11.5, verify_free_tokens: 8, verify_ms_per_token: 0.5, draft_step_ms: 2.5, service_ms: 0.7,
        glue_ms: 2.8, tree_step_ms: 2.5, prefill_ms: 20}
search: {speculation_lengths: [2], budgets: [8], fan_out_rules: [uniform], fallbacks: [draft]}
"""
SAMPLES = Path(__file__).parents[1] / "calibration" / "importers" / "samples"
SD, AR = "{kind: sd, speculation_length: 2}", "{kind: ar}"
SIMULATE = ("simulate", "numbers.yaml", "--policy", SD)
SAMPLED = (*SIMULATE, "--engine", "des")
SERVE = ("serve", "numbers.yaml", "--policy", SD, "--requests", 40)
LOADED = (*SERVE, "--rate", 4)
SEARCH = ("search", "numbers.yaml")
GOODPUT = (*SEARCH, "--objective", "goodput", "--rate", 4)
EXPORT = ("export", "numbers.yaml", "--to", "ssd")
VLLM = ("import", "vllm", SAMPLES / "vllm_serve_sd.json")
SGLANG = ("import", "sglang", SAMPLES / "sglang.jsonl")
SSD = ("import", "ssd", SAMPLES / "ssd_async.txt", "--fan-out", 3)
EXPERIMENT = (QUICKSTART, "--dry-run", "--json")
VALIDATION = ("validate", QUICKSTART.parent / "validate_stdlib.yaml", "--dry-run", "--json")

# A command with an option left out, and what to add.
CHANGES: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (("run", *EXPERIMENT), ("--seed", 5)),
    (("run", *EXPERIMENT), ("--batch-size", 2)),
    (("run", *EXPERIMENT), ("--reduced",)),
    (("run", *EXPERIMENT), ("--set", "run.repeats=5")),
    (("profile", *EXPERIMENT), ("--seed", 5)),
    (("profile", *EXPERIMENT), ("--batch-size", 2)),
    (("profile", *EXPERIMENT), ("--reduced",)),
    (("profile", *EXPERIMENT), ("--set", "workload.temperature=1")),
    (VALIDATION, ("--seed", 5)),
    (VALIDATION, ("--reduced",)),
    (VALIDATION, ("--set", "validation.repeats=5")),
    (SIMULATE[:2], ("--policy", AR)),
    (SIMULATE, ("--engine", "vectorized")),
    (SIMULATE, ("--batch-size", 1)),
    (SIMULATE, ("--set", "times.verify_ms=20")),
    (("simulate", "system.json", *SAMPLED[2:], "--batch-size", 3), ("--beyond", "extrapolate")),
    (SAMPLED, ("--seed", 5)),
    (SAMPLED, ("--half-width", 0.5)),
    (SIMULATE, ("--json",)),
    (SERVE, ("--rate", 4)),
    (SERVE, ("--concurrency", 4)),
    (LOADED, ("--max-batch", 2)),
    (LOADED[:4] + LOADED[6:], ("--requests", 60)),
    (LOADED, ("--slo-ttft-ms", 25)),
    (LOADED, ("--slo-tpot-ms", 7)),
    (LOADED, ("--policy", AR)),
    (LOADED, ("--set", "times.verify_ms=20")),
    (LOADED, ("--seed", 5)),
    (LOADED, ("--json",)),
    (("serve", "system.json", *LOADED[2:], "--max-batch", 3), ("--beyond", "extrapolate")),
    (("search", "system.json"), ("--config", "other.yaml")),
    (("search", "system.json"), ("--set", "search.budgets=[8]")),
    (("search", "system.json"), ("--beyond", "extrapolate")),
    (SEARCH, ("--set", "search.budgets=[4]")),
    (SEARCH, ("--engine", "des")),
    (SEARCH, ("--objective", "throughput")),
    (SEARCH, ("--batch-size", 1)),
    (SEARCH, ("--batch-sizes", "1,2")),
    (SEARCH, ("--slo-tpot-ms", 20)),
    (GOODPUT, ("--slo-ttft-ms", 20)),
    (GOODPUT[:4], ("--rate", 5)),
    (GOODPUT[:4], ("--concurrency", 5)),
    (GOODPUT, ("--max-batch", 2)),
    (GOODPUT, ("--requests", 50)),
    (SEARCH, ("--sensitivity",)),
    (SEARCH, ("--map", "map.svg")),
    (SEARCH, ("--out", "found")),  # a report holds map and sensitivity
    (SEARCH, ("--draws", 3)),
    (SEARCH, ("--seed", 5)),
    (EXPORT[:2], ("--to", "vllm")),
    (EXPORT, ("--policy", SD)),
    (("export", "system.json", "--to", "ssd"), ("--config", "other.yaml")),
    (EXPORT, ("--batch-size", 1)),
    (EXPORT, ("--set", "search.budgets=[4]")),
    (EXPORT, ("--json",)),
    (VLLM, ("--ar", SAMPLES / "vllm_serve_ar.json")),
    (SGLANG, ("--speculation-length", 4)),
    (VLLM, ("--batch-size", 3)),
    (VLLM, ("--prompt-tokens", 77)),
    (VLLM, ("--new-tokens", 99)),
    (VLLM, ("--temperature", 0.5)),
    (SSD[:3], ("--fan-out", 3)),
    (VLLM, ("--draws", 7)),
    (VLLM, ("--seed", 7)),
    (("doctor",), ("--json",)),
]
# Of which command, or of any (*), an option changes neither, and where it is tested.
CHANGES_NEITHER = {
    ("*", "--help"): "test_cli",
    ("*", "--out"): "where the same result goes: test_output",
    ("*", "--overwrite"): "what may stand there: test_output",
    ("*", "--resume"): "what need not be done again: test_resume, test_validation",
    ("*", "--quiet"): "progress only: test_cli, test_validation, test_searching",
    ("*", "--dry-run"): "the settings alone: test_cli, test_validation",
    ("*", "--json"): "the same as JSON: test_cli, test_searching, test_benchmark, test_checks, test_validation",
    ("*", "--profile"): "an earlier profile in place of a new one: test_cli, test_validation",
    ("*", "--num-workers"): "results do not depend on it: test_workers, test_searching",
    ("search", "--cluster"): "results do not depend on it: test_workers",
    ("bench sim", "--reduced"): "how long it takes: test_benchmark",
    ("bench executor", "--reduced"): "how long it takes: test_executor_benchmark",
    ("bench executor", "--pair"): "needs models: test_executor_benchmark",
    ("check faults", "--pair"): "needs models: test_checks",
}

# Commands with axes of their own.
TESTED_WITH_THEIR_COMMAND = {"rivals", "sweep"}


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


OPTIONS = {
    (name, option)
    for name, command in commands(typer.main.get_command(cli.app))
    for parameter in command.params
    for option in parameter.opts
    if option.startswith("--")
}


def test_every_option_is_accounted_for() -> None:
    changing = {(base[0], added[0]) for base, added in CHANGES}
    assert {(name, option) for name, option in changing} <= OPTIONS
    neither = {(name, option) for name, option in OPTIONS if {(name, option), ("*", option)} & CHANGES_NEITHER.keys()}
    elsewhere = {(name, option) for name, option in OPTIONS if name in TESTED_WITH_THEIR_COMMAND}
    assert changing | neither | elsewhere == OPTIONS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of numbers, a system that was profiled for short speculations, another search, and no search itself: it
    would only answer what it was asked."""
    (tmp_path / "numbers.yaml").write_text(NUMBERS)
    system = system_of(record_of(*markov(1), num_prompts=3, length=12, seed=1))
    served(system, most_rows=2).write(tmp_path / "system.json")
    config = load_config(QUICKSTART, settings=["search.budgets=[8]", "search.speculation_lengths=[2]"])
    (tmp_path / "other.yaml").write_text(json.dumps(config.to_dict()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(searching, "answer", asked)
    return tmp_path


class Asked(Exception):
    """In place of the answer: the question."""


def asked(question: searching.Question, plan: Plan, stages: Any) -> searching.Answer:
    more = [question.with_sensitivity, question.with_map, plan.workload.batch_size, plan.system.latency.beyond.value]
    raise Asked(json.dumps([question.to_dict(), more, plan.numbers and plan.numbers.document.data]))


@pytest.fixture
def outcome(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[tuple[Any, ...]], str]:
    def run(arguments: tuple[Any, ...]) -> str:
        out = ("--out", "imported", "--overwrite") if arguments[0] == "import" else ()
        monkeypatch.setattr(sys, "argv", ["saguaro", *map(str, (*arguments, *out))])
        try:
            cli.main()
        except SystemExit as exit_:
            said = capsys.readouterr()
            written = (folder / "imported" / "numbers.yaml").read_text() if exit_.code == 0 and out else ""
            return f"{exit_.code} {said.out} {said.err if exit_.code else ''} {written}"
        except Asked as question:
            return str(question)
        raise AssertionError("a command ends")

    return run


@pytest.mark.parametrize(("base", "added"), CHANGES, ids=[f"{base[0]} {added[0]}" for base, added in CHANGES])
def test_an_option_changes_what_is_asked_or_answered(
    outcome: Callable[[tuple[Any, ...]], str], base: tuple[Any, ...], added: tuple[Any, ...]
) -> None:
    changed = outcome((*base, *added))
    assert changed != outcome(base) and not changed.startswith("2 ")


@pytest.mark.parametrize("base", [SIMULATE, SAMPLED, LOADED, SEARCH, GOODPUT, EXPORT, VLLM, SSD, VALIDATION], ids=str)
def test_without_a_change_there_is_none(outcome: Callable[[tuple[Any, ...]], str], base: tuple[Any, ...]) -> None:
    first = outcome(base)
    assert outcome(base) == first and not first.startswith("2 ")


def test_a_misspelt_number_names_the_nearest(outcome: Callable[[tuple[Any, ...]], str]) -> None:
    assert "did you mean times.verify_ms?" in outcome((*SIMULATE, "--set", "times.verify=12"))
    assert "did you mean search.budgets?" in outcome((*SEARCH, "--set", "search.budget=[8]"))
    assert "did you mean search.budgets?" in outcome(("search", "system.json", "--set", "search.budget=[8]"))
    assert "measured" in outcome(("search", "system.json", "--set", "times.verify_ms=12"))
