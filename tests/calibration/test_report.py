"""The report says the answer first, keeps its doubts, and the parts of a round's time add up."""

from collections.abc import Mapping
from typing import Any

import pytest

from calibration.breakdown import figures_of_merit, round_time
from calibration.report import FIGURES, answer, policy_rows, report
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.simulate import simulate
from sim.trace import Source, Trace
from tests.sim.toy import markov, record_of, system_of, workload_of

POLICIES: list[Policy] = [
    Autoregressive(),
    Speculative(3),
    SpeculativeSpeculative(3, (2, 1, 1, 1), (2, 1, 1, 1), Fallback.DRAFT),
    SpeculativeSpeculative(3, (2, 1, 1, 1), (2,), Fallback.NONE),
]


def interval(value: float, width: float = 0.1) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width}


def row(name: str, kind: str, predicted: float, measured: float) -> dict[str, Any]:
    hit_rate = interval(0.8) if kind == "ssd" else None
    figures = {"hit_rate": hit_rate, "mean_acceptance_length": interval(2.0)}
    return {
        "name": name,
        "policy": {"kind": kind},
        "forecast": {"tokens_per_s": interval(1.25 * predicted, 5)},
        "predicted": figures | {"tokens_per_s": interval(predicted, 5)},
        "measured": figures | {"tokens_per_s": interval(measured, 4), "repeats": 3, "repeat_spread": 0.012},
        "error": {
            "tokens_per_s": predicted / measured - 1,
            "forecast_tokens_per_s": 1.25 * predicted / measured - 1,
            "tokens_per_s_interval": [predicted / measured - 1.1, predicted / measured - 0.9],
        },
    }


def summary_of(*, ssd: float = 200.0, recommended: str = "SSD", ssd_over_sd: Mapping[str, Any] | None = None) -> dict:
    rates = {"AR": 100.0, "SD": 150.0, "SSD": ssd}
    return {
        "schema": 1,
        "policies": [row(name, name.lower(), 1.05 * rate, rate) for name, rate in rates.items()],
        "recommended": recommended,
        "best_measured": max(rates, key=lambda name: rates[name]),
        "regret": interval(0.2, 0.05),
        "lossless": {"prompts": 24, "identical": 24, "near_tie_flips": 0},
        "speedups": {
            "sd_over_ar": interval(1.5),
            "ssd_over_ar": interval(ssd / 100),
            "ssd_over_sd": ssd_over_sd or interval(ssd / 150),
        },
    }


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    record = record_of(*markov(1), num_prompts=6, length=24, seed=1)
    system = system_of(record, tree_step_s=0.004, host_s=0.0005)  # builds end after the verification
    return {
        policy.name: [simulate(policy, workload_of(record), system, seed) for seed in (0, 1)] for policy in POLICIES
    }


def details_of(traces: dict[str, list[Trace]]) -> dict[str, Any]:
    figures = [figures_of_merit(repeats) for repeats in traces.values()]
    return {
        "policies": {
            name: {"measured": f, "simulated": f} for name, f in zip(("AR", "SD", "SSD"), figures, strict=False)
        },
        "engines": [
            {
                "name": "AR",
                "engine": "exact",
                "tokens_per_s": 100.0,
                "des_tokens_per_s": 101.0,
                "standard_error": 0.5,
                "relative_difference": 0.01,
                "z": 2.0,
            }
        ],
        "differences": [
            {"policy": "SD", "prompt": 3, "position": 7, "gap": 1e-5},
            {"policy": "SD", "prompt": 4, "position": 8, "gap": None},
        ],
        "num_policies": 245,
        "notes": ["a remark."],
        "map": None,
        "map_in_words": "There is no map: none was asked for",
        "hit_curves": {
            "policy": "SSD",
            "predicted": [{"source": "hit", "fan_outs": [1, 2], "hit_rates": [0.5, 0.7]}],
            "measured": [{"source": "hit", "fan_out": 2, "lookups": 40, "hit_rate": interval(0.725, 0.05)}],
        },
        "side_by_side": {
            "steps": [
                {
                    "lane": "target",
                    "operation": "verify",
                    "batch_size": 2,
                    "num_tokens": 6,
                    "context": 128,
                    "alone_s": 0.004,
                    "beside_s": 0.006,
                }
            ],
            "gain": 1.25,
        },
    }


MANIFEST = {
    "date": "2000-01-01",
    "version": "1.0",
    "digest": "abc",
    "identity": {"pair": "toy", "threads": {"target": 1}},
    "workload": {"batch_size": 1},
    "settings": {"name": "trial", "workload": {"temperature": 0.0}},
    "durations_s": {"search": 1.25},
}


# --------------------------------------------------------------------------------------------------------------- answer


def test_answer_holds_rate_speed_ups_error_and_spread() -> None:
    text = answer(summary_of())
    for part in ("SSD", "200.0 [196.0, 204.0] tokens/s", "2.00 [1.90, 2.10] x AR", "1.33 [1.23, 1.43] x SD"):
        assert part in text
    for part in ("210.0 tokens/s were predicted", "error +5.0 %", "±1.2 %", "It is the policy that was recommended"):
        assert part in text
    assert "significant" not in text


