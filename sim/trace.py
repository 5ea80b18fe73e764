"""The record of a run: what happened in every round and when every operation ran.

The simulator and the executor both return a `Trace`; metrics are functions of it (`sim.metrics`). Times are seconds on
one clock per trace. A trace is stored as a folder of parquet tables plus `trace.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from sim.errors import BadInput

FORCED = "forced_acceptance"  # in a trace's policy: the accept counts that its rounds were given
SCHEMA = 3
READABLE = (1, 2, 3)  # 1 knew one row and one device a lane, 2 no stop strings and log-probabilities; defaults say so


class Lane(StrEnum):
    """Whose time an operation takes."""

    TARGET = "target"
    DRAFT = "draft"


class Operation(StrEnum):
    """Every kind of work that a decoder does; a span is one of these."""

    PREFILL = "prefill"  # either lane: the prompt's forward pass
    VERIFY = "verify"  # target: forward over `num_tokens` tokens, acceptance, roll-back (1 token is an AR step)
    DRAFT_STEP = "draft_step"  # draft: one forward over `num_tokens` tokens and one sampled token
    GLUE = "glue"  # draft: forward over the round's speculation, choice of the branches
    TREE_STEP = "tree_step"  # draft: one forward over `num_tokens` branches and one sampled token each
    LOOKUP = "lookup"  # draft: outcome to prepared speculation


BUILD = (Operation.GLUE, Operation.TREE_STEP)  # what preparing a speculation cache consists of


class Source(StrEnum):
    """Where the speculation verified in a round came from."""

    SYNCHRONOUS = "synchronous"  # SD and AR: drafted (or not) before the round, no speculation cache
    FIRST = "first"  # SSD: the first round of a sequence, supplied by the fallback without a look-up
    HIT = "hit"  # SSD: prepared in the speculation cache
    MISS = "miss"  # SSD: supplied by the fallback after a look-up that failed
    REDRAFTED = "redrafted"  # SSD: prepared, but drafted anew with the rest of the batch; the round is as after a miss


class StopReason(StrEnum):
    """What ended a sequence."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a verification: `num_accepted` draft tokens, then `bonus_token`."""

    num_accepted: int
    bonus_token: int


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on one device of a lane. `round` is -1 before the first round.

    Of a batch, `sequence` and `round` are those of its first row, `num_tokens` the tokens of all `batch_size` rows that
    take part, and `context`, the number of KV entries before the operation, their mean.
    """

    lane: Lane
    operation: Operation
    sequence: int
    round: int
    num_tokens: int
    context: int
    start_s: float
    end_s: float
    batch_size: int = 1
    device: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Round:
    """One verification, from the moment its speculation is asked for to the moment its outcome is known.

    `num_emitted` counts committed tokens: accepted ones plus the bonus token, except where a stop token among the
    accepted ones ended the sequence, where nothing after it counts anywhere. `policy` names the policy that the round
    ran under; it is empty in traces of earlier releases.
    """

    sequence: int
    index: int
    source: Source
    num_drafted: int
    num_accepted: int
    num_emitted: int
    context: int
    start_s: float
    end_s: float
    policy: str = ""

    @property
    def was_rejected(self) -> bool:
        return self.num_accepted < self.num_drafted and self.num_emitted > self.num_accepted


@dataclass(frozen=True, slots=True)
class Sequence:
    """One decoded prompt. `tokens` includes the first token, which the prefill emits before `decode_start_s`.

    `arrival_s` is when it was asked for: 0 where all requests are there from the beginning. `stopped` says that a stop
    token or a stop string ended it. `log_probs` are, if asked for, the natural logarithms of the target's probability
    of each token given all before it, by its logits as they are: at temperature 1, before any processing.
    """

    index: int
    prompt_length: int
    tokens: tuple[int, ...]
    prefill_start_s: float
    decode_start_s: float
    end_s: float
    stopped: bool
    arrival_s: float = 0.0
    stopped_by_string: bool = False
    log_probs: tuple[float, ...] = ()

    @property
    def stop_reason(self) -> StopReason:
        if not self.stopped:
            return StopReason.LENGTH
        return StopReason.STOP_STRING if self.stopped_by_string else StopReason.STOP_ID

    @property
    def num_decoded(self) -> int:
        """Tokens that rounds emitted."""
        return max(0, len(self.tokens) - 1)

    @property
    def decode_s(self) -> float:
        return self.end_s - self.decode_start_s


@dataclass
class Trace:
    """Sequences, rounds and spans of one policy over one workload; `meta` says how they were produced.

    Rounds that were verified together follow one another, that of the verification's span first.
    """

    policy: dict[str, Any]
    workload: dict[str, Any]
    sequences: list[Sequence] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 of what was decoded and in which rounds, times left out."""
        rows: list[Any] = [[s.index, list(s.tokens)] for s in self.sequences]
        rows += [[r.sequence, r.index, r.source, r.num_drafted, r.num_accepted, r.num_emitted] for r in self.rounds]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def require_generation(self) -> None:
        """Raises `BadInput` if the accept counts were forced: then the text says nothing, and the rates are chosen."""
        if FORCED in self.policy:
            rule = "must be a generation, not a run whose accept counts were forced"
            raise BadInput("trace", rule, self.policy[FORCED])

    def verified_together(self) -> Iterator[list[Round]]:
        """The rounds of every verification of more than one row. Raises `BadInput` if they are not all there."""
        shared = [s for s in self.spans if s.operation is Operation.VERIFY and s.batch_size > 1]
        place = {(r.sequence, r.index): index for index, r in enumerate(self.rounds)} if shared else {}
        for s in shared:
            first = place.get((s.sequence, s.round), len(self.rounds))
            rounds = self.rounds[first : first + s.batch_size]
            if len(rounds) < s.batch_size or any(r.end_s != rounds[0].end_s for r in rounds):
                name = f"trace: round {s.round} of sequence {s.sequence}"
                raise BadInput(name, f"must be followed by the others of its batch of {s.batch_size}")
            yield rounds

    def hits(self) -> Iterator[tuple[Span, Span]]:
        """For every verification with a hit, the last operation of the build that prepared it, and the verification. Of
        a batch, the build is that of all rows. A trace without spans has none."""
        first_of = {
            (r.sequence, r.index): (rows[0].sequence, rows[0].index) for rows in self.verified_together() for r in rows
        }
        builds: dict[tuple[int, int], Span] = {}
        for s in self.spans:
            place = (s.sequence, s.round)
            if s.operation in BUILD and (place not in builds or s.end_s > builds[place].end_s):
                builds[place] = s
        verifications = {(s.sequence, s.round): s for s in self.spans if s.operation is Operation.VERIFY}
        drawn: set[tuple[int, int]] = set()
        for r in (r for r in self.rounds if r.source is Source.HIT):
            here, before = (first_of.get((r.sequence, index), (r.sequence, index)) for index in (r.index, r.index - 1))
            if here not in drawn and here in verifications and before in builds:
                drawn.add(here)
                yield builds[before], verifications[here]

    def write(self, folder: Path) -> None:
        """Write what `write_tables` does, and for other programs `rounds.csv`, `spans.csv` and `perfetto.json`."""
        import pyarrow.csv as csv

        self.write_tables(folder)
        for name, rows, row_type in self._tables():
            if row_type is not Sequence:  # whose lists a CSV file cannot hold
                csv.write_csv(_to_table(rows, row_type), folder / f"{name}.csv")
        (folder / "perfetto.json").write_text(json.dumps(self.to_perfetto()))

    def write_tables(self, folder: Path) -> None:
        """Write what `read` reads: `sequences.parquet`, `rounds.parquet`, `spans.parquet` and `trace.json`."""
        import pyarrow.parquet as pq

        folder.mkdir(parents=True, exist_ok=True)
        for name, rows, row_type in self._tables():
            pq.write_table(_to_table(rows, row_type), folder / f"{name}.parquet")
        header = {"schema": SCHEMA, "policy": self.policy, "workload": self.workload, "meta": self.meta}
        (folder / "trace.json").write_text(json.dumps(header, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Trace:
        """Inverse of `write_tables`. Raises `BadInput` if a file is missing or of another schema."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = folder / "trace.json"
        if not path.exists():
            raise BadInput(str(path), "no such file; a trace folder holds trace.json and three parquet tables")
        try:
            header = json.loads(path.read_text())
        except ValueError as error:
            raise BadInput(str(path), f"must be JSON ({error})") from None
        if not isinstance(header, dict) or header.get("schema") not in READABLE:
            raise BadInput(f"{path}: schema", f"must be one of {', '.join(map(str, READABLE))}")
        trace = cls(policy=header["policy"], workload=header["workload"], meta=header["meta"])
        for name, rows, row_type in trace._tables():
            file = folder / f"{name}.parquet"
            if not file.is_file():
                raise BadInput(str(file), "no such file; a trace folder holds trace.json and three parquet tables")
            try:
                rows.extend(_from_rows(pq.read_table(file).to_pylist(), row_type))
            except (pa.ArrowInvalid, TypeError, ValueError) as error:
                raise BadInput(str(file), f"must be a table of a trace ({error})") from None
        return trace

    def _tables(self) -> list[tuple[str, list, type]]:
        return [("sequences", self.sequences, Sequence), ("rounds", self.rounds, Round), ("spans", self.spans, Span)]

    def to_perfetto(self) -> dict[str, Any]:
        """Chrome-trace JSON (open in ui.perfetto.dev): a track for each device of a lane, and for the rounds as many
        tracks as sequences were decoded at a time.

        Arrows lead from the build of a speculation to the verification that it hit; counters show, round by round, how
        many tokens were accepted and, of SSD, whether the round began with a hit.
        """
        row_of = _rows_at_a_time(self.sequences)
        num_rows = 1 + max(row_of.values(), default=0)
        devices = sorted({(s.lane, s.device) for s in self.spans} | {(lane, 0) for lane in Lane}, key=_lanes_first)
        names = [_numbered("rounds", row) for row in range(num_rows)] + [_numbered(*device) for device in devices]
        origin = min((s.prefill_start_s for s in self.sequences), default=0.0)
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(names)
        ]
        if FORCED in self.policy:
            name = f"NO GENERATION: accept counts forced to {', '.join(map(str, self.policy[FORCED]))}, again and again"
            events.append({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": name}})

        def add(name: str, track: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
            event = {"name": name, "ph": "X", "pid": 0, "tid": names.index(track), "args": args}
            events.append(event | {"ts": (start_s - origin) * 1e6, "dur": (end_s - start_s) * 1e6})

        for r in self.rounds:
            name = f"{r.source.value}: {r.num_accepted}/{r.num_drafted} accepted"
            args = {"sequence": r.sequence, "round": r.index, "emitted": r.num_emitted, "policy": r.policy}
            add(name, _numbered("rounds", row_of.get(r.sequence, 0)), r.start_s, r.end_s, args)
        for s in self.spans:
            args = {"sequence": s.sequence, "round": s.round, "num_tokens": s.num_tokens, "context": s.context}
            add(s.operation.value, _numbered(s.lane, s.device), s.start_s, s.end_s, args | {"rows": s.batch_size})

        def point(name: str, phase: str, at_s: float, entries: dict[str, Any]) -> None:
            events.append({"name": name, "ph": phase, "pid": 0, "ts": (at_s - origin) * 1e6, **entries})

        for number, (build, verify) in enumerate(self.hits()):
            arrow = {"cat": "speculation", "id": number}
            for s, phase, binding in ((build, "s", {}), (verify, "f", {"bp": "e"})):
                track = names.index(_numbered(s.lane, s.device))
                point("hit", phase, s.start_s, {"tid": track, **arrow, **binding})
        for r in self.rounds:
            row = row_of.get(r.sequence, 0)
            point(_numbered("accepted per round", row), "C", r.end_s, {"args": {"accepted": r.num_accepted}})
            if r.source is not Source.SYNCHRONOUS:
                point(_numbered("hit", row), "C", r.start_s, {"args": {"hit": int(r.source is Source.HIT)}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes_first(device: tuple[Lane, int]) -> tuple[int, int]:
    return list(Lane).index(device[0]), device[1]


def _numbered(name: str, index: int) -> str:
    """Name of a track; the first of its kind needs no number."""
    return f"{name} {index}" if index else str(name)


def _rows_at_a_time(sequences: Iterable[Sequence]) -> dict[int, int]:
    """A row for every sequence, the lowest that is free when its decoding starts."""
    row_of: dict[int, int] = {}
    busy_until: list[float] = []
    for s in sorted(sequences, key=lambda s: (s.decode_start_s, s.index)):
        free = [row for row, end_s in enumerate(busy_until) if end_s <= s.decode_start_s]
        row_of[s.index] = free[0] if free else len(busy_until)
        busy_until[row_of[s.index] : row_of[s.index] + 1] = [s.end_s]
    return row_of


def _to_table(rows: Iterable[Any], row_type: type) -> Any:
    import pyarrow as pa

    arrow_types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "tuple[int, ...]": pa.list_(pa.int64()),
        "tuple[float, ...]": pa.list_(pa.float64()),
    }
    schema = pa.schema([(f.name, arrow_types.get(str(f.type), pa.string())) for f in fields(row_type)])
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)


def _from_rows(rows: list[dict[str, Any]], row_type: type) -> list[Any]:
    types: dict[str, Any] = {"Lane": Lane, "Operation": Operation, "Source": Source}
    types |= {"tuple[int, ...]": tuple, "tuple[float, ...]": tuple}
    convert = {f.name: types[str(f.type)] for f in fields(row_type) if str(f.type) in types}
    return [row_type(**{k: convert[k](v) if k in convert else v for k, v in row.items()}) for row in rows]
