"""Where SSD beats SD and AR, and where it does not: over pairs, cost ratios, vocabularies, numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from experiments.figures import win_map as draw_win_map
from experiments.paper.agreement_records import calibration_of, held_out_of, read_record
from experiments.paper.constant_times import StepCosts
from experiments.paper.hit_rates import uniform_policy
from experiments.paper.section import Answer, Cell, Figure, Section, Table
from experiments.recorded_workload import recorded_workload
from sim.agreement import Agreement, AgreementRecord
from sim.metrics import Estimate
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.search_space import SearchSpace, candidates, mean_acceptance
from sim.simulate import Prediction, predict_all, predicted_speedup
from sim.win_map import TIE, WinMap, win_map

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
SPACE = SearchSpace((1, 2, 3, 4, 6, 8), (8, 16), ("uniform", "exact"), (Fallback.DRAFT, Fallback.NONE))
PAIRS = ("library_t0", "library_t1", "editor_t0", "editor_t1", "smollm2_t0", "smollm2_t1")
AFTER_HIT, AFTER_MISS = HitCurve(0.4, 0.5), HitCurve(0.7, 0.5)  # in the middle of the published ones
BATCH_SIZES = (1, 4, 16)
TARGET_DEVICES = (1, 2, 4, 8)
VOCABULARIES = (512, 32_000, 128_256, 262_144)
LINKS = {  # seconds of a message, bytes per second
    "300 GB/s, 5 us": (5e-6, 300e9),
    "25 GB/s, 10 us": (10e-6, 25e9),
    "1.25 GB/s, 30 us": (30e-6, 1.25e9),
}


def section() -> Section:
    """Recorded pairs, the map of synthetic ones, vocabularies."""
    recorded = [found for name in PAIRS for found in of_pair(name)]
    synthetic = synthetic_map()
    by_devices = tuple(_by_devices(synthetic))
    sent = list(_by_vocabulary(read_record("library_t1")))
    return Section(
        "Which pairs SSD is for",
        text=(
            "Recorded pairs: policies are chosen on one half of the prompts and judged on the other, at every cost of a"
            " draft step (and of a tree step and a glue pass, which cost the same). `stdlib` is the packaged pair on"
            " two kinds of files, `smollm2` the distilled one, whose draft accepts a third. Synthetic pairs: i.i.d."
            " acceptance, hit curves in the middle of the published ones (c .4 and .7, r .5), uniform fan-outs of 8 or"
            " 16 branches, K up to 8, batches that take as long as one row. The same number of devices: SSD with one"
            " draft device beside D of the target has to beat the better of AR and SD by (D + 1) / D, which is what one"
            " more device would give them at best, whether it serves other requests or shares the target's layers.",
        ),
        tables=(
            Table("pairs", "SSD beside SD and AR on recorded pairs", _PAIR_HEAD, tuple(f.row() for f in recorded)),
            Table("pairs_by_devices", "Synthetic pairs for which SSD pays", _DEVICE_HEAD, by_devices),
            Table("pairs_by_vocabulary", "What a vocabulary costs on a link", _VOCABULARY_HEAD, tuple(sent)),
        ),
        figures=(
            Figure(
                "pair_diversity",
                "SSD over the better of AR and SD on synthetic pairs; the star stands for the default costs",
                partial(draw_win_map, synthetic.to_dict()),
            ),
        ),
        answers=(_on_pairs(recorded, by_devices), _on_vocabularies(sent)),
    )


# ------------------------------------------------------------------------------------------------------ recorded pairs

_PAIR_HEAD = (
    *("pair", "acceptance", "draft step over verification", "best SD over AR", "best SSD over AR"),
    *(
        "SSD over SD",
        "low",
        "high",
        "SSD over the better of AR and SD",
        "low",
        "high",
        "devices of the target from which",
    ),
    *("SSD policy",),
)


@dataclass(frozen=True)
class PairFound:
    """The best SD and SSD by the calibration prompts, on the held-out ones. `num_devices` of the target are needed
    until one more for a draft is well spent; None if it never is."""

    name: str
    acceptance: float
    ratio: float
    sd_over_ar: float
    ssd_over_ar: float
    over_sd: Estimate
    over_best: Estimate
    policy: str

    @property
    def num_devices(self) -> int | None:
        return devices_needed(self.over_best.value)

    def row(self) -> tuple[Cell, ...]:
        sd, best = self.over_sd, self.over_best
        return (
            *(self.name, self.acceptance, self.ratio, self.sd_over_ar, self.ssd_over_ar),
            *(sd.value, sd.low, sd.high, best.value, best.low, best.high, self.num_devices, self.policy),
        )


def devices_needed(gain: float) -> int | None:
    """The smallest D with gain > (D + 1) / D; None for a gain of at most 1 %."""
    if gain <= 1.01:
        return None
    return next(D for D in range(1, 101) if gain > (D + 1) / D)


def of_pair(name: str) -> Iterator[PairFound]:
    """By cost ratio."""
    record = read_record(name)
    known, judged = calibration_of(record), held_out_of(record)
    policies = candidates(SPACE, known)
    for ratio in RATIOS:
        costs = StepCosts.of_ratio(ratio)
        chosen = [_best(_predicted(known, policies, costs), kind) for kind in (Speculative, SpeculativeSpeculative)]
        ar, sd, ssd = _predicted(judged, [Autoregressive(), *chosen], costs)
        better = max((ar, sd), key=lambda prediction: prediction.tokens_per_s.value)
        rates = [prediction.tokens_per_s.value for prediction in (ar, sd, ssd)]
        yield PairFound(
            *(name, mean_acceptance(record), ratio, rates[1] / rates[0], rates[2] / rates[0]),
            over_sd=predicted_speedup(ssd, sd),
            over_best=predicted_speedup(ssd, better),
            policy=ssd.policy.name,
        )


def _predicted(agreement: Agreement, policies: list[Policy], costs: StepCosts) -> list[Prediction[Policy]]:
    return predict_all(policies, recorded_workload(agreement), costs.system(agreement))


def _best(predictions: list[Prediction[Policy]], kind: type) -> Policy:
    of_kind = (prediction for prediction in predictions if isinstance(prediction.policy, kind))
    return max(of_kind, key=lambda prediction: prediction.tokens_per_s.value).policy


# ----------------------------------------------------------------------------------------------------- synthetic pairs

_DEVICE_HEAD = (
    *("batch size", "devices of the target", "gain needed", "pairs where SSD pays, %", "where it is slower, %"),
    *("largest gain", "at acceptance", "at draft step over verification"),
)


def synthetic_map() -> WinMap:
    """Over acceptance and cost ratio."""
    agreement = ParametricAgreement(128, 512, (0.8,), (AFTER_HIT,), (AFTER_MISS,))
    system = StepCosts().system(agreement)
    space = replace(SPACE, fan_out_rules=("uniform",))
    return win_map(space, recorded_workload(agreement), system, batch_sizes=BATCH_SIZES)


def _by_devices(found: WinMap) -> Iterator[tuple[Cell, ...]]:
    """The share of the map's pairs, which are spread evenly over acceptance and over the logarithm of the ratio. In the
    first row of a batch size the draft's device costs nothing."""
    for gain, size in zip(found.gain, found.batch_sizes, strict=True):
        row, column = divmod(int(gain.argmax()), gain.shape[1])
        best = float(gain.max()), found.acceptances[column], found.ratios[row]
        for devices in (None, *TARGET_DEVICES):
            needed = 1.0 if devices is None else (devices + 1) / devices
            pays, loses = (100 * float(share.mean()) for share in (gain > needed + TIE, gain < needed - TIE))
            yield size, devices or "not counted", needed, pays, loses, *best


