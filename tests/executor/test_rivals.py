"""Rivals on the packaged pair, run for real: their rounds are the predicted ones, and texts are the target's."""

from functools import cache

import numpy as np
import pytest

from executor.concurrency import open_runner
from executor.execute import execute
from executor.pairs import load_pair
from executor.profiling import measure_agreement
from executor.token_trees import decode_with_trees
from sim.policy import Autoregressive, Fallback, SpeculativeSpeculative
from sim.simulate import predict
from sim.strategies.all_accepted import all_accepted_only
from sim.strategies.pearl import Pearl
from sim.strategies.prepared_tree import PreparedTree
from sim.strategies.prompt_lookup import prompt_lookup_policy
from sim.strategies.replayed import replayed
from sim.strategies.speculative_tree import SpeculativeTree
from sim.strategies.token_tree import TokenTree
from sim.trace import Source
from sim.workload import Workload
from tests.sim.toy import system_of

NUM_PROMPTS = 6
TREES = {
    "chain": TokenTree.chain(3),
    "two by two": TokenTree.of_widths((2, 2)),
    "uneven": TokenTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))),
}


class Decoded:
    """The pair, a few prompts, and what their agreement record says."""

    def __init__(self, runner) -> None:
        self.runner = runner
        prompts = runner.pair.prompts("test", NUM_PROMPTS, 48)
        self.rules = Workload("stdlib", prompts, 24, stop_ids=runner.pair.stop_ids)
        record = measure_agreement(runner, self.rules)
        self.system = system_of(record)
        self.executed = cache(lambda policy: execute(policy, self.rules, runner))


@pytest.fixture(scope="module")
def decoded():
    with open_runner(load_pair("stdlib"), "serial") as runner:
        yield Decoded(runner)


def rounds_of(trace) -> np.ndarray:
    return np.bincount([one.sequence for one in trace.rounds], minlength=NUM_PROMPTS)


def num_hits(trace) -> int:
    return sum(one.source is Source.HIT for one in trace.rounds)


@pytest.mark.parametrize(
    "policy", [all_accepted_only(3), all_accepted_only(6), prompt_lookup_policy(4)], ids=lambda p: p.name
)
def test_rounds_of_all_accepted_and_of_lookup_are_the_predicted_ones(policy, decoded) -> None:
    known = predict(policy, decoded.rules, decoded.system).expectation
    trace = decoded.executed(policy)
    np.testing.assert_allclose(rounds_of(trace), known.num_rounds, atol=1e-9)
    assert num_hits(trace) == pytest.approx(known.num_hits.sum())
    assert [s.tokens for s in trace.sequences] == [s.tokens for s in decoded.executed(Autoregressive()).sequences]


def test_rounds_of_pearl_are_those_of_the_ssd_that_it_is(decoded) -> None:
    trace = decoded.executed(SpeculativeSpeculative(4, (0, 0, 0, 0, 1), (1,), Fallback.NONE))
    known = replayed(Pearl(5), decoded.rules, decoded.system)
    np.testing.assert_allclose(rounds_of(trace), known.num_rounds, atol=1e-9)
    assert num_hits(trace) == pytest.approx(known.num_hits.sum())


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_decode_the_text_of_the_target_in_the_predicted_rounds(tree: TokenTree, decoded) -> None:
    """All that the prediction says of a tree but its time: at every place it accepts what the record says."""
    known = replayed(SpeculativeTree(tree), decoded.rules, decoded.system)
    texts = decoded.executed(Autoregressive()).sequences
    target, draft = (decoded.runner.pair.load(role) for role in ("target", "draft"))
    for number, prompt in enumerate(decoded.rules.prompts):
        found = decode_with_trees(target, draft, prompt, tree.paths, 24, decoded.rules.stop_ids)
        assert found.tokens == tuple(texts[number].tokens)
        assert len(found.emitted) == round(known.num_rounds[number])
        assert sum(found.emitted) == len(found.tokens) - 1


def test_a_tree_takes_fewer_rounds_than_its_first_path(decoded) -> None:
    rules, system = decoded.rules, decoded.system
    chain, tree = (
        replayed(SpeculativeTree(t), rules, system).num_rounds.sum() for t in (TokenTree.chain(2), TREES["two by two"])
    )
    assert tree < chain
    prepared = PreparedTree(TREES["two by two"], (1,) * 7, (1,) * 7)
    assert replayed(prepared, rules, system).num_rounds.sum() == pytest.approx(tree)
