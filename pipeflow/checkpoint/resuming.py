"""Which checkpoint a run goes on from (`run.resume`), and its folder cut back to that.

A resumed run goes on in the folder of the run before it: what its sinks and its metrics wrote after the
checkpoint is cut off, as it will be written again. A lock keeps two processes from one folder.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipeflow.checkpoint import store
from pipeflow.document import parse
from pipeflow.errors import PipeflowError
from pipeflow.nodes import to_plain
from pipeflow.observe.folder import FolderError, default_run_dir, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeflow.check import Report
    from pipeflow.checkpoint.store import Saved

__all__ = ["Place", "cut_back", "find", "hold"]

SHOWN = 5
"""Differences that are named."""


class Place(NamedTuple):
    """Where a run writes, and what it goes on from."""

    run_dir: Path
    saved: Saved | None


def find(report: Report, run_dir: Path | None, resume: str | None = None) -> Place:
    """Follow `run.resume`, or what a caller says in its place.

    PipeflowError where that names nothing whole, or `auto` finds the run of another file.
    """
    spec = report.spec
    assert spec is not None
    new = run_dir if run_dir is not None else default_run_dir(spec.name)
    base = Path.cwd() if resume is not None else report.document.folder
    resume = resume or spec.run.resume
    if resume == "never":
        return Place(new, None)
    if spec.run.checkpoint is None:
        raise PipeflowError("--resume: the file has no `run.checkpoint`, so there is nothing to go on from")
    if resume != "auto":
        return _named(base / Path(resume).expanduser(), run_dir)
    folders = [run_dir] if run_dir is not None else _runs(spec.name, new.parent)
    for folder in folders:
        found = store.committed(folder)
        if found:
            differ = _differences(folder, report)
            if differ:
                raise PipeflowError(
                    f"run.resume: auto: {folder} was made by another file ({_listed(differ)}). Name "
                    "the folder (run.resume, --resume) to go on all the same, or set run.resume: never"
                )
            return Place(folder, store.read(found[-1]))
    return Place(new, None)


def _named(path: Path, run_dir: Path | None) -> Place:
    path = Path(os.path.abspath(path))
    if store.step_of(path) is not None:
        folder, found = path.parent.parent, [path] if path in store.committed(path.parent.parent) else []
    else:
        folder, found = path, store.committed(path)
    if not found:
        raise PipeflowError(f"run.resume: {path} holds no whole checkpoint. Name a run folder that has one")
    if run_dir is not None and run_dir.absolute() != folder.absolute():
        raise PipeflowError(
            f"run.resume: a run that is resumed goes on in its own folder, {folder}. Leave --run-dir out"
        )
    return Place(folder, store.read(found[-1]))


def _runs(name: str, base: Path) -> list[Path]:
    """The run folders of a pipeline, newest first."""
    if not base.is_dir():
        return []
    pattern = re.compile(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = [(match, path) for path in base.iterdir() if (match := pattern.fullmatch(path.name))]
    return [
        path for _, path in sorted(found, key=lambda each: (each[0][1], int(each[0][2] or 0)), reverse=True)
    ]


def _differences(folder: Path, report: Report) -> list[str]:
    """Keys whose value is another one than in the file that the folder's run was made by."""
    try:
        text = (folder / "pipeline.yaml").read_text(encoding="utf-8")
    except OSError as error:
        raise FolderError(folder / "pipeline.yaml", error) from error
    before = dict(_values(to_plain(parse(text).root)))
    now = dict(_values(to_plain(parse(report.document.to_yaml()).root)))
    keys = [*now, *(key for key in before if key not in now)]
    return [key for key in keys if before.get(key, _values) != now.get(key, _values) and key != "run.resume"]


def _values(plain: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(plain, dict) and plain:
        for key, value in cast("dict[str, Any]", plain).items():
            yield from _values(value, f"{path}.{key}" if path else key)
    else:
        yield path, plain


def _listed(keys: list[str]) -> str:
    more = len(keys) - SHOWN
    return ", ".join([*keys[:SHOWN], *([f"{more} more"] if more > 0 else [])])


# The folder -----------------------------------------------------------------------------------------------


def hold(run_dir: Path) -> Callable[[], None]:
    """Keep other processes from a run folder until the result is called. PipeflowError where one has it."""
    path = run_dir / store.FOLDER / ".lock"
    try:
        import fcntl
    except ImportError:  # where there is none, nothing keeps two runs apart but their user
        return lambda: None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise FolderError(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise PipeflowError(
            f"{run_dir}: a run is at work in this folder. Wait for its end, or stop it"
        ) from error
    return lambda: os.close(descriptor)


def cut_back(saved: Saved) -> None:
    """Take the lines out of metrics.jsonl and dead_letter.jsonl that a resumed run writes again."""
    run_dir = saved.path.parent.parent
    store.clear_halves(run_dir)
    stages = saved.document["stages"]
    nexts = {name: _next_of(about["facts"]) for name, about in stages.items()}
    counted: dict[str, int] = {}
    for name, about in stages.items():
        if about["behind"]:
            counted |= about["facts"]["lines"]
            nexts |= dict.fromkeys(about["facts"]["lines"], nexts[name])

    def metric(line: dict[str, Any]) -> bool:
        stage, step = line.get("stage"), line.get("step")
        if stage in counted:
            counted[stage] -= 1
            return counted[stage] >= 0
        return stage not in nexts or not isinstance(step, int) or step <= nexts[stage]

    def dead(line: dict[str, Any]) -> bool:
        stage, number = line.get("stage"), line.get("sequence")
        return stage not in nexts or not isinstance(number, int) or number < nexts[stage]

    _keep_lines(run_dir / "metrics.jsonl", metric)
    _keep_lines(run_dir / "dead_letter.jsonl", dead)


def _next_of(facts: dict[str, Any]) -> int:
    """The first number that a stage will meet again."""
    return min((edge["from"] for edge in facts["edges"]), default=facts["next"])


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        raise FolderError(path, error) from error
    kept: list[str] = []
    for line in text.splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        if wanted(values):
            kept.append(line)
    write_whole(path, "".join(kept))
