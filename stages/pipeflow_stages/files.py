"""Files and folders that are never seen half written: write aside, fsync, rename.

A reader finds the old content or the new one. After a fault (disk full, cancel) what stood there stands
still and the half is removed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import uuid
from typing import TYPE_CHECKING, BinaryIO, cast

from pipeflow.errors import PipeflowError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Buffer

__all__ = [
    "MARKER",
    "AtomicFile",
    "aside",
    "explain",
    "folder_aside",
    "is_complete",
    "publish_folder",
    "swap_folders",
    "sync_path",
    "write_atomically",
]

MARKER = "COMPLETE"
"""The last file written into a published folder: JSON, the size of every other file in it."""


def aside(path: Path) -> Path:
    """A free, hidden name in the same folder, so on the same file system as `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def explain(error: BaseException, path: Path) -> PipeflowError:
    """An error of writing in our words: what, where, remedy. Raise it `from` the original."""
    number = getattr(error, "errno", None)
    # Libraries that write by themselves (safetensors, pip) pass the system's words on, not its number.
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return PipeflowError(
            f"{path}: no space left on the disk. Nothing half written was left there. "
            f"Free some space under {path.parent}, or choose another place, and run again"
        )
    return PipeflowError(f"{path}: cannot be written: {error}. Check the folder and its permissions")


def sync_path(path: Path) -> None:
    """fsync a file or a folder (a folder: so that a rename in it outlives a power cut)."""
    if os.name != "posix" and path.is_dir():
        return  # other systems cannot open a folder, and order its names by themselves
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Raw(io.RawIOBase):
    """A descriptor as a raw stream. Every byte passes `os.write`, the one place where a disk can be full.
    `size`: of a file that is there already, and goes on behind so many bytes."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        self._descriptor = -1
        new = os.O_CREAT | os.O_EXCL if size is None else 0
        self._descriptor = os.open(path, os.O_WRONLY | new | os.O_CLOEXEC, 0o666)
        if size is not None:
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Buffer, /) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed and self._descriptor >= 0:
            os.close(self._descriptor)
        super().close()


class AtomicFile:
    """A file being written aside. `commit` shows it under its name; `discard` leaves no trace.

    PipeflowError from every method that meets a full disk or a closed folder; the half is then gone.
    `goes_on`: the name of a half that `keep` kept, and its bytes then.
    """

    def __init__(self, path: Path, goes_on: tuple[str, int] | None = None) -> None:
        self.path = path
        self._aside = aside(path) if goes_on is None else path.with_name(goes_on[0])
        self._raw: _Raw | None = None
        self._kept = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if goes_on is not None:
                self._find(goes_on[1])
            self._raw = _Raw(self._aside, None if goes_on is None else goes_on[1])
        except OSError as error:
            raise explain(error, path) from error
        self.stream = cast("BinaryIO", io.BufferedWriter(self._raw, 1 << 20))

    def _find(self, size: int) -> None:
        """The half, as long as it was; made again from the whole file where that was finished meanwhile."""
        if not self._aside.exists() and self.path.is_file():
            shutil.copyfile(self.path, self._aside)
        held = self._aside.stat().st_size if self._aside.exists() else 0
        if held < size:
            raise PipeflowError(
                f"{self.path}: the run that is resumed had written {size} bytes, of which {held} are left. "
                "Bring the file back, or start anew"
            )
        self._kept = True

    @property
    def name(self) -> str:
        """Of the half, in the same folder."""
        return self._aside.name

    def keep(self) -> int:
        """Bring what was written to the disk, and from now on leave the half there; its bytes so far."""
        if self._raw is None:
            raise PipeflowError(f"{self.path}: its writing was given up before")
        self._kept = True
        try:
            self.stream.flush()
            os.fsync(self._raw.fileno())
        except OSError as error:
            self.discard()
            raise explain(error, self.path) from error
        return os.lseek(self._raw.fileno(), 0, os.SEEK_CUR)

    def write(self, data: bytes) -> None:
        try:
            self.stream.write(data)
        except OSError as error:
            self.discard()
            raise explain(error, self.path) from error

    def commit(self) -> None:
        if self._raw is None:
            raise PipeflowError(f"{self.path}: cannot be finished: its writing was given up before")
        try:
            self.stream.flush()
            os.fsync(self._raw.fileno())
            self._raw.close()
            os.replace(self._aside, self.path)
            self._raw = None
            sync_path(self.path.parent)
        except OSError as error:
            self.discard()
            raise explain(error, self.path) from error

    def discard(self) -> None:
        """Give up what was not committed, but for a half that is kept. May be called at any time, any number
        of times."""
        if self._raw is None:
            return
        self._raw.close()  # before the buffer above it: a closed one drops its bytes, an open one retries
        self._raw = None
        if not self._kept:
            self._aside.unlink(missing_ok=True)


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """A binary stream whose content appears at `path` when the block ends, whole or not at all.

    Raises PipeflowError where the disk is full or the folder cannot be written.
    """
    file = AtomicFile(path)
    try:
        yield file.stream
        file.commit()
    except OSError as error:
        raise explain(error, path) from error
    finally:
        file.discard()


def is_complete(folder: Path) -> bool:
    """Whether `publish_folder` finished this folder and every file still has the size it had then.

    Sizes, not sums: a copy cut short is found in no time, flipped bits are not looked for.
    """
    try:
        sizes = json.loads((folder / MARKER).read_bytes())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


@contextlib.contextmanager
def folder_aside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, on the same disk; removed if it is still there at the end.

    Raises OSError where it cannot be made.
    """
    new = aside(folder.absolute())
    new.mkdir(parents=True)
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def swap_folders(new: Path, folder: Path) -> None:
    """`new` takes the place of `folder`, which is removed, in two renames: a reader between them finds no
    folder, and never a mixture. After an OSError the old one stands where it stood."""
    old = aside(folder.absolute())
    os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """A folder aside that becomes `folder` when the block ends: fsynced, marked `COMPLETE`, renamed.

    A complete folder that another process put there meanwhile is kept and ours dropped; a broken one is
    replaced. Raises PipeflowError where the disk is full, whichever library met it.
    """
    try:
        with folder_aside(folder) as temporary:
            yield temporary
            _finish(temporary)
            _move(temporary, folder)
    except PipeflowError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or "No space left" in str(error):
            raise explain(error, folder) from error
        raise


def _finish(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    for path in files:
        sync_path(path)
    try:
        with write_atomically(folder / MARKER) as stream:
            stream.write(json.dumps(sizes, indent=1).encode())
    except PipeflowError as error:
        if isinstance(error.__cause__, OSError):  # to be told of the folder's own name, not of this one
            raise error.__cause__ from None
        raise
    sync_path(folder)


def _move(temporary: Path, folder: Path) -> None:
    for _ in range(8):  # another process may publish or clear the same name between our two steps
        try:
            os.rename(temporary, folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if is_complete(folder):
            return
        broken = aside(folder)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, broken)
            _remove(broken)
    else:
        raise PipeflowError(f"{folder}: other processes keep replacing it. Stop them and run again")
    sync_path(folder.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
