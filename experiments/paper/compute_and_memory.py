"""What speculation costs beside time: operations, bytes read, stored distributions, KV of branches, traffic."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper.agreement_records import read_record
from experiments.paper.constant_times import StepCosts
from experiments.paper.hit_rates import uniform_policy
from experiments.paper.section import Answer, Cell, Section, Table
from experiments.recorded_workload import recorded_workload
from sim.agreement import AgreementRecord
from sim.expectation import Expectation
from sim.memory import Memory
from sim.placement import TOKEN_BYTES, Placement
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.simulate import predict_all
from sim.trace import Lane, Source

K = 4
FAN_OUTS = (1, 2, 4, 8)
PROBABILITY_BYTES = 4
OPERATIONS_PER_PARAMETER = 2.0  # a multiplication and an addition for each token


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair. A forward pass takes 2 operations per parameter and token, attention over the context left out,
    and reads every weight once, however many tokens it is of."""

    name: str
    target_parameters: float
    draft_parameters: float
    vocab_size: int
    target_kv_bytes: int  # of a token of context
    draft_kv_bytes: int
    weight_bytes: int  # of a parameter

    @property
    def placement(self) -> Placement:
        return Placement(distribution_bytes=self.vocab_size * PROBABILITY_BYTES)

    @property
    def memory(self) -> Memory:
        return Memory(target_kv_bytes_per_token=self.target_kv_bytes, draft_kv_bytes_per_token=self.draft_kv_bytes)


SHAPES = (
    Shape("packaged pair", 2.56e6, 0.39e6, 512, 8 * 2 * 160 * 4, 1 * 2 * 160 * 4, 4),
    # 80 and 16 layers with 8 KV heads of 128 and 64 dimensions, bfloat16
    Shape("70B target, 1B draft", 70.6e9, 1.24e9, 128_256, 80 * 2 * 8 * 128 * 2, 16 * 2 * 8 * 64 * 2, 2),
)


@dataclass(frozen=True)
class Consumption:
    """Of one policy on one shape. Totals are over the texts of a record; `stored_bytes` and `kv_bytes` are the most
    that stands in the draft's memory for the branches of one row at a time."""

    shape: Shape
    policy: str
    num_tokens: float
    num_hits: float
    target_operations: float
    draft_operations: float
    bytes_read: float
    bytes_sent: float
    stored_bytes: float
    kv_bytes: float
    used_share: float | None  # of the tokens drafted in branches, those that were verified

    @property
    def operations_per_token(self) -> float:
        return (self.target_operations + self.draft_operations) / self.num_tokens

    @property
    def draft_share(self) -> float:
        """Of the operations."""
        return self.draft_operations / (self.draft_operations + self.target_operations)

    @property
    def draft_operations_per_hit(self) -> float | None:
        return self.draft_operations / self.num_hits if self.num_hits else None


def consumption(policy: Policy, totals: Expectation, shape: Shape) -> Consumption:
    """What the rounds of a policy at a temperature above 0 take.

    A verification is a pass over K + 1 tokens. A round of SD, or after a miss, has K draft steps of one token. A build
    is a glue pass over K + 1 tokens and K passes over all branches. The outcome and a speculation, with the
    distribution of each of its tokens, travel once per round. Branches of the last round of a text, which are never
    built, and rounds shortened by the end of a text are counted as if they were like the others.
    """
    K, branches = policy.speculation_length, _num_branches(policy)
    rounds, hits = float(totals.num_rounds.sum()), float(totals.num_hits.sum())
    synchronous = (rounds - hits) * (K if policy.waits_for_draft(Source.MISS) else 0)
    build_passes = rounds * (K + 1) if branches else 0.0
    drafted = synchronous + (rounds * (K + 1 + K * branches) if branches else 0.0)
    passes_bytes = rounds * shape.target_parameters + (synchronous + build_passes) * shape.draft_parameters
    message_bytes = 2 * TOKEN_BYTES + shape.placement.speculation_bytes(K, sampled=True)
    return Consumption(
        shape,
        policy.name,
        num_tokens=float(totals.num_tokens.sum()),
        num_hits=hits,
        target_operations=rounds * (K + 1) * OPERATIONS_PER_PARAMETER * shape.target_parameters,
        draft_operations=drafted * OPERATIONS_PER_PARAMETER * shape.draft_parameters,
        bytes_read=passes_bytes * shape.weight_bytes,
        bytes_sent=rounds * message_bytes if K else 0.0,
        stored_bytes=_of_branches(policy, Memory(), shape.placement),
        kv_bytes=_of_branches(policy, shape.memory, Placement()),
        used_share=hits / (rounds * branches) if branches else None,
    )


def _of_branches(policy: Policy, memory: Memory, placement: Placement) -> float:
    """Bytes that one row takes on the draft's device beyond those of SD with as many draft tokens."""

    def on_draft(one: Policy) -> float:
        demands = memory.demands(one, 1, 0, placement, sampled=True)
        return sum(demand.num_bytes for demand in demands if demand.lane is Lane.DRAFT)

    return on_draft(policy) - on_draft(Speculative(policy.speculation_length))


