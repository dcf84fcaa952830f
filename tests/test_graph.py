"""Facts of a graph: order, domains, ancestors, sections, devices, lanes; and the types between stages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Protocol, TypedDict, TypeVar

import pytest
from checking import HEAD, Batch, LongRow, Row, checked, passes, registry

from pipeflow.check import check_document
from pipeflow.document import parse
from pipeflow.graph import Graph, devices_of
from pipeflow.item import Failed, Port, Scatter
from pipeflow.stage import Gather, Kind, Stage
from pipeflow.typing_fit import fits, mapping_value, signature_of, type_name

if TYPE_CHECKING:
    from nowhere import Tensor  # pyright: ignore


def _graph(text: str) -> Graph:
    report = passes(text)
    assert report.graph is not None
    return report.graph


def test_order_is_topological_whatever_the_file_says() -> None:
    graph = _graph("""
        stages:
          d: {uses: step, from: {x: c, y: b}}
          c: {uses: step, from: a}
          b: {uses: step, from: a}
          a: {uses: rows}
    """)
    assert graph.order == ["a", "c", "b", "d"]
    assert graph.nodes["a"].consumers == ["c", "b"]
    assert [node.name for node in graph.upstream(graph.nodes["d"])] == ["a", "c", "b"]
    assert graph.behind(graph.nodes["d"], graph.nodes["a"])
    assert not graph.behind(graph.nodes["c"], graph.nodes["b"])
    assert not graph.behind(graph.nodes["a"], graph.nodes["a"])


def test_stages_on_a_circle_come_last() -> None:
    report = checked("""
        stages:
          x: {uses: step, from: y}
          y: {uses: step, from: x}
          a: {uses: rows}
    """)
    assert report.graph is not None
    assert report.graph.order == ["a", "x", "y"]


@pytest.mark.axiom("1.1")
def test_domains() -> None:
    """Axiom 1.1: one-to-one and joins keep the numbering; the others start one."""
    graph = _graph("""
        stages:
          rows: {uses: rows}
          map: {uses: step, from: rows}
          split: {uses: split, from: map}
          gather: {uses: collect, from: split}
          spread: {uses: spread, from: split}
          join: {uses: step, from: {x: map, y: rows}}
          list: {uses: step, from: [map, rows]}
          some: {uses: step, from: rows, every: 3}
          all: {uses: step, from: rows, every: 1}
          two: {uses: two, from: rows}
          good: {uses: step, from: two.good}
          ports: {uses: step, from: [two.good, two.bad]}
          barrier: {uses: barrier, from: rows}
          release: {uses: release, from: barrier}
    """)
    assert {name: node.domain for name, node in graph.nodes.items()} == {
        "rows": "rows", "map": "rows", "split": "split", "gather": "gather", "spread": "spread",
        "join": "rows", "list": "list", "some": "some", "all": "rows", "two": "rows", "good": "rows",
        "ports": "rows", "barrier": "barrier", "release": "barrier",
    }  # fmt: skip


def test_kinds_devices_and_lanes() -> None:
    graph = _graph("""
        devices: {targets: [cuda:0, cuda:1], again: cuda}
        resources: {target: {uses: model}}
        stages:
          rows: {uses: rows}
          host: {uses: step, from: rows}
          here: {uses: forward, from: rows, reads: target}
          there: {uses: step, from: rows, on: [targets, again, cuda:0], replicas: 3}
          gather: {uses: collect, from: rows}
    """)
    assert {name: (node.kind, node.devices, node.lanes) for name, node in graph.nodes.items()} == {
        "rows": (Kind.SOURCE, (), 1),
        "host": (Kind.MAP, (), 1),
        "here": (Kind.MAP, ("auto",), 1),
        "there": (Kind.MAP, ("cuda:0", "cuda:1"), 6),
        "gather": (Kind.GATHER, (), 1),
    }


def test_devices_of() -> None:
    assert devices_of(None, {}) == ()
    assert devices_of("cuda", {}) == ("cuda:0",)
    assert devices_of(["b", "a"], {"a": ["cpu", "cuda:1"], "b": "cuda:1"}) == ("cuda:1", "cpu")


def test_sections_and_their_barriers() -> None:
    graph = _graph("""
        resources: {drafter: {uses: weights}}
        stages:
          rows: {uses: rows}
          train: {uses: train, from: rows, writes: drafter}
          barrier: {uses: barrier, from: train}
          publish: {uses: publish, from: release, reads: drafter}
          release: {uses: release, from: barrier}
          log: {uses: log, from: release}
          behind: {uses: step, from: log}
    """)
    barrier = graph.nodes["barrier"]
    assert [node.name for node in graph.section(barrier)] == ["release", "publish"]
    assert [node.name for node in graph.barriers_of(graph.nodes["publish"])] == ["barrier"]
    assert graph.barriers == [barrier]
    assert graph.writer("drafter") is graph.nodes["train"]
    assert graph.writer("none") is None


def _large(count: int) -> str:
    """Arms of maps, a join by number for each pair of stages, barriers, resources."""
    lines = [HEAD, "resources:\n  drafter: {uses: weights}\nstages:\n  s0: {uses: rows}"]
    for index in range(1, count - 3):
        source = f"s{index - 1}" if index % 4 else f"{{x: s{index - 1}, y: s{max(index - 3, 0)}}}"
        lines.append(f"  s{index}:\n    uses: step\n    from: {source}\n    in_flight: 2")
    last = f"s{count - 4}"
    lines.append(f"  train: {{uses: train, from: {last}, writes: drafter}}")
    lines.append("  barrier: {uses: barrier, from: train, every: 10}")
    lines.append("  publish: {uses: publish, from: barrier, reads: drafter}")
    return "\n".join(lines) + "\n"


@pytest.mark.alone
def test_five_hundred_stages_check_in_half_a_second() -> None:
    text, known = _large(500), registry()
    best = 9.0
    for _ in range(5):
        begin = time.perf_counter()
        report = check_document(parse(text, file="p.yaml"), env={}, registry=known)
        best = min(best, time.perf_counter() - begin)
        assert report.spec is not None
        assert len(report.spec.stages) == 500
        assert report.diagnostics == ()
    assert best < 0.5


# Types ---------------------------------------------------------------------------------------------------


UserId = NewType("UserId", int)
T = TypeVar("T")


class Sized(Protocol):
    size: int


class Small(TypedDict):
    a: int


class Large(Small):
    b: Row


@pytest.mark.parametrize(("given", "wanted"), [
    (Row, Row), (LongRow, Row), (Any, Row), (Row, Any), (object, Row), (Row, object), (T, Row), (Row, T),
    (int, float), (bool, int), (UserId, int), (Annotated[Row, "x"], Row), (Row, Annotated[Row, "x"]),
    (Row | None, Row), (Row | Failed, Row), (Row, Row | Batch), (Row | Batch, Batch | Row), (Row, Row | None),
    (list[Row], list[Row]), (list[LongRow], Sequence[Row]), (list, list[Row]), (list[Row], list),
    (dict[str, int], Mapping[str, float]), (tuple[Row, ...], Sequence[Row]),
    (tuple[int, str], tuple[int, str]), (tuple[int, ...], tuple[int, int]),
    (Port[Row], Row), (Literal["a"], str), (Literal["a"], Literal["a", "b"]), (str, Literal["a"]),
    (Large, Small), (Large, dict), (dict[str, Any], Small), (Row, Sized), ("Unknown", Row),
    (Callable[[int], int], Callable[[str], str]),
])  # fmt: skip
def test_types_fit(given: Any, wanted: Any) -> None:
    assert fits(given, wanted)


@pytest.mark.parametrize(("given", "wanted"), [
    (Row, Batch), (Row, LongRow), (float, int), (str, bytes), (Row | Batch, Row), (Row, None),
    (list[Row], list[Batch]), (list[Row], Row), (Row, list[Row]), (dict[str, str], Mapping[str, int]),
    (tuple[Row, Batch], Sequence[Row]), (tuple[int, str], tuple[int, int]), (tuple[int], tuple[int, int]),
    (Port[Row], Batch), (Literal["a"], int), (Literal["c"], Literal["a", "b"]), (int, Literal["a"]),
    (Small, Large), (Row, Small), (Small, list), (Row | None, Batch), (UserId, str),
])  # fmt: skip
def test_types_do_not_fit(given: Any, wanted: Any) -> None:
    assert not fits(given, wanted)


class Gives(Stage):
    def run(self, item: Row) -> Generator[Batch | Failed, None, None]:
        yield Batch()


class GivesLater(Stage):
    async def run(self) -> AsyncIterator[Row]:
        yield Row()


class Unresolvable(Stage):
    def run(self, item: Tensor) -> Row:
        return Row()


class Members(Gather):
    def run(self, items: Sequence[Row]) -> Scatter[Batch]:
        return Scatter([])


class Bare(Stage):
    def run(self, item):  # pyright: ignore
        return item


class SomePorts(Stage):
    def run(self, item: Row) -> Port[Row] | Port[Batch]:
        return Port("a", item)


@pytest.mark.parametrize(("cls", "kind", "takes", "gives"), [
    (Gives, Kind.FLAT, "Row", "Batch"),
    (GivesLater, Kind.SOURCE, "Any", "Row"),
    (Unresolvable, Kind.MAP, "Any", "Row"),
    (Members, Kind.GATHER, "Row", "Batch"),
    (Bare, Kind.MAP, "Any", "Any"),
    (SomePorts, Kind.MAP, "Row", "Row | Batch"),
])  # fmt: skip
def test_signatures(cls: type[Stage[Any, Any]], kind: Kind, takes: str, gives: str) -> None:
    found = signature_of(cls, kind)
    assert (type_name(found.takes), type_name(found.gives)) == (takes, gives)


def test_type_names() -> None:
    shown = [list[Row], dict[str, int] | None, Literal["a", 1], tuple[int, ...], Iterator[Row], None]
    assert list(map(type_name, shown)) == [
        "list[Row]", "dict[str, int]", "Literal['a', 1]", "tuple[int, ...]", "Iterator[Row]", "nothing"
    ]  # fmt: skip


def test_values_of_mappings() -> None:
    assert mapping_value(dict[str, Row]) is Row
    assert mapping_value(dict) is Any
    assert mapping_value(Row) is None
