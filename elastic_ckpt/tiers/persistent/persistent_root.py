"""The directory of all steps in persistent storage, and how it commits steps.

    <root>/<step>/                              a committed step
    <root>/<step>/preserve                      keeps it, regardless of policies
    <root>/<step>.orbax-checkpoint-tmp-<save>/  an upload, running or interrupted
    <root>/<step>.orbax-checkpoint-tmp-<save>.aside/  a committed step, set aside
    <root>/run.json, <root>/agents.json, <root>/evaluations/    see `run_files`
    <root>/worlds/                              who may write, see `claims`
    <root>/leases/                              see `leases`

Where directories can be renamed atomically, a step is written under the third name and
committed by a rename. Object stores have no atomic rename: there a step is written to
its final directory and committed by a last file, `commit_success.txt`. Orbax works the
same way, so it lists and cleans up the same directories. (On `s3://` Orbax assumes that
directories can be renamed, unless its `AtomicityMode.COMMIT_FILE` is set.)

Before the first step of a line is committed (see `steps.step`), the steps that it
abandons are set aside, unchanged, under a name that Orbax does not list. Steps of the
line are moved back from there. No decision depends on a step's location, so if the
program is killed at any point, all of this can be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from etils import epath

from elastic_ckpt.core import background, checked_json, errors, storage
from elastic_ckpt.steps.manifest import (
    Manifest,
    is_manifest_name,
    manifest_name,
    read_manifest,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import records
from elastic_ckpt.tiers.source import Leftover

T = TypeVar("T")

COMMIT_FILE = "commit_success.txt"
# Replaces the save in the name of a step that is being removed.
REMOVED = "removed"
_VERSION = 1
_READERS = 32
_TEMPORARY = ".orbax-checkpoint-tmp"
_COMMITTED = re.compile(rb"^elastic_ckpt (\{.*\})$", re.MULTILINE)
_ASIDE = ".aside"
# A step directory, committed or not, or a temporary directory.
_DIRECTORY = re.compile(
    rf"(?P<step>0|[1-9]\d*)(?P<temporary>{re.escape(_TEMPORARY)}"
    rf"(-(?P<save>.*?)(?P<aside>{re.escape(_ASIDE)})?)?)?"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentRoot:
    """The directory of a run's steps in persistent storage.

    Attributes:
      in_place: whether a step is committed by a file rather than a rename.
      only: the only step to list; None for all.
    """

    path: epath.Path
    in_place: bool
    only: int | None = None

    @classmethod
    def from_path(cls, path: epath.PathLike) -> PersistentRoot:
        """The root at `path`; only local paths and NFS mounts use renames.

        Raises:
          ConfigError: if TensorStore cannot have the path.
        """
        root = storage.absolute(path)
        storage.check_tensorstore(root)
        return cls(path=root, in_place=not storage.is_local(root))

    def final(self, step: int) -> epath.Path:
        """The directory of a committed step."""
        return self.path / str(step)

    def unfinished(self, step_id: StepId) -> epath.Path:
        """The directory to which a save of a step is uploaded."""
        temporary = self.path / f"{step_id.step}{_TEMPORARY}-{step_id.save}"
        return self.final(step_id.step) if self.in_place else temporary

    def aside(self, step_id: StepId) -> epath.Path:
        """The directory of a set-aside save of a step."""
        return self.path / f"{step_id.step}{_TEMPORARY}-{step_id.save}{_ASIDE}"

    def is_committed(self, step: int) -> bool:
        """Whether the step is committed, regardless of which program wrote it."""
        marker = COMMIT_FILE if self.in_place else ""
        return storage.has_file(self.final(step) / marker)

    def is_pending(self, step_id: StepId, *, run: str) -> bool:
        """Whether a save of a step is still uncommitted.

        Older saves of the step are set aside when the new one is committed (before it
        is uploaded, where steps are written in place).

        Raises:
          CheckpointError: if a newer save, another run or stock Orbax has committed the
            step since then.
        """
        step, save = step_id
        if not self.is_committed(step):
            return True
        there = self.save_of(step, run=run)
        if there is None or there > save or (self.in_place and there < save):
            what = "saved by stock Orbax, without elastic_ckpt"
            if manifest_names(self.final(step)):
                what = f"its save is {there or 'from a different run or version'}"
            raise errors.CheckpointError(
                f"step {step} already exists in {self.path} ({what}), so save {save}"
                " does not replace it; to replace the existing step, remove it first"
            )
        return there < save

    def save_of(self, step: int, *, run: str) -> str | None:
        """The committed save of a step; None if the run cannot read the step.

        For a step that stock Orbax saved, returns the save that the step counts as.
        """
        there, save = committed(self.final(step))
        if not there and not manifest_names(self.final(step)):
            return self.foreign_save(step)
        return save if there == run else None

    def foreign_save(self, step: int) -> str:
        """The save that a step of stock Orbax counts as: its commit time.

        Saves are named by a time in milliseconds (see `HostWorld.new_save`).
        """
        return f"{commit_nsecs(self.final(step)) // 1_000_000:015d}"

    def steps(self) -> list[int]:
        """The committed steps, in ascending order.

        Raises:
          CheckpointError: if the steps cannot be listed; also in `leftovers`.
        """
        there = self.of_each(self.is_committed, self._numbers())
        return [step for step, is_committed in there.items() if is_committed]

    def are_ours(self) -> dict[int, bool]:
        """Whether this library wrote each committed step; steps in ascending order.

        Needs one request for each step with manifests, because the directory listing
        also shows the file that commits the step.
        """

        def is_ours(step: int) -> bool | None:
            names = records.names(self.final(step))
            if not (COMMIT_FILE in names or self.is_committed(step)):
                return None
            # All of its manifests may be lost.
            has_any = any(map(is_manifest_name, names))
            return has_any or committed(self.final(step)) != ("", "")

        found = self.of_each(is_ours, self._numbers())
        return {step: ours for step, ours in found.items() if ours is not None}

    def of_each(self, asked: Callable[[int], T], steps: Sequence[int]) -> dict[int, T]:
        """Calls `asked` for many steps at a time.

        A request to an object store takes as long as thousands of reads from a disk,
        and a root may have hundreds of steps.
        """
        with background.pool(_READERS, "steps") as readers:
            return dict(zip(steps, readers.map(asked, steps), strict=True))

    def leftovers(self) -> list[Leftover]:
        """The uncommitted steps in ascending order, including running uploads.

        Includes Orbax's own leftovers, whose names have the same form.
        """
        leftovers = []
        # In this order, because a step may be committed between the two calls.
        found, committed = self._directories(), self.steps()
        for each in found:
            path, step = self.path / each[0], int(each["step"])
            if self._is_aside(each) or (not each["temporary"] and step in committed):
                continue
            # The name of a step that is written in place does not contain its save.
            listed = () if each["temporary"] else readable(path)
            save = max((of.step_id.save for of in listed), default=each["save"])
            leftovers.append(Leftover(step=step, save=save, path=path))
        return leftovers

    def set_aside_steps(self) -> list[StepId]:
        """The set-aside steps, in ascending order."""
        return [
            StepId(int(each["step"]), each["save"])
            for each in filter(self._is_aside, self._directories())
        ]

    def remove(self, directory: epath.Path) -> None:
        """Removes a step, committed or set aside.

        The step disappears immediately; then its files are removed. If the program is
        killed before that is done, the remaining files are a leftover.
        """
        storage.remove(self.uncommit(directory))

    def uncommit(self, directory: epath.Path) -> epath.Path:
        """Makes a step disappear and returns where its files are."""
        if self.in_place:
            storage.remove(directory / COMMIT_FILE)
            return directory
        step = directory.name.partition(".")[0]
        taken_back = self.path / f"{step}{_TEMPORARY}-{REMOVED}"
        # An earlier removal may have left a directory of this name.
        storage.remove(taken_back)
        storage.rename(directory, taken_back)
        return taken_back

    def move(self, source: epath.Path, target: epath.Path) -> None:
        """Moves a step; repeatable, because `source` or `target` is always whole."""
        if target.exists():
            # An edit was interrupted, and a run stored the same save from RAM again.
            self.remove(target)
        if not self.in_place:
            storage.rename(source, target)
            return
        storage.copy_tree(source, target, last=COMMIT_FILE)
        self.remove(source)

    def _is_aside(self, found: re.Match[str]) -> bool:
        # In an object store, the directory may be a half-finished copy or removal.
        commit_file = self.path / found[0] / COMMIT_FILE
        return bool(found["aside"]) and (
            not self.in_place or storage.has_file(commit_file)
        )

    def _numbers(self) -> list[int]:
        # The steps with a directory, committed or not, in ascending order.
        return [int(e["step"]) for e in self._directories() if not e["temporary"]]

    def _directories(self) -> list[re.Match[str]]:
        # By step and name.
        found = map(_DIRECTORY.fullmatch, sorted(records.names(self.path)))
        listed = [e for e in found if e and self.only in (None, int(e["step"]))]
        return sorted(listed, key=lambda each: int(each["step"]))


def run_of(directory: epath.Path) -> str | None:
    """The run of a step, in storage or in RAM; None if it has no valid manifest."""
    return next((each.run for each in readable(directory)), None)


def readable(directory: epath.Path) -> Iterator[Manifest]:
    """The readable manifests of any run in a step directory."""
    for name in manifest_names(directory):
        with contextlib.suppress(OSError, checked_json.UnreadableError):
            yield Manifest.parse(storage.read_bytes(directory / name))


def commit_text(final: epath.Path, run: str, save: str) -> bytes:
    """The content of the file that commits a save of a step."""
    own = json.dumps({"version": _VERSION, "run": run, "save": save})
    return f"Checkpoint commit was successful to {final}\nelastic_ckpt {own}\n".encode()


def committed(directory: epath.Path) -> tuple[str, str]:
    """A committed step's run and save; empty if this library did not commit it."""
    # A truncated or altered file does not identify a save.
    with contextlib.suppress(FileNotFoundError, LookupError, ValueError):
        found = _COMMITTED.search(storage.read_bytes(directory / COMMIT_FILE))
        fields = json.loads(found[1]) if found else {}
        if fields.get("version") == _VERSION:
            return fields["run"], fields["save"]
    return "", ""


