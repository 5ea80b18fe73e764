"""Toy pairs of known law (a Markov target and draft over a small vocabulary) and systems around their records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sim.agreement import AgreementRecord
from sim.latency import LatencyModel, OperationLatency
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from sim.workload import Workload

VOCABULARY = 6


def markov(seed: int, concentration: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """(V, V) rows p(. | previous) of the target and q(. | previous) of the draft."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(VOCABULARY, concentration), size=VOCABULARY)
    q = 0.5 * p + 0.5 * rng.dirichlet(np.full(VOCABULARY, concentration), size=VOCABULARY)
    return p, q


def draw(rng: np.random.Generator, probs: np.ndarray) -> int:
    return int(min(np.searchsorted(probs.cumsum(), rng.random() * probs.sum(), side="right"), len(probs) - 1))


def ranks(q: np.ndarray) -> np.ndarray:
    """Rank of each token in q, ties to the lower id."""
    order = np.lexsort((np.arange(len(q)), -q))
    rank = np.empty(len(q), dtype=int)
    rank[order] = np.arange(len(q))
    return rank


def prompts_of(num_prompts: int, prompt_length: int, seed: int) -> np.ndarray:
    """(num_prompts, prompt_length) random tokens, the last of each 0."""
    tokens = np.random.default_rng((seed, 1)).integers(VOCABULARY, size=(num_prompts, prompt_length))
    tokens[:, -1] = 0
    return tokens


def by_place(law: np.ndarray, length: int) -> np.ndarray:
    """(length, V, V) of a law that is the same everywhere, (V, V), or already is by place in the text."""
    return np.broadcast_to(law, (length, *law.shape[-2:]))


def record_of(
    p: np.ndarray,
    q: np.ndarray,
    *,
    num_prompts: int,
    length: int,
    seed: int,
    prompt_length: int = 4,
    temperature: float = 1.0,
    num_candidates: int | None = None,
):
    """Agreement record of target runs after prompts that end with token 0, at temperature 1 or 0.

    The laws are (V, V) by the previous token, or (length, V, V) by place and previous token.
    """
    rng = np.random.default_rng(seed)
    p, q = by_place(p, length), by_place(q, length)
    previous = np.zeros((num_prompts, length), dtype=int)
    token = np.zeros((num_prompts, length), dtype=int)
    state = np.zeros(num_prompts, dtype=int)
    for t in range(length):
        previous[:, t] = state
        drawn = (rng.random(num_prompts)[:, None] >= p[t, state].cumsum(1)).sum(1).clip(max=VOCABULARY - 1)
        state = drawn if temperature else p[t, state].argmax(1)
        token[:, t] = state
    prev, tok, place = previous.ravel(), token.ravel(), np.tile(np.arange(length), num_prompts)
    order = np.argsort(-q, axis=-1, kind="stable")
    p, q, order = p[place, prev], q[place, prev], order[place, prev]
    top = order[:, :num_candidates]
    row = np.arange(len(tok))
    return AgreementRecord(
        identity={
            "dataset": "toy",
            "temperature": temperature,
            "stop_ids": [],
            "max_new_tokens": length,
            "vocab_size": VOCABULARY,
        },
        prompt_length=np.full(num_prompts, prompt_length),
        stopped=np.zeros(num_prompts, dtype=bool),
        prompt=np.repeat(np.arange(num_prompts), length),
        position=place,
        token=tok,
        log_p=np.log(p[row, tok]),
        log_q=np.log(q[row, tok]),
        rank=(order == tok[:, None]).argmax(1),
        overlap=np.minimum(p, q).sum(1),
        top_token=top,
        top_p=np.take_along_axis(p, top, 1),
        top_q=np.take_along_axis(q, top, 1),
        prompt_tokens=tuple(map(tuple, prompts_of(num_prompts, prompt_length, seed).tolist())),
    )


def cut_at(record: AgreementRecord, stop: int) -> AgreementRecord:
    """The record of the same texts where token `stop` ends a sequence."""
    before = np.concatenate(
        [
            np.cumsum(tokens == stop) - (tokens == stop)
            for tokens in np.split(record.token, np.cumsum(record.lengths)[:-1])
        ]
    )
    kept = before == 0
    columns = ("prompt", "position", "token", "log_p", "log_q", "rank", "overlap", "top_token", "top_p", "top_q")
    ended = np.bincount(record.prompt[record.token == stop], minlength=record.num_prompts) > 0
    identity = record.identity | {"stop_ids": [stop]}
    rows = {name: getattr(record, name)[kept] for name in columns}
    return replace(record, identity=identity, stopped=ended, **rows)


def scripted_record(acceptance: float, *, num_prompts: int, length: int, rank: int = 0, prompt_length: int = 4):
    """A record with one acceptance probability everywhere, whose tokens all stand at `rank` in q."""
    n = num_prompts * length
    top_q = np.tile(np.array([0.4, 0.3, 0.2, 0.1]), (n, 1))
    return AgreementRecord(
        identity={
            "dataset": "scripted",
            "temperature": 1.0,
            "stop_ids": [],
            "max_new_tokens": length,
            "vocab_size": top_q.shape[1],
        },
        prompt_length=np.full(num_prompts, prompt_length),
        stopped=np.zeros(num_prompts, dtype=bool),
        prompt=np.repeat(np.arange(num_prompts), length),
        position=np.tile(np.arange(length), num_prompts),
        token=np.ones(n, dtype=int),
        log_p=np.zeros(n),
        log_q=np.full(n, np.log(acceptance) if acceptance > 0 else -1e6),
        rank=np.full(n, rank),
        overlap=np.full(n, acceptance),
        top_token=np.tile(np.arange(4), (n, 1)),
        top_p=np.zeros((n, 4)),
        top_q=top_q,
        prompt_tokens=((1,) * prompt_length,) * num_prompts,
    )


def system_of(
    record: AgreementRecord,
    *,
    verify_s: float = 0.010,
    verify_per_token_s: float = 0.0,
    draft_step_s: float = 0.002,
    glue_s: float = 0.002,
    tree_step_s: float = 0.002,
    host_s: float = 0.0,
    residuals: tuple[float, ...] = (1.0,),
    contention: float = 1.0,
) -> System:
    """Constant latencies with the residuals given."""

    def table(operation: Operation, base_s: float, per_token_s: float = 0.0) -> OperationLatency:
        knots = {
            width: ((0, base_s + per_token_s * width), (4096, base_s + per_token_s * width)) for width in (1, 2, 64)
        }
        return OperationLatency(operation, knots, residuals)

    return System(
        latency=LatencyModel(
            {
                (Lane.TARGET, Operation.VERIFY): table(Operation.VERIFY, verify_s, verify_per_token_s),
                (Lane.DRAFT, Operation.DRAFT_STEP): table(Operation.DRAFT_STEP, draft_step_s),
                (Lane.DRAFT, Operation.GLUE): table(Operation.GLUE, glue_s),
                (Lane.DRAFT, Operation.TREE_STEP): table(Operation.TREE_STEP, tree_step_s),
            }
        ),
        contention={lane: contention for lane in Lane},
        host_s={term: host_s for term in HostTerm},
        agreement=record,
        identity={"pair": "toy"},
    )


def workload_of(record: AgreementRecord, max_new_tokens: int | None = None) -> Workload:
    return Workload(
        dataset="toy",
        prompts=((0,),),
        max_new_tokens=record.max_new_tokens if max_new_tokens is None else max_new_tokens,
        temperature=record.temperature,
        stop_ids=tuple(record.identity["stop_ids"]),
    )
