"""Pictures say what the references did: steps, texts and alternative texts come from their arrays."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from ddtree_numba.draft_tree import random_tree
from ddtree_numba.pictures import (
    bar_chart,
    bitmask_steps,
    commit_steps,
    draw_tree,
    heap_steps,
    heap_trace,
    line_chart,
    online_softmax,
    softmax_steps,
    stride_steps,
    walk_steps,
    walk_trace,
)
from ddtree_numba.pictures.commit_steps import commit_trace
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.best_first_tree import build_tree_reference, reference


def candidates(rng, depths=4, k=4):
    log_probs = -np.sort(rng.exponential(1.5, (1, depths, k))).astype(np.float32)
    return log_probs, np.arange(depths * k, dtype=np.int32).reshape(1, depths, k)


def assert_well_formed(picture) -> None:
    html = str(picture)
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") and root.get("role") == "img"
        assert "nan" not in svg.lower() and "None" not in svg
    assert not re.search(r"#[0-9a-f]{3,6}", re.sub(r"<style>.*?</style>", "", html, flags=re.S)), "a colour of its own"


def test_the_heap_trace_is_what_the_reference_builds(rng) -> None:
    for _ in range(20):
        log_probs, token_ids = candidates(rng)
        trace = heap_trace(log_probs[0], budget=9)
        tree = build_tree_reference(log_probs, token_ids, np.zeros(1, np.int32), 9)
        popped = [step.popped for step in trace[1:]]
        assert [entry.score for entry in popped] == tree.log_probs[0, 1:].tolist()
        for step, following in itertools.pairwise(trace):
            assert step.heap[0] == following.popped
        assert [len(entry.path) for entry in popped] == tree.depths[0, 1:].tolist()


def test_recording_leaves_the_reference_as_it_was() -> None:
    import heapq

    heap_trace(np.zeros((2, 2), np.float32), budget=2)
    assert reference.heapq is heapq
    with pytest.raises(ValueError, match="K of log_probs"):
        heap_trace(np.zeros((2, 0), np.float32), budget=2)
    assert reference.heapq is heapq


def test_the_walk_trace_ends_where_the_reference_does(rng) -> None:
    tree = random_tree(rng, 20, 12, vocab=4)
    targets = rng.integers(0, 4, (20, 13)).astype(np.int32)
    path = accept_walk_reference(tree, targets)
    for b in range(20):
        trace = walk_trace(tree, targets, b)
        matched = [child for _, child, match in trace if match]
        assert [0, *matched] == path.accept_slots[b, : path.accept_count[b]].tolist()
        for node, child, match in trace:
            assert tree.parents[b, child] == node
            assert match == (tree.token_ids[b, child] == targets[b, node])


def test_the_last_commit_step_holds_the_accepted_rows_in_order() -> None:
    rows = ["p0", "p1", "R", "A", "B", "C", "D", ""]
    pool = commit_trace(rows, 2, [3, 0, 2, 1], prefix=2, accept_slots=[0, 2, 4])[-1]
    in_order = [name for page in [3, 0, 2, 1] for name in pool[page]]
    assert in_order[:5] == ["p0", "p1", "R", "B", "D"]
    with pytest.raises(ValueError, match="accept_slots"):
        commit_trace(rows, 2, [3, 0, 2, 1], prefix=2, accept_slots=[0, 2, 1])


def test_online_softmax_is_softmax_also_where_nothing_is_visible(rng) -> None:
    scores, values = rng.normal(0, 3, 11), rng.normal(size=(11, 3))
    scores[:4] = scores[9] = -np.inf
    for tile in (1, 2, 3, 11, 20):
        last = online_softmax(scores, values, tile)[-1]
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(last.out / last.total, weights @ values, rtol=1e-12)
    nothing = online_softmax(np.full(4, -np.inf), np.ones((4, 2)), 2)[-1]
    assert nothing.total == 0 and nothing.largest == -np.inf and not nothing.out.any()


def test_every_picture_is_well_formed_and_names_its_tokens(rng) -> None:
    log_probs, token_ids = candidates(rng, 3, 3)
    labels = ["<a>", "b&c", '"q"', *map(str, range(3, 20))]
    tree = build_tree_reference(log_probs, token_ids, np.array([15], np.int32), 5)
    targets = rng.integers(0, 9, (1, 6)).astype(np.int32)
    pictures = [
        draw_tree(tree, labels=labels, marked=[0, 1], caption="a & b"),
        heap_steps(log_probs[0], token_ids[0], 5, labels=labels),
        bitmask_steps(tree, labels=labels),
        walk_steps(tree, targets, labels=labels),
        commit_steps(["p", "R", "A", "B"], 2, [1, 0], 1, [0, 2]),
        softmax_steps(np.array([-np.inf, -np.inf, 1.0, 3.0]), np.ones((4, 2)), 2),
        stride_steps(np.array([0, 1, 0]), np.array([0, 0, 1])),
        line_chart([1, 2, 4], {"x": [0.1, 0.2, 0.3], "y": [1, 1, 1]}, x_label="a", y_label="b"),
        bar_chart([0.0, 0.5], ["<", ">"], marked=[1], y_label="p"),
    ]
    for picture in pictures:
        assert_well_formed(picture)
    assert "&lt;a&gt;" in str(pictures[1]) and "<a>" not in str(pictures[1])
    assert len(pictures[1].steps) == 6 and pictures[1].steps[-1].alt.count("0.") >= 5


def test_a_picture_of_too_many_nodes_is_refused(rng) -> None:
    with pytest.raises(ValueError, match="at most 32"):
        bitmask_steps(random_tree(rng, 1, 40, node_counts=[40]))
