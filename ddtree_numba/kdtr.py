"""KDTR: named arrays and a block of JSON in one file that any language maps into memory and uses without a copy.

A file is a header of 64 bytes, the arrays' bytes, the JSON block, and the entry table, each on a multiple of 64 bytes,
everything little-endian. The table stands last, so that a writer need not know sizes beforehand; the header says where
it is. Header, table, JSON block and each array have a CRC-32 of their own. `docs/reference/kdtr.md` is the format to
the byte.

Reading trusts nothing: whatever the bytes are, the outcome is the arrays that were written or a `KdtrError`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DTYPES", "KdtrEntry", "KdtrError", "KdtrFile", "KdtrWriter", "read_kdtr", "write_kdtr"]

MAGIC = b"KDTR"
VERSION = 1
ALIGNMENT = 64
MAX_ENTRIES = 1 << 16
MAX_NAME_BYTES = 1024
MAX_AXES = 32  # of NumPy before 2.0
MAX_METADATA_BYTES = 1 << 20
_MAX_BYTES = (1 << 63) - 1

_HEADER = struct.Struct("<4sI5Q4I")  # magic, version, five places and sizes, entries, three checksums of what follows
_RECORD = struct.Struct("<QQIBBHII")  # offset, size, CRC-32, type code, bits, axes, bytes of the name, zero

_BLOCK = 1 << 20  # bytes that a checksum takes at once while the next are read

DTYPES: dict[str, tuple[int, int, np.dtype]] = {
    "int8": (0, 8, np.dtype("i1")),
    "int16": (0, 16, np.dtype("<i2")),
    "int32": (0, 32, np.dtype("<i4")),
    "int64": (0, 64, np.dtype("<i8")),
    "uint8": (1, 8, np.dtype("u1")),
    "uint16": (1, 16, np.dtype("<u2")),
    "uint32": (1, 32, np.dtype("<u4")),
    "uint64": (1, 64, np.dtype("<u8")),
    "float16": (2, 16, np.dtype("<f2")),
    "float32": (2, 32, np.dtype("<f4")),
    "float64": (2, 64, np.dtype("<f8")),
    "bfloat16": (4, 16, np.dtype("<u2")),
    "bool": (6, 8, np.dtype("?")),
}
"""Every dtype a file can hold: DLPack's type code, bits, and the NumPy dtype it travels as."""

_BY_CODE = {(code, bits): name for name, (code, bits, _) in DTYPES.items()}


class KdtrError(ValueError):
    """A file that is no KDTR file, or one that is damaged. The message is one line and begins with the path."""


class KdtrEntry(NamedTuple):
    """One array of a file, as its table tells."""

    name: str
    """Its name, unique in the file."""
    dtype: str
    """A key of `DTYPES`."""
    shape: tuple[int, ...]
    """Its lengths, in C order."""
    offset: int
    """Where its bytes begin in the file, a multiple of 64."""
    size: int
    """How many bytes it has."""
    crc32: int
    """The CRC-32 of these bytes, as `zlib.crc32`."""


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---- writing ----


