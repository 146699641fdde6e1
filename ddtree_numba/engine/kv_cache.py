"""The paged latent KV cache: rows of one sequence in pages of a pool, found through a block table."""

from __future__ import annotations

import numpy as np

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """One row (latent and rotated key, D = D_c + D_r) per layer and position, in pages of `page_size` rows.

    Row r of the sequence lies in page ``block_table[0, r // page_size]`` at offset ``r % page_size``, in every layer.
    Pages are taken from the pool when the sequence grows into them. The first ``prefix_lengths[0]`` rows are the
    accepted prefix; the rows after it belong to the tree of the round, row ``prefix + slot`` to the node in `slot`.
    """

    def __init__(self, layers: int, width: int, max_rows: int, page_size: int = 16) -> None:
        """Make room for `max_rows` rows of `width` numbers in each of `layers` layers."""
        pages = -(-max_rows // page_size)
        self.page_size = page_size
        self.pool = np.zeros((layers, pages, page_size, width), np.float32)
        """[layers, pages, page_size, D] float32."""
        self.block_table = np.full((1, pages), -1, np.int32)
        """[1, pages] int32: page of each stretch of `page_size` rows; -1 where none is taken yet."""
        self.prefix_lengths = np.zeros(1, np.int32)
        """[1] int32: accepted rows."""
        self._free = list(range(pages))[::-1]
        self._rows = np.zeros(0, np.int64)  # pool row (page * page_size + offset) of every row that has a page

    @property
    def prefix(self) -> int:
        """How many rows are accepted."""
        return int(self.prefix_lengths[0])

    @property
    def capacity(self) -> int:
        """How many rows fit in the pool."""
        return self.block_table.shape[1] * self.page_size

    def reserve(self, rows: int) -> None:
        """Take pages until the sequence has `rows` rows; `ValueError` when the pool has no more."""
        if rows > self.capacity:
            raise ValueError(f"rows: got {rows}, needs at most {self.capacity}, the room of the KV cache")
        taken = len(self._rows) // self.page_size
        needed = -(-rows // self.page_size)
        if needed > taken:
            for index in range(taken, needed):
                self.block_table[0, index] = self._free.pop()
            first_rows = self.block_table[0, :needed, None].astype(np.int64) * self.page_size
            self._rows = (first_rows + np.arange(self.page_size)).reshape(-1)

    def pool_rows(self, first: int, last: int) -> np.ndarray:
        """Return where rows `first` to `last` - 1 lie: indices into ``pool[layer].reshape(-1, D)``."""
        if last > len(self._rows):
            raise ValueError(f"rows: got {last}, needs at most {len(self._rows)}, the rows reserved")
        return self._rows[first:last]

    def layer(self, index: int) -> np.ndarray:
        """Return the pool of one layer as rows, [pages * page_size, D], a view."""
        pool = self.pool[index]
        return pool.reshape(-1, pool.shape[-1])
