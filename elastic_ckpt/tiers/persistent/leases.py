"""Leases: a step that another program reads is not removed meanwhile.

    <root>/leases/<step>-<start>.json    a lease: a record (see `records`)
    <root>/leases/removing-<save>.json   the steps that the run is about to remove

A reader writes a lease and then looks for its step among those being removed; the run
first writes which steps it removes or sets aside, and then looks for leases. So at
least one of them sees the other, and gives way: the run keeps the step, or the reader
takes another one.

If a reader is killed, its step becomes removable at the first collection that finds the
lease unchanged for one full duration; on the machine of the run, at the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, clock, errors, process, storage
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import persistent_root, records
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.records import Record

DIRECTORY = "leases"
DURATION_SECS = 120.0
_REMOVING = "removing-"


class StepGoneError(errors.CheckpointError):
    """The step was removed, or is being removed; there may be a newer one."""


@contextlib.contextmanager
def lease(
    step_path: epath.PathLike, *, duration_secs: float = DURATION_SECS
) -> Iterator[epath.Path]:
    """Keeps a step in storage: its run does not remove it until the block ends.

    Args:
      step_path: the directory of a committed step in persistent storage.
      duration_secs: how long the step is kept, at least, if this process is killed; the
        lease is lost if storage is out of reach for longer.

    Yields:
      The directory of the step.

    Raises:
      StepGoneError: if there is no such step, or it is being removed.
      CheckpointError: when the block ends, if the lease was lost meanwhile, so that
        files may have been removed before they were read.
      OSError: if storage is unavailable; for a bucket, it may be its client's error.
    """
    if not duration_secs > 0:
        raise errors.ConfigError(
            f"duration_secs={duration_secs!r}: give a positive number of seconds"
        )
    directory = storage.absolute(step_path)
    root = PersistentRoot.from_path(directory.parent)
    gone = StepGoneError(
        f"{directory} is not a committed step; name PERSISTENT_DIRECTORY/<step>, or"
        " take a newer one if it was removed"
    )
    if not directory.name.isdecimal():
        raise gone
    step, start = int(directory.name), records.new_start()
    record = Record(start=start, process=process.this(), secs=duration_secs)
    path = storage.make_directory(root.path / DIRECTORY) / f"{step}-{start}.json"
    storage.write_atomic(path, records.to_bytes(record))
    held = records.Held(path, record)
    try:
        if step in _announced(root, _names(root)):
            raise StepGoneError(f"{directory} is being removed; take a newer step")
        if not root.is_committed(step):
            raise gone
        save = persistent_root.committed_save(directory)
        yield directory
        problem = None
        try:
            is_late = clock.monotonic() - held.renewed_secs > duration_secs
            if is_late or not held.check():
                problem = "it was not renewed in time"
            elif not root.is_committed(step) or save != persistent_root.committed_save(
                directory
            ):
                problem = "the step was removed, or saved again"
        except bucket_clients.failures() as error:
            problem = f"the storage is out of reach ({error})"
    finally:
        held.remove()
    if problem is not None:
        raise errors.CheckpointError(
            f"the lease of {directory} was lost while it was read: {problem}; read it"
            " again, or a newer step"
        )


@contextlib.contextmanager
def leased_if_ours(path: epath.PathLike) -> Iterator[None]:
    """Leases the step that a path lies in, if a run of this library may remove it.

    Nothing is leased in other checkpoints, or in storage that cannot be written to: the
    latter is logged.

    Args:
      path: of a step in persistent storage or a part of it, or of anything else.

    Raises:
      CheckpointError: as `lease`.
    """
    with contextlib.ExitStack() as stack:
        step_path = _step_of_a_run(storage.absolute(path))
        if step_path is not None:
            try:
                stack.enter_context(lease(step_path))
            except bucket_clients.failures() as error:
                logging.warning(
                    "%s is read without a lease (%s); see that its run does not"
                    " remove it meanwhile",
                    step_path,
                    error,
                )
        yield


class Watch:
    """The leases of a run, as the host that removes steps has seen them."""

    def __init__(self) -> None:
        # By path: the record, and when it was first seen.
        self._seen: dict[epath.Path, tuple[Record, float]] = {}

    def leased(self, root: PersistentRoot) -> set[int]:
        """The steps that are leased; files of leases that are over are removed.

        Raises:
          CheckpointError: if leases cannot be read, so that nothing may be removed.
        """
        before, self._seen = self._seen, {}
        steps = set()
        for name in _names(root):
            path = root.path / DIRECTORY / name
            number = name.partition("-")[0]
            record = _read(path) if number.isdecimal() else None
            if record is None:
                continue
            now_secs = clock.monotonic()
            same, since_secs = before.get(path, (None, now_secs))
            if record != same:
                since_secs = now_secs
            if record.process.is_dead or now_secs - since_secs > record.secs:
                storage.remove(path)
                continue
            self._seen[path] = record, since_secs
            steps.add(int(number))
        return steps


@contextlib.contextmanager
def removing(
    root: PersistentRoot, steps: Collection[int], line: Line, *, watch: Watch
) -> Iterator[set[int]]:
    """Announces removals, finishes those of earlier worlds, and yields leased steps.

    Args:
      root: of the steps.
      steps: that are to be removed or moved, unless they are leased.
      line: of the world that does it.
      watch: of the leases.
    """
    path = root.path / DIRECTORY / f"{_REMOVING}{line.save}.json"
    record = Record(
        start=line.save, process=process.this(), secs=0, fields={"steps": sorted(steps)}
    )
    storage.make_directory(path.parent)
    storage.write_atomic(path, records.to_bytes(record))
    try:
        # Of worlds that were killed meanwhile.
        earlier = [
            name
            for name in _names(root)
            if name.startswith(_REMOVING) and name < path.name
        ]
        for number in _announced(root, earlier):
            if not root.is_committed(number):
                storage.remove(root.final(number))
        yield watch.leased(root)
        for name in earlier:
            storage.remove(path.parent / name)
    finally:
        storage.remove(path)


def arrange(
    root: PersistentRoot, line: Line, *, run: str, step: int, watch: Watch
) -> None:
    """Sets aside what a line abandons, and brings back what is of it.

    An abandoned step that is leased stays where it is until a later commit.

    Args:
      root: of the steps.
      line: that `step` is about to be committed to.
      run: the identity of the run.
      step: that will be committed; older saves of it are set aside.
      watch: of the leases.

    Raises:
      CheckpointError: if an older save of `step` is leased, or storage is out of reach.
      OSError: if storage is unavailable.
    """
    misplaced = root.misplaced(line, run=run, step=step)
    if misplaced:
        numbers = {each.step for each in misplaced}
        with removing(root, numbers, line, watch=watch) as leased:
            if step in leased & numbers:
                raise leased_error(root, step)
            for each in misplaced:
                if each.step not in leased:
                    root.set_aside(each)
    root.bring_back(line, step=step)


def leased_error(root: PersistentRoot, step: int) -> errors.CheckpointError:
    """The error of a step that can be neither removed nor replaced."""
    return errors.CheckpointError(
        f"step {step} in {root.path} is leased: a program is reading it; delete or"
        " replace it when that has ended. The lease of a program that was killed"
        " expires by itself"
    )


def _step_of_a_run(path: epath.Path) -> epath.Path | None:
    # The directory of the step that has `path`, at most a tree in it; None if it has no
    # manifest of ours.
    for directory in (path, path.parent, path.parent.parent):
        if (
            directory.name.isdecimal()
            and directory.is_dir()
            and persistent_root.manifest_names(directory)
        ):
            return directory
    return None


def _announced(root: PersistentRoot, names: Collection[str]) -> set[int]:
    steps: set[int] = set()
    for name in names:
        if name.startswith(_REMOVING):
            record = _read(root.path / DIRECTORY / name)
            steps.update([] if record is None else record.fields["steps"])
    return steps


def _names(root: PersistentRoot) -> list[str]:
    directory = root.path / DIRECTORY
    with records.within_reach(directory):
        names = storage.names(directory) if directory.exists() else []
    # Others are temporary names.
    return sorted(name for name in names if name[0] != "." and name.endswith(".json"))


def _read(path: epath.Path) -> Record | None:
    with records.within_reach(path):
        return records.read(path)