class KdtrWriter:
    """Writes a file array by array, in any amount: none of them has to fit into memory.

    The file appears under `path` when the ``with`` block ends, complete and on disk, and replaces what was there. When
    the block raises, or the process dies, `path` is untouched. A writer writes one file: it has one ``with`` block.
    What `KdtrFile` would refuse is refused here: an integer of more than 20 characters in the metadata, a bool array
    with a byte other than 0 and 1.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with KdtrWriter(f"{folder}/rows.kdtr", {"unit": "token"}) as writer:
    ...         writer.add("lengths", np.array([3, 5], np.int32))
    ...         writer.add_rows("kv", (np.full((2, 4), i, np.uint16) for i in range(3)), dtype="bfloat16")
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
        """Take where the file shall be, and what `json.dumps` turns into an object."""
        self._path = os.path.realpath(path)  # a link stays one
        self._metadata = _metadata_bytes(metadata)
        self._entries: list[KdtrEntry] = []
        self._names: set[str] = set()
        self._end = _HEADER.size
        self._file: Any = None
        self._adding = False
        self._entered = False
        self._draft = ""

    def __enter__(self) -> KdtrWriter:
        """Open a draft of the file, beside it."""
        if self._entered:
            raise ValueError(f"writer: got a second with block for {self._path}, needs a new KdtrWriter for each file")
        self._entered = True
        _check_target(self._path)
        self._draft = os.path.join(os.path.dirname(self._path), f".kdtr-{secrets.token_hex(8)}.part")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with _naming(self._path):
            self._file = open(os.open(self._draft, flags, 0o666), "r+b", buffering=0)
        self._crc_thread = ThreadPoolExecutor(1, "kdtr-crc32")
        try:
            self._pad_to(_HEADER.size, 0)
        except BaseException:
            self._drop()
            raise
        return self

    def add(self, name: str, array: Any, *, dtype: str | None = None) -> None:
        """Write one array. `dtype` "bfloat16" declares a uint16 array to be that; else it is the array's own."""
        array = np.asarray(array)
        self._add(name, dtype, array.shape, iter([array]))

    def add_rows(self, name: str, chunks: Iterable[Any], *, dtype: str | None = None) -> None:
        """Write one array from `chunks` that follow each other along its first axis, one at a time in memory.

        All have one dtype and the same shape but for the first axis; there is at least one.
        """
        stream = (np.asarray(chunk) for chunk in chunks)
        first = next(stream, None)
        if first is None or first.ndim == 0:
            raise ValueError(f"chunks of {name!r}: got {'none' if first is None else 'a number'}, needs arrays")

        def joined() -> Iterator[np.ndarray]:
            yield first
            for chunk in stream:
                if chunk.dtype != first.dtype or chunk.shape[1:] != first.shape[1:] or chunk.ndim == 0:
                    got, needs = (f"{a.dtype} {list(a.shape)}" for a in (chunk, first))
                    raise ValueError(f"chunks of {name!r}: got {got} after {needs}, needs all alike")
                yield chunk

        self._add(name, dtype, (None, *first.shape[1:]), joined())

    def _add(self, name: str, dtype: str | None, shape: tuple[int | None, ...], chunks: Iterator[np.ndarray]) -> None:
        if self._file is None or self._adding:
            where = "inside another" if self._adding else "outside its with block"
            raise ValueError(f"writer: got array {name!r} {where}, needs one after the other in it")
        self._check_name(name)
        if len(shape) > MAX_AXES:
            raise ValueError(f"{name!r}: got {len(shape)} axes, needs at most {MAX_AXES}")
        offset, size, crc, rows = _aligned(self._end), 0, 0, 0
        dtype_name = ""
        self._adding = True
        try:
            self._pad_to(offset, self._end)
            for chunk in chunks:
                dtype_name, data = _file_bytes(name, chunk, dtype)
                rows += chunk.shape[0] if chunk.ndim else 0
                crc = self._write(data, crc)
                size += data.nbytes
            full = tuple(rows if length is None else length for length in shape)
            if not _is_addressable(full, DTYPES[dtype_name][2].itemsize):
                raise ValueError(f"{name!r}: got shape {list(full)}, needs one of less than 2**63 bytes")
        except BaseException:
            with _naming(self._path):
                self._file.seek(self._end)  # what came of the array is forgotten
                self._file.truncate()
            raise
        finally:
            self._adding = False
        self._entries.append(KdtrEntry(name, dtype_name, full, offset, size, crc))
        self._names.add(name)
        self._end = offset + size

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name: got {type(name).__name__}, needs a str")
        encoded = name.encode("utf-8", "surrogatepass")
        if not 1 <= len(encoded) <= MAX_NAME_BYTES or "\0" in name or not _is_utf8(encoded):
            raise ValueError(f"name: got {name[:40]!r}, needs 1 to {MAX_NAME_BYTES} bytes of UTF-8 without NUL")
        if name in self._names:
            raise ValueError(f"name: got {name!r} twice, needs names that differ")
        if len(self._entries) == MAX_ENTRIES:
            raise ValueError(f"{name!r}: got one array more, needs at most {MAX_ENTRIES}")

    def _write(self, data: np.ndarray, crc: int) -> int:
        """Write the bytes and return their checksum, counted beside the writing: zlib lets go of the interpreter.

        Block by block, so that both find a block in the processor's cache.
        """
        view = memoryview(data.data)
        if view.nbytes < _BLOCK:
            self._write_all(view)
            return zlib.crc32(view, crc)
        for at in range(0, view.nbytes, _BLOCK):
            block = view[at : at + _BLOCK]
            counted: Future[int] = self._crc_thread.submit(zlib.crc32, block, crc)
            self._write_all(block)
            crc = counted.result()
        return crc

    def _write_all(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        with _naming(self._path):
            while view.nbytes:
                view = view[self._file.write(view) :]

    def _pad_to(self, offset: int, end: int) -> None:
        self._write_all(bytes(offset - end))

    def _finish(self) -> None:
        """Write what follows the arrays, then the header, and have all of it on the disk."""
        table = b"".join(map(_record_bytes, self._entries))
        metadata_offset = _aligned(self._end)
        table_offset = _aligned(metadata_offset + len(self._metadata))
        self._pad_to(metadata_offset, self._end)
        self._write_all(self._metadata)
        self._pad_to(table_offset, metadata_offset + len(self._metadata))
        self._write_all(table)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            table_offset + len(table),
            table_offset,
            len(table),
            metadata_offset,
            len(self._metadata),
            len(self._entries),
            zlib.crc32(table),
            zlib.crc32(self._metadata),
            0,
        )[:-4]
        self._file.seek(0)
        self._write_all(header + struct.pack("<I", zlib.crc32(header)))
        os.fsync(self._file.fileno())

    def __exit__(self, kind: object, *_: object) -> None:
        """Put the finished file in its place, or drop the draft."""
        try:
            if kind is None:
                with _naming(self._path):
                    self._finish()
                    self._close()
                    os.replace(self._draft, self._path)
                self._draft = ""
                _sync_folder(os.path.dirname(self._path))
        finally:
            self._drop()

    def _close(self) -> None:
        if self._file is not None:
            self._crc_thread.shutdown()
            file, self._file = self._file, None
            file.close()

    def _drop(self) -> None:
        """Let go of the draft, where there still is one."""
        with contextlib.suppress(OSError):
            self._close()
        if self._draft:
            with contextlib.suppress(OSError):
                os.unlink(self._draft)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Have an `OSError` name the file, not its draft, whose name nobody has given."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _check_target(path: str) -> None:
    """Refuse a path where something stands that a file must not replace."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"path: got {path}, which is a folder or a device, needs a file")


def _sync_folder(folder: str) -> None:
    """Have the new name itself on the disk, where a folder can be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _file_bytes(name: str, array: np.ndarray, dtype: str | None) -> tuple[str, np.ndarray]:
    """Return the array's dtype as the file says it, and its bytes as the file has them."""
    if array.dtype.name == "bfloat16":  # of ml_dtypes
        array, dtype = array.view(np.uint16), "bfloat16"
    if array.dtype.isnative:
        stored = dtype or array.dtype.name
    else:
        array = array.astype(array.dtype.newbyteorder("="))
        stored = dtype or array.dtype.name
    if stored not in DTYPES:
        raise TypeError(f"{name!r}: got {stored}, needs one of {', '.join(DTYPES)}")
    in_file = DTYPES[stored][2]
    if array.dtype != in_file.newbyteorder("="):
        raise TypeError(f"{name!r}: got {array.dtype} as {stored}, needs {in_file.name}")
    data = np.ascontiguousarray(array, in_file).reshape(-1).view(np.uint8)
    # Not made 0 or 1: such bytes come from a view of something else, and what it was is lost.
    if stored == "bool" and data.max(initial=0) > 1:
        raise ValueError(f"{name!r}: got a bool with the byte {data.max()}, needs only 0 and 1")
    return stored, data


