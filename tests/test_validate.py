"""Validation: every fault, each at its place, in plain words; and the values that come out."""

from __future__ import annotations

import enum
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from pipeflow.config import Config, Duration, InputPath, OutputPath, Size
from pipeflow.document import load, parse
from pipeflow.spec import OnError, PipelineSpec, QueueSpec
from pipeflow.validate import convert, spec_of

if TYPE_CHECKING:
    from pipeflow.diagnostic import Diagnostic

HERE = Path("/somewhere")
A_SIZE = "a size (bytes, or text such as 512MiB, 8GiB, 2GB)"
A_DURATION = "a duration (seconds, or text such as 500ms, 30s, 5m, 2h)"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(Config):
    x: int
    y: float = 1.0


class Square(msgspec.Struct, tag="square", forbid_unknown_fields=True):
    side: int


class Circle(msgspec.Struct, tag="circle", forbid_unknown_fields=True):
    radius: float


class Checked(Config):
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} lies above high {self.high}")


def got(text: str, type: Any, **more: Any) -> tuple[Any, list[Diagnostic]]:
    document = parse(f"a: {text}", file="p.yaml", **more)
    node = document.node(("a",))
    assert node is not None
    return convert(node, type, path="a", folder=HERE)


def good(text: str, type: Any, **more: Any) -> Any:
    value, found = got(text, type, **more)
    assert found == []
    return value


def fault(text: str, type: Any, **more: Any) -> Diagnostic:
    value, found = got(text, type, **more)
    assert value is None
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("text", "type", "expected"),
    [
        ("3", int, 3), ("3", float, 3.0), ("3.5", float, 3.5), ("x", str, "x"), ("'3'", str, "3"),
        ("true", bool, True),
        ("~", int | None, None), ("x", str | list[str], "x"), ("[x, y]", str | list[str], ["x", "y"]),
        ("stop", Literal["stop"] | OnError, "stop"),
        ("{skip: 2}", Literal["stop"] | OnError, OnError(skip=2)),
        ("[1, 2]", list[float], [1.0, 2.0]), ("[1, a]", tuple[int, str], (1, "a")),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ("[1, 1]", set[int], {1}), ("[1]", frozenset[int], frozenset({1})),
        ("{k: 1}", dict[str, int], {"k": 1}), ("{'1': x}", dict[int, str], {1: "x"}),
        ("{red: 1}", dict[Literal["red"], int], {"red": 1}), ("{red: 1}", dict[Colour, int], {Colour.RED: 1}),
        ("{x: 1}", Inner, Inner(x=1)), ("[{x: 1, y: 2}]", list[Inner], [Inner(x=1, y=2.0)]),
        ("red", Colour, Colour.RED), ("2", Literal[1, 2], 2), ("{z: [1, ~, x]}", Any, {"z": [1, None, "x"]}),
        ("{type: square, side: 2}", Square | Circle, Square(2)),
        ("{type: circle, radius: 2}", Square | Circle, Circle(2.0)),
        ("64KiB", Size, 65536), ("64", Size, 64), ("0", Size, 0), ("~", Size | None, None),
        ("auto", Size | Literal["auto"], "auto"), ("1KiB", Size | Literal["auto"], 1024),
        ("500ms", Duration, 0.5), ("30", Duration, 30.0), ("0", Duration, 0.0), ("1.5", Duration, 1.5),
        ("x/y", OutputPath, "x/y"), ("/abs", InputPath, "/abs"),
        ("3", int | str, 3), ("x", int | str, "x"), ("3", float | str, 3.0),
    ],
)  # fmt: skip
def test_values(text: str, type: Any, expected: object) -> None:
    value = good(text, type)
    assert value == expected
    assert value.__class__ is expected.__class__


def test_types_that_yaml_has_no_value_for_are_read_from_text() -> None:
    import datetime
    import decimal

    assert good("2024-01-02", datetime.date) == datetime.date(2024, 1, 2)
    assert good("'1.5'", decimal.Decimal) == decimal.Decimal("1.5")
    assert fault("soon", datetime.date).code == "wrong-type"


