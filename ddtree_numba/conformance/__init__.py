"""Check any implementation of the decoding step, in any language, against the golden vectors.

``ddtree conformance --impl package.module:object`` calls Python, ``--command "engine --in {in} --out {out}"`` runs a
program. Every case is passed, failed with the first differing element and the rule it breaks, or not supported.
"""

from ddtree_numba.conformance.command import NOT_SUPPORTED, CommandEngine, CommandError
from ddtree_numba.conformance.engine import Engine
from ddtree_numba.conformance.faults import FAULTS
from ddtree_numba.conformance.own import kernels, reference
from ddtree_numba.conformance.report import as_json, as_junit, as_table, exit_code
from ddtree_numba.conformance.runner import Result, check_engine, load_engine

__all__ = [
    "FAULTS",
    "NOT_SUPPORTED",
    "CommandEngine",
    "CommandError",
    "Engine",
    "Result",
    "as_json",
    "as_junit",
    "as_table",
    "check_engine",
    "exit_code",
    "kernels",
    "load_engine",
    "reference",
]
