"""Whether what is emitted has the target's law: whole runs on a toy vocabulary against exact enumeration.

Every case decodes many prompts through the code that decodes real models, and compares how often each text occurs with
its probability. Known-wrong variants of that code must fail the same comparison, or it would show nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor import target as target_role
from executor.draws import Draws, Purpose
from executor.execute import execute
from executor.row_sampler import RowSampler
from executor.sampling import draw, penalised, process
from executor.toy_model import HashModel, serial_runner
from sim.decider import Decider
from sim.policy import Autoregressive, Drafting, Fallback, PolicyTable, Proposer, Speculative, SpeculativeSpeculative
from sim.workload import Sampling, Workload

VOCAB_SIZE = 4
PROMPT = (1, 2)
NUM_TOKENS = 4  # decoded; the law of the first `NUM_TESTED` is compared
NUM_TESTED = 3
NUM_TRIALS = 1000  # texts of each setting of a case
FALSE_ALARM = 1e-4  # probability that a lossless decoder exceeds the threshold of one comparison
NUM_NULL = 50_000  # draws from the law itself that the threshold is taken from
SEED = 11

FloatArray = NDArray[np.float64]
Fault = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A decider, the settings of the rows in turn, rows decoded together. With a `fault` it must be caught."""

    name: str
    decider: Decider
    settings: tuple[Sampling, ...] = (Sampling(1.0),)
    batch_size: int = 1
    fault: Fault = nullcontext

    @property
    def is_control(self) -> bool:
        return self.fault is not nullcontext


@dataclass(frozen=True)
class Comparison:
    """Of one setting of a case: the total variation between the texts' frequencies and their law, and the threshold
    that a lossless decoder exceeds with probability `FALSE_ALARM`."""

    setting: Sampling
    num_trials: int
    total_variation: float
    threshold: float

    @property
    def is_within(self) -> bool:
        return self.total_variation <= self.threshold

    @property
    def setting_in_words(self) -> str:
        """What differs from plain sampling, and the temperature."""
        plain, given = asdict(Sampling()), asdict(self.setting)
        return ", ".join(f"{name} {v:g}" for name, v in given.items() if name == "temperature" or v != plain[name])


@dataclass(frozen=True)
class Verdict:
    """A lossless case is right if every comparison is within its threshold, a control if one is not."""

    case: Case
    comparisons: tuple[Comparison, ...]

    @property
    def is_right(self) -> bool:
        return all(c.is_within for c in self.comparisons) != self.case.is_control


def check_law(
    cases: Sequence[Case], num_trials: int = NUM_TRIALS, progress: Callable[[str], None] = lambda name: None
) -> Iterator[Verdict]:
    """Run every case; `progress` is told which comes next."""
    for case in cases:
        progress(case.name)
        yield Verdict(case, tuple(_compare(case, num_trials)))


def models() -> tuple[HashModel, HashModel]:
    """A target, and a draft that agrees with it now and then."""
    return HashModel(VOCAB_SIZE, seed=0), HashModel(VOCAB_SIZE, seed=0, own_seed=1, agreement=0.3)


def decode(case: Case, num_trials: int) -> Any:
    """The trace of `num_trials` texts of each setting, the settings in turn."""
    num_texts = num_trials * len(case.settings)
    workload = Workload(
        "toy", (PROMPT,) * num_texts, NUM_TOKENS, sampling=case.settings * num_trials, batch_size=case.batch_size
    )
    with _one_thread(), case.fault():
        return execute(case.decider, workload, serial_runner(*models()), seed=SEED)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several would only wait for one another over four tokens."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(case: Case, num_trials: int) -> Iterator[Comparison]:
    texts = [sequence.tokens[:NUM_TESTED] for sequence in decode(case, num_trials).sequences]
    for number, setting in enumerate(case.settings):
        law = law_of(setting)
        counts = Counter(texts[number :: len(case.settings)])
        observed = np.array([counts[text] for text in _texts()]) / num_trials
        distance = float(np.abs(observed - law).sum() / 2)
        yield Comparison(setting, num_trials, distance, threshold(setting, num_trials))


def _texts() -> list[tuple[int, ...]]:
    return list(product(range(VOCAB_SIZE), repeat=NUM_TESTED))


@lru_cache
def law_of(setting: Sampling) -> FloatArray:
    """(V^n,) probability of each text of `NUM_TESTED` tokens after the prompt, by enumeration."""
    target, probabilities = models()[0], []
    for text in _texts():
        probability = 1.0
        for place in range(NUM_TESTED):
            before = (*PROMPT, *text[:place])
            logits = penalised(target.logits_after(before)[None], setting.repetition_penalty, before)
            probability *= float(process(logits, setting)[0, text[place]])
        probabilities.append(probability)
    return np.array(probabilities)


@lru_cache
def threshold(setting: Sampling, num_trials: int) -> float:
    """The total variation that frequencies of `num_trials` texts drawn from the law exceed with probability
    `FALSE_ALARM`, by simulation."""
    law = law_of(setting)
    drawn = np.random.default_rng(SEED).multinomial(num_trials, law / law.sum(), size=NUM_NULL) / num_trials
    distances = np.abs(drawn - law).sum(1) / 2
    return float(np.sort(distances)[-1 - int(NUM_NULL * FALSE_ALARM)]) + 1e-12


# --------------------------------------------------------------------------------------------------------------- cases

