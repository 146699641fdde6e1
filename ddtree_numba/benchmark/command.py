"""`ddtree bench`: the command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ddtree_numba.backend import ON_GPU, describe
from ddtree_numba.json_output import JsonOutput
from ddtree_numba.refusal import RefusedError

__all__ = ["bench"]


def bench(
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="ID,ID...", help="Measure these parts alone.", show_default="all"),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="Write the report as JSON (- here).", show_default=False),
    ] = None,
) -> None:
    """Time every stage on the GPU beside its peers and its floor.

    Parts are the ids of the table, ladder_top, ladder_tree, ladder_attn and costs.
    """
    from ddtree_numba.benchmark.case import Tools
    from ddtree_numba.benchmark.ceilings import measure_ceilings
    from ddtree_numba.benchmark.peers import TorchPeers
    from ddtree_numba.benchmark.report import PARTS, count_steps, make_report, summary
    from ddtree_numba.benchmark.timing import Timer

    parts = _chosen(only, PARTS)
    _require_gpu()
    notes = Console(stderr=True, highlight=False)
    with JsonOutput(json_file) as output:
        notes.print(Text(describe(), style="dim"))
        with _bar(notes, 1 + count_steps(parts)) as step:
            step("the GPU's own rates")
            tools = Tools(Timer(), np.random.default_rng(), TorchPeers.installed())
            ceilings = measure_ceilings(tools.timer, tools.rng, tools.torch and tools.torch.module)
            report = make_report(parts, tools, ceilings, step)
        output.write(report)
    out = notes if json_file == "-" else Console(highlight=False)
    for part in summary(report):
        out.print(part if not isinstance(part, str) else Text(part), soft_wrap=isinstance(part, str))
    if report["failed"]:
        raise typer.Exit(1)


def _chosen(only: str | None, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts that `only` names, in the order of the report."""
    if only is None:
        return parts
    named = [name.strip() for name in only.split(",")]
    for name in named:
        if name not in parts:
            raise RefusedError("--only", repr(name), f"ids of {', '.join(parts)}")
    return tuple(part for part in parts if part in named)


def _require_gpu() -> None:
    if not ON_GPU:
        needs = "a GPU and numba-cuda (see `ddtree info`): simulated times mean nothing"
        raise RefusedError("bench", "the simulator", needs)
    try:
        describe()
    except Exception as error:  # of Numba, of many classes: no driver, NUMBA_ENABLE_CUDASIM=0
        reason = (" ".join(str(error).split()) or type(error).__name__).split(". ")[0].rstrip(" :")
        raise RefusedError("bench", f"no GPU that works ({reason})", "one") from None


@contextlib.contextmanager
def _bar(notes: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Show how far it is, on a terminal; what it yields is told of each step as it begins."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def step(name: str) -> None:
            bar.update(task, advance=1, description=name)
            if not notes.is_terminal:
                notes.print(Text(name, style="dim"))

        yield step
