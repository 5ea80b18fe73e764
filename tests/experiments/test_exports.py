"""A policy as the settings of other engines: what arrives there, and what is said not to."""

from __future__ import annotations

import argparse
import json
import shlex

import pytest

from experiments.exports import Engine, export
from sim.errors import BadInput
from sim.hill_climbing import HillClimbing
from sim.policy import Autoregressive, Fallback, LateBuild, PolicyTable, Speculative, SpeculativeSpeculative

SSD = SpeculativeSpeculative(2, (3, 2, 4), (4, 3, 2), Fallback.DRAFT)


def bench_options(command: str) -> argparse.Namespace:
    """As the public engine's benchmark reads them."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-O", "bench/bench.py"]
    parser = argparse.ArgumentParser()
    for flag in ("--spec", "--async"):
        parser.add_argument(flag, action="store_true")
    for number in ("--k", "--b"):
        parser.add_argument(number, type=int)
    for number in ("--temp", "--x"):
        parser.add_argument(number, type=float)
    for numbers in ("--flh", "--flm"):
        parser.add_argument(numbers, type=int, nargs="+")
    parser.add_argument("--backup", choices=["jit", "fast"])
    return parser.parse_args(words[3:])


def test_the_ssd_engine_takes_lengths_lists_and_backup():
    exported = export(SSD, Engine.SSD, temperature=0.0, batch_size=4)
    assert exported.settings == {
        "max_num_seqs": 4,
        "speculate": True,
        "speculate_k": 2,
        "draft_async": True,
        "async_fan_out": 4,
        "fan_out_list": [3, 2, 4],
        "fan_out_list_miss": [4, 3, 2],
        "jit_speculate": True,
    }
    options = bench_options(exported.command)
    assert (options.k, options.b, options.flh, options.flm) == (2, 4, [3, 2, 4], [4, 3, 2])
    assert options.spec and vars(options)["async"] and options.backup == "jit" and options.x is None
    assert exported.not_expressed == ()


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        (SpeculativeSpeculative(1, (2, 2), (2, 2), "ngram"), ["fallback ngram"]),
        (SpeculativeSpeculative(1, (2, 2), (4,), "none"), ["fallback none", "fan-out after a miss [4]"]),
        (SpeculativeSpeculative(1, (2, 2), (2, 3)), ["fan-out after a miss [2, 3]"]),
        (SpeculativeSpeculative(1, (2, 2), (2, 2), "draft_missing"), ["draft_missing"]),
        (SpeculativeSpeculative(1, (2, 2), (2, 2), downweight=0.5), ["downweight 0.5"]),
        (SpeculativeSpeculative(1, (2, 2), (2, 2), on_late_build=LateBuild.ABANDON), ["on_late_build abandon"]),
        (SpeculativeSpeculative(1, (2, 2), (2, 2), "filler"), []),
    ],
)
def test_what_the_ssd_engine_lacks_is_said(policy, parts):
    exported = export(policy, Engine.SSD, temperature=1.0)
    assert len(exported.not_expressed) == len(parts)
    for part, line in zip(parts, exported.not_expressed, strict=True):
        assert part in line
    options = bench_options(exported.command)
    assert sum(options.flh) == sum(options.flm) and len(options.flh) == len(options.flm)
    assert options.x == (policy.downweight if policy.downweight != 1 else None)
    assert options.backup == ("jit" if policy.fallback in ("draft", "draft_missing") else "fast")


def speculative_config(command: str) -> dict:
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "TARGET_MODEL"]
    return json.loads(words[words.index("--speculative-config") + 1])


def test_vllm_takes_a_length_and_a_schedule():
    exported = export(Speculative(4), Engine.VLLM, temperature=0.0)
    assert speculative_config(exported.command) == exported.settings["speculative_config"]
    assert exported.settings["speculative_config"] == {
        "method": "draft_model", "model": "DRAFT_MODEL", "num_speculative_tokens": 4
    }  # fmt: skip
    table = PolicyTable(((1, Speculative(4)), (8, Speculative(2)), (32, Autoregressive())))
    config = speculative_config(export(table, Engine.VLLM, temperature=1.0).command)
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert config["num_speculative_tokens"] == 4 and config["draft_sample_method"] == "probabilistic"
    assert [K for low, high, K in ranges for _ in range(low, high + 1)] == [
        table.at(size).speculation_length for size in range(1, ranges[-1][1] + 1)
    ]


def server_arguments(command: str) -> dict[str, str]:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    return dict(zip(words[3::2], words[4::2], strict=True))


def test_sglang_takes_a_chain():
    arguments = server_arguments(export(Speculative(4), Engine.SGLANG, temperature=0.0).command)
    assert arguments == {
        "--model-path": "TARGET_MODEL",
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "DRAFT_MODEL",
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }
    table = PolicyTable(((1, Speculative(4)), (8, Autoregressive())))
    exported = export(table, Engine.SGLANG, temperature=0.0, batch_size=8)
    assert server_arguments(exported.command) == {"--model-path": "TARGET_MODEL"}
    assert "the table by batch size" in exported.not_expressed[0]


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_engines_that_take_turns_are_said_to_lack_the_rest(engine):
    said = "\n".join(export(SSD, engine, temperature=0.0).not_expressed)
    for part in ("SD K=2", "[3, 2, 4] after a hit, [4, 3, 2] after a miss", "fallback draft", "devices of its own"):
        assert part in said


@pytest.mark.parametrize("engine", list(Engine))
def test_ar_needs_no_settings_of_speculation(engine):
    exported = export(Autoregressive(), engine, temperature=0.0)
    assert "spec" not in exported.command.replace("bench.py", "") and exported.not_expressed == ()
    assert json.loads(json.dumps(exported.to_dict()))["name"] == "AR"


def test_adaptive_choices_have_no_settings():
    with pytest.raises(BadInput, match="policy: must be one policy or a table by batch size"):
        export(HillClimbing((1, 2), (4,)), Engine.VLLM, temperature=0.0)
