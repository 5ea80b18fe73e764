"""One entry to the simulator: predict the figures of a policy, or simulate its trace."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.decider import Decider, check_decider
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.metrics import Estimate, joined, ratio_of_rates, ratio_of_totals
from sim.policy import Policy, PolicyTable
from sim.recursion import expectations
from sim.replay import check_workload
from sim.replications import CEILING, RELATIVE_HALF_WIDTH, CeilingReached, Rate, rate_of, until
from sim.streams import replication_seeds
from sim.system import System
from sim.trace import Trace
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
DeciderT = TypeVar("DeciderT", bound="Decider")  # a policy, a table of them, an adaptive choice
FEWEST_TO_TRUST = 5  # prompts; a bootstrap over fewer says little about others
ENGINES = ("exact", "vectorized", "des")


@dataclass(frozen=True)
class Prediction(Generic[DeciderT]):
    """Predicted figures of one policy; intervals are bootstraps over the prompts of the agreement record, or over its
    batches where prompts are decoded together.

    Prompts that the record holds more than once count as one in them. `tokens_per_s` is the throughput of one target:
    tokens over the time in which it decodes at least one prompt, in a batch those of all rows. `num_targets` share the
    draft devices. `replications` says how well independent runs over the same prompts know tokens/s, None for the exact
    engine. `notes` are what a reader must know: latencies beyond the profiled range, doubts that the record leaves
    open, replications that ended too early, targets that the rate does not count. `expectation` has the totals of each
    prompt behind the figures, and its batch.
    """

    policy: DeciderT
    engine: str
    tokens_per_s: Estimate
    mean_acceptance_length: Estimate | None
    hit_rate: Estimate | None
    hit_rate_by_source: dict[str, Estimate | None]
    expectation: Expectation
    num_targets: int = 1
    replications: Rate | None = None
    seed: int | None = None  # of the sampled engines
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, without the expectation; `tokens_per_s` is that of one of `num_targets` targets."""

        def plain(estimate: Estimate | None) -> dict[str, Any] | None:
            return None if estimate is None else estimate.to_dict()

        return {
            "name": self.policy.name,
            "policy": self.policy.to_dict(),
            "engine": self.engine,
            "tokens_per_s": plain(self.tokens_per_s),
            "num_targets": self.num_targets,
            "mean_acceptance_length": plain(self.mean_acceptance_length),
            "hit_rate": plain(self.hit_rate),
            "hit_rate_by_source": {source: plain(rate) for source, rate in self.hit_rate_by_source.items()},
            "seed": self.seed,
            "replications": None if self.replications is None else self.replications.to_dict(),
            "notes": list(self.notes),
        }


def simulate(policy: Decider, workload: Workload, system: System, seed: int = 0) -> Trace:
    """A trace of the policy over the prompts of the system's agreement record (SimPy).

    The workload gives the rules. Raises `BadInput` if they are not those of the record. Latencies beyond the profiled
    range are noted in the trace's meta under "extrapolated".
    """
    from sim.timeline import replicate

    check_decider(policy)
    check_workload(system.agreement, workload)
    trace, extrapolated = system.answer(lambda of: replicate(policy, workload, of, [seed])[0])
    if extrapolated:
        trace.meta["extrapolated"] = extrapolated
    return trace


def predict(
    policy: DeciderT,
    workload: Workload,
    system: System,
    *,
    engine: str = "exact",
    seed: int = 0,
    relative_half_width: float = RELATIVE_HALF_WIDTH,
    ceiling: int = CEILING,
) -> Prediction[DeciderT]:
    """Figures of one policy: `exact` by recursion; the others by independent runs over all prompts until tokens/s is
    known to `relative_half_width` (95 %) or `ceiling` runs are done, which the prediction notes: `vectorized` in NumPy,
    `des` in SimPy.

    The prompts predicted on are the agreement's: the workload gives the rules, and its own prompts are not looked at.
    Raises `BadInput` where a policy is outside the reach of an engine, and where the rules are not those of the
    agreement: another temperature, other stop tokens, longer texts.
    """
    if engine not in ENGINES:
        raise BadInput("engine", f"must be one of {', '.join(ENGINES)}", engine)
    check_decider(policy)
    check_workload(system.agreement, workload)

    def ask(of: System) -> Prediction[DeciderT]:
        return _predict(policy, workload, of, engine, seed, relative_half_width, ceiling)

    prediction, extrapolated = system.answer(ask)
    return replace(prediction, notes=(extrapolated, *prediction.notes)) if extrapolated else prediction


