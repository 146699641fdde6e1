"""Rung 2: a warp for each request, every lane with its own slots in registers.

What changed: `one_thread` walks over all slots for every node, twice. Here each lane keeps the offers of a few slots
and the lanes compare theirs by `redux.sync`, an instruction that reduces a number over the warp:

- *The best offer.* A score becomes an integer that sorts as the float64 does. Three reductions find the winner: of the
  upper halves of the scores, of the lower halves among the lanes that have that upper half, and of the places among
  what is left. A *place* is `turn` (see `one_thread.py`, where its rule is proved) and slot in one word, so the last
  reduction breaks the tie and names the slot at once.
- *The turns.* Every lane moves its own: a comparison and an addition for each slot, no memory.
- *The candidates.* They lie in shared memory as float64, with -inf behind the last rank and the last depth, so that no
  step has to ask whether a candidate is there.
- *The new offers.* What its own best would offer, should it win, each lane computes while the lanes still compare:
  loads and sums of float64 hide behind the reductions. The lane that will offer the winner's child is handed its score.

A node costs what must happen one after the other: three reductions, and the exchange of what the winner knows. Past 64
slots the offers are spread over more warps, whose winners meet in shared memory: one barrier and three more reductions.

What it buys: latency. The work per node was N steps in one lane, now it is N / 32 in each, and independent ones.
Measured on an H200, bits included: 17.3 us for 64 nodes of one request, 17.7 for 64 requests; 569 us for 1024 nodes of
one. Of the 17.3, 5.4 are there for a tree of two nodes, too, and 190 ns a node are left. With loads and sums after the
reductions it took 19.5. Tried, and slower at 1267 us: one warp for 1024 nodes too, which keeps the best offer of every
32nd slot in a register and searches only the popped slot's bucket anew. It does a thirtieth of the comparisons, in 340
instructions a node.

What it costs: the order of events is less plain than in `one_thread`, and there is a kernel for each size class.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.draft_tree import STATUS_OK
from ddtree_numba.ptx import inlined, warp_max, warp_min
from ddtree_numba.stages.best_first_tree.sized_kernels import SizedKernels

__all__ = ["WARP", "warp_kernels"]

_LANES = 32 if ON_GPU else 1
_SLOT = np.uint32((1 << 11) - 1)  # 1025 slots
_NEXT_TURN = np.uint32(1 << 11)
_UNUSED = np.uint32(1 << 30)  # a place behind all places in use
_SIGN = np.uint64(1 << 63)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_NOTHING = np.uint64(0x000FFFFFFFFFFFFF)  # ordered(-inf)
_RANK_BITS, _RANK = np.int32(11), np.int32((1 << 11) - 1)  # a cell is what is offered: row (depth - 1), rank
_CELL_BITS, _CELL = np.int32(18), np.int32((1 << 18) - 1)  # a node is its parent's slot, and its cell
_THREADS = 512  # of a block whose offers are one warp's
_SIZES = ((1, 1), (1, 2), (8, 1), (8, 4)) if ON_GPU else ((4, 2), (4, 10), (4, 256))
"""(warps, slots of a lane), smallest first."""


@inlined
def ordered(value):
    """Return bits that compare as the float64 `value` does (no NaN)."""
    bits = np.float64(value).view(np.uint64)
    return np.uint64(~bits) if bits & _SIGN else np.uint64(bits | _SIGN)


@inlined
def unordered(bits):
    return np.uint64(bits ^ _SIGN if bits & _SIGN else ~bits).view(np.float64)


if ON_GPU:

    @inlined
    def _top_of_warp(key):
        """Return the upper half of the warp's largest key."""
        return warp_max(np.uint32(key >> _HALF))

    @inlined
    def _best_below(top, key, place):
        """Return the warp's largest key, whose upper half is `top`, and of those who have it the smallest place."""
        high, low = np.uint32(key >> _HALF), np.uint32(key & _LOW)
        bottom = warp_max(low if high == top else np.uint32(0))
        first = warp_min(place if high == top and low == bottom else np.uint32(0xFFFFFFFF))
        return (np.uint64(top) << _HALF) | np.uint64(bottom), first

    @inlined
    def _from_lane(value, lane):
        return cuda.shfl_sync(np.uint32(0xFFFFFFFF), value, lane)

    @inlined
    def best_of_block(keys, places, parity, warps):
        warp = cuda.threadIdx.x & np.int32(31)
        warp = warp if warp < warps else np.int32(0)
        return best_of_warp(keys[parity, warp], places[parity, warp])

