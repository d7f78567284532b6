"""Leases: a step that another program reads is not removed meanwhile.

    <root>/leases/<step>-<start>.json       a lease: a record (see `records`)
    <root>/leases/<step>-<save>.removing    the run is about to remove the step

A reader writes a lease and then looks whether its step is being removed; the run first
writes which steps it removes or sets aside, and then looks for leases. So at least one
of them sees the other, and gives way: the run keeps the step, or the reader takes
another one.

If a reader is killed, its step becomes removable at the first collection that finds the
lease unchanged for one full duration; on the machine of the run, at the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, clock, errors, process, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import records
from elastic_ckpt.tiers.persistent.persistent_root import (
    PersistentRoot,
    committed,
    manifest_names,
)

DIRECTORY = "leases"
DURATION_SECS = 120.0
_LEASE, _REMOVING = ".json", ".removing"
# The leases of a run as the host that removes steps has seen them: by path and count of
# renewals, when they were first seen.
Watch = dict[tuple[epath.Path, int], float]


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
        f"{directory} is not a committed step, or is being removed; name"
        " PERSISTENT_DIRECTORY/<step>, or take a newer one"
    )
    if not directory.name.isdecimal():
        raise gone
    step, start = int(directory.name), records.new_start()
    record = records.Record(start=start, process=process.this(), secs=duration_secs)
    path = root.path / DIRECTORY / f"{step}-{start}{_LEASE}"
    storage.write_atomic(path, records.to_bytes(record))
    held = records.Held(path, record)
    try:
        if step in _files(root, _REMOVING).values() or not root.is_committed(step):
            raise gone
        commit = committed(directory)
        yield directory
        is_kept = False
        with contextlib.suppress(records.OutOfReachError, *bucket_clients.failures()):
            is_kept = (
                held.check()
                and root.is_committed(step)
                and commit == committed(directory)
            )
    finally:
        held.remove()
    if not is_kept:
        raise errors.CheckpointError(
            f"the lease of {directory} was lost while it was read: it was not renewed"
            " in time, the step was removed or saved again, or storage is out of reach;"
            " read it again, or a newer step"
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
    given = storage.absolute(path)
    ours = [
        each
        for each in (given, given.parent, given.parent.parent)
        if each.name.isdecimal() and each.is_dir() and manifest_names(each)
    ]
    with contextlib.ExitStack() as stack:
        for directory in ours[:1]:
            try:
                stack.enter_context(lease(directory))
            except bucket_clients.failures() as error:
                logging.warning(
                    "%s is read without a lease (%s); see that its run does not"
                    " remove it meanwhile",
                    directory,
                    error,
                )
        yield


def leased(root: PersistentRoot, watch: Watch) -> set[int]:
    """The steps that are leased; files of leases that are over are removed.

    Raises:
      CheckpointError: if leases cannot be read, so that nothing may be removed.
    """
    files, before = _files(root, _LEASE), dict(watch)
    watch.clear()
    for path in files:
        record = records.read(path)
        if record is None:
            continue
        now_secs, seen = clock.monotonic(), (path, record.count)
        since_secs = before.get(seen, now_secs)
        if record.process.is_dead or now_secs - since_secs > record.secs:
            storage.remove(path)
        else:
            watch[seen] = since_secs
    return {files[path] for path, _ in watch}


@contextlib.contextmanager
def removing(
    root: PersistentRoot,
    steps: Collection[int],
    line: Line,
    *,
    watch: Watch,
    replaced: int | None = None,
) -> Iterator[set[int]]:
    """Announces removals, finishes those of earlier worlds, and yields leased steps.

    Args:
      root: of the steps.
      steps: that are to be removed or moved, unless they are leased.
      line: of the world that does it.
      watch: of the leases.
      replaced: a step among them that has to go.

    Raises:
      CheckpointError: if `replaced` is leased, or leases cannot be read.
    """
    names = [f"{step}-{line.save}{_REMOVING}" for step in steps]
    own = [root.path / DIRECTORY / name for name in names]
    for path in own:
        storage.write_atomic(path, b"")
    try:
        for path, step in _files(root, _REMOVING).items():
            # Of a world that was killed meanwhile.
            if path.stem.partition("-")[2] < line.save:
                if not root.is_committed(step):
                    storage.remove(root.final(step))
                storage.remove(path)
        are_leased = leased(root, watch)
        if replaced in are_leased:
            raise errors.CheckpointError(
                f"step {replaced} in {root.path} is leased: a program is reading it;"
                " delete or replace it when that has ended. The lease of a program that"
                " was killed expires by itself"
            )
        yield are_leased
    finally:
        for path in own:
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
    saves = root.of_each(lambda number: root.save_of(number, run=run), root.steps())
    older = [
        StepId(number, save)
        for number, save in saves.items()
        if save is not None and save < line.save
    ]
    misplaced = [each for each in older if each.step == step or line.abandons(each)]
    if misplaced:
        numbers = {each.step for each in misplaced}
        with removing(root, numbers, line, watch=watch, replaced=step) as kept:
            for each in reversed(misplaced):
                if each.step not in kept:
                    root.move(root.final(each.step), root.aside(each))
    for each in root.set_aside_steps():
        is_of_line = each.save < line.save and not line.abandons(each)
        if is_of_line and each.step != step and not root.is_committed(each.step):
            root.move(root.aside(each), root.final(each.step))


def _files(root: PersistentRoot, kind: str) -> dict[epath.Path, int]:
    # Files of a kind, with their steps. Temporary names begin with a dot.
    directory = root.path / DIRECTORY
    return {
        directory / name: int(name.partition("-")[0])
        for name in sorted(records.names(directory))
        if name[0].isdecimal() and name.endswith(kind)
    }
