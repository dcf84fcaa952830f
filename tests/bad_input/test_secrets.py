"""No secret is shown or saved: not by findings, drawings, errors, tracebacks, nor any file of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.check import check_document
from pipeflow.cli.__main__ import main
from pipeflow.document import parse
from pipeflow.observe.folder import RunFolder
from pipeflow.scrub import Scrubber

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "hush'\"\\7 \u00e9\nx"
"""Every writer has to escape something of it."""
ENV = {"S": SECRET, "LONG": "hushhush-and-more", "PART": "hushhush", "TWO": "ab", "EMPTY": ""}

FILE = """\
pipeflow: 1
name: leaky
params: {key: "Bearer ${secret:PIPEFLOW_TEST_SECRET}"}
stages:
  numbers: {uses: "leaky_stages:numbers", with: {key: "${params.key}"}}
  show: {uses: "leaky_stages:show", from: numbers, on_error: ON_ERROR, with: {key: "${params.key}", at: AT}}
run: {step: show}
"""
STAGES = """\
from collections.abc import Iterator

import pipeflow


@pipeflow.stage
def numbers(*, key: str) -> Iterator[dict]:
    for each in range(4):
        yield {"number": each, "key": key}


class Show(pipeflow.Stage[dict, None]):
    class Config(pipeflow.Config, frozen=True, kw_only=True):
        key: str
        at: str

        def __post_init__(self):
            if self.at == "options":
                raise ValueError(f"{self.key!r} is refused")

    def _fail(self, at):
        if self.config.at == at:
            raise RuntimeError(f"refused: {self.config.key}", self.config.key)

    def setup(self, ctx):
        self._fail("setup")

    def run(self, item: dict, ctx: pipeflow.Context) -> None:
        ctx.log(key=self.config.key, both=[{self.config.key: 1}])
        ctx.report(key=self.config.key)
        self._fail("run")

    def close(self):
        self._fail("close")


