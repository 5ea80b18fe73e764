"""Where the accepted path of a token tree ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.strategies.rank_law import RankLaw
from sim.strategies.token_tree import Path, TokenTree

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PathEnd:
    """That the accepted path ends at a node: `reached` is the probability that it gets there, `chance` that it ends
    there. Its tokens and the bonus token are emitted."""

    path: Path
    num_children: int
    reached: FloatArray
    chance: FloatArray

    @property
    def num_tokens(self) -> int:
        return len(self.path) + 1

    def prepared(self, fan_out: int, law: RankLaw) -> FloatArray:
        """Probability to end here with a bonus token that is among the `fan_out` likeliest ones without a node."""
        if self.num_children == 0:
            return self.chance * law.prepared_after_all(fan_out, len(self.path))
        return self.reached * law.within(self.num_children, self.num_children + fan_out, len(self.path))


def path_ends(tree: TokenTree, law: RankLaw) -> Iterator[PathEnd]:
    """The ends of a walk that follows the target's token as long as it is a child, the root first.

    Lossless whatever the tree: the token at every place is the target's own, drawn before the tree is looked at. At
    temperature 0 it is also what verification by rejection accepts; above, that accepts sampled trees more often
    (`sim.strategies.tree_verification`).
    """
    reached: dict[Path, FloatArray] = {(): np.ones_like(law.within(0, 1, 0))}
    for path in tree.nodes:
        here, num_children, depth = reached[path], tree.num_children(path), len(path)
        for rank in range(num_children):
            reached[*path, rank] = here * law.within(rank, rank + 1, depth)
        yield PathEnd(path, num_children, here, here * (1 - law.within(0, num_children, depth)))
