"""Every way to decode on the texts of an agreement record: `saguaro rivals system.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.metrics import Estimate, ratio_of_rates, ratio_of_totals
from sim.policy import (
    Autoregressive,
    Fallback,
    Policy,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.simulate import predict
from sim.strategies.all_accepted import all_accepted_only
from sim.strategies.block_verification import BlockVerification, PreparedBlocks
from sim.strategies.pearl import Pearl
from sim.strategies.prepared_tree import prepared_tree
from sim.strategies.prompt_lookup import prompt_lookup_policy
from sim.strategies.replayed import replayed
from sim.strategies.speculative_tree import SpeculativeTree
from sim.strategies.strategy import Strategy
from sim.strategies.token_tree import TokenTree
from sim.system import System
from sim.trace import Source
from sim.workload import Workload

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
BUDGETS = (4, 8, 16, 32)
NODES, DEPTHS = (4, 8, 16, 32), (2, 3, 6)
BUDGETS_OF_TREES = (8, 32)
HEAD = ("way to decode", "best setting", "tokens/s", "emitted / round", "times AR")
Way = Policy | Strategy


@dataclass(frozen=True)
class OnRecord:
    """The best setting of a family on the record's prompts; `speedup` is over AR."""

    family: str
    setting: str
    tokens_per_s: Estimate
    tokens_per_round: Estimate
    speedup: Estimate

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        figures = {name: getattr(self, name).to_dict() for name in ("tokens_per_s", "tokens_per_round", "speedup")}
        return {"family": self.family, "setting": self.setting, **figures}


def rivals_on_record(workload: Workload, system: System) -> list[OnRecord]:
    """The families, fastest first: exact expectations over the recorded texts, one sequence at a time.

    Trees follow the target's token through the draft's likeliest ones, at temperature 0 the rule of SD; they are the
    best for how often the target's token stands at which rank of the record. Every family shows its best setting on
    the very prompts that it is judged on, which favours those of many settings a little. Settings outside the profiled
    latencies are left out, and so are families that have none. Raises `BadInput` unless there is a record.
    """
    if not isinstance(system.agreement, AgreementRecord):
        raise BadInput("rivals", "needs an agreement record here")
    (_, ar), *others = [_best(family, ways, workload, system) for family, ways in families_on(system.agreement)]
    assert ar is not None
    rows = [OnRecord("AR", "AR", *_rates(ar), ratio_of_rates(_totals(ar), _totals(ar)))]
    for (family, setting), found in others:
        if found is not None:
            rows.append(OnRecord(family, setting, *_rates(found), ratio_of_rates(_totals(found), _totals(ar))))
    return sorted(rows, key=lambda row: -row.tokens_per_s.value)


def _best(
    family: str, ways: Sequence[Way], workload: Workload, system: System
) -> tuple[tuple[str, str], Expectation | None]:
    best: tuple[tuple[str, str], Expectation | None] = ((family, ""), None)
    for way in ways:
        try:
            found = _expectation(way, workload, system)
        except BadInput:
            continue  # outside the profiled range
        if best[1] is None or _rate(found) > _rate(best[1]):
            best = ((family, way.name), found)
    return best


def _expectation(way: Way, workload: Workload, system: System) -> Expectation:
    if isinstance(way, Policy):
        return predict(way, workload, system).expectation
    return replayed(way, workload, system)


def _rate(found: Expectation) -> float:
    return float(found.num_tokens.sum() / found.seconds.sum())


def _totals(found: Expectation) -> tuple[np.ndarray, np.ndarray]:
    return found.num_tokens, found.seconds


def _rates(found: Expectation) -> tuple[Estimate, Estimate]:
    tokens_per_s = ratio_of_totals(found.num_tokens, found.seconds)
    tokens_per_round = ratio_of_totals(found.num_tokens, found.num_rounds)
    assert tokens_per_s is not None and tokens_per_round is not None
    return tokens_per_s, tokens_per_round


def families_on(record: AgreementRecord) -> Iterator[tuple[str, list[Way]]]:
    """AR first. Block verification only where tokens are sampled: at temperature 0 it is SD."""
    chance = rank_frequencies(record)
    yield "AR", [Autoregressive()]
    yield "SD", [Speculative(K) for K in LENGTHS]
    yield "SD tree", [SpeculativeTree(tree) for tree in _trees(chance)]
    yield "SSD", list(_ssd(record))
    yield (
        "SSD tree",
        [
            prepared_tree(tree, budget, record, fallback)
            for tree, budget, fallback in product(
                _trees(chance), BUDGETS_OF_TREES, (Fallback.DRAFT_MISSING, Fallback.NONE)
            )
        ],
    )
    yield "SSD all accepted", [all_accepted_only(K) for K in LENGTHS]
    yield "PEARL", [Pearl(window) for window in range(1, 10)]
    if record.prompt_tokens:
        yield "prompt look-up", [prompt_lookup_policy(K) for K in LENGTHS]
    if record.temperature:
        yield "SD, block verification", [BlockVerification(K) for K in LENGTHS]
        yield "SSD, block verification", [PreparedBlocks(fan_out) for fan_out in _fan_outs(record)]


def rank_frequencies(record: AgreementRecord) -> Callable[[int, int], float]:
    """How often the target's token has a rank, whatever its place; 0 beyond the candidates."""
    counts = np.bincount(np.minimum(record.rank, record.num_candidates), minlength=record.num_candidates + 1)
    shares = np.sort(counts[:-1])[::-1] / max(1, len(record.rank))

    def chance(rank: int, place: int) -> float:
        return float(shares[rank]) if rank < len(shares) else 0.0

    return chance


def _trees(chance: Callable[[int, int], float]) -> list[TokenTree]:
    return list(dict.fromkeys(TokenTree.likeliest(chance, *size) for size in product(NODES, DEPTHS)))


def _ssd(record: AgreementRecord) -> Iterator[SpeculativeSpeculative]:
    """With the best fan-outs of the record's own curves."""
    after_no_draft = outcome_hit_mass(record, 0, _widest(record), Source.MISS)
    for fan_out in _fan_outs(record):
        K, budget = len(fan_out) - 1, sum(fan_out)
        yield SpeculativeSpeculative(K, fan_out, fan_out, Fallback.DRAFT)
        yield SpeculativeSpeculative(K, fan_out, exact_fan_out(after_no_draft.tolist(), budget), Fallback.NONE)


def _fan_outs(record: AgreementRecord) -> list[tuple[int, ...]]:
    masses = [outcome_hit_mass(record, K, _widest(record), Source.HIT) for K in LENGTHS]
    return list(dict.fromkeys(exact_fan_out(mass.tolist(), budget) for mass in masses for budget in BUDGETS))


def _widest(record: AgreementRecord) -> int:
    return min(max(BUDGETS), record.num_candidates)


def in_rows(found: Sequence[OnRecord]) -> list[tuple[str, ...]]:
    return [
        (row.family, row.setting, f"{row.tokens_per_s:.1f}", f"{row.tokens_per_round.value:.2f}", f"{row.speedup:.2f}")
        for row in found
    ]
