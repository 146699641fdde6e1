"""Runs every case on an implementation and tells what came of it."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.conformance.command import CommandEngine
from ddtree_numba.conformance.comparison import first_difference
from ddtree_numba.conformance.engine import answer, supported_stages
from ddtree_numba.conformance.faults import faults_of
from ddtree_numba.draft_tree import DraftTree, check_tree, empty_tree
from ddtree_numba.vectors import RULES, STAGES, Case

__all__ = ["Result", "check_engine", "load_engine"]

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "not supported"

_Answer = Callable[[Case], dict[str, np.ndarray]]


class Result(NamedTuple):
    """What came of one case."""

    case: str
    """Its name."""
    status: str
    """"passed", "failed" or "not supported"."""
    seconds: float
    """How long the implementation took."""
    difference: str
    """Of a failed case: the first differing element, or how the implementation broke down."""
    rule: str
    """Of a failed case: the broken rule, a key of `RULES`."""
    mistakes: tuple[str, ...]
    """The known mistakes that give exactly this answer."""
    detail: str
    """Of a failed case: the rule in words, or the broken invariant."""
    guards: str
    """What the case is there to catch."""
    left_out: tuple[str, ...]
    """Outputs that the implementation did not return, and which were not compared."""

    @property
    def stage(self) -> str:
        """The case's stage."""
        return self.case.partition("/")[0]


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeoutError` inside after `seconds`, where the system has an alarm. Compiled code is not ended."""
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"ran for more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_case(case: Case, ask: _Answer, timeout: float | None = None) -> Result:
    """Run one case through `ask` and judge the answer; nothing that `ask` raises comes through but an interrupt."""
    start = time.perf_counter()
    try:
        with _time_limit(timeout):
            got = ask(case)
    except NotImplementedError:
        return _result(case, UNSUPPORTED, start)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: the run goes on
        return _broken_down(case, start, error)
    seconds = time.perf_counter() - start
    left_out = tuple(name for name in STAGES[case.stage].optional if name not in got)
    try:
        difference = first_difference(case, got)
    except (TypeError, ValueError, IndexError) as error:  # an answer of objects, or worse
        return _broken_down(case, start, error)
    if difference is None:
        return Result(case.name, PASSED, seconds, "", "", (), "", case.guards, left_out)
    known = faults_of(case, got)
    rule = known[0][1] if known else case.rule
    detail = RULES[rule] if known else _broken_invariant(case, got) or RULES[rule]
    mistakes = tuple(name for name, _ in known)
    return Result(case.name, FAILED, seconds, str(difference), rule, mistakes, detail, case.guards, left_out)


def _result(case: Case, status: str, start: float) -> Result:
    return Result(case.name, status, time.perf_counter() - start, "", "", (), "", case.guards, ())


def _broken_down(case: Case, start: float, error: BaseException) -> Result:
    words = " ".join(str(error).split())
    kind = "" if type(error).__name__ == "CommandError" else f"{type(error).__name__}: "
    message = (kind + words).rstrip(": ")[:300]
    seconds = time.perf_counter() - start
    return Result(case.name, FAILED, seconds, message, case.rule, (), RULES[case.rule], case.guards, ())


def _broken_invariant(case: Case, got: dict[str, np.ndarray]) -> str:
    """Return what `check_tree` says about a wrong tree, "" when it is a valid one or not whole."""
    fields = [name for name in DraftTree._fields if name != "ancestor_bits"]
    if case.stage != "build_tree" or not all(name in got for name in fields):
        return ""
    bits = empty_tree(len(case.inputs["root_tokens"]), int(case.parameters["budget"])).ancestor_bits
    try:
        check_tree(
            DraftTree(**{name: np.ascontiguousarray(got[name]) for name in fields}, ancestor_bits=bits), bits=False
        )
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def check_engine(engine: Any, cases: Iterable[Case], timeout: float | None = None) -> Iterator[Result]:
    """Yield a `Result` for every case.

    `engine` is an object or module of the `Engine` protocol, or a `CommandEngine`, which has a time limit of its own.
    Python that runs for more than `timeout` seconds has failed the case; compiled code can't be stopped from inside.

    >>> from ddtree_numba.conformance import reference
    >>> from ddtree_numba.vectors import all_cases
    >>> [result.status for result in check_engine(reference, all_cases(only="positions/*"))]
    ['passed', 'passed']
    """
    ask: _Answer = lambda case: answer(engine, case)  # noqa: E731
    if isinstance(engine, CommandEngine):
        ask, timeout = engine.answer, None
    for case in cases:
        yield check_case(case, ask, timeout)


def load_engine(where: str) -> Any:
    """Return the object at ``package.module:object``, or the module itself without ``:object``; a class is called.

    Modules are also looked for in the current folder. Raises `ValueError` when there is none, or none of its functions
    is a stage.
    """
    module_name, _, path = where.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        engine: Any = importlib.import_module(module_name)
        for name in filter(None, path.split(".")):
            engine = getattr(engine, name)
        engine = engine() if isinstance(engine, type) else engine
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{where!r} ({type(error).__name__}: {words})") from None
    if not supported_stages(engine):
        raise ValueError(f"{where!r}, which has none of {', '.join(STAGES)}")
    return engine
