"""`saguaro serve`: a load from the command line, its table, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from experiments.cli import main
from experiments.config import QUICKSTART

NUMBERS = QUICKSTART.parent / "serving_numbers.yaml"
SSD = "{kind: ssd, speculation_length: 2, fan_out_after_hit: [2, 2, 2], fan_out_after_miss: [4], fallback: none}"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["saguaro", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


def test_every_policy_serves_the_same_load(serve) -> None:
    policies = ("--policy", "{kind: ar}", "--policy", SSD)
    code, out, _ = serve(
        NUMBERS, "--rate", 1, "--max-batch", 8, "--requests", 60, "--slo-tpot-ms", 12, *policies, "--json"
    )
    assert code == 0
    ar, ssd = json.loads(out)
    assert ar["load"] == ssd["load"] and ar["load"]["kind"] == "open"
    assert ssd["tpot_s"]["mean"]["value"] < ar["tpot_s"]["mean"]["value"]
    assert (ar["num_devices"], ssd["num_devices"]) == (1, 2)
    code, out, _ = serve(NUMBERS, "--concurrency", 2, "--max-batch", 2, "--requests", 20, *policies)
    assert code == 0 and "AR" in out and "SSD K=2" in out


def test_the_answer_is_a_sentence_with_its_uncertainty(serve) -> None:
    load = ("--rate", 2, "--max-batch", 8, "--requests", 60, "--quiet")
    policies = ("--policy", "{kind: ar}", "--policy", SSD)
    code, out, err = serve(NUMBERS, *load, *policies)
    assert code == 0 and "serve the load" not in err
    assert re.search(r"SSD K=2 .* gives every request its tokens fastest: [\d.]+ \[[\d.]+, [\d.]+\] ms per token", out)
    _, out, _ = serve(NUMBERS, *load, *policies, "--slo-tpot-ms", 10)
    assert re.search(r"SSD K=2 .* serves most requests as promised: [\d.]+ \[[\d.]+, [\d.]+\] per second", out)
    _, out, _ = serve(NUMBERS, *load, *policies[:2], *policies[:2])
    assert out.strip().endswith("not clearly better than AR.")


def test_too_much_is_said_to_have_no_steady_state(serve) -> None:
    code, out, err = serve(NUMBERS, "--rate", 50, "--max-batch", 2, "--requests", 50, "--policy", "{kind: ar}")
    assert code == 0 and "saturated, no steady state" in err
    assert "AR" in out and out.strip().endswith("No policy keeps up with the load.")


def test_a_table_of_policies_by_the_rows_at_work(serve) -> None:
    table = f"{{kind: table, entries: [[1, {SSD}], [2, {{kind: ar}}]]}}"
    code, out, _ = serve(NUMBERS, "--concurrency", 2, "--max-batch", 2, "--requests", 20, "--policy", table, "--json")
    assert code == 0 and json.loads(out)[0]["policy"]["kind"] == "table"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", 1, "--concurrency", 2), "--rate, --concurrency: must give one of the two"),
        ((), "--rate, --concurrency: must give one of the two"),
        (("--rate", 1, "--max-batch", 32), "number of rows must be in the profiled range 1..16"),
    ],
)
def test_what_cannot_be_served_is_refused(serve, arguments: tuple, message: str) -> None:
    code, out, err = serve(NUMBERS, *arguments, "--requests", 20, "--policy", "{kind: ar}")
    assert (code, out) == (2, "") and message in err


def test_without_a_prefill_nothing_is_served(serve, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.yaml"
    numbers.write_text(NUMBERS.read_text().replace("  prefill_ms: 30\n", ""))
    code, _, err = serve(numbers, "--rate", 1, "--requests", 20, "--policy", "{kind: ar}")
    assert code == 2 and "prefill" in err
