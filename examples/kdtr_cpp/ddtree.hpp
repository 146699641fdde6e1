// Stages of the DDTree decoding step in plain C++17: tree, visibility bits, positions, walk and commit of one request.
// Written from docs/contract.md, to be read and to be compared bit for bit; nothing here is fast.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <queue>
#include <vector>

namespace ddtree {

using I32 = std::int32_t;

struct Tree {
    explicit Tree(std::size_t slots)
        : token_ids(slots, 0), parents(slots, -1), depths(slots, 0), first_child(slots, -1), next_sibling(slots, -1),
          log_probs(slots, -INFINITY) {}
    std::vector<I32> token_ids, parents, depths, first_child, next_sibling;
    std::vector<double> log_probs;
    I32 node_count = 1;
};

// The paper's Algorithm 1: `log_probs` and `token_ids` are [depths, candidates] of one request.
inline Tree build_tree(const float *log_probs, const I32 *token_ids, std::size_t depths, std::size_t candidates,
                       I32 root_token, std::size_t budget) {
    struct Offer {
        double score;
        std::vector<std::uint32_t> path; // ranks at depths 1, 2, ...
        I32 parent, previous;
        bool operator<(const Offer &other) const { // the largest is taken first
            return score != other.score ? score < other.score : path > other.path;
        }
    };
    Tree tree(budget + 1);
    tree.token_ids[0] = root_token;
    tree.log_probs[0] = 0.0;
    std::priority_queue<Offer> heap;
    const auto offer = [&](double base, std::vector<std::uint32_t> path, I32 parent, I32 previous) {
        const std::size_t depth = path.size(), rank = path.back();
        if (depth > depths || rank >= candidates) return;
        const double own = log_probs[(depth - 1) * candidates + rank];
        if (std::isfinite(own)) heap.push({base + own, std::move(path), parent, previous});
    };
    offer(0.0, {0}, 0, -1);
    while (!heap.empty() && static_cast<std::size_t>(tree.node_count) <= budget) {
        const Offer best = heap.top();
        heap.pop();
        const std::size_t depth = best.path.size(), rank = best.path.back();
        const I32 slot = tree.node_count++;
        tree.token_ids[slot] = token_ids[(depth - 1) * candidates + rank];
        tree.parents[slot] = best.parent;
        tree.depths[slot] = static_cast<I32>(depth);
        tree.log_probs[slot] = best.score;
        (best.previous < 0 ? tree.first_child[best.parent] : tree.next_sibling[best.previous]) = slot;

        std::vector<std::uint32_t> sibling = best.path, child = best.path;
        ++sibling.back();
        child.push_back(0);
        const double without = best.score - log_probs[(depth - 1) * candidates + rank];
        offer(without, std::move(sibling), best.parent, slot);
        offer(best.score, std::move(child), slot, -1);
    }
    return tree;
}

constexpr I32 status_broken_link = 1, status_too_deep = 2, status_bad_page = 4;

// Fills `bits` [slots, words] (zeros before) of one request; returns its status.
inline I32 ancestor_bits(const I32 *parents, I32 count, std::size_t slots, std::uint32_t *bits) {
    const std::size_t words = (slots + 31) / 32;
    if (count < 1 || static_cast<std::size_t>(count) > slots) return status_broken_link;
    I32 status = 0;
    for (I32 slot = 0; slot < count; ++slot) {
        std::uint32_t *row = bits + slot * words;
        if (slot > 0) {
            const I32 parent = parents[slot];
            if (parent >= 0 && parent < slot) std::memcpy(row, bits + parent * words, words * 4);
            if (row[0] == 0) { // every whole row sees the root: bit 0
                status = status_broken_link;
                continue;
            }
        } else if (parents[0] != -1) {
            status = status_broken_link;
            continue;
        }
        row[slot / 32] |= std::uint32_t(1) << (slot % 32);
    }
    return status;
}

struct Path {
    std::vector<I32> slots, tokens; // [length + 1], unused -1
    I32 count = 0, status = 0;
};

inline Path accept_walk(const I32 *token_ids, const I32 *first_child, const I32 *next_sibling, I32 count,
                        std::size_t slots, const I32 *target_tokens, std::size_t length) {
    Path path;
    path.slots.assign(length + 1, -1);
    path.tokens.assign(length + 1, -1);
    if (count < 1 || static_cast<std::size_t>(count) > slots) {
        path.status = status_broken_link;
        count = count < 1 ? 1 : static_cast<I32>(slots);
    }
    I32 node = 0, unseen = count - 1; // no node is looked at twice in a whole tree
    for (;;) {
        path.slots[path.count] = node;
        path.tokens[path.count++] = target_tokens[node];
        I32 child = first_child[node];
        for (; child != -1; child = next_sibling[child]) {
            if (child <= node || child >= count || unseen-- == 0) {
                path.status |= status_broken_link;
                return path;
            }
            if (token_ids[child] == target_tokens[node]) break;
        }
        if (child == -1) return path;
        if (static_cast<std::size_t>(path.count) > length) {
            path.status |= status_too_deep;
            return path;
        }
        node = child;
    }
}

// Moves the accepted rows of one request in a pool [layers, pages, page_size, row_bytes]; returns its status.
inline I32 commit_kv(unsigned char *pool, std::size_t layers, std::size_t pages, std::size_t page_size,
                     std::size_t row_bytes, const I32 *table, std::size_t table_pages, I32 &prefix, const I32 *slots,
                     std::size_t columns, I32 count) {
    if (count < 0 || static_cast<std::size_t>(count) > columns) return status_broken_link;
    for (I32 k = 0; k < count; ++k)
        if (slots[k] < 0 || (k > 0 && slots[k] <= slots[k - 1])) return status_broken_link;
    if (count == 0) return 0;
    const std::int64_t rows = static_cast<std::int64_t>(table_pages * page_size);
    if (prefix < 0 || std::int64_t(prefix) + slots[count - 1] >= rows) return status_bad_page;
    const auto page_of = [&](std::int64_t row) { return table[row / static_cast<std::int64_t>(page_size)]; };
    for (I32 k = 0; k < count; ++k)
        for (const std::int64_t row : {std::int64_t(prefix) + slots[k], std::int64_t(prefix) + k})
            if (page_of(row) < 0 || static_cast<std::size_t>(page_of(row)) >= pages) return status_bad_page;
    const auto place = [&](std::size_t layer, std::int64_t row) {
        const auto in_page = static_cast<std::size_t>(row % static_cast<std::int64_t>(page_size));
        return pool + ((layer * pages + static_cast<std::size_t>(page_of(row))) * page_size + in_page) * row_bytes;
    };
    for (I32 k = 0; k < count; ++k) // ascending: a row is read before another takes its place
        for (std::size_t layer = 0; layer < layers && slots[k] != k; ++layer)
            std::memcpy(place(layer, std::int64_t(prefix) + k), place(layer, std::int64_t(prefix) + slots[k]), row_bytes);
    prefix += count;
    return 0;
}

} // namespace ddtree
