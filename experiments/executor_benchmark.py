"""Speed of the executor on this machine, beside transformers' own decoding: `saguaro bench executor`.

Every figure is a ratio of times of the same work, measured in turns: each unit (a prompt, a batch of prompts, a block)
goes through all that is compared before the next one, in an order that rotates, so that drift of the machine hits all
alike. On a shared machine the ratios travel, the times do not. Intervals are 95 % percentile bootstraps over the units:

- whole texts, prefill included, by wall clock around the call: ratio of total times over prompts
  (`sd_over_assisted_generation`, `ar_over_generate`, `prompt_lookup_over_transformers`);
- `verify_over_ar_step`: ratio of median times of the forward passes, over blocks that hold `PASSES_IN_A_ROW` passes of
  each width: a decoder repeats one width, and a pass that finds the processor's caches full of other work is slower;
- `speedups`: ratio of decode rates, and `round_efficiency_on_hits`, over batches of prompts (`sim.metrics`).

Texts have a fixed length. The policies are those of `default_policies`, the same for every pair and machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from executor.concurrency import Runner, open_runner
from executor.execute import execute
from executor.language_model import LanguageModel
from executor.pairs import Pair, load_pair
from executor.reference import PlainPass, Transformers
from executor.serial_draft import SerialDraft
from experiments.benchmark import machine
from experiments.measurement import join
from sim.errors import BadInput
from sim.metrics import BOOTSTRAP_SEED, NUM_BOOTSTRAP, Estimate, FloatArray, ratio_of_totals, round_efficiency, speedup
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.trace import Trace
from sim.workload import Workload

PAIRS = ("stdlib", "smollm2")  # the first one's figures stand for all; those that cannot be loaded are listed as such
SPECULATION_LENGTH = 5
NUM_BRANCHES = 12  # of a batch, as long as that leaves each row one for every accept count
NUM_PROMPTS = 64  # of the test split
SEED = 20260311
FEWEST_UNITS = 3
LONGEST_MEASURED = 8  # K of the forward passes
MOST_BLOCKS = 1000
PASSES_IN_A_ROW = 10
COMPARED = {  # their way to decode and ours, by the name of the ratio of their times
    "ar_over_generate": ("generate", "ar"),
    "sd_over_assisted_generation": ("assisted", "sd"),
    "sd_in_its_usual_processes_over_assisted_generation": ("assisted", "sd_usual"),
    "prompt_lookup_over_transformers": ("their_lookup", "lookup"),
}

Work = Callable[[int], Any]  # does one unit, by number, and returns what came of it


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Each comparison takes `budget_s`, and `FEWEST_UNITS` units at least."""

    num_tokens: int = 64
    prompt_tokens: int = 48
    context: int = 128
    budget_s: float = 8.0
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)


REDUCED = Sizes(num_tokens=24, budget_s=0.5, batch_sizes=(1, 4))


