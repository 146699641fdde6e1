"""One decoding step around the target's forward pass: drafter logits in, tree out; target tokens in, commit out.

The draft side is stages 1-3 (candidates, tree, bitmask and positions), the commit side stages 5-6 (walk, KV rows).
Between them the caller runs the target on the tree, with stage 4 as its attention. `DecodeStep.prepare` binds a step to
the caller's arrays and records each side as a CUDA graph: then a side costs one call to the driver.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer, describe_array
from ddtree_numba.backend import ON_GPU, as_stream, cuda, is_device_array
from ddtree_numba.commit_side import launch_commit_side
from ddtree_numba.device_library import as_device, library_of, stream_for
from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree, empty_tree
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.accept_walk import AcceptedPath, accept_walk_reference, check_walk
from ddtree_numba.stages.ancestor_bitmask import (
    ancestor_bitmask,
    ancestor_bitmask_reference,
    positions,
    positions_reference,
)
from ddtree_numba.stages.best_first_tree import (
    DRAFT_LAUNCHERS,
    MAX_DRAFT_LENGTH,
    build_tree,
    build_tree_reference,
)
from ddtree_numba.stages.best_first_tree import best_version as best_tree_version
from ddtree_numba.stages.kv_commit import check_commit, commit_kv_reference, kv_words
from ddtree_numba.stages.top_candidates import best_version as best_candidates_version
from ddtree_numba.stages.top_candidates import top_candidates, top_candidates_reference
from ddtree_numba.stages.top_candidates.fused import workspace_for

__all__ = ["DecodePlan", "DecodeStep", "DecodeStepReference", "launch_tree"]


def _candidates_for(budget: int, k: int | None) -> int:
    """Return K: a tree of `budget` nodes never looks past rank `budget` of a depth."""
    return max(1, budget) if k is None else check_integer("k", k, 1, 2**31 - 1)


class DecodeStepReference:
    """The step in NumPy: the same chain as `DecodeStep`, from the stages' references, which raise as they do alone.

    >>> step = DecodeStepReference(budget=2)
    >>> logits = np.log(np.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]], np.float32))
    >>> tree, where = step.draft(logits, np.array([7], np.int32), np.array([10], np.int32))
    >>> tree.token_ids.tolist(), where.tolist()
    ([[7, 0, 2]], [[10, 11, 12]])
    """

    def __init__(self, budget: int, k: int | None = None) -> None:
        """Take the tree's node `budget` (0..1024, root not counted) and `k` candidates a depth (None: the budget)."""
        self.budget = check_integer("budget", budget, 0, MAX_BUDGET)
        self.k = _candidates_for(self.budget, k)
        self.tree: DraftTree | None = None
        """The draft tree of the round."""
        self.tree_status = self.commit_status = np.zeros(0, np.int32)
        """[B] int32 each: what the bitmask and the commit stage found, 0 when all is well."""
        self._draft_length = 0

    def draft(
        self, logits: np.ndarray, root_tokens: np.ndarray, prefix_lengths: np.ndarray
    ) -> tuple[DraftTree, np.ndarray]:
        """Return the draft tree, bits filled, and the nodes' positions [B, N] int32.

        `logits` [B, L, V] (float32, float16, or bfloat16 as uint16) are the drafter's, `root_tokens` [B] int32 the
        last emitted tokens, `prefix_lengths` [B] int32 the rows in the KV cache.
        """
        log_probs, token_ids = top_candidates_reference(logits, self.k)
        tree = build_tree_reference(log_probs, token_ids, root_tokens, self.budget)
        bits, self.tree_status = ancestor_bitmask_reference(tree.parents, tree.node_count)
        self.tree = tree._replace(ancestor_bits=bits)
        self._draft_length = logits.shape[1]
        return self.tree, positions_reference(tree.depths, prefix_lengths)

    def commit(
        self, target_tokens: np.ndarray, kv_pool: np.ndarray, block_table: np.ndarray, prefix_lengths: np.ndarray
    ) -> AcceptedPath:
        """Walk the drafted tree, keep the accepted rows, advance the lengths; return the accepted path.

        `target_tokens` [B, N] int32 is the target's token at each node; `kv_pool` [layers, pages, page_size, D] and
        `prefix_lengths` [B] int32 are changed in place; `block_table` [B, max_pages] int32.
        """
        if self.tree is None:
            raise RuntimeError("commit: no tree has been drafted yet, call draft first")
        path = accept_walk_reference(self.tree, target_tokens, self._draft_length)
        self.commit_status = commit_kv_reference(
            kv_pool, block_table, prefix_lengths, path.accept_slots, path.accept_count
        )
        return path


