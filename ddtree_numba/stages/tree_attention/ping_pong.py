"""Rung 5: two halves of a block take turns, one multiplying while the other one finds its weights.

What changed against `tensor_core`:

- *Ping-pong.* The four warps of a row group now do everything for their 32 rows: scores, softmax, and all 512 output
  columns (each warp 32 rows x 128 columns, as many registers as before). So the two groups of a block need nothing of
  each other but the tiles, and one works half a tile behind the other: while one exchanges scores and computes
  exponentials, the tensor cores work for the other. There, they stood idle for a third of the time.
- *Bulk copies.* A row of a tile is one instruction of one thread (`cp.async.bulk`); the copy engine writes it and
  tells a barrier in shared memory. No registers and no share of the load pipeline are spent on it, and no barrier
  of the block waits for it. Rows are 16 bytes longer than their data, so that eight of them start in eight groups of
  banks: with no swizzle, every fragment's address is one register and a constant.

What it should buy: the tensor cores' own pace is 3600 clocks for a tile of 64 keys; `tensor_core` takes 6700. What was
measured on an H200 (8 requests, 33 nodes, 64 heads, prefix 8192, bfloat16): 961 us against 968, where 650 had been
predicted. Something else holds both back, so `version="auto"` does not take this rung.
What it costs: each group reads all values for itself, 160 KB instead of 128 KB of fragments a tile; a tile must arrive
within half the time of one; and it needs the copy engine of compute capability 9.0.

The block's schedule, in steps of half a tile, with a barrier after each::

    step          0       1       2       3       4
    group 0   score 0  value 0 score 1 value 1 score 2 ...
    group 1           score 0  value 0 score 1 value 1 ...
    copies       -    tile 1     -     tile 2     -        (tile 2 takes the place of tile 0)
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.stages.tree_attention import mma as ptx
from ddtree_numba.stages.tree_attention.tensor_core import launch_in_splits, shared_memory_per_block
from ddtree_numba.stages.tree_attention.tensor_core import why_not as why_not_tensor_core

__all__ = ["PingPongTiling", "launch_ping_pong", "make_ping_pong_kernel", "why_not", "why_not_here"]

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
ALL_LANES = 0xFFFFFFFF
NOTHING = np.float32(-np.inf)  # the score of a key that is not seen

SLACK = np.float32(8)
"""A row's maximum is left alone until a score passes it by more than this (base 2): weights stay below 2^8."""

MISSING = np.uint32(0x80000000)
"""A pool row's number when there is no row to copy: zeros are written instead."""