@pytest.mark.parametrize(
    ("text", "type", "message"),
    [
        ("eight", int, "expected a whole number, got the text 'eight'"),
        ("1.5", int, "expected a whole number, got the number 1.5"),
        ("1.0", int, "expected a whole number, got the number 1.0"),
        ("true", int, "expected a whole number, got true"),
        ("true", float, "expected a number, got true"),
        ("'3'", int, "expected a whole number, got the text '3'"),
        ("'3'", float, "expected a number, got the text '3'"),
        ("3", str, "expected text, got the whole number 3"),
        ("yes", bool, "expected true or false, got the text 'yes'"),
        ("1", bool, "expected true or false, got the whole number 1"),
        ("", int, "expected a whole number, got nothing (null)"),
        ("", int | None, None),
        ("[1]", int | None, "expected a whole number, got a list"),
        ("{b: 1}", str | list[str] | None, "expected text or a list of text, got a mapping"),
        ("3", str | list[str] | None, "expected text or a list of text, got the whole number 3"),
        ("x", list[int], "expected a list of whole numbers, got the text 'x'"),
        ("[1]", Inner, "expected a mapping, got a list"),
        ("stpo", Literal["stop"] | OnError, "expected 'stop' or a mapping, got the text 'stpo'"),
        ("reed", Colour, "expected one of 'red', 'blue', got the text 'reed'"),
        ("true", Literal[1], "expected 1, got true"),
        ("[1, 2]", tuple[int, int, int], "must hold exactly 3 values; got 2"),
        ("1" + "0" * 400, float, "expected a number, got the whole number 1" + "0" * 400),
        ("8GBB", Size, f"expected {A_SIZE}, got the text '8GBB'"),
        ("-1", Size, f"expected {A_SIZE}, got the whole number -1"),
        ("1.5", Size, f"expected {A_SIZE}, got the number 1.5"),
        ("true", Size, f"expected {A_SIZE}, got true"),
        ("-1", Duration, f"expected {A_DURATION}, got the whole number -1"),
        (".inf", Duration, f"expected {A_DURATION}, got the number inf"),
        (".nan", Duration, f"expected {A_DURATION}, got the number nan"),
        ("soon", Duration | None, f"expected {A_DURATION}, got the text 'soon'"),
        ("''", InputPath, "must be a path, not empty text; got the text ''"),
        ("3", OutputPath, "expected a path, got the whole number 3"),
        ("0", Annotated[int, Meta(ge=1)], "must be at least 1; got the whole number 0"),
        ("0", Annotated[int, Meta(ge=1)] | None, "must be at least 1; got the whole number 0"),
        ("0", Annotated[float, Meta(gt=0)], "must be greater than 0; got the whole number 0"),
        ("2", Annotated[int, Meta(le=1)], "must be at most 1; got the whole number 2"),
        ("1.0", Annotated[float, Meta(lt=1)], "must be less than 1; got the number 1.0"),
        (".nan", Annotated[float, Meta(ge=0)], "must be at least 0; got the number nan"),
        ("3", Annotated[int, Meta(multiple_of=2)], "must be a multiple of 2; got the whole number 3"),
        ("30s", Annotated[Duration, Meta(ge=60)], "must be at least 60; got the text '30s'"),
        ("x", Annotated[str, Meta(min_length=2)], "must have at least 2 characters; got the text 'x'"),
        ("xyz", Annotated[str, Meta(max_length=2)], "must have at most 2 characters; got the text 'xyz'"),
        ("x1", Annotated[str, Meta(pattern="^[a-z]$")], "must match the pattern ^[a-z]$; got the text 'x1'"),
        ("[]", Annotated[list[int], Meta(min_length=1)], "must have at least 1 entries; got 0"),
        ("{}", Annotated[dict[str, int], Meta(min_length=1)], "must have at least 1 entries; got 0"),
        ("{1b: 1}", dict[Annotated[str, Meta(pattern="^[a-z]")], int],
         "the key '1b' must match the pattern ^[a-z]"),
        ("{b: 1}", dict[int, int], "the key 'b' must be a whole number"),
        ("{rod: 1}", dict[Colour, int], "the key 'rod' must be one of 'red', 'blue'"),
        ("{low: 3, high: 2}", Checked, "low 3 lies above high 2"),
        ("{y: 1}", Inner, "the key 'x' is missing"),
    ],
)  # fmt: skip
def test_faults_in_plain_words(text: str, type: Any, message: str | None) -> None:
    if message is None:
        assert good(text, type) is None
        return
    found = fault(text, type)
    assert found.message == message
    assert found.code == "wrong-type"


@pytest.mark.parametrize(
    ("text", "type", "remedy"),
    [
        ("'3'", int, "leave the quotes off: quoted values are text"),
        ("3", str, 'quote it: "3"'),
        ("1e-4", str, 'quote it: "1e-4"'),
        ("yes", bool, "write true or false"),
        ("", int, "give a value, or leave the key out"),
        ("stpo", Literal["stop", "skip"], "did you mean 'stop'?"),
        ("stpo", Literal["stop"] | OnError, "did you mean 'stop'?"),
        ("{y: 1}", Inner, "add `x:` (a whole number)"),
    ],
)
def test_remedies(text: str, type: Any, remedy: str) -> None:
    assert fault(text, type).remedy == remedy