_HITS = SpeculativeSpeculative(2, (4, 4, 4), (4, 4, 4))
_MISSES = SpeculativeSpeculative(2, (0, 0, 0), (0, 0, 0))
_MIXED = SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1))
_NONE = SpeculativeSpeculative(2, (1, 1, 2), (2,), Fallback.NONE)
_FILLER = SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), Fallback.FILLER)
_NGRAM = SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), Fallback.NGRAM)
_DRAFT_MISSING = SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), Fallback.DRAFT_MISSING)
_WEIGHTED = replace(_MIXED, downweight=0.3)
_TABLE = PolicyTable(((1, _MIXED), (2, Autoregressive()), (3, Speculative(2)), (4, _DRAFT_MISSING)))

_COOL, _HOT = Sampling(0.6), Sampling(1.5)
_TOP_TWO = Sampling(1.0, top_k=2)
_UNEQUAL = (
    Sampling(1.0),
    Sampling(0.0),
    _TOP_TWO,
    Sampling(0.8, top_p=0.8, min_p=0.1),
    Sampling(1.0, repetition_penalty=1.7),
)

CASES = (
    Case("AR", Autoregressive()),
    Case("SD", Speculative(2)),
    Case("SD, K beyond the text", Speculative(6)),
    Case("SSD, every look-up hits", _HITS),
    Case("SSD, every look-up misses", _MISSES),
    Case("SSD, hits and misses, draft", _MIXED),
    Case("SSD, hits and misses, none", _NONE),
    Case("SSD, hits and misses, n-gram", _NGRAM),
    Case("SSD, hits and misses, filler", _FILLER),
    Case("SSD, C = .3", _WEIGHTED),
    Case("SSD, C = .2, mostly hits", SpeculativeSpeculative(2, (2, 2, 2), (2, 2, 2), downweight=0.2)),
    Case("SD, batches of 3", Speculative(2), batch_size=3),
    Case("SSD, batches of 3, draft", _MIXED, batch_size=3),
    Case("SSD, batches of 3, draft missing", _DRAFT_MISSING, batch_size=3),
    Case("table, batches of 4", _TABLE, batch_size=4),
    Case("SSD, batches of two temperatures", _MIXED, (_COOL, _HOT), batch_size=4),
    Case("SD, batches of five settings", Speculative(2), _UNEQUAL, batch_size=5),
    Case("SSD, batches of five settings", _DRAFT_MISSING, _UNEQUAL, batch_size=5),
    Case("SSD, C = .3, five settings alone", _WEIGHTED, _UNEQUAL),
)

# ------------------------------------------------------------------------------------------------------------- controls


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    honest = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, honest)


_SAMPLE, _UNIFORMS, _VERIFY = RowSampler.sample, Draws.uniforms, target_role.verify


def _with_argmax(
    sampler: RowSampler, rows: Sequence[int], logits: Tensor, uniforms: Tensor, drafting: Drafting, draft_index: int
) -> Any:
    """Takes the most likely token and hands on the whole q."""
    return logits.argmax(-1), list(process(logits, Sampling(1.0)))


def _with_another_law(
    sampler: RowSampler, rows: Sequence[int], logits: Tensor, uniforms: Tensor, drafting: Drafting, draft_index: int
) -> Any:
    """Draws from the processed q, or from q', and hands on the plain one."""
    tokens, _ = _SAMPLE(sampler, rows, logits, uniforms, drafting, draft_index)
    return tokens, list(process(logits, Sampling(1.0)))


def _filler_with_another_law(proposer: Proposer, tokens: Tensor, vocab_size: int) -> Tensor:
    law = torch.tensor([0.55, 0.05, 0.25, 0.15], dtype=torch.float64)
    return law.expand(*tokens.shape, vocab_size)


def _noise_of_one_purpose(draws: Draws, purpose: Purpose, round_index: int, num: int) -> Tensor:
    return _UNIFORMS(draws, Purpose.DRAFT, round_index, num)


def _without_residual(target_probs: Tensor, draft_tokens: Tensor, *others: Tensor, **uniforms: Tensor) -> Any:
    """Draws the bonus token after a rejection from p itself."""
    num_accepted, _ = _VERIFY(target_probs, draft_tokens, *others, **uniforms)
    return num_accepted, draw(target_probs[int(num_accepted)], uniforms["bonus_uniform"])


def _accepting_everything(target_probs: Tensor, draft_tokens: Tensor, *others: Tensor, **uniforms: Tensor) -> Any:
    return torch.tensor(draft_tokens.shape[-1]), draw(target_probs[-1], uniforms["bonus_uniform"])


CONTROLS = (
    Case("SD: argmax drawn, q tested", Speculative(2), fault=lambda: _replaced(RowSampler, "sample", _with_argmax)),
    Case("SSD hits: argmax drawn, q tested", _HITS, fault=lambda: _replaced(RowSampler, "sample", _with_argmax)),
    Case(
        "SSD, C = .3: q' drawn, q tested",
        _WEIGHTED,
        fault=lambda: _replaced(RowSampler, "sample", _with_another_law),
    ),
    Case(
        "SD: processed q drawn, plain q tested",
        Speculative(2),
        (Sampling(3.0, top_k=3),),
        fault=lambda: _replaced(RowSampler, "sample", _with_another_law),
    ),
    Case(
        "SSD: filler, another law tested",
        _FILLER,
        fault=lambda: _replaced(target_role, "stated_probs", _filler_with_another_law),
    ),
    Case(
        "SD: one noise for all purposes",
        Speculative(2),
        fault=lambda: _replaced(Draws, "uniforms", _noise_of_one_purpose),
    ),
    Case(
        "SD: no residual after rejection",
        Speculative(2),
        fault=lambda: _replaced(target_role, "verify", _without_residual),
    ),
    Case(
        "SSD: every draft token accepted",
        _MIXED,
        fault=lambda: _replaced(target_role, "verify", _accepting_everything),
    ),
)
