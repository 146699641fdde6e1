"""The `ddtree` command: decode text, look at one round, say what runs where.

Standard output carries the result alone (the text, or JSON); everything about it goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddtree_numba import __version__
from ddtree_numba.backend import BACKEND, describe
from ddtree_numba.benchmark.command import bench
from ddtree_numba.cli_conformance import add_conformance, show_help
from ddtree_numba.docs_site import docs
from ddtree_numba.draft_tree import MAX_BUDGET
from ddtree_numba.engine.arithmetic import MissingCuPyError, arithmetic_of
from ddtree_numba.engine.byte_tokenizer import TextStream, decode_text, encode_text
from ddtree_numba.engine.checkpoint import CheckpointError
from ddtree_numba.engine.decoding import MAX_NEW_TOKENS, MODES, Decoder, Round
from ddtree_numba.engine.model_pair import BACKENDS, DEFAULT_MODEL, ModelPair, load_model
from ddtree_numba.json_output import JsonOutput as _JsonOutput
from ddtree_numba.refusal import RefusedError as _RefusedError

if TYPE_CHECKING:
    from ddtree_numba.draft_tree import DraftTree

__all__ = ["app", "main"]

app = typer.Typer(
    name="ddtree",
    help="Decode text with a draft tree: several tokens from one pass of the model, the same text.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
"""The commands, as a Typer application."""

# Typer brings its own Click or uses the installed one, so the class is taken from what Typer exports.
_CommandLineError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended
_BAD_INPUT = 2


def main() -> None:
    """Run the command line; whatever the user got wrong is one line on standard error and exit code 2."""
    _take_interrupts()
    code = _outcome()
    if code == _INTERRUPTED:  # Typer may have caught the interrupt itself
        _say("stopped")
    for stream in (sys.stdout, sys.stderr):
        _let_go(stream)
    if code == _INTERRUPTED:
        os._exit(code)  # simulated GPU threads may wait for each other for ever
    sys.exit(code if isinstance(code, int) else 0)


def _outcome() -> Any:
    """Run the command; return its exit code, whatever it comes to."""
    try:
        _open_streams()
        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code
    except _CommandLineError as error:
        return _complain(error.format_message())
    except (_RefusedError, CheckpointError) as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`: nobody is left to tell
        return 1
    except OSError as error:  # files of the user's are looked after where they are opened
        _complain(f"standard output: got {error.strerror or error}, needs room for the result")
        return 1


def _complain(message: str) -> int:
    _say(" ".join(message.split()).translate(_VISIBLE))
    return _BAD_INPUT


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"ddtree: {line}", file=sys.stderr)


def _open_streams() -> None:
    """Make the standard streams fit to use: one may be closed (`>&-`), or unable to show every character."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (open to the end, like the two below)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        raise _RefusedError("standard output", "a closed one", "one that can be written")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _let_go(stream: Any) -> None:
    """Write what `stream` still holds, or drop it: the interpreter would try again, and complain, at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _take_interrupts() -> None:
    """From here on no Ctrl-C gets lost."""
    sys.unraisablehook = _interrupt_again


def _interrupt_again(unraisable: Any) -> None:
    """Python drops an interrupt that arrives inside a destructor: send it once more, when that is over."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


# ---- arguments ----

_Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.", show_default=False),
]
_PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file.", show_default=False)
]
_Mode = Annotated[str, typer.Option("--mode", metavar="|".join(MODES), help="How to draft.")]
_Budget = Annotated[int, typer.Option("--budget", metavar="N", help=f"Most nodes of a draft, 0 to {MAX_BUDGET}.")]
_Backend = Annotated[
    str,
    typer.Option("--backend", metavar="|".join(BACKENDS), help="What runs the six stages; gpu: the models as well."),
]
_Model = Annotated[
    Path, typer.Option("--model", metavar="DIR", help="Another model's folder.", show_default="the package's")
]


