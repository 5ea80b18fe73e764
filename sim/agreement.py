"""Token-level agreement of target and draft, and the law by which it replays under any policy.

One autoregressive run of the target, scored by the draft along the same tokens, determines the law of every SD and SSD
policy on that text: at a tested position with committed token x the draft token was accepted with probability
min(1, q(x)/p(x)), and given rejection the rejected token y is independent of x with law (q - p)+ normalised. The
outcome is a hit iff x is among the F most likely tokens of q, y left out (nothing is left out after K acceptances).
p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.policy import Drafting

SCHEMA = 1
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Agreement(ABC):
    """What decides the outcome of a round, over texts of known lengths.

    Tables are (num_prompts, longest) over the position of the token concerned. Texts count as prompts whether they were
    recorded or are only assumed.
    """

    identity: dict[str, Any]
    prompt_length: IntArray  # (num_prompts,)
    stopped: NDArray[np.bool_]  # (num_prompts,) ended by a stop token, not by the cap

    @abstractmethod
    def text(self, prompt: int) -> tuple[int, ...]:
        """The generated tokens of one prompt."""

    @property
    @abstractmethod
    def lengths(self) -> IntArray:
        """(num_prompts,) number of generated tokens."""

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """The largest fan-out of one accept count that can be evaluated."""

    @property
    @abstractmethod
    def depends_on_draft_index(self) -> bool:
        """Whether the acceptance of a draft token depends on its place in the speculation, beyond its position."""

    @abstractmethod
    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        """Probability that draft token number `draft_index` of a round is accepted, if it is tested at a position."""

    @abstractmethod
    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        """Probability that the bonus token at a position is among the `fan_out` prepared for `accept_count`, after the
        draft token of this position was `rejected` or after all draft tokens were accepted."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_length)

    @property
    def temperature(self) -> float:
        return float(self.identity["temperature"])

    @property
    def max_new_tokens(self) -> int:
        return int(self.identity["max_new_tokens"])