def test_answer_doubts_a_speed_up_whose_interval_holds_one() -> None:
    close = {"value": 1.02, "low": 0.97, "high": 1.08}
    assert "1.02 [0.97, 1.08] x SD (no significant difference)" in answer(summary_of(ssd_over_sd=close))
    single = {"value": 1.02, "low": None, "high": None}
    assert "1.02 (no interval) x SD" in answer(summary_of(ssd_over_sd=single))


def test_answer_says_when_the_recommendation_was_not_the_best() -> None:
    text = answer(summary_of(recommended="SD"))
    assert "Recommended was SD, which lost 20.0 [15.0, 25.0] %" in text
    slow = answer(summary_of(ssd=90.0, recommended="SSD"))
    assert slow.startswith("SD was the fastest") and "x AR" in slow and "x SD" not in slow


def test_table_has_one_row_per_policy_and_a_dash_where_nothing_applies() -> None:
    head, rows = policy_rows(summary_of())
    assert [cells[0] for cells in rows] == ["AR", "SD", "SSD"]
    assert all(len(cells) == len(head) for cells in rows)
    assert rows[0][-1] == "- / -" and rows[2][-1] == "80.0 / 80.0"


# --------------------------------------------------------------------------------------------------------------- report


def test_report_answers_first_and_names_every_figure(traces: dict[str, list[Trace]]) -> None:
    text = report(summary_of(), details_of(traces), MANIFEST)
    lines = [line for line in text.splitlines() if line]
    assert lines[0].startswith("# trial") and lines[1] == answer(summary_of())
    for _, title, _, _ in FIGURES:
        assert title in text
    for part in (
        "a remark.",
        "245 policies",
        "prompt 3: departs at token 7",
        "identity: threads.target",
        "search | 1.2 s",
        "| verify (target) | 2 | 6 | 128 | 4.00 | 6.00 | 1.50 |",
        "1.25 times the work",
        "| after a hit | 2 | 40 | 72.5 [67.5, 77.5] |",
    ):
        assert part in text
    assert "Not lossless" not in text
    apart = details_of(traces) | {"side_by_side": None}
    assert "The roles took turns: nothing was timed beside the other." in report(summary_of(), apart, MANIFEST)


def test_report_warns_of_lost_text_before_any_table(traces: dict[str, list[Trace]]) -> None:
    summary = summary_of()
    summary["lossless"] = {"prompts": 24, "identical": 22, "near_tie_flips": 1}
    text = report(summary, details_of(traces), MANIFEST)
    assert text.index("**Not lossless") < text.index("| policy |")
    summary["lossless"] = None
    assert "temperature > 0" in report(summary, details_of(traces), MANIFEST)


def test_tables_are_rectangular_even_if_a_name_holds_a_bar(traces: dict[str, list[Trace]]) -> None:
    summary, details = summary_of(), details_of(traces)
    summary["policies"][2]["name"] = "SSD F=1/2|3"
    details["policies"]["SSD F=1/2|3"] = details["policies"].pop("SSD")
    summary["recommended"] = summary["best_measured"] = "SSD F=1/2|3"
    width = 0
    for line in report(summary, details, MANIFEST).splitlines():
        is_row = line.startswith("|")
        cells = line.replace("\\|", "").count("|")
        assert not is_row or width in (0, cells), line
        width = cells if is_row else 0


# ------------------------------------------------------------------------------------------------------------ breakdown


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_parts_of_a_round_add_up_and_none_is_negative(policy: Policy, traces: dict[str, list[Trace]]) -> None:
    times = round_time(traces[policy.name])
    assert times is not None
    parts = times.to_dict()
    assert sum(parts.values()) == pytest.approx(2 * times.round_s)
    assert min(parts.values()) >= -1e-9


def test_each_part_is_what_the_system_says(traces: dict[str, list[Trace]]) -> None:
    ar, sd, ssd, none = (round_time(traces[policy.name]) for policy in POLICIES)
    for times in (ar, sd, ssd, none):
        assert times.verify_s == pytest.approx(0.010)
        assert times.rest_s == pytest.approx(0.0005)
    assert ar.draft_s == ar.build_s == none.draft_s == 0
    sd_rounds, ssd_rounds = ([r for t in traces[POLICIES[i].name] for r in t.rounds] for i in (1, 2))
    sd_steps = sum(r.num_drafted for r in sd_rounds) / len(sd_rounds)
    ssd_steps = sum(r.num_drafted for r in ssd_rounds if r.source is not Source.HIT) / len(ssd_rounds)
    assert sd.draft_s == pytest.approx(0.002 * sd_steps)
    assert ssd.draft_s == pytest.approx(0.002 * ssd_steps)
    assert 0.002 < ssd.build_s <= 0.004  # glue 2 ms + 3 tree steps of 4 ms against 10 ms; no build beside a last round


def test_no_round_no_time() -> None:
    assert round_time([Trace({}, {})]) is None
