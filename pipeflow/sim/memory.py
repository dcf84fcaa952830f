"""A caching allocator like torch's, but harsher: what is free is given on, or unmapped, at once.

As in torch, a request is rounded up to 512 bytes; up to 1 MiB it is cut from segments of 2 MiB, below 10 MiB
from segments of 20 MiB, else from one of its own size in whole 2 MiB. The smallest free chunk that fits is
cut, free neighbours grow together again, and chunks belong to the stream they were allocated on
(c10/cuda/CUDACachingAllocator.cpp). Unlike it, `release` unmaps every free chunk, not only whole segments
that are free.

Where nothing fits, a device gives back what is cached, as torch with expandable segments does, and asks once
more (`Sim.allocate`): the host waits for what is held back by `keep`, and for the work of each free chunk's
own stream, but of no other. So a chunk that another stream may still use, in no order to its own, is unmapped
under that: a hazard, like any `release` without a barrier. An engine that frees nothing before its last
fence never shows one.

Who used a chunk is remembered beyond its owner, so that giving on and unmapping can be checked (`access`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from pipeflow.sim.access import Block, Use, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.sim.order import Timeline
    from pipeflow.sim.queue import SimMark, SimStream

__all__ = ["Allocator", "Chunk", "OutOfMemory"]

_STEP = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_MEDIUM = 10 << 20
_MEDIUM_SEGMENT = 20 << 20
_SEGMENT_STEP = 2 << 20

_Pool = tuple["SimStream | None", bool]
"""Stream, and whether it is for small requests."""


class OutOfMemory(RuntimeError):
    """Nothing fits. The allocator is as it was before the request."""


class Chunk:
    """A range of addresses: in use by a block, free, held back, or unmapped."""

    __slots__ = ("address", "after", "before", "free", "ghosts", "past", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before: Chunk | None = None
        self.after: Chunk | None = None
        self.free = False
        self.past: list[Use] = []
        """Under owners before, unless known to be done when they gave it up."""
        self.ghosts: list[Block] = []
        """Blocks given up while something enqueued may still read them."""


def _text(nbytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:g} bytes"


class Allocator:
    """The memory of one device, or what the host has pinned (`total` infinite)."""

    def __init__(self, name: str, base: int, total: float, log: Callable[..., None]) -> None:
        self.name = name
        self.total = total
        self.used = 0
        self.reserved = 0
        self.peak = 0
        """Reserved at most, so far."""
        self._top = base
        self._made = 0
        self._log = log
        self._free: dict[_Pool, list[Chunk]] = {}
        """By size, then address."""
        self._unmapped: list[tuple[int, int]] = []
        self._held: list[tuple[list[SimMark], Chunk]] = []
        """Given up, but a stream may still use them."""

    def allocate(self, nbytes: int, stream: SimStream | None, growing: Callable[[], None]) -> Block:
        """A block for `stream`. `growing` is called before more is reserved. Raises OutOfMemory."""
        self.poll()
        size = max(_STEP, -(-nbytes // _STEP) * _STEP)
        pool = (stream, size <= _SMALL)
        chunk = self._take(pool, size)
        reused = chunk is not None
        if chunk is None:
            chunk = self._grow(pool, size, nbytes, growing)
        self._cut(chunk, size)
        self.used += chunk.size
        self._made += 1
        block = Block(f"{self.name} block {self._made}", nbytes, chunk, stream)
        self._log("reuse" if reused else "alloc", block.name, nbytes)
        return block

    def refuse(self, nbytes: int) -> OutOfMemory:
        """The error for a request that does not fit."""
        total = "unlimited" if math.isinf(self.total) else _text(self.total)
        return OutOfMemory(
            f"{self.name} out of memory. Tried to allocate {_text(nbytes)}. Its total capacity is {total}, "
            f"of which {_text(self.total - self.reserved)} is free. {_text(self.used)} is allocated, and "
            f"{_text(self.reserved - self.used)} is reserved but unallocated"
        )

    def give_up(self, block: Block, where: Where, knows: Timeline) -> None:
        """The last tensor of the block is gone. `knows`: of the host thread that dropped it; what that knows
        to be done needs no order any more."""
        block.freed = where
        chunk = block.chunk
        uses = list(block.uses())
        again = {use.event.line for use in uses}  # each of the whole chunk, so what was before says no more
        uses += [use for use in chunk.past if use.event.line not in again]
        chunk.past = [use for use in uses if not knows.knows(use.event.line, use.event.count)]
        if any(not use.event.done for use in chunk.past):
            chunk.ghosts.append(block)
        self.used -= chunk.size
        self._log("free", block.name)
        marks = [stream.mark_now() for stream in block.kept if stream is not block.stream]
        if all(mark.done for mark in marks):
            self._let_go(marks, chunk)
        else:
            self._held.append((marks, chunk))

    def poll(self) -> None:
        """Take back what was held for streams that have come by."""
        if not self._held:
            return
        held, self._held = self._held, []
        for marks, chunk in held:
            if all(mark.done for mark in marks):
                self._let_go(marks, chunk)
            else:
                self._held.append((marks, chunk))

    def settle(self, wait: Callable[[SimMark], None]) -> None:
        """Have the host wait for all that is held back, and for the streams of free chunks."""
        held, self._held = self._held, []
        for marks, chunk in held:
            for mark in marks:
                wait(mark)
            self._let_go(marks, chunk)
        for stream, _ in {pool: None for pool, free in self._free.items() if free}:
            if stream is not None:
                wait(stream.mark_now())

    def release(self, unmapped: Callable[[Chunk], None]) -> None:
        """Unmap every free chunk; `unmapped` hears of each."""
        self.poll()
        for free in self._free.values():
            for chunk in free:
                chunk.free = False  # gone for good: no neighbour grows into it
                self.reserved -= chunk.size
                self._unmapped.append((chunk.address, chunk.address + chunk.size))
                self._log("unmap", self.name, chunk.size)
                unmapped(chunk)
        self._free.clear()

    def is_unmapped(self, address: int) -> bool:
        """Whether `release` took the address away."""
        return any(low <= address < high for low, high in self._unmapped)

    # Chunks -----------------------------------------------------------------------------------------

    def _take(self, pool: _Pool, size: int) -> Chunk | None:
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, 0), key=_rank)
        if at == len(free):
            return None
        chunk = free.pop(at)
        chunk.free = False
        return chunk

    def _grow(self, pool: _Pool, size: int, nbytes: int, growing: Callable[[], None]) -> Chunk:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _MEDIUM:
            segment = _MEDIUM_SEGMENT
        else:
            segment = -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
        if self.reserved + segment > self.total:
            raise self.refuse(nbytes)
        growing()
        self.reserved += segment
        self.peak = max(self.peak, self.reserved)
        chunk = Chunk(self._top, segment, pool)
        self._top += segment
        return chunk

    def _cut(self, chunk: Chunk, size: int) -> None:
        """Give the rest back, unless it is too small to be worth it."""
        rest = chunk.size - size
        if rest < _STEP or (not chunk.pool[1] and rest <= _SMALL):
            return
        tail = Chunk(chunk.address + size, rest, chunk.pool)
        tail.past = [use for use in chunk.past if use.high > tail.address]
        tail.ghosts = [ghost for ghost in chunk.ghosts if ghost.span[1] > tail.address]
        chunk.past = [use for use in chunk.past if use.low < tail.address]
        tail.before, tail.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = tail
        chunk.after = tail
        chunk.size = size
        self._put(tail)

    def _put(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self._free.setdefault(chunk.pool, []), chunk, key=_rank)

    def _pull(self, chunk: Chunk) -> None:
        free = self._free[chunk.pool]
        del free[bisect_left(free, _rank(chunk), key=_rank)]
        chunk.free = False

    def _let_go(self, marks: list[SimMark], chunk: Chunk) -> None:
        """Free, and one with its free neighbours."""
        clocks = [mark.clock for mark in marks]
        if clocks:  # what had to come by has
            chunk.past = [
                use
                for use in chunk.past
                if not any(clock.knows(use.event.line, use.event.count) for clock in clocks)
            ]
        before, after = chunk.before, chunk.after
        if after is not None and after.free:
            self._pull(after)
            _absorb(chunk, after)
        if before is not None and before.free:
            self._pull(before)
            _absorb(before, chunk)
            chunk = before
        self._put(chunk)


def _rank(chunk: Chunk) -> tuple[int, int]:
    return chunk.size, chunk.address


def _absorb(chunk: Chunk, after: Chunk) -> None:
    chunk.size += after.size
    chunk.after = after.after
    if after.after is not None:
        after.after.before = chunk
    chunk.past = chunk.past + after.past
    chunk.ghosts.extend(ghost for ghost in after.ghosts if ghost not in chunk.ghosts)
