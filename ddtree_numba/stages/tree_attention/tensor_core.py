"""Rung 4: the same tile of latent rows, multiplied by the tensor cores.

What changed against `split_kv`: queries, latents and weights stay bfloat16 (or float16) and the matrix products are
`mma.sync` instructions on fragments in registers (`mma.py`); sums are float32 as before. A block works for 64 pairs
(node, head), so that a request's latents are read once for 64 rows and not once for 16, and all 512 output columns of
those rows live in its registers: 8 warps, each 64 rows x 64 columns, 128 registers of each thread.

How a tile of 64 keys is worked on:

1. *Scores*, 64 x 64. Every `ldmatrix` moves 512 bytes, and shared memory delivers 128 bytes a clock: with 16 rows x
   32 keys for each warp the fragments would be 442 KB, 3456 clocks, against 2100 clocks of `mma.sync`. So a warp
   takes 32 rows x 32 keys but only every other step of 16 columns of the inner dimension: 295 KB. The fragments of
   the first HELD steps of Q, the same for every tile, stay in registers.
2. *Exchange.* Four warps now hold four partial sums of the same 32 rows. Each finishes eight rows for all 64 keys, and
   gets what the three others have of them through its inbox in shared memory. A whole row then lies in four lanes
   of one warp, and its maximum takes two shuffles and no barrier.
3. *Softmax* in base 2, online: the maximum moves only when it would grow by more than 2^8. That is exact (any shift
   is, numerator and denominator have the same one) and spares the rescaling of 128 registers almost always.
4. *Values.* The weights, rounded to 16 bits, go through shared memory to all eight warps. The tile's first 512
   columns are read a second time, transposed by `ldmatrix`.

Meanwhile the next tile is on its way into the other buffer (`cp.async`). Rows of a tile are swizzled: the 16-byte
chunk c of row r lies at place c ^ (r % 8), so that eight rows of one column of chunks are in eight different groups of
banks.

What it buys: 0.59 PFLOP/s of matrix products instead of 0.06 of multiply-adds. Of these, 0.31 were measured on an H200
(8 requests, 33 nodes, 64 heads, prefix 8192, bfloat16): 986 us, where three operations of torch took 1178.

What it costs: 230 KB of shared memory and 255 registers a thread: one block for each multiprocessor, and nothing to
hide a bubble behind.

On a Hopper the rung above, `hopper`, is faster; this one runs from compute capability 8.0 on.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.ptx import array_address, exp2
from ddtree_numba.stages.tree_attention import mma as ptx
from ddtree_numba.stages.tree_attention.split_kv import MAX_SPLITS, launch_merge, split_buffers

__all__ = [
    "Tiling",
    "choose_splits",
    "choose_tiling",
    "launch_tensor_core",
    "make_tensor_core_kernel",
    "place_a",
    "place_b",
    "place_b_trans",
    "place_weight",
    "why_not",
    "why_not_here",
    "why_not_these",
]

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
ALL_LANES = 0xFFFFFFFF
NOTHING = np.float32(-np.inf)  # the score of a key that is not seen

SLACK = np.float32(8)
"""A row's maximum is left alone until a score passes it by more than this (base 2): weights stay below 2^8."""

SHAPES = ((512, 64), (256, 64), (64, 64))
"""The (D_c, D_r) that the kernel can be compiled for."""

MISSING = np.uint32(0x80000000)
"""Set in a pool row's number when there is no row to copy: zeros are written instead."""


class Tiling(NamedTuple):
    """How a block cuts its work; every number is a compile-time constant of the kernel."""

    width: int
    """D_c + D_r."""
    latent_width: int
    """D_c."""
    row_groups: int
    """Groups of four warps, each with the scores of 32 rows."""
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
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return 2 * self.width * self.keys

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
        inboxes = self.rows // 8 * self.inbox_bytes
        return 128 + self.rows * self.query_stride + 2 * self.tile_bytes + inboxes + 4 * self.rows + 16


def choose_tiling(width: int, latent_width: int, shared_bytes: int) -> Tiling | None:
    """Return the fastest tiling of which a block fits `shared_bytes` of shared memory; None when none does.

    >>> choose_tiling(576, 512, 227 * 1024).rows, choose_tiling(576, 512, 99 * 1024).rows  # an H200, an RTX PRO 6000
    (64, 32)
    """
    for row_groups, keys, held in ((2, 64, 4), (1, 32, 2), (1, 32, 8)):
        tiling = Tiling(width, latent_width, row_groups, keys, held)
        columns = latent_width // (4 * row_groups)
        if columns >= 16 and 32 * held <= width and tiling.shared_bytes <= shared_bytes:
            return tiling
    return None


