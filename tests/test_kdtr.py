"""The KDTR container: what goes in comes out, and a damaged file is one clear error."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba import kdtr
from ddtree_numba.kdtr import DTYPES, KdtrError, KdtrFile, KdtrWriter, read_kdtr, write_kdtr


def every_dtype(rng) -> dict[str, np.ndarray]:
    arrays = {}
    for name, (_, _, dtype) in DTYPES.items():
        data = rng.integers(0, 2 if name == "bool" else 256, 6 * dtype.itemsize, dtype=np.uint8)
        arrays[name] = data.view(dtype).reshape(2, 3)
    return arrays


def small_file(folder: Path) -> bytes:
    arrays = {"tree.parents": np.array([[-1, 0, 0]], np.int32), "mask": np.array([True]), "none": np.zeros((2, 0))}
    write_kdtr(folder / "small.kdtr", arrays, {"case": "small", "budget": 2})
    return (folder / "small.kdtr").read_bytes()


def read_all(path) -> None:
    arrays, metadata = read_kdtr(path)
    assert isinstance(metadata, dict) and all(isinstance(array, np.ndarray) for array in arrays.values())


def refused(path, content: bytes) -> str:
    """The one line that reading `content` ends in."""
    Path(path).write_bytes(content)
    with pytest.raises(KdtrError) as caught:
        read_all(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return str(caught.value)


# --- round trips -----------------------------------------------------------------------------------------------------


def test_every_dtype_comes_back_bit_for_bit(rng, tmp_path):
    arrays = every_dtype(rng)
    write_kdtr(tmp_path / "a", arrays, {"π": [1, -2.5, None, {"x": "\n"}]}, bfloat16=["bfloat16"])
    with KdtrFile(tmp_path / "a") as file:
        assert list(file) == list(DTYPES) and len(file) == 13
        for name, array in arrays.items():
            assert file.entries[name].dtype == name
            assert file[name].dtype == array.dtype and file[name].tobytes() == array.tobytes()
        assert file.metadata == {"π": [1, -2.5, None, {"x": "\n"}]}


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,) * 32, (7, 1, 2), (2**40, 0)])
def test_every_shape(rng, tmp_path, shape):
    array = rng.integers(-9, 9, shape)
    write_kdtr(tmp_path / "a", {"before": np.zeros(5, np.int8), "x": array, "after": np.ones(3)})
    got, _ = read_kdtr(tmp_path / "a")
    assert got["x"].shape == shape and got["x"].dtype == array.dtype
    np.testing.assert_array_equal(got["x"], array)
    np.testing.assert_array_equal(got["after"], np.ones(3))


def test_strided_and_big_endian_arrays_are_converted(rng, tmp_path):
    array = rng.normal(size=(6, 8))
    arrays = {"strided": array[::2, ::-3], "turned": array.T, "big": array.astype(">f8"), "bits": array.view(">u8")}
    write_kdtr(tmp_path / "a", arrays)
    got, _ = read_kdtr(tmp_path / "a")
    for name, expected in arrays.items():
        np.testing.assert_array_equal(got[name], expected)
        assert got[name].dtype.isnative


def test_reading_maps_and_never_copies(tmp_path):
    write_kdtr(tmp_path / "a", {"x": np.arange(100, dtype=np.int32), "y": np.arange(7.0)})
    with KdtrFile(tmp_path / "a") as file:
        x, y = file["x"], file["y"]
        assert not x.flags.writeable and not x.flags.owndata
        assert np.shares_memory(x, file["x"])
        start = x.__array_interface__["data"][0]
        assert start % 64 == 0 and y.__array_interface__["data"][0] - start == 448
    np.testing.assert_array_equal(x, np.arange(100))  # the map lives as long as the array
    with pytest.raises(ValueError, match="closed"):
        file["x"]


def test_an_array_larger_than_what_is_held(tmp_path):
    """Rows come from a generator; the writer holds one chunk, the reader one block."""
    alive = []

    def chunks():
        for number in range(30):
            chunk = np.full((1000, 50), number, np.float32)
            alive.append(chunk.__array_interface__["data"][0])
            yield chunk

    with KdtrWriter(tmp_path / "a") as writer:
        writer.add_rows("rows", chunks())
        writer.add_rows("bits", (np.zeros((2, 3), np.uint16) for _ in range(2)), dtype="bfloat16")
    assert len(set(alive)) <= 4, "chunks are kept"
    with KdtrFile(tmp_path / "a") as file:
        assert file.entries["rows"].shape == (30000, 50) and file.entries["bits"].dtype == "bfloat16"
        np.testing.assert_array_equal(file["rows"][::1000, 0], np.arange(30))


def test_the_layout_is_the_documented_one(tmp_path):
    """The header and one record taken apart with nothing but the numbers of the specification."""
    content = small_file(tmp_path)
    assert content[:4] == b"KDTR" and struct.unpack_from("<I", content, 4) == (1,)
    size, table_at, table_size, text_at, text_size = struct.unpack_from("<5Q", content, 8)
    count, table_crc, text_crc, header_crc = struct.unpack_from("<4I", content, 48)
    assert size == len(content) == table_at + table_size and count == 3
    assert zlib.crc32(content[:60]) == header_crc
    assert zlib.crc32(content[table_at:]) == table_crc
    assert content[text_at : text_at + text_size] == b'{"case":"small","budget":2}'
    assert zlib.crc32(content[text_at : text_at + text_size]) == text_crc
    record = struct.unpack_from("<QQIBBHII", content, table_at)
    assert record == (64, 12, zlib.crc32(content[64:76]), 0, 32, 2, 12, 0)
    assert struct.unpack_from("<2Q", content, table_at + 32) == (1, 3)
    assert content[table_at + 48 : table_at + 64] == b"tree.parents\0\0\0\0"
    assert content[64:76] == struct.pack("<3i", -1, 0, 0)


def test_the_same_content_is_the_same_bytes(tmp_path):
    assert small_file(tmp_path) == small_file(tmp_path)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_truncation_and_every_extension(tmp_path):
    content = small_file(tmp_path)
    for length in range(len(content)):
        refused(tmp_path / "cut", content[:length])
    refused(tmp_path / "cut", content + b"\0")


def test_every_flipped_bit(tmp_path):
    """Of header, table, metadata, arrays and the zeros between them."""
    content = small_file(tmp_path)
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        refused(tmp_path / "bent", bytes(damaged))


def resealed(content: bytes, **fields) -> bytes:
    """`content` with other header fields or another table, and checksums that agree with it: made in bad faith."""
    names = ("size", "table_at", "table_size", "text_at", "text_size", "count")
    values = dict(zip(names, struct.unpack_from("<5QI", content, 8), strict=True))
    table = fields.pop("table", content[values["table_at"] :])
    text = fields.pop("text", content[values["text_at"] : values["text_at"] + values["text_size"]])
    body = content[: values["text_at"]] + text + bytes(-len(text) % 64) + table
    values |= {"text_size": len(text), "table_at": values["text_at"] + len(text) + -len(text) % 64}
    values |= {"table_size": len(table), "size": len(body)} | fields
    header = b"KDTR" + struct.pack("<I5QI", 1, *(values[name] for name in names))
    header += struct.pack("<2I", zlib.crc32(table), zlib.crc32(text))
    return header + struct.pack("<I", zlib.crc32(header)) + body[64:]


def record(name=b"x", offset=64, size=12, crc=0, code=0, bits=32, shape=(3,), zero=0, axes=None) -> bytes:
    axes = len(shape) if axes is None else axes
    fixed = struct.pack("<QQIBBHII", offset, size, crc, code, bits, axes, len(name), zero)
    return fixed + struct.pack(f"<{len(shape)}Q", *shape) + name + bytes(-len(name) % 8)


HOSTILE_TABLES = {
    "overlap": ("begins at 64, needs 128", [record(b"a"), record(b"b", offset=64)]),
    "entry in the header": ("begins at 0, needs 64", [record(offset=0)]),
    "entry not aligned": ("begins at 68, needs 64", [record(offset=68)]),
    "entry after a gap": ("begins at 128, needs 64", [record(offset=128)]),
    "huge offset": ("begins at 9223372036854775808", [record(offset=2**63)]),
    "offset that wraps": ("begins at 18446744073709551552", [record(offset=2**64 - 64)]),
    "huge size": ("goes past the arrays' end", [record(size=2**62, shape=(2**60,))]),
    "size that wraps": ("too large a shape", [record(size=2**64 - 4, shape=(2**62 - 1,))]),
    "shape whose product wraps to the size": ("too large a shape", [record(size=0, shape=(2**32, 2**32))]),
    "zero shape beyond any address": ("too large a shape", [record(size=0, shape=(2**62, 2**62, 0))]),
    "shape without size": ("its shape needs others", [record(size=12, shape=(4,))]),
    "unknown dtype": ("unknown dtype (5, 64)", [record(code=5, bits=64)]),
    "three bytes a number": ("unknown dtype (0, 24)", [record(bits=24)]),
    "33 axes": ("has 33 axes", [record(size=4, shape=(1,) * 33)]),
    "more axes than bytes": ("the table ends inside entry 0", [record(axes=32)]),
    "no name": ("a name of 0 bytes", [record(name=b"")]),
    "name of 2000 bytes": ("a name of 2000 bytes", [record(name=b"x" * 2000)]),
    "name that is not UTF-8": ("a name that is no text", [record(name=b"\xff\xfe")]),
    "NUL in a name": ("a name that is no text", [record(name=b"a\0b")]),
    "two of one name": ("has two entries 'x'", [record(), record(offset=128, size=0, shape=(0,))]),
    "reserved bytes used": ("bytes that must be zero", [record(zero=1)]),
    "bytes after the last": ("longer than its entries", [record(), b"\0" * 8]),
    "half a record": ("the table ends inside entry 0", [record()[:20]]),
    "padding of a name used": ("bytes that must be zero", [record()[:-1] + b"\1"]),
}


@pytest.mark.parametrize("what", HOSTILE_TABLES)
def test_tables_made_in_bad_faith(tmp_path, what):
    content = small_file(tmp_path)
    fault, records = HOSTILE_TABLES[what]
    table, count = b"".join(records), len([r for r in records if len(r) > 16])
    assert fault in refused(tmp_path / "bad", resealed(content, table=table, count=count))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"count": 0}, "longer than its entries"),
        ({"count": 0, "table": b""}, "bytes that no entry has"),
        ({"count": 4}, "the table ends inside entry 3"),
        ({"count": 2**32 - 1}, "has 4294967295 entries"),
        ({"size": 2**63}, "its header says 9223372036854775808"),
        ({"table_at": 2**64 - 64}, "do not follow"),
        ({"table_size": 2**64 - 1}, "do not follow"),
        ({"text_at": 2**64 - 64}, "do not follow"),
        ({"text_at": 0}, "do not follow"),
        ({"text_size": 2**64 - 1}, "bytes of metadata"),
        ({"text_size": 0}, "do not follow"),
        ({"table_at": 64, "table_size": 2**40}, "do not follow"),
    ],
)
def test_headers_made_in_bad_faith(tmp_path, fields, fault):
    assert fault in refused(tmp_path / "bad", resealed(small_file(tmp_path), **fields))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"a":NaN}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"9" * 21 + b"}",
        b"\xff{}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
    ids=["empty", "list", "half", "nan", "digits", "21 digits", "latin", "lists", "objects"],
)
def test_metadata_made_in_bad_faith(tmp_path, text):
    assert "metadata" in refused(tmp_path / "bad", resealed(small_file(tmp_path), text=text))


def test_a_bool_that_is_neither_is_refused(tmp_path):
    write_kdtr(tmp_path / "a", {"mask": np.array([2], np.uint8)})
    content = (tmp_path / "a").read_bytes()
    table_at = struct.unpack_from("<Q", content, 16)[0]
    table = bytearray(content[table_at:])
    table[20] = 6
    assert "bool" in refused(tmp_path / "bad", resealed(content, table=bytes(table)))


def test_random_damage_with_honest_checksums(rng, tmp_path):
    """Random bytes in the table behind good checksums: whatever comes, it is arrays or one error."""
    content = small_file(tmp_path)
    table_at = struct.unpack_from("<Q", content, 16)[0]
    outcomes = set()
    for _ in range(1500):
        table = bytearray(content[table_at:])
        for _ in range(int(rng.integers(1, 4))):
            table[rng.integers(len(table))] = rng.choice([0, 1, 255, rng.integers(256)])
        (tmp_path / "bad").write_bytes(resealed(content, table=bytes(table)))
        try:
            read_all(tmp_path / "bad")
            outcomes.add("read")
        except KdtrError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_damaged_bytes_of_an_array_name_it(rng, tmp_path):
    write_kdtr(tmp_path / "a", {"good": np.arange(9), "bad": rng.random(500_000)})
    with KdtrFile(tmp_path / "a") as file:
        offset = file.entries["bad"].offset
    content = bytearray((tmp_path / "a").read_bytes())
    content[offset + 3_000_001] ^= 16
    (tmp_path / "a").write_bytes(content)
    with KdtrFile(tmp_path / "a") as file:
        np.testing.assert_array_equal(file["good"], np.arange(9))
        for look in (lambda: file["bad"], lambda: file.verify("bad"), file.verify):
            with pytest.raises(KdtrError, match="array 'bad' is damaged"):
                look()
    with KdtrFile(tmp_path / "a", verify=False) as file:
        assert file["bad"].shape == (500_000,)


def test_a_file_cut_short_while_open_is_an_error(tmp_path):
    write_kdtr(tmp_path / "a", {"x": np.zeros(1_000_000)})
    with KdtrFile(tmp_path / "a") as file:
        os.truncate(tmp_path / "a", 5000)
        with pytest.raises(KdtrError, match="shorter"):
            file["x"]


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(KdtrError, match="not a regular file"):
            KdtrFile(path)
    with pytest.raises(FileNotFoundError):
        KdtrFile(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/nothing/a'"):
        write_kdtr(tmp_path / "nothing" / "a", {})
    with pytest.raises(ValueError, match="needs a file"):
        write_kdtr(tmp_path, {})
    assert sorted(os.listdir(tmp_path)) == ["pipe"]


def test_a_damaged_file_takes_no_memory(tmp_path):
    """A header and table that promise 2**62 bytes are refused with the memory of a small process."""
    content = resealed(small_file(tmp_path), table=record(size=2**62, shape=(2**60,)), count=1)
    (tmp_path / "bad").write_bytes(content)
    code = (
        "import resource, sys; from ddtree_numba.kdtr import KdtrFile, KdtrError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: KdtrFile(sys.argv[1]); sys.exit('read')\n"
        "except KdtrError: pass\n"
        "sys.exit(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 2000)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "bad"], check=True)


# --- writing whole or not at all -------------------------------------------------------------------------------------


def test_an_error_in_the_middle_leaves_the_old_file(tmp_path):
    content = small_file(tmp_path)

    def write_and_fail() -> None:
        with KdtrWriter(tmp_path / "small.kdtr") as writer:
            writer.add("x", np.arange(10))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert (tmp_path / "small.kdtr").read_bytes() == content
    assert os.listdir(tmp_path) == ["small.kdtr"]


def test_a_bad_array_is_forgotten_and_the_rest_goes_on(tmp_path):
    with KdtrWriter(tmp_path / "a") as writer:
        writer.add("x", np.arange(10))
        with pytest.raises(ValueError, match="needs all alike"):
            writer.add_rows("y", iter([np.zeros((2, 3)), np.zeros((2, 4))]))
        writer.add("y", np.arange(3))
    got, _ = read_kdtr(tmp_path / "a")
    assert list(got) == ["x", "y"] and got["y"].tolist() == [0, 1, 2]


def test_an_array_inside_another_is_refused(tmp_path):
    with KdtrWriter(tmp_path / "a") as writer:

        def chunks():
            yield np.zeros(3)
            writer.add("y", np.zeros(3))

        with pytest.raises(ValueError, match="got array 'y' inside another"):
            writer.add_rows("x", chunks())
        writer.add("z", np.arange(3))
    with pytest.raises(ValueError, match="outside its with block"):
        writer.add("y", np.zeros(3))
    assert list(read_kdtr(tmp_path / "a")[0]) == ["z"]


def test_asking_for_a_name_reads_no_array(tmp_path):
    write_kdtr(tmp_path / "a", {"x": np.zeros(1000)})
    content = bytearray((tmp_path / "a").read_bytes())
    content[100] ^= 1
    (tmp_path / "a").write_bytes(content)
    with KdtrFile(tmp_path / "a") as file:
        assert "x" in file and "y" not in file and len(file) == 1


@contextlib.contextmanager
def disk_of(size: int):
    """The system's limit on a file's size stands in for the disk's end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("size", "when"), [(0, "the header"), (64, "an array"), (64 + 80_000, "what follows the arrays")]
)
def test_a_full_disk_leaves_nothing_behind(tmp_path, size, when):
    """Neither draft nor open file, and the error names the file."""
    content = small_file(tmp_path)
    path = tmp_path / "small.kdtr"
    writer = KdtrWriter(path)
    with disk_of(size), pytest.raises(OSError) as caught, writer:
        writer.add("x", np.zeros(10_000))
    assert caught.value.filename == str(path) and caught.value.errno == errno.EFBIG, when
    assert writer._file is None
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["small.kdtr"]


