"""Every way of writing the experiment file wrongly gives one message with file, line, key and rule."""

import json
from pathlib import Path

import pytest

from experiments.config import QUICKSTART, load_config
from sim.errors import BadInput
from sim.workload import Sampling

TEXT = QUICKSTART.read_text()


def changed(tmp_path: Path, old: str, new: str) -> Path:
    assert old in TEXT
    path = tmp_path / "experiment.yaml"
    path.write_text(TEXT.replace(old, new, 1))
    return path


def line_of(old: str) -> int:
    return TEXT[: TEXT.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("temperature: 0.0", "temprature: 0.0", "workload.temprature: unknown key; did you mean workload.temperature?"),
        ("repeats: 3", "repeets: 3", "run.repeets: unknown key; did you mean run.repeats?"),
        (
            "repeats: 3",
            "repeats: 3\nvalidation: {fresh_prompt: 4}",
            "validation.fresh_prompt: unknown key; did you mean",
        ),
        (
            "repeats: 3",
            "repeats: 3\nvalidation: {configurations: [{budgts: [4]}]}",
            "validation.configurations.0.budgts: unknown key; did you mean validation.configurations.budgets?",
        ),
        ("repeats: 3", "fresh_prompts: 4", "run.fresh_prompts: unknown key; did you mean validation.fresh_prompts?"),
        ("seed: 0", "max_new_tokens: 8", "max_new_tokens: unknown key; did you mean workload.max_new_tokens?"),
        ("repeats: 3", "zzz: 3", "run.zzz: unknown key; known here: repeats, on_draft_failure"),
        ("temperature: 0.0", "temperature: hot", "workload.temperature: must be a valid number, got 'hot'"),
        ("temperature: 0.0", "temperature: .nan", "workload.temperature: must be a valid number, got '.nan'"),
        ("temperature: 0.0", "temperature: -1", "workload.temperature: must be greater than or equal to 0, got -1"),
        ("seed: 0", "seed: 010", "seed: must be a valid integer, got '010'"),
        ("seed: 0", "seed: 12:30", "seed: must be a valid integer, got '12:30'"),
        ("seed: 0", "seed: 1e3", "seed: must be a valid integer, got 1000.0"),
        ("seed: 0", "seed: no", "seed: must be a valid integer, got 'no'"),
        ("seed: 0", "seed: null", "seed: must be a valid integer"),
        ("stop_at_end_of_text: true", "stop_at_end_of_text: yes", "must be a valid boolean, got 'yes'"),
        ("repeats: 3", "repeats: 2", "run.repeats: must be greater than or equal to 3, got 2"),
        (
            "fallbacks: [draft, none]",
            "fallbacks: [draft, beam]",
            "search.fallbacks.1: must be 'draft', 'draft_missing', 'n",
        ),
        ("fallbacks: [draft, none]", "fallbacks: draft", "search.fallbacks: must be a valid array, got 'draft'"),
        ("fallbacks: [draft, none]", "fallbacks: []", "search.fallbacks: must have at least 1 item"),
        ("concurrency: auto", "concurrency: threads", "concurrency: must be 'auto', 'processes', 'streams"),
        ("seed: 0", "seed: 0\ndevice: gpu", "device: must be cpu, cuda or cuda:i, got 'gpu'"),
        ("seed: 0", "seed: 0\ndtype: int8", "dtype: must be 'float32', 'float64'"),
        ("schema: 1", "schema: 2", "schema: must be 1, got 2"),
        ("name: quickstart", "name: ../elsewhere", "name: must be letters, digits"),
        ("budgets: [4, 8", "budgets: [4, 64", "search.budgets: must not exceed the largest of profile.branch_counts"),
        (
            "max_speculation_length: 8",
            "max_speculation_length: 4",
            "must not exceed profile.max_speculation_length = 4",
        ),
        ("contexts: [64, 96, 128]", "contexts: [64, 96]", "profile.contexts: must span 64..128"),
        (
            "trace_prompts: 16",
            "trace_prompts: 400",
            "profile.trace_prompts: must not exceed workload.calibration_prompts",
        ),
        ("{max_new_tokens: 32", "{max_new_token: 32", "reduced.workload.max_new_token: unknown key; did you mean"),
        ("{max_new_tokens: 32", "{max_new_tokens: 0", "reduced.workload.max_new_tokens: must be greater than"),
        ("{max_new_tokens: 32", "{max_new_tokens: 320", "reduced.profile.contexts: must span 64..384"),
    ],
)
def test_message_names_file_line_key_and_rule(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = changed(tmp_path, old, new)
    with pytest.raises(BadInput) as caught:
        load_config(path)
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"{path}, line ")
    assert "\n" not in text


