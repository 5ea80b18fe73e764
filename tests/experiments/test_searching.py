"""`saguaro search` and `saguaro export` as a person calls them, from a small file of numbers."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from experiments.benchmark import SPACE
from experiments.candidates import COLUMNS
from experiments.cli import main
from experiments.config import QUICKSTART
from experiments.search_benchmark import bench_search
from experiments.searching import Question, parse_batch_sizes
from sim.errors import BadInput
from sim.objective import Objective
from sim.search_space import SearchSpace
from tests.experiments.browser import assert_sound, needs_browser

Saguaro = Callable[..., tuple[int, str, str]]
NUMBERS = """
schema: 1
name: small
text: {prompt_tokens: 16, new_tokens: 48, batch_size: 4}
acceptance: {conditional: [0.75]}
times: {verify_ms: 11.5, verify_free_tokens: 8, verify_ms_per_token: 0.5, draft_step_ms: 2.5, service_ms: 0.7,
        glue_ms: 2.8, tree_step_ms: 2.5, prefill_ms: 20}
search: {speculation_lengths: [1, 2, 3], budgets: [8], fan_out_rules: [uniform], fallbacks: [draft, none]}
"""


@pytest.fixture
def saguaro(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Saguaro:
    """Run the command in a folder that holds numbers.yaml; returns exit code, standard output, error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "numbers.yaml").write_text(NUMBERS)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["saguaro", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        code = exit_.value.code or 0
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return run


def test_one_answer_holds_front_ties_and_what_if(saguaro: Saguaro, tmp_path: Path) -> None:
    options = ("--batch-sizes", "1,2,4", "--objective", "throughput", "--sensitivity", "--map", "map.svg", "--draws", 0)
    code, out, _ = saguaro("search", "numbers.yaml", *options, "--json")
    assert code == 0
    found = json.loads(out)
    assert {"num_policies", "seconds", "recommended", "ties", "front", "stopped", "answer"} <= found.keys()
    assert [row["batch_size"] for row in found["by_batch_size"]] == [1, 2, 4]
    assert all(set(row["best"]) == {"ar", "sd", "ssd"} for row in found["by_batch_size"])
    throughputs = [point["throughput"] for point in found["front"]]
    assert throughputs == sorted(throughputs) and found["batch_size"] == found["front"][-1]["batch_size"]
    assert found["recommended"]["name"] in found["ties"]
    assert found["sensitivity"]["recommended"] == found["recommended"]["name"] and found["sensitivity"]["rows"]
    assert found["map"]["batch_sizes"] == [1, 2, 4] and found["map"]["own"]["batch_size"] == found["batch_size"]
    figure = ElementTree.parse(tmp_path / "map.svg").getroot()
    assert figure.tag.endswith("svg") and len(list(figure.iter("{http://www.w3.org/2000/svg}pattern"))) >= 1


def test_the_same_question_has_the_same_answer_with_other_workers(saguaro: Saguaro) -> None:
    answers = []
    for workers in (1, 2):
        _, out, _ = saguaro("search", "numbers.yaml", "--draws", "0", "--num-workers", workers, "--json")
        answers.append(json.loads(out) | {"seconds": None})
    assert answers[0] == answers[1]


def test_tables_end_with_the_answer_in_a_sentence(saguaro: Saguaro) -> None:
    code, out, err = saguaro("search", "numbers.yaml", "--batch-sizes", "1,4", "--sensitivity", "--draws", "0")
    assert code == 0 and "every policy of the space was evaluated" in err
    for part in ("recommended", "ms per token", "if wrong", "AR", "SD K=1"):
        assert part in out
    *remarks, answer = out.rpartition("┘")[2].strip().splitlines()
    assert any("Batches of 1 are the best by tokens_per_s" in line for line in remarks)
    assert "is the best of" in answer and "tokens/s; " in answer and answer.endswith("times SD K=3.")


def test_goodput_asks_for_a_load(saguaro: Saguaro) -> None:
    load = ("--rate", "5", "--max-batch", "2", "--requests", "200", "--slo-tpot-ms", "11")
    code, out, _ = saguaro("search", "numbers.yaml", "--objective", "goodput", *load, "--draws", "0", "--json")
    assert code == 0
    goodput = json.loads(out)["goodput"]
    assert goodput["recommended"] in goodput["ties"] and len(goodput["reports"]) >= 3
    for options in (("--objective", "goodput"), ("--rate", "1")):
        code, out, err = saguaro("search", "numbers.yaml", *options)
        assert code == 2 and "--objective goodput: goes with a load" in err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--objective", "speed"), "--objective: must be one of tokens_per_s, throughput"),
        (("--batch-sizes", "1,x"), "--batch-sizes: must be integers >= 1 with commas between them, got '1,x'"),
        (("--batch-sizes", "64"), "none can be served; 64: "),
        (("--slo-tpot-ms", "0.001"), "is kept by no policy"),
    ],
)
def test_impossible_questions_are_refused(saguaro: Saguaro, options: tuple[str, ...], part: str) -> None:
    code, out, err = saguaro("search", "numbers.yaml", "--draws", "0", *options)
    assert code == 2 and out == "" and part in err


