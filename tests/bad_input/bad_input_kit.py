"""A small DFlash pipeline file, and the command in a process of its own, quickly started.

The processes are forked by a server that has imported torch and transformers once; what they run is the
command's own `main`, with its own descriptors, signals and exit code.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

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


def _child(argv: list[str], cwd: str, out: str, err: str | int, env: dict[str, str]) -> None:
    os.environ.update(env)
    os.chdir(cwd)
    for path, number in ((out, 1), (err, 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
        descriptor = os.open(path, flags, 0o600) if isinstance(path, str) else path
        os.dup2(descriptor, number)
    os.environ.pop("COLUMNS", None)
    from pipeflow.cli.__main__ import main

    main(argv)


class Run:
    """One call of the command. `stdout` and `stderr` are what it has written so far."""

    def __init__(self, folder: Path, *argv: str, terminal: str | None = None, **env: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        folder.mkdir(parents=True, exist_ok=True)
        self.points = folder / "points"
        self.points.mkdir(exist_ok=True)
        number = len(list(folder.glob("out*")))
        self._out, self._err = folder / f"out{number}", folder / f"err{number}"
        env = {"PIPEFLOW_TEST_POINTS": str(self.points), "OMP_NUM_THREADS": "1", **env}
        self._process = context.Process(
            target=_child, args=(list(argv), str(folder), str(self._out), terminal or str(self._err), env)
        )
        self._process.start()

    @property
    def stdout(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def stderr(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def reach(self, place: str) -> None:
        """Wait until the run stands at a place of `points.py`."""
        self.until(lambda: (self.points / f"{place}.reached").exists(), f"reaches {place}")

    def until(self, happened: Any, what: str, seconds: float = 60.0) -> None:
        """Wait until something is so; AssertionError when the run ends before it, or it never is."""
        limit = time.monotonic() + seconds
        while not happened():
            alive = self._process.is_alive()
            if happened():
                return
            assert alive, f"ended before it {what}:\n{self.stderr}"
            assert time.monotonic() < limit, f"never {what}:\n{self.stderr}"
            time.sleep(0.005)

    def go(self, place: str) -> None:
        """Let it go on."""
        (self.points / f"{place}.go").touch()

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
