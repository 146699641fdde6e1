// KDTR files, read and written: named arrays and a JSON block in one file. One header, C++17, no dependency.
//
// The format is docs/reference/kdtr.md, to the byte. Reading trusts nothing: whatever the bytes are, the outcome is the
// arrays or a kdtr::Error; no size is believed before it is known to fit into the file, and arrays are views of the
// file's own bytes.
//
//     kdtr::File file("tree.kdtr");
//     const auto parents = file.array<std::int32_t>("parents");     // shape() and data(), checked by CRC-32
//
//     kdtr::Writer writer("answer.kdtr");
//     writer.add("parents", {batch, slots}, values.data());
//     writer.finish(R"({"engine":"mine"})");
//
// A File is mapped: a program that cuts the file short in place, instead of replacing it, takes mapped bytes away, and the
// system ends who touches them. Needs a little-endian machine, which is checked when this is compiled.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(_WIN32)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "KDTR is little-endian; this header does not turn bytes round"
#endif

namespace kdtr {

// A file that is no KDTR file, or damaged, or can't be read or written.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// DLPack's type codes: what an array's numbers are. bool is one byte, 0 or 1; read it as std::uint8_t.
enum class Kind : std::uint8_t { Int = 0, UInt = 1, Float = 2, BFloat = 4, Bool = 6 };

struct Dtype {
    Kind kind;
    std::uint8_t bits;
    friend bool operator==(Dtype a, Dtype b) { return a.kind == b.kind && a.bits == b.bits; }
};

// 16-bit floats are their bits here.
struct Half {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};

namespace detail {

constexpr std::size_t header_size = 64, record_size = 32, alignment = 64;
constexpr std::uint32_t max_entries = 1u << 16, max_name = 1024, max_axes = 32, max_metadata = 1u << 20;

template <class T> struct DtypeOf;
template <> struct DtypeOf<std::int8_t> { static constexpr Dtype value{Kind::Int, 8}; };
template <> struct DtypeOf<std::int16_t> { static constexpr Dtype value{Kind::Int, 16}; };
template <> struct DtypeOf<std::int32_t> { static constexpr Dtype value{Kind::Int, 32}; };
template <> struct DtypeOf<std::int64_t> { static constexpr Dtype value{Kind::Int, 64}; };
template <> struct DtypeOf<std::uint8_t> { static constexpr Dtype value{Kind::UInt, 8}; };
template <> struct DtypeOf<std::uint16_t> { static constexpr Dtype value{Kind::UInt, 16}; };
template <> struct DtypeOf<std::uint32_t> { static constexpr Dtype value{Kind::UInt, 32}; };
template <> struct DtypeOf<std::uint64_t> { static constexpr Dtype value{Kind::UInt, 64}; };
template <> struct DtypeOf<float> { static constexpr Dtype value{Kind::Float, 32}; };
template <> struct DtypeOf<double> { static constexpr Dtype value{Kind::Float, 64}; };
template <> struct DtypeOf<Half> { static constexpr Dtype value{Kind::Float, 16}; };
template <> struct DtypeOf<BFloat16> { static constexpr Dtype value{Kind::BFloat, 16}; };
template <> struct DtypeOf<bool> { static constexpr Dtype value{Kind::Bool, 8}; };

inline bool known(Dtype d) {
    switch (d.kind) {
    case Kind::Int:
    case Kind::UInt: return d.bits == 8 || d.bits == 16 || d.bits == 32 || d.bits == 64;
    case Kind::Float: return d.bits == 16 || d.bits == 32 || d.bits == 64;
    case Kind::BFloat: return d.bits == 16;
    case Kind::Bool: return d.bits == 8;
    }
    return false;
}

// CRC-32 as in zlib and PNG, eight bytes a turn.
inline std::uint32_t crc32(const void *bytes, std::size_t size, std::uint32_t crc = 0) {
    static const auto tables = [] {
        std::array<std::array<std::uint32_t, 256>, 8> t{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t c = i;
            for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0xEDB88320u : 0u);
            t[0][i] = c;
        }
        for (std::size_t k = 1; k < 8; ++k)
            for (std::uint32_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
        return t;
    }();
    const auto *p = static_cast<const unsigned char *>(bytes);
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        std::uint32_t low, high;
        std::memcpy(&low, p, 4);
        std::memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^ tables[4][low >> 24] ^
              tables[3][high & 0xFF] ^ tables[2][high >> 8 & 0xFF] ^ tables[1][high >> 16 & 0xFF] ^ tables[0][high >> 24];
    }
    for (; size > 0; --size, ++p) crc = tables[0][(crc ^ *p) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

constexpr std::uint64_t aligned(std::uint64_t offset) { return (offset + alignment - 1) / alignment * alignment; }

// The bytes of `shape`, or false when they would not fit into 63 bits; axes of length 0 count as 1 for that.
inline bool shape_bytes(const std::vector<std::uint64_t> &shape, std::uint64_t width, std::uint64_t &bytes) {
    constexpr std::uint64_t most = (std::uint64_t(1) << 63) - 1;
    std::uint64_t product = width;
    bool empty = false;
    for (const auto length : shape) {
        empty |= length == 0;
        if (length > 1 && product > most / length) return false;
        if (length > 1) product *= length;
    }
    bytes = empty ? 0 : product;
    return true;
}

// Valid UTF-8 without NUL: no overlong forms, no surrogates, nothing past U+10FFFF.
inline bool is_text(std::string_view s) {
    for (std::size_t i = 0; i < s.size();) {
        const auto lead = static_cast<unsigned char>(s[i]);
        std::size_t more = lead < 0x80 ? 0 : lead < 0xC2 ? 9 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : lead < 0xF5 ? 3 : 9;
        if (lead == 0 || more == 9 || s.size() - i <= more) return false;
        for (std::size_t k = 1; k <= more; ++k)
            if ((static_cast<unsigned char>(s[i + k]) & 0xC0) != 0x80) return false;
        const auto second = more ? static_cast<unsigned char>(s[i + 1]) : 0;
        if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
            (lead == 0xF4 && second > 0x8F))
            return false;
        i += more + 1;
    }
    return true;
}

template <class T> T load(const unsigned char *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <class T> void store(std::string &out, T value) {
    out.append(reinterpret_cast<const char *>(&value), sizeof value);
}

} // namespace detail

struct Entry {
    Dtype dtype;
    std::vector<std::uint64_t> shape;
    std::uint64_t offset, size;
    std::uint32_t crc32;
};

// A view of one array; valid as long as its File.
template <class T> class Array {
  public:
    Array(const T *data, std::vector<std::uint64_t> shape) : data_(data), shape_(std::move(shape)) {}
    const T *data() const { return data_; }
    const std::vector<std::uint64_t> &shape() const { return shape_; }
    std::size_t size() const {
        std::size_t n = 1;
        for (const auto length : shape_) n *= static_cast<std::size_t>(length);
        return n;
    }
    const T *begin() const { return data_; }
    const T *end() const { return data_ + size(); }
    const T &operator[](std::size_t i) const { return data_[i]; }

  private:
    const T *data_;
    std::vector<std::uint64_t> shape_;
};

// A file, mapped (read into memory where there is no mmap), its header, table and metadata checked.
class File {
  public:
    explicit File(const std::string &path) : path_(path) {
        map();
        try {
            read();
        } catch (...) {
            unmap();
            throw;
        }
    }
    ~File() { unmap(); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    const std::map<std::string, Entry> &entries() const { return entries_; }
    bool has(const std::string &name) const { return entries_.count(name) != 0; }
    std::string_view metadata() const { return metadata_; }

    const Entry &entry(const std::string &name) const {
        const auto found = entries_.find(name);
        if (found == entries_.end()) fail("has no array '" + name + "'");
        return found->second;
    }

    // The array `name`, whose dtype must be that of T (std::uint8_t reads bool too); its bytes are checked each time.
    template <class T> Array<T> array(const std::string &name) const {
        const Entry &e = entry(name);
        const Dtype wanted = detail::DtypeOf<T>::value;
        static_assert(!std::is_same_v<T, bool>, "read bool as std::uint8_t");
        const bool byte = wanted == Dtype{Kind::UInt, 8} && e.dtype == Dtype{Kind::Bool, 8};
        if (!(e.dtype == wanted) && !byte) fail("array '" + name + "' has another dtype");
        verify(name, e);
        return {reinterpret_cast<const T *>(bytes_ + e.offset), e.shape};
    }

    // An array without axes, as a number.
    template <class T> T number(const std::string &name) const {
        const auto values = array<T>(name);
        if (!values.shape().empty()) fail("'" + name + "' is not a number");
        return values[0];
    }

    void verify() const {
        for (const auto &[name, e] : entries_) verify(name, e);
    }

  private:
    [[noreturn]] void fail(const std::string &fault) const { throw Error(path_ + ": " + fault); }
    void require(bool truth, const char *fault) const {
        if (!truth) fail(fault);
    }

    void verify(const std::string &name, const Entry &e) const {
        if (detail::crc32(bytes_ + e.offset, e.size) != e.crc32) fail("array '" + name + "' is damaged");
        if (e.dtype == Dtype{Kind::Bool, 8})
            for (std::uint64_t i = 0; i < e.size; ++i)
                if (bytes_[e.offset + i] > 1) fail("'" + name + "' is no bool: not only 0 and 1");
        for (std::uint64_t i = e.offset + e.size; i < detail::aligned(e.offset + e.size); ++i)
            if (bytes_[i] != 0) fail("bytes behind array '" + name + "' are not zero");
    }

    void read() {
        using detail::load;
        require(size_ >= detail::header_size, "is shorter than a header");
        require(std::memcmp(bytes_, "KDTR", 4) == 0, "is no KDTR file");
        require(load<std::uint32_t>(bytes_ + 4) == 1, "has a version that this reader does not know");
        require(detail::crc32(bytes_, 60) == load<std::uint32_t>(bytes_ + 60), "the header is damaged");
        const auto size = load<std::uint64_t>(bytes_ + 8), table = load<std::uint64_t>(bytes_ + 16);
        const auto table_size = load<std::uint64_t>(bytes_ + 24), text = load<std::uint64_t>(bytes_ + 32);
        const auto text_size = load<std::uint64_t>(bytes_ + 40);
        const auto count = load<std::uint32_t>(bytes_ + 48);
        require(size == size_, "has another size than its header says");
        require(count <= detail::max_entries, "has too many entries");
        require(text_size <= detail::max_metadata, "has too much metadata");
        // In this order nothing overflows: every number is known to be at most the file's size before it is added to.
        require(text >= detail::header_size && text <= size && text % detail::alignment == 0, "its parts are out of place");
        require(text_size <= size - text && table == detail::aligned(text + text_size) && table <= size &&
                    table_size == size - table,
                "its parts do not follow each other");
        require(detail::crc32(bytes_ + table, table_size) == load<std::uint32_t>(bytes_ + 52), "the table is damaged");
        require(detail::crc32(bytes_ + text, text_size) == load<std::uint32_t>(bytes_ + 56), "the metadata is damaged");
        for (auto i = text + text_size; i < table; ++i) require(bytes_[i] == 0, "bytes between its parts are not zero");
        metadata_ = {reinterpret_cast<const char *>(bytes_ + text), static_cast<std::size_t>(text_size)};
        read_table(bytes_ + table, bytes_ + size, count, text);
    }

    void read_table(const unsigned char *at, const unsigned char *end, std::uint32_t count, std::uint64_t data_end) {
        using detail::load;
        std::uint64_t previous = detail::header_size;
        for (std::uint32_t number = 0; number < count; ++number) {
            require(static_cast<std::size_t>(end - at) >= detail::record_size, "the table ends inside an entry");
            Entry e{};
            e.offset = load<std::uint64_t>(at);
            e.size = load<std::uint64_t>(at + 8);
            e.crc32 = load<std::uint32_t>(at + 16);
            e.dtype = {static_cast<Kind>(at[20]), at[21]};
            const auto axes = load<std::uint16_t>(at + 22);
            const auto name_size = load<std::uint32_t>(at + 24);
            require(load<std::uint32_t>(at + 28) == 0, "an entry has bytes that must be zero");
            at += detail::record_size;
            require(detail::known(e.dtype), "an entry has an unknown dtype");
            require(axes <= detail::max_axes, "an entry has too many axes");
            require(name_size >= 1 && name_size <= detail::max_name, "an entry has a name of no or too many bytes");
            const std::size_t padded = (name_size + 7) / 8 * 8;
            require(static_cast<std::size_t>(end - at) >= 8u * axes + padded, "the table ends inside an entry");
            for (std::uint16_t axis = 0; axis < axes; ++axis, at += 8) e.shape.push_back(load<std::uint64_t>(at));
            std::string name(reinterpret_cast<const char *>(at), name_size);
            require(detail::is_text(name), "an entry has a name that is no text");
            for (std::size_t i = name_size; i < padded; ++i) require(at[i] == 0, "an entry has bytes that must be zero");
            at += padded;
            std::uint64_t bytes = 0;
            require(detail::shape_bytes(e.shape, e.dtype.bits / 8u, bytes), "an entry has too large a shape");
            require(bytes == e.size, "an entry has another size than its shape");
            require(e.offset == detail::aligned(previous) && e.offset <= data_end, "an entry begins in the wrong place");
            require(e.size <= data_end - e.offset, "an entry goes past the arrays' end");
            previous = e.offset + e.size;
            require(entries_.emplace(std::move(name), std::move(e)).second, "has two entries of one name");
        }
        require(at == end, "the table is longer than its entries");
        require(detail::aligned(previous) == data_end, "there are bytes that no entry has");
    }

#if defined(_WIN32)
    void map() {
        std::ifstream in(path_, std::ios::binary | std::ios::ate);
        require(in.good(), "can't be opened");
        held_.resize(static_cast<std::size_t>(in.tellg()));
        in.seekg(0);
        in.read(reinterpret_cast<char *>(held_.data()), static_cast<std::streamsize>(held_.size()));
        require(in.good(), "can't be read");
        bytes_ = held_.data(), size_ = held_.size();
    }
    void unmap() {}
    std::vector<unsigned char> held_;
#else
    void map() {
        const int handle = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        require(handle >= 0, "can't be opened");
        struct stat status {};
        const bool regular = ::fstat(handle, &status) == 0 && S_ISREG(status.st_mode);
        if (regular && status.st_size > 0) {
            void *at = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, handle, 0);
            if (at != MAP_FAILED) bytes_ = static_cast<unsigned char *>(at), size_ = static_cast<std::size_t>(status.st_size);
        }
        ::close(handle);
        require(regular, "is not a regular file");
        require(bytes_ != nullptr || status.st_size == 0, "can't be mapped");
    }
    void unmap() {
        if (bytes_ != nullptr) ::munmap(const_cast<unsigned char *>(bytes_), size_);
        bytes_ = nullptr;
    }
#endif