def test_line_is_that_of_the_key(tmp_path: Path) -> None:
    old = "stop_at_end_of_text: true"
    with pytest.raises(BadInput, match=f"line {line_of(old)}: "):
        load_config(changed(tmp_path, old, "stop_at_end_of_text: 1"))


def test_missing_key_and_missing_section_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"experiment\.yaml: schema: this key is missing"):
        load_config(changed(tmp_path, "schema: 1\n", ""))
    with pytest.raises(BadInput, match=r", line \d+: workload\.prompt_tokens: this key is missing"):
        load_config(changed(tmp_path, "  prompt_tokens: 64\n", ""))


def test_exponent_without_a_point_is_a_number(tmp_path: Path) -> None:
    config = load_config(changed(tmp_path, "temperature: 0.0", "temperature: 1e-3"))
    assert config.workload.temperature == 0.001


def test_reduced_section_applies_only_when_asked_for() -> None:
    full, small = load_config(QUICKSTART), load_config(QUICKSTART, reduced=True)
    assert small.workload.max_new_tokens < full.workload.max_new_tokens
    assert small.workload.temperature == full.workload.temperature
    assert small.search == full.search


def test_seed_of_the_command_line_wins_even_if_it_equals_a_default(tmp_path: Path) -> None:
    path = changed(tmp_path, "seed: 0", "seed: 7")
    assert load_config(path).seed == 7
    assert load_config(path, seed=0).seed == 0
    with pytest.raises(BadInput, match="--seed: must be greater than or equal to 0, got -1"):
        load_config(path, seed=-1)


def test_resolved_settings_are_a_complete_experiment_file(tmp_path: Path) -> None:
    config = load_config(QUICKSTART)
    path = tmp_path / "resolved.yaml"
    path.write_text(json.dumps(config.to_dict()))  # JSON is YAML
    assert load_config(path) == config


