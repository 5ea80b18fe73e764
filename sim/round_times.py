"""How long sampled rounds take, many at once: the times of `sim.timeline` by gathers from tables.

A place is (prompt, tokens emitted before the round, side): number (prompt * width + emitted) * 2 + side, where side 1
are rounds after a hit (of SSD) or after a full acceptance (of SD, whose next first draft step takes two tokens), and
side 0 all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.latency import OperationLatency, sum_of_independent
from sim.policy import Drafting, LateBuild, Policy, SpeculativeSpeculative
from sim.round_law import RoundLaw
from sim.system import System, host_term
from sim.trace import Lane, Operation, Source

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

SIDES = (Source.MISS, Source.HIT)  # what a side stands for in a round of SSD


@dataclass(frozen=True)
class Visited:
    """Consecutive rounds of batches in lockstep: `places` is (rounds + 1, batches, rows), the others are (rounds,
    batches, rows). `is_live` says whether the row is decoded in that round, `goes_on` whether in the next one too.
    """

    places: IntArray
    is_live: BoolArray
    goes_on: BoolArray

    @property
    def num_rounds(self) -> int:
        return self.is_live.shape[0]

    @property
    def num_batches(self) -> int:
        return self.is_live.shape[1]


@dataclass(frozen=True)
class Noise:
    """Numbers from [0, 1): `target` (rounds, batches), `draft` (draws, rounds, batches)."""

    target: FloatArray
    draft: FloatArray


@dataclass(frozen=True)
class Places:
    """What a round of a policy is at every place: flat arrays over places; no draft token where no round starts.

    `draftings` are those of the two sides. Whatever numbers its places so can have its rounds timed: texts that are
    replayed, or rounds that happened.
    """

    is_ssd: bool
    draftings: tuple[Drafting, Drafting]
    is_reachable: BoolArray
    side: IntArray
    context: IntArray
    num_drafted: IntArray
    num_branches: IntArray

    @property
    def sources(self) -> list[Source]:
        return [drafting.source for drafting in self.draftings]

    @classmethod
    def of_texts(cls, policy: Policy, laws: Sequence[RoundLaw]) -> Places:
        """Wherever rounds of a policy may start in the texts of its laws, one of them a side."""
        is_ssd, replay = isinstance(policy, SpeculativeSpeculative), laws[0].replay
        shape = (replay.num_prompts, replay.longest, len(SIDES))
        # After a hit or a full acceptance so many tokens are there at least, the prefill's included.
        fewest = np.array([1, 2 if is_ssd else 3])
        is_reachable: BoolArray = ((laws[0].starts[:, None] >= fewest) & (laws[0].left[:, :, None] > 0)).ravel()
        return cls(
            is_ssd=is_ssd,
            draftings=(laws[0].drafting, laws[1].drafting),
            is_reachable=is_reachable,
            side=np.broadcast_to(np.arange(len(SIDES)), shape).ravel(),
            context=np.repeat((replay.prompt_length[:, None] + laws[0].starts - 1).ravel(), len(SIDES)),
            num_drafted=np.stack([law.num_drafted for law in laws], axis=-1).ravel() * is_reachable,
            num_branches=np.stack([_num_branches(law) for law in laws], axis=-1).ravel() * is_reachable,
        )


def _num_branches(law: RoundLaw) -> IntArray:
    """(num_prompts, width) branches of the build beside a round: none if the round must be the last."""
    branches = np.array([law.drafting.num_branches(n) for n in range(law.drafting.num_drafted + 1)])
    return np.where(law.starts + 1 < law.replay.cap, branches[law.num_drafted], 0)


def _total(round_s: FloatArray) -> FloatArray:
    """(batches,) sum over (rounds, batches), round by round: NumPy's own sum over a single column rounds otherwise."""
    total_s = np.zeros(round_s.shape[1:])
    for of_round_s in round_s:
        total_s += of_round_s
    return total_s


