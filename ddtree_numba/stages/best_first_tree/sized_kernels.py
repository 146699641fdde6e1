"""A rung whose kernels are compiled for size classes: the smallest one that holds a tree's offers is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ddtree_numba.draft_tree import DraftTree

__all__ = ["SizedKernels"]


class SizedKernels(NamedTuple):
    """The kernels of one rung."""

    make: Callable[[int, int], tuple[Any, Any, int]]
    """(warps, slots of a lane) -> (kernel, kernel that fills bits and positions too, threads)."""
    sizes: tuple[tuple[int, int], ...]
    """(warps, slots of a lane), smallest first."""
    lanes: int
    """Threads of a warp."""

    def for_tree(self, tree: DraftTree) -> tuple[Any, Any, int]:
        """Return what `make` gives for the smallest size that holds the offers of a tree's nodes: the last has none."""
        offers = tree.parents.shape[1] - 1
        return self.make(*next(size for size in self.sizes if size[0] * self.lanes * size[1] >= offers))

    def launch(self, log_probs: Any, token_ids: Any, root_tokens: Any, tree: DraftTree, stream: Any) -> None:
        """Launch the kernel on device arrays."""
        kernel, _, threads = self.for_tree(tree)
        kernel[len(root_tokens), threads, stream](log_probs, token_ids, root_tokens, tree)

    def launch_draft(
        self,
        log_probs: Any,
        token_ids: Any,
        root_tokens: Any,
        prefix_lengths: Any,
        tree: DraftTree,
        positions: Any,
        status: Any,
        stream: Any,
    ) -> None:
        """Launch the kernel that does stages 2 and 3 in one, on device arrays."""
        _, kernel, threads = self.for_tree(tree)
        kernel[len(root_tokens), threads, stream](
            log_probs, token_ids, root_tokens, prefix_lengths, tree, positions, status
        )