    std::string path_;
    const unsigned char *bytes_ = nullptr;
    std::uint64_t size_ = 0;
    std::string_view metadata_;
    std::map<std::string, Entry> entries_;
};

// Writes a file array by array; it appears under its name when finish() returns, and not at all without.
class Writer {
  public:
    explicit Writer(std::string path) : path_(std::move(path)) {
        std::random_device random;
        draft_ = path_ + "." + std::to_string(random()) + "-" + std::to_string(random()) + ".part";
        file_ = std::fopen(draft_.c_str(), "wbx"); // only a new file: no other writer's draft, and through no link
        if (file_ == nullptr) throw Error(path_ + ": can't be written");
        const char nothing[detail::header_size] = {};
        put(nothing, sizeof nothing);
    }
    ~Writer() { drop(); }
    Writer(const Writer &) = delete;
    Writer &operator=(const Writer &) = delete;

    template <class T> void add(const std::string &name, std::vector<std::uint64_t> shape, const T *data) {
        static_assert(!std::is_same_v<T, bool> || sizeof(bool) == 1, "bool is one byte in a file");
        add(name, std::move(shape), detail::DtypeOf<T>::value, data);
    }

    void add(const std::string &name, std::vector<std::uint64_t> shape, Dtype dtype, const void *data) {
        require_open();
        std::uint64_t bytes = 0;
        if (name.empty() || name.size() > detail::max_name || !detail::is_text(name)) throw Error("name: needs 1 to 1024 bytes of UTF-8");
        if (shape.size() > detail::max_axes || !detail::known(dtype) || !detail::shape_bytes(shape, dtype.bits / 8u, bytes))
            throw Error("'" + name + "': needs a shape and dtype that a file can hold");
        if (dtype == Dtype{Kind::Bool, 8})
            for (std::uint64_t i = 0; i < bytes; ++i)
                if (static_cast<const unsigned char *>(data)[i] > 1) throw Error("'" + name + "': needs bools of only 0 and 1");
        if (count_ == detail::max_entries || !names_.emplace(name, 0).second) throw Error("'" + name + "': one name or entry too many");
        pad();
        detail::store<std::uint64_t>(table_, at_);
        detail::store<std::uint64_t>(table_, bytes);
        detail::store<std::uint32_t>(table_, detail::crc32(data, bytes));
        table_ += static_cast<char>(dtype.kind);
        table_ += static_cast<char>(dtype.bits);
        detail::store<std::uint16_t>(table_, static_cast<std::uint16_t>(shape.size()));
        detail::store<std::uint32_t>(table_, static_cast<std::uint32_t>(name.size()));
        detail::store<std::uint32_t>(table_, 0);
        for (const auto length : shape) detail::store<std::uint64_t>(table_, length);
        table_ += name;
        table_.append((8 - name.size() % 8) % 8, '\0');
        ++count_;
        put(data, bytes);
    }

