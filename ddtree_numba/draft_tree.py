"""The data contract: what a batch of draft trees is, its invariants, a checker and a generator of random ones.

A tree of request ``b`` has ``node_count[b]`` nodes in slots 0, 1, 2, ...; slot 0 is the *root*, the last emitted token.
Slots are in the order in which nodes were added, so a parent always has a smaller slot than its children.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import ArrayCheck, check_integer

__all__ = [
    "MAX_BUDGET",
    "STATUS_BAD_PAGE",
    "STATUS_BROKEN_LINK",
    "STATUS_OK",
    "STATUS_TOO_DEEP",
    "STATUS_TOO_SMALL",
    "DraftTree",
    "check_tree",
    "check_tree_arrays",
    "empty_tree",
    "mask_words",
    "random_tree",
]

MAX_BUDGET = 1024
"""The largest number of drafted nodes in one tree."""

# A kernel can't raise: it ends and leaves these bits in `status[B]` (int32), one word a request.
STATUS_OK = 0
"""Nothing to report."""
STATUS_BROKEN_LINK = 1
"""Bit of a status: a slot number that points outside the tree, backwards, or in a circle."""
STATUS_TOO_DEEP = 2
"""Bit of a status: a path deeper than the draft length that the caller named."""
STATUS_BAD_PAGE = 4
"""Bit of a status: a KV row outside the block table or the pool."""
STATUS_TOO_SMALL = 8
"""Bit of a status: an output has too little room for what belongs there."""


class DraftTree(NamedTuple):
    """A batch of draft trees, as C-contiguous arrays (B requests, N = budget + 1 slots, W = ceil(N / 32) mask words).

    Numba takes it as one kernel argument. A token id of 0 is a token: count nodes by `node_count` alone.
    """

    token_ids: Any
    """[B, N] int32: token of the node; unused slots 0."""
    parents: Any
    """[B, N] int32: slot of the parent, root -1; unused slots -1."""
    depths: Any
    """[B, N] int32: edges from the root, root 0; unused slots 0."""
    first_child: Any
    """[B, N] int32: slot of the most probable child, or -1; unused slots -1."""
    next_sibling: Any
    """[B, N] int32: slot of the next less probable sibling, or -1; unused slots -1."""
    log_probs: Any
    """[B, N] float64: sum of log-probabilities (natural) along the path, root 0.0; unused slots -inf."""
    ancestor_bits: Any
    """[B, N, W] uint32: bit j % 32 of word j // 32 of row i is set when j is i or an ancestor of i; unused rows 0."""
    node_count: Any
    """[B] int32: used slots, root included, 1..N."""


_FIELDS = {
    "token_ids": ("B N", np.int32, 0),
    "parents": ("B N", np.int32, -1),
    "depths": ("B N", np.int32, 0),
    "first_child": ("B N", np.int32, -1),
    "next_sibling": ("B N", np.int32, -1),
    "log_probs": ("B N", np.float64, -np.inf),
    "ancestor_bits": ("B N W", np.uint32, 0),
    "node_count": ("B", np.int32, 1),
}


