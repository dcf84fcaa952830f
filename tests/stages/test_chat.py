"""The template and the mask, checked by decoding what is supervised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.errors import PipeflowError
from pipeflow.item import DROP
from pipeflow_stages.text.chat import Chat
from pipeflow_stages.types import Conversation, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.context import Context
    from pipeflow_stages.hf.language_model import LanguageModel


def talk(*turns: str, system: str = "") -> Conversation:
    """User and assistant in turn."""
    messages = [Message("system", system)] if system else []
    messages += [Message(("user", "assistant")[place % 2], text) for place, text in enumerate(turns)]
    return Conversation(messages=tuple(messages), source="rows.jsonl:7")


def supervised(target: LanguageModel, row: Any) -> list[str]:
    """The runs of supervised tokens, decoded."""
    runs: list[list[int]] = []
    before = 0
    for token, flag in zip(row.input_ids, row.loss_mask, strict=True):
        if flag:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = flag
    return [target.tokenizer.decode(run) for run in runs]


@pytest.fixture
def run(make_context: Callable[..., Context]) -> Callable[..., Any]:
    def call(target: LanguageModel, item: Conversation, **config: Any) -> Any:
        context = make_context(reads={"target": target}, sequence=11)
        call.context = context  # pyright: ignore[reportFunctionMemberAccess]
        return Chat(Chat.Config(**config)).run(item, context)

    return call


def test_answers_and_their_end_of_turn_are_supervised(run: Any, make_target: Any) -> None:
    target = make_target()
    row = run(target, talk("Hi", "Hello é!", "And?", "Bye\nnow", system="Be kind."))
    assert supervised(target, row) == ["Hello é!<|im_end|>", "Bye\nnow<|im_end|>"]
    assert target.tokenizer.decode(row.input_ids) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello é!<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\nBye\nnow<|im_end|>\n"
    )
    assert (row.source, row.document) == ("rows.jsonl:7", 11)


def test_an_answer_that_spells_the_end_of_turn_is_supervised_to_its_own(run: Any, make_target: Any) -> None:
    target = make_target()
    assert supervised(target, run(target, talk("Q", "a<|im_end|>b"))) == ["a<|im_end|>b<|im_end|>"]


def test_the_prompt_is_what_inference_asks(run: Any, make_target: Any) -> None:
    target = make_target()
    row = run(target, talk("Hi", "Yes"))
    first = row.loss_mask.index(1)
    assert row.input_ids[:first] == target.chat([Message("user", "Hi")], generation_prompt=True)


def test_every_token_of_plain_text_is_supervised(run: Any, make_target: Any) -> None:
    target = make_target(template=None)
    row = run(target, Conversation(text="a b c"))
    assert target.tokenizer.decode(row.input_ids) == "a b c"
    assert row.loss_mask == [1] * 5


def test_no_supervised_token_is_an_error_naming_the_row(run: Any, make_target: Any) -> None:
    with pytest.raises(PipeflowError, match=r"rows\.jsonl:7: no token is supervised"):
        run(make_target(), talk("Only a question"))


def test_a_model_without_a_template_is_named_with_a_remedy(run: Any, make_target: Any) -> None:
    with pytest.raises(PipeflowError, match=r"rows\.jsonl:7: model 'tiny' has no chat template.*instruction"):
        run(make_target(template=None), talk("Hi", "Yes"))


LAST_ONLY = (  # keeps the answers' own words only in the last turn, as reasoning templates do
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if m['role'] == 'assistant' and not loop.last %}(short){% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NO_PROMPT = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|im_end|>{% endfor %}GO"
REFUSES = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}A"


@pytest.mark.parametrize(
    ("template", "said"),
    [(LAST_ONLY, "renders the turns before"), (NO_PROMPT, "renders"), (REFUSES, "one turn")],
)
def test_a_template_that_cannot_be_masked_is_refused(
    run: Any, make_target: Any, template: str, said: str
) -> None:
    with pytest.raises(PipeflowError, match=said) as caught:
        run(make_target(template=template), talk("Hi", "Yes", "So", "No"))
    assert str(caught.value).startswith("rows.jsonl:7: ")


def test_an_answer_before_any_question_is_refused(run: Any, make_target: Any) -> None:
    item = Conversation(messages=(Message("assistant", "Hi"),), source="rows.jsonl:7")
    with pytest.raises(PipeflowError, match="begin with a user turn"):
        run(make_target(), item)


def test_a_template_without_stop_tokens_supervises_the_answer(run: Any, make_target: Any) -> None:
    target = make_target(template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert supervised(target, run(target, talk("Q", "A"))) == ["[A]"]


@pytest.mark.parametrize("over_long", ["drop", "truncate", "error"])
def test_over_long_rows(run: Any, make_target: Any, over_long: str) -> None:
    target = make_target()
    item = talk("Hi", "x" * 50)
    whole = run(target, item)
    assert len(whole.input_ids) == 73
    if over_long == "error":
        with pytest.raises(PipeflowError, match=r"rows\.jsonl:7: 73 tokens, more than max_length 72"):
            run(target, item, max_length=72, over_long="error")
        return
    row = run(target, item, max_length=72, over_long=over_long)
    if over_long == "drop":
        assert row is DROP
        assert run.context.logged == [{"dropped_over_long": 1, "tokens": 73, "source": "rows.jsonl:7"}]
    else:
        assert row.input_ids == whole.input_ids[:72]
        assert supervised(target, row) == ["x" * 50 + "<|im_end|>"]
    assert run(target, item, max_length=73, over_long=over_long).input_ids == whole.input_ids


def test_truncation_that_leaves_nothing_supervised_is_an_error(run: Any, make_target: Any) -> None:
    with pytest.raises(PipeflowError, match=r"no token is supervised.*max_length \(10\)"):
        run(make_target(), talk("Hi", "Yes"), max_length=10, over_long="truncate")
