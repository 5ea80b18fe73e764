"""The `saguaro` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from sim.errors import BadInput, Interrupted, RunFailed

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.bench import Bench
    from experiments.config import ExperimentConfig
    from experiments.dry_run import Command
    from experiments.ledger import Ledger
    from experiments.planning import Plan
    from experiments.searching import Answer, Question
    from experiments.stages import Stages
    from sim.search_space import SearchSpace

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_NOT_LOSSLESS = 1
EXIT_INTERRUPTED = 130
WIDTH_OF_FILES = 150
LONGEST_FIGURE = len("1234.5 [1234.5, 1234.5]")
DIGITS = tuple("0123456789+-±")

app = typer.Typer(
    help="Plan speculative and speculative speculative decoding: profile a pair, predict, choose, execute, compare.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Engine(StrEnum):
    """How `simulate` predicts."""

    EXACT = "exact"  # expectation by recursion over the agreement record
    VECTORIZED = "vectorized"  # the event simulation's rounds, many at once in NumPy
    DES = "des"  # event simulation (SimPy), sampled


class Beyond(StrEnum):
    """What is answered about sizes that were not profiled."""

    REFUSE = "refuse"
    EXTRAPOLATE = "extrapolate"


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Experiment file (YAML).")]
PlanSource = Annotated[
    Path,
    typer.Argument(
        metavar="SYSTEM|NUMBERS",
        help="system.json, as `saguaro fit` writes it, or a YAML file of numbers (see configs/from_numbers.yaml).",
    ),
]
SearchConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Experiment file whose `search` section to use with a system.json."),
]
PolicyText = Annotated[
    str, typer.Option("--policy", help="Policy file (YAML), or inline: '{kind: sd, speculation_length: 4}'.")
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Prompts decoded together; the file's number or, of a system.json, 1."),
]
OtherBatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Prompts decoded together, instead of the file's number.")
]
BeyondProfile = Annotated[
    Beyond | None,
    typer.Option("--beyond", help="Sizes of a system.json that were not profiled: refuse, or extrapolate and say so."),
]
Draws = Annotated[
    int, typer.Option("--draws", min=0, help="Draws from the ranges of a file of numbers; 0 leaves them out.")
]
DrawSeed = Annotated[int, typer.Option("--seed", min=0, help="Of the draws, and of sampled runs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a finished output.")]
Reduced = Annotated[bool, typer.Option("--reduced", help="Use the small sizes in the file's `reduced` section.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was interrupted; what it finished is not done again.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting instead of the file's: workload.temperature=0.7; several times."
    ),
]
Numbers = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A number instead of the file's: times.verify_ms=12; several times."
    ),
]
NumbersOrSearch = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A number instead of the file's: times.verify_ms=12; of a system.json what to search: search.budgets=[8].",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved settings and the estimated time; measure nothing.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Instead of the file's seed.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON to standard output, everything else to the error output.")
]


bench_app = typer.Typer(
    help="Speed of the simulator and of the executor; whether the simulator's engines agree.", rich_markup_mode=None
)
app.add_typer(bench_app, name="bench", short_help="Speed of simulator and executor; do engines agree?")
check_app = typer.Typer(help="Whether decoding is lossless on this machine, also when something fails.")
app.add_typer(check_app, name="check", short_help="Is decoding lossless here, also when parts fail?")


@app.callback(invoke_without_command=True)
def saguaro(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        print(installed_version("saguaro-planner"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(short_help="Measure a pair: agreement, latencies, short runs.")
def profile(
    config_file: ConfigFile,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; out/<name>-profile unless given.")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    seed: Seed = None,
    batch_size: OtherBatchSize = None,
    reduced: Reduced = False,
    settings: Settings = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the simulator needs: agreement of the two models, latency of every operation, short runs."""
    from experiments.config import load_config
    from experiments.dry_run import Command

    config = load_config(config_file, reduced=reduced, seed=seed, batch_size=batch_size, settings=settings or ())
    out = out or Path("out") / f"{config.name}-profile"
    if dry_run:
        _print_dry_run(config, out, None, Command.PROFILE, as_json=as_json)
        return
    console = _console(as_json=as_json)
    from experiments.measured_folder import fill
    from experiments.run import profile_into

    def work(folder: Path, bench: Bench, stages: Stages, ledger: Ledger) -> None:
        profile_into(folder, config, bench, stages, ledger)

    fill(out, config, console, work, overwrite=overwrite, resume=resume, quiet=quiet)
    _print_record(out, console, as_json=as_json)


