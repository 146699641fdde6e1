"""Runs a tensor-core kernel's own source without a GPU, on NumPy models of the instructions (`mma.py`, `wgmma.py`).

Numba's simulator knows no warps. Here each thread of a block is a Python thread, one of them running at a time, and
gives way at every instruction that a warp or a block executes together: when all lanes of a warp are at the same
`mma`, `ldmatrix`, shuffle or vote, the model computes it for all 32, and `wgmma` for the 128 of a warpgroup. So
layouts, addresses, exchanges and barriers are checked as they stand in the kernel. Shared memory starts as NaN,
asynchronous copies land as late as the kernel allows, and asynchronous products read their operands then, too. What
this does not find: races, and what a compiler makes of the source.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.stages.tree_attention import mma, wgmma

SHARED_START = 1024 + 16  # where dynamic shared memory begins: real addresses are not 0 either, nor multiples of 128


def _closed_gate() -> threading.Lock:
    """A lock that is taken: `acquire` waits until somebody calls `release`, as often as it is called."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Lane(threading.Thread):
    """One emulated thread. It runs only between `resume` and its next request."""

    def __init__(self, index: int, body: Any, hub: threading.Lock) -> None:
        super().__init__(daemon=True)
        self.index, self.body, self.hub = index, body, hub
        self.turn = _closed_gate()
        self.request: tuple[str, Any, Any] | None = None
        self.answer: Any = None
        self.error: BaseException | None = None
        self.copies: list[tuple[int, np.ndarray]] = []

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.body()
        except BaseException as error:
            self.error = error
        self.request = None
        self.hub.release()

    def ask(self, kind: str, name: Any, data: Any) -> Any:
        self.request = kind, name, data
        self.hub.release()
        self.turn.acquire()
        if self.error is not None:  # the block is being given up
            raise SystemExit
        return self.answer


def _lane() -> _Lane:
    lane = threading.current_thread()
    assert isinstance(lane, _Lane)
    return lane


