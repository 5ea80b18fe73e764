"""The command line: one clear line and exit code 2 for bad input, results otherwise, and nothing heavy for `--help`."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import experiments.bench
from experiments.cli import Engine, main
from experiments.config import QUICKSTART, load_config
from experiments.run import measure_profile
from experiments.stages import Stages
from sim.policy import Policy
from sim.simulate import ENGINES
from sim.trace import Trace
from tests.experiments.fake_bench import FakeBench

ROOT = Path(__file__).parents[2]
Saguaro = Callable[..., tuple[int, str, str]]


@pytest.fixture
def saguaro(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Saguaro:
    """Run the command in an empty folder; returns exit code, standard output, error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["saguaro", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The quickstart at its reduced size with a narrow search."""
    config = load_config(QUICKSTART, reduced=True).to_dict()
    config["search"] |= {"speculation_lengths": [2, 4], "budgets": [8, 16]}
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path


@pytest.fixture
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the executor; fields of the bench can be set in the value."""
    fields: dict[str, Any] = {}

    @contextmanager
    def open_bench(config: Any, stages: Stages) -> Iterator[FakeBench]:
        yield FakeBench(config, **fields)

    monkeypatch.setattr(experiments.bench, "open_bench", open_bench)
    return fields


def assert_refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


# ------------------------------------------------------------------------------------------------------------ bad input


def test_missing_files_are_named(saguaro: Saguaro, tmp_path: Path, experiment: Path) -> None:
    assert_refused(saguaro("run", "nowhere.yaml"), "nowhere.yaml: no such file")
    assert_refused(saguaro("profile", "nowhere.yaml"), "nowhere.yaml: no such file")
    assert_refused(saguaro("fit", "nowhere", "--out", "system.json"), "nowhere/manifest.json: no such file")
    assert_refused(saguaro("simulate", "nowhere.json", "--policy", "{kind: ar}"), "nowhere.json")
    assert_refused(saguaro("search", "nowhere.json"), "nowhere.json")
    assert_refused(saguaro("run", experiment, "--profile", "nowhere"), "nowhere/manifest.json")
    assert list(tmp_path.iterdir()) == [experiment]


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ('"temperature"', '"temprature"', ["line {}", "workload.temprature", "did you mean workload.temperature?"]),
        ('"max_new_tokens": 32', '"max_new_tokens": "many"', ["workload.max_new_tokens", "integer", "'many'"]),
        ('"repeats": 3', '"repeats": 010', ["run.repeats", "integer", "'010'"]),
        ('"pair": "stdlib"', '"pair": "nowhere"', ["pair", "'nowhere'", "stdlib"]),
    ],
)
def test_bad_experiment_file_is_refused_and_nothing_written(
    saguaro: Saguaro, tmp_path: Path, experiment: Path, old: str, new: str, parts: list[str]
) -> None:
    text = experiment.read_text()
    assert old in text
    experiment.write_text(text.replace(old, new))
    line = 1 + text[: text.index(old)].count("\n")
    for command in ("run", "profile"):
        assert_refused(saguaro(command, experiment, "--out", "here"), *(part.format(line) for part in parts))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"experiment.yaml"}


def test_draft_with_another_tokenizer_is_refused(saguaro: Saguaro, tmp_path: Path, experiment: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pair = tmp_path / "pair"
    vocabularies = {"target": {"a": 0, "b": 1, "c": 2}, "draft": {"a": 0, "c": 1, "b": 2}}
    for role, vocabulary in vocabularies.items():
        (pair / role).mkdir(parents=True)
        (pair / role / "config.json").write_text(json.dumps({"vocab_size": 3, "max_position_embeddings": 512}))
        (pair / role / "model.safetensors").write_bytes(b"")
        model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
        tokenizers.Tokenizer(model).save(str(pair / role / "tokenizer.json"))
    experiment.write_text(experiment.read_text().replace('"stdlib"', f'"{pair}"'))
    assert_refused(saguaro("run", experiment, "--out", "here"), "draft/tokenizer.json", "id 1", "'b'", "'c'")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run"], "Missing argument 'CONFIG'"),
        (["run", "x.yaml", "--ovrwrite"], "--overwrite"),
        (["rum"], "Did you mean 'run'"),
        (["simulate", "s.json", "--policy", "{kind: ar}", "--engine", "magic"], "'exact', 'vectorized', 'des'"),
        (["simulate", "s.json"], "--policy"),
        (["simulate", "s.json", "--policy", "{kind: ar}", "--seed", "-1"], "--seed"),
    ],
)
def test_misused_options_are_one_line_too(saguaro: Saguaro, arguments: list[str], part: str) -> None:
    assert_refused(saguaro(*arguments), part)


