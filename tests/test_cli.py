"""The `ddtree` command, as a user runs it: in a process of its own."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
import typer

from ddtree_numba import cli, show
from ddtree_numba.backend import BACKEND
from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.engine.byte_tokenizer import TextStream, encode_text
from ddtree_numba.engine.decoding import Decoder
from ddtree_numba.engine.model_pair import DEFAULT_MODEL, load_model
from tests import tiny_model

COMMAND = [sys.executable, "-m", "ddtree_numba.cli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model.write_model(tmp_path_factory.mktemp("models") / "tiny")


def ddtree(*arguments, stdin: bytes = b"", **options) -> subprocess.CompletedProcess:
    command = [*COMMAND, *(argument if isinstance(argument, bytes) else str(argument) for argument in arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, **options)


def expected_tokens(folder: Path, prompt: str | bytes, count: int) -> list[int]:
    decoder = Decoder(load_model(folder), "autoregressive")
    return [token for each in decoder.decode(encode_text(prompt), count) for token in each.tokens]


# ---- generate ----


def test_the_main_job_with_the_package_s_model(tmp_path):
    start = time.perf_counter()
    done = ddtree("generate", "def quicksort(", "--compare", "--json", tmp_path / "out.json")
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["identical"] is True and result["model"] == "tiny_stdlib" and result["backend"] == "numpy"
    assert [run["mode"] for run in result["runs"]] == ["autoregressive", "chain", "tree"]
    assert [run["budget"] for run in result["runs"]] == [0, 15, 32]
    texts = {run["text"] for run in result["runs"]}
    assert len(texts) == 1 and done.stdout.decode() == texts.pop() + "\n"
    tree = result["runs"][2]
    assert tree["new_tokens"] == len(tree["tokens"]) and tree["tokens_per_round"] > 2
    assert b"output identical: yes" in done.stderr and b"backend: numpy" in done.stderr
    assert seconds < 60, "three modes of 200 tokens; one of them is promised in 20 s"


@pytest.mark.parametrize("mode", ["autoregressive", "chain", "tree"])
def test_plain_text_into_a_pipe(folder, mode):
    done = ddtree("generate", "def f(", "--mode", mode, "--max-new-tokens", 12, "--model", folder)
    assert done.returncode == 0, done.stderr
    tokens = expected_tokens(folder, "def f(", 12)
    assert done.stdout.decode() == bytes(t for t in tokens if t < 256).decode("utf-8", "replace") + "\n"
    assert re.search(rf"{mode}\W+\d+\W+12\W+\d+\W+[\d.]+\W+[\d,]+", done.stderr.decode()), done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_json_alone_on_standard_output(folder):
    done = ddtree("generate", "def f(", "--max-new-tokens", 9, "--budget", 7, "--json", "-", "--model", folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == ["backend", "model", "prompt", "identical", "runs"]
    assert result["prompt"] == "def f(" and result["identical"] is None and result["model"] == "tiny"
    (run,) = result["runs"]
    assert run["mode"] == "tree" and run["budget"] == 7 and run["tokens"] == expected_tokens(folder, "def f(", 9)
    assert run["new_tokens"] == 9 and run["finish"] == "length"
    assert run["tokens_per_round"] == pytest.approx(9 / run["rounds"])
    assert run["tokens_per_second"] == pytest.approx(9 / run["seconds"])
    assert re.search(rb"rounds +/round +/s\n", done.stderr), "a speed only beside another mode's"


def test_compare_runs_every_mode(folder):
    done = ddtree("generate", "x = ", "--compare", "--max-new-tokens", 8, "--json", "-", "--model", folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True and len({tuple(run["tokens"]) for run in result["runs"]}) == 1


@pytest.mark.parametrize("columns", [55, 60, 80, 200])
def test_nothing_of_the_table_is_cut(folder, columns):
    environment = os.environ | {"COLUMNS": str(columns)}
    done = ddtree("generate", "x = ", "--compare", "--max-new-tokens", 8, "--model", folder, env=environment)
    assert done.returncode == 0, done.stderr
    shown = done.stderr.decode()
    head = re.search(r"^mode +budget +tokens +rounds +/round +/s +speed *$", shown, re.MULTILINE)
    rows = re.findall(r"^(?:autoregressive|chain|tree) +\d+ +8 +\d+ +[\d.]+ +[\d,]+ +[\d.]+x *$", shown, re.MULTILINE)
    assert head and len(rows) == 3 and "…" not in shown, shown
    assert all(len(line) <= columns for line in (head[0], *rows))


def test_modes_that_differ_are_told(folder, monkeypatch, capsys):
    class Wrong(Decoder):
        def decode(self, prompt, count):
            for each in super().decode(prompt, count):
                yield dataclasses.replace(each, tokens=[65] * len(each.tokens)) if self.mode == "chain" else each

    monkeypatch.setattr(cli, "Decoder", Wrong)
    with pytest.raises(typer.Exit) as ended:
        cli.generate("def f(", compare=True, max_new_tokens=6, json_file="-", model=folder)
    assert ended.value.exit_code == 1
    out, errors = capsys.readouterr()
    assert json.loads(out)["identical"] is False and "NO, the modes differ" in errors


def test_prompt_from_a_file_and_from_standard_input(folder, tmp_path):
    prompt = b"\xff\xc3 x\x00\n"  # neither UTF-8 nor free of NUL
    (tmp_path / "prompt").write_bytes(prompt)
    options = ("--max-new-tokens", 8, "--json", "-", "--model", folder)
    from_file = ddtree("generate", "--prompt-file", tmp_path / "prompt", *options)
    from_input = ddtree("generate", "-", *options, stdin=prompt)
    tokens = expected_tokens(folder, prompt, 8)
    for done in (from_file, from_input):
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["runs"][0]["tokens"] == tokens
        assert result["prompt"] == "\ufffd\ufffd x\x00\n"


def test_argument_that_is_not_utf8(folder):
    done = ddtree("generate", b"\xff(", "--max-new-tokens", 5, "--json", "-", "--model", folder)
    assert json.loads(done.stdout)["runs"][0]["tokens"] == expected_tokens(folder, b"\xff(", 5)


def test_bytes_that_are_not_utf8_survive_in_tokens(folder):
    done = ddtree("generate", "def f(", "--max-new-tokens", 40, "--json", "-", "--model", folder)
    run = json.loads(done.stdout)["runs"][0]
    assert "\ufffd" in run["text"], "the random model writes all kinds of bytes"
    assert bytes(run["tokens"]).decode("utf-8", "replace") == run["text"]


def test_without_numbas_compiler(folder):
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    options = ("--max-new-tokens", 5, "--json", "-", "--model", folder)
    done = ddtree("generate", "def f(", *options, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][0]["tokens"] == expected_tokens(folder, "def f(", 5)


def test_budget_of_nothing_and_the_kernels(folder):
    tokens = expected_tokens(folder, "ab", 3)
    for options in (("--budget", 0), ("--backend", BACKEND, "--budget", 2)):
        done = ddtree("generate", "ab", "--max-new-tokens", 3, "--json", "-", "--model", folder, *options)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["runs"][0]["tokens"] == tokens
    assert result["backend"] == BACKEND and b"backend: " + BACKEND.encode() in done.stderr


def test_colours_on_a_terminal(folder):
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [*COMMAND, "generate", "def f(", "--max-new-tokens", "30", "--model", str(folder)]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60, env=environment)
    os.close(theirs)
    shown = read_all(ours)
    assert done.returncode == 0, done.stderr
    assert b"drafted and accepted \xc2\xb7 the target's own" in done.stderr, "a legend"
    assert "\x1b[2mdef f(" in shown, "the prompt is dim"
    assert "\x1b[4;35m" in shown, "the target's own token is underlined, without colour, too"
    # What the model writes must not steer the terminal: the random model writes control bytes.
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "")
    assert not any(is_control(character) for character in text), repr(text)
    written = TextStream().feed(expected_tokens(folder, "def f(", 30), final=True)
    assert text == "def f(" + written.translate(cli._VISIBLE).expandtabs() + "\n"


def test_text_on_a_terminal_is_the_text(tmp_path):
    """Line ends, blank lines and long lines come through, with the package's model."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "generate", "def quicksort(", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, stdout=theirs, stderr=subprocess.PIPE, timeout=60, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", read_all(ours)).replace("\r", "")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert shown == "def quicksort(" + run["text"] + "\n" and "\n" in run["text"]


