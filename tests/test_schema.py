"""The JSON Schema says the same about a file as `check` does."""

from __future__ import annotations

from typing import Annotated, Any

import jsonschema
import pytest
from msgspec import Meta

from pipeflow.compose import compose
from pipeflow.config import Config, Duration, InputPath, Size
from pipeflow.document import parse
from pipeflow.nodes import to_plain
from pipeflow.schema import json_schema
from pipeflow.stage import Resource, Stage
from pipeflow.validate import convert, spec_of


class Inner(Config):
    n: Annotated[int, Meta(ge=1)]


class Jsonl(Stage[Any, Any]):
    class Config(Config):
        path: InputPath
        epochs: Annotated[int, Meta(ge=1)] = 1
        inner: Inner | None = None
        buffer: Size | None = None
        wait: Duration = 1.0
        pair: tuple[int, str] = (1, "a")


class Pack(Stage[Any, Any]):
    class Config(Config):
        tokens: int = 1


class Model(Resource):
    class Config(Config):
        model: str


STAGES: dict[str, type[Stage[Any, Any]]] = {"data/jsonl": Jsonl, "pack": Pack}
RESOURCES: dict[str, type[Resource]] = {"model": Model}
WHOLE = jsonschema.Draft202012Validator(json_schema(STAGES, RESOURCES))
BARE = jsonschema.Draft202012Validator(json_schema())


def checked(text: str) -> bool:
    """What `check` says of a file: the document, the spec, and the options of the stages it knows."""
    document = parse(text, env={"N": "3", "T": "30s"})
    spec, found = spec_of(document)
    found = document.diagnostics + found
    for section, classes in (("stages", STAGES), ("resources", RESOURCES)):
        for name, entry in getattr(spec, section, {}).items():
            path = (section, name, "with")
            node = document.node(path) or parse("{}").root
            if entry.uses in classes:
                config = classes[entry.uses].Config
                found += convert(node, config, path=".".join(path), folder=document.folder)[1]
    return not found


def schema_says(validator: Any, text: str) -> bool:
    """Of the file as it is written, references and all."""
    node, faults = compose(text, file="p.yaml", folder=None)
    assert node is not None
    assert not faults
    return validator.is_valid(to_plain(node))


TOP = "pipeflow: 1\nname: x\n"
STAGE = TOP + "stages:\n  a:\n    uses: data/jsonl\n"

GOOD = {
    "least": TOP + "stages: {}\n",
    "whole": TOP
    + """
params: {anything: [1, {goes: here}]}
devices: {gpus: [cuda:0, cuda:1], one: cpu}
resources: {net: {uses: model, on: gpus, with: {model: m}}}
stages:
  a: {uses: data/jsonl, with: {path: x, epochs: 2, inner: {n: 1}, buffer: 8GiB, wait: 30s, pair: [1, b]}}
  b: {uses: mine.py:Own, from: [a], with: {any: [thing]}, on_error: stop, every: 2, ordered: false}
  c: {uses: pack, from: {x: a, y: b}, on_error: {retry: 2}, queue: {items: 1, bytes: 1024}, timeout: 1.5}
run: {seed: 1, step: c, stop: {drain: 1m, grace: 500ms}, stall: 60, queue: {total: 1GB}}
""",
    "reference for a number": STAGE + "    in_flight: ${env:N}\n    with: {path: x}\n",
    "reference for a duration": STAGE + "    timeout: ${env:T}\n    with: {path: x}\n",
    "reference for an option": STAGE + "    with:\n      path: x\n      epochs: ${env:N}\n",
    "reference for all options": TOP
    + "params: {p: {path: x}}\n"
    + STAGE[len(TOP) :]
    + "    with: ${params.p}\n",
    "null where it may be": STAGE + "    on: ~\n    with: {path: x}\n",
}