def test_an_error_of_the_chunks_is_left_as_it_is(tmp_path):
    def chunks():
        yield np.zeros(3)
        raise FileNotFoundError(2, "No such file or directory", "theirs")

    with KdtrWriter(tmp_path / "a") as writer, pytest.raises(FileNotFoundError, match="'theirs'"):
        writer.add_rows("x", chunks())


def test_a_writer_has_one_with_block(tmp_path):
    """Used again, it would write its old table over new bytes."""
    writer = KdtrWriter(tmp_path / "a")
    with writer:
        writer.add("x", np.arange(100))
    content = (tmp_path / "a").read_bytes()
    with pytest.raises(ValueError, match=r"^writer: got a second with block for .*, needs a new KdtrWriter"), writer:
        pass
    nested = KdtrWriter(tmp_path / "b")
    with pytest.raises(ValueError, match="a second with block"), nested, nested:
        pass
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize("number", [10**20, -(10**19), [{"x": 10**25}]])
def test_metadata_that_a_reader_refuses_is_not_written(tmp_path, number):
    with pytest.raises(ValueError, match=r"^metadata: got an integer of more than 20 characters, needs"):
        write_kdtr(tmp_path / "a", {}, {"number": number})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [10**20 - 1, -(10**19) + 1, 2**64 - 1, -(2**63), 1e300])
