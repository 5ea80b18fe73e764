"""What arrives: requests of a closed loop of clients, or of an open stream, and how many are decoded at a time.

A request is an arrival, a prompt of the agreement record, a luck of its own, and the number of tokens that its text is
cut at. All are drawn from the seed and from nothing else: every policy under one seed meets the same requests. A luck
is one of a bounded pool of variants of each prompt (`num_variants`): the outcome stream has numbers for each variant
and token, and requests draw variants, so that repeats of a prompt differ and no request needs tables of its own. What a
seed's pool leaves to chance is no more than a run over all prompts, repeated as often as there are variants, would.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from sim.errors import BadInput
from sim.replay import Replay

LUCK_ENTRIES = 1 << 18  # (variant, prompt, position) entries in an outcome table: some MB for each drafting
MOST_VARIANTS = 512  # of a prompt
BLOCK = 1024  # draws made at a time
ARRIVALS, PROMPTS = 3, 4  # streams of a seed, after those of `sim.streams.Streams`


class Shape(NamedTuple):
    """Prompt and length of a request. Without a prompt one is drawn; without a number of output tokens the request
    ends where the text of the record does, which ends it earlier in any case."""

    prompt: int | None = None
    output_tokens: int | None = None


class Request(NamedTuple):
    """What is decoded: `luck` is its variant's number times the number of prompts, plus the prompt."""

    prompt: int
    luck: int
    output_tokens: int | None


class TracedArrival(NamedTuple):
    """One line of a trace of requests."""

    arrival_s: float
    prompt: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class Poisson:
    """Arrivals at independent exponential intervals."""

    rate_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise BadInput("rate_per_s", "must be a finite number > 0", self.rate_per_s)


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients, each with one request at a time: a request that has ended is replaced at once until there
    have been `num_requests`.

    `max_batch_size` rows at most are decoded together on a target; None leaves it to the number of clients. Requests
    take their `shapes` in turn; without, each is a text of the record.
    """

    concurrency: int
    num_requests: int
    max_batch_size: int | None = None
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(Shape(*shape) for shape in self.shapes))
        _require_count("load.concurrency", self.concurrency)
        _require_count("load.num_requests", self.num_requests)
        if self.max_batch_size is not None:
            _require_count("load.max_batch_size", self.max_batch_size)

    @property
    def name(self) -> str:
        return f"closed loop of {self.concurrency}"

    @property
    def most_rows(self) -> int:
        """Rows that a target may decode together."""
        return self.concurrency if self.max_batch_size is None else self.max_batch_size

    def requests(self, replay: Replay, seed: int) -> Iterator[Request]:
        """All requests in order."""
        return islice(_requests(replay, seed, self.shapes), self.num_requests)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "kind": "closed",
            "concurrency": self.concurrency,
            "num_requests": self.num_requests,
            "max_batch_size": self.most_rows,
            "shapes": [list(shape) for shape in self.shapes],
        }


@dataclass(frozen=True)
class OpenLoop:
    """Requests that arrive whether or not others have ended: `Poisson`, or as a trace says, in order of time.

    `num_requests` of them arrive; None, for a trace only, means all. `max_batch_size` rows at most are decoded together
    on a target.
    """

    arrivals: Poisson | tuple[TracedArrival, ...]
    max_batch_size: int
    num_requests: int | None = None

    def __post_init__(self) -> None:
        _require_count("load.max_batch_size", self.max_batch_size)
        if self.num_requests is not None:
            _require_count("load.num_requests", self.num_requests)
        if isinstance(self.arrivals, Poisson):
            if self.num_requests is None:
                raise BadInput("load.num_requests", "must be given for Poisson arrivals")
            return
        trace = tuple(TracedArrival(*line) for line in self.arrivals)
        if not trace or len(trace) < (self.num_requests or 0):
            raise BadInput("load.arrivals", f"must hold at least {self.num_requests or 1} arrivals", len(trace))
        object.__setattr__(self, "arrivals", trace[: self.num_requests])
        object.__setattr__(self, "num_requests", len(self._trace))
        times = [line.arrival_s for line in self._trace]
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise BadInput("load.arrivals", "must have finite times >= 0")
        if any(after < before for before, after in pairwise(times)):
            raise BadInput("load.arrivals", "must be in order of time")

    @property
    def name(self) -> str:
        return f"open loop at {self.rate_per_s:g} requests/s"

    @property
    def _trace(self) -> tuple[TracedArrival, ...]:
        return () if isinstance(self.arrivals, Poisson) else self.arrivals

    @property
    def most_rows(self) -> int:
        """Rows that a target may decode together."""
        return self.max_batch_size

    @property
    def rate_per_s(self) -> float:
        """Offered requests per second; of a trace, those after the first over the time in which they arrived."""
        if isinstance(self.arrivals, Poisson):
            return self.arrivals.rate_per_s
        span_s = self._trace[-1].arrival_s - self._trace[0].arrival_s
        return (len(self._trace) - 1) / span_s if span_s else math.inf

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the requests, in turn; () where each is a text of the record."""
        return tuple(Shape(line.prompt, line.output_tokens) for line in self._trace)

    def requests(self, replay: Replay, seed: int) -> Iterator[Request]:
        """All requests in order."""
        return islice(_requests(replay, seed, self.shapes), self.num_requests)

    def arrival_times(self, seed: int) -> Iterator[float]:
        """Seconds at which they arrive."""
        if not isinstance(self.arrivals, Poisson):
            return iter([line.arrival_s for line in self._trace])
        return islice(accumulate(_intervals(self.arrivals.rate_per_s, seed)), self.num_requests)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        poisson = isinstance(self.arrivals, Poisson)
        return {
            "kind": "open",
            "rate_per_s": self.rate_per_s if math.isfinite(self.rate_per_s) else None,
            "num_requests": self.num_requests,
            "max_batch_size": self.max_batch_size,
            "arrivals": "poisson" if poisson else "trace",
            "trace_sha256": None if poisson else _sha256([tuple(line) for line in self._trace]),
        }


