"""Forced accept counts: rounds of a known shape, caches as right as ever, and nobody mistakes the text for one."""

import itertools

import pytest

from calibration.validate import check_losslessness, compare
from executor.execute import execute
from executor.toy_model import HashModel, serial_runner
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Speculative, policy_from_dict
from sim.simulate import Prediction
from sim.trace import Trace
from sim.workload import Workload
from tests.executor.test_loops import ssd, texts
from tests.executor.tiny_models import prompts

VOCAB_SIZE, K = 16, 3
CYCLE = tuple(range(K + 1))


def hash_runner(agreement: float = 0.5):
    return serial_runner(HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=agreement))


@pytest.mark.parametrize(
    ("policy", "num_rows"),
    [(Speculative(K), 2), (ssd(K, 1), 1), (ssd(K, 1, Fallback.NGRAM), 1)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_caches_do_not_drift_over_200_rounds(policy, num_rows: int) -> None:
    """Accept counts 0, 1, .., K repeated: after every round both KV caches hold the committed prefix."""
    rules = Workload("test", ((1, 2, 3), (4,))[:num_rows], 500, batch_size=num_rows)
    trace = execute(policy, rules, hash_runner(), forced_acceptance=CYCLE, audit=True)
    for index in range(num_rows):
        rounds = [r for r in trace.rounds if r.sequence == index]
        assert len(rounds) >= 200
        scripted = zip(itertools.cycle(CYCLE), rounds, strict=False)
        assert [r.num_accepted for r in rounds] == [min(count, r.num_drafted) for count, r in scripted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bonus_token_is_the_targets_own(temperature: float) -> None:
    """Accepting nothing is AR: every token is the target's, drawn from the numbers of its own round."""
    rules = Workload("test", ((1, 2, 3),), 40, temperature)
    runner = hash_runner()
    expected = texts(execute(Autoregressive(), rules, runner, seed=5))
    assert texts(execute(Speculative(K), rules, runner, seed=5, forced_acceptance=(0,))) == expected
    forced = execute(Speculative(K), rules, runner, seed=5, forced_acceptance=(0, K))
    (text,) = texts(forced)
    assert text != expected[0]
    if temperature == 0:
        for r in forced.rounds:
            end = r.context - 3 + r.num_emitted + 1  # of the round, in the generated text
            logits = runner.target.model.logits_after((1, 2, 3, *text[: end - 1]))
            assert text[end - 1] == int(logits.argmax())


def test_real_models_can_be_forced_and_audited(tiny_serial) -> None:
    rules = Workload("test", (prompts(1, 9)[0], prompts(1, 3)[0]), 40, batch_size=2)
    for policy in (Speculative(K), ssd(K)):
        trace = execute(policy, rules, tiny_serial, forced_acceptance=CYCLE, audit=True)
        assert {r.num_accepted for r in trace.rounds if r.num_drafted == K} == set(CYCLE)


@pytest.mark.parametrize("counts", [(), (-1,), (1.5,), (True,)])
def test_accept_counts_must_be_counts(counts) -> None:
    with pytest.raises(BadInput, match="forced_acceptance"):
        execute(Speculative(K), Workload("test", ((1,),), 4), hash_runner(), forced_acceptance=counts)


def test_a_forced_run_is_never_compared(tmp_path) -> None:
    rules, runner, policy = Workload("test", ((1, 2, 3),), 12), hash_runner(), Speculative(K)
    forced = execute(policy, rules, runner, forced_acceptance=(0, 2))
    honest = execute(policy, rules, runner)
    forced.write(tmp_path / "forced")
    forced = Trace.read(tmp_path / "forced")
    with pytest.raises(BadInput, match=r"not a run whose accept counts were forced, got \[0, 2\]"):
        check_losslessness(honest, {"SD": [forced]}, lambda *_: 0.0)
    with pytest.raises(BadInput, match="forced"):
        check_losslessness(forced, {"SD": [honest]}, lambda *_: 0.0)
    prediction = Prediction(policy, *[None] * (len(Prediction.__dataclass_fields__) - 1))
    with pytest.raises(BadInput, match="forced"):
        compare(prediction, prediction, [forced])
    with pytest.raises(BadInput, match="forced_acceptance"):
        policy_from_dict(forced.policy)  # what fits a simulator to a trace reads it
    titles = [
        [e["args"]["name"] for e in trace.to_perfetto()["traceEvents"] if e["name"] == "process_name"]
        for trace in (forced, honest)
    ]
    assert titles == [["NO GENERATION: accept counts forced to 0, 2, again and again"], []]