class Block:
    """One block: its threads, shared memory, barriers, and the global arrays it may touch."""

    def __init__(self, threads: int, shared_bytes: int, arrays: list[np.ndarray], rng: np.random.Generator) -> None:
        self.threads, self.rng = threads, rng
        self.shared = np.full(SHARED_START + shared_bytes, 0xFF, np.uint8)
        self.starts = {id(array): (i + 1) << 40 for i, array in enumerate(arrays)}
        self.global_memory = [array.reshape(-1).view(np.uint8) for array in arrays]
        self.barriers: dict[int, dict[str, int]] = {}  # mbarriers, by address
        self.late: list[tuple[int, list[tuple[int, np.ndarray]]]] = []  # an mbarrier, and the copies that arrive there
        self.products: dict[int, tuple[list[Any], dict[int, np.ndarray]]] = {}  # of each warpgroup, under way

    def memory(self, address: Any, size: int) -> np.ndarray:
        """The bytes of global memory at an address; an AssertionError outside all arrays."""
        array, offset = (int(address) >> 40) - 1, int(address) & ((1 << 40) - 1)
        flat = self.global_memory[array]
        assert offset + size <= flat.size, f"reads past the end of array {array}"
        return flat[offset : offset + size]

    def run(self, body: Any) -> None:
        hub = _closed_gate()
        lanes = [_Lane(t, body, hub) for t in range(self.threads)]
        for lane in lanes:
            lane.start()
        ready = lanes
        try:
            while ready:
                for lane in ready:
                    lane.turn.release()
                    hub.acquire()
                    if lane.error is not None:
                        raise lane.error
                waiting = [lane for lane in lanes if lane.request is not None]
                ready = self._serve(waiting)
                assert ready or not waiting, f"deadlock: {sorted({str(lane.request[:2]) for lane in waiting})}"
        finally:
            for lane in lanes:
                if lane.request is not None:
                    lane.error, lane.request = SystemExit(), None
                    lane.turn.release()
                    hub.acquire()

    def _serve(self, waiting: list[_Lane]) -> list[_Lane]:
        """Answer the requests that are complete; return the lanes that may go on."""
        groups: dict[tuple[str, Any], list[_Lane]] = {}
        for lane in waiting:
            kind, name, _ = lane.request
            together = {"warp": lane.index // 32, "warpgroup": lane.index // 128}
            groups.setdefault((kind, together.get(kind, name)), []).append(lane)
        ready = []
        for (kind, name), members in groups.items():
            if kind == "poll":
                continue
            if kind == "barrier" and len(members) == name[1]:
                answers = [np.int32(any(lane.request[2] for lane in members))] * len(members)
            elif len(members) == {"warp": 32, "warpgroup": 128}.get(kind):
                names = {lane.request[1] for lane in members}
                assert len(names) == 1, f"lanes of one {kind} are at different instructions: {names}"
                operands = [lane.request[2] for lane in members]
                answers = getattr(self, names.pop())(operands) if kind == "warp" else self.multiply(name, operands)
            else:
                continue
            for lane, answer in zip(members, answers, strict=True):
                lane.answer, lane.request = answer, None
            ready += members
        polling = groups.get(("poll", None), [])
        if polling and not ready:  # copies land when nothing else can go on
            for _ in range(1 + len(self.late) // 8):
                self.let_a_copy_land()
        for lane in polling:
            lane.request = None
        return ready + polling

    # What a warp does together.

    def mma_bf16(self, operands: list[Any]) -> list[Any]:
        return self._mma(operands, from_bfloat16)

    def mma_f16(self, operands: list[Any]) -> list[Any]:
        return self._mma(operands, lambda bits: bits.view(np.float16).astype(np.float32))

    def _mma(self, operands: list[Any], widen: Any) -> list[Any]:
        registers = np.array([lane[:6] for lane in operands], np.uint32)
        elements = widen(registers.view(np.uint16).reshape(32, 12))
        sums = np.array([lane[6:] for lane in operands], np.float32)
        return list(map(tuple, mma.mma_model(elements[:, :8], elements[:, 8:], sums).astype(np.float32)))

    def ldmatrix_x4(self, addresses: list[Any], trans: bool = False) -> list[Any]:
        flat = np.array(addresses, np.int64)
        for matrix in flat.reshape(4, 8):
            assert len(set(matrix // 16 % 8)) == 8, "bank conflict: rows of a matrix in the same group of banks"
        halves = mma.ldmatrix_model(self.shared.view(np.uint16), flat, trans=trans)
        return list(map(tuple, halves.view(np.uint32)))

    def ldmatrix_x4_trans(self, addresses: list[Any]) -> list[Any]:
        return self.ldmatrix_x4(addresses, trans=True)

    def shuffle(self, operands: list[Any]) -> list[Any]:
        return [operands[int(source) % 32][0] for _, source in operands]

    def ballot(self, flags: list[Any]) -> list[Any]:
        return [np.uint32(sum(1 << lane for lane, flag in enumerate(flags) if flag))] * 32

    def arrive(self, barrier: int) -> None:
        state = self.barriers[barrier]
        state["left"] -= 1
        if state["left"] == 0:
            state["left"], state["phase"] = state["count"], state["phase"] + 1

    def let_a_copy_land(self) -> None:
        if self.late:
            barrier, data = self.late.pop(int(self.rng.integers(len(self.late))))
            for address, content in data:
                self.shared[address : address + len(content)] = content
            self.arrive(barrier)

    # What a warpgroup does together.

    def multiply(self, group: int, operands: list[Any]) -> list[Any]:
        """Start a product, or (operands None) end all: only now do they read shared memory, and give results.

        In between the accumulators are NaN, for a kernel that does not wait.
        """
        pending, sums = self.products.setdefault(group, ([], {}))
        if operands[0] is not None:
            pending.append(operands)
            for lane in operands:
                if id(lane[0]) not in sums:
                    sums[id(lane[0])] = lane[0].copy()
                    lane[0][:] = np.nan
            return [None] * 128
        for lanes in pending:
            self.finish_product(lanes, sums)
        for lanes in pending:
            for lane in lanes:
                lane[0][:] = sums[id(lane[0])]
        pending.clear()
        sums.clear()
        return [None] * 128

    def finish_product(self, lanes: list[Any], sums: dict[int, np.ndarray]) -> None:
        """Add what one product of a warpgroup gives to its accumulators."""
        memory = self.shared.view(np.uint16)
        accumulators, kind, a, b, add = lanes[0]
        narrow = np.float16 if kind == "f16" else None

        def widen(bits: np.ndarray) -> np.ndarray:
            return from_bfloat16(bits) if narrow is None else bits.view(narrow).astype(np.float32)

        assert all(lane[3] == b for lane in lanes), "descriptors differ within a warpgroup"
        columns, value = 2 * accumulators.size, accumulators.size == 128
        layout = wgmma.accumulator_layout(columns)
        c = np.zeros((64, columns), np.float32)
        c[layout[..., 0], layout[..., 1]] = [sums[id(lane[0])] for lane in lanes]
        if isinstance(a, tuple):
            halves = widen(np.array([lane[2] for lane in lanes], np.uint32).view(np.uint16).reshape(128, 8))
            place = np.tile(mma.A_LAYOUT, (4, 1, 1))
            matrix = np.zeros((64, 16), np.float32)
            matrix[place[..., 0] + 16 * (np.arange(128) // 32)[:, None], place[..., 1]] = halves
        else:
            assert all(lane[2] == a for lane in lanes), "descriptors differ within a warpgroup"
            matrix = widen(wgmma.operand_model(memory, int(a), 64, False))
        c = (c if add else 0) + matrix @ widen(wgmma.operand_model(memory, int(b), columns, value)).T
        for lane, values in zip(lanes, c[layout[..., 0], layout[..., 1]], strict=True):
            sums[id(lane[0])] = values


class Emulator:
    """Stands in for `numba.cuda` and for `mma` in a kernel's module; `run` launches."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.block: Block
        self.index = self.grid = (0, 0, 0)
        self.cuda, self.ptx = self._make_cuda(), self._make_ptx()
        self.wgmma = self._make_wgmma()

    def run(self, kernel: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, *arguments: Any) -> None:
        """Run every block of `kernel`, one after the other."""
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        self.grid = grid
        for z, y, x in np.ndindex(*reversed(grid)):
            self.index = x, y, z
            self.block = Block(threads, shared_bytes, arrays, self.rng)
            self.block.run(lambda: kernel(*arguments))

    def _make_cuda(self) -> Any:
        emulator = self

        def axes(x: int, y: int = 0, z: int = 0) -> Any:
            return SimpleNamespace(x=x, y=y, z=z)

        class Cuda:
            threadIdx = property(lambda _: axes(_lane().index))  # noqa: N815 (CUDA's names)
            blockIdx = property(lambda _: axes(*emulator.index))  # noqa: N815
            gridDim = property(lambda _: axes(*emulator.grid))  # noqa: N815
            shared = SimpleNamespace(array=lambda size, dtype: None)
            local = SimpleNamespace(array=lambda size, dtype: np.full(size, 77, dtype))

            def jit(self, *arguments: Any, **options: Any) -> Any:
                return arguments[0] if arguments else lambda function: function

            def syncthreads(self) -> None:
                _lane().ask("barrier", (0, emulator.block.threads), 0)

            def syncthreads_or(self, flag: Any) -> Any:
                return _lane().ask("barrier", (0, emulator.block.threads), flag)

            def shfl_sync(self, mask: int, value: Any, source: int) -> Any:
                return _lane().ask("warp", "shuffle", (value, source))

            def shfl_xor_sync(self, mask: int, value: Any, distance: int) -> Any:
                return _lane().ask("warp", "shuffle", (value, (_lane().index % 32) ^ distance))

            def ballot_sync(self, mask: int, flag: Any) -> Any:
                return _lane().ask("warp", "ballot", flag)

            def any_sync(self, mask: int, flag: Any) -> Any:
                return _lane().ask("warp", "ballot", flag) != 0

            def syncwarp(self) -> None:
                _lane().ask("warp", "ballot", 0)

        return Cuda()

    def _make_ptx(self) -> Any:
        def together(name: str) -> Any:
            return lambda *operands: _lane().ask("warp", name, operands if len(operands) > 1 else operands[0])

        def shared(address: Any, size: int) -> np.ndarray:
            assert int(address) % size == 0 and int(address) >= SHARED_START, "misaligned, or outside"
            assert int(address) + size <= self.block.shared.size, "past the end of shared memory"
            return self.block.shared[int(address) : int(address) + size]

        def cp_async_16(address: Any, source: Any, size: Any) -> None:
            data = self.block.memory(source, 16).copy() if size else np.zeros(16, np.uint8)
            shared(address, 16)
            _lane().copies.append((int(address), data))

        def cp_async_wait() -> None:
            for address, data in _lane().copies:
                self.block.shared[address : address + 16] = data
            _lane().copies.clear()

        def store_shared(address: Any, value: Any) -> None:
            shared(address, 4)[:] = np.atleast_1d(value).view(np.uint8)

        def store_shared_4(address: Any, *values: Any) -> None:
            shared(address, 16)[:] = np.array(values, np.float32).view(np.uint8)

        def store_global_2(address: Any, *values: Any) -> None:
            self.block.memory(address, 8)[:] = np.array(values, np.float32).view(np.uint8)

        def mbarrier_init(address: Any, count: int) -> None:
            shared(address, 8)
            self.block.barriers[int(address)] = {"count": count, "left": count, "phase": 0}

        def mbarrier_arrive(address: Any) -> None:
            self.block.arrive(int(address))

        def mbarrier_done(address: Any, parity: Any) -> int:
            _lane().ask("poll", None, None)
            return int(self.block.barriers[int(address)]["phase"] % 2 != parity)

        def pack(low: Any, high: Any, narrow: Any) -> Any:
            return narrow(np.array([low, high], np.float32)).view(np.uint32)[0]

        return SimpleNamespace(
            mma_bf16=together("mma_bf16"),
            mma_f16=together("mma_f16"),
            ldmatrix_x4=together("ldmatrix_x4"),
            ldmatrix_x4_trans=together("ldmatrix_x4_trans"),
            named_barrier=lambda name, threads: _lane().ask("barrier", (int(name), threads), 0),
            cp_async_16=cp_async_16,
            cp_async_wait=cp_async_wait,
            store_shared=store_shared,
            store_shared_4=store_shared_4,
            load_shared_4=lambda address: tuple(shared(address, 16).view(np.float32).copy()),
            load_shared_float=lambda address: shared(address, 4).view(np.float32)[0],
            store_global_2=store_global_2,
            mbarrier_init=mbarrier_init,
            mbarrier_arrive=mbarrier_arrive,
            mbarrier_done=mbarrier_done,
            fence_async=lambda: None,
            pack_bf16=lambda low, high: pack(low, high, to_bfloat16),
            pack_f16=lambda low, high: pack(low, high, lambda values: values.astype(np.float16)),
            shared_address=lambda array: np.uint32(SHARED_START),
            array_address=lambda array: np.uint64(self.block.starts[id(array)]),
            exp2=lambda x: np.exp2(np.float32(x)),
        )

    def _make_wgmma(self) -> Any:
        def copies_arrive(barrier: Any) -> None:
            self.block.late.append((int(barrier), list(_lane().copies)))
            _lane().copies.clear()

        def start(kind: str, registers: bool) -> Any:
            def product(c: Any, *operands: Any) -> None:
                a = operands[:4] if registers else operands[0]
                _lane().ask("warpgroup", "multiply", (c, kind, a, *operands[-2:]))

            return product

        def wait(c: Any) -> None:
            _lane().ask("warpgroup", "multiply", None)

        shared, registers = ({kind: start(kind, held) for kind in ("bf16", "f16")} for held in (False, True))
        return SimpleNamespace(
            BLOCK_BYTES=wgmma.BLOCK_BYTES,
            swizzled=wgmma.swizzled,
            descriptor=wgmma.descriptor,
            score_from_shared=shared,
            score_from_registers=registers,
            value_from_shared=shared,
            value_from_registers=registers,
            fence_scores=lambda c: None,
            fence_values=lambda c: None,
            wgmma_commit=lambda: None,
            wait_for_scores=wait,
            wait_for_values=wait,
            copies_arrive=copies_arrive,
            more_registers=lambda: None,
            fewer_registers=lambda: None,
        )
