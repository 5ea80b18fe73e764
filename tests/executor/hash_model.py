"""A fake language model that audits its KV cache: its logits are a function of the exact text that a token sees."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

from executor.concurrency import Runner, SerialDraft
from executor.recorder import Recorder
from executor.target import Target
from sim.trace import Lane

SPREAD = 1.5  # standard deviation of the logits


class HashModel:
    """Stands in for `LanguageModel`. `agreement` 1 makes all models of one seed alike, 0 makes them independent.

    Every slot keeps its token and position. Each forward asserts that what a token sees is a text: positions 0, 1, 2
    ... without hole or repeat. So a wrong mask, position or roll-back fails at once, or changes the logits.
    """

    dtype = torch.float64
    attention = "fake"

    def __init__(self, vocab_size: int, seed: int, own_seed: int = 0, agreement: float = 1.0) -> None:
        self.vocab_size = vocab_size
        self.max_positions = 4096
        self.num_forwards = 0
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self._law = (seed, own_seed, agreement)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def length(self) -> int:
        return len(self.tokens)

    def with_rows(self, num_rows: int) -> "HashModelRows":
        return HashModelRows(self, num_rows)

    def append(self, tokens, num_logits=None) -> torch.Tensor:
        self.num_forwards += 1
        rows = []
        for token in tokens:
            self.positions.append(self.length)
            self.tokens.append(token)
            rows.append(self._logits(list(range(self.length))))
        return torch.stack(rows[-num_logits:] if num_logits else rows)

    def append_branches(self, tokens, positions, mask) -> torch.Tensor:
        self.num_forwards += 1
        self.tokens += tokens.tolist()
        self.positions += positions.tolist()
        assert mask.shape == (1, 1, len(tokens), self.length)
        return torch.stack([self._logits(torch.nonzero(row == 0).flatten().tolist()) for row in mask[0, 0]])

    def roll_back(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError
        del self.tokens[length:], self.positions[length:]

    def _logits(self, visible: list[int]) -> torch.Tensor:
        ordered = sorted(visible, key=lambda slot: self.positions[slot])
        assert [self.positions[slot] for slot in ordered] == list(range(len(ordered)))
        return self.logits_after(tuple(self.tokens[slot] for slot in ordered))

    def logits_after(self, text: tuple[int, ...]) -> torch.Tensor:
        """(V,) logits after a text."""
        if text not in self._known:
            seed, own_seed, agreement = self._law
            shared, own = self._noise(text, seed), self._noise(text, (seed, own_seed))
            self._known[text] = SPREAD * torch.from_numpy(agreement * shared + (1 - agreement) * own)
        return self._known[text]

    def _noise(self, text: tuple[int, ...], key: object) -> np.ndarray:
        digest = hashlib.sha256(f"{key}{text}".encode()).digest()
        return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32)).standard_normal(self.vocab_size)


class HashModelRows:
    """Several texts of a `HashModel` at once."""

    def __init__(self, model: HashModel, num_rows: int) -> None:
        self._model = model
        self._texts: list[tuple[int, ...]] = [()] * num_rows

    def append_rows(self, tokens, num_logits=None) -> torch.Tensor:
        rows = []
        for row, new in enumerate(tokens.tolist()):
            steps = []
            for token in new:
                self._texts[row] += (token,)
                steps.append(self._model.logits_after(self._texts[row]))
            rows.append(torch.stack(steps[-num_logits:] if num_logits else steps))
        return torch.stack(rows)


@dataclass
class FakePair:
    """What a runner asks of a pair."""

    name: str = "fake"
    vocab_size: int = 16
    max_positions: int = 4096
    hashes: dict = field(default_factory=lambda: {"target": "t", "draft": "d", "tokenizer": "k"})


def serial_runner(target: HashModel, draft: HashModel) -> Runner:
    """Two fakes behind the serial runner's own code."""
    pair = FakePair(vocab_size=target.vocab_size)
    return Runner(pair, "serial", Target(target, Recorder(Lane.TARGET)), SerialDraft(draft), {})
