"""The sink: the file appears whole or not at all, and reads back as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.errors import PipeflowError
from pipeflow_stages.data.jsonl import parse_row
from pipeflow_stages.data.write_jsonl import WriteJsonl
from pipeflow_stages.types import Conversation, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.context import Context

ROWS = [
    Conversation(messages=(Message("user", "hi é\n"), Message("assistant", "yes")), kind="greeting"),
    Conversation(text="plain"),
]


def open_stage(context: Context, path: str = "out.jsonl") -> Any:
    stage = WriteJsonl(WriteJsonl.Config(path=path))
    stage.setup(context)
    return stage


def test_rows_read_back(make_context: Callable[..., Context]) -> None:
    context = make_context()
    stage = open_stage(context, "deep/out.jsonl")
    for row in ROWS:
        stage.run(row)
    path = context.output("deep/out.jsonl")
    assert not path.exists()
    stage.finish(context)
    stage.close()
    back = [parse_row(line, "x") for line in path.read_bytes().splitlines()]
    assert [(r.messages, r.text, r.kind) for r in back] == [(r.messages, r.text, r.kind) for r in ROWS]
    assert context.reported == {"rows_written": 2}
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


def test_a_cancel_leaves_what_stood_there(make_context: Callable[..., Context]) -> None:
    context = make_context()
    path = context.output("out.jsonl")
    path.parent.mkdir()
    path.write_text("old")
    stage = open_stage(context)
    stage.run(ROWS[0])
    stage.close()
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]
    with pytest.raises(PipeflowError, match="finished"):
        stage.run(ROWS[0])


def test_a_full_disk_leaves_what_stood_there(
    make_context: Callable[..., Context], every_full_disk: Callable[..., int]
) -> None:
    context = make_context()
    path = context.output("out.jsonl")
    path.parent.mkdir()
    path.write_text("old")
    big = Conversation(text="x" * 700_000)

    def attempt(after: int) -> None:
        stage = WriteJsonl(WriteJsonl.Config(path="out.jsonl"))
        try:
            stage.setup(context)
            for _ in range(4):
                stage.run(big)
            stage.finish(context)
        except PipeflowError as error:
            assert "no space left" in str(error)  # noqa: PT017
            assert str(path) in str(error)  # noqa: PT017
        finally:
            stage.close()
        assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]
        assert path.read_text() == "old" or path.read_bytes().count(b"\n") == 4

    assert every_full_disk(attempt) >= 6
    assert path.read_bytes().count(b"\n") == 4


def test_a_folder_in_the_way_is_told_at_setup(make_context: Callable[..., Context]) -> None:
    context = make_context()
    context.output("out.jsonl").mkdir(parents=True)
    with pytest.raises(PipeflowError, match="is a folder"):
        open_stage(context)
