"""The document: YAML 1.2 values with places, every fault at once, references, `extends`, overrides."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow.compose import MAX_DEPTH
from pipeflow.diagnostic import Place
from pipeflow.document import Document, from_dict, load, parse
from pipeflow.nodes import MapNode, Scalar
from pipeflow.scalars import parse_duration, parse_size, read_plain


def value(text: str, **more: object) -> object:
    document = parse(f"a: {text}", **more)  # pyright: ignore[reportArgumentType]
    assert document.diagnostics == []
    return document.plain(mask_secrets=False)["a"]


def codes(document: Document) -> list[str]:
    return [fault.code for fault in document.diagnostics]


def one(document: Document) -> str:
    assert len(document.diagnostics) == 1, document.diagnostics
    return document.diagnostics[0].render()


# ---------------------------------------------------------------- YAML 1.2 values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None), ("~", None), ("null", None), ("Null", None), ("NULL", None), ("nULL", "nULL"),
        ("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False), ("FALSE", False),
        ("yes", "yes"), ("on", "on"), ("no", "no"), ("Off", "Off"), ("y", "y"),
        ("0", 0), ("-7", -7), ("+7", 7), ("010", 10), ("0o17", 15), ("0xfF", 255), ("0b1", "0b1"),
        ("1_000", "1_000"), ("0x", "0x"), ("-0o7", "-0o7"),
        ("1e-4", 1e-4), ("1.", 1.0), (".5", 0.5), ("-1.5E+3", -1500.0), ("1e", "1e"), ("+", "+"), (".", "."),
        (".inf", math.inf), ("-.Inf", -math.inf), ("+.INF", math.inf), ("inf", "inf"), ("nan", "nan"),
        ("12:30:45", "12:30:45"), ("2024-01-02", "2024-01-02"), ("1.2.3", "1.2.3"), ("=", "="),
        ('"1"', "1"), ("'true'", "true"), ("''", ""), ("|\n  5\n", "5\n"),
    ],
)  # fmt: skip
def test_scalars_are_yaml_1_2(text: str, expected: object) -> None:
    got = value(text)
    assert got == expected
    assert type(got) is type(expected)


def test_nan() -> None:
    assert math.isnan(value(".nan"))  # pyright: ignore[reportArgumentType]


def test_a_number_of_more_digits_than_python_converts_is_text() -> None:
    assert read_plain("9" * 5000) == "9" * 5000


def test_the_key_on_is_text() -> None:
    assert parse("on: cuda:0\nyes: 1\n12:30: x").plain() == {"on": "cuda:0", "yes": 1, "12:30": "x"}


@pytest.mark.parametrize("key", ["1", "true", "~", "1e-4"])
def test_a_key_that_is_not_text_is_refused(key: str) -> None:
    assert codes(parse(f"{key}: x")) == ["wrong-type"]
    assert parse(f'"{key}": x').plain() == {key: "x"}


def test_a_key_that_is_a_list_is_refused() -> None:
    assert codes(parse("? [a]\n: x")) == ["wrong-type"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64KiB", 65536), ("8GiB", 8 * 2**30), ("2GB", 2 * 10**9), ("1.5KiB", 1536), ("7B", 7),
     ("3 MB", 3_000_000),
     ("64kB", 64_000), ("1TiB", 2**40), ("8G", None), ("8gib", None), ("0.3B", None), ("-1MB", None),
     ("2.4GiB", 2_576_980_378),
     ("MB", None), ("8GiBB", None), ("1e3MB", None), ("1kiB", None)],
)  # fmt: skip
def test_sizes(text: str, expected: int | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("2h", 7200.0), ("1.5h", 5400.0), ("0.1s", 0.1),
     ("30", None),
     ("-1s", None), ("5 min", None), ("1h30m", None), ("s", None)],
)  # fmt: skip
def test_durations(text: str, expected: float | None) -> None:
    assert parse_duration(text) == expected


# ---------------------------------------------------------------- places


TEXT = """\
# a comment
name: x
stages:
  train:
    with: {lr: 1e-4, sizes: [1, é, 3]}