def is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc" and character not in "\n\t"


def test_every_control_character_is_drawn():
    drawn = "".join(map(chr, range(0x110000))).translate(cli._VISIBLE)
    assert len(drawn) == 0x110000 and not any(map(is_control, drawn))


def read_all(descriptor: int) -> str:
    content = b""
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        content += piece
    os.close(descriptor)
    return content.decode("utf-8", "replace")


def hear_interrupts() -> None:
    """Undo what a shell does to a job in its background, whose children ignore Ctrl-C as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_ends_cleanly(folder, tmp_path):
    out = tmp_path / "out.json"
    # In the simulator a round takes long enough to be interrupted.
    options = ("--backend", BACKEND, "--budget", "60", "--model", str(folder), "--json", str(out))
    process = subprocess.Popen(
        [*COMMAND, "generate", "def f(", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )
    line = process.stderr.readline()
    assert b"backend" in line
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    if process.returncode != 0:  # a GPU may have been done by then
        assert process.returncode == 130 and b"stopped" in errors and b"Traceback" not in errors
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_where_python_drops_exceptions():
    """As in a destructor, or in the callback by which LLVM hands Numba a compiled function."""
    script = """if True:
        import os, signal, time
        from ddtree_numba import cli

        class Doomed:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)

        def work(standalone_mode):
            Doomed()
            time.sleep(60)

        cli.app = work
        cli.main()
    """
    start = time.perf_counter()
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=120, preexec_fn=hear_interrupts)
    assert done.returncode == 130 and done.stderr == b"ddtree: stopped\n", done.stderr
    assert time.perf_counter() - start < 55


def test_reader_that_goes_away(folder):
    command = f"{' '.join(COMMAND)} generate 'def f(' --max-new-tokens 60 --model {folder} | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=60)
    assert len(done.stdout) == 1 and b"Traceback" not in done.stderr and b"Exception" not in done.stderr


# ---- bad input: one line, exit code 2, nothing written ----

BAD = [
    (("generate", ""), "PROMPT: got an empty text, needs at least one byte"),
    (("generate",), "PROMPT: got nothing, needs either a text (- for standard input) or --prompt-file FILE"),
    (("generate", "-"), "PROMPT: got an empty text"),
    (("generate", "a", "--prompt-file", "b"), "PROMPT: got a text and --prompt-file, needs either"),
    (("generate", "--prompt-file", "/no/such/file"), "--prompt-file: got /no/such/file (No such file or directory)"),
    (("generate", "--prompt-file", "/no/such\nfile"), "--prompt-file: got /no/such file (No such file or directory)"),
    (("generate", "--prompt-file", "/"), "--prompt-file: got / (Is a directory)"),
    (("generate", "x" * 79), "PROMPT: got 79 bytes, needs at most 78 bytes: the model's context has 80 tokens"),
    (("generate", "a", "--mode", "fast"), "--mode: got 'fast', needs one of autoregressive, chain, tree"),
    (("generate", "a", "--budget", "-1"), "--budget: got -1, needs a whole number from 0 to 1024"),
    (("generate", "a", "--budget", "1025"), "--budget: got 1025, needs a whole number from 0 to 1024"),
    (("generate", "a", "--budget", "many"), "--budget"),
    (("generate", "a", "--budget"), "--budget"),
    (("generate", "a", "--max-new-tokens", "0"), "--max-new-tokens: got 0, needs a whole number from 1"),
    (("generate", "a", "--max-new-tokens", "-5"), "--max-new-tokens: got -5"),
    (("generate", "a", "--max-new-tokens", "2147483648"), "got 2147483648, needs a whole number from 1 to 2147483647"),
    (("generate", "a", "--backend", "tpu"), "--backend: got 'tpu', needs one of numpy, simulator, gpu"),
    (("generate", "a", "--model", "/no/such/model"), "/no/such/model: no such folder"),
    (("generate", "a", "--json", "/no/such/folder/out.json"), "--json: got /no/such/folder/out.json (No such file"),
    (("generate", "a", "--model", "/no/\x1b[31m\x9b"), "/no/\u241b[31m\ufffd: no such folder"),
    (("generate", "a", "--model", b"/no/\xff"), "/no/\\udcff: no such folder"),
    (("generate", "a", "--model", "x" * 300), "no such folder"),
    (("generate", "a", "--json", "/"), "--json: got / (it is a folder), needs a file that can be written"),
    (("generate", "a", "--json", ""), "--json: got '' (an empty name), needs a file that can be written"),
    (("generate", "a", "--json", "x" * 300), "(File name too long), needs a file that can be written"),
    (("generate", "a", "--json", "/dev/null/x"), "--json: got /dev/null/x (Not a directory)"),
    (("generate", "a", "b"), "unexpected extra argument"),
    (("generate", "a", "--colour"), "--colour"),
    (("tree", ""), "PROMPT: got an empty text"),
    (("tree", "a", "--budget", "2000"), "--budget: got 2000, needs a whole number from 0 to 1024"),
    (("tree", "a", "--round", "0"), "--round: got 0, needs a whole number from 1"),
    (("tree", "a", "--round", "999"), "--round: got 999, needs at most"),
    (("fly",), "fly"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[" ".join(map(str, a))[:40] for a, _ in BAD])
def test_bad_input(folder, tmp_path, arguments, message):
    options = ["--model", str(folder)] if "--model" not in arguments and arguments[0] in ("generate", "tree") else []
    if arguments[0] == "generate" and "--json" not in arguments:
        options += ["--json", str(tmp_path / "out.json")]
    if arguments[-1] == "--budget":
        options = []
    done = ddtree(*arguments, *options)
    errors = done.stderr.decode()
    assert done.returncode == 2, errors
    *notes, line = errors.splitlines()
    assert line.startswith("ddtree: ") and message in line, errors
    assert "Traceback" not in errors and all(note.startswith("backend: ") for note in notes), errors
    assert done.stdout == b"" and list(tmp_path.iterdir()) == []


def test_other_backend_of_kernels(folder):
    other = "gpu" if BACKEND == "simulator" else "simulator"
    done = ddtree("generate", "a", "--backend", other, "--model", folder)
    assert done.returncode == 2 and f"--backend: got '{other}', needs" in done.stderr.decode()


def test_damaged_model_leaves_an_older_result(folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for part in ("target", "drafter"):
        (broken / part).mkdir()
        for name in ("config.json", "model.safetensors"):
            (broken / part / name).write_bytes((folder / part / name).read_bytes()[:-3])
    (tmp_path / "out.json").write_text("older")
    done = ddtree("generate", "a", "--model", broken, "--json", tmp_path / "out.json")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"config.json: not JSON" in done.stderr
    assert (tmp_path / "out.json").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "out.json"]


def test_json_into_a_pipe_does_not_replace_it(folder, tmp_path):
    pipe = tmp_path / "pipe"  # stands for /dev/null and the like
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    done = ddtree("generate", "a", "--max-new-tokens", 2, "--model", folder, "--json", pipe)
    assert done.returncode == 0, done.stderr
    assert pipe.is_fifo()
    out, _ = reader.communicate(timeout=20)
    assert json.loads(out)["runs"][0]["new_tokens"] == 2


def test_json_file_has_the_usual_rights(folder, tmp_path):
    out = tmp_path / "out.json"
    done = ddtree("generate", "a", "--max-new-tokens", 2, "--model", folder, "--json", out, umask=0o022)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_mode & 0o777 == 0o644 and [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_json_through_a_link(folder, tmp_path):
    (tmp_path / "real.json").write_text("older")
    os.symlink("real.json", tmp_path / "link.json")
    done = ddtree("generate", "a", "--max-new-tokens", 2, "--model", folder, "--json", tmp_path / "link.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "real.json").read_text())["runs"] and (tmp_path / "link.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_json_of_a_long_name(folder, tmp_path):
    out = tmp_path / ("x" * 250 + ".json")
    done = ddtree("generate", "a", "--max-new-tokens", 2, "--model", folder, "--json", out)
    assert done.returncode == 0 and json.loads(out.read_text())["runs"], done.stderr


# ---- output that can't be written as it is ----


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk(folder):
    generate = ("generate", "a", "--max-new-tokens", 2, "--model", folder)
    for arguments in (
        generate,
        (*generate, "--json", "-"),
        ("tree", "a", "--model", folder),
        ("info",),
        ("--version",),
    ):
        with open("/dev/full", "wb") as full:
            done = run_into(full, *arguments)
        last = done.stderr.splitlines()[-1]
        assert last == b"ddtree: standard output: got No space left on device, needs room for the result"
        assert done.returncode == 1 and b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    done = ddtree(*generate, "--json", "/dev/full")
    assert done.returncode == 2 and b"--json: got /dev/full (No space left on device), needs" in done.stderr


def run_into(out, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, arguments)], stdout=out, stderr=subprocess.PIPE, timeout=120)


@pytest.mark.parametrize(
    "closed, code, line",
    [
        ("0<&-", 2, b"ddtree: PROMPT: got an empty text, needs at least one byte\n"),
        ("1>&-", 2, b"ddtree: standard output: got a closed one, needs one that can be written\n"),
        ("2>&-", 2, b""),
    ],
)
def test_closed_streams(folder, closed, code, line):
    command = f"{' '.join(COMMAND)} generate - --model {folder} {closed}"
    done = subprocess.run(command, shell=True, input=b"", capture_output=True, timeout=60)
    assert done.returncode == code and done.stderr == line and done.stdout == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16"])
def test_characters_that_the_output_lacks(folder, tmp_path, encoding):
    named = tmp_path / os.fsdecode(b"caf\xff\xc3\xa9\x1b\xe2\x82\xac")
    named.mkdir()
    for part in ("target", "drafter"):
        os.symlink(folder / part, named / part)
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    options = ("--max-new-tokens", 30, "--model", os.fsencode(named))
    texts = [
        ddtree("generate", "\u20ac(", *options, env=environment),
        ddtree("tree", "\u20ac(", *options[2:], env=environment),
    ]
    result = ddtree("generate", "\u20ac(", *options, "--json", "-", env=environment)
    for done in (*texts, result):
        assert done.returncode == 0 and "\x1b" not in done.stderr.decode(encoding), done.stderr
    figures = json.loads(result.stdout.decode(encoding))
    assert figures["prompt"] == "\u20ac(" and figures["model"] == named.name
    expected = figures["runs"][0]["text"] + "\n"
    assert texts[0].stdout.decode(encoding) == expected.encode(encoding, "replace").decode(encoding)
    ddtree("generate", "a", *options, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["model"] == named.name


# ---- tree, info, help ----


def test_tree_shows_one_round(folder):
    done = ddtree("tree", "def f(", "--budget", 9, "--model", folder)
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    decoder = Decoder(load_model(folder), "tree", 9)
    first = next(decoder.decode(encode_text("def f("), 50))
    for slot in range(10):
        position = int(first.positions[0, slot])
        label = re.escape(show.byte_label(int(first.tree.token_ids[0, slot])))
        row = "".join("█" if int(first.tree.ancestor_bits[0, slot, 0]) >> j & 1 else "·" for j in range(10))
        assert re.search(rf"^ +{slot} +{label} +{position} +{row}", text, re.MULTILINE), (slot, text)
    count = "1 token" if len(first.tokens) == 1 else f"{len(first.tokens)} tokens"
    assert f"{count} from one pass of the target" in text and "the bonus token" in text
    assert "backend: numpy" in done.stderr.decode()


def test_a_row_of_bits_longer_than_the_line_is_not_cut(folder):
    done = ddtree("tree", "def f(", "--budget", 99, "--model", folder)
    bits = done.stdout.decode().partition("Who sees whom")[2].partition("The walk")[0]
    assert done.returncode == 0, done.stderr
    assert len(re.findall("[█·]", bits)) == 100 * 100
    assert "position" in bits and "…" not in bits.partition("\n")[2].replace("slot 0 …", "")


def test_tree_of_a_later_round(folder):
    rounds = list(Decoder(load_model(folder), "tree", 3).decode(encode_text("def f("), 30))
    done = ddtree("tree", "def f(", "--budget", 3, "--round", 4, "--model", folder)
    assert done.returncode == 0, done.stderr
    written = TextStream().feed([token for each in rounds[:3] for token in each.tokens], final=True)
    assert done.stdout.decode().startswith("def f(" + written.translate(cli._VISIBLE))
    position = int(rounds[3].positions[0, 0])
    assert re.search(rf"^ +0 +\S+ +{position} +█", done.stdout.decode(), re.MULTILINE)


def test_pictures_of_a_hand_made_round():
    #      0 'a' -> 1 'b' -> 3 'd';  0 'a' -> 2 'c'
    from rich.console import Console

    tree = DraftTree(
        token_ids=[97, 98, 99, 100],
        parents=[-1, 0, 0, 1],
        depths=[0, 1, 1, 2],
        first_child=[1, 3, -1, -1],
        next_sibling=[-1, 2, -1, -1],
        log_probs=[0.0, -0.693147, -1.386294, -2.0],
        ancestor_bits=show.np.array([[0b0001], [0b0011], [0b0101], [0b1011]]),
        node_count=4,
    )
    targets = [99, 100, 10, 32]
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(show.tree_picture(tree, targets, [0, 2]))
    assert "\x1b[1;32m'c'\x1b[0m\x1b[1;32m ✓" in console.file.getvalue(), "accepted: bold, green, with a check mark"
    console.print(show.bitmask_picture(tree, show.np.array([7, 8, 8, 9])))
    console.print(show.walk_picture(tree, targets, [0, 2], [99, 10]))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[:4] == [
        " 0 'a' ✓  root  target: 'c'",
        "├──  1 'b'  50.0%  target: 'd'",
        "│   └──  3 'd'  13.5%  target: space",
        "└──  2 'c' ✓  25.0%  target: newline",
    ]
    assert lines[5:9] == [
        "   0  'a'           7  █···",
        "   1  'b'           8  ██··",
        "   2  'c'           8  █·█·",
        "   3  'd'           9  ██·█",
    ]
    assert lines[9:] == [
        "at slot 0 ('a') the target wants 'c': slot 2 holds it, accepted",
        "at slot 2 ('c') the target wants newline: no child here, the bonus token",
        "2 tokens from one pass of the target: 'c' newline",
    ]


def test_info_and_version():
    done = ddtree("info")
    text = done.stdout.decode()
    assert done.returncode == 0 and BACKEND in text and "numba" in text and "numpy" in text, done.stderr
    narrow = ddtree("info", env=os.environ | {"COLUMNS": "40"}).stdout.decode()
    assert narrow == text and str(DEFAULT_MODEL) in narrow.splitlines()[-1], "a path that is cut is of no use"
    assert ddtree("--version").stdout.startswith(b"ddtree-numba ")


def test_gpu_that_was_asked_for_and_is_not_there(folder):
    if BACKEND == "gpu":
        pytest.skip("needs a machine without a GPU")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0"}
    done = ddtree("info", env=environment)
    assert done.returncode == 0 and done.stderr == b"" and b"nothing: gpu was asked for, but " in done.stdout
    done = ddtree("generate", "a", "--backend", "gpu", "--model", folder, env=environment)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr
    assert done.stderr.startswith(b"ddtree: --backend: got 'gpu' (") and b"needs a GPU that works" in done.stderr


def test_gpu_without_cupy(folder, monkeypatch):
    monkeypatch.setattr(cli, "BACKEND", "gpu")
    monkeypatch.setattr(cli, "describe", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    needs = "needs pip install 'ddtree-numba[gpu13]' (gpu12 where the driver knows CUDA 12 alone)"
    with pytest.raises(Exception, match=re.escape(f"--backend: got 'gpu' (CuPy is not installed), {needs}")):
        cli.generate(prompt="a", backend="gpu", model=folder)


def test_no_arguments_show_the_help_alone():
    done = ddtree()
    assert b"generate" in done.stdout and done.stderr == b"" and done.returncode == 2


def test_help_is_quick_and_names_the_commands():
    start = time.perf_counter()
    done = ddtree("--help")
    assert done.returncode == 0 and all(name in done.stdout.decode() for name in ("generate", "tree", "bench", "info"))
    assert time.perf_counter() - start < 10
    assert all(line.endswith(".") for line in done.stdout.decode().rpartition("Commands:")[2].split("\n")[1:-1]), "cut"
    for command in ("generate", "tree", "docs", "info"):
        done = ddtree(command, "--help")
        assert done.returncode == 0 and b"bool" not in done.stdout
