"""The check of a GPU runs from end to end without one, and hides nothing that it left out."""

import json
from dataclasses import replace

import pytest

from executor.language_model import LanguageModel
from executor.synthetic_pair import SyntheticPair
from experiments.scripts.gpu_check import (
    PARITY,
    REDUCED,
    SPEED,
    WAITING,
    bytes_read,
    check,
    is_sound,
    markdown,
    write,
)

SMALL = replace(
    REDUCED,
    device="cpu",
    pair=SyntheticPair(2, 16, 2, 1, 24, 32, draft_layers=1, max_positions=64),
    batch_sizes=(2,),
    speculation_length=2,
    budget=3,
    prompt_tokens=8,
    new_tokens=10,
    parity_prompts=1,
    parity_tokens=8,
    copied_bytes=2**16,
)


@pytest.fixture(scope="module")
def report() -> dict:
    return check(SMALL)


def test_all_that_a_cpu_can_do_is_done(report: dict, tmp_path) -> None:
    assert report["failures"] == {} and report["not_run"] == ["waiting: needs a CUDA device"]
    assert is_sound(report)
    assert {name: found["identical"] for name, found in report[PARITY].items()} == {
        "without graphs": 1,
        "with graphs": 1,
    }
    runs = report[SPEED]["runs"]
    assert [(run["policy"], run["graphs"]) for run in runs] == [
        (policy, graphs) for graphs in (False, True) for policy in ("AR", "SD", "SSD")
    ]
    for run in runs:
        assert run["tokens_per_s"]["low"] <= run["tokens_per_s"]["median"] <= run["tokens_per_s"]["high"]
        assert (run["overlap"] is None) == (run["policy"] != "SSD")
        assert all(op["median_s"] > 0 and op["bandwidth_floor_s"] > 0 for op in run["operations"])
    write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    text = (tmp_path / "report.md").read_text()
    for part in ("with graphs", "tree_step (draft)", "GB/s", "Side by side", "waiting: needs a CUDA device"):
        assert part in text


def test_what_there_is_no_time_for_is_listed() -> None:
    report = check(replace(SMALL, budget_s=0.0))
    assert "parity: texts of the CPU: no time left" in report["not_run"]
    assert any(step.startswith("speed: load the pair with graphs") for step in report["not_run"])
    assert report[PARITY] == report[WAITING] == {} and report[SPEED]["runs"] == []
    assert "- speed: load the pair with graphs: no time left" in markdown(report)


def test_a_part_that_fails_is_told_and_the_next_one_runs(monkeypatch) -> None:
    def explode(*_args, **_kwargs):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr("experiments.scripts.gpu_check.texts_on", explode)
    report = check(replace(SMALL, batch_sizes=()))
    assert "no kernel for this device" in report["failures"][PARITY] and SPEED not in report["failures"]
    assert not is_sound(report)
    assert "**Failed: parity**" in markdown(report)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_bytes_of_a_pass_are_those_of_the_weights_and_the_cache(role: str) -> None:
    settings = replace(SMALL, dtype="float32")
    model: LanguageModel = settings.pair.load(role)
    embedding = model.model.get_input_embeddings().weight
    weights = sum(weight.nbytes for weight in model.model.parameters()) - embedding.nbytes
    assert bytes_read(settings, role, 1, 0) == weights
    model.begin(2)
    model.feed([0, 1], [[1] * 5, [2] * 5], [1, 1])
    kept = sum(part[:2, :, :5].nbytes for layer in model._cache.storage() for part in layer)
    assert bytes_read(settings, role, 2, 5) - weights == kept
