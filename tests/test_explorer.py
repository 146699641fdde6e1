"""The explorer's builder and walk in a browser, against the NumPy reference, and its page by mouse and keyboard."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.draft_tree import random_tree
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference
from ddtree_numba.stages.best_first_tree import build_tree_reference
from tests.site import ROOT, chromium, needs_browser, needs_sphinx, open_page

SCRIPT = ROOT / "docs" / "_static" / "explorer.js"
LINKS = ("token_ids", "parents", "depths", "first_child", "next_sibling", "log_probs")

pytestmark = [
    needs_browser,
    pytest.mark.skipif(not SCRIPT.exists(), reason="the site's sources are not here: an installed package"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the browser's driver
]


def candidate_rows(rng: np.random.Generator) -> np.ndarray:
    """Return [L, K] float32 log-probabilities, descending, of one of the kinds that builders get wrong."""
    depths, candidates = int(rng.integers(0, 9)), int(rng.integers(1, 9))
    shape = (depths, candidates)
    kind = rng.choice([0, 1, 2, 2, 2, 3, 4])
    if kind == 0:  # sums of quarters: ties everywhere
        values = -rng.integers(0, 5, shape) / 4
    elif kind == 1:  # ordinary
        values = -rng.exponential(2, shape)
    elif kind == 2:  # from almost certain to hopeless: the order of the sums shows in the last bit
        values = -rng.uniform(0.1, 6, shape) * 10.0 ** -rng.choice([0, 9], (depths, 1))
    elif kind == 3:  # certain: a child scores the same as its parent
        values = np.where(np.arange(candidates) == 0, 0.0, -30.0) * np.ones(shape)
    else:  # candidates that do not exist
        values = np.where(rng.random(shape) < 0.3, -np.inf, -rng.exponential(1, shape))
    rows = -np.sort(-values.astype(np.float32), axis=-1)
    if kind == 4 and rows.size and rng.random() < 0.5:
        rows[rng.integers(depths)] = np.nan
    return np.ascontiguousarray(rows, np.float32)


def vectors(rng: np.random.Generator, count: int) -> list[dict]:
    made = []
    for _ in range(count):
        rows, budget = candidate_rows(rng), int(rng.choice([0, 1, 3, 16, 40, 100, 100]))
        depths, candidates = rows.shape
        token_ids = (
            np.stack([rng.permutation(candidates) for _ in range(depths)]) if depths else np.zeros((0, candidates))
        )
        token_ids = np.ascontiguousarray(token_ids, np.int32)
        tree = build_tree_reference(rows[None], token_ids[None], np.array([7], np.int32), budget)
        nodes = int(tree.node_count[0])
        bits, _ = ancestor_bitmask_reference(tree.parents, tree.node_count)
        targets = rng.integers(0, candidates, (1, budget + 1)).astype(np.int32)
        path = accept_walk_reference(tree, targets, depths)
        words = -(-nodes // 32)
        made.append(
            {
                "log_probs": rows.tolist(),
                "token_ids": token_ids.tolist(),
                "budget": budget,
                "targets": targets[0].tolist(),
                "tree": {name: getattr(tree, name)[0, :nodes].tolist() for name in LINKS},
                "bits": bits[0, :nodes, :words].tolist(),
                "slots": path.accept_slots[0, : path.accept_count[0]].tolist(),
                "tokens": path.accept_tokens[0, : path.accept_count[0]].tolist(),
            }
        )
    return made


def order_of_sums_shows(case: dict) -> bool:
    """Tell whether adding some node's path up from the root gives another score than the contract's order."""
    tree, rows = case["tree"], case["log_probs"]
    for slot, score in enumerate(tree["log_probs"]):
        path, node = [], slot
        while node > 0:
            depth = tree["depths"][node] - 1
            path.append(rows[depth][case["token_ids"][depth].index(tree["token_ids"][node])])
            node = tree["parents"][node]
        if sum(reversed(path), 0.0) != score:
            return True
    return False


RUN = """(vectors) => vectors.map((v) => {
  const tree = ddtree.buildTree(v.log_probs, v.token_ids, 7, v.budget);
  const walk = ddtree.acceptWalk(tree, v.targets, v.log_probs.length);
  const { paths, frontier, ...links } = tree;
  return { tree: links, bits: ddtree.ancestorBits(tree.parents), slots: walk.slots, tokens: walk.tokens };
})"""


def test_builder_bits_and_walk_equal_the_reference(rng: np.random.Generator) -> None:
    cases = vectors(rng, 600)
    scores = [case["tree"]["log_probs"] for case in cases]
    assert sum(len(set(row)) < len(row) for row in scores) > 20, "too few vectors with ties"
    assert sum(map(order_of_sums_shows, cases)) > 2, "too few vectors that tell one order of sums from another"
    with chromium() as browser:
        page = browser.new_page()
        page.add_script_tag(path=SCRIPT)
        answers = page.evaluate(RUN, cases)
    for case, got in zip(cases, answers, strict=True):
        for name in ("tree", "bits", "slots", "tokens"):
            assert got[name] == case[name], f"{name} of {case}"


def test_a_broken_tree_ends_the_walk(rng: np.random.Generator) -> None:
    tree = random_tree(rng, 1, 6, node_counts=[7], vocab=4)
    tree.next_sibling[0, 3] = 3
    tree.first_child[0, 0] = 3
    targets = np.full((1, 7), 9, np.int32)
    expected = accept_walk_reference(tree, targets)
    with chromium() as browser:
        page = browser.new_page()
        page.add_script_tag(path=SCRIPT)
        links = {name: getattr(tree, name)[0].tolist() for name in LINKS}
        got = page.evaluate("([tree, targets]) => ddtree.acceptWalk(tree, targets, 6)", [links, targets[0].tolist()])
    assert got["status"] == expected.status[0] != 0 and got["slots"] == [0]


@needs_sphinx
def test_the_page_works_by_keyboard_and_mouse() -> None:
    with chromium() as browser:
        page, complaints = open_page(browser, "docs/explorer.html")
        numbers, nodes = page.locator("[data-part=numbers]"), page.locator("[data-part=tree] g[role=button]")
        assert numbers.inner_text().startswith("8 drafted nodes") and nodes.count() == 8

        page.locator(".explorer input[type=range]").focus()
        page.keyboard.press("ArrowRight")
        assert numbers.inner_text().startswith("9 drafted nodes") and nodes.count() == 9
        page.keyboard.press("Home")
        assert numbers.inner_text().startswith("0 drafted nodes") and nodes.count() == 0
        page.keyboard.press("End")
        assert numbers.inner_text().startswith("16 drafted nodes")

        page.get_by_role("button", name="all tied").click()
        accepted = page.locator("[data-part=tree] rect.good")
        nodes.nth(0).click()  # the target writes the first node: pressed again, it does not
        pressed = nodes.nth(0).get_attribute("aria-pressed")
        nodes.nth(0).focus()
        page.keyboard.press("Enter")
        assert nodes.nth(0).get_attribute("aria-pressed") != pressed
        nodes.nth(15).click()
        depth = accepted.count() - 1
        assert f"accepts {depth} and emits {depth + 1}" in numbers.inner_text()

        page.locator("[data-part=targets] select").first.select_option("-1")
        assert "accepts 0 and emits 1" in numbers.inner_text()
        page.get_by_label("probability of token 1 of depth 1", exact=True).fill("0")
        assert "NaN" not in page.locator("#ddtree-explorer").inner_text()
        rows = page.locator("[data-part=bits] tr").count()
        assert rows == nodes.count() + 2  # the heading and the root
        assert not complaints
