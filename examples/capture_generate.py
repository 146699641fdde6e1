"""Draw the README's picture: run `ddtree generate --compare` for real and keep the terminal as SVG.

Run it from the repository root::

    python examples/capture_generate.py docs/_static/generate.svg docs/_data/generate.json

The JSON is what the command itself writes with --json, plus machine, versions and date: the figures in the picture.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import numpy as np
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from ddtree_numba import cli

PROMPT = "def quicksort("


def main(svg: Path, figures: Path) -> None:
    """Write the picture to `svg` and its figures to `figures`."""
    screen = Console(record=True, width=92, force_terminal=True, highlight=False, file=io.StringIO())
    screen.status = lambda *args, **kwargs: Mock()  # progress overwrites itself, which a picture cannot
    cli.Console = lambda *args, **kwargs: screen
    screen.print(f'$ ddtree generate "{PROMPT}" --compare', style="bold")
    cli.generate(prompt=PROMPT, compare=True, json_file=str(figures))
    # Without the web font that Rich asks for: a README and a page without a network show the reader's own.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg.write_text(screen.export_svg(title="ddtree", code_format=plain), encoding="utf-8")
    facts = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "numba": version("numba")},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    figures.write_text(json.dumps(facts | json.loads(figures.read_text()), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
