"""Runs a tensor-core kernel's own source without a GPU, on the NumPy models of the instructions in `mma.py`.

Numba's simulator knows no warps. Here each thread of a block is a Python thread, one of them running at a time, and
gives way at every instruction that a warp or a block executes together: when all lanes of a warp are at the same
`mma`, `ldmatrix`, shuffle or vote, the model computes it for all 32. So fragment layouts, addresses, exchanges and
barriers are checked as they stand in the kernel. Shared memory starts as NaN, and asynchronous copies land as late as
the kernel allows. What this does not find: races, and what a compiler makes of the source.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.stages.tree_attention import mma

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
        self.late: list[tuple[int, np.ndarray, int]] = []  # bulk copies under way

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
            groups.setdefault((kind, lane.index // 32 if kind == "warp" else name), []).append(lane)
        ready = []
        for (kind, name), members in groups.items():
            if kind == "poll":
                continue
            if kind == "barrier" and len(members) == name[1]:
                answers = [np.int32(any(lane.request[2] for lane in members))] * len(members)
            elif kind == "warp" and len(members) == 32:
                names = {lane.request[1] for lane in members}
                assert len(names) == 1, f"lanes of one warp are at different instructions: {names}"
                answers = getattr(self, names.pop())([lane.request[2] for lane in members])
            else:
                continue
            for lane, answer in zip(members, answers, strict=True):
                lane.answer, lane.request = answer, None
            ready += members
        polling = groups.get(("poll", None), [])
        if polling and not ready:  # copies land when nothing else can go on
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

    def end_phase(self, barrier: dict[str, int]) -> None:
        if barrier["left"] == 0 and barrier["bytes"] == 0:
            barrier["left"] = barrier["count"]
            barrier["phase"] += 1

    def let_a_copy_land(self) -> None:
        if self.late:
            address, data, barrier = self.late.pop(int(self.rng.integers(len(self.late))))
            self.shared[address : address + len(data)] = data
            self.barriers[barrier]["bytes"] -= len(data)
            self.end_phase(self.barriers[barrier])


class Emulator:
    """Stands in for `numba.cuda` and for `mma` in a kernel's module; `run` launches."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.block: Block
        self.index = self.grid = (0, 0, 0)
        self.cuda, self.ptx = self._make_cuda(), self._make_ptx()

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
            self.block.barriers[int(address)] = {"count": count, "left": count, "bytes": 0, "phase": 0}

        def mbarrier_arrive(address: Any, size: int) -> None:
            barrier = self.block.barriers[int(address)]
            barrier["left"] -= 1
            barrier["bytes"] += size
            self.block.end_phase(barrier)

        def mbarrier_done(address: Any, parity: Any) -> int:
            _lane().ask("poll", None, None)
            return int(self.block.barriers[int(address)]["phase"] % 2 != parity)

        def bulk_copy(address: Any, source: Any, size: int, barrier: Any) -> None:
            assert int(address) % 16 == int(source) % 16 == size % 16 == 0
            self.block.late.append((int(address), self.block.memory(source, size).copy(), int(barrier)))

        def pack(low: Any, high: Any, narrow: Any) -> Any:
            return narrow(np.array([low, high], np.float32)).view(np.uint32)[0]

        return SimpleNamespace(
            mma_bf16=together("mma_bf16"),
            mma_f16=together("mma_f16"),
            ldmatrix_x4=together("ldmatrix_x4"),
            ldmatrix_x4_trans=together("ldmatrix_x4_trans"),
            named_barrier=lambda name, threads: _lane().ask("barrier", (int(name), threads), 0),
            named_barrier_or=lambda name, threads, flag: _lane().ask("barrier", (int(name), threads), flag),
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
            bulk_copy=bulk_copy,
            fence_async=lambda: None,
            exp2=lambda x: np.exp2(np.float32(x)),
            pack_bf16=lambda low, high: pack(low, high, to_bfloat16),
            pack_f16=lambda low, high: pack(low, high, lambda values: values.astype(np.float16)),
            shared_address=lambda array: np.uint32(SHARED_START),
            global_address=lambda array: np.uint64(self.block.starts[id(array)]),
        )
