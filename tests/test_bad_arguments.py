"""What a launcher refuses its reference refuses too, in the same words; and the small functions beside them."""

from __future__ import annotations

import numpy as np
import pytest

import ddtree_numba as d
from ddtree_numba.arguments import Transfer
from ddtree_numba.backend import cuda
from ddtree_numba.decode_step import DecodeStep
from tests.helpers import on_device

F32, I32 = np.float32, np.int32


def numbers(*shape, dtype=I32):
    return np.zeros(shape, dtype)


def tree_of(batch=2, budget=5):
    return d.empty_tree(batch, budget)


ATTENTION = (numbers(2, 3, 4, 7, dtype=F32), numbers(5, 2, 7, dtype=F32), numbers(2, 3), numbers(2))
BITS = (numbers(2, 3, 1, dtype=np.uint32), numbers(2))
POOL = numbers(1, 6, 2, 3, dtype=F32)

WRONG = {
    "top_candidates": [
        ((numbers(2, 3, 5), 2), "logits: got int32, needs float32 or float16 or uint16"),
        ((numbers(3, 5, dtype=F32), 2), "logits: got shape (3, 5), needs [B, L, V]"),
        ((numbers(2, 3, 0, dtype=F32), 2), "V of logits: got 0, needs a whole number from 1"),
        ((numbers(0, 3, 5, dtype=F32), 2), "B of logits: got 0, needs a whole number from 1"),
        ((numbers(2, 3, 5, dtype=F32), 0), "k: got 0, needs a whole number from 1"),
        ((numbers(2, 3, 5, dtype=F32), -1), "k: got -1, needs a whole number from 1"),
        ((numbers(2, 3, 5, dtype=F32), 1.5), "k: got 1.5, needs a whole number from 1"),
        (([[[1.0]]], 1), "logits: got list, needs a NumPy array or a device array"),
    ],
    "build_tree": [
        (
            (numbers(2, 3, 4, dtype=F32), numbers(2, 3, 4), numbers(1), 4),
            "root_tokens: got shape (1,), needs [B] with B=2",
        ),
        (
            (numbers(2, 3, 4, dtype=F32), numbers(2, 3, 5), numbers(2), 4),
            "token_ids: got shape (2, 3, 5), needs [B, L, K]",
        ),
        ((numbers(2, 3, 0, dtype=F32), numbers(2, 3, 0), numbers(2), 4), "K of log_probs: got 0, needs"),
        ((numbers(2, 65, 1, dtype=F32), numbers(2, 65, 1), numbers(2), 4), "L of log_probs: got 65, needs"),
        ((numbers(2, 3, 4), numbers(2, 3, 4), numbers(2), 4), "log_probs: got int32, needs float32"),
        (
            (numbers(2, 3, 4, dtype=F32), numbers(2, 3, 4), numbers(2), -1),
            "budget: got -1, needs a whole number from 0",
        ),
        ((numbers(2, 3, 4, dtype=F32), numbers(2, 3, 4), numbers(2), 1025), "budget: got 1025, needs"),
    ],
    "ancestor_bitmask": [
        ((numbers(2, 4), numbers(1)), "node_count: got shape (1,), needs [B] with B=2"),
        ((numbers(2, 4, dtype=np.int64), numbers(2)), "parents: got int64, needs int32"),
        ((numbers(2, 0), numbers(2)), "N of parents: got 0, needs"),
    ],
    "positions": [
        ((numbers(2, 4), numbers(1)), "prefix_lengths: got shape (1,), needs [B] with B=2"),
        ((numbers(2, 4, dtype=F32), numbers(2)), "depths: got float32, needs int32"),
    ],
    "accept_walk": [
        ((tree_of(), numbers(1, 6)), "target_tokens: got shape (1, 6), needs [B, N] with B=2, N=6"),
        ((tree_of(), numbers(2, 3)), "target_tokens: got shape (2, 3), needs [B, N] with B=2, N=6"),
        ((tree_of(), numbers(2, 6), -1), "draft_length: got -1, needs a whole number from 0"),
        ((tuple(tree_of()), numbers(2, 6)), "tree: got tuple, needs a DraftTree"),
    ],
    "commit_kv": [
        ((POOL, numbers(2, 3), numbers(3), numbers(2, 4), numbers(2)), "prefix_lengths: got shape (3,), needs [B]"),
        (
            (POOL, numbers(2, 3, dtype=float), numbers(2), numbers(2, 4), numbers(2)),
            "block_table: got float64, needs int32",
        ),
        ((POOL[0], numbers(2, 3), numbers(2), numbers(2, 4), numbers(2)), "kv_pool: got shape (6, 2, 3), needs"),
        ((POOL, numbers(2, 3), numbers(2), numbers(1, 4), numbers(2)), "accept_slots: got shape (1, 4), needs"),
    ],
    "tree_attention": [
        ((*ATTENTION, *BITS, np.nan), "scale: got nan, needs a finite number that float32 holds"),
        ((*ATTENTION, *BITS, 1e300), "scale: got 1e+300, needs a finite number that float32 holds"),
        ((*ATTENTION, *BITS, 1j), "scale: got complex, needs a number"),
        ((*ATTENTION, numbers(2, 3, 2, dtype=np.uint32), numbers(2), 1.0), "ancestor_bits: got 2 words a row, needs 1"),
        ((*ATTENTION[:3], numbers(3), *BITS, 1.0), "prefix_lengths: got shape (3,), needs [B] with B=2"),
        (
            (ATTENTION[0], numbers(5, 2, 8, dtype=F32), *ATTENTION[2:], *BITS, 1.0),
            "kv_pool: got shape (5, 2, 8), needs",
        ),
    ],
}


