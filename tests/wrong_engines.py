"""Engines with one mistake each, written as someone would make it, not as the runner describes it.

Everything else they do right, so that the runner must find the one stage and name the one mistake.
"""

from __future__ import annotations

import heapq

import numpy as np

from ddtree_numba import (
    accept_walk_reference,
    ancestor_bitmask_reference,
    build_tree_reference,
    commit_kv_reference,
    empty_tree,
    positions_reference,
    top_candidates_reference,
)


class Right:
    """The stages that the mistakes below are made in, without them."""

    top_candidates = staticmethod(top_candidates_reference)
    build_tree = staticmethod(build_tree_reference)
    ancestor_bitmask = staticmethod(ancestor_bitmask_reference)
    positions = staticmethod(positions_reference)
    accept_walk = staticmethod(accept_walk_reference)
    commit_kv = staticmethod(commit_kv_reference)

    def sample_walk(self, tree, target_probs, draft_probs, uniforms, draft_length):
        tokens = np.full((len(uniforms), draft_length + 1), -1, np.int32)
        counts = np.zeros(len(uniforms), np.int32)
        children = {}
        for slot in range(int(tree.node_count[0]) - 1, 0, -1):
            children.setdefault(int(tree.parents[0, slot]), {})[int(tree.token_ids[0, slot])] = slot
        vocab = np.arange(target_probs.shape[1])
        rng = np.random.default_rng(7)  # a sampler of its own
        draws = [rng.choice(vocab, size=len(uniforms), p=row) for row in target_probs]
        for trial in range(len(uniforms)):
            node = 0
            while node is not None:
                token = int(draws[node][trial])
                tokens[trial, counts[trial]] = token
                counts[trial] += 1
                node = children.get(node, {}).get(token)
        return {"accept_tokens": tokens, "accept_count": counts}


class BudgetCountsTheRoot(Right):
    def build_tree(self, log_probs, token_ids, root_tokens, budget):
        tree = empty_tree(len(root_tokens), budget)
        smaller = build_tree_reference(log_probs, token_ids, root_tokens, max(budget - 1, 0))
        for name, field in tree._asdict().items():
            if field.ndim == 2:
                field[:, : max(budget, 1)] = getattr(smaller, name)
        tree.node_count[:] = smaller.node_count
        return tree


class Builder(Right):
    """A builder by links, not by rank paths; subclasses decide what comes next."""

    def build_tree(self, log_probs, token_ids, root_tokens, budget):
        tree = empty_tree(len(root_tokens), budget)
        for b in range(len(root_tokens)):
            tree.token_ids[b, 0], tree.log_probs[b, 0] = root_tokens[b], 0.0
            self.b, self.tree, self.lp, self.ids = b, tree, log_probs[b], token_ids[b]
            self.youngest = {}
            self.grow(budget)
        return tree

    def finite(self, depth, rank):
        return depth < len(self.lp) and rank < self.lp.shape[1] and np.isfinite(self.lp[depth, : rank + 1]).all()

    def add(self, parent, rank, score):
        tree, b = self.tree, self.b
        slot = int(tree.node_count[b])
        depth = int(tree.depths[b, parent]) + 1
        tree.token_ids[b, slot] = self.ids[depth - 1, rank]
        tree.parents[b, slot], tree.depths[b, slot], tree.log_probs[b, slot] = parent, depth, score
        if parent in self.youngest:
            tree.next_sibling[b, self.youngest[parent]] = slot
        else:
            tree.first_child[b, parent] = slot
        self.youngest[parent] = slot
        tree.node_count[b] += 1
        return slot


class TiesByInsertion(Builder):
    def grow(self, budget):
        heap, pushed = [], 0
        if budget and self.finite(0, 0):
            heap.append((-(0.0 + float(self.lp[0, 0])), 0, 0, 0))
        while heap and self.tree.node_count[self.b] <= budget:
            negative, _, parent, rank = heapq.heappop(heap)
            slot = self.add(parent, rank, -negative)
            depth = int(self.tree.depths[self.b, slot])
            if self.finite(depth - 1, rank + 1):
                pushed += 1
                score = (-negative - float(self.lp[depth - 1, rank])) + float(self.lp[depth - 1, rank + 1])
                heapq.heappush(heap, (-score, pushed, parent, rank + 1))
            if self.finite(depth, 0):
                pushed += 1
                heapq.heappush(heap, (-(-negative + float(self.lp[depth, 0])), pushed, slot, 0))


class ChainFirst(Builder):
    def grow(self, budget):
        chain, score = [0], 0.0
        while len(chain) <= budget and self.finite(len(chain) - 1, 0):
            score += float(self.lp[len(chain) - 1, 0])
            chain.append(self.add(chain[-1], 0, score))
        heap = []
        for parent in chain:  # then the alternatives, best first
            depth = int(self.tree.depths[self.b, parent])
            if self.finite(depth, 1):
                base = float(self.tree.log_probs[self.b, self.youngest[parent]]) - float(self.lp[depth, 0])
                heapq.heappush(heap, (-(base + float(self.lp[depth, 1])), (0,) * depth + (1,), parent, 1))
        while heap and self.tree.node_count[self.b] <= budget:
            negative, path, parent, rank = heapq.heappop(heap)
            slot = self.add(parent, rank, -negative)
            depth = len(path)
            if self.finite(depth - 1, rank + 1):
                score = (-negative - float(self.lp[depth - 1, rank])) + float(self.lp[depth - 1, rank + 1])
                heapq.heappush(heap, (-score, (*path[:-1], rank + 1), parent, rank + 1))
            if self.finite(depth, 0):
                heapq.heappush(heap, (-(-negative + float(self.lp[depth, 0])), (*path, 0), slot, 0))