# ---------------------------------------------------------------------------------------------------------- batch of 1


class SoloTimes:
    """Batches of one row whose builds are always finished.

    Operations of one kind that follow one another, draft steps or tree steps, are drawn as their sum: the mean of their
    locations times a sum of independent residuals.
    """

    def __init__(self, policy: Policy, places: Places, system: System, temperature: float) -> None:
        self.policy, self.places, self.system = policy, places, system
        self.sampled = [drafting.is_sampled(temperature) for drafting in places.draftings]
        self.outcome_s = system.placement.outcome_s() if policy.speculation_length else 0.0
        num_places = len(places.side)
        self.host_s, self.around_s = np.zeros(num_places), np.zeros(num_places)
        self.verify = _Durations(num_places)
        devices = [(_Durations(num_places), _Durations(num_places)) for _ in range(system.placement.num_draft_devices)]
        self.builds = devices
        self.steps, self.two_unfed = _Durations(num_places), _Durations(num_places)
        for kind in self._kinds():
            self._fill(*kind)
        self.builds = [(glue, tree_steps) for glue, tree_steps in devices if glue.is_filled]
        self.drafts = [steps for steps in (self.steps, self.two_unfed) if steps.is_filled]
        self.num_draft_draws = 2 * len(self.builds) + len(self.drafts)

    def _kinds(self) -> list[tuple[int, int, int]]:
        """Every (side, draft tokens, branches) that a round can have."""
        columns = np.stack([self.places.side, self.places.num_drafted, self.places.num_branches])
        found = np.unique(columns[:, self.places.is_reachable], axis=1).T.tolist()
        return [(side, num_drafted, num_branches) for side, num_drafted, num_branches in found]

    def _fill(self, side: int, num_drafted: int, num_branches: int) -> None:
        """Enter what rounds of one kind take."""
        places, system = self.places, self.system
        is_kind = (places.side == side) & (places.num_drafted == num_drafted) & (places.num_branches == num_branches)
        at = np.flatnonzero(is_kind & places.is_reachable)
        contexts = places.context[at]
        self.host_s[at] = system.host_s[host_term(self.policy, places.sources[side])]
        self.around_s[at] = self._message_s(side, num_drafted) + self.outcome_s
        verify = system.latency[Lane.TARGET, Operation.VERIFY]
        slowdown = system.slowdown(Lane.TARGET, beside=num_branches > 0)
        self.verify.put(at, verify, [(num_drafted + 1, contexts)], slowdown)
        if num_branches:
            self._fill_builds(at, num_drafted, num_branches, contexts)
        if num_drafted and self.policy.waits_for_draft(places.sources[side]):
            step = system.latency[Lane.DRAFT, Operation.DRAFT_STEP]
            # After a full acceptance the last draft token was never fed to the draft of SD.
            two_unfed = side == 1 and not places.is_ssd
            if two_unfed:
                self.two_unfed.put(at, step, [(2, contexts - 1)])
            if num_drafted > two_unfed:
                self.steps.put(at, step, [(1, contexts + index) for index in range(two_unfed, num_drafted)])

    def _fill_builds(self, at: IntArray, num_drafted: int, num_branches: int, contexts: IntArray) -> None:
        slowdown = self.system.slowdown(Lane.DRAFT, beside=True)
        tables = [self.system.latency[Lane.DRAFT, operation] for operation in (Operation.GLUE, Operation.TREE_STEP)]
        shares = self.system.placement.shares_of_build(num_branches, 1)
        for (_, branches), (glue, tree_steps) in zip(shares, self.builds, strict=False):
            glue.put(at, tables[0], [(num_drafted + 1, contexts)], slowdown)
            slots = [contexts + num_drafted + 1 + branches * step for step in range(self.policy.speculation_length)]
            tree_steps.put(at, tables[1], [(branches, context) for context in slots], slowdown)

    def _message_s(self, side: int, num_drafted: int) -> float:
        if not self.policy.speculation_length:
            return 0.0
        return self.system.placement.speculation_s(num_drafted, sampled=self.sampled[side])

    def seconds(self, visited: Visited, noise: Noise) -> FloatArray:
        """(batches,) time of the rounds, each up to the moment its outcome is known where the next speculation is
        prepared, or at the target after a last round."""
        place, goes_on = visited.places[:-1, :, 0], visited.goes_on[..., 0]
        took_s = self.verify.draw(place, noise.target)
        if self.around_s.any():
            took_s += self.around_s.take(place)
        if self.builds:
            self._with_build(took_s, self._build_s(place, noise), goes_on)
        for steps, uniform in zip(self.drafts, noise.draft[2 * len(self.builds) :], strict=True):
            took_s += steps.draw(place, uniform)
        took_s += self.host_s.take(place)
        if self.outcome_s:
            took_s -= self.outcome_s * ~goes_on
        took_s *= visited.is_live[..., 0]
        return _total(took_s)

    def _build_s(self, place: IntArray, noise: Noise) -> FloatArray:
        """Of the slowest draft device."""
        took_s = [
            glue.draw(place, noise.draft[2 * device]) + tree_steps.draw(place, noise.draft[2 * device + 1])
            for device, (glue, tree_steps) in enumerate(self.builds)
        ]
        return took_s[0] if len(took_s) == 1 else np.max(took_s, axis=0)

    def _with_build(self, took_s: FloatArray, build_s: FloatArray, goes_on: BoolArray) -> None:
        if not self.system.overlaps:
            took_s += build_s
            return
        build_s *= goes_on  # nobody waits for the build beside a last round
        np.maximum(took_s, build_s, out=took_s)


