"""Which attempt at a run measured what: a run that was interrupted meets the machine in more than one mood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.ledger import Ledger, piece_name


@dataclass(frozen=True)
class Sessions:
    """From which session each measured piece came, in the order of measuring: (repeat, batch, policy) -> session."""

    pieces: Mapping[tuple[int, int, int], int]

    @classmethod
    def of(cls, ledger: Ledger, name: str, places: Iterable[tuple[int, int, int]]) -> Sessions:
        return cls({place: ledger.session_of(piece_name(name, *place)) for place in places})

    @property
    def counts(self) -> list[int]:
        """Pieces of every session that finished any."""
        numbers = list(self.pieces.values())
        return [numbers.count(number) for number in sorted(set(numbers))]

    @property
    def first_pieces(self) -> list[list[int]]:
        """Repeat, batch and policy with which each of them began."""
        first: dict[int, list[int]] = {}
        for place, number in self.pieces.items():
            first.setdefault(number, list(place))
        return list(first.values())

    @property
    def num_split_batches(self) -> int:
        """Batches of prompts that not all policies decoded in the same session."""
        of_batch: dict[tuple[int, int], set[int]] = {}
        for (repeat, batch, _), number in self.pieces.items():
            of_batch.setdefault((repeat, batch), set()).add(number)
        return sum(len(numbers) > 1 for numbers in of_batch.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "pieces": self.counts,
            "first_pieces": self.first_pieces,
            "split_batches": self.num_split_batches,
        }

    def notes(self) -> list[str]:
        """What a reader must know of a run that was interrupted."""
        if len(self.counts) < 2:
            return []
        sessions = f"{len(self.counts)} sessions ({' + '.join(map(str, self.counts))})"
        return [
            f"the run was interrupted and went on later: its measured pieces, in order, are of {sessions}. All "
            "policies decode a batch of prompts before the next one; batches divided between two sessions, where the "
            f"machine may have had another speed: {self.num_split_batches}."
        ]
