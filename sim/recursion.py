"""Exact expectation of a policy over an agreement record: no sampling of outcomes, no noise.

A forward recursion over (tokens emitted so far, source of the round). Policies whose draft tokens have the same law are
carried through together. Batches of rows that wait for each other are followed only where every text is like every
other (`sim.batch_chain`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.batch_chain import steady_state
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.mean_times import BuildDelays, RoundTimes, second_unfed_s
from sim.parametric import ParametricAgreement
from sim.policy import Autoregressive, Drafting, LateBuild, Policy, Proposer, Speculative, SpeculativeSpeculative
from sim.replay import SOURCES, Replay
from sim.round_law import RoundLaw
from sim.system import System
from sim.trace import Source
from sim.workload import Workload

__all__ = ["Expectation", "expectations", "outcome_hit_mass", "round_starts"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

CELLS = 2**20  # (policy, prompt, position) carried together; bounds memory


def expectations(policies: Sequence[Policy], workload: Workload, system: System) -> list[Expectation]:
    """One `Expectation` per policy, in their order.

    Raises `BadInput` on what the engine cannot follow exactly: several targets, tables of policies and controllers,
    batches on a record, abandoned builds on several draft devices.
    """
    _check_reach(policies, workload, system)
    if workload.batch_size > 1:
        return [steady_state(policy, workload, system) for policy in policies]
    replay = Replay(system.agreement, workload)
    results: dict[int, Expectation] = {}
    prepared: dict[int, SpeculativeSpeculative] = {}
    for index, policy in enumerate(policies):
        if isinstance(policy, SpeculativeSpeculative):
            prepared[index] = policy
        else:
            results[index] = _synchronous(policy, replay, system.as_run_by(policy))
    results.update(_speculative_speculative(prepared, replay, system))
    return [results[index] for index in range(len(policies))]


def _check_reach(policies: Sequence[Policy], workload: Workload, system: System) -> None:
    for policy in policies:
        if not isinstance(policy, Autoregressive | Speculative | SpeculativeSpeculative):
            rule = "the exact engine follows one fixed policy; tables and controllers need engine des"
            raise BadInput("policy", rule, getattr(policy, "name", type(policy).__name__))
    if system.placement.num_targets > 1:
        rule = "must be 1 for the exact engine: targets queue for the draft devices; use engine des"
        raise BadInput("placement.num_targets", rule, system.placement.num_targets)
    if workload.batch_size > 1 and not isinstance(system.agreement, ParametricAgreement):
        rule = "must be 1 for the exact engine on an agreement record: rows of a batch wait for each other; use engine"
        raise BadInput("workload.batch_size", f"{rule} vectorized or des", workload.batch_size)


def _group_of(policy: SpeculativeSpeculative) -> object:
    """Equal for policies that are carried through together."""
    laws = tuple(_law_of(policy.drafting(source)) for source in SOURCES)
    return policy.speculation_length, policy.fallback, policy.on_late_build, laws


def _law_of(drafting: Drafting) -> Drafting:
    """The drafting without the fan-out where that has no part in the law of its draft tokens."""
    return drafting if drafting.downweight != 1 else replace(drafting, fan_out=())


def _doubt(policy: SpeculativeSpeculative, replay: Replay) -> float:
    """Largest doubt of the laws of a policy; a law of plain samples of the draft model, or of an n-gram, has none."""
    draftings = [policy.drafting(source) for source in SOURCES]
    open_to_doubt = [d for d in draftings if d.downweight != 1 or d.proposer is Proposer.FILLER]
    return max((RoundLaw(replay, drafting).doubt for drafting in open_to_doubt), default=0.0)


def round_starts(laws: Mapping[Source, RoundLaw]) -> dict[Source, FloatArray]:
    """(width, num_prompts) probability that a round of each source starts there, given the laws of a policy's rounds:
    of SSD those after a hit and after a miss, of AR and SD those of the only source.

    Raises `BadInput` where the record leaves open how often rounds hit.
    """
    if Source.SYNCHRONOUS in laws:
        return {Source.SYNCHRONOUS: _Rounds(laws[Source.SYNCHRONOUS]).starts()}
    for law in laws.values():
        _ = law.doubt  # refuses what the record leaves open
    rounds = [_Rounds(laws[source]) for source in SOURCES]
    hit_tables = [one.hits(np.array([one.law.drafting.fan_out])) for one in rounds]
    masses, _ = _masses(rounds, hit_tables, rounds[0].replay, num_policies=1)
    return {source: mass[:, 0] for source, mass in zip(SOURCES, masses, strict=True)}


# ----------------------------------------------------------------------------------------------- draft, then verify


def _synchronous(policy: Policy, replay: Replay, system: System) -> Expectation:
    """AR and SD: every round drafts, then verifies."""
    side = _Side(policy, Source.SYNCHRONOUS, replay, BuildDelays(system))
    mass = side.starts()
    seconds = side.seconds(mass[:, None], np.zeros((1, side.num_accept_counts), dtype=int), None)[0]
    K = policy.speculation_length
    if K > 0:
        # The last draft token of a fully accepted round was never fed to the draft: the next step takes two tokens.
        drafts_on = np.arange(len(mass)) + K + 2 < replay.cap
        start, prompt = np.nonzero(side.goes_on[:, K] * drafts_on[:, None])
        extra_s = second_unfed_s(system, replay.prompt_length[prompt] + start - 1 + K)
        np.add.at(seconds, prompt, mass[start, prompt] * side.goes_on[start, K, prompt] * extra_s)
    nothing = np.zeros((2, replay.num_prompts))
    return Expectation(replay.num_tokens(), mass.sum(0), seconds, nothing, nothing)


# ------------------------------------------------------------------------------------- draft beside the verification


@dataclass(frozen=True)
class _Block:
    """Rounds with equally many draft tokens: `here` (starts, num_prompts) says which between `first` and `end`."""

    num_drafted: int
    ends_surely: bool
    first: int
    end: int
    here: BoolArray


class _Rounds:
    """Rounds of one source, for policies that share the law of their draft tokens.

    Tables have the places where rounds start first and the prompts last; `goes_on[i, k]` is the probability that a
    round that starts with i tokens emitted accepts exactly k and that the sequence goes on.
    """

    def __init__(self, law: RoundLaw) -> None:
        self.law, self.replay = law, law.replay
        self.num_accept_counts = law.drafting.num_drafted + 1
        ended = [law.ended[k] * law.goes_on(k) for k in range(self.num_accept_counts)]
        self.goes_on = np.stack(ended).transpose(2, 0, 1).copy()

    def starts(self) -> FloatArray:
        """(width, num_prompts) probability that a round starts there, if all rounds are of this source."""
        width, num_prompts = len(self.goes_on), self.replay.num_prompts
        mass = np.zeros((width + self.num_accept_counts + 1, num_prompts))
        mass[1] = self.replay.lengths > 1
        for start in range(1, width):
            mass[start + 1 : start + 1 + self.num_accept_counts] += mass[start] * self.goes_on[start]
        return mass[:width]

    def arrivals(self) -> FloatArray:
        """(width, K + 1, num_prompts) `goes_on` by the place where the next round starts, K acceptances first."""
        return _by_arrival(self.goes_on.transpose(1, 0, 2))[:, ::-1].copy()

    def hits(self, fan_outs: IntArray) -> tuple[FloatArray, IntArray]:
        """Distinct tables (width, tables, num_prompts) of the probability to go on with a hit, by the place where the
        next round starts, and (K + 1, policies) which of them concerns a policy, K acceptances first.

        `fan_outs` is (policies, K + 1).
        """
        codes = fan_outs * self.num_accept_counts + np.arange(self.num_accept_counts)
        distinct, which = np.unique(codes, return_inverse=True)
        tables = np.zeros((len(self.goes_on), len(distinct), self.replay.num_prompts))
        for index, code in enumerate(distinct):
            fan_out, k = divmod(int(code), self.num_accept_counts)
            if fan_out:
                tables[k + 1 :, index] = (self.goes_on[:, k] * self.law.prepared(k, fan_out).T)[: -(k + 1)]
        return tables, np.ascontiguousarray(which.reshape(codes.shape)[:, ::-1].T)


class _Side(_Rounds):
    """Rounds of one source and their times."""

    def __init__(self, policy: Policy, source: Source, replay: Replay, delays: BuildDelays) -> None:
        super().__init__(RoundLaw(replay, _law_of(policy.drafting(source))))
        self.source = source
        self.times = RoundTimes(policy, source, delays, replay.agreement.temperature)
        self.goes_on_at_all = self.goes_on.sum(1)
        self.blocks = list(_blocks(self.law, replay.cap))

    def seconds(self, mass: FloatArray, fan_outs: IntArray, hit_rates: FloatArray | None) -> FloatArray:
        """(policies, num_prompts) mean time of the rounds; `mass` (width, policies, num_prompts) says how many start.

        `hit_rates`, of the same shape, are the probabilities to go on with a hit: where a miss does not wait for a
        late build.
        """
        total = np.zeros(mass.shape[1:])
        branches_up_to = np.cumsum(fan_outs, axis=1)
        for block in self.blocks:
            branches = branches_up_to[:, block.num_drafted] * (not block.ends_surely)
            distinct, which = np.unique(branches, return_inverse=True)
            round_s, hit_s = self._round_s(block, distinct.tolist())
            here = mass[block.first : block.end]
            total += np.einsum("ipn,pin->pn", here, round_s[which])
            if hit_rates is not None and hit_s.any():
                total += np.einsum("ipn,ipn,pin->pn", here, hit_rates[block.first : block.end], hit_s[which])
        return total

    def _round_s(self, block: _Block, num_branches: list[int]) -> tuple[FloatArray, FloatArray]:
        """(branches, starts, num_prompts) mean time of a round, and what a hit adds; 0 outside the block."""
        start, prompt = np.nonzero(block.here)
        start += block.first
        contexts, where = np.unique(self.replay.prompt_length[prompt] + start - 1, return_inverse=True)
        found = self.times.at(block.num_drafted, num_branches, contexts)
        round_s, hit_s = np.zeros((2, len(num_branches), *block.here.shape))
        onward_s = found.onward_s[:, where] * self.goes_on_at_all[start, prompt]
        round_s[:, block.here] = found.always_s[:, where] + onward_s
        hit_s[:, block.here] = found.hit_s[:, where]
        return round_s, hit_s


def _blocks(law: RoundLaw, cap: int) -> Iterator[_Block]:
    """All rounds that can be. One that surely ends the sequence builds nothing."""
    can_be = (law.left > 0) & (law.starts > 0)
    for ends_surely in (False, True):
        for num_drafted in np.unique(law.num_drafted[can_be]):
            here = can_be & (law.num_drafted == num_drafted) & ((law.starts == cap - 1) == ends_surely)
            starts = np.flatnonzero(here.any(0))
            if len(starts):
                first, end = int(starts[0]), int(starts[-1]) + 1
                yield _Block(int(num_drafted), ends_surely, first, end, here[:, first:end].T)


def _by_arrival(tables: FloatArray) -> FloatArray:
    """(K + 1, width, num_prompts) by start and accept count k to (width, K + 1, num_prompts) by the next start."""
    arrivals = np.zeros((tables.shape[1], tables.shape[0], tables.shape[2]))
    for k, table in enumerate(tables):
        arrivals[k + 1 :, k] = table[: -(k + 1)]
    return arrivals


def _speculative_speculative(
    policies: Mapping[int, SpeculativeSpeculative], replay: Replay, system: System
) -> Iterator[tuple[int, Expectation]]:
    """SSD policies by index, in groups that share laws, in chunks that share memory."""
    if not policies:
        return
    delays = BuildDelays(system.as_run_by(next(iter(policies.values()))))
    groups: dict[object, list[int]] = {}
    for index, policy in policies.items():
        groups.setdefault(_group_of(policy), []).append(index)
    size = max(1, CELLS // max(1, replay.longest * replay.num_prompts))
    for members in groups.values():
        sides = [_Side(policies[members[0]], source, replay, delays) for source in SOURCES]
        for start in range(0, len(members), size):
            chunk = members[start : start + size]
            yield from zip(chunk, _chunk([policies[index] for index in chunk], sides, replay), strict=True)


def _chunk(policies: Sequence[SpeculativeSpeculative], sides: list[_Side], replay: Replay) -> Iterator[Expectation]:
    fan_outs = [np.array([policy.fan_out(side.source) for policy in policies]) for side in sides]
    hit_tables = [side.hits(lists) for side, lists in zip(sides, fan_outs, strict=True)]
    masses, hits = _masses(sides, hit_tables, replay, len(policies))
    seconds = np.zeros((len(policies), replay.num_prompts))
    for side, mass, lists, tables in zip(sides, masses, fan_outs, hit_tables, strict=True):
        abandons = policies[0].on_late_build is LateBuild.ABANDON
        seconds += side.seconds(mass, lists, _hit_rates(*tables) if abandons else None)
    rounds = masses[0].sum(0) + masses[1].sum(0)
    lookups = np.stack([_weighted(mass, side.goes_on_at_all) for side, mass in zip(sides, masses, strict=True)])
    num_tokens = replay.num_tokens()
    for index, policy in enumerate(policies):
        doubt = _doubt(policy, replay)
        yield Expectation(num_tokens, rounds[index], seconds[index], lookups[:, index], hits[:, index], doubt)


def _masses(
    sides: Sequence[_Rounds], hit_tables: list[tuple[FloatArray, IntArray]], replay: Replay, num_policies: int
) -> tuple[list[FloatArray], FloatArray]:
    """For each side the probability (width, policies, num_prompts) that a round starts there, and (2, policies,
    num_prompts) hits.

    Rounds that start at a place come from the K + 1 places before it. Where both sides accept alike, how many start is
    the same for all policies, and only the share of hits among them differs.
    """
    shape = (num_policies, replay.num_prompts)
    pad = max(side.num_accept_counts for side in sides)
    mass = np.zeros((2, pad + max(2, replay.longest), *shape))
    hit, miss = mass
    miss[pad + 1] = replay.lengths > 1
    alike = np.array_equal(sides[0].goes_on, sides[1].goes_on)
    starts = sides[0].starts() if alike else None
    arrivals = [] if alike else [side.arrivals()[:, :, None] for side in sides]
    terms = [np.empty((side.num_accept_counts, *shape)) for side in sides]
    hits, from_side, all_starts = np.zeros((2, *shape)), np.empty(shape), np.empty(shape)
    for place in range(2, replay.longest):
        here = pad + place
        before = [mass[side, here - len(terms[side]) : here] for side in range(2)]
        for side, (tables, which) in enumerate(hit_tables):
            np.take(tables[place], which, axis=0, out=terms[side], mode="clip")
            np.multiply(terms[side], before[side], out=terms[side])
            np.add.reduce(terms[side], axis=0, out=from_side)
            hits[side] += from_side
            hit[here] += from_side
        if starts is not None:
            np.subtract(starts[place], hit[here], out=miss[here])
            continue
        np.negative(hit[here], out=miss[here])
        for side in range(2):
            np.multiply(arrivals[side][place], before[side], out=terms[side])
            miss[here] += np.add.reduce(terms[side], axis=0, out=all_starts)
    return [mass[side, pad : pad + replay.longest] for side in range(2)], hits


def _hit_rates(tables: FloatArray, which: IntArray) -> FloatArray:
    """(width, policies, num_prompts) probability that a round that starts there goes on with a hit."""
    width, _, num_prompts = tables.shape
    rates = np.zeros((width, which.shape[1], num_prompts))
    for k, table in enumerate(which[::-1]):
        rates[: max(0, width - k - 1)] += tables[k + 1 :, table]
    return rates


def _weighted(mass: FloatArray, weights: FloatArray) -> FloatArray:
    """Sum over places of (width, policies, num_prompts) times (width, num_prompts)."""
    return np.einsum("ipn,in->pn", mass, weights)


# ------------------------------------------------------------------------------------------------------------ curves


def outcome_hit_mass(
    agreement: Agreement,
    speculation_length: int,
    max_fan_out: int,
    source: Source,
    *,
    downweight: float = 1.0,
    proposer: Proposer = Proposer.DRAFT_MODEL,
) -> FloatArray:
    """(K + 1, max_fan_out + 1) P(k accepted and bonus token among the f prepared), over look-ups of rounds that start
    anywhere. Input of `sim.policy.exact_fan_out`.

    Every position that leaves room for a whole round after which the sequence goes on counts once as a start. With
    `downweight` below 1 what is prepared at a draft index changes acceptance there: column f is then the law of the
    list (f, ..., f).
    """
    K = speculation_length
    longest = int(agreement.lengths.max(initial=0))
    workload = Workload(
        dataset="curves",
        prompts=((0,),),
        max_new_tokens=longest,
        stop_ids=tuple(agreement.identity["stop_ids"]),
        sampling=(agreement.sampling,),
        stop_strings=agreement.stop_strings,
    )
    replay = Replay(agreement, workload)
    mass = np.zeros((K + 1, max_fan_out + 1))
    for f in range(max_fan_out + 1):
        law = RoundLaw(replay, _law_of(Drafting(proposer, K, (f,) * (K + 1), source, downweight)))
        counted = (law.starts > 0) & law.goes_on(K)
        for k in range(K + 1):
            mass[k, f] = (law.ended[k] * law.prepared(k, f))[counted].sum() / max(1, counted.sum())
    return mass