class _Durations:
    """Durations of one operation, or of several one after another, by place: a location and the equally likely ratios
    to it, whose number may differ from place to place."""

    def __init__(self, num_places: int) -> None:
        self.location_s = np.zeros(num_places)
        self.ratios = np.zeros(0)
        self.first: IntArray = np.zeros(num_places, dtype=np.int64)
        self.number: IntArray = np.ones(num_places, dtype=np.int64)
        self.known: dict[int, tuple[int, int]] = {}  # by number of operations: where their ratios start, and how many

    @property
    def is_filled(self) -> bool:
        return len(self.ratios) > 0

    def put(
        self,
        at: IntArray,
        table: OperationLatency,
        operations: Sequence[tuple[float, NDArray]],
        slowdown: float = 1.0,
    ) -> None:
        """At places `at` the operations follow one another; each has its tokens and its contexts, one a place."""
        locations_s = [table.location_s(tokens, contexts) for tokens, contexts in operations]
        self.location_s[at] = slowdown * np.mean(locations_s, axis=0)
        first, number = self._ratios_of(len(operations), table)
        self.first[at], self.number[at] = first, number

    def _ratios_of(self, num_operations: int, table: OperationLatency) -> tuple[int, int]:
        """Where the ratios of so many operations of the table start, and their number."""
        if num_operations not in self.known:
            ratios = sum_of_independent([np.asarray(table.residuals)] * num_operations)
            self.known[num_operations] = (len(self.ratios), len(ratios))
            self.ratios = np.append(self.ratios, ratios)
        return self.known[num_operations]

    def draw(self, place: IntArray, uniform: FloatArray) -> FloatArray:
        """Durations at places of any shape; `uniform` of the same shape decides which."""
        if len(self.known) == 1:
            ratios = self.ratios.take((uniform * len(self.ratios)).astype(np.int64))
        else:
            index = (uniform * self.number.take(place)).astype(np.int64)
            index += self.first.take(place)
            ratios = self.ratios.take(index)
        ratios *= self.location_s.take(place)
        return ratios


# ------------------------------------------------------------------------------------------------------- any batch