# Where a lane's 16 bytes for ldmatrix lie, from the start of a tile whose rows are `stride` bytes apart. Plain
# functions, so that the tests can run them on NumPy arrays. Steps are 16 columns = 2 chunks; a swizzled place is found
# by exclusive or, and so is the place some chunks further on, as long as they are in the same eight chunks (128 bytes).


def place_a(lane, stride):
    """A operand (Q, weights) of 16 rows: matrices are rows 0-7, rows 8-15, then the same 8 columns further."""
    return (lane & 15) * stride + (((lane >> 4) ^ (lane & 7)) << 4)


def place_b(lane, stride):
    """B operand (K) of 16 keys: matrices are keys 0-7, the same 8 columns further, then keys 8-15."""
    return (((lane >> 4) << 3) + (lane & 7)) * stride + ((((lane >> 3) & 1) ^ (lane & 7)) << 4)


def place_b_trans(lane, stride):
    """B operand (V) of 16 keys and 16 columns, transposed: keys 0-7, keys 8-15, then 8 columns further."""
    return (lane & 15) * stride + (((lane >> 4) ^ (lane & 7)) << 4)


def place_weight(lane, chunk):
    """Two weights of row lane // 4, in rows of 128 bytes: elements 2 (lane % 4) and the next of the 8 of `chunk`."""
    return (lane >> 2) * 128 + ((chunk ^ (lane >> 2)) << 4) + (lane & 3) * 4


