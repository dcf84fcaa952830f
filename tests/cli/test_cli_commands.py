"""check, graph, schema, stages, init, doctor: their texts, their JSON, their exit codes."""

from __future__ import annotations

import errno
import json
import sys
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from commands import pipeflow

from pipeflow.cli import doctor
from pipeflow.cli.check import command as check
from pipeflow.cli.graph import command as graph
from pipeflow.cli.init import command as init
from pipeflow.cli.schema import command as schema
from pipeflow.cli.stages import command as stages

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
pipeflow: 1
name: good
params: {steps: 5}
resources:
  model: {uses: beside:Model, on: cpu}
stages:
  numbers: {uses: beside:numbers, with: {count: "${params.steps}"}}
  route: {uses: route, from: numbers, with: {by: kind, ports: [a, b]}}
  train: {uses: beside:Train, from: numbers, on: cpu, writes: model}
  look: {uses: beside:look, from: route.a, replicas: 2, reads: model}
  barrier: {uses: barrier, from: train, every: 50}
  release: {uses: release_cache, from: barrier}
"""
BESIDE = '''\
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

import pipeflow
from pipeflow import Resource, Stage


class Model(Resource):
    """A model. It is small."""


@pipeflow.stage
def numbers(*, count: int = 3) -> Iterator[int]:
    yield from range(count)


@pipeflow.stage
def look(item: int) -> None:
    """Looks at an item."""


class Train(Stage):
    """Trains a model.

    In a second paragraph.
    """

    class Config(pipeflow.Config):
        rate: Annotated[float, Meta(gt=0)]
        """Learning rate."""
        warm: bool = True
        wait: pipeflow.Duration = 1.5

    stateful = True
    writes = {"model": Model}

    def run(self, item: int) -> int:
        return item
'''

KINDS = """\
from collections.abc import Iterator

import pipeflow
from pipeflow import Gather


@pipeflow.stage
def numbers() -> Iterator[int]:
    yield from range(3)


@pipeflow.stage
def each(item: int) -> Iterator[int]:
    yield item


class Pairs(Gather):
    def full(self, members):
        return len(members) == 2

    def run(self, items: list[int]) -> list[int]:
        return items


@pipeflow.stage
def total(item: list[int]) -> int:
    return sum(item)


@pipeflow.stage
def show(item: int) -> None:
    print(item)


@pipeflow.stage
def keep(item):
    print(item)
"""
FAKE_TORCH = ModuleType("torch")
FAKE_TORCH.cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)  # pyright: ignore
FAKE_TORCH.get_num_threads = lambda: 1  # pyright: ignore


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with a file that is right, and its module."""
    (tmp_path / "good.yaml").write_text(GOOD.replace("on: cpu, writes", "with: {rate: 0.1}, on: cpu, writes"))
    (tmp_path / "bad.yaml").write_text(GOOD.replace("from: train", "from: trian"))
    (tmp_path / "beside.py").write_text(BESIDE)
    return tmp_path


def test_check_says_ok(good: Path) -> None:
    done = pipeflow("check", "good.yaml", cwd=good)
    assert (done.returncode, done.stdout, done.stderr) == (0, "good.yaml: ok, 6 stages\n", "")


