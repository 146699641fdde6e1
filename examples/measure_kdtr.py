"""Measure writing and reading a KDTR file of 1 GiB beside a plain copy of it, each in a process of its own.

``python examples/measure_kdtr.py docs/_data/kdtr.json [FOLDER]`` takes 12 GiB of FOLDER's disk and a minute or two.
Every round runs every way once, in turn, so that what disturbs the machine disturbs all of them. Writing and copying
end when the file is on the disk (fsync); reading finds it in the page cache. No file is deleted before the end: a disk
that frees another file's blocks in the middle of a run makes whoever comes next wait.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ddtree_numba.kdtr import KdtrFile, KdtrWriter

CHUNK, CHUNKS, ROUNDS = 4 << 20, 256, 5


def synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write(folder: Path) -> None:
    """From a generator: one chunk at a time in memory."""
    chunk = np.frombuffer(os.urandom(CHUNK), np.uint16).reshape(-1, 4096)
    with KdtrWriter(folder / "x.kdtr") as writer:
        writer.add_rows("kv", (chunk for _ in range(CHUNKS)), dtype="bfloat16")


def copy(folder: Path) -> None:
    shutil.copyfile(folder / "x.kdtr", folder / "copy")
    synchronise(folder / "copy")


def read(folder: Path) -> None:
    """Mapped, every byte checked, and the first and last rows used."""
    with KdtrFile(folder / "x.kdtr") as file:
        rows = file["kv"]
        assert rows[0, 0] == rows[len(rows) // CHUNKS, 0] and not rows.flags.owndata


def plain_read(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    with open(folder / "x.kdtr", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


WAYS = {"write KDTR": write, "copy file": copy, "read KDTR": read, "plain read": plain_read}


def timed(way: str, folder: Path) -> tuple[float, float]:
    """Run one way in a fresh process; return its seconds and the memory it adds, without the start and imports."""
    done = subprocess.run([sys.executable, __file__, way, str(folder)], capture_output=True, text=True, check=True)
    seconds, kilobytes = json.loads(done.stdout)
    return seconds, kilobytes / 1e3


def child(way: str, folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Python, NumPy and Numba, just imported
    start = time.perf_counter()
    WAYS[way](folder)
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))


def main(out: Path, folder: Path) -> None:
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    size = CHUNK * CHUNKS
    for number in range(ROUNDS + 1):
        (folder / str(number)).mkdir()
        for way in WAYS:
            result = timed(way, folder / str(number))
            if number:  # the first round warms the disk up
                runs[way].append(result)
            print(f"round {number} {way}: {result[0]:.2f} s, {result[1]:.0f} MB", file=sys.stderr)
    ratios = {
        "write KDTR": [c[0] / w[0] for c, w in zip(runs["copy file"], runs["write KDTR"], strict=True)],
        "copy file": [1.0],
        "read KDTR": [c[0] / r[0] for c, r in zip(runs["copy file"], runs["read KDTR"], strict=True)],
        "plain read": [c[0] / r[0] for c, r in zip(runs["copy file"], runs["plain read"], strict=True)],
    }
    measured = {
        way: {
            "seconds_for_1_GiB": statistics.median(seconds for seconds, _ in results),
            "slowest_seconds": max(seconds for seconds, _ in results),
            "GB_per_second": size / statistics.median(seconds for seconds, _ in results) / 1e9,
            "speed_relative_to_copy_median_of_pairs": statistics.median(ratios[way]),
            "memory_added_MB": max(memory for _, memory in results),
        }
        for way, results in runs.items()
    }
    report = {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} while measuring",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "measured": measured,
    }
    draft = out.with_suffix(".part")
    draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, out)


if __name__ == "__main__":
    if sys.argv[1] in WAYS:
        child(sys.argv[1], Path(sys.argv[2]))
    else:
        place = sys.argv[2] if len(sys.argv) > 2 else None
        with tempfile.TemporaryDirectory(dir=place) as holder:
            main(Path(sys.argv[1]), Path(holder))
