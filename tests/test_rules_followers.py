# ruff: noqa: RUF012 - classes as a stage author writes them
"""Followers, `spare`, `snapshot` and `at_start`: a passing and a failing file each."""

from __future__ import annotations

from typing import Any

import pytest
from checking import Weights, fails, passes

from pipeflow.item import Scatter, Trigger
from pipeflow.stage import Gather, Stage


class Generate(Stage):
    reads = {"actor": Weights}

    def run(self, item: Any) -> Any:
        return item


class Split(Stage):
    reads = {"actor": Weights}

    def run(self, item: Any):
        yield item


class Learn(Stage):
    writes = {"drafter": Weights}

    def run(self, item: Any) -> Any:
        return item


class Show(Stage):
    """Guarded, and a writer."""

    guarded = True
    reads = {"drafter": Weights}
    writes = {"actor": Weights}

    def run(self, item: Trigger) -> Trigger:
        return item


class Hand(Stage):
    """The same without a barrier."""

    reads = {"drafter": Weights}
    writes = {"actor": Weights}

    def run(self, item: Any) -> Any:
        return item


class Put(Stage):
    """Writes without reading."""

    writes = {"actor": Weights}

    def run(self, item: Any) -> Any:
        return item


class Pack(Gather):
    class Config(Gather.Config):  # type: ignore[name-defined, misc]
        size: int = 2

    @classmethod
    def gathers(cls, config: Any) -> int:
        return config.size

    def run(self, items: list[Any]) -> Any:
        return items


class Loose(Gather):
    """Full whenever it likes."""

    def full(self, members: Any) -> bool:
        return True

    def run(self, items: list[Any]) -> Any:
        return items


class Buckets(Pack):
    def bucket(self, item: Any) -> Any:
        return item


class Lingers(Pack):
    linger = 1.0


class Spreads(Pack):
    def run(self, items: list[Any]) -> Scatter[Any]:
        return Scatter(items)


class Draws(Stage):
    reads = {"actor": Weights}

    def run(self, ctx: Any):
        yield ctx.read("actor")


class Both(Stage):
    """One-to-many, a reader and a writer."""

    reads = {"actor": Weights}
    writes = {"drafter": Weights}

    def run(self, item: Any):
        yield item


class Soft(Weights):
    """Can be copied."""

    def snapshot(self, value: Any) -> Any:
        return value


class Look(Stage):
    reads = {"drafter": Weights}

    def run(self, item: Any) -> Any:
        return item


class Send(Stage):
    guarded = True
    reads = {"drafter": Weights}

    def run(self, item: Trigger) -> Trigger:
        return item


class Frees(Stage):
    guarded = True
    releases = True

    def run(self, item: Trigger) -> Trigger:
        return item


class Fan(Stage):
    def run(self, item: Any):
        yield item


MORE = {
    "generate": Generate, "split_reads": Split, "learn": Learn, "show": Show, "hand": Hand, "put": Put,
    "draws": Draws, "both": Both, "soft": Soft, "look": Look, "send": Send, "frees": Frees,
    "pack": Pack, "loose": Loose, "buckets": Buckets, "lingers": Lingers, "spreads": Spreads, "fan": Fan,
}  # fmt: skip

HEAD = """
resources:
  drafter: {uses: weights}
  actor: {uses: weights, follows: drafter, max_staleness: 1}
stages:
  rows: {uses: rows}
"""
LOOP = {
    "g": "  g: {uses: generate, from: rows, reads: {actor: actor}}",
    "t": "  t: {uses: learn, from: g, writes: {drafter: drafter}}",
    "b": "  b: {uses: barrier, from: t, every: 2}",
    "p": "  p: {uses: show, from: b, reads: {drafter: drafter}, writes: {actor: actor}}",
}


def text(head: str = HEAD, **changed: str | None) -> str:
    """The loop with some of its lines changed, left out (None) or added."""
    lines = LOOP | {name: None if line is None else f"  {name}: {line}" for name, line in changed.items()}
    return head + "\n".join(line for line in lines.values() if line is not None) + "\n"


def head(actor: str) -> str:
    return HEAD.replace("follows: drafter, max_staleness: 1", actor)


