"""Source `data/jsonl`: conversations or text, a JSON object a line."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator  # noqa: TC003  (the engine resolves the hints of run)
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

from pipeflow.config import Config as Options
from pipeflow.config import InputPath
from pipeflow.context import Context  # noqa: TC001
from pipeflow.errors import PipeflowError
from pipeflow.item import Failed
from pipeflow.stage import Stage
from pipeflow_stages.types import Conversation, Message

__all__ = ["Jsonl", "parse_row", "split_of"]


class _Turn(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _Row(msgspec.Struct, frozen=True):
    messages: list[_Turn] | None = None
    text: str | None = None
    kind: str = ""


class _Place(NamedTuple):
    file: int
    offset: int
    line: int


class Jsonl(Stage[None, Conversation]):
    """Reads rows `{"messages": [{"role": .., "content": ..}, ..]}` or `{"text": ".."}`; `kind` is kept,
    other fields are ignored, blank lines are passed over. Roles: system, user, assistant.

    A row that cannot be read is handed to `on_error` by its `file:line`. Every split reports such rows,
    since their hash is not known. Only offsets are held in memory.
    """

    class Config(Options, frozen=True):
        path: InputPath | list[InputPath]
        epochs: Annotated[int, Meta(ge=1)] | None = 1
        """How often every row is read; null: for ever."""
        shuffle: bool = True
        """Another order each epoch, from the run's seed and the epoch's number."""
        split: Literal["all", "train", "held_out"] = "all"
        """Which part, by the hash of the prompt: no prompt is ever in both."""
        held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.1
        """The share of prompts in `held_out`."""
        limit: Annotated[int, Meta(ge=1)] | None = None
        """At most this many rows of the split, the first in the files."""

    def setup(self, ctx: Context) -> None:
        """Finds the rows. PipeflowError: a file is missing or unreadable, or there is no row to read."""
        paths = self.config.path if isinstance(self.config.path, list) else [self.config.path]
        self._paths = [Path(path) for path in paths]
        self._seed = ctx.seed
        self._files, self._offsets, self._lines = array("L"), array("Q"), array("Q")
        for number, path in enumerate(self._paths):
            self._index(number, path)
        if not self._offsets:
            raise self._no_rows()
        self._epoch = self._position = 0
        self._malformed: set[int] = set()

    def _no_rows(self) -> PipeflowError:
        files = ", ".join(map(str, self._paths)) or "path: []"
        if self.config.split == "all":
            return PipeflowError(f"{files}: has no rows. Give a file with a JSON object a line")
        return PipeflowError(
            f"{files}: has no rows in the split {self.config.split!r} (held_out: {self.config.held_out}). "
            "Give more rows, or another share"
        )

    def run(self, ctx: Context) -> Iterator[Conversation]:
        with _Files(self._paths) as files:
            while self.config.epochs is None or self._epoch < self.config.epochs:
                if len(self._malformed) == len(self._offsets):
                    raise PipeflowError(f"{', '.join(map(str, self._paths))}: every row is malformed")
                order = self._order(self._epoch)
                while self._position < len(order):
                    if ctx.stopping:
                        return
                    index = order[self._position]
                    self._position += 1
                    if index in self._malformed:
                        continue  # told of once: it counts once against a budget, however often it is met
                    record = self._read(files, index)
                    if isinstance(record, Failed):
                        self._malformed.add(index)
                    yield cast("Conversation", record)
                self._epoch, self._position = self._epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Which row of which epoch comes next; the order follows from the seed."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "rows": len(self._offsets),
            "malformed": sorted(self._malformed),
        }

    def load(self, state: dict[str, Any]) -> None:
        """PipeflowError where the files have another number of rows now: their order would be another."""
        if state["rows"] != len(self._offsets):
            raise PipeflowError(
                f"{', '.join(map(str, self._paths))}: {len(self._offsets)} rows, but the run that is resumed "
                f"had {state['rows']}. Give it the same files"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._malformed = set(state["malformed"])

    def _order(self, epoch: int) -> Any:
        count = len(self._offsets)
        if not self.config.shuffle:
            return range(count)
        order = array("Q", range(count))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)  # pyright: ignore[reportArgumentType]
        return order

    def _read(self, files: _Files, index: int) -> Any:
        place = _Place(self._files[index], self._offsets[index], self._lines[index])
        source = f"{self._paths[place.file]}:{place.line}"
        try:
            line = files.line(place)
            return parse_row(line, source)
        except PipeflowError as error:
            return Failed(error, source)
        except OSError as error:
            failure = PipeflowError(f"{source}: cannot be read: {error}")
            failure.__cause__ = error
            return Failed(failure, source)

    def _index(self, number: int, path: Path) -> None:
        offset = 0
        try:
            with path.open("rb") as stream:
                for line_number, line in enumerate(stream, 1):
                    if len(self._offsets) == self.config.limit:
                        return
                    if line.strip() and self._wanted(line, str(path)):
                        self._files.append(number)
                        self._offsets.append(offset)
                        self._lines.append(line_number)
                    offset += len(line)
        except OSError as error:
            what = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
            raise PipeflowError(
                f"{path}: {what}. Input paths are taken from the pipeline file's folder; check `path`"
            ) from error

    def _wanted(self, line: bytes, source: str) -> bool:
        if self.config.split == "all":
            return True
        try:
            key = parse_row(line, source).key
        except PipeflowError:
            return True
        return split_of(key, self.config.held_out) == self.config.split


class _Files:
    """The open files of one pass."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open: dict[int, BinaryIO] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()

    def line(self, place: _Place) -> bytes:
        if place.file not in self._open:
            self._open[place.file] = self._paths[place.file].open("rb")
        stream = self._open[place.file]
        stream.seek(place.offset)
        return stream.readline()