@app.command(short_help="Turn a profile into the simulator's system.")
def fit(
    profile_folder: Annotated[Path, typer.Argument(metavar="PROFILE", help="Folder that `saguaro profile` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="The system.json to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Turn a profile into the simulator's system: one JSON file, and the agreement record beside it. Shows how well its
    parameters are known, and writes that beside it as well (`<stem>.fit.json`)."""
    from calibration.fit import fit as fit_system
    from calibration.profile import Profile
    from experiments.fitted import look_at, print_fit
    from experiments.output import output_files

    profile = Profile.read(profile_folder)
    system = fit_system(profile)
    fitted = look_at(profile, system)
    with output_files(out, overwrite=overwrite) as file:
        system.write(file)
        file.with_suffix(".fit.json").write_text(json.dumps(fitted.to_dict(), indent=1))
    print_fit(fitted, _console(as_json=False))
    print(f"wrote {out}")


@app.command(short_help="Predict one policy.")
def simulate(
    source: PlanSource,
    policy: PolicyText,
    engine: Annotated[Engine, typer.Option("--engine", help="Exact expectation, or sampled runs.")] = Engine.EXACT,
    batch_size: BatchSize = None,
    settings: Numbers = None,
    beyond: BeyondProfile = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampled runs.")] = 0,
    half_width: Annotated[
        float,
        typer.Option("--half-width", min=1e-4, max=1, help="Sampled runs go on until tokens/s is known to this share."),
    ] = 0.02,
    as_json: AsJson = False,
) -> None:
    """Predict one policy on the recorded prompts, or on what a file of numbers describes."""
    from experiments.planning import read_plan
    from experiments.policies import load_policy
    from sim.simulate import predict

    plan = read_plan(source, batch_size, beyond, settings or ())
    _print_basis(plan)
    wanted = load_policy(policy, plan)
    prediction = predict(wanted, plan.workload, plan.system, engine=engine, seed=seed, relative_half_width=half_width)
    _print_predictions([prediction], as_json=as_json)
    _print_digest([prediction.to_dict()])


@app.command(short_help="Recommend a policy, and say how sure that is.")
def search(
    source: PlanSource,
    config_file: SearchConfigFile = None,
    engine: Annotated[
        Engine | None,
        typer.Option("--engine", help="exact unless given; vectorized where prompts are decoded together."),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="tokens_per_s, throughput, throughput_per_device or goodput.")
    ] = "tokens_per_s",
    batch_size: BatchSize = None,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", help="1,2,4: search each, and show latency against throughput.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option("--slo-tpot-ms", min=0, help="Time per token that every row must keep.")
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option("--slo-ttft-ms", min=0, help="Time to the first token that goodput counts.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-9, help="Of goodput: requests per second (Poisson).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Of goodput, instead: clients at any time.")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Of goodput: rows decoded together.")] = 1,
    requests: Annotated[int, typer.Option("--requests", min=10, help="Of goodput: how many are served.")] = 2000,
    what_if: Annotated[bool, typer.Option("--sensitivity", help="What if a measured quantity is 10 % wrong?")] = False,
    map_file: Annotated[
        Path | None, typer.Option("--map", help="Write a figure (SVG) of where SSD wins, ties and loses.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for a report (HTML, Markdown) with sensitivity and map, and for tables."),
    ] = None,
    overwrite: Overwrite = False,
    num_workers: Annotated[
        int | None,
        typer.Option("--num-workers", min=1, help="Processes, used once it pays; the cores unless given; 1: none."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Run on the Dask cluster whose scheduler has this address.")
    ] = None,
    settings: NumbersOrSearch = None,
    beyond: BeyondProfile = None,
    draws: Draws = 40,
    seed: DrawSeed = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Rank policies and recommend the simplest of the best: the best SSD and SD of every speculation length, and AR.

    From a file of numbers: also how far the answer moves over the ranges of what is assumed or not known exactly.
    """
    from experiments import searching
    from experiments.output import output_files, output_folder
    from experiments.planning import read_plan
    from experiments.served import load_of
    from experiments.stages import Stages
    from sim.objective import Objective
    from sim.serving import Slo
    from sim.workers import Workers, num_cores

    if objective not in list(Objective):
        raise BadInput("--objective", f"must be one of {', '.join(Objective)}", objective)
    has_load = rate is not None or concurrency is not None
    plan = read_plan(source, batch_size, beyond, _numbers_in(settings, source))
    space = _space_of(plan, config_file, settings)
    question = searching.Question(
        space=space,
        objective=Objective(objective),
        batch_sizes=searching.parse_batch_sizes(batch_sizes),
        slo=Slo(*(math.inf if ms is None else ms / 1e3 for ms in (slo_ttft_ms, slo_tpot_ms))),
        load=load_of(rate, concurrency, max_batch, requests) if has_load else None,
        engine=engine,
        seed=seed,
        num_draws=draws,
        with_sensitivity=what_if or out is not None,
        with_map=map_file is not None or out is not None,
        workers=Workers(num_workers or num_cores(), cluster),
    )
    _print_basis(plan)
    stages = Stages(_console(as_json=True), quiet=quiet)
    with ExitStack() as outputs:
        folder = outputs.enter_context(output_folder(out, overwrite=overwrite)) if out else None
        figure = outputs.enter_context(output_files(map_file, overwrite=overwrite)) if map_file else None
        answer = searching.answer(question, plan, stages)
        if figure is not None:
            _draw_map(answer, figure)
        if folder is not None:
            _write_search(folder, question, plan, source, answer, stages)
    if as_json:
        print(json.dumps(answer.to_dict(plan), indent=1))
    else:
        _print_answer(answer, with_sensitivity=what_if)
    if out is not None:
        print(f"wrote {out / 'report.html'}", file=sys.stderr)


@app.command(short_help="Trees, one-pass drafters, PEARL ... beside SSD.")
def rivals(
    source: PlanSource,
    acceptances: Annotated[
        str, typer.Option("--acceptances", help="Of the drafter's first token.")
    ] = "0.5,0.6,0.7,0.8,0.9",
    ratios: Annotated[
        str, typer.Option("--ratios", help="A pass of the drafter over a verification of one token.")
    ] = "0.02,0.05,0.1,0.2,0.4",
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="Up to the file's text.batch_size.")] = "1,4,16",
    one_pass_decay: Annotated[
        float, typer.Option("--one-pass-decay", min=0, max=1, help="Of acceptance per draft token of one pass.")
    ] = 0.85,
    feature_decay: Annotated[
        float, typer.Option("--feature-decay", min=0, max=1, help="Of acceptance per step without true features.")
    ] = 0.95,
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", min=1, help="Processes, used once it pays; the cores unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Token trees, one-pass and feature drafters, PEARL, look-up, block verification beside AR, SD and SSD.

    A file of numbers: who wins over acceptance, cost of a draft step, batch size and devices. A system.json: every way
    on the recorded texts.
    """
    from experiments.planning import read_plan
    from sim.agreement import AgreementRecord
    from sim.workers import Workers, num_cores

    plan = read_plan(source)
    _print_basis(plan)
    if isinstance(plan.system.agreement, AgreementRecord):
        from experiments.rivals_on_record import HEAD, in_rows, rivals_on_record

        found = rivals_on_record(plan.workload, plan.system)
        if as_json:
            print(json.dumps([row.to_dict() for row in found], indent=1))
            return
        _print_table(HEAD, in_rows(found), _console(as_json=False))
        return
    from experiments.rivals import Assumptions, Grid, winner_table, winners_in_markdown

    grid = Grid.parse(acceptances, ratios, batch_sizes)
    assumptions = Assumptions(one_pass_decay, feature_decay)
    table = winner_table(plan.workload, plan.system, grid, assumptions, Workers(num_workers or num_cores()))
    print(json.dumps(table.to_dict(), indent=1) if as_json else winners_in_markdown(table))


def _draw_map(answer: Answer, path: Path) -> None:
    from experiments.figures import win_map

    if answer.win_map is None:
        raise BadInput("--map", f"cannot be drawn; {answer.no_map}")
    win_map(answer.win_map.to_dict(), path)


def _write_search(folder: Path, question: Question, plan: Plan, source: Path, answer: Answer, stages: Stages) -> None:
    from experiments.search_report import search_manifest, write_search

    manifest = search_manifest(question, plan, source, answer, stages)
    write_search(folder, answer, plan, manifest)
    print(f"digest {manifest['digest'][:16]}, of the result {manifest['digest_of_result'][:16]}", file=sys.stderr)


def _numbers_in(settings: list[str] | None, source: Path) -> Sequence[str]:
    """Settings of a search that are a file's numbers; the others say what to search with a system.json."""
    from experiments.planning import is_numbers

    return settings or () if is_numbers(source) else ()


def _space_of(plan: Plan, config_file: Path | None, settings: list[str] | None) -> SearchSpace:
    from experiments.config import QUICKSTART, load_config
    from experiments.run import search_space

    if plan.search is not None:
        if config_file is not None:
            raise BadInput("--config", "goes with a system.json; a file of numbers has its own search section")
        return search_space(plan.search)
    for text in settings or ():
        if not text.startswith("search."):
            raise BadInput("--set", "must be like search.budgets=[8]; the rest of a system.json was measured", text)
    return search_space(load_config(config_file or QUICKSTART, settings=settings or ()).search)


def _print_answer(answer: Answer, *, with_sensitivity: bool) -> None:
    from experiments.searching import FRONT_HEAD, SENSITIVITY_HEAD, found_table, front_rows, sensitivity_rows
    from experiments.served import SERVED_HEAD, served_row

    console, found = _console(as_json=False), answer.found
    if len(answer.batches.points) > 1:
        _print_table(FRONT_HEAD, front_rows(answer.batches), console)
    for size, reason in answer.batches.refused.items():
        print(f"batches of {size}: {reason}", file=sys.stderr)
    _print_table(*found_table(answer), console)
    for note in dict.fromkeys(note for prediction in found.best_of_each_length() for note in prediction.notes):
        print(note, file=sys.stderr)
    if answer.goodput is not None:
        _print_table(SERVED_HEAD, [served_row(report) for report in answer.goodput.ranked], console)
    if found.infeasible:
        policy, reason = found.infeasible[0]
        num = len(found.infeasible)
        print(f"{num} policies cannot run or be predicted, {policy.name} for one: {reason}", file=sys.stderr)
    if with_sensitivity and answer.sensitivity is not None:
        _print_table(SENSITIVITY_HEAD, sensitivity_rows(answer.sensitivity), console)
    print(f"{found.num_policies} policies: {found.stopped}", file=sys.stderr)
    for sentence in (*answer.remarks(), answer.in_words()):
        console.print(f"{sentence}.", highlight=False, markup=False)


@app.command(short_help="Answer a file at every point of its sweep.")
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiment file or file of numbers with a `sweep`.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Of an experiment file: folder of the runs; out/<name> unless given.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    reduced: Reduced = False,
    settings: Settings = None,
    seed: Seed = None,
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", min=1, help="Of numbers: processes; the cores unless given.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Answer a file at every point of its `sweep`: search a file of numbers, run an experiment file."""
    from experiments.strict_yaml import read_yaml
    from experiments.swept import is_experiment, run_points, search_points
    from sim.workers import Workers, num_cores

    console = _console(as_json=as_json)
    if is_experiment(read_yaml(file)):
        if num_workers is not None:
            raise BadInput("--num-workers", "goes with a file of numbers; runs are made one after another")
        options = {"reduced": reduced, "overwrite": overwrite, "resume": resume, "quiet": quiet}
        swept = run_points(file, out, console, settings=settings or (), seed=seed, **options)
    else:
        given = {"--out": out is not None, "--overwrite": overwrite, "--resume": resume, "--reduced": reduced}
        for option in (name for name, is_given in given.items() if is_given):
            raise BadInput(option, "goes with an experiment file; numbers are searched, and nothing is written")
        workers = Workers(num_workers or num_cores())
        swept = search_points(
            file, _say_nothing if quiet else _say, settings=settings or (), seed=seed or 0, workers=workers
        )
    if as_json:
        print(json.dumps(swept.to_dict(), indent=1))
    else:
        _print_table(swept.head, swept.rows(), console)
        console.print(swept.in_words(), highlight=False, markup=False)
    if swept.kind == "search":
        _print_digest([swept.to_dict()])


@app.command("export", short_help="Write a recommendation as an engine's settings.")
def export_(
    source: PlanSource,
    engine: Annotated[str, typer.Option("--to", help="ssd, vllm or sglang.")],
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Policy file (YAML), or inline; what `search` recommends unless given."),
    ] = None,
    config_file: SearchConfigFile = None,
    batch_size: BatchSize = None,
    settings: NumbersOrSearch = None,
    as_json: AsJson = False,
) -> None:
    """The recommended policy, or a given one, as settings of another engine; says what cannot be told to it."""
    from experiments.exports import Engine as Exported
    from experiments.exports import export
    from experiments.planning import best_engine, read_plan
    from experiments.policies import load_policy
    from sim.search import search as search_policies

    if engine not in list(Exported):
        raise BadInput("--to", f"must be one of {', '.join(Exported)}", engine)
    plan = read_plan(source, batch_size, settings=_numbers_in(settings, source))
    if policy is not None and config_file is not None:
        raise BadInput("--config", "says what to search; it is not searched where --policy is given")
    _print_basis(plan)
    workload, system = plan.workload, plan.system
    if policy is None:
        space = _space_of(plan, config_file, settings)
        found = search_policies(space, workload, system, engine=best_engine(workload, system))
        print(found.in_words(), file=sys.stderr)
    wanted = found.recommended.policy if policy is None else load_policy(policy, plan)
    exported = export(wanted, Exported(engine), temperature=workload.temperature, batch_size=workload.batch_size)
    for line in exported.not_expressed:
        print(f"not expressed: {line}", file=sys.stderr)
    print(json.dumps(exported.to_dict(), indent=1) if as_json else exported.command)


@app.command("import", short_help="Plan from the files of another engine.")
def import_(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="vllm, sglang, ssd or logprobs.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Its files; of logprobs the target's, then the draft's.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write numbers.yaml into.")],
    plain: Annotated[
        Path | None, typer.Option("--ar", help="The same benchmark of the same engine without speculation.")
    ] = None,
    overwrite: Overwrite = False,
    speculation_length: Annotated[int | None, typer.Option("--speculation-length", min=1)] = None,
    fan_out: Annotated[int | None, typer.Option("--fan-out", min=1, help="Of every accepted count (ssd).")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Rows decoded together.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Of every text.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", min=2, help="Of every text.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, help="Of the target.")] = None,
    draws: Draws = 40,
    seed: DrawSeed = 0,
) -> None:
    """Plan from the files of another engine: what they tell goes into a file of numbers, with the ranges of what they
    leave open, and is searched as `search` does. Options say what the files of some formats leave out."""
    from calibration.importers.imported import Told
    from experiments.imports import NUMBERS, Format, import_files, predicted_runs, write_import
    from experiments.numbers import read_numbers
    from experiments.output import output_folder

    if format_ not in list(Format):
        raise BadInput("FORMAT", f"must be one of {', '.join(Format)}", format_)
    told = Told(speculation_length, fan_out, batch_size, prompt_tokens, new_tokens, temperature)
    imported = import_files(Format(format_), files, plain, told)
    with output_folder(out, overwrite=overwrite) as folder:
        write_import(imported, [*files, *([plain] if plain else [])], folder)
        runs = predicted_runs(imported, read_numbers(folder / NUMBERS))
    for said, lines in (("learned", imported.how), ("not learned", imported.not_learned)):
        for line in lines:
            print(f"{said}: {line}", file=sys.stderr)
    if runs:
        rows = [(name, f"{had:.1f}", f"{has:.1f}", f"{100 * (has / had - 1):+.1f} %") for name, had, has in runs]
        _print_table(("runs in the files", "tokens/s", "predicted", "error"), rows, _console(as_json=False))
    search(out / NUMBERS, draws=draws, seed=seed)
    print(f"wrote {out / NUMBERS}")


@app.command(short_help="Serve requests as they arrive (simulated).")
def serve(
    source: PlanSource,
    policy: Annotated[
        list[str], typer.Option("--policy", help="Policy file (YAML), or inline; may be given several times.")
    ],
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-9, help="Requests per second that arrive at random (Poisson).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Instead: clients with one request each at any time.")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Rows decoded together on a target.")] = 1,
    requests: Annotated[
        int, typer.Option("--requests", min=10, help="Of which the first fifth is the warm-up.")
    ] = 2000,
    slo_ttft_ms: Annotated[
        float | None, typer.Option("--slo-ttft-ms", min=0, help="Time to the first token that goodput counts.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option("--slo-tpot-ms", min=0, help="Time per further token that goodput counts.")
    ] = None,
    settings: Numbers = None,
    beyond: BeyondProfile = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, prompts, outcomes and durations.")] = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Serve requests as they arrive, by continuous batching: latencies, throughput, goodput of every policy given."""
    from experiments.planning import read_plan
    from experiments.policies import load_policy
    from experiments.served import SERVED_HEAD, load_of, served_in_words, served_row
    from experiments.stages import Stages
    from sim.serving import Slo
    from sim.serving import serve as serve_load

    plan = read_plan(source, beyond=beyond, settings=settings or ())
    _print_basis(plan)
    load = load_of(rate, concurrency, max_batch, requests)
    slo = Slo(*(math.inf if ms is None else ms / 1e3 for ms in (slo_ttft_ms, slo_tpot_ms)))
    policies = [load_policy(text, plan) for text in policy]
    with Stages(_console(as_json=True), quiet=quiet).watched("serve the load", len(policies)) as watched:
        reports = [serve_load(p, load, plan.workload, plan.system, seed, slo=slo) for p in watched(policies)]
    _print_digest([report.to_dict() for report in reports])
    if as_json:
        print(json.dumps([report.to_dict() for report in reports], indent=1))
        return
    console = _console(as_json=False)
    _print_table(SERVED_HEAD, [served_row(report) for report in reports], console)
    for report in reports:
        for note in filter(None, (report.extrapolated, report.note)):
            print(f"{report.name}: {note}", file=sys.stderr)
    console.print(f"{served_in_words(reports)}.", highlight=False, markup=False)


@app.command(short_help="Profile, choose, execute, compare.")
def run(
    config_file: ConfigFile,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; out/<name> unless given.")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    seed: Seed = None,
    batch_size: OtherBatchSize = None,
    reduced: Reduced = False,
    settings: Settings = None,
    profile_folder: Annotated[
        Path | None, typer.Option("--profile", help="Use this profile of the same pair and machine; measure none.")
    ] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Profile, fit, choose, execute AR, the best SD and the best SSD on other prompts, and compare."""
    from calibration.profile import Profile
    from experiments.config import load_config
    from experiments.dry_run import Command

    config = load_config(config_file, reduced=reduced, seed=seed, batch_size=batch_size, settings=settings or ())
    earlier = Profile.read(profile_folder) if profile_folder else None
    out = out or Path("out") / config.name
    if dry_run:
        _print_dry_run(config, out, profile_folder, Command.RUN, as_json=as_json)
        return
    from experiments.run import run_in

    console = _console(as_json=as_json)
    summary = run_in(out, config, console, overwrite=overwrite, resume=resume, quiet=quiet, earlier=earlier)
    _print_summary(summary, console)
    _print_record(out, console, report="report.html")
    if as_json:
        print(json.dumps(summary, indent=1))
    _exit_unless_lossless(summary)


@app.command(short_help="Set many predictions beside their measurement.")
def validate(
    config_file: ConfigFile,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; out/<name> unless given.")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    seed: Seed = None,
    reduced: Reduced = False,
    settings: Settings = None,
    profile_folder: Annotated[
        Path | None, typer.Option("--profile", help="Use the profiles of an earlier validation; measure none.")
    ] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run many held-out configurations for real and set every prediction beside its measurement."""
    from experiments.config import load_config
    from experiments.dry_run import Command
    from experiments.measured_folder import fill
    from experiments.validation import for_largest_batch, print_validation, read_profiles, run_validation

    config = for_largest_batch(load_config(config_file, reduced=reduced, seed=seed, settings=settings or ()))
    earlier = read_profiles(profile_folder) if profile_folder else None
    out = out or Path("out") / config.name
    if dry_run:
        _print_dry_run(config, out, profile_folder, Command.VALIDATE, as_json=as_json)
        return
    console = _console(as_json=as_json)

    def work(folder: Path, bench: Bench, stages: Stages, ledger: Ledger) -> None:
        run_validation(config, bench, folder, stages, earlier, ledger)

    fill(out, config, console, work, overwrite=overwrite, resume=resume, quiet=quiet)
    validation = json.loads((out / "validation.json").read_text())
    print_validation(validation, console)
    _print_record(out, console, report="validation.html")
    if as_json:
        print(json.dumps(validation, indent=1))
    lossless = validation["lossless"]
    if validation["missed"] or (lossless and lossless["identical"] + lossless["near_tie_flips"] < lossless["prompts"]):
        raise typer.Exit(EXIT_FAILED)


@app.command(short_help="Print the JSON schema of the YAML files.")
def schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="experiment, numbers or policy.")] = "experiment",
) -> None:
    """Print the JSON schema of the YAML files, for editors and checkers."""
    from experiments.schema import FileKind
    from experiments.schema import schema as schema_of

    if kind not in list(FileKind):
        raise BadInput("KIND", f"must be one of {', '.join(FileKind)}", kind)
    print(json.dumps(schema_of(FileKind(kind)), indent=1))