def test_batch_sizes_are_read_once_each() -> None:
    assert parse_batch_sizes("4, 1,4") == (4, 1) and parse_batch_sizes(None) == ()
    with pytest.raises(BadInput, match="goes with a load"):
        Question(SearchSpace((1,), (1,)), Objective.GOODPUT)


def test_export_says_what_it_recommends_and_what_is_lost(saguaro: Saguaro) -> None:
    code, out, err = saguaro("export", "numbers.yaml", "--to", "vllm", "--json")
    assert code == 0 and "is the best of" in err
    exported = json.loads(out)
    assert all(f"not expressed: {line}" in err for line in exported["not_expressed"])
    code, out, err = saguaro("export", "numbers.yaml", "--to", "sglang", "--policy", "{kind: ar}")
    assert code == 0 and out == "python -m sglang.launch_server --model-path TARGET_MODEL\n"
    code, out, err = saguaro("export", "numbers.yaml", "--to", "llama")
    assert code == 2 and "--to: must be one of ssd, vllm, sglang, got 'llama'" in err


def test_ten_lines_choose_a_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = QUICKSTART.parent / "from_numbers.yaml"
    monkeypatch.setattr(sys, "argv", ["choose", str(numbers)])
    runpy.run_module("experiments.scripts.choose", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("AR: ") and "SSD K=3" in lines[-1]


def test_benchmark_searches_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SearchSpace((1, 2), (4, 8))
    monkeypatch.setattr("experiments.search_benchmark.SPACE", small)
    figures = bench_search(lambda doing: None, num_workers=2)
    one, several = figures["one_worker"], figures["all_workers"]
    assert one["num_policies"] == several["num_policies"] > 4 and one["recommended"] == several["recommended"]
    assert SPACE.num_combinations > 500


# ----------------------------------------------------------------------------------------------------------- the report


FIGURES = ["rates_by_length", "latency_throughput", "win_map", "what_if"]
SMALL = "search={speculation_lengths: [2], budgets: [8], fan_out_rules: [uniform], fallbacks: [none]}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "numbers.yaml").write_text(NUMBERS)
    options = ["--batch-sizes", "1,2,4", "--objective", "throughput", "--draws", "3", "--set", SMALL]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_:
        arguments = ["saguaro", "search", folder / "numbers.yaml", *options, "--out", folder / "found"]
        patch.setattr(sys, "argv", list(map(str, arguments)))
        main()
    assert not exit_.value.code
    return folder / "found"


def test_a_report_begins_with_the_answer_and_needs_no_other_file(report: Path) -> None:
    found, manifest = (json.loads((report / f"{name}.json").read_text()) for name in ("search", "manifest"))
    markdown, page = (report / "report.md").read_text(), (report / "report.html").read_text()
    assert markdown.splitlines()[2] == f"{found['answer']}." and found["recommended"]["name"] in found["answer"]
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    document = ElementTree.fromstring(page)
    assert "".join(document.find("body/main/p").itertext()) == f"{found['answer']}."  # type: ignore[union-attr]
    titles = [title.text for title in document.iter("h2")]
    assert titles == re.findall(r"^## (.+)$", markdown, re.MULTILINE)
    figures = [figure.attrib["id"] for figure in document.iter("figure")]
    assert figures == FIGURES
    assert all((report / "figures" / f"{name}.svg").is_file() for name in figures)
    assert manifest["record"] == "search" and manifest["digest"] in markdown and "**front**" in markdown


def test_the_table_holds_every_candidate_of_every_batch_size(report: Path) -> None:
    found = json.loads((report / "search.json").read_text())
    rows = pq.read_table(report / "candidates.parquet")
    assert [(field.name, str(field.type)) for field in rows.schema] == list(COLUMNS.items())
    assert csv.read_csv(report / "candidates.csv").cast(rows.schema).num_rows == rows.num_rows == found["num_policies"]
    recommended = [row for row in rows.to_pylist() if row["is_recommended"]]
    assert [row["batch_size"] for row in recommended] == [1, 2, 4]
    assert recommended[-1]["name"] == found["recommended"]["name"]
    assert recommended[-1]["tokens_per_s"] == found["recommended"]["tokens_per_s"]["value"]


def test_the_same_question_has_the_same_digests_and_another_seed_has_not(saguaro: Saguaro, tmp_path: Path) -> None:
    def digests(seed: int) -> list[str]:
        out = tmp_path / "again"
        options = ("--draws", 2, "--seed", seed, "--out", out, "--overwrite", "--quiet", "--batch-size", 1)
        assert saguaro("search", "numbers.yaml", "--set", SMALL, *options)[0] == 0
        manifest = json.loads((out / "manifest.json").read_text())
        return [manifest["digest"], manifest["digest_of_result"]]

    first = digests(3)
    assert digests(3) == first
    assert not set(digests(4)) & set(first)


def test_a_finished_report_is_not_overwritten_unasked(saguaro: Saguaro, report: Path) -> None:
    code, out, err = saguaro("search", "numbers.yaml", "--draws", "0", "--out", report)
    assert code == 2 and out == "" and "already exists" in err


@needs_browser
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_without_network_shows_the_report_whole(report: Path, tmp_path: Path, width: int) -> None:
    assert_sound(report / "report.html", tmp_path, width=width, figures=FIGURES)
