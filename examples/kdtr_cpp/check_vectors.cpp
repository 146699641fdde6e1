// Reads golden vectors (`ddtree vectors write DIR`), builds every tree, mask and walk again in plain C++ and compares bit
// for bit; then writes what it built to DIR/../from_cpp.kdtr, or to the second argument, for Python to read back.

#include "ddtree.hpp"
#include "kdtr.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

namespace {

using ddtree::I32;
int differences = 0;

template <class T, class Values>
void compare(const std::string &what, const kdtr::Array<T> &expected, std::size_t at, const Values &got) {
    for (std::size_t i = 0; i < got.size(); ++i)
        if (std::memcmp(&expected[at + i], &got[i], sizeof(T)) != 0) {
            std::fprintf(stderr, "%s: element %zu differs\n", what.c_str(), at + i);
            ++differences;
            return;
        }
}

void check_tree(const std::string &name, const kdtr::File &file, kdtr::Writer &out) {
    const auto log_probs = file.array<float>("in/log_probs");
    const auto token_ids = file.array<I32>("in/token_ids"), roots = file.array<I32>("in/root_tokens");
    const auto budget = static_cast<std::size_t>(file.number<std::int64_t>("in/budget"));
    const std::size_t depths = log_probs.shape()[1], candidates = log_probs.shape()[2], slots = budget + 1;
    const auto count = file.array<I32>("expected/node_count");
    const auto scores = file.array<double>("expected/log_probs");
    std::vector<I32> parents;
    for (std::size_t b = 0; b < roots.size(); ++b) {
        const auto at = b * depths * candidates;
        const auto tree = ddtree::build_tree(log_probs.data() + at, token_ids.data() + at, depths, candidates, roots[b], budget);
        compare(name + " node_count", count, b, std::vector<I32>{tree.node_count});
        compare(name + " token_ids", file.array<I32>("expected/token_ids"), b * slots, tree.token_ids);
        compare(name + " parents", file.array<I32>("expected/parents"), b * slots, tree.parents);
        compare(name + " depths", file.array<I32>("expected/depths"), b * slots, tree.depths);
        compare(name + " first_child", file.array<I32>("expected/first_child"), b * slots, tree.first_child);
        compare(name + " next_sibling", file.array<I32>("expected/next_sibling"), b * slots, tree.next_sibling);
        compare(name + " log_probs", scores, b * slots, tree.log_probs);
        parents.insert(parents.end(), tree.parents.begin(), tree.parents.end());
    }
    out.add(name, {roots.size(), slots}, parents.data());
}

void check_walk(const std::string &name, const kdtr::File &file, kdtr::Writer &out) {
    const auto tokens = file.array<I32>("in/token_ids"), first = file.array<I32>("in/first_child");
    const auto next = file.array<I32>("in/next_sibling"), counts = file.array<I32>("in/node_count");
    const auto targets = file.array<I32>("in/target_tokens");
    const auto length = static_cast<std::size_t>(file.number<std::int64_t>("in/draft_length"));
    const std::size_t slots = tokens.shape()[1];
    std::vector<I32> accepted;
    for (std::size_t b = 0; b < counts.size(); ++b) {
        const auto at = b * slots;
        const auto path = ddtree::accept_walk(tokens.data() + at, first.data() + at, next.data() + at, counts[b], slots,
                                              targets.data() + at, length);
        compare(name + " accept_slots", file.array<I32>("expected/accept_slots"), b * (length + 1), path.slots);
        compare(name + " accept_tokens", file.array<I32>("expected/accept_tokens"), b * (length + 1), path.tokens);
        compare(name + " accept_count", file.array<I32>("expected/accept_count"), b, std::vector<I32>{path.count});
        compare(name + " status", file.array<I32>("expected/status"), b, std::vector<I32>{path.status});
        accepted.insert(accepted.end(), path.slots.begin(), path.slots.end());
    }
    out.add(name, {counts.size(), length + 1}, accepted.data());
}

void check_bits(const std::string &name, const kdtr::File &file, kdtr::Writer &out) {
    const auto parents = file.array<I32>("in/parents"), counts = file.array<I32>("in/node_count");
    const std::size_t slots = parents.shape()[1], words = (slots + 31) / 32;
    std::vector<std::uint32_t> all;
    for (std::size_t b = 0; b < counts.size(); ++b) {
        std::vector<std::uint32_t> bits(slots * words, 0);
        const I32 status = ddtree::ancestor_bits(parents.data() + b * slots, counts[b], slots, bits.data());
        compare(name + " ancestor_bits", file.array<std::uint32_t>("expected/ancestor_bits"), b * slots * words, bits);
        compare(name + " status", file.array<I32>("expected/status"), b, std::vector<I32>{status});
        all.insert(all.end(), bits.begin(), bits.end());
    }
    out.add(name, {counts.size(), slots, words}, all.data());
}

} // namespace

int main(int argc, char **argv) {
    namespace fs = std::filesystem;
    if (argc < 3 || !fs::is_directory(argv[1])) {
        std::fprintf(stderr, "usage: %s VECTORS OUT: without vectors (`ddtree vectors write DIR`) there is nothing to check\n", argv[0]);
        return 77;
    }
    std::size_t checked = 0, read = 0;
    try {
        kdtr::Writer out(argv[2]);
        std::vector<fs::path> files;
        for (const auto &each : fs::recursive_directory_iterator(argv[1]))
            if (each.path().extension() == ".kdtr") files.push_back(each.path());
        std::sort(files.begin(), files.end());
        for (const auto &path : files) {
            const kdtr::File file(path.string());
            file.verify();
            ++read;
            const auto stage = path.parent_path().filename().string(), name = stage + "/" + path.stem().string();
            const auto check = stage == "build_tree"         ? check_tree
                               : stage == "accept_walk"      ? check_walk
                               : stage == "ancestor_bitmask" ? check_bits
                                                             : nullptr;
            if (check == nullptr) continue;
            check(name, file, out);
            ++checked;
        }
        out.finish(R"({"written_by":"examples/kdtr_cpp"})");
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    std::printf("%zu files read, %zu cases built again, %d differences\n", read, checked, differences);
    return differences == 0 && checked > 0 ? 0 : 1;
}
