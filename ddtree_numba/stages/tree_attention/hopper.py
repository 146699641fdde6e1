"""Rung 5: warpgroup instructions, whose operands the tensor cores fetch from shared memory themselves.

What changed against `tensor_core`: a product is one `wgmma` of 64 rows for four warps (`wgmma.py`). There are no
fragments to load and no addresses for each lane, which is what the rung before waited for, and it runs at twice the
pace of `mma.sync`. It also runs by itself: while one warpgroup computes exponentials, the other one's product is under
way.

A block has 64 rows and two warpgroups, and goes through its tiles of 64 keys in pairs::

    warpgroup 0   scores 0  softmax 0  values 0  values 1  scores 2 ...
    warpgroup 1   scores 1  values 0  softmax 1  values 1  scores 3 ...

Each warpgroup has the scores of every other tile, all 64 rows, so that a row lies in four lanes and its maximum takes
two shuffles. And it has half of the 512 output columns, of every tile: 128 registers of a thread. So the weights
of a tile go to the other warpgroup through shared memory, 8 KB, and the new maxima with them. The warpgroup's own
product takes the weights from registers: accumulators of one `wgmma` are laid out as A of the next.

A third warpgroup does nothing but copy (`cp.async`), into whichever half of a tile's columns has become free: a half is
free when the warpgroup that has these columns has added their values. Mbarriers say what is free and what is complete,
so nobody waits for anybody else. The order above is what makes that work: with `values 1` after `scores 2` the copies
of one tile waited for the scores of the next. Once Q is there, no barrier counts all threads of the block: the copying
warps end before the others. Copying takes few registers and multiplying takes many, so the third warpgroup gives most
of its own away (`setmaxnreg`).

The shared memory holds Q (74 KB), two tiles (147 KB) and the weights of one. The other tile's weights take the
place of Q's rope columns, of which each warpgroup keeps its copy in 16 registers.

What it buys, measured on an H200 (8 requests, 33 nodes, 64 heads, prefix 8192, bfloat16): 488 us, 620 TFLOP/s, where
`tensor_core` takes 986 and three operations of torch 1178. On the way: 725 us with `values 1` after `scores 2`; 570 us
with each warpgroup copying for itself, which took a sixth of its time; 478 us before rows that are not finite were kept
from nodes that do not see them.

What it costs: compute capability 9.0 and no other, rows of 512 + 64 and no others, and 231 KB of shared memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.ptx import array_address, exp2
from ddtree_numba.stages.tree_attention import mma as ptx
from ddtree_numba.stages.tree_attention import wgmma
from ddtree_numba.stages.tree_attention.tensor_core import launch_in_splits, shared_memory_per_block, why_not_these

__all__ = ["HopperTiling", "launch_hopper", "make_hopper_kernel", "why_not", "why_not_here"]

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
ALL_LANES = 0xFFFFFFFF
NOTHING = np.float32(-np.inf)  # the score of a key that is not seen

SLACK = np.float32(8)
"""A row's maximum is left alone until a score passes it by more than this (base 2): weights stay below 2^8."""

MISSING = np.uint32(0x80000000)
"""Set in a pool row's number when there is no row to copy: zeros are written instead."""

WIDTH, LATENT, ROWS, KEYS = 576, 512, 64, 64
BLOCK = wgmma.BLOCK_BYTES
BLOCKS = WIDTH // 64  # of 64 columns, in Q and in a tile
TILE = BLOCKS * BLOCK
ROW_BYTES = 2 * WIDTH
HALF = LATENT // 2  # output columns of a warpgroup
ROPE = LATENT // 64  # the block of the rope columns


class HopperTiling(NamedTuple):
    """How a block cuts its work; nothing to choose yet."""

    rows: int = ROWS
    """(node, head) pairs of a block."""
    keys: int = KEYS
    """Latent rows of a tile."""
    latent_width: int = LATENT
    """D_c."""
    threads: int = 384
    """Threads of a block: two warpgroups that multiply and one that copies."""
    shared_bytes: int = 1024 + 3 * TILE + BLOCK + 2 * 2 * 4 * ROWS + 88
    """Bytes of dynamic shared memory, with what aligning the start may take."""