class AddsAllChildren(Builder):
    def grow(self, budget):
        waiting = [(0.0, (), 0)]
        while waiting:
            waiting.sort()
            negative, path, node = waiting.pop(0)
            rank = 0
            while self.finite(len(path), rank) and self.tree.node_count[self.b] <= budget:
                score = -negative + float(self.lp[len(path), rank])
                waiting.append((-score, (*path, rank), self.add(node, rank, score)))
                rank += 1


class CountByToken(Right):
    def build_tree(self, *arguments, **named):
        tree = build_tree_reference(*arguments, **named)
        drafted = (tree.token_ids[:, 1:] > 0).sum(axis=1)
        return tree._replace(node_count=(drafted + 1).astype(np.int32))


class BigEndianBits(Right):
    def ancestor_bitmask(self, parents, node_count):
        bits, status = ancestor_bitmask_reference(parents, node_count)
        flags = np.unpackbits(bits.view(np.uint8).reshape(*bits.shape, 4), axis=-1, bitorder="little")
        words = flags.astype(np.uint32) @ (1 << np.arange(31, -1, -1, dtype=np.uint32))
        return words.astype(np.uint32), status


class BigEndianBytes(Right):
    def ancestor_bitmask(self, parents, node_count):
        bits, status = ancestor_bitmask_reference(parents, node_count)
        slots = parents.shape[1]
        flags = np.unpackbits(bits.view(np.uint8).reshape(*bits.shape[:2], -1), axis=-1, bitorder="little")[..., :slots]
        flags = np.concatenate([flags, np.zeros((*flags.shape[:2], -slots % 32), np.uint8)], axis=-1)
        return np.packbits(flags, axis=-1).view(np.uint32), status


class PositionsBySlot(Right):
    def positions(self, depths, prefix_lengths):
        return (np.arange(depths.shape[1]) + prefix_lengths.reshape(-1, 1)).astype(np.int32)


class LastSiblingWins(Right):
    """Keeps looking after a match, and so ends on the last one; loops are cut."""

    def accept_walk(self, tree, target_tokens, draft_length):
        path = accept_walk_reference(tree, target_tokens, draft_length)
        for b in range(len(target_tokens)):
            if path.status[b]:
                continue  # right about broken trees
            slots = [0]
            while len(slots) <= draft_length:
                child, found, turns = int(tree.first_child[b, slots[-1]]), -1, 0
                while 0 <= child < len(target_tokens[b]) and turns < len(target_tokens[b]):
                    turns += 1
                    if tree.token_ids[b, child] == target_tokens[b, slots[-1]]:
                        found = child
                    child = int(tree.next_sibling[b, child])
                if found < 0:
                    break
                slots.append(found)
            path.accept_slots[b], path.accept_tokens[b], path.accept_count[b] = -1, -1, len(slots)
            path.accept_slots[b, : len(slots)] = slots
            path.accept_tokens[b, : len(slots)] = target_tokens[b, slots]
        return path


class DescendingCommit(Right):
    def commit_kv(self, kv_pool, block_table, prefix_lengths, accept_slots, accept_count):
        status = commit_kv_reference(kv_pool.copy(), block_table, prefix_lengths.copy(), accept_slots, accept_count)
        size = kv_pool.shape[2]
        for b in np.flatnonzero(status == 0):
            start, count = int(prefix_lengths[b]), int(accept_count[b])
            for k in reversed(range(count)):
                a, z = start + int(accept_slots[b, k]), start + k
                kv_pool[:, block_table[b, z // size], z % size] = kv_pool[:, block_table[b, a // size], a % size]
            prefix_lengths[b] += count
        return status


class RatioAcceptance(Right):
    """min(1, p/q), as for a chain drafted by sampling, on children that were not sampled."""

    bonus = "target"

    def sample_walk(self, tree, target_probs, draft_probs, uniforms, draft_length):
        tokens = np.full((len(uniforms), draft_length + 1), -1, np.int32)
        counts = np.zeros(len(uniforms), np.int32)
        rng = np.random.default_rng(3)
        for trial in range(len(uniforms)):
            node = 0
            while True:
                child = int(tree.first_child[0, node])
                while child != -1:
                    token = int(tree.token_ids[0, child])
                    ratio = target_probs[node, token] / draft_probs[node, token]
                    if rng.random() < min(1.0, ratio):
                        break
                    child = int(tree.next_sibling[0, child])
                if child == -1:
                    break
                tokens[trial, counts[trial]] = tree.token_ids[0, child]
                counts[trial] += 1
                node = child
            left = target_probs[node]
            if self.bonus == "residual" and tree.first_child[0, node] != -1:
                left = np.maximum(target_probs[node] - draft_probs[node], 0)
                left = left / left.sum()
            tokens[trial, counts[trial]] = min(
                np.searchsorted(np.cumsum(left), rng.random(), side="right"), len(left) - 1
            )
            counts[trial] += 1
        return {"accept_tokens": tokens, "accept_count": counts}


class RatioAcceptanceWithResidual(RatioAcceptance):
    bonus = "residual"


WRONG: dict[str, list[type]] = {
    "budget counts the root": [BudgetCountsTheRoot],
    "ties by insertion": [TiesByInsertion],
    "chain first": [ChainFirst],
    "adds all children": [AddsAllChildren],
    "positions by slot": [PositionsBySlot],
    "count by token": [CountByToken],
    "descending commit": [DescendingCommit],
    "min(1, p/q)": [RatioAcceptance, RatioAcceptanceWithResidual],
    "last sibling wins": [LastSiblingWins],
    "bits big-endian": [BigEndianBits, BigEndianBytes],
}
"""Mistake, as the runner names it -> engines that make it."""
