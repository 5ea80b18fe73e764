"""The host reads what the models computed once per round and role, however much was drafted.

On a GPU every read waits for all that the device was given. Reads are counted on the CPU, where they cost nothing; the
code is the same but for `by_rank`, which on a CPU asks about equals in large vocabularies.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from executor import sampling
from executor.concurrency import open_runner
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
    monkeypatch.setattr("executor.likely_outcomes.by_rank", sampling.by_rank_unasked)


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


FACTORIES = {"zeros", "ones", "full", "empty", "arange", "tensor", "rand", "randn", "eye", "linspace"}


class Homeless(TorchFunctionMode):
    """Notes tensors that are made without saying where, and what is indexed by numbers of the host: on a GPU the first
    would be elsewhere, and the second would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in FACTORIES and "device" not in (kwargs or {}):
            self.found.add(name)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found.update({f"{name} by a list"} if any(isinstance(part, list) for part in index) else ())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("graphs", [False, True])
def test_every_tensor_of_a_run_says_where_it_is(graphs: bool, tiny_pair) -> None:
    settings = (Sampling(), Sampling(temperature=1.0, top_p=0.9), Sampling(0.8, repetition_penalty=1.2))
    rules = Workload("test", prompts(3, 9), 16, batch_size=3, sampling=settings)
    fallbacks = (Fallback.DRAFT, Fallback.FILLER, Fallback.NGRAM)
    policies = [Autoregressive(), Speculative(3), *(ssd(3, fallback) for fallback in fallbacks)]
    with open_runner(tiny_pair, "serial", dtype="float64", graphs=graphs) as runner, Homeless() as homeless:
        for policy in policies:
            execute(policy, rules, runner, log_probs=True)
    assert homeless.found == set()
    with homeless:
        assert torch.zeros(2)[[0]] == 0
    assert homeless.found == {"zeros", "__getitem__ by a list"}
