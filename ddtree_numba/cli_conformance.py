"""`ddtree vectors write` and `ddtree conformance`: golden vectors, and any implementation checked against them.

The packages behind them are imported when a command runs, so that the other commands start as fast as before.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from ddtree_numba.conformance import Result
    from ddtree_numba.vectors import Case


class _RefusedError(typer.BadParameter):
    """Bad input: one line, without Click's words before it."""

    def format_message(self) -> str:
        return self.message


def add_conformance(app: typer.Typer) -> None:
    """Register both commands."""
    vectors = typer.Typer(help="Golden vectors for implementations in any language.", no_args_is_help=True)
    vectors.command("write")(write)
    app.add_typer(vectors, name="vectors")
    app.command("conformance")(conformance)


_Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Draws the random cases, 0 to 2**64 - 1.")]


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise _RefusedError(f"--seed: got {seed}, needs a whole number from 0 to 2**64 - 1")
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
            raise _RefusedError(str(error).replace("folder:", "DIR:", 1)) from None
        except OSError as error:
            raise _RefusedError(f"DIR: got {folder} ({error.strerror}), needs a folder that can be written") from None
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
        str | None, typer.Option("--junit", metavar="FILE", help="Write the outcome as JUnit XML.", show_default=False)
    ] = None,
) -> None:
    """Check an implementation of the stages against the golden vectors.

    Exit code 0: all that it does is right; 1: something is wrong, or nothing was checked; 2: bad input.
    """
    from ddtree_numba import conformance as kit

    name, engine = _engine(impl, command, timeout)
    _check_seed(seed)
    if not 0 < timeout < 1e6:
        raise _RefusedError(f"--timeout: got {timeout}, needs seconds above 0")
    for option, file in (("--json", json_file), ("--junit", junit)):
        _check_output(option, file)
    with _progress("making cases" if vectors is None else "reading cases", None) as tell:
        cases = _chosen(vectors, seed, only, tell)
    # What an engine prints is no part of the outcome.
    with _progress("checking", len(cases)) as tell, contextlib.redirect_stdout(sys.stderr):
        results = list(_told(kit.check_engine(engine, cases, timeout), tell))
    if json_file is not None:
        _write_text("--json", json_file, json.dumps(kit.as_json(results, name), indent=1, ensure_ascii=True) + "\n")
    if junit is not None:
        _write_text("--junit", junit, kit.as_junit(results, name))
    out = _console() if json_file == "-" else Console(highlight=False, markup=False)
    out.print(kit.as_table(results, every))
    if code := kit.exit_code(results):
        raise typer.Exit(code)


def _engine(impl: str | None, command: str | None, timeout: float) -> tuple[str, Any]:
    from ddtree_numba.conformance import CommandEngine, load_engine

    if (impl is None) == (command is None):
        got = "neither" if impl is None else "both"
        raise _RefusedError(f"--impl, --command: got {got}, needs one of them")
    if impl is not None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what a module prints is none of ours
                return impl, load_engine(impl)
        except ValueError as error:
            raise _RefusedError(f"--impl: got {error}, needs package.module:object") from None
    assert command is not None
    try:
        return command, CommandEngine(command, timeout)
    except ValueError as error:
        option, _, rest = str(error).partition(":")
        raise _RefusedError(f"--{option}:{rest}") from None


def _chosen(folder: Path | None, seed: int, only: str, tell: Any) -> list[Case]:
    """Return the cases to run; refuses a pattern that none has."""
    from ddtree_numba.vectors import all_cases, read_vectors

    cases = []
    try:
        for case in all_cases(seed, only) if folder is None else read_vectors(folder, only):
            cases.append(case)
            tell(case.name)
    except (ValueError, OSError) as error:
        words = str(error).replace("folder:", "--vectors:", 1)
        raise _RefusedError(
            words if words.startswith("--") else f"--vectors: got {words}, needs whole vectors"
        ) from None
    if not cases:
        raise _RefusedError(f"--only: got {only!r}, needs a pattern that cases have, such as 'accept_walk/*'")
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


def _check_output(option: str, file: str | None) -> None:
    """Refuse a path that can't be written, before any work."""
    if file is None or (file == "-" and option == "--json"):
        return
    target = Path(os.path.realpath(file))
    if not file or target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise _RefusedError(f"{option}: got {file!r}, needs a file that can be written")


def _write_text(option: str, file: str, text: str) -> None:
    """Write a text whole or not at all; a device or a pipe is written to directly."""
    if file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(os.path.realpath(file))
    draft = target if target.exists() and not target.is_file() else target.with_name(f".ddtree-{secrets.token_hex(8)}")
    try:
        draft.write_text(text, encoding="utf-8")
        if draft is not target:
            os.replace(draft, target)
    except OSError as error:
        if draft is not target:
            draft.unlink(missing_ok=True)
        raise _RefusedError(f"{option}: got {file!r} ({error.strerror}), needs a file that can be written") from None
