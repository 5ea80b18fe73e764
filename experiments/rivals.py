"""Which way to decode wins where, on the same system: `saguaro rivals`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from experiments.searching import parse_batch_sizes
from sim.errors import BadInput, require_count, require_number
from sim.extrapolation import Knots
from sim.latency import OperationLatency
from sim.mean_times import DRAFT_STEP, VERIFY
from sim.parametric import ParametricAgreement
from sim.policy import Fallback
from sim.strategies.drafter import DRAFT_MODEL, Drafter, feature_drafter, one_pass_drafter
from sim.strategies.long_run import SteadyState
from sim.strategies.pearl import Pearl
from sim.strategies.prepared_tree import PreparedTree, prepared_tree
from sim.strategies.rank_law import rank_law
from sim.strategies.speculative_tree import SpeculativeTree
from sim.strategies.strategy import Strategy
from sim.strategies.token_tree import TokenTree
from sim.system import System
from sim.trace import Lane, Source
from sim.workers import HERE, Workers
from sim.workload import Workload

TARGET_DEVICES = (1, 4)
TIE = 0.02  # of tokens/s: what differs by less is a tie

LENGTHS = (1, 2, 3, 4, 6, 8, 12)
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 13)
BUDGETS = (8, 32)  # branches of each row
NODES, DEPTHS = (8, 16, 32, 63), (2, 3, 4, 6, 10)
NODES_OF_EACH_OUTCOME, DEPTHS_OF_EACH_OUTCOME = (6, 16, 32), (3, 4, 6)
FALLBACKS = (Fallback.DRAFT_MISSING, Fallback.NONE)

AR, SD, SSD = "AR", "SD", "SSD"
SD_TREE, SSD_TREE = "SD tree", "SSD tree"
ONE_PASS, ONE_PASS_TREE, SSD_ONE_PASS = "one pass", "one pass tree", "SSD one pass"
FEATURES, FEATURES_TREE, SSD_FEATURES = "features", "features tree", "SSD features"
ALL_ACCEPTED, PEARL = "SSD all accepted", "PEARL"
BESIDE = (SSD, SSD_TREE, SSD_ONE_PASS, SSD_FEATURES, ALL_ACCEPTED, PEARL)  # need a device of the draft's own
GAINS = (  # what drafting beside the verification adds, with the same drafter
    (SSD, SD),
    (SSD_TREE, SD_TREE),
    (SSD_FEATURES, FEATURES),
    (SSD_ONE_PASS, ONE_PASS),
    (PEARL, SD),
    (ALL_ACCEPTED, SD),
)


@dataclass(frozen=True)
class Grid:
    """The points of a table: acceptance of the drafter's first token, ratio of one of its passes to a verification of
    one token, rows of a batch."""

    acceptances: tuple[float, ...]
    ratios: tuple[float, ...]
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        for acceptance in self.acceptances:
            require_number("--acceptances", acceptance, 0, 1)
        for ratio in self.ratios:
            require_number("--ratios", ratio, 0, above=True)
        for batch_size in self.batch_sizes:
            require_count("--batch-sizes", batch_size, 1)

    @classmethod
    def parse(cls, acceptances: str, ratios: str, batch_sizes: str) -> Grid:
        """Of numbers with commas between them. Raises `BadInput` naming the option."""
        return cls(_numbers("--acceptances", acceptances), _numbers("--ratios", ratios), parse_batch_sizes(batch_sizes))

    @property
    def places(self) -> list[tuple[float, int]]:
        """Ratios and batch sizes."""
        return list(product(self.ratios, self.batch_sizes))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise BadInput(option, "must be numbers with commas between them", text) from None


@dataclass(frozen=True)
class Assumptions:
    """How acceptance decays with each further token of the drafters that are not the draft model."""

    one_pass_decay: float = 0.85
    feature_decay: float = 0.95


@dataclass(frozen=True)
class Contender:
    """The best setting of a family of strategies at one point."""

    setting: str
    tokens_per_s: float


@dataclass(frozen=True)
class Verdict:
    """Who is first, who second, and by how much of the second's rate."""

    winner: str
    runner_up: str
    margin: float

    @classmethod
    def of(cls, rates: dict[str, float]) -> Verdict:
        first, second = sorted(rates, key=lambda name: -rates[name])[:2]
        return cls(first, second, rates[first] / rates[second] - 1)

    @property
    def in_words(self) -> str:
        if self.margin < TIE:
            return f"{self.winner} = {self.runner_up}"
        return f"{self.winner} +{100 * self.margin:.0f} %"


@dataclass(frozen=True)
class Point:
    """One acceptance, ratio of a draft step to a verification of one token, and batch size."""

    acceptance: float
    ratio: float
    batch_size: int
    contenders: dict[str, Contender]

    @property
    def rates(self) -> dict[str, float]:
        return {name: contender.tokens_per_s for name, contender in self.contenders.items()}

    @property
    def verdict(self) -> Verdict:
        """By tokens/s, whatever devices that takes."""
        return Verdict.of(self.rates)

    def verdict_per_device(self, target_devices: int) -> Verdict:
        """By tokens/s and device, where the target takes so many and what drafts beside it one more. What drafts while
        the target waits does so on a device of the target."""
        return Verdict.of({name: rate / (target_devices + (name in BESIDE)) for name, rate in self.rates.items()})

    def gain(self, of: str, over: str) -> float:
        return self.rates[of] / self.rates[over]


