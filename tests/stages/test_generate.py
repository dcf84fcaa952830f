"""Prompts are grouped and answered as one by one would be."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.errors import PipeflowError
from pipeflow_stages.text.generate import Generate
from pipeflow_stages.text.prompts import Prompts
from pipeflow_stages.types import Conversation, Message, PromptBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.context import Context
    from pipeflow_stages.hf.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("one_thread")


def ask(*questions: str, system: str = "", source: str = "p.jsonl:1") -> Conversation:
    turns = [Message("user", q) for q in questions]
    if system:
        turns.insert(0, Message("system", system))
    return Conversation(messages=tuple(turns), source=source, key="k", kind="kind")


@pytest.fixture
def answer(make_context: Callable[..., Context]) -> Any:
    def call(target: LanguageModel, *items: Conversation, seed: int = 5, **config: Any) -> list[Conversation]:
        context = make_context(reads={"target": target}, seed=seed)
        call.context = context  # pyright: ignore[reportFunctionMemberAccess]
        stage = Generate(Generate.Config(**{"max_new_tokens": 12, **config}))
        return list(stage.run(PromptBatch(items), context))

    return call


def tokens(target: LanguageModel, messages: list[Message], limit: int) -> tuple[list[int], bool]:
    """Without batch, cache or padding: one token at a time. Also whether the limit cut it."""
    import torch

    ids = target.chat(messages, generation_prompt=True)
    new: list[int] = []
    with torch.inference_mode():
        while len(new) < limit:
            token = int(target.model(torch.tensor([ids + new])).logits[0, -1].argmax())
            if token in target.stop_ids:
                return new, False
            new.append(token)
    return new, True


def greedy(target: LanguageModel, messages: list[Message], limit: int) -> tuple[str, bool]:
    new, cut = tokens(target, messages, limit)
    return target.tokenizer.decode(new, skip_special_tokens=True), cut


def test_a_batch_answers_as_each_alone_would(answer: Any, make_target: Any) -> None:
    target = make_target()
    questions = [ask("a"), ask("a much longer question than that"), ask("why", system="Be brief.")]
    out = answer(target, *questions)
    assert len(out) == 3
    for asked, got in zip(questions, out, strict=True):
        text, cut = greedy(target, list(asked.messages), 12)
        assert got.messages == (*asked.messages, Message("assistant", text))
        assert got.cut == cut
        assert (got.source, got.key, got.kind) == (asked.source, "k", "kind")


def stop_at(target: LanguageModel, item: Conversation, place: int) -> LanguageModel:
    """Make the greedy token at `place` of the answer a stop token."""
    new, _ = tokens(target, list(item.messages), 12)
    target.stop_ids = target.stop_ids | {new[place]}
    return target


def test_an_answer_ends_at_its_stop_token(answer: Any, make_target: Any) -> None:
    target = stop_at(make_target(), ask("hello"), 5)
    new, cut = tokens(target, [Message("user", "hello")], 12)
    assert not cut
    assert 0 < len(new) <= 5
    short, long = answer(target, ask("hello"), ask("hello, this one goes on"))
    assert short.messages[-1] == Message("assistant", target.tokenizer.decode(new))
    assert not short.cut
    assert long.cut  # so the first row was padded behind its stop token


def test_user_turns_are_answered_in_order_and_old_answers_made_anew(answer: Any, make_target: Any) -> None:
    target = stop_at(make_target(), ask("one"), 3)
    old = Conversation(
        messages=(Message("user", "one"), Message("assistant", "stale"), Message("user", "two"))
    )
    (got,) = answer(target, old)
    first, cut = greedy(target, [Message("user", "one")], 12)
    assert not cut
    turns = [Message("user", "one"), Message("assistant", first), Message("user", "two")]
    assert got.messages == (*turns, Message("assistant", greedy(target, turns, 12)[0]))


def test_a_cut_answer_ends_its_conversation(answer: Any, make_target: Any) -> None:
    (got,) = answer(make_target(), ask("one", "two"), max_new_tokens=1)
    assert got.cut
    assert [m.role for m in got.messages] == ["user", "assistant"]


def test_an_empty_answer_is_dropped_and_counted(answer: Any, make_target: Any) -> None:
    target = stop_at(make_target(), ask("one"), 0)
    assert answer(target, ask("one")) == []
    assert answer.context.logged == [{"dropped_empty": 1}]


def test_sampling_hangs_on_the_seed_alone_and_leaves_the_global_generator(
    answer: Any, make_target: Any
) -> None:
    import torch

    target = make_target()
    state = torch.get_rng_state()
    first = answer(target, ask("hello"), temperature=1.5, top_p=0.95)
    assert torch.get_rng_state().equal(state)
    torch.rand(3)
    assert answer(target, ask("hello"), temperature=1.5, top_p=0.95) == first
    assert answer(target, ask("hello"), temperature=1.5, top_p=0.95, seed=6) != first
    assert answer(target, ask("hello"), temperature=1e-4) == answer(target, ask("hello"))


def test_noise_samples_the_softmax() -> None:
    """20,000 draws over 4 tokens: each share within 4 standard deviations of softmax(logits / T)."""
    import torch

    from pipeflow_stages.text.generate import _processors

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draw = _processors(0.7, 1.0, torch.Generator().manual_seed(0))
    count = 20_000
    tokens = draw(torch.zeros(count, 1, dtype=torch.int64), logits.expand(count, 4)).argmax(-1)
    shares = tokens.bincount(minlength=4) / count
    want = (logits / 0.7).softmax(-1)
    assert ((shares - want).abs() < 4 * (want * (1 - want) / count).sqrt()).all()
    kept = _processors(1.0, 0.6, torch.Generator().manual_seed(0))
    tokens = kept(torch.zeros(200, 1, dtype=torch.int64), logits.expand(200, 4)).argmax(-1)
    assert set(tokens.tolist()) == {0}


def test_a_stop_gives_the_batch_up_and_counts_it(make_context: Any, make_target: Any) -> None:
    stop = threading.Event()
    target = make_target()
    forward = target.model.forward
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            stop.set()
        return forward(*args, **kwargs)

    target.model.forward = counted
    context = make_context(reads={"target": target}, stop=stop)
    stage = Generate(Generate.Config(max_new_tokens=200))
    assert list(stage.run(PromptBatch((ask("a"), ask("b"))), context)) == []
    assert context.logged == [{"left_out": 2}]
    assert calls <= 4


def test_a_prompt_beyond_the_context_is_named(answer: Any, make_target: Any) -> None:
    with pytest.raises(PipeflowError, match=r"p\.jsonl:9: prompt and answer need .* 'tiny' has 64"):
        answer(make_target(positions=64), ask("x" * 60, source="p.jsonl:9"))


def test_a_row_without_a_question_is_named(answer: Any, make_target: Any) -> None:
    with pytest.raises(PipeflowError, match=r"p\.jsonl:9: nothing to answer"):
        answer(make_target(), Conversation(text="plain", source="p.jsonl:9"))


def test_prompts_of_similar_length_go_together() -> None:
    stage = Prompts(Prompts.Config(rows=2, characters=100))
    assert stage.bucket(ask("a" * 99)) == stage.bucket(ask("b"))
    assert stage.bucket(ask("a" * 101)) != stage.bucket(ask("b"))
    assert stage.bucket(ask("a", "b")) != stage.bucket(ask("b"))
    pair = [ask("a"), ask("b")]
    assert not stage.full(pair[:1])
    assert stage.full(pair)
    assert stage.run(pair).conversations == tuple(pair)
