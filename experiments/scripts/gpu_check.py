"""The executor on a GPU, checked and measured with one command, without downloads, in under six minutes on 80 GB:

    python -m experiments.scripts.gpu_check

Parity: AR, SD and SSD of the packaged pair on the GPU against the texts of the CPU, with and without CUDA graphs.
Speed: a pair of random weights, the target in the shape of a model of 8 billion parameters and its first layers as the
draft, in bfloat16: times of all operations beside the least that the memory's bandwidth allows, tokens/s and overlap of
AR, SD and SSD at several batch sizes, with and without graphs; what the two roles cost each other.
Waiting: how often the host waits for the device in a round.

Every part has a share of the time. What does not fit is listed as not run, what fails with its traceback. Two files are
written: report.json and report.md. `--device cpu --reduced` runs the same on tiny shapes, to check the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from calibration.side_by_side import side_by_side
from calibration.validate import check_losslessness
from executor.concurrency import Runner, open_runner
from executor.device import describe, resolve
from executor.execute import execute
from executor.pairs import load_pair
from executor.profiling import LatencyGrid, measure_latency, top2_gap
from executor.synthetic_pair import SyntheticPair
from sim.errors import BadInput
from sim.metrics import hit_rate, mean_acceptance_length, overlap, tokens_per_s
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.trace import Lane, Operation, Trace
from sim.workload import Workload

SCHEMA = 1
OUT = Path("experiments/reports/gpu_check")
PARITY, SPEED, WAITING = "parity", "speed", "waiting"
SHARES = {PARITY: 0.2, SPEED: 0.65, WAITING: 0.15}
ROLE_OF = {Lane.TARGET: "target", Lane.DRAFT: "draft"}


@dataclass(frozen=True)
class Settings:
    """What is checked, and how long it may take."""

    device: str = "cuda"
    budget_s: float = 330.0
    dtype: str = "bfloat16"
    pair: SyntheticPair = field(
        default_factory=lambda: SyntheticPair(
            layers=32,
            hidden_size=4096,
            num_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
            draft_layers=3,
            max_positions=1024,
        )
    )
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    speculation_length: int = 4
    budget: int = 12  # branches
    prompt_tokens: int = 128
    new_tokens: int = 96
    repeats: int = 3
    parity_prompts: int = 6
    parity_tokens: int = 64
    waiting_lengths: tuple[int, ...] = (2, 6)
    copied_bytes: int = 2**31

    def policies(self, speculation_length: int | None = None) -> dict[str, Policy]:
        K = speculation_length or self.speculation_length
        fan_out = uniform_fan_out(K, self.budget)
        return {"AR": Autoregressive(), "SD": Speculative(K), "SSD": SpeculativeSpeculative(K, fan_out, fan_out)}


REDUCED = Settings(
    budget_s=50.0,
    dtype="float32",
    pair=SyntheticPair(2, 64, 4, 2, 96, 512, draft_layers=1, max_positions=256),
    batch_sizes=(1, 2),
    prompt_tokens=16,
    new_tokens=24,
    repeats=2,
    parity_prompts=2,
    parity_tokens=24,
    copied_bytes=2**24,
)


class Log:
    """What was found, what was not run and what failed. A part's steps begin as long as its share of the time lasts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._until_s = 0.0
        self.not_run: list[str] = []
        self.failures: dict[str, str] = {}
        self.durations_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A named part. An exception in it is noted, and the next part goes on."""
        start_s = time.perf_counter()
        self._until_s = start_s + SHARES[name] * self._settings.budget_s
        try:
            yield
        except Exception:
            self.failures[name] = traceback.format_exc()
        self.durations_s[name] = time.perf_counter() - start_s

    def allows(self, step: str) -> bool:
        """Whether there is time left for a step; if not it is noted as not run."""
        if time.perf_counter() < self._until_s:
            print(f"{step} ...", flush=True)
            return True
        self.not_run.append(f"{step}: no time left")
        return False


def check(settings: Settings) -> dict[str, Any]:
    """The content of report.json."""
    log, device = Log(settings), resolve("device", settings.device)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe(device) | {"torch": torch.__version__, "cuda": torch.version.cuda},
        "settings": asdict(settings) | {"pair": settings.pair.name},
        PARITY: {},
        SPEED: {},
        WAITING: {},
    }
    with log.part(PARITY):
        parity(settings, log, report[PARITY])
    with log.part(SPEED):
        speed(settings, device, log, report[SPEED])
    with log.part(WAITING):
        waiting(settings, device, log, report[WAITING])
    return report | {"not_run": log.not_run, "failures": log.failures, "durations_s": log.durations_s}


def is_sound(report: Mapping[str, Any]) -> bool:
    """Whether nothing failed and no text departed from the CPU's beyond rounding."""
    return not report["failures"] and not any(found["violations"] for found in report[PARITY].values())


