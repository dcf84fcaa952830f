"""The source: rows, bad rows by line, epochs, order, splits."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.errors import PipeflowError
from pipeflow.item import Failed
from pipeflow_stages.data.jsonl import Jsonl, parse_row, split_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeflow.context import Context


def row(user: str, answer: str | None = "yes", **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": user}]
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return {"messages": turns, **more}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def read(context: Context, **config: Any) -> list[Any]:
    stage = Jsonl(Jsonl.Config(**config))
    stage.setup(context)
    return list(stage.run(context))


def texts(items: list[Any]) -> list[str]:
    return [item.messages[0].content for item in items]


def test_rows_with_their_place(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps(row("hello", kind="greeting", extra=1)) + "\n\n  \n" + json.dumps({"text": "plain é"})
    )
    first, second = read(make_context(), path=str(path), shuffle=False)
    assert (first.source, first.kind) == (f"{path}:1", "greeting")
    assert [(m.role, m.content) for m in first.messages] == [("user", "hello"), ("assistant", "yes")]
    assert (second.source, second.text, second.messages) == (f"{path}:4", "plain é", ())


def test_prompts_without_answers_are_rows(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = write(tmp_path / "a.jsonl", [row("hello", None)])
    assert texts(read(make_context(), path=str(path))) == ["hello"]


def test_several_files_in_order(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    a = write(tmp_path / "a.jsonl", [row("1"), row("2")])
    b = write(tmp_path / "b.jsonl", [row("3")])
    items = read(make_context(), path=[str(b), str(a)], shuffle=False)
    assert texts(items) == ["3", "1", "2"]
    assert [item.source for item in items] == [f"{b}:1", f"{a}:1", f"{a}:2"]


BAD = [
    (b"{", "not JSON"),
    (b"[1]", "Expected `object`"),
    (b"{}", "neither"),
    (b'{"mesages": []}', "neither"),
    (b'{"messages": [], "text": "a"}', "both"),
    (b'{"messages": []}', "no user turn"),
    (b'{"messages": [{"role": "system", "content": "a"}]}', "no user turn"),
    (b'{"messages": [{"role": "robot", "content": "a"}]}', "robot"),
    (b'{"messages": [{"role": "user"}]}', "content"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "Expected `str`"),
    (b'{"messages": [{"role": "user", "content": " "}]}', "empty"),
    (b'{"text": ""}', "empty"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "a", "kind": 3}', "kind"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
@pytest.mark.parametrize("split", ["all", "train", "held_out"])
def test_a_bad_row_is_named_and_the_rest_is_read(
    tmp_path: Path, make_context: Callable[..., Context], line: bytes, said: str, split: str
) -> None:
    good = json.dumps(row("fine")).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    items = read(make_context(), path=str(path), shuffle=False, split=split)
    failed = [item for item in items if isinstance(item, Failed)]
    assert len(failed) == 1
    assert isinstance(failed[0].error, PipeflowError)
    assert str(failed[0].error).startswith(f"{path}:2: ")
    assert said in str(failed[0].error)
    mine = split in ("all", split_of("\nfine", 0.1))
    assert len(items) == (3 if mine else 1)


def test_a_missing_file_is_named_before_anything_is_read(
    tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    stage = Jsonl(Jsonl.Config(path=str(tmp_path / "gone.jsonl")))
    with pytest.raises(PipeflowError, match=r"gone\.jsonl: there is no such file"):
        stage.setup(make_context())


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_named(tmp_path: Path, make_context: Callable[..., Context], content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(PipeflowError, match=r"a\.jsonl: has no rows"):
        read(make_context(), path=str(path))


def test_an_empty_split_is_named(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = write(tmp_path / "a.jsonl", [row("only one")])
    other = "held_out" if split_of("\nonly one", 0.1) == "train" else "train"
    with pytest.raises(PipeflowError, match=f"no rows in the split '{other}'"):
        read(make_context(), path=str(path), split=other)


def test_no_prompt_is_in_both_splits(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    rows = [row(f"question {n % 500}", f"answer {n}") for n in range(1000)]
    path = str(write(tmp_path / "a.jsonl", rows))
    train = read(make_context(), path=path, split="train")
    held = read(make_context(), path=path, split="held_out")
    assert len(train) + len(held) == 1000
    assert not set(texts(train)) & set(texts(held))
    assert 0.06 < len(held) / 1000 < 0.14
    assert len(read(make_context(), path=path, split="held_out", held_out=0.5)) > 400


def test_the_split_hangs_on_the_prompt_alone() -> None:
    line = json.dumps(row("Why?", "because")).encode()
    other = json.dumps(row("  why? ", "no idea")).encode()
    keys = [parse_row(each, "x").key for each in (line, other)]
    for share in (0.01, 0.1, 0.3, 0.7, 0.95):
        assert split_of(keys[0], share) == split_of(keys[1], share)
    assert split_of("a", 0.999) == "held_out"


def test_the_system_prompt_counts_as_prompt() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert parse_row(json.dumps({"messages": turns}).encode(), "x").key == "Be brief.\nWhy?"


def test_limit_takes_the_first_rows_of_the_split(
    tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    path = str(write(tmp_path / "a.jsonl", [row(f"{n}") for n in range(200)]))
    whole = read(make_context(), path=path, shuffle=False, split="held_out")
    some = read(make_context(), path=path, shuffle=False, split="held_out", limit=3)
    assert texts(some) == texts(whole)[:3]


def test_epochs_are_permutations_that_differ(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    path = str(write(tmp_path / "a.jsonl", [row(f"{n}") for n in range(20)]))
    order = texts(read(make_context(seed=3), path=path, epochs=3))
    epochs = [order[n : n + 20] for n in (0, 20, 40)]
    assert all(sorted(epoch, key=int) == [str(n) for n in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert texts(read(make_context(seed=3), path=path, epochs=3)) == order
    assert texts(read(make_context(seed=4), path=path, epochs=3)) != order
    assert texts(read(make_context(), path=path, shuffle=False)) == [str(n) for n in range(20)]


def test_epochs_null_never_ends_until_the_run_stops(
    tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    path = str(write(tmp_path / "a.jsonl", [row("1"), row("2")]))
    stop = threading.Event()
    context = make_context(stop=stop)
    stage = Jsonl(Jsonl.Config(path=path, epochs=None))
    stage.setup(context)
    count = 0
    for _ in stage.run(context):
        count += 1
        if count == 50:
            stop.set()
    assert count == 50


def test_a_file_that_goes_away_fails_the_row_and_no_handle_is_left(
    tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    path = write(tmp_path / "a.jsonl", [row("1")])
    stage = Jsonl(Jsonl.Config(path=str(path)))
    stage.setup(make_context())
    path.unlink()
    (failed,) = stage.run(make_context())
    assert isinstance(failed, Failed)
    assert f"{path}:1" in str(failed.error)


def test_a_malformed_row_is_told_of_once_however_many_epochs(tmp_path: Path, make_context: Any) -> None:
    """So a budget of one skipped row is enough for a run of many epochs."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    stage = Jsonl(Jsonl.Config(path=str(path), epochs=3, shuffle=False))
    stage.setup(make_context())
    records = list(stage.run(make_context()))
    assert sum(isinstance(record, Failed) for record in records) == 1
    assert [record.text for record in records if not isinstance(record, Failed)] == ["a", "b"] * 3


def test_a_file_of_malformed_rows_alone_ends(tmp_path: Path, make_context: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": \n[]\n')
    stage = Jsonl(Jsonl.Config(path=str(path), epochs=None, shuffle=False))
    stage.setup(make_context())
    records = stage.run(make_context())
    assert all(isinstance(next(records), Failed) for _ in range(2))
    with pytest.raises(PipeflowError, match="every row is malformed"):
        next(records)