def test_missing_model_library_is_said(
    saguaro: Saguaro, experiment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "executor.concurrency", None)
    pytest.importorskip("tokenizers")
    assert_refused(saguaro("run", experiment, "--out", "here"), "saguaro-planner[executor]")
    assert not (tmp_path / "here").exists()


# ------------------------------------------------------------------------------------------------------- whole commands


def test_run_prints_the_table_and_the_answer(
    saguaro: Saguaro, experiment: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    code, out, err = saguaro("run", experiment)
    assert code == 0, err
    assert "was the fastest policy measured" in out
    assert "search" in out and " s\n" in out  # stage times
    folder = tmp_path / "out" / "quickstart"
    assert (folder / "report.md").is_file()
    summary = (folder / "summary.json").read_text()
    assert_refused_after_output(saguaro("run", experiment), "already exists")
    assert (folder / "summary.json").read_text() == summary
    code, _, _ = saguaro("run", experiment, "--overwrite", "--seed", "5")
    assert code == 0
    assert json.loads((folder / "manifest.json").read_text())["settings"]["seed"] == 5


def assert_refused_after_output(result: tuple[int, str, str], part: str) -> None:
    assert result[0] == 2 and part in result[2]


def test_json_keeps_standard_output_clean(
    saguaro: Saguaro, experiment: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    code, out, err = saguaro("run", experiment, "--json", "--out", "here")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "here" / "summary.json").read_text())
    assert "was the fastest policy measured" in err


