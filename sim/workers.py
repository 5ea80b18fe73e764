"""Where independent pieces of work run: in this process, in worker processes, or on a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sim.errors import BadInput, require_count

WORTHWHILE_S = 5.0  # of work left, below which starting worker processes takes longer than they save
PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nobody(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Workers:
    """`num` processes (joblib's loky), or those of the Dask cluster whose scheduler has the address `cluster`.

    With `num` 1 everything runs in this process. With more it begins there, and goes to worker processes once what is
    left would take longer than `worthwhile_s` at the pace so far: small searches do not wait for processes to start.
    A cluster is used from the first piece on. Results are the same wherever a piece ran. `on_done` is told how many
    pieces are done, and of how many, after each of them.
    """

    num: int = 1
    cluster: str | None = None
    worthwhile_s: float = WORTHWHILE_S
    on_done: Callable[[int, int], None] = field(default=_nobody, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num", require_count("num_workers", self.num, 1))

    def map(self, function: Callable[[PieceT], ResultT], pieces: Sequence[PieceT]) -> list[ResultT]:
        """`function` of every piece, in their order; an exception of one of them is raised. Raises `BadInput` if the
        cluster does not answer."""
        done = [] if self.cluster else self._begun_here(function, pieces)
        left = pieces[len(done) :]
        if not left:
            return done
        from joblib import Parallel, delayed

        with self._backend(function):
            run = Parallel(n_jobs=-1 if self.cluster else self.num, return_as="generator")
            for result in run(delayed(_applied)(function, piece) for piece in left):
                done.append(result)
                self.on_done(len(done), len(pieces))
        return done

    def _begun_here(self, function: Callable[[PieceT], ResultT], pieces: Sequence[PieceT]) -> list[ResultT]:
        done: list[ResultT] = []
        start_s = time.perf_counter()
        for piece in pieces:
            done.append(function(piece))
            self.on_done(len(done), len(pieces))
            num_left = len(pieces) - len(done)
            left_s = num_left * (time.perf_counter() - start_s) / len(done)
            if self.num > 1 and num_left > 1 and left_s > self.worthwhile_s:
                break
        return done

    @contextmanager
    def _backend(self, function: Callable[..., Any]) -> Iterator[None]:
        """A cluster is sent the function, and all that it holds, once."""
        import joblib

        if self.cluster is None:
            with joblib.parallel_config(backend="loky"):
                yield
            return
        with self._client(), joblib.parallel_config(backend="dask", scatter=[function]):
            yield

    def _client(self) -> Any:
        try:
            from distributed import Client
        except ImportError:
            rule = "needs Dask: install 'saguaro-planner[search]'"
            raise BadInput("cluster", rule, self.cluster) from None
        try:
            return Client(self.cluster, set_as_default=True)
        except (OSError, ValueError) as error:
            raise BadInput("cluster", f"no Dask scheduler answers there ({error})", self.cluster) from None


def _applied(function: Callable[[PieceT], ResultT], piece: PieceT) -> ResultT:
    return function(piece)


HERE = Workers()