@functools.cache
def make_hopper_kernel(is_bfloat16: bool) -> Any:
    """Return `hopper_kernel` for one number format."""
    kind = "bf16" if is_bfloat16 else "f16"
    EXPONENT = np.uint32(0x7F80 if is_bfloat16 else 0x7C00)  # all ones: infinity or NaN
    EXPONENTS = np.uint32(int(EXPONENT) * 0x10001)
    pack = ptx.pack_bf16 if is_bfloat16 else ptx.pack_f16
    score_from_shared, score_from_registers = wgmma.score_from_shared[kind], wgmma.score_from_registers[kind]
    value_from_shared, value_from_registers = wgmma.value_from_shared[kind], wgmma.value_from_registers[kind]
    fence_scores, fence_values, wgmma_commit = wgmma.fence_scores, wgmma.fence_values, wgmma.wgmma_commit
    more_registers, fewer_registers = wgmma.more_registers, wgmma.fewer_registers
    wait_for_scores, wait_for_values, copies_arrive = wgmma.wait_for_scores, wgmma.wait_for_values, wgmma.copies_arrive
    cp_async_16, cp_async_wait, ldmatrix_x4 = ptx.cp_async_16, ptx.cp_async_wait, ptx.ldmatrix_x4
    mbarrier_init, mbarrier_arrive, mbarrier_done = ptx.mbarrier_init, ptx.mbarrier_arrive, ptx.mbarrier_done
    named_barrier = ptx.named_barrier
    fence_async, shared_address = ptx.fence_async, ptx.shared_address
    load_shared_4, store_shared_4 = ptx.load_shared_4, ptx.store_shared_4
    load_shared_float, store_shared, store_global_2 = ptx.load_shared_float, ptx.store_shared, ptx.store_global_2
    inline = cuda.jit(device=True, forceinline=True)
    swizzled, descriptor = inline(wgmma.swizzled), inline(wgmma.descriptor)

    @inline
    def wait(barrier, phase):
        """Wait for a phase of an mbarrier to end, and let the tensor cores see what has been written until then."""
        while mbarrier_done(barrier, phase) == 0:
            pass
        fence_async()

    @inline
    def look_up(block_table, b, index):
        """Return page number `index` of a request, or its last. Nothing waits for the answer here."""
        return np.uint32(block_table[b, min(index, np.uint32(block_table.shape[1] - 1))])

    @inline
    def pool_row(page, offset, key, end, pages, page_size):
        """Return the pool row of a request's row `key`, given its page and place there; `MISSING` if there is none."""
        row = MISSING
        if key < end and page < pages:
            row = page * page_size + offset
        return np.uint32(row)

    @inline
    def further(block_table, b, page, at, stride, end, pages, page_size, missing_flag):
        """Return the pool row of the row `at` in `page`; then the page and the place of the row that is a tile further.

        A place `at` is a row's number, the index of its page and its offset there; `stride` is a tile in whole pages
        and further rows, so that no division is needed. And the next page's number is asked for long before it is
        used.
        """
        key, index, offset = at
        row = pool_row(page, offset, key, end, pages, page_size)
        if key < end and row == MISSING:
            store_shared(missing_flag, np.float32(1))
        index, offset = index + stride[0], offset + stride[1]
        if offset >= page_size:
            index, offset = index + np.uint32(1), offset - page_size
        at = np.int32(key + KEYS), np.uint32(index), np.uint32(offset)
        return row, look_up(block_table, b, at[1]), at

    @inline
    def copy_half(pool, row, tile, half, lane, thread):
        """Start the copies of one warpgroup's columns of a tile, and of half of the rope's.

        A thread copies chunk `thread` % 8 of every block, of rows `thread` / 8 + 0, 16, 32 and 48. Lane l knows the
        pool row of the l-th of its warp's 16 rows.
        """
        chunk = thread & 7
        place = tile + np.uint32(swizzled(thread >> 3, chunk))
        for k in range(4):
            pool_row = np.uint32(cuda.shfl_sync(ALL_LANES, np.int32(row), (lane >> 3) + 4 * k))
            size = np.uint32(16) - ((pool_row >> np.uint32(27)) & np.uint32(16))
            source = pool + np.uint64(pool_row & ~MISSING) * np.uint64(ROW_BYTES) + np.uint64(chunk * 16)
            columns = source + np.uint64(half * HALF * 2)
            for block in range(4):
                target = place + np.uint32(half * 4 * BLOCK + block * BLOCK + k * 2048)
                cp_async_16(target, columns + np.uint64(block * 128), size)
            if k >> 1 == half:
                cp_async_16(place + np.uint32(ROPE * BLOCK + k * 2048), source + np.uint64(ROPE * 128), size)

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
    def put_out_broken_rows(tile, thread):
        """Write zeros over the values of keys that have a NaN or an infinity: 0 x NaN would reach who doesn't see them.

        Who does see such a key has a score that is not finite either, and so has its weight. Two threads for a row.
        """
        row, half = thread >> 1, thread & 1
        broken = np.uint32(0)
        i = np.int32(0)
        while i < 32:  # four words at a time; a loop that stays one, since few tiles need it
            place = tile + np.uint32((4 * half + (i >> 3)) * BLOCK + swizzled(row, i & 7))
            for word in load_shared_4(place):
                bits = np.float32(word).view(np.uint32) & EXPONENTS
                broken |= np.uint32((bits & np.uint32(0xFFFF)) == EXPONENT)
                broken |= np.uint32((bits >> np.uint32(16)) == EXPONENT)
            i += np.int32(1)
        broken |= np.uint32(cuda.shfl_xor_sync(ALL_LANES, np.int32(broken), 1))
        i = np.int32(0)
        while i < 32 and broken != 0:
            place = tile + np.uint32((4 * half + (i >> 3)) * BLOCK + swizzled(row, i & 7))
            store_shared_4(place, np.float32(0), np.float32(0), np.float32(0), np.float32(0))
            i += np.int32(1)

    @inline
    def start_scores(scores, q, rope, tile):
        """Start the scores of a tile: 32 steps of 16 columns with Q in shared memory, and the rope's four."""
        a, b = descriptor(q, 0), descriptor(tile, 0)
        fence_scores(scores)
        for block in range(ROPE):
            for step in range(4):
                offset = np.uint64(block * (BLOCK >> 4) + step * 2)
                score_from_shared(scores, a + offset, b + offset, np.uint32(block + step > 0))
        for step in range(4):
            offset = np.uint64(ROPE * (BLOCK >> 4) + step * 2)
            r = 4 * step
            score_from_registers(scores, rope[r], rope[r + 1], rope[r + 2], rope[r + 3], b + offset, np.uint32(1))
        wgmma_commit()

    @inline
    def scale_accumulators(acc, x0, x1):
        """Multiply the accumulators of the two rows of a thread."""
        for i in range(4):
            for n in range(8):
                s = 32 * i + 4 * n
                acc[s] *= x0
                acc[s + 1] *= x0
                acc[s + 2] *= x1
                acc[s + 3] *= x1

    @inline
    def mask_row(scores, first, bits, member):
        """Put out the scores of a row, of which bit k of the two words of `bits` says that key k is seen."""
        for word in range(2):
            w = bits[word] >> np.uint32(2 * member)
            for n in range(4):
                for e in range(2):
                    if (w >> np.uint32(8 * n + e)) & np.uint32(1) == 0:
                        scores[16 * word + 4 * n + first + e] = NOTHING

    @cuda.jit(lto=False, launch_bounds=(384, 1))
    def hopper_kernel(q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count, scale, out, lse):
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

        Launch: grid (ceil(N * H / ROWS), splits, B), block 384, `HopperTiling.shared_bytes` of dynamic shared memory.
        Needs: compute capability 9.0; D_c 512, D_r 64; fewer than 2^31 rows in the pool and pairs in a request.
        """
        dynamic = cuda.shared.array(0, np.uint8)
        base = (shared_address(dynamic) + np.uint32(1023)) & np.uint32(0xFFFFFC00)
        thread = np.int32(cuda.threadIdx.x & 127)  # of its warpgroup
        group = np.int32(cuda.shfl_sync(ALL_LANES, cuda.threadIdx.x >> 7, 0))  # a number that all lanes share
        lane, warp = thread & 31, thread >> 5
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
        first_tile = np.int32(tiles * split // splits)
        count = np.int32(tiles * (split + 1) // splits) - first_tile
        if first_pair >= used or count <= 0:  # for the whole block, so no barrier is left waiting
            for row in range(cuda.threadIdx.x >> 5, min(ROWS, pairs - first_pair), 12):
                if splits == 1:  # parts that saw nothing are not read by the merge
                    for column in range(2 * lane, LATENT, 64):
                        zeros = out_address + np.uint64(row * (4 * LATENT) + column * 4)
                        store_global_2(zeros, np.float32(0), np.float32(0))
                if lane == 0:
                    lse[first_out + row] = NOTHING
            return

        q_shared = base
        tiles_shared = q_shared + np.uint32(TILE)
        weights_0 = tiles_shared + np.uint32(2 * TILE)  # of even tiles; of odd ones:
        weights_1 = q_shared + np.uint32(ROPE * BLOCK)
        maxima = weights_0 + np.uint32(BLOCK)  # one float32 for each row, of the even and of the odd tile
        totals = maxima + np.uint32(2 * 4 * ROWS)  # one float32 for each row, of each warpgroup
        complete = totals + np.uint32(2 * 4 * ROWS)  # a barrier for each place: the tile is there
        weighed = complete + np.uint32(16)  # a barrier for each place: the weights of the tile are there
        freed = weighed + np.uint32(16)  # two barriers for each place: a warpgroup's columns of the tile are done with
        met = freed + np.uint32(32)  # a barrier of the two that multiply: rope columns taken; then: totals there
        missing_flag = met + np.uint32(8)  # float32: 1 once a row in sight has no page
        if cuda.threadIdx.x == 0:
            for place in range(2):
                mbarrier_init(complete + np.uint32(8 * place), 256)
                mbarrier_init(freed + np.uint32(16 * place), 128)
                mbarrier_init(freed + np.uint32(16 * place + 8), 128)
                mbarrier_init(weighed + np.uint32(8 * place), 128)
            mbarrier_init(met, 256)
            store_shared(missing_flag, np.float32(0))

        # Q, a row of 72 chunks for each warp.
        q_row = array_address(q) + np.uint64((np.int64(b) * pairs + first_pair) * ROW_BYTES)
        for row in range(cuda.threadIdx.x >> 5, ROWS, 12):
            there = first_pair + row < used
            for chunk in range(lane, WIDTH // 8, 32):
                target = q_shared + np.uint32((chunk >> 3) * BLOCK + swizzled(row, chunk & 7))
                source = q_row + np.uint64((row * ROW_BYTES if there else 0) + chunk * 16)
                cp_async_16(target, source, 16 if there else 0)
        cp_async_wait()
        fence_async()
        cuda.syncthreads()  # Q is complete, and the barriers are ready

        if group == 2:  # copies, and nothing else
            fewer_registers()
            pool = array_address(kv_pool)
            # This lane knows the pool row of one row of the tile to be copied, and the page of the row a tile further.
            key = np.int32(first_tile * KEYS + 4 * warp + (lane & 3) + 16 * ((lane >> 2) & 3))
            at = key, np.uint32(key) // page_size, np.uint32(key) % page_size
            stride = np.uint32(KEYS) // page_size, np.uint32(KEYS) % page_size
            page = look_up(block_table, b, at[1])
            t = np.int32(0)
            while t < count:
                row, page, at = further(block_table, b, page, at, stride, end, pages, page_size, missing_flag)
                place = np.uint32(t & 1)
                phase_before = np.uint32(((t >> 1) & 1) ^ 1)
                turn = np.int32(0)
                while turn < 2:
                    half = np.int32(turn ^ (t & 1))  # the one that becomes free first
                    if t >= 2:
                        wait(freed + np.uint32(16) * place + np.uint32(8 * half), phase_before)
                    copy_half(pool, row, tiles_shared + place * np.uint32(TILE), half, lane, thread)
                    turn += np.int32(1)
                # A thread arrives twice: when its copies are there, and at once for what it has said of missing rows.
                copies_arrive(complete + np.uint32(8) * place)
                mbarrier_arrive(complete + np.uint32(8) * place)
                t += np.int32(1)
            cp_async_wait()
            return

        more_registers()  # what the copying warps don't need
        rope = cuda.local.array(16, np.uint32)
        rope_row = 16 * warp + (lane & 15)
        for step in range(4):
            r = 4 * step
            address = weights_1 + np.uint32(swizzled(rope_row, 2 * step + (lane >> 4)))
            rope[r], rope[r + 1], rope[r + 2], rope[r + 3] = ldmatrix_x4(address)
        mbarrier_arrive(met)

        # A thread has rows my_row and my_row + 8 of all scores and values, and of 8 columns 2 `member` and the next.
        member = lane & 3
        my_row = 16 * warp + (lane >> 2)
        node_0 = min(first_pair + my_row, used - 1) // heads
        node_1 = min(first_pair + my_row + 8, used - 1) // heads
        v_first = np.uint32(group * 4 * BLOCK)
        p_place = np.uint32(swizzled(my_row, 0) + 4 * member)

        acc = cuda.local.array(128, np.float32)
        scores = cuda.local.array(32, np.float32)
        weights = cuda.local.array(16, np.uint32)
        for i in range(4):
            for n in range(32):
                acc[32 * i + n] = np.float32(0)
        for i in range(32):
            scores[i] = np.float32(0)
        largest_0, largest_1 = NOTHING, NOTHING  # of the two rows, base 2
        total_0, total_1 = np.float32(0), np.float32(0)  # of this thread's weights of its own tiles
        factor = scale * LOG2_E
        # All have taken the rope columns of Q, whose place is for weights now. (For other warps' rows `weighed` would
        # do; but lanes that have read a row together need a barrier before one of them writes there.)
        wait(met, np.uint32(0))

        pair = np.int32(0)
        while pair < count:
            # 1. Scores of this warpgroup's own tile.
            own = np.int32(pair + group)
            own_place = np.uint32(group)
            phase = np.uint32((pair >> 1) & 1)
            if own < count:
                wait(complete + own_place * np.uint32(8), phase)
                start_scores(scores, q_shared, rope, tiles_shared + own_place * np.uint32(TILE))
                wait_for_scores(scores)

            # The even tile's values come before the odd one's: warpgroup 0 begins with its own, 1 with the other's.
            turn = np.int32(0)
            while turn < 2:
                place = np.uint32(turn)
                t = np.int32(pair + turn)
                if t < count:
                    tile_shared = tiles_shared + place * np.uint32(TILE)
                    v = descriptor(tile_shared + v_first, 1)
                    x0, x1 = np.float32(1), np.float32(1)
                    if turn == group:
                        # 2. Mask, where not every node sees every row: in the tree, past its end, with a page missing.
                        first_key = np.int32((first_tile + t) * KEYS)
                        for i in range(32):
                            scores[i] *= factor
                        if first_key + KEYS > min(prefix, end) or load_shared_float(missing_flag) != np.float32(0):
                            bits_0 = cuda.local.array(2, np.uint32)
                            bits_1 = cuda.local.array(2, np.uint32)
                            for word in range(2):
                                seen = np.int32(first_key + 32 * word + lane)
                                its_page = look_up(block_table, b, np.uint32(seen) // page_size)
                                here = pool_row(its_page, np.uint32(seen) % page_size, seen, end, pages, page_size)
                                found = np.uint32(cuda.ballot_sync(ALL_LANES, here != MISSING))
                                slot = np.int32(first_key + 32 * word - prefix)
                                bits_0[word] = found & visible(ancestor_bits, b, node_0, slot)
                                bits_1[word] = found & visible(ancestor_bits, b, node_1, slot)
                            mask_row(scores, 0, bits_0, member)
                            mask_row(scores, 2, bits_1, member)

                        if first_key + KEYS > prefix:  # rows of the tree, which not every node sees
                            named_barrier(1 + group, 128)  # all four warps have their scores
                            put_out_broken_rows(tile_shared, thread)
                            fence_async()
                            named_barrier(1 + group, 128)

                        # 3. Online softmax in base 2. A row lies in four lanes.
                        highest_0, highest_1 = scores[0], scores[2]
                        for n in range(8):
                            highest_0 = max(highest_0, max(scores[4 * n], scores[4 * n + 1]))
                            highest_1 = max(highest_1, max(scores[4 * n + 2], scores[4 * n + 3]))
                        for distance in (1, 2):
                            highest_0 = max(highest_0, cuda.shfl_xor_sync(ALL_LANES, highest_0, distance))
                            highest_1 = max(highest_1, cuda.shfl_xor_sync(ALL_LANES, highest_1, distance))
                        if highest_0 > largest_0 + SLACK:
                            x0 = exp2(largest_0 - highest_0)
                            largest_0 = highest_0
                        if highest_1 > largest_1 + SLACK:
                            x1 = exp2(largest_1 - highest_1)
                            largest_1 = highest_1
                        # Two maxima of -inf (nothing seen yet) must not be subtracted from each other.
                        shift_0 = largest_0 if largest_0 != NOTHING else np.float32(0)
                        shift_1 = largest_1 if largest_1 != NOTHING else np.float32(0)
                        total_0 *= x0
                        total_1 *= x1
                        p = p_place + (weights_1 if place else weights_0)
                        for n in range(8):
                            s = 4 * n
                            scores[s], scores[s + 1] = exp2(scores[s] - shift_0), exp2(scores[s + 1] - shift_0)
                            scores[s + 2], scores[s + 3] = exp2(scores[s + 2] - shift_1), exp2(scores[s + 3] - shift_1)
                            total_0 += scores[s] + scores[s + 1]
                            total_1 += scores[s + 2] + scores[s + 3]
                            weights[2 * n] = pack(scores[s], scores[s + 1])
                            weights[2 * n + 1] = pack(scores[s + 2], scores[s + 3])
                            store_shared(p ^ np.uint32(16 * n), weights[2 * n])
                            store_shared((p ^ np.uint32(16 * n)) + np.uint32(1024), weights[2 * n + 1])
                        if member == 0:
                            store_shared(maxima + np.uint32(4 * (ROWS * place + my_row)), largest_0)
                            store_shared(maxima + np.uint32(4 * (ROWS * place + my_row + 8)), largest_1)
                        fence_async()  # the tensor cores will read the weights
                        mbarrier_arrive(weighed + place * np.uint32(8))

                        # 4. Its values, with the weights in registers.
                        if cuda.any_sync(ALL_LANES, x0 != np.float32(1) or x1 != np.float32(1)):
                            scale_accumulators(acc, x0, x1)
                        fence_values(acc)
                        for step in range(4):
                            r = 4 * step
                            value_from_registers(
                                acc, weights[r], weights[r + 1], weights[r + 2], weights[r + 3],
                                v + np.uint64(128 * step), np.uint32(1),
                            )  # fmt: skip
                        wgmma_commit()
                        wait_for_values(acc)
                    else:
                        # 5. The values of the other's tile, with its maxima, and its weights from shared memory.
                        wait(complete + place * np.uint32(8), phase)
                        wait(weighed + place * np.uint32(8), phase)
                        now_0 = load_shared_float(maxima + np.uint32(4 * (ROWS * place + my_row)))
                        now_1 = load_shared_float(maxima + np.uint32(4 * (ROWS * place + my_row + 8)))
                        if now_0 != largest_0:
                            x0 = exp2(largest_0 - now_0)
                            largest_0 = now_0
                        if now_1 != largest_1:
                            x1 = exp2(largest_1 - now_1)
                            largest_1 = now_1
                        total_0 *= x0
                        total_1 *= x1
                        if cuda.any_sync(ALL_LANES, x0 != np.float32(1) or x1 != np.float32(1)):
                            scale_accumulators(acc, x0, x1)
                        a = descriptor(weights_1 if place else weights_0, 0)
                        fence_values(acc)
                        for step in range(4):
                            value_from_shared(acc, a + np.uint64(2 * step), v + np.uint64(128 * step), np.uint32(1))
                        wgmma_commit()
                        wait_for_values(acc)

                    # 6. This warpgroup's columns of the tile are done with.
                    mbarrier_arrive(freed + np.uint32(16) * place + np.uint32(8 * group))
                turn += np.int32(1)
            pair += np.int32(2)

        # The totals of the two warpgroups are added, and the sums divided, once.
        for distance in (1, 2):
            total_0 += cuda.shfl_xor_sync(ALL_LANES, total_0, distance)
            total_1 += cuda.shfl_xor_sync(ALL_LANES, total_1, distance)
        mailbox = totals + np.uint32(4 * (ROWS * group + my_row))
        if member == 0:
            store_shared(mailbox, total_0)
            store_shared(mailbox + np.uint32(32), total_1)
        mbarrier_arrive(met)
        wait(met, np.uint32(1))
        other = totals + np.uint32(4 * (ROWS * (1 - group) + my_row))
        total_0 += load_shared_float(other)
        total_1 += load_shared_float(other + np.uint32(32))
        for r in range(2):
            row_out = my_row + 8 * r
            total, largest = (total_1, largest_1) if r else (total_0, largest_0)
            inverse, logarithm = np.float32(0), NOTHING
            if first_pair + row_out < used and total != np.float32(0):
                inverse = np.float32(1) / total
                logarithm = largest * LN_2 + math.log(total)
            if first_pair + row_out < pairs:
                if group == 0 and member == 0:
                    lse[first_out + row_out] = logarithm
                address = out_address + np.uint64(row_out * (4 * LATENT) + group * (4 * HALF) + member * 8)
                for i in range(4):
                    for n in range(8):
                        s = 32 * i + 4 * n + 2 * r
                        v0 = acc[s] * inverse if inverse != np.float32(0) else np.float32(0)
                        v1 = acc[s + 1] * inverse if inverse != np.float32(0) else np.float32(0)
                        store_global_2(address + np.uint64(32 * (8 * i + n)), v0, v1)

    return hopper_kernel


def launch_hopper(
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
) -> None:
    """Start `hopper_kernel`, and the merge if there are splits, on arrays that `tree_attention` has checked.

    `splits` None leaves their number to `choose_splits`.
    """
    fault = why_not(q, kv_pool, out.shape[3])
    if fault:
        raise ValueError(f"{fault} (other versions of tree_attention take it)")
    kernel = make_hopper_kernel(bool(is_bfloat16))
    inputs = (q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count, scale)
    launch_in_splits(kernel, HopperTiling(), inputs, out, lse, stream, splits)


def why_not(q: Any, kv_pool: Any, latent_width: int) -> str | None:
    """Return why this version can't take these device arrays on this machine, in one line, or None when it can."""
    return why_not_these("hopper", ((LATENT, WIDTH - LATENT),), q, kv_pool, latent_width) or why_not_here()


def why_not_here() -> str | None:
    """Return what this GPU lacks, in one line, or None."""
    capability = tuple(cuda.get_current_device().compute_capability[:2])
    if capability != (9, 0):
        return f"version: got 'hopper', needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    needed, shared = HopperTiling().shared_bytes, shared_memory_per_block()
    if needed > shared:
        return f"version: got 'hopper', needs {needed} bytes of shared memory a block, this GPU has {shared}"
    return None
