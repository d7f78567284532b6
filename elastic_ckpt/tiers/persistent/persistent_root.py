"""The directory of all steps in persistent storage, and how a step is committed there.

    <root>/<step>/                              a committed step
    <root>/<step>/preserve                      keeps it, regardless of policies
    <root>/<step>.orbax-checkpoint-tmp-<save>/  one that is being uploaded, or was
    <root>/abandoned/<step>-<save>/             a committed step that was set aside
    <root>/evaluations/, <root>/leases/         see the modules of these names
    <root>/writers.lock                         held by the worlds that upload
    <root>/run.json                             see `run_identity`
    <root>/agents.json                          see `run_agents`
    <root>/writers/                             see `writer`
    <root>/leader/                              see `elastic.machines.leader_claim`

If directories can be renamed atomically, a step is written under the second name, and
the rename commits it. Object stores have no such rename: there a step is written in its
final directory, and a last file, `commit_success.txt`, commits it. Both are Orbax's
ways: it lists, and cleans away, the same directories as this module does. A step that
is set aside (see `line`) is a checkpoint like any other, in a directory that Orbax does
not list. (Orbax assumes that directories can be renamed on `s3://`, unless its
`AtomicityMode.COMMIT_FILE` is set.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from etils import epath

from elastic_ckpt.core import (
    background,
    bucket_clients,
    checked_json,
    errors,
    storage,
)
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.source import Leftover

T = TypeVar("T")

COMMIT_FILE = "commit_success.txt"
ABANDONED = "abandoned"
# In place of the save, in the name of a step that is being removed.
REMOVED = "removed"
_READERS = 32
_TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"0|[1-9]\d*")
_SAVE = re.compile(rb"^save (\S+)$", re.MULTILINE)
_UNFINISHED = re.compile(rf"(0|[1-9]\d*){re.escape(_TEMPORARY)}(?:-(.*))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentRoot:
    """The directory of a run's steps in persistent storage.

    Attributes:
      path: of the directory of all steps.
      in_place: whether a file commits a step, rather than a rename.
    """

    path: epath.Path
    in_place: bool

    @classmethod
    def from_path(cls, path: epath.PathLike) -> PersistentRoot:
        """The root at `path`; steps are renamed on local paths and NFS mounts alone."""
        root = storage.absolute(path)
        return cls(path=root, in_place=not storage.is_local(root))

    def final(self, step: int) -> epath.Path:
        """The directory of a step when it is committed."""
        return self.path / str(step)

    def unfinished(self, step_id: StepId) -> epath.Path:
        """The directory that a save of a step is uploaded into."""
        if self.in_place:
            return self.final(step_id.step)
        return self.path / f"{step_id.step}{_TEMPORARY}-{step_id.save}"

    def is_committed(self, step: int) -> bool:
        """Whether the step exists, written by any program."""
        if self.in_place:
            return (self.final(step) / COMMIT_FILE).exists()
        return self.final(step).exists()

    def is_pending(self, step: int, *, run: str, save: str) -> bool:
        """Whether a save of a step is still to be committed; False if it was already.

        Older saves of it are replaced: they are set aside when the new one is committed
        (before it is uploaded, where steps are written in place).

        Raises:
          CheckpointError: if the step was committed by a newer save, by another run, or
            by plain Orbax since then.
        """
        final = self.final(step)
        if not self.is_committed(step):
            return True
        names = manifest_names(final)
        if not names:
            there = "one that Orbax saved without elastic_ckpt"
            older = self.foreign_save(step) < save
        else:
            committed = (
                committed_save(final)
                or manifest_file.read(
                    final / names[0], run=run, step=step, stores=True
                ).save
            )
            if committed == save:
                return False
            there = f"its save {committed!r}"
            older = committed < save
        if older and not self.in_place:
            return True
        raise errors.CheckpointError(
            f"step {step} in {self.path} exists already, {there}, and is not replaced"
            f" by save {save!r}; remove it first if the new one shall count"
        )

    def foreign_save(self, step: int) -> str:
        """The save that a step counts as which Orbax alone wrote: when that was.

        Saves are named by the time in milliseconds (see `HostWorld.new_save`).
        """
        nsecs = read_json(self.final(step) / "_CHECKPOINT_METADATA").get(
            "commit_timestamp_nsecs"
        )
        return f"{(nsecs or 0) // 1_000_000:015d}"

    def steps(self) -> list[int]:
        """The committed steps, ascending.

        Raises:
          CheckpointError: if they cannot be listed; `leftovers` likewise.
        """
        return sorted(self._committed(self._names()))

    def manifests(self) -> dict[int, list[str]]:
        """The names of the manifests of each committed step, ascending.

        An object store is asked once about each step: the listing of its directory
        also shows the file that commits it.
        """

        def names_in(step: int) -> list[str] | None:
            try:
                names = storage.names(self.final(step))
            except FileNotFoundError:
                return None
            is_committed = COMMIT_FILE in names or self.is_committed(step)
            return _manifests_among(names) if is_committed else None

        found = self.of_each(names_in, self._numbers(self._names()))
        return {step: names for step, names in found.items() if names is not None}

    def newest_first(self) -> Iterator[int]:
        """The committed steps; storage is asked about each when its turn comes."""
        return filter(self.is_committed, reversed(self._numbers(self._names())))

    def of_each(self, asked: Callable[[int], T], steps: Sequence[int]) -> dict[int, T]:
        """What is asked of storage about each of some steps.

        A request to an object store takes as long as thousands on a disk, so that many
        are under way at once: a root may keep hundreds of steps.
        """
        if not self.in_place:
            return {step: asked(step) for step in steps}
        with background.pool(_READERS, "steps") as readers:
            return dict(zip(steps, readers.map(asked, steps), strict=True))

    def leftovers(self) -> list[Leftover]:
        """The steps that are not committed, ascending; uploads that run are among them.

        So are parts of steps that were set aside. Leftovers of Orbax itself are
        included: it names them in the same way.
        """
        leftovers = []
        names = self._names()
        committed = self._committed(names)
        for name in names:
            cut_short = _UNFINISHED.fullmatch(name)
            if cut_short:
                step, save = int(cut_short[1]), cut_short[2]
            elif _STEP.fullmatch(name) and int(name) not in committed:
                step, save = int(name), None
            else:
                continue
            leftovers.append(Leftover(step=step, save=save, path=self.path / name))
        leftovers += [
            Leftover(step=each.step, save=each.save, path=self.aside(each))
            for each in self._aside_steps()
            if not self._is_committed_aside(each)
        ]
        return sorted(leftovers, key=lambda each: (each.step, str(each.path)))

    def uncommit(self, step: int) -> epath.Path:
        """Makes a committed step invisible, and returns its directory."""
        return self._taken_back(step, self.final(step))

    def aside(self, step_id: StepId) -> epath.Path:
        """The directory of a save of a step that is set aside."""
        return self.path / ABANDONED / str(step_id)

    def set_aside_steps(self) -> list[StepId]:
        """The steps that are set aside, with their saves, ascending."""
        return [each for each in self._aside_steps() if self._is_committed_aside(each)]

    def set_aside(self, step_id: StepId) -> None:
        """Moves a committed step to the directory `aside`; can be repeated."""
        if not self.in_place and self.aside(step_id).exists():
            # An edit was cut short, and a run has stored the same save from RAM again.
            self.discard_aside(step_id)
        self._move(self.final(step_id.step), self.aside(step_id))

    def bring_back(self, step_id: StepId) -> None:
        """Undoes `set_aside`."""
        self._move(self.aside(step_id), self.final(step_id.step))

    def discard_aside(self, step_id: StepId) -> None:
        """Removes a step that is set aside: it is gone at once."""
        storage.remove(self._taken_back(step_id.step, self.aside(step_id)))

    def _committed(self, names: Sequence[str]) -> set[int]:
        # The steps among the directories of these names that are committed.
        are_committed = self.of_each(self.is_committed, self._numbers(names))
        return {step for step, is_committed in are_committed.items() if is_committed}

    @staticmethod
    def _numbers(names: Sequence[str]) -> list[int]:
        # The steps that have directories of these names, committed or not, ascending.
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _taken_back(self, step: int, directory: epath.Path) -> epath.Path:
        # Makes a committed directory invisible, and returns where its files are.
        if self.in_place:
            storage.remove(directory / COMMIT_FILE)
            return directory
        taken_back = self.path / f"{step}{_TEMPORARY}-{REMOVED}"
        # A directory of this name is the rest of an earlier removal.
        storage.remove(taken_back)
        storage.rename(directory, taken_back)
        return taken_back

    def _move(self, source: epath.Path, target: epath.Path) -> None:
        storage.make_directory(target.parent)
        if not self.in_place:
            storage.rename(source, target)
            return
        # At each moment one of the two is committed.
        storage.copy_tree(source, target, last=COMMIT_FILE)
        storage.remove(source / COMMIT_FILE)
        storage.remove(source)

    def _aside_steps(self) -> list[StepId]:
        names = map(StepId.parse, self._names(ABANDONED))
        return sorted(each for each in names if each is not None)

    def _is_committed_aside(self, step_id: StepId) -> bool:
        # Copies and removals take a while in an object store.
        return not self.in_place or (self.aside(step_id) / COMMIT_FILE).exists()

    def _names(self, below: str = "") -> list[str]:
        directory = self.path / below
        try:
            return storage.names(directory)
        except FileNotFoundError:
            return []
        except bucket_clients.failures() as error:
            raise errors.CheckpointError(
                f"the steps in {directory} cannot be listed ({error}); check the path"
                " and who may read there, or try again when the storage is back"
            ) from error


def find_run(path: epath.PathLike) -> str | None:
    """The run that saved the newest steps at `path`, by their manifests; None if none.

    Raises:
      CheckpointError: if the steps cannot be listed.
    """
    root = PersistentRoot.from_path(path)
    runs = (run_of(root.final(step)) for step in root.newest_first())
    return next((run for run in runs if run is not None), None)


def run_of(directory: epath.Path) -> str | None:
    """The run of a step, by the manifests in its directory; None if none is valid."""
    manifest = any_manifest(directory)
    return None if manifest is None else manifest.run


def any_manifest(directory: epath.Path) -> Manifest | None:
    """A valid manifest of the step in a directory; None if there is none."""
    for name in manifest_names(directory):
        with contextlib.suppress(OSError, checked_json.UnreadableError):
            content = (directory / name).read_bytes()
            return manifest_file.parse(content, stores=True)
    return None


def commit_text(final: epath.Path, save: str) -> bytes:
    """The content of the file that commits a save of a step."""
    return f"Checkpoint commit was successful to {final}\nsave {save}\n".encode()


def committed_save(directory: epath.Path) -> str | None:
    """The save that the file names which commits a step; None if it names none.

    A start of the run that was replaced while it uploaded in place may have added a
    manifest of another save.
    """
    with contextlib.suppress(FileNotFoundError):
        match = _SAVE.search((directory / COMMIT_FILE).read_bytes())
        return match and match[1].decode()
    return None


class UnknownError(errors.CheckpointError):
    """What a file holds is not known, because it cannot be read now."""


def read_json(path: epath.Path) -> dict[str, Any]:
    """A JSON object that Orbax wrote; empty if there is none that can be read."""
    try:
        return read_metrics(path) or {}
    except UnknownError:
        return {}


def read_metrics(path: epath.Path) -> dict[str, Any] | None:
    """The metrics that a step was saved with; None if there are none.

    Raises:
      UnknownError: if the file is cut short or altered.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UnknownError(f"{path} is no JSON ({error})") from None
    return content if isinstance(content, dict) else None


def manifest_names(directory: epath.Path) -> list[str]:
    """The names of the manifests in the directory of a step, ordered."""
    return _manifests_among(storage.names(directory))


def _manifests_among(names: Sequence[str]) -> list[str]:
    return sorted(filter(manifest_file.is_file_name, names))


def read_manifests(
    directory: epath.Path, names: Sequence[str], *, run: str, step: int
) -> list[Manifest | errors.CheckpointError]:
    """The manifests in a step's directory, or why one cannot be had, in order."""

    def read(name: str) -> Manifest | errors.CheckpointError:
        try:
            return manifest_file.read(directory / name, run=run, step=step, stores=True)
        except errors.CheckpointError as error:
            return error
        except bucket_clients.failures() as error:
            return UnknownError(
                f"manifest {directory / name} cannot be read ({error}); try again when"
                " the storage is back"
            )

    with background.pool(_READERS, "manifests") as readers:
        return list(readers.map(read, names))