class BatchTimes:
    """Batches of any number of rows and builds that may be abandoned: every operation's duration is drawn."""

    def __init__(self, policy: Policy, places: Places, system: System, temperature: float) -> None:
        self.policy, self.places, self.system = policy, places, system
        self.num_devices = system.placement.num_draft_devices
        K = self.num_steps = policy.speculation_length
        self.drafts = [policy.waits_for_draft(source) for source in places.sources]
        self.builds = bool(places.num_branches.any())
        self.can_abandon = isinstance(policy, SpeculativeSpeculative) and policy.on_late_build is LateBuild.ABANDON
        self.num_draft_draws = self.num_devices * (K * any(self.drafts) + (K + 1) * self.builds)
        self.host_s = [system.host_s[host_term(policy, source)] for source in places.sources]
        self.byte_s = 1 / system.placement.transfer_bytes_per_s
        self.token_bytes = [
            system.placement.speculation_bytes(1, sampled=drafting.is_sampled(temperature))
            for drafting in places.draftings
        ]
        self.verify = _Timed(system.latency[Lane.TARGET, Operation.VERIFY])
        if any(self.drafts):
            self.draft_step = _Timed(system.latency[Lane.DRAFT, Operation.DRAFT_STEP])
        if self.builds:
            self.glue = _Timed(system.latency[Lane.DRAFT, Operation.GLUE])
            self.tree_step = _Timed(system.latency[Lane.DRAFT, Operation.TREE_STEP])

    def seconds(self, visited: Visited, noise: Noise) -> FloatArray:
        """(batches,) time of the rounds, each up to the moment its outcomes are known where the next speculations are
        prepared, or at the target after a last round."""
        rows = _Rows.of(visited, self.places)
        draws = iter(noise.draft)
        start_s = self._draft_s(rows, draws) + self._host_s(rows)
        build_s = self._build_ends_s(rows, draws)
        known_s = self._message_s(rows) + self._verify_s(rows, noise.target)
        goes_on = rows.goes_on.any(-1)
        answer_s = np.where(goes_on, known_s + self._outcome_s(rows), known_s)
        if not self.system.overlaps:
            took_s = answer_s + np.max([device[-1] for device in build_s], axis=0, initial=0.0)
        else:
            ends_s = [self._end_s(device, answer_s, rows) for device in build_s]
            took_s = np.where(goes_on, np.max([answer_s, *ends_s], axis=0), answer_s)
        return _total((start_s + took_s) * rows.is_live.any(-1))

    def _host_s(self, rows: _Rows) -> FloatArray:
        return np.where((rows.is_live & (rows.side == 0)).any(-1), *self.host_s)

    def _message_s(self, rows: _Rows) -> FloatArray:
        if not self.num_steps:
            return np.zeros(rows.shape)
        after_miss, after_hit = self.token_bytes
        num_bytes = (rows.num_drafted * np.where(rows.side == 1, after_hit, after_miss)).sum(-1)
        return self.system.placement.transfer_latency_s + num_bytes * self.byte_s

    def _outcome_s(self, rows: _Rows) -> FloatArray:
        """Of the rows that go on."""
        if not self.num_steps:
            return np.zeros(rows.shape)
        num_rows = rows.goes_on.shape[-1]
        of_rows = np.array([self.system.placement.outcome_s(number) for number in range(num_rows + 1)])
        return of_rows[rows.goes_on.sum(-1)]

    def _verify_s(self, rows: _Rows, uniform: FloatArray) -> FloatArray:
        number = rows.is_live.sum(-1)
        tokens = _mean(rows.num_drafted.sum(-1) + number, number)
        beside = (rows.num_branches > 0).any(-1)
        slowdown = np.where(beside, *(self.system.slowdown(Lane.TARGET, beside=b) for b in (True, False)))
        return slowdown * self.verify(number, tokens, _mean(rows.context.sum(-1), number), uniform)

    def _draft_s(self, rows: _Rows, draws: Iterator[FloatArray]) -> FloatArray:
        """Draft steps that the target waits for; a row takes part in as many as it has draft tokens."""
        took_s = np.zeros((self.num_devices, *rows.shape))
        if not any(self.drafts):
            return took_s[0]
        drafted = rows.num_drafted * np.where(rows.side == 1, self.drafts[1], self.drafts[0])
        for step in range(self.num_steps):
            takes_part = drafted > step
            number = takes_part.sum(-1)
            # After a full acceptance the last draft token was never fed to the draft of SD.
            two = (takes_part & (rows.side == 1)).sum(-1) * (step == 0)
            context = _mean((rows.context * takes_part).sum(-1) - two, number) + step
            for device in range(self.num_devices):
                share = self._rows_of(device, number)
                took_s[device] += self.draft_step(share, _mean(number + two, number), context, next(draws))
        return took_s.max(0)

    def _build_ends_s(self, rows: _Rows, draws: Iterator[FloatArray]) -> list[list[FloatArray]]:
        """For every draft device the ends of its glue pass and of its tree steps, from the start of the build."""
        if not self.builds:
            return []
        builds = rows.num_branches > 0
        number = builds.sum(-1)
        tokens = (rows.num_drafted * builds).sum(-1) + number
        context = (rows.context * builds).sum(-1)
        slowdown = self.system.slowdown(Lane.DRAFT, beside=True)
        ends_s = []
        for share, branches in self._shares_of_build(number, rows.num_branches.sum(-1)):
            end_s = slowdown * self.glue(share, _mean(tokens, number), _mean(context, number), next(draws))
            ends_s.append([end_s])
            for step in range(self.num_steps):
                slots = _mean(context + tokens, number) + branches * step
                end_s = end_s + slowdown * self.tree_step(share, branches, slots, next(draws))
                ends_s[-1].append(end_s)
        return ends_s

    def _end_s(self, device: list[FloatArray], answer_s: FloatArray, rows: _Rows) -> FloatArray:
        """When a draft device has ended its build, or the operation in progress of one that nobody needs."""
        if not self.can_abandon:
            return device[-1]
        abandoned_s = answer_s
        for end_s in reversed(device):
            abandoned_s = np.where(end_s >= answer_s, end_s, abandoned_s)
        # Rows of a batch that is drafted anew are all on the side of a miss: none needs its build.
        is_needed = (rows.goes_on & (rows.next_side == 1)).any(-1)
        return np.where(is_needed, device[-1], abandoned_s)

    def _rows_of(self, device: int, number: IntArray) -> IntArray:
        """How many of so many rows a device drafts for."""
        if self.num_devices == 1:
            return number
        shares = [self.system.placement.shares_of_rows(rows) for rows in range(int(number.max(initial=0)) + 1)]
        return np.array([share[device] if device < len(share) else 0 for share in shares])[number]

    def _shares_of_build(self, number: IntArray, branches: IntArray) -> list[tuple[IntArray, FloatArray]]:
        """For every draft device its rows, and the mean branches of each."""
        if self.num_devices == 1:
            return [(number, _mean(branches, number))]
        pairs, which = np.unique(np.stack([number.ravel(), branches.ravel()]), axis=1, return_inverse=True)
        shares = np.zeros((2, self.num_devices, pairs.shape[1]))
        for index, (rows, total) in enumerate(pairs.T.tolist()):
            if rows:
                of_devices = self.system.placement.shares_of_build(total / rows, rows)
                shares[:, : len(of_devices), index] = np.array(of_devices).T
        found = shares[..., which.ravel()].reshape(2, self.num_devices, *number.shape)
        return [(found[0, device].astype(np.int64), found[1, device]) for device in range(self.num_devices)]