def _predict(
    policy: DeciderT,
    workload: Workload,
    system: System,
    engine: str,
    seed: int,
    relative_half_width: float,
    ceiling: int,
) -> Prediction[DeciderT]:
    one: Decider = policy.at(1) if isinstance(policy, PolicyTable) and workload.batch_size == 1 else policy
    if engine == "exact":
        (expectation,) = expectations([one], workload, system)  # type: ignore[list-item]  # it refuses what it cannot do
        return _from_expectation(policy, expectation, engine, workload, system)
    runs = _replicate_vectorized if engine == "vectorized" else _replicate_des
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CeilingReached)  # a note says it
        expectation, rate = runs(one, workload, system, seed, relative_half_width, ceiling)
    return _from_expectation(policy, expectation, engine, workload, system, rate, seed)


def predict_all(
    policies: Sequence[Policy], workload: Workload, system: System, *, engine: str = "exact", seed: int = 0
) -> list[Prediction[Policy]]:
    """Predictions of many policies, exact ones all at once; raises what `predict` does."""
    if engine != "exact":
        return [predict(policy, workload, system, engine=engine, seed=seed) for policy in policies]
    check_workload(system.agreement, workload)

    def ask(of: System) -> list[Prediction[Policy]]:
        found = expectations(policies, workload, of)
        return [_from_expectation(*one, "exact", workload, of) for one in zip(policies, found, strict=True)]

    predictions, extrapolated = system.answer(ask)
    if extrapolated is None:
        return predictions
    if len(policies) == 1:
        return [replace(predictions[0], notes=(extrapolated, *predictions[0].notes))]
    middle = len(policies) // 2  # only some of them may need it: each says so for itself
    return [p for part in (policies[:middle], policies[middle:]) for p in predict_all(part, workload, system)]


def totals_by_batch(predictions: Sequence[Prediction[Any]]) -> tuple[FloatArray, FloatArray]:
    """(predictions, batches) tokens and seconds of the batches that all predictions decode, over the same prompts;
    prompts that one of them decodes together are one batch. Raises `BadInput` if they are of different prompts."""
    expectations = [prediction.expectation for prediction in predictions]
    sizes = list(dict.fromkeys(len(e.num_tokens) for e in expectations))
    if len(sizes) > 1:
        raise BadInput("predictions", "must be of the same prompts", sizes)
    batch = np.arange(sizes[0])
    for other in {e.batch.tobytes(): e.batch for e in expectations if e.batch is not None}.values():
        batch = _joined_batches(batch, _groups(other))
    tokens, seconds = (np.stack([getattr(e, name) for e in expectations]) for name in ("num_tokens", "seconds"))
    return _by_batch(tokens, batch), _by_batch(seconds, batch)


def predicted_speedup(fast: Prediction[Any], slow: Prediction[Any]) -> Estimate:
    """Tokens/s of one prediction over that of another, over the same prompts; prompts that one of them decodes together
    are drawn together. Raises `BadInput` if they are of different numbers of prompts."""
    tokens, seconds = totals_by_batch([fast, slow])
    return ratio_of_rates((tokens[0], seconds[0]), (tokens[1], seconds[1]))


@dataclass(frozen=True)
class CrossCheck:
    """`engine` and the event simulation on one policy. `z` is their difference in tokens/s over its standard error."""

    policy: Policy
    engine: str
    tokens_per_s: float
    des_tokens_per_s: float
    standard_error: float

    @property
    def z(self) -> float:
        return (self.des_tokens_per_s - self.tokens_per_s) / max(self.standard_error, 1e-12)

    @property
    def relative_difference(self) -> float:
        return self.des_tokens_per_s / self.tokens_per_s - 1


def cross_check(
    policy: Policy,
    workload: Workload,
    system: System,
    *,
    engine: str = "exact",
    seed: int = 0,
    replications: int = 8,
) -> CrossCheck:
    """Compare what an engine predicts with the mean of independent SimPy runs (ratio of totals, delta-method error)."""
    from sim.timeline import totals

    prediction = predict(policy, workload, system, engine=engine, seed=seed)
    own_error = 0.0 if prediction.replications is None else prediction.replications.standard_error
    runs = totals(policy, workload, system, replication_seeds(seed, replications))
    rate = rate_of([run.num_tokens.sum() for run in runs], [run.shared_s.sum() for run in runs])
    error = math.hypot(rate.standard_error, own_error)
    return CrossCheck(policy, engine, prediction.tokens_per_s.value, rate.tokens_per_s, error)


