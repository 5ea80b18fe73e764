"""The pipeline on real models, as small as it gets: no figure is judged, but every text, record and file is."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from calibration.profile import Profile
from experiments.bench import open_bench
from experiments.config import QUICKSTART, ExperimentConfig, load_config
from experiments.run import run_experiment
from experiments.stages import Stages
from sim.errors import BadInput
from sim.trace import Operation, Trace

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    data = load_config(QUICKSTART, reduced=True)
    sizes = {"max_new_tokens": 12, "prompt_tokens": 24, "calibration_prompts": 5, "test_prompts": 2}
    profile = {"latency_budget_s": 0.1, "max_speculation_length": 3, "branch_counts": (1, 8), "contexts": (24, 48)}
    search = {"speculation_lengths": (2, 3), "budgets": (4, 8)}
    return data.model_copy(
        update={
            "concurrency": "serial",
            "workload": data.workload.model_copy(update=sizes),
            "profile": data.profile.model_copy(update=profile),
            "search": data.search.model_copy(update=search),
        }
    )


def test_whole_pipeline_on_real_models(config: ExperimentConfig, tmp_path: Path) -> None:
    stages = Stages(Console(quiet=True))
    with open_bench(config, stages) as bench:
        summary = run_experiment(config, bench, tmp_path, stages)
        test = bench.workload("test", config.workload.test_prompts)
        record = bench.measure_agreement(test, lambda done, total: None)
    lossless = summary["lossless"]
    assert lossless["identical"] + lossless["near_tie_flips"] == lossless["prompts"] == 2
    profile = Profile.read(tmp_path / "profile")
    assert {sample.operation for sample in profile.latency} >= {
        Operation.VERIFY,
        Operation.DRAFT_STEP,
        Operation.GLUE,
        Operation.TREE_STEP,
    }
    assert json.loads((tmp_path / "manifest.json").read_text())["identity"]["concurrency"] == "serial"
    assert "nothing overlapped" in (tmp_path / "report.md").read_text()
    num_compared = 0
    for kind in ("sd", "ssd"):  # what was executed is what the record says must happen
        trace = Trace.read(tmp_path / "traces" / "measured" / kind / "0")
        for sequence in trace.sequences:
            rows = record.prompt == sequence.index
            if tuple(record.token[rows]) != sequence.tokens:
                continue  # a near-tie flip in the batched run that made the record
            accepted = np.flatnonzero(record.rank[rows] == 0)
            position = 1
            for r in (r for r in trace.rounds if r.sequence == sequence.index):
                assert set(range(position, position + r.num_accepted)) <= set(accepted)
                assert not r.was_rejected or position + r.num_accepted not in accepted
                position += r.num_emitted
                num_compared += 1
    assert num_compared > 0


def test_pair_without_enough_prompts_is_refused(config: ExperimentConfig) -> None:
    stages = Stages(Console(quiet=True))
    with open_bench(config, stages) as bench, pytest.raises(BadInput, match=r"prompts\.jsonl: must hold 100000 test"):
        bench.workload("test", 100_000)
