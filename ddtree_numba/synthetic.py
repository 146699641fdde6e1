"""Test data: trees, target tokens that make walks of every length, and links that no walk may trust."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.draft_tree import DraftTree, random_tree
from ddtree_numba.stable_random import StableRandom

__all__ = ["LINK_FAULTS", "SyntheticBatch", "break_links", "random_target_tokens", "synthetic_batch"]

LINK_FAULTS = ("duplicates", "reversed", "cycle", "outside", "backward", "random")
"""What `break_links` can do to a tree; the first two leave it walkable."""


class SyntheticBatch(NamedTuple):
    """What one round's walk is given."""

    tree: DraftTree
    """The drafts of B requests."""
    target_tokens: np.ndarray
    """[B, N] int32: the target's token at every slot."""


def synthetic_batch(
    seed: int,
    batch: int,
    budget: int,
    *,
    vocab: int = 1000,
    max_depth: int = 64,
    degree: int | None = None,
    node_counts: Sequence[int] | None = None,
    follow: float = 0.7,
    accept_weights: Sequence[float] | None = None,
    ties: float = 0.0,
    links: str | None = None,
) -> SyntheticBatch:
    """Return random trees and target tokens, the same for the same arguments on every machine and NumPy version.

    `batch` requests of `budget` drafted nodes at most (sizes are drawn, or `node_counts` [B] with the root, fixes
    them), tokens below `vocab`, no deeper than `max_depth`, at most `degree` children a node, and as probable as their
    neighbour with probability `ties`: see `random_tree`.

    The target follows a random child with probability `follow` at every node. Or `accept_weights` gives the
    distribution of the accepted draft tokens: entry i is the weight of a walk that accepts i of them, cut off at what a
    request's tree has.

    `links`, one of `LINK_FAULTS`, breaks the trees afterwards.

    >>> tree, target_tokens = synthetic_batch(0, batch=2, budget=4)
    >>> tree.node_count.tolist(), target_tokens.shape
    ([5, 5], (2, 5))
    """
    rng = StableRandom(seed, "synthetic")
    tree = random_tree(
        rng, batch, budget, vocab=vocab, max_depth=max_depth, node_counts=node_counts, degree=degree, ties=ties
    )
    counts = None if accept_weights is None else _draw_counts(rng, tree, accept_weights)
    targets = random_target_tokens(rng, tree, vocab, follow=follow, accept_counts=counts)
    return SyntheticBatch(tree if links is None else break_links(rng, tree, links), targets)


def _draw_counts(rng: Any, tree: DraftTree, weights: Sequence[float]) -> list[int]:
    """Draw every request's `accept_count`, the bonus counted."""
    given = np.asarray(weights, np.float64)
    if given.ndim != 1 or not given.size or not np.isfinite(given).all() or (given < 0).any() or given[0] <= 0:
        raise ValueError(f"accept_weights: got {weights!r}, needs numbers of 0 or more, the first above 0")
    counts = []
    for b, used in enumerate(tree.node_count):
        able = np.cumsum(given[: int(tree.depths[b, :used].max()) + 1])
        counts.append(1 + int(np.searchsorted(able, rng.random() * able[-1], side="right")))
    return counts


def random_target_tokens(
    rng: Any,
    tree: DraftTree,
    vocab: int = 1000,
    *,
    follow: float = 0.7,
    accept_counts: Sequence[int] | None = None,
) -> np.ndarray:
    """Return [B, N] int32 tokens for the nodes of a valid `tree`, below `vocab`.

    At each node they follow a random child with probability `follow`, which makes long paths; else, and on leaves and
    unused slots, the token is random, which ends most walks. With `accept_counts` [B] request b accepts exactly
    ``accept_counts[b]`` tokens, the bonus counted: from 1 to the depth of its tree plus 1.

    `rng` is a `numpy.random.Generator` or a `StableRandom`.
    """
    if not 0 <= follow <= 1:
        raise ValueError(f"follow: got {follow}, needs a probability from 0 to 1")
    targets = rng.integers(0, vocab, tree.token_ids.shape, dtype=np.int32)
    for b, used in enumerate(tree.node_count):
        children = _children(tree.parents[b, :used])
        for node in range(used):
            if children[node] and rng.random() < follow:
                targets[b, node] = tree.token_ids[b, rng.choice(children[node])]
        if accept_counts is not None:
            _steer(rng, tree, b, children, targets, int(accept_counts[b]), vocab)
    return targets


def _children(parents: np.ndarray) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    return children


def _steer(
    rng: Any, tree: DraftTree, b: int, children: list[list[int]], targets: np.ndarray, count: int, vocab: int
) -> None:
    """Make request b's walk accept `count` tokens."""
    ends = np.flatnonzero(tree.depths[b, : tree.node_count[b]] == count - 1)
    if count < 1 or not ends.size:
        raise ValueError(f"accept_counts[{b}]: got {count}, needs from 1 to {int(tree.depths[b].max()) + 1}")
    node = end = int(rng.choice(ends))
    while node > 0:
        parent = int(tree.parents[b, node])
        targets[b, parent] = tree.token_ids[b, node]
        node = parent
    taken = {int(tree.token_ids[b, child]) for child in children[end]}
    if len(taken) == vocab:
        raise ValueError(f"accept_counts[{b}]: got {count}, but every token is a child of slot {end}")
    while int(targets[b, end]) in taken:
        targets[b, end] = (targets[b, end] + 1) % vocab


def break_links(rng: Any, tree: DraftTree, fault: str) -> DraftTree:
    """Return a copy of a valid `tree` whose links a walk must not trust; arrays that are not named stay as they are.

    - ``duplicates``: siblings hold equal tokens, so that the first in the chain must win;
    - ``reversed``: sibling chains run from the least probable to the most probable;
    - ``cycle``: the last sibling of every chain points to the first;
    - ``outside``: every chain ends in a slot outside the arrays;
    - ``backward``: the last sibling of every chain points to the parent;
    - ``random``: `first_child` and `next_sibling` are any numbers from -N to 2 N.
    """
    if fault not in LINK_FAULTS:
        raise ValueError(f"links: got {fault!r}, needs one of {', '.join(LINK_FAULTS)}")
    tree = DraftTree(*(field.copy() for field in tree))
    slots = tree.parents.shape[1]
    if fault == "random":
        for links in (tree.first_child, tree.next_sibling):
            links[:] = rng.integers(-slots, 2 * slots, links.shape, dtype=np.int32)
        return tree
    for b, used in enumerate(tree.node_count):
        for parent, siblings in enumerate(_children(tree.parents[b, :used])):
            if not siblings:
                continue
            if fault == "duplicates":
                tree.token_ids[b, siblings] = tree.token_ids[b, siblings[0]]
            elif fault == "reversed":
                tree.first_child[b, parent] = siblings[-1]
                tree.next_sibling[b, siblings] = [-1, *siblings[:-1]]
            else:
                last = {"cycle": siblings[0], "outside": 2 * slots + 7, "backward": parent}[fault]
                tree.next_sibling[b, siblings[-1]] = last
    return tree