def default_policies(batch_size: int) -> dict[str, Policy]:
    """AR, SD and SSD of `SPECULATION_LENGTH`, SSD with a row's share of the branches spread evenly over its accept
    counts: a build takes the longer the more branches the whole batch has.

    After a miss the draft model drafts: in a batch for the missing rows alone, since with more rows one of them nearly
    always misses.
    """
    num_branches = max(SPECULATION_LENGTH + 1, NUM_BRANCHES // batch_size)
    fan_out = uniform_fan_out(SPECULATION_LENGTH, num_branches)
    fallback = Fallback.DRAFT if batch_size == 1 else Fallback.DRAFT_MISSING
    ssd = SpeculativeSpeculative(SPECULATION_LENGTH, fan_out, fan_out, fallback)
    return {"ar": Autoregressive(), "sd": Speculative(SPECULATION_LENGTH), "ssd": ssd}


def prompt_lookup_policy() -> SpeculativeSpeculative:
    """SSD that prepares nothing and proposes an n-gram in every round: its draft model feeds the prompt only."""
    nothing = (0,) * (SPECULATION_LENGTH + 1)
    return SpeculativeSpeculative(SPECULATION_LENGTH, nothing, nothing, Fallback.NGRAM)


def bench_executor(
    sizes: Sizes, progress: Callable[[str], None], pairs: Sequence[str] = PAIRS, concurrency: str = "auto"
) -> dict[str, Any]:
    """The figures of the first pair, JSON-safe; `other_pairs` holds those of the others, `speedups` those of all.

    `not_run` says which pair cannot be measured and why; the first one must.
    """
    figures: dict[str, dict[str, Any]] = {}
    not_run: dict[str, str] = {}
    for name in pairs:
        progress(f"load {name}")
        try:
            figures[name] = _figures(name, sizes, progress, concurrency)
        except BadInput as error:
            if name == pairs[0]:
                raise
            not_run[name] = str(error)
    speedups = {name: of_pair.pop("speedups") for name, of_pair in figures.items()}
    return {
        **figures.pop(pairs[0]),
        "speedups": speedups,
        "other_pairs": figures,
        "not_run": not_run,
        "policies": {str(size): _to_dicts(default_policies(size)) for size in sizes.batch_sizes},
        "prompt_lookup_policy": prompt_lookup_policy().to_dict(),
        "sizes": asdict(sizes),
        "machine": machine(),
    }


def _figures(name: str, sizes: Sizes, progress: Callable[[str], None], concurrency: str) -> dict[str, Any]:
    pair = load_pair(name)
    prompts = _test_prompts(pair, sizes.prompt_tokens)
    with open_runner(pair, concurrency) as runner:
        return _PairBench(pair, prompts, runner, pair.load("draft"), sizes, progress).figures()


@dataclass(frozen=True)
class _PairBench:
    """A loaded pair; `draft` is its draft model in this process, whatever the runner does."""

    pair: Pair
    prompts: tuple[tuple[int, ...], ...]
    runner: Runner
    draft: LanguageModel
    sizes: Sizes
    progress: Callable[[str], None]

    def figures(self) -> dict[str, Any]:
        return self._against_transformers() | self._verify_over_ar_step() | self._against_each_other()

    # --------------------------------------------------------------------------------------------------- whole texts

    def _against_transformers(self) -> dict[str, Any]:
        """The same models, prompts, K and numbers of tokens, greedy, on one core and one thread; SD once more as it
        runs with a core for each role."""
        self.progress(f"{self.pair.name}: beside transformers' own decoding")
        works = self._texts()
        times_s, texts = _in_turns(works, len(self.prompts), 4 * self.sizes.budget_s)
        ratios = {
            name: _json(ratio_of_totals(times_s[theirs], times_s[ours])) if theirs in works else None
            for name, (theirs, ours) in COMPARED.items()
        }
        same = {name: sum(map(_equal, texts[name], texts["generate"])) for name in works}
        return ratios | {"num_texts": len(texts["generate"]), "num_texts_as_generate": same}

    def _texts(self) -> dict[str, Work]:
        """Prompt number -> text, by each way to decode it."""
        prompts, num, length = self.prompts, self.sizes.num_tokens, SPECULATION_LENGTH
        serial = replace(self.runner, concurrency="serial", draft=SerialDraft(self.draft))
        theirs = Transformers(self.runner.target.model, self.draft)

        def ours(policy: Policy, runner: Runner) -> Work:
            return lambda unit: self._execute(policy, prompts[unit : unit + 1], 0.0, runner).sequences[0].tokens

        works: dict[str, Work] = {
            "ar": ours(Autoregressive(), serial),
            "sd": ours(Speculative(length), serial),
            "sd_usual": ours(Speculative(length), self.runner),
            "lookup": ours(prompt_lookup_policy(), serial),
            "generate": lambda unit: theirs.generate(prompts[unit], num),
            "their_lookup": lambda unit: theirs.prompt_lookup(prompts[unit], num, length),
        }
        if theirs.can_assist:
            works["assisted"] = lambda unit: theirs.assisted(prompts[unit], num, length)
        return works

    # ------------------------------------------------------------------------------------------------ forward passes

    def _verify_over_ar_step(self) -> dict[str, Any]:
        """The target's passes over K + 1 tokens and over one, by our pass and by the model's own forward method."""
        self.progress(f"{self.pair.name}: forward passes")
        context = [token for prompt in self.prompts for token in prompt][: self.sizes.context]
        plain, model = PlainPass(self.runner.target.model, context), self.runner.target.model.with_rows(1)
        model.append(context)

        def lean(tokens: Sequence[int]) -> None:
            model.append(tokens)
            model.roll_back(len(context))

        def feed(one_pass: Callable[[Sequence[int]], Any], width: int) -> Work:
            def passes(unit: int) -> None:
                for _ in range(PASSES_IN_A_ROW):
                    one_pass(context[:width])

            return passes

        widths = range(1, LONGEST_MEASURED + 2)
        works = {f"lean {width}": feed(lean, width) for width in widths}
        works |= {f"plain {width}": feed(plain, width) for width in widths}
        times_s, _ = _in_turns(works, MOST_BLOCKS, self.sizes.budget_s)

        def over(above: str, below: str) -> dict[str, Any] | None:
            return _json(_ratio_of_medians(times_s[above], times_s[below]))

        return {
            "verify_over_ar_step": {str(w - 1): over(f"lean {w}", "lean 1") for w in widths[1:]},
            "verify_over_ar_step_before": {str(w - 1): over(f"plain {w}", "plain 1") for w in widths[1:]},
            "plain_over_lean_pass": {str(w): over(f"plain {w}", f"lean {w}") for w in widths},
        }

    # --------------------------------------------------------------------------------------------------- the decoders

    def _against_each_other(self) -> dict[str, Any]:
        """Speed-ups by batch size and temperature; of SSD alone, how much of a round of hits is work."""
        speedups: dict[str, dict[str, Any]] = {}
        efficiency: dict[str, Any] = {}
        for batch_size in self.sizes.batch_sizes:
            by_temperature = speedups.setdefault(str(batch_size), {})
            for temperature in self.sizes.temperatures:
                what = f"AR, SD and SSD, {batch_size} prompts at a time, temperature {temperature:g}"
                self.progress(f"{self.pair.name}: {what}")
                traces = self._decoded(batch_size, temperature)
                by_temperature[f"{temperature:g}"] = {
                    f"{fast}_over_{slow}": _json(speedup([traces[fast]], [traces[slow]]))
                    for fast, slow in (("ssd", "sd"), ("ssd", "ar"), ("sd", "ar"))
                }
                if batch_size == 1:
                    efficiency[f"{temperature:g}"] = _json(round_efficiency([traces["ssd"]]))
        return {
            "speedups": speedups,
            "round_efficiency_on_hits": efficiency.get("0"),
            "round_efficiency_on_hits_by_temperature": efficiency,
            "identity": self.runner.identity(),
        }

    def _decoded(self, batch_size: int, temperature: float) -> dict[str, Trace]:
        """One trace of each policy over the same batches."""
        prompts = self.prompts
        num_batches = max(FEWEST_UNITS, len(prompts) // batch_size)

        def work(policy: Policy) -> Work:
            def decode(unit: int) -> Trace:
                batch = [prompts[(unit * batch_size + row) % len(prompts)] for row in range(batch_size)]
                return self._execute(policy, batch, temperature, self.runner, seed=SEED + unit)

            return decode

        works = {name: work(policy) for name, policy in default_policies(batch_size).items()}
        _, traces = _in_turns(works, num_batches, self.sizes.budget_s)
        return {name: join(parts) for name, parts in traces.items()}

    def _execute(
        self, policy: Policy, prompts: Sequence[tuple[int, ...]], temperature: float, runner: Runner, seed: int = SEED
    ) -> Trace:
        """The prompts as one batch."""
        workload = Workload(
            self.pair.dataset, tuple(prompts), self.sizes.num_tokens, temperature, batch_size=len(prompts)
        )
        return execute(policy, workload, runner, seed)


def _test_prompts(pair: Pair, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The first `NUM_PROMPTS` of the test split, or half as many as often as there are not that many."""
    num = NUM_PROMPTS
    while True:
        try:
            return pair.prompts("test", num, num_tokens)
        except BadInput:
            if num <= FEWEST_UNITS:
                raise
            num //= 2


def _in_turns(
    works: Mapping[str, Work], num_units: int, budget_s: float
) -> tuple[dict[str, FloatArray], dict[str, list[Any]]]:
    """Units 0, 1, ... by every work, until the time or the units are used up: seconds and results by work.

    The first work of a unit is another one each time. Everything is done once beforehand, untimed.
    """
    names = list(works)
    for work in works.values():
        work(0)
    times_s: dict[str, list[float]] = {name: [] for name in names}
    results: dict[str, list[Any]] = {name: [] for name in names}
    end_s = time.perf_counter() + budget_s
    for unit in range(num_units):
        if unit >= FEWEST_UNITS and time.perf_counter() > end_s:
            break
        for turn in range(len(names)):
            name = names[(unit + turn) % len(names)]
            start_s = time.perf_counter()
            result = works[name](unit)
            times_s[name].append(time.perf_counter() - start_s)
            results[name].append(result)
    return {name: np.array(values) for name, values in times_s.items()}, results


def _ratio_of_medians(above: FloatArray, below: FloatArray) -> Estimate:
    """Median over median, with a bootstrap over the blocks that they share."""
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(above), size=(NUM_BOOTSTRAP, len(above)))
    low, high = np.percentile(np.median(above[picks], 1) / np.median(below[picks], 1), [2.5, 97.5])
    return Estimate(float(np.median(above) / np.median(below)), float(low), float(high), len(above))


def _equal(tokens: Sequence[int], others: Sequence[int]) -> bool:
    return list(tokens) == list(others)


def _json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_dict()


def _to_dicts(policies: Mapping[str, Policy]) -> dict[str, Any]:
    return {name: policy.to_dict() for name, policy in policies.items()}


# ------------------------------------------------------------------------------------------------------------ the table


def table(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of what was measured: name, value, interval, number of units."""
    first = next(iter(figures["speedups"]))
    rows: list[tuple[str, ...]] = []
    for pair, of_pair in {first: figures, **figures["other_pairs"]}.items():
        rows += [_row(f"{pair}: {name}", value) for name, value in _single_figures(of_pair)]
        for batch_size, by_temperature in figures["speedups"][pair].items():
            for temperature, ratios in by_temperature.items():
                where = f"batch {batch_size}, T={temperature}"
                rows += [_row(f"{pair}, {where}: {_spoken(name)}", value) for name, value in ratios.items()]
    return rows


def _single_figures(of_pair: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in COMPARED:
        yield _spoken(name), of_pair[name]
    for temperature, value in of_pair["round_efficiency_on_hits_by_temperature"].items():
        yield f"round efficiency on hits, T={temperature}", value
    for name in ("verify_over_ar_step", "verify_over_ar_step_before"):
        for length, value in of_pair[name].items():
            yield f"{_spoken(name)}, K={length}", value
    for width, value in of_pair["plain_over_lean_pass"].items():
        yield f"plain over lean pass, {width} tokens", value


def _spoken(name: str) -> str:
    kinds = {"ar": "AR", "sd": "SD", "ssd": "SSD"}
    return " ".join(kinds.get(word, word) for word in name.split("_"))


def _row(name: str, value: Mapping[str, Any] | None) -> tuple[str, ...]:
    if value is None:
        return name, "-", "-", "0"
    low, high = ("-" if bound is None else f"{bound:.2f}" for bound in (value["low"], value["high"]))
    return name, f"{value['value']:.2f}", f"[{low}, {high}]", str(value["n"])
