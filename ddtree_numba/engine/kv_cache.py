"""The paged latent KV cache: rows of one sequence in pages of a pool, found through a block table."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """One row (latent and rotated key, D = D_c + D_r) per layer and position, in pages of `page_size` rows.

    Row r of the sequence lies in page ``block_table[0, r // page_size]`` at offset ``r % page_size``, in every layer.
    Pages are taken from the pool when the sequence grows into them. The first ``prefix_lengths[0]`` rows are the
    accepted prefix; the rows after it belong to the tree of the round, row ``prefix + slot`` to the node in `slot`.

    Rows, table and lengths are arrays of NumPy, or of CuPy: then they never leave the device.
    """

    def __init__(self, layers: int, width: int, max_rows: int, page_size: int = 16, xp: Any = np) -> None:
        """Make room for `max_rows` rows of `width` numbers in each of `layers` layers, in arrays of the module `xp`."""
        pages = -(-max_rows // page_size)
        self.page_size = page_size
        self.pool = xp.zeros((layers, pages, page_size, width), np.float32)
        """[layers, pages, page_size, D] float32."""
        self.block_table = xp.full((1, pages), -1, np.int32)
        """[1, pages] int32: page of each stretch of `page_size` rows; -1 where none is taken yet."""
        self.prefix_lengths = xp.zeros(1, np.int32)
        """[1] int32: accepted rows."""
        self.prefix = 0
        """The same number, known without asking a device; whoever changes one changes the other."""
        self._xp = xp
        self._free = list(range(pages))[::-1]
        self._taken: list[int] = []
        self._rows = xp.zeros(0, np.int64)  # pool row (page * page_size + offset) of every row that has a page

    @property
    def capacity(self) -> int:
        """How many rows fit in the pool."""
        return self.block_table.shape[1] * self.page_size

    def reserve(self, rows: int) -> None:
        """Take pages until the sequence has `rows` rows; `ValueError` when the pool has no more."""
        if rows > self.capacity:
            raise ValueError(f"rows: got {rows}, needs at most {self.capacity}, the room of the KV cache")
        needed = -(-rows // self.page_size)
        if needed > len(self._taken):
            self._taken += [self._free.pop() for _ in range(needed - len(self._taken))]
            pages = self._xp.asarray(np.array(self._taken))
            self.block_table[0, :needed] = pages
            self._rows = (pages[:, None] * self.page_size + self._xp.arange(self.page_size)).reshape(-1)

    def advance(self, rows: int) -> None:
        """Accept the next `rows` rows as they lie."""
        self.prefix_lengths += rows
        self.prefix += rows

    def pool_rows(self, first: int, last: int) -> Any:
        """Return where rows `first` to `last` - 1 lie: indices into ``pool[layer].reshape(-1, D)``."""
        if last > len(self._rows):
            raise ValueError(f"rows: got {last}, needs at most {len(self._rows)}, the rows reserved")
        return self._rows[first:last]

    def layer(self, index: int) -> Any:
        """Return the pool of one layer as rows, [pages * page_size, D], a view."""
        pool = self.pool[index]
        return pool.reshape(-1, pool.shape[-1])