def _one_of(argument: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _RefusedError(argument, repr(value), f"one of {', '.join(allowed)}")
    return value


def _whole(argument: str, value: int, low: int, high: int | None = None) -> int:
    if value < low or (high is not None and value > high):
        raise _RefusedError(argument, value, f"a whole number from {low}" + (f" to {high}" if high else " up"))
    return value


def _check_backend(backend: str) -> str:
    _one_of("--backend", backend, BACKENDS)
    if backend not in ("numpy", BACKEND):
        hint = "a GPU and numba-cuda, see `ddtree info`" if backend == "gpu" else "NUMBA_ENABLE_CUDASIM=1 here"
        raise _RefusedError("--backend", repr(backend), hint)
    if backend == "gpu" and (fault := _kernels_place()[1]):
        raise _RefusedError("--backend", f"'gpu' ({fault})", "a GPU that works")
    try:
        arithmetic_of(backend)
    except MissingCuPyError as error:
        reason, _, command = str(error).partition("; ")
        raise _RefusedError("--backend", f"{backend!r} ({reason})", command) from None
    return backend


def _kernels_place() -> tuple[str, str]:
    """Return where kernels run, and what keeps them from it ("" when nothing does)."""
    try:
        return describe(), ""
    except Exception as error:  # of Numba, of many classes: no driver, NUMBA_ENABLE_CUDASIM=0
        lines = " ".join(str(error).split()) or type(error).__name__
        return BACKEND, lines.split(". ")[0].rstrip(" :")


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> bytes:
    """Return the prompt's bytes, wherever they come from."""
    if (prompt is None) == (prompt_file is None):
        got = "nothing" if prompt is None else "a text and --prompt-file"
        raise _RefusedError("PROMPT", got, "either a text (- for standard input) or --prompt-file FILE")
    name = "PROMPT"
    if prompt_file is not None:
        name = "--prompt-file"
        try:
            content = prompt_file.read_bytes()
        except OSError as error:
            raise _RefusedError(name, f"{prompt_file} ({error.strerror})", "a file that can be read") from None
    elif prompt == "-":
        try:
            content = sys.stdin.buffer.read()
        except OSError as error:  # a folder, or closed for reading
            raise _RefusedError(name, f"standard input ({error.strerror})", "one that can be read") from None
    else:
        content = os.fsencode(prompt or "")
    if not content:
        raise _RefusedError(name, "an empty text", "at least one byte")
    return content


def _tokens_of(prompt: bytes, model: ModelPair) -> list[int]:
    tokens = encode_text(prompt)
    if len(tokens) >= model.context:
        room = f"the model's context has {model.context} tokens, one begins the text and one is new"
        needs = f"at most {model.context - 2} bytes: {room}"
        raise _RefusedError("PROMPT", f"{len(prompt)} bytes", needs)
    return tokens


# ---- generate ----


@app.command()
def generate(
    prompt: _Prompt = None,
    prompt_file: _PromptFile = None,
    mode: _Mode = "tree",
    budget: _Budget = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Stop after so many.")] = 200,
    compare: Annotated[bool, typer.Option("--compare", help="Run all modes, show the text of --mode.")] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="Write the figures as JSON (- here).", show_default=False),
    ] = None,
    backend: _Backend = "numpy",
    model: _Model = DEFAULT_MODEL,
) -> None:
    """Continue PROMPT, streaming the text, and say how fast that was."""
    _one_of("--mode", mode, MODES)
    _whole("--budget", budget, 0, MAX_BUDGET)
    _whole("--max-new-tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
    _check_backend(backend)
    content = _read_prompt(prompt, prompt_file)
    with _JsonOutput(json_file) as output:
        pair = load_model(model, backend)
        tokens = _tokens_of(content, pair)
        notes = Console(stderr=True, highlight=False)
        _announce(notes, backend, pair)
        decoders = [Decoder(pair, each, budget) for each in (MODES if compare else (mode,))]
        if backend != "simulator":
            _warm_up(decoders, tokens)
        runs, coloured = [], False
        for decoder in decoders:
            if decoder.mode == mode and json_file != "-":
                watcher: _Watcher = _TextWriter(content)
            else:
                watcher = _Progress(notes, decoder.mode, max_new_tokens)
            runs.append(_run(decoder, tokens, max_new_tokens, watcher))
            coloured |= watcher.coloured
        identical = all(run.tokens == runs[0].tokens for run in runs) if compare else None
        if coloured:
            notes.print(_LEGEND)
        notes.print()
        notes.print(_summary(runs, identical, notes.width))
        notes.print()
        notes.print(Text(_ENDINGS[runs[-1].finish], style="dim"))
        output.write(
            {
                "backend": backend,
                "model": pair.name,
                "prompt": content.decode("utf-8", "replace"),
                "identical": identical,
                "runs": [run.as_json() for run in runs],
            }
        )
    if identical is False:
        raise typer.Exit(1)


def _announce(notes: Console, backend: str, pair: ModelPair) -> None:
    where = "numpy (everything on the CPU)" if backend == "numpy" else describe()
    notes.print(Text(f"backend: {where} · model: {pair.name}".translate(_VISIBLE), style="dim"), soft_wrap=True)
    if backend == "simulator":
        notes.print(Text("every GPU thread is a Python thread here: seconds to minutes for a round", style="dim"))


def _warm_up(decoders: list[Decoder], tokens: list[int]) -> None:
    """One untimed round in each mode: what is compiled at first use is, and memory is touched for the first time."""
    for decoder in decoders:
        next(decoder.decode(tokens, 1))


_DRAFTED, _OWN = "green", "magenta underline"  # how a terminal shows tokens; the underline is there without colour, too
_LEGEND = Text.assemble(("drafted and accepted", _DRAFTED), " · ", ("the target's own, one a round", _OWN))

_ENDINGS = {
    "stop": "ended where the model ends the document",
    "length": "ended at --max-new-tokens",
    "context": "ended because the model's context is full",
}


@dataclass
class _Run:
    """The figures of one decode."""

    mode: str
    budget: int
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0
    finish: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "budget": self.budget,
            "text": decode_text(self.tokens),
            "tokens": self.tokens,
            "new_tokens": len(self.tokens),
            "rounds": self.rounds,
            "tokens_per_round": len(self.tokens) / self.rounds,
            "seconds": self.seconds,
            "tokens_per_second": len(self.tokens) / self.seconds,
            "finish": self.finish,
        }


