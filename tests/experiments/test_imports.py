"""From other engines' files to a plan: what the simulator wrote in their formats is found again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from calibration.importers.imported import Imported, Told
from experiments.imports import NUMBERS, Format, import_files, numbers_file, predicted_runs, write_import
from experiments.numbers import Numbers, read_numbers
from sim.errors import BadInput
from sim.metrics import hit_rate, mean_acceptance_length, tokens_per_s
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.simulate import predict, simulate
from sim.trace import Lane, Operation, Trace

SAMPLES = Path(__file__).parents[1] / "calibration" / "importers" / "samples"
ACCEPTANCE = (0.8, 0.7, 0.75, 0.6)
AR_MS, VERIFY_MS, DRAFT_MS, HIT_RATE, FAN_OUT = 20.0, 22.0, 2.0, 0.85, 3
KNOWN = f"""
schema: 1
name: known
text: {{prompt_tokens: 100, new_tokens: 20000}}
acceptance: {{conditional: {list(ACCEPTANCE)}}}
hits: {{overall: {{hit_rate: {HIT_RATE}, fan_out: {FAN_OUT}}}}}
times: {{ar_ms: {AR_MS}, verify_ms: {VERIFY_MS}, draft_step_ms: {DRAFT_MS}, tree_step_ms: 3}}
search: {{speculation_lengths: [1, 2, 3, 4], budgets: [8, 15], fan_out_rules: [uniform], fallbacks: [draft]}}
"""
SIGMAS = 4.5  # a deviation beyond it comes once in 150,000 estimates


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    path = tmp_path_factory.mktemp("known") / "known.yaml"
    path.write_text(KNOWN)
    return read_numbers(path)


@pytest.fixture(scope="module")
def traces(known: Numbers) -> dict[str, Trace]:
    policies: dict[str, Policy] = {
        "ar": Autoregressive(),
        "sd": Speculative(4),
        "ssd": SpeculativeSpeculative(4, (FAN_OUT,) * 5, (FAN_OUT,) * 5),
    }
    return {name: simulate(policy, known.workload, known.system, seed=1) for name, policy in policies.items()}


def tpot_ms(trace: Trace) -> float:
    return 1e3 / tokens_per_s([trace]).value


def tokens_per_round(trace: Trace) -> float:
    mean = mean_acceptance_length([trace])
    assert mean is not None
    return mean.value


def survivors(trace: Trace, length: int = 4) -> list[int]:
    return [sum(r.num_accepted > position for r in trace.rounds) for position in range(length)]


def as_counters(trace: Trace) -> str:
    accepted = survivors(trace)
    totals = {
        "drafts": len(trace.rounds),
        "draft_tokens": sum(r.num_drafted for r in trace.rounds),
        "accepted_tokens": sum(accepted),
    }
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(value)}' for name, value in totals.items()]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{engine="0",position="{j}"}} {float(count)}' for j, count in enumerate(accepted)]
    return "\n".join(lines)


def as_result(trace: Trace, **more: object) -> str:
    return json.dumps({"mean_tpot_ms": tpot_ms(trace), "max_concurrency": 1, **more})


def as_ssd_output(trace: Trace, mode: str) -> str:
    accepted = [r.num_accepted for r in trace.rounds if r.num_drafted == 4]
    rate = hit_rate([trace])
    lines = [
        f"Final Decode Throughput: {1e3 / tpot_ms(trace):.0f}tok/s",
        f"[metrics] Avg Tokens per step (incl recovery): {tokens_per_round(trace):.2f}",
        f"[metrics] Avg target verify time (ms): {VERIFY_MS:.2f}",
        *([f"[metrics] Avg Cache Hits: {rate.value:.2f}"] if rate else []),
        *(["[metrics] Empirical frequencies of accepted_suffix_lens_on_hit - 1:"] if rate else []),
        *(f"  {k}: {accepted.count(k) / len(accepted):.3f}" for k in range(5) if rate),
        f"Model: known, Mode: CUDA Graphs{mode} + JIT, Total: 20000tok, Time: 1.00s, Total Throughput: 1.00tok/s",
    ]
    return "\n".join(lines)


def written(folder: Path, **texts: str) -> dict[str, Path]:
    files = {name: folder / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    return files


def planned(imported: Imported, folder: Path) -> Numbers:
    write_import(imported, [], folder)
    return read_numbers(folder / NUMBERS)


def assert_acceptance(numbers: Numbers, trace: Trace, rounding: float = 0.0) -> None:
    """Within `SIGMAS` standard errors of the truth, from as many tokens as were tested."""
    tested = [len(trace.rounds), *survivors(trace)]
    found = numbers.system.agreement.acceptance  # type: ignore[attr-defined]
    for rate, truth, number in zip(found, ACCEPTANCE, tested, strict=False):
        assert abs(rate - truth) < SIGMAS * math.sqrt(truth * (1 - truth) / number) + rounding


def step_ms(numbers: Numbers, lane: Lane, operation: Operation, width: int) -> float:
    return 1e3 * float(numbers.system.latency[lane, operation].location_s(width, 100))


def test_vllm_round_trip(traces: dict[str, Trace], tmp_path: Path) -> None:
    """Acceptance by position, the autoregressive step and the round; what the round is made of stays open."""
    texts = {"metrics": as_counters(traces["sd"]), "sd": as_result(traces["sd"]), "ar": as_result(traces["ar"])}
    files = written(tmp_path, **texts)
    imported = import_files(Format.VLLM, [files["metrics"], files["sd"]], files["ar"], Told(new_tokens=20000))
    numbers = planned(imported, tmp_path)
    assert_acceptance(numbers, traces["sd"])
    assert step_ms(numbers, Lane.TARGET, Operation.VERIFY, 1) == pytest.approx(AR_MS, rel=1e-6)
    assert imported.learned["times.sd_round_ms"] == pytest.approx(VERIFY_MS + 4 * DRAFT_MS, rel=1e-3)
    at_truth = numbers.at({"times.verify_over_ar": VERIFY_MS / AR_MS})
    draft_ms = 1e3 * float(at_truth.latency[Lane.DRAFT, Operation.DRAFT_STEP].location_s(1, 100))
    assert draft_ms == pytest.approx(DRAFT_MS, rel=0.01)
    for name, had, has in predicted_runs(imported, numbers):
        assert has == pytest.approx(had, rel=0.005), name


def test_sglang_round_trip(traces: dict[str, Trace], tmp_path: Path) -> None:
    """One rate with the same tokens per round; any two engines that count the bonus token agree on it."""
    tokens = tokens_per_round(traces["sd"])
    lines = [as_result(traces["ar"], accept_length=None), as_result(traces["sd"], accept_length=tokens)]
    files = written(tmp_path, lines="\n".join(lines))
    imported = import_files(Format.SGLANG, [files["lines"]], None, Told(speculation_length=4, new_tokens=20000))
    numbers = planned(imported, tmp_path)
    found = predict(Speculative(4), numbers.workload, numbers.system)
    assert found.mean_acceptance_length is not None
    assert found.mean_acceptance_length.value == pytest.approx(tokens, rel=1e-3)
    for name, had, has in predicted_runs(imported, numbers):
        assert has == pytest.approx(had, rel=0.005), name


def test_ssd_round_trip(traces: dict[str, Trace], tmp_path: Path) -> None:
    """All but the build, within what printing rounds away: a throughput of 130 to half a token, a rate to .005."""
    modes = {"ssd": " + Speculative(k=4) + Async", "sd": " + Speculative(k=4)", "ar": ""}
    texts = {name: as_ssd_output(traces[name], mode) for name, mode in modes.items()}
    files = written(tmp_path, **texts)
    told = Told(fan_out=FAN_OUT, new_tokens=20000)
    imported = import_files(Format.SSD, [files["ssd"], files["sd"]], files["ar"], told)
    numbers = planned(imported, tmp_path)
    assert_acceptance(numbers, traces["ssd"], rounding=0.002)
    assert step_ms(numbers, Lane.TARGET, Operation.VERIFY, 5) == VERIFY_MS
    assert step_ms(numbers, Lane.TARGET, Operation.VERIFY, 1) == pytest.approx(AR_MS, rel=0.5 / 50)
    assert step_ms(numbers, Lane.DRAFT, Operation.DRAFT_STEP, 1) == pytest.approx(DRAFT_MS, abs=0.1)
    assert imported.learned["hits.overall.hit_rate"] == pytest.approx(HIT_RATE, abs=0.025)
    for name, had, has in predicted_runs(imported, numbers):
        assert has == pytest.approx(had, rel=0.02), name


@pytest.mark.parametrize(
    ("format_", "files", "plain", "told"),
    [
        (Format.VLLM, ["vllm_metrics.txt", "vllm_serve_sd.json"], "vllm_serve_ar.json", Told()),
        (Format.VLLM, ["vllm_server.log"], None, Told()),
        (Format.SGLANG, ["sglang.jsonl"], None, Told(speculation_length=4)),
        (Format.SSD, ["ssd_async.txt"], None, Told(fan_out=3)),
        (Format.SSD, ["ssd_async.txt", "ssd_sync.txt"], "ssd_plain.txt", Told(fan_out=3)),
        (Format.SSD, ["ssd_sync.txt"], None, Told(batch_size=2)),
        (Format.LOGPROBS, ["echo_target.json", "echo_draft.json"], None, Told(prompt_tokens=2, temperature=1)),
        (Format.LOGPROBS, ["ids_target.jsonl", "ids_draft.jsonl"], None, Told(prompt_tokens=2, temperature=0)),
    ],
)
def test_every_sample_leads_to_a_plan(
    tmp_path: Path, format_: Format, files: list[str], plain: str | None, told: Told
) -> None:
    imported = import_files(format_, [SAMPLES / name for name in files], SAMPLES / plain if plain else None, told)
    numbers = planned(imported, tmp_path)
    assert predict(Speculative(2), numbers.workload, numbers.system).tokens_per_s.value > 0
    stated = {entry.key for entry in numbers.ranges}
    assert {entry.key for entry in imported.assumed} <= stated
    text = numbers_file(imported)
    assert all(f"# not learned: {line}" in text for line in imported.not_learned)
    for name, had, has in predicted_runs(imported, numbers):
        assert has == pytest.approx(had, rel=0.05), name


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: no such file"):
        import_files(Format.VLLM, [tmp_path / "nowhere"], None, Told())
    with pytest.raises(BadInput, match="cannot be read"):
        import_files(Format.VLLM, [tmp_path], None, Told())
    with pytest.raises(BadInput, match="--ar: goes with runs of an engine"):
        import_files(Format.LOGPROBS, [tmp_path], tmp_path, Told())
