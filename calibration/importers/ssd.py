"""The public SSD engine (github.com/tanishqkumar/ssd): what `bench/bench.py` prints.

Minimal input: the output of one run with `--spec`, in which these lines are looked for:

- `Model: ..., Mode: ... + Speculative(k=7) + Async + JIT, Total: ..., Total Throughput: ...` says K and the decoder:
  SSD with Async, speculative decoding without it, autoregressive without Speculative. JIT is the draft as fallback.
- `Final Decode Throughput: 255tok/s`, of all rows and without prefill. Times of a round come from it, since the printed
  time of a full step counts prefills as well.
- `[metrics] Avg Tokens per step (incl recovery): 3.66` includes the bonus token, as all of its lengths do.
- `[metrics] Avg target verify time (ms): 11.50`, `[metrics] Avg Cache Hits: 0.86`, and the frequencies of accepted
  draft tokens after hits, `  0: 0.250` and so on.

The fan-out F is on the command line and not in the output; it must be told (`--f` of the run), and so must the batch
size if it is not 1 (`--b`). Outputs of the same pair without speculation and with plain speculative decoding, if given
as well, tell the autoregressive step and the draft step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.importers.imported import Assumed, Imported, Measured, Source, Told
from calibration.importers.serving_run import NO_BUILD
from calibration.importers.speculation import SPREAD_OF_PROMPTS, Speculation, whose_acceptance
from calibration.importers.step_times import DRAFT_OVER_AR, StepTimes, step_times
from sim.errors import BadInput, require_number
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative

EXPONENT = Assumed(
    "hits.overall.exponent", 0.5, 0.4, 0.56, "hits were seen at one fan-out; exponents of published pairs"
)
MISS_RATIO = Assumed(
    "hits.overall.miss_ratio", 1.75, 1.5, 3.0, "hits are not told apart by source; misses of published pairs"
)
USUAL_BUILD, LEAST_BUILD = 0.8, 0.4  # of a verification: the steps of a build that hides behind it
PAST_THE_END = "acceptance of texts that end by themselves: bench.py decodes past the end-of-text token"
LEAST_DRAFTING = 0.5  # of the time of misses beyond the verification, what draft steps take at least

MODE = re.compile(r"Model: .*Mode: (.*), Total: (\d+)tok, Time: ")
LENGTH = re.compile(r"Speculative\(k=(\d+)\)")
DECODE = re.compile(r"Final Decode Throughput: (\d+)tok/s")
METRIC = r"\[metrics\] {}: ([\d.]+)"
FREQUENCY = re.compile(r"^\s+(\d+): ([\d.]+)\s*$", re.MULTILINE)
FREQUENCIES = "Empirical frequencies of accepted_suffix_lens_on_hit - 1:"
MOST_ROUNDING = 0.02  # of frequencies printed with three digits, summed


@dataclass(frozen=True)
class SsdRun:
    """One output. Times in seconds per round; what was not printed is None."""

    name: str
    mode: str
    speculation_length: int  # 0: autoregressive
    tokens_per_s: float  # of all rows, while decoding
    tokens_per_round: float  # of a row, with the bonus token
    verify_s: float | None
    hit_rate: float | None
    frequencies_on_hit: tuple[float, ...]  # of 0, 1, ..., K accepted draft tokens

    @property
    def kind(self) -> str:
        if not self.speculation_length:
            return "ar"
        return "ssd" if "Async" in self.mode else "sd"

    def round_s(self, batch_size: int) -> float:
        """Mean time of a round."""
        return batch_size * self.tokens_per_round / self.tokens_per_s

    @property
    def falls_back_on_draft(self) -> bool:
        return "JIT" in self.mode

    def missing(self, batch_size: int) -> float:
        """Share of the rounds in which a row misses."""
        return 1 - (self.hit_rate or 0.0) ** batch_size

    def speculation(self) -> Speculation:
        """After hits by position, where the frequencies were printed; else one rate."""
        if not self.frequencies_on_hit:
            return Speculation(self.speculation_length, self.tokens_per_round)
        total = sum(self.frequencies_on_hit)
        survive = tuple(sum(self.frequencies_on_hit[count:]) / total for count in range(1, self.speculation_length + 1))
        return Speculation(self.speculation_length, 1 + sum(survive), survive)


def import_ssd(sources: Sequence[Source], told: Told) -> Imported:
    """Raises `BadInput` naming the output and the line that is missing, or what must be told."""
    runs = [_read(source) for source in sources]
    by_kind = {run.kind: run for run in runs}
    if len(by_kind) != len(runs):
        raise BadInput("outputs", "must be of different decoders", [f"{run.name}: {run.kind}" for run in runs])
    main = by_kind.get("ssd") or by_kind.get("sd")
    if main is None:
        raise BadInput("outputs", "must hold a run with speculation", [run.name for run in runs])
    batch_size = told.batch_size or 1
    speculation = main.speculation()
    times = _times(by_kind, batch_size)
    hits, assumed_hits, unknown_hits = _hits(by_kind.get("ssd"), told)
    temperature, unknown = whose_acceptance(told.temperature)
    lengths = {"prompt_tokens": told.prompt_tokens, "new_tokens": told.new_tokens, "batch_size": batch_size}
    text = {f"text.{name}": value for name, value in lengths.items() if value is not None}
    return Imported(
        engine="ssd",
        learned={**text, **temperature, **speculation.learned(), **times.learned, **hits},
        how=(speculation.in_words(), *times.how, *(f"{run.name}: {run.kind}" for run in runs)),
        not_learned=(
            *times.not_learned,
            *unknown,
            PAST_THE_END,
            *unknown_hits,
            *(() if "ssd" in by_kind else (NO_BUILD,)),
        ),
        assumed=(SPREAD_OF_PROMPTS, *times.assumed, *assumed_hits),
        measured=tuple(Measured(policy, run.tokens_per_s) for run in runs for policy in _policies(run, told)),
    )


def _policies(run: SsdRun, told: Told) -> list[Policy]:
    """The policy of a run; none where its fallback is one that summary numbers say nothing about."""
    K = run.speculation_length
    if run.kind == "ar":
        return [Autoregressive()]
    if run.kind == "sd":
        return [Speculative(K)]
    if not run.falls_back_on_draft or told.fan_out is None:
        return []
    fan_out = (told.fan_out,) * (K + 1)
    return [SpeculativeSpeculative(K, fan_out, fan_out, Fallback.DRAFT)]


def _read(source: Source) -> SsdRun:
    mode = MODE.search(source.text)
    if not mode:
        raise BadInput(source.name, "must have the line `Model: ..., Mode: ..., Total: ...` of bench.py")
    length = LENGTH.search(mode[1])
    K = int(length[1]) if length else 0
    decode = DECODE.search(source.text)
    if not decode:
        raise BadInput(source.name, "must have the line `Final Decode Throughput: ...`")
    tokens = _metric(source, r"Avg Tokens per step \(incl recovery\)") if K else 1.0
    if tokens is None:
        raise BadInput(source.name, "must have the line `[metrics] Avg Tokens per step (incl recovery): ...`")
    verify_ms = _metric(source, r"Avg target verify time \(ms\)")
    hit_rate = _metric(source, "Avg Cache Hits")
    return SsdRun(
        name=source.name,
        mode=mode[1],
        speculation_length=K,
        tokens_per_s=require_number(f"{source.name}: Final Decode Throughput", float(decode[1]), 0, above=True),
        tokens_per_round=require_number(f"{source.name}: Avg Tokens per step", tokens, 1, K + 1),
        verify_s=None if verify_ms is None else verify_ms / 1e3,
        hit_rate=None if hit_rate is None else require_number(f"{source.name}: Avg Cache Hits", hit_rate, 0, 1),
        frequencies_on_hit=_frequencies(source, K),
    )


def _metric(source: Source, name: str) -> float | None:
    found = re.search(METRIC.format(name), source.text)
    return float(found[1]) if found else None


def _frequencies(source: Source, K: int) -> tuple[float, ...]:
    _, _, after = source.text.partition(FREQUENCIES)
    found = [(int(count), float(share)) for count, share in FREQUENCY.findall(after)]
    if not found:
        return ()
    shares = tuple(share for _, share in found)
    if [count for count, _ in found] != list(range(K + 1)) or abs(sum(shares) - 1) > MOST_ROUNDING:
        raise BadInput(f"{source.name}: frequencies after hits", f"must be of 0 to {K} and add up to 1", shares)
    return shares


# ------------------------------------------------------------------------------------------------------------- hits


def _hits(run: SsdRun | None, told: Told) -> tuple[dict[str, Any], tuple[Assumed, ...], tuple[str, ...]]:
    """Keys of what was learned, what is assumed beside it, and what was not learned."""
    if run is None or run.hit_rate is None:
        return {}, (), ("how often prepared outcomes are hit: published hit curves stand for it, each over its range",)
    learned = {"hits.overall.hit_rate": run.hit_rate, "hits.overall.fan_out": told.need("fan_out", run.name)}
    unknown = (
        "hit rates at other fan-outs, and apart after hits and misses",
        "hit rates by accepted tokens: one curve",
    )
    return learned, (EXPONENT, MISS_RATIO), unknown


# ------------------------------------------------------------------------------------------------------------ times


def _times(by_kind: Mapping[str, SsdRun], batch_size: int) -> StepTimes:
    plain, sd, ssd = (by_kind.get(kind) for kind in ("ar", "sd", "ssd"))
    ar_s = plain.round_s(batch_size) if plain else None
    sd_s = sd.round_s(batch_size) if sd else None
    verify_s = next((run.verify_s for run in (ssd, sd) if run and run.verify_s), None)
    if verify_s is None:
        if ar_s is None and sd_s is None:
            rule = "must tell a time: the target's verify time, or outputs of the other decoders"
            raise BadInput("outputs", rule)
        return step_times(ar_s, sd_s, sd.speculation_length if sd else None)
    learned, how = {"times.verify_ms": _ms(verify_s)}, [f"a verification takes {1e3 * verify_s:.4g} ms"]
    not_learned = ["the host's time per round: part of the draft step"]
    if ar_s is not None:
        learned["times.ar_ms"] = _ms(ar_s)
        how.append(f"an autoregressive step takes {1e3 * ar_s:.4g} ms")
    else:
        not_learned.append("how long an autoregressive step takes")
    if sd is not None and sd_s is not None:
        learned |= {"times.sd_round_ms": _ms(sd_s), "times.sd_speculation_length": sd.speculation_length}
        how.append(f"a round of speculative decoding takes {1e3 * sd_s:.4g} ms")
        least_draft_s = max(0.0, sd_s - verify_s) / sd.speculation_length
        assumed = []
    else:
        assert ssd is not None
        not_learned.append("how long a draft step takes by itself")
        assumed = [_drafting(ssd, verify_s, batch_size)]
        least_draft_s = assumed[0].low / 1e3
    if ssd is not None:
        not_learned.append("how long a build takes, but that rounds leave it no more")
        assumed += _build(ssd, verify_s, least_draft_s, batch_size)
    return StepTimes(learned, tuple(how), tuple(not_learned), tuple(assumed))


def _build(run: SsdRun, verify_s: float, draft_s: float, batch_size: int) -> list[Assumed]:
    """Steps of a build that hides behind the verification, or lasts as long as rounds without their draft steps."""
    drafting_s = run.missing(batch_size) * run.speculation_length * draft_s if run.falls_back_on_draft else 0.0
    most = max(verify_s, run.round_s(batch_size) - drafting_s) / run.speculation_length
    because = "a build was not timed; rounds leave it no more"
    hidden = verify_s / run.speculation_length
    return [
        Assumed("times.tree_step_ms", _ms(USUAL_BUILD * hidden), _ms(LEAST_BUILD * hidden), _ms(most), because),
        Assumed("times.glue_ms", 0.0, 0.0, _ms((1 - USUAL_BUILD) * verify_s), because),
    ]


def _drafting(run: SsdRun, verify_s: float, batch_size: int) -> Assumed:
    """The draft step. A miss with the draft as fallback costs K of them: that is at most what rounds take beyond their
    verification."""
    excess_s = run.round_s(batch_size) - verify_s
    misses = run.missing(batch_size)
    if run.falls_back_on_draft and excess_s > 0 and misses > 0:
        most = _ms(excess_s / (misses * run.speculation_length))
        because = "rounds take so much longer than verifications; part of it may be the host's time"
        return Assumed("times.draft_step_ms", most * (1 + LEAST_DRAFTING) / 2, most * LEAST_DRAFTING, most, because)
    value, low, high = (_ms(share * verify_s) for share in DRAFT_OVER_AR)
    return Assumed("times.draft_step_ms", value, low, high, "a draft step was not timed")


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)
