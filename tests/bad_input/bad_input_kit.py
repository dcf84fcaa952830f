"""A small DFlash pipeline file, and the command in a process of its own, quickly started.

The processes are forked by a server that has imported torch and transformers once; what they run is the
command's own `main`, with its own descriptors, signals and exit code. What a test waits for is written into
a pipe: what the command says on stderr, and the places of `points.py` that it reaches.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pty
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEYS = [
    "status",
    "exit_code",
    "wall_s",
    "steps",
    "items",
    "tokens",
    "tokens_per_s",
    "loss_first",
    "loss_last",
    "tau_start",
    "tau_constant",
    "tau_end",
    "tau_decode",
    "plain_tokens_per_s",
    "decode_tokens_per_s",
    "lossless",
    "device",
    "versions",
]
"""The keys of summary.json by the contract, written out here: a test of a name must not import it."""

PRELOAD = [
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.cache_utils",
    "safetensors.torch",
    "uvloop",
    "click",
    "bad_input_kit",
]

TINY = """\
pipeflow: 1
name: mini
params: {{steps: 6, hold: null, mask: 20}}
resources:
  gate: {{uses: "{gate}"}}
  book: {{uses: data/phrase_book, with: {{phrases: 4, tokens: 6, symbols: 20, length: 24, lead: 4}}}}
  target:
    uses: dflash/tiny_target
    on: cpu
    reads: book
    with: {{layers: 4, hidden_size: 16, heads: 2, intermediate_size: 16, steps: 2, accuracy: 0}}
  rows: {{uses: data/phrase_rows, reads: book, with: {{rows: 4}}}}
  drafter:
    uses: dflash/drafter
    on: cpu
    reads: target
    with: {{block_size: 4, mask_token_id: "${{params.mask}}", layers: 1, taps: 1}}
stages:
  documents: {{uses: data/phrases, reads: book}}
  batches:
    uses: text/batch
    from: documents
    limit: "${{params.steps}}"
    with: {{tokens: 96, max_length: 24, bucket: 24}}
  target: {{uses: dflash/target, from: batches, on: cpu, reads: target, with: {{taps: 1}}}}
  pack: {{uses: dflash/pack, from: target, on: cpu, with: {{block_size: 4, mask_token_id: 20, anchors: 8}}}}
  hold: {{{hold}, from: pack}}
  train:
    uses: "{train}"
    from: hold
    on: cpu
    reads: target
    writes: drafter
    with: {{steps: "${{params.steps}}", lr: 3e-3}}
  evaluate:
    uses: "{evaluate}"
    from: train
    every: 2
    on: cpu
    reads: [target, drafter, rows]
    with: {{taps: 1, decode_rows: 1, decode_tokens: 8}}
  quiesce: {{uses: barrier, from: train, every: 3}}
  release: {{uses: "{release}", from: quiesce}}
  publish:
    uses: weights/broadcast
    from: release
    on: cpu
    reads: drafter
    with: {{backend: filesystem, path: weights}}