def launch_tree(
    log_probs: Any,
    token_ids: Any,
    root_tokens: Any,
    prefix_lengths: Any,
    tree: DraftTree,
    out_positions: Any,
    status: Any,
    *,
    version: str = "auto",
    stream: Any = None,
) -> None:
    """Launch stages 2 and 3 on device arrays: in one launch where the rung `version` of stage 2 can, else in three.

    `log_probs`, `token_ids` [B, L, K] and `root_tokens` [B] as in `build_tree`, `prefix_lengths` [B] int32 are read.
    `tree` (N slots, ancestor bits included), `out_positions` [B, N] and `status` [B] int32 are written.
    """
    budget = tree.parents.shape[1] - 1
    rung = best_tree_version(budget) if version == "auto" else version
    if rung in DRAFT_LAUNCHERS:
        outputs = (tree, out_positions, status)
        DRAFT_LAUNCHERS[rung](log_probs, token_ids, root_tokens, prefix_lengths, *outputs, as_stream(stream))
        return
    build_tree(log_probs, token_ids, root_tokens, budget, version=rung, out=tree, stream=stream)
    ancestor_bitmask(tree.parents, tree.node_count, out=(tree.ancestor_bits, status), stream=stream)
    positions(tree.depths, prefix_lengths, out=out_positions, stream=stream)


