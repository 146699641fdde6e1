"""Random target tokens that make walks of every length."""

from __future__ import annotations

import numpy as np

from ddtree_numba.draft_tree import DraftTree


def random_target_tokens(
    rng: np.random.Generator, tree: DraftTree, vocab: int = 1000, *, follow: float = 0.7
) -> np.ndarray:
    """Return [B, N] int32 tokens for the nodes of a valid `tree`.

    At each node they follow a random child with probability `follow`, which makes long paths; else, and on leaves and
    unused slots, the token is random, which ends most walks.
    """
    targets = rng.integers(0, vocab, tree.token_ids.shape, dtype=np.int32)
    for b, count in enumerate(tree.node_count):
        for node in range(count):
            children = np.flatnonzero(tree.parents[b, :count] == node)
            if children.size and rng.random() < follow:
                targets[b, node] = tree.token_ids[b, rng.choice(children)]
    return targets
