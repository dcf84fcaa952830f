"""`dflash/evaluate`: what it reports, how a drain shortens it. No device stage makes the host wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeflow.item import Version
from pipeflow_stages.dflash import decode, evaluate
from pipeflow_stages.dflash.drafter import DrafterResource
from pipeflow_stages.dflash.evaluate import Evaluate
from pipeflow_stages.dflash.pack import Pack
from pipeflow_stages.dflash.target import Target
from pipeflow_stages.dflash.train import Train
from pipeflow_stages.hf.language_model import LanguageModel
from pipeflow_stages.text.batch import Batches
from pipeflow_stages.types import Step, TokenRow

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 4


@pytest.fixture
def target() -> LanguageModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=41, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LanguageModel(Qwen3ForCausalLM(config), name="tiny", device="cpu")
    model.compute_dtype = torch.float32
    return model


@pytest.fixture
def drafter(target: LanguageModel) -> Any:
    from types import SimpleNamespace

    options = DrafterResource.Config(block_size=BLOCK, mask_token_id=40, layers=1, taps=2)
    context = SimpleNamespace(read=lambda role: target, seed=3, device="cpu", stopping=False)
    return DrafterResource(options).open(context)  # type: ignore[arg-type]


def rows_of(count: int, plain: bool = False) -> list[TokenRow]:
    """Rows of different lengths. `plain`: supervised from the first token on, as plain text is."""
    made = []
    for n in range(count):
        length = 12 + 3 * n
        ids = [(7 * n + 5 * i) % 40 for i in range(length)]
        made.append(TokenRow(ids, [1] * length if plain else [0] * 4 + [1] * (length - 4), document=n))
    return made


class Stop(threading.Event):
    """Becomes set by itself once it was asked `after` times."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


class Bench:
    """One `Evaluate`, and contexts for its hooks."""

    def __init__(
        self, make: Callable[..., Any], target: Any, drafter: Any, rows: list[TokenRow], **options: Any
    ) -> None:
        given = {"taps": 2, "rows_at_once": 2, "decode_rows": 2, "decode_tokens": 6} | options
        self.stage = Evaluate(Evaluate.Config(**given))
        self._make = make
        self._reads = {"target": target, "drafter": drafter, "rows": rows}

    def context(self, stop: threading.Event | None = None, step: int = 5) -> Any:
        versions = dict.fromkeys(self._reads, Version("run", step))
        return self._make(reads=self._reads, versions=versions, stop=stop or threading.Event(), sequence=0)

    def call(self, hook: str, *arguments: Any, stop: threading.Event | None = None) -> Any:
        context = self.context(stop)
        getattr(self.stage, hook)(*arguments, context)
        return context


@pytest.fixture
def bench(make_context: Any, target: LanguageModel, drafter: Any) -> Callable[..., Bench]:
    return lambda rows=None, **options: Bench(make_context, target, drafter, rows or rows_of(5), **options)


def reported(context: Any) -> dict[str, Any]:
    return {key: float(value) for key, value in context.reported.items()}


def test_the_reports_are_those_of_the_definitions(
    bench: Callable[..., Bench], target: LanguageModel, drafter: Any
) -> None:
    """In batches or row by row, the sums are the same; the constant is that of all rows."""
    b = bench()
    start = b.call("setup")
    tapper = evaluate.tapper_for(target, 2)
    accepted = blocks = 0
    for row in rows_of(5):
        ids, mask = torch.tensor([row.input_ids]), torch.tensor([row.loss_mask]).bool()
        with torch.no_grad():
            features = tapper.features(ids)
        found = decode.teacher_forced(
            drafter, features, ids, mask, target.embedding, target.head, supervised=[row.loss_mask]
        )
        accepted, blocks = accepted + int(found.accepted), blocks + int(found.blocks)
    assert reported(start)["tau_start"] == pytest.approx(accepted / blocks)
    constant = decode.constant_tau([(row.input_ids, row.loss_mask) for row in rows_of(5)], BLOCK)
    assert reported(start)["tau_constant"] == pytest.approx(constant.tau, abs=1e-6)
    assert start.logged[0]["step"] == 0
    assert int(start.logged[0]["blocks"]) == blocks
    end = b.call("finish")
    assert reported(end)["tau_end"] == pytest.approx(accepted / blocks)  # nothing was trained
    assert {"tau_decode", "lossless", "plain_tokens_per_s", "decode_tokens_per_s"} <= set(end.reported)
    assert end.reported["lossless"] is True
    last = end.logged[-1]
    assert (last["mode"], last["step"]) == ("decode", 5)
    assert last["tau"] == pytest.approx(last["accepted"] / last["blocks"])
    assert sum(last["histogram"]) == last["blocks"]


def test_plain_text_is_decoded_from_its_first_token(bench: Callable[..., Bench]) -> None:
    """Every token of it is supervised, so nothing before the answer is left for a prompt."""
    b = bench(rows_of(3, plain=True))
    b.call("setup")
    end = b.call("finish")
    assert end.reported["lossless"] is True
    assert end.reported["tau_decode"] >= 1