# -------------------------------------------------------------------------------------------------------------- parity


def parity(settings: Settings, log: Log, found: dict[str, Any]) -> None:
    """Texts of the packaged pair in float32 on the device against the CPU's."""
    workload = packaged_workload(settings, settings.parity_prompts)
    with open_runner(load_pair("stdlib"), "serial") as on_cpu:
        if not log.allows("parity: texts of the CPU"):
            return
        expected = execute(Autoregressive(), workload, on_cpu)
        for graphs in (False, True):
            name = with_or_without(graphs)
            if log.allows(f"parity: {name}"):
                texts = texts_on(settings, workload, graphs=graphs)
                lossless = check_losslessness(
                    expected, texts, lambda prompt, tokens: top2_gap(on_cpu, workload.prompts[prompt] + tokens)
                )
                violations = [difference.to_dict() for difference in lossless.violations]
                found[name] = lossless.to_dict() | {"violations": violations}


def texts_on(settings: Settings, workload: Workload, *, graphs: bool) -> dict[str, list[Trace]]:
    """Two runs of every policy on the device: the second replays what the first has shown."""
    with open_runner(load_pair("stdlib"), "streams", device=settings.device, graphs=graphs) as runner:
        policies = settings.policies().items()
        return {name: [execute(policy, workload, runner) for _ in range(2)] for name, policy in policies}


def packaged_workload(settings: Settings, num_prompts: int) -> Workload:
    pair = load_pair("stdlib")
    prompts = pair.prompts("test", num_prompts, 48)
    return Workload(pair.dataset, prompts, settings.parity_tokens, stop_ids=pair.stop_ids, batch_size=2)


def with_or_without(graphs: bool) -> str:
    return "with graphs" if graphs else "without graphs"


# --------------------------------------------------------------------------------------------------------------- speed


def speed(settings: Settings, device: torch.device, log: Log, found: dict[str, Any]) -> None:
    """The synthetic pair at every batch size, without graphs and with them."""
    found |= {"bytes_per_s": copy_bandwidth(device, settings.copied_bytes), "runs": [], "side_by_side": {}}
    for graphs in (False, True):
        if log.allows(f"speed: load the pair {with_or_without(graphs)}"):
            speed_of(settings, log, found, graphs=graphs)


def speed_of(settings: Settings, log: Log, found: dict[str, Any], *, graphs: bool) -> None:
    name = with_or_without(graphs)
    with open_runner(settings.pair, "streams", settings.dtype, device=settings.device, graphs=graphs) as runner:
        for batch_size in settings.batch_sizes:
            if log.allows(f"speed: batch {batch_size} {name}"):
                found["runs"] += measure(settings, runner, batch_size, found["bytes_per_s"])
        if log.allows(f"speed: side by side {name}"):
            found["side_by_side"][name] = solo_and_joint(settings, runner)


