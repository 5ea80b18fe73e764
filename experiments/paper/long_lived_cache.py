"""Is a speculation cache that lives longer than a round worth anything?

Beside the speculation cache of a round stands a store of speculations by the last n tokens that they follow, the
least recently used of which make room. A miss asks it before the draft model. Whatever it answers is proposed as
certain: a draft token is accepted iff it is the one that the target draws, which keeps the target's law wherever the
proposal comes from and however often it is used. (A stored sample of the draft model could be verified by the law that
it was drawn from, but only once: after that the text depends on it.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.paper.agreement_records import DATA, TEMPERATURES, read_record
from experiments.paper.constant_times import StepCosts
from experiments.paper.section import Answer, Cell, Section, Table
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.metrics import Estimate, ratio_of_rates, ratio_of_totals

Tokens = tuple[int, ...]
FloatArray = NDArray[np.float64]
K, FAN_OUT = 4, 2
NUM_RUNS = 8  # at temperature 1
UNLIMITED = 10**9


class Store:
    """Speculations by the `num_tokens` tokens that they follow; the least recently used make room."""

    def __init__(self, num_tokens: int, capacity: int) -> None:
        self.num_tokens, self.capacity = num_tokens, capacity
        self._kept: OrderedDict[Tokens, Tokens] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, text: Tokens, speculation: Tokens) -> None:
        """What may follow `text`, of which only the end counts."""
        if len(text) >= self.num_tokens:
            key = text[-self.num_tokens :]
            self._kept[key] = speculation
            self._kept.move_to_end(key)
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)

    def get(self, text: Tokens) -> Tokens | None:
        """What has been put for a text that ends alike."""
        found = self._kept.get(text[-self.num_tokens :])
        if found is not None:
            self._kept.move_to_end(text[-self.num_tokens :])
        return found


@dataclass(frozen=True)
class Branches:
    """The draft model's greedy continuations, (n, branches, K) by row of a record, of its likeliest tokens there."""

    record: AgreementRecord
    continuation: NDArray[np.int64]

    @classmethod
    def read(cls, record: AgreementRecord, path: Path, num_branches: int = 4) -> Branches:
        """Raises `BadInput` if the file is not of this record."""
        import pyarrow.parquet as pq

        rows = np.array(pq.read_table(path)["continuation"].to_pylist())
        if len(rows) != len(record.token):
            raise BadInput(str(path), f"must have {len(record.token)} rows, as its record", len(rows))
        return cls(record, rows.reshape(len(rows), num_branches, -1))

    def drafted(self, row: int) -> Tokens:
        """What the draft model drafts greedily from this row's position on: K tokens."""
        return (int(self.record.top_token[row, 0]), *self.continuation[row, 0, : K - 1].tolist())

    def prepared(self, row: int, skip: int) -> Iterator[tuple[int, Tokens]]:
        """`FAN_OUT` tokens that may stand at the row's position, the first `skip` left out, and what follows each."""
        for rank in range(skip, skip + FAN_OUT):
            yield int(self.record.top_token[row, rank]), tuple(self.continuation[row, rank].tolist())


@dataclass(frozen=True)
class Variant:
    """What is asked after a miss. `what` is kept: `branches`, all that was prepared or drafted, `text`, the target's
    own tokens (prompt look-up), or nothing."""

    name: str
    what: str = ""
    num_tokens: int = 1
    capacity: int = UNLIMITED
    across_texts: bool = False


VARIANTS = (
    Variant("none"),
    *(Variant("prepared before", "branches", n) for n in (1, 2, 3, 4)),
    *(Variant("prepared before", "branches", 2, capacity) for capacity in (16, 64, 256)),
    *(Variant("prepared before, kept across texts", "branches", n, across_texts=True) for n in (2, 3)),
    *(Variant("prompt look-up", "text", n) for n in (2, 3)),
)


