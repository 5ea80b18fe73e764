"""Token-level agreement of target and draft, and the law by which it replays under any policy.

One autoregressive run of the target, scored by the draft along the same tokens, determines the law of every SD and SSD
policy on that text: at a tested position with committed token x the draft token was accepted with probability
min(1, q(x)/p(x)), and given rejection the rejected token y is independent of x with law (q - p)+ normalised. The
outcome is a hit iff x is among the F most likely tokens of q, y left out (nothing is left out after K acceptances).
p is the target's distribution, q the draft's.

With Saguaro sampling the draft draws from q', which takes the place of q for acceptance and for y, not for what is
prepared. A uniform filler is the case q' = 1/V, an n-gram the case of a q' that has one token: it is accepted iff it is
x, and y is that token.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.ngram import NgramProposals
from sim.policy import Drafting, Proposer
from sim.proposal import Proposal, downweighted_mass, downweighted_proposal, plain_proposal, uniform_proposal
from sim.trace import Source
from sim.workload import Sampling

SCHEMA = 1
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PLAIN = Drafting(Proposer.DRAFT_MODEL, 1, (), Source.SYNCHRONOUS)  # draft tokens from q itself
TABLE_BYTES = 128e6  # what the tables of a record may take in memory; the oldest make room
MIN_TABLES = 64  # kept whatever they take: what one policy needs


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

    @abstractmethod
    def check(self, drafting: Drafting) -> None:
        """Raises `BadInput` if it does not say how rounds of this drafting go."""

    def num_proposed(self, drafting: Drafting) -> IntArray:
        """Draft tokens there are for a round by the number of tokens emitted before it, the length cap left out."""
        shape = (self.num_prompts, int(self.lengths.max(initial=0)))
        return np.broadcast_to(np.array(drafting.num_drafted), shape)

    @abstractmethod
    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        """Probability that draft token number `draft_index` of a round is accepted, if it is tested at a position."""

    @abstractmethod
    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        """Probability that the bonus token at a position is among the `fan_out` prepared for `accept_count`, after the
        draft token of this position was `rejected` or after all draft tokens were accepted."""

    def doubt_table(self, fan_out: int, accept_count: int, drafting: Drafting) -> FloatArray:
        """By how much the `rejected` hit table may be wrong at a position; 0 where it is exact."""
        return np.zeros((self.num_prompts, int(self.lengths.max(initial=0))))

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_length)

    def __getstate__(self) -> dict[str, Any]:
        """What was computed along the way stays behind: it is larger than the record, and made again in no time."""
        known = {entry.name for entry in fields(self)} if is_dataclass(self) else vars(self).keys()
        return {name: value for name, value in vars(self).items() if name in known}

    @property
    def repeated_prompts(self) -> list[list[int]]:
        """Groups of prompts that are one and the same, with the same text: they say nothing new about other prompts."""
        return []

    @property
    def temperature(self) -> float:
        return float(self.identity["temperature"])

    @property
    def sampling(self) -> Sampling:
        """The settings that the texts were decoded under; a record without any has the temperature alone."""
        given = self.identity.get("sampling", [])
        return Sampling(**given[0]) if given else Sampling(self.temperature)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.identity.get("stop_strings", ()))

    @property
    def max_new_tokens(self) -> int:
        return int(self.identity["max_new_tokens"])


@dataclass(frozen=True)
class AgreementRecord(Agreement):
    """One row per generated position of every prompt, n rows in all, ordered by prompt and position.

    Probabilities are those of the distributions that tokens are drawn from, processed as the workload's settings say;
    at T = 0 they are at temperature 1, and acceptance is decided by the draft's argmax instead. Ranks are those of the
    logits, under the repetition penalty if there is one. `identity` holds at least `dataset`,
    `temperature`, `stop_ids`, `max_new_tokens`, `target`, `draft`; a filler needs its `vocab_size`, an n-gram the
    `prompt_tokens`, which records of an earlier release lack.
    """

    identity: dict[str, Any]
    prompt_length: IntArray  # (num_prompts,)
    stopped: NDArray[np.bool_]  # (num_prompts,) ended by a stop token, not by the cap
    prompt: IntArray  # (n,) index of the prompt
    position: IntArray  # (n,) 0 is the token that the prefill emits
    token: IntArray  # (n,) the committed token x
    log_p: FloatArray  # (n,) log p(x)
    log_q: FloatArray  # (n,) log q(x), -inf where q cannot give x
    rank: IntArray  # (n,) how many tokens q puts before x
    overlap: FloatArray  # (n,) sum over the vocabulary of min(p, q)
    top_token: IntArray  # (n, M) the M most likely tokens of q, best first
    top_p: FloatArray  # (n, M) their p
    top_q: FloatArray  # (n, M) their q
    source: str = field(default="", compare=False)  # the file it was read from, for messages
    prompt_tokens: tuple[tuple[int, ...], ...] = ()  # of every prompt, or () where they were not recorded

    def __post_init__(self) -> None:
        num_rows = len(self.prompt)
        name = self.source or "agreement record"
        for column in ("position", "token", "log_p", "log_q", "rank", "overlap", "top_token", "top_p", "top_q"):
            values = getattr(self, column)
            if len(values) != num_rows:
                raise BadInput(f"{name}: {column}", f"must have {num_rows} rows", len(values))
            finite = np.isfinite(values) | ((values == -np.inf) & (column == "log_q"))
            if values.dtype.kind == "f" and not finite.all():
                row = int(np.argwhere(~finite)[0][0])
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
        try:
            is_one_law = self.sampling.law == self.sampling and self.sampling.temperature == self.temperature
        except (KeyError, TypeError):
            is_one_law = False
        if not is_one_law or len(self.identity.get("sampling", [])) > 1:
            rule = "must hold at most one set of sampling settings, of the record's temperature and without a seed"
            raise BadInput(f"{name}: identity.sampling", rule, self.identity.get("sampling"))
        if len(self.stopped) != self.num_prompts or (num_rows and not 0 <= self.prompt.max() < self.num_prompts):
            raise BadInput(f"{name}: prompt_length", "must have one entry per prompt", self.num_prompts)
        if self.prompt_tokens and [len(tokens) for tokens in self.prompt_tokens] != self.prompt_length.tolist():
            raise BadInput(f"{name}: prompt_tokens", "must hold as many tokens of each prompt as prompt_length says")
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

    @cached_property
    def repeated_prompts(self) -> list[list[int]]:
        alike: dict[object, list[int]] = {}
        for index, prompt in enumerate(self.prompt_tokens):
            alike.setdefault((prompt, self.text(index)), []).append(index)
        return [group for group in alike.values() if len(group) > 1]

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
            prompt_tokens=tuple(self.prompt_tokens[index] for index in prompts) if self.prompt_tokens else (),
            **columns,
        )

    # ------------------------------------------------------------------------------------------------ replay law

    @property
    def _name(self) -> str:
        return self.source or "the record"

    def check(self, drafting: Drafting) -> None:
        if drafting.downweight != 1:
            self._check_downweighting(drafting)
        if drafting.num_drafted and drafting.proposer is Proposer.FILLER:
            _ = self.vocab_size
        if drafting.num_drafted and drafting.proposer is Proposer.NGRAM:
            _ = self._ngrams

    def _check_downweighting(self, drafting: Drafting) -> None:
        if self.temperature == 0:
            raise BadInput("downweight", "must be 1 at temperature 0, where no token is sampled", drafting.downweight)
        widest = max((drafting.num_downweighted(j) for j in range(drafting.num_drafted)), default=0)
        if widest > self.num_candidates:
            limit = f"{self.num_candidates - 1} where its draft token is down-weighted"
            rule = f"must be <= {limit}, one less than the number of candidates recorded in {self._name}"
            raise BadInput("fan-out", rule, widest - 1)

    @cached_property
    def vocab_size(self) -> int:
        """V, of both models. Raises `BadInput` if it was not recorded."""
        size = self.identity.get("vocab_size")
        if isinstance(size, bool) or not isinstance(size, int) or size < self.num_candidates:
            rule = f"must be recorded, an integer >= {self.num_candidates}, for uniformly drawn draft tokens (filler)"
            raise BadInput(f"{self._name}: identity.vocab_size", rule, size)
        return size

    @cached_property
    def _ngrams(self) -> NgramProposals:
        if not self.prompt_tokens:
            rule = "must be recorded for an n-gram proposal; `saguaro profile` of this release records them"
            raise BadInput(f"{self._name}: prompt_tokens", rule)
        return NgramProposals(self.prompt_tokens, tuple(self.text(prompt) for prompt in range(self.num_prompts)))

    def num_proposed(self, drafting: Drafting) -> IntArray:
        if drafting.proposer is not Proposer.NGRAM or not drafting.num_drafted:
            return super().num_proposed(drafting)
        return np.minimum(drafting.num_drafted, self._ngrams.lengths)

    def _looked_up(self, draft_index: int, rows: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """The n-gram's token at these positions in a round where it has number `draft_index`, and if there is one."""
        start = self.position[rows] - draft_index
        prompt, start, has_start = self.prompt[rows], np.maximum(0, start), start >= 0
        token = self._ngrams.token(prompt, start, draft_index)
        return token, has_start & (draft_index < self._ngrams.lengths[prompt, start])

    @cached_property
    def acceptance(self) -> FloatArray:
        """(n,) probability that a draft token from q is accepted where it is tested, given the path."""
        if self.temperature == 0:
            return (self.rank == 0).astype(float)
        return np.exp(np.minimum(0.0, self.log_q - self.log_p))

    def _acceptance(self, draft_index: int, drafting: Drafting) -> FloatArray:
        """(n,) the same for whatever proposes draft token number `draft_index`."""
        self.check(drafting)
        if drafting.proposer is Proposer.NGRAM:
            token, is_there = self._looked_up(draft_index, np.arange(len(self.token)))
            return (is_there & (token == self.token)).astype(float)
        if drafting.proposer is Proposer.FILLER:
            log_p = self.log_p if self.temperature else np.zeros(len(self.log_p))
            return np.exp(np.minimum(0.0, -np.log(self.vocab_size) - log_p))
        num = drafting.num_downweighted(draft_index)
        if num == 0:
            return self.acceptance
        weight = np.where(self.rank < num, drafting.downweight, 1.0)
        weight = weight / downweighted_mass(self.top_q, num, drafting.downweight)
        return np.exp(np.minimum(0.0, self.log_q + np.log(weight) - self.log_p))

    def _check_fan_out(self, fan_out: int) -> None:
        if fan_out > self.num_candidates:
            rule = f"must be <= {self.num_candidates}, the number of candidates recorded in {self._name}"
            raise BadInput("fan-out", rule, fan_out)

    def hit_after_acceptance(self, fan_out: int) -> FloatArray:
        """(n,) probability that x is prepared when all K draft tokens were accepted: x among the top `fan_out` of q."""
        self._check_fan_out(fan_out)
        return (self.rank < fan_out).astype(float)

    def hit_after_rejection(self, fan_out: int) -> FloatArray:
        """(n,) probability that x is prepared given that a draft token from q was rejected at its position."""
        return self.bounds_after_rejection(fan_out, 0, PLAIN)[0]

    def bounds_after_rejection(
        self, fan_out: int, draft_index: int, drafting: Drafting
    ) -> tuple[FloatArray, FloatArray]:
        """(n,) bounds of the probability that x is prepared given that draft token y of this position was rejected; y
        had number `draft_index` in its round.

        The prepared tokens are the top `fan_out` of q without y. If x stands at rank `fan_out` it moves up exactly when
        y stands before it.
        """
        self.check(drafting)
        low = self.hit_after_acceptance(fan_out)
        high = low.copy()
        if fan_out:
            edge = np.flatnonzero(self.rank == fan_out)
            low[edge], high[edge] = self._stands_before(edge, fan_out, draft_index, drafting)
        return low, high

    def _stands_before(
        self, rows: IntArray, fan_out: int, draft_index: int, drafting: Drafting
    ) -> tuple[FloatArray | float, FloatArray | float]:
        """Bounds of the probability that a rejected token is among the top `fan_out` of q, none of which is x."""
        if drafting.proposer is Proposer.NGRAM:
            token, _ = self._looked_up(draft_index, rows)
            known = (self.top_token[rows, :fan_out] == token[:, None]).any(1).astype(float)
            return known, known
        if self.temperature == 0:
            # The draft model's token was the first; a uniform one is any but x.
            certain = 1.0 if drafting.proposer is Proposer.DRAFT_MODEL else fan_out / max(1, self.vocab_size - 1)
            return certain, certain
        return self._proposal(rows, draft_index, drafting).rejected_within(fan_out)

    def _proposal(self, rows: IntArray, draft_index: int, drafting: Drafting) -> Proposal:
        top_p, top_q, overlap = self.top_p[rows], self.top_q[rows], self.overlap[rows]
        num = drafting.num_downweighted(draft_index)
        if drafting.proposer is Proposer.FILLER:
            return uniform_proposal(top_p, self.vocab_size)
        if num == 0:
            return plain_proposal(top_p, top_q, overlap)
        return downweighted_proposal(top_p, top_q, overlap, num, drafting.downweight)

    # ---------------------------------------------------------------------------------------------------- tables

    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        key = ("accepted", *_law_of(draft_index, drafting))
        return self._tables.get(key, lambda: self._padded(self._acceptance(draft_index, drafting)))

    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        if rejected:
            return self._after_rejection(fan_out, accept_count, drafting)[0]
        return self._tables.get(("complete", fan_out), lambda: self._padded(self.hit_after_acceptance(fan_out)))

    def doubt_table(self, fan_out: int, accept_count: int, drafting: Drafting) -> FloatArray:
        return self._after_rejection(fan_out, accept_count, drafting)[1]

    def _after_rejection(self, fan_out: int, accept_count: int, drafting: Drafting) -> FloatArray:
        """(2, num_prompts, longest) middle and half the width of the bounds."""

        def make() -> FloatArray:
            low, high = self.bounds_after_rejection(fan_out, accept_count, drafting)
            return np.stack([self._padded((low + high) / 2), self._padded((high - low) / 2)])

        return self._tables.get(("rejected", fan_out, *_law_of(accept_count, drafting)), make)

    @cached_property
    def _tables(self) -> _Tables:
        return _Tables()

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
            "prompt_tokens": self.prompt_tokens,
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
                prompt_tokens=tuple(tuple(tokens) for tokens in header.get("prompt_tokens", ())),
                **{name: np.array(table[name].to_pylist()) for name in names},
            )
        except BadInput:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(str(path), f"must be as `saguaro profile` writes it ({error})") from None


def _law_of(draft_index: int, drafting: Drafting) -> tuple[Hashable, ...]:
    """What tells laws of draft tokens apart."""
    if drafting.proposer is Proposer.NGRAM:
        return (Proposer.NGRAM, draft_index)
    num = drafting.num_downweighted(draft_index)
    return (drafting.proposer, num, drafting.downweight if num else 1.0)


class _Tables:
    """Tables by what they say. Fan-outs and numbers of down-weighted tokens are at most the number of candidates, but
    policies may come with any number of weights: so the tables have a limit in memory, and the oldest make room."""

    def __init__(self) -> None:
        self._made: dict[Hashable, FloatArray] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable, make: Callable[[], FloatArray]) -> FloatArray:
        found = self._made.get(key)
        if found is None:
            found = make()
            self._made[key] = found
            while len(self._made) > max(MIN_TABLES, TABLE_BYTES / max(1, found.nbytes)):
                self._made.pop(list(self._made)[0], None)  # noqa: RUF015 - other threads may add meanwhile
        return found


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
_NOT_ROWS = ("identity", "prompt_length", "stopped", "source", "prompt_tokens")