class DecodeStep:
    """The step on the device, over buffers made once: no host copy, allocation or synchronisation between stages.

    Every argument is a device array, every result one of the step's own buffers, in flight on the stream and
    overwritten by the next round. Shapes are fixed, contents are free: each round may bring other prefixes and trees.

    Raises `TypeError` for what is no device array or of another dtype, `ValueError` for a wrong shape or layout or a
    number out of range, `RuntimeError` for a commit that no draft came before.
    """

    def __init__(self, batch: int, draft_length: int, vocab: int, budget: int, k: int | None = None) -> None:
        """Make the buffers for B = `batch` requests, L = `draft_length` depths, V = `vocab`, N = `budget` + 1 slots.

        `k` is K, the candidates of a depth; None: the budget, which is as many as a tree can use.
        """
        self.batch = check_integer("batch", batch, 1, 2**31 - 1)
        self.draft_length = check_integer("draft_length", draft_length, 0, MAX_DRAFT_LENGTH)
        self.vocab = check_integer("vocab", vocab, 1, 2**31 - 1)
        self.budget = check_integer("budget", budget, 0, MAX_BUDGET)
        self.k = min(_candidates_for(self.budget, k), self.vocab)

        candidates, path, slots = (batch, draft_length, self.k), (batch, draft_length + 1), (batch, self.budget + 1)
        self.log_probs = cuda.device_array(candidates, np.float32)
        """[B, L, K] float32: the drafter's best log-probabilities of each depth."""
        self.token_ids = cuda.device_array(candidates, np.int32)
        """[B, L, K] int32: their tokens."""
        self.tree = DraftTree(*(cuda.to_device(field) for field in empty_tree(batch, self.budget)))
        """The draft tree of the round."""
        self.positions = cuda.device_array(slots, np.int32)
        """[B, N] int32: position of each node in its sequence."""
        self.tree_status = cuda.device_array(batch, np.int32)
        """[B] int32: what the bitmask stage found, 0 when whole."""
        self.path = AcceptedPath(
            accept_slots=cuda.device_array(path, np.int32),
            accept_tokens=cuda.device_array(path, np.int32),
            accept_count=cuda.device_array(batch, np.int32),
            status=cuda.device_array(batch, np.int32),
        )
        """The accepted path of the round."""
        self.commit_status = cuda.device_array(batch, np.int32)
        """[B] int32: what the commit stage found, 0 when every row moved."""
        self._arrived = cuda.to_device(np.zeros(batch, np.uint32))
        self._drafted = False
        self._workspace = None
        if draft_length > 0 and best_candidates_version(self.k, vocab) == "fused":
            self._workspace = workspace_for(batch * draft_length, vocab)
        if ON_GPU:
            cuda.synchronize()  # a first draft may be launched on a stream that does not wait for Numba's

    def draft(self, logits: Any, root_tokens: Any, prefix_lengths: Any, stream: Any = None) -> tuple[DraftTree, Any]:
        """Return (tree, positions), the step's own buffers, as `DecodeStepReference.draft` defines them.

        `logits` [B, L, V], `root_tokens` [B] int32, `prefix_lengths` [B] int32: device arrays.
        """
        stream = stream_for(stream, logits, root_tokens, prefix_lengths)
        inputs = self._draft_inputs(logits, root_tokens, prefix_lengths, stream)
        self._launch_draft(stream, *inputs)
        self._drafted = True
        return self.tree, self.positions

    def _draft_inputs(self, logits: Any, root_tokens: Any, prefix_lengths: Any, stream: Any = 0) -> Any:
        """Return the draft side's inputs, checked, as Numba's device arrays."""
        arrays = {"logits": logits, "root_tokens": root_tokens, "prefix_lengths": prefix_lengths}
        logits, root_tokens, prefix_lengths = device_arrays = _on_device(arrays, stream)
        check = ArrayCheck(B=self.batch, L=self.draft_length, V=self.vocab)
        check("logits", logits, "B L V", (np.float32, np.float16, np.uint16))
        check("root_tokens", root_tokens, "B", (np.int32,))
        check("prefix_lengths", prefix_lengths, "B", (np.int32,))
        return device_arrays

    def _launch_draft(self, stream: Any, logits: Any, root_tokens: Any, prefix_lengths: Any) -> None:
        candidates = (self.log_probs, self.token_ids)
        top_candidates(logits, self.k, out=candidates, stream=stream, workspace=self._workspace)
        outputs = (self.tree, self.positions, self.tree_status)
        launch_tree(*candidates, root_tokens, prefix_lengths, *outputs, stream=stream)

    def commit(
        self, target_tokens: Any, kv_pool: Any, block_table: Any, prefix_lengths: Any, stream: Any = None
    ) -> AcceptedPath:
        """Walk the round's tree, move the accepted rows, advance the lengths; return the step's own path buffers.

        `target_tokens` [B, N] int32, `kv_pool` [layers, pages, page_size, D] and `prefix_lengths` [B] int32 (both
        changed in place), `block_table` [B, max_pages] int32: device arrays.
        """
        arrays = {
            "target_tokens": target_tokens,
            "kv_pool": kv_pool,
            "block_table": block_table,
            "prefix_lengths": prefix_lengths,
        }
        self._require_draft()
        stream = stream_for(stream, *arrays.values())
        self._launch_commit(stream, *_on_device(arrays, stream))
        return self.path

    def _require_draft(self) -> None:
        if not self._drafted:
            raise RuntimeError("commit: no tree has been drafted yet, call draft first")

    def _launch_commit(
        self, stream: Any, target_tokens: Any, kv_pool: Any, block_table: Any, prefix_lengths: Any
    ) -> None:
        check_walk(self.tree, target_tokens, self.draft_length)
        path = (self.path.accept_slots, self.path.accept_count)
        check_commit(kv_pool, block_table, prefix_lengths, *path)
        inputs = {
            "target_tokens": target_tokens,
            "kv_pool": kv_words(kv_pool),
            "block_table": block_table,
            "prefix_lengths": prefix_lengths,
        }
        transfer = Transfer(stream, inputs)
        targets, pool, table, lengths = map(transfer.input, inputs.values())
        outputs = (self._arrived, self.commit_status)
        launch_commit_side(self.tree, targets, self.path, pool, table, lengths, *outputs, transfer.stream)

    def prepare(
        self,
        logits: Any,
        root_tokens: Any,
        prefix_lengths: Any,
        target_tokens: Any,
        kv_pool: Any,
        block_table: Any,
    ) -> DecodePlan:
        """Return this step bound to the caller's device arrays, which it reads and changes in place in every round.

        The arrays are those of `draft` and `commit`. All kernels are compiled and both sides recorded here; nothing of
        the caller's is changed. The plan shares this step's buffers.
        """
        return DecodePlan(self, logits, root_tokens, prefix_lengths, target_tokens, kv_pool, block_table)

    def _warm_up_commit(self, target_tokens: Any, kv_pool: Any, block_table: Any, prefix_lengths: Any) -> None:
        """Check the commit side's arguments and compile its kernel for them, on stand-ins: nobody's rows move."""
        check = ArrayCheck(B=self.batch, N=self.budget + 1)
        check("target_tokens", target_tokens, "B N", (np.int32,))
        check("block_table", block_table, "B max_pages", (np.int32,))
        check("prefix_lengths", prefix_lengths, "B", (np.int32,))
        pool = kv_words(kv_pool)
        targets = cuda.to_device(np.zeros((self.batch, self.budget + 1), np.int32))
        table = cuda.to_device(np.zeros((self.batch, 1), np.int32))
        lengths = cuda.to_device(np.zeros(self.batch, np.int32))
        stand_in = cuda.to_device(np.zeros((pool.shape[0], 1, 1, 1), pool.dtype))
        self._launch_commit(None, targets, stand_in, table, lengths)