TEXTS = {path: path.read_text() for path in sorted(QUICKSTART.parent.glob("*.yaml"))}
CONFIGS = [path for path, text in TEXTS.items() if "\npair:" in text and "\nsweep:" not in text]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_that_comes_along_is_valid(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert load_config(path, reduced=True).workload.test_prompts < config.workload.test_prompts


def test_settings_of_the_next_token_are_those_of_every_prompt(tmp_path: Path) -> None:
    settings = "temperature: 0.7\n  top_k: 40\n  top_p: 0.9\n  min_p: 1e-2\n  repetition_penalty: 1.1"
    workload = load_config(changed(tmp_path, "temperature: 0.0", settings)).workload
    assert workload.sampling == Sampling(0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1)


def test_batches_come_whole(tmp_path: Path) -> None:
    path = changed(tmp_path, "  prompt_tokens: 64\n", "  prompt_tokens: 64\n  batch_size: 2\n")
    assert load_config(path).workload.batch_size == load_config(path, reduced=True).workload.batch_size == 2
    assert load_config(path, batch_size=4, reduced=True).workload.batch_size == 4
    assert load_config(QUICKSTART).workload.batch_size == 1
    with pytest.raises(BadInput, match=r"--batch-size: must divide workload.calibration_prompts, 8 of them, .* got 3"):
        load_config(path, batch_size=3, reduced=True)
    with pytest.raises(BadInput, match=r"line \d+: workload.batch_size: must divide .*, 200 of them, .*, 80, got 3"):
        load_config(changed(tmp_path, "  prompt_tokens: 64\n", "  prompt_tokens: 64\n  batch_size: 3\n"))
    short = changed(tmp_path, "contexts: [64, 96, 128]", "contexts: [1, 96, 128]")
    assert load_config(short).profile.contexts[0] == 1
    with pytest.raises(BadInput, match=r"line \d+: profile.contexts: must be >= 2 for batches, whose rows differ"):
        load_config(short, batch_size=2)


def test_what_becomes_of_a_run_without_its_draft_is_a_setting(tmp_path: Path) -> None:
    assert load_config(QUICKSTART).run.on_draft_failure == "raise"
    path = changed(tmp_path, "  repeats: 3\n", "  repeats: 3\n  on_draft_failure: continue\n")
    assert load_config(path).run.on_draft_failure == "continue"
    with pytest.raises(BadInput, match=r"run\.on_draft_failure: "):
        load_config(changed(tmp_path, "  repeats: 3\n", "  repeats: 3\n  on_draft_failure: ignore\n"))


# ---------------------------------------------------------------------------------------------- settings of the command


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("workload.temprature=1", "--set workload.temprature: unknown key; did you mean workload.temperature?"),
        ("max_new_tokens=3", "--set max_new_tokens: unknown key; did you mean workload.max_new_tokens?"),
        ("wrkload.temperature=1", "--set wrkload.temperature: wrkload: unknown key; did you mean workload?"),
        ("seed=no", "--set seed: must be a valid integer, got 'no'"),
        ("seed=010", "--set seed: must be a valid integer, got '010'"),
        ("seed=12:30", "--set seed: must be a valid integer, got '12:30'"),
        ("seed=", "--set seed: must be a valid integer"),
        ("seed", "--set: must be like section.key=value, got 'seed'"),
        ("=3", "--set: must be like section.key=value, got '=3'"),
        ("run..repeats=3", "--set: must be like section.key=value"),
        ("run={repeats: 3, repeats: 4}", "--set run, line 1: repeats: duplicate key"),
        ("seed=[1", "--set seed, line 1: is not one valid YAML document"),
        ("search.budgets.0=4", "--set search.budgets.0: search.budgets is a list; set all of it"),
        ("seed.x=4", "--set seed.x: seed is no section"),
        (
            "search.budgets=[64]",
            "--set search.budgets: must not exceed the largest of profile.branch_counts = 32, got 64",
        ),
        ("run={repeats: 1}", "--set run: run.repeats: must be greater than or equal to 3, got 1"),
        ("reduced.seed=1", "--set: must name a setting itself; --reduced uses those of that section"),
    ],
)
def test_settings_of_the_command_line_are_as_strict_as_the_file(setting: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(QUICKSTART, settings=[setting])
    assert str(caught.value).startswith(message)


def test_settings_replace_values_of_the_file_and_of_its_reduced_section() -> None:
    settings = ["workload.temperature=1e-3", "search.budgets=[4, 8]", "workload.max_new_tokens=16", "run={repeats: 4}"]
    for reduced in (False, True):
        config = load_config(QUICKSTART, reduced=reduced, settings=settings)
        assert (config.workload.temperature, config.search.budgets) == (0.001, (4, 8))
        assert (config.workload.max_new_tokens, config.run.repeats) == (16, 4)
    plain, set_to_default = load_config(QUICKSTART), load_config(QUICKSTART, settings=["seed=0"])
    assert plain == set_to_default
    assert load_config(QUICKSTART, settings=["draft_device=cpu"]).draft_device == "cpu"


def test_a_setting_is_given_once() -> None:
    with pytest.raises(BadInput, match="--set seed: must be given once; --seed gave it already"):
        load_config(QUICKSTART, seed=1, settings=["seed=2"])
    with pytest.raises(BadInput, match="--set seed: must be given once"):
        load_config(QUICKSTART, settings=["seed=2", "seed=2"])
