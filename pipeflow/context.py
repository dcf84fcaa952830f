"""What stage code is handed beside its item: names, seeds, resources, metrics, and whether to stop."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeflow.errors import PipeflowError, StageError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping

    import torch

    from pipeflow.item import Version

__all__ = ["Context", "ResourceContext", "seed_of"]


def seed_of(*parts: object) -> int:
    """A seed of 63 bits from names and numbers, the same in every process."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class ResourceContext:
    """Handed to `Resource.open`."""

    def __init__(
        self,
        *,
        name: str,
        device: str,
        seed: int,
        run_dir: Path,
        stop: threading.Event,
        reads: Mapping[str, Any],
    ) -> None:
        self._reads = reads
        self.logged: list[dict[str, Any]] = []
        self.reported: dict[str, Any] = {}
        self.name = name
        self.device = device
        """Torch device text: `cpu`, `cuda:0`."""
        self.seed = seed
        """hash(run, resource): the same on every device, so replicas start equal."""
        self.run_dir = run_dir
        self._stop = stop

    def read(self, role: str) -> Any:
        """A resource opened before this one, on the same device. PipeflowError if the file names none."""
        if role in self._reads:
            return self._reads[role]
        raise PipeflowError(
            f"resource {self.name!r} needs a resource in the role {role!r}. Add `reads: NAME` to it"
        )

    def log(self, **values: Any) -> None:
        """One line of metrics.jsonl, written once the resource is open. Plain values only."""
        self.logged.append(values)

    def report(self, **values: Any) -> None:
        """Set keys of summary.json. Plain values only."""
        self.reported.update(values)

    @property
    def stopping(self) -> bool:
        """True once the run drains or is cancelled: a long load may give up early."""
        return self._stop.is_set()


class Context:
    """Handed to `setup`, `run` and `finish`: one a job."""

    __slots__ = ("_copies", "_enqueue", "_reads", "_stop", "_versions", "_writes", "device", "lane",
                 "logged", "moving", "reported", "resumed", "run_dir", "sequence", "stage",
                 "stage_seed")  # fmt: skip

    def __init__(
        self,
        *,
        stage: str,
        lane: int,
        device: str,
        run_dir: Path,
        stop: threading.Event,
        seed: int,
        sequence: int | None,
        reads: Mapping[str, Any],
        writes: Mapping[str, Any],
        versions: Mapping[str, Version],
        copies: Mapping[str, Mapping[str, Any]] | None = None,
        enqueue: Callable[[Callable[[], Any]], Any] | None = None,
        resumed: bool = False,
    ) -> None:
        self.stage = stage
        self.lane = lane
        self.device = device
        """Torch device text: `cpu`, `cuda:0`; `cpu` for a host stage."""
        self.run_dir = run_dir
        self.sequence = sequence
        """The item's number in its domain; None in `setup` and `finish`."""
        self.stage_seed = seed
        """hash(run seed, stage): the same for every item and lane."""
        self.resumed = resumed
        """The run goes on from a checkpoint: what is measured or reported at a start was so already."""
        self._stop = stop
        self._reads = reads
        self._writes = writes
        self._versions = versions
        self._copies = copies or {}
        self.moving: Collection[str] = ()
        """In `setup`: roles that it may not keep, as their value is another one for each version."""
        self.logged: list[dict[str, Any]] = []
        self.reported: dict[str, Any] = {}
        self._enqueue = enqueue

    def read(self, role: str) -> Any:
        """The resource in this role, leased while the job runs. StageError if the file names none."""
        if role in self.moving:
            raise self._moves(role)
        if role in self._reads:
            return self._reads[role]
        if role in self._writes:
            return self._writes[role]
        raise StageError(
            f"uses the resource role {role!r}, which the file does not give it. "
            f"Add it to `reads` of {self.stage!r} (declared roles: {', '.join(self._reads) or 'none'})",
            stage=self.stage,
            sequence=self.sequence,
        )

    def write(self, role: str) -> Any:
        """The resource in this role, leased to this job alone. StageError if the file names none, or if it is
        open on several devices: then `copies` gives all of them."""
        if role in self.moving:
            raise self._moves(role)
        if len(self._copies.get(role, ())) > 1:
            raise StageError(
                f"writes the resource role {role!r}, which is open on {', '.join(self._copies[role])}: to "
                "write one alone would give one version two contents. Write all of `ctx.copies(role)`",
                stage=self.stage,
                sequence=self.sequence,
            )
        if role in self._writes:
            return self._writes[role]
        raise StageError(
            f"writes the resource role {role!r}, which the file does not give it. "
            f"Add it to `writes` of {self.stage!r} (declared roles: {', '.join(self._writes) or 'none'})",
            stage=self.stage,
            sequence=self.sequence,
        )

    def copies(self, role: str) -> Mapping[str, Any]:
        """Device to value of the resource in this role, which this job writes: one for each device that it is
        open on, all leased to this job alone. StageError if the file names none."""
        if role not in self._copies or role in self.moving:
            self.write(role)  # says why not
        return self._copies[role]

    def _moves(self, role: str) -> StageError:
        said = (
            f"uses the resource role {role!r} in setup, but it has a spare copy, and which one is live "
            "changes with each version. Read it in `run`"
        )
        return StageError(said, stage=self.stage)

    def version(self, role: str) -> Version:
        """The version of a resource this job reads (or writes: before the write)."""
        self.read(role)
        return self._versions[role]

    @property
    def seed(self) -> int:
        """hash(run seed, stage, sequence): the same whatever ran before and on whichever lane."""
        return seed_of(self.stage_seed, self.sequence)

    @property
    def generator(self) -> torch.Generator:
        """A CPU generator seeded with `seed`; a new one each time it is asked for."""
        import torch

        return torch.Generator().manual_seed(self.seed)

    @property
    def stopping(self) -> bool:
        """True once the run drains or is cancelled: long host loops end early and say what they left out."""
        return self._stop.is_set()

    def output(self, path: str) -> Path:
        """An output path taken from the run folder."""
        return self.run_dir / path

    def log(self, **values: Any) -> None:
        """One line of metrics.jsonl, read when the job's fence is reached; tensors of one element are
        welcome, and are not waited for here. Several calls make several lines."""
        self.logged.append(values)

    def report(self, **values: Any) -> None:
        """Set keys of summary.json, read when the job's fence is reached; the last job's value stands."""
        self.reported.update(values)

    async def enqueue(self, function: Callable[[], Any]) -> Any:
        """In an async stage with `on:`, run `function` on the lane's thread and stream. A closed barrier
        holds it back here. RuntimeError in any other stage."""
        if self._enqueue is None:
            raise RuntimeError(f"stage {self.stage!r} is not an async stage on a device: call it directly")
        return await self._enqueue(function)