# --------------------------------------------------------------------------------------------------------- vocabularies

_VOCABULARY_HEAD = ("link", "vocabulary", "kB of a speculation", "SSD over AR", "lost by the link, %")


def _by_vocabulary(record: AgreementRecord) -> Iterator[tuple[Cell, ...]]:
    """One policy of K = 4 with two branches per accept count at temperature 1, a verification of 10 ms, probabilities
    of 4 bytes."""
    policy = uniform_policy(4, 2, Fallback.DRAFT)
    for link, (latency_s, bytes_per_s) in LINKS.items():
        for size in VOCABULARIES:
            placement = Placement(
                transfer_latency_s=latency_s, transfer_bytes_per_s=bytes_per_s, distribution_bytes=4 * size
            )
            free, sent = (
                _predicted(record, [policy], StepCosts(placement=place))[0].tokens_per_s.value
                for place in (Placement(), placement)
            )
            kilobytes = placement.speculation_bytes(4, sampled=True) / 1e3
            yield link, size, kilobytes, sent * StepCosts().verify_s, 100 * (1 - sent / free)


# ------------------------------------------------------------------------------------------------------------- answers


def _on_pairs(recorded: list[PairFound], by_devices: tuple[tuple[Cell, ...], ...]) -> Answer:
    most = max(recorded, key=lambda found: found.over_best.value)
    lost = [found for found in recorded if found.over_best.high < 1]
    worst = min(lost, key=lambda found: found.over_best.value)
    shares = {(row[0], row[1]): row[3:5] for row in by_devices}
    pays, slower = shares[1, "not counted"]
    of_four, of_one = shares[1, 4][0], shares[1, 1][0]
    largest, acceptance, ratio = by_devices[0][5:8]
    return Answer(
        "Where does SSD beat SD, by how much, and where does it lose to SD or AR with the same number of devices?",
        f"Where drafting takes time that a build can hide: of the recorded pairs at most {most.over_best:.2f} over the"
        f" better of AR and SD ({most.name}, a draft step of {most.ratio:g} verifications), little where drafting is"
        f" nearly free, and {worst.over_best:.2f} where a build of one token does not fit ({worst.name} at"
        f" {worst.ratio:g}); on the map of synthetic pairs it is faster for {pays:.0f} % and slower for {slower:.0f} %,"
        f" at most {largest:.2f} times as fast (acceptance {acceptance:g}, ratio {ratio:g}); but with the same number"
        f" of devices it pays for {of_four:.0f} % of them beside a target on four devices, and for {of_one:.0f} %"
        " beside one.",
        "tables pairs and pairs_by_devices, figure pair_diversity",
    )


def _on_vocabularies(sent: list[tuple[Cell, ...]]) -> Answer:
    lost = {(row[0], row[1]): row[4] for row in sent}
    fast, middle, slow = LINKS
    size = 128_256
    return Answer(
        "Does the size of the vocabulary matter?",
        f"Only through the draft distributions that are stored and sent at temperatures above 0: with {size:,} ids and"
        f" a verification of 10 ms they cost {lost[fast, size]:.1f} % of tokens/s on a link of {fast},"
        f" {lost[middle, size]:.1f} % at {middle} and {lost[slow, size]:.0f} % at {slow}.",
        "table pairs_by_vocabulary",
    )
