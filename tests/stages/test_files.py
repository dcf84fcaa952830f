"""Nothing is seen half written, wherever the disk fills."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeflow.errors import PipeflowError
from pipeflow_stages import files
from pipeflow_stages.files import (
    MARKER,
    AtomicFile,
    folder_aside,
    is_complete,
    publish_folder,
    swap_folders,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "a.txt") as stream:
        stream.write(b"new")
        assert not (tmp_path / "a.txt").exists()
    assert (tmp_path / "a.txt").read_bytes() == b"new"
    assert names(tmp_path) == ["a.txt"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, every_full_disk: Callable[..., int]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def attempt(after: int) -> None:
        try:
            with write_atomically(path) as stream:
                for _ in range(3):
                    stream.write(b"x" * (1 << 20))
        except PipeflowError as error:
            assert "no space left" in str(error)  # noqa: PT017
            assert str(path) in str(error)  # noqa: PT017
            # Only the folder's own fsync comes after the rename: the file is then new, and whole.
            assert path.read_bytes() in (b"old", b"x" * (3 << 20))
        assert names(tmp_path) == ["a.txt"]

    assert every_full_disk(attempt) >= 6
    assert path.read_bytes() == b"x" * (3 << 20)


def test_an_error_in_the_block_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="stop"), write_atomically(path) as stream:  # noqa: PT012
        stream.write(b"half")
        raise ValueError("stop")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


def test_a_real_full_device_is_told_as_one() -> None:
    """The system's own refusal, not an injected one: what a library meets that writes by itself."""
    with pytest.raises(OSError) as caught, open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")
    assert caught.value.errno == errno.ENOSPC


def test_committing_what_was_given_up_is_an_error(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "a.txt")
    file.discard()
    with pytest.raises(PipeflowError, match="given up"):
        file.commit()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a file")
    with pytest.raises(PipeflowError, match="cannot be written"):
        AtomicFile(tmp_path / "a" / "b.txt")


def write_folder(folder: Path, content: str) -> None:
    with publish_folder(folder) as temporary:
        (temporary / "weights").write_text(content)
        (temporary / "config").write_text("{}")


def test_a_published_folder_is_marked_complete(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    assert not is_complete(folder)
    write_folder(folder, "1234")
    assert is_complete(folder)
    assert names(folder) == [MARKER, "config", "weights"]
    assert names(folder.parent) == ["m"]


@pytest.mark.parametrize("fault", ["cut", "missing", "no marker", "bad marker", "a file"])
def test_a_broken_folder_is_noticed_and_replaced(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "m"
    write_folder(folder, "1234")
    if fault == "cut":
        (folder / "weights").write_text("12")
    elif fault == "missing":
        (folder / "weights").unlink()
    elif fault == "no marker":
        (folder / MARKER).unlink()
    elif fault == "bad marker":
        (folder / MARKER).write_text("[1, 2")
    else:
        for path in list(folder.iterdir()):
            path.unlink()
        folder.rmdir()
        folder.write_text("a file")
    assert not is_complete(folder)
    write_folder(folder, "again")
    assert is_complete(folder)
    assert (folder / "weights").read_text() == "again"
    assert names(tmp_path) == ["m"]


def test_a_full_disk_never_publishes_half_a_folder(
    tmp_path: Path, every_full_disk: Callable[..., int]
) -> None:
    folder = tmp_path / "m"

    def attempt(after: int) -> None:
        try:
            write_folder(folder, "1234")
        except PipeflowError as error:
            assert "no space left" in str(error)  # noqa: PT017
        assert names(tmp_path) in ([], ["m"])
        assert is_complete(folder) or not folder.exists()

    assert every_full_disk(attempt) >= 6
    assert is_complete(folder)


def test_a_library_that_meets_a_full_disk_is_understood(tmp_path: Path) -> None:
    with pytest.raises(PipeflowError, match="no space left"), publish_folder(tmp_path / "m"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    assert names(tmp_path) == []


def test_two_at_once_end_with_one_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    start = threading.Barrier(4)
    errors: list[BaseException] = []

    def publish(content: str) -> None:
        try:
            start.wait()
            write_folder(folder, content)
        except BaseException as error:
            errors.append(error)

    for broken_first in (False, True):
        if broken_first:
            (folder / MARKER).unlink()
        threads = [threading.Thread(target=publish, args=(str(n) * 9,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert is_complete(folder)
        assert names(tmp_path) == ["m"]


def test_the_injected_disk_really_fills(every_full_disk: Callable[..., int], tmp_path: Path) -> None:
    """The planted fault: a writer without care leaves a half, and the helper shows it."""
    halves = []

    def attempt(after: int) -> None:
        path = tmp_path / f"{after}"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
            try:
                os.write(descriptor, b"1")
                os.write(descriptor, b"2")
            finally:
                os.close(descriptor)
        except OSError:
            halves.append(path.exists() and path.read_bytes())

    assert every_full_disk(attempt) == 3
    assert halves == [False, b"", b"1"]


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor: int) -> None:
        steps.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        steps.append(("name", os.stat(source).st_ino))
        replace(source, target)

    def renamed(source: Path, target: Path) -> None:
        steps.append(("name", os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "rename", renamed)
    home = tmp_path.stat().st_ino
    with write_atomically(tmp_path / "a.txt") as stream:
        stream.write(b"new")
    file = (tmp_path / "a.txt").stat().st_ino
    assert steps == [("fsync", file), ("name", file), ("fsync", home)]

    steps.clear()
    write_folder(tmp_path / "m", "1234")
    folder = tmp_path / "m"
    inodes = {name: (folder / name).stat().st_ino for name in names(folder)}
    published = steps.index(("name", folder.stat().st_ino))
    marked = steps.index(("name", inodes[MARKER]))
    assert all(("fsync", inode) in steps[:published] for inode in inodes.values())
    assert all(("fsync", inodes[name]) in steps[:marked] for name in ("config", "weights"))
    assert steps[published + 1 :] == [("fsync", home)]


def test_a_folder_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "old").write_text("1")
    rename = os.rename
    targets: list[object] = []

    def renamed(source: Path, target: Path) -> None:
        targets.append(target)
        if len(targets) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", renamed)
        with pytest.raises(OSError, match="No space left"), folder_aside(folder) as new:
            swap_folders(new, folder)
    assert (names(tmp_path), names(folder)) == (["m"], ["old"])
    assert targets[-1] == folder
    with folder_aside(folder) as new:
        (new / "new").write_text("2")
        assert names(folder) == ["old"]
        swap_folders(new, folder)
    assert (names(tmp_path), names(folder)) == (["m"], ["new"])


def test_one_module_sees_to_it_that_nothing_is_half_written() -> None:
    home = Path(files.__file__).parent
    assert [p.name for p in sorted(home.rglob("*.py")) if "fsync(" in p.read_text()] == ["files.py"]
