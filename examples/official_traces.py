"""Rebuild the draft trees that a run of the published DDTree code recorded, and report any difference.

    python examples/official_traces.py run.pt            # saved with torch.save
    python examples/official_traces.py rounds.json       # the same rounds as JSON, which needs no PyTorch

A .pt file holds what `ddtree_generate(..., save_tree_traces=True)` returns, or what the published benchmark.py saves of
such calls; a .json file its `round_trees`.

The published code (liranringel/ddtree, by the authors of arXiv 2604.12989) records of each round, as facts restated
here: `accepted_indices`, the accepted path with the root, and a `tree` of `node_token_ids` and `node_depths`, both
without the root, and `parents`, with the root, whose parent is -1. Node i of the first two is node i + 1 of the third.

There are no probabilities in a trace, and none are needed: all that a best-first tree depends on is the order in which
sums of log-probabilities fall. So for each round

1. the tree must be one: `check_tree` on its links, depths equal to those that its parents give;
2. the r-th child of a node at depth d must be the same token below every node: that is candidate r of depth d;
3. log-probabilities are looked for, by a linear program, with which the nodes' scores fall strictly in the recorded
   order and every candidate that was left out scores less. If there are none, no drafter leads to this tree;
4. `build_tree` on these candidates must give the recorded tree, node for node;
5. `accept_walk`, with the target's tokens along the recorded path, must accept that path.

A round that was recorded with its candidates as well (`log_probs` and `token_ids`, [L, K], in `tree`) is rebuilt from
those instead: then step 4 also checks every tie. The exit code is 1 when a round differs, 2 for what is no trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree, check_tree, empty_tree
from ddtree_numba.stages.accept_walk import accept_walk, accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference
from ddtree_numba.stages.best_first_tree import MAX_DRAFT_LENGTH, build_tree, build_tree_reference


class Round(NamedTuple):
    """One recorded round."""

    name: str
    tokens: list[int]
    depths: list[int]
    parents: list[int]
    accepted: list[int]
    candidates: tuple[np.ndarray, np.ndarray] | None


class Difference(Exception):  # noqa: N818 (it is what the program looks for, not its failure)
    """How a recorded round differs from what the contract makes of it."""


def read_rounds(path: Path) -> Iterator[Round]:
    """Yield the rounds of a file; `ValueError` for what is no trace."""
    if path.suffix == ".json":
        data = json.loads(path.read_text(encoding="utf-8"))
        yield from _rounds("", data["round_trees"] if isinstance(data, dict) else data)
        return
    import torch

    # The file holds plain containers and SimpleNamespace; anything else in the pickle is refused, not run.
    with torch.serialization.safe_globals([types.SimpleNamespace]):
        data = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(data, types.SimpleNamespace):  # of one call
        data = {"responses": [{"ddtree_generate": data}]}
    for index, response in enumerate(data["responses"]):
        for method, result in response.items():
            trees = getattr(result, "round_trees", None)
            if trees:
                yield from _rounds(f"response {index}, {method}, ", trees)


def _rounds(prefix: str, trees: Any) -> Iterator[Round]:
    for number, entry in enumerate(trees):
        tree = entry["tree"]
        lists = [tree["node_token_ids"], tree["node_depths"], tree["parents"], entry["accepted_indices"]]
        tokens, depths, parents, accepted = ([int(value) for value in values] for values in lists)
        candidates = None
        if "log_probs" in tree:
            candidates = np.array(tree["log_probs"], np.float32), np.array(tree["token_ids"], np.int32)
        yield Round(f"{prefix}round {number}", tokens, depths, parents, accepted, candidates)


def as_draft_tree(each: Round) -> DraftTree:
    """Return the recorded tree in our arrays; `Difference` when it is none."""
    nodes = len(each.tokens)
    if len(each.depths) != nodes or len(each.parents) != nodes + 1:
        sizes = f"{nodes} tokens, {len(each.depths)} depths and {len(each.parents)} parents"
        raise Difference(f"{sizes}; needs as many depths as tokens and one parent more")
    if nodes > MAX_BUDGET:
        raise Difference(f"{nodes} nodes; needs at most {MAX_BUDGET}")
    tree = empty_tree(1, nodes)
    tree.node_count[0], tree.log_probs[0] = nodes + 1, -np.arange(nodes + 1)  # only their order is known
    tree.token_ids[0, 1:], tree.parents[0], tree.depths[0, 1:] = each.tokens, each.parents, each.depths
    last_child: dict[int, int] = {}
    for slot, parent in enumerate(each.parents[1:], start=1):
        if not 0 <= parent < slot:
            raise Difference(f"node {slot}: parent {parent}; needs an earlier node")
        if parent in last_child:
            tree.next_sibling[0, last_child[parent]] = slot
        else:
            tree.first_child[0, parent] = slot
        last_child[parent] = slot
    bits, _ = ancestor_bitmask_reference(tree.parents, tree.node_count)
    tree = tree._replace(ancestor_bits=bits)
    try:
        check_tree(tree)
    except ValueError as error:
        raise Difference(str(error).removeprefix("request 0, ")) from None
    return tree


def rank_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the rank path of every node, the root's empty: a node's rank is how many siblings came before it."""
    paths: list[tuple[int, ...]] = [()]
    children = [0] * len(tree.parents[0])
    for parent in tree.parents[0, 1:].tolist():
        paths.append((*paths[parent], children[parent]))
        children[parent] += 1
    return paths


