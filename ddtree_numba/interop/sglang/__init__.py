"""SGLang: its tree arrays and masks to and from a `DraftTree`, and a `verify_tree_greedy` with its argument list.

Facts: `sgl-kernel/csrc/speculative/eagle_utils.cu` (Apache-2.0) and the tests beside it, in `sgl-project/sglang`. All
index arrays are int64. N, there `draft_token_num`, counts the root; every slot is used.

- `retrive_index` [B, N]: ``b * N + slot``, an index into all requests' nodes. (Newer Python code there spells it
  `retrieve_index`; the kernel's arguments do not.)
- `retrive_next_token`, `retrive_next_sibling` [B, N]: first child and next sibling inside the request, -1 for none.
- `positions` [B * N]: prefix length + depth.
- `tree_mask`, one of three: FULL_MASK, booleans over prefix and tree, requests one after the other; QLEN_ONLY,
  booleans [B * N * N] of the tree; QLEN_ONLY_BITPACKING, one word a row, bit j for slot j, of 8, 16 or 32 bits, the
  narrowest that holds N.

SGLang's trees have N nodes each. A `DraftTree` with fewer keeps its unused slots: no link leads there, their position
is the root's, and in the mask they see the prefix alone.
"""

from ddtree_numba.interop.sglang.packed_rows import (
    pack_rows,
    pack_rows_reference,
    unpack_rows,
    unpack_rows_reference,
)
from ddtree_numba.interop.sglang.selection import (
    parents_from_selection,
    parents_from_selection_kernel,
    parents_from_selection_reference,
)
from ddtree_numba.interop.sglang.tree import (
    SGLangTree,
    TreeMaskMode,
    from_sglang,
    from_sglang_kernel,
    from_sglang_reference,
    to_sglang,
    to_sglang_kernel,
    to_sglang_reference,
)
from ddtree_numba.interop.sglang.verify import (
    verify_tree_greedy,
    verify_tree_greedy_kernel,
    verify_tree_greedy_reference,
)

__all__ = [
    "SGLangTree",
    "TreeMaskMode",
    "from_sglang",
    "from_sglang_kernel",
    "from_sglang_reference",
    "pack_rows",
    "pack_rows_reference",
    "parents_from_selection",
    "parents_from_selection_kernel",
    "parents_from_selection_reference",
    "to_sglang",
    "to_sglang_kernel",
    "to_sglang_reference",
    "unpack_rows",
    "unpack_rows_reference",
    "verify_tree_greedy",
    "verify_tree_greedy_kernel",
    "verify_tree_greedy_reference",
]