SOFT = HEAD.replace("drafter: {uses: weights}", "drafter: {uses: soft}")
LOOKS = "{uses: look, from: t, snapshot: §true, reads: {drafter: drafter}}"
WAY = "{uses: learn, from: x, writes: {drafter: drafter}}"
PASS = {
    "a barrier and a guarded stage": text(),
    "more than every - 1": text(head("follows: drafter, max_staleness: 4")),
    "lock-step is the default": text(head("follows: drafter"), b="{uses: barrier, from: t}"),
    "a stage without a barrier": text(
        b=None, p="{uses: hand, from: t, every: 2, reads: {drafter: drafter}, writes: {actor: actor}}"
    ),
    "a gather of a fixed size": text(x="{uses: pack, from: g, with: {size: 3}}", t=WAY),
    "a diamond": text(
        x="{uses: step, from: g}",
        y="{uses: step, from: g}",
        t="{uses: learn, from: {x: x, y: y}, writes: {drafter: drafter}}",
    ),
    "one port": text(x="{uses: two, from: g}", t="{uses: learn, from: x.good, writes: {drafter: drafter}}"),
    "every before the reader": text(g="{uses: generate, from: rows, every: 3, reads: {actor: actor}}"),
    "a reader on a way of its own": text(
        x="{uses: split_reads, from: rows, reads: {actor: actor}}", y="{uses: loose, from: x}"
    ),
    "a limit on the writer": text(t="{uses: learn, from: g, limit: 5, writes: {drafter: drafter}}"),
    "a spare copy": text(head("follows: drafter, max_staleness: 1, spare: true")),
    "a reader's snapshot": text(SOFT, l="{uses: look, from: t, snapshot: true, reads: {drafter: drafter}}"),
    "a barrier's snapshot": text(
        SOFT,
        c="{uses: barrier, from: t, snapshot: true}",
        s="{uses: send, from: c, reads: {drafter: drafter}}",
        n="{uses: shows, from: s}",
    ),
    "a follower without readers": text(head("follows: drafter"), g=None, t=WAY.replace("x", "rows")),
}


@pytest.mark.parametrize("file", PASS.values(), ids=PASS.keys())
def test_passes(file: str) -> None:
    passes(file, more=MORE)


