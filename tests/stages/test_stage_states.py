"""The states of the shipped stages: what comes back is what was saved, wherever it was cut."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.errors import PipeflowError
from pipeflow.item import Failed
from pipeflow_stages.data.jsonl import Jsonl
from pipeflow_stages.data.phrases import Book, Phrases
from pipeflow_stages.data.write_jsonl import WriteJsonl
from pipeflow_stages.text.loops import DropLoops
from pipeflow_stages.types import Conversation, Message

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeflow.context import Context


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


# data/jsonl ------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = ["not JSON" if n in (2, 5) else json.dumps({"text": f"row {n}"}) for n in range(7)]
    path.write_text("\n".join(lines) + "\n")
    return path


def reader(path: Path, context: Context, **options: Any) -> Jsonl:
    stage = Jsonl(Jsonl.Config(path=str(path), **options))
    stage.setup(context)
    return stage


def shown(record: Any) -> str:
    return f"failed {record.record}" if isinstance(record, Failed) else record.text


@pytest.mark.parametrize("shuffle", [True, False])
def test_jsonl_goes_on_behind_any_record(
    rows: Path, make_context: Callable[..., Context], shuffle: bool
) -> None:
    options = {"epochs": 3, "shuffle": shuffle}
    whole = [shown(record) for record in reader(rows, make_context(), **options).run(make_context())]
    assert len(whole) == 7 + 5 + 5  # what cannot be read is told of once
    for cut in range(len(whole) + 1):
        first = reader(rows, make_context(), **options)
        records = first.run(make_context())
        before = [shown(record) for record in islice(records, cut)]
        state = through_json(first.state())
        records.close()  # type: ignore[attr-defined]
        second = reader(rows, make_context(), **options)
        second.load(state)
        assert before + [shown(record) for record in second.run(make_context())] == whole


def test_jsonl_refuses_files_that_have_changed(rows: Path, make_context: Callable[..., Context]) -> None:
    state = reader(rows, make_context()).state()
    rows.write_text(rows.read_text() + '{"text": "one more"}\n')
    with pytest.raises(PipeflowError, match="8 rows, but the run that is resumed had 7"):
        reader(rows, make_context()).load(state)


# data/phrases, text/loops ----------------------------------------------------------------------------------


def test_phrases_go_on_behind_any_document(make_context: Callable[..., Context]) -> None:
    context = make_context(reads={"book": Book([[1, 2, 3], [4, 5, 6]], 8, 6, 2)})

    def phrases() -> Phrases:
        stage = Phrases(Phrases.Config())
        stage.setup(context)
        return stage

    whole = list(islice(phrases().run(context), 9))
    first = phrases()
    before = list(islice(first.run(context), 4))
    second = phrases()
    second.load(through_json(first.state()))
    assert before + list(islice(second.run(context), 5)) == whole


def test_loops_count_on(make_context: Callable[..., Context]) -> None:
    def loops() -> DropLoops:
        stage = DropLoops(DropLoops.Config())
        stage.setup(make_context())
        return stage

    row = Conversation(messages=(Message("user", "hi"), Message("assistant", "yes")))
    cut = Conversation(messages=row.messages, cut=True)
    first = loops()
    for item in (row, cut, row):
        first.run(item, make_context())
    second, context = loops(), make_context()
    second.load(through_json(first.state()))
    second.run(row, context)
    assert context.reported == {"dropped_looping": 0, "dropped_cut": 1, "kept": 3}


# data/write_jsonl ------------------------------------------------------------------------------------------


def writer(context: Context) -> WriteJsonl:
    stage = WriteJsonl(WriteJsonl.Config(path="out.jsonl"))
    stage.setup(context)
    return stage


TEXTS = [Conversation(text=f"row {number}") for number in range(5)]
WHOLE = b"".join(json.dumps({"text": row.text}, separators=(",", ":")).encode() + b"\n" for row in TEXTS)


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("ending", ["cancelled", "killed", "finished"])
def test_rows_behind_the_checkpoint_are_cut_off(
    make_context: Callable[..., Context], cut: int, ending: str
) -> None:
    context = make_context()
    path = context.output("out.jsonl")
    first = writer(context)
    for row in TEXTS[:cut]:
        first.run(row)
    state = through_json(first.state())
    for row in [*TEXTS[cut:], *TEXTS]:  # more than will be there in the end
        first.run(row)
    if ending == "finished":
        first.finish(context)
        assert path.is_file()
    elif ending == "killed":
        first._file.stream.flush()  # type: ignore[union-attr]
    if ending != "killed":
        first.close()
    second = writer(context)
    second.load(state)
    for row in TEXTS[cut:]:
        second.run(row)
    second.finish(context)
    second.close()
    assert path.read_bytes() == WHOLE
    assert [each.name for each in path.parent.iterdir()] == ["out.jsonl"]
    assert context.reported == {"rows_written": 5}


def test_a_file_that_is_gone_is_told(make_context: Callable[..., Context]) -> None:
    context = make_context()
    first = writer(context)
    first.run(TEXTS[0])
    state = first.state()
    first.close()
    (half,) = context.run_dir.iterdir()
    half.write_bytes(b"short")
    second = writer(context)
    with pytest.raises(PipeflowError, match="had written 17 bytes, of which 5 are left"):
        second.load(state)
    second.close()


def test_a_file_without_a_checkpoint_leaves_no_half(make_context: Callable[..., Context]) -> None:
    context = make_context()
    first = writer(context)
    first.run(TEXTS[0])
    first.close()
    assert list(context.run_dir.iterdir()) == []