def test_an_unknown_key_is_reported_at_the_key() -> None:
    class Outer(Config):
        inner: Inner
        size: int = 1

    found = fault("{inner: {x: 1, yy: 2}}", Outer)
    assert (found.code, found.path, found.line, found.column) == ("unknown-key", "a.inner.yy", 1, 19)
    assert found.remedy == "did you mean 'y'?"
    assert fault("{inner: {x: 1}, zzzz: 2}", Outer).remedy == "known keys: inner, size"


def test_a_missing_key_is_reported_at_the_mapping() -> None:
    found = fault("{y: 1}", Inner)
    assert (found.path, found.line, found.column) == ("a.x", 1, 4)


def test_every_fault_is_found() -> None:
    class Outer(Config):
        inner: list[Inner]
        size: Size
        names: dict[str, int]
        rate: float = 1.0

    _, found = got("{inner: [{x: a}, {z: 1}, 3], size: big, names: {p: q, r: 1.5}, rat: 2}", Outer)
    assert [(f.path, f.code) for f in found] == [
        ("a.inner[0].x", "wrong-type"), ("a.inner[1].z", "unknown-key"), ("a.inner[1].x", "wrong-type"),
        ("a.inner[2]", "wrong-type"), ("a.size", "wrong-type"), ("a.names.p", "wrong-type"),
        ("a.names.r", "wrong-type"), ("a.rat", "unknown-key"),
    ]  # fmt: skip


def test_input_paths_are_taken_from_the_folder_of_their_file(tmp_path: Path) -> None:
    class Paths(Config):
        a: InputPath
        b: InputPath
        c: InputPath
        d: InputPath
        e: OutputPath

    (tmp_path / "base").mkdir()
    (tmp_path / "base/base.yaml").write_text(
        "params: {p: own.txt}\nw: {a: in.txt, b: ../x.txt, e: out, d: ~/h}\n"
    )
    (tmp_path / "top.yaml").write_text(
        "extends: base/base.yaml\nw: {b: in.txt}\nparams: {c: '${params.p}'}\n"
    )
    document = load(tmp_path / "top.yaml", overrides=["params.p=given.txt"])
    node = document.node(("w",))
    assert node is not None
    value, found = convert(node, Paths, path="w", folder=document.folder)
    assert value is None
    assert [f.path for f in found] == ["w.c"]
    node.entries["c"] = document.root.entries["params"].node.entries["p"]  # pyright: ignore
    value, found = convert(node, Paths, path="w", folder=document.folder)
    assert found == []
    assert value is not None
    assert value.a == str(tmp_path / "base/in.txt")
    assert value.b == str(tmp_path / "in.txt")
    assert value.c == str(tmp_path / "given.txt")  # from the command line: the pipeline file's folder
    assert value.d == os.path.expanduser("~/h")
    assert value.e == "out"


def test_a_fault_in_an_override_names_it() -> None:
    document = parse("params: {n: 1}\na: ${params.n}", overrides=["n=abc"])
    node = document.node(("a",))
    assert node is not None
    _, found = convert(node, int, path="a", folder=HERE)
    assert found[0].render().startswith("override 'n=abc' - a: expected a whole number, got the text 'abc'")


def test_secrets_do_not_show() -> None:
    env = {"S": "hunter2"}
    shown = [
        fault("${secret:S}", int, env=env),
        fault("${secret:S}", Literal["hunter3"], env=env),
        fault("${secret:S}", Annotated[str, Meta(max_length=2)], env=env),
        fault("${secret:S}", Size | None, env=env),
    ]

    class Token(Config):
        token: str

        def __post_init__(self) -> None:
            raise ValueError(f"{self.token} has expired")

    shown.append(fault("{token: 'x${secret:S}'}", Token, env=env))
    assert "has expired" in shown[-1].message
    assert not any("hunter" in repr(found).replace("hunter3", "") for found in shown)
    assert good("${secret:S}", str, env=env) == "hunter2"


def test_a_broken_reference_is_not_reported_twice() -> None:
    value, found = got("{x: '${env:N}', y: bad}", Inner, env={})
    assert value is None
    assert [f.path for f in found] == ["a.y"]
    assert got("['${env:N}']", list[Any], env={}) == (None, [])
    assert got("{b: '${env:N}'}", Any, env={}) == (None, [])


# ---------------------------------------------------------------- the spec


SPEC = """\
pipeflow: 1
name: tiny
devices: {gpus: [cuda:0, cuda:1]}
resources:
  net: {uses: hf/causal_lm, on: gpus, with: {model: x}}
stages:
  rows: {uses: data/jsonl, with: {path: rows.jsonl}}
  train:
    uses: dflash/train
    from: {rows: rows}
    on_error: {skip: 3}
    queue: {bytes: 8GiB}
    timeout: 30s
run: {stop: {drain: 5m}, queue: {items: 2}}
"""


