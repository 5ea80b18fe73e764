"""Random pairs of any shape: reproducible, agreeing as much as asked for, strictly described."""

import itertools
from dataclasses import fields, replace

import pytest
import torch

from executor.concurrency import open_runner
from executor.execute import execute
from executor.pairs import load_pair
from executor.profiling import measure_agreement
from executor.synthetic_pair import SyntheticPair
from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative, SpeculativeSpeculative
from sim.workload import Workload

PAIR = SyntheticPair(4, 32, 4, 2, 48, vocab_size=128, draft_layers=1, max_positions=128)
TEXT = (
    "synthetic:layers=4, hidden_size=32,num_heads=4,num_key_value_heads=2,intermediate_size=48,vocab_size=128,"
    "draft_layers=1,max_positions=128"
)


def acceptance(pair: SyntheticPair, temperature: float) -> float:
    """Mean probability that a draft token is accepted on the target's own texts; at temperature 0 how often."""
    with open_runner(pair, "serial") as runner:
        record = measure_agreement(runner, Workload("test", pair.prompts("test", 24, 8), 40, temperature))
    return float(record.overlap.mean() if temperature else record.acceptance.mean())


def test_acceptance_falls_as_the_divergence_grows() -> None:
    """Over 960 positions: the standard error of a mean is below .015, the slack above three of them."""
    found = [acceptance(replace(PAIR, divergence=value), 1.0) for value in (0.0, 0.375, 0.75, 1.5, 3.0, 8.0)]
    assert found[0] == pytest.approx(1.0)
    assert all(first > second + 0.05 for first, second in itertools.pairwise(found))
    assert found[2] == pytest.approx(0.8, abs=0.06)
    assert found[-1] < 0.25
    assert acceptance(PAIR, 0.0) == pytest.approx(found[2], abs=0.12)


def test_texts_are_no_noise() -> None:
    """The likeliest of 128 tokens has a probability far above 1/128, and text does not collapse."""
    with open_runner(PAIR, "serial") as runner:
        trace = execute(Autoregressive(), Workload("test", PAIR.prompts("test", 4, 8), 60, 1.0), runner)
        probs = runner.target.model.append(trace.sequences[0].tokens).softmax(-1)
    assert float(probs.max(-1).values.mean()) > 0.3
    assert all(len(set(sequence.tokens)) > 15 for sequence in trace.sequences)


def test_without_divergence_every_draft_token_is_accepted() -> None:
    with open_runner(replace(PAIR, divergence=0.0), "serial", dtype="float64") as runner:
        for temperature in (0.0, 1.0):
            rules = Workload("test", PAIR.prompts("test", 2, 8), 32, temperature, batch_size=2)
            for policy in (Speculative(4), SpeculativeSpeculative(3, (2,) * 4, (2,) * 4)):
                trace = execute(policy, rules, runner)
                assert all(r.num_accepted == r.num_drafted for r in trace.rounds)


def test_weights_follow_from_the_description_alone() -> None:
    torch.manual_seed(1)
    first = PAIR.load("target").model.state_dict()
    torch.manual_seed(2)
    again, draft = PAIR.load("target").model.state_dict(), PAIR.load("draft").model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert all(torch.equal(value, first[name]) for name, value in draft.items())
    other = replace(PAIR, seed=1).load("draft").model.state_dict()
    assert not torch.equal(other["lm_head.weight"], draft["lm_head.weight"])
    matrices = [value for name, value in first.items() if name.endswith("_proj.weight")]
    assert len({float(value.flatten()[0] / value.std()) for value in matrices}) == len(matrices)  # no stream twice


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_models_are_made_in_the_precision_asked_for(dtype: str) -> None:
    model = PAIR.load("draft", dtype)
    assert {parameter.dtype for parameter in model.model.parameters()} == {getattr(torch, dtype)}


def test_the_description_is_a_pair_like_any_other() -> None:
    pair = load_pair(TEXT)
    assert pair == PAIR
    assert SyntheticPair.parse(pair.name) == pair
    assert "synthetic" in pair.dataset
    assert pair.stop_ids == ()
    prompts = pair.prompts("test", 5, 16)
    assert prompts == PAIR.prompts("test", 9, 16)[:5]
    assert {len(prompt) for prompt in prompts} == {16}
    assert max(map(max, prompts)) < 128
    assert not set(prompts) & set(pair.prompts("calibration", 5, 16))
    assert pair.tokenizer is None
    with pytest.raises(BadInput, match="split"):
        pair.prompts("train", 1, 1)


def test_hashes_speak_of_the_whole_description() -> None:
    others = [replace(PAIR, **{f.name: 2 * getattr(PAIR, f.name) or 1}) for f in fields(PAIR) if f.name != "num_heads"]
    hashes = [pair.hashes[role] for pair in (PAIR, *others) for role in ("target", "draft")]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("layers=4", "layers=4.0"), "synthetic:layers: must be an integer >= 1, got 4.0"),
        (("layers=4", "layers=four"), "synthetic:layers: must be a number, got 'four'"),
        (("layers=4", "layers"), "synthetic:layers: must be a number"),
        (("layers=4", "depth=4"), "synthetic:depth: no such key; known: layers, hidden_size"),
        (("layers=4", "seed=1"), "synthetic:layers: this key is missing"),
        (("layers=4", "layers=4,layers=4"), "synthetic:layers: must be given once"),
        (("vocab_size=128", "vocab_size=0"), "synthetic:vocab_size: must be an integer >= 1, got 0"),
        (("draft_layers=1", "draft_layers=5"), "synthetic:draft_layers: must be <= layers 4, got 5"),
        (("num_heads=4", "num_heads=5"), "synthetic:hidden_size: must be a multiple of twice num_heads 5, got 32"),
        (("num_key_value_heads=2", "num_key_value_heads=3"), "num_key_value_heads: must divide num_heads 4, got 3"),
        (("max_positions=128", "divergence=-1"), "synthetic:divergence: must be a finite number >= 0, got -1"),
        (("max_positions=128", "divergence=nan"), "synthetic:divergence: must be a finite number"),
        (("max_positions=128", ""), "synthetic:: must be a number"),
    ],
)
def test_a_description_that_is_wrong_is_refused(change: tuple[str, str], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        load_pair(TEXT.replace(*change))
