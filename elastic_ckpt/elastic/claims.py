"""Claims: each world of a run belongs to the first supervisor that creates its record.

The records are in the run's storage, `worlds/<number>.json`, numbered from 1. A record
is created if it is absent (`storage.create`), so that of several groups of supervisors
that cannot reach each other one gets the next world. The others, and those that cannot
reach the storage, have to stop. A record is never changed. It names the step that the
world goes on from, so readers can ignore what a replaced world still writes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import Any

from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage

DIRECTORY = "worlds"
_VERSION = 1
_NAME = re.compile(r"([1-9][0-9]*)\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """The record of one world.

    Attributes:
      number: of the world, from 1.
      claimant: the supervisor that created the record.
      slices: of the mesh, in its order.
      address: of the coordination service of the world, `host:port`.
      step: that the world goes on from; 0 for a new run.
      save: which save of the step; empty for a new run.
      time_ms: when it was claimed, since the epoch.
    """

    number: int
    claimant: str
    slices: tuple[int, ...]
    address: str
    step: int
    save: str
    time_ms: int = dataclasses.field(default_factory=lambda: time.time_ns() // 10**6)


class Claims:
    """The claims of a run.

    Args:
      run_directory: of the run, local or in an object store.
    """

    def __init__(self, run_directory: epath.PathLike) -> None:
        self._directory = storage.absolute(run_directory) / DIRECTORY

    def newest(self) -> Claim | None:
        """The claim of the newest world; None before the first.

        Raises:
          RunError: if the storage is out of reach, or the record cannot be read.
        """
        try:
            names = os.listdir(self._directory) if self._is_local else self._names()
        except FileNotFoundError:
            return None
        except bucket_clients.failures() as error:
            raise self._out_of_reach(error) from error
        numbers = [int(match[1]) for match in map(_NAME.fullmatch, names) if match]
        return self._read(max(numbers)) if numbers else None

    def claim(self, claim: Claim) -> bool:
        """Claims the world that follows the newest one.

        Returns:
          Whether it is the caller's now; if not, another supervisor was first.

        Raises:
          RunError: if the storage is out of reach: the caller has no claim then, unless
            `newest` shows one later.
        """
        newest = self.newest()
        if newest is not None and newest.number >= claim.number:
            return False
        fields: dict[str, Any] = dataclasses.asdict(claim)
        content = checked_json.to_bytes(
            fields | {"slices": list(claim.slices)}, version=_VERSION
        )
        try:
            storage.make_directory(self._directory)
            return storage.create(self._path(claim.number), content)
        except bucket_clients.failures() as error:
            raise self._out_of_reach(error) from error

    def is_current(self, claim: Claim) -> bool:
        """Whether no other world has replaced that of `claim`.

        Raises:
          RunError: as `newest`.
        """
        return self.newest() == claim

    @property
    def _is_local(self) -> bool:
        return storage.is_local(self._directory)

    def _names(self) -> list[str]:
        if not self._directory.exists():
            return []
        return [child.name for child in self._directory.iterdir()]

    def _path(self, number: int) -> epath.Path:
        return self._directory / f"{number}.json"

    def _read(self, number: int) -> Claim:
        path = self._path(number)
        try:
            fields = checked_json.parse(
                path.read_bytes(), what="claim of a world", version=_VERSION
            )
        except (
            checked_json.UnreadableError,
            *bucket_clients.failures(),
        ) as error:
            raise errors.RunError(
                f"claim of a world {path} {error}; restore the file from a copy, or end"
                " all processes of the run, remove the file and start the run again"
            ) from error
        del fields["version"]
        return Claim(**fields | {"slices": tuple(fields["slices"])})

    def _out_of_reach(self, error: BaseException) -> errors.RunError:
        return errors.RunError(
            f"the claims of the run's worlds, {self._directory}, are out of reach"
            f" ({error}): another group of hosts may continue the run, so this one"
            " stops; bring the storage back and start it again"
        )