def candidate_tokens(tree: DraftTree, paths: list[tuple[int, ...]]) -> list[list[int]]:
    """Return the token of every rank at every depth; `Difference` when two nodes disagree."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for slot, path in enumerate(paths[1:], start=1):
        token = int(tree.token_ids[0, slot])
        depth, rank = len(path), path[-1]
        other, first = found.setdefault((depth, rank), (token, slot))
        if other != token:
            raise Difference(
                f"node {slot}: token {token} is child {rank} at depth {depth}, where node {first} holds {other}"
            )
    depths = max((depth for depth, _ in found), default=0)
    widths = [sum(depth == of for of, _ in found) for depth in range(1, depths + 1)]
    return [[found[depth, rank][0] for rank in range(width)] for depth, width in enumerate(widths, start=1)]


def log_probs_for(paths: list[tuple[int, ...]], widths: list[int]) -> np.ndarray:
    """Return log-probabilities [L, K + 1] whose best-first tree has the nodes `paths`, in this order.

    Unused places are -inf; behind the last used rank of a depth is one more, which must not become a node.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError:
        raise SystemExit(
            "official_traces.py: needs SciPy for traces without candidates: pip install '.[examples]'"
        ) from None
    place = {key: index for index, key in enumerate((d, r) for d, width in enumerate(widths) for r in range(width + 1))}
    rows: list[dict[int, float]] = []  # each: sum(coefficient * lp) <= -1

    def less(lower: tuple[int, ...], higher: tuple[int, ...]) -> None:
        row: dict[int, float] = {}
        for path, sign in ((lower, 1.0), (higher, -1.0)):
            for depth, rank in enumerate(path):
                row[place[depth, rank]] = row.get(place[depth, rank], 0.0) + sign
        rows.append(row)

    for higher, lower in pairwise(paths):
        less(lower, higher)
    for depth, width in enumerate(widths):
        for rank in range(width):
            rows.append({place[depth, rank + 1]: 1.0, place[depth, rank]: -1.0})
    known = set(paths)
    for path in paths:
        sibling, child = (*path[:-1], path[-1] + 1) if path else None, (*path, 0)
        if sibling is not None and sibling not in known:
            less(sibling, paths[-1])
        if len(path) < len(widths) and child not in known:
            less(child, paths[-1])
    entries = [(index, column, value) for index, row in enumerate(rows) for column, value in row.items() if value]
    index, column, value = (list(part) for part in zip(*entries, strict=True))
    matrix = csr_array((value, (index, column)), shape=(len(rows), len(place)))
    # The largest sum, so the numbers stay near 0, where float32 is finest.
    answer = linprog(-np.ones(len(place)), A_ub=matrix, b_ub=-np.ones(len(rows)), bounds=(None, -1.0))
    if answer.status == 2:
        raise Difference("no log-probabilities lead to these nodes in this order")
    if not answer.success:
        raise RuntimeError(f"the linear program ends with: {answer.message}")
    log_probs = np.full((len(widths), max(widths) + 1), -np.inf, np.float32)
    for (depth, rank), at in place.items():
        log_probs[depth, rank] = answer.x[at]
    return log_probs