"""


def test_keys_and_values_know_their_places() -> None:
    document = parse(TEXT, file="p.yaml")
    path = ("stages", "train", "with", "lr")
    line = "    with: {lr: 1e-4, sizes: [1, é, 3]}"
    assert document.place(path) == Place("p.yaml", 5, 16, line)
    assert document.place(path, key=True) == Place("p.yaml", 5, 12, line)
    assert document.place(("stages", "train", "with", "sizes", 2)) == Place("p.yaml", 5, 36, line)
    assert document.place(("stages",), key=True)[:3] == ("p.yaml", 3, 1)


def test_the_place_of_what_is_not_there_is_that_of_its_nearest_parent() -> None:
    document = parse(TEXT, file="p.yaml")
    assert document.place(("stages", "train", "with", "wd")) == document.place(("stages", "train", "with"))
    assert document.place(("stages", "none", "with", "wd"), key=True)[:3] == ("p.yaml", 3, 1)
    assert document.place(("run",)) == document.root.place
    assert document.place(("stages", "train", "with", "sizes", 9))[:3] == ("p.yaml", 5, 29)
    assert document.node(("name", "x")) is None


def test_a_very_long_line_is_not_shown() -> None:
    document = parse("a: 1\nb: [" + "1, " * 500 + "!x 1]")
    assert document.diagnostics[0].text == ""
    assert document.diagnostics[0].column == 1505


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("a: 1\n---\nb: 2", "a second document begins here", (2, 1)),
        ("a:\n\tb: 1", "a tab stands in the indentation", (2, 1)),
        ("a: b: c", "`: ` cannot stand here", (1, 5)),
        ("a: @x", "unquoted text cannot begin with @", (1, 4)),
        ("a: *b", "names no anchor", (1, 4)),
        ("a: {b: ${params.x}}", "cannot stand unquoted inside { }", (1, 9)),
        ("a: 'b", "the file ends inside quoted text", (1, 6)),
        ("a: [1, 2\nb: 3", "not YAML", (2, 2)),
        ("a: b\x07", "control character U+0007", (1, 5)),
        ("", "the file is empty", (1, 1)),
        ("# only a comment\n", "the file is empty", (1, 1)),
        ("null", "the file is empty", (1, 1)),
        ("[" * 5000, "nesting", (1, 1001)),
        ("- " * 5000 + "x", "nesting", (1, 1999)),
    ],
)
def test_what_yaml_itself_refuses(text: str, message: str, place: tuple[int, int]) -> None:
    document = parse(text, file="p.yaml")
    assert document.unreadable
    assert codes(document) == ["syntax"]
    assert message in one(document)
    assert (document.diagnostics[0].line, document.diagnostics[0].column) == place


@pytest.mark.parametrize(("text", "got"), [("- a", "a list"), ("text", "a single value")])
def test_the_root_must_be_a_mapping(text: str, got: str) -> None:
    document = parse(text)
    assert codes(document) == ["wrong-type"]
    assert f"this is {got}" in one(document)


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system [ls]", "!!str 5", "!mine {}", "!!set {a}", "! 5", "&x ! 5"]
)
def test_tags_are_refused(tag: str) -> None:
    document = parse(f"a: {tag}")
    assert codes(document) == ["syntax"]
    assert f"the tag {tag.replace('&x ', '').split()[0]} is not allowed" in one(document)


def test_a_tag_on_a_key_is_refused() -> None:
    assert codes(parse("!!str a: 1")) == ["syntax"]


def test_merge_keys_are_refused_with_the_remedy() -> None:
    document = parse("a: &x {b: 1}\nc:\n  <<: *x")
    assert codes(document) == ["syntax"]
    assert "extends" in document.diagnostics[0].remedy
    assert parse('"<<": 1').plain() == {"<<": 1}


def test_duplicate_keys_at_every_depth_name_the_first() -> None:
    document = parse('a: 1\nb: [{c: 1, "c": 2}]\na: 3\n', file="p.yaml")
    assert codes(document) == ["duplicate-key", "duplicate-key"]
    deep, top = document.diagnostics
    assert (deep.path, deep.line, deep.column) == ("b[0].c", 2, 12)
    assert "first at p.yaml:2:6" in deep.message
    assert (top.path, top.line) == ("a", 3)


def test_aliases_give_the_same_node() -> None:
    document = parse("a: &x {b: 1}\nc: *x")
    assert document.diagnostics == []
    assert document.node(("a",)) is document.node(("c",))


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: {c: *x}}"])
def test_an_alias_of_itself_is_refused(text: str) -> None:
    assert "inside its own anchor" in one(parse(text))


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_an_alias_bomb_is_refused_at_once() -> None:
    assert parse(bomb(3)).diagnostics == []
    document = parse(bomb(30))
    assert document.unreadable
    assert "make over 200,000 values" in one(document)
    assert document.diagnostics[0].text.startswith("a5:")


def test_a_bomb_of_parameters_is_refused_at_once() -> None:
    lines = ["params:", "  a0: [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 20):
        lines += [f"  a{i}:", *[f"    - ${{params.a{i - 1}}}"] * 10]
    document = parse("\n".join(lines))
    assert document.unreadable
    assert "make over 200,000 values" in one(document)


def test_nesting_has_a_limit() -> None:
    deep = "x"
    for _ in range(MAX_DEPTH + 5):
        deep = f"[{deep}]"
    assert codes(parse(f"a: {deep}")) == ["syntax"]


def test_all_faults_come_in_one_go() -> None:
    text = "a: !x 1\nb: 1\nb: 2\n3: x\nc: ${env:NOPE}\nd: ${params.x}\ne: ${what}\n"
    document = parse(text, env={}, overrides=["zz=1", "novalue"])
    expected = [
        "syntax",
        "duplicate-key",
        "wrong-type",
        "unknown-key",
        "syntax",
        "missing-env",
        "unknown-key",
        "syntax",
    ]
    assert codes(document) == expected


# ---------------------------------------------------------------- files


def test_a_missing_file(tmp_path: Path) -> None:
    document = load(tmp_path / "none.yaml")
    assert document.unreadable
    assert "there is no such file" in one(document)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "cannot read" in one(load(tmp_path))


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"a: 1\nb: caf" + b"\xe9\n")
    document = load(path)
    assert "byte 0xe9 is not UTF-8" in one(document)
    assert (document.diagnostics[0].line, document.diagnostics[0].column) == (2, 7)


def test_a_byte_order_mark_and_windows_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    document = load(path)
    assert document.plain() == {"a": 1, "b": 2}
    assert document.place(("b",)) == Place(str(path), 2, 4, "b: 2")


# ---------------------------------------------------------------- references


def test_a_plain_reference_is_read_as_a_scalar() -> None:
    env = {"PORT": "8080", "LR": "1e-4", "T": "[1, 2]", "M": "a: b", "E": ""}
    assert value("${env:PORT}", env=env) == 8080
    assert value("${env:LR}", env=env) == 1e-4
    assert value("${env:T}", env=env) == "[1, 2]"
    assert value("${env:M}", env=env) == "a: b"
    assert value("${env:E}", env=env) is None


def test_quoted_or_embedded_references_are_text() -> None:
    env = {"PORT": "8080"}
    assert value('"${env:PORT}"', env=env) == "8080"
    assert value("'${env:PORT}'", env=env) == "8080"
    assert value("x${env:PORT}", env=env) == "x8080"
    assert value("${env:PORT}${env:PORT}", env=env) == "80808080"


def test_defaults() -> None:
    assert value("${env:N:-3}", env={}) == 3
    assert value("${env:N:-3}", env={"N": ""}) == 3
    assert value("${env:N:-3}", env={"N": "4"}) == 4
    assert value("a${env:N:-}b", env={}) == "ab"
    assert value('"${env:N:-a:-b}"', env={}) == "a:-b"


def test_a_variable_holds_no_references_of_its_own() -> None:
    assert value("${env:N}", env={"N": "${env:OTHER}"}) == "${env:OTHER}"


def test_escapes() -> None:
    assert value("$${env:N}") == "${env:N}"
    assert value("$$${x}") == "$${x}"
    assert value("$5 and $") == "$5 and $"


def test_all_missing_variables_are_reported() -> None:
    document = parse("a: ${env:A} ${env:B}\nb: [x, '${secret:C}']", env={})
    assert codes(document) == ["missing-env"] * 3
    assert [fault.path for fault in document.diagnostics] == ["a", "a", "b[1]"]
    assert document.diagnostics[2].column == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${x}", "is not a reference"), ("${enw:A}", "did you mean 'env'"),
        ("${param.x}", "did you mean 'params'"),
        ("${env:A", "not closed"), ("a ${env:{A}}", "not closed"), ("${env:9}", "is not a reference"),
        ("${secret:A:-b}", "is not a reference"),
        ("${params}", "is not a reference"), ("${}", "is not a reference"),
    ],
)  # fmt: skip
def test_what_is_no_reference(text: str, message: str) -> None:
    document = parse(f"a: '{text}'", env={"A": "1"})
    assert codes(document) == ["syntax"]
    assert message in one(document)


def test_a_key_holds_no_reference() -> None:
    assert codes(parse("${env:A}: 1")) == ["syntax"]


def test_a_variable_that_is_not_text() -> None:
    assert codes(parse("a: ${env:A}", env={"A": "\udce9"})) == ["wrong-type"]


PARAMS = "params: {n: 3, v: 1.10, t: '5', m: {k: [1, 2], z: ~}, dir: data}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${params.n}", 3), ("'${params.n}'", 3), ("v${params.v}", "v1.10"), ("${params.t}", "5"),
        ("${params.m}", {"k": [1, 2], "z": None}), ("'${params.m.k}'", [1, 2]), ("${params.m.z}", None),
        ("${params.dir}/x", "data/x"),
    ],
)  # fmt: skip
def test_parameters(text: str, expected: object) -> None:
    document = parse(f"{PARAMS}a: {text}")
    assert document.diagnostics == []
    got = document.plain()["a"]
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("${params.nn}", "unknown-key", "did you mean 'n'?"),
        ("${params.m.kk}", "unknown-key", "there is no params.m.kk"),
        ("${params.n.x}", "unknown-key", "params.n is not a mapping"),
        ("x${params.m}", "wrong-type", "is a mapping, which cannot stand within text"),
        ("x${params.m.z}", "wrong-type", "is null"),
    ],
)
def test_wrong_parameters(text: str, code: str, message: str) -> None:
    document = parse(f"{PARAMS}a: {text}")
    assert codes(document) == [code]
    assert message in one(document)


def test_a_parameter_keeps_the_place_of_its_definition() -> None:
    document = parse(f"{PARAMS}a: ${{params.n}}", file="p.yaml")
    assert document.place(("a",))[:3] == ("p.yaml", 1, 13)


def test_parameters_may_refer_to_parameters() -> None:
    text = "params:\n  a: ${params.m.x}\n  m: {y: 2, x: '${params.m.y}', z: '${env:E}'}\n"
    text += "b: ${params.a}${params.m.z}"
    assert parse(text, env={"E": "!"}).plain()["b"] == "2!"


@pytest.mark.parametrize(
    ("text", "circle"),
    [
        ("  a: ${params.b}\n  b: ${params.a}\n", "params.b -> params.a -> params.b"),
        ("  a: ${params.a}\n", "params.a -> params.a"),
        ("  a:\n    b: ${params.a}\n", "params.a -> params.a"),
        ("  a: x${params.b.c}\n  b: ${params.a}\n", "params.b -> params.a -> params.b"),
    ],
)
def test_a_circle_of_parameters_is_named_once(text: str, circle: str) -> None:
    document = parse("params:\n" + text)
    assert codes(document) == ["syntax"]
    assert f"in a circle: {circle}" in one(document)


def test_a_long_chain_of_parameters_is_an_error_and_not_a_crash() -> None:
    lines = ["params:", "  p0: 1", *[f"  p{i}: ${{params.p{i - 1}}}" for i in range(1, 300)]]
    assert parse("\n".join(lines)).plain()["params"]["p299"] == 1  # in order, each is resolved by then
    document = parse("\n".join([lines[0], *reversed(lines[1:])]))
    assert set(codes(document)) == {"syntax"}
    assert "too many others in turn" in document.diagnostics[0].message


def test_deep_parameters_in_a_long_chain_are_no_crash() -> None:
    lines = [f"  p{i}: {'[' * 50}'${{params.p{i + 1}}}'{']' * 50}" for i in range(40)]
    document = parse("\n".join(["params:", *lines, "  p40: x"]))
    assert set(codes(document)) == {"syntax"}


def test_a_missing_variable_in_a_parameter_is_reported_once() -> None:
    document = parse("params: {a: '${env:N}'}\nx: ${params.a}\ny: v${params.a}", env={})
    assert codes(document) == ["missing-env"]
    assert document.diagnostics[0].path == "params.a"


SECRET = "t: ${secret:TOKEN}\nu: 'Bearer ${secret:TOKEN} $${x}'\n"
SECRET += "params: {p: '${secret:TOKEN}'}\nw: k=${params.p}\n"


def test_secrets_are_used_but_not_shown() -> None:
    document = parse(SECRET, env={"TOKEN": "12345"})
    assert document.plain(mask_secrets=False) == {
        "t": 12345, "u": "Bearer 12345 ${x}", "params": {"p": "12345"}, "w": "k=12345",
    }  # fmt: skip
    assert "12345" not in document.to_yaml()
    assert "12345" not in str(document.plain())
    assert document.plain()["t"] == "${secret:TOKEN}"
    assert "12345" in document.to_yaml(mask_secrets=False)


def test_a_masked_document_loads_to_the_same_values() -> None:
    env = {"TOKEN": "12345"}
    document = parse(SECRET, env=env)
    again = parse(document.to_yaml(), env=env)
    assert again.diagnostics == []
    assert again.plain(mask_secrets=False) == document.plain(mask_secrets=False)


# ---------------------------------------------------------------- extends


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_extends_merges_deeply_and_keeps_places(tmp_path: Path) -> None:
    write(
        tmp_path,
        base__base="pipeflow: 1\nparams: {n: 1, m: 2}\nstages:\n  a: {uses: x, with: {p: in.txt, l: [1]}}\n",
        top="extends: base/base.yaml\nparams: {n: 5}\nstages:\n  a: {with: {l: [3]}}\n  b: {uses: y}\n",
    )
    document = load(tmp_path / "top.yaml")
    assert document.diagnostics == []
    assert document.plain() == {
        "pipeflow": 1,
        "params": {"n": 5, "m": 2},
        "stages": {"a": {"uses": "x", "with": {"p": "in.txt", "l": [3]}}, "b": {"uses": "y"}},
    }
    assert document.place(("params", "n"))[:2] == (str(tmp_path / "top.yaml"), 2)
    assert document.place(("params", "m"))[:2] == (str(tmp_path / "base" / "base.yaml"), 2)
    path = document.node(("stages", "a", "with", "p"))
    assert isinstance(path, Scalar)
    assert path.folder == tmp_path / "base"


def test_a_base_is_shown_relative_where_the_file_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, dir__base="a: 1\na: 2\n", dir__top="extends: base.yaml\n")
    monkeypatch.chdir(tmp_path)
    assert load("dir/top.yaml").diagnostics[0].file == "dir/base.yaml"


def test_faults_of_the_base_are_reported_too(tmp_path: Path) -> None:
    write(tmp_path, base="a: 1\na: 2\n", top="extends: base.yaml\nb: 1\nb: 2\n")
    document = load(tmp_path / "top.yaml")
    assert sorted((Path(f.file).name, f.line) for f in document.diagnostics) == [
        ("base.yaml", 2),
        ("top.yaml", 3),
    ]


def test_references_and_overrides_see_the_merged_file(tmp_path: Path) -> None:
    write(tmp_path, base="params: {n: 1}\nx: ${params.n}\n", top="extends: base.yaml\nparams: {n: 2}\n")
    assert load(tmp_path / "top.yaml").plain()["x"] == 2
    assert load(tmp_path / "top.yaml", overrides=["n=3"]).plain()["x"] == 3


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("none.yaml", "there is no such file"), ("top.yaml", "in a circle: top.yaml -> top.yaml"),
        ("ring.yaml", "in a circle: top.yaml -> ring.yaml -> top.yaml"), ("[a, b]", "the path of one file"),
        ("'${env:X}'", "before references are resolved"), ("empty.yaml", "the file is empty"),
    ],
)  # fmt: skip
def test_a_base_that_cannot_be(tmp_path: Path, named: str, message: str) -> None:
    write(tmp_path, top=f"a: 1\nextends: {named}\n", ring="extends: top.yaml\n", empty="")
    document = load(tmp_path / "top.yaml")
    assert document.unreadable
    assert message in one(document)


# ---------------------------------------------------------------- overrides


FILE = """\
params: {steps: 200, opt: {lr: 1e-3}, target: {model: m}, ref: "${env:E:-e}"}
resources:
  net: {uses: n, with: {model: a}}