def test_the_largest_numbers_of_metadata_come_back(tmp_path, number):
    write_kdtr(tmp_path / "a", {}, {"number": number})
    assert read_kdtr(tmp_path / "a")[1] == {"number": number}


def test_arrays_that_a_reader_refuses_are_not_written(tmp_path):
    odd = np.array([0, 1, 2], np.uint8).view(bool)
    with KdtrWriter(tmp_path / "a") as writer:
        for add in (lambda: writer.add("x", odd), lambda: writer.add_rows("x", [odd[:2], odd[2:]])):
            with pytest.raises(ValueError, match=r"^'x': got a bool with the byte 2, needs only 0 and 1"):
                add()
        with pytest.raises(ValueError, match=r"^'x': got shape \[9223372036854775808, 0\], needs"):
            writer.add_rows("x", [np.zeros((2**62, 0), np.int8)] * 2)
        writer.add("x", odd[:2])
        writer.add("none", odd[:0])
    assert read_kdtr(tmp_path / "a")[0]["x"].tolist() == [False, True]


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    content = small_file(tmp_path)
    code = (
        "import os, sys, numpy as np; from ddtree_numba.kdtr import KdtrWriter\n"
        "with KdtrWriter(sys.argv[1]) as w: w.add('x', np.zeros(9)); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "small.kdtr"], check=False)
    assert (tmp_path / "small.kdtr").read_bytes() == content
    assert len(os.listdir(tmp_path)) == 2  # a draft with a name of its own


def test_readers_beside_a_writer_see_whole_files(tmp_path):
    path = tmp_path / "a"
    write_kdtr(path, {"x": np.full(50_000, 0)})
    faults: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                with KdtrFile(path) as file:
                    assert len(set(file["x"].tolist())) == 1
        except BaseException as error:
            faults.append(error)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(25):
        write_kdtr(path, {"x": np.full(50_000, number)})
    done.set()
    for reader in readers:
        reader.join()
    assert not faults, faults


def test_a_link_stays_a_link_and_rights_are_the_usual(tmp_path):
    (tmp_path / "link").symlink_to("real")
    write_kdtr(tmp_path / "link", {"x": np.arange(2)})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").exists()
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(
    "name", ["a b", "ü/..", "-", "x" * 200, "new\nline", b"\xff".decode("utf-8", "surrogateescape")]
)
def test_paths_of_any_kind(tmp_path, name):
    path = tmp_path / name.replace("/", "_")
    write_kdtr(path, {name.encode("utf-8", "replace").decode(): np.arange(2)})
    assert read_kdtr(path)[0]


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ({"x": np.zeros(2, complex)}, {}, TypeError, "'x': got complex128, needs one of int8,"),
        ({"x": np.array([None])}, {}, TypeError, "'x': got object"),
        ({"x": np.array(["a"])}, {}, TypeError, "'x': got str"),
        ({"x": np.zeros(2, np.float32)}, {"bfloat16": ["x"]}, TypeError, "'x': got float32 as bfloat16, needs uint16"),
        ({"x": np.zeros(2)}, {"bfloat16": ["y"]}, ValueError, "bfloat16: got 'y', needs names of arrays"),
        ({"": np.zeros(2)}, {}, ValueError, "name: got '', needs 1 to 1024 bytes"),
        ({"a\0": np.zeros(2)}, {}, ValueError, "name: got 'a"),
        ({"\ud800": np.zeros(2)}, {}, ValueError, "name: got "),
        ({"é" * 600: np.zeros(2)}, {}, ValueError, "name: got "),
        ({3: np.zeros(2)}, {}, TypeError, "name: got int, needs a str"),
        ({}, {"metadata": {"x": float("nan")}}, ValueError, "metadata: got "),
        ({}, {"metadata": {"x": np.zeros(2)}}, TypeError, "metadata: got "),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, arrays, options, error, message):
    with pytest.raises(error) as caught:
        write_kdtr(tmp_path / "a", arrays, **options)
    assert str(caught.value).startswith(message)
    assert os.listdir(tmp_path) == []


def test_bfloat16_of_ml_dtypes(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    write_kdtr(tmp_path / "a", {"x": np.array([1.0, -2.0], ml_dtypes.bfloat16)})
    with KdtrFile(tmp_path / "a") as file:
        assert file.entries["x"].dtype == "bfloat16" and file["x"].tolist() == [0x3F80, 0xC000]


def test_limits_are_those_of_the_specification():
    assert (kdtr.MAX_ENTRIES, kdtr.MAX_NAME_BYTES, kdtr.MAX_AXES, kdtr.MAX_METADATA_BYTES) == (65536, 1024, 32, 2**20)
