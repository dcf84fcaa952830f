"""The rule for answers that run in a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeflow.item import DROP
from pipeflow_stages.text.loops import DropLoops, repeats, units
from pipeflow_stages.types import Conversation, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.context import Context

PHRASE = "the quick brown fox jumps over the lazy dog. "


def answered(text: str, cut: bool = False) -> Conversation:
    return Conversation(
        messages=(Message("user", "go " * 99), Message("assistant", text)), source="a:1", cut=cut
    )


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        (PHRASE * 4, True),
        (PHRASE * 3, False),
        ("A sentence of its own. " + PHRASE * 4 + "And an end.", True),
        ("The Quick, brown fox - jumps over the lazy dog! " * 4, True),
        ("no " * 11, True),
        ("no " * 10, False),
        ("ha" * 30, True),
        ("-" * 200, False),
        (" ".join(f"word{n}" for n in range(300)), False),
        ("", False),
    ],
)
def test_the_rule(make_context: Callable[..., Context], text: str, dropped: bool) -> None:
    stage = DropLoops(DropLoops.Config())
    context = make_context()
    stage.setup(context)
    item = answered(text)
    assert stage.run(item, context) is (DROP if dropped else item)
    assert context.reported == {"dropped_looping": int(dropped), "dropped_cut": 0, "kept": int(not dropped)}


def test_drops_are_counted_over_the_run(make_context: Callable[..., Context]) -> None:
    stage = DropLoops(DropLoops.Config())
    stage.setup(make_context())
    for item in (
        answered(PHRASE * 9),
        answered("fine"),
        answered("cut", cut=True),
        answered("no " * 50, cut=True),
    ):
        context = make_context()
        stage.run(item, context)
    assert context.reported == {"dropped_looping": 2, "dropped_cut": 1, "kept": 1}
    assert context.logged == [{"dropped_looping": 1, "source": "a:1", "kind": ""}]


def test_cut_answers_may_be_kept_and_the_rule_be_set(make_context: Callable[..., Context]) -> None:
    stage = DropLoops(DropLoops.Config(cut="keep", words=2, times=3))
    stage.setup(make_context())
    kept = answered("a b and a b", cut=True)
    assert stage.run(kept, make_context()) is kept
    assert stage.run(answered("a b a b a b"), make_context()) is DROP


def test_words_and_runs() -> None:
    assert units("It's 3 o'clock!") == ["it", "s", "3", "o", "clock"]
    assert units("x" * 25) == ["x"] * 25
    assert repeats(list("abab"), 2) == 2
    assert repeats(list("ab"), 3) == 0
