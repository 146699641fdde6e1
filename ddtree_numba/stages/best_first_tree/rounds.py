"""Rung 3: in each round, all the nodes that nothing yet to come can overtake.

What changed: `warp` adds one node and looks at all offers again. But most of the time the next nodes are known already.
An offer that becomes a node makes two new ones, its first child and its next sibling, and both scores can be computed
before. The better of them (or the offer's own score, should that be less: sums round) is the offer's *limit*: nothing
that it brings comes up before. So all offers that come before the first of all limits are the next nodes, in their
order, and the heap would not have popped anything between them. There is always one: the offer with the first limit.

Where scores are equal the places decide, as in `warp`. A new offer stands where the old one stood (`one_thread.py`
proves it), so a limit has its offer's place, and an offer may be chosen that stands no further back.

A round has two parts, and a barrier after each. First every thread compares its offers with the first limit, and lists
those that come before it. Then three groups of warps work at the same time on what is listed:

- *Owners* keep the offers. They move the turns of those that stay, and look for the first of their limits.
- *Makers* compute the new offers, two threads for each node: one for its first child, one for its next sibling.
- *Writers* write the nodes.

Nothing is sorted: a listed offer's slot is the number of those that come before it.

What it buys: few steps, where many offers wait. Candidates as the benchmark draws them make 1024 nodes in 32 to 110
rounds, counted in eight draws. Measured on an H200, bits included, in one run with `warp`: 106 us for 1024 nodes of one
request (`warp`: 559), 38 us for 256 (107); with candidates of which the first of a depth mostly has a large share, as a
language model's do, 197 (561) and 51 us (107). For 64 nodes `warp` is faster, 20 us against 22: it needs no barrier.

What it costs: the time depends on the candidates, since a round takes about 1 us and has one node at least. Where each
node hangs on the one before, it has no more: 1024 nodes took 713 us (`warp`: 559) with 0.999 for the first candidate of
every depth, and 1034 us (634) with all candidates equal. And three kinds of warps at work in one loop are more to read.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.draft_tree import STATUS_OK
from ddtree_numba.ptx import inlined, kernel_for
from ddtree_numba.stages.best_first_tree.sized_kernels import SizedKernels
from ddtree_numba.stages.best_first_tree.warp import (
    best_of_block,
    best_of_warp,
    candidate,
    ordered,
    score_of_sibling,
    unordered,
)

__all__ = ["ROUNDS", "rounds_kernels"]

_LANES = 32 if ON_GPU else 1
_SLOT_BITS, _SLOT = np.uint32(11), np.uint32((1 << 11) - 1)  # a place is a turn and, in 11 bits, a slot
_LAST_PLACE = np.uint32(0xFFFFFFFF)
_RANK_BITS, _RANK = np.uint32(10), np.uint32((1 << 10) - 1)  # a cell is what is offered: row (depth - 1), rank
_CELL_BITS, _CELL = np.uint32(16), np.uint32((1 << 16) - 1)  # a node is its parent's slot, and its cell
_ONE, _TWO = np.uint32(1), np.uint32(2)
_MAKERS, _WRITERS = (128, 64) if ON_GPU else (2, 1)  # threads
_SIZES = ((8, 1), (8, 4)) if ON_GPU else ((2, 20), (2, 512))
"""(warps of owners, slots of a lane), smallest first."""


class _Offers(NamedTuple):
    """What each slot offers, by slot."""

    score: Any
    limit: Any
    place: Any
    cell: Any


class _Chosen(NamedTuple):
    """The offers that become nodes in this round, in any order."""

    score: Any
    place: Any
    cell: Any


@inlined
def _comes_first(value, place, other, other_place):
    # Joined by & and |: `and` and `or` are branches, and the lanes part at each.
    return (value > other) | ((value == other) & (place < other_place))


@inlined
def _row(node):
    return np.uint32((node & _CELL) >> _RANK_BITS)


@inlined
def _limit(score, own, following, child):
    """Return the best score that an offer of `score` makes room for once it is a node, or `score` if that is less."""
    sibling, child = score_of_sibling(score, own, following), score + child
    best = child if child > sibling else sibling
    return ordered(best if best < score else score)


@inlined
def _number_before(chosen, count, score, place):
    """Return how many of the `count` chosen offers come before this one, and how many stand before it."""
    before, in_front, i = np.uint32(0), np.uint32(0), np.uint32(0)
    while i < count:
        other, other_place = chosen.score[i], chosen.place[i]
        before = np.uint32(before + _ONE) if _comes_first(other, other_place, score, place) else before
        in_front = np.uint32(in_front + _ONE) if other_place < place else in_front
        i = np.uint32(i + _ONE)
    return before, in_front


@functools.cache
def rounds_kernels(warps: int, slots_of_lane: int) -> tuple[Any, Any, int]:
    """Return (kernel, kernel that fills bits and positions too, threads), for up to warps * lanes * slots nodes."""
    owners = warps * _LANES
    searchers = owners + _MAKERS  # threads that look for the first limit
    threads = searchers + _WRITERS
    searching_warps = searchers // _LANES
    most_offers = owners * slots_of_lane  # the last slot makes none
    most_slots = most_offers + 1
    table_size = 2048 if most_offers < 300 else 1408

    @inlined
    def clear(tree, thread):
        """Write what a tree without nodes has; the fields that `finish` writes are left out."""
        b, slots, words = cuda.blockIdx.x, np.uint32(tree.parents.shape[1]), np.uint32(tree.ancestor_bits.shape[2])
        for slot in range(thread, slots, threads):
            tree.first_child[b, slot] = -1
            tree.next_sibling[b, slot] = -1
            tree.log_probs[b, slot] = 0.0 if slot == 0 else -np.inf
        slot, word = np.uint32(thread // words), np.uint32(thread % words)
        while slot < slots:
            tree.ancestor_bits[b, slot, word] = np.uint32(0)
            slot, word = np.uint32(slot + np.uint32(threads) // words), np.uint32(word + np.uint32(threads) % words)
            if word >= words:
                slot, word = np.uint32(slot + _ONE), np.uint32(word - words)

    @inlined
    def choose(offers, chosen, listed_ever, listed_before, thread, first, where, score, place, limit):
        """List this owner's offers that come no later than the first limit; they have no limit from now on."""
        bound = unordered(first)
        for e in range(slots_of_lane):
            in_time = (score[e] > bound) | ((score[e] == bound) & (place[e] <= where))
            if in_time & (score[e] > -np.inf):
                i = np.uint32(np.uint32(cuda.atomic.add(listed_ever, 0, 1)) - listed_before)
                chosen.score[i], chosen.place[i] = score[e], place[e]
                chosen.cell[i] = offers.cell[np.uint32(e * owners + thread)]
                limit[e] = 0

    @inlined
    def stay(offers, chosen, listed, thread, place, limit):
        """Move the turns of this owner's offers that stay; return the first of their limits, and its place."""
        first, where = np.uint64(0), _LAST_PLACE
        for e in range(slots_of_lane):
            if limit[e] > 0:
                late, i = np.uint32(0), np.uint32(0)
                while i < listed:
                    late = np.uint32(late + _ONE) if chosen.place[i] < place[e] else late
                    i = np.uint32(i + _ONE)
                moved = np.uint32(place[e] + np.uint32(late << _SLOT_BITS))
                offers.place[np.uint32(e * owners + thread)] = moved
                better = _comes_first(limit[e], moved, first, where)
                first, where = limit[e] if better else first, moved if better else where
        return first, where

    @inlined
    def make(offers, chosen, listed, thread, count, table, width, log_probs):
        """Write this maker's new offers; return the first of their limits, and its place."""
        first, where = np.uint64(0), _LAST_PLACE
        is_child = (thread & _ONE) == 1
        i = np.uint32(np.uint32(thread - np.uint32(owners)) >> _ONE)
        while i < listed:
            parent_score, place, cell = chosen.score[i], chosen.place[i], np.uint32(chosen.cell[i])
            row, rank = np.uint32(cell >> _RANK_BITS), np.uint32(cell & _RANK)
            here, below = np.uint32(np.uint32(row * width) + rank), np.uint32(np.uint32(row * width) + width)
            at = below if is_child else np.uint32(here + _ONE)
            child = np.float64(table[np.uint32(below + width) if is_child else below])
            if is_child | (np.uint32(rank + _TWO) < width):
                own = np.float64(np.float32(0) if is_child else table[here])
                value, following = np.float64(table[at]), np.float64(table[np.uint32(at + _ONE)])
            else:
                own = candidate(log_probs, cuda.blockIdx.x, row, rank)
                value = candidate(log_probs, cuda.blockIdx.x, row, np.uint32(rank + _ONE))
                following = candidate(log_probs, cuda.blockIdx.x, row, np.uint32(rank + _TWO))
            score = score_of_sibling(parent_score, own, value)  # of a first child, too: 0 changes no sum
            limit = _limit(score, value, following, child)

            before, in_front = _number_before(chosen, listed, parent_score, place)
            parent = np.uint32(place & _SLOT)
            slot = np.uint32(count + before) if is_child else parent
            turn = np.uint32(np.uint32(place >> _SLOT_BITS) + in_front)
            place = np.uint32(np.uint32((turn if is_child else np.uint32(turn + _ONE)) << _SLOT_BITS) | slot)
            offers.score[slot], offers.limit[slot], offers.place[slot] = score, limit, place
            # Row 64, behind the last of 64 depths, is cut off: nothing is there, and nobody chooses it.
            offers.cell[slot] = np.uint32(np.uint32(row + _ONE) << _RANK_BITS) if is_child else np.uint32(cell + _ONE)
            better = _comes_first(limit, place, first, where)
            first, where = limit if better else first, place if better else where
            i = np.uint32(i + np.uint32(_MAKERS // 2))
        return first, where

    @inlined
    def write(chosen, listed, thread, count, slots, node_of, last_of, tree):
        """Write this writer's nodes."""
        b = cuda.blockIdx.x
        i = np.uint32(thread - np.uint32(searchers))
        while i < listed:
            score, place = chosen.score[i], chosen.place[i]
            before, _ = _number_before(chosen, listed, score, place)
            slot, parent = np.uint32(count + before), np.uint32(place & _SLOT)
            if slot < slots:
                node_of[slot] = np.uint32(np.uint32(parent << _CELL_BITS) | np.uint32(chosen.cell[i]))
                tree.log_probs[b, slot] = score
                previous = np.uint32(last_of[parent])
                if previous == 0:
                    tree.first_child[b, parent] = slot
                else:
                    tree.next_sibling[b, previous] = slot
                last_of[parent] = slot
            i = np.uint32(i + np.uint32(_WRITERS))

    @inlined
    def finish(token_ids, root_tokens, tree, thread, slots, count, node_of):
        """Write tokens, parents, depths and the number of nodes."""
        b = cuda.blockIdx.x
        for slot in range(thread, slots, threads):
            token, parent, depth = np.int32(0), np.int32(-1), np.int32(0)
            if slot == 0:
                token = root_tokens[b]
            elif slot < count:
                node = np.uint32(node_of[slot])
                token = token_ids[b, _row(node), np.uint32(node & _RANK)]
                parent, depth = np.int32(node >> _CELL_BITS), np.int32(_row(node) + 1)
            tree.token_ids[b, slot] = token
            tree.parents[b, slot] = parent
            tree.depths[b, slot] = depth
        if thread == 0:
            tree.node_count[b] = count

    @inlined
    def grow(log_probs, token_ids, root_tokens, tree, node_of):
        """Write all of the tree of this block's request, the bits as 0; fill `node_of`; return the number of nodes."""
        score_of = cuda.shared.array(most_offers, np.float64)
        limit_of = cuda.shared.array(most_offers, np.uint64)
        place_of = cuda.shared.array(most_offers, np.uint32)
        cell_of = cuda.shared.array(most_offers, np.uint16)
        last_of = cuda.shared.array(most_offers, np.uint16)  # last children; 0: none
        chosen_score = cuda.shared.array(most_offers, np.float64)
        chosen_place = cuda.shared.array(most_offers, np.uint32)
        chosen_cell = cuda.shared.array(most_offers, np.uint16)
        listed_ever = cuda.shared.array(1, np.uint32)
        first_limits = cuda.shared.array((1, searching_warps), np.uint64)  # 1: `warp` has two sets of these
        first_places = cuda.shared.array((1, searching_warps), np.uint32)
        table = cuda.shared.array(table_size, np.float32)
        score = cuda.local.array(slots_of_lane, np.float64)
        place = cuda.local.array(slots_of_lane, np.uint32)
        limit = cuda.local.array(slots_of_lane, np.uint64)
        offers = _Offers(score_of, limit_of, place_of, cell_of)
        chosen = _Chosen(chosen_score, chosen_place, chosen_cell)

        b, thread = cuda.blockIdx.x, np.uint32(cuda.threadIdx.x)
        slots, depths = np.uint32(tree.parents.shape[1]), np.uint32(log_probs.shape[1])
        rows = np.uint32(depths + _TWO)  # two of nothing behind the last depth
        width = np.uint32(min(log_probs.shape[2] + 2, slots + _ONE, table_size // rows))  # ranks that lie in `table`
        for i in range(thread, np.uint32(rows * width), threads):
            row = np.uint32(np.uint32(i) // width)
            table[i] = candidate(log_probs, b, row, np.uint32(np.uint32(i) - np.uint32(row * width)))
        for slot in range(thread, most_offers, threads):
            score_of[slot] = -np.inf
            limit_of[slot] = place_of[slot] = last_of[slot] = 0  # a limit of 0 is no offer's
        clear(tree, thread)
        for i in range(thread, searching_warps, threads):
            first_limits[0, i], first_places[0, i] = np.uint64(0), _LAST_PLACE
        cuda.syncthreads()
        if thread == 0:
            node_of[0], listed_ever[0] = 0, 0
            own = np.float64(table[0])
            score_of[0], cell_of[0] = 0.0 + own, 0  # a sum, so that -0.0 becomes 0.0
            limit_of[0] = first_limits[0, 0] = _limit(0.0 + own, own, np.float64(table[1]), np.float64(table[width]))
            first_places[0, 0] = 0
        cuda.syncthreads()  # the root's offer is there

        count = np.uint32(1)
        while count < slots:
            listed_before = np.uint32(count - _ONE)  # every node but the root was listed once
            if thread < owners:
                for e in range(slots_of_lane):  # all loads at once, on their way while the first limit is found
                    slot = np.uint32(e * owners + thread)
                    score[e], place[e], limit[e] = score_of[slot], place_of[slot], limit_of[slot]
            first, where = best_of_block(first_limits, first_places, np.uint32(0), searching_warps)
            if thread < owners:
                choose(offers, chosen, listed_ever, listed_before, thread, first, where, score, place, limit)
            cuda.syncthreads()  # all offers that become nodes are listed
            listed = np.uint32(listed_ever[0] - listed_before)
            if listed == 0:
                break

            if thread >= searchers:
                write(chosen, listed, thread, count, slots, node_of, last_of, tree)
            elif np.uint32(count + listed) < slots:
                if thread < owners:
                    first, where = stay(offers, chosen, listed, thread, place, limit)
                else:
                    first, where = make(offers, chosen, listed, thread, count, table, width, log_probs)
                first, where = best_of_warp(first, where)
                if np.uint32(thread % np.uint32(_LANES)) == 0:
                    warp = np.uint32(thread // np.uint32(_LANES))
                    first_limits[0, warp], first_places[0, warp] = first, where
            cuda.syncthreads()  # the nodes, their offers and the limits are there
            count = np.uint32(min(np.uint32(count + listed), slots))

        finish(token_ids, root_tokens, tree, thread, slots, count, node_of)
        return count

    @kernel_for(threads, 1)
    def build_tree_rounds_kernel(log_probs, token_ids, root_tokens, tree):
        """Grow the tree of one request in each block.

        log_probs (B, L, K float32), token_ids (B, L, K int32): candidates of each depth, best first.
        root_tokens (B int32): last emitted tokens.
        tree (DraftTree, N slots): all of it is written; ancestor bits 0.

        Launch: grid B, block `threads`, up to 48 KB of static shared memory.
        Needs: N - 1 <= warps * lanes * slots_of_lane <= 1024; L <= 64.
        """
        node_of = cuda.shared.array(most_slots, np.uint32)
        grow(log_probs, token_ids, root_tokens, tree, node_of)

    @kernel_for(threads, 1)
    def draft_tree_rounds_kernel(log_probs, token_ids, root_tokens, prefix_lengths, tree, positions, status):
        """Grow the tree of one request in each block, and fill its bits and positions from the nodes at hand.

        log_probs, token_ids, root_tokens, tree: as in `build_tree_rounds_kernel`, ancestor bits filled.
        prefix_lengths (B int32).
        positions (B, N int32), status (B int32): written, as by stage 3.

        Launch and needs: as `build_tree_rounds_kernel`.
        """
        node_of = cuda.shared.array(most_slots, np.uint32)
        count = grow(log_probs, token_ids, root_tokens, tree, node_of)
        b = cuda.blockIdx.x
        for slot in range(cuda.threadIdx.x, tree.parents.shape[1], threads):
            depth = np.uint32(0)
            if slot < count:
                node, word, bits = np.uint32(slot), np.uint32(slot >> 5), np.uint32(0)
                while True:  # slots fall on the way up to the root
                    if np.uint32(node >> np.uint32(5)) != word:
                        tree.ancestor_bits[b, slot, word] = bits
                        word, bits = np.uint32(node >> np.uint32(5)), np.uint32(0)
                    bits |= np.uint32(_ONE << np.uint32(node & np.uint32(31)))
                    if node == 0:
                        break
                    node = np.uint32(node_of[node] >> _CELL_BITS)
                    depth = np.uint32(depth + _ONE)
                tree.ancestor_bits[b, slot, word] = bits
            positions[b, slot] = np.int32(prefix_lengths[b] + depth)
        if cuda.threadIdx.x == 0:
            status[b] = STATUS_OK

    return build_tree_rounds_kernel, draft_tree_rounds_kernel, threads


ROUNDS = SizedKernels(rounds_kernels, _SIZES, _LANES)
"""The rung: compiled for a size of tree when one is first launched."""