@dataclass(frozen=True)
class AgreementRecord(Agreement):
    """One row per generated position of every prompt, n rows in all, ordered by prompt and position.

    Probabilities are those of the processed distributions at the workload's temperature T; at T = 0 they are at
    temperature 1, and acceptance is decided by the draft's argmax instead. `identity` holds at least `dataset`,
    `temperature`, `stop_ids`, `max_new_tokens`, `target`, `draft`.
    """

    identity: dict[str, Any]
    prompt_length: IntArray  # (num_prompts,)
    stopped: NDArray[np.bool_]  # (num_prompts,) ended by a stop token, not by the cap
    prompt: IntArray  # (n,) index of the prompt
    position: IntArray  # (n,) 0 is the token that the prefill emits
    token: IntArray  # (n,) the committed token x
    log_p: FloatArray  # (n,) log p(x)
    log_q: FloatArray  # (n,) log q(x)
    rank: IntArray  # (n,) how many tokens q puts before x
    overlap: FloatArray  # (n,) sum over the vocabulary of min(p, q)
    top_token: IntArray  # (n, M) the M most likely tokens of q, best first
    top_p: FloatArray  # (n, M) their p
    top_q: FloatArray  # (n, M) their q
    source: str = field(default="", compare=False)  # the file it was read from, for messages

    def __post_init__(self) -> None:
        num_rows = len(self.prompt)
        name = self.source or "agreement record"
        for column in ("position", "token", "log_p", "log_q", "rank", "overlap", "top_token", "top_p", "top_q"):
            values = getattr(self, column)
            if len(values) != num_rows:
                raise BadInput(f"{name}: {column}", f"must have {num_rows} rows", len(values))
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                row = int(np.argwhere(~np.isfinite(values))[0][0])
                raise BadInput(f"{name}: {column}, row {row}", "must be finite")
        for column, low, high in _BOUNDS:
            values = getattr(self, column)
            outside = np.argwhere((values < low) | (values > high))
            if len(outside):
                row = int(outside[0][0])
                rule = f"must be in {low}..{high}"
                raise BadInput(f"{name}: {column}, row {row}", rule, values[tuple(outside[0])].item())
        if "temperature" not in self.identity or "max_new_tokens" not in self.identity:
            raise BadInput(f"{name}: identity", "must hold temperature and max_new_tokens", sorted(self.identity))
        if len(self.stopped) != self.num_prompts or (num_rows and not 0 <= self.prompt.max() < self.num_prompts):
            raise BadInput(f"{name}: prompt_length", "must have one entry per prompt", self.num_prompts)
        lengths = np.bincount(self.prompt, minlength=self.num_prompts) if num_rows else np.zeros(self.num_prompts, int)
        expected = np.concatenate([np.arange(n) for n in lengths]) if num_rows else np.zeros(0)
        if not np.array_equal(self.position, expected) or (np.diff(self.prompt) < 0).any():
            raise BadInput(name, "must hold positions 0, 1, 2, ... of each prompt in order")

    @property
    def num_candidates(self) -> int:
        """M, the number of recorded candidates."""
        return int(self.top_token.shape[1])

    @cached_property
    def lengths(self) -> IntArray:
        return np.bincount(self.prompt, minlength=self.num_prompts)

    def text(self, prompt: int) -> tuple[int, ...]:
        return tuple(self.token[self.prompt == prompt].tolist())

    def select(self, prompts: IntArray) -> AgreementRecord:
        """The record of some prompts (repeats allowed), renumbered 0, 1, ...: a bootstrap sample or a split."""
        rows = [np.flatnonzero(self.prompt == index) for index in prompts]
        picked = np.concatenate(rows) if rows else np.zeros(0, dtype=int)
        columns = {f.name: getattr(self, f.name)[picked] for f in fields(self) if f.name not in _NOT_ROWS}
        columns["prompt"] = np.repeat(np.arange(len(prompts)), [len(r) for r in rows])
        return AgreementRecord(
            identity=self.identity,
            prompt_length=self.prompt_length[prompts],
            stopped=self.stopped[prompts],
            source=self.source,
            **columns,
        )

    # ------------------------------------------------------------------------------------------------ replay law

    @cached_property
    def acceptance(self) -> FloatArray:
        """(n,) probability that the draft token of a tested position is accepted, given the path."""
        if self.temperature == 0:
            return (self.rank == 0).astype(float)
        return np.exp(np.minimum(0.0, self.log_q - self.log_p))

    def _check_fan_out(self, fan_out: int) -> None:
        if fan_out > self.num_candidates:
            rule = (
                f"must be <= {self.num_candidates}, the number of candidates recorded in {self.source or 'the record'}"
            )
            raise BadInput("fan-out", rule, fan_out)

    def hit_after_acceptance(self, fan_out: int) -> FloatArray:
        """(n,) probability that x is prepared when all K draft tokens were accepted: x among the top `fan_out` of q."""
        self._check_fan_out(fan_out)
        return (self.rank < fan_out).astype(float)

    def hit_after_rejection(self, fan_out: int) -> FloatArray:
        """(n,) probability that x is prepared given that the draft token y of this position was rejected.

        The prepared tokens are the top `fan_out` of q without y. If x stands at rank `fan_out` it moves up exactly when
        y stands before it.
        """
        self._check_fan_out(fan_out)
        if fan_out == 0:
            return np.zeros(len(self.rank))
        if self.temperature == 0:
            moves_up = np.ones(len(self.rank))
        else:
            rejected_mass = np.maximum(0.0, self.top_q[:, :fan_out] - self.top_p[:, :fan_out]).sum(1)
            total = 1.0 - self.overlap
            moves_up = np.where(total > 1e-12, np.minimum(1.0, rejected_mass / np.maximum(total, 1e-12)), 1.0)
        return np.where(self.rank < fan_out, 1.0, np.where(self.rank == fan_out, moves_up, 0.0))

    @property
    def depends_on_draft_index(self) -> bool:
        return False

    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        return self._acceptance_table

    @cached_property
    def _acceptance_table(self) -> FloatArray:
        return self._padded(self.acceptance)

    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        key = (fan_out, rejected)
        if key not in self._hit_tables:
            law = self.hit_after_rejection if rejected else self.hit_after_acceptance
            self._hit_tables[key] = self._padded(law(fan_out))
        return self._hit_tables[key]

    @cached_property
    def _hit_tables(self) -> dict[tuple[int, bool], FloatArray]:
        """By fan-out and whether the round ended with a rejection: whatever the policy, there are no others."""
        return {}

    def _padded(self, values: FloatArray) -> FloatArray:
        """(num_prompts, longest) table of a per-row array, 0 beyond each prompt's end."""
        table = np.zeros((self.num_prompts, int(self.lengths.max(initial=0))))
        table[self.prompt, self.position] = values
        return table

    # ------------------------------------------------------------------------------------------------ storage

    def write(self, path: Path) -> None:
        """One parquet file; prompts and identity travel in its metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_ROWS}
        table = pa.table({name: pa.array(list(v) if v.ndim == 2 else v) for name, v in columns.items()})
        header = {
            "schema": SCHEMA,
            "identity": self.identity,
            "prompt_length": self.prompt_length.tolist(),
            "stopped": self.stopped.tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata({"agreement": json.dumps(header)}), path)

    @classmethod
    def read(cls, path: Path) -> AgreementRecord:
        """Inverse of `write`. Raises `BadInput` naming the file and the column on a missing file, column or value."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not path.is_file():
            raise BadInput(str(path), "no such agreement record; `saguaro profile` writes one")
        try:
            table = pq.read_table(path)
        except pa.ArrowInvalid:
            raise BadInput(str(path), "is not a parquet file") from None
        try:
            header = json.loads((table.schema.metadata or {}).get(b"agreement", b"{}"))
        except ValueError:
            raise BadInput(str(path), "must be an agreement record (its header is not JSON)") from None
        if header.get("schema") != SCHEMA:
            raise BadInput(f"{path}: schema", f"must be {SCHEMA}", header.get("schema"))
        names = [f.name for f in fields(cls) if f.name not in _NOT_ROWS]
        missing = sorted(set(names) - set(table.column_names))
        if missing:
            raise BadInput(f"{path}: {missing[0]}", "this column is missing")
        empty = [name for name in names if table[name].null_count]
        if empty:
            raise BadInput(f"{path}: {empty[0]}", "must not have empty cells")
        try:
            return cls(
                identity=header["identity"],
                prompt_length=np.array(header["prompt_length"], dtype=np.int64),
                stopped=np.array(header["stopped"], dtype=bool),
                source=str(path),
                **{name: np.array(table[name].to_pylist()) for name in names},
            )
        except BadInput:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(str(path), f"must be as `saguaro profile` writes it ({error})") from None


_ROUNDING = 1e-6
_BOUNDS = (
    ("prompt", 0, np.inf),
    ("token", 0, np.inf),
    ("rank", 0, np.inf),
    ("log_p", -np.inf, _ROUNDING),
    ("log_q", -np.inf, _ROUNDING),
    ("overlap", 0, 1 + _ROUNDING),
    ("top_token", 0, np.inf),
    ("top_p", 0, 1 + _ROUNDING),
    ("top_q", 0, 1 + _ROUNDING),
)
_NOT_ROWS = ("identity", "prompt_length", "stopped", "source")
