"""Trees of draft tokens whose shape is fixed before the tokens are known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from sim.errors import BadInput

Path = tuple[int, ...]  # ranks from the root on: (0, 2) is the third choice after the first choice


@dataclass(frozen=True)
class TokenTree:
    """`paths` are the nodes, each by the ranks that lead to it; the root () is the pending token.

    A node's children are the drafter's likeliest tokens after it, without gaps. Raises `BadInput` on a node whose
    parent or better sibling is missing. One child each makes a chain, the speculation of SD.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(sorted(set(self.paths) - {()}, key=lambda path: (len(path), path))))
        known = {(), *self.paths}
        for path in self.paths:
            needed = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
            if path[-1] < 0 or needed not in known:
                raise BadInput("token tree", "must hold the parent and the better siblings of every node", path)

    @classmethod
    def chain(cls, num_tokens: int) -> TokenTree:
        """K tokens one after another."""
        return cls(tuple((0,) * depth for depth in range(1, num_tokens + 1)))

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> TokenTree:
        """Every node at depth d has `widths[d]` children."""
        return cls(tuple(p for depth in range(1, len(widths) + 1) for p in product(*map(range, widths[:depth]))))

    @classmethod
    def likeliest(cls, chance: Callable[[int, int], float], num_nodes: int, depth: int) -> TokenTree:
        """The tree of at most `num_nodes` nodes and `depth` levels that accepts most tokens on average (Sequoia,
        arXiv 2402.12374, for acceptance by rank and level).

        `chance(rank, depth)` is the probability that the child of a rank is the right one, not rising with the rank.
        Expected accepted tokens are the sum of the probabilities of the paths, and a path is never likelier than its
        parent or its better sibling: the likeliest paths make a tree, and the best one.
        """
        paths: list[Path] = []
        heap: list[tuple[float, Path]] = [(-chance(0, 0), (0,))] if depth else []
        while heap and len(paths) < num_nodes:
            weight, path = heapq.heappop(heap)
            paths.append(path)
            parent, rank = path[:-1], path[-1]
            before = weight / max(chance(rank, len(parent)), 1e-300)
            heapq.heappush(heap, (before * chance(rank + 1, len(parent)), (*parent, rank + 1)))
            if len(path) < depth:
                heapq.heappush(heap, (weight * chance(0, len(path)), (*path, 0)))
        return cls(tuple(paths))

    @property
    def num_nodes(self) -> int:
        """Draft tokens of the tree, which the target verifies in one pass; the root is not one of them."""
        return len(self.paths)

    @cached_property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @cached_property
    def nodes(self) -> tuple[Path, ...]:
        """The root and all paths, by depth: the places where an accepted path can end."""
        return ((), *self.paths)

    def num_children(self, path: Path) -> int:
        return self._num_children.get(path, 0)

    @cached_property
    def _num_children(self) -> dict[Path, int]:
        counts: dict[Path, int] = {}
        for path in self.paths:
            counts[path[:-1]] = counts.get(path[:-1], 0) + 1
        return counts

    @cached_property
    def num_expanded(self) -> tuple[int, ...]:
        """By depth, how many nodes have children: the tokens that the drafter takes in one step to make the next
        level."""
        return tuple(sum(len(path) == depth for path in self._num_children) for depth in range(self.depth))

    def cut(self, depth: int) -> TokenTree:
        """The nodes down to a depth."""
        return TokenTree(tuple(path for path in self.paths if len(path) <= depth))
