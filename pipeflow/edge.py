"""An edge: the queue between two stages, and the credits that bound what is alive on it.

A producer takes a credit on *every* out-edge before it starts a job; the consumer gives it back when the
item retires there. Gaps (numbers without a value) hold no credit, and a run of them is one entry.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pipeflow.item import Item

if TYPE_CHECKING:
    from pipeflow.operations import OperationLog
    from pipeflow.runner import Runner

__all__ = ["Edge", "Gap"]


class Gap:
    """A run of numbers without a value, as one entry of a queue."""

    __slots__ = ("count", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.count = 1


class Edge:
    """Changes on the loop only."""

    __slots__ = ("_queue", "bytes_limit", "bytes_live", "closed", "consumer", "credits", "every", "gathered",
                 "items_limit", "largest", "name", "operations", "peak", "pinned", "port", "producer",
                 "production", "queued", "since_selected", "storages", "wants_bytes")  # fmt: skip

    def __init__(
        self,
        producer: Runner,
        consumer: Runner,
        *,
        items: int,
        nbytes: int | None,
        every: int = 1,
        port: str | None = None,
        name: str | None = None,
        declared: int | None = None,
        pinned: bool = False,
    ) -> None:
        self.producer = producer
        self.consumer = consumer
        self.every = every
        """Selects (seq + 1) % every == 0 and numbers what it selects anew."""
        self.port = port
        self.name = name
        """The consumer's name for this input, where it joins by name."""
        self.items_limit = items
        self.bytes_limit = nbytes
        self.pinned = pinned
        """The consumer must see the version its item made: the producer holds the next item back."""
        self.credits = 0
        """Credits out: items in production for this edge, queued on it, or in work at the consumer."""
        self.gathered = 0
        """Of these, members of the consumer's unfinished batches."""
        self.queued = 0
        self.peak = 0
        self.bytes_live = 0
        self.largest = declared
        """Bytes of the largest item seen (or declared), reserved by each start; None: not known yet."""
        self.wants_bytes = nbytes is not None
        self.production = 0
        """Items charged whose size is not known yet."""
        self.storages: dict[int, tuple[int, int]] = {}
        """Address to (items alive here that hold it, bytes): a storage counts once."""
        self.closed = False
        self.since_selected = 0
        """Live items that `every` passed over since the last one it took."""
        self.operations: OperationLog | None = None
        """Hears of credits and items, if the run keeps such a log."""
        self._queue: deque[Item | Gap] = deque()

    # Credits ---------------------------------------------------------------------------------------

    def admits(self, kept_behind: int | None = None) -> bool:
        """Whether one more item may start. `kept_behind`: asked for the oldest item in hand, how many of
        this edge's credits its own stage keeps in hand behind it.

        Liveness beats the budget (axiom 2.4): if all that is alive here sits in the consumer's unfinished
        batches, or behind the item that asks, nothing can give a credit back before one more arrives.
        """
        if self.credits == self.gathered:  # an idle edge too
            return True
        if kept_behind is not None and self.credits == self.gathered + kept_behind:
            return True
        if self.credits >= self.items_limit:
            return False
        if self.bytes_limit is None:
            return True
        if self.largest is None:
            return self.production == 0
        return self.bytes_live + (self.production + 1) * self.largest <= self.bytes_limit

    def take(self) -> None:
        """Charge one item in production."""
        self.credits += 1
        self.production += 1
        if self.credits > self.peak:
            self.peak = self.credits
        if self.operations is not None:
            self.operations.credit(self, 1)

    def untake(self) -> None:
        """The production ended without an item for this edge."""
        self.credits -= 1
        self.production -= 1
        if self.operations is not None:
            self.operations.credit(self, -1)

    def give_back(self, item: Item) -> None:
        """The item retired at the consumer."""
        self.credits -= 1
        if self.operations is not None:
            self.operations.gave(self, item)
        if self.wants_bytes:
            self._uncount(item)
        self.producer.wake()

    # Queue -----------------------------------------------------------------------------------------

    def selects(self, seq: int) -> bool:
        """Whether `every` takes the item of this number: never a counter, so gaps shift nothing."""
        return self.every == 1 or (seq + 1) % self.every == 0

    def number(self, item: Item) -> int:
        """The item's number on this edge: `every` numbers anew what it selects."""
        return item.seq if self.every == 1 else (item.seq + 1) // self.every - 1

    def put(self, seq: int, item: Item | None, charged: bool) -> bool:
        """Deliver an item, or a gap (None). Returns whether a live item was queued.

        `charged`: a credit was taken for it; one that is not queued after all gives it back.
        """
        if item is not None and self.port is not None and item.port != self.port:
            item = None
        if self.every > 1:
            if not self.selects(seq):
                if item is not None:
                    self.since_selected += 1
                if charged:
                    self.untake()
                return False
            self.since_selected = 0
            seq = (seq + 1) // self.every - 1
        if item is None:
            if charged:
                self.untake()
            self._put_gap(seq)
        else:
            if charged:
                self.production -= 1
            else:  # an edge that overdraws (what a guarded stage emits) still counts what it holds
                self.credits += 1
            if self.wants_bytes:
                self._count(item)
            self._queue.append(item)
            self.queued += 1
            item.holds += 1
        if self.operations is not None:
            self.operations.put(self, seq, item, charged)
        self.consumer.wake()
        return item is not None

    def _put_gap(self, seq: int) -> None:
        if self._queue:
            last = self._queue[-1]
            if type(last) is Gap and last.seq + last.count == seq:
                last.count += 1
                return
        self._queue.append(Gap(seq))

    def first(self) -> Item | None:
        """The item at the head; None where a gap is, or nothing."""
        if not self._queue:
            return None
        head = self._queue[0]
        return head if type(head) is Item else None

    def gap(self) -> int | None:
        """The number of the gap at the head; None where an item is, or nothing."""
        if not self._queue:
            return None
        head = self._queue[0]
        return head.seq if type(head) is Gap else None

    def head(self) -> int | None:
        """The number of what is at the head; None where nothing is queued."""
        if not self._queue:
            return None
        head = self._queue[0]
        return head.seq if type(head) is Gap else self.number(head)  # type: ignore[arg-type]

    def pop(self) -> Item | None:
        """Take the head (None: a gap). A live item keeps its credit until `give_back`."""
        head = self._queue[0]
        if type(head) is Gap:
            if head.count > 1:
                head.seq += 1
                head.count -= 1
            else:
                self._queue.popleft()
            return None
        self.queued -= 1
        return self._queue.popleft()  # type: ignore[return-value]

    def throw_away(self) -> Item | None:
        """Take the head for nobody's use."""
        return self.pop()

    def values(self) -> list[Any]:
        """Of the items that are queued."""
        return [entry.value for entry in self._queue if type(entry) is Item]

    def clear(self) -> None:
        """At the end of a run: drop what is queued."""
        for entry in self._queue:
            if type(entry) is Item:
                entry.forget()
        self._queue.clear()
        self.storages.clear()

    @property
    def empty(self) -> bool:
        return not self._queue

    @property
    def ended(self) -> bool:
        """Nothing queued, and nothing will be."""
        return self.closed and not self._queue

    # Bytes -----------------------------------------------------------------------------------------

    def _count(self, item: Item) -> None:
        total = 0
        for address, nbytes, _ in self.producer.buffers(item):
            total += nbytes
            items, size = self.storages.get(address, (0, nbytes))
            if items == 0:
                self.bytes_live += size
            self.storages[address] = (items + 1, size)
        item.nbytes = total
        if self.largest is None or total > self.largest:
            self.largest = total

    def _uncount(self, item: Item) -> None:
        for address, _, _ in self.producer.buffers(item):
            items, size = self.storages[address]
            if items == 1:
                del self.storages[address]
                self.bytes_live -= size
            else:
                self.storages[address] = (items - 1, size)

    def __repr__(self) -> str:
        return f"{self.producer.name} -> {self.consumer.name}"
