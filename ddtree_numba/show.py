"""Pictures of one round for the terminal: the tree, its visibility bits, the walk.

Everything takes one request of a batch, as the arrays of the data contract without their batch axis, and a function
that names a token. Meaning never hangs on colour alone: accepted nodes also carry a check mark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ddtree_numba.draft_tree import DraftTree

__all__ = ["bitmask_picture", "byte_label", "request_tree", "tree_picture", "walk_picture"]

Label = Callable[[int], str]

_ACCEPTED = "bold green"
_BONUS = "bold magenta"
_QUIET = "dim"
_NAMES = {9: "tab", 10: "newline", 13: "return", 32: "space", 256: "end of document", 257: "mask"}


def byte_label(token: int) -> str:
    """Return a byte token as one reads it.

    >>> [byte_label(token) for token in (97, 32, 10, 195, 256)]
    ["'a'", 'space', 'newline', '0xc3', 'end of document']
    """
    if token in _NAMES:
        return _NAMES[token]
    return repr(chr(token)) if 32 < token < 127 else f"0x{token:02x}"


def request_tree(tree: DraftTree, request: int = 0) -> DraftTree:
    """Return one request's tree: every array of a batch without its first axis."""
    return DraftTree(*(field[request] for field in tree))


def tree_picture(
    tree: DraftTree, target_tokens: np.ndarray, accept_slots: Sequence[int], label: Label = byte_label
) -> Tree:
    """Return one request's `tree` as an indented tree: slot, token, probability of the path, what the target says.

    `target_tokens` [N] is the target's token after every node, `accept_slots` the slots of the accepted path.
    """
    accepted = set(accept_slots)

    def line(slot: int) -> Text:
        style = _ACCEPTED if slot in accepted else ""
        text = Text.assemble((f"{slot:>2} ", _QUIET))
        text.append(label(int(tree.token_ids[slot])), style=style)
        text.append(" ✓" if slot in accepted else "", style=style)
        text.append("  root" if slot == 0 else f"  {math.exp(tree.log_probs[slot]):.1%}", style=_QUIET)
        text.append(f"  target: {label(int(target_tokens[slot]))}", style=_QUIET)
        return text

    def grow(branch: Tree, slot: int) -> None:
        child = int(tree.first_child[slot])
        while child >= 0:
            grow(branch.add(line(child)), child)
            child = int(tree.next_sibling[child])

    picture = Tree(line(0), guide_style=_QUIET)
    grow(picture, 0)
    return picture


def bitmask_picture(tree: DraftTree, positions: np.ndarray, label: Label = byte_label) -> Table:
    """Return one request's visibility rows: which slots each node sees, and where in the text it stands.

    `positions` [N] int32. Every node sees the whole prefix as well, which is not drawn.
    """
    used = int(tree.node_count)
    grid = Table(box=None, pad_edge=False, show_edge=False)
    grid.add_column("slot", justify="right", style=_QUIET, no_wrap=True)
    grid.add_column("token", no_wrap=True)
    grid.add_column("position", justify="right", no_wrap=True)
    # Where a row of bits is longer than the line is wide it goes on below: a cut row would hide what a node sees.
    grid.add_column("sees slot 0 … " + str(used - 1), overflow="fold")
    for slot in range(used):
        row = [bool(int(tree.ancestor_bits[slot, j // 32]) >> j % 32 & 1) for j in range(used)]
        cells = Text("".join("█" if seen else "·" for seen in row))
        grid.add_row(str(slot), label(int(tree.token_ids[slot])), str(int(positions[slot])), cells)
    return grid


def walk_picture(
    tree: DraftTree,
    target_tokens: np.ndarray,
    accept_slots: Sequence[int],
    accept_tokens: Sequence[int],
    label: Label = byte_label,
) -> Group:
    """Return the walk through one request's tree, a line per node: the target's token, and where it leads.

    `accept_slots` and `accept_tokens` are the used part of the accepted path.
    """
    lines: list[Any] = []
    for step, slot in enumerate(accept_slots):
        wanted = label(int(target_tokens[slot]))
        text = Text(f"at slot {slot} ({label(int(tree.token_ids[slot]))}) the target wants ")
        last = step + 1 == len(accept_slots)
        text.append(wanted, style=_BONUS if last else _ACCEPTED)
        if not last:
            text.append(f": slot {accept_slots[step + 1]} holds it, accepted")
        else:
            drafted = int(tree.first_child[slot]) >= 0
            text.append(f": {'no child holds it' if drafted else 'no child here'}, the bonus token")
        lines.append(text)
    emitted = " ".join(label(int(token)) for token in accept_tokens)
    count = "1 token" if len(accept_tokens) == 1 else f"{len(accept_tokens)} tokens"
    lines.append(Text(f"{count} from one pass of the target: {emitted}", style="bold"))
    return Group(*lines)