else:

    @inlined
    def _top_of_warp(key):
        return key

    @inlined
    def _best_below(top, key, place):
        return key, place

    @inlined
    def _from_lane(value, lane):
        return value

    @inlined
    def best_of_block(keys, places, parity, warps):
        key, place = keys[parity, 0], places[parity, 0]
        for warp in range(1, warps):
            other, other_place = keys[parity, warp], places[parity, warp]
            if other > key or (other == key and other_place < place):
                key, place = other, other_place
        return key, place


@inlined
def score_of_sibling(score, own, following):
    """Return what the next sibling of an offer of `score` scores; NaN at times where the offer is not there.

    The order of these sums is part of the contract: another one rounds differently.
    """
    return (float(score) - float(own)) + float(following)  # NumPy's own numbers would warn of inf - inf


@inlined
def best_of_warp(key, place):
    """Return the warp's largest key and, of those who have it, the smallest place."""
    return _best_below(_top_of_warp(key), key, place)


@inlined
def _row(cell):
    return np.int32((cell & _CELL) >> _RANK_BITS)


@inlined
def candidate(log_probs, b, row, rank):
    """Return a candidate's log-probability in float64; -inf for one that is not finite or not there."""
    if row >= log_probs.shape[1] or rank >= log_probs.shape[2]:
        return -np.inf
    value = np.float64(log_probs[b, row, rank])
    return value if math.isfinite(value) else -np.inf