def measure(settings: Settings, runner: Runner, batch_size: int, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of the report: the policies' repeats, taken in turns, after runs that show all shapes."""
    prompts = settings.pair.prompts("test", batch_size, settings.prompt_tokens)
    workload = Workload(settings.pair.dataset, prompts, settings.new_tokens, batch_size=batch_size)
    policies = settings.policies()
    for _ in range(2):
        for policy in policies.values():
            execute(policy, workload, runner)
    traces: dict[str, list[Trace]] = {name: [] for name in policies}
    for _ in range(settings.repeats):
        for name, policy in policies.items():
            traces[name].append(execute(policy, workload, runner))
    return [
        {"policy": name, "batch_size": batch_size, "graphs": runner.graphs, **figures(settings, repeats, bandwidth)}
        for name, repeats in traces.items()
    ]


def figures(settings: Settings, traces: Sequence[Trace], bandwidth: float) -> dict[str, Any]:
    rates = [tokens_per_s([trace]).value for trace in traces]
    hidden, hits, length = overlap(traces), hit_rate(traces), mean_acceptance_length(traces)
    return {
        "tokens_per_s": {"median": median(rates), "low": min(rates), "high": max(rates)},
        "emitted_per_round": None if length is None else length.value,
        "hit_rate": None if hits is None else hits.value,
        "overlap": None if hidden is None else hidden.value,
        "captures": traces[-1].meta["captures"],
        "operations": operations(settings, traces, bandwidth),
    }


def operations(settings: Settings, traces: Sequence[Trace], bandwidth: float) -> list[dict[str, Any]]:
    """Median time of each operation of all rows in the widths that occur most, and the least time for its bytes."""
    by_operation: dict[tuple[Lane, Operation], dict[int, list[tuple[float, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trace in traces:
        largest = max(span.batch_size for span in trace.spans)
        for span in trace.spans:
            if span.batch_size == largest and span.operation not in (Operation.PREFILL, Operation.LOOKUP):
                by_operation[span.lane, span.operation][span.num_tokens].append((span.duration_s, span.context))
    rows = []
    for (lane, operation), by_width in by_operation.items():
        width = max(by_width, key=lambda num_tokens: len(by_width[num_tokens]))
        times, contexts = zip(*by_width[width], strict=True)
        least_s = bytes_read(settings, ROLE_OF[lane], largest, median(contexts)) / bandwidth
        timed = {"lane": lane, "operation": operation, "num_tokens": width, "median_s": median(times)}
        rows.append(timed | {"n": len(times), "bandwidth_floor_s": least_s})
    return rows


def bytes_read(settings: Settings, role: str, num_rows: int, context: float) -> float:
    """Bytes that a pass cannot but read: all weights but the embedding, and the rows' keys and values."""
    pair, itemsize = settings.pair, getattr(torch, settings.dtype).itemsize
    layers = pair.layers if role == "target" else pair.draft_layers
    width_of_keys = pair.hidden_size // pair.num_heads * pair.num_key_value_heads
    attention = 2 * pair.hidden_size * (pair.hidden_size + width_of_keys)
    weights_of_layer = attention + 3 * pair.hidden_size * pair.intermediate_size + 2 * pair.hidden_size
    weights = layers * weights_of_layer + pair.hidden_size * (pair.vocab_size + 1)
    return itemsize * (weights + num_rows * context * layers * 2 * width_of_keys)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes/s that a copy on the device reads and writes; the best of ten."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        synchronize(device)
        start_s = time.perf_counter()
        goal.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return 2 * num_bytes / min(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def solo_and_joint(settings: Settings, runner: Runner) -> dict[str, Any] | None:
    """Step times of one row alone and beside the other role at work."""
    grid = LatencyGrid(settings.speculation_length, (settings.budget,), (settings.prompt_tokens,))
    found = side_by_side(measure_latency(runner, grid, budget_s=0.0, min_blocks=2).samples)
    return None if found is None else found.to_dict()


# ------------------------------------------------------------------------------------------------------------- waiting


def waiting(settings: Settings, device: torch.device, log: Log, found: dict[str, Any]) -> None:
    """How often the host waits for the device, by policy and speculation length."""
    if device.type != "cuda":
        log.not_run.append("waiting: needs a CUDA device")
        return
    workload = replace(packaged_workload(settings, 1), batch_size=1)
    with open_runner(load_pair("stdlib"), "streams", device=settings.device) as runner:
        for K in settings.waiting_lengths:
            for name, policy in settings.policies(K).items():
                if log.allows(f"waiting: {name}, K = {K}"):
                    execute(policy, workload, runner)
                    trace, num = counted_waits(partial(execute, policy, workload, runner))
                    found[f"{name}, K = {K}"] = {"waits": num, "rounds": len(trace.rounds)}


def counted_waits(run: Callable[[], Trace]) -> tuple[Trace, int]:
    """A run, and how many calls of both roles waited for the device in it, its prefill included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trace = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return trace, sum("synchronizing" in str(warning.message) for warning in caught)


# -------------------------------------------------------------------------------------------------------------- report


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    sections = [
        "# The executor on a GPU",
        f"{report['date']}; {machine}. Synthetic pair: {report['settings']['pair']}, {report['settings']['dtype']}.",
        *[f"**Failed: {part}**\n\n```\n{text}```" for part, text in report["failures"].items()],
        *(["Not run:\n\n" + "\n".join(f"- {step}" for step in report["not_run"])] if report["not_run"] else []),
        "## Parity with the texts of the CPU (float32, greedy)",
        table(
            ["", "prompts", "identical", "near ties", "violations"],
            [[name, p["prompts"], p["identical"], p["near_tie_flips"], len(p["violations"])]
             for name, p in report[PARITY].items()],
        ),
        "## Speed",
        *speed_sections(report[SPEED]),
        "## Waiting of the host for the device",
        "Calls of both roles that waited, prefill included, over a run. More tokens drafted must not mean more.",
        table(
            ["policy", "waits", "rounds", "waits / round"],
            [[name, w["waits"], w["rounds"], f"{w['waits'] / w['rounds']:.2f}"] for name, w in report[WAITING].items()],
        ),
        "Seconds: " + ", ".join(f"{part} {seconds:.0f}" for part, seconds in report["durations_s"].items()) + ".",
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def speed_sections(found: Mapping[str, Any]) -> list[str]:
    runs = found.get("runs", [])
    operations = [(run, operation) for run in runs for operation in run["operations"]]
    return [
        f"A copy on the device moves {found.get('bytes_per_s', 0) / 1e9:.0f} GB/s. Medians of the repeats, and their "
        "range; a batch is one sample, so there are no intervals.",
        table(
            ["policy", "rows", "graphs", "tokens/s", "range", "emitted / round", "hit rate, %", "build hidden, %",
             "graphs recorded", "recording, s"],
            [run_row(run) for run in runs],
        ),
        "Least: the time to read the weights and the rows' keys and values at the bandwidth of the copy.",
        table(
            ["policy", "rows", "graphs", "operation", "tokens", "median, ms", "least, ms", "ratio", "n"],
            [operation_row(run, operation) for run, operation in operations],
        ),
        *[side_section(name, side) for name, side in found.get("side_by_side", {}).items()],
    ]  # fmt: skip


def run_row(run: Mapping[str, Any]) -> list[Any]:
    rate, captures = run["tokens_per_s"], run["captures"].values()
    return [
        run["policy"],
        run["batch_size"],
        "on" if run["graphs"] else "off",
        f"{rate['median']:.1f}",
        f"{rate['low']:.1f} - {rate['high']:.1f}",
        shown(run["emitted_per_round"], 1, ".2f"),
        shown(run["hit_rate"], 100, ".0f"),
        shown(run["overlap"], 100, ".0f"),
        sum(counts["num_captures"] for counts in captures),
        f"{sum(counts['capture_s'] for counts in captures):.1f}",
    ]


def operation_row(run: Mapping[str, Any], operation: Mapping[str, Any]) -> list[Any]:
    took, least = 1e3 * operation["median_s"], 1e3 * operation["bandwidth_floor_s"]
    return [
        run["policy"],
        run["batch_size"],
        "on" if run["graphs"] else "off",
        f"{operation['operation']} ({operation['lane']})",
        operation["num_tokens"],
        f"{took:.2f}",
        f"{least:.2f}",
        f"{took / least:.1f}",
        operation["n"],
    ]


def side_section(name: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return f"Side by side, {name}: not measured, the roles took turns."
    steps = table(
        ["operation", "tokens", "context", "alone, ms", "beside the other role, ms"],
        [[s["operation"], s["num_tokens"], s["context"], f"{1e3 * s['alone_s']:.2f}", f"{1e3 * s['beside_s']:.2f}"]
         for s in found["steps"]],
    )  # fmt: skip
    gain = f"the roles do {found['gain']:.2f} times the work that they do in turns"
    return f"Side by side, {name}: {gain} (2: neither slows the other; 1: they take turns).\n\n{steps}"


def shown(value: float | None, scale: float, spec: str) -> str:
    return "-" if value is None else f"{scale * value:{spec}}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write(report: Mapping[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.md").write_text(markdown(report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of report.json and report.md")
    parser.add_argument("--device", default=Settings.device)
    parser.add_argument("--budget-s", type=float, help="seconds for all parts together")
    parser.add_argument("--reduced", action="store_true", help="tiny shapes: whether all works, not how fast")
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args()
    if (arguments.out / "report.json").exists() and not arguments.overwrite:
        parser.error(f"{arguments.out} holds a report; give another --out or --overwrite")
    settings = replace(REDUCED if arguments.reduced else Settings(), device=arguments.device)
    if arguments.budget_s is not None:
        settings = replace(settings, budget_s=arguments.budget_s)
    try:
        report = check(settings)
    except BadInput as error:
        parser.error(str(error))
    write(report, arguments.out)
    print(f"{arguments.out / 'report.md'} written; {'sound' if is_sound(report) else 'NOT SOUND, see there'}")
    return 0 if is_sound(report) else 1


if __name__ == "__main__":
    sys.exit(main())