@dataclass
class Totals:
    """Of the runs of one prompt."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    lookups: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    found: float = 0.0  # in the store
    accepted_of_found: float = 0.0
    accepted_of_drafted: float = 0.0  # what the draft model would have had accepted in their place

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)


@dataclass
class Replayer:
    """Rounds of SSD along recorded texts, one text after the other, with a store beside the speculation cache."""

    branches: Branches
    variant: Variant
    costs: StepCosts
    rng: np.random.Generator
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.record = self.branches.record
        self.first_row = np.concatenate([[0], np.cumsum(self.record.lengths)])
        self.acceptance = self.record.acceptance
        self.hit_rejected = self.record.hit_after_rejection(FAN_OUT)
        self.hit_complete = self.record.hit_after_acceptance(FAN_OUT)
        self._renew()

    def _renew(self) -> None:
        self.store = Store(self.variant.num_tokens, self.variant.capacity)

    def run(self) -> list[Totals]:
        """Every prompt once. The numbers drawn do not depend on the variant."""
        return [self._of_prompt(prompt) for prompt in range(self.record.num_prompts)]

    def _of_prompt(self, prompt: int) -> Totals:
        if not self.variant.across_texts:
            self._renew()
        length, first = int(self.record.lengths[prompt]), int(self.first_row[prompt])
        text = (*self.record.prompt_tokens[prompt], *self.record.text(prompt))
        start = len(self.record.prompt_tokens[prompt])
        self._learn_text(text, 0, start)
        accepted_luck, hit_luck = self.rng.random((2, length))
        totals = Totals(tokens=length - 1.0)
        place, is_hit = 1, False
        while place < length:
            room = min(K, length - 1 - place)
            row, before = first + place, text[: start + place]
            drawn = _leading(accepted_luck[place : place + room] < self.acceptance[row : row + room])
            accepted, wait = drawn, 0.0 if is_hit else room * self.costs.draft_step
            found = None if is_hit else self._ask(before)
            if found is not None:
                right = [token == truth for token, truth in zip(found[:room], text[start + place :], strict=False)]
                accepted, wait = _leading(np.array(right, dtype=bool)), 0.0
                totals.add(found=1, accepted_of_found=accepted, accepted_of_drafted=drawn)
            totals.add(rounds=1, misses=not is_hit, seconds=(1 + wait) * self.costs.verify_s)
            self._learn(text, start, first, place, accepted, is_hit)
            last = place + accepted
            if last + 1 < length:
                rejected = found[accepted] if found is not None and accepted < room else None
                is_hit = bool(hit_luck[last] < self._hit_rate(first + last, accepted == room, rejected))
                totals.add(lookups=1, hits=is_hit)
            place = last + 1
        return totals

    def _hit_rate(self, row: int, complete: bool, rejected: int | None) -> float:
        """Of the speculation cache of the round; `rejected` is a token of the store, whose law is known."""
        if complete:
            return float(self.hit_complete[row])
        if rejected is None:
            return float(self.hit_rejected[row])
        moves_up = rejected in self.record.top_token[row, :FAN_OUT]
        return float(self.record.rank[row] < FAN_OUT + moves_up)

    def _ask(self, before: Tokens) -> Tokens | None:
        return self.store.get(before) if self.variant.what else None

    def _learn(self, text: Tokens, start: int, first: int, place: int, accepted: int, is_hit: bool) -> None:
        """What a round has prepared at the places that its text passed, or the text itself."""
        if self.variant.what == "text":
            self._learn_text(text, start + place, start + place + accepted + 1)
        if self.variant.what != "branches":
            return
        if not is_hit:
            self.store.put(text[: start + place], self.branches.drafted(first + place))
        for at in range(place, place + accepted + 1):
            skip = int(self.record.temperature == 0 and at < place + K)  # the draft token is no bonus token
            for token, speculation in self.branches.prepared(first + at, skip):
                self.store.put((*text[: start + at], token), speculation)

    def _learn_text(self, text: Tokens, begin: int, end: int) -> None:
        """The tokens that followed every place whose next K tokens have become known."""
        if self.variant.what == "text":
            for at in range(max(1, begin - K + 1), end - K + 1):
                self.store.put(text[:at], text[at : at + K])


def _leading(right: NDArray[np.bool_]) -> int:
    return int(np.cumprod(right).sum())


# ------------------------------------------------------------------------------------------------------------- results

_HEAD = (
    *("temperature", "what is kept", "tokens of the key", "entries at most", "misses answered", "low", "high"),
    *("extra hits of all look-ups", "accepted of what is kept", "accepted of fresh drafts in its place"),
    *("tokens/s over none", "low", "high"),
)


@dataclass(frozen=True)
class Worth:
    """A variant beside none at all."""

    temperature: int
    variant: Variant
    answered: Estimate  # share of misses, the first round of a text among them
    extra_hits: float
    accepted: float
    accepted_of_drafts: float
    speedup: Estimate
    rate: tuple[FloatArray, FloatArray]  # (num_prompts,) tokens and seconds

    def row(self) -> tuple[Cell, ...]:
        v = self.variant
        limit = "none" if v.capacity == UNLIMITED else v.capacity
        return (
            *(
                self.temperature,
                v.name,
                v.num_tokens,
                limit,
                self.answered.value,
                self.answered.low,
                self.answered.high,
            ),
            *(self.extra_hits, self.accepted, self.accepted_of_drafts),
            *(self.speedup.value, self.speedup.low, self.speedup.high),
        )


def section() -> Section:
    """Variants by temperature."""
    worth = [entry for T in TEMPERATURES for entry in worth_of(T)]
    return Section(
        "A speculation cache that outlives its round",
        text=(
            f"Long texts of the packaged pair (12 prompts, 256 tokens), K = {K}, {FAN_OUT} branches for every accept"
            " count, the draft as fallback, a draft step of .15 of a verification. Kept is, under the last n tokens"
            " before it, every speculation that was prepared at the places that the text passed, with what the fallback"
            " drafted; branches behind a rejected draft token are left out. The draft model's greedy continuations"
            " stand for its samples, and are proposed as certain.",
        ),
        tables=(Table("long_lived_cache", "What is kept, and what it is worth", _HEAD, tuple(w.row() for w in worth)),),
        answers=(_answer(worth),),
    )


def worth_of(temperature: int, num_runs: int = NUM_RUNS) -> list[Worth]:
    """Every variant but none, on the long texts of one temperature."""
    record = read_record(f"long_t{temperature}")
    branches = Branches.read(record, DATA / f"long_t{temperature}.branches.parquet")
    seeds = range(num_runs if temperature else 1)
    none, *others = (_replayed(branches, v, seeds) for v in VARIANTS)
    return [_worth(temperature, v, of, none) for v, of in zip(VARIANTS[1:], others, strict=True)]


def _replayed(branches: Branches, variant: Variant, seeds: range) -> dict[str, FloatArray]:
    """(num_prompts,) totals by name over all runs."""
    runs = [Replayer(branches, variant, StepCosts(), np.random.default_rng(seed)).run() for seed in seeds]
    return {entry.name: np.sum([[getattr(t, entry.name) for t in run] for run in runs], 0) for entry in fields(Totals)}


def _worth(temperature: int, variant: Variant, of: dict[str, FloatArray], none: dict[str, FloatArray]) -> Worth:
    answered = ratio_of_totals(of["found"], of["misses"])
    assert answered is not None
    num_found = max(1.0, of["found"].sum())
    return Worth(
        *(temperature, variant, answered),
        extra_hits=float(of["found"].sum() / of["lookups"].sum()),
        accepted=float(of["accepted_of_found"].sum() / num_found),
        accepted_of_drafts=float(of["accepted_of_drafted"].sum() / num_found),
        speedup=ratio_of_rates((of["tokens"], of["seconds"]), (none["tokens"], none["seconds"])),
        rate=(of["tokens"], of["seconds"]),
    )


def _answer(worth: list[Worth]) -> Answer:
    def best(temperature: int, what: str) -> Worth:
        entries = (w for w in worth if w.temperature == temperature and w.variant.what == what)
        return max(entries, key=lambda entry: entry.speedup.value)

    greedy, sampled, copied = best(0, "branches"), best(1, "branches"), best(0, "text")
    return Answer(
        "Is a speculation cache that lives longer than a round worth anything?",
        f"Only where the text repeats itself, and there no more than a copy of the text: in greedy texts it answers"
        f" {100 * greedy.answered.value:.0f} % of the misses with speculations of which {greedy.accepted:.2f} tokens"
        f" are accepted where a fresh draft has {greedy.accepted_of_drafts:.2f}, and makes decoding"
        f" {greedy.speedup:.3f} times as fast; prompt look-up answers {100 * copied.answered.value:.0f} % with"
        f" {copied.accepted:.2f} accepted tokens against {copied.accepted_of_drafts:.2f} and makes it"
        f" {copied.speedup:.3f} times as fast, {ratio_of_rates(copied.rate, greedy.rate):.3f} of the former; in sampled"
        f" texts the best key gives {sampled.speedup:.3f}, for what comes again comes only under keys so short that the"
        " speculation no longer fits.",
        "table long_lived_cache",
    )