ON_X = {"t": WAY}
FAIL = {
    "an unknown resource": ("unknown-resource", text(head("follows: §draftr"))),
    "itself": ("unfed-follower", text(head("follows: §actor"))),
    "a follower of a follower": (
        "unfed-follower",
        text(
            head("follows: drafter}\n  third: {uses: weights, follows: §actor"), b="{uses: barrier, from: t}"
        ),
    ),
    "nobody writes what it follows": (
        "unfed-follower", text(head("follows: §drafter"), t="{uses: step, from: g}")
    ),
    "nobody writes it": ("unfed-follower", text(head("follows: §drafter"), b=None, p=None)),
    "its writer does not read what it follows": (
        "unfed-follower",
        text(head("follows: §drafter"), b=None, p="{uses: put, from: t, writes: {actor: actor}}"),
    ),
    "staleness without follows": ("misplaced-key", text(head("§max_staleness: 1"))),
    "staleness that holds nobody": (
        "misplaced-key", text(head("follows: drafter, §max_staleness: 1"), g="{uses: step, from: rows}")
    ),
    "less than every - 1": (
        "small-staleness", text(b="{uses: barrier, from: t, every: 3}").replace("ss: 1", "ss: §1")
    ),
    "none, and every 2": ("small-staleness", text(head("follows: §drafter"))),
    "less than every - 1 without a barrier": (
        "small-staleness",
        text(
            b=None, p="{uses: hand, from: t, every: 3, reads: {drafter: drafter}, writes: {actor: actor}}"
        ).replace("ss: 1", "ss: §1"),
    ),
    "a gather of no fixed size": ("unbounded-staleness", text(x="{uses: §loose, from: g}", **ON_X)),
    "a gather with buckets": ("unbounded-staleness", text(x="{uses: §buckets, from: g}", **ON_X)),
    "a gather that lingers": ("unbounded-staleness", text(x="{uses: §lingers, from: g}", **ON_X)),
    "a gather that scatters": ("unbounded-staleness", text(x="{uses: §spreads, from: g}", **ON_X)),
    "one-to-many on the way": ("unbounded-staleness", text(x="{uses: §fan, from: g}", **ON_X)),
    "every on the way": ("unbounded-staleness", text(x="{uses: step, from: g, every: §2}", **ON_X)),
    "unordered on the way": (
        "unbounded-staleness", text(x="{uses: step, from: g, ordered: §false, replicas: 2}", **ON_X)
    ),
    "an unordered reader": (
        "unbounded-staleness",
        text(g="{uses: generate, from: rows, ordered: §false, replicas: 2, reads: {actor: actor}}"),
    ),
    "a list on the way": (
        "unbounded-staleness", text(x="{uses: step, from: §[g, rows2]}", rows2="{uses: rows}", **ON_X)
    ),
    "a one-to-many reader": (
        "unbounded-staleness", text(g="{uses: split_reads, from: rows, reads: §{actor: actor}}")
    ),
    "a barrier on the way": (
        "unbounded-staleness",
        text(x="{uses: barrier, from: §g}", y="{uses: shows_on, from: x}", t=WAY.replace("x", "y")),
    ),
    "a publisher that goes by something else": (
        "unpublished-version",
        text(b=None, p="{uses: hand, from: §rows, reads: {drafter: drafter}, writes: {actor: actor}}"),
    ),
    "a publisher that ends": (
        "unpublished-version",
        text(b=None, p="{uses: hand, from: t, limit: §3, reads: {drafter: drafter}, writes: {actor: actor}}"),
    ),
    "a publisher that skips": (
        "unpublished-version",
        text(
            p="{uses: show, from: b, on_error: §{skip: 1}, reads: {drafter: drafter}, writes: {actor: actor}}"
        ),
    ),
    "a spare copy without follows": ("misplaced-key", text(head("§spare: true"))),
    "a source that reads a spared follower": (
        "spare-in-generator",
        text(
            head("follows: drafter, max_staleness: 1, spare: true"),
            g="{uses: draws, reads: §{actor: actor}}",
        ),
    ),
    "a one-to-many writer that reads one": (
        "spare-in-generator",
        text(
            head("follows: drafter, spare: true"), g="{uses: step, from: rows}",
            t="{uses: both, from: g, reads: §{actor: actor}, writes: {drafter: drafter}}",
        ),
    ),
    "a snapshot by a class that has none": ("no-snapshot", text(l=LOOKS)),
    "a barrier's, by a class that has none": (
        "no-snapshot",
        text(
            c="{uses: barrier, from: t, snapshot: §true}",
            s="{uses: send, from: c, reads: {drafter: drafter}}",
        ),
    ),
    "a snapshot of what nobody writes": (
        "misplaced-key",
        text(
            SOFT.replace("  drafter:", "  frozen: {uses: model}\n  drafter:"),
            l="{uses: forward, from: t, §snapshot: true, reads: {target: frozen}}",
        ),
    ),
    "a snapshot of a writer": (
        "misplaced-key", text(SOFT, b=None, p="{uses: hand, from: t, §snapshot: true, every: 2, "
                              "reads: {drafter: drafter}, writes: {actor: actor}}"),
    ),
    "a snapshot of a source": (
        "misplaced-key", text(SOFT, g="{uses: draws, §snapshot: true, reads: {actor: actor}}").replace(
            "actor: {uses: weights", "actor: {uses: soft"),
    ),
    "a snapshot of a guarded stage": (
        "misplaced-key",
        text(SOFT, c="{uses: barrier, from: t}",
             s="{uses: send, from: c, §snapshot: true, reads: {drafter: drafter}}"),
    ),
    "a barrier's snapshot before a write": (
        "misplaced-key", text(SOFT, b="{uses: barrier, from: t, every: 2, §snapshot: true}")
    ),
    "a barrier's snapshot before a release": (
        "misplaced-key",
        text(
            SOFT,
            c="{uses: barrier, from: t, §snapshot: true}",
            s="{uses: send, from: c, reads: {drafter: drafter}}",
            f="{uses: frees, from: c}",
        ),
    ),
    "at_start where nothing is guarded": (
        "misplaced-key", text(x="{uses: step, from: rows, §at_start: true}")
    ),
    "at_start said twice": (
        "misplaced-key",
        text(
            b="{uses: barrier, from: t, every: 2, at_start: true}",
            p="{uses: show, from: b, §at_start: false, reads: {drafter: drafter}, writes: {actor: actor}}",
        ),
    ),
}  # fmt: skip


class ShowsOn(Stage):
    guarded = True

    def run(self, item: Trigger) -> Trigger:
        return item


@pytest.mark.axiom("3.6")
@pytest.mark.parametrize(("code", "file"), FAIL.values(), ids=FAIL.keys())
def test_fails(code: str, file: str) -> None:
    fails(file, code, more=MORE | {"shows_on": ShowsOn})