def test_a_measurement_in_between_is_logged_with_its_step(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.call("setup")
    context = b.call("run", Step(7, torch.zeros(()), 1))
    assert [line["step"] for line in context.logged] == [7]
    assert context.reported == {}


def test_a_drain_in_setup_measures_nothing(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    for after in (0, 1, 2):  # at once, and between two batches
        b = bench()
        start = b.call("setup", stop=Stop(after))
        assert (start.logged, start.reported) == ([], {})
        end = b.call("finish", stop=Stop(0))
        assert (end.logged, end.reported) == ([], {})


def test_a_drain_ends_measurements_in_time_and_tells_only_whole_ones(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    b.call("setup")
    real, now, calls = decode.teacher_forced, [100.0], []

    def slow(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        now[0] += 4.5
        return real(*arguments, **options)

    monkeypatch.setattr(decode, "teacher_forced", slow)
    monkeypatch.setattr(evaluate.time, "monotonic", lambda: now[0])
    assert len(b.stage._batches) == 3
    assert evaluate.DRAIN_SECONDS == 5
    during = b.call("run", Step(2, torch.zeros(()), 1), stop=Stop(0))
    assert (calls, during.logged) == ([], [])  # the last one follows soon
    end = b.call("finish", stop=Stop(0))
    assert len(calls) == 2  # the second began within the time, the third would not
    assert (end.logged, end.reported) == ([], {})  # not over the rows of the others
    calls.clear()
    monkeypatch.setattr(evaluate, "DRAIN_SECONDS", 1e6)
    whole = b.call("finish", stop=Stop(0))
    assert set(whole.reported) == {"tau_end"}  # and no decoding begins
    assert len(calls) == 3


def test_a_drain_between_two_prompts_ends_the_decoding(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.call("setup")
    asked = Stop(10**9)
    b.call("finish", stop=asked)
    questions = 10**9 - asked.left
    short = b.call("finish", stop=Stop(questions - 1))  # the last question: before the second prompt
    assert short.logged[-1]["mode"] == "decode"
    whole = b.call("finish")
    assert short.logged[-1]["blocks"] < whole.logged[-1]["blocks"]


def test_no_rows_at_all_report_nothing(make_context: Any, target: LanguageModel, drafter: Any) -> None:
    b = Bench(make_context, target, drafter, [])
    assert "tau_start" not in b.call("setup").reported
    assert b.call("finish").reported == {}


# The host never waits ------------------------------------------------------------------------------


class HostReads(TorchFunctionMode):
    """Raises where the host would read a device value by name."""

    NAMES = ("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique",
             "__bool__", "__int__", "__float__", "__index__", "equal", "allclose")  # fmt: skip

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.NAMES:
            raise AssertionError(f"the host reads a device value: {name}")
        return function(*args, **(kwargs or {}))


class HostScalars(TorchDispatchMode):
    """The same beneath Python: what torch's own code reads, and indexing that must know how many."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) in (
            "aten._local_scalar_dense.default",
            "aten.nonzero.default",
            "aten.masked_select.default",
        ):
            raise AssertionError(f"the host reads a device value: {function}")
        if "index" in str(function) and any(
            isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
            for part in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        ):
            raise AssertionError("the host reads a device value: how many places a mask has")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_host_reads() -> Callable[[Callable[[], Any]], Any]:
    def call(work: Callable[[], Any]) -> Any:
        with HostReads(), HostScalars():
            return work()

    return call


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW as it is on a GPU: on the CPU its default keeps its step count where Python reads it."""
    real = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda p, **options: real(p, **(options | {"fused": True})))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("features", ["tapped", "zero"])
def test_the_device_stages_never_make_the_host_wait(
    features: str,
    make_context: Any,
    target: LanguageModel,
    drafter: Any,
    no_host_reads: Any,
    bench: Callable[..., Bench],
) -> None:
    batch = Batches(Batches.Config(tokens=512, max_length=64, bucket=32)).run(rows_of(3))
    taps = Target(Target.Config(taps=2, features=features))  # type: ignore[arg-type]
    reads = {"target": target, "drafter": drafter}
    taps.setup(make_context(reads=reads))
    pack = Pack(Pack.Config(block_size=BLOCK, mask_token_id=40, anchors=6))
    train = Train(Train.Config(steps=10))
    train.setup(make_context(reads={"target": target}, writes={"drafter": drafter}))
    b = bench(features=features)
    b.call("setup")

    def step() -> Any:
        seen = taps.run(batch, make_context(reads=reads))
        packed = pack.run(seen, make_context(sequence=0))
        context = make_context(reads={"target": target}, writes={"drafter": drafter}, sequence=0)
        done = train.run(packed, context)
        b.stage.run(done, b.context())
        return context

    for _ in range(2):
        context = no_host_reads(step)
    (line,) = context.logged
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "anchors", "slot_accuracy"} <= set(line)
    assert isinstance(line["loss"], torch.Tensor)
    assert isinstance(line["tokens_per_s"], float)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: float(t.sum()),
        lambda t: bool(t.any()),
        lambda t: 1 if t.sum() > 0 else 0,
        lambda t: t.cpu(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.masked_select(t, t > 0),
        lambda t: torch.zeros(3).index_put_((t > 0,), torch.tensor(1.0)),
    ],
)
def test_the_detector_finds_a_read(read: Any, no_host_reads: Any) -> None:
    with pytest.raises(AssertionError, match="reads a device value"):
        no_host_reads(lambda: read(torch.ones(3)))
