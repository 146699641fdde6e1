// Writes a small file and damages it in every way: cut at every length, every bit flipped, and random bytes behind honest
// checksums. Reading must give the arrays or one kdtr::Error. Best built with -fsanitize=address,undefined.

#include "kdtr.hpp"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

namespace {

std::string slurp(const std::string &path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

// Whether reading `content` gives arrays; false when it is refused. Anything but a kdtr::Error ends the program.
bool readable(const std::string &path, const std::string &content) {
    std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
    try {
        const kdtr::File file(path);
        file.verify();
        return true;
    } catch (const kdtr::Error &) {
        return false;
    }
}

void reseal(std::string &content) {
    const auto number = [&](std::size_t at) {
        std::uint64_t value;
        std::memcpy(&value, &content[at], 8);
        return value;
    };
    const auto seal = [&](std::size_t at, std::uint64_t begin, std::uint64_t size) {
        if (begin > content.size() || size > content.size() - begin) return;
        const auto crc = kdtr::detail::crc32(content.data() + begin, size);
        std::memcpy(&content[at], &crc, 4);
    };
    seal(52, number(16), number(24));
    seal(56, number(32), number(40));
    seal(60, 0, 60);
}

template <class Work> bool throws(Work work) {
    try {
        work();
    } catch (const kdtr::Error &) {
        return true;
    }
    return false;
}

// What a writer must refuse, and that two of them at one path do not write into each other's draft.
const char *writers_are_careful(const std::string &path) {
    const std::int32_t ones[] = {1, 1, 1, 1}, twos[] = {2, 2};
    const std::uint8_t flags[] = {1, 2};
    kdtr::Writer first(path), second(path);
    first.add("x", {4}, ones);
    second.add("x", {2}, twos);
    if (!throws([&] { first.add("flags", {2}, kdtr::Dtype{kdtr::Kind::Bool, 8}, flags); })) return "a bool of 2 was written";
    first.finish();
    if (kdtr::File(path).array<std::int32_t>("x").size() != 4) return "the first of two writers lost its array";
    if (!throws([&] { first.add("y", {4}, ones); })) return "an array was added to a finished file";
    if (!throws([&] { first.finish(); })) return "a file was finished twice";
    second.finish();
    const kdtr::File file(path);
    const auto x = file.array<std::int32_t>("x");
    return x.size() == 2 && x[0] == 2 ? nullptr : "the second of two writers lost its array";
}

} // namespace

int main(int argc, char **argv) {
    const std::string path = argc > 1 ? argv[1] : "fuzz.kdtr";
    if (const char *fault = writers_are_careful(path)) return std::puts(fault), 1;
    {
        kdtr::Writer writer(path);
        const std::int32_t parents[] = {-1, 0, 0};
        const double scores[] = {0.0, -0.5};
        const std::uint8_t flags[] = {1, 0};
        writer.add("tree.parents", {1, 3}, parents);
        writer.add("scores", {2}, scores);
        writer.add("empty", {4, 0}, static_cast<const kdtr::BFloat16 *>(nullptr));
        writer.add("flags", {2}, kdtr::Dtype{kdtr::Kind::Bool, 8}, flags);
        writer.add("number", {}, scores);
        writer.finish(R"({"case":"small"})");
    }
    const std::string whole = slurp(path);
    {
        const kdtr::File file(path);
        const auto parents = file.array<std::int32_t>("tree.parents");
        if (parents.size() != 3 || parents[0] != -1 || file.number<double>("number") != 0.0 ||
            file.array<std::uint8_t>("flags")[0] != 1 || file.array<kdtr::BFloat16>("empty").size() != 0)
            return std::puts("what was written did not come back"), 1;
        try {
            file.array<float>("scores");
            return std::puts("float64 was read as float32"), 1;
        } catch (const kdtr::Error &) {
        }
    }
    std::size_t tried = 0;
    for (std::size_t length = 0; length < whole.size(); ++length, ++tried)
        if (readable(path, whole.substr(0, length))) return std::printf("cut to %zu bytes: read\n", length), 1;
    for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit, ++tried) {
        std::string damaged = whole;
        damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
        if (readable(path, damaged)) return std::printf("bit %zu flipped: read\n", bit), 1;
    }
    std::uint64_t state = 1;
    const auto next = [&](std::uint64_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) % below;
    };
    const char hard[] = {0, 1, 2, 0x3F, 0x40, 0x7F, static_cast<char>(0x80), static_cast<char>(0xFF)};
    std::size_t refused = 0;
    for (int round = 0; round < 3000; ++round, ++tried) {
        std::string damaged = whole;
        for (auto changes = 1 + next(4); changes > 0; --changes) {
            const auto table = next(2) ? 8 + next(44) : whole.size() - 1 - next(260);
            damaged[table] = next(2) ? hard[next(sizeof hard)] : static_cast<char>(next(256));
        }
        reseal(damaged);
        refused += !readable(path, damaged);
    }
    std::remove(path.c_str());
    std::printf("%zu damaged files, none read wrongly; %zu of the honest-looking ones refused\n", tried, refused);
    return refused > 500 ? 0 : 1;
}
