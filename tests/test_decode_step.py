"""The chained step: equal to its twin, lossless over many rounds, and without a hand from the host in between."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.backend import cuda
from ddtree_numba.decode_step import DecodeStep, DecodeStepReference
from ddtree_numba.draft_tree import (
    STATUS_BAD_PAGE,
    STATUS_BROKEN_LINK,
    STATUS_OK,
    STATUS_TOO_DEEP,
    DraftTree,
    check_tree,
    random_tree,
)
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference, positions_reference
from ddtree_numba.stages.best_first_tree import build_tree_reference
from ddtree_numba.stages.kv_commit import commit_kv_reference
from ddtree_numba.stages.top_candidates import top_candidates_reference
from ddtree_numba.stages.tree_attention import tree_attention, tree_attention_reference
from ddtree_numba.synthetic import random_target_tokens
from tests.helpers import assert_same, on_device, on_host, poisoned

VOCAB, DEPTHS, BUDGET, PAGE = 11, 4, 9, 4


class Toy:
    """A deterministic language model without weights, whose KV row of a token is (token, position).

    After each commit the cache must hold exactly the emitted sequence, so a lost, doubled or misplaced row shows.
    """

    def __init__(self, rng: np.random.Generator, batch: int, max_length: int = 64) -> None:
        self.rng = rng
        self.rule = rng.integers(VOCAB, size=(VOCAB, VOCAB))
        pages = -(-max_length // PAGE)
        table = rng.permutation(batch * pages).reshape(batch, pages)
        self.block_table = table.astype(np.int32)
        self.kv_pool = np.full((2, batch * pages, PAGE, 2), -7, np.float32)
        self.prefix_lengths = rng.integers(1, 6, batch).astype(np.int32)
        self.sequences = [rng.integers(VOCAB, size=n + 1).tolist() for n in self.prefix_lengths]
        for request in range(batch):
            for position, token in enumerate(self.sequences[request][:-1]):
                self.write_row(request, position, token, position)

    def row_address(self, request: int, row: int) -> tuple[int, int]:
        return int(self.block_table[request, row // PAGE]), row % PAGE

    def write_row(self, request: int, row: int, token: int, position: int) -> None:
        self.kv_pool[(slice(None), *self.row_address(request, row))] = token, position

    def next_token(self, sequence: list[int]) -> int:
        return int(self.rule[sequence[-1], sequence[-2] if len(sequence) > 1 else 0])

    def greedy(self, sequence: list[int], count: int) -> list[int]:
        for _ in range(count):
            sequence = [*sequence, self.next_token(sequence)]
        return sequence

    def draft_logits(self) -> np.ndarray:
        """Logits of a drafter that knows the target, with so much noise that it is often wrong."""
        logits = self.rng.normal(size=(len(self.sequences), DEPTHS, VOCAB)).astype(np.float32)
        for request, sequence in enumerate(self.sequences):
            for depth, token in enumerate(self.greedy(sequence, DEPTHS)[-DEPTHS:]):
                logits[request, depth, token] += 2.0
        return logits

    def verify(self, tree, positions) -> np.ndarray:
        """Write every node's KV row behind the prefix; return the target's token at each node."""
        targets = self.rng.integers(VOCAB, size=tree.token_ids.shape).astype(np.int32)
        for request, sequence in enumerate(self.sequences):
            for slot in range(tree.node_count[request]):
                token, position = tree.token_ids[request, slot], positions[request, slot]
                self.write_row(request, self.prefix_lengths[request] + slot, token, position)
                path, at = [], slot
                while at > 0:
                    path.insert(0, int(tree.token_ids[request, at]))
                    at = tree.parents[request, at]
                targets[request, slot] = self.next_token(sequence + path)
        return targets

    def emit(self, path) -> None:
        for request, sequence in enumerate(self.sequences):
            sequence.extend(path.accept_tokens[request, : path.accept_count[request]].tolist())

    def assert_cache_is_the_sequence(self) -> None:
        for request, sequence in enumerate(self.sequences):
            assert self.prefix_lengths[request] == len(sequence) - 1
            rows = [self.kv_pool[(0, *self.row_address(request, r))].tolist() for r in range(len(sequence) - 1)]
            assert rows == [[token, position] for position, token in enumerate(sequence[:-1])]
        np.testing.assert_array_equal(self.kv_pool[0], self.kv_pool[1])

    def roots(self) -> np.ndarray:
        return np.array([sequence[-1] for sequence in self.sequences], np.int32)


class PreparedStep:
    """A plan over fixed arrays, used like a step: inputs are copied into them, what is changed in place copied back."""

    def __init__(self, batch, toy):
        shape = (batch, DEPTHS, VOCAB)
        self.inputs = on_device((np.zeros(shape, np.float32), np.zeros(batch, np.int32), np.zeros(batch, np.int32)))
        self.cache = on_device((np.zeros((batch, BUDGET + 1), np.int32), toy.kv_pool * 0, toy.block_table * 0))
        self.plan = DecodeStep(batch, DEPTHS, VOCAB, BUDGET).prepare(*self.inputs, *self.cache)

    def draft(self, *arrays):
        for mine, array in zip(self.inputs, arrays, strict=True):
            mine.copy_to_device(array)
        return self.plan.draft()

    def commit(self, targets, kv_pool, block_table, prefix_lengths):
        yours = (targets, kv_pool, block_table, prefix_lengths)
        mine = (*self.cache, self.inputs[2])
        for device, array in zip(mine, yours, strict=True):
            device.copy_to_device(array)
        path = self.plan.commit()
        for device, array in zip(mine, yours, strict=True):
            array.copy_to_device(device)
        return path


@pytest.mark.parametrize("how", ["reference", "device", "prepared"])
def test_rounds_emit_what_plain_greedy_decoding_emits(rng, how):
    batch, rounds, device = 2, 6, how != "reference"
    toy = Toy(rng, batch)
    starts = [list(sequence) for sequence in toy.sequences]
    if how == "prepared":
        step = PreparedStep(batch, toy)
    else:
        step = DecodeStep(batch, DEPTHS, VOCAB, BUDGET) if device else DecodeStepReference(BUDGET)
    accepted = 0
    for _ in range(rounds):
        inputs = (toy.draft_logits(), toy.roots(), toy.prefix_lengths)
        tree, positions = step.draft(*(on_device(inputs) if device else inputs))
        if device:
            tree, (positions,) = on_host(tree), on_host((positions,))
        check_tree(tree)
        cache = (toy.verify(tree, positions), toy.kv_pool, toy.block_table, toy.prefix_lengths)
        if device:
            cache = on_device(cache)
        path = step.commit(*cache)
        if device:
            path = on_host(path)
            _, toy.kv_pool, _, toy.prefix_lengths = on_host(cache)
        assert not path.status.any()
        toy.emit(path)
        toy.assert_cache_is_the_sequence()
        accepted += int(path.accept_count.sum()) - batch
    assert toy.sequences == [
        toy.greedy(start, len(s) - len(start)) for start, s in zip(starts, toy.sequences, strict=True)
    ]
    assert accepted > 0, "the drafter never guessed right: this test has shown nothing of the commit"


@pytest.mark.parametrize("k", [None, 1, 3])
def test_the_device_chain_equals_its_twin(rng, k):
    batch = 3
    step, twin = DecodeStep(batch, DEPTHS, VOCAB, BUDGET, k), DecodeStepReference(BUDGET, k)
    for _ in range(2):  # the second round runs over the first one's leftovers
        logits = np.round(rng.normal(size=(batch, DEPTHS, VOCAB)) * 2).astype(np.float32)  # rounded: ties
        roots = rng.integers(VOCAB, size=batch).astype(np.int32)
        prefix = rng.integers(0, 20, batch).astype(np.int32)
        tree, positions = step.draft(*on_device((logits, roots, prefix)))
        twin.draft(logits, roots, prefix)
        log_probs, token_ids = on_host((step.log_probs, step.token_ids))
        expected_log_probs, expected_ids = top_candidates_reference(logits, BUDGET if k is None else k)
        np.testing.assert_array_equal(token_ids, expected_ids)
        np.testing.assert_allclose(log_probs, expected_log_probs, rtol=1e-6, atol=1e-6)
        # The last bit of a log-probability may differ from the reference's and turn a tie of two path scores, so the
        # tree is held against the reference's tree of the same candidates.
        expected_tree = build_tree_reference(log_probs, token_ids, roots, BUDGET)
        bits, _ = ancestor_bitmask_reference(expected_tree.parents, expected_tree.node_count)
        twin.tree = expected_tree = expected_tree._replace(ancestor_bits=bits)
        assert_same(on_host(tree), expected_tree)
        assert_same(on_host((positions,)), (positions_reference(expected_tree.depths, prefix),))

        targets = random_target_tokens(rng, expected_tree, VOCAB)
        pool = rng.random((2, 40, PAGE, 3), np.float32)
        table = rng.permutation(39)[: 3 * 13].reshape(3, 13).astype(np.int32)
        cache = on_device((targets, pool, table, prefix))
        path = on_host(step.commit(*cache))
        assert_same(path, twin.commit(targets, pool, table, prefix))
        assert_same(on_host(cache), (targets, pool, table, prefix))
        assert_same(on_host((step.tree_status, step.commit_status)), (twin.tree_status, twin.commit_status))


def test_no_copy_no_allocation_and_no_wait_between_the_stages(rng, monkeypatch):
    step = DecodeStep(1, DEPTHS, VOCAB, BUDGET)
    inputs = on_device((rng.random((1, DEPTHS, VOCAB), np.float32), np.zeros(1, np.int32), np.ones(1, np.int32)))
    pool = on_device((np.ones((1, 5, PAGE, 2), np.float32), np.arange(5, dtype=np.int32)[None], np.ones(1, np.int32)))
    (targets,) = on_device((np.zeros((1, BUDGET + 1), np.int32),))

    for name in ("to_device", "device_array", "device_array_like", "synchronize", "as_cuda_array"):
        monkeypatch.setattr(cuda, name, _forbidden(name), raising=False)
    monkeypatch.setattr(type(targets), "copy_to_host", _forbidden("copy_to_host"))
    tree, _ = step.draft(*inputs)
    path = step.commit(targets, *pool)
    assert tree is step.tree
    assert path is step.path


def test_preparing_moves_nothing_of_the_callers(rng):
    step = DecodeStep(1, DEPTHS, VOCAB, BUDGET)
    inputs = (rng.random((1, DEPTHS, VOCAB), np.float32), np.zeros(1, np.int32), np.array([3], np.int32))
    cache = (
        np.zeros((1, BUDGET + 1), np.int32),
        rng.random((2, 5, PAGE, 2), np.float32),
        np.arange(5, dtype=np.int32)[None],
    )
    on_card = on_device((*inputs, *cache))
    step.draft(*on_card[:3])
    plan = step.prepare(*on_card)
    assert_same(on_host(on_card), (*inputs, *cache))
    with pytest.raises(RuntimeError, match="no tree has been drafted yet"):
        plan.commit()
    with pytest.raises(ValueError, match=r"target_tokens: got shape \(1, 9\), needs \[B, N\] with B=1, N=10"):
        step.prepare(*on_card[:3], *on_device((cache[0][:, :9].copy(), *cache[1:])))
    with pytest.raises(TypeError, match="kv_pool: got ndarray, needs a device array"):
        step.prepare(*on_card[:4], cache[1], on_card[5])


def test_wrong_arguments_are_named(rng):
    step = DecodeStep(2, DEPTHS, VOCAB, BUDGET)
    logits, roots, prefix = rng.random((2, DEPTHS, VOCAB), np.float32), np.zeros(2, np.int32), np.zeros(2, np.int32)
    with pytest.raises(TypeError, match=r"logits: got ndarray, needs a device array \(DecodeStepReference takes NumPy"):
        step.draft(logits, roots, prefix)
    with pytest.raises(ValueError, match=r"logits: got shape \(2, 4, 10\), needs \[B, L, V\] with B=2, L=4, V=11"):
        step.draft(*on_device((logits[..., :10], roots, prefix)))
    with pytest.raises(ValueError, match=r"root_tokens: got shape \(3,\), needs \[B\] with B=2"):
        step.draft(*on_device((logits, np.zeros(3, np.int32), prefix)))
    with pytest.raises(RuntimeError, match="commit: no tree has been drafted yet"):
        DecodeStepReference(3).commit(roots, logits, roots, prefix)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch: got 0, needs a whole number from 1"),
        ({"draft_length": 65}, "draft_length: got 65, needs a whole number from 0 to 64"),
        ({"vocab": 0}, "vocab: got 0, needs a whole number from 1"),
        ({"budget": 1025}, "budget: got 1025, needs a whole number from 0 to 1024"),
        ({"k": 0}, "k: got 0, needs a whole number from 1"),
    ],
)
def test_wrong_sizes_are_named(arguments, message):
    sizes = {"batch": 1, "draft_length": 4, "vocab": 8, "budget": 3} | arguments
    with pytest.raises(ValueError, match=message):
        DecodeStep(**sizes)


def commit_case(rng, batch, layers, width, *, draft_length=12, budget=30, page_size=4, dtype=np.uint16, vocab=6):
    """A step of random trees, and `commit`'s arguments: the deepest node accepted, shuffled pages, ragged prefixes."""
    step = DecodeStep(batch, draft_length, 8, budget)
    tree = random_tree(rng, batch, budget, vocab=vocab, max_depth=draft_length, node_counts=[budget + 1] * batch)
    targets = random_target_tokens(rng, tree, vocab)
    for b, slot in enumerate(tree.depths.argmax(-1).tolist()):
        while slot > 0:
            parent = tree.parents[b, slot]
            targets[b, parent] = tree.token_ids[b, slot]
            slot = parent
    max_pages = -(-(20 + budget + 1) // page_size)
    pool_bytes = (layers, batch * max_pages + 2, page_size, width * np.dtype(dtype).itemsize)
    pool = rng.integers(0, 256, pool_bytes, dtype=np.uint8).view(dtype)  # every kind of NaN among them
    table = rng.permutation(pool.shape[1])[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    return step, tree, (targets, pool, table, rng.integers(0, 20, batch).astype(np.int32))


def assert_commits_as_the_stages(step, tree, arguments):
    """Commit `tree` with the step on poisoned results and compare all with the stages' references; return them."""
    for mine, theirs in zip(step.tree, tree, strict=True):
        mine.copy_to_device(theirs)
    for result in (*step.path, step.commit_status):
        result.copy_to_device(poisoned(result.shape, np.int32))
    step._drafted = True
    on_card = on_device(arguments)
    path = on_host(step.commit(*on_card))
    targets, pool, table, prefix = arguments
    expected = accept_walk_reference(tree, targets, step.draft_length)
    status = commit_kv_reference(pool, table, prefix, expected.accept_slots, expected.accept_count)
    assert_same(path, expected)
    for got, want in zip(on_host(on_card), arguments, strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(step.commit_status.copy_to_host(), status)
    np.testing.assert_array_equal(step._arrived.copy_to_host(), 0)
    return expected, status


@pytest.mark.parametrize("dtype, width", [(np.uint16, 7), (np.float16, 3), (np.float32, 11), (np.uint8, 5)])
@pytest.mark.parametrize("batch, layers", [(1, 5), (3, 2)])
def test_commit_side_equals_the_stages(rng, batch, layers, dtype, width):
    moved = 0
    for _ in range(3):
        path, status = assert_commits_as_the_stages(*commit_case(rng, batch, layers, width, dtype=dtype))
        moved += int((path.accept_slots > np.arange(path.accept_slots.shape[1])).sum())
        assert not status.any()
    assert moved > 2, "hardly a row had to move"


def chain_of_every_second_slot(rng, length, layers):
    """A commit of one request whose path is 0, 2, 4, ..., 2 * length."""
    sizes = {"draft_length": length, "budget": 2 * length}
    step, tree, (targets, *cache) = commit_case(rng, 1, layers, 2, **sizes)
    chain = np.arange(2 * length + 1, dtype=np.int32)
    tree.token_ids[:], tree.next_sibling[:], tree.node_count[:] = chain, -1, len(chain)
    tree.first_child[:] = targets[:] = np.where(chain + 2 < len(chain), chain + 2, -1)
    return step, tree, (targets, *cache)


@pytest.mark.parametrize("length, layers", [(3, 14), (6, 3), (20, 1), (64, 2)])
def test_commit_side_moves_the_rows_of_a_long_path_in_order(rng, length, layers):
    """The path's slots are 0, 2, 4, ...: half of its rows lie where others go, and a row written too early is lost.

    So is one that is moved twice: 14 layers are more than the simulator's blocks take at a time.
    """
    path, status = assert_commits_as_the_stages(*chain_of_every_second_slot(rng, length, layers))
    assert path.accept_slots[0].tolist() == list(range(0, 2 * length + 1, 2))
    assert not status.any()


def test_commit_side_sees_a_missing_page_anywhere_on_a_long_path(rng):
    for row in (0, 13, 40):
        step, tree, (targets, pool, table, prefix) = chain_of_every_second_slot(rng, 20, 1)
        table[0, (prefix[0] + row) // PAGE] = -1
        _, status = assert_commits_as_the_stages(step, tree, (targets, pool, table, prefix))
        assert status[0] == STATUS_BAD_PAGE


def test_commit_side_stops_a_path_that_is_too_deep(rng):
    _, tree, arguments = chain_of_every_second_slot(rng, 6, 2)
    path, status = assert_commits_as_the_stages(DecodeStep(1, 4, 8, 12), tree, arguments)
    assert path.status[0] == STATUS_TOO_DEEP and path.accept_count[0] == 5
    assert not status.any()


def test_commit_side_takes_broken_trees_as_the_walk_does(rng):
    step, tree, arguments = commit_case(rng, 5, 1, 2)
    tree.first_child[1], tree.next_sibling[3], tree.node_count[4] = 0, 77, 0
    path, status = assert_commits_as_the_stages(step, tree, arguments)
    assert path.status[1] == path.status[4] == STATUS_BROKEN_LINK
    assert not status.any()


def test_commit_side_of_links_of_noise(rng):
    for _ in range(4):
        step, tree, (_, *cache) = commit_case(rng, 6, 1, 2, draft_length=5, budget=9)
        tree.first_child[:], tree.next_sibling[:] = rng.integers(-2, 11, (2, 6, 10))
        tree.token_ids[:], tree.node_count[:] = rng.integers(0, 2, (6, 10)), rng.integers(-1, 12, 6)
        assert_commits_as_the_stages(step, tree, (rng.integers(0, 2, (6, 10)).astype(np.int32), *cache))


@pytest.mark.parametrize("what", ["prefix negative", "prefix far behind", "row behind", "page", "page negative"])
def test_commit_side_keeps_rows_and_length_of_a_request_with_a_status(rng, what):
    step, tree, (targets, pool, table, prefix) = commit_case(rng, 3, 3, 2)
    slots = accept_walk_reference(tree, targets, step.draft_length).accept_slots[1]
    behind = table.shape[1] * PAGE - slots.max()  # the last row of the path is then the first behind the table
    prefix[1] = {"prefix negative": -1, "prefix far behind": 2**31 - 1, "row behind": behind}.get(what, 3)
    if what.startswith("page"):
        table[1, (3 + slots.max()) // PAGE] = -1 if what == "page negative" else pool.shape[1]
    before, old = pool.copy(), prefix.copy()
    _, status = assert_commits_as_the_stages(step, tree, (targets, pool, table, prefix))
    assert status.tolist() == [STATUS_OK, STATUS_BAD_PAGE, STATUS_OK]
    assert prefix[1] == old[1]
    pages = table[1][(table[1] >= 0) & (table[1] < pool.shape[1])]
    np.testing.assert_array_equal(pool[:, pages], before[:, pages])


@pytest.mark.parametrize("page", [-1, 10**6])
def test_commit_side_looks_at_pages_that_rows_only_move_to(rng, page):
    """Rows 3 + 0, 3 + 9, 3 + 10 belong at 3, 4, 5: nothing is read in the page of rows 4 to 7."""
    step, tree, (targets, pool, table, prefix) = commit_case(rng, 1, 2, 2)
    tree.first_child[0, :11], tree.next_sibling[:] = [9, *[-1] * 8, 10, -1], -1
    targets[0, [0, 9]], targets[0, 10] = tree.token_ids[0, [9, 10]], -5
    prefix[0], table[0, 1] = 3, page
    path, status = assert_commits_as_the_stages(step, tree, (targets, pool, table, prefix))
    assert path.accept_slots[0, :4].tolist() == [0, 9, 10, -1]
    assert status[0] == STATUS_BAD_PAGE


def test_commit_side_knows_the_first_row_behind_the_pool(rng):
    """Row 3 + 9 belongs at 4, the first row of its page: the page behind the last would be the next layer's first."""
    step, tree, (targets, pool, table, prefix) = commit_case(rng, 1, 2, 2)
    tree.first_child[0, :10], tree.next_sibling[:] = [9, *[-1] * 9], -1
    targets[0, 0], prefix[0], table[0, 1] = tree.token_ids[0, 9], 3, pool.shape[1]
    path, status = assert_commits_as_the_stages(step, tree, (targets, pool, table, prefix))
    assert path.accept_slots[0, :3].tolist() == [0, 9, -1]
    assert status[0] == STATUS_BAD_PAGE


def test_commit_side_reaches_the_last_row_and_the_longest_path(rng):
    step, tree, (targets, pool, table, prefix) = commit_case(rng, 2, 1, 2)
    slots = accept_walk_reference(tree, targets, step.draft_length).accept_slots
    prefix[:] = table.shape[1] * PAGE - 1 - slots.max(1)
    _, status = assert_commits_as_the_stages(step, tree, (targets, pool, table, prefix))
    assert not status.any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batch, layers, width, page_size, draft_length, budget",
    [(1, 61, 576, 64, 15, 64), (64, 9, 576, 16, 15, 64), (1500, 3, 16, 8, 15, 64), (2, 7, 577, 1, 64, 1024)],
)
def test_gpu_commit_side_at_model_size(rng, batch, layers, width, page_size, draft_length, budget):
    sizes = {"draft_length": draft_length, "budget": budget, "page_size": page_size}
    for vocab in (4, 60):
        _, status = assert_commits_as_the_stages(*commit_case(rng, batch, layers, width, vocab=vocab, **sizes))
        assert not status.any()


@pytest.mark.gpu
def test_gpu_commit_side_in_a_callers_graph(rng):
    """A plan on a stream that is captured: its kernels become part of that graph, and replay with new contents."""
    batch = 2
    toy = Toy(rng, batch)
    step = PreparedStep(batch, toy)
    step.draft(toy.draft_logits(), toy.roots(), toy.prefix_lengths)
    targets = rng.integers(0, VOCAB, (batch, BUDGET + 1)).astype(np.int32)
    arguments = (targets, toy.kv_pool, toy.block_table, toy.prefix_lengths)
    for mine, array in zip((*step.cache, step.inputs[2]), arguments, strict=True):
        mine.copy_to_device(array)
    outer = Recorded(step.plan.commit)
    tree = DraftTree(*on_host(step.plan.step.tree))
    for _ in range(2):
        expected = accept_walk_reference(tree, targets, DEPTHS)
        commit_kv_reference(*arguments[1:], expected.accept_slots, expected.accept_count)
        outer.replay()
        assert_same(on_host(step.plan.step.path), expected)
        assert_same(on_host((step.cache[1], step.inputs[2])), (toy.kv_pool, toy.prefix_lengths))


@cuda.jit
def first_largest_kernel(out, target_tokens):
    """A stand-in for the rest of the target: a node's token is the column where its first head's output is largest."""
    b = cuda.blockIdx.x
    for slot in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
        best = 0
        for column in range(1, out.shape[3]):
            if out[b, slot, 0, column] > out[b, slot, 0, best]:
                best = column
        target_tokens[b, slot] = best


def test_draft_attention_and_commit_in_one_chain_without_the_host(rng, monkeypatch):
    batch, heads, layers, latent, rope = 2, 3, 2, VOCAB, 5
    step, twin = DecodeStep(batch, DEPTHS, VOCAB, BUDGET), DecodeStepReference(BUDGET)
    logits = rng.normal(size=(batch, DEPTHS, VOCAB)).astype(np.float32)
    roots, prefix = rng.integers(VOCAB, size=batch).astype(np.int32), np.array([3, 9], np.int32)
    pool = rng.normal(size=(layers, 14, PAGE, latent + rope)).astype(np.float32)
    table = rng.permutation(14).reshape(batch, 7).astype(np.int32)
    q = rng.normal(size=(batch, BUDGET + 1, heads, latent + rope)).astype(np.float32)
    card = on_device((logits, roots, prefix, pool, table, q, poisoned((batch, BUDGET + 1), np.int32)))
    result = on_device([poisoned((batch, BUDGET + 1, heads, latent), np.float32), poisoned(q.shape[:3], np.float32)])
    layer = on_device([pool[0]])[0]  # what the attention reads; a real target has its own rows there by now
    for warm_up in (True, False):
        if not warm_up:  # kernels are compiled: from here on, every touch of the host is an error
            for name in ("to_device", "device_array", "device_array_like", "synchronize"):
                monkeypatch.setattr(cuda, name, _forbidden(name))
            monkeypatch.setattr(type(layer), "copy_to_host", _forbidden("copy_to_host"))
        tree, _ = step.draft(*card[:3])
        inputs = (card[5], layer, card[4], card[2], tree.ancestor_bits, tree.node_count, 0.3)
        tree_attention(*inputs, latent_width=latent, version="shared_tile", out=tuple(result))
        first_largest_kernel[batch, 2](result[0], card[6])
        if not warm_up:
            path = step.commit(card[6], card[3], card[4], card[2])
    monkeypatch.undo()

    expected_tree, _ = twin.draft(logits, roots, prefix)
    bits, count = expected_tree.ancestor_bits, expected_tree.node_count
    out, _ = tree_attention_reference(q, pool[0], table, prefix, bits, count, 0.3, latent_width=latent)
    targets = out[:, :, 0].argmax(-1).astype(np.int32)
    np.testing.assert_allclose(result[0].copy_to_host(), out, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(card[6].copy_to_host(), targets)
    assert_same(on_host(path), twin.commit(targets, pool, table, prefix))
    assert_same(on_host((card[3], card[2])), (pool, prefix))


def _forbidden(name):
    def call(*args, **kwargs):
        raise AssertionError(f"{name} was called between the stages")

    return call