@dataclass(frozen=True)
class WinnerTable:
    points: tuple[Point, ...]
    assumptions: Assumptions

    def at(self, acceptance: float, ratio: float, batch_size: int) -> Point:
        return next(p for p in self.points if (p.acceptance, p.ratio, p.batch_size) == (acceptance, ratio, batch_size))

    def values(self, name: str) -> list[Any]:
        """The distinct values of an axis."""
        return sorted({getattr(point, name) for point in self.points})

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "assumptions": asdict(self.assumptions),
            "tie": TIE,
            "points": [_point_to_dict(point) for point in self.points],
        }


def _point_to_dict(point: Point) -> dict[str, Any]:
    per_device = {str(num): asdict(point.verdict_per_device(num)) for num in TARGET_DEVICES}
    return asdict(point) | {"verdict": asdict(point.verdict), "verdict_per_device": per_device}


def winner_table(
    workload: Workload,
    system: System,
    grid: Grid,
    assumptions: Assumptions = Assumptions(),
    workers: Workers = HERE,
) -> WinnerTable:
    """Every family at its best setting, at every point.

    Acceptance is that of a drafter's first token; the draft model keeps it at every place. The ratio is that of one
    pass of the drafter, whoever drafts, to a verification of one token; all operations of the draft are scaled
    together. Hit curves, the growth of times with tokens and rows, and host times are the system's. Prompt look-up and
    block verification are left out, as these numbers say nothing about them. Settings outside the system's latencies
    are left out. Raises `BadInput` unless the system is one of summary numbers, whose times reach the largest batch.
    """
    if not isinstance(system.agreement, ParametricAgreement):
        raise BadInput("rivals", "compares on a file of numbers; an agreement record has one acceptance only")
    if max(grid.batch_sizes) > workload.batch_size:
        rule = f"must not exceed text.batch_size = {workload.batch_size}, to which times are known"
        raise BadInput("--batch-sizes", rule, max(grid.batch_sizes))
    of_acceptance = partial(_points, workload, system, assumptions, grid.places)
    points = [point for found in workers.map(of_acceptance, grid.acceptances) for point in found]
    return WinnerTable(tuple(points), assumptions)


def _points(
    workload: Workload,
    system: System,
    assumptions: Assumptions,
    places: Sequence[tuple[float, int]],
    acceptance: float,
) -> list[Point]:
    """Of one acceptance, at every ratio and batch size."""
    assert isinstance(system.agreement, ParametricAgreement)
    agreement = replace(system.agreement, acceptance=(acceptance,))
    families = {
        name: [SteadyState.of(setting, agreement) for setting in settings]
        for name, settings in families_of(agreement, assumptions)
    }
    systems = {ratio: replace(with_draft_ratio(system, ratio), agreement=agreement) for ratio, _ in places}
    points = []
    for ratio, batch_size in places:
        rules = replace(workload, batch_size=batch_size)
        contenders = {name: _best(settings, rules, systems[ratio]) for name, settings in families.items()}
        points.append(Point(acceptance, ratio, batch_size, contenders))
    return points


def _best(settings: Sequence[SteadyState], workload: Workload, system: System) -> Contender:
    found = []
    for setting in settings:
        try:
            found.append(Contender(setting.strategy.name, setting.timed(workload, system).tokens_per_s))
        except BadInput:
            continue  # outside the profiled range
    if not found:
        raise BadInput("latency", f"must cover a setting of {settings[0].strategy.name}")
    return max(found, key=lambda contender: contender.tokens_per_s)


def with_draft_ratio(system: System, ratio: float) -> System:
    """The system whose draft step of one token takes so many verifications of one token; every operation of the draft
    is scaled alike."""
    context = int(system.agreement.prompt_length[0])
    draft_s, verify_s = (float(system.latency[key].mean_s(1, context)) for key in (DRAFT_STEP, VERIFY))
    factor = ratio * verify_s / draft_s
    tables = {
        key: _scaled(table, factor) if key[0] is Lane.DRAFT else table
        for key, table in system.latency.operations.items()
    }
    return replace(system, latency=replace(system.latency, operations=tables))


def _scaled(table: OperationLatency, factor: float) -> OperationLatency:
    def scaled(knots: Mapping[int, Knots]) -> dict[int, Knots]:
        return {width: tuple((context, factor * s) for context, s in row) for width, row in knots.items()}

    return replace(
        table, knots=scaled(table.knots), batched={rows: scaled(knots) for rows, knots in table.batched.items()}
    )


# -------------------------------------------------------------------------------------------------------- families