class PingPongTiling(NamedTuple):
    """How a block cuts its work; every number is a compile-time constant of the kernel."""

    width: int
    """D_c + D_r."""
    latent_width: int
    """D_c."""
    row_groups: int
    """Groups of four warps, each with 32 rows: two take turns, one (for a small shared memory) just works."""
    keys: int
    """Latent rows of a tile."""
    held: int
    """Steps of each warp whose Q fragments stay in registers, 8 registers each; even."""

    @property
    def rows(self) -> int:
        """(node, head) pairs of a block."""
        return 32 * self.row_groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.row_groups

    @property
    def query_stride(self) -> int:
        """Bytes of a row of Q in shared memory: what is not held in registers."""
        return 2 * self.width - 64 * self.held

    @property
    def key_stride(self) -> int:
        """Bytes from one row of a tile to the next: an odd number of 16-byte chunks."""
        return 2 * self.width + 16

    @property
    def part_bytes(self) -> int:
        """Bytes of one message: float32 scores of 8 rows and half the keys."""
        return 4 * 8 * self.keys // 2

    @property
    def inbox_bytes(self) -> int:
        """Bytes of a warp's inbox: three messages. The weights of its eight rows are put there after reading."""
        return 3 * self.part_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory, with what aligning the start may take."""
        tiles = 2 * self.keys * self.key_stride
        inboxes = self.rows // 8 * self.inbox_bytes
        return 128 + self.rows * self.query_stride + tiles + inboxes + 4 * self.rows + 32


@functools.cache
def make_ping_pong_kernel(tiling: PingPongTiling, is_bfloat16: bool) -> Any:
    """Return `ping_pong_kernel` for one tiling and number format."""
    WIDTH, LATENT, GROUPS, KEYS, HELD = tiling
    ROWS, WARPS = tiling.rows, tiling.threads // 32
    ROW_BYTES, Q_STRIDE, K_STRIDE = 2 * WIDTH, tiling.query_stride, tiling.key_stride
    TILE = KEYS * K_STRIDE
    PART, INBOX = tiling.part_bytes, tiling.inbox_bytes
    HELD_STRIDE = 64 * HELD
    STEPS = WIDTH // 32  # of each warp: every other one of WIDTH / 16
    THIRD = -(-STEPS // 3)
    PAIRS = KEYS // 32  # of n-tiles: a warp scores KEYS / 2 keys, 16 with each ldmatrix
    ROWS_EACH = KEYS // 4  # tile rows that each warp of group 0 copies
    COLUMNS = LATENT // 4  # of a warp
    N_TILES = COLUMNS // 8
    HALF = 8 * PAIRS  # score registers of 16 rows; also weights of a lane, the first half for half the keys
    N_ACC, N_SCORES, N_WEIGHTS, N_HELD = 2 * N_TILES * 4, 2 * HALF, HALF, 8 * HELD

    mma = ptx.mma_bf16 if is_bfloat16 else ptx.mma_f16
    pack = ptx.pack_bf16 if is_bfloat16 else ptx.pack_f16
    cp_async_16, cp_async_wait, exp2 = ptx.cp_async_16, ptx.cp_async_wait, ptx.exp2
    bulk_copy, fence_async, mbarrier_init = ptx.bulk_copy, ptx.fence_async, ptx.mbarrier_init
    mbarrier_arrive, mbarrier_done = ptx.mbarrier_arrive, ptx.mbarrier_done
    ldmatrix_x4, ldmatrix_x4_trans, named_barrier_or = ptx.ldmatrix_x4, ptx.ldmatrix_x4_trans, ptx.named_barrier_or
    load_shared_4, store_shared_4 = ptx.load_shared_4, ptx.store_shared_4
    load_shared_float, store_shared, store_global_2 = ptx.load_shared_float, ptx.store_shared, ptx.store_global_2
    shared_address, global_address = ptx.shared_address, ptx.global_address
    inline = cuda.jit(device=True, forceinline=True)

    @inline
    def look_up(block_table, b, key, end, page_size):
        """Return the page of a request's row `key`, or of its last row. Nothing waits for the answer here."""
        return np.uint32(block_table[b, np.uint32(min(key, end - 1)) // page_size])

    @inline
    def pool_row(page, key, end, pages, page_size):
        """Return the pool row of a request's row `key`, given its page; `MISSING` when there is none."""
        row = MISSING
        if key < end and page < pages:
            row = page * page_size + np.uint32(key) % page_size
        return np.uint32(row)

    @inline
    def copy_row(pool, row, target, barrier):
        """Start the copy of pool row `row` to `target`, or write zeros; `barrier` hears of it either way."""
        if row != MISSING:
            mbarrier_arrive(barrier, ROW_BYTES)
            bulk_copy(target, pool + np.uint64(row) * np.uint64(ROW_BYTES), ROW_BYTES, barrier)
        else:
            for chunk in range(WIDTH // 8):
                place = target + np.uint32(16 * chunk)
                store_shared_4(place, np.float32(0), np.float32(0), np.float32(0), np.float32(0))
            fence_async()
            mbarrier_arrive(barrier, 0)

    @inline
    def visible(ancestor_bits, b, node, slot):
        """Return bits for 32 rows from tree slot `slot` on (negative: still in the prefix): 1 where `node` sees it.

        Bits past the last row mean nothing.
        """
        bits = np.uint32(0)
        word = slot >> 5  # rounds down
        shift = np.uint32(slot & 31)
        for i in range(2):
            w = word + i
            value = np.uint32(0)
            if w < 0:
                value = np.uint32(0xFFFFFFFF)
            elif w < ancestor_bits.shape[2]:
                value = ancestor_bits[b, node, w]
            if i == 0:
                bits = value >> shift
            elif shift > 0:
                bits |= value << (np.uint32(32) - shift)
        return np.uint32(bits)

    @inline
    def score_step(i, held, q_even, k_first, scores):
        """Add step i of this warp, 16 columns of Q and K, to its 32 x KEYS / 2 scores."""
        if i < HELD:
            h = 8 * i
            a0, a1, a2, a3 = held[h], held[h + 1], held[h + 2], held[h + 3]
            a4, a5, a6, a7 = held[h + 4], held[h + 5], held[h + 6], held[h + 7]
        else:
            address = (q_even ^ np.uint32(64 * (i & 1))) + np.uint32((i >> 1) * 128 - HELD_STRIDE)
            a0, a1, a2, a3 = ldmatrix_x4(address)
            a4, a5, a6, a7 = ldmatrix_x4(address + np.uint32(16 * Q_STRIDE))
        for n in range(PAIRS):
            b0, b1, b2, b3 = ldmatrix_x4(k_first + np.uint32(64 * i + 16 * n * K_STRIDE))
            s = 8 * n
            scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = mma(
                a0, a1, a2, a3, b0, b1, scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
            )
            s = 8 * n + 4
            scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = mma(
                a0, a1, a2, a3, b2, b3, scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
            )
            s = HALF + 8 * n
            scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = mma(
                a4, a5, a6, a7, b0, b1, scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
            )
            s = HALF + 8 * n + 4
            scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = mma(
                a4, a5, a6, a7, b2, b3, scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
            )

    @inline
    def send_scores(scores, weights, octet, group_inboxes, lane):
        """Send the partial scores of the three other warps' rows to their inboxes; keep those of the own rows.

        Octet o of the group is register pair o % 2 of the 16 rows o // 2. The warp that differs in bit 0 has the other
        steps of the same keys, the two that differ in bit 1 have the other keys.
        """
        for o in range(4):
            if o != octet:
                target = group_inboxes + np.uint32(o * INBOX + ((o ^ octet) - 1) * PART + lane * 16)
                for n in range(PAIRS):
                    r = HALF * (o >> 1) + 2 * (o & 1) + 8 * n
                    store_shared_4(target + np.uint32(512 * n), scores[r], scores[r + 1], scores[r + 4], scores[r + 5])
        for n in range(2 * PAIRS):
            for e in range(2):
                s = 4 * n + e
                first = scores[s + 2] if octet & 1 else scores[s]
                second = scores[HALF + s + 2] if octet & 1 else scores[HALF + s]
                weights[2 * n + e] = second if octet >> 1 else first

    @inline
    def receive_scores(weights, inbox, lane, factor):
        """Add what the three other warps sent: a whole row now lies in four lanes, first the keys of this warp."""
        for n in range(PAIRS):
            w, source = 4 * n, inbox + np.uint32(lane * 16 + 512 * n)
            x0, x1, x2, x3 = load_shared_4(source)
            y0, y1, y2, y3 = load_shared_4(source + np.uint32(PART))
            z0, z1, z2, z3 = load_shared_4(source + np.uint32(2 * PART))
            weights[w] = (weights[w] + x0) * factor
            weights[w + 1] = (weights[w + 1] + x1) * factor
            weights[w + 2] = (weights[w + 2] + x2) * factor
            weights[w + 3] = (weights[w + 3] + x3) * factor
            w += HALF // 2
            weights[w] = (y0 + z0) * factor
            weights[w + 1] = (y1 + z1) * factor
            weights[w + 2] = (y2 + z2) * factor
            weights[w + 3] = (y3 + z3) * factor

    @inline
    def row_maximum(weights):
        """Return the largest weight of a row, which lies in four neighbouring lanes."""
        highest = max(max(weights[0], weights[1]), max(weights[2], weights[3]))
        for w in range(4, N_WEIGHTS, 4):
            highest = max(highest, max(max(weights[w], weights[w + 1]), max(weights[w + 2], weights[w + 3])))
        highest = max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, 1))
        return max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, 2))

    @inline
    def store_weights(weights, inbox, key_half, lane):
        """Round the weights of row lane // 4 to 16 bits; chunk c of a row lies at place c ^ (row % 8)."""
        for half in range(2):
            for n in range(2 * PAIRS):
                w = HALF // 2 * half + 2 * n
                chunk = (key_half ^ half) * 2 * PAIRS + n
                place = (lane >> 2) * 128 + ((chunk ^ (lane >> 2)) << 4) + (lane & 3) * 4
                store_shared(inbox + np.uint32(place), pack(weights[w], weights[w + 1]))

    @inline
    def add_values(acc, p_first, v_first):
        """Add the tile's values, weighed: 32 rows x COLUMNS, 16 keys at a time."""
        for k in range(KEYS // 16):
            p_place = p_first ^ np.uint32(32 * k)
            a0, a1, a2, a3 = ldmatrix_x4(p_place)
            a4, a5, a6, a7 = ldmatrix_x4(p_place + np.uint32(2 * INBOX))
            for n in range(N_TILES // 2):
                b0, b1, b2, b3 = ldmatrix_x4_trans(v_first + np.uint32(k * 16 * K_STRIDE + 32 * n))
                s = 8 * n
                acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = mma(
                    a0, a1, a2, a3, b0, b1, acc[s], acc[s + 1], acc[s + 2], acc[s + 3]
                )
                s = 8 * n + 4
                acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = mma(
                    a0, a1, a2, a3, b2, b3, acc[s], acc[s + 1], acc[s + 2], acc[s + 3]
                )
                s = 4 * N_TILES + 8 * n
                acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = mma(
                    a4, a5, a6, a7, b0, b1, acc[s], acc[s + 1], acc[s + 2], acc[s + 3]
                )
                s = 4 * N_TILES + 8 * n + 4
                acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = mma(
                    a4, a5, a6, a7, b2, b3, acc[s], acc[s + 1], acc[s + 2], acc[s + 3]
                )

    @cuda.jit(lto=False)
    def ping_pong_kernel(q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count, scale, out, lse):
        """Attend from ROWS (node, head) pairs of one request to its keys, or to one split of them.

        q (B, N * H, D_c + D_r) uint16 (bfloat16) or float16: absorbed queries, pair = node * H + head
        kv_pool (pages, page_size, D_c + D_r), as q: latent rows, key and (the first D_c numbers) value at once
        block_table (B, max_pages) int32: pages of each request, in the order of its rows
        prefix_lengths (B,) int32: rows that every node of the request sees
        ancestor_bits (B, N, W) uint32: rows after the prefix that each node sees; bits from node_count on mean nothing
        node_count (B,) int32: used slots
        scale float32: multiplies the dot product
        out (splits * B * N * H * D_c,) float32: for each split, the weighted mean of its values; where it sees none, 0
        with one split and anything with several
        lse (splits * B * N * H,) float32: natural logarithm of the sum of exp(score); -inf there

        A row whose page lies outside the block table or the pool is not seen: the kernel never reads outside.

        Launch: grid (ceil(N * H / ROWS), splits, B), block `threads`, `shared_bytes` of dynamic shared memory
        (`PingPongTiling`); for D_c 512 and D_r 64: 64 rows, 256 threads and 231,856 bytes.
        Needs: compute capability 9.0; fewer than 2^31 rows in the pool and pairs in a request.
        """
        dynamic = cuda.shared.array(0, np.uint8)
        base = (shared_address(dynamic) + np.uint32(127)) & np.uint32(0xFFFFFF80)  # places are found by exclusive or
        lane, warp = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5)
        b, split, splits = cuda.blockIdx.z, cuda.blockIdx.y, cuda.gridDim.y
        nodes = np.int32(max(0, min(node_count[b], ancestor_bits.shape[1])))
        pairs = np.int32(q.shape[1])
        heads = np.int32(pairs // ancestor_bits.shape[1])
        used = nodes * heads
        first_pair = np.int32(cuda.blockIdx.x * ROWS)
        first_out = (np.int64(split) * cuda.gridDim.z + b) * pairs + first_pair
        out_address = global_address(out) + np.uint64(first_out * (4 * LATENT))

        pages, page_size = np.uint32(kv_pool.shape[0]), np.uint32(kv_pool.shape[1])
        prefix = np.int32(max(0, prefix_lengths[b]))
        end = np.int32(min(np.int64(prefix) + nodes, np.int64(block_table.shape[1]) * page_size))
        tiles = np.int64((end + KEYS - 1) // KEYS)
        first_tile = np.int32(tiles * split // splits)
        count = np.int32(tiles * (split + 1) // splits) - first_tile
        if first_pair >= used or count <= 0:  # for the whole block, so no barrier is left waiting
            for row in range(warp, min(ROWS, pairs - first_pair), WARPS):
                if splits == 1:  # parts that saw nothing are not read by the merge
                    for column in range(2 * lane, LATENT, 64):
                        zeros = out_address + np.uint64(row * (4 * LATENT) + column * 4)
                        store_global_2(zeros, np.float32(0), np.float32(0))
                if lane == 0:
                    lse[first_out + row] = NOTHING
            return

        q_shared = base
        tiles_shared = q_shared + np.uint32(ROWS * Q_STRIDE)
        inboxes = tiles_shared + np.uint32(2 * TILE)
        rescales = inboxes + np.uint32(ROWS // 8 * INBOX)  # one float32 for each row
        barriers = rescales + np.uint32(4 * ROWS)  # one for each of the two tiles, 8 bytes
        missing_flag = barriers + np.uint32(16)  # float32: 1 once a row in sight has no page
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, KEYS)
            mbarrier_init(barriers + np.uint32(8), KEYS)
            store_shared(missing_flag, np.float32(0))

        # Q: the columns that will be held in registers pass through the second tile's place, which is free now.
        staging = tiles_shared + np.uint32(TILE + 127) & np.uint32(0xFFFFFF80)
        q_row = global_address(q) + np.uint64((np.int64(b) * pairs + first_pair) * ROW_BYTES)
        for row in range(warp, ROWS, WARPS):
            there = first_pair + row < used
            for chunk in range(lane, WIDTH // 8, 32):
                place = (chunk ^ (row & 7)) << 4
                if chunk < 4 * HELD:
                    target = staging + np.uint32(row * HELD_STRIDE + place)
                else:
                    target = q_shared + np.uint32(row * Q_STRIDE + place - HELD_STRIDE)
                source = q_row + np.uint64((row * ROW_BYTES if there else 0) + chunk * 16)
                cp_async_16(target, source, 16 if there else 0)
        cp_async_wait()
        cuda.syncthreads()  # Q is complete, and the barriers are ready

        # Group 0 copies, while it would leave the tensor cores to the other group anyway. Tile row `copied` is this
        # thread's in every tile, if `copies`; pages are looked up a tile ahead.
        pool = global_address(kv_pool)
        copies = warp < 4 and lane < ROWS_EACH
        copied = warp * ROWS_EACH + (lane & (ROWS_EACH - 1))
        key = np.int32(first_tile * KEYS + copied)
        row = pool_row(look_up(block_table, b, key, end, page_size), key, end, pages, page_size)
        if copies:
            if key < end and row == MISSING:
                store_shared(missing_flag, np.float32(1))
            copy_row(pool, row, tiles_shared + np.uint32(copied * K_STRIDE), barriers)
        page = look_up(block_table, b, np.int32(key + KEYS), end, page_size)

        # What this warp does. Scores: rows of `group`, keys of `key_half`, steps 2 i + `octet` % 2. Softmax: the eight
        # rows of `octet`. Values: its own COLUMNS for the rows of `group`.
        group, octet = warp >> 2, warp & 3
        key_half, step_half = octet >> 1, octet & 1
        lane_chunk = ((lane >> 4) ^ (lane & 7) ^ (2 * step_half)) << 4
        q_even = q_shared + np.uint32((32 * group + (lane & 15)) * Q_STRIDE + lane_chunk)
        held_even = staging + np.uint32((32 * group + (lane & 15)) * HELD_STRIDE + lane_chunk)
        k_row = key_half * (KEYS // 2) + ((lane >> 4) << 3) + (lane & 7)
        k_first = np.uint32(k_row * K_STRIDE + (2 * step_half + ((lane >> 3) & 1)) * 16)
        v_first = np.uint32((lane & 15) * K_STRIDE + octet * (2 * COLUMNS) + (lane >> 4) * 16)
        group_inboxes = inboxes + np.uint32(4 * group * INBOX)
        inbox = group_inboxes + np.uint32(octet * INBOX)
        # Weights of rows 8 r .. 8 r + 7 are in inbox r of the group.
        p_row = ((lane >> 3) & 1) * INBOX + (lane & 7) * 128
        p_first = group_inboxes + np.uint32(p_row + (((lane >> 4) ^ (lane & 7)) << 4))
        my_row = 8 * (4 * group + octet) + (lane >> 2)
        my_node = min(first_pair + my_row, used - 1) // heads

        held = cuda.local.array(N_HELD, np.uint32)
        for i in range(HELD):
            for m in range(2):
                address = (held_even ^ np.uint32(64 * (i & 1))) + np.uint32((i >> 1) * 128 + 16 * m * HELD_STRIDE)
                h = 8 * i + 4 * m
                held[h], held[h + 1], held[h + 2], held[h + 3] = ldmatrix_x4(address)
        acc = cuda.local.array(N_ACC, np.float32)
        scores = cuda.local.array(N_SCORES, np.float32)
        weights = cuda.local.array(N_WEIGHTS, np.float32)
        for i in range(N_ACC):
            acc[i] = np.float32(0)
        for i in range(N_WEIGHTS):
            weights[i] = np.float32(0)
        largest, total = NOTHING, np.float32(0)  # of row my_row, base 2; `total` of this lane's keys alone
        factor = scale * LOG2_E
        fence_async()  # the copy engine will write where this thread has
        cuda.syncthreads()  # all have taken their part of Q from `staging`

        for i in range(2 * count + GROUPS - 1):
            step = np.int32(i)
            # The tile that comes into use at step 2 t has the place of tile t - 2, whose last values were added in
            # the step before this one.
            t = np.int32((step + 2) >> 1)
            if group == 0 and (step + GROUPS) & 1 == 1:
                key = np.int32((first_tile + t) * KEYS + copied)
                row = pool_row(page, key, end, pages, page_size)
                if copies and t < count:
                    if key < end and row == MISSING:
                        store_shared(missing_flag, np.float32(1))
                    place = tiles_shared + np.uint32((t & 1) * TILE + copied * K_STRIDE)
                    copy_row(pool, row, place, barriers + np.uint32(8 * (t & 1)))
                page = look_up(block_table, b, np.int32(key + KEYS), end, page_size)

            mine = np.int32(step - group)  # this group's own step
            t = np.int32(mine >> 1)
            tile_shared = tiles_shared + np.uint32((t & 1) * TILE)
            if mine & 1 == 0 and t < count:
                while mbarrier_done(barriers + np.uint32(8 * (t & 1)), (t >> 1) & 1) == 0:
                    pass
                for i in range(N_SCORES):
                    scores[i] = np.float32(0)
                # Three loops: the compiler unrolls one of 6 steps for certain, one of 18 when it likes to.
                for i in range(THIRD):
                    score_step(i, held, q_even, tile_shared + k_first, scores)
                for i in range(THIRD, 2 * THIRD):
                    score_step(i, held, q_even, tile_shared + k_first, scores)
                for i in range(2 * THIRD, STEPS):
                    score_step(i, held, q_even, tile_shared + k_first, scores)
                send_scores(scores, weights, octet, group_inboxes, lane)
            elif mine > 0 and mine & 1 == 1:
                receive_scores(weights, inbox, lane, factor)
                # Mask, only where not every node sees every row: in the tree, past its end, where a page is missing.
                first_key = (first_tile + t) * KEYS
                if first_key + KEYS > prefix or load_shared_float(missing_flag) != np.float32(0):
                    for half in range(2):
                        half_key = first_key + (key_half ^ half) * (KEYS // 2)
                        bits = visible(ancestor_bits, b, my_node, half_key - prefix)
                        key_here = np.int32(half_key + lane)
                        here = look_up(block_table, b, key_here, end, page_size)
                        found = pool_row(here, key_here, end, pages, page_size) != MISSING
                        bits &= np.uint32(cuda.ballot_sync(ALL_LANES, found))
                        bits >>= np.uint32(2 * (lane & 3))
                        for n in range(2 * PAIRS):
                            for e in range(2):
                                if (bits >> np.uint32(8 * n + e)) & np.uint32(1) == 0:
                                    weights[HALF // 2 * half + 2 * n + e] = NOTHING
                # Online softmax.
                highest = row_maximum(weights)
                grew = highest > largest + SLACK
                rescale = np.float32(1)
                if grew:
                    rescale = exp2(largest - highest)
                    largest = highest
                # Two maxima of -inf (nothing seen yet) must not be subtracted from each other.
                shift = largest if largest != NOTHING else np.float32(0)
                total *= rescale
                for w in range(0, N_WEIGHTS, 2):
                    weights[w] = exp2(weights[w] - shift)
                    weights[w + 1] = exp2(weights[w + 1] - shift)
                    total += weights[w] + weights[w + 1]
                store_weights(weights, inbox, key_half, lane)
                if lane & 3 == 0:
                    store_shared(rescales + np.uint32(my_row * 4), rescale)
                # All weights of the group are there; and it agrees on whether a maximum has moved.
                if named_barrier_or(1 + group, 128, np.uint32(grew)):
                    for r in range(4):
                        x = load_shared_float(rescales + np.uint32((32 * group + 8 * r + (lane >> 2)) * 4))
                        for n in range(N_TILES):
                            s = 4 * N_TILES * (r >> 1) + 4 * n + 2 * (r & 1)
                            acc[s] *= x
                            acc[s + 1] *= x
                add_values(acc, p_first, tile_shared + v_first)
            cuda.syncthreads()

        # The sums are divided at the end, once. A lane has a quarter of its row's total.
        total += cuda.shfl_xor_sync(ALL_LANES, total, 1)
        total += cuda.shfl_xor_sync(ALL_LANES, total, 2)
        if lane & 3 == 0:
            inverse, logarithm = np.float32(0), NOTHING
            if first_pair + my_row < used and total != np.float32(0):
                inverse = np.float32(1) / total
                logarithm = largest * LN_2 + math.log(total)
            store_shared(rescales + np.uint32(my_row * 4), inverse)
            if first_pair + my_row < pairs:
                lse[first_out + my_row] = logarithm
        cuda.syncthreads()
        for r in range(4):
            row_out = 32 * group + 8 * r + (lane >> 2)
            x = load_shared_float(rescales + np.uint32(row_out * 4))
            if first_pair + row_out < pairs:
                address = out_address + np.uint64(row_out * (4 * LATENT) + octet * (4 * COLUMNS) + (lane & 3) * 8)
                for n in range(N_TILES):
                    s = 4 * N_TILES * (r >> 1) + 4 * n + 2 * (r & 1)
                    v0 = acc[s] * x if x != np.float32(0) else np.float32(0)
                    v1 = acc[s + 1] * x if x != np.float32(0) else np.float32(0)
                    store_global_2(address + np.uint64(32 * n), v0, v1)

    return ping_pong_kernel


def launch_ping_pong(
    q: Any,
    kv_pool: Any,
    block_table: Any,
    prefix_lengths: Any,
    ancestor_bits: Any,
    node_count: Any,
    scale: np.float32,
    is_bfloat16: np.int32,
    out: Any,
    lse: Any,
    *,
    stream: Any,
    splits: int | None = None,
    tiling: PingPongTiling | None = None,
) -> None:
    """Start `ping_pong_kernel`, and the merge if there are splits, on arrays that `tree_attention` has checked.

    `splits` and `tiling` None leave them to `choose_splits` and `_tiling`.
    """
    width, latent_width = q.shape[3], out.shape[3]
    fault = why_not(q, kv_pool, latent_width)
    if fault:
        raise ValueError(f"{fault} (other versions of tree_attention take it)")
    tiling = _tiling(width, latent_width) if tiling is None else tiling
    kernel = make_ping_pong_kernel(tiling, bool(is_bfloat16))
    inputs = (q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count, scale)
    launch_in_splits(kernel, tiling, inputs, out, lse, stream, splits)


def why_not(q: Any, kv_pool: Any, latent_width: int) -> str | None:
    """Return why this version can't take these device arrays on this machine, in one line, or None when it can."""
    fault = why_not_tensor_core(q, kv_pool, latent_width)
    return fault.replace("tensor_core", "ping_pong") if fault else why_not_here(q.shape[3], latent_width)


def why_not_here(width: int, latent_width: int) -> str | None:
    """Return what this GPU lacks for rows that `tensor_core` could take, in one line, or None."""
    capability = cuda.get_current_device().compute_capability
    if tuple(capability) < (9, 0):
        return f"version: got 'ping_pong', needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    needed, shared = _tiling(width, latent_width).shared_bytes, shared_memory_per_block()
    if needed > shared:
        return f"version: got 'ping_pong', needs {needed} bytes of shared memory a block, this GPU has {shared}"
    return None


def _tiling(width: int, latent_width: int) -> PingPongTiling:
    return PingPongTiling(width, latent_width, row_groups=2, keys=64, held=min(4, width // 64 * 2))
