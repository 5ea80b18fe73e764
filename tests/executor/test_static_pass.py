"""Passes of fixed shapes give the usual logits whatever was accepted, and no shape comes up after all were met."""

import random

import pytest
import torch

from executor.concurrency import open_runner
from executor.execute import execute
from executor.kv_cache import branch_mask
from executor.language_model import LanguageModel
from executor.static_pass import PassShape
from sim.policy import Autoregressive, Speculative, SpeculativeSpeculative
from sim.workload import Workload
from tests.executor.tiny_models import VOCAB_SIZE, gpt2, llama, prompts

K = 4


class FakeGraphs:
    """Records as a GPU does: a replay runs the same pass again and leaves its logits in the same tensor."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, run):
        self.num_recorded += 1
        logits = run().clone()

        def replay():
            self.num_replayed += 1
            return logits.copy_(run())

        return torch.inference_mode()(replay)


def twins(make, num_rows: int):
    """The same model with the usual passes and with those of fixed shapes."""
    usual, static, graphs = LanguageModel(make(2, seed=0)), LanguageModel(make(2, seed=0)), FakeGraphs()
    static.use_static_passes(graphs)
    for model in (usual, static):
        model.begin(num_rows)
    return usual, static, graphs


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num)]


def both(models, call):
    """The same call of both models; their logits must agree."""
    results = [call(model) for model in models]
    expected, given = (list(result) for result in results)
    for one, other in zip(expected, given, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


def round_of(models, rows, num_accepted, rng) -> None:
    """Verify K tokens in each row and keep those accepted; then two branches of each row, which are rolled back."""
    fed = [tokens(rng, K + 1) for _ in rows]
    both(models, lambda model: model.feed(rows, fed, [K + 1] * len(rows)))
    for model in models:
        for row in rows:
            model.roll_back(model.length_of(row) - K + num_accepted[row], row)
    lengths = [models[0].length_of(row) for row in rows]
    _, num_slots = (model.level(rows) for model in models)
    starts = torch.tensor([[length, length - 1] for length in lengths])
    branches = torch.tensor([tokens(rng, 2) for _ in rows])
    mask = branch_mask(starts, num_slots, 1, models[0].dtype)
    both(models, lambda model: model.append_branches(rows, branches, starts, mask))
    for model in models:
        for row, length in zip(rows, lengths, strict=True):
            model.roll_back(length, row)
    drawn = torch.tensor([tokens(rng, 1)[0] for _ in rows])
    both(models, lambda model: model.feed_drawn(rows, drawn))
    for model in models:
        for row, length in zip(rows, lengths, strict=True):
            model.roll_back(length, row)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_any_pattern_of_acceptance_gives_the_usual_logits_and_no_new_shape(make, num_rows: int) -> None:
    rng = random.Random(1)
    *models, graphs = twins(make, num_rows)
    rows = list(range(num_rows))
    fed = [tokens(rng, 6 + 3 * row) for row in rows]
    both(models, lambda model: model.feed(rows, fed, [1] * num_rows))
    for number in range(3):
        round_of(models, rows, [(number + row) % (K + 1) for row in rows], rng)
    static = models[1]._static
    shapes, counts = static.shapes, models[1].capture()
    assert counts.num_captures == graphs.num_recorded == len(shapes) > 0
    assert counts.num_replays == graphs.num_replayed == 0 and counts.num_unrecorded == 9
    for _ in range(6):
        round_of(models, rows, [rng.randrange(K + 1) for _ in rows], rng)
    again = models[1].capture()
    assert static.shapes == shapes
    assert (again.num_captures, again.num_unrecorded) == (counts.num_captures, counts.num_unrecorded)
    assert again.num_replays == graphs.num_replayed == 18


def test_rows_that_stay_move_together_and_rows_left_out_keep_their_cache() -> None:
    rng = random.Random(2)
    *models, _ = twins(llama, 4)
    fed = [tokens(rng, 5 + row) for row in range(4)]
    both(models, lambda model: model.feed(range(4), fed, [1] * 4))
    for rows in ([0, 1, 2, 3], [2, 0], [1, 3], [3]):  # a pass over some rows only, then over others
        round_of(models, rows, [0, 2, 1, 4], rng)
    for model in models:
        model.keep([1, 3])
    round_of(models, [1, 3], [0, 1, 0, 3], rng)
    round_of(models, [3], [0, 1, 0, 3], rng)


def test_a_larger_batch_begins_anew_and_a_smaller_one_goes_on() -> None:
    rng = random.Random(3)
    *models, graphs = twins(llama, 1)
    for num_rows in (1, 2, 1):
        for model in models:
            model.begin(num_rows)
        rows = list(range(num_rows))
        fed = [tokens(rng, 5) for _ in rows]
        both(models, lambda model, rows=rows, fed=fed: model.feed(rows, fed, [1] * len(rows)))
        round_of(models, rows, [1] * num_rows, rng)
        models[1].capture()
    before = graphs.num_recorded
    for model in models:
        model.begin(2)
    both(models, lambda model: model.feed([0, 1], [[1, 2], [3, 4, 5]], [1, 1]))
    round_of(models, [0, 1], [2, 3], rng)
    assert models[1].capture().num_captures == graphs.num_recorded == before


def test_what_a_failed_run_left_behind_does_not_reach_the_next() -> None:
    """Masked slots weigh 0, and 0 times a NaN is one."""
    *models, _ = twins(llama, 1)
    models[1].append([1, 2, 3, 4, 5])
    for keys, values in models[1]._cache.storage():
        with torch.inference_mode():
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
    for model in models:
        model.begin(1)
        model.append([5, 6])
    both(models, lambda model: model.append([7]))


def test_rows_and_slots_are_rounded_up() -> None:
    _, static, _ = twins(llama, 3)
    static.feed([0, 1, 2], [[1, 2], [3], [4]], [1, 1, 1])
    static.feed([0, 1, 2], [[1], [3, 4], [4]], [1, 1, 1])
    static.feed([1], [[5]], [1])
    assert static._static.shapes == {PassShape(3, 2, 256), PassShape(2, 1, 256)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_runs_are_the_same_with_and_without(tiny_pair, tiny_serial, temperature: float) -> None:
    rules = Workload("test", prompts(3, 9), 24, temperature, stop_ids=(17,), batch_size=3)
    policies = [Autoregressive(), Speculative(3), SpeculativeSpeculative(3, (2,) * 4, (2,) * 4)]
    with open_runner(tiny_pair, "serial", dtype="float64", graphs=True) as runner:
        graphs = FakeGraphs()
        runner.target.model.use_static_passes(graphs)
        assert runner.identity()["passes"] == "of fixed shapes"
        for policy in policies * 2:
            expected = execute(policy, rules, tiny_serial, seed=3).digest()
            trace = execute(policy, rules, runner, seed=3)
            assert trace.digest() == expected
        captures = trace.meta["captures"]
        assert captures["target"]["num_captures"] == graphs.num_recorded > 0
        assert captures["draft"]["num_captures"] == 0 and captures["draft"]["num_unrecorded"] > 0
        assert graphs.num_replayed > 0
        before = graphs.num_recorded
        execute(policies[-1], rules, runner, seed=3)
        assert graphs.num_recorded == before