class DecodePlan:
    """A `DecodeStep` bound to the caller's arrays, each side replayed as one CUDA graph.

    Pointers and shapes are fixed, contents are free. Each side runs on the stream it is given, also on one that the
    caller is capturing: then its kernels become part of the caller's graph. Without graphs (in the simulator) the
    kernels are launched one by one.

    Results are the step's buffers: `tree`, `positions`, `tree_status`, `path`, `commit_status`.
    """

    def __init__(
        self,
        step: DecodeStep,
        logits: Any,
        root_tokens: Any,
        prefix_lengths: Any,
        target_tokens: Any,
        kv_pool: Any,
        block_table: Any,
    ) -> None:
        """See `DecodeStep.prepare`."""
        self.step = step
        draft_inputs = step._draft_inputs(logits, root_tokens, prefix_lengths)
        cache = _on_device({"target_tokens": target_tokens, "kv_pool": kv_pool, "block_table": block_table})
        commit_inputs = [*cache, draft_inputs[2]]
        self._callers_arrays = (logits, root_tokens, prefix_lengths, target_tokens, kv_pool, block_table)  # kept alive
        self._library = library_of(*self._callers_arrays)
        step._warm_up_commit(*commit_inputs)
        if ON_GPU:
            step._launch_draft(None, *draft_inputs)
            cuda.synchronize()
        step._drafted = False  # that tree is nobody's
        self._draft = Recorded(lambda stream: step._launch_draft(stream, *draft_inputs))
        self._commit = Recorded(lambda stream: step._launch_commit(stream, *commit_inputs))

    def draft(self, stream: Any = None) -> tuple[DraftTree, Any]:
        """Do what `DecodeStep.draft` does; return (tree, positions), in flight on `stream`."""
        self._draft.replay(self._stream(stream))
        self.step._drafted = True
        return self.step.tree, self.step.positions

    def commit(self, stream: Any = None) -> AcceptedPath:
        """Do what `DecodeStep.commit` does; return the path, in flight on `stream`."""
        self.step._require_draft()
        self._commit.replay(self._stream(stream))
        return self.step.path

    def _stream(self, stream: Any) -> Any:
        return self._library.current_stream() if stream is None else stream


def _on_device(arrays: dict[str, Any], stream: Any = 0) -> Any:
    for name, array in arrays.items():
        if not is_device_array(array):
            raise TypeError(
                f"{name}: got {type(array).__name__}, needs a device array (DecodeStepReference takes NumPy)"
            )
        describe_array(name, array)
    return [as_device(array, stream) for array in arrays.values()]