show = Show
"""


def shows(text: str) -> bool:
    """Whether any form of the secret, or a part of it that is long enough to know it by, is there."""
    return "hush" in text


@pytest.fixture
def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import sys

    (tmp_path / "leaky_stages.py").write_text(STAGES)
    monkeypatch.setenv("PIPEFLOW_TEST_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEFLOW_NO_PROGRESS", "1")
    monkeypatch.delitem(sys.modules, "leaky_stages", raising=False)

    def run(
        command: str,
        at: str,
        on_error: str = "stop",
        *more: str,
        uses: str = "leaky_stages:show",
        source: str = "numbers",
    ) -> int:
        file = tmp_path / "leaky.yaml"
        text = FILE.replace("AT}", at + "}").replace("ON_ERROR", on_error)
        text = text.replace('"leaky_stages:show"', f'"{uses}"').replace("from: numbers", f'from: "{source}"')
        file.write_text(text)
        with pytest.raises(SystemExit) as left:
            main([command, str(file), *more])
        return int(left.value.code or 0)

    yield run
    sys.modules.pop("leaky_stages", None)


@pytest.mark.parametrize(
    ("at", "on_error", "code"),
    [
        ("nowhere", "stop", 0),
        ("options", "stop", 1),
        ("setup", "stop", 1),
        ("run", "stop", 1),
        ("run", "{skip: 9}", 0),
        ("close", "stop", 1),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_neither_shows_nor_saves_a_secret(
    at: str, on_error: str, code: int, as_json: bool, leaky: Any, tmp_path: Path, capfd: Any
) -> None:
    options = ["--run-dir", "r", *(["--json"] if as_json else [])]
    assert leaky("run", at, on_error, *options) == code
    told = capfd.readouterr()
    assert not shows(told.out + told.err)
    if at != "nowhere" and on_error == "stop":
        assert "${secret:PIPEFLOW_TEST_SECRET}" in told.err
    if at == "options":
        return
    written = {path.name: path.read_text() for path in (tmp_path / "r").iterdir() if path.is_file()}
    assert not any(shows(text) for text in written.values())
    assert "summary.json" in written
    if at == "run" and on_error != "stop":
        assert "Bearer ${secret:PIPEFLOW_TEST_SECRET}" in written["dead_letter.jsonl"]
        assert "Bearer ${secret:PIPEFLOW_TEST_SECRET}" in written["metrics.jsonl"]
    if at in ("setup", "run", "close") and on_error == "stop":
        assert "leaky_stages.py" in told.err, "the user's traceback"


@pytest.mark.parametrize("command", ["check", "graph"])
@pytest.mark.parametrize("source", ["numbers", "${secret:PIPEFLOW_TEST_SECRET}"])
def test_findings_and_drawings(command: str, source: str, leaky: Any, capfd: Any) -> None:
    assert leaky(command, "nowhere", source=source) == (source != "numbers")
    told = capfd.readouterr()
    assert not shows(told.out + told.err)
    if source != "numbers":
        assert "there is no stage '${secret:PIPEFLOW_TEST_SECRET}'" in told.out + told.err


GOOD = {
    "name": "x",
    "uses": "input",
    "on": "cpu",
    "from": "a",
    "reads": "r",
    "writes": "r",
}


@pytest.mark.parametrize("key", GOOD)
@pytest.mark.parametrize("value", ["${secret:LONG}", "x${secret:LONG}", "${params.key}"])
def test_a_secret_belongs_under_with(key: str, value: str) -> None:
    def of(wanted: str) -> str:
        return f"'{value}'" if key == wanted else GOOD[wanted]

    text = (
        f"pipeflow: 1\nname: {of('name')}\nparams: {{key: '${{secret:LONG}}'}}\n"
        "stages:\n  a: {uses: input}\n"
        f"  b: {{uses: {of('uses')}, from: {of('from')}, on: {of('on')}, reads: {of('reads')}, "
        f"writes: {of('writes')}}}\n"
    )
    report = check_document(parse(text, env=ENV), env=ENV)
    path = "name" if key == "name" else f"stages.b.{key}"
    (found,) = [each for each in report.errors if each.message == "a secret cannot stand here"]
    assert (found.code, found.path) == ("wrong-type", path)
    assert "under `with`" in found.remedy
    assert not any("hush" in each.render() for each in report.diagnostics)


def test_a_short_secret_is_refused_and_an_empty_one_ignored() -> None:
    document = parse("params: {a: '${secret:TWO}', b: '${secret:EMPTY}'}", env=ENV)
    (found,) = document.diagnostics
    assert (found.code, found.path) == ("wrong-type", "params.a")
    assert "shorter than 4 characters" in found.message
    assert not document.scrub


def test_the_longest_goes_first_and_twice_is_once() -> None:
    document = parse("params: {a: '${secret:PART}', b: '${secret:LONG}'}", env=ENV)
    once = document.scrub("hushhush hushhush-and-more")
    assert once == "${secret:PART} ${secret:LONG}" == document.scrub(once)
    odd = Scrubber({"secret": "${secret:ODD}"})
    assert odd(odd("a secret")) == "a ${secret:ODD}"


def test_values_of_every_kind_are_scrubbed_and_the_rest_left() -> None:
    scrub = Scrubber({"12345": "${secret:N}"})
    value = {"12345": [12345, 1, True, None, 0.5], "path": ValueError("x12345")}
    assert scrub.values(value) == {
        "${secret:N}": ["${secret:N}", 1, True, None, 0.5],
        "path": "x${secret:N}",
    }


def test_a_dead_letter_is_scrubbed_before_it_is_cut(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Scrubber({"hushhush": "${secret:S}"}))
    folder.create()
    folder.dead_letter("s", 1, ValueError("no"), "x" * 1996 + "hushhush")
    folder.close()
    line = json.loads((tmp_path / "dead_letter.jsonl").read_text())
    assert "hush" not in line["item"]


@pytest.mark.parametrize("form", ["text", "mermaid", "dot"])
def test_a_misplaced_secret_is_not_drawn(form: str, leaky: Any, capfd: Any) -> None:
    misplaced = "${secret:PIPEFLOW_TEST_SECRET}"
    assert leaky("graph", "nowhere", "stop", "--format", form, uses=misplaced) == 1
    told = capfd.readouterr()
    assert not shows(told.out + told.err)
    assert "${secret:PIPEFLOW_TEST_SECRET}" in told.out
