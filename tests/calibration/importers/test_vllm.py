"""vLLM's counters, logs and benchmark results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from calibration.importers.imported import Source, Told
from calibration.importers.vllm import import_vllm
from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative
from tests.calibration.importers.samples import sample

COUNTERS, SD, AR = sample("vllm_metrics.txt"), sample("vllm_serve_sd.json"), sample("vllm_serve_ar.json", is_plain=True)


def changed(source: Source, **values: object) -> Source:
    return replace(source, text=json.dumps(json.loads(source.text) | values))


def test_counters_and_both_runs_tell_all_but_the_split_of_a_round() -> None:
    imported = import_vllm([COUNTERS, SD, AR], Told())
    learned = imported.learned
    assert learned["acceptance.cumulative"] == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    assert learned["times.ar_ms"] == 20.0 and learned["times.sd_round_ms"] == pytest.approx(30.0, abs=1e-3)
    assert learned["times.sd_speculation_length"] == 4
    assert (
        learned["text.batch_size"] == 1 and learned["text.new_tokens"] == 512 and learned["text.prompt_tokens"] == 128
    )
    assert [entry.key for entry in imported.assumed] == ["acceptance.shift", "times.verify_over_ar"]
    assert imported.assumed[1].high < 30 / 20  # drafting takes some time
    assert [run.policy for run in imported.measured] == [Autoregressive(), Speculative(4)]
    assert [run.tokens_per_s for run in imported.measured] == pytest.approx([50.0, 1000 / 8.9243])


def test_without_the_plain_run_the_draft_step_is_assumed_as_well() -> None:
    imported = import_vllm([SD], Told(temperature=0.7))
    assert "times.ar_ms" not in imported.learned and imported.learned["text.temperature"] == 0.7
    assert {entry.key for entry in imported.assumed} >= {"times.verify_over_ar", "times.draft_over_ar"}
    assert "how long a draft step takes" in imported.not_learned


def test_counters_alone_tell_acceptance_and_no_time() -> None:
    imported = import_vllm([COUNTERS], Told())
    assert imported.learned["times.ar_ms"] == 1.0 and imported.measured == ()
    assert any("counts as 1 ms" in said for said in imported.not_learned)


def test_two_snapshots_count_what_lies_between() -> None:
    values = {"10000.0": "1000.0", "40000.0": "4000.0", "23616.0": "2000.0", "8000.0": "900.0", "6400.0": "600.0"}
    earlier = COUNTERS.text
    for old, new in (values | {"5120.0": "300.0", "4096.0": "200.0"}).items():
        earlier = earlier.replace(f" {old}", f" {new}")
    imported = import_vllm([replace(COUNTERS, text=earlier), COUNTERS], Told())
    shares = [(8000 - 900) / 9000, (6400 - 600) / 9000, (5120 - 300) / 9000, (4096 - 200) / 9000]
    assert imported.learned["acceptance.cumulative"] == pytest.approx(shares, abs=1e-6)
    with pytest.raises(BadInput, match="give the earlier one first"):
        import_vllm([COUNTERS, replace(COUNTERS, text=earlier)], Told())


def test_log_lines_are_pooled_by_their_drafts() -> None:
    imported = import_vllm([sample("vllm_server.log")], Told())
    expected = [(low + 3 * high) / 4 for low, high in ((0.82, 0.78), (0.65, 0.61), (0.52, 0.45), (0.41, 0.36))]
    assert imported.learned["acceptance.cumulative"] == pytest.approx(expected, abs=1e-6)


def test_a_result_of_bench_latency_needs_what_it_leaves_out() -> None:
    latency = sample("vllm_latency.json", is_plain=True)
    imported = import_vllm([COUNTERS, latency], Told(new_tokens=512, batch_size=1))
    assert imported.learned["times.ar_ms"] == pytest.approx(1e3 * 10.27 / 512, abs=1e-6)
    with pytest.raises(BadInput, match="does not say the new tokens; give --new-tokens"):
        import_vllm([COUNTERS, latency], Told())


def test_positions_missing_the_mean_length_counts_with_its_bonus_token() -> None:
    imported = import_vllm([changed(SD, spec_decode_per_position_acceptance_rates=None), AR], Told())
    assert imported.learned["acceptance.mean_acceptance_length"] == 3.3616
    assert imported.learned["acceptance.speculation_length"] == 4
    assert "conditional acceptance 0.8 " in imported.how[0]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([AR], "vllm|must tell what was accepted"),
        ([replace(AR, is_plain=False)], "must tell what was accepted"),
        ([changed(replace(AR, is_plain=False), acceptance_rate=0.6)], "acceptance_rate: must come with its definition"),
        ([SD, replace(SD, is_plain=True)], "must be of a run without speculation"),
        ([COUNTERS, SD, SD], "must be of one run with speculation"),
        ([SD, changed(AR, max_concurrency=8)], "must be of one batch size"),
        ([SD, changed(AR, mean_tpot_ms=40)], "must be longer than an autoregressive step of 40 ms"),
        ([changed(SD, mean_tpot_ms=None)], "mean_tpot_ms"),
        ([changed(SD, spec_decode_per_position_acceptance_rates=[0.5, 0.6])], "must not rise"),
        (
            [replace(COUNTERS, text=COUNTERS.text.replace("num_drafts_total", "other"))],
            "num_drafts_total: this counter",
        ),
        ([replace(COUNTERS, text=COUNTERS.text.replace('position="2"', ""))], "must have the label position"),
        ([replace(COUNTERS, text=COUNTERS.text.replace(" 8000.0", " NaN"))], "must be a finite number"),
        ([COUNTERS, sample("vllm_server.log")], "counters or log lines, not both"),
        ([Source("empty.json", "")], "empty.json: is empty"),
        ([Source("bad.json", "{")], "bad.json, line 1: is not valid JSON"),
    ],
)
def test_what_cannot_be_told_is_refused(sources: list[Source], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        import_vllm(sources, Told())
