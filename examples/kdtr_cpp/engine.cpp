// A small engine for `ddtree conformance --command "kdtr_engine --in {in} --out {out}"`: it reads a case, answers it with
// the functions of ddtree.hpp and writes what came out. Stages that it does not have end in exit code 77.

#include "ddtree.hpp"
#include "kdtr.hpp"

#include <cstdio>
#include <string>
#include <vector>

namespace {

using ddtree::I32;
using Shape = std::vector<std::uint64_t>;

void build_tree(const kdtr::File &in, kdtr::Writer &out) {
    const auto log_probs = in.array<float>("log_probs");
    const auto token_ids = in.array<I32>("token_ids"), roots = in.array<I32>("root_tokens");
    const auto budget = static_cast<std::size_t>(in.number<std::int64_t>("budget"));
    const std::size_t batch = roots.size(), depths = log_probs.shape()[1], candidates = log_probs.shape()[2];
    std::vector<I32> tokens, parents, levels, first, next, counts;
    std::vector<double> scores;
    for (std::size_t b = 0; b < batch; ++b) {
        const std::size_t at = b * depths * candidates;
        const auto tree = ddtree::build_tree(log_probs.data() + at, token_ids.data() + at, depths, candidates, roots[b], budget);
        tokens.insert(tokens.end(), tree.token_ids.begin(), tree.token_ids.end());
        parents.insert(parents.end(), tree.parents.begin(), tree.parents.end());
        levels.insert(levels.end(), tree.depths.begin(), tree.depths.end());
        first.insert(first.end(), tree.first_child.begin(), tree.first_child.end());
        next.insert(next.end(), tree.next_sibling.begin(), tree.next_sibling.end());
        scores.insert(scores.end(), tree.log_probs.begin(), tree.log_probs.end());
        counts.push_back(tree.node_count);
    }
    const Shape shape{batch, budget + 1};
    out.add("token_ids", shape, tokens.data());
    out.add("parents", shape, parents.data());
    out.add("depths", shape, levels.data());
    out.add("first_child", shape, first.data());
    out.add("next_sibling", shape, next.data());
    out.add("log_probs", shape, scores.data());
    out.add("node_count", {batch}, counts.data());
}

void ancestor_bitmask(const kdtr::File &in, kdtr::Writer &out) {
    const auto parents = in.array<I32>("parents"), counts = in.array<I32>("node_count");
    const std::size_t batch = counts.size(), slots = parents.shape()[1], words = (slots + 31) / 32;
    std::vector<std::uint32_t> bits(batch * slots * words, 0);
    std::vector<I32> status;
    for (std::size_t b = 0; b < batch; ++b)
        status.push_back(ddtree::ancestor_bits(parents.data() + b * slots, counts[b], slots, &bits[b * slots * words]));
    out.add("ancestor_bits", {batch, slots, words}, bits.data());
    out.add("status", {batch}, status.data());
}

void positions(const kdtr::File &in, kdtr::Writer &out) {
    const auto depths = in.array<I32>("depths"), prefix = in.array<I32>("prefix_lengths");
    std::vector<I32> where;
    for (std::size_t i = 0; i < depths.size(); ++i) where.push_back(prefix[i / depths.shape()[1]] + depths[i]);
    out.add("positions", depths.shape(), where.data());
}

void accept_walk(const kdtr::File &in, kdtr::Writer &out) {
    const auto tokens = in.array<I32>("token_ids"), first = in.array<I32>("first_child"), next = in.array<I32>("next_sibling");
    const auto counts = in.array<I32>("node_count"), targets = in.array<I32>("target_tokens");
    const auto length = static_cast<std::size_t>(in.number<std::int64_t>("draft_length"));
    const std::size_t batch = counts.size(), slots = tokens.shape()[1];
    std::vector<I32> path_slots, path_tokens, path_counts, status;
    for (std::size_t b = 0; b < batch; ++b) {
        const std::size_t at = b * slots;
        const auto path = ddtree::accept_walk(tokens.data() + at, first.data() + at, next.data() + at, counts[b], slots,
                                              targets.data() + at, length);
        path_slots.insert(path_slots.end(), path.slots.begin(), path.slots.end());
        path_tokens.insert(path_tokens.end(), path.tokens.begin(), path.tokens.end());
        path_counts.push_back(path.count);
        status.push_back(path.status);
    }
    out.add("accept_slots", {batch, length + 1}, path_slots.data());
    out.add("accept_tokens", {batch, length + 1}, path_tokens.data());
    out.add("accept_count", {batch}, path_counts.data());
    out.add("status", {batch}, status.data());
}

template <class T> void commit_rows(const kdtr::File &in, kdtr::Writer &out) {
    const auto pool = in.array<T>("kv_pool");
    const auto table = in.array<I32>("block_table"), lengths = in.array<I32>("prefix_lengths");
    const auto slots = in.array<I32>("accept_slots"), counts = in.array<I32>("accept_count");
    std::vector<T> rows(pool.begin(), pool.end());
    std::vector<I32> prefix(lengths.begin(), lengths.end()), status;
    const auto &s = pool.shape();
    const std::size_t columns = slots.shape()[1], max_pages = table.shape()[1];
    for (std::size_t b = 0; b < counts.size(); ++b)
        status.push_back(ddtree::commit_kv(reinterpret_cast<unsigned char *>(rows.data()), s[0], s[1], s[2], s[3] * sizeof(T),
                                           table.data() + b * max_pages, max_pages, prefix[b], slots.data() + b * columns,
                                           columns, counts[b]));
    out.add("kv_pool", s, rows.data());
    out.add("prefix_lengths", lengths.shape(), prefix.data());
    out.add("status", {counts.size()}, status.data());
}

void commit_kv(const kdtr::File &in, kdtr::Writer &out) {
    const auto dtype = in.entry("kv_pool").dtype;
    if (dtype == kdtr::Dtype{kdtr::Kind::UInt, 8}) return commit_rows<std::uint8_t>(in, out);
    if (dtype == kdtr::Dtype{kdtr::Kind::UInt, 16}) return commit_rows<std::uint16_t>(in, out);
    if (dtype == kdtr::Dtype{kdtr::Kind::Float, 16}) return commit_rows<kdtr::Half>(in, out);
    if (dtype == kdtr::Dtype{kdtr::Kind::Float, 32}) return commit_rows<float>(in, out);
    if (dtype == kdtr::Dtype{kdtr::Kind::Float, 64}) return commit_rows<double>(in, out);
    throw kdtr::Error("kv_pool: a dtype that this engine does not move");
}

// The value of a string in the flat metadata that the runner writes.
std::string field(std::string_view json, const std::string &name) {
    const auto key = json.find("\"" + name + "\":\"");
    if (key == std::string_view::npos) throw kdtr::Error("metadata: has no " + name);
    const auto begin = key + name.size() + 4;
    return std::string(json.substr(begin, json.find('"', begin) - begin));
}

} // namespace

int main(int argc, char **argv) {
    std::string in_path, out_path;
    for (int i = 1; i + 1 < argc; i += 2) (std::string(argv[i]) == "--in" ? in_path : out_path) = argv[i + 1];
    if (in_path.empty() || out_path.empty()) {
        std::fprintf(stderr, "usage: %s --in FILE --out FILE\n", argv[0]);
        return 2;
    }
    try {
        const kdtr::File in(in_path);
        const auto stage = field(in.metadata(), "stage");
        void (*run)(const kdtr::File &, kdtr::Writer &) = stage == "build_tree"         ? build_tree
                                                          : stage == "ancestor_bitmask" ? ancestor_bitmask
                                                          : stage == "positions"        ? positions
                                                          : stage == "accept_walk"      ? accept_walk
                                                          : stage == "commit_kv"        ? commit_kv
                                                                                        : nullptr;
        if (run == nullptr) return 77; // not supported
        kdtr::Writer out(out_path);
        run(in, out);
        out.finish(R"({"engine":"examples/kdtr_cpp"})");
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
