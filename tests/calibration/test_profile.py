"""A profile survives storage, impossible values are named by file, row and column, and strangers are refused."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibration.profile import (
    Profile,
    check_identity,
    check_workload,
    flattened,
    profile_manifest,
    prompt_hashes,
    read_samples,
)
from sim.errors import BadInput
from sim.latency import LatencySample
from sim.policy import Speculative
from sim.simulate import simulate
from sim.trace import Lane, Operation
from sim.workload import Workload
from tests.sim.toy import markov, record_of, system_of, workload_of

IDENTITY = {
    "pair": "toy",
    "sha256": {"target": "t", "draft": "d", "tokenizer": "k"},
    "cpu_model": "EPYC",
    "num_cores": 2,
    "dtype": "float32",
    "attention": "sdpa",
    "concurrency": "processes",
    "overlap": "two processes",
    "device": "cpu",
    "threads": {"target": 1, "draft": 1},
    "pinned_cores": {"target": 0, "draft": 1},
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "numpy": "2.4.6",
}
SAMPLE = LatencySample(Lane.TARGET, Operation.VERIFY, 4, 128, False, 0, 0.01)
WORKLOAD = Workload("toy", ((1, 2), (3, 4)), max_new_tokens=8, temperature=1.0, stop_ids=(0,))


@pytest.fixture
def profile() -> Profile:
    record = record_of(*markov(0), num_prompts=2, length=8, seed=0)
    trace = simulate(Speculative(2), workload_of(record), system_of(record))
    samples = (SAMPLE, replace(SAMPLE, lane=Lane.DRAFT, operation=Operation.GLUE, busy=True, block=3, duration_s=0.002))
    manifest = profile_manifest(IDENTITY, WORKLOAD, {"name": "toy"}, {"latency": 1.5}, samples, num_traces=1)
    return Profile(record, samples, (trace,), manifest)


def change_column(path: Path, column: str, values: list) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), path)


def test_profile_survives_storage(profile: Profile, tmp_path: Path) -> None:
    profile.write(tmp_path)
    again = Profile.read(tmp_path)
    assert again.latency == profile.latency
    assert again.manifest == profile.manifest
    assert again.identity == IDENTITY
    assert [trace.digest() for trace in again.traces] == [trace.digest() for trace in profile.traces]
    assert again.traces[0].spans == profile.traces[0].spans
    np.testing.assert_array_equal(again.agreement.token, profile.agreement.token)


def test_manifest_counts_what_was_timed(profile: Profile) -> None:
    assert profile.manifest["latency"] == {"num_samples": 2, "num_cells": 2, "num_blocks": 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_impossible_durations_are_named_by_file_column_and_row(profile: Profile, tmp_path: Path, value: float) -> None:
    with pytest.raises(BadInput, match="latency samples: duration_s, row 1"):
        replace(profile, latency=(SAMPLE, replace(SAMPLE, duration_s=value)))
    profile.write(tmp_path)
    change_column(tmp_path / "latency.parquet", "duration_s", [0.01, value])
    with pytest.raises(BadInput, match=r"latency\.parquet: duration_s, row 1: must be a finite number > 0, got"):
        Profile.read(tmp_path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("duration_s", [0.01, None], "duration_s, row 1: must not be empty"),
        ("operation", ["verify", "think"], "operation, row 1: must be one of prefill, verify"),
        ("lane", ["gpu", "draft"], "lane, row 0: must be one of target, draft, got 'gpu'"),
        ("context", [-5, 1], "context, row 0: must be >= 0, got -5"),
    ],
)
def test_other_impossible_values_are_named_too(
    profile: Profile, tmp_path: Path, column: str, values: list, message: str
) -> None:
    profile.write(tmp_path)
    change_column(tmp_path / "latency.parquet", column, values)
    with pytest.raises(BadInput, match=message):
        Profile.read(tmp_path)


def test_missing_column_and_files_are_named(profile: Profile, tmp_path: Path) -> None:
    profile.write(tmp_path)
    path = tmp_path / "latency.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["block"]), path)
    with pytest.raises(BadInput, match=r"latency\.parquet: block: this column is missing"):
        Profile.read(tmp_path)
    path.write_text("not parquet")
    with pytest.raises(BadInput, match=r"latency\.parquet: is not a parquet file"):
        Profile.read(tmp_path)
    path.unlink()
    with pytest.raises(BadInput, match=r"latency\.parquet: no such file"):
        read_samples(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "manifest.json: schema: must be 1, got 2"),
        ({"record": "validation"}, "manifest.json: record: must be 'calibration', got 'validation'"),
        ({"identity": None}, "manifest.json: identity: this key is missing"),
    ],
)
def test_manifest_of_another_kind_is_refused(profile: Profile, tmp_path: Path, change: dict, message: str) -> None:
    profile.write(tmp_path)
    changed = {key: value for key, value in (profile.manifest | change).items() if value is not None}
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(BadInput, match=message):
        Profile.read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_broken_manifest_is_refused(profile: Profile, tmp_path: Path, text: str) -> None:
    profile.write(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match=r"manifest\.json"):
        Profile.read(tmp_path)


# ------------------------------------------------------------------------------------------------- what may be compared


def test_same_identity_passes_through_storage() -> None:
    check_identity(json.loads(json.dumps(IDENTITY | {"cores": [0, 1]})), IDENTITY | {"cores": (0, 1)})


@pytest.mark.parametrize("name", flattened(IDENTITY))
def test_every_differing_field_is_named(name: str) -> None:
    """Device, model revisions, precision, threads, versions: each by itself, and none beside it."""
    was = flattened(IDENTITY)[name]
    *groups, leaf = name.split(".")
    other = copy.deepcopy(IDENTITY)
    place = other
    for group in groups:
        place = place[group]
    place[leaf] = "other"
    with pytest.raises(BadInput) as refusal:
        check_identity(IDENTITY, other)
    assert str(refusal.value).endswith(f"versions; {name} was {was!r} and is 'other'")


@pytest.mark.parametrize("name", IDENTITY)
def test_a_field_that_only_one_of_them_has_is_named(name: str) -> None:
    without = {key: value for key, value in IDENTITY.items() if key != name}
    for profile, run in ((IDENTITY, without), (without, IDENTITY)):
        with pytest.raises(BadInput, match=rf"{name}.* (was|is) None"):
            check_identity(profile, run)


def test_all_differences_are_in_one_message() -> None:
    with pytest.raises(BadInput, match="device was 'cpu' and is 'cuda', pair was 'toy' and is 'other'"):
        check_identity(IDENTITY, IDENTITY | {"pair": "other", "device": "cuda"})


def test_record_is_not_validated_on_its_own_prompts(profile: Profile) -> None:
    check_workload(profile.manifest, replace(WORKLOAD, prompts=((5, 6), (7, 8))))
    with pytest.raises(BadInput, match="own calibration prompts, got '1 of 2 prompts in both'"):
        check_workload(profile.manifest, replace(WORKLOAD, prompts=((5, 6), (3, 4))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"workload\.temperature: must be 1\.0 as in the profile, got 0\.0"),
        ({"max_new_tokens": 9}, r"workload\.max_new_tokens: must be 8"),
        ({"stop_ids": ()}, r"workload\.stop_ids: must be \[0\]"),
        ({"dataset": "news"}, r"workload\.dataset: must be 'toy'"),
        ({"batch_size": 2}, r"workload\.batch_size: must be 1 as in the profile, got 2"),
    ],
)
def test_rules_of_the_workload_must_be_those_of_the_profile(profile: Profile, change: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_workload(profile.manifest, replace(WORKLOAD, prompts=((5, 6),), **change))


def test_a_profile_that_knows_no_batches_is_of_one_prompt_at_a_time(profile: Profile) -> None:
    earlier = {name: value for name, value in profile.manifest["workload"].items() if name != "batch_size"}
    test = replace(WORKLOAD, prompts=((5, 6),))
    check_workload({"workload": earlier}, test)
    with pytest.raises(BadInput, match=r"workload\.batch_size: must be 1 as in the profile, got 2"):
        check_workload({"workload": earlier}, replace(test, batch_size=2))


def test_prompts_differ_in_their_hashes() -> None:
    hashes = prompt_hashes(replace(WORKLOAD, prompts=((1, 2), (12,), (1, 2), (2, 1))))
    assert hashes[0] == hashes[2]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_traces", "8", "num_traces: must be an integer, got '8'"),
        ("identity", {}, "identity: must be a mapping that holds concurrency"),
        ("identity", [], "identity: must be a mapping that holds concurrency"),
    ],
)
def test_a_manifest_of_wrong_types_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    manifest = {"schema": 1, "record": "calibration", "identity": {"concurrency": "serial"}, "workload": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"num_traces": 0} | {key: value}))
    with pytest.raises(BadInput, match=message):
        Profile.read(tmp_path)