def recovered_candidates(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """Return candidates (log_probs, token_ids), [L, K], that must lead to `tree`."""
    paths = rank_paths(tree)
    tokens = candidate_tokens(tree, paths)
    if not tokens:
        return np.empty((0, 1), np.float32), np.empty((0, 1), np.int32)
    log_probs = log_probs_for(paths, [len(row) for row in tokens])
    token_ids = np.full(log_probs.shape, max(map(max, tokens)) + 1, np.int32)
    for depth, row in enumerate(tokens):
        token_ids[depth, : len(row)] = row
    return log_probs, token_ids


def compare(each: Round, kernels: bool) -> None:
    """Rebuild one round; raise `Difference` naming the first that there is."""
    tree = as_draft_tree(each)
    log_probs, token_ids = recovered_candidates(tree) if each.candidates is None else each.candidates
    if log_probs.ndim != 2 or log_probs.shape != token_ids.shape or len(log_probs) > MAX_DRAFT_LENGTH:
        raise Difference(f"candidates of shapes {log_probs.shape}, {token_ids.shape}; needs [L, K] twice, L up to 64")
    build, walk = (build_tree, accept_walk) if kernels else (build_tree_reference, accept_walk_reference)
    ours = build(log_probs[None], token_ids[None], np.zeros(1, np.int32), len(each.tokens))
    for name in ("node_count", "parents", "depths", "token_ids"):
        recorded, rebuilt = getattr(tree, name).ravel(), getattr(ours, name).ravel()
        differ = np.flatnonzero(recorded != rebuilt)
        if differ.size:
            at = int(differ[0])
            raise Difference(f"{name} of node {at}: recorded {recorded[at]}, rebuilt {rebuilt[at]}")
    path = each.accepted
    if not path or path[0] != 0 or not all(0 < slot <= len(each.tokens) for slot in path[1:]):
        raise Difference(f"accepted_indices {path}; needs the root and nodes of the tree")
    targets = np.full((1, len(each.tokens) + 1), max(each.tokens, default=0) + 1, np.int32)  # nobody's token
    for slot, following in pairwise(path):
        targets[0, slot] = tree.token_ids[0, following]
    walked = walk(tree, targets)
    accepted = walked.accept_slots[0, : walked.accept_count[0]].tolist()
    if accepted != path:
        raise Difference(f"accepted_indices: recorded {path}, rebuilt {accepted}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("trace", type=Path, nargs="+", help="a .json of rounds, or what the published benchmark saves")
    parser.add_argument("--kernels", action="store_true", help="rebuild with the kernels (default: the references)")
    args = parser.parse_args()
    rounds = nodes = different = 0
    for path in args.trace:
        try:
            for each in read_rounds(path):
                rounds, nodes = rounds + 1, nodes + len(each.tokens)
                try:
                    compare(each, args.kernels)
                except Difference as difference:
                    different += 1
                    print(f"{path}: {each.name}: {difference}")
                if rounds % 200 == 0:
                    print(f"{rounds} rounds", end="\r", file=sys.stderr, flush=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError, OverflowError) as error:
            parser.error(f"{path}: is no trace that this program can read: {type(error).__name__}: {error}")
        except Exception as error:  # torch's unpickler has errors of its own
            if "Unpickling" not in type(error).__name__:
                raise
            parser.error(f"{path}: is no trace that this program can read: {str(error).splitlines()[0]}")
    print(f"{rounds} rounds, {nodes} nodes: {different} differ")
    if rounds == 0:
        parser.error("no round was recorded; run the published code with save_tree_traces")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