def mask_words(slots: int) -> int:
    """Return W, the 32-bit words that one visibility row of `slots` bits takes.

    >>> [mask_words(n) for n in (1, 32, 33, 1025)]
    [1, 1, 2, 33]
    """
    return -(-slots // 32)


def empty_tree(batch: int, budget: int) -> DraftTree:
    """Return NumPy arrays for `batch` trees of `budget` nodes and the root, every slot unused, `node_count` 1.

    Raises `TypeError` for what is no whole number, `ValueError` for a negative batch or a budget outside 0..1024.

    >>> empty_tree(2, 3).parents.shape
    (2, 4)
    """
    batch, budget = check_integer("batch", batch, 0, 2**31 - 1), check_integer("budget", budget, 0, MAX_BUDGET)
    sizes = {"B": batch, "N": budget + 1, "W": mask_words(budget + 1)}
    return DraftTree(
        **{
            name: np.full([sizes[axis] for axis in axes.split()], unused, dtype)
            for name, (axes, dtype, unused) in _FIELDS.items()
        }
    )


def check_tree_arrays(tree: DraftTree, check: ArrayCheck | None = None) -> tuple[int, int]:
    """Return (B, N) when every array of `tree` (NumPy or device) has the shape and dtype of the contract.

    Raises `TypeError` or `ValueError` naming the field. Contents are not read.
    """
    check = ArrayCheck() if check is None else check
    for name, (axes, dtype, _) in _FIELDS.items():
        shape = check(f"tree.{name}", getattr(tree, name), axes, (dtype,))
        if name == "ancestor_bits" and shape[2] != mask_words(shape[1]):
            raise ValueError(
                f"tree.{name}: got {shape[2]} words a row, needs {mask_words(shape[1])} for {shape[1]} slots"
            )
        if name == "token_ids" and shape[1] == 0:
            raise ValueError(f"tree.{name}: got 0 slots, needs at least the root's")
    batch, slots = tree.token_ids.shape
    return batch, slots


def check_tree(tree: DraftTree, *, bits: bool = True) -> None:
    """Raise `ValueError` naming request, slot and rule when a tree breaks an invariant of the contract.

    `tree` holds NumPy arrays as in `DraftTree`. With ``bits=False`` the ancestor bits are not looked at: they are
    filled by a later stage than the links. What is no `DraftTree` of arrays of its dtypes raises `TypeError`.

    >>> tree = random_tree(np.random.default_rng(0), batch=1, budget=4, node_counts=[4])
    >>> check_tree(tree)
    >>> tree.parents[0, 2] = 3
    >>> check_tree(tree)
    Traceback (most recent call last):
    ValueError: request 0, slot 2: parent 3 must be a smaller slot
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree: got {type(tree).__name__}, needs a DraftTree")
    batch, _ = check_tree_arrays(tree)
    for request in range(batch):
        _check_request(DraftTree(*(field[request] for field in tree)), request, bits)


def _check_request(tree: DraftTree, request: int, bits: bool) -> None:
    slots, count = len(tree.token_ids), int(tree.node_count)
    if not 1 <= count <= slots:
        raise ValueError(f"request {request}: node_count {count} must be from 1 to {slots}")
    try:
        _check_root(tree)
        for slot in range(1, count):
            _check_node(tree, slot)
        for slot in range(count):
            _check_children(tree, slot, count)
        for slot in range(count, slots):
            _check_unused(tree, slot, bits)
        if bits:
            _check_bits(tree, count)
    except _BrokenRuleError as broken:
        raise ValueError(f"request {request}, slot {broken.slot}: {broken.rule}") from None


class _BrokenRuleError(Exception):
    def __init__(self, slot: int, rule: str) -> None:
        self.slot, self.rule = slot, rule


def _require(truth: bool, slot: int, rule: str) -> None:
    if not truth:
        raise _BrokenRuleError(slot, rule)


def _check_root(tree: DraftTree) -> None:
    _require(tree.parents[0] == -1, 0, f"the root's parent is {tree.parents[0]}, must be -1")
    _require(tree.depths[0] == 0, 0, f"the root's depth is {tree.depths[0]}, must be 0")
    _require(tree.next_sibling[0] == -1, 0, f"the root's next sibling is {tree.next_sibling[0]}, must be -1")
    _require(tree.log_probs[0] == 0.0, 0, f"the root's log-probability is {tree.log_probs[0]}, must be 0.0")


def _check_node(tree: DraftTree, slot: int) -> None:
    parent = int(tree.parents[slot])
    _require(parent >= 0, slot, f"parent {parent} must be a slot: only slot 0 is a root")
    _require(parent < slot, slot, f"parent {parent} must be a smaller slot")
    expected = tree.depths[parent] + 1
    _require(
        tree.depths[slot] == expected,
        slot,
        f"depth {tree.depths[slot]} must be its parent's plus one, {expected}",
    )
    _require(tree.token_ids[slot] >= 0, slot, f"token {tree.token_ids[slot]} must be 0 or more")
    _require(np.isfinite(tree.log_probs[slot]), slot, f"log-probability {tree.log_probs[slot]} must be finite")


def _check_children(tree: DraftTree, slot: int, count: int) -> None:
    """Walk the sibling chain of `slot`: it must hold each of its children once, earlier slots first."""
    children = [child for child in range(slot + 1, count) if tree.parents[child] == slot]
    tokens: set[int] = set()
    previous, child = -1, int(tree.first_child[slot])
    for expected in children:
        holder, link = (slot, "first child") if previous < 0 else (previous, "next sibling")
        _require(child == expected, holder, f"{link} {child} must be slot {expected}")
        token = int(tree.token_ids[child])
        _require(token not in tokens, child, f"token {token} stands already among its siblings")
        if previous >= 0:
            falling = tree.log_probs[child] <= tree.log_probs[previous]
            _require(bool(falling), child, "must not be more probable than its earlier sibling")
        tokens.add(token)
        previous, child = child, int(tree.next_sibling[child])
    if children:
        _require(child == -1, previous, f"next sibling {child} must be -1 at the end of the chain")
    else:
        _require(child == -1, slot, f"first child {child} must be -1: no node has this parent")


def _check_unused(tree: DraftTree, slot: int, bits: bool) -> None:
    for name, (axes, _, unused) in _FIELDS.items():
        if axes == "B N":
            value = getattr(tree, name)[slot]
            _require(value == unused, slot, f"{name} is {value}, must be {unused} in an unused slot")
    _require(not bits or not tree.ancestor_bits[slot].any(), slot, "ancestor bits must be 0 in an unused slot")


def _check_bits(tree: DraftTree, count: int) -> None:
    rows = [0] * count
    for slot in range(count):
        above = rows[tree.parents[slot]] if slot else 0
        rows[slot] = above | 1 << slot
        got = sum(int(word) << 32 * index for index, word in enumerate(tree.ancestor_bits[slot]))
        _require(got == rows[slot], slot, f"ancestor bits {got:#x} must be {rows[slot]:#x}")


def random_tree(
    rng: Any,
    batch: int,
    budget: int,
    *,
    vocab: int = 1000,
    max_depth: int = 64,
    node_counts: Any = None,
    degree: int | None = None,
    ties: float = 0.0,
) -> DraftTree:
    """Return a batch of random valid trees (NumPy arrays, see `DraftTree`), bits filled, sizes ragged.

    `rng` (a `numpy.random.Generator`, or a `StableRandom`) seeds it; `batch` is B and N = `budget` + 1; `vocab` bounds
    the token ids; siblings differ, so a node has at most `vocab` children, and at most `degree`; `max_depth` bounds the
    edges from the root. `node_counts` [B] fixes the sizes, 1..budget + 1 each, else they are drawn. With probability
    `ties` a node is as probable as its earlier sibling, or, without one, as its parent. The shapes range from chains to
    stars.

    Raises `ValueError` for a number out of range, and where no such tree exists; `TypeError` for what is no number.
    """
    tree = empty_tree(batch, budget)
    vocab = check_integer("vocab", vocab, 1, 2**31 - 1)
    width = vocab if degree is None else min(vocab, check_integer("degree", degree, 1, 2**31 - 1))
    if not 0 <= ties <= 1:
        raise ValueError(f"ties: got {ties}, needs a probability from 0 to 1")
    if node_counts is None:
        node_counts = rng.integers(1, budget + 2, size=batch)
    if len(node_counts) != batch:
        raise ValueError(f"node_counts: got {len(node_counts)} sizes, needs {batch}, one a request")
    for request, count in enumerate(node_counts):
        count = check_integer(f"node_counts[{request}]", count, 1, budget + 1)
        # A small spread always extends the newest nodes (chains), a large one any node (stars and bushes).
        spread = int(count ** rng.random())
        _grow(rng, DraftTree(*(field[request] for field in tree)), count, spread, vocab, max_depth, width, ties)
        tree.node_count[request] = count
    return tree


def _grow(
    rng: Any, tree: DraftTree, count: int, spread: int, vocab: int, max_depth: int, width: int, ties: float
) -> None:
    """Fill one request's arrays in place."""
    children: list[list[int]] = [[] for _ in range(count)]
    tree.token_ids[0], tree.log_probs[0] = rng.integers(vocab), 0.0
    tree.ancestor_bits[0, 0] = 1
    able = [0] if max_depth > 0 else []  # slots that may have one more child, oldest first
    for slot in range(1, count):
        if not able:
            limits = f"vocab={vocab} and max_depth={max_depth}" + (f" and degree={width}" if width < vocab else "")
            raise ValueError(f"node_counts: no tree of {slot + 1} nodes has {limits}")
        parent = able[-int(rng.integers(1, min(spread, len(able)) + 1))]
        siblings = children[parent]
        taken = {int(tree.token_ids[s]) for s in siblings}
        token = int(rng.integers(vocab))
        while token in taken:
            token = (token + 1) % vocab
        ceiling = tree.log_probs[siblings[-1]] if siblings else tree.log_probs[parent]
        tree.token_ids[slot], tree.parents[slot] = token, parent
        tree.depths[slot] = tree.depths[parent] + 1
        tied = ties > 0 and rng.random() < ties
        tree.log_probs[slot] = ceiling if tied else ceiling - rng.exponential()
        if siblings:
            tree.next_sibling[siblings[-1]] = slot
        else:
            tree.first_child[parent] = slot
        siblings.append(slot)
        if len(siblings) == width:
            able.remove(parent)
        if tree.depths[slot] < max_depth:
            able.append(slot)
        tree.ancestor_bits[slot] = tree.ancestor_bits[parent]
        tree.ancestor_bits[slot, slot // 32] |= np.uint32(1 << slot % 32)