    // Writes the rest and puts the file in its place; nothing can be added after it. `metadata` is a JSON object.
    void finish(std::string_view metadata = "{}") {
        require_open();
        if (metadata.size() > detail::max_metadata) throw Error("metadata: needs at most 1 MiB");
        pad();
        const auto text = at_;
        put(metadata.data(), metadata.size());
        pad();
        const auto table = at_;
        put(table_.data(), table_.size());
        std::string header = "KDTR";
        detail::store<std::uint32_t>(header, 1);
        for (const std::uint64_t number : {at_, table, std::uint64_t(table_.size()), text, std::uint64_t(metadata.size())})
            detail::store<std::uint64_t>(header, number);
        detail::store<std::uint32_t>(header, count_);
        detail::store<std::uint32_t>(header, detail::crc32(table_.data(), table_.size()));
        detail::store<std::uint32_t>(header, detail::crc32(metadata.data(), metadata.size()));
        detail::store<std::uint32_t>(header, detail::crc32(header.data(), header.size()));
        bool good = std::fseek(file_, 0, SEEK_SET) == 0;
        put(header.data(), header.size());
        good = good && std::fflush(file_) == 0;
#if !defined(_WIN32)
        good = good && ::fsync(::fileno(file_)) == 0;
#endif
        good = std::fclose(file_) == 0 && good;
        file_ = nullptr;
#if defined(_WIN32)
        if (good) std::remove(path_.c_str());
#endif
        good = good && std::rename(draft_.c_str(), path_.c_str()) == 0;
        if (!good) {
            std::remove(draft_.c_str());
            throw Error(path_ + ": can't be written");
        }
    }

  private:
    void require_open() const {
        if (file_ == nullptr) throw Error(path_ + ": this writer has finished or failed, needs a new one");
    }
    void put(const void *bytes, std::uint64_t size) {
        if (size != 0 && std::fwrite(bytes, 1, size, file_) != size) {
            drop();
            throw Error(path_ + ": can't be written");
        }
        at_ += size;
    }
    void pad() {
        const char nothing[detail::alignment] = {};
        put(nothing, detail::aligned(at_) - at_);
    }
    void drop() {
        if (file_ == nullptr) return;
        std::fclose(file_);
        file_ = nullptr;
        std::remove(draft_.c_str());
    }

    std::string path_, draft_, table_;
    std::map<std::string, int> names_;
    std::FILE *file_ = nullptr;
    std::uint64_t at_ = 0;
    std::uint32_t count_ = 0;
};

} // namespace kdtr
