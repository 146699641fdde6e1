"""`ddtree vectors write` and `ddtree conformance`: golden vectors, and any implementation checked against them.

The packages behind them are imported when a command runs, so that the other commands start as fast as before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ddtree_numba.json_output import JsonOutput, TextOutput
from ddtree_numba.refusal import RefusedError

if TYPE_CHECKING:
    from ddtree_numba.conformance import Result
    from ddtree_numba.vectors import Case


def add_conformance(app: typer.Typer) -> None:
    """Register both commands."""
    vectors = typer.Typer(help="Golden vectors for implementations in any language.")
    vectors.callback(invoke_without_command=True)(show_help)
    vectors.command("write")(write)
    app.add_typer(vectors, name="vectors")
    app.command("conformance")(conformance)


def show_help(context: typer.Context) -> None:
    """Show the help of a command that was given without one of its own, with exit code 2."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


_Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Draws the random cases, 0 to 2**64 - 1.")]


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise RefusedError("--seed", seed, "a whole number from 0 to 2**64 - 1")
    return seed


def write(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    seed: _Seed = 0,
) -> None:
    """Write every golden vector, one KDTR file a case, and a manifest to DIR."""
    from ddtree_numba.vectors import write_vectors

    _check_seed(seed)
    with _progress("writing", None) as tell:
        try:
            manifest = write_vectors(folder, seed, tell)
        except ValueError as error:
            raise _refused(error, "DIR") from None
        except OSError as error:
            raise RefusedError("DIR", f"{folder} ({error.strerror})", "a folder that can be written") from None
    size = sum(entry["bytes"] for entry in manifest["cases"])
    _console().print(f"{len(manifest['cases'])} cases, {size / 1e6:.1f} MB, seed {seed}, in {folder}", soft_wrap=True)


def conformance(
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl", metavar="MODULE:OBJECT", help="Python: an object with any of the stages.", show_default=False
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--command", metavar="COMMAND", help="A program, with {in} and {out} in it.", show_default=False),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option("--vectors", metavar="DIR", help="Cases from here.", show_default="made anew"),
    ] = None,
    seed: _Seed = 0,
    only: Annotated[
        str, typer.Option("--only", metavar="PATTERN", help="Cases by name, as in 'build_tree/known_*'.")
    ] = "*",
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For each case.")] = 60.0,
    every: Annotated[bool, typer.Option("--all", help="Show passed cases, too.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the outcome as JSON.", show_default=False)
    ] = None,
    junit: Annotated[
        str | None,
        typer.Option("--junit", metavar="FILE|-", help="Write the outcome as JUnit XML.", show_default=False),
    ] = None,
) -> None:
    """Check an implementation of the stages against the golden vectors.

    Exit code 0: all that it does is right; 1: something is wrong, or nothing was checked; 2: bad input.
    """
    from ddtree_numba import conformance as kit

    name, engine = _engine(impl, command, timeout)
    _check_seed(seed)
    if vectors is not None and seed != 0:
        raise RefusedError("--seed", f"{seed} beside --vectors", "one of them: stored vectors have their seed")
    if not 0 < timeout < 1e6:
        raise RefusedError("--timeout", timeout, "seconds above 0")
    if json_file and junit and _place(json_file) == _place(junit):
        raise RefusedError("--json, --junit", f"{junit} for both", "two places")
    with JsonOutput(json_file) as json_output, TextOutput(junit, "--junit") as junit_output:
        results = _checked(engine, vectors, seed, only, timeout)
        json_output.write(kit.as_json(results, name))
        junit_output.write_text(kit.as_junit(results, name))
    out = _console() if "-" in (json_file, junit) else Console(highlight=False, markup=False)
    out.print(kit.as_table(results, every))
    if code := kit.exit_code(results):
        raise typer.Exit(code)


def _place(path: str) -> str:
    return path if path == "-" else os.path.realpath(path)


def _checked(engine: Any, vectors: Path | None, seed: int, only: str, timeout: float) -> list[Result]:
    from ddtree_numba.conformance import check_engine

    with _progress("making cases" if vectors is None else "reading cases", None) as tell:
        cases = _chosen(vectors, seed, only, tell)
    # What an engine prints is no part of the outcome.
    with _progress("checking", len(cases)) as tell, contextlib.redirect_stdout(sys.stderr):
        return list(_told(check_engine(engine, cases, timeout), tell))


def _engine(impl: str | None, command: str | None, timeout: float) -> tuple[str, Any]:
    from ddtree_numba.conformance import CommandEngine, load_engine

    if (impl is None) == (command is None):
        got = "neither" if impl is None else "both"
        raise RefusedError("--impl, --command", got, "one of them")
    if impl is not None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what a module prints is none of ours
                return impl, load_engine(impl)
        except ValueError as error:
            raise RefusedError("--impl", error, "package.module:object") from None
    assert command is not None
    try:
        return command, CommandEngine(command, timeout)
    except ValueError as error:
        raise _refused(error) from None


def _refused(error: ValueError, argument: str = "") -> RefusedError:
    """Return a function's "name: got this, needs that" as the command's, of `argument` or the option of that name."""
    name, _, rest = str(error).partition(": got ")
    got, _, needs = rest.rpartition(", needs ")
    return RefusedError(argument or f"--{name}", got, needs)


def _chosen(folder: Path | None, seed: int, only: str, tell: Any) -> list[Case]:
    """Return the cases to run; refuses a pattern that none has."""
    from ddtree_numba.vectors import all_cases, read_vectors

    cases = []
    try:
        for case in all_cases(seed, only) if folder is None else read_vectors(folder, only):
            cases.append(case)
            tell(case.name)
    except (ValueError, OSError) as error:
        if str(error).startswith("folder: got "):
            raise RefusedError(
                "--vectors", f"{folder}, which has no manifest that can be read", "golden vectors"
            ) from None
        raise RefusedError("--vectors", error, "golden vectors that are whole") from None
    if not cases:
        raise RefusedError("--only", repr(only), "a pattern that cases have, such as 'accept_walk/*'")
    return cases


def _told(results: Iterable[Result], tell: Any) -> Iterator[Result]:
    for result in results:
        tell(result.case)
        yield result


def _console() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


@contextlib.contextmanager
def _progress(what: str, total: int | None) -> Iterator[Any]:
    """Show a bar on a terminal; yields a function that takes the name of each case done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[case]}"))
    console = _console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, case="")
        yield lambda name: bar.update(task, advance=1, case=name)