def test_a_file_becomes_a_spec() -> None:
    spec, found = spec_of(parse(SPEC))
    assert found == []
    assert isinstance(spec, PipelineSpec)
    assert spec.stages["train"].from_ == {"rows": "rows"}
    assert spec.stages["train"].on_error == OnError(skip=3)
    assert spec.stages["train"].queue == QueueSpec(bytes=8 * 2**30)
    assert spec.stages["train"].timeout == 30.0
    assert spec.stages["rows"].with_ == {"path": "rows.jsonl"}
    assert spec.run.stop.drain == 300.0
    assert spec.run.stop.grace == 2.0


@pytest.mark.parametrize("given", ["foo", "skip", "fail", "[skip]", "3", "null", "true"])
def test_on_error_of_another_form_is_told_its_forms(given: str) -> None:
    _, found = spec_of(parse(SPEC.replace("{skip: 3}", given)))
    assert [(f.code, f.path, f.remedy) for f in found] == [
        ("wrong-type", "stages.train.on_error", "write `stop`, `{skip: N}` or `{retry: N}`")
    ]


def test_a_slip_in_on_error_has_its_near_match() -> None:
    _, found = spec_of(parse(SPEC.replace("{skip: 3}", "stpo")))
    assert [f.remedy for f in found] == ["did you mean 'stop'?"]


def test_the_node_of_a_stages_options_is_at_hand() -> None:
    document = parse(SPEC)
    assert document.node(("stages", "rows", "with")) is not None
    assert document.node(("stages", "train", "with")) is None


@pytest.mark.parametrize(
    ("line", "place"),
    [("", (2, 1)), ("pipeflow: 2", (1, 11)), ("pipeflow: '1'", (1, 11)), ("pipeflow: 1.0", (1, 11)),
     ("pipeflow: true", (1, 11)), ("pipeflow: [1]", (1, 11))],
)  # fmt: skip
def test_the_version(line: str, place: tuple[int, int]) -> None:
    spec, found = spec_of(parse(SPEC.replace("pipeflow: 1", line, 1)))
    assert spec is None
    assert [(f.code, f.path, f.line, f.column) for f in found] == [("version", "pipeflow", *place)]
    assert found[0].remedy == "write `pipeflow: 1`"


def test_faulty_stages_do_not_hide_the_others() -> None:
    text = "pipeflow: 1\nname: x\nstages:\n  a: {uses: p}\n  b: [1]\n  c: {from: a}\n"
    text += "  d: {uses: p, in_flight: z}\n  '9': {uses: p}\n"
    spec, found = spec_of(parse(text))
    assert spec is not None
    assert list(spec.stages) == ["a"]
    assert [f.path for f in found] == ["stages.b", "stages.c.uses", "stages.d.in_flight", "stages.9"]


def test_an_unknown_key_leaves_its_stage_in() -> None:
    spec, found = spec_of(parse("pipeflow: 1\nname: x\nstages:\n  a: {uses: p, path: q}\n"))
    assert spec is not None
    assert list(spec.stages) == ["a"]
    assert [(f.code, f.path) for f in found] == [("unknown-key", "stages.a.path")]
    assert "under `with`" in found[0].remedy


def test_faults_at_the_top_give_no_spec() -> None:
    assert spec_of(parse(SPEC.replace("items: 2", "items: 0")))[0] is None
    spec, found = spec_of(parse("pipeflow: 1\nname: x\nstages: [a]\n"))
    assert spec is None
    assert [f.path for f in found] == ["stages"]


def test_an_unreadable_file_gives_no_further_faults() -> None:
    assert spec_of(parse("a: [")) == (None, [])


def large(stages: int) -> str:
    lines = ["pipeflow: 1", "name: large", "params: {rate: 1e-4}", "stages:", "  s0: {uses: data/jsonl}"]
    for i in range(1, stages):
        lines += [
            f"  s{i}:", "    uses: text/batch", f"    from: s{i - 1}", "    in_flight: 2",
            "    on_error: {skip: 3}",            "    with:", "      rate: ${params.rate}",
            f"      path: ./rows{i}.jsonl", "      sizes: [1, 2, 3]",
            "    queue: {items: 4, bytes: 8GiB}", "    timeout: 30s",
        ]  # fmt: skip
    return "\n".join(lines)


@pytest.mark.alone
def test_five_hundred_stages_in_a_third_of_a_second() -> None:
    text = large(500)
    best = 9.0
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        document = parse(text)
        spec, found = spec_of(document)
        best = min(best, time.process_time() - start)
        assert document.diagnostics == found == []
        assert spec is not None
        assert len(spec.stages) == 500
    assert best < 0.35
