"""Sink `data/write_jsonl`: conversations as JSON, a row a line; the file appears whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pipeflow.config import Config as Options
from pipeflow.config import OutputPath
from pipeflow.context import Context  # noqa: TC001  (the engine resolves the hints of run)
from pipeflow.errors import PipeflowError
from pipeflow.stage import Stage
from pipeflow_stages.types import Conversation

if TYPE_CHECKING:
    from pipeflow_stages.files import AtomicFile

__all__ = ["WriteJsonl", "row_of"]


class WriteJsonl(Stage[Conversation, None]):
    """Rows go to a hidden file beside `path`, which takes that name when the input has ended (so also
    after a drain). After a fault or a cancel the hidden file is removed and an older `path` stands. One that
    a checkpoint knows stays, and a resumed run cuts it back to what it held then and goes on with it."""

    class Config(Options, frozen=True):
        path: OutputPath

    stateful = True
    retriable = False  # a row may have been written before the error

    def setup(self, ctx: Context) -> None:
        from pipeflow_stages.files import AtomicFile

        path = ctx.output(self.config.path)
        if path.is_dir():
            raise PipeflowError(f"{path}: is a folder. Name a file under `path`")
        self._file: AtomicFile | None = AtomicFile(path)
        self._rows = 0

    def run(self, item: Conversation) -> None:
        if self._file is None:
            raise PipeflowError("the file is finished, and a row came after it")
        self._file.write(msgspec.json.encode(row_of(item)) + b"\n")
        self._rows += 1

    def state(self) -> dict[str, Any]:
        """What the file holds, once that is on the disk."""
        if self._file is None:
            raise PipeflowError("the file is finished, so there is no state of it")
        return {"rows": self._rows, "name": self._file.name, "bytes": self._file.keep()}

    def load(self, state: dict[str, Any]) -> None:
        """PipeflowError where the file is gone, or holds less."""
        from pipeflow_stages.files import AtomicFile

        assert self._file is not None
        path = self._file.path
        self._file.discard()
        self._file = AtomicFile(path, goes_on=(state["name"], state["bytes"]))
        self._rows = state["rows"]

    def finish(self, ctx: Context) -> None:
        if self._file is not None:
            self._file.commit()
            self._file = None
            ctx.report(rows_written=self._rows)

    def close(self) -> None:
        file = getattr(self, "_file", None)  # setup may have failed
        if file is not None:
            file.discard()
            self._file = None


def row_of(item: Conversation) -> dict[str, Any]:
    """The row that `data/jsonl` reads back as the same conversation."""
    row: dict[str, Any] = {}
    if item.messages:
        row["messages"] = [{"role": m.role, "content": m.content} for m in item.messages]
    else:
        row["text"] = item.text
    if item.kind:
        row["kind"] = item.kind
    return row