stages:
  train:
    uses: t
    with: &w {lr: 1.0, opt: {wd: 0, lr: "${params.opt.lr}"}, steps: "${params.steps}"}
  other: {uses: t, with: *w}
  target: {uses: t}
  bare:
    uses: t
    with:
run: {seed: 0}
"""


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("steps=50", ("params", "steps"), 50),
        ("params.steps=50", ("params", "steps"), 50),
        ("opt.lr=1e-4", ("params", "opt", "lr"), 1e-4),
        ("steps=[1, 2]", ("params", "steps"), [1, 2]),
        ("steps={a: 1}", ("params", "steps"), {"a": 1}),
        ("steps=", ("params", "steps"), None),
        ("steps='5'", ("params", "steps"), "5"),
        ("steps=a=b", ("params", "steps"), "a=b"),
        ("steps=yes", ("params", "steps"), "yes"),
        ("steps=${env:E:-7}", ("params", "steps"), 7),
        ("train.lr=2", ("stages", "train", "with", "lr"), 2),
        ("train.with.lr=2", ("stages", "train", "with", "lr"), 2),
        ("stages.train.with.lr=2", ("stages", "train", "with", "lr"), 2),
        ("train.opt.wd=2", ("stages", "train", "with", "opt", "wd"), 2),
        ("train.fresh=2", ("stages", "train", "with", "fresh"), 2),
        ("train.fresh.er=2", ("stages", "train", "with", "fresh", "er"), 2),
        ("bare.x=2", ("stages", "bare", "with", "x"), 2),
        ("stages.target.with.x=2", ("stages", "target", "with", "x"), 2),
        ("resources.net.with.model=b", ("resources", "net", "with", "model"), "b"),
    ],
)
def test_overrides(override: str, path: tuple[str, ...], expected: object) -> None:
    document = parse(FILE, overrides=[override], env={})
    assert document.diagnostics == []
    got: object = document.plain()
    for part in path:
        got = got[part]  # pyright: ignore
    assert got == expected
    assert type(got) is type(expected)
    assert document.place(path) == Place(f"override {override!r}", 0, 0)


def test_an_override_feeds_references() -> None:
    document = parse(FILE, overrides=["steps=50"], env={})
    assert document.plain()["stages"]["train"]["with"]["steps"] == 50
    assert document.place(("stages", "train", "with", "steps")).file == "override 'steps=50'"


def test_an_override_of_a_shared_mapping_changes_one_stage() -> None:
    stages = parse(FILE, overrides=["train.lr=2"], env={}).plain()["stages"]
    assert (stages["train"]["with"]["lr"], stages["other"]["with"]["lr"]) == (2, 1.0)


def test_the_last_override_wins() -> None:
    assert parse(FILE, overrides=["steps=1", "steps=2"], env={}).plain()["params"]["steps"] == 2


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("steps", "syntax", "needs an `=`"),
        ("=5", "syntax", "needs a key"),
        ("a..b=5", "syntax", "needs a key"),
        ("steps=[1", "syntax", "steps"),
        ("steps=!x 1", "syntax", "the tag !x"),
        ("steps={a: 1, a: 2}", "duplicate-key", "steps.a"),
        ("stepz=5", "unknown-key", "did you mean 'steps'?"),
        ("params.stepz=5", "unknown-key", "did you mean 'steps'?"),
        ("opt.lrr=5", "unknown-key", "did you mean 'lr'?"),
        ("steps.x=5", "unknown-key", "params.steps is a single value"),
        ("ref.x=5", "unknown-key", "params.ref is a reference"),
        ("trian.lr=5", "unknown-key", "did you mean 'train'?"),
        ("train=5", "unknown-key", "'train' is a stage"),
        ("train.with=5", "unknown-key", "names no option"),
        ("train.lr.x=5", "unknown-key", "stages.train.with.lr is a single value"),
        ("stages.trian.with.lr=5", "unknown-key", "did you mean 'train'?"),
        ("stages.train.in_flight=5", "unknown-key", "only the options"),
        ("resources.nett.with.x=5", "unknown-key", "did you mean 'net'?"),
        ("target.model=5", "unknown-key", "is a parameter and a stage"),
        ("run.seed=5", "unknown-key", "reaches only params"),
        ("zzz=5", "unknown-key", "parameters: steps, opt, target, ref"),
    ],
)
def test_overrides_that_are_refused(override: str, code: str, message: str) -> None:
    document = parse(FILE, overrides=[override], env={})
    assert codes(document) == [code]
    assert message in one(document)
    assert document.diagnostics[0].file == f"override {override!r}"
    assert (document.diagnostics[0].line, document.diagnostics[0].column) == (0, 0)


def test_every_refused_override_is_reported() -> None:
    assert codes(parse(FILE, overrides=["a=1", "steps=3", "b"], env={})) == ["unknown-key", "syntax"]


# ---------------------------------------------------------------- dicts, and writing


def test_a_dict_is_a_document(tmp_path: Path) -> None:
    data = {
        "params": {"n": 3},
        "a": ["5", "${params.n}", "x${env:E}"],
        "p": Path("in.txt"),
        "t": (1, 2.5, None, True),
    }
    document = from_dict(data, folder=tmp_path, env={"E": "!"}, overrides=["n=4"])
    assert document.diagnostics == []
    expected = {"params": {"n": 4}, "a": ["5", 4, "x!"], "p": "in.txt", "t": [1, 2.5, None, True]}
    assert document.plain() == expected
    assert document.place(("a", 0)) == Place("<dict>", 0, 0)
    assert document.folder == tmp_path


def test_a_dict_may_extend_a_file(tmp_path: Path) -> None:
    write(tmp_path, base="a: 1\nb: 2\n")
    assert from_dict({"extends": "base.yaml", "a": 3}, folder=tmp_path).plain() == {"a": 3, "b": 2}


def test_what_a_dict_cannot_hold() -> None:
    assert codes(from_dict({"a": object(), "b": {1: 2}, "c": "${env:N}"}, env={})) == [
        "wrong-type", "wrong-type", "missing-env",
    ]  # fmt: skip
    endless: dict[str, object] = {}
    endless["a"] = endless
    assert codes(from_dict(endless)) == ["syntax"]


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXTS = ANY_TEXT | st.sampled_from(
    ["yes", "on", "010", "1e-4", "~", "null", "", " a", "a ", "a: b", "- a", "#", "a #b", "${env:X}", "$${x}",
     "$$$${", "12:30", "x:", "'", '"', "\\", "\n", "a\nb", "...", "---", "a" * 1200, "cuda:0", "./x", "<<",
     "!x", "&a", "*a", "\x85", "\u2028", "\ufeff", "\ufffe", "\U0001f600", "\x00", "\x7f", "Null", "TRUE",
     ".inf", "0x1F", "1.", "="]
)  # fmt: skip
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
# A key cannot hold `${`, and `extends` has a meaning.
KEYS = TEXTS.filter(lambda text: "${" not in text and text != "extends")


def keys_only(tree: object) -> object:
    if isinstance(tree, dict):
        return {k.replace("$", "%"): keys_only(v) for k, v in tree.items()}
    return [keys_only(item) for item in tree] if isinstance(tree, list) else tree


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_what_is_written_is_read_back(tree: dict[str, object]) -> None:
    tree = {key: keys_only(item) for key, item in tree.items()}
    written = from_dict(escaped(tree), env={}).to_yaml()  # pyright: ignore[reportArgumentType]
    again = parse(written, env={})
    assert again.diagnostics == []
    assert same(again.plain(), tree), written


def escaped(tree: object) -> object:
    if isinstance(tree, dict):
        return {k: escaped(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [escaped(item) for item in tree]
    return tree.replace("${", "$${") if isinstance(tree, str) else tree


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_block_style_that_other_readers_agree_on() -> None:
    yaml = pytest.importorskip("yaml")
    document = parse("a: {on: 'yes', lr: 1e-5, l: [1, [2, {x: w, z: []}], {}], n: .nan, t: 'cuda:0'}")
    written = document.to_yaml()
    assert written == (
        'a:\n  on: "yes"\n  lr: 1.0e-05\n  l:\n    - 1\n    - - 2\n      - x: w\n        z: []\n    - {}\n'
        "  n: .nan\n  t: cuda:0\n"
    )
    assert yaml.safe_load(written)["a"]["lr"] == 1e-5


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"#,? \n\t$%@`.~<1é\x07"), max_size=40))
def test_no_text_makes_it_raise(text: str) -> None:
    document = parse(text, env={}, overrides=[text])
    assert isinstance(document.root, MapNode)
    document.to_yaml()
    for fault in document.diagnostics:
        fault.render()


def test_the_pure_python_loader_reads_the_same() -> None:
    """Where PyYAML was built without libyaml."""
    code = (
        "import yaml; del yaml.CSafeLoader\n"
        "from pipeflow.document import parse\n"
        "d = parse('a: 1e-4\\non: yes\\nb: {c: \"1\", d: [x]}\\ne: &x [1]\\nf: *x\\n')\n"
        "b = {'c': '1', 'd': ['x']}\n"
        "assert d.plain() == {'a': 1e-4, 'on': 'yes', 'b': b, 'e': [1], 'f': [1]}, d\n"
        "assert d.place(('b', 'c'))[1:3] == (3, 8), d.place(('b', 'c'))\n"
        "assert parse('a: ' + '[' * 3000).diagnostics\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "import pipeflow.document, pipeflow.validate, pipeflow.schema\n"
        "assert pipeflow.validate.spec_of(pipeflow.document.parse('pipeflow: 1\\nname: a\\nstages: {}'))[0]\n"
        "pipeflow.schema.json_schema()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