@functools.cache
def warp_kernels(warps: int, slots_of_lane: int) -> tuple[Any, Any, int]:
    """Return (kernel, kernel that fills bits and positions too, threads), for up to warps * lanes * slots nodes."""
    offering = warps * _LANES  # threads that hold offers
    threads = offering if warps > 1 or not ON_GPU else _THREADS  # one warp alone has helpers before and after
    most_slots = offering * slots_of_lane + 1
    most_links = 2 * most_slots
    table_size = 2048 if most_slots < 200 else 2800

    # Slots are unsigned: an index that may be negative costs a comparison. Conditions are joined by & and |: `and` and
    # `or` are branches, and the lanes part at each.
    owner_bits, owner_mask = np.uint32(offering.bit_length() - 1), np.uint32(offering - 1)

    @inlined
    def grow(log_probs, token_ids, root_tokens, tree, node_of):
        """Write all of the tree of this block's request but the bits; fill `node_of`; return its nodes."""
        score_of = cuda.shared.array(most_slots, np.float64)
        links = cuda.shared.array(most_links, np.int16)  # first children, then next siblings
        table = cuda.shared.array(table_size, np.float64)
        keys = cuda.shared.array((2, warps), np.uint64)
        places = cuda.shared.array((2, warps), np.uint32)
        cells = cuda.shared.array((2, warps), np.int32)
        children = cuda.shared.array((2, warps), np.uint64)
        lasts = cuda.shared.array((2, warps), np.int32)
        found = cuda.shared.array(1, np.int32)
        key = cuda.local.array(slots_of_lane, np.uint64)  # scores of the offers
        place = cuda.local.array(slots_of_lane, np.uint32)
        cell = cuda.local.array(slots_of_lane, np.int32)
        last = cuda.local.array(slots_of_lane, np.int32)  # last children

        b, thread = cuda.blockIdx.x, np.uint32(cuda.threadIdx.x)
        slots, depths = np.uint32(tree.parents.shape[1]), np.uint32(log_probs.shape[1])
        width = np.uint32(min(log_probs.shape[2] + 1, slots, (table_size - 1) // (depths + 1)))  # ranks in `table`
        for i in range(thread, np.uint32(depths * width + 1), threads):  # one entry is enough behind the last depth
            row = np.uint32(i) // width
            table[i] = candidate(log_probs, b, row, np.uint32(i) - row * width)
        for slot in range(thread, slots, threads):
            links[slot] = -1
            links[most_slots + slot] = -1
        if thread == 0:
            node_of[0] = 0
            # A lane whose best lies behind the last depth, and can't win, asks for its first child all the same.
            table[np.uint32(np.uint32(depths + np.uint32(1)) * width)] = -np.inf
        cuda.syncthreads()

        if thread < offering:
            for e in range(slots_of_lane):
                key[e] = np.uint64(0)
                place[e] = _UNUSED | np.uint32(e * offering + thread)
                cell[e] = 0
                last[e] = -1
            if thread == 0:
                key[0] = ordered(0.0 + table[0])  # a sum, so that -0.0 becomes 0.0
                place[0] = np.uint32(0)
            count = np.uint32(1)
            while count < slots:
                best, where, what, previous = key[0], place[0], cell[0], last[0]
                for e in range(1, slots_of_lane):
                    better = (key[e] > best) | ((key[e] == best) & (place[e] < where))
                    best = key[e] if better else best
                    where = place[e] if better else where
                    what = cell[e] if better else what
                    previous = last[e] if better else previous
                row, rank = np.uint32(what >> _RANK_BITS), np.uint32(what & _RANK)
                at = np.uint32(row * width + min(rank, np.uint32(width - np.uint32(2))))
                child = table[np.uint32(row * width + width)]
                own, following = table[at], table[np.uint32(at + np.uint32(1))]
                top = _top_of_warp(best)
                # What each lane's best will offer, should it win: computed while the lanes compare.
                score = unordered(best)
                child_key = ordered(score + child)
                sibling_key = ordered(score_of_sibling(score, own, following))
                winner, first = _best_below(top, best, where)
                owner = np.uint32(first & owner_mask)
                if warps == 1:
                    what, previous = _from_lane(what, np.int32(owner)), _from_lane(previous, np.int32(owner))
                    child_key = np.uint64(_from_lane(np.int64(child_key), np.int32(owner)))
                else:
                    parity, warp = np.uint32(count & np.uint32(1)), np.uint32(thread // np.uint32(_LANES))
                    if where == first:
                        keys[parity, warp], places[parity, warp] = best, where
                        cells[parity, warp], children[parity, warp] = what, child_key
                        lasts[parity, warp] = previous
                    cuda.syncthreads()  # the winners of all warps are there; those of the node before stay readable
                    winner, first = best_of_block(keys, places, parity, warps)
                    owner = np.uint32(first & owner_mask)
                    its_warp = np.uint32(owner // np.uint32(_LANES))
                    what, child_key = cells[parity, its_warp], children[parity, its_warp]
                    previous = lasts[parity, its_warp]
                if winner <= _NOTHING:
                    break

                parent, turn = np.uint32(first & _SLOT), np.uint32(first & ~_SLOT)
                row, rank = np.uint32(what >> _RANK_BITS), np.uint32(what & _RANK)
                if np.uint32(rank + np.uint32(1)) >= width:  # right for the winner; the others don't use it
                    own, following = candidate(log_probs, b, row, rank), candidate(log_probs, b, row, rank + 1)
                    sibling_key = ordered(score_of_sibling(score, own, following))

                which = np.uint32(parent >> owner_bits)
                # All lanes of one warp write the same, which costs less than a branch that one of them takes alone.
                if warps == 1 or thread == 0:
                    node_of[count] = np.int32(parent << np.uint32(_CELL_BITS)) | what
                    score_of[count] = unordered(winner)
                    links[np.uint32(parent if previous < 0 else previous + most_slots)] = np.int16(count)
                for e in range(slots_of_lane):
                    won = (thread == owner) & (which == e)
                    new = np.uint32(e * offering + thread) == count
                    moved = place[e] >= turn
                    place[e] = np.uint32(place[e] + _NEXT_TURN) if moved else place[e]
                    place[e] = np.uint32(turn | count) if new else place[e]
                    key[e] = sibling_key if won else key[e]
                    key[e] = child_key if new else key[e]
                    cell[e] = np.int32(what + 1) if won else cell[e]
                    cell[e] = np.int32(np.int32(row + 1) << _RANK_BITS) if new else cell[e]
                    last[e] = np.int32(count) if won else last[e]
                count = np.uint32(count + np.uint32(1))
            if thread == 0:
                found[0] = np.int32(count)
        cuda.syncthreads()  # all nodes are there

        nodes = found[0]
        for slot in range(thread, slots, threads):
            token, parent, depth, score = np.int32(0), np.int32(-1), np.int32(0), -np.inf
            if slot == 0:
                token, score = root_tokens[b], 0.0
            elif slot < nodes:
                node = node_of[slot]
                token = token_ids[b, _row(node), np.int32(node & _RANK)]
                parent, depth, score = np.int32(node >> _CELL_BITS), np.int32(_row(node) + 1), score_of[slot]
            tree.token_ids[b, slot] = token
            tree.parents[b, slot] = parent
            tree.depths[b, slot] = depth
            tree.first_child[b, slot] = links[slot]
            tree.next_sibling[b, slot] = links[most_slots + slot]
            tree.log_probs[b, slot] = score
        if thread == 0:
            tree.node_count[b] = nodes
        return nodes

    @cuda.jit
    def build_tree_warp_kernel(log_probs, token_ids, root_tokens, tree):
        """Grow the tree of one request in each block.

        log_probs (B, L, K float32), token_ids (B, L, K int32): candidates of each depth, best first.
        root_tokens (B int32): last emitted tokens.
        tree (DraftTree, N slots): all of it is written; ancestor bits 0.

        Launch: grid B, block `threads`, up to 42 KB of static shared memory.
        Needs: N - 1 <= warps * lanes * slots_of_lane; L <= 64.
        """
        node_of = cuda.shared.array(most_slots, np.int32)
        grow(log_probs, token_ids, root_tokens, tree, node_of)
        slots, words = tree.ancestor_bits.shape[1], tree.ancestor_bits.shape[2]
        for i in range(cuda.threadIdx.x, slots * words, threads):
            tree.ancestor_bits[cuda.blockIdx.x, i // words, i % words] = np.uint32(0)

    @cuda.jit
    def draft_tree_warp_kernel(log_probs, token_ids, root_tokens, prefix_lengths, tree, positions, status):
        """Grow the tree of one request in each block, and fill its bits and positions from the links at hand.

        log_probs, token_ids, root_tokens, tree: as in `build_tree_warp_kernel`, ancestor bits filled.
        prefix_lengths (B int32).
        positions (B, N int32), status (B int32): written, as by stage 3.

        Launch and needs: as `build_tree_warp_kernel`.
        """
        node_of = cuda.shared.array(most_slots, np.int32)
        count = grow(log_probs, token_ids, root_tokens, tree, node_of)
        b, words = cuda.blockIdx.x, tree.ancestor_bits.shape[2]
        for slot in range(cuda.threadIdx.x, tree.parents.shape[1], threads):
            depth = np.int32(_row(node_of[slot]) + 1) if 0 < slot < count else np.int32(0)
            positions[b, slot] = prefix_lengths[b] + depth
            node = np.int32(slot) if slot < count else np.int32(-1)
            for word in range(words - 1, -1, -1):  # slots fall on the way up to the root
                bits = np.uint32(0)
                while node >= word * 32:
                    bits |= np.uint32(1) << np.uint32(node & 31)
                    node = np.int32(node_of[node] >> _CELL_BITS) if node > 0 else np.int32(-1)
                tree.ancestor_bits[b, slot, word] = bits
        if cuda.threadIdx.x == 0:
            status[b] = STATUS_OK

    return build_tree_warp_kernel, draft_tree_warp_kernel, threads


WARP = SizedKernels(warp_kernels, _SIZES, _LANES)
"""The rung: compiled for a size of tree when one is first launched."""
