"""An implementation that is a program: it reads a case's inputs from one KDTR file and writes its answer to another."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

import numpy as np

from ddtree_numba.kdtr import KdtrError, read_kdtr, write_kdtr
from ddtree_numba.vectors import STAGES, Case

__all__ = ["NOT_SUPPORTED", "CommandEngine", "CommandError"]

NOT_SUPPORTED = 77
"""The exit code by which a program says that it does not do this case, as Automake's test programs do."""

_TAIL_LINES = 20


class CommandError(RuntimeError):
    """A program that crashed, hung, or wrote no answer; the message is one line."""


class CommandEngine:
    """Runs a command once per case: ``my_engine --in {in} --out {out}``.

    The file at ``{in}`` holds the case's inputs and, as arrays without axes, its parameters, by name; its metadata
    tells ``stage`` and ``case``. The program writes its answer's arrays by name to ``{out}`` and exits with 0, or
    with 77 when it does not do this case. No shell is involved. The command has a process group of its own, which is
    ended when the program exits and when `timeout` seconds are over.
    """

    def __init__(self, command: str, timeout: float = 60.0) -> None:
        """Take the command line.

        Raises `ValueError` for one that can't be split, has no ``{in}`` or ``{out}``, or names no program.
        """
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"command: got {command!r} ({error}), needs a command line") from None
        for place in ("{in}", "{out}"):
            if not any(place in word for word in self._words):
                raise ValueError(f"command: got {command!r}, needs {place} in it")
        if "{" not in self._words[0] and shutil.which(self._words[0]) is None:
            raise ValueError(f"command: got {command!r}, needs a program that is there: {self._words[0]} is not")
        if not 0 < timeout < 1e6:
            raise ValueError(f"timeout: got {timeout}, needs seconds above 0")
        self._timeout = timeout

    def answer(self, case: Case) -> dict[str, np.ndarray]:
        """Run one case; return what came out by name.

        Raises `NotImplementedError` for exit code 77, `CommandError` for whatever else goes wrong.
        """
        with tempfile.TemporaryDirectory(prefix="ddtree-conformance-") as folder:
            given, answered = Path(folder, "in.kdtr"), Path(folder, "out.kdtr")
            arrays = dict(case.inputs)
            for name, value in case.parameters.items():
                arrays[name] = np.array(value, np.float64 if isinstance(value, float) else np.int64)
            write_kdtr(given, arrays, {"stage": case.stage, "case": case.name}, bfloat16=case.bfloat16)
            self._run([w.replace("{in}", str(given)).replace("{out}", str(answered)) for w in self._words])
            try:
                got, _ = read_kdtr(answered)
            except FileNotFoundError:
                raise CommandError("the program ended well and wrote no {out}") from None
            except (KdtrError, OSError) as error:
                raise CommandError(f"the program's {{out}} can't be read: {str(error).rpartition(': ')[2]}") from None
        wanted = (*STAGES[case.stage].outputs, *STAGES[case.stage].optional)
        return {name: array for name, array in got.items() if name in wanted}

    def _run(self, words: list[str]) -> None:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise CommandError(f"the program can't be started: {error}") from None
        said: deque[bytes] = deque(maxlen=_TAIL_LINES)
        assert process.stdout is not None
        listener = threading.Thread(target=_listen, args=(process.stdout, said), daemon=True)
        listener.start()
        try:
            ended = _ends_within(self._timeout, process.pid)
        finally:
            code = _end_group(process)
            listener.join(1.0)  # a descendant that left the group may keep the pipe open
        if not ended:
            raise CommandError(f"the program was stopped: it ran for more than {self._timeout:g} seconds")
        if code == NOT_SUPPORTED:
            raise NotImplementedError
        if code != 0:
            raise CommandError(f"the program {_ending(code)}{_last_words(said)}")


def _listen(pipe: IO[bytes], said: deque[bytes]) -> None:
    """Read all that the program says, so that it never waits for us; keep the end."""
    with contextlib.suppress(OSError, ValueError), pipe:
        while line := pipe.readline(4096):
            said.append(line)


def _ends_within(seconds: float, child: int) -> bool:
    """Tell whether the child ends in time, without reaping it: its number, and its group's, stay taken until then."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return _ends_within_by_kqueue(seconds, child)
    deadline, pause = time.monotonic() + seconds, 0.0005
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, and so the system has reaped it
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)
    return True


def _ends_within_by_kqueue(seconds: float, child: int) -> bool:
    kqueue: Any = select  # named on BSD and macOS only
    exits = kqueue.kevent(child, kqueue.KQ_FILTER_PROC, kqueue.KQ_EV_ADD | kqueue.KQ_EV_ONESHOT, kqueue.KQ_NOTE_EXIT)
    with contextlib.closing(kqueue.kqueue()) as queue:
        try:
            return bool(queue.control([exits], 1, seconds))
        except ProcessLookupError:  # it has ended already
            return True


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """End the program and all that it has started and left in its group, then reap it; return its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _last_words(said: deque[bytes]) -> str:
    lines = [line.decode("utf-8", "replace").strip() for line in said]
    words = next((line for line in reversed(lines) if line), "")
    return f": {''.join(c if c.isprintable() else chr(0xFFFD) for c in words[:200])}" if words else ""