def _replicate_vectorized(
    policy: Decider, workload: Workload, system: System, seed: int, relative_half_width: float, ceiling: int
) -> tuple[Expectation, Rate]:
    from sim.vectorized import replicate_until

    return replicate_until(
        policy,  # type: ignore[arg-type]  # what it cannot do it refuses
        workload,
        system,
        seed=seed,
        relative_half_width=relative_half_width,
        ceiling=ceiling,
    )


def _replicate_des(
    policy: Decider, workload: Workload, system: System, seed: int, relative_half_width: float, ceiling: int
) -> tuple[Expectation, Rate]:
    from sim.timeline import Totals, mean_of, totals

    runs: list[Totals] = []

    def run(seeds: Sequence[int]) -> tuple[list[float], list[float]]:
        new = totals(policy, workload, system, seeds)
        runs.extend(new)
        return [float(r.num_tokens.sum()) for r in new], [float(r.shared_s.sum()) for r in new]

    rate = until(run, seed=seed, relative_half_width=relative_half_width, ceiling=ceiling)
    return mean_of(runs), rate


def _by_batch(totals: FloatArray, batch: IntArray) -> FloatArray:
    """(..., num_batches) sums over the prompts of each batch, by the batch of each prompt: prompts that are decoded
    together share their time, and are drawn together."""
    by_prompt = np.moveaxis(totals, -1, 0)
    sums = np.zeros((1 + int(batch.max(initial=-1)), *by_prompt.shape[1:]))
    np.add.at(sums, batch, by_prompt)
    return np.moveaxis(sums, 0, -1)


def _joined_batches(batch: IntArray, groups: list[list[int]]) -> IntArray:
    """The batch of each prompt once batches that share a group are one."""
    return np.array(list(joined(range(len(batch)), [*_groups(batch), *groups]).values()), dtype=np.int64)


def _groups(batch: IntArray) -> list[list[int]]:
    return [np.flatnonzero(batch == number).tolist() for number in np.unique(batch)]


def _notes(e: Expectation, num_drawn: int, system: System, replications: Rate | None) -> tuple[str, ...]:
    """`num_drawn` are the prompts, or batches of them, that intervals draw from."""
    notes = list(e.notes)
    num_targets = system.placement.num_targets
    if 1 < num_drawn < FEWEST_TO_TRUST:
        notes.append(f"intervals are over {num_drawn} prompts or batches only: too few to be trusted")
    if num_targets > 1:
        notes.append(f"tokens/s are per target; {num_targets} targets share the draft")
    if e.doubt:
        notes.append(f"the recorded candidates leave hit rates open by +-{100 * e.doubt:.2g} points")
    if replications is not None and replications.reached_ceiling:
        half_width = f"{100 * replications.relative_half_width:.1f} %"
        notes.append(f"{replications.num_replications} replications, the ceiling, know tokens/s to {half_width} only")
    return tuple(notes)


def _from_expectation(
    policy: DeciderT,
    e: Expectation,
    engine: str,
    workload: Workload,
    system: System,
    replications: Rate | None = None,
    seed: int | None = None,
) -> Prediction[DeciderT]:
    batch = np.arange(len(e.num_tokens)) // workload.batch_size if e.batch is None else e.batch
    if system.agreement.repeated_prompts:
        batch = _joined_batches(batch, system.agreement.repeated_prompts)
    num_tokens, num_rounds, seconds, lookups, hits = (
        _by_batch(totals, batch) for totals in (e.num_tokens, e.num_rounds, e.seconds, e.num_lookups, e.num_hits)
    )
    return Prediction(
        policy=policy,
        engine=engine,
        tokens_per_s=ratio_of_totals(num_tokens, seconds) or Estimate(0.0, 0.0, 0.0, len(num_tokens)),
        mean_acceptance_length=ratio_of_totals(num_tokens, num_rounds),
        hit_rate=ratio_of_totals(hits.sum(0), lookups.sum(0)),
        hit_rate_by_source={
            name: ratio_of_totals(hits[side], lookups[side]) for side, name in enumerate(("after_hit", "after_miss"))
        },
        expectation=replace(e, batch=batch),
        num_targets=system.placement.num_targets,
        replications=replications,
        seed=seed,
        notes=_notes(e, len(num_tokens), system, replications),
    )