def families_of(agreement: ParametricAgreement, assumptions: Assumptions) -> Iterator[tuple[str, list[Strategy]]]:
    """The settings of every family."""
    one_pass, features = one_pass_drafter(assumptions.one_pass_decay), feature_drafter(assumptions.feature_decay)
    yield AR, [SpeculativeTree(TokenTree(()))]
    yield SD, _chains(DRAFT_MODEL)
    yield SD_TREE, _trees(agreement, DRAFT_MODEL)
    yield ONE_PASS, _chains(one_pass)
    yield ONE_PASS_TREE, _trees(agreement, one_pass)
    yield FEATURES, _chains(features)
    yield FEATURES_TREE, _trees(agreement, features)
    yield SSD, _prepared_chains(agreement, DRAFT_MODEL)
    yield SSD_TREE, _prepared_trees(agreement)
    yield SSD_ONE_PASS, _prepared_chains(agreement, one_pass)
    yield SSD_FEATURES, _prepared_chains(agreement, features)
    yield ALL_ACCEPTED, [_all_accepted(K) for K in LENGTHS]
    yield PEARL, [Pearl(window) for window in WINDOWS]


def _chains(drafter: Drafter) -> list[Strategy]:
    return [SpeculativeTree(TokenTree.chain(K), drafter) for K in LENGTHS]


def _trees(agreement: ParametricAgreement, drafter: Drafter) -> list[Strategy]:
    shapes = (likeliest_tree(agreement, drafter, *size) for size in product(NODES, DEPTHS))
    return [SpeculativeTree(tree, drafter) for tree in dict.fromkeys(shapes)]


def _prepared_chains(agreement: ParametricAgreement, drafter: Drafter) -> list[Strategy]:
    return [
        prepared_tree(TokenTree.chain(K), budget, agreement, fallback, drafter)
        for K, budget, fallback in product(LENGTHS, BUDGETS, FALLBACKS)
    ]


def _prepared_trees(agreement: ParametricAgreement) -> list[Strategy]:
    sizes = product(NODES_OF_EACH_OUTCOME, DEPTHS_OF_EACH_OUTCOME)
    trees = dict.fromkeys(likeliest_tree(agreement, DRAFT_MODEL, *size) for size in sizes)
    return [
        prepared_tree(tree, budget, agreement, fallback)
        for tree, budget, fallback in product(trees, BUDGETS, FALLBACKS)
    ]


def _all_accepted(K: int) -> Strategy:
    fan_out = (0,) * K + (1,)
    return PreparedTree(TokenTree.chain(K), fan_out, fan_out)


def likeliest_tree(agreement: ParametricAgreement, drafter: Drafter, num_nodes: int, depth: int) -> TokenTree:
    """The best tree of so many nodes for what synchronous rounds of a drafter accept."""
    law = rank_law(agreement, Source.SYNCHRONOUS, drafter)
    known: dict[tuple[int, int], float] = {}

    def chance(rank: int, place: int) -> float:
        if (rank, place) not in known:
            known[rank, place] = float(law.within(rank, rank + 1, place))
        return known[rank, place]

    return TokenTree.likeliest(chance, num_nodes, depth)


# ---------------------------------------------------------------------------------------------------------- tables


def winners_in_markdown(table: WinnerTable) -> str:
    """Who wins by tokens/s, who by tokens/s and device, and what drafting beside the verification adds."""
    sections = [
        "# Which way to decode wins",
        f"Columns: a pass of the drafter over a verification of one token. `A +x %`: A is first, by x % of the second;"
        f" `A = B`: they differ by less than {100 * TIE:.0f} %. Decay per draft token: one pass"
        f" {table.assumptions.one_pass_decay:g}, features {table.assumptions.feature_decay:g}.",
    ]
    for batch_size in table.values("batch_size"):
        sections.append(f"## Batch {batch_size}")
        sections.append(_verdicts(table, batch_size, "tokens/s", lambda point: point.verdict))
        for num in TARGET_DEVICES:
            title = f"per device, target on {num}"
            sections.append(_verdicts(table, batch_size, title, partial(Point.verdict_per_device, target_devices=num)))
        sections.append(_gains(table, batch_size))
    return "\n\n".join(sections) + "\n"


def _verdicts(table: WinnerTable, batch_size: int, title: str, verdict: Callable[[Point], Verdict]) -> str:
    ratios = table.values("ratio")
    rows = [
        [f"a = {acceptance:g}", *(verdict(table.at(acceptance, ratio, batch_size)).in_words for ratio in ratios)]
        for acceptance in table.values("acceptance")
    ]
    return in_markdown([title, *(f"{ratio:g}" for ratio in ratios)], rows)


def _gains(table: WinnerTable, batch_size: int) -> str:
    """Smallest and largest over the acceptances."""
    ratios = table.values("ratio")
    rows = []
    for of, over in GAINS:
        row = [f"{of} over {over}"]
        for ratio in ratios:
            gains = [table.at(a, ratio, batch_size).gain(of, over) for a in table.values("acceptance")]
            row.append(f"{min(gains):.2f} .. {max(gains):.2f}")
        rows.append(row)
    return in_markdown(["times as fast, over all a", *(f"{ratio:g}" for ratio in ratios)], rows)


def in_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
