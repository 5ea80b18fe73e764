"""The winner table and the ways on a record: every entry is what the strategy or policy predicts by itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.numbers import read_numbers
from experiments.rivals import (
    AR,
    BESIDE,
    GAINS,
    LENGTHS,
    ONE_PASS,
    SD,
    SSD_ONE_PASS,
    Assumptions,
    Grid,
    Verdict,
    WinnerTable,
    families_of,
    winner_table,
    winners_in_markdown,
    with_draft_ratio,
)
from experiments.rivals_on_record import families_on, rivals_on_record
from sim.batch_chain import steady_state
from sim.errors import BadInput
from sim.policy import Speculative
from sim.simulate import predict
from tests.sim.toy import markov, record_of, system_of, workload_of

CONFIG = Path(__file__).parents[2] / "experiments" / "configs" / "rivals.yaml"
GRID = Grid((0.6,), (0.2,), (1, 2))


@pytest.fixture(scope="module")
def numbers():
    return read_numbers(CONFIG)


@pytest.fixture(scope="module")
def table(numbers) -> WinnerTable:
    return winner_table(numbers.workload, numbers.system, GRID)


def test_every_point_has_every_family(numbers, table) -> None:
    agreement = replace(numbers.system.agreement, acceptance=(0.6,))
    names = [name for name, _ in families_of(agreement, Assumptions())]
    assert [(p.ratio, p.batch_size) for p in table.points] == GRID.places
    assert all(list(point.contenders) == names for point in table.points)
    assert set(BESIDE) | {name for pair in GAINS for name in pair} <= set(names)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_best_sd_is_the_best_of_the_policies(numbers, table, batch_size: int) -> None:
    system = replace(
        with_draft_ratio(numbers.system, 0.2), agreement=replace(numbers.system.agreement, acceptance=(0.6,))
    )
    rules = replace(numbers.workload, batch_size=batch_size)
    known = [steady_state(Speculative(K), rules, system) for K in LENGTHS]
    best = max(float(found.num_tokens[0] / found.seconds[0]) for found in known)
    assert table.at(0.6, 0.2, batch_size).rates[SD] == pytest.approx(best)
    assert table.at(0.6, 0.2, batch_size).rates[AR] == pytest.approx(batch_size / 0.0115)


def test_the_ratio_is_that_of_a_draft_step_to_a_verification(numbers) -> None:
    system = with_draft_ratio(numbers.system, 0.2)
    steps = {key[1].value: float(table.mean_s(1, 128)) for key, table in system.latency.operations.items()}
    assert steps["draft_step"] == pytest.approx(0.2 * steps["verify"])
    assert steps["tree_step"] == pytest.approx(0.2 * steps["verify"])


def test_drafting_in_one_pass_leaves_ssd_the_time_of_that_pass(table) -> None:
    """Corollary 9: with the same drafter SSD gains at most a factor 1 + T_SD, and T_SD is one pass."""
    for point in table.points:
        assert point.gain(SSD_ONE_PASS, ONE_PASS) <= 1 + point.ratio + 1e-9


def test_a_verdict_is_the_first_over_the_second(table) -> None:
    verdict = Verdict.of({"a": 3.0, "b": 1.0, "c": 2.0})
    assert (verdict.winner, verdict.runner_up, verdict.margin) == ("a", "c", pytest.approx(0.5))
    assert Verdict.of({"a": 1.01, "b": 1.0}).in_words == "a = b"
    point = table.points[0]
    shared = point.verdict_per_device(1).winner
    per_device = {name: rate / (1 + (name in BESIDE)) for name, rate in point.rates.items()}
    assert shared == max(per_device, key=lambda name: per_device[name])


def test_the_table_is_written_as_markdown_and_json(table) -> None:
    text = winners_in_markdown(table)
    assert text.count("| a = 0.6 |") == 2 * 3
    assert "## Batch 2" in text
    assert len(json.loads(json.dumps(table.to_dict()))["points"]) == 2


def test_an_axis_that_is_none_is_refused(numbers) -> None:
    for given, option in (
        (("x", "0.1", "1"), "--acceptances"),
        (("0.5", "0", "1"), "--ratios"),
        (("0.5", "0.1", "1.5"), "--batch-sizes"),
    ):
        with pytest.raises(BadInput, match=option):
            Grid.parse(*given)
    with pytest.raises(BadInput, match="file of numbers"):
        record = record_of(*markov(1), num_prompts=2, length=10, seed=0)
        winner_table(workload_of(record), system_of(record), GRID)
    with pytest.raises(BadInput, match="--batch-sizes: must not exceed"):
        winner_table(numbers.workload, numbers.system, Grid((0.6,), (0.2,), (1, 64)))


def test_the_command_prints_the_table_of_its_axes() -> None:
    axes = ["--acceptances", "0.6", "--ratios", "0.2", "--batch-sizes", "1", "--num-workers", "1"]
    ran = CliRunner().invoke(app, ["rivals", str(CONFIG), *axes])
    assert ran.exit_code == 0
    assert "| a = 0.6 |" in ran.stdout and "| SSD over SD |" in ran.stdout


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ways_on_a_record_are_ranked_by_what_each_predicts(temperature: float) -> None:
    record = record_of(*markov(5), num_prompts=3, length=20, seed=2, temperature=temperature)
    system, rules = system_of(record, verify_per_token_s=2e-4), workload_of(record)
    found = {row.family: row for row in rivals_on_record(rules, system)}
    rates = [row.tokens_per_s.value for row in found.values()]
    assert rates == sorted(rates, reverse=True)
    best = max(predict(Speculative(K), rules, system).tokens_per_s.value for K in range(1, 9))
    assert found["SD"].tokens_per_s.value == pytest.approx(best)
    assert found["AR"].speedup.value == pytest.approx(1)
    assert set(found) == {family for family, _ in families_on(record)}
    blocks = {"SD, block verification", "SSD, block verification"}
    assert (blocks <= set(found)) == (temperature > 0)
    if temperature:
        assert found["SD, block verification"].tokens_per_s.value >= found["SD"].tokens_per_s.value
