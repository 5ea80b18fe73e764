"""A policy as the settings of engines that others run, and what they cannot be told."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sim.errors import BadInput
from sim.policy import (
    Fallback,
    LateBuild,
    Policy,
    PolicyTable,
    Speculative,
    SpeculativeSpeculative,
)
from sim.trace import Source

TARGET, DRAFT = "TARGET_MODEL", "DRAFT_MODEL"  # stand for the models, whose names a plan does not know
_ON_ITS_OWN = "a draft on devices of its own: {engine} runs it on those of the target, so times differ from the plan"
LARGEST_BATCH = 1024  # where a schedule ends that holds for every larger batch


class Engine(StrEnum):
    """Engines whose settings are known: the public SSD engine (tanishqkumar/ssd), vLLM and SGLang, as of 2026."""

    SSD = "ssd"
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True)
class Export:
    """`settings` as the engine's own names have them, the command that gives them, and, in words, what of the policy
    the engine cannot be told and so does otherwise."""

    engine: Engine
    policy: Policy | PolicyTable
    settings: dict[str, Any]
    command: str
    not_expressed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine.value,
            "policy": self.policy.to_dict(),
            "name": self.policy.name,
            "settings": self.settings,
            "command": self.command,
            "not_expressed": list(self.not_expressed),
        }


def export(policy: object, engine: Engine, *, temperature: float, batch_size: int = 1) -> Export:
    """The settings of a policy, or of a table of policies by batch size, for an engine. Raises `BadInput` for adaptive
    choices, which have no fixed settings."""
    if not isinstance(policy, Policy | PolicyTable):
        rule = "must be one policy or a table by batch size; an adaptive choice has no fixed settings"
        raise BadInput("policy", rule, getattr(policy, "name", policy))
    of_engine: dict[Engine, Callable[[Policy | PolicyTable, float, int], Export]] = {
        Engine.SSD: _for_ssd,
        Engine.VLLM: _for_vllm,
        Engine.SGLANG: _for_sglang,
    }
    return of_engine[Engine(engine)](policy, temperature, batch_size)


# ----------------------------------------------------------------------------------------------- the public SSD engine


def _for_ssd(policy: Policy | PolicyTable, temperature: float, batch_size: int) -> Export:
    """Keyword arguments of its `LLM`, and the options of its benchmark."""
    chosen, missing = _one_of(policy, batch_size)
    settings: dict[str, Any] = {"max_num_seqs": batch_size, "speculate": chosen.speculation_length > 0}
    options = ["--b", str(batch_size), "--temp", f"{temperature:g}"]
    if chosen.speculation_length:
        settings |= {"speculate_k": chosen.speculation_length, "draft_async": False}
        options += ["--spec", "--k", str(chosen.speculation_length)]
    if isinstance(chosen, SpeculativeSpeculative):
        of_build, build_options, of_build_missing = _ssd_build(chosen)
        settings |= of_build
        options += build_options
        missing += of_build_missing
    command = shlex.join(["python", "-O", "bench/bench.py", *options])
    return Export(Engine.SSD, policy, settings, command, tuple(missing))


def _ssd_build(policy: SpeculativeSpeculative) -> tuple[dict[str, Any], list[str], list[str]]:
    hit, miss = list(policy.fan_out_after_hit), list(policy.fan_out_after_miss)
    missing = _unknown_to_ssd(policy)
    if sum(hit) != sum(miss) or len(hit) != len(miss):
        missing.append(f"fan-out after a miss {miss}: its list must have the entries and the sum of that after a hit")
        miss = hit
    waits = policy.waits_for_draft(Source.MISS)
    settings = {
        "draft_async": True,
        "async_fan_out": max(hit),
        "fan_out_list": hit,
        "fan_out_list_miss": miss,
        "jit_speculate": waits,
    }
    options = ["--async", "--backup", "jit" if waits else "fast"]
    options += ["--flh", *map(str, hit), "--flm", *map(str, miss)]
    if policy.downweight != 1:
        settings["sampler_x"] = policy.downweight
        options += ["--x", f"{policy.downweight:g}"]
    return settings, options, missing


def _unknown_to_ssd(policy: SpeculativeSpeculative) -> list[str]:
    missing = []
    if policy.fallback is Fallback.DRAFT_MISSING:
        missing.append("fallback draft_missing: on a miss the engine drafts for all rows of the batch (backup jit)")
    if policy.fallback in (Fallback.NGRAM, Fallback.NONE):
        missing.append(
            f"fallback {policy.fallback.value}: the engine's only backup that does not wait (fast) verifies K made-up"
            " tokens"
        )
    if policy.downweight != 1:
        missing.append(
            f"downweight {policy.downweight:g} of the top F + 1 tokens: the engine's sampler_x takes the top F"
        )
    if policy.on_late_build is LateBuild.ABANDON:
        missing.append("on_late_build abandon: the engine finishes every build")
    return missing


# ------------------------------------------------------------------------------------------------------------- vLLM


def _for_vllm(policy: Policy | PolicyTable, temperature: float, batch_size: int) -> Export:
    """`--speculative-config`. A table becomes a schedule of inclusive ranges, 0 draft tokens where it says AR."""
    entries = policy.entries if isinstance(policy, PolicyTable) else ((1, policy),)
    missing = [line for _, entry in entries for line in _beyond_sd(entry, "vLLM")]
    longest = max(entry.speculation_length for _, entry in entries)
    if longest == 0:
        command = shlex.join(["vllm", "serve", TARGET])
        return Export(Engine.VLLM, policy, {}, command, tuple(missing))
    config: dict[str, Any] = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": longest}
    if temperature > 0:
        config["draft_sample_method"] = "probabilistic"
    if len(entries) > 1:
        ends = [start - 1 for start, _ in entries[1:]] + [max(LARGEST_BATCH, entries[-1][0])]
        config["num_speculative_tokens_per_batch_size"] = [
            [start, end, entry.speculation_length] for (start, entry), end in zip(entries, ends, strict=True)
        ]
        missing.append("lengths by batch size of a draft model: vLLM tested its schedule with EAGLE and DFlash drafts")
    missing.append(_ON_ITS_OWN.format(engine="vLLM"))
    command = shlex.join(["vllm", "serve", TARGET, "--speculative-config", json.dumps(config)])
    return Export(Engine.VLLM, policy, {"speculative_config": config}, command, tuple(dict.fromkeys(missing)))


# ----------------------------------------------------------------------------------------------------------- SGLang


def _for_sglang(policy: Policy | PolicyTable, temperature: float, batch_size: int) -> Export:
    """Server arguments: a chain of K draft steps, which verifies K + 1 tokens."""
    chosen, missing = _one_of(policy, batch_size)
    missing += _beyond_sd(chosen, "SGLang")
    settings: dict[str, Any] = {"--model-path": TARGET}
    if K := chosen.speculation_length:
        settings |= {
            "--speculative-algorithm": "STANDALONE",
            "--speculative-draft-model-path": DRAFT,
            "--speculative-num-steps": K,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": K + 1,
        }
        missing.append(_ON_ITS_OWN.format(engine="SGLang"))
        if temperature > 0:
            missing.append(
                f"how drafts are sampled at temperature {temperature:g}: SGLang's own rule decides acceptance"
            )
    arguments = [str(part) for pair in settings.items() for part in pair]
    command = shlex.join(["python", "-m", "sglang.launch_server", *arguments])
    return Export(Engine.SGLANG, policy, settings, command, tuple(dict.fromkeys(missing)))


# ------------------------------------------------------------------------------------------------------ what all lack


def _one_of(policy: Policy | PolicyTable, batch_size: int) -> tuple[Policy, list[str]]:
    """The policy of the batch size; an engine with one setting for all batches lacks the rest of a table."""
    if not isinstance(policy, PolicyTable):
        return policy, []
    chosen = policy.at(batch_size)
    return chosen, [f"the table by batch size: the settings are those of {batch_size} rows, {chosen.name}"]


def _beyond_sd(policy: Policy, engine: str) -> list[str]:
    """What is left of an SSD policy where drafting and verifying take turns."""
    if not isinstance(policy, SpeculativeSpeculative):
        return []
    sd = Speculative(policy.speculation_length).name
    missing = [
        f"drafting beside the verification: {engine} drafts after it, which is {sd}",
        f"fan-out lists {list(policy.fan_out_after_hit)} after a hit, {list(policy.fan_out_after_miss)} after a miss",
        f"fallback {policy.fallback.value}",
    ]
    if policy.downweight != 1:
        missing.append(f"downweight {policy.downweight:g}")
    if policy.on_late_build is LateBuild.ABANDON:
        missing.append("on_late_build abandon")
    return missing