def read_json(path: epath.Path) -> dict[str, Any] | None:
    """Reads a JSON object that Orbax wrote: empty if missing, None if damaged."""
    try:
        content = json.loads(storage.read_bytes(path))
    except FileNotFoundError:
        return {}
    except ValueError:
        return None
    return content if isinstance(content, dict) else {}


def commit_nsecs(directory: epath.Path) -> int:
    """The commit time in Orbax's metadata, in nanoseconds since 1970; 0 if unknown."""
    metadata = read_json(directory / "_CHECKPOINT_METADATA") or {}
    return metadata.get("commit_timestamp_nsecs") or 0


def manifest_names(directory: epath.Path) -> list[str]:
    """The names of the manifests in a step directory, ordered."""
    return sorted(filter(is_manifest_name, records.names(directory)))


def read_manifests(
    directory: epath.Path, *, run: str, step: int, hosts: Collection[str] = ()
) -> list[Manifest | errors.CheckpointError]:
    """Reads a step directory's manifests in order of name.

    An unreadable manifest is returned as an error.

    Args:
      directory: the step directory.
      run: the run that the manifests must belong to.
      step: the step that the manifests must belong to.
      hosts: the hosts known to have written manifests; these are read even if an object
        store's listing lags.

    Raises:
      OutOfReachError: if storage is unavailable.
    """

    def read(name: str) -> Manifest | errors.CheckpointError:
        try:
            return read_manifest(directory / name, run=run, step=step)
        except errors.CheckpointError as error:
            return error

    names = sorted({*manifest_names(directory), *map(manifest_name, hosts)})
    with records.within_reach(directory), background.pool(_READERS, "m") as readers:
        return list(readers.map(read, names))
