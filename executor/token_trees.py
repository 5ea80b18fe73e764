"""Greedy decoding with a token tree of fixed shape, for one row: what the simulator's speculation trees stand for.

The draft expands the tree level by level, the target verifies all nodes in one pass under a tree mask and follows its
own most likely token as long as it is a child. Both models are in this process, and take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.language_model import LanguageModel

Path = tuple[int, ...]  # ranks from the pending token on


@dataclass(frozen=True)
class TreeText:
    """A decoded text, and the tokens that each round emitted; the prefill's token belongs to none."""

    tokens: tuple[int, ...]
    emitted: tuple[int, ...]


def decode_with_trees(
    target: LanguageModel,
    draft: LanguageModel,
    prompt: Sequence[int],
    paths: Sequence[Path],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
) -> TreeText:
    """Greedily, with a tree of these nodes in every round: a node's children are the draft's likeliest tokens after it,
    by rank. Near the length cap the tree keeps the levels that there is room for. The text is the target's own.
    """
    target.begin(1)
    draft.begin(1)
    draft.append(prompt, 1)
    committed = [*prompt, int(target.append(prompt, 1)[-1].argmax())]
    emitted: list[int] = []
    while (room := len(prompt) + max_new_tokens - len(committed) - 1) >= 0 and committed[-1] not in stop_ids:
        tree = _drafted(draft, committed, [path for path in paths if len(path) <= room])
        new = _until(_verified(target, committed, tree), stop_ids)
        _forget_all_but(committed, draft, target)
        committed += new
        emitted.append(len(new))
    return TreeText(tuple(committed[len(prompt) :]), tuple(emitted))


def _until(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Up to the first stop token."""
    ends = [place for place, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def _forget_all_but(committed: Sequence[int], *models: LanguageModel) -> None:
    """Of the tree nothing is kept: what was accepted is fed again with the next pass."""
    for model in models:
        model.roll_back(min(model.length_of(0), len(committed)))


@dataclass
class _Tree:
    """Tokens of the nodes, in the order in which they were fed."""

    token: dict[Path, int] = field(default_factory=dict)

    def children(self, path: Path) -> Iterator[Path]:
        rank = 0
        while (child := (*path, rank)) in self.token:
            yield child
            rank += 1


def _drafted(draft: LanguageModel, committed: Sequence[int], paths: Sequence[Path]) -> _Tree:
    """The tree after the committed tokens; the draft's cache then holds more than those."""
    tree = _Tree()
    if not paths:
        return tree
    width = {path: 0 for path in ((), *paths)}
    for path in paths:
        width[path[:-1]] += 1
    unfed = committed[draft.length_of(0) :]
    _name_children(tree, [()], draft.append(unfed, 1), width)
    fed: list[Path] = []
    for depth in range(1, max(map(len, paths))):
        level = [path for path in tree.token if len(path) == depth and width[path]]
        logits = _feed_nodes(draft, len(committed), tree, fed, level)
        _name_children(tree, level, logits, width)
        fed += level
    return tree


def _name_children(tree: _Tree, parents: Sequence[Path], logits: Tensor, width: dict[Path, int]) -> None:
    """The likeliest tokens after each parent; ties go to the lower id."""
    for parent, row in zip(parents, logits, strict=True):
        likeliest = torch.sort(row, descending=True, stable=True).indices[: width[parent]]
        tree.token.update({(*parent, rank): token for rank, token in enumerate(likeliest.tolist())})


def _feed_nodes(
    model: LanguageModel, num_committed: int, tree: _Tree, fed: Sequence[Path], nodes: Sequence[Path]
) -> Tensor:
    """(nodes, V) logits; each sees the committed tokens and its own ancestors among `fed` and `nodes`."""
    tokens = torch.tensor([[tree.token[path] for path in nodes]], device=model.device)
    positions = torch.tensor([[num_committed + len(path) - 1 for path in nodes]], device=model.device)
    mask = tree_mask(num_committed, [*fed, *nodes], nodes, model.dtype)
    return model.append_branches([0], tokens, positions, mask.to(model.device))[0]


def tree_mask(num_before: int, slots: Sequence[Path], nodes: Sequence[Path], dtype: torch.dtype) -> Tensor:
    """(1, 1, nodes, num_before + slots) additive mask: all slots before the tree, and of the tree's a node's ancestors
    and itself."""
    sees = torch.tensor([[path[: len(slot)] == slot for slot in slots] for path in nodes])
    mask = torch.zeros(len(nodes), num_before + len(slots), dtype=dtype)
    mask[:, num_before:].masked_fill_(~sees, -torch.inf)
    return mask[None, None]


def _verified(target: LanguageModel, committed: Sequence[int], tree: _Tree) -> list[int]:
    """The accepted tokens and the bonus token. One pass feeds the unfed committed tokens and the tree."""
    num_known = target.length_of(0)
    unfed, nodes = committed[num_known:], list(tree.token)
    tokens = torch.tensor([[*unfed, *tree.token.values()]], device=target.device)
    depths = [len(path) for path in nodes]
    positions = [*range(num_known, len(committed)), *(len(committed) + depth - 1 for depth in depths)]
    mask = _verify_mask(num_known, len(unfed), nodes, target.dtype)
    logits = target.append_branches(
        [0], tokens, torch.tensor([positions], device=target.device), mask.to(target.device)
    )[0]
    target.name_last(0, [*unfed, *tree.token.values()])
    after = dict(zip([(), *nodes], logits[len(unfed) - 1 :].argmax(-1).tolist(), strict=True))
    return list(_walk(tree, after))


def _verify_mask(num_known: int, num_unfed: int, nodes: Sequence[Path], dtype: torch.dtype) -> Tensor:
    """The unfed committed tokens see what is before them, the nodes all of them and their ancestors."""
    num_before = num_known + num_unfed
    mask = torch.full((num_unfed + len(nodes), num_before + len(nodes)), -torch.inf, dtype=dtype)
    mask[:num_unfed, :num_before] = torch.full((num_unfed, num_before), -torch.inf, dtype=dtype).triu(num_known + 1)
    if nodes:
        mask[num_unfed:] = tree_mask(num_before, nodes, nodes, dtype)[0, 0]
    return mask[None, None]


def _walk(tree: _Tree, after: dict[Path, int]) -> Iterator[int]:
    """The target's tokens along the tree, and the first that is not in it."""
    path: Path | None = ()
    while path is not None:
        token = after[path]
        yield token
        path = next((child for child in tree.children(path) if tree.token[child] == token), None)
