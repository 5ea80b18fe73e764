"""What is decoded: prompts, how tokens are drawn, and what ends a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any

from sim.errors import BadInput, require_count, require_number


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from a model's logits. The defaults are greedy and change nothing.

    The steps in order: `repetition_penalty` divides the positive logits of all tokens of prompt and text so far and
    multiplies the negative ones (1: off); `temperature` divides the logits (0: the most likely token, whatever the
    steps that follow); `top_k` keeps that many most likely tokens (0: all); `top_p` the fewest that together have this
    probability; `min_p` those with at least this part of the largest probability. Raises `BadInput` naming the field.

    `seed` None: from the run's seed. A request with a seed of its own draws the same tokens in any company.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        values = {
            "temperature": require_number("sampling.temperature", self.temperature, 0),
            "top_k": require_count("sampling.top_k", self.top_k, 0),
            "top_p": require_number("sampling.top_p", self.top_p, 0, 1, above=True),
            "min_p": require_number("sampling.min_p", self.min_p, 0, 1),
            "repetition_penalty": require_number("sampling.repetition_penalty", self.repetition_penalty, 0, above=True),
            "seed": None if self.seed is None else require_count("sampling.seed", self.seed, 0),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def law(self) -> Sampling:
        """What decides the law of the tokens: everything but the seed."""
        return replace(self, seed=None)


@dataclass(frozen=True)
class Workload:
    """Prompts decoded under one set of rules, `batch_size` at a time.

    A batch is the next `batch_size` prompts in order; its rows advance in lockstep, a row that ends leaves, and the
    next batch starts when the last row has ended.

    `prompts` are token ids. A sequence ends at the first token in `stop_ids`, at the first one that completes one of
    the `stop_strings` in the decoded generated text (either is kept), or after `max_new_tokens`.

    `temperature` 0 is greedy. More settings are given by `sampling`, one entry for each prompt; then `temperature` is
    the highest of theirs and need not be given. `dataset` names where the prompts come from; it is part of a record's
    identity. Raises `BadInput` naming the field that is of another type or outside its range.
    """

    dataset: str
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float = 0.0
    stop_ids: tuple[int, ...] = ()
    batch_size: int = 1
    sampling: tuple[Sampling, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, str):
            raise BadInput("workload.dataset", "must be a name", self.dataset)
        if not isinstance(self.prompts, tuple) or not self.prompts or () in self.prompts:
            raise BadInput("workload.prompts", "must hold at least one prompt, none of them empty")
        for index, prompt in enumerate(self.prompts):
            _require_tokens(f"workload.prompts[{index}]", prompt)
        _require_tokens("workload.stop_ids", self.stop_ids)
        for name, minimum in (("max_new_tokens", 0), ("batch_size", 1)):
            object.__setattr__(self, name, require_count(f"workload.{name}", getattr(self, name), minimum))
        object.__setattr__(self, "temperature", require_number("workload.temperature", self.temperature, 0))
        _require_strings("workload.stop_strings", self.stop_strings)
        self._resolve_sampling()

    def _resolve_sampling(self) -> None:
        if not isinstance(self.sampling, tuple) or not all(isinstance(s, Sampling) for s in self.sampling):
            raise BadInput("workload.sampling", "must be a tuple of Sampling", self.sampling)
        if self.sampling:
            if len(self.sampling) != len(self.prompts):
                rule = f"must be empty or hold one entry for each of the {len(self.prompts)} prompts"
                raise BadInput("workload.sampling", rule, len(self.sampling))
            highest = max(s.temperature for s in self.sampling)
            if self.temperature not in (0, highest):
                rule = f"must be left out where sampling says it, or be the highest there, {highest}"
                raise BadInput("workload.temperature", rule, self.temperature)
            object.__setattr__(self, "temperature", highest)

    def select(self, prompts: Iterable[int]) -> Workload:
        """The workload of some of the prompts, by number, with their settings."""
        numbers = list(prompts)
        sampling = tuple(self.sampling[index] for index in numbers) if self.sampling else ()
        temperature = 0.0 if sampling else self.temperature
        kept = tuple(self.prompts[index] for index in numbers)
        return replace(self, prompts=kept, sampling=sampling, temperature=temperature)

    def sampling_of(self, prompt: int) -> Sampling:
        """The settings of prompt number `prompt`."""
        return self.sampling[prompt] if self.sampling else Sampling(self.temperature)

    @property
    def laws(self) -> tuple[Sampling, ...]:
        """The settings that decide the law of the tokens: one for all prompts if they agree, else one for each."""
        laws = tuple(settings.law for settings in self.sampling) or (Sampling(self.temperature),)
        return laws[:1] if len(set(laws)) == 1 else laws

    def identity(self) -> dict[str, Any]:
        """What must agree before a measurement made on this workload speaks about another.

        `sampling` is empty where the temperature says all. Records of earlier releases have batches of 1, no `sampling`
        and no `stop_strings`.
        """
        says_all = self.laws == (Sampling(self.temperature),)
        return {
            "dataset": self.dataset,
            "temperature": self.temperature,
            "stop_ids": [int(token) for token in self.stop_ids],
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "sampling": [] if says_all else [sampling_to_dict(law) for law in self.laws],
            "stop_strings": list(self.stop_strings),
        }


def sampling_to_dict(law: Sampling) -> dict[str, Any]:
    """The settings of a law by name."""
    return {name: value for name, value in asdict(law).items() if name != "seed"}


def _require_strings(name: str, strings: object) -> None:
    if not isinstance(strings, tuple) or not all(isinstance(string, str) and string for string in strings):
        raise BadInput(name, "must be a tuple of strings, none of them empty", strings)
    if any("\ufffd" in string for string in strings):
        raise BadInput(name, "must not hold U+FFFD, which stands for bytes that are no character", strings)


def _require_tokens(name: str, tokens: object) -> None:
    if not isinstance(tokens, tuple):
        raise BadInput(name, "must be a tuple of token ids", tokens)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise BadInput(name, "must hold token ids, integers >= 0", token)