Load = ClosedLoop | OpenLoop


def num_variants(replay: Replay) -> int:
    """Lucks of each prompt, whatever the load: as many as `MOST_VARIANTS` and `LUCK_ENTRIES` allow."""
    return max(1, min(MOST_VARIANTS, LUCK_ENTRIES // max(1, replay.num_prompts * replay.width)))


def _requests(replay: Replay, seed: int, shapes: tuple[Shape, ...]) -> Iterator[Request]:
    """Endless. A prompt is drawn for each request, given ones included: the next requests are the same with or without
    them."""
    for shape in shapes:
        _check_shape(shape, replay)
    stream = _stream(seed, PROMPTS)
    sizes = (replay.num_prompts, num_variants(replay))
    draws = chain.from_iterable(stream.integers(sizes, size=(BLOCK, 2)).tolist() for _ in iter(int, 1))
    for (prompt, variant), shape in zip(draws, cycle(shapes or (Shape(),)), strict=False):
        of = prompt if shape.prompt is None else shape.prompt
        yield Request(of, variant * replay.num_prompts + of, shape.output_tokens)


def _check_shape(shape: Shape, replay: Replay) -> None:
    if shape.prompt is not None and not 0 <= shape.prompt < replay.num_prompts:
        raise BadInput("load: prompt", f"must be in 0..{replay.num_prompts - 1}, those of the record", shape.prompt)
    if shape.output_tokens is not None and not 1 <= shape.output_tokens <= replay.cap:
        raise BadInput("load: output_tokens", f"must be in 1..{replay.cap}, max_new_tokens", shape.output_tokens)


def _intervals(rate_per_s: float, seed: int) -> Iterator[float]:
    stream = _stream(seed, ARRIVALS)
    return chain.from_iterable((stream.standard_exponential(BLOCK) / rate_per_s).tolist() for _ in iter(int, 1))


def _sha256(lines: list[tuple[float | int | None, ...]]) -> str:
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(name, "must be an integer >= 1", value)
