"""Vector clocks against the definition: a path in the graph of what waited for what."""

from __future__ import annotations

import random
import time

import pytest

from pipeflow.sim.order import Order, Stamp, happened_before


@pytest.mark.parametrize("seed", range(30))
def test_happened_before_is_reachability(seed):
    draw = random.Random(seed)
    order = Order()
    lines = [order.timeline(str(n)) for n in range(5)]
    before: list[set[Stamp]] = [set() for _ in lines]  # what each timeline comes after, by definition
    moments = []
    events: list[Stamp] = []
    for _ in range(300):
        at = draw.randrange(5)
        match draw.randrange(3):
            case 0:
                stamp = lines[at].tick()
                events.append(stamp)
                before[at].add(stamp)
            case 1:
                moments.append((lines[at].snapshot(), frozenset(before[at])))
            case _ if moments:
                moment, reached = draw.choice(moments)  # old ones too: a mark is waited for late
                lines[at].join(moment)
                before[at] |= reached
            case _:
                pass
    assert len(moments) > 50
    for moment, reached in moments:  # later changes of the timeline do not show in a snapshot
        assert {event for event in events if happened_before(event, moment)} == reached
    for line, reached in zip(lines, before, strict=True):
        assert {event for event in events if line.knows(*event)} == reached


def test_nothing_orders_two_timelines_by_itself():
    order = Order()
    a, b = order.timeline("a"), order.timeline("b")
    event = a.tick()
    assert not b.knows(*event)
    b.join(a.snapshot())
    assert b.knows(*event)
    assert not b.knows(*a.tick())


def test_a_hundred_thousand_kernels_on_forty_timelines_are_cheap():
    order = Order()
    lines = [order.timeline(str(n)) for n in range(40)]
    begun = time.process_time()
    for number in range(100_000):
        line = lines[number % 40]
        line.tick()
        if number % 10 == 0:
            lines[(number * 7) % 40].join(line.snapshot())
    assert time.process_time() - begun < 3
