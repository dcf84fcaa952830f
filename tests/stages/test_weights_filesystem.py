"""`weights/broadcast` and its `filesystem` backend: a reader finds whole versions, whatever happens."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeflow.errors import PipeflowError
from pipeflow.item import Trigger, Version
from pipeflow_stages.weights.broadcast import Broadcast
from pipeflow_stages.weights.filesystem import latest, publish, read, remove, versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def weights(n: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((200, 10), float(n)), "b": torch.full((3,), float(n))}


def test_a_version_reads_back(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    folder = publish(tmp_path / "w", 1, weights(1), {"step": 5, "reason": "every"})
    assert folder.name == "v00000001"
    assert sorted(p.name for p in folder.iterdir()) == ["COMPLETE", "model.safetensors", "version.json"]
    tensors, about = read(folder)
    assert about == {"step": 5, "reason": "every"}
    assert all(torch.equal(tensors[name], t) for name, t in weights(1).items())
    publish(tmp_path / "w", 2, weights(2), {})
    assert [p.name for p in versions(tmp_path / "w")] == ["v00000001", "v00000002"]
    assert latest(tmp_path / "w") == tmp_path / "w" / "v00000002"


@pytest.mark.parametrize("harm", ["no marker", "short", "gone", "half marker"])
def test_a_version_that_is_not_whole_is_nobodys_business(harm: str, tmp_path: Path) -> None:
    publish(tmp_path, 1, weights(1), {})
    broken = publish(tmp_path, 2, weights(2), {})
    model, marker = broken / "model.safetensors", broken / "COMPLETE"
    if harm == "no marker":
        marker.unlink()
    elif harm == "short":
        model.write_bytes(model.read_bytes()[:-1])
    elif harm == "gone":
        model.unlink()
    else:
        marker.write_bytes(marker.read_bytes()[:7])
    assert latest(tmp_path) == tmp_path / "v00000001"
    with pytest.raises(PipeflowError, match="v00000002: not a complete version"):
        read(broken)


def test_a_full_disk_leaves_the_versions_before(
    tmp_path: Path, every_full_disk: Callable[[Callable[[int], None]], int]
) -> None:
    publish(tmp_path / "w", 1, weights(1), {"step": 1})

    def attempt(after: int) -> None:
        said = ""
        try:
            publish(tmp_path / "w", 2, weights(2), {"step": 2})
        except PipeflowError as error:
            said = str(error)
        # Whole, or not there: the last sync may fail once the new name stands.
        names = sorted(p.name for p in (tmp_path / "w").iterdir())
        assert names in (["v00000001"], ["v00000001", "v00000002"])
        assert said == "" or ("no space left" in said and "w/v00000002" in said)
        assert said != "" or names[-1] == "v00000002"
        for version in versions(tmp_path / "w"):
            tensors, about = read(version)
            assert float(tensors["b"][0]) == about["step"]
        shutil.rmtree(tmp_path / "w" / "v00000002", ignore_errors=True)

    assert every_full_disk(attempt) >= 5


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    """Readers beside a writer that keeps two versions: what they find complete is of one piece."""
    stop, faults, seen = threading.Event(), [], set()
    found_one = threading.Event()

    def look() -> None:
        while not stop.is_set():
            version = latest(tmp_path)
            if version is None:
                continue
            try:
                tensors, about = read(version)
            except (PipeflowError, FileNotFoundError):
                continue  # it was taken away as a whole meanwhile
            found = {float(t.unique()) for t in tensors.values()}
            seen.add(about["step"])
            found_one.set()
            if found != {float(about["step"])}:
                faults.append((version, found, about))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(1, 40):
        publish(tmp_path, n, weights(n), {"step": n})
        for old in versions(tmp_path)[:-2]:
            remove(old)
    assert found_one.wait(60)
    stop.set()
    for thread in threads:
        thread.join()
    assert seen
    assert faults == []
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["v00000038", "v00000039"]


def test_what_cannot_be_taken_away_is_told(tmp_path: Path) -> None:
    with pytest.raises(PipeflowError, match="v00000009: cannot be written"):
        remove(tmp_path / "v00000009")


def broadcast(make_context: Any, model: Any, step: int, **options: Any) -> tuple[Broadcast, Any]:
    stage = Broadcast(Broadcast.Config(backend="filesystem", path="weights", **options))
    return stage, make_context(reads={"weights": model}, versions={"weights": Version("run", step)})


def test_the_stage_numbers_on_and_keeps_the_newest(make_context: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in range(1, 5):  # a new stage each time: a run that goes on in the same folder
        stage, context = broadcast(make_context, model, step, keep=2)
        stage.setup(context)
        with torch.no_grad():
            model.weight.fill_(step)
        trigger = Trigger(step - 1, {}, "every")
        assert stage.run(trigger, context) is trigger
        (line,) = context.logged
        assert (line["step"], line["version"]) == (step, step)
        assert line["bytes"] == 24
    left = versions(context.run_dir / "weights")
    assert [p.name for p in left] == ["v00000003", "v00000004"]
    tensors, about = read(left[-1])
    assert about == {"step": 4, "incarnation": "run", "reason": "every"}
    assert torch.equal(tensors["weight"], model.weight)


def test_what_has_no_weights_is_refused(make_context: Any) -> None:
    stage, context = broadcast(make_context, SimpleNamespace(), 1)
    stage.setup(context)
    with pytest.raises(PipeflowError, match="SimpleNamespace, which has no weights"):
        stage.run(Trigger(0, {}, "every"), context)


def test_it_keeps_at_least_one(make_context: Any) -> None:
    stage, context = broadcast(make_context, torch.nn.Linear(1, 1), 1, keep=0)
    with pytest.raises(PipeflowError, match="keep must be 1 or more"):
        stage.setup(context)