def _num_branches(policy: Policy) -> int:
    return sum(policy.fan_out(Source.HIT)) if isinstance(policy, SpeculativeSpeculative) else 0


# ------------------------------------------------------------------------------------------------------------- results

_HEAD = (
    *("pair", "policy", "tokens per round", "hit rate", "operations per token over AR", "of them by the draft, %"),
    *("weights read per token over AR", "draft operations per round, G", "per token, G", "per hit, G"),
    *("branch tokens verified, %", "stored distributions, MB", "branch KV, MB"),
    *("sent per round, kB", "per token, kB", "per hit, kB"),
)


def section() -> Section:
    """Policies by shape, on texts at temperature 1, where distributions are stored and sent."""
    record = read_record("library_t1")
    policies: list[Policy] = [Autoregressive(), Speculative(K)]
    policies += [uniform_policy(K, fan_out, Fallback.DRAFT) for fan_out in FAN_OUTS]
    totals = totals_of(record, policies)
    found = [[consumption(p, of, shape) for p, of in zip(policies, totals, strict=True)] for shape in SHAPES]
    rows = [_row(c, of, group[0]) for group in found for c, of in zip(group, totals, strict=True)]
    return Section(
        "Compute and memory",
        text=(
            f"Rounds are those of the packaged pair at temperature 1 (48 prompts, K = {K}, uniform fan-outs, the draft"
            " as fallback); the second shape is counted with the same rounds, which is an assumption. A pass takes 2"
            " operations per parameter and token and reads every weight once; a round verifies K + 1 tokens, builds"
            " with a glue pass of K + 1 tokens and K passes over all branches, and after a miss drafts K tokens. A"
            " branch keeps K distributions of V probabilities of 4 bytes, and K tokens of KV. The outcome (8 bytes) and"
            " the K tokens with their distributions travel once per round. There is no meter: energy is taken to follow"
            " the operations where passes are wide, and the bytes read where they are narrow.",
        ),
        tables=(Table("compute_and_memory", "What policies consume", _HEAD, tuple(rows)),),
        answers=(_answer(found),),
    )


def totals_of(record: AgreementRecord, policies: list[Policy]) -> list[Expectation]:
    """Rounds and hits; times have no part in them where a build is awaited."""
    predictions = predict_all(policies, recorded_workload(record), StepCosts().system(record))
    return [prediction.expectation for prediction in predictions]


def _row(c: Consumption, totals: Expectation, ar: Consumption) -> tuple[Cell, ...]:
    rounds, hits = float(totals.num_rounds.sum()), float(totals.num_hits.sum())
    per_hit = c.draft_operations_per_hit
    return (
        *(c.shape.name, c.policy, c.num_tokens / rounds, hits / rounds if hits else None),
        *(c.operations_per_token / ar.operations_per_token, 100 * c.draft_share),
        *(c.bytes_read / ar.bytes_read, c.draft_operations / rounds / 1e9, c.draft_operations / c.num_tokens / 1e9),
        *(None if per_hit is None else per_hit / 1e9, None if c.used_share is None else 100 * c.used_share),
        *(c.stored_bytes / 1e6, c.kv_bytes / 1e6, c.bytes_sent / rounds / 1e3, c.bytes_sent / c.num_tokens / 1e3),
        c.bytes_sent / hits / 1e3 if hits else None,
    )


def _answer(found: list[list[Consumption]]) -> Answer:
    ar, sd, *ssd = found[-1]
    narrow, wide = ssd[0], ssd[-1]

    def operations(of: Consumption) -> float:
        return of.operations_per_token / ar.operations_per_token

    def read(of: Consumption) -> float:
        return of.bytes_read / ar.bytes_read

    assert narrow.used_share is not None and wide.used_share is not None
    return Answer(
        "What does SSD cost in compute, memory, traffic and energy?",
        f"For a 70B target and a 1B draft, K = {K}: {operations(sd):.2f} times AR's operations per token with SD, and"
        f" with SSD {operations(narrow):.2f} ({K + 1} branches) to {operations(wide):.2f} ({(K + 1) * FAN_OUTS[-1]}"
        f" branches), of which the draft does {100 * narrow.draft_share:.0f} to {100 * wide.draft_share:.0f} %, while"
        f" the weights read fall to {read(sd):.2f} (SD) and {read(narrow):.2f} to {read(wide):.2f} (SSD) of AR's; of"
        f" the tokens drafted in branches {100 * narrow.used_share:.1f} to {100 * wide.used_share:.1f} % are ever"
        f" verified; the distributions stored take {narrow.stored_bytes / 1e6:.0f} to {wide.stored_bytes / 1e6:.0f} MB"
        f" a row, the branches' KV {narrow.kv_bytes / 1e6:.2g} to {wide.kv_bytes / 1e6:.2g} MB, and"
        f" {wide.bytes_sent / wide.num_tokens / 1e3:.0f} kB are sent per token.",
        "table compute_and_memory",
    )