@functools.cache
def make_tensor_core_kernel(tiling: Tiling, is_bfloat16: bool) -> Any:
    """Return `tensor_core_kernel` for one tiling and number format."""
    WIDTH, LATENT, _, KEYS, HELD = tiling
    ROWS, WARPS = tiling.rows, tiling.threads // 32
    ROW_BYTES, Q_STRIDE, TILE = 2 * WIDTH, tiling.query_stride, tiling.tile_bytes
    PART, INBOX = tiling.part_bytes, tiling.inbox_bytes
    HELD_STRIDE = 64 * HELD
    STEPS = WIDTH // 32  # of each warp: every other one of WIDTH / 16
    PAIRS = KEYS // 32  # of n-tiles: a warp scores KEYS / 2 keys, 16 with each ldmatrix
    CHUNKS = WIDTH // 8
    FULL, REST = CHUNKS // 32, CHUNKS % 32
    ROWS_EACH = KEYS // WARPS  # tile rows that a warp copies
    LANES = REST if REST else 32
    AT_ONCE = 32 // LANES
    COPIES = ROWS_EACH * FULL + (ROWS_EACH // AT_ONCE if REST else 0)
    THIRD = -(-STEPS // 3)
    COPIES_EACH = -(-COPIES // STEPS)
    COLUMNS = LATENT // WARPS  # of a warp
    N_TILES, M_TILES = COLUMNS // 8, ROWS // 16
    HALF = 8 * PAIRS  # score registers of 16 rows; also weights of a lane that belong to half the keys, twice
    N_ACC, N_SCORES, N_WEIGHTS, N_VALUES, N_HELD = M_TILES * N_TILES * 4, 2 * HALF, HALF, 2 * N_TILES, max(1, 8 * HELD)

    EXPONENT = np.uint32(0x7F80 if is_bfloat16 else 0x7C00)  # all ones: infinity or NaN
    EXPONENTS = np.uint32(int(EXPONENT) * 0x10001)

    mma = ptx.mma_bf16 if is_bfloat16 else ptx.mma_f16
    pack = ptx.pack_bf16 if is_bfloat16 else ptx.pack_f16
    cp_async_16, cp_async_wait = ptx.cp_async_16, ptx.cp_async_wait
    ldmatrix_x4, ldmatrix_x4_trans, named_barrier = ptx.ldmatrix_x4, ptx.ldmatrix_x4_trans, ptx.named_barrier
    load_shared_4, store_shared_4 = ptx.load_shared_4, ptx.store_shared_4
    load_shared_float, store_shared, store_global_2 = ptx.load_shared_float, ptx.store_shared, ptx.store_global_2
    shared_address = ptx.shared_address

    inline = cuda.jit(device=True, forceinline=True)
    lane_a, lane_b, lane_b_trans, lane_weight = map(inline, (place_a, place_b, place_b_trans, place_weight))

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
    def copy_piece(c, tile, pool, row, warp, lane):
        """Start this thread's copy number c of COPIES of a tile; lane l knows the pool row of tile row warp + WARPS l.

        All lanes copy neighbouring chunks of one row; what a row has more than a multiple of 32 chunks (the 8 of the
        rope part) is copied four rows at once.
        """
        if c < ROWS_EACH * FULL:
            j, first = c // FULL, 512 * (c % FULL)
        else:
            j, first = AT_ONCE * (c - ROWS_EACH * FULL) + lane // LANES, 512 * FULL
        pool_row = np.uint32(cuda.shfl_sync(ALL_LANES, np.int32(row), j))
        tile_row = warp + WARPS * j
        size = np.uint32(16) - ((pool_row >> np.uint32(27)) & np.uint32(16))
        source = pool + np.uint64(pool_row & ~MISSING) * np.uint64(ROW_BYTES)
        if c < ROWS_EACH * FULL:
            target = tile + tile_row * ROW_BYTES + ((lane ^ (tile_row & 7)) << 4) + first
            cp_async_16(target, source + np.uint64((lane << 4) + first), size)
        else:
            chunk = lane & (LANES - 1)
            target = tile + tile_row * ROW_BYTES + ((chunk ^ (tile_row & 7)) << 4) + first
            cp_async_16(target, source + np.uint64((chunk << 4) + first), size)

    @inline
    def copy_pieces(i, tile, pool, row, warp, lane):
        """Start the copies that go with score step i."""
        for c in range(COPIES_EACH):
            if i * COPIES_EACH + c < COPIES:
                copy_piece(i * COPIES_EACH + c, tile, pool, row, warp, lane)

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
    def score_step(i, held, q_even, k_even, scores):
        """Add step i of this warp, 16 columns of Q and K, to its 32 x KEYS / 2 scores."""
        if i < HELD:
            h = 8 * i
            a0, a1, a2, a3 = held[h], held[h + 1], held[h + 2], held[h + 3]
            a4, a5, a6, a7 = held[h + 4], held[h + 5], held[h + 6], held[h + 7]
        else:
            address = (q_even ^ np.uint32(64 * (i & 1))) + np.uint32((i >> 1) * 128 - HELD_STRIDE)
            a0, a1, a2, a3 = ldmatrix_x4(address)
            a4, a5, a6, a7 = ldmatrix_x4(address + np.uint32(16 * Q_STRIDE))
        place = (k_even ^ np.uint32(64 * (i & 1))) + np.uint32((i >> 1) * 128)
        for n in range(PAIRS):
            b0, b1, b2, b3 = ldmatrix_x4(place + np.uint32(16 * n * ROW_BYTES))
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
    def put_out_broken_rows(tile, thread):
        """Write zeros over the values of keys that have a NaN or an infinity: 0 x NaN would reach who doesn't see them.

        Who does see such a key has a score that is not finite either, and so has its weight. Four threads for a row.
        """
        first = tile + np.uint32((thread >> 2) * ROW_BYTES + (thread & 3) * (LATENT // 2))
        broken = np.uint32(0)
        i = np.int32(0)
        while i < LATENT // 32:  # 16 bytes at a time; a loop that stays one, since few tiles need it
            for word in load_shared_4(first + np.uint32(16 * i)):
                bits = np.float32(word).view(np.uint32) & EXPONENTS
                broken |= np.uint32((bits & np.uint32(0xFFFF)) == EXPONENT)
                broken |= np.uint32((bits >> np.uint32(16)) == EXPONENT)
            i += np.int32(1)
        broken |= np.uint32(cuda.shfl_xor_sync(ALL_LANES, np.int32(broken), 1))
        broken |= np.uint32(cuda.shfl_xor_sync(ALL_LANES, np.int32(broken), 2))
        i = np.int32(0)
        while i < LATENT // 32 and broken != 0:
            place = first + np.uint32(16 * i)
            store_shared_4(place, np.float32(0), np.float32(0), np.float32(0), np.float32(0))
            i += np.int32(1)

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
        """Round the weights of row lane // 4 to 16 bits and put them where the messages were."""
        for half in range(2):
            for n in range(2 * PAIRS):
                w = HALF // 2 * half + 2 * n
                chunk = (key_half ^ half) * 2 * PAIRS + n
                place = inbox + np.uint32(lane_weight(lane, chunk))
                store_shared(place, pack(weights[w], weights[w + 1]))

    @inline
    def add_values(acc, values, p_first, v_tile):
        """Add the tile's values, weighed: ROWS x COLUMNS, 16 keys at a time."""
        for k in range(KEYS // 16):
            for n in range(N_TILES // 2):
                place = np.uint32((n >> 2) * 128 + k * 16 * ROW_BYTES)
                v = 4 * n
                values[v], values[v + 1], values[v + 2], values[v + 3] = ldmatrix_x4_trans(
                    (v_tile ^ np.uint32(32 * (n & 3))) + place
                )
            for m in range(M_TILES):
                a0, a1, a2, a3 = ldmatrix_x4((p_first ^ np.uint32(32 * k)) + np.uint32(2 * m * INBOX))
                for n in range(N_TILES):
                    s = 4 * (m * N_TILES + n)
                    b0, b1 = values[2 * n], values[2 * n + 1]
                    acc[s], acc[s + 1], acc[s + 2], acc[s + 3] = mma(
                        a0, a1, a2, a3, b0, b1, acc[s], acc[s + 1], acc[s + 2], acc[s + 3]
                    )

    @cuda.jit(lto=False)
    def tensor_core_kernel(q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count, scale, out, lse):
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

        Launch: grid (ceil(N * H / ROWS), splits, B), block `Tiling.threads`, `Tiling.shared_bytes` of dynamic shared
        memory; for D_c 512 and D_r 64: 64 rows, 256 threads and 229,776 bytes.
        Needs: compute capability 8.0; fewer than 2^31 rows in the pool and pairs in a request.
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
        out_address = array_address(out) + np.uint64(first_out * (4 * LATENT))

        pages, page_size = np.uint32(kv_pool.shape[0]), np.uint32(kv_pool.shape[1])
        prefix = np.int32(max(0, prefix_lengths[b]))
        end = np.int32(min(np.int64(prefix) + nodes, np.int64(block_table.shape[1]) * page_size))
        tiles = np.int64((end + KEYS - 1) // KEYS)
        tile = np.int32(tiles * split // splits)
        last_tile = np.int32(tiles * (split + 1) // splits)
        copy_end = min(end, last_tile * KEYS)
        if first_pair >= used or tile >= last_tile:  # for the whole block, so no barrier is left waiting
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
        missing_flag = rescales + np.uint32(4 * ROWS)  # float32: 1 once a row in sight has no page
        if cuda.threadIdx.x == 0:
            store_shared(missing_flag, np.float32(0))

        # Q: the columns that will be held in registers pass through the other tile's buffer, which is free now.
        staging = tiles_shared + np.uint32(((tile + 1) & 1) * TILE)
        q_row = array_address(q) + np.uint64((np.int64(b) * pairs + first_pair) * ROW_BYTES)
        for row in range(warp, ROWS, WARPS):
            there = first_pair + row < used
            for chunk in range(lane, CHUNKS, 32):
                place = (chunk ^ (row & 7)) << 4
                if chunk < 4 * HELD:
                    target = staging + np.uint32(row * HELD_STRIDE + place)
                else:
                    target = q_shared + np.uint32(row * Q_STRIDE + place - HELD_STRIDE)
                source = q_row + np.uint64((row * ROW_BYTES if there else 0) + chunk * 16)
                cp_async_16(target, source, 16 if there else 0)
        # The first tile; the rows of the one after it are looked up a tile ahead, while there is time to wait.
        pool = array_address(kv_pool)
        copied = np.int32(warp + WARPS * (lane & (ROWS_EACH - 1)))
        key = np.int32(tile * KEYS + copied)
        row = pool_row(look_up(block_table, b, key, end, page_size), key, copy_end, pages, page_size)
        for c in range(COPIES):
            copy_piece(c, tiles_shared + np.uint32((tile & 1) * TILE), pool, row, warp, lane)
        page = look_up(block_table, b, np.int32(key + KEYS), end, page_size)
        cp_async_wait()
        cuda.syncthreads()  # Q and the first tile are complete, and the flag is 0
        if key < copy_end and row == MISSING:
            store_shared(missing_flag, np.float32(1))

        # What this warp does. Scores: rows of `group`, keys of `key_half`, steps 2 i + `step_half`. Softmax: the
        # eight rows of `octet`. Values: its own COLUMNS.
        group, octet = warp >> 2, warp & 3
        key_half, step_half = octet >> 1, octet & 1
        q_place = lane_a(lane, Q_STRIDE) ^ (step_half << 5)
        q_even = q_shared + np.uint32(group * 32 * Q_STRIDE + q_place)
        held_even = staging + np.uint32(group * 32 * HELD_STRIDE + (lane_a(lane, HELD_STRIDE) ^ (step_half << 5)))
        k_even = np.uint32(key_half * (KEYS // 2) * ROW_BYTES + (lane_b(lane, ROW_BYTES) ^ (step_half << 5)))
        chunk = warp * (COLUMNS // 8)
        v_first = np.uint32((lane_b_trans(lane, ROW_BYTES) ^ ((chunk & 7) << 4)) + (chunk >> 3) * 128)
        group_inboxes = inboxes + np.uint32(4 * group * INBOX)
        inbox = group_inboxes + np.uint32(octet * INBOX)
        # Weights of rows 8 r .. 8 r + 7 are in inbox r: rows 8 to 15 of an A operand are INBOX further, not 8 rows.
        p_first = inboxes + np.uint32(((lane >> 3) & 1) * INBOX + (lane_a(lane, 128) & ~1024))
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
        values = cuda.local.array(N_VALUES, np.uint32)
        for i in range(N_ACC):
            acc[i] = np.float32(0)
        largest, total = NOTHING, np.float32(0)  # of row my_row, base 2; `total` of this lane's keys alone
        factor = scale * LOG2_E
        cuda.syncthreads()  # all have taken their part of Q from `staging`

        while tile < last_tile:
            tile_shared = tiles_shared + np.uint32((tile & 1) * TILE)
            next_shared = tiles_shared + np.uint32(((tile + 1) & 1) * TILE)
            key = np.int32((tile + 1) * KEYS + copied)
            row = pool_row(page, key, copy_end, pages, page_size)
            if key < copy_end and row == MISSING:
                store_shared(missing_flag, np.float32(1))

            # 1. Scores: 32 rows x KEYS / 2 keys, half of the steps. One copy of the next tile is started at each step:
            # a burst of them would keep ldmatrix waiting.
            k_tile = tile_shared + k_even
            for i in range(N_SCORES):
                scores[i] = np.float32(0)
            # Three loops: the compiler unrolls one of 6 steps for certain, one of 18 when it likes to.
            for i in range(THIRD):
                score_step(i, held, q_even, k_tile, scores)
                copy_pieces(i, next_shared, pool, row, warp, lane)
            for i in range(THIRD, 2 * THIRD):
                score_step(i, held, q_even, k_tile, scores)
                copy_pieces(i, next_shared, pool, row, warp, lane)
            for i in range(2 * THIRD, STEPS):
                score_step(i, held, q_even, k_tile, scores)
                copy_pieces(i, next_shared, pool, row, warp, lane)

            page = look_up(block_table, b, np.int32((tile + 2) * KEYS + copied), end, page_size)

            # 2. Exchange.
            send_scores(scores, weights, octet, group_inboxes, lane)
            named_barrier(1 + group, 128)  # the four warps' messages are there
            receive_scores(weights, inbox, lane, factor)

            # 3. Mask, only where not every node sees every row: in the tree, past its end, and where a page is missing.
            if (tile + 1) * KEYS > min(prefix, end) or load_shared_float(missing_flag) != np.float32(0):
                for half in range(2):
                    first_key = tile * KEYS + (key_half ^ half) * (KEYS // 2)
                    bits = visible(ancestor_bits, b, my_node, first_key - prefix)
                    mine = np.int32(first_key + lane)
                    found = pool_row(look_up(block_table, b, mine, end, page_size), mine, end, pages, page_size)
                    bits &= np.uint32(cuda.ballot_sync(ALL_LANES, found != MISSING))
                    bits >>= np.uint32(2 * (lane & 3))
                    for n in range(2 * PAIRS):
                        for e in range(2):
                            if (bits >> np.uint32(8 * n + e)) & np.uint32(1) == 0:
                                weights[HALF // 2 * half + 2 * n + e] = NOTHING

            if (tile + 1) * KEYS > prefix:  # rows of the tree, which not every node sees
                cuda.syncthreads()  # all warps have their scores
                put_out_broken_rows(tile_shared, np.int32(cuda.threadIdx.x))

            # 4. Online softmax of row my_row.
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
            # All weights are there; and the block agrees on whether a maximum has moved.
            if cuda.syncthreads_or(np.int32(grew)):
                for m in range(M_TILES):
                    for h in range(2):
                        x = load_shared_float(rescales + np.uint32((16 * m + 8 * h + (lane >> 2)) * 4))
                        for n in range(N_TILES):
                            s = 4 * (m * N_TILES + n) + 2 * h
                            acc[s] *= x
                            acc[s + 1] *= x

            # 5. Values.
            add_values(acc, values, p_first, tile_shared + v_first)

            # The copies of the next tile have been started. Past the last tile they were zeros and nobody reads them.
            tile += np.int32(1)
            cp_async_wait()
            cuda.syncthreads()  # the next tile is complete, and this one is done with

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
        for m in range(M_TILES):
            for h in range(2):
                row_out = 16 * m + 8 * h + (lane >> 2)
                x = load_shared_float(rescales + np.uint32(row_out * 4))
                if first_pair + row_out < pairs:
                    address = out_address + np.uint64(row_out * (4 * LATENT) + warp * (4 * COLUMNS) + (lane & 3) * 8)
                    for n in range(N_TILES):
                        s = 4 * (m * N_TILES + n) + 2 * h
                        v0 = acc[s] * x if x != np.float32(0) else np.float32(0)
                        v1 = acc[s + 1] * x if x != np.float32(0) else np.float32(0)
                        store_global_2(address + np.uint64(32 * n), v0, v1)

    return tensor_core_kernel


def choose_splits(blocks: int, tiles: int, multiprocessors: int, rows: int = 64) -> int:
    """Return how many splits finish `blocks` blocks of `tiles` tiles first, one block at a time on a multiprocessor.

    Counted in the time of one tile: a block's own start and end take `_BLOCK_OVERHEAD`; the last wave of blocks
    takes as long as a full one; and merging takes `_MERGE_OVERHEAD` and reads the parts.

    >>> choose_splits(33, 128, 132), choose_splits(264, 128, 132)
    (4, 1)
    """
    best, best_time = 1, math.inf
    for splits in range(1, min(MAX_SPLITS, max(1, tiles // 2)) + 1):
        waves = -(-blocks * splits // multiprocessors)
        time = waves * (-(-tiles // splits) + _BLOCK_OVERHEAD)
        if splits > 1:
            time += _MERGE_OVERHEAD + blocks * splits * rows * _MERGE_EACH
        if time < best_time:
            best, best_time = splits, time
    return best


_BLOCK_OVERHEAD = 3.0
_MERGE_OVERHEAD = 1.0
_MERGE_EACH = 4096 / 3.5e12 / 2.8e-6  # a row's part written and read, at 3.5 TB/s, over 2.8 us for a tile


def launch_tensor_core(
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
    tiling: Tiling | None = None,
) -> None:
    """Start `tensor_core_kernel`, and the merge if there are splits, on arrays that `tree_attention` has checked.

    `splits` and `tiling` None leave them to `choose_splits` and `choose_tiling`. The lengths are on the device, so
    the splits go by the most rows that the block table has room for.
    """
    width, latent_width = q.shape[3], out.shape[3]
    fault = why_not(q, kv_pool, latent_width)
    if fault:
        raise ValueError(f"{fault} (other versions of tree_attention take it)")
    if tiling is None:
        tiling = choose_tiling(width, latent_width, shared_memory_per_block())
    kernel = make_tensor_core_kernel(tiling, bool(is_bfloat16))
    inputs = (q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count, scale)
    launch_in_splits(kernel, tiling, inputs, out, lse, stream, splits)


def launch_in_splits(
    kernel: Any, tiling: Any, inputs: tuple[Any, ...], out: Any, lse: Any, stream: Any, splits: int | None
) -> None:
    """Start `kernel`, and the merge if there are splits; None leaves their number to `choose_splits`.

    The lengths are on the device, so the splits go by the most rows that the block table has room for.
    """
    q, kv_pool, block_table = inputs[:3]
    batch, nodes, heads, width = q.shape
    pairs = nodes * heads
    blocks = -(-pairs // tiling.rows)
    if splits is None:
        tiles = -(-block_table.shape[1] * kv_pool.shape[1] // tiling.keys)
        multiprocessors = cuda.get_current_device().MULTIPROCESSOR_COUNT
        splits = choose_splits(blocks * batch, tiles, multiprocessors, tiling.rows)
    parts, part_lse = out.reshape(out.size), lse.reshape(lse.size)
    if splits > 1:
        parts, part_lse = split_buffers(splits, batch * pairs, tiling.latent_width, stream)
    arguments = (q.reshape(batch, pairs, width), *inputs[1:], parts, part_lse)
    _allow_shared_memory(kernel, arguments, tiling.shared_bytes)
    kernel[(blocks, splits, batch), tiling.threads, stream, tiling.shared_bytes](*arguments)
    if splits > 1:
        launch_merge(parts, part_lse, splits, out, lse, stream)


def why_not(q: Any, kv_pool: Any, latent_width: int) -> str | None:
    """Return why this version can't take these device arrays on this machine, in one line, or None when it can."""
    fault = why_not_these("tensor_core", SHAPES, q, kv_pool, latent_width)
    return fault or why_not_here(q.shape[3], latent_width)


def why_not_these(version: str, shapes: Any, q: Any, kv_pool: Any, latent_width: int) -> str | None:
    """Return why a tensor-core `version` for rows of `shapes` can't take these device arrays, in one line, or None."""
    width = q.shape[3]
    if not ON_GPU:
        return f"version: got '{version}', needs a GPU with tensor cores: the simulator has none"
    if q.dtype not in (np.dtype(np.uint16), np.dtype(np.float16)):
        return f"q: got {q.dtype}, version '{version}' needs float16 or uint16 (bfloat16)"
    if (latent_width, width - latent_width) not in shapes:
        needed = " or ".join(f"{latent} + {rope}" for latent, rope in shapes)
        return f"q: got rows of {latent_width} + {width - latent_width}, version '{version}' needs {needed}"
    for name, array in (("q", q), ("kv_pool", kv_pool)):
        address = array.__cuda_array_interface__["data"][0]
        if address % 16:
            return f"{name}: got address {address:#x}, version '{version}' needs a multiple of 16 bytes"
    if kv_pool.shape[0] * kv_pool.shape[1] >= 2**31:
        return f"kv_pool: got {kv_pool.shape[0] * kv_pool.shape[1]} rows, version '{version}' needs fewer than 2^31"
    return None


def why_not_here(width: int, latent_width: int) -> str | None:
    """Return what this GPU lacks for rows of one of `SHAPES`, in one line, or None."""
    capability = cuda.get_current_device().compute_capability
    if tuple(capability) < (8, 0):
        return f"version: got 'tensor_core', needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    shared = shared_memory_per_block()
    if choose_tiling(width, latent_width, shared) is None:
        least = Tiling(width, latent_width, 1, 32, 8).shared_bytes
        return f"version: got 'tensor_core', needs {least} bytes of shared memory a block, this GPU has {shared}"
    return None


def _driver() -> Any:
    """Return CUDA's driver API, which comes with numba-cuda and is not there without."""
    return importlib.import_module("cuda.bindings.driver")


def shared_memory_per_block() -> int:
    """Return the most dynamic shared memory that a block of the current device may ask for."""
    return _shared_memory_of(cuda.get_current_device().id)


@functools.cache
def _shared_memory_of(device: int) -> int:
    driver = _driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    error, value = driver.cuDeviceGetAttribute(attribute, device)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuDeviceGetAttribute answers {error}")
    return int(value)


_allowed: set[tuple[Any, Any, int]] = set()  # kernel, types of its arguments, device


def _allow_shared_memory(kernel: Any, arguments: tuple[Any, ...], shared_bytes: int) -> None:
    """Compile `kernel` for `arguments` if need be, and allow it more than the 48 KB that every kernel may have here."""
    types = tuple(kernel.typeof_pyval(argument) for argument in arguments)
    device = cuda.get_current_device().id
    if (kernel, types, device) in _allowed:
        return
    driver = _driver()
    kernel.compile(types)
    handle = kernel.overloads[types]._codelibrary.get_cufunc().kernel.handle
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, handle, device)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuKernelSetAttribute answers {error} for {shared_bytes} bytes of shared memory")
    _allowed.add((kernel, types, device))