def test_check_finds_modules_beside_the_file(good: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert pipeflow("check", str(good / "good.yaml"), cwd=elsewhere).returncode == 0


def test_check_shows_place_caret_and_remedy(good: Path) -> None:
    done = pipeflow("check", "bad.yaml", cwd=good)
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout == dedent("""\
        bad.yaml:9:17 - stages.train.with.rate: the key 'rate' is missing [CODE]
              train: {uses: beside:Train, from: numbers, on: cpu, writes: model}
                            ^
          remedy: add `rate:` (a number)
        bad.yaml:11:34 - stages.barrier.from: there is no stage 'trian' [unknown-input]
              barrier: {uses: barrier, from: trian, every: 50}
                                             ^
          remedy: did you mean 'train'?
        bad.yaml: 2 errors
    """).replace("[CODE]", _code(done.stdout))


def _code(text: str) -> str:
    """The code of the first line, which is the validator's to choose."""
    return text.split("\n", 1)[0].rpartition(" ")[2]


def test_check_as_json(good: Path) -> None:
    done = pipeflow("check", "bad.yaml", "--json", cwd=good)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found[1] == {
        "code": "unknown-input", "severity": "error", "file": "bad.yaml", "line": 11, "column": 34,
        "path": "stages.barrier.from", "message": "there is no stage 'trian'",
        "remedy": "did you mean 'train'?",
    }  # fmt: skip
    assert json.loads(pipeflow("check", "good.yaml", "--json", cwd=good).stdout) == []


def test_check_takes_overrides(good: Path) -> None:
    assert pipeflow("check", "good.yaml", "steps=7", cwd=good).returncode == 0
    wrong = pipeflow("check", "good.yaml", "steps=many", cwd=good)
    assert wrong.returncode == 1
    assert "stages.numbers.with.count" in wrong.stdout
    usage = pipeflow("check", "good.yaml", "steps", cwd=good)
    assert usage.returncode == 2
    assert "'steps' is no override: write key=value" in usage.stderr


@pytest.mark.parametrize("command", ["check", "graph"])
def test_a_missing_file_is_a_usage_error(command: str, tmp_path: Path) -> None:
    done = pipeflow(command, "no.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "the pipeline file 'no.yaml' does not exist" in done.stderr
    assert "is a folder" in pipeflow(command, ".", cwd=tmp_path).stderr


def test_here_refuses_a_device_that_is_not_here(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (good / "good.yaml").read_text().replace("on: cpu", "on: cuda:99")
    (good / "far.yaml").write_text(text)
    runner = CliRunner()
    monkeypatch.syspath_prepend(str(good))
    monkeypatch.setitem(sys.modules, "torch", FAKE_TORCH)  # the real one takes seconds to import
    assert runner.invoke(check, [str(good / "far.yaml")]).exit_code == 0
    done = runner.invoke(check, [str(good / "far.yaml"), "--here"])
    assert done.exit_code == 1
    assert "cuda:99 is not here: this machine has no CUDA device" in done.stdout
    monkeypatch.delitem(sys.modules, "beside", raising=False)


def test_warnings_are_no_errors(good: Path) -> None:
    text = (good / "good.yaml").read_text()
    text = text.replace("{uses: beside:numbers,", "{uses: beside:numbers, bytes: 2MiB,")
    (good / "warn.yaml").write_text(text + "run: {queue: {bytes: 1MiB}}\n")
    done = pipeflow("check", "warn.yaml", cwd=good)
    assert done.returncode == 0
    assert done.stdout.endswith("warn.yaml: ok, 6 stages, 2 warnings\n")


def test_colour_only_on_a_terminal(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in pipeflow("check", "bad.yaml", cwd=good).stdout
    monkeypatch.delenv("NO_COLOR", raising=False)
    runner = CliRunner()
    coloured = runner.invoke(check, [str(good / "bad.yaml")], color=True)
    assert "\x1b[31m" in coloured.output
    plain = runner.invoke(check, [str(good / "bad.yaml")], color=True, env={"NO_COLOR": "1"})
    assert "\x1b[" not in plain.output


# graph -----------------------------------------------------------------------------------------------------


def test_graph_as_text(good: Path) -> None:
    done = pipeflow("graph", "good.yaml", cwd=good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        numbers  beside:numbers  source
        route    route           one-to-one  from numbers
        train    beside:Train    one-to-one  from numbers  on cpu  writes model
        look     beside:look     sink        from route.a  2 replicas  reads model
        barrier  barrier         barrier     from train (every 50)
        release  release_cache   one-to-one  from barrier
        model    beside:Model    resource    on cpu
    """)


def test_graph_says_what_each_stage_is(good: Path) -> None:
    """In the words of the README and of `pipeflow stages`. Only what nobody takes from is a sink."""
    (good / "kinds.py").write_text(KINDS)
    (good / "kinds.yaml").write_text(
        "pipeflow: 1\nname: kinds\nstages:\n"
        "  numbers: {uses: 'kinds:numbers'}\n"
        "  each: {uses: 'kinds:each', from: numbers}\n"
        "  pairs: {uses: 'kinds:Pairs', from: each}\n"
        "  total: {uses: 'kinds:total', from: pairs}\n"
        "  show: {uses: 'kinds:show', from: total}\n"
        "  keep: {uses: 'kinds:keep', from: total}\n"
        "  last: {uses: 'kinds:total', from: pairs}\n"
    )
    done = pipeflow("graph", "kinds.yaml", cwd=good)
    assert {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()} == {
        "numbers": "source", "each": "one-to-many", "pairs": "gather", "total": "one-to-one",
        "show": "sink", "keep": "sink", "last": "one-to-one",
    }  # fmt: skip


def test_the_end_of_a_service_is_no_sink(good: Path) -> None:
    (good / "kinds.py").write_text(KINDS)
    (good / "service.yaml").write_text(
        "pipeflow: 1\nname: service\nstages:\n  in: {uses: input}\n"
        "  keep: {uses: 'kinds:keep', from: in}\n  show: {uses: 'kinds:show', from: in}\n"
        "  out: {uses: output, from: in}\n"
    )
    done = pipeflow("graph", "service.yaml", cwd=good)
    assert {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()} == {
        "in": "source", "keep": "one-to-one", "show": "sink", "out": "one-to-one"
    }  # fmt: skip


def test_graph_as_mermaid(good: Path) -> None:
    assert pipeflow("graph", "good.yaml", "--format", "mermaid", cwd=good).stdout == dedent("""\
        flowchart TD
            s0["numbers<br/>beside:numbers"]
            s1["route<br/>route"]
            s2["train<br/>beside:Train"]
            s3["look<br/>beside:look"]
            s4{{"barrier<br/>barrier"}}
            s5[["release<br/>release_cache"]]
            r0[("model")]
            s0 --> s1
            s0 --> s2
            s1 -->|"a"| s3
            s2 -->|"every 50"| s4
            s4 --> s5
            s2 -.-> r0
            r0 -.-> s3
    """)


def test_graph_as_dot(good: Path) -> None:
    assert pipeflow("graph", "good.yaml", "--format", "dot", cwd=good).stdout == dedent("""\
        digraph pipeline {
          node [shape=box];
          "numbers" [label="numbers\\nbeside:numbers"];
          "route" [label="route\\nroute"];
          "train" [label="train\\nbeside:Train"];
          "look" [label="look\\nbeside:look"];
          "barrier" [label="barrier\\nbarrier", shape=octagon];
          "release" [label="release\\nrelease_cache", shape=box3d];
          "resource model" [label="model", shape=cylinder];
          "numbers" -> "route";
          "numbers" -> "train";
          "route" -> "look" [label="a"];
          "train" -> "barrier" [label="every 50"];
          "barrier" -> "release";
          "train" -> "resource model" [style=dashed];
          "resource model" -> "look" [style=dashed];
        }
    """)


def test_graph_of_a_faulty_file_draws_what_it_can(good: Path) -> None:
    done = CliRunner().invoke(graph, [str(good / "bad.yaml")])
    assert done.exit_code == 1
    assert "unknown-input" in done.stderr
    assert "barrier  barrier         barrier\n" in done.stdout


# schema ----------------------------------------------------------------------------------------------------


def test_schema_is_a_schema_with_the_stages_options() -> None:
    import jsonschema

    done = CliRunner().invoke(schema)
    assert (done.exit_code, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    validator: Any = jsonschema.Draft202012Validator
    validator.check_schema(made)
    file = {
        "pipeflow": 1,
        "name": "x",
        "stages": {"a": {"uses": "route", "with": {"by": "k", "ports": ["p"]}}},
    }
    assert validator(made).is_valid(file)
    file["stages"]["a"]["with"]["bye"] = "k"
    assert not validator(made).is_valid(file)


# stages ----------------------------------------------------------------------------------------------------


def test_stages_lists_names_with_a_line_each() -> None:
    done = CliRunner().invoke(stages)
    assert done.exit_code == 0
    lines = done.stdout.split("\n")
    assert lines[0] == "Stages"
    assert any(
        line.startswith("  release_cache ") and "Gives cached device memory back" in line for line in lines
    )
    assert "cannot be used" not in done.stdout


def test_stages_describes_one(good: Path) -> None:
    done = pipeflow("stages", "beside:Train", cwd=good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dedent("""\
        beside:Train  (beside:Train)

          Trains a model.

          In a second paragraph.

          kind    one-to-one
          takes   int
          gives   int
          writes  model (Model)
          traits  stateful

          Options (under `with:`)
            rate: a number, required
                Learning rate.
            warm: true or false, default true
            wait: a duration (seconds, or text such as 500ms, 30s, 5m, 2h), default 1.5
    """)


def test_stages_describes_functions_and_resources(good: Path) -> None:
    function = pipeflow("stages", "beside:numbers", cwd=good).stdout
    assert "  kind   source\n  gives  int\n" in function
    assert "    count: a whole number, default 3\n" in function
    sink = pipeflow("stages", "beside:look", cwd=good).stdout
    assert "  kind   sink\n  takes  int\n  gives  nothing\n" in sink
    model = pipeflow("stages", "beside:Model", cwd=good).stdout
    assert model == "beside:Model  (beside:Model)\n\n  A model. It is small.\n\n  No options\n"


def test_stages_of_an_unknown_name(good: Path) -> None:
    done = pipeflow("stages", "beside:Trian", cwd=good)
    assert done.returncode == 1
    came = f"(it came from {good / 'beside.py'})"
    assert done.stderr == f"pipeflow: module 'beside' has no 'Trian' {came}. did you mean 'Train'?\n"


# init ------------------------------------------------------------------------------------------------------


def test_init_lists_its_templates() -> None:
    done = CliRunner().invoke(init, ["--list"])
    assert done.stdout.startswith("hello  Numbers, squared by a stage of your own")


def test_init_writes_a_pipeline_that_checks(tmp_path: Path) -> None:
    done = pipeflow("init", "hello", "new/here", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == "new/here/hello.yaml\nnew/here/hello_stages.py\n"
    assert done.stderr == "Next: pipeflow run new/here/hello.yaml\n"
    checked = pipeflow("check", "new/here/hello.yaml", "count=3", cwd=tmp_path)
    assert checked.stdout == "new/here/hello.yaml: ok, 3 stages\n"


def test_the_written_pipeline_runs(tmp_path: Path) -> None:
    assert pipeflow("init", "hello", cwd=tmp_path).returncode == 0
    done = pipeflow("run", "hello.yaml", "count=4", "--run-dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["value"] for line in lines] == [0, 1, 4, 9]


def test_init_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "hello_stages.py").write_text("mine")
    done = pipeflow("init", "hello", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "nothing written: hello_stages.py exists already. Choose another folder\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hello_stages.py"]
    assert (tmp_path / "hello_stages.py").read_text() == "mine"


def test_init_leaves_no_half_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    done = CliRunner().invoke(init, ["hello", str(tmp_path / "new")])
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    assert list((tmp_path / "new").iterdir()) == []


def test_init_of_an_unknown_template(tmp_path: Path) -> None:
    done = pipeflow("init", "helo", cwd=tmp_path)
    assert done.returncode == 2
    assert "no template is called 'helo': did you mean 'hello'?" in done.stderr
    assert pipeflow("init", cwd=tmp_path).returncode == 2


# doctor ----------------------------------------------------------------------------------------------------


def test_doctor_finds_what_is_here() -> None:
    done = pipeflow("doctor", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert done.returncode == 0, done.stdout
    rows = {line[8:34].strip(): (line[:8].strip(), line[34:]) for line in done.stdout.splitlines()}
    assert rows["python"][0] == "ok"
    assert rows["torch"][0] == "ok"
    assert rows["cpu"][0] == "ok"
    assert rows["PYTORCH_ALLOC_CONF"] == ("ok", "expandable_segments:True")
    assert done.stderr == "all that is required is here\n"


def test_doctor_misses_what_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FAKE_TORCH)
    monkeypatch.setattr(doctor, "REQUIRED", (*doctor.REQUIRED, "no-such-distribution"))
    done = CliRunner().invoke(doctor.command)
    assert done.exit_code == 1
    assert f"missing {'no-such-distribution':26}required: pip install no-such-distribution" in done.stdout
    assert "something required is missing" in done.stderr