def _record_bytes(entry: KdtrEntry) -> bytes:
    code, bits, _ = DTYPES[entry.dtype]
    name = entry.name.encode()
    fixed = _RECORD.pack(entry.offset, entry.size, entry.crc32, code, bits, len(entry.shape), len(name), 0)
    return fixed + struct.pack(f"<{len(entry.shape)}Q", *entry.shape) + name + bytes(-len(name) % 8)


def _metadata_bytes(metadata: Mapping[str, Any] | None) -> bytes:
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"metadata: got {error}, needs what JSON can hold") from None
    try:
        _parsed(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata: got {error}, needs what a reader takes") from None
    if len(text) > MAX_METADATA_BYTES:
        raise ValueError(f"metadata: got {len(text)} bytes of JSON, needs at most {MAX_METADATA_BYTES}")
    return text.encode()


def write_kdtr(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    bfloat16: Iterable[str] = (),
) -> None:
    """Write named arrays and `metadata` (a JSON object) to `path`, whole or not at all.

    `bfloat16` names the uint16 arrays that are bfloat16. Big-endian and strided arrays are converted. Raises
    `TypeError` for a dtype that is not in `DTYPES`, `ValueError` for a bad name, a bool with a byte other than 0 and 1
    and metadata that a reader would refuse, `OSError` when the disk fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_kdtr(f"{folder}/tree.kdtr", {"parents": np.array([[-1, 0, 0]], np.int32)}, {"budget": 2})
    ...     arrays, metadata = read_kdtr(f"{folder}/tree.kdtr")
    >>> arrays["parents"].tolist(), metadata
    ([[-1, 0, 0]], {'budget': 2})
    """
    marked = set(bfloat16)
    if unknown := marked - set(arrays):
        raise ValueError(f"bfloat16: got {sorted(unknown)[0]!r}, needs names of arrays")
    with KdtrWriter(path, metadata) as writer:
        for name, array in arrays.items():
            writer.add(name, array, dtype="bfloat16" if name in marked else None)


# ---- reading ----


class KdtrFile(Mapping[str, np.ndarray]):
    """A file, mapped into memory: each array is a read-only view of the file's own bytes.

    Opening checks header, table and JSON block. An array's bytes are checked when it is first asked for, through a
    small buffer, so that checking does not load the map; ``verify=False`` leaves that out.

    Arrays stay valid after `close`: the map lives as long as any of them. Writers put a new file in the place of an old
    one and so leave a mapped one alone; a program that cuts the file itself short takes mapped bytes away, and the
    system ends a process that touches them. Where that can happen, `read_kdtr` copies.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """Open `path`. Raises `KdtrError` when it is damaged, `OSError` when it can't be opened."""
        self.path = os.fspath(path)
        """The path as given."""
        self._verify = verify
        self._checked: set[str] = set()
        self._map: mmap.mmap | None = None
        # Not blocking: a pipe is to be refused, not waited for.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        self._handle = os.open(self.path, flags)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        status = os.fstat(self._handle)
        self._require(stat.S_ISREG(status.st_mode), "not a regular file")
        self._size = status.st_size
        self._require(self._size >= _HEADER.size, f"{self._size} bytes are fewer than a header has")
        try:
            self._map = mmap.mmap(self._handle, self._size, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.EACCES):
                raise KdtrError(f"{self.path}: can't be mapped ({error.strerror})") from None
            raise
        data_end = self._read_header()
        self.entries: dict[str, KdtrEntry] = {}
        """Name -> `KdtrEntry`, in the file's order."""
        self._read_table(data_end)

    def _require(self, truth: bool, fault: str) -> None:
        if not truth:
            raise KdtrError(f"{self.path}: {fault}")

    def _read_header(self) -> int:
        """Check the header and where the parts are; return where the arrays must have ended."""
        assert self._map is not None
        header = self._map[: _HEADER.size]
        fields = _HEADER.unpack(header)
        magic, version, size, table_at, table_size, text_at, text_size, count, table_crc, text_crc, crc = fields
        self._require(magic == MAGIC, f"begins with {magic!r}, a KDTR file with {MAGIC!r}")
        self._require(version == VERSION, f"has version {version}, this reader knows {VERSION}")
        self._require(zlib.crc32(header[:-4]) == crc, "the header is damaged (its CRC-32 differs)")
        self._require(size == self._size, f"has {self._size} bytes, its header says {size}")
        self._require(count <= MAX_ENTRIES, f"has {count} entries, at most {MAX_ENTRIES} are allowed")
        self._require(text_size <= MAX_METADATA_BYTES, f"has {text_size} bytes of metadata, too many")
        whole = text_at % ALIGNMENT == 0 and text_at >= _HEADER.size
        whole = whole and table_at == _aligned(text_at + text_size) and table_at + table_size == size
        self._require(whole, "its parts do not follow each other")
        self._count, self._table, self._text = count, (table_at, table_size), (text_at, text_size)
        for part, (at, length), expected in (("table", self._table, table_crc), ("metadata", self._text, text_crc)):
            with memoryview(self._map)[at : at + length] as view:
                self._require(zlib.crc32(view) == expected, f"the {part} is damaged (its CRC-32 differs)")
        self._require(not any(self._map[text_at + text_size : table_at]), "bytes between its parts are not zero")
        return text_at

    def _read_table(self, data_end: int) -> None:
        at, size = self._table
        end, previous = at + size, _HEADER.size
        for number in range(self._count):
            entry, at = self._read_record(number, at, end)
            self._require(entry.name not in self.entries, f"has two entries {entry.name!r}")
            follows = entry.offset == _aligned(previous)
            self._require(follows, f"entry {entry.name!r} begins at {entry.offset}, needs {_aligned(previous)}")
            self._require(entry.size <= data_end - entry.offset, f"entry {entry.name!r} goes past the arrays' end")
            previous = entry.offset + entry.size
            self.entries[entry.name] = entry
        self._require(at == end, "the table is longer than its entries")
        self._require(_aligned(previous) == data_end, "there are bytes that no entry has")

    def _read_record(self, number: int, at: int, end: int) -> tuple[KdtrEntry, int]:
        """Return the entry at `at` and where the next one begins."""
        assert self._map is not None
        where = f"entry {number}"
        self._require(end - at >= _RECORD.size, f"the table ends inside {where}")
        offset, size, crc, code, bits, axes, name_size, zero = _RECORD.unpack_from(self._map, at)
        at += _RECORD.size
        self._require((code, bits) in _BY_CODE, f"{where} has the unknown dtype ({code}, {bits})")
        self._require(axes <= MAX_AXES, f"{where} has {axes} axes, at most {MAX_AXES} are allowed")
        self._require(1 <= name_size <= MAX_NAME_BYTES, f"{where} has a name of {name_size} bytes")
        name_end = at + 8 * axes + name_size
        after = name_end + -name_size % 8
        self._require(after <= end, f"the table ends inside {where}")
        shape = struct.unpack_from(f"<{axes}Q", self._map, at)
        encoded = self._map[name_end - name_size : name_end]
        self._require(_is_utf8(encoded) and b"\0" not in encoded, f"{where} has a name that is no text")
        self._require(zero == 0 and not any(self._map[name_end:after]), f"{where} has bytes that must be zero")
        name, dtype = encoded.decode(), _BY_CODE[code, bits]
        width = DTYPES[dtype][2].itemsize
        self._require(_is_addressable(shape, width), f"entry {name!r} has too large a shape")
        self._require(math.prod(shape) * width == size, f"entry {name!r} has {size} bytes, its shape needs others")
        return KdtrEntry(name, dtype, shape, offset, size, crc), after

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON block, read anew at every call. Raises `KdtrError` when it is no JSON object."""
        at, size = self._text
        try:
            content = _parsed(self._mapped()[at : at + size].decode())
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise KdtrError(f"{self.path}: the metadata is no JSON object")
        return content

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the array, read-only; bfloat16 as uint16. Raises `KdtrError` when its bytes are damaged."""
        entry = self.entries[name]
        if self._verify and name not in self._checked:
            self.verify(name)
        return np.ndarray(entry.shape, DTYPES[entry.dtype][2], self._mapped(), entry.offset)

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # without reading the array

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def verify(self, name: str | None = None) -> None:
        """Check the bytes of one array, or of all of them, against their CRC-32; raise `KdtrError` naming it."""
        self._mapped()
        names = [name] if name is not None else list(self.entries)
        largest = max((self.entries[each].size for each in names), default=0)
        buffers = [bytearray(min(_BLOCK, largest)) for _ in range(2)]
        with ThreadPoolExecutor(1, "kdtr-crc32") as beside:
            for each in names:
                self._verify_entry(self.entries[each], buffers, beside)
                self._checked.add(each)

    def _verify_entry(self, entry: KdtrEntry, buffers: list[bytearray], beside: ThreadPoolExecutor) -> None:
        """Read block after block, each while the one before is being summed."""
        crc, at, end = 0, entry.offset, entry.offset + entry.size
        pending: Future[int] | None = None
        small = entry.size <= _BLOCK
        turn = 0
        while at < end:
            view = memoryview(buffers[turn])[: min(_BLOCK, end - at)]
            self._fill(view, at)
            if entry.dtype == "bool":
                self._require(np.frombuffer(view, np.uint8).max() < 2, f"{entry.name!r} is no bool: not only 0 and 1")
            crc = pending.result() if pending else crc
            at += view.nbytes
            turn = 1 - turn
            if small:
                crc = zlib.crc32(view, crc)
            else:
                pending = beside.submit(zlib.crc32, view, crc)
        crc = pending.result() if pending else crc
        self._require(crc == entry.crc32, f"array {entry.name!r} is damaged (its CRC-32 differs)")
        padding = memoryview(bytearray(-end % ALIGNMENT))
        self._fill(padding, end)
        self._require(not any(padding), f"bytes behind array {entry.name!r} are not zero")

    def _fill(self, view: memoryview, at: int) -> None:
        """Fill `view` from the file; through a read, not the map: a file cut short is an error then, not a signal."""
        while view.nbytes:
            if hasattr(os, "preadv"):
                got = os.preadv(self._handle, [view], at)
            else:
                content = self._mapped()[at : at + view.nbytes]
                got = len(content)
                view[:got] = content
            self._require(got > 0, "has become shorter while it was read")
            view, at = view[got:], at + got

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path}: got a closed file, needs an open one")
        return self._map

    def close(self) -> None:
        """Let go of the file; arrays taken from it stay valid."""
        self._map = None  # unmapped when the last array that looks into it goes
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> KdtrFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def read_kdtr(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return copies of all arrays of a file, checked, by name, and its metadata; bfloat16 comes as uint16.

    Raises `KdtrError` when it is damaged. `KdtrFile` maps instead of copying, and tells the entries' dtypes.
    """
    with KdtrFile(path) as file:
        return {name: array.copy() for name, array in file.items()}, file.metadata


def _is_utf8(encoded: bytes) -> bool:
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_addressable(shape: tuple[int, ...], width: int) -> bool:
    """Tell whether the bytes fit into 63 bits, axes of length 0 counted as 1: NumPy does, and refuses the others."""
    return math.prod(length or 1 for length in shape) * width <= _MAX_BYTES


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=_integer, parse_constant=_refuse)


def _integer(digits: str) -> int:
    """Refuse numbers that no other reader could hold, and whose conversion takes quadratic time."""
    if len(digits) > 20:
        raise ValueError("an integer of more than 20 characters")
    return int(digits)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
