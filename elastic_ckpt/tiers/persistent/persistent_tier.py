"""The persistent tier: ordinary Orbax checkpoints, found and read by their manifests.

Hosts write them (`upload`, `commit`), and any program with Orbax alone can load them.
Our manifests lie beside Orbax's files: with them a host finds the values of a box and
their digests without Orbax, and reads only those that it needs.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import tensorstore as ts
from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.manifest import Leaf, Manifest
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import claims, evaluations, ocdbt
from elastic_ckpt.tiers.persistent.persistent_root import (
    PersistentRoot,
    UnknownError,
    committed_save,
    manifest_names,
    read_json,
    read_manifests,
    read_metrics,
)
from elastic_ckpt.tiers.source import (
    Copy,
    Leftover,
    Offered,
    OnPiece,
    ReadError,
    ignored,
)

_BEGINNING = datetime.datetime.fromtimestamp(0, datetime.UTC)

# At a time of a file.
_PIECE_BYTES = 2**24


class PersistentTier:
    """The committed steps of a run in persistent storage; a `source.Tier`.

    Args:
      root: of the steps.
      run: whose steps they are; others are problems, and offered as nothing.
      only: the one step to list and offer; None for all.

    Attributes:
      root: of the steps.
    """

    def __init__(
        self, root: PersistentRoot, *, run: str, only: int | None = None
    ) -> None:
        self.root = root
        self._run = run
        self._only = only
        self._context = ocdbt.new_context()
        # The steps and their manifests, if they are listed once for all; see `as_now`.
        self._found: list[tuple[int, list[str]]] | None = None

    def as_now(self) -> PersistentTier:
        """This tier for one search, which lists the steps once.

        Raises:
          CheckpointError: if storage is out of reach.
        """
        now = copy.copy(self)
        now._found = self._listed()
        return now

    def steps(self) -> list[int]:
        """The committed steps that have manifests, ascending; also those set aside.

        Raises:
          CheckpointError: if storage is out of reach; `foreign_steps` likewise.
        """
        aside = {step for step, _ in self.root.set_aside_steps()}
        return sorted(filter(self._is_offered, aside.union(self._steps())))

    def known_saves(self) -> list[StepId]:
        """The committed steps that can be read, and those that are set aside.

        An abandoned step that a program reads is not set aside, so that the newest save
        need not be that of the newest step.
        """
        committed = self.root.of_each(
            lambda step: committed_save(self.root.final(step), run=self._run),
            self._steps(),
        )
        there = (StepId(step, save) for step, save in committed.items() if save)
        return [*self.root.set_aside_steps(), *there]

    def recorded_lines(self) -> list[Line]:
        """The newest line on record, which may have no step in storage yet.

        Raises:
          CheckpointError: if its record is damaged or out of reach.
        """
        newest = claims.newest(self.root.path)
        is_known = newest and newest.run == self._run and newest.line.save
        return [newest.line] if newest and is_known else []

    def foreign_steps(self) -> list[int]:
        """The committed steps without manifests, which Orbax alone wrote, ascending."""
        listed = self._listed()
        return [step for step, names in listed if not names and self._is_offered(step)]

    def foreign_saves(self) -> dict[int, str]:
        """The same with the saves that they count as."""
        return {step: self.root.foreign_save(step) for step in self.foreign_steps()}

    def notes(self, step: int) -> dict[str, Any]:
        """The metadata that Orbax stored with a committed step.

        Returns:
          `metrics`, `custom_metadata` and `commit_timestamp_nsecs`, each None if there
          is none.
        """
        directory = self.root.final(step)
        metadata = read_json(directory / "_CHECKPOINT_METADATA")
        return {
            "metrics": read_json(directory / "metrics" / "metrics") or None,
            "custom_metadata": metadata.get("custom_metadata") or None,
            "commit_timestamp_nsecs": metadata.get("commit_timestamp_nsecs"),
        }

    def offers(self, step: int) -> Offered:
        """See `source.Tier`; empty if the step is not committed, or not reachable."""
        copies: list[Copy] = []
        problems: list[str] = []
        try:
            for directory in self._directories(step):
                names = manifest_names(directory)
                source = self.source(str(directory))
                for each in read_manifests(directory, names, run=self._run, step=step):
                    if isinstance(each, checked_json.LaterVersionError):
                        raise each
                    if isinstance(each, Manifest):
                        here = each.at("persistent", source.directory)
                        copies.append(Copy(here, source))
                    else:
                        problems.append(str(each))
        except checked_json.LaterVersionError:
            raise
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            problems.append(f"{self.root.final(step)} cannot be read ({error})")
        return Offered(copies, problems)

    def source(self, directory: str) -> StepSource:
        """The source of a step, committed or set aside, in its directory."""
        return StepSource(epath.Path(directory), self._context)

    def _is_offered(self, step: int) -> bool:
        return self._only in (None, step)

    def _directories(self, step: int) -> list[epath.Path]:
        if not self._is_offered(step):
            return []
        committed = [self.root.final(step)] if self.root.is_committed(step) else []
        aside = [each for each in self.root.set_aside_steps() if each.step == step]
        return [*committed, *(self.root.aside(each) for each in aside)]

    def held(self, line: Line) -> list[retention.HeldStep]:
        """The steps of this run, in the form that retention requires.

        A committed step is complete. Those of another run are left out, and those that
        a later version of elastic_ckpt has committed. The time is that of the commit by
        Orbax's metadata (1970 if that is damaged), the metrics are those that Orbax
        finds too, and those of evaluations.

        Args:
          line: of the evaluations that count.
        """
        found = self.root.of_each(self._held, self._steps())
        held = [each for each in found.values() if each is not None]
        counted = evaluations.counted(self.root, line, run=self._run)
        metrics = {step: json.loads(text) for step, text in counted}
        return retention.with_evaluations(held, metrics)

    def preserved(self) -> list[int]:
        """The steps that are preserved by hand, ascending."""
        are_preserved = self.root.of_each(
            lambda step: preserved.is_preserved(self.root.final(step)),
            list(filter(self._is_offered, self.root.steps())),
        )
        return [step for step, is_preserved in are_preserved.items() if is_preserved]

    def leftovers(self) -> list[Leftover]:
        """The steps that are not committed, those being uploaded among them."""
        return [each for each in self.root.leftovers() if self._is_offered(each.step)]

    def remove(self, step: int) -> None:
        """Removes a committed step: it is gone at once, its files little by little.

        Killed meanwhile, it leaves a leftover.
        """
        storage.remove(self.root.uncommit(step))

    def remove_all(self, step: int) -> bool:
        """Removes all saves of a step; whether there were any."""
        aside = [each for each in self.root.set_aside_steps() if each.step == step]
        committed = step in self._steps()
        if committed:
            self.remove(step)
        for each in aside:
            self.root.discard_aside(each)
        return committed or bool(aside)

    def _held(self, step: int) -> retention.HeldStep | None:
        directory = self.root.final(step)
        if committed_save(directory, run=self._run) is None:
            return None
        metadata = read_json(directory / "_CHECKPOINT_METADATA")
        nsecs = metadata.get("commit_timestamp_nsecs") or 0
        saved, complete = None, True
        try:
            saved = read_metrics(directory / "metrics" / "metrics")
        except UnknownError as error:
            logging.warning("step %d is kept, because %s", step, error)
            complete = None
        return retention.HeldStep(
            step=step,
            time=_BEGINNING + datetime.timedelta(microseconds=nsecs // 1000),
            metrics=saved,
            complete=complete,
        )

    def _steps(self) -> list[int]:
        return [step for step, names in self._listed() if names]

    def _listed(self) -> list[tuple[int, list[str]]]:
        # The committed steps and the names of their manifests.
        if self._found is not None:
            return self._found
        try:
            return list(self.root.manifests().items())
        except bucket_clients.failures() as error:
            raise errors.CheckpointError(
                f"the steps in {self.root.path} cannot be listed ({error}); try again"
                " when the storage is back"
            ) from error


class StepSource:
    """Reads the files of a step, and values in its stores; a `source.Source`.

    A store is opened once. Any number of threads may call it.

    Args:
      directory: of the step, committed or not.
      context: of TensorStore (`ocdbt.new_context`).
    """

    def __init__(self, directory: epath.Path, context: ts.Context) -> None:
        self.directory = str(directory)
        self._path = directory
        self._context = context
        self._lock = threading.Lock()
        self._stores: dict[str, ts.KvStore] = {}

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> None:
        """See `source.Source`."""
        done = 0
        with _read_errors():
            if leaf.is_file:
                with (self._path / leaf.path).open("rb") as opened:
                    while content := opened.read(min(_PIECE_BYTES, len(into) - done)):
                        into[done : done + len(content)] = content
                        done += len(content)
            else:
                content = self._chunk(leaf, box, byte_range=slice(0, len(into)))
                done = len(content)
                into[:done] = content
        if done != len(into):
            raise ReadError(f"ends after {done} bytes, before {len(into)}")
        on_piece(into)

    def size(self, leaf: Leaf, box: Box) -> int:
        """See `source.Source`."""
        with _read_errors():
            if leaf.is_file:
                with (self._path / leaf.path).open("rb") as opened:
                    return opened.seek(0, os.SEEK_END)
            return len(self._chunk(leaf, box))

    def _chunk(self, leaf: Leaf, box: Box, **options: Any) -> bytes:
        store = self._store(leaf.part)
        read = store.read(ocdbt.key(leaf, box), **options).result()
        if read.state == "missing":
            raise FileNotFoundError(read.state)
        return read.value

    def _store(self, name: str) -> ts.KvStore:
        with self._lock:
            if name not in self._stores:
                directory = self._path / name
                self._stores[name] = ocdbt.open_store(directory, self._context)
            return self._stores[name]


@contextlib.contextmanager
def _read_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ReadError("is missing") from None
    # TensorStore raises ValueErrors.
    except (*bucket_clients.failures(), ValueError) as error:
        raise ReadError(f"cannot be read ({error})") from error