def _run(decoder: Decoder, tokens: list[int], max_new_tokens: int, watcher: _Watcher) -> _Run:
    run = _Run(decoder.mode, decoder.budget)
    with watcher:
        for a_round in decoder.decode(tokens, max_new_tokens):
            run.tokens += a_round.tokens
            run.rounds += 1
            run.seconds += a_round.seconds
            run.finish = a_round.finish
            watcher.add(a_round)
    return run


class _Watcher(contextlib.AbstractContextManager["_Watcher"]):
    """Is told of every round of a decode, as it happens."""

    coloured = False  # whether tokens were shown in two colours

    def add(self, a_round: Round) -> None:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        """End the output, also of a decode that was broken off."""


class _Progress(_Watcher):
    """Counts the tokens of a decode whose text is not shown, on a terminal."""

    def __init__(self, notes: Console, mode: str, total: int) -> None:
        self._label, self._total, self._count = mode, total, 0
        self._status = notes.status(f"{mode}: reading the prompt")

    def __enter__(self) -> _Progress:
        self._status.start()
        return self

    def add(self, a_round: Round) -> None:
        self._count += len(a_round.tokens)
        self._status.update(f"{self._label}: {self._count} of {self._total} tokens")

    def __exit__(self, *_: object) -> None:
        self._status.stop()


class _TextWriter(_Watcher):
    """Streams a decode to standard output: plain into a pipe, on a terminal coloured as `_LEGEND` says."""

    def __init__(self, prompt: bytes) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._stream = TextStream()
        if self._console.is_terminal:
            self._write(prompt.decode("utf-8", "replace"), "dim")

    def add(self, a_round: Round) -> None:
        drafted, own = a_round.tokens[: a_round.accepted], a_round.tokens[a_round.accepted :]
        self._write(self._stream.feed(drafted), _DRAFTED)
        # Without a draft every token is the target's own: nothing to tell apart.
        has_draft = a_round.tree.token_ids.shape[1] > 1
        self.coloured |= has_draft and self._console.is_terminal
        self._write(self._stream.feed(own), _OWN if has_draft else "")

    def __exit__(self, *_: object) -> None:
        self._write(self._stream.feed([], final=True) + "\n", "")

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        if self._console.is_terminal:
            self._console.print(Text(text.translate(_VISIBLE), style=style), end="")
        else:
            self._console.file.write(text)
        self._console.file.flush()


# Control characters in the text must not steer the terminal: they are drawn. 128 to 159 are such, too, without a sign.
_VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 0xFFFD)
)