def test_texts_that_differ_give_another_exit_code(
    saguaro: Saguaro, experiment: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    def corrupt(policy: Policy, trace: Trace) -> Trace:
        if policy.name != "AR":
            first = trace.sequences[0]
            trace.sequences[0] = replace(first, tokens=(first.tokens[0] + 1, *first.tokens[1:]))
        return trace

    fake_machine["alter"] = corrupt
    code, _, err = saguaro("run", experiment, "--out", "here")
    assert code == 1
    assert "not lossless" in err
    assert (tmp_path / "here" / "report.md").is_file()


def test_profile_fit_simulate_search(
    saguaro: Saguaro, experiment: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    assert saguaro("profile", experiment, "--out", "measured")[0] == 0
    assert saguaro("fit", "measured", "--out", "system.json")[0] == 0
    assert_refused(saguaro("fit", "measured", "--out", "system.json"), "system.json: already exists")
    code, out, _ = saguaro("fit", "measured", "--out", "system.json", "--overwrite")
    assert code == 0
    fitted = json.loads((tmp_path / "system.fit.json").read_text())
    assert {"drift", "locations_s", "contention", "host_s", "in_situ", "design_effect"} <= fitted.keys()
    for shown in ("host time of a round (hit)", "its numbers alone", "time of decoding with every policy instead"):
        assert shown in out
    assert fitted["sweep"]["seconds"] > 0
    rates = {}
    for engine in Engine:
        policy = '{"kind": "sd", "speculation_length": 3}'
        code, out, _ = saguaro("simulate", "system.json", "--policy", policy, "--engine", engine, "--json")
        assert code == 0
        rates[engine] = json.loads(out)[0]["tokens_per_s"]["value"]
    assert all(rate == pytest.approx(rates[Engine.EXACT], rel=0.01) for rate in rates.values())
    assert tuple(Engine) == ENGINES
    code, out, _ = saguaro("search", "system.json", "--config", experiment, "--json")
    assert code == 0
    found = json.loads(out)
    ranked = found["ranked"]
    values = [prediction["tokens_per_s"]["value"] for prediction in ranked]
    assert values == pytest.approx(sorted(values, reverse=True), rel=1e-8) and len(values) == found["num_policies"]
    assert {"ar", "sd", "ssd"} <= {prediction["policy"]["kind"] for prediction in ranked}
    assert found["ties"] == [row["name"] for row in ranked if row["beside_first"]["is_tie"]]
    assert found["recommended"]["name"] in found["ties"] and found["front"][0]["name"] == found["recommended"]["name"]
    code, out, _ = saguaro("search", "system.json", "--config", experiment)
    assert code == 0 and "SD K=2" in out and "SD K=4" in out and "AR" in out
    wide = ("simulate", "system.json", "--policy", '{"kind": "sd", "speculation_length": 12}')
    refusal = "error: latency of verify: number of tokens must be in the profiled range 1..9, got"
    assert_refused_after_output(saguaro(*wide), refusal)
    code, out, err = saguaro(*wide, "--beyond", "extrapolate")
    assert code == 0 and "SD K=12" in out and "SD K=12: extrapolated beyond the profile (latency of verify" in err


def test_search_from_numbers_says_what_it_assumed(saguaro: Saguaro) -> None:
    example = QUICKSTART.parent / "from_numbers.yaml"
    code, out, err = saguaro("search", example, "--draws", "0")
    assert code == 0 and "SSD K=3" in out and "assumed: no hit curve given" in err
    assert_refused(saguaro("search", example, "--config", QUICKSTART), "--config: goes with a system.json")
    assert_refused(saguaro("search", example, "--beyond", "extrapolate"), "--beyond: goes with a system.json")


def test_search_from_numbers_says_how_far_the_answer_moves(saguaro: Saguaro, tmp_path: Path) -> None:
    example = tmp_path / "numbers.yaml"
    text = (QUICKSTART.parent / "five_numbers.yaml").read_text()
    for old, new in (
        ("[1, 2, 3, 4, 5, 6, 7, 8]", "[2]"),
        ("[8, 16, 24, 32]", "[8]"),
        ("size: 1", "size: 1, new_tokens: 32"),
    ):
        text = text.replace(old, new)
    example.write_text(text)
    code, out, err = saguaro("search", example, "--draws", "5", "--seed", "7", "--json")
    assert code == 0 and "assumed: no hit curve given" in err
    moved = json.loads(out)["uncertainty"]
    assert moved["num_draws"] == 5 and moved["seed"] == 7
    assert sum(policy["best_in_share_of_draws"] for policy in moved["policies"]) == pytest.approx(1)
    assert "times.verify_ms" in {entry["key"] for entry in moved["sensitivities"]}
    code, out, _ = saguaro("search", example, "--draws", "5", "--seed", "7")
    assert code == 0 and "% of 5 draws (seed 7)" in out
    code, out, _ = saguaro("search", example, "--draws", "0")
    assert code == 0 and "draws" not in out


def test_import_leads_to_a_file_of_numbers_and_its_answer(saguaro: Saguaro, tmp_path: Path) -> None:
    samples = ROOT / "tests" / "calibration" / "importers" / "samples"
    files = ("vllm", samples / "vllm_serve_sd.json", "--ar", samples / "vllm_serve_ar.json", "--out", "here")
    code, out, err = saguaro("import", *files, "--draws", "3")
    assert code == 0 and "SD K=4" in out and "predicted" in out and "draws (seed 0)" in out
    assert "learned: conditional acceptance 0.8" in err and "not learned: how long the verification takes" in err
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"manifest.json", "numbers.yaml"}
    code, out, _ = saguaro("simulate", "here/numbers.yaml", "--policy", "{kind: sd, speculation_length: 4}")
    assert code == 0 and "SD K=4" in out
    assert_refused(saguaro("import", *files), "here: already exists")
    code, _, _ = saguaro("import", *files, "--overwrite", "--draws", "0")
    assert code == 0
    assert_refused(saguaro("import", "other", *files[1:]), "FORMAT: must be one of vllm, sglang, ssd, logprobs")


def test_profile_of_another_machine_is_refused(
    saguaro: Saguaro, experiment: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(experiment)
    measure_profile(config, FakeBench(config), Stages(Console(quiet=True))).write(tmp_path / "measured")
    fake_machine["identity"] = {"pair": "fake", "device": "another", "concurrency": "processes", "threads": {}}
    result = saguaro("run", experiment, "--profile", "measured", "--out", "here")
    assert_refused(result, "device was 'none' and is 'another'", "threads.target was 1")
    assert not (tmp_path / "here").exists()


# ----------------------------------------------------------------------------------------- options of `run`, `profile`

CHANGES_THE_SETTINGS = {
    "--seed": ("--seed", "5"),
    "--batch-size": ("--batch-size", "2"),
    "--reduced": ("--reduced",),
    "--set": ("--set", "run.repeats=4"),
}
CHANGES_NO_SETTING = {"--out", "--overwrite", "--resume", "--profile", "--dry-run", "--quiet", "--json", "--help"}


@pytest.fixture
def tiny(experiment: Path) -> Path:
    """With a reduced section, and nothing to search."""
    config = json.loads(experiment.read_text())
    config["search"] |= {
        "speculation_lengths": [2],
        "budgets": [8],
        "fan_out_rules": ["uniform"],
        "fallbacks": ["draft"],
    }
    config["reduced"] = {"workload": {"max_new_tokens": 16}}
    experiment.write_text(json.dumps(config))
    return experiment


def options_of(command: str) -> set[str]:
    import typer.main

    from experiments.cli import app

    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {option for parameter in parameters for option in parameter.opts if option.startswith("--")}


@pytest.mark.parametrize("command", ["run", "profile"])
def test_every_option_that_is_a_setting_changes_what_is_printed_and_stored(
    saguaro: Saguaro, tiny: Path, fake_machine: dict[str, Any], tmp_path: Path, command: str
) -> None:
    assert options_of(command) <= CHANGES_THE_SETTINGS.keys() | CHANGES_NO_SETTING
    printed = {}
    for option, arguments in {"": (), **CHANGES_THE_SETTINGS}.items():
        code, out, _ = saguaro(command, tiny, *arguments, "--dry-run", "--json")
        assert code == 0
        printed[option] = json.loads(out)["config"]
    distinct = {json.dumps(config) for config in printed.values()}
    assert len(distinct) == len(printed)
    assert not (tmp_path / "out").exists()
    every = [argument for arguments in CHANGES_THE_SETTINGS.values() for argument in arguments]
    code, out, _ = saguaro(command, tiny, *every, "--out", "here", "--json")
    assert code == 0
    stored = json.loads((tmp_path / "here" / "manifest.json").read_text())["settings"]
    code, out, _ = saguaro(command, tiny, *every, "--dry-run", "--json")
    assert stored == json.loads(out)["config"]
    assert (stored["seed"], stored["workload"]["batch_size"], stored["run"]["repeats"]) == (5, 2, 4)


def test_a_dry_run_prints_a_complete_file_and_scales_earlier_times(
    saguaro: Saguaro, tiny: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    code, out, _ = saguaro("run", tiny, "--dry-run")
    assert code == 0 and out.startswith("# estimated time: more than 15 s, which the latencies take; no earlier run")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(out)
    assert load_config(resolved) == load_config(tiny)
    assert saguaro("run", tiny)[0] == 0
    manifest_file = tmp_path / "out" / "quickstart" / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    assert "load the pair" not in manifest["durations_s"]  # the fake bench loads none
    manifest["durations_s"]["load the pair"] = 2.0
    manifest_file.write_text(json.dumps(manifest))
    as_it_was, twice = (
        json.loads(saguaro("run", tiny, "--dry-run", "--json", *more)[1])["stages_s"]
        for more in ((), ("--set", "run.repeats=6"))
    )
    assert as_it_was == pytest.approx(manifest["durations_s"])
    changed = {name for name in twice if twice[name] != pytest.approx(as_it_was[name])}
    assert changed == {"execute AR, SD and SSD"}
    assert twice["execute AR, SD and SSD"] == pytest.approx(2 * as_it_was["execute AR, SD and SSD"])


def test_quiet_leaves_the_result(saguaro: Saguaro, tiny: Path, fake_machine: dict[str, Any]) -> None:
    code, out, err = saguaro("run", tiny, "--quiet")
    assert code == 0 and err == ""
    assert "was the fastest policy measured" in out and "fit the simulator" not in out


def test_the_same_seed_and_settings_have_the_same_digest(
    saguaro: Saguaro, tiny: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        code, out, _ = saguaro("run", tiny, "--seed", seed, "--out", name)
        digests.append(json.loads((tmp_path / name / "manifest.json").read_text())["digest"])
        assert code == 0 and f"digest {digests[-1][:16]} (seed {seed}" in out
    assert digests[0] == digests[1] != digests[2]


def test_the_same_simulation_has_the_same_digest(saguaro: Saguaro) -> None:
    example = QUICKSTART.parent / "from_numbers.yaml"
    policy = ("--policy", "{kind: sd, speculation_length: 3}", "--engine", "vectorized", "--seed")
    digests = [saguaro("simulate", example, *policy, seed)[2].splitlines()[-1] for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2] and digests[0].startswith("digest of the result: ")


def test_resume_of_a_finished_run_shows_it_again(
    saguaro: Saguaro, tiny: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    first = saguaro("run", tiny, "--resume", "--quiet")
    fake_machine["identity"] = None  # nothing could be run with this
    assert saguaro("run", tiny, "--resume", "--quiet") == first
    result = saguaro("run", tiny, "--resume", "--seed", "3")
    assert_refused(result, "finished run of another experiment; seed was 0 and is 3")


def test_an_interrupted_run_says_what_is_kept_and_goes_on(
    saguaro: Saguaro, tiny: Path, fake_machine: dict[str, Any], tmp_path: Path
) -> None:
    def interrupt(policy: Policy, trace: Trace) -> Trace:
        if policy.name == "SD K=2":
            raise KeyboardInterrupt
        return trace

    fake_machine["alter"] = interrupt
    code, _, err = saguaro("run", tiny)
    assert code == 130 and err == "interrupted; what was finished is kept; --resume goes on with it\n"
    assert not (tmp_path / "out" / "quickstart").exists()
    del fake_machine["alter"]
    assert_refused(
        saguaro("run", tiny), "was begun and not finished; --resume goes on with it, --overwrite begins anew"
    )
    code, out, _ = saguaro("run", tiny, "--resume")
    assert code == 0 and "of it before" in out and "was the fastest policy measured" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["quickstart"]


def test_schema_describes_the_files_that_come_along(saguaro: Saguaro) -> None:
    code, out, _ = saguaro("schema")
    found = json.loads(out)
    assert code == 0 and found["additionalProperties"] is False
    assert {"schema", "pair", "workload", "search", "reduced"} <= found["properties"].keys()
    for kind in ("numbers", "policy"):
        assert json.loads(saguaro("schema", kind)[1])["$schema"].startswith("https://json-schema.org")
    assert_refused(saguaro("schema", "other"), "KIND: must be one of experiment, numbers, policy")


def test_doctor_names_what_is_missing_and_the_command_that_installs_it(
    saguaro: Saguaro, monkeypatch: pytest.MonkeyPatch
) -> None:
    import experiments.doctor
    from experiments.doctor import examine, is_ready

    code, out, _ = saguaro("doctor")
    findings = {finding.name: finding for finding in examine()}
    assert code == (0 if is_ready(list(findings.values())) else 1)
    assert {"python", "saguaro-planner", "numpy", "torch", "cores", "threads"} <= findings.keys() and "cores" in out

    def no_torch(name: str) -> str:
        if name == "torch":
            raise experiments.doctor.PackageNotFoundError(name)
        return "0.0.1" if name == "numpy" else findings[name].found

    monkeypatch.setattr(experiments.doctor, "version", no_torch)
    code, out, _ = saguaro("doctor", "--json")
    told = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 1 and not json.loads(out)["ready"]
    assert told["torch"]["remedy"] == "pip install 'saguaro-planner[executor]'"
    assert told["numpy"]["remedy"] == "pip install 'numpy>=2.0'"


# --------------------------------------------------------------------------------------------------------------- light


def test_help_and_version(saguaro: Saguaro) -> None:
    for arguments in (["--help"], []):
        code, out, _ = saguaro(*arguments)
        assert code == 0
        for command in ("profile", "fit", "simulate", "search", "run"):
            assert command in out
    code, out, _ = saguaro("--version")
    assert code == 0 and out.strip()


def test_help_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "pyarrow", "scipy", "matplotlib", "pydantic"]
    script = (
        "import sys; sys.argv = ['saguaro', '--help']\n"
        "from experiments.cli import Engine, main\n"
        "try: main()\n"
        f"finally: print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
