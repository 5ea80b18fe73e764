"""The agreement record says what the two models say; the latency grid covers what the decoders do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import executor.profiling
from executor.execute import execute
from executor.latency_cells import BuildCell
from executor.profiling import LatencyGrid, measure_agreement, measure_latency, top2_gap
from executor.sampling import process
from executor.toy_model import HashModel, serial_runner
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Lane, Operation
from sim.workload import Sampling, Workload
from tests.executor.tiny_models import prompts

VOCAB_SIZE = 16
TEXTS = ((1, 2, 3), (4,), (5, 6, 7), (4,))


def hash_runner():
    return serial_runner(HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=0.7))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_every_column_is_what_the_models_say(temperature: float) -> None:
    runner = hash_runner()
    rules = Workload("toy", TEXTS, 20, temperature, stop_ids=(3, 5))
    record = measure_agreement(runner, rules, seed=2, num_candidates=6)
    trace = execute(Autoregressive(), rules, runner, seed=2)
    assert record.stopped.tolist() == [s.stopped for s in trace.sequences]
    assert record.prompt_length.tolist() == [len(text) for text in TEXTS]
    target, draft = HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, own_seed=1, agreement=0.7)
    row = 0
    for sequence, prompt in zip(trace.sequences, TEXTS, strict=True):
        for position, token in enumerate(sequence.tokens):
            text = prompt + sequence.tokens[:position]
            p = process(target.logits_after(text), Sampling(temperature or 1.0)).numpy()
            q = process(draft.logits_after(text), Sampling(temperature or 1.0)).numpy()
            assert (record.prompt[row], record.position[row]) == (sequence.index, position)
            assert record.token[row] == token
            assert record.log_p[row] == pytest.approx(np.log(p[token]))
            assert record.log_q[row] == pytest.approx(np.log(q[token]))
            assert record.rank[row] == (q > q[token]).sum()
            assert record.overlap[row] == pytest.approx(np.minimum(p, q).sum())
            best = np.argsort(-q)[:6]
            assert record.top_token[row].tolist() == best.tolist()
            assert record.top_p[row] == pytest.approx(p[best])
            assert record.top_q[row] == pytest.approx(q[best])
            row += 1
    assert row == len(record.token)


def test_the_record_names_what_it_is_about() -> None:
    record = measure_agreement(hash_runner(), Workload("toy", TEXTS, 4, 0.5))
    expected = {"dataset": "toy", "temperature": 0.5, "stop_ids": [], "max_new_tokens": 4, "target": "t", "draft": "d"}
    expected |= {"vocab_size": VOCAB_SIZE}
    assert expected.items() <= record.identity.items()
    assert record.prompt_tokens == TEXTS


def test_no_more_candidates_than_tokens() -> None:
    assert measure_agreement(hash_runner(), Workload("toy", TEXTS, 4), num_candidates=64).num_candidates == VOCAB_SIZE


def test_the_texts_of_real_models_are_those_of_ar(tiny_serial) -> None:
    """Rows decoded together give the tokens of single runs (float64), also when prompts have several lengths."""
    for temperature in (0.0, 1.0):
        rules = Workload("test", prompts(3, 9) + prompts(2, 5), 24, temperature, stop_ids=(17,))
        record = measure_agreement(tiny_serial, rules, seed=4)
        trace = execute(Autoregressive(), rules, tiny_serial, seed=4)
        for sequence in trace.sequences:
            assert tuple(record.token[record.prompt == sequence.index]) == sequence.tokens


def test_a_record_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="max_new_tokens"):
        measure_agreement(hash_runner(), Workload("toy", TEXTS, 0))


def test_the_gap_is_between_the_two_largest_logits(tiny_serial) -> None:
    text = prompts(1, 9)[0]
    with torch.inference_mode():
        logits = tiny_serial.target.model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    first, second = logits.sort(descending=True).values[:2].tolist()
    assert top2_gap(tiny_serial, text) == pytest.approx(first - second)


# --------------------------------------------------------------------------------------------------------- latency

GRID = LatencyGrid(max_speculation_length=3, branch_counts=(1, 4, 8), contexts=(12, 40))


@pytest.mark.parametrize(
    ("sampling", "batch_size"),
    [(Sampling(), 1), (Sampling(1.0), 1), (Sampling(), 3), (Sampling(0.7, top_k=3, repetition_penalty=1.2), 2)],
)
def test_every_block_visits_every_cell(sampling: Sampling, batch_size: int) -> None:
    grid = LatencyGrid(3, (1, 4, 8), (12, 40), sampling, batch_size)
    reports = []
    profile = measure_latency(hash_runner(), grid, 0.0, min_blocks=5, progress=lambda *done: reports.append(done))
    assert profile.num_blocks == 5
    assert reports == [(n, 5) for n in range(1, 6)]
    assert profile.num_cells == len(grid.target_cells()) + len(grid.draft_cells(4096))
    assert all(s.duration_s > 0 and not s.busy for s in profile.samples)
    by_block = [sorted(_where(s) for s in profile.samples if s.block == block) for block in range(5)]
    assert all(block == by_block[0] for block in by_block)
    by_rows = [sorted(_where(s) for s in profile.samples if s.batch_size == rows) for rows in grid.batch_sizes()]
    assert grid.batch_sizes() == list(range(1, batch_size + 1))
    assert all(cells and cells == by_rows[0] for cells in by_rows)


def _where(sample):
    return sample.lane, sample.operation, sample.num_tokens, sample.context


def test_rows_that_are_timed() -> None:
    sizes = [LatencyGrid(3, (4,), (12,), batch_size=rows).batch_sizes() for rows in (1, 2, 4, 6, 9)]
    assert sizes == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 9]]


@pytest.mark.parametrize(("budget_s", "num_blocks"), [(0.0, 1), (2.0, 1), (3.0, 2), (4.5, 4)])
def test_a_larger_budget_buys_more_blocks(budget_s: float, num_blocks: int, monkeypatch) -> None:
    """By a clock on which a block takes a second: one more is begun if it will end within the budget."""
    monkeypatch.setattr(executor.profiling, "now_s", itertools.count().__next__)
    grid = LatencyGrid(max_speculation_length=1, branch_counts=(1,), contexts=(8,))
    assert measure_latency(hash_runner(), grid, budget_s, min_blocks=1).num_blocks == num_blocks


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_grid_covers_every_operation_of_a_run_within_its_contexts(batch_size: int) -> None:
    """Contexts of 12 to 40 tokens: every span of every policy lies inside the profiled range of its operation."""
    grid = replace(GRID, batch_size=batch_size)
    profile = measure_latency(hash_runner(), grid, 0.0, min_blocks=1)
    covered: dict[tuple[Lane, Operation, int], list[int]] = {}
    for s in profile.samples:
        covered.setdefault((s.lane, s.operation, s.num_tokens), []).append(s.context)
    rules = Workload("toy", tuple(tuple(range(n, n + 13)) for n in range(batch_size)), 28, batch_size=batch_size)
    policies = [Autoregressive(), Speculative(1), Speculative(3)]
    policies += [
        SpeculativeSpeculative(3, (2, 2, 2, 2), (1, 1, 1, 1)),
        SpeculativeSpeculative(1, (4, 4), (8,), Fallback.NONE),
    ]
    checked = set()
    for policy in policies:
        for span in execute(policy, rules, hash_runner()).spans:
            if span.operation in (Operation.PREFILL, Operation.LOOKUP):
                continue
            mean = span.num_tokens / span.batch_size  # builds shortened by the cap lie between the profiled ones
            widths = sorted(
                width for lane, operation, width in covered if (lane, operation) == (span.lane, span.operation)
            )
            around = max(w for w in widths if w <= mean), min(w for w in widths if w >= mean)
            for width in around:
                contexts = covered[span.lane, span.operation, width]
                assert min(contexts) <= span.context <= max(contexts), span
            checked.add((span.operation, span.batch_size))
    operations = (Operation.VERIFY, Operation.DRAFT_STEP, Operation.GLUE, Operation.TREE_STEP)
    assert checked >= {(operation, batch_size) for operation in operations}


def test_tree_steps_reach_as_far_as_the_positions() -> None:
    farthest = max(cell.context for cell in GRID.draft_cells(50) if isinstance(cell, BuildCell))
    assert farthest == 50 - 2 * 3 - 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contexts": ()}, "contexts"),
        ({"branch_counts": (0, 4)}, "branch_counts"),
        ({"max_speculation_length": 0}, "max_speculation_length"),
        ({"batch_size": 0}, "batch_size"),
        ({"contexts": (1, 9), "batch_size": 2}, "must be >= 2 for batches"),
    ],
)
def test_a_grid_without_cells_is_refused(values, message) -> None:
    settings = {"max_speculation_length": 3, "branch_counts": (4,), "contexts": (12,)}
    with pytest.raises(BadInput, match=message):
        LatencyGrid(**(settings | values))


def test_a_record_needs_candidates_and_a_draft_that_reaches_the_end() -> None:
    for num in (0, -1, "3"):
        with pytest.raises(BadInput, match="num_candidates: must be an integer >= 1"):
            measure_agreement(hash_runner(), Workload("toy", TEXTS, 4), num_candidates=num)
    short = serial_runner(HashModel(VOCAB_SIZE, 0), HashModel(VOCAB_SIZE, 0, max_positions=12))
    assert len(measure_agreement(short, Workload("toy", TEXTS, 10)).token) == 40
    with pytest.raises(BadInput, match="prompts with max_new_tokens must fit the draft's 12 positions, got 13"):
        measure_agreement(short, Workload("toy", TEXTS, 11))


def test_contexts_beyond_the_models_are_refused() -> None:
    with pytest.raises(BadInput, match="4096 positions"):
        measure_latency(hash_runner(), LatencyGrid(3, (4,), (4090,)), 0.0)