@pytest.mark.parametrize("who", ["reference", "launcher"])
@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [(stage, *case) for stage, cases in WRONG.items() for case in cases],
    ids=[f"{stage}-{case[1].split(',')[0]}" for stage, cases in WRONG.items() for case in cases],
)
def test_reference_and_launcher_refuse_the_same(who, stage, arguments, message):
    function = getattr(d, stage if who == "launcher" else f"{stage}_reference")
    keywords = {"latent_width": 4} if stage == "tree_attention" else {}
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*arguments, **keywords)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [0, 8, 2.5])
def test_a_latent_width_outside_the_row(width):
    for function in (d.tree_attention, d.tree_attention_reference):
        with pytest.raises((TypeError, ValueError), match="latent_width: got"):
            function(*ATTENTION, *BITS, 1.0, latent_width=width)


@pytest.mark.parametrize("name", ["kv_pool", "prefix_lengths"])
@pytest.mark.parametrize("commit", [d.commit_kv, d.commit_kv_reference])
def test_a_read_only_array_is_refused_before_a_row_moves(name, commit):
    pool = np.arange(36, dtype=F32).reshape(1, 6, 2, 3)
    arrays = {"kv_pool": pool, "block_table": np.arange(6, dtype=I32).reshape(2, 3), "prefix_lengths": numbers(2)}
    arrays[name].flags.writeable = False
    with pytest.raises(ValueError, match=f"{name}: got a read-only array"):
        commit(*arrays.values(), np.array([[0, 2], [0, 2]], I32), np.full(2, 2, I32))
    np.testing.assert_array_equal(pool.ravel(), np.arange(36))


def test_commit_before_draft():
    step = DecodeStep(1, 2, 5, 3)
    with pytest.raises(RuntimeError, match="commit: no tree has been drafted yet"):
        step.commit(*on_device((numbers(1, 4), POOL, numbers(1, 3), numbers(1))))


def test_a_prepared_step_knows_whether_it_has_drafted():
    step = DecodeStep(1, 2, 5, 3)
    draft_side = on_device((numbers(1, 2, 5, dtype=F32), numbers(1), numbers(1)))
    commit_side = on_device((numbers(1, 4), POOL, np.array([[0, 1, 2]], I32)))
    plan = step.prepare(*draft_side, *commit_side)
    with pytest.raises(RuntimeError, match="commit: no tree has been drafted yet"):
        plan.commit()
    plan.draft()
    path = step.commit(*commit_side, draft_side[2])  # the plan's draft is the step's: both share their buffers
    assert path.accept_count.copy_to_host()[0] >= 1


def test_a_stream_that_is_none():
    with pytest.raises(TypeError, match="stream: got str, needs a stream"):
        Transfer("abc", {"x": numbers(2)})
    assert Transfer(cuda.stream(), {"x": numbers(2)}).stream


def test_tree_helpers_refuse():
    rng = np.random.default_rng(0)
    with pytest.raises(TypeError, match="tree: got NoneType, needs a DraftTree"):
        d.check_tree(None)
    with pytest.raises(ValueError, match="batch: got -1, needs"):
        d.empty_tree(-1, 2)
    with pytest.raises(ValueError, match="vocab: got 0, needs"):
        d.random_tree(rng, 1, 3, vocab=0)
    for sizes in ([2], [2, 2, 2]):
        with pytest.raises(ValueError, match=f"node_counts: got {len(sizes)} sizes, needs 2, one a request"):
            d.random_tree(rng, 2, 3, node_counts=sizes)


def test_bfloat16_keeps_the_shape_and_refuses_values():
    assert d.to_bfloat16(np.float32(1)).shape == ()
    with pytest.raises(TypeError, match="bits: got float64, needs uint16"):
        d.from_bfloat16([1.5])
