"""The host reads what the models computed once per round and role, however much was drafted.

On a GPU every read waits for all that the device was given. Reads are counted on the CPU, where they cost nothing; the
code is the same but for `by_rank`, which on a CPU asks about equals in large vocabularies.
"""

import pytest
from torch.overrides import TorchFunctionMode

from executor import sampling
from executor.execute import execute
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Operation
from sim.workload import Sampling, Workload
from tests.executor.tiny_models import prompts

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "__contains__"}
PREFILL = 1


class HostReads(TorchFunctionMode):
    """Counts what reads a tensor."""

    num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


def ssd(K: int, fallback: Fallback = Fallback.DRAFT) -> SpeculativeSpeculative:
    return SpeculativeSpeculative(K, (2,) * (K + 1), (3,) * (K + 1), fallback)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Ranks are selected without asking about equals; float64 logits of the tiny models are compared as float32."""
    monkeypatch.setattr(sampling, "by_rank", sampling.by_rank_unasked)
    monkeypatch.setattr("executor.drafting.by_rank", sampling.by_rank_unasked)


@pytest.mark.parametrize("settings", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=5)])
@pytest.mark.parametrize("K", [2, 5])
@pytest.mark.parametrize("make", [lambda K: Autoregressive(), Speculative, ssd])
def test_reads_per_round_do_not_grow_with_what_is_drafted(make, K: int, settings: Sampling, tiny_serial) -> None:
    policy = make(K)
    rules = Workload("test", prompts(2, 9), 24, batch_size=2, sampling=(settings,) * 2)
    execute(policy, rules, tiny_serial)
    with HostReads() as reads:
        trace = execute(policy, rules, tiny_serial)
    assert len(trace.rounds) > 10
    longest = max(trace.rounds, key=lambda r: r.index).sequence
    num_rounds = sum(r.sequence == longest for r in trace.rounds)
    steps = {(s.sequence, s.round) for s in trace.spans if s.operation is Operation.DRAFT_STEP}
    builds = sum(s.operation is Operation.GLUE for s in trace.spans)
    assert reads.num == PREFILL + num_rounds + len(steps) + builds


def test_a_read_in_every_step_would_be_noticed(tiny_serial, monkeypatch) -> None:
    rules = Workload("test", prompts(1, 9), 24)
    honest = tiny_serial.draft._service.model.feed_drawn

    def asking(rows, tokens):
        assert int(tokens[0]) >= 0
        return honest(rows, tokens)

    with HostReads() as reads:
        execute(Speculative(4), rules, tiny_serial)
    monkeypatch.setattr(tiny_serial.draft._service.model, "feed_drawn", asking)
    with HostReads() as more:
        execute(Speculative(4), rules, tiny_serial)
    assert more.num > 2 * reads.num
