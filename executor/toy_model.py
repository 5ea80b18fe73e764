"""Toy models that audit their KV cache: their logits are a function of the exact text that a token sees.

Checks and tests run the very code that decodes on them: a law over their few tokens can be enumerated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.concurrency import Runner
from executor.kv_cache import KvCacheCorrupt
from executor.recorder import Recorder
from executor.serial_draft import SerialDraft
from executor.target import Target
from sim.trace import Lane

SPREAD = 1.5  # standard deviation of the logits


class HashModel:
    """Stands in for `LanguageModel`. `agreement` 1 makes all models of one seed alike, 0 makes them independent.

    Every slot of every row keeps its token and position. Each forward asserts that what a token sees is a text:
    positions 0, 1, 2 ... without hole or repeat. So a wrong mask, position or roll-back fails at once, or changes the
    logits.
    """

    dtype = torch.float64
    device = torch.device("cpu")
    attention = "fake"

    def __init__(
        self, vocab_size: int, seed: int, own_seed: int = 0, agreement: float = 1.0, max_positions: int = 4096
    ) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.num_forwards = 0
        self._law = (seed, own_seed, agreement)
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.begin(1)

    def begin(self, num_rows: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self.positions: list[list[int | None]] = [[] for _ in range(num_rows)]
        self.kept = list(range(num_rows))

    def keep(self, rows: Sequence[int]) -> None:
        assert set(rows) <= set(self.kept)
        self.kept = list(rows)

    def length_of(self, row: int) -> int:
        return len(self.texts[row])

    def with_rows(self, num_rows: int) -> HashModelRows:
        return HashModelRows(self, num_rows)

    def append(self, tokens: Sequence[int], num_logits: int | None = None) -> Tensor:
        self.num_forwards += 1
        return self._fed(0, tokens)[-(num_logits or len(tokens)) :]

    def feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]) -> list[Tensor]:
        assert len(set(rows)) == len(rows) and set(rows) <= set(self.kept) and all(map(len, tokens))
        if len(self.texts) == 1:
            return [self.append(tokens[0], num_logits[0])]
        self.num_forwards += 1
        return [self._fed(row, own)[-num:] for row, own, num in zip(rows, tokens, num_logits, strict=True)]

    def feed_drawn(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        return torch.cat(self.feed(rows, [[token] for token in tokens.tolist()], [1] * len(rows)))

    def name_last(self, row: int, tokens: Sequence[int]) -> None:
        assert self.texts[row][len(self.texts[row]) - len(tokens) :] == list(tokens)

    def _fed(self, row: int, tokens: Sequence[int]) -> Tensor:
        logits = []
        for token in tokens:
            assert self.length_of(row) < self.max_positions
            self.positions[row].append(self.length_of(row))
            self.texts[row].append(token)
            logits.append(self._logits(row, list(range(self.length_of(row)))))
        return torch.stack(logits)

    def level(self, rows: Sequence[int]) -> int:
        length = max(self.length_of(row) for row in rows)
        for row in rows:
            num_skipped = length - self.length_of(row)
            self.texts[row] += [0] * num_skipped
            self.positions[row] += [None] * num_skipped
        return length

    def append_branches(self, rows: Sequence[int], tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        self.num_forwards += 1
        assert set(rows) <= set(self.kept) and int(positions.max()) < self.max_positions
        logits = []
        for place, row in enumerate(rows):
            self.texts[row] += tokens[place].tolist()
            self.positions[row] += positions[place].tolist()
            assert mask.shape == (len(rows), 1, tokens.shape[1], self.length_of(row))
            visible = [np.flatnonzero(own).tolist() for own in (mask[place, 0] == 0).numpy()]
            logits.append(torch.stack([self._logits(row, slots) for slots in visible]))
        return torch.stack(logits)

    def audit(self, row: int, text: Sequence[int]) -> None:
        if self.texts[row] != list(text) or self.positions[row] != list(range(len(text))):
            raise KvCacheCorrupt(f"row {row} holds {self.texts[row]} instead of {list(text)}")

    def roll_back(self, length: int, row: int = 0) -> None:
        if not 0 <= length <= self.length_of(row):
            raise ValueError
        del self.texts[row][length:], self.positions[row][length:]

    def _logits(self, row: int, visible: list[int]) -> Tensor:
        """Each position is seen once: no hole, no repeat, no slot that holds nothing (whose position is None)."""
        text, positions = self.texts[row], [self.positions[row][slot] for slot in visible]
        if positions != list(range(len(visible))):  # else the slots are in the order of their positions
            slot_at = dict(zip(positions, visible, strict=True))
            assert slot_at.keys() == set(range(len(visible)))
            visible = [slot_at[position] for position in range(len(visible))]
        return self.logits_after(tuple([text[slot] for slot in visible]))

    def logits_after(self, text: tuple[int, ...]) -> Tensor:
        """(V,) logits after a text."""
        if text not in self._known:
            seed, own_seed, agreement = self._law
            noise = agreement * self._noise(text, seed)
            if agreement < 1:
                noise += (1 - agreement) * self._noise(text, (seed, own_seed))
            self._known[text] = SPREAD * torch.from_numpy(noise)
        return self._known[text]

    def _noise(self, text: tuple[int, ...], key: object) -> np.ndarray:
        digest = hashlib.sha256(f"{key}{text}".encode()).digest()
        return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32)).standard_normal(self.vocab_size)


class HashModelRows:
    """Several texts of a `HashModel` at once."""

    def __init__(self, model: HashModel, num_rows: int) -> None:
        self._model = model
        self._texts: list[tuple[int, ...]] = [()] * num_rows

    def append_rows(self, tokens: Tensor, num_logits: int | None = None) -> Tensor:
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
    """What a runner asks of a pair; `models` by role."""

    name: str = "fake"
    vocab_size: int = 16
    max_positions: int = 4096
    tokenizer: Any = None
    hashes: dict[str, str] = field(default_factory=lambda: {"target": "t", "draft": "d", "tokenizer": "k"})
    models: dict[str, Any] = field(default_factory=dict)

    def load(self, role: str, dtype: str, device: str = "cpu") -> Any:
        return self.models[role]


def serial_runner(target: Any, draft: Any) -> Runner:
    """Two toy models behind the serial runner's own code."""
    pair: Any = FakePair(vocab_size=target.vocab_size, max_positions=min(target.max_positions, draft.max_positions))
    return Runner(pair, "serial", Target(target, Recorder(Lane.TARGET)), SerialDraft(draft), {})