run: {{step: train, threads: 1, log_every: 200ms, stop: {{grace: {grace}}}}}
"""
"""A run that trains, measures, publishes and saves: about 0.3 s once torch is there."""


def tiny(folder: Path, **changes: str) -> Path:
    """Write the file and its modules into `folder`. Changes: gate hold train evaluate release grace."""
    given = {
        "gate": "data/phrase_book",  # any resource; nothing waits
        "hold": "uses: 'points:AfterGate', reads: gate",
        "train": "dflash/train",
        "evaluate": "dflash/evaluate",
        "release": "release_cache",
        "grace": "2s",
    } | changes
    if given["gate"] == "data/phrase_book" and "gate" in given["hold"]:
        given["hold"] = "uses: 'points:passing'"
    folder.mkdir(parents=True, exist_ok=True)
    for module in (HERE / "beside").glob("*.py"):
        shutil.copy(module, folder)
    path = folder / "mini.yaml"
    path.write_text(TINY.format(**given))
    return path


def _child(
    argv: list[str], cwd: str, out: str, err: Connection, points: Connection, env: dict[str, str]
) -> None:
    os.environ.update(env)
    os.environ["PIPEFLOW_TEST_POINTS"] = str(points.fileno())
    os.chdir(cwd)
    with err:
        os.dup2(err.fileno(), 2)
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.close(descriptor)
    os.environ.pop("COLUMNS", None)
    from pipeflow.cli.__main__ import main

    main(argv)


class Listener:
    """All that is written into a pipe or a terminal, read as it comes by a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._heard = bytearray()
        self._more = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # a terminal whose other end nobody holds any more
            while part := os.read(self._descriptor, 65536):
                with self._more:
                    self._heard += part
                    self._more.notify_all()
        os.close(self._descriptor)
        with self._more:
            self._ended = True
            self._more.notify_all()

    @property
    def text(self) -> str:
        """So far."""
        with self._more:
            return self._heard.decode(errors="replace")

    def until(self, said: Callable[[str], Any], what: str, seconds: float) -> None:
        """Wait until the text so far passes; AssertionError when the end comes before it, or the time."""
        with self._more:
            self._more.wait_for(lambda: said(self.text) or self._ended, seconds)
            when = "ended before it" if self._ended else "never"
            assert said(self.text), f"{when} {what}:\n{self.text}"

    def join(self, seconds: float) -> None:
        """Wait for the end."""
        self._thread.join(seconds)


class Run:
    """One call of the command. `stdout` and `stderr` are what it has written so far."""

    def __init__(self, folder: Path, *argv: str, terminal: bool = False, **env: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        folder.mkdir(parents=True, exist_ok=True)
        self._out = folder / f"out{len(list(folder.glob('out*')))}"
        ours, theirs = pty.openpty() if terminal else os.pipe()
        self._points, points = context.Pipe()
        env = {"OMP_NUM_THREADS": "1", **env}
        # Its ends are its alone once it has started: so their end is heard here when it ends.
        with Connection(theirs) as err, points:
            self._process = context.Process(
                target=_child, args=(list(argv), str(folder), str(self._out), err, points, env)
            )
            self._process.start()
        self._err = Listener(ours)

    @property
    def stdout(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def stderr(self) -> str:
        return self._err.text

    def reach(self, place: str, seconds: float = 60.0) -> None:
        """Wait until the run stands at a place of `points.py`."""
        assert self._points.poll(seconds), f"never reaches {place}:\n{self.stderr}"
        try:
            reached = self._points.recv_bytes().decode()
        except (EOFError, OSError):
            raise AssertionError(f"ended before it reaches {place}:\n{self.stderr}") from None
        assert reached == place

    def until(self, said: Callable[[str], Any], what: str, seconds: float = 60.0) -> None:
        """Wait until what it wrote on stderr passes; AssertionError if it ends before, or never does."""
        self._err.until(said, what, seconds)

    def go(self, place: str) -> None:
        """Let it go on."""
        self._points.send_bytes(place.encode())

    def signal(self, number: int = signal.SIGINT) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"did not end within {seconds} s:\n{self.stderr}")
        self._err.join(seconds)
        return code


def summary_of(run_dir: Path) -> dict[str, Any]:
    """summary.json."""
    import json

    return json.loads((run_dir / "summary.json").read_text())


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A JSON Lines file: every line whole, the last one too."""
    import json

    text = path.read_text()
    assert not text or text.endswith("\n"), f"{path.name} ends within a line"
    return [json.loads(line) for line in text.splitlines()]


def all_whole(run_dir: Path) -> None:
    """Nothing stands half written under its final name: every file there is reads as what it is."""
    from pipeflow_stages.dflash.export import load_drafter
    from pipeflow_stages.weights.filesystem import read

    if not run_dir.exists():
        return
    for path in run_dir.glob("*.jsonl"):
        lines_of(path)
    if (run_dir / "summary.json").exists():
        summary_of(run_dir)
    if (run_dir / "pipeline.yaml").exists():
        from pipeflow.document import load

        assert not load(run_dir / "pipeline.yaml").diagnostics
    if (run_dir / "drafter").exists():
        load_drafter(run_dir / "drafter")
    for version in (run_dir / "weights").glob("v*"):
        tensors, about = read(version)
        assert tensors
        assert about["step"] >= 0