@app.command(short_help="Show versions, devices, cores, what is missing.")
def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices, cores and threads, and what is missing; exit code 1 if models cannot be run."""
    from experiments.doctor import DOCTOR_HEAD, examine, is_ready, to_json

    findings = examine()
    if as_json:
        print(json.dumps(to_json(findings), indent=1))
    else:
        _print_table(DOCTOR_HEAD, [finding.row() for finding in findings], _console(as_json=False))
    if not is_ready(findings):
        raise typer.Exit(EXIT_FAILED)


@bench_app.command("sim")
def bench_sim(
    as_json: AsJson = False, reduced: Annotated[bool, typer.Option("--reduced", help="A quick look.")] = False
) -> None:
    """Policies and rounds per second of every engine, beside the bare event library; takes about two minutes."""
    from experiments import benchmark

    console = _console(as_json=as_json)
    sizes = benchmark.REDUCED if reduced else benchmark.Sizes()
    figures = benchmark.bench_sim(sizes, lambda doing: console.print(doing, highlight=False))
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    rows = [
        (name, f"{value:,.3g}" if isinstance(value, float) and value < 10 else f"{value:,.0f}")
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    _print_table(("figure", "value"), rows, console)


@bench_app.command("search")
def bench_search(as_json: AsJson = False) -> None:
    """Seconds of an exhaustive search of over a thousand policies, with one worker and with all cores."""
    from experiments import search_benchmark

    console = _console(as_json=as_json)
    figures = search_benchmark.bench_search(lambda doing: console.print(doing, highlight=False))
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    runs = [figures[name] for name in ("one_worker", "all_workers")]
    rows = [(str(run["num_workers"]), str(run["num_policies"]), f"{run['seconds']:.1f}") for run in runs]
    _print_table(("workers", "policies", "seconds"), rows, console)


@bench_app.command("executor")
def bench_executor(
    pair: Annotated[
        list[str] | None, typer.Option("--pair", help="Pairs to measure; all packaged ones if none.")
    ] = None,
    as_json: AsJson = False,
    reduced: Annotated[bool, typer.Option("--reduced", help="A quick look.")] = False,
) -> None:
    """AR, SD and SSD beside each other and beside transformers' own decoding; takes minutes for a small pair, a quarter
    of an hour for smollm2."""
    from experiments.bench import model_libraries

    console = _console(as_json=as_json)
    with model_libraries():
        from experiments import executor_benchmark
    sizes = executor_benchmark.REDUCED if reduced else executor_benchmark.Sizes()
    pairs = tuple(pair or executor_benchmark.PAIRS)
    figures = executor_benchmark.bench_executor(sizes, lambda doing: console.print(doing, highlight=False), pairs)
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    rows = executor_benchmark.table(figures)
    _print_table(("times as fast, or part of", "value", "95 % interval", "n"), rows, console)
    for name, reason in figures["not_run"].items():
        print(f"{name} was not measured: {reason}", file=sys.stderr)


@bench_app.command("engines")
def bench_engines(as_json: AsJson = False) -> None:
    """Tokens/s of every kind of policy by every engine; exit code 1 if two of them differ beyond chance."""
    from experiments import engine_agreement

    console = _console(as_json=as_json)
    cases = engine_agreement.compare_engines(lambda doing: console.print(doing, highlight=False))
    if as_json:
        print(json.dumps(engine_agreement.to_json(cases), indent=1))
    else:
        rows = [
            (
                case.policy,
                case.system,
                str(case.batch_size),
                "refused" if case.exact is None else f"{case.exact:.2f}",
                f"{case.vectorized:.2f} ± {case.vectorized_half_width:.2f}",
                f"{case.des:.2f} ± {case.des_half_width:.2f}",
                f"{case.z:+.1f}",
            )
            for case in cases
        ]
        _print_table(("tokens/s", "system", "batch", "exact", "vectorized", "des", "z"), rows, console)
    if not all(case.agrees for case in cases):
        print("engines differ beyond chance", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)


@check_app.command("law")
def check_law(as_json: AsJson = False) -> None:
    """Decode a toy vocabulary under every kind of policy and compare with exact enumeration; exit code 1 if a law is
    wrong, or if a known-wrong variant passes."""
    console = _console(as_json=as_json)
    from experiments.checks import LAW_HEAD, law_in_words, law_rows, law_to_json, run_law_check

    verdicts = run_law_check(lambda doing: console.print(doing, highlight=False))
    if as_json:
        print(json.dumps(law_to_json(verdicts), indent=1))
    else:
        _print_table(LAW_HEAD, law_rows(verdicts), console)
        console.print(law_in_words(), highlight=False)
    if not all(verdict.is_right for verdict in verdicts):
        raise typer.Exit(EXIT_NOT_LOSSLESS)


@check_app.command("faults")
def check_faults(
    pair: Annotated[str, typer.Option("--pair", help="A packaged pair, or a folder.")] = "stdlib",
    as_json: AsJson = False,
) -> None:
    """Kill, stall and disturb real runs of a pair, and show what becomes of them; exit code 1 if a token is lost."""
    console = _console(as_json=as_json)
    from experiments.checks import FAULTS_HEAD, fault_rows, faults_to_json, run_fault_check

    aftermaths = run_fault_check(pair, lambda doing: console.print(doing, highlight=False))
    if as_json:
        print(json.dumps(faults_to_json(aftermaths), indent=1))
    else:
        _print_table(FAULTS_HEAD, fault_rows(aftermaths), console)
    if not all(aftermath.is_right for aftermath in aftermaths):
        raise typer.Exit(EXIT_FAILED)


@app.command(short_help="Published figures of SSD beside ours.")
def paper(
    out: Annotated[Path, typer.Option("--out", help="Folder.")] = Path("out/paper"),
    overwrite: Overwrite = False,
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", min=1, help="Processes; the cores unless given.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """The published figures of SSD (arXiv 2603.03251) beside ours: fits, predictions, residuals, contradictions."""
    from experiments.paper.report import write_report
    from sim.workers import num_cores

    console = _console(as_json=as_json)

    def show(doing: str) -> None:
        if not quiet:
            console.print(doing, highlight=False)

    content = write_report(out, overwrite=overwrite, progress=show, num_workers=num_workers or num_cores())
    if as_json:
        print(json.dumps(content, indent=1))
        return
    for section in content["sections"]:
        for answer in section["answers"]:
            console.print(f"{answer['question']} {answer['answer']}", highlight=False, markup=False)
    console.print(f"wrote {out / 'paper.md'}", highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Entry point: bad input is one line on the error output and exit code 2; only bugs show a traceback."""
    try:
        code = app(standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
    except BadInput as error:
        code = _fail(str(error))
    except TyperException as error:
        code = _fail(error.format_message())
    except (RunFailed, FloatingPointError) as error:
        print("; ".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        code = EXIT_FAILED
    except Interrupted as error:
        print(f"interrupted; {error}", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except (Abort, KeyboardInterrupt):
        print("interrupted; nothing was written", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _say_nothing(line: str) -> None:
    """For --quiet."""


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _console(*, as_json: bool) -> Console:
    """A file or pipe has no width of its own: lines may be long there."""
    from rich.console import Console

    console = Console(stderr=as_json)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_OF_FILES
    return console


def _print_dry_run(
    config: ExperimentConfig, out: Path, earlier: Path | None, command: Command, *, as_json: bool
) -> None:
    from experiments.dry_run import dry_run

    print(dry_run(config, out, earlier, command, as_json=as_json).rstrip())


def _print_record(out: Path, console: Console, *, report: str = "", as_json: bool = False) -> None:
    """Where a record lies, and the digest of what it was made from; its manifest as JSON if asked for."""
    from experiments.run import digest_in_words

    manifest = json.loads((out / "manifest.json").read_text())
    console.print(digest_in_words(manifest), highlight=False)
    console.print(f"wrote {out / report}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(manifest, indent=1))


def _print_digest(result: list[dict[str, Any]]) -> None:
    """Equal if the result is."""
    from calibration.digest import digest

    print(f"digest of the result: {digest(result)[:16]}", file=sys.stderr)


def _print_basis(plan: Plan) -> None:
    """What a reader must know before the figures."""
    for doubt in plan.doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    for assumption in plan.assumptions:
        print(f"assumed: {assumption}", file=sys.stderr)


def _print_predictions(predictions: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([prediction.to_dict() for prediction in predictions], indent=1))
        return
    best = max(prediction.tokens_per_s.value for prediction in predictions)
    head = ("policy", "tokens/s", "of the best, %", "emitted / round", "hit rate, %")
    rows = [
        (
            prediction.policy.name,
            _rate(prediction.tokens_per_s),
            f"{100 * prediction.tokens_per_s.value / best:.1f}",
            "-" if prediction.mean_acceptance_length is None else f"{prediction.mean_acceptance_length.value:.2f}",
            "-" if prediction.hit_rate is None else f"{100 * prediction.hit_rate.value:.1f}",
        )
        for prediction in predictions
    ]
    _print_table(head, rows, _console(as_json=False))
    for prediction in predictions:
        for note in prediction.notes:
            print(f"{prediction.policy.name}: {note}", file=sys.stderr)


def _rate(estimate: Any) -> str:
    """With its interval, where more than one text was predicted."""
    return f"{estimate:.1f}" if estimate.n > 1 else f"{estimate.value:.1f}"


def _print_summary(summary: dict[str, Any], console: Console) -> None:
    from calibration.report import answer, in_words

    rows = [
        (
            row["name"],
            f"{row['forecast']['tokens_per_s']['value']:.1f}",
            f"{row['predicted']['tokens_per_s']['value']:.1f}",
            in_words(row["measured"]["tokens_per_s"], ".1f"),
            f"{100 * row['error']['tokens_per_s']:+.1f} %",
            f"±{100 * row['measured']['repeat_spread']:.1f} %",
        )
        for row in summary["policies"]
    ]
    _print_table(("tokens/s", "forecast", "predicted", "measured", "error", "repeats"), rows, console)
    console.print(answer(summary), highlight=False, markup=False)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Columns of words fold where space is short, columns of figures do not."""
    from rich.table import Table

    table = Table()
    for number, title in enumerate(head):
        if number and _are_figures([row[number] for row in rows]):
            table.add_column(title, no_wrap=True, justify="right")
        else:
            table.add_column(title, overflow="fold", min_width=8)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False, markup=False)


def _are_figures(cells: Sequence[str]) -> bool:
    """Short cells that begin with a digit or a sign; a word may stand among them."""
    return all(len(cell) <= LONGEST_FIGURE for cell in cells) and any(cell.startswith(DIGITS) for cell in cells)


def _exit_unless_lossless(summary: dict[str, Any]) -> None:
    lossless = summary["lossless"]
    if lossless and lossless["identical"] + lossless["near_tie_flips"] < lossless["prompts"]:
        print("not lossless: some texts differ from AR's beyond rounding; see report.md", file=sys.stderr)
        raise typer.Exit(EXIT_NOT_LOSSLESS)