BAD = {
    "no version": "name: x\nstages: {}\n",
    "another version": "pipeflow: 2\nname: x\nstages: {}\n",
    "version as text": "pipeflow: '1'\nname: x\nstages: {}\n",
    "no name": "pipeflow: 1\nstages: {}\n",
    "a bad name": "pipeflow: 1\nname: a b\nstages: {}\n",
    "no stages": TOP,
    "stages as a list": TOP + "stages: []\n",
    "unknown key at the top": TOP + "stages: {}\nstage: {}\n",
    "unknown key in a stage": STAGE + "    with: {path: x}\n    frm: b\n",
    "unknown key in run": TOP + "stages: {}\nrun: {sed: 1}\n",
    "a stage without uses": TOP + "stages: {a: {from: b}}\n",
    "a bad stage name": TOP + "stages: {1a: {uses: x}}\n",
    "text for a number": STAGE + "    in_flight: two\n    with: {path: x}\n",
    "true for a number": STAGE + "    in_flight: true\n    with: {path: x}\n",
    "zero": STAGE + "    in_flight: 0\n    with: {path: x}\n",
    "number for text": TOP + "stages: {a: {uses: 3}}\n",
    "yes for true": STAGE + "    ordered: yes\n    with: {path: x}\n",
    "a bad size": STAGE + "    bytes: 8GG\n    with: {path: x}\n",
    "a negative size": STAGE + "    bytes: -1\n    with: {path: x}\n",
    "a bad duration": STAGE + "    timeout: 5 minutes\n    with: {path: x}\n",
    "a negative duration": STAGE + "    timeout: -1\n    with: {path: x}\n",
    "a bad launcher": STAGE + "    launcher: fork\n    with: {path: x}\n",
    "a bad on_error": STAGE + "    on_error: go\n    with: {path: x}\n",
    "null where it may not be": STAGE + "    with:\n",
    "an empty extends": TOP + "stages: {}\nextends: ''\n",
}

BAD_OPTIONS = {
    "options left out": STAGE,
    "an option left out": STAGE + "    with: {epochs: 1}\n",
    "an unknown option": STAGE + "    with: {path: x, epoch: 1}\n",
    "a wrong option": STAGE + "    with: {path: x, epochs: '1'}\n",
    "an option out of bounds": STAGE + "    with: {path: x, epochs: 0}\n",
    "an empty path": STAGE + "    with: {path: ''}\n",
    "a wrong nested option": STAGE + "    with: {path: x, inner: {n: 0}}\n",
    "a short pair": STAGE + "    with: {path: x, pair: [1]}\n",
    "a wrong pair": STAGE + "    with: {path: x, pair: [a, 1]}\n",
    "a resource's option": TOP + "stages: {}\nresources: {m: {uses: model, with: {model: 3}}}\n",
}


@pytest.mark.parametrize("schema", [json_schema(), json_schema(STAGES, RESOURCES)])
def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", GOOD)
def test_good_files(name: str) -> None:
    assert checked(GOOD[name])
    assert schema_says(WHOLE, GOOD[name])
    assert schema_says(BARE, GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    assert not checked(BAD[name])
    assert not schema_says(WHOLE, BAD[name])
    assert not schema_says(BARE, BAD[name])


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name: str) -> None:
    assert not checked(BAD_OPTIONS[name])
    assert not schema_says(WHOLE, BAD_OPTIONS[name])
    assert schema_says(BARE, BAD_OPTIONS[name])  # which knows no stage's options


def test_a_file_that_extends_another_may_leave_things_out() -> None:
    text = "extends: base.yaml\nstages:\n  a: {in_flight: 2, with: {epochs: 2}}\n"
    assert schema_says(WHOLE, text)
    assert not schema_says(WHOLE, text.replace("in_flight", "inflight"))
    assert not schema_says(WHOLE, text.replace("in_flight: 2", "uses: data/jsonl, in_flight: x"))
    assert not schema_says(
        WHOLE, text.replace("epochs: 2", "epochs: x").replace("in_flight: 2", "uses: data/jsonl")
    )
    assert not schema_says(WHOLE, text.replace("base.yaml", "'${env:X}'"))


def test_two_classes_called_config_have_a_definition_each() -> None:
    names = [name for name in json_schema(STAGES, RESOURCES)["$defs"] if name.endswith("Config")]
    assert len(names) == len(set(names)) == 3


def test_it_says_what_keys_are_for() -> None:
    definitions = json_schema()["$defs"]
    assert "Bounds of the queue" in definitions["QueueSpec"]["description"]