@dataclass(frozen=True)
class _Rows:
    """What rows do in the rounds visited: arrays are (rounds, batches, rows), 0 where a row is not live."""

    is_live: BoolArray
    goes_on: BoolArray
    side: IntArray
    next_side: IntArray
    num_drafted: IntArray
    num_branches: IntArray
    context: IntArray

    @classmethod
    def of(cls, visited: Visited, places: Places) -> _Rows:
        at = visited.places[:-1]
        found = [
            column.take(at) * visited.is_live for column in (places.num_drafted, places.num_branches, places.context)
        ]
        sides = places.side.take(visited.places)
        return cls(visited.is_live, visited.goes_on, sides[:-1], sides[1:], *found)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rounds, batches)"""
        return self.is_live.shape[:-1]


def _mean(total: IntArray, number: IntArray) -> FloatArray:
    """0 of none."""
    return total / np.maximum(number, 1)


class _Timed:
    """Durations of one operation at arrays of (rows, tokens of each row, context): location times a drawn residual.

    For every (rows, tokens) met, the location is a chain of straight lines over the context, with corners at the
    table's contexts; these corners are what is kept.
    """

    def __init__(self, table: OperationLatency) -> None:
        self.table = table
        self.residuals = np.array(table.residuals)
        tables = [table.knots, *table.batched.values()]
        contexts = {context for by_tokens in tables for knots in by_tokens.values() for context, _ in knots}
        self.corners = np.array(sorted(contexts), dtype=float)
        self.known = np.zeros(0, dtype=complex)  # rows + 1j * tokens, in order
        self.location_at_corner_s = np.zeros((0, len(self.corners)))
        self.lock = Lock()

    def __call__(self, rows: IntArray, tokens: FloatArray, context: FloatArray, uniform: FloatArray) -> FloatArray:
        location_s = self._location_s(rows.ravel(), tokens.ravel(), context.ravel()).reshape(rows.shape)
        return location_s * self.residuals.take((uniform * len(self.residuals)).astype(np.int64))

    def _location_s(self, rows: IntArray, tokens: FloatArray, context: FloatArray) -> FloatArray:
        known, at_corner = self._knowing(rows + 1j * tokens)
        line = np.searchsorted(known, rows + 1j * tokens)
        left = np.clip(np.searchsorted(self.corners, context, side="right") - 1, 0, max(0, len(self.corners) - 2))
        right = np.minimum(left + 1, len(self.corners) - 1)
        share = (context - self.corners[left]) / np.maximum(self.corners[right] - self.corners[left], 1.0)
        location_s = (1 - share) * at_corner[line, left] + share * at_corner[line, right]
        location_s[rows == 0] = 0.0
        # Beyond a corner that is not covered, the table itself says whether the context is.
        for index in np.flatnonzero(~np.isfinite(location_s) | ((share < 0) | (share > 1)) & (rows > 0)):
            location_s[index] = self.table.location_s(tokens[index], context[index], int(rows[index]))
        return location_s

    def _knowing(self, wanted: NDArray[np.complex128]) -> tuple[NDArray[np.complex128], FloatArray]:
        """(lines,) pairs in order and (lines, corners) locations, those of the pairs wanted among them."""
        with self.lock:
            new = np.setdiff1d(wanted, self.known)
            if len(new):
                pairs = np.append(self.known, new)
                lines = np.vstack([self.location_at_corner_s, *(self._line_s(pair) for pair in new)])
                order = np.argsort(pairs)
                self.known, self.location_at_corner_s = pairs[order], lines[order]
            return self.known, self.location_at_corner_s

    def _line_s(self, pair: complex) -> FloatArray:
        """(1, corners) locations, not a number where the table covers no such context."""
        rows, tokens = int(pair.real), float(pair.imag)
        line = np.full((1, len(self.corners)), math.nan)
        if rows:
            for corner, context in enumerate(self.corners):
                with suppress(BadInput):
                    line[0, corner] = self.table.location_s(tokens, context, rows)
        return line