def _summary(runs: list[_Run], identical: bool | None, width: int) -> Table:
    """Return the table of the runs for a terminal of `width` columns: whole from 55 on."""
    slowest = next((run.as_json() for run in runs if run.mode == "autoregressive"), None)
    compared = slowest is not None and len(runs) > 1
    table = Table(box=None, padding=(0, 0, 0, 2 if width > 60 else 1), pad_edge=False, header_style="bold")
    table.caption_style, table.caption_justify = "bold", "left"
    titles = ["mode", "budget", "tokens", "rounds", "tokens\n/round", "tokens\n/s"] + ["speed"] * compared
    for title in titles:
        table.add_column(title, justify="left" if title == "mode" else "right", vertical="bottom", no_wrap=True)
    for run in runs:
        figures = run.as_json()
        row = [run.mode, str(run.budget), str(len(run.tokens)), str(run.rounds)]
        row += [f"{figures['tokens_per_round']:.2f}", f"{figures['tokens_per_second']:,.0f}"]
        if slowest is not None and compared:
            row.append(f"{figures['tokens_per_second'] / slowest['tokens_per_second']:.2f}x")
        table.add_row(*row)
    if identical is not None:
        table.caption = "output identical: yes" if identical else "output identical: NO, the modes differ"
    return table


# ---- tree ----


@app.command()
def tree(
    prompt: _Prompt = None,
    prompt_file: _PromptFile = None,
    budget: _Budget = 16,
    number: Annotated[int, typer.Option("--round", metavar="N", help="Which round to show.")] = 1,
    backend: _Backend = "numpy",
    model: _Model = DEFAULT_MODEL,
) -> None:
    """Show one round: the draft tree, what each node sees, the walk."""
    _whole("--budget", budget, 0, MAX_BUDGET)
    _whole("--round", number, 1)
    _check_backend(backend)
    content = _read_prompt(prompt, prompt_file)
    pair = load_model(model, backend)
    tokens = _tokens_of(content, pair)
    _announce(Console(stderr=True, highlight=False), backend, pair)
    decoder = Decoder(pair, "tree", budget)
    seen, shown = 0, None
    before: list[int] = []
    for a_round in decoder.decode(tokens, pair.context):
        seen, shown = seen + 1, a_round
        if seen == number:
            break
        before += a_round.tokens
    if shown is None or seen < number:
        raise _RefusedError("--round", number, f"at most {seen}: the text ends there")
    _print_round(shown, content + bytes(token for token in before if token < 256))


def _print_round(a_round: Round, text: bytes) -> None:
    from ddtree_numba import show

    request: DraftTree = show.request_tree(a_round.tree)
    count = int(a_round.path.accept_count[0])
    slots, tokens = a_round.path.accept_slots[0, :count].tolist(), a_round.path.accept_tokens[0, :count].tolist()
    targets, positions = a_round.target_tokens[0], a_round.positions[0]
    out = Console(highlight=False, markup=False)
    tail = text.decode("utf-8", "replace")[-60:].translate(_VISIBLE)
    out.print(Text(f"… {tail}" if len(text) > 60 else tail, style="dim"))
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("Draft tree: slot, token, probability of the path", lambda: show.tree_picture(request, targets, slots)),
        ("Who sees whom (and all see the prefix)", lambda: show.bitmask_picture(request, positions)),
        ("The walk", lambda: show.walk_picture(request, targets, slots, tokens)),
    ]
    for title, picture in parts:
        out.print()
        out.print(Text(title, style="bold"))
        out.print(picture())


# ---- bench, docs, info ----

app.command()(bench)
app.command()(docs)


@app.command()
def info() -> None:
    """Say where kernels run, the versions and the model."""
    out = Console(highlight=False, markup=False, soft_wrap=True)  # a long path goes on below: cut, it would be useless
    for name, value in _facts():
        out.print(Text.assemble((f"{name:16}", "bold"), value))


def _facts() -> Iterator[tuple[str, str]]:
    yield "ddtree-numba", __version__
    place, fault = _kernels_place()
    yield "kernels run on", f"nothing: {place} was asked for, but {fault}" if fault else place
    yield "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for package in ("numpy", "numba", "numba-cuda", "safetensors"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "BLAS", str(np.show_config(mode="dicts")["Build Dependencies"]["blas"].get("name", "unknown"))
    try:
        pair = load_model()
    except CheckpointError as error:
        yield "model", f"none ({error})"
    else:
        yield "model", f"{pair.name}, context {pair.context} tokens, in {DEFAULT_MODEL}"


add_conformance(app)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"ddtree-numba {__version__}")
        raise typer.Exit
    show_help(context)


if __name__ == "__main__":
    main()