def split_of(key: str, held_out: float) -> Literal["train", "held_out"]:
    """The part that a prompt belongs to: its sha256 as a fraction of 1, below `held_out` or not.

    White space and letter case do not count, so that near copies fall into one part.
    """
    text = " ".join(key.split()).casefold()
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    return "held_out" if number < held_out * 2**64 else "train"


_decoder = msgspec.json.Decoder(_Row)


def parse_row(line: bytes, source: str) -> Conversation:
    """One line as a conversation. PipeflowError, beginning with `source`, says what is wrong with it."""
    try:
        line.decode("utf-8")
        row = _decoder.decode(line)
    except UnicodeDecodeError as error:
        raise PipeflowError(f"{source}: not UTF-8: byte {error.start + 1} of the line") from error
    except msgspec.ValidationError as error:
        raise PipeflowError(f"{source}: {error}. {_FORM}") from error
    except msgspec.DecodeError as error:
        raise PipeflowError(f"{source}: not JSON: {error}") from error
    if (row.messages is None) == (row.text is None):
        which = "neither `messages` nor `text`" if row.text is None else "both `messages` and `text`"
        raise PipeflowError(f"{source}: has {which}. {_FORM}")
    if row.text is not None:
        if not row.text.strip():
            raise PipeflowError(f"{source}: `text` is empty")
        return Conversation(text=row.text, source=source, key=row.text, kind=row.kind)
    messages = tuple(Message(turn.role, turn.content) for turn in row.messages or ())
    _check_turns(messages, source)
    return Conversation(messages=messages, source=source, key=_key(messages), kind=row.kind)


_FORM = 'A row is {"messages": [{"role": "user", "content": ".."}, ..]} or {"text": ".."}'


def _check_turns(messages: tuple[Message, ...], source: str) -> None:
    if not any(message.role == "user" for message in messages):
        raise PipeflowError(f"{source}: `messages` has no user turn. {_FORM}")
    for number, message in enumerate(messages, 1):
        if not message.content.strip():
            raise PipeflowError(f"{source}: turn {number} ({message.role}) is empty")


def _key(messages: tuple[Message, ...]) -> str:
    """System prompt and first user turn: what a regenerated answer leaves as it is."""
    system = next((m.content for m in messages if m.role == "system"), "")
    user = next(m.content for m in messages if m.role == "user")
    return f"{system}\n{user}"
